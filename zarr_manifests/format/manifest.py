"""Manifests: chunk tables of one or more nodes in one object, and pointers to them.

A `ManifestRef` lists the (node, box) tables of a manifest, so readers know which manifests they
need before they fetch any. Tables lie in blocks, small ones together. A manifest of several blocks
is stored so that each block is compressed by itself, and its `ManifestRef` says where: a reader
fetches and verifies a block without the rest. Invariant: a table is decoded on demand, so a lookup
in one node never pays for the other nodes in the manifest.

Nodes of the hierarchy, and the base of a snapshot
--------------------------------------------------

A node is a group, an array or an opaque entry: a key that is neither metadata nor chunk, and
behaves like an array of one chunk. A node keeps its random id until it is deleted. The *base* is
the node table and the directory of leaf manifests. Compactions and rewrites replace it; commits
leave it alone. It carries copies of small manifests with coordinates, so that reading a dataset's
coordinates takes no further request.

A large base is split into *pages*, which are bases of their own: each holds the nodes in a range of
paths, with their leaves and counts. The order of nodes is by parent path, then by name, so that the
members of a group are neighbours. The many leaves of a large array are in pages of their own.
Invariants: pages never change, their ranges do not overlap, and a node outside all ranges does not
exist; a page that is missing or differs from its pointer is an error.

A base *counts* the chunks of each node. A delta or run in a read list counts by how much it changes
them, or the new total if it replaces everything. Their sum is the number of an array's chunks,
without reading a manifest. A commit does not look up what it overwrites, so a count may be an upper
bound; its flags say so. Invariant: counts of all nodes are known, or of none.

Deltas: what one commit changed; and bundles of several
-------------------------------------------------------

A delta is the transaction log of its commit. Until a compaction merges it into the base, readers
also lay it over the base: node records set and deleted, truncations, and chunk tables of refs set
and unset. Small tables are embedded; others are in manifests.

A *run* replaces several neighbours in a read list. It is an object of the same form, whose `commit`
is the one that wrote it.

A *bundle* holds copies of several live deltas in one object, for readers that open a snapshot.

Invariants: a delta has at most one row for a coordinate; its truncations apply to everything older
than the delta, and not to its own rows. A bundle only repeats its deltas, so it saves requests and
can always be ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from functools import cached_property, partial
from itertools import chain, pairwise
from typing import Any, Final

import msgpack
import numpy as np
from msgspec import Struct

from zarr_manifests.errors import CorruptObjectError, InvalidArgumentError
from zarr_manifests.format.chunk_table import (
    MAX_ROWS,
    ChunkTable,
    StoredTable,
    encode_column,
)
from zarr_manifests.format.records import (
    HEADER_BYTES,
    MAX_EXPANSION,
    MAX_NUMBER,
    STORED,
    BlobRef,
    BlockRef,
    CommitId,
    ListRecord,
    MetadataObject,
    NodeId,
    Number,
    ObjectKind,
    Record,
    are,
    check_numbers,
    check_texts,
    compress,
    decode,
    decompress,
    encode,
    expanded_at_most,
    frame,
    pack,
    plain,
    record,
    refusing,
    unpack,
)
from zarr_manifests.grid import Box, Coords
from zarr_manifests.ids import COMMIT_ID_BYTES, NODE_ID_BYTES, crc32c
from zarr_manifests.keys import (
    ArrayMeta,
    GroupMeta,
    check_inside,
    join,
    node_documents,
    parse_documents,
)

_WHOLE_BYTES: Final = 256 * 1024
"""A manifest of at most about this size is one block: one request reads it."""
_MUCH_SMALLER: Final = 4
"""Small tables may compress so well that the manifest is small after all."""
_BLOCK_BYTES: Final = 64 * 1024
"""Tables up to about so many bytes share a block."""
_ID_BYTES: Final = 16
"""About what the id of a session takes, compressed."""
_SHARED_PART: Final = 8
"""Ids are shared if that saves this part of the bytes: who reads a leaf reads them all."""
_ROWS_FREELY: Final = 1 << 20
_ROWS_A_BYTE: Final = 8
_VALUES_FREELY: Final = 1 << 22
_VALUES_A_BYTE: Final = 8
_RAW, _ZSTD = b"\0", b"\1"

type Place = tuple[Number, Number, Number, Number]
"""Where a table is: offset, length and crc32c of its block in the object, and its number there."""


class Part(ListRecord, frozen=True):
    """Directory entry of one chunk table: node, box and number of rows."""

    node_id: NodeId
    box: Box
    count: Number

    def __post_init__(self) -> None:
        if len(self.node_id) != NODE_ID_BYTES or not 0 <= self.count <= MAX_NUMBER:
            raise CorruptObjectError("a chunk table with an invalid node id or number of rows")
        if max(self.box.hi, default=0) > MAX_NUMBER:
            raise CorruptObjectError(f"a chunk table whose box exceeds {MAX_NUMBER}: {self.box}")


def grouped[K, T](items: Iterable[tuple[K, T]]) -> dict[K, list[T]]:
    """The items by their key, in order.

    Examples
    --------
    >>> from zarr_manifests.format.manifest import grouped
    >>> grouped([("a", 1), ("b", 2), ("a", 3)])
    {'a': [1, 3], 'b': [2]}
    """
    found: dict[K, list[T]] = {}
    for key, item in items:
        found.setdefault(key, []).append(item)
    return found


class ManifestRef(Record, frozen=True, dict=True, rename={"packed_for": "set", "nbytes": "bytes"}):
    """Pointer to a manifest, with the directory of its tables.

    Parameters
    ----------
    blob : BlobRef
        The manifest.
    parts : tuple of Part
        Its tables, in order.
    merged : tuple of int
        In a base: for each part, the sequence up to which it includes all changes. Empty if that
        is 0 for all.
    packed_for : str
        In a base: name of the manifest set it was packed for; empty for none.
    places : tuple of (int, int, int, int)
        Where each part's table is in the object; empty if that is read whole.
    nbytes : tuple of int
        In a base: the bytes of the chunks of each part.
    ids : (int, int, int) or None
        Offset, length and crc32c of the block of session ids that the tables share, if any.

    Raises
    ------
    CorruptObjectError
        If `merged`, `places` or `nbytes` is not empty and has not one item for each part, or a
        place is not in the object.
    """

    blob: BlobRef
    parts: tuple[Part, ...] = ()
    merged: tuple[Number, ...] = ()
    packed_for: str = ""
    places: tuple[Place, ...] = ()
    nbytes: tuple[Number, ...] = ()
    ids: tuple[Number, Number, Number] | None = None

    def __post_init__(self) -> None:
        columns = self.merged, self.places, self.nbytes
        if any(of and len(of) != len(self.parts) for of in columns):
            raise CorruptObjectError(f"{self.blob.key}: expected one number for each part")
        check_numbers(self.blob.key, *self.merged, *self.nbytes)
        check_texts(self.blob.key, self.packed_for)
        of_ids = () if self.ids is None else ((*self.ids, 0),)
        for offset, length, crc, number in (*self.places, *of_ids):
            within = HEADER_BYTES <= offset < offset + length <= self.blob.length
            if not (within and 0 <= crc < 2**32 and 0 <= number < MAX_ROWS):
                raise CorruptObjectError(f"{self.blob.key}: a table lies outside of the manifest")

    def leaves(self) -> list[tuple[Part, int]]:
        """Each part and the sequence it is merged to."""
        return list(zip(self.parts, self.merged or (0,) * len(self.parts), strict=True))

    def bytes_of(self, part: Part) -> int:
        """The bytes of the part's chunks, in a base.

        Raises
        ------
        CorruptObjectError
            If the base does not say them.
        """
        if not self.nbytes:
            raise CorruptObjectError(f"{self.blob.key}: a leaf without the bytes of its chunks")
        return self.nbytes[self._numbers[part]]

    @cached_property
    def _numbers(self) -> Mapping[Part, int]:
        return {part: number for number, part in enumerate(self.parts)}

    def block(self, part: Part) -> tuple[BlobRef, int] | None:
        """The block with the part's table, and its number there; None if it is read whole."""
        if not self.places:
            return None
        offset, length, crc, number = self.places[self._numbers[part]]
        return BlockRef(self.blob.key, length, crc, start=offset), number

    def ids_block(self) -> BlobRef | None:
        """The block of the ids that the tables share, if there is one."""
        if self.ids is None:
            return None
        offset, length, crc = self.ids
        return BlockRef(self.blob.key, length, crc, start=offset)


