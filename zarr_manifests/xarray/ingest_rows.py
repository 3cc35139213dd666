"""Rows of files become rows of a group's arrays.

The session that commits grows the arrays and writes the axis variables. Tasks make the arrays and
write everything else, each its own rows: as copies of what is stored, or as references.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xarray as xr
import zarr
from xarray.coding.times import infer_datetime_units
from zarr.core.buffer import default_buffer_prototype

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.keys import V2_ARRAY, V2_ATTRIBUTES, V3_DOCUMENT, join
from zarr_manifests.planning.file_rows import FileLayout, FileRows, blocks, runs
from zarr_manifests.reports import FailedFile
from zarr_manifests.runtime import quiet
from zarr_manifests.session import Fork, Session, initialized_chunks
from zarr_manifests.store import ManifestStore, workspace_of
from zarr_manifests.xarray.array_target import ArrayTarget
from zarr_manifests.xarray.fit import (
    Fit,
    MisfitError,
    fit_of,
    meaning_of_bounds,
    units_of_first,
)
from zarr_manifests.xarray.source_files import (
    FailedFilesError,
    SourceFiles,
    axis_names,
    layout_of,
    stored_dataset,
    told_of,
)
from zarr_manifests.xarray.writers import to_session

__all__ = ["GroupRows", "create_arrays", "write_rows"]

_CHUNK_BYTES: Final = 64 * 1024**2
_AXIS_CHUNK: Final = 8192
_WINDOW_BYTES: Final = 64 * 1024**2
"""Values that are read before they are written, if one chunk is not larger."""


class GroupRows:
    """The arrays of a group, as far as files become rows of them.

    Parameters
    ----------
    store : ManifestStore
        The store of a session, or of a fork.
    group : str
        Path of the group.
    source : SourceFiles
        What the files are.

    Attributes
    ----------
    arrays : dict of str to Array
        All arrays; empty if the group has none yet.
    length : int
        How many rows there are.
    chunks : dict of str to int
        Lengths of chunks along the dimension, of the arrays that tasks write to.
    unit : int
        All these chunks end at multiples of so many rows.

    Raises
    ------
    InvalidArgumentError
        If there are arrays, and none of them has the dimension.
    """

    def __init__(self, store: ManifestStore, group: str, source: SourceFiles) -> None:
        self._store, self._group, self._source, self._dim = store, group, source, source.dim
        self.arrays: dict[str, zarr.Array[Any]] = {}
        if workspace_of(store).contents.node(group) is not None:
            self.arrays = dict(zarr.open_group(store, path=group, mode="r+").arrays())
        self._ds = stored_dataset(store, group) if self.arrays else xr.Dataset()
        if self.arrays and self._dim not in self._ds.dims:
            raise InvalidArgumentError(
                f"no array in the group '/{group}' has the dimension {self._dim!r}"
            )
        self.length = self._ds.sizes.get(self._dim, 0)
        dims = {name: self._ds.variables[name].dims for name in self.arrays}
        self._axes = {n: found.index(self._dim) for n, found in dims.items() if self._dim in found}
        self.chunks = {
            name: (self.arrays[name].shards or self.arrays[name].chunks)[self._axes[name]]
            for name in self._axes.keys() - {*axis_names(self._ds, self._dim)}
        }
        self.unit = math.lcm(*self.chunks.values())

    @cached_property
    def held(self) -> tuple[FileLayout, dict[str, npt.NDArray[Any]]]:
        """What files have to agree with, and the values of axis variables."""
        refers = self._source.containers is not None
        return layout_of(self._ds, self._dim, self._store if refers else None, self._group)

    def grow(self, length: int) -> None:
        """Make the arrays that long, if they are shorter; what is new has no values yet."""
        for name, axis in self._axes.items():
            shape = list(self.arrays[name].shape)
            if shape[axis] < length:
                shape[axis] = length
                self.arrays[name].resize(tuple(shape))

    # --- axis variables ----------------------------------------------------------------------

    def choose_units(self, placed: Sequence[FileRows]) -> None:
        """Have new arrays of times count in units in which those of all files are whole numbers.

        The first file's units stay if they do: days since a midnight are none for hourly files, and
        days since the only time there is make no room for more.
        """
        axes = [each.file.axis for each in placed]
        for name in axes[0].keys() & self.arrays.keys():
            array, told = self.arrays[name], self._ds.variables[name].attrs
            if " since " not in str(told.get("units")) or array.dtype.kind not in "iu":
                continue
            names = {name, told.get("bounds", name)}
            values = np.concatenate([axis[n].ravel() for axis in axes for n in names & axis.keys()])
            try:
                _codes(fit_of(name, array.dtype, told), values)
                units = units_of_first(values, str(told["units"]), array.dtype)
            except (InvalidArgumentError, MisfitError):
                units = infer_datetime_units(values)
            told["units"] = array.attrs["units"] = units or told["units"]

    def write_axis(self, placed: Sequence[FileRows]) -> None:
        """Write the values of axis variables of all files.

        Raises
        ------
        FailedFilesError
            If values of a file would be read back differently.
        """
        told = {str(name): variable.attrs for name, variable in self._ds.variables.items()}
        for name in sorted(placed[0].file.axis):
            meaning = {**meaning_of_bounds(name, told.values()), **told[name]}
            fit = fit_of(name, self.arrays[name].dtype, meaning)
            for run in runs(placed):
                self._write_codes(fit, run)

    def _write_codes(self, fit: Fit, run: Sequence[FileRows]) -> None:
        try:
            codes = _codes(fit, np.concatenate([each.file.axis[fit.name] for each in run]))
        except (InvalidArgumentError, MisfitError) as error:
            for each in run if len(run) > 1 else ():  # raises for the first that does not fit
                self._write_codes(fit, [each])
            why = error.misfits[0].given if isinstance(error, MisfitError) else error
            room = f"do not fit the array, which has room for {fit.range_text}: {why}"
            told = FailedFile(run[0].file.url, f"values of {fit.name!r} {room}")
            raise FailedFilesError(told) from None
        self.arrays[fit.name][run[0].start : run[-1].stop] = codes

    # --- what tasks write --------------------------------------------------------------------

    def _write(self, rows: Sequence[FileRows]) -> None:
        if self._source.containers is not None:
            for each in rows:
                with self._source.reading(each.file) as (_, session):
                    assert session is not None
                    for name in self.chunks:
                        place = join(self._group, name)
                        _refer(self._store, place, session, name, self._axes[name], each.start)
            return
        workspace = workspace_of(self._store)
        targets = {
            name: ArrayTarget(self.arrays[name], workspace, statistics=True) for name in self.chunks
        }
        row_bytes = sum(self.arrays[name].nbytes for name in targets) // self.length
        count = max(_WINDOW_BYTES // max(row_bytes, 1) // self.unit, 1) * self.unit
        for block in blocks(rows, count):
            for run in runs(block):
                self._write_run(run, targets)
        for target in targets.values():
            target.record()

    def _write_run(self, run: Sequence[FileRows], targets: Mapping[str, ArrayTarget]) -> None:
        """Write rows that follow on each other; a file is opened once for all boxes that fit."""
        start, stop = run[0].start, run[-1].stop
        for boxes in self._boxes(stop - start):
            values = [
                np.empty([side.stop - side.start for side in box], self.arrays[name].dtype)
                for name, box in boxes
            ]
            for each in run:
                here = slice(each.start - start, each.stop - start)
                there = slice(each.first, each.first + each.stop - each.start)
                with self._source.reading(each.file) as (ds, _):
                    for (name, box), block in zip(boxes, values, strict=True):
                        axis = self._axes[name]
                        found = ds.variables[name][_with(box, axis, there)].values
                        block[_with((slice(None),) * block.ndim, axis, here)] = found
            for (name, box), block in zip(boxes, values, strict=True):
                targets[name][_with(box, self._axes[name], slice(start, stop))] = block

    def _boxes(self, rows: int) -> Iterator[list[tuple[str, tuple[slice, ...]]]]:
        """All cells of so many rows, in boxes of whole chunks, as many at a time as fit the memory.

        Boxes are those of one array after those of another.
        """
        found: list[tuple[str, tuple[slice, ...]]] = []
        held = 0
        for name in self.chunks:
            array = self.arrays[name]
            shape, steps = list(array.shape), list(array.shards or array.chunks)
            shape[self._axes[name]] = steps[self._axes[name]] = rows
            for axis in reversed(range(array.ndim)):
                times = _WINDOW_BYTES // max(math.prod(steps) * array.dtype.itemsize, 1)
                steps[axis] = max(min(shape[axis], steps[axis] * max(times, 1)), 1)
            starts = [range(0, size, step) for size, step in zip(shape, steps, strict=True)]
            nbytes = math.prod(steps) * array.dtype.itemsize
            for corner in itertools.product(*starts):
                if found and held + nbytes > _WINDOW_BYTES:
                    yield found
                    found, held = [], 0
                sides = zip(corner, steps, shape, strict=True)
                found.append((name, tuple(slice(at, min(at + step, n)) for at, step, n in sides)))
                held += nbytes
        if found:
            yield found


def _with(box: tuple[slice, ...], axis: int, rows: slice) -> tuple[slice, ...]:
    return (*box[:axis], rows, *box[axis + 1 :])


def _codes(fit: Fit, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    with quiet():  # what they warn of is checked
        return fit.encoded(values)


def write_rows(
    target: Session | Fork, group: str, source: SourceFiles, rows: Sequence[FileRows]
) -> None:
    """Write rows of files, except those of axis variables.

    Raises
    ------
    FailedFilesError
        If a file cannot be read, has changed since it was looked at, or cannot be referred to.
    """
    GroupRows(target.store, group, source)._write(rows)


# --- new arrays ------------------------------------------------------------------------------


def create_arrays(
    target: Session | Fork,
    group: str,
    source: SourceFiles,
    url: str,
    encoding: Mapping[str, Mapping[str, Any]],
) -> None:
    """Make arrays like those in a file, without rows, and write what does not grow.

    Raises
    ------
    FailedFilesError
        If the file cannot be read.
    """
    dim = source.dim
    with ExitStack() as stack:
        with told_of(url):  # what fails below is no fault of the file
            ds, session = stack.enter_context(source.opened(url))
            axis = axis_names(ds, dim)
            new = ds if session is None else ds[axis]
            new = new.isel({dim: slice(0, 0)}, missing_dims="ignore").drop_encoding().load()
        if session is not None:
            held = zarr.open_array(session.store, path=str(next(iter(ds.variables))), mode="r")
            zarr.open_group(target.store, path=group, zarr_format=held.metadata.zarr_format)
        own: dict[Any, dict[str, Any]] = {}
        for key, variable in new.variables.items():
            own[key] = dict(encoding.get(str(key), {}))
            if variable.dtype.kind in "iufc":
                own[key]["dtype"] = variable.dtype.newbyteorder("=")
            if dim in variable.dims:
                own[key].setdefault("chunks", _chunks(ds.variables[key], dim, long=key in axis))
            if "_FillValue" not in variable.attrs and variable.dtype.kind in "fc":
                own[key]["_FillValue"] = None  # else xarray adds one
        to_session(new, target, group=group, mode="a", encoding=own, check=False)
        if session is not None:
            for name in map(str, ds.variables.keys() - {*axis}):
                like = zarr.open_array(session.store, path=name, mode="r")
                _create_like(target.store, join(group, name), like, ds.variables[name], dim)
                if dim not in ds.variables[name].dims:
                    _refer(target.store, join(group, name), session, name, 0, 0)


def _chunks(variable: xr.Variable, dim: str, *, long: bool) -> tuple[int, ...]:
    """Chunks of an array that grows: those of the file, or all that it has, within bounds."""
    wanted = variable.encoding.get("preferred_chunks") or {}
    chunks = [max(min(int(wanted.get(d, n)), n), 1) for d, n in variable.sizes.items()]
    if long:  # a few bytes a row
        chunks[variable.dims.index(dim)] = _AXIS_CHUNK
    while math.prod(chunks) * variable.dtype.itemsize > _CHUNK_BYTES and max(chunks) > 1:
        axis = chunks.index(max(chunks))
        chunks[axis] = -(-chunks[axis] // 2)
    return tuple(chunks)


# --- references ------------------------------------------------------------------------------


def _create_like(
    store: ManifestStore, path: str, like: zarr.Array[Any], variable: xr.Variable, dim: str
) -> None:
    """Make an array as encoded as one in a file, without rows; it may get one more axis."""
    buffers = like.metadata.to_buffer_dict(default_buffer_prototype())
    documents = {key: json.loads(buffer.to_bytes()) for key, buffer in buffers.items()}
    dims = list(map(str, variable.dims))
    chunks = [1] * (variable.ndim - like.ndim) + list(like.shards or like.chunks)
    shape = [0 if name == dim else size for name, size in variable.sizes.items()]
    if like.metadata.zarr_format == 2:
        documents[V2_ARRAY] |= {"shape": shape, "chunks": chunks}
        documents[V2_ATTRIBUTES]["_ARRAY_DIMENSIONS"] = dims
    else:
        documents[V3_DOCUMENT] |= {"shape": shape, "dimension_names": dims}
        documents[V3_DOCUMENT]["chunk_grid"]["configuration"]["chunk_shape"] = chunks
    for key, document in documents.items():
        workspace_of(store).set(join(path, key), json.dumps(document).encode())


def _refer(
    store: ManifestStore, path: str, session: Session, name: str, axis: int, start: int
) -> None:
    """Refer to the chunks of a file's array from `start` on; chunks without a file are copied."""
    array = zarr.open_array(store, path=path, mode="r+")
    shift = np.zeros(array.ndim, np.int64)
    if array.ndim:
        chunk = (array.shards or array.chunks)[axis]
        shift[axis], within = divmod(start, chunk)
        if within:
            raise InvalidArgumentError(
                f"its rows would begin at {start}, within a chunk of {name!r}, which has {chunk} "
                "rows: a chunk cannot be in two files. Copy it instead"
            )

    def moved(index: Any) -> npt.NDArray[np.int64]:
        index = np.asarray(index, np.int64)
        return np.pad(index, ((0, 0), (array.ndim - index.shape[1], 0))) + shift

    refs = session.store.get_virtual_refs(name)
    placed = replace(refs, index=moved(refs.index))
    store.set_virtual_refs(path, **{each.name: getattr(placed, each.name) for each in fields(refs)})
    virtual = {tuple(at) for at in refs.index.tolist()}
    others = [at for at in initialized_chunks(session, name).tolist() if tuple(at) not in virtual]
    if others:
        for at, data in session.read_chunks(name, coords=np.array(others, np.int64)):
            key = array.metadata.encode_chunk_key(tuple(moved([at])[0].tolist()))
            workspace_of(store).set(join(path, key), data)
