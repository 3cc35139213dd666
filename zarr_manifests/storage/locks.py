"""Lock files, held against other threads and other processes.

Invariants: a lock ends with the process that holds it, whatever becomes of that process, and with
the block that holds it, wherever an interrupt comes; a forked child holds none of its parent's; the
files stay where they are, since a lock on a file that has lost its name excludes nobody.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import weakref
from collections.abc import Iterator
from io import FileIO

from zarr_manifests.errors import StorageError
from zarr_manifests.storage.files import explained, open_regular

__all__ = ["FileTurn", "LockFile", "exclusive"]

# A forked child shares its parent's open files, and a lock lasts until the last of them is
# closed: a child that outlives a killed parent would keep it. So a child closes them (and does
# not unlock, which would unlock the parent's). No fork may come between the opening of a file
# and its entry here. An interrupt may come between any two steps, so nothing but those who hold a
# lock keeps its file, which is closed with the last of them.
_held: set[weakref.ref[FileIO]] = set()
_fork_guard = threading.RLock()


def _close_inherited() -> None:
    for file in list(_held):
        if (held := file()) is not None:
            held.close()
    _held.clear()
    _fork_guard.release()


os.register_at_fork(
    before=_fork_guard.acquire,
    after_in_parent=_fork_guard.release,
    after_in_child=_close_inherited,
)


@contextlib.contextmanager
def exclusive(path: str) -> Iterator[None]:
    """Hold the lock file at `path`, as soon as nobody else does."""
    file = _opened(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        _close(file)


class LockFile:
    """A lock file that is asked for again and again until it is free, without waiting for it.

    Raises
    ------
    OSError
        If there can be no such file.
    """

    __slots__ = ("_file", "_path")

    def __init__(self, path: str) -> None:
        self._path, self._file = path, _opened(path)

    def take(self) -> bool:
        """Hold it, unless somebody else does; whether it is held.

        Raises
        ------
        StorageError
            If the system refuses.
        """
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise StorageError(explained(error, "lock", self._path)) from error
        return True

    def end(self) -> None:
        """Hold it and ask for it no more."""
        _close(self._file)


class FileTurn:
    """A turn at what the lock file at `path` stands for.

    Who has asked in vain tries to be next, by a lock file beside it, which one of those who wait
    can be. So one asks often, and the turn is taken at once when it ends; the others need not.

    Raises
    ------
    OSError
        If there can be no such file.
    """

    __slots__ = ("_lock", "_next", "_path", "is_next")

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = LockFile(path)
        self._next: LockFile | None = None
        self.is_next = False

    def take(self) -> bool:
        """Have it, unless somebody else does; whether it is had."""
        if self._lock.take():
            self._leave_line()
            return True
        if self.is_next:
            return False
        with contextlib.suppress(OSError):  # who cannot be next asks all the same, if not often
            if self._next is None:
                self._next = LockFile(f"{self._path}-next")
            self.is_next = self._next.take()
        return False

    def end(self) -> None:
        """Have it and wait for it no more."""
        self._leave_line()
        self._lock.end()

    def _leave_line(self) -> None:
        self.is_next = False
        if self._next is not None:
            self._next.end()
            self._next = None


def _opened(path: str) -> FileIO:
    with _fork_guard:
        file = FileIO(path, "ab", opener=_open)
        _held.add(weakref.ref(file, _held.discard))
    return file


def _open(path: str, flags: int) -> int:
    try:
        return open_regular(path, flags)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        # Of no storage, whatever it may follow: a lock lies where the objects do.
        raise OSError(errno.ENXIO, f"the lock file {path} is a symbolic link") from error


def _close(file: FileIO) -> None:
    try:
        with _fork_guard:
            if not file.closed:  # as a forked child has
                with contextlib.suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_UN)  # now, should a child still have the file open
                file.close()
    finally:
        file.close()
