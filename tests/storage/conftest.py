"""Servers and conditions for the tests of storages."""

from __future__ import annotations

from typing import Any

import obstore
import pytest
from obstore.store import S3Store

from s3_server import ObjectServer
from s3_server import object_server as object_server
from s3_server import server_named as server_named
from small_store import module_store as module_store
from small_store import small_store as small_store
from zarr_manifests.storage import local, object_clients


@pytest.fixture
def bucket(object_server: ObjectServer) -> Any:
    """The bucket of the test server, empty."""
    client = S3Store(object_server.bucket)
    for page in obstore.list(client):
        obstore.delete(client, [meta["path"] for meta in page])
    return client


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests to object stores are repeated once, at once."""
    brief = object_clients.Patience(tries=1, first_wait_s=0.01)
    monkeypatch.setattr(object_clients, "PATIENCE", brief)


@pytest.fixture
def network_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every folder lies on a network filesystem."""
    monkeypatch.setattr(local, "network_filesystem", lambda path: "nfs4")