class Block(Struct, frozen=True):
    """The tables of a block of a manifest, each still encoded; or the session ids they share."""

    tables: tuple[bytes, ...]

    @classmethod
    def from_object(cls, data: bytes, ref: BlobRef) -> Block:
        """The block that the pointer names.

        Raises
        ------
        CorruptObjectError
            If the bytes are not those of the block.
        """
        if len(data) != ref.length or crc32c(data) != ref.crc32c:  # the only check of these bytes
            raise CorruptObjectError(
                f"{ref.key}: the checksum does not match the bytes of the block at {ref.offset}; "
                "restore the object from a backup, or open an older snapshot that does not use it"
            )
        with refusing(ref.key):
            return cls.parse(data, MAX_EXPANSION * len(data))

    @classmethod
    def parse(cls, data: bytes, most: int) -> Block:
        """From the bytes that `pack` made; compressed content may have at most so many bytes."""
        codec, body = data[:1], data[1:]
        if codec not in (_RAW, _ZSTD):
            raise CorruptObjectError("a block has an unknown codec")
        tables = unpack(decompress(body, most) if codec == _ZSTD else body)
        if not isinstance(tables, list) or not are(bytes, tables):
            raise CorruptObjectError("a block is no list of tables")
        return cls(tuple(tables))

    def pack(self, *, alone: bool) -> bytes:
        """The bytes; compressed, if the block is to be read alone and that makes it smaller."""
        raw = pack(self.tables)
        packed = compress(raw) if alone else raw
        smaller = len(packed) < len(raw) <= MAX_EXPANSION * len(packed)
        return _ZSTD + packed if smaller else _RAW + raw


