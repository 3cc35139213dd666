"""Files kept open for a moment: what they save, and what they must never hide."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from inside import open_handles
from zarr_manifests.error_cases import ObjectNotFoundError
from zarr_manifests.storage import handles, local
from zarr_manifests.storage.local import LocalStorage

type Clock = list[float]


pytestmark = pytest.mark.usefixtures("clock")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of the files that were opened for ranges."""
    found: list[str] = []
    true = handles.handle_of

    def counted(path: str, open_it: Callable[[], int]) -> handles.Handle:
        def noted() -> int:
            found.append(path)
            return open_it()

        return true(path, noted)

    monkeypatch.setattr(local, "handle_of", counted)
    return found


def open_numbers() -> set[int]:
    return {int(path.name) for path in Path("/dev/fd").iterdir()}


def test_ranges_of_a_file_are_read_with_one_open(tmp_path: Path, opened: list[str]) -> None:
    storage = LocalStorage(tmp_path)
    storage.create("a", b"0123456789")
    assert [storage.get("a", i, 2) for i in range(0, 10, 2)] == [b"01", b"23", b"45", b"67", b"89"]
    assert opened == [str(tmp_path / "a")]
    assert LocalStorage(tmp_path).get("a", 8, 5) == b"89"
    assert len(opened) == 1


def test_what_is_read_whole_is_opened_anew(tmp_path: Path, opened: list[str]) -> None:
    """As the root state is, which other processes replace."""
    storage = LocalStorage(tmp_path)
    storage.create("current", b"old")
    assert storage.get_tagged("current").data == b"old"
    (tmp_path / "new").write_bytes(b"new")
    (tmp_path / "new").rename(tmp_path / "current")
    assert storage.get_tagged("current").data == b"new"
    assert opened == []


