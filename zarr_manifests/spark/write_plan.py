"""The plan of a write from rows, as it travels to Spark's workers.

It says which cell a row is of, how values are encoded, and which task writes which chunks. It has
neither data nor secrets, and its size depends on the length of the axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.grid import Coords
from zarr_manifests.planning.cells import Bins
from zarr_manifests.spark.cell_values import AlongAxis, Values
from zarr_manifests.spark.checks import check_counts, check_words

__all__ = ["WriteOptions", "WritePlan", "WriteReport"]

_MODES: Final = ("append", "overwrite-region", "create")
_MISSING: Final = ("fill", "keep", "error")
_DUPLICATES: Final = ("error", "last")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """What to write and how, as `zarr_manifests.spark.write_dataframe` documents it.

    Raises
    ------
    InvalidArgumentError
        If an option has a value that it cannot have, or options contradict each other.
    """

    target: str
    dims: Sequence[str]
    mode: str = "append"
    append_dim: str | None = None
    region: Mapping[str, Any] | None = None
    template: Any = None
    encoding: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    missing: str = "fill"
    duplicates: str = "error"
    order_by: str | None = None
    tolerance: Mapping[str, Any] = field(default_factory=dict)
    statistics: bool = True
    buffer_bytes: int = 256 * 1024**2
    max_tasks: int = 1000
    time_zone: str = "UTC"

    def __post_init__(self) -> None:
        self._check_values()
        for name, goes_with in (
            ("append_dim", "append"),
            ("region", "overwrite-region"),
            ("template", "create"),
            ("encoding", "create"),
        ):
            if getattr(self, name) and self.mode != goes_with:
                raise InvalidArgumentError(f"{name} goes with mode={goes_with!r}")
        if self.mode == "append" and self.append_dim not in self.dims:
            raise InvalidArgumentError(
                f"mode='append' needs append_dim, one of {', '.join(self.dims)}, not "
                f"{self.append_dim!r}"
            )
        if (self.duplicates == "last") != (self.order_by is not None):
            raise InvalidArgumentError(
                "duplicates='last' and order_by go together: rows have no order in Spark, so the "
                "last of two is the one with the larger value in the column order_by"
            )
        unknown = sorted({*self.tolerance, *(self.region or ())} - set(self.dims))
        if unknown:
            raise InvalidArgumentError(
                f"{unknown[0]!r} is not among the dims {', '.join(self.dims)}"
            )

    def _check_values(self) -> None:
        """Refuse an option that has a value that it cannot have, whatever the others are."""
        check_words(self, mode=_MODES, missing=_MISSING, duplicates=_DUPLICATES)
        check_counts(self, "buffer_bytes", "max_tasks")
        for name in ("region", "encoding", "tolerance"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Mapping):
                raise InvalidArgumentError(f"{name} is a mapping by name, not {value!r}")
        if isinstance(self.dims, str) or len(set(self.dims)) != len(self.dims):
            raise InvalidArgumentError(f"dims are names of columns, each once, not {self.dims!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePlan:
    """What all tasks of a write have in common.

    Parameters
    ----------
    along : tuple of AlongAxis
        The dimensions, in the order of the first variable's axes.
    variables : tuple of Values
        What is written.
    shape : tuple of int
        The length of each dimension.
    bins : Bins
        The cells that are written.
    tasks : int
        How many tasks write them.
    missing, duplicates : str
        As in `WriteOptions`.
    order_by : str, optional
        The column that says which of two rows is the last.
    statistics : bool
        Whether to measure what is written.
    """

    along: tuple[AlongAxis, ...]
    variables: tuple[Values, ...]
    shape: Coords
    bins: Bins
    tasks: int
    missing: str
    duplicates: str
    order_by: str | None
    statistics: bool

    @property
    def columns(self) -> list[str]:
        """The columns of the rows that are used."""
        own = [axis.name for axis in self.along] + [one.name for one in self.variables]
        return own if self.order_by is None else [*own, self.order_by]

    @property
    def cell_schema(self) -> pa.Schema:
        """The columns of what travels between tasks: offsets in a bin, and stored values."""
        fields = [("offset", pa.uint32() if self.bins.bits <= 32 else pa.int64())]
        fields += [(str(number), _travelling(one)) for number, one in enumerate(self.variables)]
        if self.order_by is not None:
            fields.append(("order", pa.float64()))
        return pa.schema(fields)

    def cell(self, position: Sequence[int]) -> str:
        """A cell by its labels, for messages."""
        pairs = zip(self.along, position, strict=True)
        return ", ".join(f"{axis.name}={axis.label(int(at))}" for axis, at in pairs) or "()"

    def repeated(
        self, number: int, offset: int, values: Sequence[tuple[Any, Any]]
    ) -> InvalidArgumentError:
        """The error for two rows of one cell: a cell of a bin, and both values by variable."""
        told = ", ".join(
            f"{one.name} {one.decoded(first)} and {one.decoded(second)}"
            for one, (first, second) in zip(self.variables, values, strict=True)
        )
        how = (
            "give duplicates='last' and order_by=..., if one of them counts"
            if self.order_by is None
            else f"they have the same {self.order_by!r}, so neither is the last"
        )
        cell = self.cell(self.bins.cell(number, offset))
        return InvalidArgumentError(
            f"two rows are of the cell {cell}, with {told}; nothing was written: {how}"
        )


def _travelling(variable: Values) -> pa.DataType:
    stored = variable.stored
    if variable.is_text:
        return pa.string()
    if stored.kind == "b":
        return pa.uint8()
    if stored.kind in "iuf":
        return pa.from_numpy_dtype(stored.newbyteorder("="))
    return pa.binary(stored.itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteReport:
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
