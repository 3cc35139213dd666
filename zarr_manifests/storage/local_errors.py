"""Errors of the system about objects in a local folder, translated to errors of this package."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from zarr_manifests.error_cases import ObjectNotFoundError, StorageFullError
from zarr_manifests.errors import ManifestsError, StorageError
from zarr_manifests.storage.files import explained

# Paths are plain strings here, since pathlib costs as much as the system calls:
# ruff: noqa: PTH112, PTH118, PTH120

__all__ = ["file_instead", "read_error", "translated"]


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
