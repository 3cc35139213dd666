"""Lock files, exclusive among threads and processes.

Invariants: a lock ends with its process, however that ends, and with the block that holds it, even
if it is interrupted; a forked child holds none of its parent's locks; lock files are never removed,
since a lock on a file without a name excludes nobody.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import weakref
from io import FileIO
from pathlib import Path

from zarr_manifests.errors import StorageError
from zarr_manifests.storage.files import explained, open_regular

__all__ = ["FileTurn", "LockFile", "exclusive"]


# A forked child shares its parent's open files, and a lock lasts until the last copy is closed: a
# child that outlives a killed parent would keep it. So a child closes the files. (It does not
# unlock them, which would unlock the parent's.) No fork may come between the opening of a file and
# its entry here. An interrupt may come between any two steps. So only the holder of a lock refers
# to its file, which is closed with the last reference. A fork may come while a thread closes a
# file: Python's file then has no descriptor any more, and the child has it still. So a file knows
# its number, which may be another file's by then.
class _Held(FileIO):
    number: int


_held: set[weakref.ref[_Held]] = set()
_fork_guard = threading.RLock()


def _close_inherited() -> None:
    for file in list(_held):
        if (held := file()) is not None:
            with contextlib.suppress(OSError):  # it is closed already
                if os.path.samestat(os.fstat(held.number), Path(held.name).stat()):
                    os.close(held.number)
            with contextlib.suppress(OSError):
                held.close()
    _held.clear()
    _fork_guard.release()


os.register_at_fork(
    before=_fork_guard.acquire,
    after_in_parent=_fork_guard.release,
    after_in_child=_close_inherited,
)


def exclusive(path: str) -> FileIO:
    """Wait for the lock file at `path`, to hold it for a `with` block.

    The block is entered and left in C. So an interrupt leaves nothing held, not even if its
    traceback is kept, as in interactive sessions.
    """
    file = _opened(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except BaseException:
        _close(file)
        raise
    return file


class LockFile:
    """A lock file that is polled instead of waited for.

    Raises
    ------
    OSError
        If the file cannot be made.
    """

    __slots__ = ("_file", "_path")

    def __init__(self, path: str) -> None:
        self._path, self._file = path, _opened(path)

    def take(self) -> bool:
        """Try to take the lock; return whether it is held.

        Raises
        ------
        StorageError
            If the system refuses the lock.
        """
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise StorageError(explained(error, "lock", self._path)) from error
        return True

    def end(self) -> None:
        """Release the lock, or stop asking for it."""
        _close(self._file)


class FileTurn:
    """A turn, represented by the lock file at `path`.

    Of those that wait, one becomes the next by taking a second lock file. It polls often, so that
    the turn passes quickly; the others poll rarely.

    Raises
    ------
    OSError
        If the file cannot be made.
    """

    __slots__ = ("_lock", "_next", "_path", "is_next")

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = LockFile(path)
        self._next: LockFile | None = None
        self.is_next = False

    def take(self) -> bool:
        """Try to take the turn; return whether it is held."""
        if self._lock.take():
            self._leave_line()
            return True
        if self.is_next:
            return False
        with contextlib.suppress(OSError):  # without being next, it polls rarely
            if self._next is None:
                self._next = LockFile(f"{self._path}-next")
            self.is_next = self._next.take()
        return False

    def end(self) -> None:
        """Release the turn, or stop waiting for it."""
        self._leave_line()
        self._lock.end()

    def _leave_line(self) -> None:
        self.is_next = False
        if self._next is not None:
            self._next.end()
            self._next = None


def _opened(path: str) -> FileIO:
    with _fork_guard:
        file = _Held(path, "ab", opener=_open)
        file.number = file.fileno()
        _held.add(weakref.ref(file, _held.discard))
    return file


def _open(path: str, flags: int) -> int:
    try:
        return open_regular(path, flags)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        # Refused whatever the storage follows: a lock must be in the folder of the objects.
        raise OSError(errno.ENXIO, f"the lock file {path} is a symbolic link") from error


def _close(file: FileIO) -> None:
    try:
        with _fork_guard:
            if not file.closed:  # as a forked child has
                with contextlib.suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_UN)  # at once, even if a child has the file open
                file.close()
    finally:
        file.close()
