"""Files that are not what they seem, links that lead elsewhere, and few descriptors."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from inside import close_files
from zarr_manifests.errors import ObjectNotFoundError, StorageError
from zarr_manifests.storage import Storage, from_url, local
from zarr_manifests.storage.local import LocalStorage

# --- not a regular file ----------------------------------------------------------------------


def pipe(path: Path) -> None:
    os.mkfifo(path)


def listening(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the path of a socket is short
    try:
        with closing(socket.socket(socket.AF_UNIX)) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def folder(path: Path) -> None:
    path.mkdir()


@contextmanager
def in_time() -> Iterator[None]:
    """Ends the process that hangs in the block; threads that wait for a pipe cannot be ended."""
    over = threading.Timer(60, os._exit, [3])
    over.start()
    try:
        yield
    finally:
        over.cancel()


CALLS: dict[str, Callable[[Storage], object]] = {
    "get": lambda storage: storage.get("d/a"),
    "get a range": lambda storage: storage.get("d/a", 0, 4),
    "get_tagged": lambda storage: storage.get_tagged("d/a"),
    "head": lambda storage: storage.head("d/a"),
    "create": lambda storage: storage.create("d/a", b"1"),
    "cas": lambda storage: storage.cas("d/a", b"1", "token"),
    "sync": lambda storage: storage.sync(["d/a"]),
}


@pytest.mark.parametrize("odd", [pipe, listening, folder])
def test_what_is_no_regular_file_is_refused_at_once(
    tmp_path: Path, odd: Callable[[Path], None]
) -> None:
    (tmp_path / "d").mkdir()
    odd(tmp_path / "d" / "a")
    with in_time():
        for call in CALLS.values():
            with pytest.raises(StorageError, match=str(tmp_path / "d" / "a")):
                call(from_url(tmp_path))
        assert [info.key for info in from_url(tmp_path).list()] == []
        (tmp_path / ".lock").unlink(missing_ok=True)
        odd(tmp_path / ".lock")
        with pytest.raises(StorageError):
            LocalStorage(tmp_path).put("a", b"1")
    assert not (tmp_path / "a").exists()


# --- links -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chunks", "root"])
def test_folders_that_are_links_are_not_followed(tmp_path: Path, name: str) -> None:
    repository = tmp_path / "repository"
    repo = zm.create(repository, zm.Config(inline_chunk_bytes=0))
    with repo.transaction(message="make") as store:
        zarr.create_array(store, name="t", data=np.arange(64.0), chunks=(4,))
    (repository / name).rename(tmp_path / "elsewhere")
    (repository / name).symlink_to(tmp_path / "elsewhere")
    before = sorted(path for path in (tmp_path / "elsewhere").rglob("*"))

    def rewrite(repo: zm.Repository) -> None:
        with repo.transaction(message="again") as store:
            t = zarr.open_array(store, path="t")
            t[:] = t[:] + 1

    for call in (rewrite, zm.Repository.garbage_collect):
        with pytest.raises(StorageError, match="symbolic link"):
            call(zm.open(repository))
    assert sorted(path for path in (tmp_path / "elsewhere").rglob("*")) == before


@pytest.mark.parametrize("linked", ["object", "folder"])
def test_links_below_the_root_are_refused(tmp_path: Path, linked: str) -> None:
    outside, place = tmp_path / "outside", tmp_path / "place"
    (outside / "d").mkdir(parents=True)
    (outside / "d" / "a").write_bytes(b"secret")
    place.mkdir()
    if linked == "folder":
        (place / "d").symlink_to(outside / "d")
    else:
        (place / "d").mkdir()
        (place / "d" / "a").symlink_to(outside / "d" / "a")
    storage = LocalStorage(place)
    refused: list[Callable[[Storage], object]] = [*CALLS.values(), lambda s: list(s.list())]
    if linked == "folder":
        refused += [lambda s: s.put("d/b", b"1"), lambda s: s.delete_many(["d/a"])]
    for call in refused:
        with pytest.raises(StorageError, match="symbolic link"):
            call(storage)
    if linked == "object":
        storage.put("d/a", b"1")  # in the place of the link, and not of what it leads to
        assert not (place / "d" / "a").is_symlink()
    assert [path.read_bytes() for path in (outside / "d").iterdir()] == [b"secret"]


def test_an_open_file_is_not_read_once_its_object_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(local, "_now_s", lambda: now_s[0])
    close_files()
    storage = LocalStorage(tmp_path)
    for by_another in (False, True):
        storage.create("a", b"0123")
        assert storage.get("a", 0, 2) == b"01"
        if by_another:  # which is seen after a while
            (tmp_path / "a").unlink()
            now_s[0] += 3600
        else:
            storage.delete_many(["a"])
        with pytest.raises(ObjectNotFoundError):
            storage.get("a", 0, 2)


def test_files_of_earlier_reads_are_closed_by_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the disk space of objects that another process deletes is never free."""
    now_s = [1000.0]
    monkeypatch.setattr(local, "_now_s", lambda: now_s[0])
    close_files()
    storage = LocalStorage(tmp_path)
    for key in "abc":
        storage.create(key, b"0123")
        storage.get(key, 0, 2)
    now_s[0] += 3600
    storage.get("a", 0, 2)
    assert close_files() == 1


# --- few descriptors -------------------------------------------------------------------------


READ_MANY = """
import resource, sys
from zarr_manifests.storage.local import LocalStorage

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
storage = LocalStorage(sys.argv[1])
keys = [info.key for info in storage.list()]
print({storage.get(key, 0, 4) for key in keys * 2}, len(keys))
"""


def test_few_descriptors_are_enough_to_read_many_files(tmp_path: Path) -> None:
    for number in range(100):
        LocalStorage(tmp_path).create(f"d/{number}", b"data", durable=False)
    command = [sys.executable, "-c", READ_MANY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "{b'data'} 100\n", done.stderr


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    place, elsewhere = tmp_path / "place", tmp_path / "elsewhere"
    place.mkdir()
    (place / ".lock").symlink_to(elsewhere)
    with pytest.raises(StorageError, match="lock is a symbolic link"):
        LocalStorage(place).put("a", b"1")
    assert not elsewhere.exists()
