"""Chunk refs of one node inside one box, as columns.

A `ChunkTable` has one row for each chunk: the kind of ref and where the bytes are. Rows are sorted
by linear index in the table's *own* box, so resizing the array does not change what a table means.
The index column is absent if every coordinate of the box has a row. Native refs point to
`chunks/<source>/<number>`; virtual refs point into a file elsewhere. An offset
is stored as the distance from the end of the previous row in the same object or file, which is
constant for adjacent chunks. Inline chunks are in a blob beside the columns, in row order.

Invariants, checked whenever a table is built, so also when it is read: indexes strictly increase
inside the box, kinds are known, sources exist, inline lengths add up to the blob.

If many tables of a manifest name the same sessions, their ids are stored once beside the tables.
Without that, leaves of an array that 3,000 sessions wrote in turn would take half as much again.

Files outside the repository that virtual refs of a chunk table point into, as columns
--------------------------------------------------------------------------------------

A source is a path below a *named container*, which the caller maps to a location when opening the
repository, or an absolute URL, with an empty container name. It also has the file's etag,
modification time and size when it was referenced, if known. Paths are stored one after another,
which compresses well.

Invariants: a path below a container is relative and cannot leave it (no empty, `.` or `..`
segment); no path contains NUL.

Columns of unsigned integers as bytes
-------------------------------------

A column is written in the first of these modes that fits:

- *constant*: all values are equal. Stored once, and decoded without allocating n values;
- *differences*: values never decrease. Stored as the first value and the steps;
- *plain*: the values themselves.

Steps or values take 1, 2, 4 or 8 bytes each, as the largest needs, little-endian, and are
bit-shuffled and compressed by Blosc (zstd) if that makes them smaller. The list is
`[mode, first, width, packed, bytes]`. Invariant: the decoded size is bounded before anything is
allocated.
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import repeat
from typing import Annotated, Any, Final

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from zarr_manifests.errors import CorruptObjectError, InvalidArgumentError
from zarr_manifests.format.records import ListRecord, Number, Record, pack, record, unpack
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.ids import is_session_id, object_key
from zarr_manifests.keys import is_inside

type Column = npt.NDArray[np.int64]

MAX_ROWS: Final = 1 << 24
LEAF_ROWS: Final = 16_384
"""Most rows of a leaf, which is read whole; an array with more is split by box."""
TABLE_ROWS: Final = 1_000_000
"""Most rows of a chunk table in a delta."""
type RowCount = Annotated[int, Meta(ge=0, le=MAX_ROWS)]
_CONSTANT, _DIFFERENCES, _PLAIN = 0, 1, 2
_BLOSC_HEADER_BYTES: Final = 16
_WIDTHS: Final = (1, 2, 4, 8)


def repeated(value: int, rows: int) -> Column:
    """A read-only column of one value, which is stored once.

    Takes a sixth of the time of `numpy.broadcast_to`, and small tables consist of such columns.
    """
    return np.ndarray((rows,), np.int64, value.to_bytes(8, sys.byteorder, signed=True), 0, (0,))


def encode_column(values: Column) -> list[Any]:
    """The column as a list for msgpack; needs at least one value, none negative."""
    first = int(values[0])
    if (values == first).all():
        return [_CONSTANT, first]
    steps = np.diff(values)
    if steps.min() >= 0:
        return [_DIFFERENCES, first, *_pack(steps)]
    return [_PLAIN, 0, *_pack(values)]


def _pack(values: Column) -> tuple[int, int, bytes]:
    most = int(values.max())
    width = next(w for w in _WIDTHS if most < 1 << (8 * w))
    return pack_bits(values.astype(f"<u{width}"))


def pack_bits(values: npt.NDArray[np.unsignedinteger]) -> tuple[int, int, bytes]:
    """Little-endian numbers for msgpack: bytes of each, whether they are packed, and their data."""
    width, raw = values.dtype.itemsize, values.tobytes()
    if len(raw) > _BLOSC_HEADER_BYTES:
        from numcodecs import blosc  # slow to import, and small tables do without

        packed = blosc.compress(raw, b"zstd", 5, blosc.BITSHUFFLE, typesize=width)
        if len(packed) < len(raw):
            return width, 1, bytes(packed)
    return width, 0, raw


def decode_column(column: object, rows: int, most: int = 2**63 - 1) -> Column:
    """The column's `rows` values (int64), each from 0 to `most`.

    Raises
    ------
    CorruptObjectError
        If the column is malformed or a value is out of range.
    """
    valid = True
    match column:
        case [0, int(value)] if 0 <= value <= most:
            return repeated(value, rows)
        case [1, int(first), int(width), int(packed), bytes(data)] if 0 <= first <= most and rows:
            steps = unpack_bits(data, width, packed, rows - 1)
            values = np.empty(rows, np.int64)
            values[0], values[1:] = first, steps
            np.add.accumulate(values, out=values)
            # A sum that wraps around shows as a value below the one before it. (Compare, since a
            # difference would wrap around again.)
            valid = bool((values[1:] >= values[:-1]).all())
            largest = int(values[-1])
        case [2, 0, int(width), int(packed), bytes(data)]:
            unsigned = unpack_bits(data, width, packed, rows)
            largest = int(unsigned.max(initial=0))
            values = unsigned.astype(np.int64)
        case _:
            raise CorruptObjectError("a column of a chunk table is malformed")
    if not valid or largest > most:
        raise CorruptObjectError("a column of a chunk table holds a value out of range")
    return values


def unpack_bits(data: bytes, width: int, packed: int, rows: int) -> npt.NDArray[np.unsignedinteger]:
    """So many numbers that `pack_bits` made data of.

    Raises
    ------
    CorruptObjectError
        If it made other data.
    """
    nbytes = rows * width
    if type(width) is not int or width not in _WIDTHS or packed not in (0, 1) or rows > MAX_ROWS:
        raise CorruptObjectError("a column of a chunk table is malformed")
    if packed:
        # Blosc trusts the sizes in its header, so check them first.
        said = struct.unpack_from("<I4xI", data, 4) if len(data) >= _BLOSC_HEADER_BYTES else None
        if said != (nbytes, len(data)):
            raise CorruptObjectError("a column of a chunk table states a wrong size")
        from numcodecs import blosc

        try:
            data = bytes(blosc.decompress(data))
        except RuntimeError as error:
            raise CorruptObjectError("a column of a chunk table does not decompress") from error
    if len(data) != nbytes:
        raise CorruptObjectError(f"expected a column of {nbytes} bytes, found {len(data)}")
    return np.frombuffer(data, f"<u{width}")


# --- files that virtual refs point into ---------------------------------------------------------


_MAX_NAME_CHARS: Final = 64
_NAME_CHARS: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
_MOST_NUMBER: Final = 2**62
_BOUND: Final = re.compile(r"<=(0|[1-9][0-9]{0,18})", re.ASCII)


def bound_etag(unchanged_since_ms: int) -> str:
    """What stands in the place of an etag if only a bound of the modification time is known.

    It equals no etag of a file, so who does not know it reads nothing.
    """
    return f"<={unchanged_since_ms}"


def bound_of(etag: str) -> int | None:
    """The time that `bound_etag` wrote; None for a real etag."""
    found = _BOUND.fullmatch(etag)
    return int(found[1]) if found else None


def check_container_name(name: object) -> str:
    """Return `name` if it is a valid container name.

    Raises
    ------
    InvalidArgumentError
        Unless it is 1 to 64 characters of `[A-Za-z0-9._-]`.
    """
    if isinstance(name, str) and 0 < len(name) <= _MAX_NAME_CHARS and _NAME_CHARS.issuperset(name):
        return name
    raise InvalidArgumentError(
        f"invalid container name {str(name)[:80]!r}: expected 1 to {_MAX_NAME_CHARS} characters of "
        "[A-Za-z0-9._-]"
    )


class VirtualSource(Struct, frozen=True):
    """A file outside the repository.

    Parameters
    ----------
    container : str
        Name of the container that `path` is relative to; empty if `path` is an absolute URL.
    path : str
        Path or URL of the file.
    etag : str or None
        Etag when it was referenced, if known; or `<=` and a time, see `unchanged_since_ms`.
    modified_ms : int or None
        Modification time then, in milliseconds since 1970 UTC, if known.
    nbytes : int or None
        Size then, if known.
    """

    container: str
    path: str
    etag: str | None = None
    modified_ms: int | None = None
    nbytes: int | None = None

    @property
    def tag(self) -> str | None:
        """The etag, if it is one."""
        return None if self.unchanged_since_ms is not None else self.etag

    @property
    def unchanged_since_ms(self) -> int | None:
        """The time since which it must not have changed, in milliseconds, if that is known."""
        return bound_of(self.etag) if self.etag is not None else None

    @property
    def is_dated(self) -> bool:
        """Whether it is known which version of the file is meant."""
        return self.etag is not None or self.modified_ms is not None

    @property
    def location(self) -> str:
        """The URL, or `virtual://<container>/<path>`."""
        return f"virtual://{self.container}/{self.path}" if self.container else self.path


class StoredSources(Record, frozen=True):
    """Files that virtual refs of a table point into, as they are stored."""

    n: RowCount
    names: tuple[str, ...]
    paths: bytes
    container: Any
    modified: Any
    size: Any
    etags: bytes | None = None


def checked_sources(sources: Iterable[VirtualSource]) -> tuple[VirtualSource, ...]:
    """These files, as a chunk table has them.

    Raises
    ------
    CorruptObjectError
        If the name of a container is invalid, or a path could leave its container.
    """
    sources = tuple(sources)
    names, paths = {source.container for source in sources}, [source.path for source in sources]
    try:
        for name in names - {""}:
            check_container_name(name)
    except InvalidArgumentError as error:
        raise CorruptObjectError(f"virtual sources: {error}") from error
    # Searching one long text is about a hundred times faster than a loop over paths.
    text = "/\0/".join(("", *paths, ""))
    if "" in paths or text.count("\0") != len(paths) + 1:
        raise CorruptObjectError("virtual sources: a path is empty or contains NUL")
    climbs = any(names) and ("//" in text or "/./" in text or "/../" in text)
    if climbs and any(source.container and not is_inside(source.path) for source in sources):
        raise CorruptObjectError("virtual sources: a path could leave its container")
    return sources


def known_numbers(numbers: Iterable[int | None]) -> Column:
    """The numbers as a column, with -1 for unknown ones."""
    return np.array([-1 if number is None else number for number in numbers], np.int64)


def _packed_sources(sources: Sequence[VirtualSource]) -> dict[str, Any]:
    """At least one source, as a map for msgpack."""
    names = {name: i for i, name in enumerate(dict.fromkeys(s.container for s in sources))}
    packed: dict[str, Any] = {
        "n": len(sources),
        "names": list(names),
        "paths": "\0".join(source.path for source in sources).encode(),
        "container": encode_column(np.array([names[s.container] for s in sources], np.int64)),
        "modified": encode_column(known_numbers(s.modified_ms for s in sources) + 1),
        "size": encode_column(known_numbers(s.nbytes for s in sources) + 1),
    }
    if any(source.etag for source in sources):
        packed["etags"] = "\0".join(source.etag or "" for source in sources).encode()
    return packed


def _parsed_sources(stored: StoredSources) -> tuple[VirtualSource, ...]:
    """The sources from an untrusted map."""
    n, names = stored.n, stored.names
    if not n:
        raise CorruptObjectError("table.virt: expected at least one source")
    columns = stored.container, stored.modified, stored.size
    container, modified, size = (decode_column(one, n, _MOST_NUMBER).tolist() for one in columns)
    if max(container) >= len(names):
        raise CorruptObjectError("table.virt: a container has no name")
    etags = repeat("", n) if stored.etags is None else _texts(stored.etags, n)
    rows = zip(container, _texts(stored.paths, n), etags, modified, size, strict=True)
    return checked_sources(
        VirtualSource(
            names[at], path, etag or None, ms - 1 if ms else None, nbytes - 1 if nbytes else None
        )
        for at, path, etag, ms, nbytes in rows
    )


def _texts(data: bytes, n: int) -> tuple[str, ...]:
    if data.count(b"\0") != n - 1:
        raise CorruptObjectError(f"table.virt: expected {n} strings")
    try:
        return tuple(data.decode().split("\0"))
    except UnicodeDecodeError as error:
        raise CorruptObjectError("table.virt: not UTF-8") from error


# --- chunk tables -------------------------------------------------------------------------------


class SharedIds(ListRecord, frozen=True):
    """Which of the session ids that are stored once for a manifest are those of a table.

    Parameters
    ----------
    count : int
        Sessions of the table.
    at : column
        The position of each among all ids.
    """

    count: RowCount
    at: Any

    def among(self, ids: Sequence[bytes]) -> tuple[str, ...]:
        """The table's sessions, from all ids.

        Raises
        ------
        CorruptObjectError
            If an id is not there, or named twice: few bytes could name it very often.
        """
        at = decode_column(self.at, min(self.count, len(ids) + 1), len(ids) - 1)
        if len(np.unique(at)) < self.count:
            raise CorruptObjectError("table.shared: a session occurs twice")
        return tuple(ids[one].decode("ascii", "replace") for one in at.tolist())


class StoredTable(Record, frozen=True):
    """A `ChunkTable` as it is stored."""

    n: RowCount
    lo: tuple[Number, ...] = ()
    hi: tuple[Number, ...] = ()
    src: tuple[str, ...] = ()
    shared: SharedIds | None = None
    inl: bytes | None = None
    virt: StoredSources | None = None
    col: Mapping[str, Any] = {}


class RefKind(IntEnum):
    """Kind of a row in a chunk table."""

    UNSET = 0
    INLINE = 1
    NATIVE = 2
    VIRTUAL = 3


class InlineRef(Struct, frozen=True):
    """A chunk whose bytes are in the chunk table."""

    data: bytes

    @property
    def length(self) -> int:
        """Bytes of the chunk."""
        return len(self.data)


class NativeRef(Struct, frozen=True):
    """A chunk that is a byte range of an object of the repository.

    Parameters
    ----------
    source : str
        The session that wrote the object.
    number : int
        The object's number in that session.
    offset, length : int
        Byte range in the object.
    crc32c : int
        Checksum of the chunk's bytes.
    """

    source: str
    number: int
    offset: int
    length: int
    crc32c: int

    @property
    def key(self) -> str:
        """The object's key in the storage."""
        return object_key("chunks", self.source, self.number)


