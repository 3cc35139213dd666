"""Rows of files become rows of a group's arrays.

The session that commits grows the arrays and writes the axis variables. Tasks make the arrays and
write everything else, each its own rows: as copies of what is stored, or as references.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
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
from zarr_manifests.keys import join
from zarr_manifests.planning.file_rows import FileLayout, FileRows, blocks, runs
from zarr_manifests.reports import FailedFile
from zarr_manifests.runtime import quiet
from zarr_manifests.session import Fork, Session, initialized_chunks
from zarr_manifests.store import ManifestStore, workspace_of
from zarr_manifests.xarray.array_target import ArrayTarget
from zarr_manifests.xarray.encoding import fit_of, units_of_first
from zarr_manifests.xarray.fit import Fit, MisfitError
from zarr_manifests.xarray.source_files import (
    FailedFilesError,
    SourceFiles,
    axis_names,
    layout_of,
    stored_dataset,
    told_of,
)
from zarr_manifests.xarray.stored_group import meaning_of_bounds
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
    chunks : dict of str to int
        Lengths of chunks along the dimension, of the arrays that tasks write to.

    Raises
    ------
    InvalidArgumentError
        If there are arrays, and none of them has the dimension.
    """

    def __init__(self, store: ManifestStore, group: str, source: SourceFiles) -> None:
        self._store, self._group, self._source, self._dim = store, group, source, source.dim
        self.arrays: dict[str, zarr.Array[Any]] = {}
        self.chunks: dict[str, int] = {}
        self._ds = xr.Dataset()
        if workspace_of(store).contents.node(group) is not None:
            self.arrays = dict(zarr.open_group(store, path=group, mode="r+").arrays())
        if not self.arrays:
            return
        self._ds = stored_dataset(store, group)
        if self._dim not in self._ds.dims:
            raise InvalidArgumentError(
                f"no array in the group '/{group}' has the dimension {self._dim!r}"
            )
        axis = axis_names(self._ds, self._dim)
        self._axes = {
            name: self._ds[name].dims.index(self._dim)
            for name in self.arrays
            if self._dim in self._ds[name].dims
        }
        for name in self._axes.keys() - {*axis}:
            array = self.arrays[name]
            self.chunks[name] = (array.shards or array.chunks)[self._axes[name]]

    @cached_property
    def _held(self) -> tuple[FileLayout, dict[str, npt.NDArray[Any]]]:
        refers = self._source.containers is not None
        return layout_of(self._ds, self._dim, self._store if refers else None, self._group)

    @property
    def layout(self) -> FileLayout:
        """What files have to agree with."""
        return self._held[0]

    @property
    def labels(self) -> npt.NDArray[Any] | None:
        """The labels of the rows."""
        return self._held[1].get(self._dim) if self.arrays else None

    @property
    def length(self) -> int:
        """How many rows there are."""
        return self._ds.sizes.get(self._dim, 0)

    @property
    def unit(self) -> int:
        """Chunks of all arrays that tasks write to end at multiples of so many rows."""
        return math.lcm(*self.chunks.values())

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
            array, told = self.arrays[name], self._ds[name].attrs
            if " since " not in str(told.get("units")) or array.dtype.kind not in "iu":
                continue
            names = {name, told.get("bounds", name)}
            values = np.concatenate([axis[n].ravel() for axis in axes for n in names & axis.keys()])
            try:
                _codes(fit_of(name, array.dtype, told), values)
            except (InvalidArgumentError, MisfitError):
                array.attrs["units"] = infer_datetime_units(values)
            else:
                units = units_of_first(values, str(told["units"]), array.dtype)
                array.attrs["units"] = units or told["units"]

    def write_axis(self, placed: Sequence[FileRows]) -> None:
        """Write the values of axis variables of all files.

        Raises
        ------
        FailedFilesError
            If values of a file would be read back differently.
        """
        for name in sorted(placed[0].file.axis):
            array, attributes = self.arrays[name], self.arrays[name].attrs.asdict()
            told = [other.attrs.asdict() for other in self.arrays.values()]
            fit = fit_of(name, array.dtype, {**meaning_of_bounds(name, told), **attributes})
            for run in runs(placed):
                try:
                    codes = _codes(fit, np.concatenate([each.file.axis[name] for each in run]))
                except (InvalidArgumentError, MisfitError):
                    raise _misfit(fit, run) from None
                array[run[0].start : run[-1].stop] = codes

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
        """Write rows that follow on each other; files are opened once for some cells."""
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
                times = _WINDOW_BYTES // (math.prod(steps) * array.dtype.itemsize)
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


