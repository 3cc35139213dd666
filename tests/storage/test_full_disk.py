"""A disk that is full: what is there stays, and expiry and collection make room."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from datetime import timedelta
from pathlib import Path

import numpy as np
import zarr

import zarr_manifests as zm
from zarr_manifests.errors import StorageFullError
from zarr_manifests.storage.disk import PosixDisk, Temp
from zarr_manifests.storage.local import RESERVE_BYTES, LocalStorage

BLOCK = 4096


def used(root: Path) -> int:
    """The bytes of all files, in whole blocks; other threads rename and delete meanwhile."""
    total = 0
    for path in root.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            there = path.lstat()
            if stat.S_ISREG(there.st_mode):
                total += -(-there.st_size // BLOCK) * BLOCK
    return total


class SmallDisk(PosixDisk):
    """A disk with room for so many bytes, in whole blocks, of what lies below a folder."""

    def __init__(self, root: Path, nbytes: int) -> None:
        self.root, self.nbytes = root, nbytes

    def _demand(self, nbytes: int) -> None:
        if used(self.root) + -(-nbytes // BLOCK) * BLOCK > self.nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, temp: Temp, data: bytes | memoryview) -> None:
        self._demand(len(data))
        super().write(temp, data)


def overwrite(repo: zm.Repository, seed: int) -> None:
    """A commit of 64 KiB that do not compress, and leave as many dead bytes."""
    values = np.random.default_rng(seed).random(8192)
    with repo.transaction(message=f"day {seed}") as store:
        zarr.create_array(store, name="t", data=values, chunks=(1024,), overwrite=True)


def fill(repo: zm.Repository) -> int:
    """Commit until nothing fits any more; how often."""
    for count in range(1000):
        try:
            overwrite(repo, count)
        except StorageFullError:
            return count
    raise AssertionError("the disk is not full yet")


def sound(repo: zm.Repository, seed: int) -> None:
    assert repo.verify().ok
    values = zarr.open_array(repo.readonly_session().store, path="t", mode="r")[:]
    assert np.array_equal(values, np.random.default_rng(seed).random(8192))


def test_a_full_disk_is_made_room_on(tmp_path: Path) -> None:
    disk = SmallDisk(tmp_path, 3 << 19)
    folder = tmp_path / "repository"
    storage = LocalStorage(folder, disk=disk)
    last = fill(zm.create(storage)) - 1
    assert last > 2
    disk.nbytes = used(tmp_path)  # not one block is left
    repo = zm.open(storage)
    sound(repo, last)
    assert len(repo.expire_snapshots(keep_last=1).snapshots) == last + 1
    repo.garbage_collect(timedelta(0))
    # What was overwritten is still named by the changes that lie on the base.
    repo.compact("main", mode="full")
    repo.expire_snapshots(keep_last=1)
    assert repo.garbage_collect(timedelta(0)).deleted_nbytes > last * 60_000
    sound(repo, last)
    assert (folder / ".reserve").stat().st_size == RESERVE_BYTES  # for the next time
    overwrite(repo, last + 1)
    sound(repo, last + 1)