class VirtualRef(Struct, frozen=True):
    """A chunk that is a byte range of a file elsewhere.

    Parameters
    ----------
    source : VirtualSource
        The file.
    offset, length : int
        Byte range in the file.
    crc32c : int or None
        Checksum of the chunk's bytes, if known.
    """

    source: VirtualSource
    offset: int
    length: int
    crc32c: int | None = None


class Unset:
    """Type of `UNSET`: the chunk is absent, even if older tables have it."""

    __slots__ = ()

    def __reduce__(self) -> str:
        return "UNSET"

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset()
type ChunkRef = InlineRef | NativeRef | VirtualRef
type StoredRef = InlineRef | NativeRef | VirtualRef | Unset

COLUMNS: Final = ("kind", "source", "number", "offset", "length", "crc32c")
_MOST: Final = {
    "crc32c": 2**32 - 1,
    "kind": 3,
    "source": MAX_ROWS,
    "number": 10**9 - 1,
    "length": 2**48,
}
# Plain integers for lookups, since enum members are slow.
_UNSET, _INLINE, _NATIVE, _VIRTUAL = map(
    int, (RefKind.UNSET, RefKind.INLINE, RefKind.NATIVE, RefKind.VIRTUAL)
)


class ChunkTable(Struct, frozen=True, eq=False):
    """Sorted chunk refs of one node inside one box.

    Parameters
    ----------
    box : Box
        The chunk coordinates that may have rows.
    index : int64[n] or None
        Linear index of each row in `box`; None if row i has index i.
    kind, source, number, offset, length, crc32c : int64[n]
        One value for each row. `source` is a position in `sources`, or in `virtual` for a virtual
        ref, whose `number` is 1 if its `crc32c` is known, else 0. Unused values are 0.
    sources : tuple of str
        Session ids.
    inline : bytes
        Bytes of the inline chunks, in row order.
    virtual : tuple of VirtualSource
        Files that virtual refs point into.

    Raises
    ------
    CorruptObjectError
        If the columns contradict each other.
    """

    box: Box
    index: Column | None
    kind: Column
    source: Column
    number: Column
    offset: Column
    length: Column
    crc32c: Column
    sources: tuple[str, ...]
    inline: bytes
    virtual: tuple[VirtualSource, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.kind)
        kind = _once(self.kind)
        inline = kind == RefKind.INLINE
        if self.index is None:
            sound = n == self.box.size
        else:
            sound = len(self.index) == n and (
                n == 0
                or (
                    0 <= int(self.index[0])
                    and int(self.index[-1]) < self.box.size
                    and bool((self.index[1:] > self.index[:-1]).all())
                )
            )
        sound = sound and all(map(is_session_id, self.sources))
        if sound and n:  # rows without a source have 0
            most = np.array([1, 1, len(self.sources), len(self.virtual)])
            sound = bool((self.source < most[kind]).all())
            elsewhere = kind == RefKind.VIRTUAL
            sound = sound and not (elsewhere & (_once(self.number) > 1)).any()
        held = int(np.where(inline, self.length, 0).sum()) if inline.any() else 0
        if not sound or held != len(self.inline):
            raise CorruptObjectError("the columns of a chunk table contradict each other")

    def __len__(self) -> int:
        return len(self.kind)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (pack(self.pack()),)

    def linear_index(self) -> Column:
        """Linear index of each row in the table's box (int64[n])."""
        return np.arange(len(self), dtype=np.int64) if self.index is None else self.index

    def coords(self) -> IndexArray:
        """Chunk coordinates of the rows (int64[n, ndim])."""
        return self.box.unravel(self.linear_index())

    def get(self, coords: Coords) -> StoredRef | None:
        """The ref of a coordinate; None if the table has no row for it."""
        box, linear = self.box, 0
        if len(coords) != len(box.lo):
            return None
        for at, lo, hi in zip(coords, box.lo, box.hi, strict=True):  # inlined `box.ravel_one`
            if not lo <= at < hi:
                return None
            linear = linear * (hi - lo) + at - lo
        if self.index is None:
            return self.ref(linear)
        row = int(self.index.searchsorted(linear))
        found = row < len(self.index) and self.index.item(row) == linear
        return self.ref(row) if found else None

    def ref(self, row: int) -> StoredRef:
        """The ref in a row."""
        return self._ref(
            self.kind.item(row),
            self.source.item(row),
            self.number.item(row),
            self.offset.item(row),
            self.length.item(row),
            self.crc32c.item(row),
        )

    def _ref(
        self, kind: int, source: int, number: int, offset: int, length: int, crc32c: int
    ) -> StoredRef:
        """The ref in a row with these values in the order of `COLUMNS`."""
        if kind == _NATIVE:
            return NativeRef(self.sources[source], number, offset, length, crc32c)
        if kind == _VIRTUAL:
            return VirtualRef(self.virtual[source], offset, length, crc32c if number else None)
        if kind == _INLINE:
            return InlineRef(self.inline[offset : offset + length])
        return UNSET

    def refs(self) -> Iterator[tuple[Coords, StoredRef]]:
        """Coordinate and ref of every row."""
        columns = [column.tolist() for column in self.columns().values()]
        for where, *row in zip(self.coords().tolist(), *columns, strict=True):
            yield tuple(where), self._ref(*row)

    def pack(self) -> dict[str, Any]:
        """As a map for msgpack.

        Raises
        ------
        InvalidArgumentError
            If there are more rows than readers accept.
        """
        if len(self) > MAX_ROWS:
            raise InvalidArgumentError(
                f"{len(self)} chunks of one array in one table exceed {MAX_ROWS}; commit them in "
                "several steps, or use larger chunks"
            )
        packed: dict[str, Any] = {"n": len(self), "lo": self.box.lo, "hi": self.box.hi}
        packed["src"] = self.sources
        if self.inline:
            packed["inl"] = self.inline
        if self.virtual:
            packed["virt"] = _packed_sources(self.virtual)
        if len(self):
            columns = self.columns()
            stored = {**columns, "offset": _gaps(columns)}
            if self.index is not None:
                stored["index"] = self.index
            packed["col"] = {name: encode_column(column) for name, column in stored.items()}
        return packed

    def columns(self) -> dict[str, Column]:
        """The columns by name, without the index."""
        return {name: getattr(self, name) for name in COLUMNS}

    @classmethod
    def parse(
        cls, stored: StoredTable, ids: Sequence[bytes] = (), *, refs: bool = True
    ) -> ChunkTable:
        """From an untrusted map that `pack` made; without `refs`, only which chunks it has.

        `ids` are those that the tables of its manifest share.
        """
        box, n = Box(stored.lo, stored.hi), stored.n
        if not n:
            return cls.build(box, np.zeros(0, np.int64), [])
        index = decode_column(stored.col["index"], n) if "index" in stored.col else None
        if not refs:
            kind = _once(decode_column(stored.col.get("kind"), n, _VIRTUAL))
            return bare(box, index, np.broadcast_to(np.minimum(kind, _INLINE), n))
        virtual = () if stored.virt is None else _parsed_sources(stored.virt)
        sources, shared = stored.src, stored.shared
        if shared is not None:
            if sources:
                raise CorruptObjectError("table: its sessions are in two places")
            sources = shared.among(ids)
        return cls(box, index, **_rows(stored), sources=sources, virtual=virtual)

    @classmethod
    def of(cls, refs: Mapping[Coords, StoredRef]) -> ChunkTable:
        """The table of one or more refs, in the smallest box that holds them.

        Examples
        --------
        >>> from zarr_manifests.format.chunk_table import ChunkTable, InlineRef
        >>> table = ChunkTable.of({(0, 4): InlineRef(b"a"), (0, 6): InlineRef(b"bc")})
        >>> table.box.shape, table.get((0, 6)), table.get((0, 5))
        ((1, 3), InlineRef(data=b'bc'), None)
        """
        coords = np.array(list(refs), np.int64).reshape(len(refs), -1)
        box = Box.around_coords(coords) if coords.shape[1] else Box((), ())
        index = box.ravel(coords)
        order = np.argsort(index)
        values = list(refs.values())
        return cls.build(box, index[order], [values[i] for i in order])

    @classmethod
    def build(cls, box: Box, index: Column, refs: Sequence[StoredRef]) -> ChunkTable:
        """The table of refs in the order of their linear indexes in `box`."""
        numbers: dict[str, int] = {}
        files: dict[VirtualSource, int] = {}
        inline: list[bytes] = []
        filled = 0
        rows: list[tuple[int, int, int, int, int, int]] = []  # in the order of `COLUMNS`
        for ref in refs:
            match ref:
                case NativeRef(source, number, offset, length, crc):
                    source_at = numbers.setdefault(source, len(numbers))
                    rows.append((_NATIVE, source_at, number, offset, length, crc))
                case InlineRef(data):
                    rows.append((_INLINE, 0, 0, filled, len(data), 0))
                    inline.append(data)
                    filled += len(data)
                case VirtualRef(file, offset, length, known):
                    source_at = files.setdefault(file, len(files))
                    is_known, crc = (0, 0) if known is None else (1, known)
                    rows.append((_VIRTUAL, source_at, is_known, offset, length, crc))
                case Unset():
                    rows.append((_UNSET, 0, 0, 0, 0, 0))
        each = np.array(rows, np.int64).reshape(-1, len(COLUMNS)).T
        columns = dict(zip(COLUMNS, map(np.ascontiguousarray, each), strict=True))
        dense = len(refs) == box.size
        return cls(
            box,
            None if dense else index,
            **columns,
            sources=tuple(numbers),
            inline=b"".join(inline),
            virtual=checked_sources(files) if files else (),
        )