def test_what_this_process_deletes_is_missing_at_once(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.create("a", b"0123")
    assert storage.get("a", 0, 4) == b"0123"
    LocalStorage(tmp_path).delete_many(["a"])
    with pytest.raises(ObjectNotFoundError):
        storage.get("a", 0, 4)


def test_what_this_process_replaces_is_read_anew(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("a", b"0123")
    assert storage.get("a", 0, 4) == b"0123"
    storage.put("a", b"4567")
    assert storage.get("a", 0, 4) == b"4567"
    token = storage.get_tagged("a").token
    assert storage.cas("a", b"89ab", token) is not None
    assert storage.get("a", 0, 4) == b"89ab"


def test_what_another_process_deletes_is_missing_a_moment_later(
    tmp_path: Path, clock: Clock
) -> None:
    storage = LocalStorage(tmp_path)
    storage.create("a", b"0123")
    assert storage.get("a", 0, 4) == b"0123"
    (tmp_path / "a").unlink()
    assert storage.get("a", 0, 4) == b"0123"  # its own bytes
    clock[0] += handles.KEPT_S
    with pytest.raises(ObjectNotFoundError):
        storage.get("a", 0, 4)


def test_no_more_than_so_many_files_are_open(tmp_path: Path, opened: list[str]) -> None:
    storage = LocalStorage(tmp_path)
    before = open_numbers()
    for i in range(handles.MOST + 30):
        storage.create(f"o{i}", b"0", durable=False)
        assert storage.get(f"o{i}", 0, 1) == b"0"
    assert len(open_numbers() - before) <= handles.MOST
    assert len(open_handles()) == handles.MOST


def test_no_more_are_open_where_threads_open_them_at_once(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    for i in range(handles.MOST + 1):
        storage.create(f"o{i}", b"0", durable=False)

    def amid() -> int:
        """Opens a file, and before that another one."""
        storage.get(f"o{handles.MOST}", 0, 1)
        return os.open(tmp_path / "o0", os.O_RDONLY)

    for i in range(1, handles.MOST):
        storage.get(f"o{i}", 0, 1)
    handles.handle_of(str(tmp_path / "o0"), amid)
    assert len(open_handles()) == handles.MOST


def test_a_deleted_file_is_closed_when_another_is_opened_later(
    tmp_path: Path, clock: Clock
) -> None:
    storage = LocalStorage(tmp_path)
    before = open_numbers()
    for key in ("a", "b", "c"):
        storage.create(key, b"0")
    storage.get("a", 0, 1)
    storage.get("b", 0, 1)
    clock[0] += handles.KEPT_S
    storage.get("c", 0, 1)
    assert len(open_numbers() - before) == 1


def test_a_file_is_not_closed_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its number could become another file's before the read begins."""
    storage = LocalStorage(tmp_path)
    storage.create("a", b"mine")
    storage.create("other", b"else")
    began, go_on = threading.Event(), threading.Event()
    true = local._read

    def slow(fd: int, start: int, length: int | None) -> bytes:
        if length == 4:
            began.set()
            assert go_on.wait(60)
        return true(fd, start, length)

    monkeypatch.setattr(local, "_read", slow)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(storage.get("a", 0, 4)))
    reader.start()
    assert began.wait(60)
    handles.forget(str(tmp_path / "a"))
    fd = os.open(tmp_path / "other", os.O_RDONLY)  # would take its number
    go_on.set()
    reader.join()
    os.close(fd)
    assert found == [b"mine"]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_opens_its_own(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.create("a", b"0123")
    assert storage.get("a", 0, 4) == b"0123"
    handle = handles.opened(str(tmp_path / "a"))
    assert handle is not None
    number = handle.fd
    del handle
    child = os.fork()
    if not child:
        try:
            os.fstat(number)
        except OSError:
            os._exit(0 if storage.get("a", 1, 2) == b"12" else 2)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert storage.get("a", 0, 4) == b"0123"


@pytest.mark.parametrize(("length", "calls"), [(4, ["preadv"]), (40_000, ["preadv", "_read"])])
def test_a_read_that_would_block_leaves_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, calls: list[str]
) -> None:
    """A small one is made by the call that would say so, a larger one after it."""
    storage, data = LocalStorage(tmp_path), bytes(length)
    storage.create("a", data)
    made: list[tuple[str, int]] = []
    read, preadv = local._read, os.preadv

    def noted(fd: int, start: int, length: int | None) -> bytes:
        made.append(("_read", threading.get_ident()))
        return read(fd, start, length)

    def at_hand(fd: int, buffers: Sequence[bytearray], at: int, flags: int) -> int:
        made.append(("preadv", threading.get_ident()))
        return preadv(fd, buffers, at)

    def refuses(error: OSError) -> None:
        def refused(*_: object) -> int:
            raise error

        monkeypatch.setattr(os, "preadv", refused)
        made.clear()

    here = threading.get_ident()
    monkeypatch.setattr(local, "_read", noted)
    monkeypatch.setattr(handles, "_NOWAIT", 8)  # also where the system has none
    monkeypatch.setattr(os, "preadv", at_hand)
    assert asyncio.run(storage.get_async("a", 0, length)) == data
    assert made == [(call, here) for call in calls]
    refuses(BlockingIOError())
    assert asyncio.run(storage.get_async("a", 0, length)) == data
    assert len(made) == 1
    assert made[0][1] != here
    refuses(OSError("this filesystem cannot tell"))
    assert asyncio.run(storage.get_async("a", 0, length)) == data
    assert made == [("_read", here)]


def test_what_ends_before_a_small_read_does_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.create("a", b"0123")
    assert asyncio.run(storage.get_async("a", 2, 8)) == b"23"
    assert asyncio.run(storage.get_async("a", 8, 8)) == b""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Where the system was asked to read, and how much."""
    found: list[tuple[int, int]] = []
    pread, preadv = os.pread, os.preadv

    def read(fd: int, length: int, at: int) -> bytes:
        found.append((at, length))
        return pread(fd, length, at)

    def read_at_hand(fd: int, buffers: Sequence[bytearray], at: int, flags: int) -> int:
        found.append((at, len(buffers[0])))
        return preadv(fd, buffers, at)

    monkeypatch.setattr(handles, "_NOWAIT", 8)  # also where the system has none
    monkeypatch.setattr(os, "pread", read)
    monkeypatch.setattr(os, "preadv", read_at_hand)
    return found


KB = 1024
LONG = bytes(i * 7 % 251 for i in range(200 * KB))


@pytest.mark.parametrize("in_loop", [False, True])
def test_small_ranges_that_follow_one_another_are_read_ahead(
    tmp_path: Path, calls: list[tuple[int, int]], in_loop: bool
) -> None:
    storage = LocalStorage(tmp_path)
    storage.create("a", LONG)
    for at in range(0, 200 * KB, 4 * KB):
        got = (
            asyncio.run(storage.get_async("a", at, 4 * KB))
            if in_loop
            else storage.get("a", at, 4 * KB)
        )
        assert got == LONG[at : at + 4 * KB]
    ahead = handles.AHEAD_BYTES
    begun = [at for at, length in calls if length == ahead]
    assert (calls[0], begun) == ((0, 4 * KB), [*range(4 * KB, 200 * KB, ahead)])
    assert len(calls) <= 1 + len(begun) + 1  # one more finds the end of the file


def test_ranges_here_and_there_are_read_as_they_are(
    tmp_path: Path, calls: list[tuple[int, int]]
) -> None:
    storage = LocalStorage(tmp_path)
    storage.create("a", LONG)
    asked = [(80 * KB, 4 * KB), (8 * KB, 4 * KB), (120 * KB, 4 * KB), (20 * KB, 4 * KB)]
    for at, length in asked:
        assert storage.get("a", at, length) == LONG[at : at + length]
    assert calls == asked


def test_large_ranges_are_not_read_ahead(tmp_path: Path, calls: list[tuple[int, int]]) -> None:
    storage = LocalStorage(tmp_path)
    storage.create("a", LONG)
    for at in range(0, 160 * KB, 40 * KB):
        assert storage.get("a", at, 40 * KB) == LONG[at : at + 40 * KB]
    assert {length for _, length in calls} == {40 * KB}


def test_a_reader_that_lags_behind_does_not_stop_reading_ahead(
    tmp_path: Path, calls: list[tuple[int, int]]
) -> None:
    """As one of two threads may that share the ranges of a file."""
    storage = LocalStorage(tmp_path)
    storage.create("a", LONG)
    for at in (0, 2, 1, 3, 4, 5, 6, 7, 8):
        assert storage.get("a", at * 4 * KB, 4 * KB) == LONG[at * 4 * KB : (at + 1) * 4 * KB]
    assert [at // (4 * KB) for at, _ in calls] == [0, 2, 1, 3]


def test_what_was_read_ahead_of_a_file_goes_with_it(tmp_path: Path, clock: Clock) -> None:
    storage = LocalStorage(tmp_path)
    storage.create("a", LONG)
    for at in (0, 10, 20):
        storage.get("a", at, 10)
    (tmp_path / "a").unlink()
    assert storage.get("a", 30, 10) == LONG[30:40]
    clock[0] += handles.KEPT_S
    with pytest.raises(ObjectNotFoundError):
        storage.get("a", 40, 10)
