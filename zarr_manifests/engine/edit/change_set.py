"""What a writer has changed and not yet committed.

A `ChangeSet` is plain data: nodes by path (None = deleted), chunk refs by node and coordinate,
tables of refs under these, truncations. `node_edits` decides *what* to record, and `merge_forks`
merges forks; this module compares change sets, and packs them into a fork (`ForkState`).

If there are very many refs, most are spilled from memory to manifests (`spill`).

Invariant: a node created and deleted within the change set leaves no trace in it; refs are recorded
only for nodes that exist.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from operator import le, lt
from typing import Any, Final

from msgspec import Struct, field

from zarr_manifests.config import CacheOptions, Config
from zarr_manifests.engine.objects.spill import (
    Rows,
    Spill,
    Spilled,
    held,
    resident,
    rows_of,
    together,
)
from zarr_manifests.engine.snapshot.base_pages import PathIndex
from zarr_manifests.format.chunk_table import (
    UNSET,
    ChunkTable,
    InlineRef,
    NativeRef,
    StoredRef,
    Unset,
    VirtualRef,
    chunk_key,
    native_keys,
)
from zarr_manifests.format.nodes import Node
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.zone_maps import PAGE_ROWS, ZoneTable
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.ids import crc32c
from zarr_manifests.planning.conflict.components import Reads
from zarr_manifests.planning.layout.leaves import TABLE_ROWS
from zarr_manifests.planning.tables.merge import (
    Layer,
    difference,
    in_c_order,
    in_tables,
    inside,
    merge_layers,
    owned,
    pick,
    select,
)
from zarr_manifests.planning.zones.meaning import like, merged
from zarr_manifests.storage import Storage
from zarr_manifests.virtual.containers import Containers

_MOST_SINGLE: Final = 16
"""Up to about so many refs of a node take fewer bytes one by one than as a table."""
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
    durable : dict of str to int
        How many chunk objects each copy has written and made durable, by its session id.
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
    durable: dict[str, int] = {}
    paths: PathIndex = field(default_factory=PathIndex)
    """The paths of `nodes` by directory, whatever is given."""
    _room: int = 0
    """How much fits into the memory budget at least; 0 if not known."""

    def __post_init__(self) -> None:
        self.paths, self._room = PathIndex(self.nodes), 0

    def __reduce__(self) -> tuple[Any, ...]:
        state = (self.nodes, self.chunks, self.truncated, self.unsynced, self.tables)
        return ChangeSet, (*state, self.reads, self.spill, self.zones, self.durable)

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
            dict(self.durable),
        )

    @property
    def chunk_objects_written(self) -> int:
        """Number of chunk objects that were written for these changes."""
        return len(self.unsynced) + sum(self.durable.values())

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

    def layers(self, node_id: bytes) -> tuple[Rows, ...]:
        """All changes to a node's chunks, oldest first."""
        tables, refs = self.tables.get(node_id, ()), self.chunks.get(node_id)
        return (*tables, ChunkTable.of(refs)) if refs else tables

    def table(self, node_id: bytes) -> ChunkTable | None:
        """All changed chunks of a node, in memory; None if there are none."""
        return self._together(self.layers(node_id))

    def _together(self, layers: Sequence[Rows]) -> ChunkTable | None:
        return merge_layers([Layer(None, tuple(map(self.rows, layers)))]).table

    def parts(self, node_id: bytes) -> tuple[Rows, ...]:
        """All changed chunks of a node, in disjoint tables of at most one leaf each."""
        groups, tables = self._apart(node_id)
        parts: list[Rows] = []
        for group in groups:
            if len(group) == 1:
                parts += group
            else:
                assert self.spill is not None
                for merged in self.spill.merged(group):
                    parts += self.spill.save(node_id, merged, self.unsynced)
        return (*parts, *_disjoint(tables))

    def _apart(self, node_id: bytes) -> tuple[list[list[Rows]], list[ChunkTable]]:
        """Groups of spilled layers with what overlaps them, and the tables that overlap none."""
        layers = self.layers(node_id)
        tables = [layer for layer in layers if isinstance(layer, ChunkTable)]
        if len(tables) == len(layers):
            return [], tables
        assert self.spill is not None
        return self.spill.apart(layers)

    def count(self, node_id: bytes) -> int:
        """Number of changed chunks of a node."""
        if node_id not in self.tables:
            return len(self.chunks.get(node_id, ()))
        groups, tables = self._apart(node_id)
        table = self._together(tables)
        count = 0 if table is None else len(table)
        for group in groups:
            if len(group) > 1 and self.spill is not None:
                count += sum(map(len, self.spill.merged(group)))
            else:
                count += len(group[0])
        return count

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
        tables = list(self.zones.get(node_id, ()))
        # As in `put_table`: few tables, each row merged few times.
        while (
            tables
            and isinstance(last := tables[-1], ZoneTable)
            and len(last) <= 2 * len(zones)
            and like(last, zones)
        ):
            zones = merged([last, zones])
            tables.pop()
        # Packed they take a tenth of the memory.
        self.zones[node_id] = (*tables, zones if len(zones) < PAGE_ROWS else zones.pack())

    def take_zones(self, zones: Mapping[bytes, tuple[ZoneTable | bytes, ...]]) -> None:
        """Add entries made elsewhere; which of both describe a chunk now is settled later.

        They are packed, so that `add_zones` does not merge them: here neither is the newer one.
        """
        for node_id, tables in zones.items():
            packed = [zones if isinstance(zones, bytes) else zones.pack() for zones in tables]
            self.zones[node_id] = (*packed, *self.zones.get(node_id, ()))

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

    def chunk_objects(self, sessions: Collection[str]) -> set[str]:
        """Keys of the chunk objects of these sessions that changed refs point to.

        Without those of spilled refs, which are durable already.
        """
        refs = (ref for _, _, ref in self.refs() if isinstance(ref, NativeRef))
        objects = {(ref.source, ref.number) for ref in refs}
        found = {chunk_key(*each) for each in objects if each[0] in sessions}
        for table in filter(resident, chain.from_iterable(self.tables.values())):
            found |= native_keys(table, sessions)
        return found

    def since(self, before: ChangeSet) -> ChangeSet:
        """The changes of this set since `before`, an earlier state of it."""
        nodes = {
            path: self.nodes.get(path)
            for path in self.nodes.keys() | before.nodes.keys()
            if self.nodes.get(path) != before.nodes.get(path)
            or (path in self.nodes) != (path in before.nodes)
        }
        # Where tables have changed, all of the node's refs are compared as tables.
        bulk = {
            node_id
            for node_id in self.tables.keys() | before.tables.keys()
            if self.tables.get(node_id) != before.tables.get(node_id)
        }
        beyond = {node_id: self.beyond(node_id, before) for node_id in bulk}
        tables = {node_id: rows for node_id, rows in beyond.items() if rows}
        chunks: dict[bytes, dict[Coords, StoredRef]] = {}
        for node_id, coords, ref in self.refs():
            if node_id not in bulk and before.chunks.get(node_id, {}).get(coords) != ref:
                chunks.setdefault(node_id, {})[coords] = ref
        for node_id, coords, _ in before.refs():
            if node_id not in bulk and coords not in self.chunks.get(node_id, {}):
                chunks.setdefault(node_id, {})[coords] = UNSET
        truncated = {
            node: shape
            for node, shape in self.truncated.items()
            if before.truncated.get(node) != shape
        }
        known = set(before.unsynced)
        unsynced = [key for key in self.unsynced if key not in known]
        rest = self.reads, self.spill, dict(self.zones), dict(self.durable)
        return ChangeSet(nodes, chunks, truncated, unsynced, tables, *rest)

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
            few = len(self.chunks.get(node_id, ())) <= _MOST_SINGLE
            if added is None:
                refs = {} if few else self.chunks.pop(node_id)
                if refs:
                    self.put_table(node_id, ChunkTable.of(refs))
            elif added and not (few and len(self.tables.get(node_id, ())) == len(known)):
                light: list[Rows] = []
                for here, run in groupby(added, resident):
                    rows = list(run)
                    light += self._light(node_id, rows, most) if here else rows
                self.tables[node_id] = (*known, *light)
                self.chunks.pop(node_id, None)
        self.zones = {
            node_id: tuple(each if isinstance(each, bytes) else each.pack() for each in tables)
            for node_id, tables in self.zones.items()
        }

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


def _disjoint(tables: Sequence[ChunkTable]) -> list[ChunkTable]:
    """The latest row of each chunk in these tables (oldest first), as disjoint tables."""
    parts: list[ChunkTable] = []
    for group in together([table.box for table in tables]):
        merged = merge_layers([Layer(None, tuple(tables[i] for i in group))]).table
        parts += [] if merged is None else map(owned, in_tables(merged))
    return parts


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
        The session id under which the copy wrote its objects.
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
