"""Parse Zarr keys and metadata documents.

A key names a metadata document of a node (`<path>/zarr.json`; in Zarr v2 `.zarray` or `.zgroup`,
and `.zattrs`), a chunk of an array (`<path>/c/0/12/3`, in that array's chunk key encoding), or
anything else, which is an *opaque* entry. Invariants:

- Only a canonical chunk key inside the array's grid is a chunk, so key and coordinate determine
  each other. `c/01`, `c/+1` and keys outside the grid are opaque.
- A node has documents of one format. If several are at one path, only their content decides which
  make the node (`node_documents`).

Sources: Zarr v3 core specification, sections "Array metadata", "Chunk key encoding"; Zarr v2
specification, sections "Metadata", "Hierarchies"; for dimension names in v2, the attribute
`_ARRAY_DIMENSIONS` of xarray.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, Final, Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import force_setattr

from zarr_manifests.errors import InvalidArgumentError, NotFoundError, UnsupportedFormatError
from zarr_manifests.grid import MAX_BOX_CHUNKS, Box, Coords, IndexArray, grid_shape

V3_DOCUMENT: Final = "zarr.json"
V2_ARRAY: Final = ".zarray"
V2_GROUP: Final = ".zgroup"
V2_ATTRIBUTES: Final = ".zattrs"
DOCUMENTS: Final = (V3_DOCUMENT, V2_ARRAY, V2_GROUP, V2_ATTRIBUTES)
_MAX_NDIM: Final = 64
_MALFORMED: Final = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
_NUMBER: Final = r"(0|[1-9][0-9]{0,18})"
_TRANSFORMED: Final = re.compile(rb'"storage_transformers"\s*:\s*\[\s*[^\s\]]')


def absolute(path: str) -> str:
    """The path of a node as callers see it, with a leading slash.

    Examples
    --------
    >>> from zarr_manifests.keys import absolute
    >>> absolute("air"), absolute("/opaque")
    ('/air', '/opaque')
    """
    return path if path.startswith("/") else f"/{path}"


def is_inside(key: str) -> bool:
    """Whether a key or path names one place below any folder, URL or archive.

    So no segment is empty, `.` or `..`, and no character is NUL.

    Examples
    --------
    >>> from zarr_manifests.keys import is_inside
    >>> [key for key in ("a/.b", "a..b", "../a", "/a", "a//b", "a/", "") if is_inside(key)]
    ['a/.b', 'a..b']
    """
    text = f"/{key}/"
    return not ("//" in text or "/./" in text or "/../" in text or "\0" in text)


def check_inside(key: str) -> str:
    """Return a key or path that is stored, or written as a name somewhere else.

    Raises
    ------
    InvalidArgumentError
        Unless `is_inside`.
    """
    if is_inside(key):
        return key
    raise InvalidArgumentError(
        f"the name {key[:80]!r} is refused: it has an empty, '.' or '..' segment, or a NUL"
    )


def no_array(path: str, arrays: Iterable[str], where: str = "") -> NotFoundError:
    """The error for a path with no array; it lists arrays that there are.

    Examples
    --------
    >>> from zarr_manifests.keys import no_array
    >>> print(no_array("ari", ["air", "sea"], " in snapshot 9F"))
    there is no array '/ari' in snapshot 9F; there are: /air, /sea
    """
    listed = ", ".join(sorted(map(absolute, arrays))[:10]) or "none"
    return NotFoundError(f"there is no array {absolute(path)!r}{where}; there are: {listed}")


def join(path: str, name: str) -> str:
    """The key of `name` in the node at `path` (the root's path is empty)."""
    return f"{path}/{name}" if path else name


def directory(path: str) -> str:
    """What all keys below the path start with: the path and a slash; for the root nothing."""
    return path + "/" if path else ""


def lies_below(path: str, top: str) -> bool:
    """Whether a path is that of a group, or of something in it."""
    return not top or path == top or path.startswith(top + "/")


def split(key: str) -> tuple[str, str]:
    """The key's directory (empty for the root) and its last segment."""
    path, _, name = key.rpartition("/")
    return path, name


def document_path(key: str) -> str | None:
    """Path of the node whose metadata document has this key; None for other keys.

    Examples
    --------
    >>> from zarr_manifests.keys import document_path
    >>> document_path("air/t/zarr.json"), document_path(".zgroup"), document_path("air/c/0")
    ('air/t', '', None)
    """
    if not key.endswith(DOCUMENTS):  # fast path: nearly all keys are chunks
        return None
    path, name = split(key)
    return path if name in DOCUMENTS and not key.startswith("/") else None


class ChunkKeys(Struct, frozen=True):
    """A chunk key encoding of Zarr: `default` (`c/0/1`) or `v2` (`0.1`), with its separator."""

    kind: Literal["default", "v2"]
    separator: Literal["/", "."]

    def encode(self, coords: Coords) -> str:
        """The key of a chunk, below its array's path.

        Examples
        --------
        >>> from zarr_manifests.keys import ChunkKeys
        >>> ChunkKeys("default", "/").encode((0, 12, 3))
        'c/0/12/3'
        """
        numbers = self.separator.join(map(str, coords))
        if self.kind == "v2":
            return numbers or "0"
        return f"c{self.separator}{numbers}" if numbers else "c"

    def decode(self, rest: str, ndim: int) -> Coords | None:
        """The coordinate of a key below the array's path; None if it is not a chunk key."""
        found = self.pattern(ndim).fullmatch(rest)
        return None if found is None else tuple(map(int, found.groups()))

    def pattern(self, ndim: int) -> re.Pattern[str]:
        """Pattern of chunk keys below the array's path, with a group for each axis."""
        return _chunk_key(self.kind, self.separator, ndim)

    def decode_all(self, rests: Sequence[str], ndim: int) -> IndexArray | None:
        """The coordinates (int64[n, ndim]) of many keys at once; None if one is not a chunk key.

        None also for arrays without axes. What is beyond 2**63 becomes the largest number.

        Examples
        --------
        >>> from zarr_manifests.keys import ChunkKeys
        >>> ChunkKeys("v2", ".").decode_all(["0.12", "10.3"], 2).tolist()
        [[0, 12], [10, 3]]
        """
        if not ndim or not all(map(self.pattern(ndim).fullmatch, rests)):
            return None
        lead = len(f"c{self.separator}") if self.kind == "default" else 0
        text = self.separator.join([rest[lead:] for rest in rests])
        # Text is parsed much faster at once; the pattern has seen that it holds numbers only.
        return np.fromstring(text, np.int64, sep=self.separator).reshape(-1, ndim)


@cache  # bounded by the number of encodings and axes
def _chunk_key(kind: str, separator: str, ndim: int) -> re.Pattern[str]:
    """Pattern of a chunk key below its array's path."""
    if not ndim:
        return re.compile("c" if kind == "default" else "0")
    fields = [_NUMBER] * ndim if kind == "v2" else ["c", *[_NUMBER] * ndim]
    return re.compile(re.escape(separator).join(fields), re.ASCII)


class GroupMeta(Struct, frozen=True):
    """A parsed group document."""


class ArrayMeta(Struct, frozen=True):
    """The part of an array's document that decides where its chunks are.

    Parameters
    ----------
    shape, chunk_shape : tuple of int
        In elements.
    chunk_keys : ChunkKeys
        How chunk coordinates become keys.
    dimension_names : tuple of (str or None), optional
        Names of the axes, as in the document.
    checks_itself : bool
        Whether a codec, or the index of a shard, ends with its own CRC-32C. The CRC-32C of such
        bytes is a constant, so different chunks of one length may have the same checksum.
    """

    shape: Coords
    chunk_shape: Coords
    chunk_keys: ChunkKeys
    dimension_names: tuple[str | None, ...] | None = None
    checks_itself: bool = False
    grid: Box = Box((), ())
    """All chunk coordinates of the array."""

    def __post_init__(self) -> None:
        grid = Box((0,) * len(self.shape), grid_shape(self.shape, self.chunk_shape))
        force_setattr(self, "grid", grid)

    def same_chunking(self, other: object) -> bool:
        """Whether a chunk coordinate has the same key and the same cells in both."""
        if not isinstance(other, ArrayMeta):
            return False
        return self.chunk_shape == other.chunk_shape and self.chunk_keys == other.chunk_keys

    def is_coordinate(self, path: str) -> bool:
        """Whether this is a CF coordinate variable: one axis with the array's own name."""
        return self.dimension_names == (split(path)[1],)


def node_documents(found: Mapping[str, bytes]) -> dict[str, bytes]:
    """The documents at one path, by file name, that make a node; empty if there is none.

    These are `zarr.json` if it is valid, else `.zarray`, else `.zgroup`; the last two with
    `.zattrs`, whatever its content.

    Examples
    --------
    >>> from zarr_manifests.keys import node_documents
    >>> node_documents({".zgroup": b'{"zarr_format": 2}', ".zattrs": b"{}", "zarr.json": b"{}"})
    {'.zgroup': b'{"zarr_format": 2}', '.zattrs': b'{}'}
    """
    for name in (V3_DOCUMENT, V2_ARRAY, V2_GROUP):
        if name in found and parse_documents({name: found[name]}) is not None:
            names = (name,) if name == V3_DOCUMENT else (name, V2_ATTRIBUTES)
            return {name: found[name] for name in names if name in found}
    return {}


def parse_documents(documents: Mapping[str, bytes]) -> ArrayMeta | GroupMeta | None:
    """Parse the documents of one node; None if they do not describe a node."""
    match documents:
        case {"zarr.json": document}:
            return parse_document(document)
        case {".zarray": document}:
            return _parse_v2_array(document, documents.get(V2_ATTRIBUTES))
        case {".zgroup": document}:
            return _parse_v2_group(document)
    return None


@lru_cache(maxsize=4096)
def parse_document(document: bytes) -> ArrayMeta | GroupMeta | None:
    """Parse a Zarr v3 metadata document; None if malformed or without a regular chunk grid.

    Examples
    --------
    >>> from zarr_manifests.keys import parse_document
    >>> parse_document(b'{"zarr_format": 3, "node_type": "group"}')
    GroupMeta()
    >>> parse_document(b"not json") is None
    True
    """
    try:
        fields = json.loads(document)
        if fields["zarr_format"] != 3:
            return None
        if fields["node_type"] == "group":
            return GroupMeta()
        return _parse_array(fields) if fields["node_type"] == "array" else None
    except _MALFORMED:
        return None


def check_document(path: str, document: bytes) -> None:
    """Refuse a `zarr.json` of a node whose chunks this version could not tell from other keys.

    Bytes that are no metadata of Zarr are not refused: any key may have any value.

    Raises
    ------
    UnsupportedFormatError
        If the chunk grid, the chunk key encoding, a storage transformer, the type of the node or
        the Zarr format is unknown.

    Examples
    --------
    >>> from zarr_manifests.keys import check_document
    >>> check_document("a", b'{"zarr_format": 3, "node_type": "group"}')
    >>> check_document("a", b'{"zarr_format": 4, "node_type": "group"}')
    Traceback (most recent call last):
    zarr_manifests.errors.UnsupportedFormatError: '/a' has Zarr format 4: ...
    """
    if parse_document(document) is not None and not _TRANSFORMED.search(document):
        return  # nearly always
    try:
        unknown = _unknown(json.loads(document))
    except _MALFORMED:
        return
    if unknown is not None:
        raise UnsupportedFormatError(
            f"{absolute(path)!r} has {unknown}: its chunks could not be told from other keys. "
            "Arrays are stored with regular chunks, of one size along each dimension, as "
            "chunks=(100, 50)"
        )


def _unknown(fields: Any) -> str | None:
    """What in the document is of a kind that this version does not know."""
    match fields:
        case {"zarr_format": int(number), "node_type": str()} if number > 3:
            return f"Zarr format {number}"
        case {"zarr_format": 3, "node_type": str(kind)} if kind not in ("array", "group"):
            return f"the node type {kind[:80]!r}"
        case {"zarr_format": 3, "node_type": "array"}:
            pass
        case _:
            return None
    match fields.get("chunk_grid"):
        case {"name": str(name)} if name != "regular":
            return f"the chunk grid {name[:80]!r}"
    match fields.get("chunk_key_encoding"):
        case str(name) | {"name": str(name)} if name not in ("default", "v2"):
            return f"the chunk key encoding {name[:80]!r}"
    return "storage transformers" if fields.get("storage_transformers") else None


@lru_cache(maxsize=4096)
def _parse_v2_group(document: bytes) -> GroupMeta | None:
    try:
        return GroupMeta() if json.loads(document)["zarr_format"] == 2 else None
    except _MALFORMED:
        return None


@lru_cache(maxsize=4096)
def _parse_v2_array(document: bytes, attributes: bytes | None) -> ArrayMeta | None:
    try:
        fields = json.loads(document)
        if fields["zarr_format"] != 2:
            return None
        shape, chunks = tuple(fields["shape"]), tuple(fields["chunks"])
        separator = fields.get("dimension_separator", ".")
        names = _v2_dimensions(attributes, len(shape))
        checked = _has_crc32c([fields.get("compressor"), fields.get("filters")])
        return _array(shape, chunks, "v2", separator, names, checked)
    except _MALFORMED:
        return None


def _v2_dimensions(attributes: bytes | None, ndim: int) -> tuple[str, ...] | None:
    """Dimension names as xarray writes them to attributes; None if absent or malformed."""
    try:
        names = json.loads(attributes or b"{}")["_ARRAY_DIMENSIONS"]
    except _MALFORMED:
        return None
    if not isinstance(names, list) or len(names) != ndim:
        return None
    return tuple(names) if all(isinstance(name, str) for name in names) else None


def _parse_array(fields: Any) -> ArrayMeta | None:
    grid, encoding = fields["chunk_grid"], fields["chunk_key_encoding"]
    if grid["name"] != "regular":
        return None
    shape, chunks = tuple(fields["shape"]), tuple(grid["configuration"]["chunk_shape"])
    names = fields.get("dimension_names")
    if isinstance(encoding, str):
        encoding = {"name": encoding}
    kind = encoding["name"]
    separator = encoding.get("configuration", {}).get("separator", "." if kind == "v2" else "/")
    if names is not None:
        names = tuple(names)
        if len(names) != len(shape) or not all(n is None or isinstance(n, str) for n in names):
            return None
    return _array(shape, chunks, kind, separator, names, _has_crc32c(fields.get("codecs")))


def _has_crc32c(codecs: Any) -> bool:
    """Whether one of the codecs, or of those inside them, is called `crc32c`."""
    if isinstance(codecs, dict):
        codecs = [*codecs.values()]
    if isinstance(codecs, list):
        return any(map(_has_crc32c, codecs))
    return isinstance(codecs, str) and codecs.rpartition(".")[2] == "crc32c"


def _array(
    shape: Coords,
    chunks: Coords,
    kind: Any,
    separator: Any,
    names: tuple[str | None, ...] | None,
    checked: bool,
) -> ArrayMeta | None:
    if (
        any(type(n) is not int for n in (*shape, *chunks))  # `True` and `1.0` equal integers
        or kind not in ("default", "v2")
        or separator not in ("/", ".")
        or len(shape) != len(chunks)
        or len(shape) > _MAX_NDIM
        or not all(0 <= n < 2**63 for n in (*shape, *chunks))
        or any(c == 0 and n for n, c in zip(shape, chunks, strict=True))
        or math.prod(grid_shape(shape, chunks)) >= MAX_BOX_CHUNKS
    ):
        return None
    return ArrayMeta(shape, chunks, ChunkKeys(kind, separator), names, checked)
