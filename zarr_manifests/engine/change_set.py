"""What a writer has changed and not yet committed.

A `ChangeSet` is plain data: nodes by path (None = deleted), chunk refs by node and coordinate,
tables of refs under these, truncations. `node_edits` decides *what* to record, and `forks`
merges forks; this module compares change sets, and packs them into a fork (`ForkState`).

If there are very many refs, most are spilled from memory to manifests.

Invariant: a node created and deleted within the change set leaves no trace in it; refs are recorded
only for nodes that exist.

Chunk refs of a writer that are kept in manifests instead of in memory
----------------------------------------------------------------------

Beyond the memory budget, chunk refs are written to manifests of one table each, under the writer's
own keys. Only their locations, boxes and counts stay in memory (`Spilled`). A commit refers to
these manifests as they are. Rows are merged and rewritten only where later changes overlap a
spilled table, or two spilled tables share chunks. That is done slab by slab, so that only a slab is
in memory.

Invariants: spilled rows and the chunks they refer to are durable; the same rows are written once,
however often they are saved; a manifest never changes, and is garbage until a commit refers to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from operator import le, lt
from typing import Any, Final, TypeGuard

import numpy as np
from msgspec import Struct, field

from zarr_manifests.config import CacheOptions, Config
from zarr_manifests.engine.base_pages import PathIndex
from zarr_manifests.engine.objects import ObjectReader, Objects, SessionKeys, Upload
from zarr_manifests.format.chunk_table import (
    TABLE_ROWS,
    ChunkTable,
    InlineRef,
    NativeRef,
    RefKind,
    StoredRef,
    Unset,
    VirtualRef,
    native_keys,
)
from zarr_manifests.format.manifest import Manifest, ManifestRef, Node, grouped
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.zone_maps import PAGE_ROWS, ZoneTable
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.ids import crc32c, lineage_of, session_of
from zarr_manifests.planning.components import Changes, Reads
from zarr_manifests.planning.meaning import in_pages, merged, sort_of
from zarr_manifests.planning.merge import (
    Layer,
    difference,
    in_box,
    in_c_order,
    in_tables,
    inside,
    merge_layers,
    owned,
    pick,
    select,
    split,
)
from zarr_manifests.storage import Storage
from zarr_manifests.virtual.containers import Containers

_INLINE_BYTES: Final = 64
"""Bytes of inline chunks that take about as much memory as a ref."""


class Spilled(Struct, frozen=True):
    """A table of chunk refs that is stored in a manifest.

    Parameters
    ----------
    manifest : ManifestRef
        The manifest, with one part.
    unset : int
        The number of rows that unset a chunk.
    nbytes, written_bytes : int
        Bytes of all chunks set, and of those stored in the repository.
    is_own : bool, default False
        Whether all chunk objects are known to be of the lineage that wrote the manifest.
    """

    manifest: ManifestRef
    unset: int
    nbytes: int
    written_bytes: int
    is_own: bool = False

    def __post_init__(self) -> None:
        (part,) = self.manifest.parts
        assert 0 <= self.unset <= part.count
        assert 0 <= self.written_bytes <= self.nbytes

    @classmethod
    def of(cls, manifest: ManifestRef, table: ChunkTable) -> Spilled:
        """Describe a table stored in the manifest."""
        lineage = lineage_of(session_of(manifest.blob.key))
        is_own = all(lineage_of(source) == lineage for source in table.sources)
        return cls(manifest, *counts(table), is_own)

    @property
    def node_id(self) -> bytes:
        """The node whose chunks they are."""
        return self.manifest.parts[0].node_id

    @property
    def key(self) -> str:
        """The manifest's key."""
        return self.manifest.blob.key

    @property
    def box(self) -> Box:
        """The box of the rows."""
        return self.manifest.parts[0].box

    def __len__(self) -> int:
        return self.manifest.parts[0].count


type Rows = ChunkTable | Spilled
"""Chunks set and unset, in memory or spilled."""


