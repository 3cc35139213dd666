"""What a write puts into a session, by group.

`parts_of` parses the arguments of a write into datasets, each with the group that it goes to. A
`DataArray` is a dataset of one variable, under the names that `DataArray.to_zarr` gives it, so that
`xarray.open_dataarray` returns the same array. A `DataTree` has a dataset for each node.

An append with an index coordinate is planned by its labels (`xarray.appended_rows`), and cut
into the rows that replace others, and those that go behind them.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import xarray as xr
from msgspec import Struct
from msgspec.structs import replace

from zarr_manifests.engine.change_set import ChangeSet, same_bytes
from zarr_manifests.engine.workspace import Workspace
from zarr_manifests.errors import CorruptObjectError, InvalidArgumentError, MissingChunkError
from zarr_manifests.format.chunk_table import StoredRef, Unset
from zarr_manifests.format.manifest import Node
from zarr_manifests.grid import Coords
from zarr_manifests.keys import check_inside, is_inside
from zarr_manifests.storage.protocol import Version
from zarr_manifests.texts import listed
from zarr_manifests.xarray.appended_rows import AppendPlan, OnExisting

type Given = xr.Dataset | xr.DataArray | xr.DataTree
type Region = Mapping[str, slice | Literal["auto"]] | Literal["auto"]
type WriteMode = Literal["w", "w-", "a", "r+"]
type Encodings = Mapping[Hashable, Mapping[str, Any]]
"""Encodings by name of the variable."""

_CHOICES: Final[Mapping[str, Sequence[object]]] = {
    "mode": (None, "w", "w-", "a", "r+"),
    "on_existing": ("error", "skip", "replace"),
    "sort": (None, "keep"),
}


class DatasetPart(Struct, frozen=True):
    """A dataset, and how it goes to its group.

    Parameters
    ----------
    ds : Dataset
        The dataset.
    group : str
        Path of the group, without slashes around it.
    top : str
        Path of the group that all parts are in.
    mode, append_dim, region, encoding, on_existing, sort, check, statistics
        As in `write`, for this dataset.
    labels : Variable, optional
        The index coordinate along which rows are appended, if there is one, in memory.
    only_group : bool
        Whether it is a node of a tree without variables and attributes.
    zarr_format : int
        The format of the group, if it is to be made.
    versions : dict of str to Version
        What is known of files of virtual variables, by their URL.
    """

    ds: xr.Dataset
    group: str
    top: str
    mode: WriteMode | None
    append_dim: Hashable | None
    region: Region | None
    encoding: Encodings
    on_existing: OnExisting
    sort: Literal["keep"] | None
    check: bool
    statistics: bool
    labels: xr.Variable | None = None
    only_group: bool = False
    zarr_format: Literal[2, 3] = 3
    versions: dict[str, Version] = {}


def parts_of(given: Given, group: str | None, *how: Any) -> list[DatasetPart]:
    """Return the datasets to write, groups before what is in them.

    Parameters
    ----------
    given : Dataset, DataArray or DataTree
        What is written.
    group : str, optional
        Path of the group that all of it goes to.
    *how
        The arguments of `write` that a part has, from `mode` to `statistics`, in its order.

    Raises
    ------
    InvalidArgumentError
        If the arguments contradict each other, or have unknown names.
    """
    top = str(group or "").strip("/")
    if top:
        check_inside(top)
    whole = DatasetPart(xr.Dataset(), top, top, *how)
    _check_options(whole)
    append_dim, region, on_existing = whole.append_dim, whole.region, whole.on_existing
    if isinstance(given, xr.DataTree) and (region is not None or whole.encoding):
        raise InvalidArgumentError(
            "region and encoding are of one group: write the tree's nodes one by one, as "
            "tree['node'].to_dataset() with group='node', or set tree['node/name'].encoding"
        )
    datasets = _datasets(given)
    dims = {dim: None for _, ds in datasets for dim in ds.dims}
    if append_dim is not None and append_dim not in dims:
        raise InvalidArgumentError(
            f"append_dim {append_dim!r} is not a dimension of the dataset; there are: "
            f"{listed(dims, 20)}"
        )
    found = []
    for path, ds in datasets:
        at = f"{top}/{path}".strip("/")
        part = replace(whole, ds=ds, group=at, encoding=_encoding(ds, whole.encoding))
        if isinstance(given, xr.DataTree):
            part = _of_tree(part)
        dim = part.append_dim
        labels = ds.variables.get(dim)
        if labels is not None and labels.dims == (dim,) and not is_virtual(labels):
            labels = labels.copy(deep=False).load()  # without loading the caller's dataset
            part = replace(part, labels=labels)
        elif dim is not None and on_existing != "error":
            raise InvalidArgumentError(
                f"on_existing={on_existing!r} compares the labels of {dim!r} with the existing "
                f"ones, and the dataset for group '/{at}' has no coordinate of that name; add "
                f"one, such as by ds.assign_coords({dim}=...), or leave out on_existing"
            )
        found.append(part)
    return found


def _check_options(part: DatasetPart) -> None:
    mode, region, on_existing = part.mode, part.region, part.on_existing
    if not isinstance(part.check, bool):
        raise InvalidArgumentError(f"check must be True or False, not {part.check!r}")
    for name, known in _CHOICES.items():
        given = getattr(part, name)
        if given not in known:
            raise InvalidArgumentError(
                f"{name} must be one of {', '.join(map(str, known))}, not {given!r}"
            )
    if part.append_dim is not None and mode not in (None, "a"):
        raise InvalidArgumentError(f"append_dim goes with mode 'a', not {mode!r}")
    if region is not None and mode not in (None, "a", "r+"):
        raise InvalidArgumentError(f"region goes with mode 'r+' or 'a', not {mode!r}")
    if region is not None and part.append_dim is not None:
        raise InvalidArgumentError("append_dim finds the place of rows itself: leave out region")
    if part.append_dim is None and (on_existing != "error" or part.sort is not None):
        raise InvalidArgumentError("on_existing and sort go with append_dim")


def _datasets(given: Given) -> list[tuple[str, xr.Dataset]]:
    """The datasets, and the paths of their groups."""
    if isinstance(given, xr.DataTree):
        found: list[tuple[str, xr.Dataset]] = []
        for path, node in given.subtree_with_keys:
            top = node is given
            if not top and not is_inside(path):
                raise InvalidArgumentError(f"a group cannot have the path {path!r} of a node")
            found.append(("" if top else path, node.to_dataset(inherit=top)))
        return found
    if isinstance(given, xr.DataArray):
        return [("", _dataset_of(given))]
    if not isinstance(given, xr.Dataset):
        raise InvalidArgumentError(
            f"expected a Dataset, a DataArray or a DataTree, not a {type(given).__name__}"
            + ("; for files, take zm.ingest" if isinstance(given, str | os.PathLike) else "")
        )
    return [("", given)]


def _dataset_of(array: xr.DataArray) -> xr.Dataset:
    from xarray.backends.api import DATAARRAY_NAME, DATAARRAY_VARIABLE

    if array.name is not None and array.name not in (*array.coords, *array.dims):
        return array.to_dataset()
    ds = array.to_dataset(name=DATAARRAY_VARIABLE)
    if array.name is not None:
        ds.attrs[DATAARRAY_NAME] = array.name
    return ds


def _encoding(ds: xr.Dataset, encoding: Encodings) -> Encodings:
    """The encodings, checked."""
    for name, how in encoding.items():
        if name not in ds.variables:
            raise InvalidArgumentError(
                f"encoding names {name!r}, which is not a variable of the dataset; there are: "
                f"{listed(ds.variables, 20)}"
            )
        if not isinstance(how, Mapping):
            raise InvalidArgumentError(f"the encoding of {name!r} is a mapping, not {how!r}")
    return {name: dict(how) for name, how in encoding.items()}


def _of_tree(part: DatasetPart) -> DatasetPart:
    """How a node of a tree is written: an append leaves nodes without the dimension in place."""
    ds = part.ds
    if part.append_dim is not None and part.append_dim not in ds.dims:
        part = replace(part, mode="a", append_dim=None)
    return replace(part, only_group=not ds.variables and not ds.attrs and part.mode != "w")


def is_virtual(variable: xr.Variable) -> bool:
    """Whether the values of a variable are references of VirtualiZarr."""
    kind = type(variable._data)
    return kind.__name__ == "ManifestArray" and kind.__module__.startswith("virtualizarr.")


# --- appends ------------------------------------------------------------------------------------


def pieces_of(part: DatasetPart, planned: AppendPlan) -> Iterator[DatasetPart]:
    """Yield the parts that an append writes."""
    assert part.labels is not None
    ds, dim = part.ds, str(part.labels.dims[0])
    values = ds.drop_vars([name for name, v in ds.variables.items() if dim not in v.dims])
    over = replace(part, mode="a", append_dim=None)
    for start, rows in planned.replaced if values.variables.keys() - {dim} else ():
        place = {dim: slice(start, start + len(rows))}
        yield replace(over, ds=_rows(values, dim, rows), region=place)
    if planned.appended or planned.replaced or not ds.sizes[dim]:
        yield replace(part, ds=_rows(ds, dim, planned.appended))


def _rows(ds: xr.Dataset, dim: str, rows: Sequence[int]) -> xr.Dataset:
    first = rows[0] if rows else 0
    in_a_row = [*rows] == [*range(first, first + len(rows))]
    return ds.isel({dim: slice(first, first + len(rows)) if in_a_row else [*rows]})


# --- what the snapshot has already ----------------------------------------------------------------


def changes_nothing(workspace: Workspace) -> bool:
    """Whether the snapshot has everything that was written already, byte for byte."""
    changes = workspace.contents.changes
    if changes.nodes or changes.truncated:
        return False
    # A differing checksum shows most changes, before any chunk is read.
    return all(
        all(_is_same(workspace, *each, reads=reads) for each in _written(changes))
        for reads in (False, True)
    )


def _written(changes: ChangeSet) -> Iterator[tuple[bytes, Coords, StoredRef]]:
    yield from changes.refs()
    for node_id, tables in changes.tables.items():
        for rows in tables:
            yield from ((node_id, coords, ref) for coords, ref in changes.rows(rows).refs())


def drop_unchanged(workspace: Workspace, nodes: Iterable[Node]) -> None:
    """Drop written chunks of these nodes that the snapshot has already, unless set in bulk."""
    own, changes = {node.node_id for node in nodes}, workspace.contents.changes
    same = [
        (node_id, coords)
        for node_id, coords, new in changes.refs()
        if node_id in own and _is_same(workspace, node_id, coords, new, reads=True)
    ]
    with workspace.lock:
        for node_id, coords in same:
            del changes.chunks[node_id][coords]


def _is_same(
    workspace: Workspace, node_id: bytes, coords: Coords, new: StoredRef, *, reads: bool
) -> bool:
    """Whether the snapshot has the chunk; without a read, whether its checksum is the same."""
    old, reader = workspace.contents.view.lookup(node_id, coords), workspace.contents.reader
    if old is None or isinstance(new, Unset) or not same_bytes(old, new):
        return False
    if not reads or old == new:
        return True
    try:
        return reader.read(old, 0, old.length) == reader.read(new, 0, new.length)
    except (CorruptObjectError, MissingChunkError):  # to write such a chunk again mends it
        return False