def bare(box: Box, index: Column | None, kind: Column) -> ChunkTable:
    """Rows that are unset, or empty inline chunks."""
    zeros = repeated(0, len(kind))
    return ChunkTable(box, index, kind, zeros, zeros, zeros, zeros, zeros, (), b"")


def _unpickled(packed: bytes) -> ChunkTable:
    """The table from what `ChunkTable.__reduce__` packed, a tenth of its columns."""
    return ChunkTable.parse(record(StoredTable, unpack(packed), "table"))


def side_by_side(blob: bytes, kind: Column, offset: Column, length: Column) -> tuple[Column, bytes]:
    """Offsets and bytes of the inline rows among these, whose bytes follow on each other then."""
    rows = np.flatnonzero(kind == RefKind.INLINE)
    begin, lengths = offset[rows], length[rows]
    end = begin + lengths
    # Rows whose bytes follow on each other already are copied together.
    first = np.flatnonzero(np.append(True, begin[1:] != end[:-1])[: len(rows)])
    last = np.append(first[1:], len(rows))[: len(first)] - 1
    pieces = zip(begin[first].tolist(), end[last].tolist(), strict=True)
    offset = offset.copy()
    offset[rows] = np.cumsum(lengths) - lengths
    return offset, b"".join([blob[start:stop] for start, stop in pieces])


