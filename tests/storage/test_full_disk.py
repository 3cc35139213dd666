"""A disk that is full: what is there stays, and expiry and collection make room."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr

import zarr_manifests as zm
from zarr_manifests.engine.root.roots import RootAt, Roots
from zarr_manifests.error_cases import StorageFullError
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.storage.disk import PosixDisk, Temp
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.reserve import RESERVE_BYTES

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
        super().__init__(anonymous=False)
        self.root, self.nbytes = root, nbytes

    def _demand(self, nbytes: int) -> None:
        if used(self.root) + -(-nbytes // BLOCK) * BLOCK > self.nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, temp: Temp, data: bytes | memoryview) -> None:
        self._demand(len(data))
        super().write(temp, data)

    def reserve(self, path: str, nbytes: int) -> None:
        there = Path(path)
        self._demand(max(0, nbytes - (there.stat().st_size if there.exists() else 0)))
        super().reserve(path, nbytes)


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


def fill_up(folder: Path) -> None:
    """Somebody else takes the last block."""
    room = os.statvfs(folder)
    (folder / "others").write_bytes(bytes(room.f_bavail * room.f_frsize))
    assert not os.statvfs(folder).f_bavail


def sound(repo: zm.Repository, seed: int) -> None:
    assert repo.verify().ok
    values = zarr.open_array(repo.readonly_session().store, path="t", mode="r")[:]
    assert np.array_equal(values, np.random.default_rng(seed).random(8192))


def way_out(place: Path | LocalStorage, folder: Path) -> None:
    """Expire, collect and compact where there is no room, then commit again."""
    repo = zm.open(place)
    last = len(list(repo.ancestry())) - 2
    sound(repo, last)
    report = repo.expire_snapshots(keep_last=1)
    assert len(report.snapshots) == last + 1
    repo.garbage_collect(timedelta(0))
    # What was overwritten is still named by the changes that lie on the base.
    repo.compact("main", mode="full")
    repo.expire_snapshots(keep_last=1)
    collected = repo.garbage_collect(timedelta(0))
    assert collected.deleted_nbytes > last * 60_000
    sound(repo, last)
    assert (folder / ".reserve").stat().st_size == RESERVE_BYTES  # for the next time
    overwrite(repo, last + 1)
    sound(repo, last + 1)


@pytest.fixture
def full(tmp_path: Path) -> LocalStorage:
    """A repository on a disk that has not one block left."""
    disk = SmallDisk(tmp_path, 3 << 19)
    storage = LocalStorage(tmp_path / "repository", disk=disk)
    assert fill(zm.create(storage)) > 3
    disk.nbytes = 0
    return storage


def test_a_full_disk_is_made_room_on(full: LocalStorage, tmp_path: Path) -> None:
    disk = full._disk
    assert isinstance(disk, SmallDisk)
    disk.nbytes = used(tmp_path)
    way_out(full, tmp_path / "repository")


def test_without_a_reserve_nothing_is_changed(full: LocalStorage, tmp_path: Path) -> None:
    """And as much room as the error asks for is enough."""
    disk = full._disk
    assert isinstance(disk, SmallDisk)
    (tmp_path / "repository" / ".reserve").unlink()
    disk.nbytes = used(tmp_path)
    repo = zm.open(full)
    before = [info.snapshot_id for info in repo.ancestry()]
    for call in (lambda: repo.expire_snapshots(keep_last=1), repo.garbage_collect):
        with pytest.raises(StorageFullError, match="free space"):
            call()
    assert [info.snapshot_id for info in zm.open(full).ancestry()] == before
    assert repo.verify().ok
    disk.nbytes += RESERVE_BYTES
    way_out(full, tmp_path / "repository")


OPERATIONS: dict[str, Callable[[zm.Repository], object]] = {
    "expire": lambda repo: repo.expire_snapshots(keep_last=1),
    "collect": lambda repo: repo.garbage_collect(timedelta(0)),
    "compact": lambda repo: repo.compact("main", mode="full"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_needs_no_room_but_the_reserve(
    full: LocalStorage, tmp_path: Path, name: str
) -> None:
    """Wherever amid its writes the disk is full."""
    disk, place = full._disk, tmp_path / "repository"
    assert isinstance(disk, SmallDisk)
    for blocks in range(8):
        there = tmp_path / f"copy{blocks}"
        shutil.copytree(place, there)
        disk.root, disk.nbytes = there, used(there) + blocks * BLOCK
        repo = zm.open(LocalStorage(there, disk=disk))
        last = len(list(repo.ancestry())) - 2
        OPERATIONS[name](repo)
        sound(repo, last)


def test_an_expiry_leaves_room_for_the_collection(full: LocalStorage, tmp_path: Path) -> None:
    """Also if somebody else takes what is left."""
    disk = full._disk
    assert isinstance(disk, SmallDisk)
    disk.nbytes = used(tmp_path)
    repo = zm.open(full)
    repo.expire_snapshots(keep_last=1)
    disk.nbytes = used(tmp_path)
    assert repo.garbage_collect(timedelta(0)).deleted_nbytes


def test_somebody_else_takes_the_room_amid_a_collection(
    full: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it has swapped the root, and before it archives it."""
    disk, true = full._disk, Roots.archive
    assert isinstance(disk, SmallDisk)

    def archived(roots: Roots, at: RootAt) -> None:
        monkeypatch.setattr(Roots, "archive", true)
        disk.nbytes = used(tmp_path)
        return true(roots, at)

    disk.nbytes = used(tmp_path) + RESERVE_BYTES
    monkeypatch.setattr(Roots, "archive", archived)
    repo = zm.open(full)
    last = len(list(repo.ancestry())) - 2
    repo.garbage_collect(timedelta(0))
    assert Roots.archive is true
    sound(repo, last)


