"""Variables of VirtualiZarr's virtual datasets, which become references by column.

Their values are a `ManifestArray`: metadata, and for each chunk a file and a byte range. These
become virtual chunks. Other variables of such a dataset are written as by `write`.

Invariant: an append or a write to a region never changes how existing chunks decode: what differs
in type, codecs, chunks or encoding is refused by name, before anything is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pandas as pd
import xarray as xr
from xarray.backends.zarr import encode_zarr_attr_value
from zarr.core.buffer import default_buffer_prototype

from zarr_manifests.engine.workspace import Workspace
from zarr_manifests.errors import InvalidArgumentError, NotFoundError
from zarr_manifests.grid import Box, Coords
from zarr_manifests.keys import V3_DOCUMENT, join
from zarr_manifests.planning.merge import unset_at
from zarr_manifests.storage.protocol import Version
from zarr_manifests.store import ManifestStore, contents_of, workspace_of
from zarr_manifests.virtual.virtual_refs import VirtualReader
from zarr_manifests.xarray.fit import DECODED_BY
from zarr_manifests.xarray.parts import DatasetPart

if TYPE_CHECKING:
    from zarr_manifests.xarray.stored_group import StoredGroup

_FIXED: Final = ("data_type", "chunk_grid", "codecs", "fill_value", "dimension_names")
_SLACK_MS: Final = 1000


def without_virtual(
    ds: xr.Dataset, virtual: Iterable[Hashable], attributes: Mapping[str, Any]
) -> xr.Dataset:
    """The other variables, with what the attributes of the group say of all coordinates."""
    others = sorted(str(name) for name in ds.coords if name not in ds.dims)
    own = ds.drop_vars(virtual)
    own = own.reset_coords([name for name in own.coords if name not in own.dims])
    told = {"coordinates": " ".join(others)} if others else {}
    return own.assign_attrs({**attributes, **told, **ds.attrs})


def planned_references(
    name: str, var: xr.Variable, part: DatasetPart, there: StoredGroup, store: ManifestStore
) -> Callable[[], None]:
    """Check a virtual variable against what is there; what writes it."""
    path, region = join(part.group, name), part.region
    if part.zarr_format == 2:
        raise InvalidArgumentError(
            f"/{part.group} is of Zarr format 2, and references of VirtualiZarr are of format "
            "3: write to another group, with group=..."
        )
    node = None if part.mode == "w" else contents_of(store).node(path)
    if node is not None and name == part.append_dim:  # which are there already is not known
        raise InvalidArgumentError(
            f"labels of {name!r} are virtual: open files with loadable_variables=[{name!r}, ...]"
        )
    if node is None and (region is not None or part.mode == "r+"):
        raise NotFoundError(f"there is no array /{path} to write to")
    if node is not None and node.array is None:
        raise InvalidArgumentError(f"/{path} is a group, and no array")
    document, put = _document(var), partial(_put, store, part, path, var)
    if node is None or (region is None and part.append_dim not in var.dims):
        return partial(put, document)
    old = json.loads(node.documents[V3_DOCUMENT])
    _check_fits(path, old, document)
    cells, shape = there.cells_of(name, var, part)
    chunks = there.meta(name).chunk_shape
    for dim, side, chunk, end in zip(var.dims, cells, chunks, shape, strict=True):
        if side.start % chunk or (side.stop % chunk and side.stop != end):
            raise InvalidArgumentError(
                f"/{path} cannot be written from {side.start} to {side.stop} of {str(dim)!r}: "
                f"its chunks have {chunk} there, and one would be filled partly by each of two "
                "files"
            )
    first = tuple(side.start // chunk for side, chunk in zip(cells, chunks, strict=True))
    return partial(put, {**old, "shape": shape}, first)


def _put(
    store: ManifestStore,
    part: DatasetPart,
    path: str,
    var: xr.Variable,
    document: Mapping[str, Any],
    first: Coords | None = None,
) -> None:
    """Put an array, or more of it, whose first chunk lies at `first`.

    In a region, chunks that the variable does not have have the fill value from now on.
    """
    references: Any = var._data
    workspace, manifest = workspace_of(store), references.manifest
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
    if part.region is not None and not present.all():
        absent = here.unravel(np.flatnonzero(~present)) + start
        workspace.put_table(path, array.grid, unset_at(absent))
    rows = np.flatnonzero(present)
    if len(rows):
        source, used = pd.factorize(paths.ravel()[rows].astype(object))
        columns = manifest._offsets, manifest._lengths
        offset, length = (column.ravel()[rows].astype(np.int64) for column in columns)
        locations, index = used.tolist(), here.unravel(rows) + start
        noted = _noted(workspace, part.versions, locations)
        store.set_virtual_refs(path, index, locations, source, offset, length, **noted)
    for coords, data in manifest._inlined.items():
        at = tuple((start + coords).tolist())
        workspace.set(join(path, array.chunk_keys.encode(at)), bytes(data))


def _noted(
    workspace: Workspace, versions: dict[str, Version], locations: list[str]
) -> dict[str, Any]:
    """What is noted of the files, by column, so that a later change is noticed.

    That is the etag of a file below a container, or else its time of modification. Others must
    not change from now on.
    """
    runtime, containers = workspace.runtime, workspace.context.containers
    due = [url for url in locations if url not in versions and containers.locate(url)[0]]
    reader = VirtualReader(containers)
    versions |= zip(
        due, runtime.parallel([partial(reader.version, url) for url in due]), strict=True
    )
    none, since = Version(), runtime.now_ms() + _SLACK_MS
    found = [versions.get(url, none) for url in locations]
    modified = [None if one.etag is not None else one.modified_ms for one in found]
    return {
        "etags": [one.etag for one in found],
        "modified": [-1 if ms is None else ms for ms in modified],
        "sizes": [-1 if one.nbytes is None else one.nbytes for one in found],
        "unchanged_since": [-1 if url in versions else since for url in locations],
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