class Manifest(Record, frozen=True, dict=True):
    """Chunk tables of one or more nodes, each still encoded.

    Parameters
    ----------
    parts : tuple of (Part, bytes)
        Each table's directory entry, and the encoded table.
    ids : tuple of bytes
        Session ids that several tables share.
    """

    parts: tuple[tuple[Part, bytes], ...] = ()
    ids: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, tables: Iterable[tuple[bytes, ChunkTable]]) -> Manifest:
        """The manifest of these (node id, table) pairs."""
        parts = [(Part(node, table.box, len(table)), encode_table(table)) for node, table in tables]
        return cls(tuple(parts))

    def directory(self) -> tuple[Part, ...]:
        """The directory of its tables."""
        return tuple(part for part, _ in self.parts)

    def tables(self, node_id: bytes) -> list[ChunkTable]:
        """The tables of one node, decoded."""
        return [self.decode(part, data) for part, data in self.parts if part.node_id == node_id]

    def decode(self, part: Part, data: bytes) -> ChunkTable:
        """One of the tables, decoded."""
        return decode_table(part, data, self.ids)

    def data(self, part: Part) -> bytes:
        """The encoded table of that part.

        Raises
        ------
        CorruptObjectError
            If there is none, since the node would read wrongly.
        """
        found = self._of_parts.get(part)
        if found is None:
            raise CorruptObjectError("a manifest has no chunk table such as the snapshot says")
        return found

    @cached_property
    def _of_parts(self) -> Mapping[Part, bytes]:
        return dict(self.parts)

    def encode(self) -> tuple[bytes, dict[str, Any]]:
        """The object's bytes, and what its pointer says of its blocks; nothing if it is small."""
        nbytes = sum(len(data) for _, data in self.parts)
        if nbytes <= _MUCH_SMALLER * _WHOLE_BYTES:
            block = Block(tuple(data for _, data in self.parts)).pack(alone=False)
            whole = encode(ObjectKind.MANIFEST, {"blocks": [[self.directory(), block]]})
            if nbytes <= _WHOLE_BYTES or len(whole) <= _WHOLE_BYTES:
                return whole, {}
        return _in_blocks(self.parts)

    @classmethod
    def from_object(cls, data: bytes, ref: BlobRef) -> Manifest:
        """Decode a manifest; its tables stay encoded."""
        told: Any = {"crc": ref.crc32c, "length": ref.length}
        parse = partial(_of_blocks, most=expanded_at_most(data))
        return decode(data, ObjectKind.MANIFEST, parse, ref.key, **told)


NO_TABLES: Final = Manifest(())


