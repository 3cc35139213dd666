"""Files that are not what they seem, links that lead elsewhere, and few descriptors."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from inside import open_handles
from zarr_manifests.error_cases import ObjectNotFoundError
from zarr_manifests.errors import StorageError
from zarr_manifests.storage import Storage, from_url, handles
from zarr_manifests.storage.local import LocalStorage

# --- not a regular file ----------------------------------------------------------------------


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


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


@pytest.mark.parametrize("odd", [pipe, device, listening, folder])
def test_what_is_no_regular_file_is_refused_at_once(
    tmp_path: Path, odd: Callable[[Path], None]
) -> None:
    (tmp_path / "d").mkdir()
    odd(tmp_path / "d" / "a")
    with in_time():
        for call in CALLS.values():
            with pytest.raises(StorageError, match=str(tmp_path / "d" / "a")):
                call(from_url(tmp_path, follow_links=odd is device))
        assert [info.key for info in from_url(tmp_path, follow_links=True).list()] == []
        (tmp_path / ".lock").unlink(missing_ok=True)
        odd(tmp_path / ".lock")
        with pytest.raises(StorageError):
            LocalStorage(tmp_path).put("a", b"1")
    assert not (tmp_path / "a").exists()


# --- links -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chunks", "root"])
def test_folders_that_are_links_are_followed_on_request_only(tmp_path: Path, name: str) -> None:
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
        with pytest.raises(StorageError, match=r"symbolic link.*follow_links=True"):
            call(zm.open(repository))
    assert sorted(path for path in (tmp_path / "elsewhere").rglob("*")) == before
    repo = zm.open(from_url(repository, follow_links=True))
    rewrite(repo)
    repo.garbage_collect()
    assert repo.verify().problems == ()


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
    # What is opened with links is not at hand for who follows none.
    assert from_url(place, follow_links=True).get("d/a", 0, 6) == b"secret"
    storage = LocalStorage(place)
    refused: list[Callable[[Storage], object]] = [*CALLS.values(), lambda s: list(s.list())]
    if linked == "folder":
        refused += [lambda s: s.put("d/b", b"1"), lambda s: s.delete_many(["d/a"])]
    for call in refused:
        with pytest.raises(StorageError, match=r"symbolic link.*follow_links=True"):
            call(storage)
    if linked == "object":
        storage.put("d/a", b"1")  # in the place of the link, and not of what it leads to
        assert not (place / "d" / "a").is_symlink()
    assert [path.read_bytes() for path in (outside / "d").iterdir()] == [b"secret"]


def test_an_open_file_is_not_read_once_its_object_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(handles, "_now_s", lambda: now_s[0])
    open_handles().clear()
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


# --- few descriptors -------------------------------------------------------------------------


def test_what_can_go_is_closed_when_no_descriptor_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call of the storage that opens a file or a folder."""
    storage = LocalStorage(tmp_path)
    storage.create("kept", b"0123")
    storage.create("d/a", b"0123")
    true, scan = os.open, os.scandir

    def refuse() -> None:
        if open_handles():
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def opened(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        refuse()
        return true(path, flags, mode, dir_fd=dir_fd)

    def scanned(path: str) -> Iterator[os.DirEntry[str]]:
        refuse()
        return scan(path)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "scandir", scanned)
    calls: list[Callable[[], object]] = [
        lambda: storage.get("d/a"),
        lambda: storage.get("d/a", 0, 2),
        lambda: storage.get_ranges("d/a", [(0, 2)]),
        lambda: storage.head("d/a"),
        lambda: list(storage.list()),
        lambda: storage.put("p", b"1"),
        lambda: storage.create("c", b"1"),
        lambda: storage.sync(["c"]),
        lambda: storage.cas("p", b"2", storage.get_tagged("p").token),
        lambda: storage.delete_many(["c"]),
    ]
    for call in calls:
        open_handles().clear()
        storage.get("kept", 0, 2)
        assert open_handles()
        call()


def test_a_lock_that_is_a_link_is_refused_whatever_is_followed(tmp_path: Path) -> None:
    place, elsewhere = tmp_path / "place", tmp_path / "elsewhere"
    place.mkdir()
    (place / ".lock").symlink_to(elsewhere)
    with pytest.raises(StorageError, match="lock is a symbolic link"):
        LocalStorage(place, follow_links=True).put("a", b"1")
    assert not elsewhere.exists()