def _misfit(fit: Fit, run: Sequence[FileRows]) -> FailedFilesError:
    """What to tell of the first file whose values the array cannot hold."""
    why = ""
    for each in run:  # xarray stores all in other units if those of one file do not fit
        try:
            _codes(fit, each.file.axis[fit.name])
        except (InvalidArgumentError, MisfitError) as error:
            why = f": {error.misfits[0].given if isinstance(error, MisfitError) else error}"
            break
    told = f"values of {fit.name!r} do not fit the array, which has room for {fit.range_text}{why}"
    return FailedFilesError(FailedFile(each.file.url, told))


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
    with told_of(url), source.opened(url) as (ds, session):
        axis = axis_names(ds, source.dim)
        new = ds.isel({source.dim: slice(0, 0)}).drop_encoding()
        if session is not None:
            new = new.drop_vars([name for name in new.variables if name not in axis])
            held = zarr.open_array(session.store, path=str(next(iter(ds.variables))), mode="r")
            zarr.open_group(target.store, path=group, zarr_format=held.metadata.zarr_format)
        own: dict[Any, dict[str, Any]] = {}
        for key, variable in new.variables.items():
            name = str(key)
            own[name] = dict(encoding.get(name, {}))
            if source.dim in variable.dims:
                long = name in axis
                own[name].setdefault("chunks", _chunks(ds.variables[key], source.dim, long=long))
            if variable.dtype.kind in "iufc":
                native = variable.dtype.newbyteorder("=")
                new[key] = variable.astype(native, keep_attrs=True)
            if "_FillValue" not in variable.attrs and variable.dtype.kind in "fc":
                own[name]["_FillValue"] = None  # else xarray adds one
        to_session(new.load(), target, group=group, mode="a", encoding=own, check=False)
        if session is not None:
            for key in ds.variables.keys() - {*axis}:
                _create_referring(target.store, group, session, ds[key].variable, str(key), source)


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


def _create_referring(
    store: ManifestStore,
    group: str,
    session: Session,
    variable: xr.Variable,
    name: str,
    source: SourceFiles,
) -> None:
    """Make an array as encoded as one in a file; refer to its chunks if it does not grow."""
    array = zarr.open_array(session.store, path=name, mode="r")
    buffers = array.metadata.to_buffer_dict(default_buffer_prototype())
    documents = {key: json.loads(buffer.to_bytes()) for key, buffer in buffers.items()}
    dims = list(map(str, variable.dims))
    chunks = [1] * (variable.ndim - array.ndim) + list(array.shards or array.chunks)
    shape = [0 if dim == source.dim else size for dim, size in variable.sizes.items()]
    if array.metadata.zarr_format == 2:
        documents[".zarray"] |= {"shape": shape, "chunks": chunks}
        documents[".zattrs"]["_ARRAY_DIMENSIONS"] = dims
    else:
        documents["zarr.json"] |= {"shape": shape, "dimension_names": dims}
        documents["zarr.json"]["chunk_grid"]["configuration"]["chunk_shape"] = chunks
    for key, document in documents.items():
        workspace_of(store).set(join(group, join(name, key)), json.dumps(document).encode())
    if source.dim not in dims:
        _refer(store, join(group, name), session, name, 0, 0)


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
