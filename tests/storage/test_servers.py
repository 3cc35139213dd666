"""Whole repositories on each server of object stores, as `make servers` runs them.

The storage contract runs on the same servers, in test_contract.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from servers import SERVERS, Server
from zarr_manifests.errors import UnsupportedStorageError
from zarr_manifests.storage import from_url

pytestmark = pytest.mark.servers

COMMITTING = """
import sys, numpy as np, zarr, zarr_manifests as zm
from zarr_manifests.storage import from_url
url, options, who = sys.argv[1], dict(allow_http=True), int(sys.argv[2])
repo = zm.open(from_url(url, **options))
for i in range(10):
    with repo.transaction(message=f"process {who}, commit {i}") as store:
        zarr.open_array(store, path="a")[who, i] = 100 * who + i
"""


def _opened(
    server_named: Callable[[str], Server], name: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, dict[str, object]]:
    """URL and options of an empty place on the server, to which the environment points.

    No other server has this URL: opened places are kept by URL and options, not by environment.
    """
    server = server_named(name)
    for variable, value in server.environment.items():
        monkeypatch.setenv(variable, value)
    return f"{server.url}/whole-{name}-{os.getpid()}", {"allow_http": True}


@pytest.mark.parametrize("name", SERVERS)
def test_a_repository_lives_on_the_server(
    server_named: Callable[[str], Server], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, options = _opened(server_named, name, monkeypatch)
    storage = from_url(url, **options)
    repo = zm.create(storage, {"inline-chunk-bytes": 0, "pack-chunk-bytes": 0})
    with repo.transaction(message="an array") as store:
        zarr.create_array(store, name="a", shape=(5, 20), chunks=(1, 1), dtype="i8", fill_value=-1)
    for i in range(20):
        with repo.transaction(message=f"commit {i}") as store:
            zarr.open_array(store, path="a")[4, i] = i

    processes = [
        subprocess.Popen(
            [sys.executable, "-c", COMMITTING, url, str(who)], stderr=subprocess.PIPE, text=True
        )
        for who in range(4)
    ]
    for process in processes:
        _, stderr = process.communicate(timeout=240)
        assert process.returncode == 0, stderr

    expected = np.full((5, 20), -1)
    expected[:4, :10] = 100 * np.arange(4)[:, None] + np.arange(10)
    expected[4] = np.arange(20)

    def check() -> None:
        there = zm.open(from_url(url, **options))
        array = zarr.open_array(there.readonly_session().store, path="a", mode="r")
        np.testing.assert_array_equal(array[:], expected)
        assert there.verify().ok

    check()
    messages = [info.message for info in repo.ancestry()]
    landed = [f"process {who}, commit {i}" for who in range(4) for i in range(10)]
    assert sorted(m for m in messages if m.startswith("process")) == landed
    objects = len(list(storage.list()))
    repo.expire_snapshots(keep_last=1)
    assert repo.garbage_collect(grace=timedelta(0)).deleted > 0
    assert len(list(storage.list())) < objects
    check()


def test_a_server_that_ignores_a_condition_is_only_read(
    server_named: Callable[[str], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = _opened(server_named, "localbucket", monkeypatch)
    storage = from_url(url)
    with pytest.raises(UnsupportedStorageError, match=r"can only be read.* no notice of If-Match"):
        zm.create(storage)
    with pytest.raises(UnsupportedStorageError, match="no notice of If-Match"):
        storage.create("a", b"1")
    assert not storage.capabilities.cas
    assert list(storage.list()) == []
    storage.put("a", b"0123")
    assert storage.get("a", 1, 2) == b"12"
    storage.delete_many(["a", "b"])
    assert list(storage.list()) == []