def test_somebody_else_takes_the_room_when_a_collection_has_swapped_the_root(
    full: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The archive of the new root, due before anything is deleted, fits into the reserve."""
    disk = full._disk
    assert isinstance(disk, SmallDisk)
    rename = disk.rename

    def swap(temp: Temp, path: str) -> None:
        rename(temp, path)
        monkeypatch.undo()
        disk.nbytes = used(tmp_path)

    disk.nbytes = used(tmp_path) + RESERVE_BYTES
    monkeypatch.setattr(disk, "rename", swap)
    repo = zm.open(full)
    last = len(list(repo.ancestry())) - 2
    repo.garbage_collect(timedelta(0))
    assert disk.rename == rename
    sound(repo, last)


def test_the_reserve_shrinks_rather_than_to_be_none(tmp_path: Path) -> None:
    disk = SmallDisk(tmp_path, RESERVE_BYTES)
    storage = LocalStorage(tmp_path, disk=disk)
    assert storage.reserve.keep() == RESERVE_BYTES
    assert storage.reserve.keep() == RESERVE_BYTES
    assert storage.reserve.give_up()
    assert not storage.reserve.give_up()
    disk.nbytes = RESERVE_BYTES // 2
    assert storage.reserve.keep() == RESERVE_BYTES // 2
    disk.nbytes = RESERVE_BYTES
    assert storage.reserve.keep() == RESERVE_BYTES
    assert (tmp_path / ".reserve").stat().st_blocks * 512 >= RESERVE_BYTES
    assert storage.reserve.give_up()
    disk.nbytes = 0
    assert storage.reserve.keep() == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["create", "write", "collect"])
def test_every_repository_sets_room_aside(tmp_path: Path, how: str) -> None:
    place = tmp_path / "repository"
    if how == "write":
        zm.write(xr.Dataset({"t": ("x", np.arange(3))}), place, message="the first")
    else:
        repo = zm.create(place)
    if how == "collect":  # one that was made before this was so
        (place / ".reserve").unlink()
        repo.garbage_collect()
    assert (place / ".reserve").stat().st_blocks * 512 >= RESERVE_BYTES


def test_a_first_write_that_fails_sets_nothing_aside(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    refused = xr.Dataset({"t": ("x", [np.nan])})
    with pytest.raises(InvalidArgumentError, match="NaN"):
        zm.write(refused, tmp_path / "a", message="m", encoding={"t": {"dtype": "i4"}})
    assert not list(tmp_path.rglob(".reserve"))


_ON_TMPFS = """
import subprocess, sys
from pathlib import Path

folder = Path(sys.argv[1])
mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", folder], check=False)
if mounted.returncode:
    sys.exit(77)

import zarr_manifests as zm
from tests.storage.test_full_disk import fill, fill_up, way_out

place = folder / "repository"
print(fill(zm.create(place)))
fill_up(folder)
way_out(place, place)
"""


@pytest.mark.slow
def test_a_full_tmpfs_is_made_room_on(tmp_path: Path) -> None:
    """The same where the system itself refuses, in a namespace of its own."""
    here = Path(__file__).parents[2]
    namespace = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "-r"]
    try:
        ended = subprocess.run(
            [*namespace, sys.executable, "-c", _ON_TMPFS, tmp_path],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=os.environ | {"PYTHONPATH": str(here)},
        )
    except FileNotFoundError:
        pytest.skip("there is no unshare to mount a small disk with")
    if ended.returncode == 77 or "unshare" in ended.stderr[:20]:
        pytest.skip(f"a small disk cannot be mounted here: {ended.stderr[-200:]}")
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 3
