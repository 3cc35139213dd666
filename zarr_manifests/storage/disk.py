"""The system calls by which a local storage changes the disk, and its lock files.

A new object is written to a temporary file and gets its name only when it is complete, by `link`
(fails if the name is taken) or `rename` (replaces). The name of a temporary file starts with
`.tmp-`, which no key can.

On macOS an fsync ends when the drive has the bytes, possibly in a cache that loses them with the
power. `F_FULLFSYNC` reaches the disk, and is used wherever the filesystem supports it.

`LocalStorage` decides when to fsync, not this module. A subclass can record, drop or fail calls.

Invariants of lock files: a lock is exclusive among threads and processes. It ends with its process,
however that ends, and with the block that holds it. A forked child holds none of its parent's
locks. Lock files are never removed, since a lock on a file without a name excludes nobody.
"""
# Paths are plain strings here, since pathlib costs as much as the system calls:
# ruff: noqa: PTH102, PTH104, PTH106, PTH108, PTH110, PTH116, PTH120, PTH123

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import threading
from collections.abc import Iterator
from io import FileIO
from weakref import WeakSet

from zarr_manifests.errors import StorageError
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage.files import explained, open_regular

__all__ = [
    "TEMP_PREFIX",
    "FileTurn",
    "PosixDisk",
    "Temp",
    "exclusive",
    "network_filesystem",
]

TEMP_PREFIX = ".tmp-"
_F_FULLFSYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)  # only macOS has it
# The errors of a filesystem without it. Other errors are real, and fsync is then not repeated:
# a second one succeeds although data was lost.
_NO_FULLFSYNC = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY, errno.ENOSYS}
_NETWORK = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|fuse|fuse\..*|fuseblk|9p|virtiofs|ceph|lustre|afs|glusterfs"
    r"|beegfs|gpfs|orangefs|pvfs2|vboxsf|prl_fs|ncpfs|coda|davfs|acfs|pohmelfs"
)


class Temp:
    """A temporary file being written: its descriptor, and its path, None once it is renamed."""

    def __init__(self, fd: int, path: str) -> None:
        self.fd = fd
        self.path: str | None = path


class PosixDisk:
    """The calls that change a disk; a subclass may record, drop or fail them."""

    def open_temp(self, directory: str) -> Temp:
        """Open a new temporary file in `directory` for writing."""
        path = f"{directory}/{TEMP_PREFIX}{SYSTEM.random_bytes(8).hex()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return Temp(os.open(path, flags, 0o666), path)

    def write(self, temp: Temp, data: bytes | memoryview) -> None:
        """Write all of `data` to the file."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(temp.fd, rest) :]

    def fsync_file(self, fd: int) -> None:
        """Flush the bytes of an open file to the disk."""
        _fsync(fd)

    def fsync_dir(self, directory: str) -> None:
        """Flush the names in a folder to the disk."""
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _fsync(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a filesystem without fsync for folders
                raise
        finally:
            os.close(fd)

    def mkdir(self, directory: str) -> None:
        """Make a folder; its parent exists."""
        os.mkdir(directory)

    def rmdir(self, directory: str) -> None:
        """Remove a folder; `OSError` if anything is in it."""
        os.rmdir(directory)

    def link(self, temp: Temp, path: str) -> None:
        """Also give the temporary file the name `path`; `FileExistsError` if it is taken."""
        assert temp.path is not None
        os.link(temp.path, path)

    def rename(self, temp: Temp, path: str) -> None:
        """Give the temporary file the name `path`, replacing an existing file."""
        assert temp.path is not None
        os.rename(temp.path, path)
        temp.path = None

    def unlink(self, path: str) -> None:
        """Remove the name `path`."""
        os.unlink(path)


def _fsync(fd: int) -> None:
    if _F_FULLFSYNC is None:
        os.fsync(fd)
        return
    try:
        fcntl.fcntl(fd, _F_FULLFSYNC)
    except OSError as error:
        if error.errno not in _NO_FULLFSYNC:
            raise
        os.fsync(fd)


def network_filesystem(path: str) -> str | None:
    """The type of the filesystem that `path` is or would be on if it is a network or FUSE one.

    None for others, such as `ext4`, and always on systems other than Linux.
    """
    while not os.path.exists(path):
        path = os.path.dirname(path)
    device = os.stat(path).st_dev
    with contextlib.suppress(FileNotFoundError), open("/proc/self/mountinfo", "rb") as mounts:
        for line in mounts:
            fields = os.fsdecode(line).split(" ")
            kind = fields[fields.index("-") + 1]
            if fields[2] == f"{os.major(device)}:{os.minor(device)}" and _NETWORK.fullmatch(kind):
                return kind
    return None


# --- lock files ------------------------------------------------------------------------------

# A forked child shares its parent's open files, and a lock lasts until the last copy is closed: a
# child that outlives a killed parent would keep it. So a child closes the files. (It does not
# unlock them, which would unlock the parent's.) No fork may come between the opening of a file and
# its entry here, nor while it is closed. Only the holder of a lock refers to its file, so one that
# an interrupt has left open is closed with the interrupt's traceback.
_lock_files: WeakSet[FileIO] = WeakSet()
_fork_guard = threading.RLock()


def _close_inherited() -> None:
    for file in list(_lock_files):
        file.close()
    _lock_files.clear()
    _fork_guard.release()


os.register_at_fork(
    before=_fork_guard.acquire,
    after_in_parent=_fork_guard.release,
    after_in_child=_close_inherited,
)


@contextlib.contextmanager
def exclusive(path: str) -> Iterator[None]:
    """A block that waits for the lock file at `path`, and holds it."""
    file = _lock_file(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        _close(file)


class FileTurn:
    """A turn, represented by the lock file at `path`.

    Raises
    ------
    OSError
        If the file cannot be made.
    """

    def __init__(self, path: str) -> None:
        self._path, self._file = path, _lock_file(path)

    def take(self) -> bool:
        """Try to take the turn; return whether it is held.

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
        """Release the turn, or stop waiting for it."""
        _close(self._file)


def _lock_file(path: str) -> FileIO:
    with _fork_guard:
        # Not through a link, whatever the storage follows: a lock must be where the objects are.
        file = FileIO(path, "ab", opener=open_regular)
        _lock_files.add(file)
    return file


def _close(file: FileIO) -> None:
    with _fork_guard:
        with contextlib.suppress(OSError, ValueError):  # closed already, as in a forked child
            fcntl.flock(file, fcntl.LOCK_UN)  # at once, even if a child has the file open
        file.close()
