"""Empty folders go; writers who use them meanwhile lose nothing, nor does a crash then."""

import itertools
import random
from pathlib import Path

import pytest

from storages import CrashDisk, SimulatedCrash
from zarr_manifests.storage import Storage
from zarr_manifests.storage.local import LocalStorage

LATER = 1 << 50  # milliseconds: everything there is was changed before


def _folders(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_dir())


def _leave(storage: Storage, *keys: str) -> None:
    """Folders in which there is nothing any more."""
    for key in keys:
        storage.create(key, b"1")
    storage.delete_many(keys)


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


def test_what_was_answered_survives_a_crash(tmp_path: Path) -> None:
    disk = CrashDisk(tmp_path)
    storage = disk.storage()
    storage.create("archive/0", b"0")
    storage.create("found", b"1", durable=False)
    assert not storage.create("found", b"2")
    assert storage.cas("root", b"1", None, then_create=("archive/1", b"1"))
    disk.crash()
    assert [disk.storage().get(key) for key in ("found", "root")] == [b"1", b"1"]


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
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