def counts(rows: Rows) -> tuple[int, int, int]:
    """How many rows unset a chunk; the bytes of chunks set, and of those in the repository."""
    if isinstance(rows, Spilled):
        return rows.unset, rows.nbytes, rows.written_bytes
    unset, virtual = rows.kind == RefKind.UNSET, rows.kind == RefKind.VIRTUAL
    nbytes = int(rows.length[~unset].sum())
    return int(unset.sum()), nbytes, nbytes - int(rows.length[virtual].sum())


def resident(rows: Rows) -> TypeGuard[ChunkTable]:
    """Whether the rows are in memory."""
    return isinstance(rows, ChunkTable)


def held(rows: Rows) -> int:
    """The memory that the rows take, in refs."""
    return len(rows) + len(rows.inline) // _INLINE_BYTES if isinstance(rows, ChunkTable) else 0


def rows_of(objects: ObjectReader, rows: Rows) -> ChunkTable:
    """The rows, fetched if they are not in memory.

    Raises
    ------
    CorruptObjectError
        If the manifest does not have what was written.
    """
    if isinstance(rows, ChunkTable):
        return rows
    return objects.table(rows.manifest, rows.manifest.parts[0], {})


class Spill:
    """Writes and reads rows that a writer does not keep in memory.

    It is not pickled: a pickled change set loses it, and a copy has its own.

    Parameters
    ----------
    objects : Objects
        The repository's objects.
    keys : SessionKeys
        Keys for manifests.
    budget : int
        The number of refs that may be in memory.
    """

    def __init__(self, objects: Objects, keys: SessionKeys, budget: int) -> None:
        self.objects = objects
        self.budget = budget
        self._keys = keys

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return type(None), ()

    def save(self, node_id: bytes, table: ChunkTable, unsynced: Iterable[str]) -> list[Spilled]:
        """Write the rows to manifests of one leaf each, after their chunks are durable.

        Parameters
        ----------
        node_id : bytes
            The node whose chunks they are.
        table : ChunkTable
            The rows.
        unsynced : iterable of str
            Keys of chunk objects that are not durable yet.
        """
        due = set(unsynced)
        due = due & native_keys(table) if due else due
        if due:
            self.objects.storage.sync(sorted(due))
        return [self._write(node_id, part) for part in split(table, TABLE_ROWS)]

    def _write(self, node_id: bytes, table: ChunkTable) -> Spilled:
        manifest = Manifest.of([(node_id, table)])
        data, where = manifest.encode()
        upload = Upload.of(self._keys, "manifests", data)
        if not self._keys.has_written(upload.key):
            self.objects.create(upload.key, upload.data)
            self._keys.note_written(upload.key, upload.data)
            self.objects.remember(upload.ref, manifest)
        return Spilled.of(ManifestRef(upload.ref, manifest.directory(), **where), table)

    def merged(self, layers: Sequence[Rows]) -> Iterator[ChunkTable]:
        """Yield the merged rows of these layers of one node (oldest first), slab by slab."""
        around = Box.around(layer.box for layer in layers)
        most = max(self.budget // 2, 1)
        for slab in slabs(around, -(-sum(map(len, layers)) // most)):
            near = [layer for layer in layers if layer.box.overlaps(slab)]
            inner = tuple(self._inside(layer, slab) for layer in near)  # one after another
            table = merge_layers([Layer(None, inner)]).table
            if table is not None:
                yield table

    def _inside(self, layer: Rows, slab: Box) -> ChunkTable:
        table = rows_of(self.objects, layer)
        return select(table, in_box(table, slab))


def _apart(layers: Sequence[Rows]) -> tuple[list[list[Rows]], list[ChunkTable]]:
    """Split layers of one node (oldest first) into groups without common chunks, and the rest.

    Each group has at least one spilled layer and, in their order, the layers that share chunks
    with it. The rest is in memory.
    """
    rest = [layer if isinstance(layer, ChunkTable) else None for layer in layers]
    found: list[list[Rows]] = []
    spilled = [i for i, layer in enumerate(layers) if not resident(layer)]
    for members in together([layers[i].box for i in spilled]):
        group = [spilled[i] for i in members]
        boxes = [layers[i].box for i in group]
        overlapping: list[Rows] = []
        for i, layer in enumerate(layers):
            table = rest[i]
            if i in group:
                overlapping.append(layer)
            elif table is not None and any(box.overlaps(table.box) for box in boxes):
                inner = np.zeros(len(table), np.bool_)
                for box in boxes:
                    inner |= in_box(table, box)
                if inner.any():
                    overlapping.append(select(table, inner))
                    rest[i] = None if inner.all() else select(table, ~inner)
        found.append(overlapping)
    return found, [table for table in rest if table is not None]


def together(boxes: Sequence[Box]) -> list[list[int]]:
    """Positions of the boxes, grouped so that boxes of different groups do not overlap."""
    lo = np.array([box.lo for box in boxes], np.int64)
    hi = np.array([box.hi for box in boxes], np.int64)
    group = np.arange(len(boxes))
    for n in range(1, len(boxes)):
        near = ((lo[:n] < hi[n]) & (lo[n] < hi[:n])).all(axis=1)
        if near.any():
            group[: n + 1][np.isin(group[: n + 1], [*group[:n][near], n])] = n
    return [*grouped((number, i) for i, number in enumerate(group.tolist())).values()]


def slabs(box: Box, count: int) -> Iterator[Box]:
    """Cut the box into `count` slabs across its longest axis, or one per chunk if it is shorter."""
    if not box.ndim:
        yield box
        return
    axis, lo, hi = int(np.argmax(box.shape)), box.lo, box.hi
    count = min(count, box.shape[axis])
    for i in range(count):
        first, last = (lo[axis] + (hi[axis] - lo[axis]) * j // count for j in (i, i + 1))
        yield Box((*lo[:axis], first, *lo[axis + 1 :]), (*hi[:axis], last, *hi[axis + 1 :]))


# --- change set -----------------------------------------------------------------------------------

_PART_SENT: Final = 4
"""Of refs that are spilled, at most this part of what may be sent is sent: small boxes."""


def same_bytes(a: StoredRef | None, b: StoredRef | None) -> bool:
    """Whether two refs have the same chunk bytes, by length and checksum."""
    if a == b:
        return True
    if a is None or b is None or isinstance(a, Unset) or isinstance(b, Unset):
        return False
    one, other = _fingerprint(a), _fingerprint(b)
    return one == other and None not in one


def _fingerprint(ref: InlineRef | NativeRef | VirtualRef) -> tuple[int, int | None]:
    return ref.length, crc32c(ref.data) if isinstance(ref, InlineRef) else ref.crc32c


class ChangeSet(Struct, eq=False):
    """Changes to a snapshot.

    Attributes
    ----------
    nodes : dict of str to Node or None
        Nodes created or changed, by path; None for a deleted one.
    chunks : dict of bytes to dict of coords to ref
        By node id.
    truncated : dict of bytes to tuple of int
        Node id to grid shape: chunks of the snapshot at or beyond it are gone.
    tables : dict of bytes to tuple of ChunkTable or Spilled
        By node id: refs set in bulk, oldest first; those in `chunks` are newer.
    unsynced : list of str
        Keys of chunk objects written and not yet durable.
    zones : dict of bytes to tuple of ZoneTable or bytes
        By node id: entries of zone maps made while writing, oldest first; long tables are packed.
    reads : Reads
        What was read of the snapshot. Not a change, but a commit may depend on it.
    spill : Spill or None
        Writes refs to manifests and reads them back; without it all refs stay in memory.
    """

    nodes: dict[str, Node | None] = {}
    chunks: dict[bytes, dict[Coords, StoredRef]] = {}
    truncated: dict[bytes, Coords] = {}
    unsynced: list[str] = []
    tables: dict[bytes, tuple[Rows, ...]] = {}
    reads: Reads = field(default_factory=Reads)
    spill: Spill | None = None
    zones: dict[bytes, tuple[ZoneTable | bytes, ...]] = {}
    paths: PathIndex = field(default_factory=PathIndex)
    """The paths of `nodes` by directory, whatever is given."""
    _room: int = 0
    """How much fits into the memory budget at least; 0 if not known."""

    def __post_init__(self) -> None:
        self.paths, self._room = PathIndex(self.nodes), 0

    def __reduce__(self) -> tuple[Any, ...]:
        state = (self.nodes, self.chunks, self.truncated, self.unsynced, self.tables)
        return ChangeSet, (*state, self.reads, self.spill, self.zones)

    def __bool__(self) -> bool:
        return bool(self.nodes or self.truncated or self.tables or any(self.chunks.values()))

    def copy(self) -> ChangeSet:
        """A copy that shares nothing mutable."""
        chunks = {node: dict(refs) for node, refs in self.chunks.items()}
        return ChangeSet(
            dict(self.nodes),
            chunks,
            dict(self.truncated),
            list(self.unsynced),
            dict(self.tables),
            self.reads.copy(),
            self.spill,
            dict(self.zones),
        )

    def set_node(self, path: str, node: Node | None) -> None:
        """Record the node at the path as created or changed, or as deleted if it is None."""
        self.paths.add(path)
        self.nodes[path] = node

    def leave_node(self, path: str) -> None:
        """Record the node at the path as unchanged."""
        self.nodes.pop(path, None)
        self.paths.discard(path)

    def rows(self, rows: Rows) -> ChunkTable:
        """The rows, fetched if they are not in memory."""
        if isinstance(rows, ChunkTable):
            return rows
        assert self.spill is not None  # set by whoever takes over spilled rows
        return rows_of(self.spill.objects, rows)

    def get(self, node_id: bytes, coords: Coords) -> StoredRef | None:
        """The changed ref of a chunk; None if it is unchanged."""
        refs = self.chunks.get(node_id)
        ref = refs.get(coords) if refs is not None else None
        if ref is None and self.tables:
            for rows in reversed(self.tables.get(node_id, ())):
                ref = self.rows(rows).get(coords) if coords in rows.box else None
                if ref is not None:
                    break
        return ref

    def touched(self) -> list[bytes]:
        """Ids of the nodes with changed chunks."""
        return list(dict.fromkeys((*(n for n, refs in self.chunks.items() if refs), *self.tables)))

    def layers(self, node_id: bytes, box: Box | None = None) -> tuple[Rows, ...]:
        """All changes to a node's chunks, or those that may be in the box, oldest first."""
        tables, refs = self.tables.get(node_id, ()), self.chunks.get(node_id, {})
        if box is not None:
            tables = tuple(rows for rows in tables if rows.box.overlaps(box))
            if box.size < len(refs):
                inside = map(tuple, box.unravel(np.arange(box.size)).tolist())
                refs = {coords: refs[coords] for coords in inside if coords in refs}
            else:
                refs = {coords: ref for coords, ref in refs.items() if coords in box}
        return (*tables, ChunkTable.of(refs)) if refs else tables

    def table(self, node_id: bytes) -> ChunkTable | None:
        """All changed chunks of a node, in memory; None if there are none."""
        return self._together(self.layers(node_id))

    def _together(self, layers: Sequence[Rows]) -> ChunkTable | None:
        return merge_layers([Layer(None, tuple(map(self.rows, layers)))]).table

    def parts(self, node_id: bytes) -> tuple[Rows, ...]:
        """All changed chunks of a node, in disjoint tables of at most one leaf each."""
        groups, tables = _apart(self.layers(node_id))
        parts: list[Rows] = []
        for group in groups:
            if len(group) == 1:
                parts += group
            else:
                assert self.spill is not None
                for merged in self.spill.merged(group):
                    parts += self.spill.save(node_id, merged, self.unsynced)
        for alike in together([table.box for table in tables]):
            newest = self._together([tables[i] for i in alike])
            parts += [] if newest is None else map(owned, in_tables(newest))
        return tuple(parts)

    def all_parts(self) -> dict[bytes, tuple[Rows, ...]]:
        """All changed chunks, by node."""
        return {node_id: parts for node_id in self.touched() if (parts := self.parts(node_id))}

    def on(self, nodes: Mapping[str, Node], by_id: Mapping[bytes, Node]) -> Changes:
        """The changes, given the nodes before them by path and by node id."""
        tables = {n: tuple(map(self.rows, self.layers(n))) for n in self.touched()}
        return Changes.of(nodes, by_id, self.nodes, self.truncated, tables)

    def put_table(self, node_id: bytes, table: Rows) -> None:
        """Put a table of refs on top of the node's changes."""
        refs = self.chunks.get(node_id)
        self._stack(node_id, ([ChunkTable.of(refs)] if refs else []) + [table])
        self.chunks.pop(node_id, None)

    def put_beside(self, node_id: bytes, table: ChunkTable) -> None:
        """Put a table of refs on top of the node's changes; other single refs stay single."""
        self._stack(node_id, [table])
        refs = self.chunks.get(node_id)
        if refs:
            for coords in map(tuple, table.coords().tolist()):
                refs.pop(coords, None)

    def _stack(self, node_id: bytes, added: Sequence[Rows]) -> None:
        tables = list(self.tables.get(node_id, ()))
        for newer in added:
            # Each table is more than twice as long as the next, so that there are few tables and
            # each row is merged few times. No merge exceeds a leaf, to bound memory.
            while (
                tables
                and resident(newer)
                and resident(tables[-1])
                and len(tables[-1]) <= 2 * len(newer)
                and len(tables[-1]) + len(newer) <= TABLE_ROWS
            ):
                merged = self._together((tables.pop(), newer))
                assert merged is not None  # neither is empty
                newer = merged
            tables.append(newer)
        self.tables[node_id] = tuple(tables)
        self._keep_room(added)

    def _keep_room(self, added: Iterable[Rows]) -> None:
        """Spill tables if these, which were added, may exceed the memory budget."""
        self._room -= sum(map(held, added))
        if self._room < 0:  # at most, since tables that were dropped are not counted
            self.keep_within_budget()

    def keep_within_budget(self) -> None:
        """Spill tables to manifests while they exceed the memory budget, largest first."""
        spill = self.spill
        if spill is None:
            return
        self._room = room = spill.budget - sum(map(held, chain.from_iterable(self.tables.values())))
        if room >= 0:
            return
        due = [
            (held(rows), node_id, rows)
            for node_id, tables in self.tables.items()
            for rows in tables
            if isinstance(rows, ChunkTable)
        ]
        for size, node_id, table in sorted(due, key=lambda each: each[0], reverse=True):
            if room >= spill.budget // 2:  # frees enough that few spilled manifests are small
                break
            spilled = spill.save(node_id, table, self.unsynced)
            self.tables[node_id] = tuple(
                each
                for rows in self.tables[node_id]
                for each in (spilled if rows is table else (rows,))
            )
            room += size
        self._room = room

    def cut_tables(self, node_id: bytes, shape: Coords) -> None:
        """Drop the rows at or beyond `shape` from the node's tables."""
        left: list[Rows] = []
        for rows in self.tables.pop(node_id, ()):
            if isinstance(rows, Spilled) and lies_below(rows.box, shape):
                left.append(rows)
            elif all(map(lt, rows.box.lo, shape)):
                table = self.rows(rows)
                table = select(table, inside(table.coords(), shape))
                left += [table] if len(table) else []
        if left:
            self.tables[node_id] = tuple(left)
            self._keep_room(left)

    def add_zones(self, node_id: bytes, zones: ZoneTable) -> None:
        """Add entries of a node's zone map."""
        for page in in_pages(zones):
            tables = list(self.zones.get(node_id, ()))
            # As in `put_table`: few tables, each row merged few times.
            while (
                tables
                and isinstance(last := tables[-1], ZoneTable)
                and len(last) <= 2 * len(page)
                and sort_of(last) == sort_of(page)
            ):
                page = merged([last, page])
                tables.pop()
            # Packed they take a tenth of the memory.
            self.zones[node_id] = (*tables, page if len(page) < PAGE_ROWS else page.pack())

    def packed_zones(self) -> dict[bytes, tuple[bytes, ...]]:
        """The entries of zone maps, by node, all packed."""
        return {
            node_id: tuple(each if isinstance(each, bytes) else each.pack() for each in tables)
            for node_id, tables in self.zones.items()
        }

    def take_zones(self, zones: Mapping[bytes, Iterable[bytes]]) -> None:
        """Add entries made elsewhere; which of both describe a chunk now is settled later.

        They are packed, so that `add_zones` does not merge them: here neither is the newer one.
        """
        for node_id, tables in zones.items():
            self.zones[node_id] = (*tables, *self.zones.get(node_id, ()))

    def zones_of(self, node_id: bytes) -> Iterator[ZoneTable]:
        """The entries of a node's zone map, oldest first, in several tables."""
        for zones in self.zones.get(node_id, ()):
            yield ZoneTable.parse(zones) if isinstance(zones, bytes) else zones

    def forget(self, node_id: bytes) -> None:
        """Drop all changes to a node's chunks."""
        self.zones.pop(node_id, None)
        self.chunks.pop(node_id, None)
        self.tables.pop(node_id, None)
        self.truncated.pop(node_id, None)

    def refs(self) -> Iterator[tuple[bytes, Coords, StoredRef]]:
        """Every changed chunk: node id, coordinate, ref."""
        for node_id, refs in self.chunks.items():
            for coords, ref in refs.items():
                yield node_id, coords, ref

    def since(self, before: ChangeSet) -> ChangeSet:
        """The changes of this set since `before`, an earlier state of it; all chunks in tables."""
        nodes = {
            path: self.nodes.get(path)
            for path in self.nodes.keys() | before.nodes.keys()
            if self.nodes.get(path) != before.nodes.get(path)
            or (path in self.nodes) != (path in before.nodes)
        }
        touched = dict.fromkeys((*self.touched(), *before.touched()))
        beyond = {node_id: self.beyond(node_id, before) for node_id in touched}
        tables = {node_id: rows for node_id, rows in beyond.items() if rows}
        truncated = {
            node: shape
            for node, shape in self.truncated.items()
            if before.truncated.get(node) != shape
        }
        known = set(before.unsynced)
        unsynced = [key for key in self.unsynced if key not in known]
        rest = self.reads, self.spill, dict(self.zones)
        return ChangeSet(nodes, {}, truncated, unsynced, tables, *rest)

    def beyond(self, node_id: bytes, before: ChangeSet) -> tuple[Rows, ...]:
        """The tables to put on top of a node's chunks in `before` to get those of this set."""
        if self.tables.get(node_id) == before.tables.get(node_id) and (
            self.chunks.get(node_id, {}) == before.chunks.get(node_id, {})
        ):
            return ()
        added = self._added(node_id, before)
        if added is None:
            changed = difference(self.table(node_id), before.table(node_id))
            return () if changed is None else (changed,)
        if not all(map(resident, added)):
            return added  # nothing is fetched
        changed = self._together(added)
        if changed is None:
            return ()
        near = [rows for rows in before.layers(node_id) if rows.box.overlaps(changed.box)]
        if near and all(map(resident, near)):
            changed = difference(changed, before.at(node_id, changed.coords()))
        return () if changed is None else (changed,)

    def _added(self, node_id: bytes, before: ChangeSet) -> tuple[Rows, ...] | None:
        """The tables that were put on top of those in `before`; None if it is not only that."""
        tables, known = self.tables.get(node_id, ()), before.tables.get(node_id, ())
        if tables[: len(known)] != known or before.chunks.get(node_id):
            return None
        return self.layers(node_id)[len(known) :]

    def lighten(self, before: ChangeSet, most: int) -> None:
        """Make what was changed since `before` small to pickle.

        Refs become tables, and most refs of a table with more than `most` are spilled. They are cut
        into boxes that hardly overlap those of other copies, so that a merge need not read them.
        """
        for node_id in self.touched():
            added, known = self._added(node_id, before), before.tables.get(node_id, ())
            if added is None:
                if refs := self.chunks.pop(node_id, None):
                    self.put_table(node_id, ChunkTable.of(refs))
            elif added:
                light: list[Rows] = []
                for here, run in groupby(added, resident):
                    rows = list(run)
                    light += self._light(node_id, rows, most) if here else rows
                self.tables[node_id] = (*known, *light)
                self.chunks.pop(node_id, None)
        self.zones = dict(self.packed_zones())

    def _light(self, node_id: bytes, tables: Sequence[Rows], most: int) -> list[Rows]:
        """The refs of these tables in one table of at most `most` refs, and the others spilled."""
        table, spill = self._together(tables), self.spill
        if table is None or held(table) <= most or spill is None:
            return [] if table is None else [table]
        parts = sorted(in_c_order(table), key=held)
        spilled: list[Rows] = []
        room = held(table)
        while parts and room > most // _PART_SENT:
            room -= held(parts[-1])
            spilled += spill.save(node_id, parts.pop(), self.unsynced)
        left = self._together(parts)
        return spilled if left is None else [*spilled, left]

    def at(self, node_id: bytes, coords: IndexArray) -> ChunkTable | None:
        """Those of these chunks that are changed, in memory; None if there are none."""
        box = Box.around_coords(coords)
        near = [rows for rows in self.layers(node_id) if rows.box.overlaps(box)]
        found = [pick(self.rows(rows), coords) for rows in near]
        return self._together([table for table in found if len(table)])


def lies_below(box: Box, shape: Coords) -> bool:
    """Whether the whole box is below the shape."""
    return all(map(le, box.hi, shape))


class ForkState(Struct, frozen=True):
    """A copy of a workspace, as it is pickled.

    Parameters
    ----------
    repository_id : str
        Id of the repository.
    storage : Storage
        The repository's storage.
    config : Config
        Configuration of the session.
    head, base : BlobRef
        The snapshot, and its base.
    start : int
        The root version the session began at.
    lineage : bytes or None
        Shared by all copies of the session; None for a read-only copy.
    copy_id : str
        The session id under which the copy wrote its objects; empty if nobody has opened it yet.
    before, after : ChangeSet
        The changes the copy started from, and those it has now.
    explicit : bool
        Whether the copy was made by `session.fork()`, not by pickling a session's store.
    containers : Containers
        The containers that virtual chunks may be read from; they hold no secrets.
    cache : CacheOptions
        Limits of the copy's metadata cache.
    token : str or None
        The session's open token, if its copies report what they change (`merge_forks`).
    depth : int
        How many copies lie between the session and this one: 0 for a copy of the session itself.
    """

    repository_id: str
    storage: Storage
    config: Config
    head: BlobRef
    base: BlobRef | None
    start: int = 0
    lineage: bytes | None = None
    copy_id: str = ""
    before: ChangeSet = field(default_factory=ChangeSet)
    after: ChangeSet = field(default_factory=ChangeSet)
    explicit: bool = False
    containers: Containers = field(default_factory=Containers)
    cache: CacheOptions = field(default_factory=CacheOptions)
    token: str | None = None
    depth: int = 0
