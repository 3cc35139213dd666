"""The local disk: order of fsyncs, crashes, full disks, locks, places that are not safe."""

import errno
import fcntl
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zarr_manifests as zm
from zarr_manifests.errors import (
    InvalidArgumentError,
    ManifestsError,
    ObjectNotFoundError,
    StorageError,
    UnsupportedStorageError,
)
from zarr_manifests.storage import disk as disk_module
from zarr_manifests.storage.disk import FileTurn, PosixDisk, Temp
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.protocol import MAX_TAGGED_BYTES

# --- disks that refuse -----------------------------------------------------------------------


class _FailingDisk(PosixDisk):
    """Fails to flush files."""

    failing = True

    def fsync_file(self, fd: int) -> None:
        if self.failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().fsync_file(fd)


def test_a_failed_sync_is_not_made_good_by_a_later_one(tmp_path: Path) -> None:
    """The system drops the pages it could not write, and the next fsync succeeds over nothing."""
    disk = _FailingDisk()
    storage = LocalStorage(tmp_path, disk=disk)
    for key in ("lost", "kept"):
        assert storage.create(key, b"1", durable=False)
    with pytest.raises(StorageError, match=os.strerror(errno.EIO)):
        storage.sync(["lost"])
    disk.failing = False
    storage.sync(["kept"])
    for again in (lambda: storage.sync(["kept", "lost"]), lambda: storage.create("lost", b"2")):
        with pytest.raises(StorageError, match=f"{tmp_path}/lost "):
            again()
    assert storage.get("lost") == b"1"
    storage.put("lost", b"2", durable=False)  # another file, of that name
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
    wrong: list[Callable[[], object]] = [
        lambda: storage.get("folder"),
        lambda: storage.get_tagged("folder"),
        lambda: storage.create("folder", b"2"),
        lambda: storage.put("folder", b"2"),
        lambda: storage.cas("folder", b"2", None),
        lambda: storage.delete_many(["folder"]),
        lambda: storage.create("file/x", b""),
        lambda: storage.put("file/x", b""),
    ]
    for call in wrong:
        with pytest.raises(StorageError, match="stands where") as error:
            call()
        assert not isinstance(error.value, ObjectNotFoundError)
    with pytest.raises(ObjectNotFoundError):
        storage.get("file/x")
    assert [info.key for info in storage.list()] == ["file", "folder/x"]


def test_a_place_that_is_a_file_is_called_that(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_bytes(b"")
    for place in (file, file / "folder/repository"):
        for call in (zm.create, zm.open):
            with pytest.raises(ManifestsError, match=f"{file} is a file, not a folder"):
                call(place)
        assert not zm.exists(place)
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


@pytest.mark.parametrize("refusal", [None, errno.ENOTSUP, errno.EIO])
def test_where_the_system_can_flush_the_drive_it_is_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int | None
) -> None:
    """A filesystem that cannot gets a plain fsync; a drive that fails is not asked again."""
    calls: list[str] = []

    def full(fd: int, number: int) -> int:
        assert number == 51
        calls.append("full")
        if refusal is not None:
            raise OSError(refusal, os.strerror(refusal))
        return 0

    storage = LocalStorage(tmp_path)
    storage.create("a", b"1")
    monkeypatch.setattr(disk_module, "_F_FULLFSYNC", 51)
    monkeypatch.setattr(fcntl, "fcntl", full)
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append("fsync"))
    if refusal == errno.EIO:
        with pytest.raises(StorageError, match="Input/output error"):
            storage.put("a", b"2")
        assert calls == ["full"]
    else:
        storage.put("a", b"2")
        assert calls == (["full"] if refusal is None else ["full", "fsync"]) * 2


def test_no_more_of_a_root_is_read_than_a_root_may_have(tmp_path: Path) -> None:
    LocalStorage(tmp_path).put("current", b"1")
    os.truncate(tmp_path / "current", 2 * MAX_TAGGED_BYTES)
    assert len(LocalStorage(tmp_path).get_tagged("current").data) == MAX_TAGGED_BYTES + 1


