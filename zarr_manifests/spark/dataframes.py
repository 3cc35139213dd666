"""Writing the rows of a Spark DataFrame to the cells of arrays, in one commit.

The driver prepares a session, and tasks write chunks to forks of it (`cell_writer`). The driver
merges the forks and commits. It never collects rows, only the labels that are to be appended or
made. If another commit has changed what an append is planned on, all of it is done again.

Invariant: wrong data is reported in a row, not by an exception, since Spark would try the task
again.

A write from rows, wherever they are: what it may be asked for, its plan, and its commit
----------------------------------------------------------------------------------------

Before tasks begin, it makes or resizes arrays, and plans. All of it happens in a session that is
not committed yet, so nothing is left of it if the write fails. Tasks get forks of that session: a
fork made before a resize would have the wrong shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xarray as xr
from msgspec import Struct
from msgspec.structs import replace
from pyspark.errors import PySparkAttributeError
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import to_arrow_schema
from xarray.coding.strings import create_vlen_dtype

from zarr_manifests.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidArgumentError,
    NotFoundError,
    TransactionAlreadyCommitted,
)
from zarr_manifests.grid import Box, Coords
from zarr_manifests.keys import join, split
from zarr_manifests.planning.conflict import Txn, txn_of
from zarr_manifests.planning.scan import Bins, common_unit, default_chunks
from zarr_manifests.planning.skipping import matching_runs
from zarr_manifests.planning.where import parse_where, zone_of
from zarr_manifests.repositories import Location, target_of, write_into
from zarr_manifests.repository import Repository
from zarr_manifests.session import Fork, Session, commits_of
from zarr_manifests.spark.cell_writer import (
    AlongAxis,
    Values,
    WritePlan,
    check_fits,
    distinct,
    share_cells,
    shown,
    to_numpy,
    write_cells,
)
from zarr_manifests.spark.job import (
    SparkFacts,
    check_options,
    check_shared,
    options_of,
    shared_repository,
)
from zarr_manifests.spark.source import Source
from zarr_manifests.spark.tasks import PICKLE, mapped, results
from zarr_manifests.store import contents_of, workspace_of
from zarr_manifests.xarray.fit import MisfitError, fit_of, of_first_label
from zarr_manifests.xarray.stored_group import StoredGroup, check_agreement, same_labels
from zarr_manifests.xarray.writers import to_session

QUERY_ID: Final = "sql.streaming.queryId"
"""The local property of Spark that names the query of a batch."""
_WHOLE: Final = {"dtype": "int64", "_FillValue": -(2**63)}
_TIMED: Final[Mapping[str, Mapping[str, Any]]] = {
    "M": {**_WHOLE, "units": "microseconds since 1970-01-01"},
    "m": {**_WHOLE, "units": "microseconds"},
}
"""How new times and durations are stored."""


class WriteOptions(Struct, frozen=True, kw_only=True):
    """What to write and how, as `zarr_manifests.spark.write_dataframe` documents it.

    Raises
    ------
    InvalidArgumentError
        If an option has a value that it cannot have, or options contradict each other.
    """

    target: str
    dims: Sequence[str]
    mode: Literal["append", "overwrite-region", "create"] = "append"
    append_dim: str | None = None
    region: Mapping[str, Any] | None = None
    encoding: Mapping[str, Mapping[str, Any]] | None = None
    missing: Literal["fill", "keep", "error"] = "fill"
    tolerance: Mapping[str, Any] | None = None
    buffer_bytes: int = 256 * 1024**2
    max_tasks: int = 1000
    time_zone: str = "UTC"
    txn_app_id: str | None = None
    txn_version: int | None = None
    message: str | None = None
    metadata: Mapping[str, Any] | None = None
    branch: str = "main"

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("region", "encoding", "tolerance"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Mapping):
                raise InvalidArgumentError(f"{name} is a mapping by name, not {value!r}")
        if isinstance(self.dims, str) or len(set(self.dims)) != len(self.dims):
            raise InvalidArgumentError(f"dims are names of columns, each once, not {self.dims!r}")
        for name, goes_with in (
            ("append_dim", "append"),
            ("region", "overwrite-region"),
            ("encoding", "create"),
        ):
            if getattr(self, name) and self.mode != goes_with:
                raise InvalidArgumentError(f"{name} goes with mode={goes_with!r}")
        if self.mode == "append" and self.append_dim not in self.dims:
            raise InvalidArgumentError(
                f"mode='append' needs append_dim, one of {', '.join(self.dims)}, not "
                f"{self.append_dim!r}"
            )
        for name in sorted({*(self.tolerance or ()), *(self.region or ())} - set(self.dims)):
            raise InvalidArgumentError(f"{name!r} is not among the dims {', '.join(self.dims)}")

    def txn(self) -> Txn | None:
        """The transaction that the write is, if it is not a batch of a stream.

        Raises
        ------
        InvalidArgumentError
            If only one of its two parts is given.
        """
        if (self.txn_app_id is None) != (self.txn_version is None):
            raise InvalidArgumentError("txn_app_id and txn_version go together")
        return None if self.txn_app_id is None else txn_of((self.txn_app_id, self.txn_version))


class WriteReport(Struct, frozen=True, kw_only=True):
    """What a write from rows has done.

    Parameters
    ----------
    snapshot_id : str or None
        The new snapshot; None if there was nothing to commit.
    cells : int
        The cells that have got a value, or NULL, from a row.
    chunks : int
        The chunks that were written.
    bytes : int
        Their stored bytes.
    tasks : int
        The tasks that wrote them.
    replayed : bool
        Whether the transaction had landed before, so that nothing was written.
    """

    snapshot_id: str | None
    cells: int = 0
    chunks: int = 0
    bytes: int = 0
    tasks: int = 0
    replayed: bool = False

    def __str__(self) -> str:
        if self.replayed:
            return f"nothing written: the transaction is in {self.snapshot_id or 'the branch'}"
        if self.snapshot_id is None:
            return "nothing written"
        return (
            f"{self.cells:,} cells in {self.chunks:,} chunks of {self.bytes:,} bytes, by "
            f"{self.tasks:,} tasks, in snapshot {self.snapshot_id}"
        )


class Rows(Protocol):
    """The rows of a write: where they are, only they know."""

    @property
    def columns(self) -> pa.Schema:
        """The columns."""

    def labels(self, dims: Sequence[str]) -> Mapping[str, pa.Array]:
        """The distinct values of these columns."""

    def fill(self, plan: WritePlan, fork: Fork) -> Sequence[tuple[Fork, int]]:
        """Write the cells of a plan; what each task returns (see `write_cells`)."""


def write_rows(
    repository: Repository,
    options: WriteOptions,
    rows: Rows,
    txn: Txn | None = None,
    parallelism: int = 1,
) -> WriteReport:
    """Write rows and commit them; again, if others have changed what it is planned on."""
    message = options.message
    if message is None:
        message = f"{options.mode} rows to /{options.target.strip('/')}"
    for attempt in count(1):
        with repository.writable_session(options.branch) as session:
            try:
                commits_of(session).begin(txn)
                done: Sequence[tuple[Fork, int]] = ()
                plan = plan_write(session, options, rows, parallelism)
                if plan is not None:
                    done = rows.fill(plan, session.fork())
                    session.merge(*(fork for fork, _ in done))
                if txn is None and not session.status():
                    return WriteReport(snapshot_id=None)
                snapshot_id = commits_of(session).commit(message, options.metadata, txn=txn)
                break
            except TransactionAlreadyCommitted as landed:
                return WriteReport(snapshot_id=landed.snapshot_id, replayed=True)
            except ConflictError:
                # What others appended may leave room behind it, or say that the labels are there.
                if options.mode != "append" or attempt > repository.config.commits.attempts:
                    raise
    written = next(repository.ancestry(snapshot_id, limit=1)).written
    return WriteReport(
        snapshot_id=snapshot_id,
        chunks=written.get("refs-set", 0),
        bytes=written.get("chunk-bytes", 0),
        cells=sum(cells for _, cells in done),
        tasks=len(done),
    )


def batch_txn(app: str | None, query_id: str | None, number: int) -> Txn:
    """A batch of a stream as a transaction, which comes right after the batch before.

    Raises
    ------
    InvalidArgumentError
        If there is neither a name of an application nor a query.

    Examples
    --------
    >>> from zarr_manifests.spark.dataframes import batch_txn
    >>> batch_txn("hourly", None, 7)
    Txn(app='hourly', version=7, after=6)
    """
    if app is None and query_id is None:
        raise InvalidArgumentError(
            "the id of the query is not known, so its batches cannot be told from those of other "
            "queries; name it by txn_app_id, which is the option txn-app-id"
        )
    return Txn(app or f"spark:{query_id}", number, number - 1)


def plan_write(
    session: Session, options: WriteOptions, rows: Rows, parallelism: int = 1
) -> WritePlan | None:
    """Prepare a session for a write, and plan it; None if there is nothing to write.

    The session's commit will refuse a tip on which the write would be another one.

    Parameters
    ----------
    session : Session
        A writable session without changes.
    options : WriteOptions
        What is written, and how.
    rows : Rows
        The rows.
    parallelism : int, default 1
        How many tasks can run at once.

    Raises
    ------
    ManifestsError
        As for `zarr_manifests.spark.write_dataframe`.
    """
    columns, appended = rows.columns, str(options.append_dim)
    group, names = _target(session, options, columns)
    workspace = workspace_of(session.store)
    looked_up = [join(group, dim) for dim in options.dims]
    workspace.tip_checks.append(same_labels(workspace.context, workspace.contents.view, looked_up))
    given, length = pa.array([], pa.int64()), 0
    if options.mode == "create":
        _create(session, group, names, options, rows)
    source = Source(session, group)
    dims = _dims_of(source, names, options)
    if options.mode == "append":
        given = rows.labels([appended])[appended]
        length = _append(session, source, names, options, given)
        source = Source(session, group)
    sizes, tolerance = source.sizes(names[0]), options.tolerance or {}
    along = tuple(
        AlongAxis.of(
            dim, source.coordinate(dim), sizes[dim], columns.field(dim).type, tolerance.get(dim)
        )
        for dim in dims
    )
    variables = tuple(_values(source, name, dims, columns) for name in names)
    shape = tuple(axis.size for axis in along)
    chunks = [dict(zip(source.dims[n], source.meta(n).chunk_shape, strict=True)) for n in names]
    unit = common_unit([tuple(chunk[dim] for dim in dims) for chunk in chunks], shape)
    sides = [(0, size) for size in shape]
    if options.mode == "append":
        at = dims.index(appended)
        found = along[at].positions(given)
        sides[at] = int(found[found >= 0].min(initial=length)), shape[at]
    elif options.region is not None:
        sides = _region(source, along, options)
    elif options.mode == "overwrite-region":
        labels = rows.labels(dims)
        # Tasks refuse rows of labels that are not there.
        places = [np.maximum(axis.positions(labels[axis.name]), 0) for axis in along]
        if not all(map(len, places)):
            return None
        sides = [(int(each.min()), int(each.max()) + 1) for each in places]
    region = Box(tuple(lo for lo, _ in sides), tuple(hi for _, hi in sides))
    cell_bytes = sum(one.itemsize for one in variables) + 1
    cells = options.buffer_bytes // cell_bytes
    bins = Bins.of(region, unit, cells=cells, least=parallelism)
    plan = WritePlan(
        along=along,
        variables=variables,
        bins=bins,
        cell_bytes=cell_bytes,
        tasks=min(len(bins), options.max_tasks),
        missing=options.missing,
    )
    return plan if plan.tasks else None


# --- what is there ---------------------------------------------------------------------------


def _target(
    session: Session, options: WriteOptions, columns: pa.Schema
) -> tuple[str, tuple[str, ...]]:
    """The path of the group to write to, and the names of its variables.

    Raises
    ------
    NotFoundError
        If there is no such array, group or variable, and it is not to be created.
    AlreadyExistsError
        If a variable is to be created that is there.
    InvalidArgumentError
        If columns lack, do not go with an array, or have times without a zone.
    """
    for name in options.dims:
        if name not in columns.names:
            raise InvalidArgumentError(
                f"there is no column {name!r}; there are: {', '.join(columns.names)}"
            )
    for column in columns:
        if column.type in (pa.timestamp("us"), pa.date32()):
            raise InvalidArgumentError(
                f"the column {column.name!r} has no time zone, so its values are not exact times: "
                "cast it to timestamp"
            )
    names = tuple(name for name in columns.names if name not in options.dims)
    if not names:
        raise InvalidArgumentError("all columns are dims: there are no values to write")
    path = options.target.strip("/")
    nodes = contents_of(session.store).nodes()
    node, (parent, last) = nodes.get(path), split(path)
    if node.array is not None if node is not None else names == (last,):
        if names != (last,):
            raise InvalidArgumentError(
                f"/{path} is an array, so there has to be one column besides dims, named "
                f"{last!r}; there are: {', '.join(names)}"
            )
        path = parent
    for name in names:
        there = join(path, name) in nodes
        if there and options.mode == "create":
            raise AlreadyExistsError(
                f"/{join(path, name)} is there already; nothing was written. Pass "
                "mode='append' or 'overwrite-region' to write to it"
            )
        if not there and options.mode != "create":
            raise NotFoundError(
                f"there is no variable {name!r} in group /{path}; mode='create' makes it"
            )
    return path, names


def _dims_of(source: Source, names: Sequence[str], options: WriteOptions) -> list[str]:
    """The dims, in the order of the first variable's axes.

    Raises
    ------
    InvalidArgumentError
        If a variable has other dimensions.
    """
    for name in names:
        source.array(name)  # which refuses one whose dimensions have no names
        found = source.sizes(name).keys()
        if found != set(options.dims):
            raise InvalidArgumentError(
                f"{name!r} has the dimensions ({', '.join(found)}), and dims are "
                f"({', '.join(options.dims)}): they must be the same. Write variables with other "
                "dimensions in other calls"
            )
    return [*source.dims[names[0]]]


def _values(source: Source, name: str, dims: Sequence[str], columns: pa.Schema) -> Values:
    """A variable, and how values of its column are stored.

    Raises
    ------
    InvalidArgumentError
        If values of the column cannot be values of the variable.
    """
    array, decoded = source.array(name), source.decoded_dtype(name)
    check_fits(name, columns.field(name).type, np.empty(0, decoded), "the values of that array")
    stored = array.dtype
    if stored.kind in "biufcMmSU":
        stored = stored.newbyteorder("=")
    fit = fit_of(name, stored, source.decoded_by(name))
    absent = np.empty(0, stored)
    if decoded.kind in "biufMm":
        unit = {"M": "M8[us]", "m": "m8[us]"}.get(decoded.kind, "f8")
        with suppress(MisfitError):
            absent = fit.encoded(np.array([None], unit))
    axes = tuple(map(dims.index, source.dims[name]))
    return Values(name=name, path=array.path, axes=axes, stored=stored, fit=fit, absent=absent)


def _region(
    source: Source, along: Sequence[AlongAxis], options: WriteOptions
) -> list[tuple[int, int]]:
    """The positions in ranges of labels, by axis.

    Raises
    ------
    InvalidArgumentError
        If a range selects nothing, or labels that are apart from each other.
    """
    ranges, zone = options.region or {}, zone_of(options.time_zone)
    sides: list[tuple[int, int]] = []
    for axis in along:
        name, given = axis.name, ranges.get(axis.name)
        if name not in ranges:
            sides.append((0, axis.size))
            continue
        (labels,) = parse_where([(name, "within", given)]).comparisons
        runs = matching_runs([labels], source.coordinate(name), axis.size, zone=zone)
        if len(runs) != 1:
            known, what = axis.lookup.labels.to_numpy(), "nothing: there are no labels"
            if len(runs):
                what = f"{len(runs)} separate runs of labels; write one after the other"
            elif len(known):
                what = f"nothing: labels run from {shown(known[0])} to {shown(known[-1])}"
            raise InvalidArgumentError(f"the range {given!r} of {name!r} selects {what}")
        sides.append(tuple(runs[0].tolist()))
    return sides


# --- append ----------------------------------------------------------------------------------


def _append(
    session: Session, source: Source, names: Sequence[str], options: WriteOptions, given: pa.Array
) -> int:
    """Make the arrays longer, and write the labels; how long they were.

    Raises
    ------
    AlreadyExistsError
        If labels are there already, and cells without a row are not to be kept.
    InvalidArgumentError
        If they do not go behind what is there, or arrays would differ in length.
    """
    dim, store, group = str(options.append_dim), session.store, source.group.strip("/")
    size, there = source.sizes(names[0])[dim], source.coordinate(dim)
    alike = {name: source.dims[name] for name in names} | ({} if there is None else {dim: (dim,)})
    nothing = {name: (own, np.empty((0,) * len(own))) for name, own in alike.items()}
    arrays = StoredGroup.of(store, group)
    check_agreement(xr.Dataset(nothing), arrays, dim)
    if there is None:
        length = _behind(dim, size, distinct(dim, given), options)
    else:
        _append_labels(session, source, given, options)
        length = StoredGroup.of(store, group).sizes(dim)[dim]
    for name in names:
        arrays.open_array_in(store, name, [*(arrays.sizes(name) | {dim: length}).values()])
    return size


def _behind(dim: str, size: int, given: npt.NDArray[Any], options: WriteOptions) -> int:
    """The length after an append of positions."""
    if given.dtype.kind not in "iu":
        raise InvalidArgumentError(
            f"{dim!r} has no coordinate, so its column must have positions, not {given.dtype}"
        )
    there = given[given < size]
    if there.size and options.missing != "keep":
        raise AlreadyExistsError(
            f"{dim!r} has no coordinate and {size} positions, so rows to append have positions "
            f"from {size} on, not {', '.join(map(str, there[:3]))}; nothing was written"
        )
    return max(size, int(given[-1]) + 1) if given.size else size


def _append_labels(
    session: Session, source: Source, given: pa.Array, options: WriteOptions
) -> None:
    """Write the labels that are new behind those that are there."""
    dim, group = str(options.append_dim), source.group
    there, labels = source.coordinate(dim), distinct(dim, given)
    assert there is not None
    if there.dtype.kind == "O" and there.size and hasattr(there[0], "calendar"):
        raise InvalidArgumentError(
            f"{dim!r} has a calendar that Spark's timestamps cannot represent; append with "
            "zarr_manifests.write"
        )
    check_fits(dim, given.type, there, "the labels of that dimension")
    try:
        fit_of(dim, source.array(dim).dtype, source.decoded_by(dim)).encoded(labels)
    except MisfitError as error:
        told = "; ".join(f"{one.given} would be read back as {one.read}" for one in error.misfits)
        raise InvalidArgumentError(
            f"labels of {dim!r} do not fit the existing coordinate: {told}. Nothing was written"
        ) from None
    if not labels.size:
        return
    if len(there) > 1 and there[0] > there[-1]:
        labels = labels[::-1]
    # Attributes of the group that were left out would be dropped.
    ds = xr.Dataset(coords={dim: labels}, attrs=source.own_attributes)
    # Where cells without a row are filled, existing labels would lose what they have.
    existing: Any = "replace" if options.missing == "keep" else "error"
    how: Any = {"group": group, "append_dim": dim, "on_existing": existing}
    try:
        to_session(ds, session, **how, check=False)  # other variables are made longer later
    except (AlreadyExistsError, InvalidArgumentError) as error:
        what, said, _ = str(error).partition("othing was written")
        if not said:
            raise
        advice = "labels to append must come after the existing ones"
        if isinstance(error, AlreadyExistsError):
            advice = "mode='overwrite-region' overwrites existing cells"
        raise type(error)(f"{what}{said}: {advice}") from None


# --- create ----------------------------------------------------------------------------------


def _create(
    session: Session, group: str, names: Sequence[str], options: WriteOptions, rows: Rows
) -> None:
    """Make the arrays, without values, and the coordinates that are not there.

    They are written without a cell, and resized, since that takes no memory.
    """
    dims, store = tuple(options.dims), session.store
    nodes = contents_of(store).nodes()
    there = [dim for dim in dims if join(group, dim) in nodes]
    wanted = [dim for dim in dims if dim not in there]
    new = {dim: distinct(dim, column) for dim, column in rows.labels(wanted).items()}
    source: Any = Source(session, group) if there else None
    labels: dict[str, Any] = {**new, **{dim: source.coordinate(dim) for dim in there}}
    for dim in there:
        if labels[dim] is None:
            raise InvalidArgumentError(
                f"/{group} has an array {dim!r} that is not a coordinate of {dim!r}"
            )
    shape = tuple(len(labels[dim]) for dim in dims)
    blank = {name: _blank(name, dims, shape, rows.columns, options) for name in names}
    how: Any = {"group": group, "mode": "a"}
    empty = xr.Dataset(blank, attrs=StoredGroup.of(store, group).own_attributes)
    to_session(empty, session, **how, check=False, statistics=False)  # not yet of the right size
    arrays = StoredGroup.of(store, group)
    for name in names:
        arrays.open_array_in(store, name, shape)
    if new:
        coordinates = xr.Dataset(coords=new, attrs=empty.attrs)
        for dim in (dim for dim in new if len(new[dim]) == 1):
            coordinates, _ = of_first_label(coordinates, dim, {})
        to_session(coordinates, session, **how)


def _blank(
    name: str, dims: tuple[str, ...], shape: Coords, columns: pa.Schema, options: WriteOptions
) -> xr.Variable:
    """A variable as it is to be, without any cell."""
    dtype = to_numpy(pa.array([], columns.field(name).type)).dtype
    if dtype.kind == "O":
        dtype = create_vlen_dtype(str)  # type: ignore[no-untyped-call]
    encoding = {**_TIMED.get(dtype.kind, {}), **(options.encoding or {}).get(name, {})}
    if encoding.get("chunks") is None:
        encoding["chunks"] = default_chunks(shape, np.dtype(encoding.get("dtype", dtype)).itemsize)
    return xr.Variable(dims, np.empty((0,) * len(dims), dtype), {}, encoding)


# --- DataFrames ---------------------------------------------------------------------------------


_WRONG: Final = -1
"""In place of the number of a bin: what is wrong with the rows."""


def write_dataframe(
    df: DataFrame,
    url: Location,
    target: str,
    *,
    dims: Sequence[str],
    mode: Literal["append", "overwrite-region", "create"] = "append",
    append_dim: str | None = None,
    region: Mapping[str, Any] | None = None,
    encoding: Mapping[str, Mapping[str, Any]] | None = None,
    missing: Literal["fill", "keep", "error"] = "fill",
    tolerance: Mapping[str, Any] | None = None,
    txn_app_id: str | None = None,
    txn_version: int | None = None,
    message: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    branch: str = "main",
    buffer_bytes: int = 256 * 1024**2,
    max_tasks: int = 1000,
    storage_options: Mapping[str, object] | None = None,
) -> WriteReport:
    """Write the rows of a DataFrame to the cells of arrays, in one commit.

    Each row is written to one cell. The columns `dims` hold its coordinates, and the other columns
    are variables. Rows may be in any order. If anything fails, nothing is committed.

    Parameters
    ----------
    df : DataFrame
        The rows. Without a region, the DataFrame is computed twice, first to find labels or the
        region, and must give the same rows both times; persist it if it is costly.
    url : str, path, Storage or Repository
        The repository. Spark's workers must be able to reach it.
    target : str
        Path of an array, whose name the one column besides `dims` has; or of a group, whose
        variables have the names of the columns besides `dims`.
    dims : sequence of str
        The columns that are coordinates: all dimensions of the variables, in any order. Values are
        looked up in the coordinates as they are read; cast dates and times to timestamps. For a
        dimension without a coordinate they are positions from 0 on.
    mode : "append", "overwrite-region" or "create", default "append"
        Whether to append cells, to overwrite existing ones, or to make new variables.
    append_dim : str, optional
        The dimension to append along. Its new labels are those of the rows, and are added after the
        existing ones. Rows of existing labels are an error, unless `missing` is "keep".
    region : mapping of str to (lo, hi) or slice, optional
        With `overwrite-region`: by dimension, the closed range of labels to write, as for `read`;
        other dimensions are written whole. By default the smallest box that holds the rows.
    encoding : mapping, optional
        With `create`: encodings of the new variables, such as `{"t": {"chunks": (10, 90, 90)}}`.
        Existing coordinates of the group are used as they are; the others are the distinct labels
        of the rows, ascending.
    missing : "fill", "keep" or "error", default "fill"
        What to do with cells of the region without a row: remove their values, keep them, or raise
        an error. Cells outside the region never change.
    tolerance : mapping, optional
        By dimension, how far a value may be from the label it is looked up as, such as
        `{"lat": 1e-6}` or `{"time": timedelta(minutes=1)}`. By default they have to be equal.
    txn_app_id, txn_version : str and int, optional
        The name of an application and the number of its step, which is written at most once, as by
        `Session.commit(..., txn=(app, version))`.
    message : str, optional
        The commit message.
    metadata : mapping, optional
        Stored with the commit.
    branch : str, default "main"
        The branch to commit to.
    buffer_bytes : int, default 268,435,456
        How much of decoded values a task holds. Chunks are written by as many tasks as that takes,
        and by at least as many as can run at once.
    max_tasks : int, default 1000
        The largest number of tasks that write. Where it is not enough, a task writes several
        buffers, one after the other.
    storage_options : mapping, optional
        Options of `zarr_manifests.storage.from_url` for the path or URL.

    Returns
    -------
    WriteReport
        The snapshot, and what was written.

    Raises
    ------
    NotARepositoryError
        If there is no repository. With `create` the commit makes one, unless `branch` is another
        than "main".
    NotFoundError
        If there is no such branch or variable, and it is not to be created.
    AlreadyExistsError
        If labels to append, or variables to create, are there already.
    InvalidArgumentError
        If options contradict each other; if rows have no cell in the grid or the region, or two
        rows one cell; if values would be read back differently, as for `zarr_manifests.write`; or
        if a cell gets no value (NULL, or no row) and the array has nothing that stands for it.
    ConflictError
        If others have committed to the same chunks in the meantime.
    UnsupportedStorageError
        If other processes cannot reach the repository (`memory://`).

    Examples
    --------
    >>> from zarr_manifests.spark import read, session, write_dataframe
    >>> spark = session(master="local[2]")  # doctest: +SKIP
    >>> mean = read(spark, "winds", "u").groupBy("lat", "lon").agg({"u": "avg"})  # doctest: +SKIP
    >>> mean = mean.withColumnRenamed("avg(u)", "u_mean")  # doctest: +SKIP
    >>> how = dict(dims=["lat", "lon"], mode="create")  # doctest: +SKIP
    >>> write_dataframe(mean, "winds", "u_mean", **how)  # doctest: +SKIP
    """
    options = options_of(WriteOptions, locals())
    into = partial(_write_frame, df, options, options.txn())
    place = target_of(url, storage_options)
    check_shared(place.storage if isinstance(place, Repository) else place)
    return write_into(place, into, make=mode == "create" and branch == "main")


def foreach_batch(
    url: Location,
    target: str,
    *,
    dims: Sequence[str],
    missing: Literal["fill", "keep", "error"] = "keep",
    txn_app_id: str | None = None,
    message: str | None = None,
    branch: str = "main",
    on_report: Callable[[int, WriteReport], None] | None = None,
    storage_options: Mapping[str, object] | None = None,
    **options: Any,
) -> Callable[[DataFrame, int], None]:
    """A function for `writeStream.foreachBatch` that writes each batch in one commit, exactly once.

    Each batch is a transaction of the query: its number is kept in the snapshots. A batch that
    comes again is not written again, whatever log of the checkpoint was lost, and whoever else runs
    on the same checkpoint. A batch without rows is committed too.

    Parameters
    ----------
    url, target, dims, branch
        As for `write_dataframe`.
    missing : "fill", "keep" or "error", default "keep"
        As for `write_dataframe`. With `keep`, a later batch can bring the rest of a chunk, or cells
        of labels that earlier batches have appended.
    txn_app_id : str, optional
        The name under which the number of the batch is kept, instead of the id of the query. Spark
        Connect does not tell the id, so it is needed there.
    message : str, optional
        The message of the commits; by default it names the batch.
    on_report : callable, optional
        Called with the number of each batch, and what was written.
    storage_options : mapping, optional
        Options of `zarr_manifests.storage.from_url` for the path or URL.
    **options : optional
        `mode`, `append_dim`, `region`, `tolerance`, `metadata`,
        `buffer_bytes` and `max_tasks` of `write_dataframe`.

    Returns
    -------
    callable
        To be given to `foreachBatch`.

    Raises
    ------
    InvalidArgumentError
        If options contradict each other.
    NotARepositoryError
        If there is no repository.
    UnsupportedStorageError
        If other processes cannot reach it (`memory://`).

    Examples
    --------
    >>> from zarr_manifests.spark import foreach_batch
    >>> write = foreach_batch(  # doctest: +SKIP
    ...     "winds", "/", dims=["time", "lat", "lon"], append_dim="time"
    ... )
    >>> query = (  # doctest: +SKIP
    ...     rows.writeStream.foreachBatch(write).option("checkpointLocation", "winds-in").start()
    ... )
    """
    repository = shared_repository(url, storage_options)
    own: Any = {"txn_app_id": txn_app_id, "message": message, "branch": branch}
    asked = WriteOptions(target=target, dims=dims, missing=missing, **own, **options)
    if asked.txn_version is not None:
        raise InvalidArgumentError("a stream numbers its batches itself: leave out txn_version")

    def write(rows: DataFrame, number: int) -> None:
        query_id = None
        with suppress(PySparkAttributeError):  # Spark Connect: the context is in another process
            query_id = rows.sparkSession.sparkContext.getLocalProperty(QUERY_ID)
        txn = batch_txn(txn_app_id, query_id, number)
        how = asked if message is not None else replace(asked, message=f"batch {number}")
        rows.persist()  # it is computed for the labels, too
        try:
            report = _write_frame(rows, how, txn, repository)
        finally:
            rows.unpersist()
        if on_report is not None:
            on_report(number, report)

    return write


# --- rows of a DataFrame ---------------------------------------------------------------------


def _write_frame(
    df: DataFrame, options: WriteOptions, txn: Txn | None, repository: Repository
) -> WriteReport:
    facts = SparkFacts.of(df.sparkSession)
    options = replace(options, time_zone=facts.time_zone)
    return write_rows(repository, options, _FrameRows(df), txn, facts.parallelism)


class _FrameRows:
    """The rows of a DataFrame, whose tasks write them."""

    def __init__(self, df: DataFrame) -> None:
        self.frame = df
        self.columns = to_arrow_schema(df.schema, timezone="UTC")

    def labels(self, dims: Sequence[str]) -> dict[str, pa.Array]:
        """The distinct values of these columns, in one pass; O(axis) on the driver."""
        if not dims:
            return {}
        sets = [f.collect_set(f.col(f"`{dim}`")).alias(dim) for dim in dims]
        table = self.frame.agg(*sets).toArrow().combine_chunks()
        return {
            dim: column.chunk(0).flatten().cast(self.columns.field(dim).type)
            for dim, column in zip(dims, table.columns, strict=True)
        }

    def fill(self, plan: WritePlan, fork: Fork) -> list[tuple[Fork, int]]:
        """Write the cells of a plan; what each task returns."""
        bins = len(plan.bins)
        shares = mapped(self.frame, partial(_shares, plan), "bin bigint, cells binary")
        # Every bin gets a mark, so that those without rows are written, too.
        marks = self.frame.sparkSession.range(0, bins, 1, 1)
        marks = marks.selectExpr("id AS bin", "CAST(NULL AS binary) AS cells")
        task = f.expr(f"CAST(greatest(bin, 0) * {plan.tasks} div {bins} AS int)")
        parted = shares.union(marks).repartitionById(plan.tasks, task)
        if bins > plan.tasks:
            parted = parted.sortWithinPartitions("bin")
        return results(parted, lambda batches: write_cells(plan, fork, _pieces(batches)))


def _shares(plan: WritePlan, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """What `share_cells` yields, as rows; or, in one more, what is wrong."""
    try:
        for number, cells in share_cells(plan, batches):
            yield _row(number, cells)
    except InvalidArgumentError as error:
        yield _row(_WRONG, PICKLE.dumps(error))


def _row(number: int, cells: bytes) -> pa.RecordBatch:
    columns = [pa.array([number], pa.int64()), pa.array([cells], pa.binary())]
    return pa.record_batch(columns, ["bin", "cells"])


def _pieces(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, Any]]:
    """What `_shares` has made rows of; raises what is wrong."""
    for batch in batches:
        for number, cells in zip(batch.column(0).to_pylist(), batch.column(1), strict=True):
            data = cells.as_buffer() if cells.is_valid else None
            if number == _WRONG:
                raise PICKLE.loads(data)
            yield number, data
