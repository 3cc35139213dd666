"""The files of a local storage: opening them, changing the disk, and lock files.

Opening: a folder's owner may have put a named pipe, a device or a symbolic link where a file should
be. Opening a pipe would wait for a writer, a device may never end, and a link may lead to any file
on the machine. So files are opened here: regular ones only, without waiting, and not through
forbidden links; and they are checked before anything is read.

Changing the disk: a new object is written to a temporary file and gets its name only when it is
complete, by `link` (fails if the name is taken) or `rename` (replaces). The name of a temporary
file starts with `.tmp-`, which no key can. `LocalStorage` decides when to fsync, not this module. A
subclass of `PosixDisk` can record, drop or fail calls.

On macOS an fsync ends when the drive has the bytes, possibly in a cache that loses them with the
power. `F_FULLFSYNC` reaches the disk, and is used wherever the filesystem supports it.

Invariants of lock files: a lock is exclusive among threads and processes. It ends with its process,
however that ends, and with the block that holds it. A forked child holds none of its parent's
locks. Lock files are never removed, since a lock on a file without a name excludes nobody.

Errors of the system become errors of this package, which say what to do.
"""
# Paths are plain strings here, since pathlib costs as much as the system calls:
# ruff: noqa: PTH102, PTH104, PTH106, PTH108, PTH110, PTH112, PTH114, PTH116, PTH118, PTH120, PTH123

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import threading
from collections.abc import Iterator
from io import FileIO
from typing import Final, NamedTuple
from weakref import WeakSet

from zarr_manifests.errors import (
    ManifestsError,
    ObjectNotFoundError,
    StorageError,
    StorageFullError,
)
from zarr_manifests.runtime import SYSTEM

TEMP_PREFIX = ".tmp-"
_F_FULLFSYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)  # only macOS has it
# The errors of a filesystem without it. Other errors are real, and fsync is then not repeated:
# a second one succeeds although data was lost.
_NO_FULLFSYNC = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY, errno.ENOSYS}
_NETWORK = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|fuse|fuse\..*|fuseblk|9p|virtiofs|ceph|lustre|afs|glusterfs"
    r"|beegfs|gpfs|orangefs|pvfs2|vboxsf|prl_fs|ncpfs|coda|davfs|acfs|pohmelfs"
)
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
# A folder on the way need not be readable.
_FOLDER: Final = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
# Up to this size a read allocates what was asked for; beyond it checks the file's size first.
_UNCHECKED_READ_BYTES: Final = 256 * 1024
_MOST_AT_ONCE: Final = 2**30  # within what every system reads in one call
_HINTS: Final = {
    errno.EACCES: "check its owner and permissions",
    errno.EPERM: "check its owner and permissions",
    errno.EROFS: "the filesystem is mounted read-only",
    errno.ELOOP: "put the file or the folder itself there",
    errno.ENXIO: "move it away",
    errno.EISDIR: "a folder stands where an object should be; move it away",
    errno.ENOTDIR: "a file stands where a folder should be; move it away",
}


# --- opening -------------------------------------------------------------------------------------


