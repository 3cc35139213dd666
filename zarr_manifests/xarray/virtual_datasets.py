"""Writing VirtualiZarr's virtual datasets: references by column, loadable variables as data.

A virtual dataset has variables whose values are a `ManifestArray`: metadata, and for each chunk a
file and a byte range. These become virtual chunks. Other variables are written as by `write`.

Invariant: an append or a write to a region never changes how existing chunks decode: what differs
in type, codecs, chunks or encoding is refused by name, before anything is written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

import numpy as np
import xarray as xr
from xarray.backends.zarr import encode_zarr_attr_value
from zarr.core.buffer import default_buffer_prototype

from zarr_manifests import repositories
from zarr_manifests.engine.edit.move_nodes import node_path
from zarr_manifests.engine.edit.workspace import Workspace
from zarr_manifests.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    VirtualContainerError,
)
from zarr_manifests.format.chunk_table import VirtualRef
from zarr_manifests.grid import Box, IndexArray
from zarr_manifests.ids import crc32c
from zarr_manifests.keys import V3_DOCUMENT, directory, join
from zarr_manifests.planning.tables.merge import unset_at
from zarr_manifests.repository import Repository
from zarr_manifests.session import Session
from zarr_manifests.storage.protocol import Version
from zarr_manifests.store import ManifestStore, workspace_of
from zarr_manifests.virtual.virtual_files import VirtualReader
from zarr_manifests.xarray.backend import Location
from zarr_manifests.xarray.encoding import located
from zarr_manifests.xarray.fit import DECODED_BY
from zarr_manifests.xarray.parts import DatasetPart, Region, WriteMode, parts_of
from zarr_manifests.xarray.stored_group import is_virtual
from zarr_manifests.xarray.writers import prepare, put

__all__ = ["VirtualAccessor", "write_virtual"]

type Validation = Literal["auto", "etag", "modified", "none"]

_VALIDATIONS: Final = ("auto", "etag", "modified", "none")
_FIXED: Final = ("data_type", "chunk_grid", "codecs", "fill_value", "dimension_names")
_SLACK_MS: Final = 1000
_GROUP: Final[Mapping[str, Any]] = {"zarr_format": 3, "node_type": "group", "attributes": {}}


def write_virtual(
    vds: xr.Dataset | xr.DataTree,
    location: ManifestStore | Location,
    *,
    group: str | None = None,
    mode: WriteMode | None = None,
    append_dim: Hashable | None = None,
    region: Region | None = None,
    validate: Validation = "auto",
    checksums: bool = False,
    check: bool = True,
    message: str = "write virtual references",
    branch: str = "main",
) -> str | None:
    """Write a virtual dataset of VirtualiZarr: references to its chunks, and loadable variables.

    Parameters
    ----------
    vds : Dataset or DataTree
        From `virtualizarr.open_virtual_dataset` and the like.
    location : ManifestStore, str, path, Storage or Repository
        The store of a session, which is not committed; or where the repository is, or is to be
        made, for one commit.
    group : str, optional
        Path of the group; by default the root.
    mode : {"w", "w-", "a", "r+"}, optional
        `w-`, the default, writes where nothing is; `w` replaces the group and all below it; `a`
        writes over existing variables and adds others; `r+` writes over existing ones only.
    append_dim : hashable, optional
        Append along this dimension; if the group has no data yet, it is created.
    region : mapping of str to slice or "auto", or "auto", optional
        Write to whole chunks of existing arrays, by dimension. With `"auto"`, where the existing
        coordinate has the values of the dataset's; a dimension without one is written whole.
    validate : {"auto", "etag", "modified", "none"}
        How a later change of a file is noticed. `etag` and `modified` note what the file has now;
        it must lie below a container. `auto` notes either where the file lies below a container,
        and otherwise that the file must not change from now on. `none` notes nothing.
    checksums : bool
        Read all chunks now, and note the checksum of each.
    check : bool, default True
        As in `write`, of values that are loaded.
    message, branch : str
        Of the commit.

    Returns
    -------
    str or None
        The new snapshot's id; None if a store was given.

    Raises
    ------
    AlreadyExistsError
        If something is there, and neither `mode`, `append_dim` nor `region` says what to do.
    NotFoundError
        If the group or array to write to does not exist.
    InvalidArgumentError
        If what is appended does not fit what is there: another type, codec, chunk shape, encoding
        or shape, or a last chunk that is only partly filled; or values that `write` would refuse.
        Also if options exclude each other.
    VirtualContainerError
        If a file must be looked at, and lies below no container.

    Examples
    --------
    >>> import numpy as np, xarray as xr, zarr, zarr_manifests as zm
    >>> from virtualizarr.manifests import ChunkManifest, ManifestArray
    >>> made = zarr.create_array({}, shape=(4,), chunks=(4,), dtype="u1", compressors=None)
    >>> entry = {"path": "s3://bucket/winds.bin", "offset": 8, "length": 4}
    >>> array = ManifestArray(made.metadata, ChunkManifest({"0": entry}))
    >>> vds = xr.Dataset({"wind": ("x", array)})
    >>> repo = zm.create("memory://virtual-write")
    >>> snapshot_id = zm.virtual.write(vds, repo, message="refer to winds")
    >>> repo.readonly_session().store.get_virtual_refs("wind").locations
    ('s3://bucket/winds.bin',)
    """
    if not isinstance(vds, xr.Dataset | xr.DataTree):
        raise InvalidArgumentError(f"a Dataset or a DataTree is due, not {type(vds).__name__}")
    if validate not in _VALIDATIONS:
        raise InvalidArgumentError(f"validate={validate!r}: give one of {_VALIDATIONS}")
    if mode == "a-":
        raise InvalidArgumentError("mode='a-' is not for references: drop variables instead")
    top = node_path("" if group is None else group)
    how: Any = top, mode, append_dim, region, None, "error", None, check
    parts = parts_of(vds, *how, virtual=True)

    def into(target: ManifestStore | Session) -> None:
        store = target if isinstance(target, ManifestStore) else target.store
        if mode == "w":
            workspace_of(store).delete_below(directory(top))
        writes = [_Write(target, store, part, validate, checksums, check) for part in parts]
        for change in [change for write in writes for change in write.planned()]:
            change()

    if isinstance(location, ManifestStore):
        into(location)
        return None
    repo = location
    if not isinstance(repo, Repository):
        repo = repositories.open(repo, create=True)
    session = repo.writable_session(branch)
    into(session)
    return session.commit(message)


class _Write:
    """One group of a virtual dataset, on its way into a store."""

    def __init__(
        self,
        target: ManifestStore | Session,
        store: ManifestStore,
        part: DatasetPart,
        validate: Validation,
        checksums: bool,
        check: bool,
    ) -> None:
        self._target, self._store, self._ds, self._path = target, store, part.ds, part.group
        self._mode, self._append_dim, self._part = part.mode, part.append_dim, part
        self._region: dict[str, slice] | None = None
        self._validate, self._checksums, self._check = validate, checksums, check
        self._workspace: Workspace = workspace_of(store)
        self._reader = VirtualReader(self._workspace.context.containers)
        self._versions: dict[str, tuple[Version, int]] = {}

    def planned(self) -> list[Callable[[], None]]:
        """Check the dataset against what is there; what writes it, in order."""
        contents, region = self._workspace.contents, self._part.region
        old = contents.node(self._path)
        if old is not None and old.array is not None:
            raise AlreadyExistsError(f"/{self._path} is an array; a group is due")
        here = any(name != self._path for name in contents.within(self._path))
        if here and self._append_dim is None and region is None and self._mode in (None, "w-"):
            raise AlreadyExistsError(
                f"there is something at /{self._path}: say mode='w' to replace it, mode='a' to "
                "write over it, append_dim= or region="
            )
        loaded = [name for name, var in self._ds.variables.items() if not is_virtual(var)]
        if isinstance(self._target, ManifestStore):
            self._ds = self._ds.copy()  # the caller's stays lazy
            for name in loaded:  # other processes could not hand back what they write
                self._ds.variables[name].load()
        mode = self._mode if region is not None or self._mode == "r+" else "a"
        part = replace(self._part, ds=self._ds, mode=mode, append=None, only_group=False)
        found = prepare(part, self._store, check=self._check)
        assert found is not None
        if found.options["zarr_format"] == 2:
            raise InvalidArgumentError(
                f"/{self._path} is of Zarr format 2, and references of VirtualiZarr are of format "
                "3: write to another group, with group=..."
            )
        own, options = found.part.ds, dict(found.options)
        if region is not None:
            self._region = located(self._ds, self._store, options, region)
            place = {dim: at for dim, at in self._region.items() if dim in own.dims}
            part = replace(part, region=place)
        if self._append_dim not in own.dims:
            options["append_dim"] = None
        found = replace(found, part=replace(part, ds=own), options=options)
        how: Any = {"statistics": True, "scheduler": None, "relocate": False}
        changes = [partial(put, found, self._target, **how)] if loaded else []
        changes.append(partial(self._put_group, self._document(self._ds)))
        virtual = [name for name in self._ds.variables if name not in loaded]
        return changes + [self._planned(str(name), self._ds.variables[name]) for name in virtual]

    def _document(self, ds: xr.Dataset) -> dict[str, Any]:
        """The group's document, with the attributes of the dataset beside those that are there."""
        node = self._workspace.contents.node(self._path)
        document = dict(_GROUP if node is None else json.loads(node.documents[V3_DOCUMENT]))
        attributes = _plain(ds.attrs)
        others = sorted(str(name) for name in ds.coords if name not in ds.dims)
        if others:
            attributes["coordinates"] = " ".join(others)
        return {**document, "attributes": {**document.get("attributes", {}), **attributes}}

    def _put_group(self, document: Mapping[str, Any]) -> None:
        above = self._path
        while above:  # parents first is not needed: all are written before anything is read
            above = above.rpartition("/")[0]
            if self._workspace.contents.node(above) is None:
                self._put_document(above, _GROUP)
        self._put_document(self._path, document)

    def _put_document(self, path: str, document: Mapping[str, Any]) -> None:
        self._workspace.set(join(path, V3_DOCUMENT), json.dumps(document).encode())

    # --- variables ---------------------------------------------------------------------------

    def _planned(self, name: str, var: xr.Variable) -> Callable[[], None]:
        """Check a virtual variable against what is there; what writes it."""
        path = join(self._path, name)
        node = self._workspace.contents.node(path)
        if node is None and (self._region is not None or self._mode == "r+"):
            raise NotFoundError(f"there is no array /{path} to write to")
        if node is not None and node.array is None:
            raise InvalidArgumentError(f"/{path} is a group, and no array")
        new, grows = _document(var), self._append_dim is not None and self._append_dim in var.dims
        if node is None or not (grows or self._region is not None):
            return partial(self._put_array, path, new, var)
        assert node.array is not None
        old = json.loads(node.documents[V3_DOCUMENT])
        if tuple(old.get("dimension_names") or ()) != tuple(map(str, var.dims)):
            raise InvalidArgumentError(
                f"/{path} has the dimensions {old.get('dimension_names')}, not {list(var.dims)}"
            )
        start, shape = self._place(path, old, var)
        _check_fits(path, old, new)
        chunks = node.array.chunk_shape
        for dim, at, chunk, size, whole in zip(
            var.dims, start, chunks, var.shape, shape, strict=True
        ):
            ends = at + size
            if at % chunk or (ends % chunk and ends != whole):
                raise InvalidArgumentError(
                    f"/{path} cannot be written from {at} to {ends} of {str(dim)!r}: its chunks "
                    f"have {chunk} there, and one would be filled partly by each of two files"
                )
        first = tuple(at // chunk for at, chunk in zip(start, chunks, strict=True))
        return partial(self._put_array, path, {**old, "shape": shape}, var, first)

    def _place(
        self, path: str, old: Mapping[str, Any], var: xr.Variable
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Where a variable begins in an existing array, and the shape of the array afterwards."""
        start, shape = [], []
        for dim, have, size in zip(var.dims, old["shape"], var.shape, strict=True):
            part, there = (self._region or {}).get(str(dim), slice(None)), have
            if dim == self._append_dim:
                part, there = slice(have, None), have + size
            begin, end, step = part.indices(there)
            if step != 1 or end - begin != size:
                raise InvalidArgumentError(
                    f"/{path} has {have} along {str(dim)!r}, of which {end - begin} are to be "
                    f"written, and the dataset has {size}"
                )
            start.append(begin)
            shape.append(there)
        return tuple(start), tuple(shape)

    def _put_array(
        self,
        path: str,
        document: Mapping[str, Any],
        var: xr.Variable,
        first: tuple[int, ...] | None = None,
    ) -> None:
        """Put an array, or more of it, whose first chunk lies at `first`."""
        if first is None:
            self._workspace.edits.drop(path)
        self._put_document(path, document)
        self._refer(path, var, first or (0,) * var.ndim)

    # --- references --------------------------------------------------------------------------

    def _refer(self, path: str, var: xr.Variable, first: tuple[int, ...]) -> None:
        """Set the references of a variable, whose first chunk lies at `first`."""
        manifest: Any = _references(var).manifest
        paths = manifest._paths.ravel().tolist()
        names = list(dict.fromkeys(paths))
        source = np.arange(len(paths))
        if len(names) < len(paths):
            numbers = {name: number for number, name in enumerate(names)}
            source = np.fromiter(map(numbers.__getitem__, paths), np.int64, len(paths))
        here = Box((0,) * var.ndim, manifest._paths.shape)
        present = np.ones(len(paths), np.bool_)
        if "" in names:
            present &= source != names.index("")
        for coords in manifest._inlined:
            present[here.ravel_one(coords)] = False
        rows = np.flatnonzero(present)
        if self._region is not None:
            self._unset(path, here, ~present, first)
        used, source = np.unique(source[rows], return_inverse=True)
        locations = [names[number] for number in used.tolist()]
        index = here.unravel(rows) + np.array(first, np.int64)
        offset = manifest._offsets.ravel()[rows].astype(np.int64)
        length = manifest._lengths.ravel()[rows].astype(np.int64)
        noted = self._noted(locations)
        if len(rows):
            self._store.set_virtual_refs(
                path,
                index,
                locations,
                source,
                offset,
                length,
                **noted,
                checksums=self._sums(locations, source, offset, length),
            )
        node = self._workspace.contents.array_at(path)
        assert node.array is not None
        for coords, data in manifest._inlined.items():
            at = tuple(a + b for a, b in zip(coords, first, strict=True))
            self._workspace.set(join(path, node.array.chunk_keys.encode(at)), bytes(data))

    def _unset(self, path: str, here: Box, absent: Any, first: tuple[int, ...]) -> None:
        """Unset chunks of a region that the variable does not have: fill value is due there."""
        node = self._workspace.contents.array_at(path)
        assert node.array is not None
        if absent.any() and here.ndim:
            at = here.unravel(np.flatnonzero(absent)) + np.array(first, np.int64)
            self._workspace.put_table(path, node.array.grid, unset_at(at))
        elif absent.any():
            self._workspace.delete(join(path, node.array.chunk_keys.encode(())))

    def _noted(self, locations: list[str]) -> dict[str, Any]:
        """What is noted of the files, by column: versions, and since when they must be the same."""
        if self._validate == "none":
            return {}
        runtime, containers = self._workspace.runtime, self._workspace.context.containers
        due = [each for each in locations if each not in self._versions]
        held: list[str] = []
        if containers.places:
            names, container, _ = containers.locate_all(due)
            held = [url for url, at in zip(due, container.tolist(), strict=True) if names[at]]
        if self._validate != "auto" and len(held) < len(due):
            raise VirtualContainerError(
                f"{next(iter({*due} - {*held}))} lies below no container, so that its "
                f"{self._validate} cannot be noted: open the repository with a container that "
                "holds it, or say validate='auto'"
            )
        runtime.parallel([partial(self._look, each) for each in held])
        since_ms = runtime.now_ms() + _SLACK_MS
        if not self._versions:
            return {"unchanged_since": np.full(len(locations), since_ms)}
        same = Version(), since_ms
        versions = [self._versions.get(each, same) for each in locations]
        return {
            "etags": [version.etag for version, _ in versions],
            "modified": [_or_none(version.modified_ms) for version, _ in versions],
            "sizes": [_or_none(version.nbytes) for version, _ in versions],
            "unchanged_since": [since for _, since in versions],
        }

    def _look(self, location: str) -> None:
        found = self._reader.version(location)
        tagged = self._validate == "etag" or (self._validate == "auto" and found.etag is not None)
        if (found.etag if tagged else found.modified_ms) is None:
            raise InvalidArgumentError(f"{location}: its {self._validate} is not known there")
        noted = Version(found.etag if tagged else None, None if tagged else found.modified_ms)
        self._versions[location] = Version(noted.etag, noted.modified_ms, found.nbytes), -1

    def _sums(
        self, locations: list[str], source: IndexArray, offset: IndexArray, length: IndexArray
    ) -> IndexArray | None:
        """The checksum of each chunk, if they are wanted."""
        if not self._checksums:
            return None
        containers = self._workspace.context.containers

        def checksum(number: int, start: int, nbytes: int) -> int:
            ref = VirtualRef(containers.source_at(locations[number]), start, nbytes)
            return crc32c(self._reader.read(ref, 0, nbytes))

        rows = zip(source.tolist(), offset.tolist(), length.tolist(), strict=True)
        calls = [partial(checksum, *row) for row in rows]
        return np.array(self._workspace.runtime.parallel(calls), np.int64)


def _references(var: xr.Variable) -> Any:
    return var._data


def _plain(attributes: Mapping[Any, Any]) -> dict[str, Any]:
    """Attributes as JSON has them."""
    encode: Callable[[Any], Any] = encode_zarr_attr_value
    return {str(name): encode(value) for name, value in attributes.items()}


def _or_none(value: int | None) -> int:
    return -1 if value is None else value


def _document(var: xr.Variable) -> dict[str, Any]:
    """The `zarr.json` of a virtual variable."""
    metadata = _references(var).metadata
    found = metadata.to_buffer_dict(default_buffer_prototype())[V3_DOCUMENT].to_bytes()
    document: dict[str, Any] = json.loads(found)
    attributes = {**var.attrs, **{k: v for k, v in var.encoding.items() if k in DECODED_BY}}
    document["attributes"] = _plain(attributes)
    document["dimension_names"] = list(map(str, var.dims))
    document["chunk_key_encoding"] = {"name": "default", "configuration": {"separator": "/"}}
    return document


def _check_fits(path: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Refuse what would decode differently from what is there."""
    for name in _FIXED:
        if old.get(name) != new.get(name):
            raise InvalidArgumentError(
                f"/{path} has another {name} than what is written to it: {old.get(name)} there, "
                f"{new.get(name)} here"
            )
    was, now = old.get("attributes", {}), new.get("attributes", {})
    for name in DECODED_BY:
        a, b = was.get(name), now.get(name)
        nans = isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)
        if a != b and not nans:
            raise InvalidArgumentError(
                f"/{path} has the {name} {a!r}, and what is written to it {b!r}: chunks of both "
                "cannot be in one array"
            )


class VirtualAccessor:
    """What `vds.zm` of a virtual dataset or tree is.

    Parameters
    ----------
    vds : Dataset or DataTree
        The dataset.

    Examples
    --------
    >>> import xarray as xr, zarr_manifests as zm
    >>> repo = zm.create("memory://accessor-example")
    >>> snapshot_id = xr.Dataset({"a": ("x", [1, 2])}).zm.write(repo, message="two values")
    >>> next(repo.ancestry()).message
    'two values'
    """

    def __init__(self, vds: xr.Dataset | xr.DataTree) -> None:
        self._vds = vds

    @property
    def write(self) -> Callable[..., str | None]:
        """`zarr_manifests.virtual.write` with this dataset: pass the location and options."""
        return partial(write_virtual, self._vds)


if not hasattr(xr.Dataset, "zm"):  # which is so if this module is loaded again
    for _register in (xr.register_dataset_accessor, xr.register_datatree_accessor):
        _register("zm")(VirtualAccessor)  # type: ignore[no-untyped-call]
