"""What is stored at a place without a repository, and which repository the place lies in.

Only used for error messages. A local disk is asked for a few names, any other storage by two
requests.
"""

from __future__ import annotations

import contextlib
import os
from itertools import islice
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from zarr_manifests.errors import ManifestsError
from zarr_manifests.format.envelope import MAGIC
from zarr_manifests.format.root import CLONING_KEY, ROOT_KEY
from zarr_manifests.storage.disk import open_regular
from zarr_manifests.storage.protocol import ReadableStorage

_DOCUMENTS = ("zarr.json", ".zgroup", ".zarray", ".zmetadata")
_KINDS: Final = {
    **dict.fromkeys((".nc", ".nc4", ".cdf", ".h5", ".hdf5"), "netCDF"),
    **dict.fromkeys((".grib", ".grib2", ".grb", ".grb2"), "GRIB"),
}
_LOOKED_AT: Final = 100
"""So many names in a folder are looked at."""


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
            "has it. `zm.virtual.import_zarr` and `zarr-manifests import zarr` take it into "
            "another one"
        )
    return _of_files(storage)


def around(storage: ReadableStorage) -> Path | None:
    """The folder of a repository that contains the place; only local disks are checked."""
    folder = _folder(storage)
    for outer in folder.parents if folder is not None else ():
        with contextlib.suppress(OSError):  # unknown counts as no
            there = open_regular(str(outer / ROOT_KEY), follow_links=True)
            with os.fdopen(there, "rb") as file:
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


def _of_files(storage: ReadableStorage) -> str | None:
    """How to take in files of netCDF or GRIB, if the place is one, or a folder with some."""
    folder = _folder(storage)
    if folder is None:
        return None
    files = [folder]
    with contextlib.suppress(OSError):  # unknown counts as no
        files += islice(folder.iterdir(), _LOOKED_AT)
    kind = next((kind for file in files if (kind := _KINDS.get(file.suffix.lower()))), None)
    if kind is None:
        return None
    there = f"a {kind} file" if not folder.is_dir() else f"a folder with {kind} files"
    refer = "zm.virtual.import_kerchunk" if kind == "GRIB" else "zm.virtual.write"
    return (
        f"{there} lies there, and no repository: `{refer}` refers to the data where they are, "
        "`zm.write` copies what xarray opens; give the place of a repository"
    )


def _folder(storage: ReadableStorage) -> Path | None:
    url = urlsplit(storage.url)
    return Path(unquote(url.path)) if url.scheme == "file" else None
