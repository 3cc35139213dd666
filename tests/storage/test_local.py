"""The local disk: order of fsyncs, crashes, full disks, locks, places that are not safe."""

import contextlib
import errno
import fcntl
import itertools
import os
import pickle
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import zarr_manifests as zm
from zarr_manifests.error_cases import (
    NotARepositoryError,
    ObjectNotFoundError,
    StorageFullError,
    UnsupportedStorageError,
)
from zarr_manifests.errors import InvalidArgumentError, StorageError
from zarr_manifests.storage import Storage, from_url
from zarr_manifests.storage import disk as disk_module
from zarr_manifests.storage.disk import PosixDisk, Temp, filesystem_type, is_remote_filesystem
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.testing import CrashDisk, SimulatedCrash


def _calls(disk: CrashDisk, do: Callable[[], object]) -> list[str]:
    disk.calls.clear()
    do()
    return list(disk.calls)


# --- order of what reaches the disk ----------------------------------------------------------


def test_create_writes_then_syncs_then_links_then_syncs_folders(tmp_path: Path) -> None:
    disk = CrashDisk(tmp_path / "new" / "repository")
    storage = disk.storage()
    assert _calls(disk, lambda: storage.create("d/a", b"1")) == [
        "open_temp",  # there is no folder yet
        "mkdir ..",
        "mkdir .",
        "mkdir d",
        "open_temp",
        "write",
        "fsync_file",
        "link d/a",
        "fsync_dir d",
        "fsync_dir .",
        "fsync_dir ..",
        "fsync_dir ../..",
    ]
    # The folders above are known to be on the disk now.
    written = ["open_temp", "write", "fsync_file", "link d/b", "fsync_dir d"]
    assert _calls(disk, lambda: storage.create("d/b", b"1")) == written


def test_create_makes_durable_what_it_finds(tmp_path: Path) -> None:
    disk = CrashDisk(tmp_path / "repository")
    storage = disk.storage()
    storage.create("a", b"1", durable=False)
    found = _calls(disk, lambda: storage.create("a", b"2"))
    assert found == ["fsync_file", "fsync_dir .", "fsync_dir .."]
    disk.crash()
    storage = disk.storage()
    assert storage.get("a") == b"1"