def native_keys(table: ChunkTable) -> set[str]:
    """Keys of the chunk objects that native rows of the table point to."""
    native = table.kind == RefKind.NATIVE
    source, number = table.source[native], table.number[native]
    new = np.ones(len(source), np.bool_)  # neighbours lie in one pack: few rows begin another
    new[1:] = (source[1:] != source[:-1]) | (number[1:] != number[:-1])
    pairs = zip(source[new].tolist(), number[new].tolist(), strict=True)
    return {object_key("chunks", table.sources[source], number) for source, number in set(pairs)}


def _rows(stored: StoredTable) -> dict[str, Any]:
    """The columns and inline bytes of all rows."""
    if not stored.col.keys() >= set(COLUMNS):
        raise CorruptObjectError("table.col: a column is missing")
    columns: dict[str, Any] = {
        name: decode_column(stored.col[name], stored.n, _MOST.get(name, 2**62)) for name in COLUMNS
    }
    offset = columns["offset"] = _offsets(columns)
    if int(offset.min()) < 0:
        raise CorruptObjectError("table: an offset is negative")
    inline = stored.inl or b""
    is_inline = _once(columns["kind"]) == RefKind.INLINE
    if is_inline.any() and (is_inline & (offset > len(inline) - columns["length"])).any():
        raise CorruptObjectError("table: an inline chunk exceeds the blob")
    return {**columns, "inline": inline}


