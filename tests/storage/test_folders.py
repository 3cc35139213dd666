"""Empty folders go; writers who use them meanwhile lose nothing, nor does a crash then."""

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from zarr_manifests.error_cases import ObjectNotFoundError
from zarr_manifests.errors import StorageError
from zarr_manifests.storage import Storage
from zarr_manifests.storage.disk import PosixDisk, Temp
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.testing import CrashDisk, SimulatedCrash

LATER = 1 << 50  # milliseconds: everything there is was changed before
WRITES: dict[str, Callable[[Storage], object]] = {
    "create": lambda storage: storage.create("d/e/a", b"1"),
    "put": lambda storage: storage.put("d/e/a", b"1"),
    "cas": lambda storage: storage.cas("d/e/a", b"1", None),
}


def _folders(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_dir())


def _leave(storage: Storage, *keys: str) -> None:
    """Folders in which there is nothing any more."""
    for key in keys:
        storage.create(key, b"1")
    storage.delete_many(keys)


def test_empty_folders_go_that_nobody_has_changed_since(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    _leave(storage, "d/a", "e/old/a", "e/new/a", "f/g/h/i/a")
    old_s = 1_000
    for name in ("d", "e", "e/old", "f", "f/g", "f/g/h", "f/g/h/i"):
        os.utime(tmp_path / name, (old_s, old_s))
    assert storage.remove_temporary(old_s * 1000) == 0
    assert _folders(tmp_path) == ["d", "e", "e/new", "e/old", "f", "f/g", "f/g/h", "f/g/h/i"]
    assert storage.remove_temporary(old_s * 1000 + 1) == 0  # folders are not counted
    assert _folders(tmp_path) == ["d", "e", "e/new", "f"]
    assert storage.remove_temporary(LATER) == 0
    assert _folders(tmp_path) == ["d", "e", "f"]


def test_folders_that_hold_anything_and_those_of_others_stay(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.create("full/of/something", b"1")
    other = LocalStorage(tmp_path / "other" / "place")
    _leave(other, "kind/session/a")
    for name in ("hidden/.git/empty", "linked/there", "foreign/folder"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "linked" / "there" / "link").symlink_to(tmp_path / "full")
    (tmp_path / "foreign" / "folder" / ".note").write_bytes(b"")
    left = tmp_path / "temporary" / "folder" / ".tmp-1-1"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"left")
    before = _folders(tmp_path)
    assert storage.remove_temporary(LATER) == 1
    assert _folders(tmp_path) == [name for name in before if name != "temporary/folder"]
    assert other.remove_temporary(LATER) == 0
    assert _folders(tmp_path / "other" / "place") == ["kind"]


def test_a_folder_that_gets_an_object_before_it_is_removed_stays(tmp_path: Path) -> None:
    class Disk(PosixDisk):
        def rmdir(self, directory: str) -> None:
            assert LocalStorage(tmp_path).create("d/e/b", b"1")
            super().rmdir(directory)

    storage = LocalStorage(tmp_path, disk=Disk())
    _leave(storage, "d/e/a")
    storage.remove_temporary(LATER)
    assert [info.key for info in storage.list()] == ["d/e/b"]


def test_two_that_remove_the_same_folder_are_no_error(tmp_path: Path) -> None:
    class Disk(PosixDisk):
        def rmdir(self, directory: str) -> None:
            super().rmdir(directory)
            super().rmdir(directory)

    storage = LocalStorage(tmp_path, disk=Disk())
    _leave(storage, "d/e/a")
    storage.remove_temporary(LATER)
    assert _folders(tmp_path) == ["d"]


class _Disk(CrashDisk):
    """Somebody else removes a folder right before one of the calls."""

    def __init__(self, path: Path, at: str, *, times: int, anonymous: bool = True) -> None:
        super().__init__(path, anonymous=anonymous)
        self.at, self.times, self.path = at, times, path

    def _others(self, at: str) -> None:
        if at == self.at and self.times:
            self.times -= 1
            folder = self.path / "d" / "e"
            if not list(folder.iterdir()):  # else the temporary file has a name
                LocalStorage(self.path).remove_temporary(LATER)
                assert not folder.exists()

    def open_temp(self, directory: str) -> Temp:
        self._others("open_temp")
        return super().open_temp(directory)

    def write(self, temp: Temp, data: bytes | memoryview) -> None:
        self._others("write")
        super().write(temp, data)

    def link(self, temp: Temp, path: str) -> None:
        self._others("link")
        super().link(temp, path)


@pytest.mark.parametrize("anonymous", [True, False])
@pytest.mark.parametrize("at", ["open_temp", "write"])
@pytest.mark.parametrize("write", WRITES)
def test_a_folder_that_goes_while_it_is_written_to_is_made_again(
    tmp_path: Path, write: str, at: str, anonymous: bool
) -> None:
    disk = _Disk(tmp_path, at, times=0, anonymous=anonymous)
    storage = LocalStorage(tmp_path, disk=disk)
    _leave(storage, "d/e/x")
    disk.times = 1
    WRITES[write](storage)
    assert disk.times == 0
    disk.crash()
    assert storage.get("d/e/a") == b"1"


def test_a_folder_that_goes_again_and_again_is_told(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path, disk=_Disk(tmp_path, "link", times=9))
    (tmp_path / "d" / "e").mkdir(parents=True)
    with pytest.raises(StorageError, match="its folder vanished meanwhile"):
        storage.create("d/e/a", b"1")
    assert list(storage.list()) == []


def test_what_is_known_of_a_folder_ends_with_it(tmp_path: Path) -> None:
    """One storage knows it, a second one removes it, and a third one makes it again."""
    disk = CrashDisk(tmp_path)
    first, second, third = (disk.storage() for _ in range(3))
    for key in ("d/e/a", "d/e/b"):
        _leave(first, key)
        second.remove_temporary(LATER)
        third.create(key, b"not durable", durable=False)
        first.create(f"{key}-1", b"1")
        disk.crash()
        assert first.get(f"{key}-1") == b"1"
        first.delete_many([info.key for info in first.list()])


def test_known_folders_cost_nothing_more_while_none_is_removed(tmp_path: Path) -> None:
    disk = CrashDisk(tmp_path)
    storage = disk.storage()
    _leave(storage, "d/e/a", "d/f/a")
    storage.create("d/e/b", b"1")

    def synced() -> list[str]:
        disk.calls.clear()
        assert storage.create(f"d/e/{len(list(storage.list()))}", b"1")
        return [call for call in disk.calls if call.startswith("fsync_dir")]

    assert synced() == ["fsync_dir d/e"]
    LocalStorage(tmp_path).remove_temporary(LATER)  # one folder
    assert synced() == ["fsync_dir d/e", "fsync_dir d", "fsync_dir .", "fsync_dir .."]
    LocalStorage(tmp_path).remove_temporary(LATER)  # there is none to remove
    assert synced() == ["fsync_dir d/e"]


@pytest.mark.parametrize("seed", [None, *range(6)])
def test_a_crash_at_any_call_loses_nothing_acknowledged(tmp_path: Path, seed: int | None) -> None:
    rng = None if seed is None else random.Random(seed)
    for number in itertools.count(1):
        disk = CrashDisk(tmp_path / str(number))
        disk.crash_at = number
        storage = disk.storage()
        acknowledged = []
        try:
            for key in ("d/e/a", "d/f/g/a"):
                storage.create(f"{key}-before", b"1")
                storage.delete_many([f"{key}-before"])
                storage.remove_temporary(LATER)
                storage.create(key, b"1")
                acknowledged.append(key)
                storage.remove_temporary(LATER)
        except SimulatedCrash:
            disk.crash(rng)
            storage = disk.storage()
        else:
            break
        for key in acknowledged:
            assert storage.get(key) == b"1", (number, key)
        # And it goes on from there, whatever lies about.
        storage.remove_temporary(LATER)
        storage.create("d/f/after", b"1")
        disk.crash()
        storage = disk.storage()
        assert storage.get("d/f/after") == b"1"
    assert number > 30


def test_a_removed_folder_may_be_back_after_a_crash_with_what_was_in_it(tmp_path: Path) -> None:
    disk = CrashDisk(tmp_path)
    storage = disk.storage()
    storage.create("d/e/a", b"1")
    storage.create("d/e/b", b"1", durable=False)
    storage.delete_many(["d/e/a", "d/e/b"])
    storage.remove_temporary(LATER)
    storage.create("d/e/c", b"1", durable=False)  # in a new folder
    disk.fsync_dir(str(tmp_path / "d" / "e"))  # whose own name stays unknown
    disk.crash()
    storage = disk.storage()
    assert [info.key for info in storage.list()] == ["d/e/a"]
    storage.delete_many(["d/e/a"])
    storage.remove_temporary(LATER)
    disk.fsync_dir(str(tmp_path / "d"))  # now it is gone for good
    disk.crash()
    storage = disk.storage()
    with pytest.raises(ObjectNotFoundError):
        storage.get("d/e/a")
    assert _folders(tmp_path) == ["d"]


WRITER = """
import sys
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.disk import PosixDisk

class Disk(PosixDisk):
    def link(self, temp, path):
        print("about to link", flush=True)
        sys.stdin.readline()
        super().link(temp, path)

storage = LocalStorage(sys.argv[1], disk=Disk())
for name in ("a", "b"):
    storage.create("d/e/" + name, name.encode())
    storage.delete_many(["d/e/" + name])
storage.create("d/e/c", b"kept")
"""


def test_a_writer_in_another_process_goes_on(tmp_path: Path) -> None:
    """Though its folder goes each time it is about to name a file there."""
    storage = LocalStorage(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        for number, line in enumerate(writer.stdout):
            assert line == "about to link\n"
            assert (tmp_path / "d" / "e").exists()
            if number % 2 == 0:  # the next one is the second attempt
                storage.remove_temporary(LATER)
                assert not (tmp_path / "d" / "e").exists()
            writer.stdin.write("\n")
            writer.stdin.flush()
    assert (writer.returncode, number) == (0, 5)
    assert storage.get("d/e/c") == b"kept"
