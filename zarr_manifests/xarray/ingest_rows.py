"""Rows of files become rows of a group's arrays.

The session that commits grows the arrays and writes the axis variables. Forks of it make the arrays
and write everything else, each its own parts: as copies of what is stored, or as references.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xarray as xr
import zarr
from xarray.coding.times import infer_datetime_units

from zarr_manifests.engine.edit.workspace import Workspace
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.keys import join
from zarr_manifests.planning.file_rows import FileLayout, FilePart, PlacedFile
from zarr_manifests.runtime import quiet
from zarr_manifests.session import Session, initialized_chunks
from zarr_manifests.store import ManifestStore, workspace_of
from zarr_manifests.xarray.array_target import ArrayTarget
from zarr_manifests.xarray.encoding import begin_write, fit_of, units_of_first
from zarr_manifests.xarray.fit import Fit, MisfitError
from zarr_manifests.xarray.scan_files import array_document, codecs_of
from zarr_manifests.xarray.source_files import (
    FailedFileError,
    OpenedFile,
    SourceFiles,
    axis_names,
    decoded_axis,
    layout_of,
    stamp_of,
)
from zarr_manifests.xarray.stored_group import meaning_of_bounds

__all__ = [
    "Template",
    "There",
    "choose_units",
    "create_arrays",
    "create_arrays_of",
    "failed",
    "grow",
    "template_of",
    "there_is",
    "write_axis",
    "write_parts",
]

_CHUNK_BYTES: Final = 64 * 1024**2
_AXIS_CHUNK: Final = 8192
_WINDOW_BYTES: Final = 32 * 1024**2
"""Values of a variable that are read before they are written, if one chunk is not larger."""
_OPEN_FILES: Final = 64


@dataclass(frozen=True, slots=True, eq=False)
class There:
    """What a group has already, as far as files have to fit to it.

    Parameters
    ----------
    layout : FileLayout
        What files have to agree with.
    length : int
        Rows along the dimension.
    labels : ndarray or None
        Its labels.
    chunks : mapping of str to int
        Lengths of chunks along the dimension, of the arrays that tasks write to.
    zarr_format : int
        Of the group.
    """

    layout: FileLayout
    length: int
    labels: npt.NDArray[Any] | None
    chunks: Mapping[str, int]
    zarr_format: int


def there_is(store: ManifestStore, group: str, files: SourceFiles) -> There | None:
    """Return what the group has; None if it has no arrays.

    Raises
    ------
    InvalidArgumentError
        If none of them has the dimension.
    """
    arrays = _arrays(store, group)
    if not arrays:
        return None

    def codecs(name: str) -> str:
        if files.containers is None:
            return ""
        return codecs_of(store, join(group, name), arrays[name].ndim)

    with _stored(store, group) as ds:
        if files.dim not in ds.dims:
            raise InvalidArgumentError(
                f"no array in the group '/{group}' has the dimension {files.dim!r}"
            )
        axis = decoded_axis(ds, files.dim)
        labels = axis[files.dim].values if files.dim in axis else None
        chunks = {
            name: (array.shards or array.chunks)[ds[name].dims.index(files.dim)]
            for name, array in arrays.items()
            if files.dim in ds[name].dims and name not in axis
        }
        layout = layout_of(ds, axis, files.dim, codecs)
        form = next(iter(arrays.values())).metadata.zarr_format
        return There(layout, ds.sizes[files.dim], labels, chunks, form)


def _arrays(store: ManifestStore, group: str) -> dict[str, zarr.Array[Any]]:
    mode: Any = "r" if store.read_only else "r+"
    try:
        return dict(zarr.open_group(store, path=group, mode=mode).arrays())
    except FileNotFoundError:
        return {}


def _stored(store: Any, group: str) -> xr.Dataset:
    how: dict[str, Any] = {"decode_cf": False, "consolidated": False, "chunks": None}
    return xr.open_dataset(store, engine="zarr", group=group or None, **how)


# --- arrays ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """Arrays like those in a file, without rows.

    Parameters
    ----------
    url : str
        The file.
    ds : Dataset
        The variables: without rows, or with the values that do not grow.
    chunks : mapping of str to tuple of int
        The chunks of variables that grow, unless others are asked for.
    """

    url: str
    ds: xr.Dataset
    chunks: Mapping[str, tuple[int, ...]]


def template_of(url: str, opened: OpenedFile, dim: str) -> Template:
    """Return what arrays to make for a file; not those that refer to its chunks."""
    ds, axis = opened.ds, set(axis_names(opened.ds, dim))
    new = ds.isel({dim: slice(0, 0)}).drop_encoding()
    if opened.session is not None:
        new = new.drop_vars([name for name in new.variables if name not in axis])
    for name, variable in new.variables.items():
        if variable.dtype.kind in "iufc":
            new[name] = variable.astype(variable.dtype.newbyteorder("="), keep_attrs=True)
    chunks = {
        str(name): _chunks(ds[name].variable, dim, long=name in axis)
        for name, variable in new.variables.items()
        if dim in variable.dims
    }
    return Template(url, new.load(), chunks)


def create_arrays(
    store: ManifestStore,
    group: str,
    template: Template,
    encoding: Mapping[str, Mapping[str, Any]],
    zarr_format: int = 3,
) -> None:
    """Make arrays without rows, and write what does not grow."""
    own: dict[Any, dict[str, Any]] = {}
    for name, variable in template.ds.variables.items():
        own[name] = dict(encoding.get(str(name), {}))
        if name in template.chunks:
            own[name].setdefault("chunks", template.chunks[str(name)])
        if "_FillValue" not in variable.attrs and variable.dtype.kind in "fc":
            own[name]["_FillValue"] = None  # else xarray adds one
    how = {"group": group or None, "mode": "a", "append_dim": None, "zarr_format": zarr_format}
    begin_write(template.ds, store, how, None, own, {}, statistics=True).sync()


def create_arrays_of(
    store: ManifestStore,
    group: str,
    files: SourceFiles,
    url: str,
    encoding: Mapping[str, Mapping[str, Any]],
) -> None:
    """Make arrays like those in a file; they may refer to the chunks of files."""
    with files.opened(url) as opened:
        template, source = template_of(url, opened, files.dim), opened.session
        if source is None:
            create_arrays(store, group, template, encoding)
            return
        document_name, _ = array_document(source.store, str(next(iter(opened.ds.variables))))
        zarr_format = 3 if document_name == "zarr.json" else 2
        create_arrays(store, group, template, encoding, zarr_format)
        for name in opened.ds.variables:
            if name not in template.ds.variables:
                _create_referring(store, group, opened, str(name), files.dim)


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


def _create_referring(
    store: ManifestStore, group: str, opened: OpenedFile, name: str, dim: str
) -> None:
    """Make an array as encoded as one in a file; refer to its chunks if it does not grow."""
    assert opened.session is not None
    source, dims = opened.session.store, opened.ds[name].dims
    document_name, document = array_document(source, name)
    expands = len(dims) > len(document["shape"])
    if dim in dims:
        shape = [1] * expands + document["shape"]
        shape[dims.index(dim)] = 0
        document["shape"] = shape
    path, workspace = join(group, name), workspace_of(store)
    if document_name == ".zarray":
        document["chunks"] = [1] * expands + document["chunks"]
        attributes = {**opened.ds[name].attrs, "_ARRAY_DIMENSIONS": list(dims)}
        attributes.pop("_FillValue", None)  # which the document has
        workspace.set(join(path, ".zarray"), json.dumps(document).encode())
        workspace.set(join(path, ".zattrs"), json.dumps(attributes, default=_listed).encode())
    else:
        chunks = document["chunk_grid"]["configuration"]
        chunks["chunk_shape"] = [1] * expands + chunks["chunk_shape"]
        document["dimension_names"] = list(dims)
        workspace.set(join(path, "zarr.json"), json.dumps(document).encode())
    if dim not in dims:
        _refer(store, path, opened.session, name, 0, 0)


def _listed(value: Any) -> Any:
    return np.asarray(value).tolist()


def grow(store: ManifestStore, group: str, dim: str, length: int) -> None:
    """Make the arrays along the dimension that long; what is new has no values yet."""
    with _stored(store, group) as ds:
        for name, array in _arrays(store, group).items():
            if dim in ds[name].dims:
                shape = list(array.shape)
                shape[ds[name].dims.index(dim)] = length
                array.resize(tuple(shape))


# --- axis variables --------------------------------------------------------------------------


def choose_units(store: ManifestStore, group: str, dim: str, placed: Sequence[PlacedFile]) -> None:
    """Have new arrays of times count in units in which those of all files are whole numbers.

    The first file's units stay if they do: days since a midnight are none for hourly files, and
    days since the only time there is make no room for more.
    """
    arrays = _arrays(store, group)
    for name in {name for each in placed for name in each.file.axis} & arrays.keys():
        array = arrays[name]
        attributes: dict[str, Any] = array.attrs.asdict()
        if " since " not in str(attributes.get("units")) or array.dtype.kind not in "iu":
            continue
        names = {name, attributes.get("bounds", name)}
        axes = [each.file.axis for each in placed]
        values = np.concatenate([axis[n].ravel() for axis in axes for n in names & axis.keys()])
        try:
            _codes(fit_of(name, array.dtype, attributes), values)
        except (InvalidArgumentError, MisfitError):
            array.attrs["units"] = infer_datetime_units(values)
        else:
            finer = units_of_first(values, str(attributes["units"]), array.dtype)
            if finer is not None:
                array.attrs["units"] = finer


def write_axis(store: ManifestStore, group: str, dim: str, placed: Sequence[PlacedFile]) -> None:
    """Write the values of axis variables of all files.

    Raises
    ------
    FailedFileError
        If values of a file would be read back differently.
    """
    arrays = _arrays(store, group)
    with _stored(store, group) as ds:
        attributes = {str(name): dict(v.attrs) for name, v in ds.variables.items()}
    for name in sorted({name for each in placed for name in each.file.axis}):
        meaning = {**meaning_of_bounds(name, attributes.values()), **attributes[name]}
        for run in _runs(placed):
            values = np.concatenate([each.file.axis[name] for each in run])
            fit = fit_of(name, arrays[name].dtype, meaning)
            try:
                codes = _codes(fit, values)
            except (InvalidArgumentError, MisfitError):
                raise _misfit(fit, run) from None
            arrays[name][run[0].start : run[-1].stop] = codes


def _misfit(fit: Fit, run: Sequence[PlacedFile]) -> FailedFileError:
    """What to tell of the first file whose values the array cannot hold."""
    why = ""
    for each in run:  # xarray stores all in other units if those of one file do not fit
        try:
            _codes(fit, each.file.axis[fit.name])
        except (InvalidArgumentError, MisfitError) as error:
            why = f": {error.misfits[0].given if isinstance(error, MisfitError) else error}"
            break
    told = f"values of {fit.name!r} do not fit the array, which has room for {fit.range_text}{why}"
    return FailedFileError(each.file.url, told)


def _runs(placed: Sequence[PlacedFile]) -> Iterator[list[PlacedFile]]:
    """Files whose rows follow on each other."""
    run: list[PlacedFile] = []
    for each in sorted((one for one in placed if one.file.rows), key=lambda one: one.start):
        if run and run[-1].stop != each.start:
            yield run
            run = []
        run.append(each)
    if run:
        yield run


def _codes(fit: Fit, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    with quiet():  # what they warn of is checked
        return fit.encoded(values)


# --- what tasks write ------------------------------------------------------------------------


def write_parts(
    store: ManifestStore, group: str, files: SourceFiles, parts: Sequence[FilePart]
) -> None:
    """Write rows of files, except those of axis variables.

    Raises
    ------
    FailedFileError
        If a file cannot be read, or has changed since it was looked at.
    """
    with _stored(store, group) as ds:
        names = set(ds.variables) - set(axis_names(ds, files.dim))
        axes = {
            str(name): ds[name].dims.index(files.dim)
            for name in names
            if files.dim in ds[name].dims
        }
    if files.containers is not None:
        for part in parts:
            with _File(files, part) as opened:
                assert opened.session is not None
                for name, axis in axes.items():
                    _refer(store, join(group, name), opened.session, name, axis, part.start)
        return
    workspace = workspace_of(store)
    with _FilesInUse(files) as in_use:
        targets = [
            _Target(store, workspace, join(group, name), name, axis) for name, axis in axes.items()
        ]
        for window in _windows(parts, targets):
            for target in targets:
                target.write(window, in_use)
        for target in targets:
            target.target.record()


class _File:
    """A file in use; any failure in it is told with its URL."""

    def __init__(self, files: SourceFiles, part: FilePart) -> None:
        self._files, self._part, self._stack = files, part, ExitStack()

    def __enter__(self) -> OpenedFile:
        url = self._part.url
        try:
            return self._stack.enter_context(self._files.opened(url))
        except Exception as error:
            raise failed(url, error) from error

    def __exit__(self, *error: Any) -> None:
        self._stack.close()
        if error[0] is None and stamp_of(self._part.url) != (self._part.nbytes, self._part.stamp):
            raise FailedFileError(self._part.url, "it has changed since it was looked at")


def failed(url: str, error: Exception) -> FailedFileError:
    """What to tell of a file that cannot be read."""
    return FailedFileError(url, f"{type(error).__name__}: {error}")


class _FilesInUse:
    """Files that stay open, the ones used last."""

    def __init__(self, files: SourceFiles) -> None:
        self._files = files
        self._open: OrderedDict[str, tuple[_File, OpenedFile]] = OrderedDict()

    def __enter__(self) -> _FilesInUse:
        return self

    def __exit__(self, *error: Any) -> None:
        while self._open:
            self._open.popitem()[1][0].__exit__(*error)

    def values(self, part: FilePart, name: str, place: tuple[slice, ...]) -> npt.NDArray[Any]:
        """The stored values of a variable."""
        if part.url in self._open:
            self._open.move_to_end(part.url)
        else:
            if len(self._open) >= _OPEN_FILES:
                self._open.popitem(last=False)[1][0].__exit__(None, None, None)
            file = _File(self._files, part)
            self._open[part.url] = file, file.__enter__()
        try:
            return np.asarray(self._open[part.url][1].ds[name].variable[place].values)
        except Exception as error:
            raise failed(part.url, error) from error


class _Target:
    """An array that rows are written to, whole chunks at a time as far as there are rows."""

    def __init__(
        self, store: ManifestStore, workspace: Workspace, path: str, name: str, axis: int
    ) -> None:
        array = zarr.open_array(store, path=path, mode="r+")
        self.target = ArrayTarget(array, workspace, statistics=True)
        self.name, self.axis, self._dtype = name, axis, array.dtype
        self._sizes, self._chunks = list(array.shape), list(array.shards or array.chunks)
        self.chunk = self._chunks[axis]  # rows of a chunk
        self._sizes[axis] = self._chunks[axis] = 1  # of a row
        self.row_bytes = max(math.prod(self._sizes) * self._dtype.itemsize, 1)

    def write(self, parts: Sequence[FilePart], files: _FilesInUse) -> None:
        """Write parts that follow on each other."""
        start, rows = parts[0].start, parts[-1].stop - parts[0].start
        for box in self._boxes(rows):

            def rows_at(first: int, stop: int, box: Sequence[slice] = box) -> tuple[slice, ...]:
                return (*box[: self.axis], slice(first, stop), *box[self.axis + 1 :])

            shape = [part.stop - part.start for part in rows_at(0, rows)]
            block = np.empty(shape, self._dtype)
            for part in parts:
                values = files.values(part, self.name, rows_at(part.first, part.last))
                block.swapaxes(0, self.axis)[part.start - start : part.stop - start] = (
                    values.swapaxes(0, self.axis)
                )
            self.target[rows_at(start, start + rows)] = block

    def _boxes(self, rows: int) -> Iterator[tuple[slice, ...]]:
        """All cells of a row, in boxes of whole chunks that fit the memory with so many rows."""
        steps = list(self._chunks)
        nbytes = rows * math.prod(steps) * self._dtype.itemsize
        for axis in reversed(range(len(steps))):
            number = -(-self._sizes[axis] // steps[axis])
            times = max(1, min(number, _WINDOW_BYTES // max(nbytes, 1)))
            steps[axis], nbytes = steps[axis] * times, nbytes * times
        starts = [range(0, size, step) for size, step in zip(self._sizes, steps, strict=True)]
        for corner in itertools.product(*starts):
            sides = zip(corner, steps, self._sizes, strict=True)
            yield tuple(slice(at, min(at + step, size)) for at, step, size in sides)


def _windows(parts: Sequence[FilePart], targets: Sequence[_Target]) -> Iterator[list[FilePart]]:
    """Parts that are written together: in a row, up to a boundary of all arrays' chunks."""
    unit = math.lcm(*(target.chunk for target in targets)) if targets else 1
    most = max((target.row_bytes for target in targets), default=1)
    rows = max(_WINDOW_BYTES // most // unit, 1) * unit
    window: list[FilePart] = []
    for part in sorted(parts, key=lambda each: each.start):
        start = part.start
        while start < part.stop:
            if window and (window[-1].stop != start or start % rows == 0):
                yield window
                window = []
            stop = min((start // rows + 1) * rows, part.stop)
            first = part.first + start - part.start
            window.append(FilePart(part.url, part.nbytes, part.stamp, start, stop, first))
            start = stop
    if window:
        yield window


def _refer(
    store: ManifestStore, path: str, session: Session, name: str, axis: int, start: int
) -> None:
    """Refer to the chunks of a file's array from `start` on; chunks without a file are copied."""
    array = zarr.open_array(store, path=path, mode="r+")
    shift = np.zeros(array.ndim, np.int64)
    if array.ndim:
        shift[axis] = start // (array.shards or array.chunks)[axis]
    refs = session.store.get_virtual_refs(name)
    width = array.ndim - refs.index.shape[1]
    index = np.pad(refs.index, ((0, 0), (width, 0))) + shift
    if len(refs):
        store.set_virtual_refs(
            path,
            index,
            refs.locations,
            refs.source,
            refs.offset,
            refs.length,
            etags=refs.etags,
            unchanged_since=refs.unchanged_since,
            modified=refs.modified,
            sizes=refs.sizes,
            checksums=refs.checksums,
        )
    virtual = {tuple(at) for at in refs.index.tolist()}
    others = [at for at in initialized_chunks(session, name).tolist() if tuple(at) not in virtual]
    if others:
        for at, data in session.read_chunks(name, coords=np.array(others, np.int64)):
            place = np.pad(np.array(at, np.int64), (width, 0)) + shift
            key = array.metadata.encode_chunk_key(tuple(place.tolist()))
            workspace_of(store).set(join(path, key), data)