def open_regular(
    path: str,
    flags: int = _READ,
    *,
    follow_links: bool = False,
    dir_fd: int | None = None,
    named: str | None = None,
) -> int:
    """Open a regular file; return its descriptor.

    Parameters
    ----------
    path : str
        Links among its folders are followed; the file itself must not be one.
    flags : int
        Flags to open it with; by default for reading.
    follow_links : bool
        Allow the file itself to be a link.
    dir_fd : int, optional
        The folder that the path is relative to.
    named : str, optional
        Its name in errors, by default the path.

    Raises
    ------
    OSError
        With `ELOOP` for a symbolic link, `EISDIR` for a folder, and `ENXIO` for anything else that
        is no regular file.
    """
    flags |= os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
    try:
        fd = os.open(path, flags, 0o666, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise _odd(named or path) from error
        if error.errno == errno.ELOOP and not follow_links:
            raise link_refused(named or path) from error
        raise
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise _odd(named or path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_at(fd: int, start: int, length: int | None) -> bytes:
    """Read up to `length` bytes from `start` on; fewer only at the end of the file."""
    if length is None or length > _UNCHECKED_READ_BYTES:
        rest = max(os.fstat(fd).st_size - start, 0)
        length = rest if length is None else min(rest, length)
    parts: list[bytes] = []
    while length and (data := os.pread(fd, min(length, _MOST_AT_ONCE), start)):
        parts.append(data)
        start, length = start + len(data), length - len(data)
    return b"".join(parts)


def open_below(root: str, key: str) -> int:
    """Open the regular file `key` below the folder `root` for reading; return its descriptor.

    The root may be a link or lie below one. Each folder below it is opened separately without
    following links, so a link put there in the meantime is refused too.

    Raises
    ------
    OSError
        As `open_regular`.
    """
    path = root.rstrip("/")
    if "/" not in key:
        return open_regular(f"{path}/{key}")
    at = os.open(root or "/", _FOLDER)
    try:
        for name in key.split("/")[:-1]:
            path = f"{path}/{name}"
            above, at = at, _opened_inside(at, name, path)
            os.close(above)  # last: after an interrupt it would be closed again
        name = key.rpartition("/")[2]
        return open_regular(name, dir_fd=at, named=f"{path}/{name}")
    finally:
        os.close(at)


def open_inside(root: str, path: str) -> int:
    """Open the regular file `path` below `root`, following links that stay below `root`.

    Raises
    ------
    OSError
        With `EXDEV` if it leads out of the root, else like `open_below`.
    """
    root = os.path.realpath(root, strict=True)
    inside = root.rstrip("/") + "/"
    real = os.path.realpath(inside + path, strict=True)
    if not real.startswith(inside):
        raise OSError(errno.EXDEV, f"{path} leads out of {root} through a symbolic link")
    return open_below(root, real[len(inside) :])


def _opened_inside(at: int, name: str, path: str) -> int:
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=at)
    except OSError as error:
        if stat.S_ISLNK(os.lstat(name, dir_fd=at).st_mode):
            raise link_refused(path) from error
        raise


def check_folders(root: str, *keys: str) -> None:
    """Check that no folder between the root and one of the objects is a link.

    Raises
    ------
    OSError
        With `ELOOP` if one is.
    """
    for folder in {key.rpartition("/")[0] for key in keys}:
        while folder:
            if os.path.islink(path := f"{root}/{folder}"):
                raise link_refused(path)
            folder = folder.rpartition("/")[0]


def link_refused(path: str) -> OSError:
    """The error for a symbolic link that is not followed."""
    return OSError(errno.ELOOP, f"{path} is a symbolic link")


def _odd(path: str) -> OSError:
    return OSError(errno.ENXIO, f"{path} is not a regular file, but a pipe, a device or a socket")


# --- errors ----------------------------------------------------------------------------------


def explained(error: OSError, action: str, path: str) -> str:
    """Describe an error and what to do about it."""
    hint = _HINTS.get(error.errno or 0, "see the error of the system above")
    return f"cannot {action} {path} ({error.strerror or error}): {hint}"


@contextlib.contextmanager
def translated(path: str) -> Iterator[None]:
    """A block that writes at the path, in which errors of the system become ours.

    Raises
    ------
    StorageFullError
        If there is no room left.
    StorageError
        For any other error of the system.
    """
    try:
        yield
    except ManifestsError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFullError(
                f"no room is left to write {path} ({error.strerror}): free space on that "
                "disk or raise the quota, then try again"
            ) from error
        raise StorageError(explained(error, "write", path)) from error


@contextlib.contextmanager
def reading(root: str, key: str) -> Iterator[None]:
    """A block that reads the object `key` in the folder `root`, with errors of `read_error`."""
    try:
        yield
    except ManifestsError:
        raise
    except OSError as error:
        raise read_error(error, root, key) from error


def read_error(error: OSError, root: str, key: str) -> StorageError:
    """The error to raise if the object `key` in the folder `root` could not be read."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        file = file_instead(root) if isinstance(error, NotADirectoryError) else None
        why = "" if file is None else f": {file} is a file, not a folder"
        return ObjectNotFoundError(f"there is no object {key!r} in {root}{why}")
    return StorageError(explained(error, "read", os.path.join(root, key)))


def file_instead(root: str) -> str | None:
    """The file in place of the folder, or of a folder above it; None if there is none."""
    place = root
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    return None if os.path.isdir(place) else place


# --- changing the disk -----------------------------------------------------------------------


class Temp(NamedTuple):
    """A temporary file being written: its descriptor, and its path until it is renamed."""

    fd: int
    path: str


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
        os.link(temp.path, path)

    def rename(self, temp: Temp, path: str) -> None:
        """Give the temporary file the name `path`, replacing an existing file."""
        os.rename(temp.path, path)

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
    _fork_guard.release()


os.register_at_fork(
    before=_fork_guard.acquire, after_in_parent=_fork_guard.release, after_in_child=_close_inherited
)


@contextlib.contextmanager
def exclusive(path: str) -> Iterator[None]:
    """A block that waits for the lock file at `path`, and holds it."""
    turn = FileTurn(path)
    try:
        fcntl.flock(turn.file, fcntl.LOCK_EX)
        yield
    finally:
        turn.end()


class FileTurn:
    """A turn, represented by the lock file at `path`.

    Raises
    ------
    OSError
        If the file cannot be made.
    """

    def __init__(self, path: str) -> None:
        with _fork_guard:
            # Not through a link: a lock must be where objects are.
            self.file = FileIO(path, "ab", opener=open_regular)
            _lock_files.add(self.file)

    def take(self) -> bool:
        """Try to take the turn; return whether it is held.

        Raises
        ------
        StorageError
            If the system refuses the lock.
        """
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise StorageError(explained(error, "lock", str(self.file.name))) from error
        return True

    def end(self) -> None:
        """Release the turn, or stop waiting for it."""
        with _fork_guard:
            with contextlib.suppress(OSError, ValueError):  # closed already, as in a forked child
                fcntl.flock(self.file, fcntl.LOCK_UN)  # at once, even if a child has the file open
            self.file.close()
