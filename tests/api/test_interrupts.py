"""Ctrl-C at every call of a write: its session is closed, or all of it is as it was."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.buffer import default_buffer_prototype

import zarr_manifests as zm
from zarr_manifests.bulk import use_bulk
from zarr_manifests.bulk.here import write_here
from zarr_manifests.errors import SessionClosedError
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import ManifestStore

PACKAGE = str(Path(zm.__file__).parent)


SEVEN = default_buffer_prototype().buffer.from_bytes(np.full(2, 7, "i4").tobytes())
WRITES: dict[str, Callable[[ManifestStore, Any], object]] = {
    "set": lambda store, _: store.set_sync("a/c/0", SEVEN),
    "delete": lambda store, _: store.delete_sync("a/c/0"),
    "in bulk": lambda _, array: write_here(array, (slice(0, 2),), np.full(2, 7, "i4")),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_an_interrupt_in_a_write_closes_its_session_and_no_other(
    write: Callable[[ManifestStore, Any], object],
) -> None:
    closed = []
    for number in itertools.count(1, 4):
        storage = MemoryStorage()
        repo = zm.create(storage, {"inline-chunk-bytes": 0, "pack-chunk-bytes": 0})
        with repo.transaction(message="wanted") as store:
            data = np.arange(4, dtype="i4")
            zarr.create_array(store, name="a", data=data, chunks=(2,), compressors=None)
        session, other = repo.writable_session(), repo.writable_session()
        other.store.set_sync("a/c/1", SEVEN)
        array = zarr.open_array(session.store, path="a")
        use_bulk(array)
        try:
            with interrupted_at(number):
                write(session.store, array)
        except KeyboardInterrupt:
            try:
                session.commit("goes on", allow_empty=True)
                closed.append(False)
            except SessionClosedError as error:
                closed.append("a write was interrupted" in str(error))
        else:
            break
        other.commit("the other session's")
        now = zarr.open_array(repo.readonly_session().store, path="a")[:].tolist()
        wholly = ([0, 1],) if closed[-1] else ([0, 1], [7, 7], [0, 0])
        assert now[:2] in wholly
        assert now[2:] == [7, 7]
        assert repo.verify().ok
    assert any(closed)


@contextmanager
def interrupted_at(number: int) -> Iterator[None]:
    """Interrupt this thread at a call within the package."""
    calls = itertools.count(1)

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and PACKAGE in frame.f_code.co_filename and next(calls) == number:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