def decode_table(
    part: Part, data: bytes, ids: Sequence[bytes] = (), *, refs: bool = True
) -> ChunkTable:
    """Decode a table of a manifest; without `refs`, only which chunks it has.

    `ids` are those that the manifest's tables share.
    """
    stored = record(StoredTable, unpack(data), "table")
    if stored.n != part.count:
        raise CorruptObjectError("a chunk table has not the rows that its manifest lists")
    _check_size(stored.n, stored.col, len(data))
    try:
        table = ChunkTable.parse(stored, ids, refs=refs)
    except InvalidArgumentError as error:  # an invalid box
        raise CorruptObjectError(f"a chunk table is malformed: {error}") from error
    if table.box != part.box:
        raise CorruptObjectError("a chunk table has another box than its manifest lists")
    return table


def _in_blocks(parts: Sequence[tuple[Part, bytes]]) -> tuple[bytes, dict[str, Any]]:
    """The bytes of a manifest of several blocks, and where each table is, and the shared ids."""
    ids, parts = _sharing_ids(parts)
    groups: list[list[tuple[Part, bytes]]] = []
    room = 0
    for part, data in parts:
        if len(data) > room:
            groups.append([])
            room = _BLOCK_BYTES
        groups[-1].append((part, data))
        room -= len(data)
    packer = msgpack.Packer(use_bin_type=True)
    written, where = [packer.pack_map_header(1 + bool(ids))], dict[str, Any]()
    if ids:
        written += [packer.pack("ids"), packer.pack(ids)]
        end = HEADER_BYTES + sum(map(len, written))
        where["ids"] = end - len(ids), len(ids), crc32c(ids)
    written += [packer.pack("blocks"), packer.pack_array_header(len(groups))]
    places: list[Place] = []
    end = HEADER_BYTES + sum(map(len, written))
    for group in groups:
        block = Block(tuple(data for _, data in group)).pack(alone=True)
        listed = plain([part for part, _ in group])
        written += [packer.pack_array_header(2), packer.pack(listed), packer.pack(block)]
        end += sum(map(len, written[-3:]))
        places += [(end - len(block), len(block), crc32c(block), n) for n in range(len(group))]
    payload = b"".join(written)
    where["places"] = tuple(places)
    return frame(ObjectKind.MANIFEST, STORED, len(payload), payload), where


def _sharing_ids(
    parts: Sequence[tuple[Part, bytes]],
) -> tuple[bytes, Sequence[tuple[Part, bytes]]]:
    """A block with the session ids of the tables, and the tables without; if that saves enough."""
    tables = [unpack(data) for _, data in parts]
    number = {name: at for at, name in enumerate(dict.fromkeys(chain(*(t["src"] for t in tables))))}
    repeated = sum(len(table["src"]) for table in tables) - len(number)
    if repeated * _ID_BYTES * _SHARED_PART <= sum(len(data) for _, data in parts):
        return b"", parts
    ids = Block(tuple(name.encode() for name in number)).pack(alone=True)
    for table in tables:
        if named := table.pop("src"):
            at = encode_column(np.array([number[name] for name in named], np.int64))
            table["shared"] = [len(named), at]
    return ids, [(part, pack(table)) for (part, _), table in zip(parts, tables, strict=True)]


class _StoredBlocks(Record, frozen=True):
    """Blocks of a manifest, still packed, each with the directory of its tables."""

    ids: bytes = b""
    blocks: tuple[tuple[tuple[Part, ...], bytes], ...] = ()


def _of_blocks(payload: Any, most: int) -> Manifest:
    """The manifest of these blocks, whose tables have together at most so many bytes."""
    found: list[tuple[Part, bytes]] = []
    stored = record(_StoredBlocks, payload, "manifest")
    ids = Block.parse(stored.ids, most).tables if stored.ids else ()
    for parts, data in stored.blocks:
        tables = Block.parse(data, min(most, MAX_EXPANSION * len(data))).tables
        most -= sum(map(len, tables))
        if len(tables) != len(parts):
            raise CorruptObjectError("a block has not the tables that are listed of it")
        found += zip(parts, tables, strict=True)
    return Manifest(tuple(found), ids)


def encode_table(table: ChunkTable) -> bytes:
    """Encode a chunk table.

    Raises
    ------
    InvalidArgumentError
        If it has more rows or values than readers accept.
    """
    packed = table.pack()
    data = pack(packed)
    try:
        _check_size(len(table), packed.get("col", {}), len(data))
    except CorruptObjectError as error:
        raise InvalidArgumentError(
            f"a table of {len(data)} bytes with {len(table)} chunks of one array exceeds what "
            "readers accept; commit them in several steps"
        ) from error
    return data