def test_folders_made_by_another_process_are_synced_once(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    disk = CrashDisk(tmp_path)
    storage = disk.storage()
    assert _calls(disk, lambda: storage.create("d/a", b"1"))[-3:] == [
        "fsync_dir d",
        "fsync_dir .",
        "fsync_dir ..",
    ]


def test_folders_that_were_deleted_are_made_and_synced_again(tmp_path: Path) -> None:
    disk = CrashDisk(tmp_path / "repository")
    storage = disk.storage()
    storage.create("d/a", b"1")
    shutil.rmtree(tmp_path / "repository")
    assert storage.create("d/a", b"2")
    disk.crash()
    storage = disk.storage()
    assert storage.get("d/a") == b"2"


def test_without_durable_nothing_is_synced_until_sync(tmp_path: Path) -> None:
    disk = CrashDisk(tmp_path / "repository")
    storage = disk.storage()

    def write() -> None:
        storage.create("d/a", b"1", durable=False)
        storage.put("d/b", b"1", durable=False)
        storage.create("e/f/c", b"1", durable=False)

    assert not [call for call in _calls(disk, write) if call.startswith("fsync")]
    assert _calls(disk, lambda: storage.sync(["d/a", "d/b", "e/f/c"])) == [
        "fsync_file",
        "fsync_file",
        "fsync_file",
        "fsync_dir e/f",  # each folder once, the deepest first
        "fsync_dir e",
        "fsync_dir d",
        "fsync_dir .",
        "fsync_dir ..",
    ]


def test_a_swap_is_on_the_disk_before_what_follows_it(tmp_path: Path) -> None:
    disk = CrashDisk(tmp_path)
    storage = disk.storage()
    token = storage.cas("current", b"1", None, then_create=("root/1", b"1"))
    swap = _calls(disk, lambda: storage.cas("current", b"2", token, then_create=("root/2", b"2")))
    write = ["open_temp", "write", "fsync_file"]
    assert swap == [*write, "rename current", "fsync_dir .", *write, "link root/2"]
    assert _calls(disk, lambda: storage.cas("current", b"3", token)) == []


def test_a_failing_then_create_does_not_fail_the_swap(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.create("root", b"a file where a folder should be")
    assert storage.cas("current", b"1", None, then_create=("root/1", b"1")) is not None


# --- crashes of the machine, at every single call --------------------------------------------


def _steps(storage: Storage, acknowledged: dict[str, bytes], pending: dict[str, bytes]) -> None:
    """Writes of every kind; `pending` is what the call that is under way would write."""

    def step(key: str, data: bytes, write: Callable[[], object]) -> None:
        pending.clear()
        pending[key] = data
        write()
        acknowledged[key] = data

    step("a", b"a1", lambda: storage.create("a", b"a1"))
    step("d/b", b"b1", lambda: storage.create("d/b", b"b1"))
    step("current", b"c1", lambda: storage.cas("current", b"c1", None))
    token = storage.get_tagged("current").token
    step("current", b"c2", lambda: storage.cas("current", b"c2", token))
    token = storage.get_tagged("current").token
    step("current", b"c3", lambda: storage.cas("current", b"c3", token, then_create=("r/3", b"r3")))
    step("d/b", b"b2", lambda: storage.put("d/b", b"b2"))
    storage.create("e/f", b"f1", durable=False)
    step("e/f", b"f1", lambda: storage.sync(["e/f"]))


def _found(storage: Storage, key: str) -> bytes | None:
    try:
        return storage.get(key)
    except ObjectNotFoundError:
        return None


@pytest.mark.parametrize("seed", [None, *range(4)])
@pytest.mark.parametrize("anonymous", [True, False])
def test_a_crash_at_any_call_loses_nothing_acknowledged(
    tmp_path: Path, anonymous: bool, seed: int | None
) -> None:
    rng = None if seed is None else random.Random(seed)
    for number in itertools.count(1):
        disk = CrashDisk(tmp_path / str(number) / "r", anonymous=anonymous)
        disk.crash_at = number
        storage = disk.storage()
        acknowledged: dict[str, bytes] = {}
        pending: dict[str, bytes] = {}
        try:
            _steps(storage, acknowledged, pending)
        except SimulatedCrash:
            disk.crash(rng)
            storage = disk.storage()
        else:
            break
        for key in ("a", "d/b", "current"):
            allowed = {acknowledged.get(key), pending.get(key, acknowledged.get(key))}
            assert _found(storage, key) in allowed, (number, key)
        if "e/f" in acknowledged:
            assert storage.get("e/f") == b"f1"
        assert _found(storage, "r/3") in (None, b"r3")
        if _found(storage, "r/3"):
            assert storage.get("current") == b"c3"
        # And it goes on from there, whatever lies about.
        now = _found(storage, "current")
        token = None if now is None else storage.get_tagged("current").token
        assert storage.cas("current", b"after", token) is not None
        assert all(not info.key.startswith(".") for info in storage.list())
    assert number > 30


# --- disks that refuse -----------------------------------------------------------------------


class _RefusingDisk(PosixDisk):
    """Fails with an error number at one of its calls."""

    def __init__(self, op: str, number: int, *, anonymous: bool = True) -> None:
        super().__init__(anonymous=anonymous)
        self.op, self.number, self.armed = op, number, True

    def _check(self, op: str) -> None:
        if self.armed and op == self.op:
            raise OSError(self.number, os.strerror(self.number))

    def open_temp(self, directory: str) -> Temp:
        self._check("open_temp")
        return super().open_temp(directory)

    def write(self, temp: Temp, data: bytes) -> None:
        super().write(temp, data[: len(data) // 2])
        self._check("write")
        super().write(temp, data[len(data) // 2 :])

    def fsync_file(self, fd: int) -> None:
        self._check("fsync_file")
        super().fsync_file(fd)

    def fsync_dir(self, directory: str) -> None:
        self._check("fsync_dir")
        super().fsync_dir(directory)

    def mkdir(self, directory: str) -> None:
        self._check("mkdir")
        super().mkdir(directory)

    def link(self, temp: Temp, path: str) -> None:
        self._check("link")
        super().link(temp, path)

    def rename(self, temp: Temp, path: str) -> None:
        self._check("rename")
        super().rename(temp, path)


WRITES: dict[str, Callable[[Storage], object]] = {
    "create": lambda storage: storage.create("d/a", b"12345678"),
    "put": lambda storage: storage.put("d/a", b"12345678"),
    "cas": lambda storage: storage.cas("d/a", b"12345678", None),
}


@pytest.mark.parametrize("anonymous", [True, False])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("op", ["open_temp", "write", "fsync_file", "link", "rename", "mkdir"])
@pytest.mark.parametrize("write", WRITES)
def test_a_full_disk_is_said_and_leaves_nothing(
    tmp_path: Path, write: str, op: str, number: int, anonymous: bool
) -> None:
    if (op == "rename") != (write == "put") and op in ("rename", "link"):
        op = "rename" if write == "put" else "link"
    full = _RefusingDisk(op, number, anonymous=anonymous)
    storage = LocalStorage(tmp_path / "repository", disk=full)
    with pytest.raises(StorageFullError, match="free space") as error:
        WRITES[write](storage)
    assert f"{tmp_path}/repository/d/a" in str(error.value)
    assert isinstance(error.value.__cause__, OSError)
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"] == []
    full.armed = False
    WRITES[write](storage)
    assert storage.get("d/a") == b"12345678"


@pytest.mark.parametrize(
    "number", [errno.EACCES, errno.EROFS, errno.EIO, errno.EMFILE, errno.EBUSY]
)
def test_other_refusals_are_storage_errors(tmp_path: Path, number: int) -> None:
    storage = LocalStorage(tmp_path, disk=_RefusingDisk("open_temp", number))
    for write in WRITES.values():
        with pytest.raises(StorageError, match=f"cannot write {tmp_path}/d/a") as error:
            write(storage)
        assert os.strerror(number) in str(error.value)
        assert not isinstance(error.value, StorageFullError)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_failed_sync_is_not_made_good_by_a_later_one(tmp_path: Path, number: int) -> None:
    """The system drops the pages it could not write, and the next fsync succeeds over nothing."""
    disk = _RefusingDisk("fsync_file", number)
    storage = LocalStorage(tmp_path, disk=disk)
    for key in ("lost", "kept"):
        assert storage.create(key, b"1", durable=False)
    full = number == errno.ENOSPC
    with pytest.raises(StorageFullError if full else StorageError, match=os.strerror(number)):
        storage.sync(["lost"])
    disk.armed = False
    storage.sync(["kept"])
    for again in (lambda: storage.sync(["kept", "lost"]), lambda: storage.create("lost", b"2")):
        with pytest.raises(StorageError, match=f"{tmp_path}/lost .*must be written again"):
            again()
    assert storage.get("lost") == b"1"
    storage.put("lost", b"2", durable=False)  # another file, of that name
    storage.sync(["lost"])
    storage.delete_many(["lost"])
    with pytest.raises(ObjectNotFoundError):
        storage.sync(["lost"])


def test_a_folder_above_that_cannot_be_read_is_no_error(tmp_path: Path) -> None:
    class Disk(PosixDisk):
        def fsync_dir(self, directory: str) -> None:
            if directory == str(tmp_path):
                raise PermissionError(errno.EACCES, "Permission denied")
            super().fsync_dir(directory)

    (tmp_path / "there").mkdir()
    assert LocalStorage(tmp_path / "there", disk=Disk()).create("a", b"1")
    with pytest.raises(StorageError, match="permissions"):  # the new folder may not survive
        LocalStorage(tmp_path / "new", disk=Disk()).create("a", b"1")


def test_folders_and_files_in_each_others_place(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.create("folder/x", b"1")
    storage.create("file", b"1")
    on_folder: list[Callable[[], object]] = [
        lambda: storage.get("folder"),
        lambda: storage.get("folder", 0, 0),
        lambda: storage.get_ranges("folder", []),
        lambda: storage.get_tagged("folder"),
        lambda: storage.head("folder"),
        lambda: storage.create("folder", b"2"),
        lambda: storage.put("folder", b"2"),
        lambda: storage.cas("folder", b"2", None),
        lambda: storage.delete_many(["folder"]),
    ]
    for call in on_folder:
        with pytest.raises(
            StorageError, match="a folder stands where an object should be"
        ) as error:
            call()
        assert not isinstance(error.value, ObjectNotFoundError)
    for write in (lambda: storage.create("file/x", b""), lambda: storage.put("file/x", b"")):
        with pytest.raises(StorageError, match="a file stands where a folder should be"):
            write()
    with pytest.raises(ObjectNotFoundError):
        storage.get("file/x")
    assert [info.key for info in storage.list()] == ["file", "folder/x"]


def test_the_root_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    storage = LocalStorage(tmp_path / "file")
    assert list(storage.list()) == []
    with pytest.raises(StorageError, match="a file stands where a folder should be"):
        storage.create("a", b"1")


@pytest.mark.parametrize("below", ["", "folder/repository"])
def test_a_place_that_is_a_file_is_called_that(tmp_path: Path, below: str) -> None:
    file = tmp_path / "script.py"
    file.write_bytes(b"")
    said = f"{file} is a file, not a folder"
    place = str(file / below)
    for url in (place, f"file://{place}", file / below):
        with pytest.raises(InvalidArgumentError, match=f"{said}: choose another path, or move"):
            zm.create(url)
        with pytest.raises(InvalidArgumentError, match=said):
            zm.open(url, create=True)
        with pytest.raises(NotARepositoryError, match=f"{said}; make one with .* check the path"):
            zm.open(url)
        with pytest.raises(ObjectNotFoundError, match=f"there is no object 'a' in .*{said}"):
            from_url(url).get("a")
        assert not zm.exists(url)
    assert file.read_bytes() == b""


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    data = bytes(range(100))
    storage.create("a", data)
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, n, start: pread(fd, min(n, 7), start))
    assert storage.get("a") == data
    assert storage.get("a", 3, 50) == data[3:53]
    assert storage.get("a", 90, 50) == data[90:]
    assert storage.get_ranges("a", [(0, 30), (95, 9)]) == [data[:30], data[95:]]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    storage.create("a", bytes(range(100)))
    assert storage.get("a") == bytes(range(100))


def test_a_range_is_read_without_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    storage.create("a", bytes(1_000_000))
    read: list[int] = []
    pread = os.pread

    def counted(fd: int, length: int, start: int) -> bytes:
        data = pread(fd, length, start)
        read.append(len(data))
        return data

    monkeypatch.setattr(os, "pread", counted)
    storage.get("a", 500_000, 4096)
    assert read == [4096]


# --- systems whose fsync stops at the drive ---------------------------------------------------


class _Flushes:
    """Stands for the calls of such a system, and says which file or folder each was about."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refusal: int | None = None) -> None:
        self.calls: list[tuple[str, str]] = []
        self.refusal = refusal
        monkeypatch.setattr(disk_module, "_F_FULLFSYNC", 51)
        monkeypatch.setattr(fcntl, "fcntl", self._fcntl)
        monkeypatch.setattr(os, "fsync", lambda fd: self._note("fsync", fd))

    def _fcntl(self, fd: int, number: int) -> int:
        assert number == 51
        self._note("full", fd)
        if self.refusal is not None:
            raise OSError(self.refusal, os.strerror(self.refusal))
        return 0

    def _note(self, call: str, fd: int) -> None:
        folder = stat.S_ISDIR(os.fstat(fd).st_mode)
        self.calls.append((call, "folder" if folder else "file"))


def test_where_the_system_can_flush_the_drive_it_is_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path)
    storage.create("a", b"1")
    flushes = _Flushes(monkeypatch)
    storage.put("a", b"2")
    storage.sync(["a"])
    assert flushes.calls == [("full", "file"), ("full", "folder")] * 2


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.EINVAL, errno.ENOTTY])
def test_a_filesystem_that_cannot_flush_the_drive_gets_a_plain_fsync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    storage = LocalStorage(tmp_path)
    storage.create("a", b"1")
    flushes = _Flushes(monkeypatch, number)
    storage.put("a", b"2")
    assert flushes.calls == [(c, of) for of in ("file", "folder") for c in ("full", "fsync")]


def test_a_drive_that_fails_to_flush_is_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path)
    flushes = _Flushes(monkeypatch, errno.EIO)
    with pytest.raises(StorageError, match="the disk reports a fault"):
        storage.put("a", b"2")
    assert flushes.calls == [("full", "file")]


# --- temporary files -------------------------------------------------------------------------


def test_without_anonymous_files_there_is_a_fallback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[int] = []
    real = os.open

    def open_without_tmpfile(
        path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            refused.append(flags)
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", open_without_tmpfile)
    storage = LocalStorage(tmp_path)
    assert storage.create("a", b"1")
    assert not storage.create("a", b"2")
    assert storage.cas("a", b"3", storage.get_tagged("a").token) is not None
    assert refused
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "a"]


@pytest.mark.parametrize("anonymous", [True, False])
def test_stale_temporary_files_do_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anonymous: bool
) -> None:
    stale = [tmp_path / f".tmp-{os.getpid()}-{i}" for i in range(3)]
    for path in stale:
        path.write_bytes(b"half an obj")
    monkeypatch.setattr(disk_module, "_COUNTER", itertools.count())
    storage = LocalStorage(tmp_path, disk=PosixDisk(anonymous=anonymous))
    storage.put("a", b"1")
    assert storage.create("b", b"2")
    assert [(info.key, storage.get(info.key)) for info in storage.list()] == [
        ("a", b"1"),
        ("b", b"2"),
    ]
    assert {path.read_bytes() for path in stale} == {b"half an obj"}


def test_what_no_key_can_name_is_not_listed(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.create("a", b"1")
    for name in ("with space", ".hidden", "ü", "folder with space/a", ".git/config"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    os.mkfifo(tmp_path / "pipe")
    assert [info.key for info in storage.list()] == ["a"]
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert [info.key for info in LocalStorage(tmp_path, follow_links=True).list()] == ["a"]


# --- the lock --------------------------------------------------------------------------------

HOLDER = """
import os, pickle, sys, threading, time
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.disk import PosixDisk

locked = threading.Event()
class Disk(PosixDisk):
    def rename(self, temp, path):
        locked.set()
        threading.Event().wait()

storage = LocalStorage(sys.argv[1], disk=Disk())
threading.Thread(target=storage.put, args=("a", b"1"), daemon=True).start()
locked.wait()
how, child = sys.argv[2], 0
if how != "alone":
    heard, say = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(say, b".")
        time.sleep(0 if how == "child ends" else 60)
        os._exit(0)
    os.read(heard, 1)  # it has closed what it must not keep
if how == "child ends":
    os.waitpid(child, 0)
print(child, flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def _holder(root: Path, how: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that holds the lock, and the number of its child or 0."""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", HOLDER, str(root), how],
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        try:
            assert holder.stdout is not None
            yield holder, int(holder.stdout.readline())
        finally:
            holder.kill()


def _is_locked(root: Path) -> bool:
    fd = os.open(root / ".lock", os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


@pytest.mark.parametrize("how", ["alone", "child stays"])
def test_a_killed_holder_frees_the_lock(tmp_path: Path, how: str) -> None:
    with _holder(tmp_path, how) as (holder, child):
        try:
            assert _is_locked(tmp_path)
            holder.kill()
            holder.wait()
            assert not _is_locked(tmp_path)
            assert LocalStorage(tmp_path).cas("a", b"2", None) is not None
        finally:
            if child:
                os.kill(child, signal.SIGKILL)


def test_a_child_that_ends_does_not_free_its_parents_lock(tmp_path: Path) -> None:
    with _holder(tmp_path, "child ends") as (_, child):
        assert child
        assert _is_locked(tmp_path)


def test_the_lock_is_free_after_success_and_failure(tmp_path: Path) -> None:
    refusing = _RefusingDisk("rename", errno.EIO)
    storage = LocalStorage(tmp_path, disk=refusing)
    with pytest.raises(StorageError):
        storage.put("a", b"1")
    assert not _is_locked(tmp_path)
    refusing.armed = False
    storage.put("a", b"1")
    assert not _is_locked(tmp_path)


INTERRUPTED = """
import contextlib, fcntl, sys
from zarr_manifests.storage import locks

path, n, interrupted = sys.argv[1], 0, True

def trace(frame, event, _):
    global left
    if frame.f_code.co_filename not in (locks.__file__, contextlib.__file__):
        return None
    if event == "line":
        left -= 1
        if not left:
            raise KeyboardInterrupt
    return trace

def hold():
    if sys.argv[2] == "block":
        with locks.exclusive(path):
            pass
        return
    turn = locks.FileTurn(path)
    try:
        turn.take()
    finally:
        turn.end()

while interrupted:
    n, interrupted = n + 1, False
    left = n
    try:
        sys.settrace(trace)
        hold()
    except KeyboardInterrupt:
        interrupted = True
    sys.settrace(None)
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if it is held
print(n)
"""


@pytest.mark.parametrize("how", ["block", "turn"])
def test_wherever_an_interrupt_comes_the_lock_is_free_after_it(tmp_path: Path, how: str) -> None:
    path = tmp_path / ".lock"
    path.touch()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERRUPTED, str(path), how],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 10


def test_a_put_and_a_delete_wait_for_the_swap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, go_on, waiting = threading.Event(), threading.Event(), threading.Semaphore(0)
    real = fcntl.flock

    def flock(file: Any, operation: int) -> None:
        try:
            real(file, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting.release()
            real(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)

    class Disk(PosixDisk):
        def rename(self, temp: Temp, path: str) -> None:
            inside.set()
            go_on.wait()
            super().rename(temp, path)

    storage = LocalStorage(tmp_path)
    token = storage.cas("a", b"1", None)
    slow = LocalStorage(tmp_path, disk=Disk())
    swap = threading.Thread(target=slow.cas, args=("a", b"2", token))
    swap.start()
    inside.wait()
    others = [
        threading.Thread(target=storage.put, args=("a", b"3")),
        threading.Thread(target=storage.delete_many, args=(["a"],)),
    ]
    for thread in others:
        thread.start()
        assert waiting.acquire(timeout=60)
    assert storage.get("a") == b"1"  # readers do not wait
    go_on.set()
    for thread in (swap, *others):
        thread.join()
    assert _found(storage, "a") in (None, b"3")


def test_only_what_is_large_and_not_durable_is_begun_early(tmp_path: Path) -> None:
    calls: list[str] = []

    class Disk(PosixDisk):
        def begin_sync(self, fd: int) -> None:
            calls.append(f"begin {os.fstat(fd).st_size}")
            super().begin_sync(fd)

        def fsync_file(self, fd: int) -> None:
            calls.append(f"fsync {os.fstat(fd).st_size}")
            super().fsync_file(fd)

    storage, large = LocalStorage(tmp_path, disk=Disk()), bytes(200_000)
    storage.create("a/large", large, durable=False)
    storage.create("a/small", b"1", durable=False)
    storage.create("a/both", large)
    storage.sync(["a/large", "a/small"])  # begun or not, it takes its fsync
    assert calls == ["begin 200000", "fsync 200000", "fsync 200000", "fsync 1"]


# --- places ----------------------------------------------------------------------------------

MOUNTS = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
31 27 0:30 / /net rw,relatime shared:2 master:3 - nfs4 server:/net rw
32 31 0:31 / /net/me/my\\040data rw - xfs /dev/vdb rw
33 27 0:32 / /mnt rw - ext4 /dev/vdc rw
34 27 0:33 / /mnt rw - fuse.sshfs me@there: rw
35 27 0:34 / /mnt2 rw - 9p share rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/data", "ext4"),
        ("/", "ext4"),
        ("/net", "nfs4"),
        ("/net/me/x", "nfs4"),
        ("/net/me/my data/x", "xfs"),
        ("/net/me/my data2", "nfs4"),
        ("/nets", "ext4"),
        ("/mnt/x", "fuse.sshfs"),
        ("/mnt2/x", "9p"),
    ],
)
def test_filesystem_type(path: str, kind: str) -> None:
    assert filesystem_type(path, MOUNTS) == kind


def test_links_are_followed_to_the_filesystem(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/net/me")
    assert filesystem_type(f"{tmp_path}/link/new", MOUNTS) == "nfs4"


@pytest.mark.parametrize(
    ("kind", "remote"),
    [
        *((kind, True) for kind in ("nfs", "nfs4", "cifs", "smb3", "fuse", "fuse.s3fs", "9p")),
        *((kind, False) for kind in ("ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "")),
    ],
)
def test_which_filesystems_are_remote(
    kind: str, remote: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_module, "filesystem_type", lambda path, mounts: kind)
    assert is_remote_filesystem("/data") == (kind if remote else None)


@pytest.mark.usefixtures("network_disk")
def test_remote_filesystems_are_for_reading_unless_forced(tmp_path: Path) -> None:
    LocalStorage(tmp_path, force=True).create("a", b"1")
    storage = LocalStorage(tmp_path)
    assert storage.get("a") == b"1"
    assert [info.key for info in storage.list()] == ["a"]
    for write in (*WRITES.values(), lambda storage: storage.delete_many(["a"])):
        with pytest.raises(UnsupportedStorageError, match=r"nfs4 filesystem.*force=True"):
            write(storage)
    forced = LocalStorage(tmp_path, force=True)
    assert forced.create("b", b"2")
    assert pickle.loads(pickle.dumps(forced)).create("c", b"3")
    with pytest.raises(UnsupportedStorageError):
        pickle.loads(pickle.dumps(storage)).create("d", b"4")


def test_an_object_is_a_plain_file_of_its_bytes(tmp_path: Path) -> None:
    LocalStorage(tmp_path).create("chunks/s/1", b"12")
    assert (tmp_path / "chunks" / "s" / "1").read_bytes() == b"12"


@pytest.mark.parametrize("path", ["", "a\0b", "a\ud800b"])
def test_what_can_be_no_path_is_refused(path: str) -> None:
    with pytest.raises(InvalidArgumentError, match="is not the path of a folder"):
        LocalStorage(path)


@pytest.mark.parametrize("name", ["", "a\0b", "\ud800", "../a", "a/b", "\u00e9"])
def test_a_turn_is_named_by_letters(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="names are letters"):
        LocalStorage(tmp_path).turn(name)
