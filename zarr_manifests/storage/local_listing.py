"""Which objects there are in a local folder, in the order of their keys."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence

from zarr_manifests.errors import InvalidArgumentError, StorageError
from zarr_manifests.storage.files import check_folders, explained, link_refused, with_room
from zarr_manifests.storage.local_errors import file_instead, read_error
from zarr_manifests.storage.protocol import ObjectInfo, is_key

# Paths are plain strings here, since pathlib costs as much as the system calls:
# ruff: noqa: PTH118, PTH208

__all__ = ["objects_in", "stray_in"]


def objects_in(
    root: str, folder: str, prefix: str, after: str, *, follow_links: bool
) -> Iterator[ObjectInfo]:
    """Objects in `folder` (empty, or ending in a slash) of the root and below it, in key order.

    Only those whose keys start with `prefix` and sort after `after`.
    """
    if not follow_links:
        try:
            check_folders(root, folder)
        except OSError as error:
            raise read_error(error, root, folder) from error
    yield from _objects_in(root, folder, prefix, after, follow_links=follow_links)


def _objects_in(
    root: str, folder: str, prefix: str, after: str, *, follow_links: bool
) -> Iterator[ObjectInfo]:
    for name, entry in _entries(root, folder):
        key = folder + name
        if not (key.startswith(prefix) or prefix.startswith(key)):
            continue
        if not follow_links and entry.is_symlink():
            raise read_error(link_refused(entry.path), root, key)
        if name.endswith("/"):
            if key > after or after.startswith(key):
                yield from _objects_in(root, key, prefix, after, follow_links=follow_links)
        elif key.startswith(prefix) and key > after and is_key(key):
            try:
                found = entry.stat()
            except FileNotFoundError:  # deleted in the meantime
                continue
            except OSError as error:
                raise read_error(error, root, key) from error
            if stat.S_ISREG(found.st_mode):
                yield ObjectInfo(key, found.st_size, found.st_mtime_ns // 1_000_000)


def _entries(root: str, folder: str) -> Sequence[tuple[str, os.DirEntry[str]]]:
    try:
        # In key order, a folder sorts by its name with a slash.
        with with_room(lambda: os.scandir(os.path.join(root, folder))) as entries:
            return sorted(
                (entry.name + "/" if entry.is_dir() else entry.name, entry)
                for entry in entries
                if not entry.name.startswith(".")
            )
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise read_error(error, root, folder) from error


def stray_in(root: str) -> str | None:
    """The name of something in the folder that is not a valid key; None if there is nothing."""
    try:
        names = sorted(os.listdir(root))
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        raise InvalidArgumentError(
            f"objects cannot be stored in {root}: {file_instead(root)} is a file, not "
            "a folder: choose another path, or move the file away"
        ) from error
    except OSError as error:
        raise StorageError(explained(error, "read", root)) from error
    # Hidden files belong to the system or to this storage.
    return next((n for n in names if not n.startswith(".") and not is_key(n)), None)