def _check_size(rows: int, columns: Mapping[str, Any], nbytes: int) -> None:
    """Raise if rows, or values that vary, are more than so few bytes may hold."""
    varying = sum(isinstance(one, list) and one[:1] != [0] for one in columns.values())
    if rows > _ROWS_FREELY + _ROWS_A_BYTE * nbytes:
        raise CorruptObjectError(f"a chunk table of {nbytes} bytes cannot hold {rows} rows")
    if rows * varying > _VALUES_FREELY + _VALUES_A_BYTE * nbytes:
        raise CorruptObjectError(
            f"a chunk table of {nbytes} bytes cannot hold {rows * varying} values"
        )


# --- counts ------------------------------------------------------------------------------------

_MOST: Final = 2**62
_FLAGS: Final = range(8)


class Counted:
    """Flags of a count; plain integers, since every commit tests many and enums are slow."""

    EXACT: Final = 0
    CHUNKS_AT_MOST: Final = 1
    BYTES_AT_MOST: Final = 2
    WHOLE: Final = 4
    """The count is a total, not a change: older counts of the node no longer apply."""


class Count(ListRecord, frozen=True):
    """Chunks and bytes of one node: a total, or a change, which may be negative.

    `counted` is a sum of the flags in `Counted`.
    """

    node_id: bytes
    chunks: int
    nbytes: int
    counted: int = Counted.EXACT


def check_counts(counts: Sequence[Count], *, least: int = -_MOST) -> None:
    """Raise for invalid counts, including those below `least`.

    Raises
    ------
    CorruptObjectError
        If a node occurs twice, or a number is out of range.
    """
    seen = set()
    for count in counts:
        seen.add(count.node_id)
        within = least <= count.chunks <= _MOST and least <= count.nbytes <= _MOST
        if not within or count.counted not in _FLAGS or len(count.node_id) != NODE_ID_BYTES:
            raise CorruptObjectError("counts: an invalid id, number or flag")
    if len(seen) != len(counts):
        raise CorruptObjectError("counts: a node occurs twice")


# --- nodes -------------------------------------------------------------------------------------

type PathOrder = tuple[bool, str, str]
"""Sort key of nodes in pages: opaque entries last; then the parent path and the name."""


def path_order(path: str) -> PathOrder:
    """The sort key of the node at that path.

    Examples
    --------
    >>> from zarr_manifests.format.manifest import path_order
    >>> sorted(["a0", "a/x", "/k", "a-b", "a", ""], key=path_order)
    ['', 'a', 'a-b', 'a0', 'a/x', '/k']
    """
    parent, _, name = path.rpartition("/")
    return path.startswith("/"), parent, name


class NodeKind(IntEnum):
    """Kind of a node."""

    GROUP = 0
    ARRAY = 1
    OPAQUE = 2


class Node(ListRecord, frozen=True, dict=True):
    """A node of the hierarchy.

    Parameters
    ----------
    path : str
        Path without a leading slash; empty for the root. For an opaque entry, a slash and the
        whole key.
    node_id : bytes
        12 random bytes.
    kind : NodeKind
        Group, array or opaque entry.
    documents : mapping of str to bytes
        Metadata documents by file name, unchanged: `zarr.json`, or `.zarray` or `.zgroup` and
        optionally `.zattrs`. Empty for opaque entries.

    Raises
    ------
    InvalidArgumentError
        If the path is not valid Unicode text, or could lead out of a folder.
    CorruptObjectError
        If the id has the wrong length, or the documents do not describe a node of that kind.
    """

    path: str
    node_id: bytes
    kind: NodeKind
    documents: Mapping[str, bytes]

    def __post_init__(self) -> None:
        check_texts("a key", self.path)
        if self.path:
            check_inside(self.path.removeprefix("/"))  # an opaque entry's begins with one
        meta = self.meta
        # Most nodes have one document; checking that one is enough.
        sound = len(self.node_id) == NODE_ID_BYTES and (
            (meta is not None and len(self.documents) == 1)
            or node_documents(self.documents).keys() == self.documents.keys()
        )
        sound = sound and (
            (self.kind is NodeKind.GROUP and isinstance(meta, GroupMeta))
            or (self.kind is NodeKind.ARRAY and isinstance(meta, ArrayMeta))
            or (self.kind is NodeKind.OPAQUE and not self.documents)
        )
        sound = sound and self.path.startswith("/") == (self.kind is NodeKind.OPAQUE)
        if not sound:
            raise CorruptObjectError(f"/{self.path}: not a node of kind {self.kind.name}")

    @cached_property
    def meta(self) -> ArrayMeta | GroupMeta | None:
        """The parsed documents; None for an opaque entry."""
        return parse_documents(self.documents)

    @cached_property
    def array(self) -> ArrayMeta | None:
        """The parsed documents of an array; None for other nodes."""
        return self.meta if isinstance(self.meta, ArrayMeta) else None

    @property
    def array_meta(self) -> ArrayMeta:
        """The parsed documents of a node that is known to be an array."""
        assert isinstance(self.meta, ArrayMeta)
        return self.meta

    @property
    def document_keys(self) -> list[str]:
        """The keys of its documents."""
        return [join(self.path, name) for name in self.documents]


