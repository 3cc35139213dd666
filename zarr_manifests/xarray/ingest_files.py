"""`ingest`: files become rows of a group, read and written by tasks.

1. Tasks open the files, except those that were ingested before and have not changed. They return
   layouts and labels.
2. The driver compares the layouts, sorts the files by their labels and gives each its rows. It
   makes new arrays like those of the first file, grows them, and writes the axis variables and the
   records of the files to the session.
3. Tasks write the rows of their files, as they are stored. In other processes, each writes to a
   fork of the session. No chunk has rows of two tasks.
4. The driver merges the forks and commits.

Records, labels and data are in one commit. So two concurrent ingestions conflict, and the later one
begins again at 2, on top of the other one's commit. The records are lines of JSON in an array of
bytes, `_ingest/files` below the group. A commit appends its lines, so its cost does not depend on
how many there are. The last line of a file counts.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import xarray as xr
import zarr
from msgspec import Struct
from msgspec.structs import replace
from xarray.coding.times import infer_datetime_units

from zarr_manifests import repositories
from zarr_manifests.errors import (
    ConflictError,
    CorruptObjectError,
    InvalidArgumentError,
    UnsupportedStorageError,
)
from zarr_manifests.keys import join
from zarr_manifests.planning.scan import default_chunks
from zarr_manifests.progress import expect, tell
from zarr_manifests.reports import IngestedFile, IngestReport, Problem
from zarr_manifests.repository import Repository
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.session import Fork, Session
from zarr_manifests.storage import Storage
from zarr_manifests.store import ManifestStore, workspace_of
from zarr_manifests.texts import count_text, listed
from zarr_manifests.versions import HEADS
from zarr_manifests.xarray.appended_rows import (
    FileFacts,
    FileLayout,
    FileRows,
    blocks,
    difference,
    place,
    runs,
    write_groups,
)
from zarr_manifests.xarray.array_target import ArrayTarget
from zarr_manifests.xarray.backend import bundle
from zarr_manifests.xarray.fit import MisfitError, fit_of, units_of_first
from zarr_manifests.xarray.source_files import (
    FailedFilesError,
    SourceFiles,
    axis_names,
    layout_of,
    source_url,
    stored_dataset,
    told_of,
)
from zarr_manifests.xarray.writers import to_session

_CHUNK_ENCODING: Final = ("chunks", "shards", "compressors", "filters", "serializer", "fill_value")
_TASKS: Final = 2
"""Tasks of a step, for each that runs at once: more if they would be large."""
_TASK_BYTES: Final = (16 * 1024**2, 256 * 1024**2)
"""A task writes so many bytes of files, if there are as many, and about so many at most."""
_MOST_LOOKED: Final = 256
"""The most files that a task looks at."""
_MERGED: Final = 32
"""So many forks are merged at once."""
_RECORDS: Final = "_ingest"
_RECORDS_CHUNK: Final = 256 * 1024
_CHUNK_BYTES: Final = 64 * 1024**2
_AXIS_CHUNK: Final = 8192
_WINDOW_BYTES: Final = 64 * 1024**2
"""Values that are read before they are written, if one chunk is not larger."""


class TaskRunner(Struct, frozen=True):
    """What runs tasks; by default this process, one after the other.

    Parameters
    ----------
    run : callable
        Yields the results of a call for each item of a sequence, in their order.
    parallelism : int
        How many run at once. Also where it is one: after each task, progress is told.
    elsewhere : bool
        Whether tasks run in other processes, each with a copy of the call.
    """

    run: Callable[[Callable[[Any], Any], Sequence[Any]], Iterator[Any]] = map
    parallelism: int = 16
    elsewhere: bool = False


def ingest(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    url: str | os.PathLike[str] | Storage | Repository,
    *,
    append_dim: str,
    open: Literal["netcdf", "hdf5", "zarr", "grib"]  # noqa: A002 - the word for it
    | Callable[[str], xr.Dataset] = "netcdf",
    variables: Sequence[str] | None = None,
    open_options: Mapping[str, Any] | None = None,
    group: str | None = None,
    branch: str = "main",
    encoding: Mapping[str, Mapping[str, Any]] | None = None,
    on_error: Literal["fail", "report"] = "fail",
    on_changed: Literal["error", "replace"] = "error",
    message: str | None = None,
    storage_options: Mapping[str, object] | None = None,
    runner: TaskRunner | None = None,
) -> IngestReport:
    """Append files to a group, along one dimension, in one commit.

    Files are sorted by their labels along the dimension. They have to agree with what the group
    has, or with the first file: dimensions, types, units, calendars, packing, and all values that
    do not grow with the files. Values are stored as the files store them.

    The repository remembers the files, so the same call with the same list does nothing, and with a
    longer list it appends what is new.

    Parameters
    ----------
    files : str, path or iterable of them
        A path or URL, or many, in any order. One that is there twice counts once.
    url : str, path, Storage or Repository
        Where the repository is, or is to be made.
    append_dim : str
        The dimension along which the files are joined. A file that has it only as a scalar is one
        row.
    open : {"netcdf", "hdf5", "zarr", "grib"} or callable, default "netcdf"
        What the files are. NetCDF-3 takes the package scipy, netCDF-4 and HDF5 take h5netcdf, and
        GRIB takes cfgrib, on the driver and on every worker. A function takes a local path or a
        URL, and returns a dataset, whose values are stored as they are.
    variables : sequence of str, optional
        What to take besides the coordinates; all variables by default.
    open_options : mapping, optional
        Arguments of `xarray.open_dataset`, such as `engine` or `group`.
    group : str, optional
        Path of the group; by default the root.
    branch : str, default "main"
        The branch to commit to.
    encoding : mapping, optional
        Of new arrays, by name: chunks, shards, compressors, filters, serializer and fill value. By
        default an array has the chunks of the first file, or chunks as long as that file.
    on_error : {"fail", "report"}, default "fail"
        What to do about files that cannot be opened or do not agree: raise an error that names them
        and commit nothing, or leave them out and list them in the report.
    on_changed : {"error", "replace"}, default "error"
        What to do about files that have changed since they were ingested: raise an error that names
        them, or write their rows again. A changed file must have the labels it had.
    message : str, optional
        The commit message.
    storage_options : mapping, optional
        Options of `zarr_manifests.storage.from_url` for the path or URL.
    runner : TaskRunner, optional
        What runs the tasks that read and write; by default, this process does, one after the other.
        `zarr_manifests.spark.ingest` spreads them over Spark's workers.

    Returns
    -------
    IngestReport
        What went where; `str` says it.

    Raises
    ------
    InvalidArgumentError
        If files cannot be opened, do not agree or have changed, or if an argument is invalid.
        Nothing is committed.
    ConflictError
        If others keep changing the group at the same time.
    UnsupportedStorageError
        If other processes cannot reach the repository (`memory://`).

    Examples
    --------
    >>> from pathlib import Path
    >>> import zarr_manifests as zm
    >>> year = Path("era5").glob("2024-*.nc")
    >>> report = zm.ingest(year, "era5.zarr", append_dim="time")  # doctest: +SKIP
    >>> print(report)  # doctest: +SKIP
    366 files added, in 1 commit: 9.12 GB in 71.2 s, 128 MB/s
    """
    choices = (
        ("on_error", on_error, ("fail", "report")),
        ("on_changed", on_changed, ("error", "replace")),
        ("open", "netcdf" if callable(open) else open, ("netcdf", "hdf5", "zarr", "grib")),
    )
    for name, value, known in choices:
        if value not in known:
            told = " or ".join(map(repr, known)) + " or a function" * (name == "open")
            raise InvalidArgumentError(f"{name} must be {told}, not {value!r}")
    if not isinstance(open_options, Mapping | None):
        raise InvalidArgumentError(f"open_options must be a mapping, not {open_options!r}")
    for name, key in ((name, key) for name, how in (encoding or {}).items() for key in how):
        if key not in _CHUNK_ENCODING:
            raise InvalidArgumentError(
                f"the encoding of {name!r} has {key!r}: values are stored as the files store "
                f"them, and only {', '.join(_CHUNK_ENCODING)} can be chosen"
            )
    given = [files] if isinstance(files, str | os.PathLike) else files
    urls = [*dict.fromkeys(map(source_url, given))]
    runner, target = runner or TaskRunner(), repositories.target_of(url, storage_options)
    storage = target.storage if isinstance(target, Repository) else target
    if runner.elsewhere and not storage.capabilities.shared:
        raise UnsupportedStorageError(
            "the repository is in the memory of this process, and Spark's workers cannot reach it: "
            "use a path or URL"
        )
    if target is storage and repositories.exists(storage):
        target = repositories.open(storage)
    return _Ingestion(
        runner=runner,
        source=SourceFiles(
            kind=open,
            dim=append_dim,
            variables=None if variables is None else tuple(variables),
            options=dict(open_options or {}),
        ),
        group=(group or "").strip("/"),
        branch=branch,
        encoding=dict(encoding or {}),
        reports=on_error == "report",
        replaces=on_changed == "replace",
        message=message,
    ).run(target, urls)


# --- what tasks do ---------------------------------------------------------------------------


def _look(
    source: SourceFiles, files: Sequence[tuple[str, _Record | None]]
) -> list[FileFacts | Problem]:
    """Look at files; those that are as they were are left out."""
    found: list[FileFacts | Problem] = []
    layouts: dict[FileLayout, FileLayout] = {}
    for url, known in files:
        try:
            facts = source.facts(url, None if known is None else known.stamps)
        except FailedFilesError as error:
            found += error.args
            continue
        if facts is not None:  # one layout for all files that have it is pickled once
            found.append(replace(facts, layout=layouts.setdefault(facts.layout, facts.layout)))
    return found


def _write(
    target: Session | Fork, group: str, source: SourceFiles, rows: Sequence[FileRows]
) -> Session | Fork | FailedFilesError:
    try:
        _GroupRows(target.store, group, source).write(rows)
    except FailedFilesError as error:
        return error
    return target


# --- what the driver does --------------------------------------------------------------------


class _Ingestion(Struct, kw_only=True, dict=True):
    runner: TaskRunner
    source: SourceFiles
    group: str
    branch: str
    encoding: Mapping[str, Mapping[str, Any]]
    reports: bool
    replaces: bool
    message: str | None
    waiting: dict[str, FileFacts] = {}
    changed: set[str] = set()
    failed: dict[str, Problem] = {}
    added: list[IngestedFile] = []
    replaced: list[IngestedFile] = []
    unchanged: int = 0
    snapshot_id: str | None = None

    def run(self, target: Repository | Storage, urls: Sequence[str]) -> IngestReport:
        """Ingest files into a repository; of one that is not there yet, there is the storage."""
        began, known = SYSTEM.monotonic_s(), {}
        if isinstance(target, Repository):
            session = target.readonly_session(HEADS + self.branch)
            known = _read_records(session.store, self.group)
        self._look_at(urls, known)
        self.changed = self.waiting.keys() & known.keys()
        self.unchanged = len(urls) - len(self.waiting) - len(self.failed)
        if self.changed and not self.replaces:
            verb = "is" if len(self.changed) == 1 else "are"
            raise InvalidArgumentError(
                f"{listed(sorted(self.changed))} {verb} not what was ingested: size, time, "
                "variables or options differ. Give on_changed='replace' to write the rows again"
            )
        if self.waiting:
            repositories.write_into(target, self._write_all, make=True)
        files = tuple(self.added), tuple(self.replaced), tuple(self.failed.values())
        seconds = SYSTEM.monotonic_s() - began
        return IngestReport(self.snapshot_id, *files, self.unchanged, seconds)

    def _look_at(self, urls: Sequence[str], known: Mapping[str, _Record]) -> None:
        """Find what files hold that are new or have changed."""
        due = ((url, known.get(url)) for url in urls)
        size = max(-(-len(urls) // (_TASKS * self.runner.parallelism)), 1)
        groups = [*itertools.batched(due, min(size, _MOST_LOOKED))]
        looked, done = self.runner.run(partial(_look, self.source), groups), 0
        expect("looking at files", len(urls))
        for group, found in zip(groups, looked, strict=True):
            self.failed |= {each.key: each for each in found if isinstance(each, Problem)}
            self.waiting |= {each.url: each for each in found if isinstance(each, FileFacts)}
            done += len(group)
            tell("looking at files", done)
        self._leave_out(())

    def _leave_out(self, files: Iterable[Problem]) -> None:
        """Go on without the files, if they are only to be reported."""
        self.failed |= {file.key: file for file in files}
        for url in self.failed:
            self.waiting.pop(url, None)
        if not self.failed or self.reports:
            return
        alike: dict[str, list[str]] = {}
        for file in self.failed.values():
            alike.setdefault(file.what, []).append(file.key)
        whys = (f"{listed(keys)}: {why}" for why, keys in alike.items())
        told = f"{count_text(len(self.failed), 'file')} cannot be ingested; nothing was committed"
        skip = ". Give on_error='report' to leave such files out" if self.waiting else ""
        raise InvalidArgumentError(f"{told}{skip}: {listed(whys, between='; ')}")

    def _write_all(self, repository: Repository) -> None:
        """Commit all files, again if others come first."""
        attempts = 0
        while self.waiting:
            session = repository.writable_session(self.branch)
            try:
                self._commit(session)
            except ConflictError:
                attempts += 1
                if attempts > repository.config.commits.attempts:
                    raise
            except FailedFilesError as error:
                self._leave_out(error.args)

    def _commit(self, session: Session) -> None:
        """Write the files, and commit them.

        Raises
        ------
        FailedFilesError
            If files cannot be ingested; the session is of no use then.
        """
        known = _read_records(session.store, self.group)
        rows = _GroupRows(session.store, self.group, self.source)
        placed = self._place(known, rows)
        if not placed:
            return
        if not rows.arrays:
            _create_arrays(session, self.group, self.source, placed[0].file.url, self.encoding)
            rows = _GroupRows(session.store, self.group, self.source)
            rows.choose_units(placed)
        rows.grow(max(each.stop for each in placed))
        for run in runs(placed) if placed[0].file.axis else ():
            rows.write_axis(session, run)
        _add_records(session.store, self.group, placed)
        self._write_rows(session, placed, rows)
        self.snapshot_id = session.commit(self.message or f"ingest {len(placed):,} files")
        for each in placed:
            file = self.waiting.pop(each.file.url)
            ingested = IngestedFile(file.url, each.start, file.rows, file.stamps[0])
            (self.replaced if file.url in self.changed else self.added).append(ingested)

    def _place(self, known: Mapping[str, _Record], rows: _GroupRows) -> list[FileRows]:
        """Give each file its rows, if others have not ingested it in the meantime."""
        refused = []
        for url, file in [*self.waiting.items()]:
            if url not in known:
                continue
            if known[url].stamps == file.stamps:
                del self.waiting[url]
                self.unchanged += 1
            elif url not in self.changed:
                refused.append(Problem(url, "somebody else has ingested it as it was before"))
        files, dim = [*self.waiting.values()], self.source.dim
        if not refused and files:
            due, whose = files[0].layout, files[0].url
            if rows.arrays:
                due, whose = rows.held[0], f"the group '/{self.group}'"
            differs = cache(lambda layout: difference(layout, due, dim))
            for file in files:
                found = differs(file.layout)
                if found is not None:
                    refused.append(Problem(file.url, f"{found[0]}, and {whose} has {found[1]}"))
        if refused:
            raise FailedFilesError(*refused)
        before = {url: (known[url].start, known[url].rows) for url in self.changed & known.keys()}
        labels = rows.held[1].get(dim) if rows.arrays else None
        placed, unfit = place(files, before, rows.length, labels, dim)
        if unfit:
            raise FailedFilesError(*(Problem(file.url, reason) for file, reason in unfit))
        return placed

    def _write_rows(self, session: Session, placed: Sequence[FileRows], rows: _GroupRows) -> None:
        """Have tasks write the files, and merge what they wrote.

        Raises
        ------
        FailedFilesError
            After all of them, if some could not read files.
        """
        nbytes = sum(each.file.stamps[0] for each in placed)
        most = max(_TASKS * self.runner.parallelism, nbytes // _TASK_BYTES[1])
        groups = write_groups(placed, rows.unit, most, _TASK_BYTES[0])
        target = session.fork() if self.runner.elsewhere else session
        results = self.runner.run(partial(_write, target, self.group, self.source), groups)
        forks: list[Fork] = []
        failed: list[Problem] = []
        files: set[str] = set()
        expect("writing files", len(placed))
        for group, written in zip(groups, results, strict=True):
            if isinstance(written, FailedFilesError):
                failed += written.args
            elif written is not session:
                forks.append(written)
            if len(forks) >= _MERGED:
                session.merge(*forks)
                forks.clear()
            files |= {each.file.url for each in group}
            tell("writing files", len(files))
        if failed:
            raise FailedFilesError(*failed)
        session.merge(*forks)


# --- rows of a group's arrays ------------------------------------------------------------------


class _GroupRows:
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
        return layout_of(self._ds, self._dim)

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
            if values.dtype.kind not in "MO":
                continue  # the units mean no times
            try:
                fit_of(name, array.dtype, told).encoded(values)
                units = units_of_first(values, str(told["units"]), array.dtype)
            except (InvalidArgumentError, MisfitError):
                units = infer_datetime_units(values)
            array.attrs["units"] = units or told["units"]

    def write_axis(self, session: Session, run: Sequence[FileRows]) -> None:
        """Write the values of axis variables of files whose rows follow on each other.

        Raises
        ------
        FailedFilesError
            If values of a file would be read back differently.
        """
        dims = {name: self._ds.variables[name].dims for name in run[0].file.axis}
        axis = {n: (own, np.concatenate([e.file.axis[n] for e in run])) for n, own in dims.items()}
        ds = xr.Dataset(coords=xr.Coordinates(axis, indexes={}))
        region = {self._dim: slice(run[0].start, run[-1].stop)}
        try:
            to_session(ds, session, group=self._group, region=region)
        except InvalidArgumentError as error:
            for each in run if len(run) > 1 else ():  # raises for the first that does not fit
                self.write_axis(session, [each])
            told = str(error).partition(". Nothing is committed")[0]
            raise FailedFilesError(Problem(run[0].file.url, told)) from None

    # --- what tasks write --------------------------------------------------------------------

    def write(self, rows: Sequence[FileRows]) -> None:
        """Write rows of files, except those of axis variables.

        Raises
        ------
        FailedFilesError
            If a file cannot be read, or has changed since it was looked at.
        """
        targets = {name: ArrayTarget(self.arrays[name], statistics=True) for name in self.chunks}
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
                with self._source.reading(each.file) as ds:
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
            shape, chunks = list(array.shape), list(array.shards or array.chunks)
            shape[self._axes[name]] = chunks[self._axes[name]] = rows
            itemsize = max(array.dtype.itemsize, 1)
            steps = bundle(shape, chunks, itemsize, _WINDOW_BYTES)
            starts = [range(0, size, step) for size, step in zip(shape, steps, strict=True)]
            nbytes = math.prod(map(min, steps, shape)) * itemsize
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


# --- new arrays ------------------------------------------------------------------------------


def _create_arrays(
    session: Session,
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
    with told_of(url), source.opened(url) as ds:
        axis, grows = axis_names(ds, dim), {n: v for n, v in ds.variables.items() if dim in v.dims}
        chunks = {key: _chunks(one, dim, long=key in axis) for key, one in grows.items()}
        new = ds.isel({dim: slice(0, 0)}, missing_dims="ignore").drop_encoding().load()
    own: dict[Any, dict[str, Any]] = {}
    for key, variable in new.variables.items():
        own[key] = dict(encoding.get(str(key), {}))
        if variable.dtype.kind in "iufc":
            own[key]["dtype"] = variable.dtype.newbyteorder("=")
        if key in chunks:
            own[key].setdefault("chunks", chunks[key])
        if "_FillValue" not in variable.attrs and variable.dtype.kind in "fc":
            own[key]["_FillValue"] = None  # else xarray adds one
    to_session(new, session, group=group, mode="a", encoding=own, check=False)


def _chunks(variable: xr.Variable, dim: str, *, long: bool) -> tuple[int, ...]:
    """Chunks of an array that grows: those of the file, or all that it has, within bounds."""
    wanted = variable.encoding.get("preferred_chunks") or {}
    chunks = [max(min(int(wanted.get(d, n)), n), 1) for d, n in variable.sizes.items()]
    if long:  # a few bytes a row
        chunks[variable.dims.index(dim)] = _AXIS_CHUNK
    return default_chunks(tuple(chunks), variable.dtype.itemsize, _CHUNK_BYTES)


# --- records of files ------------------------------------------------------------------------


class _Record(Struct, frozen=True):
    """Size, time or etag of an ingested file and how it was opened; where its rows were put."""

    stamps: tuple[int, str, str]
    start: int
    rows: int


def _read_records(store: ManifestStore, group: str) -> dict[str, _Record]:
    """What was ingested into a group, by URL."""
    array = _records(store, group)
    lines = "" if array is None else np.asarray(array[:]).tobytes().decode()
    found = {}
    try:
        for url, nbytes, stamp, how, start, rows in map(json.loads, lines.splitlines()):
            found[url] = _Record((nbytes, stamp, how), start, rows)
    except (TypeError, ValueError) as error:
        raise CorruptObjectError(
            f"the records of ingested files in /{join(group, _RECORDS)} cannot be read ({error})"
        ) from error
    return found


def _add_records(store: ManifestStore, group: str, batch: Iterable[FileRows]) -> None:
    """Append records of files; they are committed with the rest of the session."""
    text = "".join(
        f"{json.dumps([f.url, *f.stamps, start, f.rows])}\n"
        for f, start in ((each.file, each.start) for each in batch)
    )
    data, array = np.frombuffer(text.encode(), np.uint8), _records(store, group)
    if array is None:
        form: Any = zarr.open_group(store, path=group).metadata.zarr_format
        # Without a name for the axis, xarray could not open the groups as a tree.
        named: Any = {"dimension_names": ["byte"]} if form == 3 else {}
        made = zarr.create_group(store, path=join(group, _RECORDS), zarr_format=form)
        how_stored: Any = {"shape": (0,), "chunks": (_RECORDS_CHUNK,), "dtype": "u1"}
        array = made.create_array("files", **how_stored, **named)
    start = array.shape[0]
    array.resize((start + len(data),))
    array[start:] = data


def _records(store: ManifestStore, group: str) -> zarr.Array[Any] | None:
    try:
        path = join(group, join(_RECORDS, "files"))
        return zarr.open_array(store, path=path, mode="r" if store.read_only else "r+")
    except FileNotFoundError:
        return None