# --- temporary files -------------------------------------------------------------------------


def test_stale_temporary_files_do_no_harm(tmp_path: Path) -> None:
    stale = [tmp_path / f".tmp-{i}" for i in range(3)]
    for path in stale:
        path.write_bytes(b"half an obj")
    storage = LocalStorage(tmp_path)
    storage.put("a", b"1")
    assert storage.create("b", b"2")
    assert [(one.key, storage.get(one.key)) for one in storage.list()] == [("a", b"1"), ("b", b"2")]
    assert {path.read_bytes() for path in stale} == {b"half an obj"}


# --- places ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("network_disk")
def test_remote_filesystems_are_for_reading_unless_forced(tmp_path: Path) -> None:
    LocalStorage(tmp_path, force=True).create("a", b"1")
    storage = LocalStorage(tmp_path)
    assert storage.get("a") == b"1"
    assert [info.key for info in storage.list()] == ["a"]
    writes: list[Callable[[], object]] = [
        lambda: storage.create("d/a", b"1"),
        lambda: storage.put("d/a", b"1"),
        lambda: storage.cas("d/a", b"1", None),
        lambda: storage.delete_many(["a"]),
    ]
    for write in writes:
        with pytest.raises(UnsupportedStorageError, match=r"nfs4.*force=True"):
            write()
    forced = LocalStorage(tmp_path, force=True)
    assert forced.create("b", b"2")
    assert pickle.loads(pickle.dumps(forced)).create("c", b"3")


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
    try:
        for thread in others:
            thread.start()
            assert waiting.acquire(timeout=60)
        assert storage.get("a") == b"1"  # readers do not wait
    finally:
        go_on.set()
    for thread in (swap, *others):
        thread.join()
    assert [storage.get(info.key) for info in storage.list()] in ([], [b"3"])


FORKED_AMID_A_CLOSE = """
import fcntl, os, signal, sys, threading, time
from zarr_manifests.storage.disk import exclusive

path, real, closing = sys.argv[1], fcntl.flock, threading.Event()

def flock(file, operation):
    if operation == fcntl.LOCK_UN:
        closing.set()
        time.sleep(0.2)
    else:
        real(file, operation)

def hold():
    with exclusive(path):
        pass

fcntl.flock = flock
thread = threading.Thread(target=hold)
thread.start()
closing.wait()
child = os.fork()
fcntl.flock = real
if child == 0:
    signal.alarm(60)
    with exclusive(path):
        os._exit(0)
thread.join()
print(os.waitpid(child, 0)[1])
"""


def test_a_child_that_is_forked_while_a_lock_is_closed_does_not_keep_it(tmp_path: Path) -> None:
    """Else it would wait for itself, and everybody for it."""
    assert LocalStorage(tmp_path).create("a", b"1")  # which makes the lock
    command = [sys.executable, "-W", "ignore", "-c", FORKED_AMID_A_CLOSE, str(tmp_path / ".lock")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "0\n", done.stderr


FORKED_WITH_A_LOCK = """
import os, signal, sys
from zarr_manifests.storage.disk import exclusive

with exclusive(sys.argv[1]):
    if os.fork() == 0:
        sys.stdin.read()
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_child_does_not_keep_the_lock_of_a_parent_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKED_WITH_A_LOCK, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as parent:
        assert parent.wait() == -signal.SIGKILL
        turn, until_s = FileTurn(str(tmp_path / ".lock")), time.monotonic() + 30
        while not turn.take():
            assert time.monotonic() < until_s, "the child has the lock"
            time.sleep(0.01)
        turn.end()


@pytest.mark.parametrize("path", ["", "a\0b", "a\ud800b"])
def test_what_can_be_no_path_is_refused(path: str) -> None:
    with pytest.raises(InvalidArgumentError, match="is not the path of a folder"):
        LocalStorage(path)