def _gaps(columns: Mapping[str, Column]) -> Column:
    """Distance of each offset from the end of the previous row in the same object.

    Zigzag-encoded, since it may be negative.
    """
    order, first = _by_object(columns)
    offset, length = columns["offset"][order], columns["length"][order]
    gap = offset.copy()
    gap[1:] -= np.where(first[1:], 0, offset[:-1] + length[:-1])
    stored: Column = np.empty_like(gap)
    stored[order] = (gap << 1) ^ (gap >> 63)
    return stored


def _offsets(columns: Mapping[str, Column]) -> Column:
    """Offsets; the inverse of `_gaps`."""
    if len(columns["offset"]) == 1:  # each small commit has such a table
        return (columns["offset"] >> 1) ^ -(columns["offset"] & 1)
    order, first = _by_object(columns)
    stored, length = columns["offset"][order], columns["length"][order]
    starts = np.flatnonzero(first)
    # In place, to save memory.
    offset: Column = stored & 1
    np.negative(offset, out=offset)
    offset ^= stored >> 1
    offset[1:] += length[:-1]
    offset[starts[1:]] -= length[starts[1:] - 1]
    step = offset[starts]
    np.cumsum(offset, out=offset)
    offset -= np.repeat(offset[starts] - step, np.diff(starts, append=len(offset)))
    if isinstance(order, slice):
        return offset
    placed: Column = np.empty_like(offset)
    placed[order] = offset
    return placed


def _by_object(columns: Mapping[str, Column]) -> tuple[Any, npt.NDArray[np.bool_]]:
    """Order of rows by object and row, and which of them are their object's first."""
    rows = len(columns["kind"])
    kind, source, number = (_once(columns[name]) for name in ("kind", "source", "number"))
    # 2 + 25 + 30 bits at most.
    key = (kind * (int(source.max()) + 1) + source) * (int(number.max()) + 1) + number
    order: Any = slice(None)
    first = np.zeros(rows, np.bool_)
    if len(key) == rows:
        if (key[1:] < key[:-1]).any():
            order = np.argsort(key, kind="stable")
            key = key[order]
        np.not_equal(key[1:], key[:-1], out=first[1:])
    first[0] = True
    return order, first


def _once(column: Column) -> Column:
    """One value of a constant column; any other column unchanged."""
    return column[:1] if len(column) and not column.strides[0] else column
