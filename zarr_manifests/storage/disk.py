"""The system calls by which a local storage changes the disk, in one place.

A new object is written to a temporary file and gets its name only when it is complete, by `link`
(fails if the name is taken) or `rename` (replaces). Where the system supports it, the temporary
file has no name (`O_TMPFILE`), so a killed process leaves nothing behind. Elsewhere, and just
before a rename, its name starts with `.tmp-`, which no key can.

On macOS an fsync ends when the drive has the bytes, possibly in a cache that loses them with the
power. `F_FULLFSYNC` reaches the disk, and is used wherever the filesystem supports it.

`LocalStorage` decides when to fsync, not this module. Another `Disk` can record, drop or fail calls
(see `CrashDisk` in `tests/support`).
"""
# Paths are plain strings here, since pathlib costs as much as the system calls:
# ruff: noqa: PTH102, PTH104, PTH106, PTH108, PTH112

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from zarr_manifests.storage.files import open_regular, with_room

__all__ = [
    "TEMP_PREFIX",
    "Disk",
    "PosixDisk",
    "Temp",
    "filesystem_type",
    "is_remote_filesystem",
]

TEMP_PREFIX = ".tmp-"
_COUNTER = itertools.count()
_F_FULLFSYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)  # only macOS has it
# The errors of a filesystem without it. Other errors are real, and fsync is then not repeated:
# a second one succeeds although data was lost.
_NO_FULLFSYNC = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY, errno.ENOSYS}
_NO_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL}
_REMOTE = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|fuse|fuse\..*|fuseblk|9p|virtiofs|ceph|lustre|afs|glusterfs"
    r"|beegfs|gpfs|orangefs|pvfs2|vboxsf|prl_fs|ncpfs|coda|davfs|acfs|pohmelfs"
)

_SYNC_FILE_RANGE_WRITE = 2


def _function_of_libc() -> Callable[[int, int, int, int], int] | None:
    found = getattr(ctypes.CDLL(None), "sync_file_range", None)  # only Linux has it
    if found is not None:
        found.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return found


_sync_file_range = _function_of_libc()


@dataclass(slots=True)
class Temp:
    """A temporary file being written: its descriptor, folder, and path if it has a name."""

    fd: int
    directory: str
    path: str | None


class Disk(Protocol):
    """The calls that change a disk."""

    def open_temp(self, directory: str) -> Temp:
        """Open a new temporary file for writing, on the filesystem of `directory`."""

    def write(self, temp: Temp, data: bytes | memoryview) -> None:
        """Write all of `data` to the file."""

    def begin_sync(self, fd: int) -> None:
        """Ask the system to start writing an open file, so that a later fsync waits less.

        Only a hint, where the system supports it; errors are left to the fsync.
        """

    def fsync_file(self, fd: int) -> None:
        """Flush the bytes of an open file to the disk."""

    def fsync_dir(self, directory: str) -> None:
        """Flush the names in a folder to the disk."""

    def mkdir(self, directory: str) -> None:
        """Make a folder; its parent exists."""

    def rmdir(self, directory: str) -> None:
        """Remove a folder; `OSError` if anything is in it."""

    def reserve(self, path: str, nbytes: int) -> None:
        """Make a file take at least `nbytes` of disk space; unchanged if there is not enough."""

    def link(self, temp: Temp, path: str) -> None:
        """Give the temporary file the name `path`; `FileExistsError` if it is taken."""

    def rename(self, temp: Temp, path: str) -> None:
        """Give the temporary file the name `path`, replacing an existing file."""

    def unlink(self, path: str) -> None:
        """Remove the name `path`."""


