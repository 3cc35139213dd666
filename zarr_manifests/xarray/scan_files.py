"""Files that stay where they are: their chunks as references, found by kerchunk or Zarr.

A file becomes a repository in memory, whose arrays have virtual chunks. So its values are read, and
its references handed on, like those of any other repository.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from zarr.core.sync import sync

from zarr_manifests import moving, repositories
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.session import Session
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import ManifestStore
from zarr_manifests.virtual.containers import VirtualContainer

__all__ = ["array_document", "codecs_of", "scan"]

_NEEDED: Final = (
    "references to netCDF, HDF5 and GRIB files are found by kerchunk, and {what} is not installed: "
    'pip install "zarr-manifests[kerchunk]", and h5py for HDF5 and netCDF-4, or '
    '"zarr-manifests[grib]" for GRIB, on every worker'
)


def scan(path: str, kind: str, containers: Mapping[str, VirtualContainer]) -> Session:
    """Return a session in which the chunks of a local file are virtual.

    Parameters
    ----------
    path : str
        The file, or the folder of a Zarr store.
    kind : str
        `netcdf`, `hdf5`, `zarr` or `grib`.
    containers : mapping of str to VirtualContainer
        The folders whose files may be read.

    Raises
    ------
    ImportError
        If a package that is needed is not installed.
    InvalidArgumentError
        If a GRIB file has several messages of one variable.
    """
    repository = repositories.create(MemoryStorage(), virtual_containers=containers)
    if kind == "zarr":
        moving.import_zarr(repository, Path(path))
    else:
        moving.import_kerchunk(repository, _references(path, kind))
    return repository.readonly_session()


def _references(path: str, kind: str) -> dict[str, Any]:
    with Path(path).open("rb") as file:
        classic = file.read(3) == b"CDF"
    try:
        if kind == "grib":
            return _messages(path)
        if classic:
            from kerchunk.netCDF3 import NetCDF3ToZarr

            scanner = NetCDF3ToZarr(path, inline_threshold=0)
            try:
                return dict(scanner.translate())
            finally:
                scanner.fp.close()
        from kerchunk.hdf import SingleHdf5ToZarr

        with Path(path).open("rb") as file:
            return dict(SingleHdf5ToZarr(file, path, inline_threshold=0).translate())
    except ImportError as error:
        raise ImportError(_NEEDED.format(what=error.name or "a part of it")) from error


def _messages(path: str) -> dict[str, Any]:
    """The references of all messages of a GRIB file, of which each has its own variable."""
    from kerchunk.grib2 import scan_grib

    found: dict[str, Any] = {}
    for message in scan_grib(path):
        refs = message["refs"]
        for key, ref in refs.items():
            name, _, rest = key.partition("/")
            if rest == "0":  # where kerchunk puts the only chunk of any array that it copies
                axes = len(json.loads(refs[f"{name}/.zarray"])["shape"])
                key = f"{name}/{'.'.join('0' * max(axes, 1))}"
            if rest[:1].isdigit() and found.setdefault(key, ref) != ref:
                raise InvalidArgumentError(
                    f"there are several messages of {name!r} in it: split the file, or copy it "
                    "with open=<a function that makes a dataset of it>"
                )
            found.setdefault(key, ref)
    return {"version": 1, "templates": {"u": path}, "refs": found}


def array_document(store: ManifestStore, path: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the content of an array's metadata document."""
    for name in ("zarr.json", ".zarray"):
        found = sync(store.get(f"{path}/{name}"))
        if found is not None:
            return name, json.loads(found.to_bytes())
    raise InvalidArgumentError(f"there is no array {path!r}")


def codecs_of(store: ManifestStore, path: str, ndim: int) -> str:
    """Return how the chunks of an array are encoded, as text to compare and to show.

    An array of fewer than `ndim` axes counts as one row of an array with one more.
    """
    name, document = array_document(store, path)
    if name == ".zarray":
        chunks, dtype = document["chunks"], document["dtype"]
        keys: tuple[str, ...] = ("order", "filters", "compressor")
    else:
        chunks = document["chunk_grid"]["configuration"]["chunk_shape"]
        dtype, keys = document["data_type"], ("codecs",)
    chunks = [1] * (ndim - len(chunks)) + chunks
    rest = ", ".join(f"{key} {json.dumps(document.get(key))}" for key in keys)
    return f"{tuple(chunks)} of {dtype}, {rest}"