class NodePage(ListRecord, frozen=True):
    """Pointer to a page of a base: the nodes in a range of paths, their leaves and counts.

    Parameters
    ----------
    blob : BlobRef
        The page, a base without pages.
    first, last : str
        Paths of its first and last node.
    nodes, leaves : int
        How many nodes and leaves it has.
    orphans : bool
        Whether the parent path of one of its nodes, other than the root's, has no node.
    """

    blob: BlobRef
    first: str
    last: str
    nodes: int
    leaves: int
    orphans: bool = False

    @classmethod
    def to(cls, blob: BlobRef, page: Base, *, orphans: bool) -> NodePage:
        """The pointer to that page, which has at least one node."""
        first, last = page.nodes[0].path, page.nodes[-1].path
        return cls(blob, first, last, len(page.nodes), page.leaf_count, orphans)

    def fits(self, page: Base) -> bool:
        """Whether the page has the range and numbers that this pointer says, and is in order."""
        orders = [path_order(node.path) for node in page.nodes]
        ordered = bool(orders) and all(one < other for one, other in pairwise(orders))
        return ordered and NodePage.to(self.blob, page, orphans=self.orphans) == self


class LeafPage(ListRecord, frozen=True):
    """Pointer to a page of a base: some of the leaves of one large array.

    Parameters
    ----------
    blob : BlobRef
        The page, a base without nodes and pages.
    node_id : bytes
        The array.
    leaves : int
        How many leaves it has.
    box : Box
        The smallest box around them.
    merged : tuple of int
        The oldest and the newest sequence that one of them is merged to.
    """

    blob: BlobRef
    node_id: bytes
    leaves: int
    box: Box
    merged: tuple[int, int]

    @classmethod
    def to(cls, blob: BlobRef, page: Base) -> LeafPage:
        """The pointer to that page, which has at least one leaf."""
        leaves = [leaf for ref in page.manifests for leaf in ref.leaves()]
        merged = [to for _, to in leaves]
        box = Box.around(part.box for part, _ in leaves)
        return cls(blob, leaves[0][0].node_id, len(leaves), box, (min(merged), max(merged)))

    def fits(self, page: Base) -> bool:
        """Whether the page has the leaves that this pointer says, and nothing besides."""
        nodes = {part.node_id for ref in page.manifests for part in ref.parts}
        alone = nodes == {self.node_id} and not (page.nodes or page.counts)
        return alone and LeafPage.to(self.blob, page) == self


