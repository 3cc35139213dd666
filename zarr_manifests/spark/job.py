"""A read as it travels to Spark's workers: its columns, its boxes, and the lease on its snapshot.

A job names a snapshot, columns and boxes of cells. It has neither data nor secrets, and its size
depends on the length of the axes, not on the number of cells.

A DataFrame is lazy, and Spark does not say when the last one that needs a snapshot is gone. So a
read leaves a lease behind that nobody gives up: it ends when its duration is over. A task that
begins when half of the duration or more is over leaves it again. So a lease covers a job of any
length, as long as tasks keep beginning.

The types of columns follow one table, and `to_arrow` converts as it defines:

=====================================  ==========================  ==============================
decoded values                         Spark                       remark
=====================================  ==========================  ==============================
bool                                   boolean
int8, int16, int32, int64              tinyint, smallint, int,
                                       bigint
uint8, uint16, uint32                  smallint, int, bigint       the next type that holds them
uint64                                 decimal(20,0)               no integer of Spark holds them
float16, float32, float64              float, float, double
datetime64 and CF times                timestamp                   UTC; NaT is null; microseconds
CF times of other calendars            string                      ISO 8601, said in the metadata
timedelta64                            interval day to second      NaT is null; microseconds
text of fixed or any length            string
bytes of fixed or any length           binary
=====================================  ==========================  ==============================

Other types (complex, structured) are refused. A calendar counts as another one if it has dates that
a timestamp cannot represent (`noleap`, `360_day`, ...), or if a coordinate in the mixed
Julian/Gregorian calendar goes back before 1582. A column's metadata has the variable's attributes.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec import Struct
from msgspec.structs import replace
from pyspark.errors import PySparkAttributeError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import StructType

from zarr_manifests import repositories
from zarr_manifests.decoding import REAL_CALENDARS
from zarr_manifests.errors import (
    InvalidArgumentError,
    ManifestsError,
    StorageError,
    UnsupportedStorageError,
    plain_text,
)
from zarr_manifests.grid import Box, IndexArray, grid_shape
from zarr_manifests.metrics import place_of
from zarr_manifests.planning.scan import Scan
from zarr_manifests.planning.where import Where
from zarr_manifests.runtime import quiet
from zarr_manifests.storage import Storage
from zarr_manifests.virtual.containers import VirtualContainer

if TYPE_CHECKING:
    import xarray as xr

    from zarr_manifests.repositories import Location
    from zarr_manifests.repository import Repository
    from zarr_manifests.spark.source import Source

_LOG = logging.getLogger(__name__)
_RENEWED: Final = 0.5 + 0.3 * os.urandom(1)[0] / 255
"""After which share of the duration this process renews: not all workers at the same moment."""
_left_s: Final[dict[tuple[Hashable, str, timedelta], float]] = {}
"""When a lease was left, as far as this process knows: by repository, snapshot and duration."""

type Containers = tuple[tuple[str, VirtualContainer], ...]

# As many tasks as a small cluster runs at once, where Spark does not tell.
_CONNECT_PARALLELISM: Final = 32
_TIMESTAMP: Final = pa.timestamp("us", tz="UTC")
_WIDER: Final[Mapping[str, pa.DataType]] = {
    "u1": pa.int16(),
    "u2": pa.int32(),
    "u4": pa.int64(),
    "u8": pa.decimal128(20, 0),
    "f2": pa.float32(),
}


# --- what is asked for -----------------------------------------------------------------------


def shared_repository(
    url: Location, storage_options: Mapping[str, object] | None = None
) -> Repository:
    """Return a repository that Spark's workers can reach.

    Raises
    ------
    UnsupportedStorageError
        If it is in the memory of this process.
    """
    repository = repositories.repository_of(url, storage_options)
    check_shared(repository.storage)
    return repository


def check_shared(storage: Storage) -> None:
    """Refuse a storage that Spark's workers cannot reach.

    Raises
    ------
    UnsupportedStorageError
        If it is in the memory of this process.
    """
    if not storage.capabilities.shared:
        raise UnsupportedStorageError(
            f"{storage.url} is in the memory of this process, and Spark's tasks run in others; put "
            "the repository on a local disk or a storage they can see"
        )


class ReadOptions(Struct, frozen=True, kw_only=True):
    """What to read and how, as `zarr_manifests.spark.read` documents it.

    Raises
    ------
    InvalidArgumentError
        If an option has a value that it cannot have.
    """

    variables: str | Sequence[str] | None = None
    group: str = "/"
    version: str | None = None
    where: Any = None
    layout: Literal["long", "chunk"] = "long"
    nan: Literal["null", "keep", "drop"] = "null"
    decode_times: bool = True
    target_rows: int = 2 * 1024**2
    max_tasks: int = 10_000

    def __post_init__(self) -> None:
        check_options(self)


def options_of[Options](kind: type[Options], given: Mapping[str, Any]) -> Options:
    """The options among the arguments of a call."""
    return kind(**{name: given[name] for name in get_type_hints(kind) if name in given})


def check_options(options: object) -> None:
    """Refuse attributes that are none of the words of their type, or no whole numbers from 1 on.

    Raises
    ------
    InvalidArgumentError
        If one is not; the error lists the words.
    """
    for name, kind in get_type_hints(type(options)).items():
        value, words = getattr(options, name), get_args(kind)
        if get_origin(kind) is Literal and value not in words:
            listed = ", ".join(map(repr, words))
            raise InvalidArgumentError(f"{name} cannot be {value!r}; known: {listed}")
        if kind is int and (type(value) is not int or value < 1):
            raise InvalidArgumentError(f"{name} must be 1 or more, not {value!r}")


class SparkFacts(Struct, frozen=True, kw_only=True):
    """What planning needs to know of a Spark session; it can be pickled.

    Parameters
    ----------
    parallelism : int, default 1
        Number of tasks that can run at once.
    time_zone : str, default "UTC"
        The time zone of times without one.
    """

    parallelism: int = 1
    time_zone: str = "UTC"

    @classmethod
    def of(cls, spark: SparkSession) -> SparkFacts:
        """The facts about a session, which may be one of Spark Connect."""
        try:
            parallelism = int(spark.sparkContext.defaultParallelism)
        except PySparkAttributeError:  # Spark Connect: the context is in another process
            told = spark.conf.get("spark.default.parallelism", None)
            parallelism = int(told) if told else _CONNECT_PARALLELISM
        return cls(
            parallelism=parallelism,
            time_zone=spark.conf.get("spark.sql.session.timeZone") or "UTC",
        )


# --- columns ---------------------------------------------------------------------------------


class Column(Struct, frozen=True):
    """A column of a DataFrame.

    Parameters
    ----------
    name : str
        Name of the variable or dimension.
    arrow : pyarrow.DataType
        Its Arrow type, which is one of Spark's.
    metadata : mapping
        The attributes that a schema can hold, and how the values are represented.
    """

    name: str
    arrow: pa.DataType
    metadata: Mapping[str, Any]


def column_of(source: Source, name: str, *, is_dimension: bool) -> Column:
    """Return a variable's column; only a dimension's coordinate is read for it.

    Raises
    ------
    NotFoundError
        If there is no such variable.
    InvalidArgumentError
        If Spark has no type for its values.
    """
    coordinate = source.coordinate(name) if is_dimension else None
    if is_dimension and coordinate is None:
        return Column(name, pa.int64(), {"values": "positions: the dimension has no coordinate"})
    dtype = source.decoded_dtype(name) if coordinate is None else coordinate.dtype
    attributes = source.decoded_by(name)
    metadata = {each: value for each, value in attributes.items() if _is_plain(value)}
    metadata.pop("coordinates", None)  # to xarray, it is no attribute
    if source.is_time(name):
        calendar = str(attributes.get("calendar", "standard")).lower()
        if calendar in REAL_CALENDARS and dtype.kind == "M":
            return Column(name, _TIMESTAMP, metadata | {"dtype": "datetime64[us]"})
        what = f"ISO 8601 text: a timestamp cannot hold all dates of the calendar {calendar!r}"
        return Column(name, pa.string(), metadata | {"dtype": "object", "values": what})
    arrow = _type(name, dtype, source.array(name).dtype)
    return Column(name, arrow, metadata | {"dtype": str(dtype)})


def frame_of(spark: SparkSession, columns: Mapping[str, xr.DataArray]) -> DataFrame:
    """A DataFrame of decoded values in memory, in C order; NaN is null."""
    fields, arrays = StructType(), []
    for name, found in columns.items():
        values = found.to_numpy().ravel()
        metadata = {each: value for each, value in found.attrs.items() if _is_plain(value)}
        text = values.dtype.kind in "OUT"  # the labels of other calendars, too
        column = Column(name, pa.string() if text else _type(name, values.dtype, values.dtype), {})
        fields.add(name, from_arrow_type(column.arrow), metadata=metadata)
        arrays.append(to_arrow(values, column, nan_is_null=True))
    return made_frame(spark, pa.table(arrays, names=[*columns]), fields)


def made_frame(spark: SparkSession, table: pa.Table, schema: StructType) -> DataFrame:
    """The rows of a table as a DataFrame; Spark Connect cannot tell the columns of none."""
    # Of several batches, Spark passes over those after an empty one.
    whole = table.combine_chunks()
    with quiet():  # what it warns of, features of pandas, is not used here
        return spark.createDataFrame(whole if len(whole) else [], schema)


def _chunk_columns(dimensions: Sequence[Column], variables: Sequence[Column]) -> tuple[Column, ...]:
    """The columns where a row is a chunk: coordinates as arrays, its shape, and values as bytes.

    Raises
    ------
    InvalidArgumentError
        If a variable's values have no fixed size.
    """
    values = pa.struct({"dtype": pa.string(), "data": pa.binary()})
    for column in variables:
        if column.metadata["dtype"] == "object" or column.arrow in (pa.string(), pa.binary()):
            raise InvalidArgumentError(
                f"the values of {column.name!r} have no fixed size, so layout='chunk' cannot give "
                "them as bytes; use layout='long'"
            )
    return (
        *(Column(c.name, pa.list_(c.arrow), c.metadata) for c in dimensions),
        Column("shape", pa.list_(pa.int64()), {}),
        *(Column(c.name, values, c.metadata) for c in variables),
    )


def _type(name: str, dtype: np.dtype[Any], stored: np.dtype[Any]) -> pa.DataType:
    if dtype.kind in "biuf" and dtype.itemsize <= 8:
        return _WIDER.get(f"{dtype.kind}{dtype.itemsize}") or pa.from_numpy_dtype(dtype)
    if dtype.kind in "mM":
        return _TIMESTAMP if dtype.kind == "M" else pa.duration("us")
    if dtype.kind == "O" and stored.kind in "TUS":
        return pa.string()
    if dtype.kind in "OSV" and dtype.names is None:
        return pa.binary()
    raise InvalidArgumentError(
        f"variable {name!r} has values of type {dtype}, which Spark has no type for; leave it out "
        "with variables=[...], or store it as several real variables"
    )


def _is_plain(value: Any) -> bool:
    """Whether a schema's metadata can hold an attribute."""
    if isinstance(value, list):
        plain = all(not isinstance(each, list) and _is_plain(each) for each in value)
        return plain and len({*map(type, value)}) == 1
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return isinstance(value, str) or (isinstance(value, float) and math.isfinite(value))


