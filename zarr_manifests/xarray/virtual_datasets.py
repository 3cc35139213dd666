"""Writing VirtualiZarr's virtual datasets: references by column, loadable variables as data.

A virtual dataset has variables whose values are a `ManifestArray`: metadata, and for each chunk a
file and a byte range. These become virtual chunks. Other variables are written as by `write`.

Invariant: an append or a write to a region never changes how existing chunks decode: what differs
in type, codecs, chunks or encoding is refused by name, before anything is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, Final

import numpy as np
import pandas as pd
import xarray as xr
from msgspec import Struct
from msgspec.structs import replace
from xarray.backends.zarr import encode_zarr_attr_value
from zarr.core.buffer import default_buffer_prototype

from zarr_manifests import repositories
from zarr_manifests.display import attributes_of
from zarr_manifests.engine.overlay import node_path
from zarr_manifests.engine.workspace import Workspace
from zarr_manifests.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
)
from zarr_manifests.grid import Box, Coords
from zarr_manifests.keys import V3_DOCUMENT, directory, join
from zarr_manifests.planning.merge import unset_at
from zarr_manifests.repositories import Location
from zarr_manifests.repository import Repository
from zarr_manifests.session import Session
from zarr_manifests.storage.protocol import Version
from zarr_manifests.store import workspace_of
from zarr_manifests.virtual.virtual_refs import VirtualReader
from zarr_manifests.xarray.fit import DECODED_BY
from zarr_manifests.xarray.parts import DatasetPart, Region, WriteMode, is_virtual, parts_of
from zarr_manifests.xarray.stored_group import StoredGroup
from zarr_manifests.xarray.writers import cells_of, prepare, put

_FIXED: Final = ("data_type", "chunk_grid", "codecs", "fill_value", "dimension_names")
_SLACK_MS: Final = 1000


def write_virtual(
    vds: xr.Dataset | xr.DataTree,
    location: Session | Location,
    *,
    group: str | None = None,
    mode: WriteMode | None = None,
    append_dim: Hashable | None = None,
    region: Region | None = None,
    check: bool = True,
    message: str = "write virtual references",
    branch: str = "main",
) -> str | None:
    """Write a virtual dataset of VirtualiZarr: references to its chunks, and loadable variables.

    A later change of a file is an error when it is read. Of files below a container, etag or time
    of modification are noted; others must not change from now on.

    Parameters
    ----------
    vds : Dataset or DataTree
        From `virtualizarr.open_virtual_dataset` and the like.
    location : Session, str, path, Storage or Repository
        A session, which is not committed; or where the repository is, or is to be made, for one
        commit.
    group : str, optional
        Path of the group; by default the root.
    mode : {"w", "w-", "a", "r+"}, optional
        `w-`, the default, writes where no arrays are; `w` replaces the group and all below it; `a`
        writes over existing variables and adds others; `r+` writes over existing ones only.
    append_dim : hashable, optional
        Append along this dimension; if the group has no data yet, it is created.
    region : mapping of str to slice or "auto", or "auto", optional
        Write to whole chunks of existing arrays, by dimension. With `"auto"`, where the existing
        coordinate has the values of the dataset's; a dimension without one is written whole.
    check : bool, default True
        As in `write`, of values that are loaded.
    message, branch : str
        The message of the commit, and the branch to commit to.

    Returns
    -------
    str or None
        The new snapshot's id; None if a session was given.

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
    MissingChunkError
        If a file below a container is not there.

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
        raise InvalidArgumentError(f"expected a Dataset or a DataTree, not {type(vds).__name__}")
    top = node_path("" if group is None else group)
    how: Any = mode, append_dim, region, {}, "error", None, check, True
    parts = parts_of(vds, top, *how, virtual=True)

    if isinstance(location, Session):
        session = location
    else:
        repo = location
        if not isinstance(repo, Repository):
            repo = repositories.open(repo, create=True)
        session = repo.writable_session(branch)
    if mode == "w":
        workspace_of(session.store).delete_below(directory(top))
    writes = [_Write(session, part) for part in parts]
    for change in [change for write in writes for change in write.planned()]:
        change()
    return None if session is location else session.commit(message)