class PosixDisk:
    """The local disk, by POSIX calls.

    Parameters
    ----------
    anonymous : bool
        Use temporary files without a name where the system has them.
    """

    def __init__(self, *, anonymous: bool = True) -> None:
        self._anonymous = anonymous and hasattr(os, "O_TMPFILE") and os.path.isdir("/proc/self/fd")

    def open_temp(self, directory: str) -> Temp:
        if self._anonymous:
            try:
                flags = os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC
                fd = with_room(lambda: os.open(directory, flags, 0o666))
                return Temp(fd, directory, None)
            except OSError as error:
                if error.errno not in _NO_TMPFILE:
                    raise
        while True:
            path = _temp_path(directory)
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                fd = with_room(partial(os.open, path, flags, 0o666))
                return Temp(fd, directory, path)
            except FileExistsError:  # left by a killed process with the same number
                continue

    def write(self, temp: Temp, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(temp.fd, rest) :]

    def begin_sync(self, fd: int) -> None:
        if _sync_file_range is not None:
            _sync_file_range(fd, 0, 0, _SYNC_FILE_RANGE_WRITE)

    def fsync_file(self, fd: int) -> None:
        _fsync(fd)

    def fsync_dir(self, directory: str) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        fd = with_room(lambda: os.open(directory, flags))
        try:
            _fsync(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a filesystem without fsync for folders
                raise
        finally:
            os.close(fd)

    def mkdir(self, directory: str) -> None:
        os.mkdir(directory)

    def rmdir(self, directory: str) -> None:
        os.rmdir(directory)

    def reserve(self, path: str, nbytes: int) -> None:
        fd = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            try:
                if size < nbytes and hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(fd, 0, nbytes)
                elif size < nbytes:
                    self.write(Temp(fd, "", path), bytes(nbytes))
            except BaseException:
                os.ftruncate(fd, size)
                if not size:
                    os.unlink(path)
                raise
        finally:
            os.close(fd)

    def link(self, temp: Temp, path: str) -> None:
        if temp.path is None:
            # With a folder's descriptor, Python calls linkat, which follows the link in /proc.
            # Without it, Python calls link, which does not.
            os.link(f"/proc/self/fd/{temp.fd}", path, src_dir_fd=temp.fd, follow_symlinks=True)
        else:
            os.link(temp.path, path)

    def rename(self, temp: Temp, path: str) -> None:
        while temp.path is None:  # a rename needs a name
            name = _temp_path(temp.directory)
            try:
                PosixDisk.link(self, temp, name)
            except FileExistsError:
                continue
            temp.path = name
        os.rename(temp.path, path)
        temp.path = None

    def unlink(self, path: str) -> None:
        os.unlink(path)


def _fsync(fd: int) -> None:
    if _F_FULLFSYNC is not None:
        try:
            fcntl.fcntl(fd, _F_FULLFSYNC)
        except OSError as error:
            if error.errno not in _NO_FULLFSYNC:
                raise
        else:
            return
    os.fsync(fd)


def _temp_path(directory: str) -> str:
    return f"{directory}/{TEMP_PREFIX}{os.getpid()}-{next(_COUNTER)}"


def filesystem_type(path: str, mountinfo: str) -> str:
    """Return the type of the filesystem that `path` is or would be on.

    Parameters
    ----------
    path : str
        An absolute path; symbolic links are followed.
    mountinfo : str
        Text in the form of Linux' `/proc/self/mountinfo`.

    Returns
    -------
    str
        Such as `ext4` or `nfs4`; empty if no mount holds the path.
    """
    place = os.path.realpath(path) + "/"
    found, length = "", 0
    for line in mountinfo.splitlines():
        fields = line.split(" ")
        mount = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        mount = mount.rstrip("/") + "/"
        # A later mount on the same place hides the earlier one.
        if place.startswith(mount) and len(mount) >= length:
            found, length = fields[fields.index("-") + 1], len(mount)
    return found


def is_remote_filesystem(path: str) -> str | None:
    """Return the type of the filesystem at `path` if it is known to be a network or FUSE one.

    None otherwise, and always on systems other than Linux.
    """
    if not sys.platform.startswith("linux"):
        return None
    try:
        with with_room(
            partial(open, "/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape")
        ) as file:
            found = filesystem_type(path, file.read())
    except FileNotFoundError:  # no /proc here
        return None
    return found if _REMOTE.fullmatch(found) else None
