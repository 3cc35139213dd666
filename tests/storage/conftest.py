"""Servers and conditions for the tests of storages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inside import open_handles
from s3_server import object_server, server_named
from small_store import module_store, small_store
from zarr_manifests.storage import handles, local, object_clients

__all__ = ["module_store", "object_server", "server_named", "small_store"]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests to object stores are repeated once, at once."""
    brief = object_clients.Patience(tries=1, first_wait_s=0.01)
    monkeypatch.setattr(object_clients, "PATIENCE", brief)


@pytest.fixture
def network_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every folder lies on a network filesystem."""
    monkeypatch.setattr(local, "is_remote_filesystem", lambda path: "nfs4")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """What time it is for files that are kept open, in seconds; none is open yet."""
    now = [1000.0]
    open_handles().clear()
    monkeypatch.setattr(handles, "_now_s", lambda: now[0])
    yield now
    open_handles().clear()
