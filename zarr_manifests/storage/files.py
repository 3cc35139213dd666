"""Opening files: regular ones only, without waiting, and not through forbidden links.

A folder's owner may have put a named pipe, a device or a symbolic link where a file should be.
Opening a pipe would wait for a writer, a device may never end, and a link may lead to any file on
the machine. So files are opened here, and checked before anything is read. Errors of the system
become errors of this package, which say what to do.
"""
# Paths are plain strings here, since pathlib costs as much as the system calls:
# ruff: noqa: PTH112, PTH118, PTH120

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import Final

from zarr_manifests.errors import (
    ManifestsError,
    ObjectNotFoundError,
    StorageError,
    StorageFullError,
)

__all__ = [
    "check_folders",
    "explained",
    "file_instead",
    "link_refused",
    "open_below",
    "open_inside",
    "open_regular",
    "read_error",
    "reading",
    "translated",
]

_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
# A folder on the way need not be readable.
_FOLDER: Final = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_HINTS: Final = {
    errno.EACCES: "check its owner and permissions",
    errno.EPERM: "check its owner and permissions",
    errno.EROFS: "the filesystem is mounted read-only",
    errno.ELOOP: "put the file or the folder itself there; or, if the link is meant, open the "
    "storage with follow_links=True, as from_url(path, follow_links=True) does",
    errno.ENXIO: "move it away",
    errno.EISDIR: "a folder stands where an object should be; move it away",
    errno.ENOTDIR: "a file stands where a folder should be; move it away",
    errno.EMFILE: "too many files are open; raise `ulimit -n`",
    errno.ENFILE: "too many files are open on this machine",
    errno.EIO: "the disk reports a fault; see the system's log",
    errno.ENOENT: "its folder vanished meanwhile; is something else deleting there?",
}


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


def open_below(root: str, key: str, *, follow_links: bool = False) -> int:
    """Open the regular file `key` below the folder `root` for reading; return its descriptor.

    The root may be a link or lie below one. Without `follow_links`, each folder below it is opened
    separately without following links, so a link put there in the meantime is refused too.

    Raises
    ------
    OSError
        As `open_regular`.
    """
    path = f"{root.rstrip('/')}/{key}"
    if follow_links or "/" not in key:
        return open_regular(path, follow_links=follow_links)
    at = _opened_folder(root, key)
    try:
        return open_regular(key.rpartition("/")[2], dir_fd=at, named=path)
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


def _opened_folder(root: str, key: str) -> int:
    """Open the folder that the object is in, and return its descriptor."""
    at, path = os.open(root or "/", _FOLDER), root.rstrip("/")
    try:
        for name in key.split("/")[:-1]:
            path = f"{path}/{name}"
            above, at = at, _opened_inside(at, name, path)
            os.close(above)  # last: after an interrupt it would be closed again
    except BaseException:
        os.close(at)
        raise
    return at


def _opened_inside(at: int, name: str, path: str) -> int:
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=at)
    except OSError as error:
        if error.errno == errno.ELOOP or (
            error.errno == errno.ENOTDIR and stat.S_ISLNK(os.lstat(name, dir_fd=at).st_mode)
        ):
            raise link_refused(path) from error
        raise


def check_folders(root: str, *keys: str) -> None:
    """Check that no folder between the root and one of the objects is a link.

    Raises
    ------
    OSError
        With `ELOOP` if one is.
    """
    for folder in dict.fromkeys(key.rpartition("/")[0] for key in keys):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.close(_opened_folder(root, f"{folder}/"))


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
