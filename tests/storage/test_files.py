"""Files that are not what they seem, links that lead elsewhere, and few descriptors."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from inside import open_handles
from zarr_manifests.error_cases import ConfigError
from zarr_manifests.errors import ManifestsError, StorageError
from zarr_manifests.storage import Storage, files, from_url, handles
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


ODD = [pipe, device, listening, folder]


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
    "get_ranges": lambda storage: storage.get_ranges("d/a", [(0, 4)]),
    "get_tagged": lambda storage: storage.get_tagged("d/a"),
    "head": lambda storage: storage.head("d/a"),
    "create": lambda storage: storage.create("d/a", b"1"),
    "cas": lambda storage: storage.cas("d/a", b"1", "token"),
    "sync": lambda storage: storage.sync(["d/a"]),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("follow_links", [False, True])
def test_what_is_no_regular_file_is_refused_at_once(
    tmp_path: Path, odd: Callable[[Path], None], call: str, follow_links: bool
) -> None:
    (tmp_path / "d").mkdir()
    odd(tmp_path / "d" / "a")
    storage = from_url(tmp_path, follow_links=follow_links)
    with in_time(), pytest.raises(StorageError, match=str(tmp_path / "d" / "a")):
        CALLS[call](storage)
    with in_time():
        assert [info.key for info in from_url(tmp_path, follow_links=True).list()] == []


@pytest.mark.parametrize("odd", ODD)
def test_a_lock_that_is_no_regular_file_is_refused_at_once(
    tmp_path: Path, odd: Callable[[Path], None]
) -> None:
    odd(tmp_path / ".lock")
    with in_time(), pytest.raises(StorageError):
        LocalStorage(tmp_path).put("a", b"1")
    assert not (tmp_path / "a").exists()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with an object of every kind."""
    place = tmp_path / "repository"
    config = zm.Config(inline_chunk_bytes=0)
    repo = zm.create(place, config)
    with repo.transaction(message="make") as store:
        zarr.create_array(store, name="t", data=np.arange(64.0), chunks=(4,))
    repo.create_tag("v1", repo.readonly_session().snapshot_id)
    return place


def kinds(place: Path) -> list[Path]:
    """One object of each kind, the newest."""
    found = {
        path.relative_to(place).parts[0]: path
        for path in sorted(place.rglob("[!.]*"))
        if path.is_file()
    }
    assert {"current", "root", "snapshots", "deltas", "chunks"} <= found.keys()
    return list(found.values())


def use(place: Path) -> None:
    """Everything that reads a repository."""
    repo = zm.open(place)
    for call in (
        lambda: zarr.open_array(repo.readonly_session("main").store, path="t", mode="r")[:],
        lambda: list(repo.ancestry()),
        lambda: repo.expire_snapshots(keep_last=1),
        repo.garbage_collect,
        repo.verify,
        lambda: zm.recover(repo, 2),
    ):
        try:
            call()
        except ManifestsError:
            continue


@pytest.mark.parametrize("odd", [pipe, device])
def test_no_object_of_a_repository_hangs(repository: Path, odd: Callable[[Path], None]) -> None:
    for path in kinds(repository):
        kept = path.read_bytes()
        path.unlink()
        odd(path)
        with in_time():
            if path.name == "current":
                with pytest.raises(ManifestsError, match="current"):
                    zm.open(repository)
            else:
                use(repository)
        path.unlink()
        path.write_bytes(kept)
        open_handles().clear()
    t = zarr.open_array(zm.open(repository).readonly_session().store, path="t", mode="r")
    assert t[:].tolist() == list(range(64))


# --- links -----------------------------------------------------------------------------------


def test_links_to_and_above_the_repository_are_followed(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "data").symlink_to(tmp_path)
    (tmp_path / "winds").symlink_to(repository)
    for place in (tmp_path / "data" / "repository", tmp_path / "winds"):
        repo = zm.open(place)
        with repo.transaction(message="again") as store:
            zarr.open_array(store, path="t")[:4] = 7
        assert repo.verify().problems == ()
        assert not zm.open(repository).verify().problems


@pytest.mark.parametrize("name", ["chunks", "snapshots", "root"])
def test_folders_that_are_links_are_followed_on_request_only(
    repository: Path, tmp_path: Path, name: str
) -> None:
    (repository / name).rename(tmp_path / "elsewhere")
    (repository / name).symlink_to(tmp_path / "elsewhere")
    before = sorted(path for path in (tmp_path / "elsewhere").rglob("*"))

    def rewrite(repo: zm.Repository) -> None:
        with repo.transaction(message="again") as store:
            t = zarr.open_array(store, path="t")
            t[:] = t[:] + 1

    refused: list[Callable[[zm.Repository], object]] = [
        rewrite,
        lambda repo: repo.garbage_collect(),
    ]
    for call in refused:
        with pytest.raises(StorageError, match=r"symbolic link.*follow_links=True"):
            call(zm.open(repository))
    assert sorted(path for path in (tmp_path / "elsewhere").rglob("*")) == before
    repo = zm.open(from_url(repository, follow_links=True))
    rewrite(repo)
    repo.garbage_collect()
    assert repo.verify().problems == ()


