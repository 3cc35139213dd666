"""Requests whose client is gone end: those that wait at once, slices between two chunks."""

from __future__ import annotations

import contextlib
import socket
import threading

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from served import get, serving
from storages import Call, WrappedStorage
from zarr_manifests.storage.memory import MemoryStorage

GONE = 60
CHUNK = 128 * 1024
CHUNKS = 8
WAIT_S = 60


class Gate(WrappedStorage):
    """Counts reads of chunks, and holds them back until it is opened."""

    def __init__(self, storage: zm.storage.Storage) -> None:
        super().__init__(storage)
        self.begun, self.open = threading.Semaphore(0), threading.Event()
        self.keys: list[str] = []

    def _around[R](self, call: Call[R]) -> R:
        if call.key.startswith("chunks/"):
            self.keys.append(call.key)
            self.begun.release()
            assert self.open.wait(WAIT_S)
        return call.run()


@pytest.mark.parametrize(
    ("path", "abreast"), [("/slice/main/a", 4), ("/zarr/main/a/c/1", 32)], ids=["slice", "zarr"]
)
def test_they_do_not_hold_up_the_next(path: str, abreast: int) -> None:
    memory = MemoryStorage()
    with zm.create(memory).transaction(message="chunks") as store:
        zarr.create_array(
            store, name="a", shape=(CHUNKS * CHUNK,), chunks=(CHUNK,), dtype="u1", compressors=None
        )[:] = np.arange(CHUNKS * CHUNK)
    gate = Gate(memory)
    with serving(zm.open(gate)) as url:
        host, port = url.removeprefix("http://").split(":")
        with contextlib.ExitStack() as clients:
            for _ in range(GONE):
                client = clients.enter_context(socket.create_connection((host, int(port))))
                client.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            for _ in range(abreast):
                assert gate.begun.acquire(timeout=WAIT_S)
        for _ in range(10):  # by then the server has seen that they are closed
            assert get(url, "/nothing").status == 404
        gate.open.set()
        assert get(url, "/slice/main/a?index=0:4").status == 200
    assert len(gate.keys) == abreast + 1, "each that had begun ends its chunk, and no other begins"
