"""What decides the meaning of an array's stored values.

Two arrays with the same digest store the same values as the same bytes, compare them alike, and
take the same ones for missing. Missing values are those that xarray reads as missing: `_FillValue`
and `missing_value`, and in Zarr v2 the fill value. Scale, offset and units are not part of the
meaning: bounds are stored values, which a reader decodes like any other.

What is not understood is not measurable, so that nothing is said of it.

An entry of a zone map counts for a coordinate if the chunk there has exactly the address of the
entry. Whatever happened between (commits, compactions, resets) cannot make an entry wrong: it makes
it useless.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field
from msgspec.structs import replace

from zarr_manifests.format.chunk_table import ChunkTable, RefKind
from zarr_manifests.format.zone_maps import HASH_BYTES, MEANING_BYTES, PAGE_ROWS, Bounds, ZoneTable
from zarr_manifests.keys import V2_ARRAY, V2_ATTRIBUTES, V3_DOCUMENT
from zarr_manifests.planning.merge import (
    Layer,
    merge_layers,
    pick,
    rows_at,
    same_rows,
    select,
    split,
    unchanged,
)

_ATTRIBUTES: Final = ("_FillValue", "missing_value", "_Unsigned", "_Encoding", "dtype")
_UNREAD: Final = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
WEIGHTS: Final = re.compile(r"([^\s:]+):\s*(\S+)")
"""A dimension, and what the weights along it are."""
_EXACT: Final = 2**53
"""Xarray compares larger integers as floats, which also takes their neighbours for missing."""
_LOSSLESS: Final = frozenset(
    {"bytes", "transpose", "shuffle", "base64"}
    | {"blosc", "bz2", "gzip", "lz4", "lzma", "zlib", "zstd"}
    | {"adler32", "crc32", "crc32c", "fletcher32", "jenkins_lookup3"}
)
"""Codecs that are known to give back exactly what was stored."""


class Meaning(Struct, frozen=True, eq=False):
    """How an array's stored values are compared, and which are missing.

    Parameters
    ----------
    digest : bytes
        16 bytes that are the same for the same meaning.
    lossless : bool
        Whether every codec is known to give back exactly what was stored.
    measurable : bool
        Whether the values can be compared: numbers, booleans and times.
        If not, the other fields mean nothing.
    stored : dtype
        Type of the stored values, in native byte order.
    dtype : dtype
        Type in which they are compared: with `_Unsigned`, the unsigned or signed twin.
    missing : array
        Values that are missing, besides NaN and NaT; of `dtype`, sorted.
    fill : scalar array
        The fill value; of `dtype`.
    laid_out : dtype
        The stored type in the byte order that a decoder of chunks needs.
    weights : mapping of str to str
        By dimension, the weights of cells that the attribute `statistics_weights` declares, such as
        `"lat: cos"`. They are no part of the meaning.

    Examples
    --------
    >>> import json
    >>> from zarr_manifests.planning.meaning import Meaning
    >>> fields = {
    ...     "zarr_format": 2, "shape": [4], "chunks": [2], "dtype": "<i2", "fill_value": -9,
    ...     "order": "C", "filters": None, "compressor": {"id": "zstd", "level": 3},
    ... }
    >>> meaning = Meaning.of({".zarray": json.dumps(fields).encode()})
    >>> meaning.measurable, meaning.lossless, meaning.missing.tolist()
    (True, True, [-9])
    """

    digest: bytes
    lossless: bool = False
    measurable: bool = False
    stored: np.dtype[Any] = field(default_factory=lambda: np.dtype("V"))
    dtype: np.dtype[Any] = field(default_factory=lambda: np.dtype("V"))
    missing: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0))
    fill: npt.NDArray[Any] = field(default_factory=lambda: np.zeros(()))
    laid_out: np.dtype[Any] = field(default_factory=lambda: np.dtype("V"))
    weights: Mapping[str, str] = {}

    @classmethod
    def of(cls, documents: Mapping[str, bytes]) -> Meaning:
        """The meaning of an array with these metadata documents, by file name."""
        return _of_documents(
            documents.get(V3_DOCUMENT), documents.get(V2_ARRAY), documents.get(V2_ATTRIBUTES)
        )

    def compared(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Stored values, as they are compared."""
        if self.stored == self.dtype:
            return values
        return values.astype(self.stored, copy=False).view(self.dtype)

    def decodable(self, bounds: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Bounds, as stored values that a reader can decode."""
        return bounds.astype(self.dtype, copy=False).view(self.stored)


@lru_cache(maxsize=1024)
def _of_documents(v3: bytes | None, v2: bytes | None, v2_attributes: bytes | None) -> Meaning:
    try:
        fields = json.loads(v3 if v3 is not None else v2 or b"")
        attributes = (
            fields.get("attributes") if v3 is not None else json.loads(v2_attributes or "{}")
        )
        attributes = dict(attributes or {})
    except _UNREAD:
        whole = b"\0".join(part or b"" for part in (v3, v2, v2_attributes))
        return Meaning(_digest(whole.hex()))
    structure = {k: v for k, v in fields.items() if k not in ("shape", "attributes")}
    for name in ("chunk_key_encoding", "dimension_names", "dimension_separator"):
        structure.pop(name, None)
    means = {name: attributes[name] for name in _ATTRIBUTES if name in attributes}
    digest = _digest([structure, means])
    codecs = fields.get("codecs")
    if v3 is None:
        codecs = [*(fields.get("filters") or []), fields.get("compressor")]
    lossless = False
    try:
        lossless = _lossless(codecs)
        found = _understood(fields, attributes)
    except _UNREAD:
        found = None
    if found is None or fields.get("storage_transformers"):
        return Meaning(digest, lossless)
    weights = dict(WEIGHTS.findall(str(attributes.get("statistics_weights", ""))))
    return Meaning(digest, lossless, True, *found, weights)


def _digest(value: Any) -> bytes:
    text = json.dumps(["zone-maps", value], sort_keys=True, separators=(",", ":"))
    return blake2b(text.encode(errors="surrogatepass"), digest_size=MEANING_BYTES).digest()


type _Type = np.dtype[Any]
type _Found = tuple[_Type, _Type, npt.NDArray[Any], npt.NDArray[Any], _Type]


def _understood(fields: Mapping[str, Any], attributes: Mapping[str, Any]) -> _Found | None:
    """The fields of `Meaning` from `stored` to `laid_out`; None if they are not understood."""
    from zarr.dtype import parse_dtype

    version = fields["zarr_format"]
    is_v2 = version == 2
    said_type = np.dtype(fields["dtype"]) if is_v2 else fields["data_type"]
    data_type = parse_dtype(said_type, zarr_format=version)
    given: np.dtype[Any] = data_type.to_native_dtype()
    stored: Any = given.newbyteorder("=")
    if stored.kind not in "biufmM" or "_Encoding" in attributes:
        return None
    as_bool = attributes.get("dtype") == "bool" and stored.kind != "b"
    if as_bool or (stored.kind in "mM" and np.datetime_data(stored)[0] == "generic"):
        return None
    dtype = stored
    twin = {("i", "true"): "u", ("u", "false"): "i"}.get(
        (stored.kind, str(attributes.get("_Unsigned")))
    )
    if twin is not None:
        dtype = np.dtype(f"{twin}{stored.itemsize}")
    said = fields.get("fill_value")
    filled = data_type.default_scalar()
    if said is not None:
        with np.errstate(over="ignore"):
            filled = data_type.from_json_scalar(said, zarr_format=version)
    fill = np.asarray(filled, stored)
    absent: list[Any] = []
    if is_v2 and said is not None:
        absent.append(fill.astype(stored).view(dtype)[()])
    elif "_FillValue" in attributes:
        fill_value = attributes["_FillValue"]
        if not is_v2:
            fill_value = _decoded_fill_value(fill_value, stored)
        if twin is not None:  # xarray converts this one, and not `missing_value`
            fill_value = np.asarray(fill_value, stored).view(dtype)[()]
        absent.append(fill_value)
    if absent and twin is not None and given != stored:
        return None  # xarray swaps the bytes of the fill value
    absent += _flat(attributes.get("missing_value", []))
    marks = _marks(absent, dtype)
    return None if marks is None else (stored, dtype, marks, fill.view(dtype), given)


def _decoded_fill_value(said: Any, dtype: np.dtype[Any]) -> Any:
    """The attribute as xarray decodes it; other writers leave numbers as they are."""
    if dtype.kind == "f" and isinstance(said, str):
        return struct.unpack("<d", base64.standard_b64decode(said))[0]
    return int(said) if dtype.kind in "iu" else said


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for one in value:
            yield from _flat(one)
    else:
        yield value


def _marks(given: list[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
    """The given values that a stored value can equal; None if that cannot be said."""
    marks: list[Any] = []
    for value in given:
        if dtype.kind in "mM":
            return None  # how xarray compares these with numbers is not settled
        number = value.item() if isinstance(value, np.generic) else value
        if not isinstance(number, int | float):
            return None
        if number != number:
            continue
        if dtype.kind in "biu":
            if dtype.itemsize == 8 and abs(number) >= _EXACT:
                return None
            ends = None if dtype.kind == "b" else np.iinfo(dtype)
            low, high = (0, 1) if ends is None else (ends.min, ends.max)
            if number == math.floor(number) and low <= number <= high:
                marks.append(int(number))
        else:
            with np.errstate(all="ignore"):
                same = float(np.asarray(number, np.float64).astype(dtype)) == number
            if same:
                marks.append(number)
    return np.unique(np.asarray(marks, dtype))


# --- codecs ---------------------------------------------------------------------------------------


def _lossless(codecs: Any) -> bool:
    """Whether each codec, also of those inside a shard, gives back what was stored."""
    return isinstance(codecs, list) and all(map(_is_lossless, codecs))


def _is_lossless(codec: Any) -> bool:
    match codec:
        case None:
            return True
        case {
            "name": "sharding_indexed",
            "configuration": {"codecs": inner, "index_codecs": index},
        }:
            return _lossless(inner) and _lossless(index)
        case str(name) | {"id": str(name)} | {"name": str(name)}:
            return name.removeprefix("numcodecs.") in _LOSSLESS
    return False


# --- entries -----------------------------------------------------------------------------------


def zones_of_chunks(meaning: bytes, table: ChunkTable, bounds: Bounds) -> ZoneTable | None:
    """The entries of the chunks in a table; row i of `bounds` describes row i of `table`.

    None if no chunk can have one. A chunk in a file elsewhere has none if nothing tells the file's
    versions apart: neither etag, nor modification time, nor a checksum of the chunk.
    """
    known = _identified(table)
    if not known.any():
        return None
    return ZoneTable(meaning, _addresses(select(table, known)), bounds.take(known))


def _identified(table: ChunkTable) -> npt.NDArray[np.bool_]:
    """Rows whose address tells their chunk from all others."""
    known: npt.NDArray[np.bool_] = table.kind != RefKind.UNSET
    virtual = table.kind == RefKind.VIRTUAL
    if virtual.any():
        dated = np.array([file.is_dated for file in table.virtual], np.bool_)
        known &= ~virtual | dated[np.where(virtual, table.source, 0)] | (table.number == 1)
    return known


def _addresses(table: ChunkTable) -> ChunkTable:
    """The table with addresses only: hashes of inline chunks, no checksums of native ones."""
    inline = np.flatnonzero(table.kind == RefKind.INLINE)
    crc = np.where(table.kind == RefKind.VIRTUAL, table.crc32c, 0)
    if not len(inline):
        return replace(table, crc32c=crc)
    offset, length = table.offset.copy(), table.length.copy()
    places = zip(offset[inline].tolist(), length[inline].tolist(), strict=True)
    hashes = [
        blake2b(table.inline[at : at + n], digest_size=HASH_BYTES).digest() for at, n in places
    ]
    offset[inline], length[inline] = np.arange(len(inline)) * HASH_BYTES, HASH_BYTES
    return replace(table, crc32c=crc, offset=offset, length=length, inline=b"".join(hashes))


def valid(zones: ZoneTable, table: ChunkTable | None) -> npt.NDArray[np.bool_]:
    """Which entries describe the chunk that `table` has at their coordinate (bool[n])."""
    if table is None or not table.box.overlaps(zones.box):
        return np.zeros(len(zones), np.bool_)
    if not same_rows(zones.addresses, table):  # as those of chunks that were written together have
        # Only these rows are looked at, since there may be many others.
        table = pick(table, zones.coords())
    return unchanged(zones.addresses, _addresses(table))


def taken(zones: ZoneTable, keep: npt.NDArray[np.bool_]) -> ZoneTable:
    """The entries for which `keep` is true."""
    if keep.all():
        return zones
    return ZoneTable(zones.meaning, select(zones.addresses, keep), zones.bounds.take(keep))


def merged(tables: Sequence[ZoneTable]) -> ZoneTable:
    """Entries of one meaning and one type in one table, oldest first: the newest of each chunk."""
    if len(tables) == 1:
        return tables[0]
    addresses = merge_layers([Layer(None, tuple(zones.addresses for zones in tables))]).table
    assert addresses is not None  # no table is empty
    coords = addresses.coords()
    # Number the rows of all tables through, and find the row of each coordinate in the newest.
    starts = accumulate((len(zones) for zones in tables), initial=0)
    rows = np.zeros(len(addresses), np.int64)
    for zones, start in zip(tables, starts, strict=False):
        at = rows_at(zones.addresses, coords)
        rows = np.where(at >= 0, at + start, rows)
    bounds = Bounds.joined([zones.bounds for zones in tables]).take(rows)
    return ZoneTable(tables[0].meaning, addresses, bounds)


def sort_of(zones: ZoneTable) -> tuple[bytes, np.dtype[Any], int]:
    """What entries that can be merged have in common: meaning, type, number of axes."""
    return zones.meaning, zones.bounds.low.dtype, zones.box.ndim


def in_pages(zones: ZoneTable) -> Iterator[ZoneTable]:
    """The entries in tables of at most `PAGE_ROWS`, in boxes that do not overlap."""
    start = 0
    for part in split(zones.addresses, PAGE_ROWS) if len(zones) else ():
        stop = start + len(part)
        yield ZoneTable(zones.meaning, part, zones.bounds.take(slice(start, stop)))
        start = stop