@pytest.mark.parametrize("call", [*CALLS, "put", "delete_many"])
@pytest.mark.parametrize("linked", ["object", "folder"])
def test_links_below_the_root_are_refused(tmp_path: Path, call: str, linked: str) -> None:
    outside, place = tmp_path / "outside", tmp_path / "place"
    (outside / "d").mkdir(parents=True)
    (outside / "d" / "a").write_bytes(b"secret")
    place.mkdir()
    if linked == "folder":
        (place / "d").symlink_to(outside / "d")
    else:
        (place / "d").mkdir()
        (place / "d" / "a").symlink_to(outside / "d" / "a")
    calls = CALLS | {
        "put": lambda storage: storage.put("d/b" if linked == "folder" else "d/a", b"1"),
        "delete_many": lambda storage: storage.delete_many(["d/a"]),
    }
    # What is opened with links is not at hand for who follows none.
    assert from_url(place, follow_links=True).get("d/a", 0, 6) == b"secret"
    storage = LocalStorage(place)
    if linked == "object" and call in ("put", "delete_many"):
        calls[call](storage)  # of the link, and not of what it leads to
        assert not (place / "d" / "a").is_symlink()
    else:
        with pytest.raises(StorageError, match=r"symbolic link.*follow_links=True"):
            calls[call](storage)
        with pytest.raises(StorageError, match=r"symbolic link.*follow_links=True"):
            list(storage.list())
    assert [path.read_bytes() for path in (outside / "d").iterdir()] == [b"secret"]


def test_a_link_that_is_put_there_while_it_is_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path / "place")
    storage.create("d/a", b"1")
    true = os.open

    def swapped(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if path == "d":
            (tmp_path / "place" / "d").rename(tmp_path / "was")
            (tmp_path / "place" / "d").symlink_to(tmp_path / "was")
        return true(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", swapped)
    with pytest.raises(StorageError, match="symbolic link"):
        storage.get("d/a")


def test_following_links_is_an_option_that_travels(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"1")
    (tmp_path / "a").symlink_to("real")
    storage = pickle.loads(pickle.dumps(from_url(tmp_path, follow_links=True)))
    assert storage.get("a") == b"1"
    with pytest.raises(ConfigError, match="follow_links: must be of type bool"):
        from_url(tmp_path, follow_links=1)


def test_a_warm_read_opens_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    storage.create("d/e/a", bytes(range(100)))
    opened: list[object] = []
    true = os.open

    def counted(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        opened.append(path)
        return true(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", counted)
    storage.get("d/e/a", 0, 10)
    assert len(opened) == 4  # the root, two folders, the file
    for at in range(0, 90, 7):
        storage.get("d/e/a", at, 10)
    assert len(opened) == 4


# --- few descriptors -------------------------------------------------------------------------

_FEW = """
import os, resource, sys
import numpy as np, zarr
import zarr_manifests as zm
from zarr_manifests.storage.local import LocalStorage

place, raw = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
repo = zm.open(place, virtual_containers={"raw": raw})
store = repo.readonly_session("main").store
for _ in range(2):
    for name in ("t", "v"):
        assert zarr.open_array(store, path=name, mode="r")[:].tolist() == list(range(1, 301))
# Nor where almost all of them are somebody else's.
others = []
while True:
    try:
        others.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        break
for fd in others[:4]:
    os.close(fd)
storage = LocalStorage(place)
keys = [info.key for info in storage.list("chunks/")]
for key in keys:
    storage.get(key, 0, 8)
with repo.transaction(message="write") as store:
    zarr.open_array(store, path="t")[:] = 1
for fd in others[4:]:
    os.close(fd)
print(len(keys))
"""


@pytest.mark.slow
def test_few_descriptors_are_enough(tmp_path: Path) -> None:
    raw, place = tmp_path / "raw", tmp_path / "repository"
    raw.mkdir()
    for i in range(300):
        (raw / str(i)).write_bytes(np.array([i + 1], "<i4").tobytes())
    # Each chunk is an object of its own.
    config = zm.Config(inline_chunk_bytes=0, pack_chunk_bytes=0)
    repo = zm.create(place, config, virtual_containers={"raw": raw})
    with repo.transaction(message="make") as store:
        shape = {"shape": (300,), "chunks": (1,), "dtype": "i4", "compressors": None}
        zarr.create_array(store, name="t", **shape)[:] = np.arange(1, 301)
        zarr.create_array(store, name="v", **shape)
        rows = np.arange(300)
        files = [(raw / str(i)).as_uri() for i in range(300)]
        store.set_virtual_refs("v", rows[:, None], files, rows, rows * 0, rows * 0 + 4)
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_FEW), place, raw],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "300\n"), ended.stderr


def test_files_that_are_only_kept_open_are_closed_before_another_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    """As many descriptors as there are, and no one more."""
    storage = LocalStorage(tmp_path)
    for i in range(handles.MOST + 1):
        storage.create(f"o{i}", b"0", durable=False)
    most: list[int] = []
    true = files.open_below

    def counted(*given: object, **options: object) -> int:
        most.append(len(open_handles()))
        return true(*given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("zarr_manifests.storage.local.open_below", counted)
    for i in range(handles.MOST + 1):
        storage.get(f"o{i}", 0, 1)
    assert max(most) == handles.MOST - 1
    clock[0] += handles.KEPT_S
    storage.get("o0", 0, 1)
    assert most[-1] == 0
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    for i in range(handles.MOST + 1):
        storage.get(f"o{i}", 0, 1)
    assert len(open_handles()) == 16


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_what_can_go_is_closed_when_no_descriptor_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Every call of the storage that opens a file or a folder."""
    storage = LocalStorage(tmp_path)
    storage.create("kept", b"0123")
    storage.create("d/a", b"0123")
    true, scan = os.open, os.scandir

    def refuse() -> None:
        if open_handles():
            raise OSError(number, os.strerror(number))

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