class Base(MetadataObject, frozen=True):
    """Node table and directory of leaves, or a page of them.

    Parameters
    ----------
    nodes : tuple of Node
        All nodes as of `sequence`, except those in pages.
    manifests : tuple of ManifestRef
        The leaves, each with the sequence it is merged to, except those in pages.
    sequence : int
        Sequence of the newest change in `nodes`; of a page, when it was written.
    counts : tuple of Count
        Chunks of each node as of `sequence`, except those in pages.
    pages : tuple of NodePage
        The pages with all nodes and their leaves, in their order; empty if they are in here.
    leaf_pages : tuple of LeafPage
        The pages with leaves of large arrays.

    Raises
    ------
    CorruptObjectError
        If a leaf is merged to a later sequence than the base, a path occurs twice, or the ranges of
        pages are out of order or overlap.
    """

    nodes: tuple[Node, ...] = ()
    manifests: tuple[ManifestRef, ...] = ()
    sequence: int = 0
    counts: tuple[Count, ...] = ()
    pages: tuple[NodePage, ...] = ()
    leaf_pages: tuple[LeafPage, ...] = ()

    _KIND = ObjectKind.BASE

    def __post_init__(self) -> None:
        merged = [to for ref in self.manifests for to in ref.merged]
        merged += [page.merged[1] for page in self.leaf_pages]
        if any(to > self.sequence for to in merged):
            raise CorruptObjectError("base: a leaf is merged to a later sequence than the base")
        if len({node.path for node in self.nodes}) != len(self.nodes):
            raise CorruptObjectError("base.nodes: a path occurs twice")
        check_numbers("base.sequence", self.sequence)
        check_counts(self.counts, least=0)
        if self.pages or self.leaf_pages:
            self._check_pages()

    def _check_pages(self) -> None:
        if self.pages and (self.nodes or self.manifests or self.counts):
            raise CorruptObjectError("base: nodes or leaves both inline and in pages")
        ends = [path_order(path) for page in self.pages for path in (page.first, page.last)]
        if any(
            one > other if at % 2 == 0 else one >= other
            for at, (one, other) in enumerate(pairwise(ends))
        ):
            raise CorruptObjectError("base.pages: ranges out of order")
        links: Iterable[NodePage | LeafPage] = (*self.pages, *self.leaf_pages)
        if len({link.blob.key for link in links}) != len(self.pages) + len(self.leaf_pages):
            raise CorruptObjectError("base: a page is listed twice")

    def check_page(self, link: NodePage | LeafPage, page: Base) -> None:
        """Raise unless the page is as the pointer to it says.

        Raises
        ------
        CorruptObjectError
            If it is not, has pages itself, or is newer than the base.
        """
        nested = page.pages or page.leaf_pages
        if nested or page.sequence > self.sequence or not link.fits(page):
            raise CorruptObjectError(f"{link.blob.key} is not the page that its base expects")

    @property
    def leaf_count(self) -> int:
        """How many leaves it has itself."""
        return sum(len(ref.parts) for ref in self.manifests)


# --- deltas -------------------------------------------------------------------------------------


class Delta(MetadataObject, frozen=True, rename={"commit_id": "commit", "embedded": "tables"}):
    """What one commit changed.

    Parameters
    ----------
    commit_id : bytes
        16 random bytes, the same for all attempts of a commit.
    nodes : tuple of Node
        Nodes created or changed, in their new state.
    deleted : mapping of str to bytes
        Deleted nodes: id by path.
    truncated : mapping of bytes to tuple of int
        Grid shape by node id: older chunks at or beyond it on any axis are gone.
    embedded : Manifest
        Small chunk tables.
    manifests : tuple of ManifestRef
        Manifests with the other chunk tables.

    Raises
    ------
    CorruptObjectError
        If an id has the wrong length.
    """

    commit_id: CommitId
    nodes: tuple[Node, ...] = ()
    deleted: Mapping[str, NodeId] = {}
    truncated: Mapping[NodeId, Coords] = {}
    embedded: Manifest = NO_TABLES
    manifests: tuple[ManifestRef, ...] = ()

    _KIND = ObjectKind.DELTA

    def __post_init__(self) -> None:
        ids = [*self.deleted.values(), *self.truncated]
        if len(self.commit_id) != COMMIT_ID_BYTES or any(len(i) != NODE_ID_BYTES for i in ids):
            raise CorruptObjectError("delta: an id has the wrong length")
        for shape in self.truncated.values():
            check_numbers("delta.truncated", *shape)
        check_texts("delta.deleted", *self.deleted)

    @property
    def changes_nodes(self) -> bool:
        """Whether it creates, changes, deletes or truncates nodes."""
        return bool(self.nodes or self.deleted or self.truncated)


class Bundle(MetadataObject, frozen=True):
    """Copies of deltas, for readers that open a snapshot.

    Parameters
    ----------
    deltas : mapping of str to Delta
        Each by its key.
    """

    deltas: Mapping[str, Delta] = {}

    _KIND = ObjectKind.BUNDLE
