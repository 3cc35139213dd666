"""Zone maps: bounds and sums of the values in chunks, so that queries need not read them.

An entry says: the cells of the chunk stored at this address, read with this meaning, have values
from `low` to `high`, this sum, and so many missing ones. The *address* identifies a chunk for good,
since objects are written once: session, number, offset and length in the repository; file, version
and range elsewhere; a hash of the bytes for inline chunks. The *meaning* is a hash of what decides
how stored bytes become values. An entry counts only for a chunk with this address, of an array with
this meaning, so entries never have to be updated. Without entries everything is read.

Numbers and times are kept as the bits they are, high ones as differences from low ones.

Invariants: decoded bounds are exact. The number of entries in an object is bounded before any is
decoded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Annotated, Any, Final

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct
from msgspec.structs import force_setattr, replace

from zarr_manifests.errors import CorruptObjectError, InvalidArgumentError, UnsupportedFormatError
from zarr_manifests.format.chunk_table import (
    MAX_ROWS,
    ChunkTable,
    Column,
    RefKind,
    RowCount,
    StoredTable,
    decode_column,
    encode_column,
    pack_bits,
    unpack_bits,
)
from zarr_manifests.format.records import (
    BlobRef,
    ListRecord,
    MetadataObject,
    NodeId,
    ObjectKind,
    Record,
    check_numbers,
    drop_copies,
    pack,
    record,
    unpack,
)
from zarr_manifests.grid import Box, IndexArray, corners

MEANING_BYTES: Final = 16
HASH_BYTES: Final = 16
"""Bytes of the hash that identifies an inline chunk."""
PAGE_ROWS: Final = 1 << 16
"""Most entries of a page."""
_DTYPES: Final = re.compile(r"[<|]([fiu][1248]|b1|[Mm]8(\[\d{0,9}[a-z]{1,2}\])?)", re.IGNORECASE)

_UNREADABLE: Final = CorruptObjectError, UnsupportedFormatError
_COUNTS: Final = ("bounded", "missing", "nan", "clip")
_FLOATS: Final = ("sums", "weighted", "weights")
"""Columns that are left out where nothing is known."""
_COLUMNS: Final = ("low", "high", *_COUNTS, *_FLOATS)
_UNKNOWN: Final = np.empty(0)
NO_SUM: Final = -(2**63)
"""A sum of integers that may not fit in 64 bits. A sum of floats that is not known is NaN."""

type _Bits = npt.NDArray[np.unsignedinteger]


class StoredBounds(Record, frozen=True):
    """`Bounds` as they are stored."""

    n: RowCount
    type: str
    low: Any
    high: Any
    bounded: Any
    missing: Any
    nan: Any
    clip: Any
    sums: Any = None
    weighted: Any = None
    weights: Any = None
    digest: Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)] | None = None


class Bounds(Struct, frozen=True, eq=False):
    """Bounds, counts and sums of the values in chunks, or in pages of chunks.

    Cells outside of the array, the padding of chunks at its edge, are not measured.

    Parameters
    ----------
    low, high : array[n]
        Least and greatest stored value that is neither missing nor NaN, native and little-endian.
    bounded : bool[n]
        Whether there is such a value; if not, `low` and `high` mean nothing.
    missing, nan : int64[n]
        Number of missing values, and of NaN.
    sums : array[n]
        Sum of the values that are not missing: int64 of integers and booleans, or `NO_SUM`; else
        float64, or NaN.
    clip : int64[n]
        How the array clipped the chunk when it was measured, as `grid.clips` numbers it; of pages,
        0 if it clipped none.
    weighted, weights : float64[n], optional
        Sum of the values that are not missing, each times the weight of its cell, and sum of these
        weights; NaN if they are not known.
    digest : bytes, optional
        Hash of the weights of all cells of the array; empty if there are none.

    Raises
    ------
    CorruptObjectError
        If the columns contradict each other, or have a type without order.
    """

    low: npt.NDArray[Any]
    high: npt.NDArray[Any]
    bounded: npt.NDArray[np.bool_]
    missing: Column
    nan: Column
    sums: npt.NDArray[Any]
    clip: Column
    weighted: npt.NDArray[np.float64] = _UNKNOWN
    weights: npt.NDArray[np.float64] = _UNKNOWN
    digest: bytes = b""

    def __post_init__(self) -> None:
        for name in _FLOATS:
            if getattr(self, name) is _UNKNOWN:
                force_setattr(self, name, np.broadcast_to(np.nan, self.low.shape))
        columns = [getattr(self, name) for name in _COLUMNS]
        if len({column.shape for column in columns}) > 1 or self.low.ndim != 1:
            raise CorruptObjectError("the columns of bounds have different lengths")
        dtype = self.low.dtype
        if self.high.dtype != dtype or not _DTYPES.fullmatch(dtype.str):
            raise CorruptObjectError(f"bounds of type {dtype} and {self.high.dtype} have no order")
        # NaN and NaT compare as false.
        if not ((self.low <= self.high) | ~self.bounded).all():
            raise CorruptObjectError("a low bound is not below its high bound")
        counts = self.missing, self.nan, self.clip
        if any(len(column) and column.min() < 0 for column in counts):
            raise CorruptObjectError("bounds count fewer than no cells")
        if self.sums.dtype != (sum_type(dtype) or np.float64):
            raise CorruptObjectError(f"sums of type {self.sums.dtype} are not of {dtype}")

    def __len__(self) -> int:
        return len(self.low)

    def take(self, rows: npt.NDArray[Any] | slice) -> Bounds:
        """The bounds at these rows, or where a mask is true."""
        if isinstance(rows, np.ndarray) and rows.dtype == np.bool_ and rows.all():
            return self
        columns: Any = {name: getattr(self, name)[rows] for name in _COLUMNS}
        return Bounds(**columns, digest=self.digest)

    def weighted_by(self, digest: bytes) -> Bounds:
        """The same bounds, with weighted sums by the weights that have this digest only."""
        if digest == self.digest:
            return self
        return replace(self, weighted=_UNKNOWN, weights=_UNKNOWN, digest=digest)

    def around(self) -> Bounds:
        """One row: the bounds of all rows together.

        Examples
        --------
        >>> import numpy as np
        >>> from zarr_manifests.format.zone_maps import Bounds
        >>> n = np.array([0, 2])
        >>> low, high = np.array([3, 1]), np.array([4, 7])
        >>> all_of = Bounds(low, high, n == 0, n, 0 * n, n + 5, 0 * n).around()
        >>> all_of.low, all_of.high, all_of.missing, all_of.sums
        (array([3]), array([4]), array([2]), array([12]))
        """
        some = np.flatnonzero(self.bounded)
        total = np.array([added(self.sums)], self.sums.dtype)
        clip = np.array([int(self.clip.any())])
        counts = np.array([self.missing.sum()]), np.array([self.nan.sum()])
        with np.errstate(invalid="ignore", over="ignore"):
            weighted = np.array([self.weighted.sum()]), np.array([self.weights.sum()])
        rest: Any = (*counts, total, clip, *weighted, self.digest)
        if not len(some):
            return Bounds(self.low[:1], self.high[:1], self.bounded[:1], *rest)
        low, high = self.low[some], self.high[some]
        ends = np.array([low.min()], low.dtype), np.array([high.max()], low.dtype)
        return Bounds(*ends, np.array([True]), *rest)

    @staticmethod
    def joined(parts: Sequence[Bounds]) -> Bounds:
        """The rows of all parts, in order; needs at least one part, all of one type.

        What was weighted by others than the newest weights is not known.
        """
        digest = next((part.digest for part in reversed(parts) if part.digest), b"")
        parts = [part.weighted_by(digest) for part in parts]
        columns: Any = {
            name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS
        }
        return Bounds(**columns, digest=digest)

    def pack(self) -> dict[str, Any]:
        """As a map for msgpack; needs at least one row."""
        packed: dict[str, Any] = {"n": len(self)}
        for name in _COUNTS:
            packed[name] = encode_column(getattr(self, name).astype(np.int64))
        for name in _FLOATS:
            if not np.isnan(getattr(self, name)).all():
                packed[name] = _packed(getattr(self, name))
        if self.digest:
            packed["digest"] = self.digest
        span = _bits(self.high) - _bits(self.low)
        ends = {"low": _packed(self.low), "high": _packed(span)}
        return {**packed, "type": self.low.dtype.str, **ends}

    @classmethod
    def parse(cls, stored: StoredBounds) -> Bounds:
        """From an untrusted map that `pack` made."""
        n, dtype = stored.n, _dtype(stored.type)
        low = _unpacked(stored.low, n, dtype)
        span = _unpacked(stored.high, n, np.dtype(f"<u{dtype.itemsize}"))
        high = _values(_bits(low) + span, dtype)
        counts: Any = {name: decode_column(getattr(stored, name), n, 2**62) for name in _COUNTS}
        floats: Any = {
            name: _unpacked(one, n, sum_type(dtype) if name == "sums" else np.dtype("f8"))
            if (one := getattr(stored, name)) is not None
            else _UNKNOWN
            for name in _FLOATS
        }
        counts["bounded"] = counts["bounded"].astype(np.bool_)
        return cls(low, high, **counts, **floats, digest=stored.digest or b"")


def sum_type(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """The type of sums of such values; None if they are not added."""
    kind = {"b": "i8", "i": "i8", "u": "i8", "f": "f8"}.get(dtype.kind)
    return None if kind is None else np.dtype(kind)


def added(sums: npt.NDArray[Any]) -> int | float:
    """The sum of sums; `NO_SUM` or NaN if it is not known."""
    if sums.dtype.kind == "f":
        with np.errstate(invalid="ignore", over="ignore"):
            return float(sums.sum())
    total = sum(sums.tolist())
    return total if abs(total) < -NO_SUM and not (sums == NO_SUM).any() else NO_SUM


def _dtype(text: str) -> np.dtype[Any]:
    try:
        if _DTYPES.fullmatch(text):
            return np.dtype(text)
    except (TypeError, ValueError):
        pass  # refused below, like any other text
    raise CorruptObjectError(f"zone maps: {text[:40]!r} is no type of values with an order")


def _bits(values: npt.NDArray[Any]) -> _Bits:
    """The values as unsigned integers."""
    return np.ascontiguousarray(values).view(f"<u{values.dtype.itemsize}")


def _values(bits: _Bits, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """The values with these bits."""
    return bits.astype(np.bool_) if dtype.kind == "b" else bits.view(dtype)


def _packed(values: npt.NDArray[Any]) -> tuple[int, int, bytes]:
    return pack_bits(_bits(values))


def _unpacked(stored: Any, n: int, dtype: np.dtype[Any] | None) -> npt.NDArray[Any]:
    """The values of this type in a list that `_packed` made."""
    match stored:
        case [int(width), int(packed), bytes(data)] if dtype and width == dtype.itemsize:
            return _values(unpack_bits(data, width, packed, n), dtype)
    raise CorruptObjectError("zone maps: no values of the type of bounds")


class _StoredZones(Record, frozen=True):
    """A `ZoneTable` as it is stored."""

    meaning: bytes
    chunks: StoredTable
    bounds: StoredBounds

    def table(self) -> ZoneTable:
        """The table, decoded."""
        try:
            chunks, bounds = ChunkTable.parse(self.chunks), Bounds.parse(self.bounds)
            return ZoneTable(self.meaning, chunks, bounds)
        except (InvalidArgumentError, OverflowError) as error:
            raise CorruptObjectError(f"zones.tables: {error}") from error


class ZoneTable(Struct, frozen=True, eq=False):
    """Entries of one array with one meaning, sorted by coordinate.

    Parameters
    ----------
    meaning : bytes
        Hash of what decides how stored bytes become values.
    addresses : ChunkTable
        The chunk that each entry describes: refs without checksums of native chunks, and with
        hashes instead of inline bytes.
    bounds : Bounds
        Its bounds, in the same order.

    Raises
    ------
    CorruptObjectError
        If they do not match.
    """

    meaning: bytes
    addresses: ChunkTable
    bounds: Bounds

    def __post_init__(self) -> None:
        at = self.addresses
        inline = at.kind == RefKind.INLINE
        sound = len(self.meaning) == MEANING_BYTES and len(at) == len(self.bounds)
        sound = sound and not (at.kind == RefKind.UNSET).any()
        if not sound or (at.length[inline] != HASH_BYTES).any():
            raise CorruptObjectError("the addresses and bounds of a zone map contradict each other")

    def __len__(self) -> int:
        return len(self.bounds)

    @property
    def box(self) -> Box:
        """The chunk coordinates that may have entries."""
        return self.addresses.box

    def coords(self) -> IndexArray:
        """Chunk coordinates of the entries (int64[n, ndim])."""
        return self.addresses.coords()

    def pack(self) -> bytes:
        """Msgpack of a map; needs at least one entry."""
        packed = {"chunks": self.addresses.pack(), "bounds": self.bounds.pack()}
        return pack({"meaning": self.meaning, **packed})

    @classmethod
    def parse(cls, packed: bytes) -> ZoneTable:
        """From untrusted bytes that `pack` made."""
        return record(_StoredZones, unpack(packed), "zones.tables").table()


class Zones(MetadataObject, frozen=True, tag="zones", rename={"packed": "tables"}):
    """Zone maps in one object, still packed: node and bytes of each.

    Parameters
    ----------
    packed : tuple of (bytes, bytes)
        Node id and packed `ZoneTable`.
    """

    packed: tuple[tuple[NodeId, bytes], ...] = ()

    _KIND = ObjectKind.INDEX

    def of_node(self, node_id: bytes, box: Box | None = None) -> Iterator[ZoneTable]:
        """The zone maps of a node, oldest first; decoded one at a time.

        Those that cannot be read are left out, and, with a box, those without entries in it.
        """
        for node, packed in self.packed:
            if node == node_id:
                with suppress(*_UNREADABLE):
                    stored = record(_StoredZones, unpack(packed), "zones.tables")
                    chunks = stored.chunks
                    if box is None or Box(chunks.lo, chunks.hi).overlaps(box):
                        yield stored.table()

    def at(self, position: int) -> ZoneTable | None:
        """The zone map at a position; None if there is none, or if it cannot be read."""
        with suppress(*_UNREADABLE, IndexError):
            return ZoneTable.parse(self.packed[position][1])
        return None


class ZonePage(ListRecord, frozen=True):
    """One page of an array's entries.

    Parameters
    ----------
    box : Box
        The coordinates of its chunks; pages of one leaf do not overlap.
    leaf : str or None
        Key of the manifest with the leaf that holds them; None if they were not in a leaf.
    count : int
        Number of entries; of a leaf, each for another of its chunks.
    blob, position : BlobRef, int
        The object with the entries, and their position in it.

    Raises
    ------
    InvalidArgumentError
        If a number is out of range.
    """

    box: Box
    leaf: str | None
    count: int
    blob: BlobRef
    position: int

    def __post_init__(self) -> None:
        drop_copies(self, "blob")
        check_numbers("zones.pages", self.count, most=PAGE_ROWS)
        check_numbers("zones.pages", self.position, most=MAX_ROWS)


class _StoredPages(Record, frozen=True, tag="zone-pages"):
    """`ZonePages` as they are stored."""

    meaning: bytes
    pages: tuple[ZonePage, ...]
    bounds: StoredBounds


class ZonePages(MetadataObject, frozen=True, eq=False, dict=True):
    """All pages of one array, and the bounds of each page.

    Parameters
    ----------
    meaning : bytes
        The meaning that the entries of all pages have.
    pages : tuple of ZonePage
        The pages; at least one.
    bounds : Bounds
        Row i has the bounds of the entries of page i together.

    Raises
    ------
    CorruptObjectError
        If they do not match.
    """

    meaning: bytes
    pages: tuple[ZonePage, ...]
    bounds: Bounds

    _KIND = ObjectKind.INDEX

    def __post_init__(self) -> None:
        alike = len({page.box.ndim for page in self.pages}) == 1
        alike &= len(self.pages) == len(self.bounds)
        if len(self.meaning) != MEANING_BYTES or not alike:
            raise CorruptObjectError("the pages of a zone map contradict their bounds")

    def near(self, box: Box) -> list[int]:
        """The positions of the pages that may have entries of chunks in the box."""
        lo, hi = self._corners
        if lo.shape[1] != box.ndim:
            return []
        return np.flatnonzero(((lo < box.hi) & (hi > box.lo)).all(axis=1)).tolist()

    @cached_property
    def _corners(self) -> tuple[IndexArray, IndexArray]:
        return corners([page.box for page in self.pages], self.pages[0].box.ndim)

    @property
    def blobs(self) -> tuple[BlobRef, ...]:
        """The objects with entries, each once."""
        return tuple({page.blob.key: page.blob for page in self.pages}.values())

    def pack(self) -> Any:
        """As a map for msgpack."""
        found = {"type": "zone-pages", "meaning": self.meaning, "pages": self.pages}
        return {**found, "bounds": self.bounds.pack()}

    @classmethod
    def parse(cls, value: Any) -> ZonePages:
        """From an untrusted map that `pack` made."""
        stored = record(_StoredPages, value, "zone-pages")
        if stored.bounds.n != len(stored.pages):
            raise CorruptObjectError("the pages of a zone map contradict their bounds")
        return cls(stored.meaning, stored.pages, Bounds.parse(stored.bounds))


class IndexDirectory(MetadataObject, frozen=True, tag="directory"):
    """Pointers to the pages of zone maps, by node id; a branch names it, outside snapshots."""

    zones: Mapping[NodeId, BlobRef] = {}

    _KIND = ObjectKind.INDEX
