"""What is stored at a place without a repository, and which repository the place lies in.

Only used for error messages. A local disk is asked for a few names, any other storage by two
requests.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from urllib.parse import unquote, urlsplit

from zarr_manifests.errors import ManifestsError
from zarr_manifests.format.envelope import MAGIC
from zarr_manifests.format.root import CLONING_KEY, ROOT_KEY
from zarr_manifests.storage.protocol import ReadableStorage

__all__ = ["around", "instead"]

_DOCUMENTS = ("zarr.json", ".zgroup", ".zarray", ".zmetadata")


def instead(storage: ReadableStorage) -> str | None:
    """Describe what is stored there instead, and how to open it; None if nothing is known."""
    outer = around(storage)
    if outer is not None:
        return (
            f"it lies inside the repository {outer}, whose groups are not folders: open that, and "
            "name the group by group="
        )
    with contextlib.suppress(ManifestsError):  # unknown counts as no
        storage.head(CLONING_KEY)
        return "an unfinished clone lies there; clone again, which continues"
    if _is_plain_zarr(storage):
        return (
            "a plain Zarr store lies there, which xr.open_zarr and zarr.open_group open. If there "
            "was a repository, something like to_zarr(mode='w') has deleted it, and only a backup "
            "has it"
        )
    return None


def around(storage: ReadableStorage) -> Path | None:
    """The folder of a repository that contains the place; only local disks are checked."""
    folder = _folder(storage)
    for outer in folder.parents if folder is not None else ():
        with contextlib.suppress(OSError), (outer / ROOT_KEY).open("rb") as file:
            if file.read(len(MAGIC)) == MAGIC:
                return outer
    return None


def _is_plain_zarr(storage: ReadableStorage) -> bool:
    folder = _folder(storage)
    if folder is not None:
        return any((folder / name).is_file() for name in _DOCUMENTS)
    with contextlib.suppress(ManifestsError):  # unknown counts as no
        storage.head(_DOCUMENTS[0])
        return True
    return False


def _folder(storage: ReadableStorage) -> Path | None:
    url = urlsplit(storage.url)
    return Path(unquote(url.path)) if url.scheme == "file" else None