def to_arrow(values: npt.NDArray[Any], column: Column, *, nan_is_null: bool = False) -> pa.Array:
    """Convert decoded values (one-dimensional) to the column's Arrow type.

    Raises
    ------
    InvalidArgumentError
        If they have a date that a timestamp cannot represent.
    """
    arrow, kind = column.arrow, values.dtype.kind
    if pa.types.is_string(arrow):
        return pa.array([_text(value) for value in values.tolist()], arrow)
    if pa.types.is_binary(arrow):
        return pa.array(values.tolist(), arrow)
    if pa.types.is_timestamp(arrow) and kind == "O":
        raise InvalidArgumentError(
            f"variable {column.name!r} has dates before 1582 in the mixed Julian/Gregorian "
            "calendar, which no timestamp can hold; store it in proleptic_gregorian"
        )
    if kind in "mM":
        values = values.astype(f"{kind}8[us]", copy=False)
    if kind == "f" and values.dtype.itemsize == 2:
        values = values.astype(np.float32)
    return pa.array(values, from_pandas=nan_is_null).cast(arrow)


def _text(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    return str(value.isoformat()) if hasattr(value, "isoformat") else None  # else missing


# --- the read --------------------------------------------------------------------------------


class LeftLease(Struct, frozen=True):
    """A lease that was left on a snapshot.

    Parameters
    ----------
    storage : Storage
        The repository's storage.
    snapshot_id : str
        The snapshot.
    duration : timedelta
        How long it lasts, if nobody renews it.
    since_s : float
        When it was left, in seconds since 1970.
    """

    storage: Storage
    snapshot_id: str
    duration: timedelta
    since_s: float = 0.0

    def left(self) -> LeftLease:
        """The lease, which is left now, unless this or the last one known is not half over.

        There is one for each snapshot and duration. Where the storage refuses to be written, no
        lease is left, and the log says so.

        Raises
        ------
        SnapshotExpiredError
            If the snapshot has expired.
        """
        key = (place_of(self.storage), self.snapshot_id, self.duration)
        since_s = max(self.since_s, _left_s.get(key, 0.0))
        if time.time() >= since_s + _RENEWED * self.duration.total_seconds():
            repository = repositories.open(self.storage)
            how: Any = {"owner": f"Spark jobs on {self.snapshot_id}, {self.duration}"}
            try:
                with repository.lease(*key[1:], **how, instead=True) as lease:
                    lease.keep()
            except StorageError:
                _LOG.warning("no lease on %s, which cannot be written", repository, exc_info=True)
            since_s = _left_s[key] = time.time()
        return replace(self, since_s=since_s)

    def renew(self) -> None:
        """Leave it again, if half of its duration is over.

        A task goes on without it: what it reads may still be there, and else its error says so.
        """
        try:
            self.left()
        except ManifestsError:
            _LOG.warning(
                "the lease on snapshot %s was not renewed", self.snapshot_id, exc_info=True
            )


class Job(Struct, frozen=True, kw_only=True):
    """What all tasks of a read have in common.

    Parameters
    ----------
    storage : Storage
        The repository's storage.
    containers : tuple of (str, VirtualContainer)
        The repository's containers, by name.
    snapshot_id, group : str
        The snapshot and group to read.
    dimensions, variables : tuple of Column
        What is read; the dimensions in order of the variables' axes.
    shape : tuple of int
        The cells along each dimension, selected or not.
    scan : Scan
        The selected cells, cut into boxes of about the size of a task.
    parts : int64[n, 2, ndim]
        Boxes of cells to read, disjoint; each lies in a box of the scan.
    starts : int64[tasks + 1]
        Where each task's begin, and the end of the last.
    options : ReadOptions
        How to read; without variables and where, which are below.
    facts : SparkFacts
        Where it runs.
    where : Where, optional
        Which rows to keep.
    lease : LeftLease, optional
        The lease on the snapshot that tasks renew.
    """

    storage: Storage
    containers: Containers = ()
    snapshot_id: str
    group: str
    dimensions: tuple[Column, ...]
    variables: tuple[Column, ...]
    shape: tuple[int, ...]
    scan: Scan
    parts: IndexArray
    starts: IndexArray
    options: ReadOptions
    facts: SparkFacts
    where: Where | None = None
    lease: LeftLease | None = None

    @property
    def tasks(self) -> int:
        """The number of tasks."""
        return len(self.starts) - 1

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of a row."""
        if self.options.layout == "chunk":
            return _chunk_columns(self.dimensions, self.variables)
        return (*self.dimensions, *self.variables)

    @property
    def schema(self) -> StructType:
        """The schema of the rows."""
        fields = StructType()
        for column in self.columns:
            fields.add(column.name, from_arrow_type(column.arrow), metadata=dict(column.metadata))
        return fields

    def chunks(self) -> IndexArray:
        """The boxes of chunks (int64[n, 2, ndim]) of the grid that tasks read, disjoint."""
        chunk = np.array([axis.chunk for axis in self.scan.axes], np.int64)
        # A box has selected cells in each of its chunks.
        return np.stack([self.parts[:, 0] // chunk, -(-self.parts[:, 1] // chunk)], axis=1)

    @property
    def name(self) -> str:
        """What is read, as plans show it: the place and version, the condition, how much."""
        where = f" where {self.where.sql[:500]}" if self.where else ""
        # Where the variables have different chunks, the larger ones.
        axes = self.scan.axes
        total = math.prod(grid_shape(self.shape, [axis.chunk for axis in axes]))
        in_range = math.prod(len(axis.chunks) for axis in axes)
        told = (
            f"{chunks_in(self.chunks()):,} of {total:,} chunks, {total - in_range:,} out of range"
        )
        place = f"{self.storage.url} at {self.snapshot_id}"
        return plain_text(f"zarr_manifests {place}, {self.group}{where}: {told}")

    def boxes(self, task: int) -> Iterator[Box]:
        """The boxes of cells that the task with that number reads."""
        for lo, hi in self.parts[self.starts[task] : self.starts[task + 1]].tolist():
            yield Box(tuple(lo), tuple(hi))


def chunks_in(boxes: IndexArray) -> int:
    """The number of chunks, or of cells, in disjoint boxes (int64[n, 2, ndim])."""
    return int((boxes[:, 1] - boxes[:, 0]).prod(axis=1).sum())


def with_lease(job: Job, duration: timedelta | None) -> Job:
    """The job, on whose snapshot a lease was left for a duration, if it reads anything.

    Raises
    ------
    SnapshotExpiredError
        If the snapshot has expired.
    """
    if duration is None or not job.tasks:
        return job
    return replace(job, lease=LeftLease(job.storage, job.snapshot_id, duration).left())
