"""Each file is closed once, whenever an interrupt comes: the number may be another file's."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from zarr_manifests.storage.local import LocalStorage

CONFIG = {"inline-chunk-bytes": 0, "pack-chunk-bytes": 0}


def read_and_swap(folder: Path) -> None:
    storage = LocalStorage(folder)
    storage.create("a/b/c", b"first")
    storage.put("a/b/c", b"second")
    assert storage.get("a/b/c", 0, 3) == b"sec"
    assert storage.get("a/b/c") == b"second"
    token = storage.get_tagged("a/b/c").token
    storage.cas("a/b/c", b"third", token)


def commit_and_export(folder: Path) -> None:
    repo = zm.create(folder / "repo", CONFIG)
    with repo.transaction(message="a chunk") as store:
        zarr.create_array(store, name="a", data=np.arange(4))
    session = repo.readonly_session()
    assert zarr.open_array(session.store, path="a")[2] == 2
    zm.export(session, folder / "copy.zarr")
    zm.export(session, folder / "copy.zip")


class Descriptors:
    """Which files are open, and an interrupt right after one of them has been closed."""

    def __init__(self, after: int) -> None:
        self.open = set[int]()
        self.twice: list[int] = []
        self.closed = 0
        self._after = after
        self._open, self._dup, self._close = os.open, os.dup, os.close

    def patch(self, patches: pytest.MonkeyPatch) -> None:
        patches.setattr(os, "open", self._opening(self._open))
        patches.setattr(os, "dup", self._opening(self._dup))
        patches.setattr(os, "close", self.close)

    def _opening(self, call: Callable[..., int]) -> Callable[..., int]:
        def opening(*args: object, **options: object) -> int:
            fd = call(*args, **options)
            self.open.add(fd)
            return fd

        return opening

    def close(self, fd: int) -> None:
        if fd not in self.open:
            self.twice.append(fd)
            return
        self.open.remove(fd)
        self._close(fd)
        if threading.current_thread() is not threading.main_thread():
            return  # Python interrupts no other
        self.closed += 1
        if self.closed == self._after:
            raise KeyboardInterrupt


# Python 3.12 closes a folder again that it removes, when it was interrupted there.
@pytest.mark.parametrize(
    "work", [read_and_swap, *([commit_and_export] if sys.version_info >= (3, 13) else [])]
)
def test_an_interrupt_closes_no_file_twice(work: Callable[[Path], None], tmp_path: Path) -> None:
    after, done = 0, False
    while not done:
        after += 1
        files = Descriptors(after)
        with pytest.MonkeyPatch.context() as patches:
            files.patch(patches)
            try:
                work(tmp_path / str(after))
            except KeyboardInterrupt:
                continue
            finally:
                assert not files.twice, f"after {after} files were closed"
            done = files.closed < after
    assert after > 10