class _Write(Struct, dict=True):
    """One group of a virtual dataset, on its way into a store."""

    session: Session
    part: DatasetPart
    versions: dict[str, Version] = {}

    @property
    def workspace(self) -> Workspace:
        """Where to write."""
        return workspace_of(self.session.store)

    def planned(self) -> list[Callable[[], None]]:
        """Check the dataset against what is there; what writes it, in order."""
        part, node = self.part, self.workspace.contents.node(self.part.group)
        if node is not None and node.array is not None:
            raise AlreadyExistsError(
                f"/{part.group} is an array, and references are written to a group: give another "
                "group="
            )
        ds = part.ds
        virtual = {name: var for name, var in ds.variables.items() if is_virtual(var)}
        mode = "a" if part.mode == "w" else part.mode  # what was there is gone
        found = prepare(replace(part, mode=mode, labels=None), self.session.store)
        part, own = found.part, found.part.ds
        if part.zarr_format == 2:
            raise InvalidArgumentError(
                f"/{part.group} is of Zarr format 2, and references of VirtualiZarr are of format "
                "3: write to another group, with group=..."
            )
        attributes = {} if node is None else attributes_of(node)
        others = sorted(str(name) for name in ds.coords if name not in ds.dims)
        if others:
            attributes["coordinates"] = " ".join(others)
        own = own.reset_coords([name for name in own.coords if name not in own.dims])
        own.attrs = {**attributes, **ds.attrs}
        region: Any = part.region
        loaded = replace(
            part,
            ds=own,
            region=region and {dim: at for dim, at in region.items() if dim in own.dims},
            append_dim=part.append_dim if part.append_dim in own.dims else None,
        )
        found = replace(found, part=loaded)
        return [
            partial(put, found, self.session),
            *(self._planned(str(name), var, part, found.there) for name, var in virtual.items()),
        ]

    def _planned(
        self, name: str, var: xr.Variable, part: DatasetPart, there: StoredGroup
    ) -> Callable[[], None]:
        """Check a virtual variable against what is there; what writes it."""
        path, region = join(part.group, name), part.region
        node = self.workspace.contents.node(path)
        if node is None and (region is not None or part.mode == "r+"):
            raise NotFoundError(f"there is no array /{path} to write to")
        if node is not None and node.array is None:
            raise InvalidArgumentError(f"/{path} is a group, and no array")
        document = _document(var)
        if node is None or (region is None and part.append_dim not in var.dims):
            return partial(self._put, path, document, var)
        old = json.loads(node.documents[V3_DOCUMENT])
        _check_fits(path, old, document)
        cells, shape = cells_of(name, var, part, there)
        chunks = there.meta(name).chunk_shape
        for dim, side, chunk, end in zip(var.dims, cells, chunks, shape, strict=True):
            if side.start % chunk or (side.stop % chunk and side.stop != end):
                raise InvalidArgumentError(
                    f"/{path} cannot be written from {side.start} to {side.stop} of {str(dim)!r}: "
                    f"its chunks have {chunk} there, and one would be filled partly by each of two "
                    "files"
                )
        first = tuple(side.start // chunk for side, chunk in zip(cells, chunks, strict=True))
        return partial(self._put, path, {**old, "shape": shape}, var, first)

    def _put(
        self, path: str, document: Mapping[str, Any], var: xr.Variable, first: Coords | None = None
    ) -> None:
        """Put an array, or more of it, whose first chunk lies at `first`.

        In a region, chunks that the variable does not have have the fill value from now on.
        """
        references: Any = var._data
        workspace, manifest = self.workspace, references.manifest
        if first is None:
            workspace.edits.drop(path)
        workspace.set(join(path, V3_DOCUMENT), json.dumps(document).encode())
        array = workspace.contents.array_at(path).array
        assert array is not None
        none, paths = (0,) * var.ndim, manifest._paths
        here, start = Box(none, paths.shape), np.array(first or none)
        present = paths.ravel() != ""
        for coords in manifest._inlined:
            present[here.ravel_one(coords)] = False
        if self.part.region is not None and not present.all():
            absent = here.unravel(np.flatnonzero(~present)) + start
            if var.ndim:
                workspace.put_table(path, array.grid, unset_at(absent))
            else:
                workspace.delete(join(path, array.chunk_keys.encode(())))
        rows = np.flatnonzero(present)
        if len(rows):
            source, used = pd.factorize(paths.ravel()[rows].astype(object))
            columns = manifest._offsets, manifest._lengths
            offset, length = (column.ravel()[rows].astype(np.int64) for column in columns)
            locations, index = used.tolist(), here.unravel(rows) + start
            noted = self._noted(locations)
            self.session.store.set_virtual_refs(
                path, index, locations, source, offset, length, **noted
            )
        for coords, data in manifest._inlined.items():
            at = tuple((start + coords).tolist())
            workspace.set(join(path, array.chunk_keys.encode(at)), bytes(data))

    def _noted(self, locations: list[str]) -> dict[str, Any]:
        """What is noted of the files, by column, so that a later change is noticed.

        That is the etag of a file below a container, or else its time of modification. Others must
        not change from now on.
        """
        runtime, containers = self.workspace.runtime, self.workspace.context.containers
        names, container, _ = containers.locate_all(locations)
        held = [url for url, at in zip(locations, container.tolist(), strict=True) if names[at]]
        due = [url for url in held if url not in self.versions]
        reader = VirtualReader(containers)
        looks = runtime.parallel([partial(reader.version, url) for url in due])
        self.versions |= zip(due, looks, strict=True)
        none, since = Version(), runtime.now_ms() + _SLACK_MS
        found = [self.versions.get(url, none) for url in locations]
        modified = [None if one.etag is not None else one.modified_ms for one in found]
        return {
            "etags": [one.etag for one in found],
            "modified": [-1 if ms is None else ms for ms in modified],
            "sizes": [-1 if one.nbytes is None else one.nbytes for one in found],
            "unchanged_since": [-1 if url in self.versions else since for url in locations],
        }


def _document(var: xr.Variable) -> dict[str, Any]:
    """The `zarr.json` of a virtual variable."""
    references: Any = var._data
    found = references.metadata.to_buffer_dict(default_buffer_prototype())[V3_DOCUMENT].to_bytes()
    attributes = {**var.attrs, **{k: v for k, v in var.encoding.items() if k in DECODED_BY}}
    return {
        **json.loads(found),
        "attributes": {str(k): encode_zarr_attr_value(v) for k, v in attributes.items()},  # type: ignore[no-untyped-call]
        "dimension_names": list(map(str, var.dims)),
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
    }


def _check_fits(path: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Refuse what would decode differently from what is there."""
    was, now = ({**document.get("attributes", {}), **document} for document in (old, new))
    for name in (*_FIXED, *DECODED_BY):
        a, b = was.get(name), now.get(name)
        if a != b and json.dumps(a) != json.dumps(b):  # as text, NaN is NaN
            raise InvalidArgumentError(
                f"/{path} has the {name} {a!r}, and what is written to it {b!r}: chunks of both "
                "cannot be in one array"
            )
