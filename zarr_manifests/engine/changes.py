"""What a writer has changed and not yet committed.

A `ChangeSet` is a plain value store: nodes by path (None = deleted), chunk refs by node and
coordinate, whole tables of refs under these, truncations. The rules about *what* to record live
in `workspace`; here is only how change sets are compared, how they travel in a fork (`ForkState`),
and how they are brought together when forks are merged.

Of very many refs most are not in memory (`spill`).

Invariant: a node that was made and deleted within the change set leaves no trace in it; refs are
only recorded for nodes that exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import le, lt
from typing import Final

import numpy as np

from zarr_manifests.config import CacheOptions, RepositoryConfig
from zarr_manifests.engine.spill import Rows, Spill, Spilled, held, resident
from zarr_manifests.errors import Conflict
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.chunk_table import (
    UNSET,
    ChunkTable,
    InlineRef,
    NativeRef,
    RefKind,
    StoredRef,
    Unset,
    VirtualRef,
    chunk_key,
    native_keys,
)
from zarr_manifests.format.nodes import Node
from zarr_manifests.grid import Box, Coords
from zarr_manifests.ids import crc32c
from zarr_manifests.planning.merge import (
    Layer,
    difference,
    inside,
    merge_layers,
    narrower,
    select,
    shared_rows,
    split,
)
from zarr_manifests.planning.packing import LEAF_ROWS
from zarr_manifests.planning.reads import Reads
from zarr_manifests.storage import Storage
from zarr_manifests.virtual.containers import Containers

__all__ = ["ChangeSet", "ForkState", "Merge", "Owners", "same_bytes"]

_ABSENT: Final = object()


def same_bytes(a: StoredRef | None, b: StoredRef | None) -> bool:
    """Whether two refs stand for the same chunk bytes (by length and checksum)."""
    if a == b:
        return True
    if a is None or b is None or isinstance(a, Unset) or isinstance(b, Unset):
        return False
    one, other = _fingerprint(a), _fingerprint(b)
    return one == other and None not in one


def _fingerprint(ref: InlineRef | NativeRef | VirtualRef) -> tuple[int, int | None]:
    return ref.length, crc32c(ref.data) if isinstance(ref, InlineRef) else ref.crc32c


@dataclass(slots=True)
class ChangeSet:
    """Changes relative to a snapshot.

    Attributes
    ----------
    nodes : dict of str to Node or None
        Nodes created or changed, by path; None for a deleted one.
    chunks : dict of bytes to dict of coords to ref
        By node id.
    truncated : dict of bytes to tuple of int
        Node id to grid shape: chunks of the snapshot at or beyond it are gone.
    tables : dict of bytes to tuple of ChunkTable or Spilled
        By node id: refs set in bulk, oldest first; what is in `chunks` is newer.
    unsynced : list of str
        Keys of chunk objects written and not yet durable.
    reads : Reads
        What was read of the snapshot meanwhile; no change, but a commit may depend on it.
    spill : Spill or None
        Where refs go and come from that are not in memory; without it all of them are.
    """

    nodes: dict[str, Node | None] = field(default_factory=dict)
    chunks: dict[bytes, dict[Coords, StoredRef]] = field(default_factory=dict)
    truncated: dict[bytes, Coords] = field(default_factory=dict)
    unsynced: list[str] = field(default_factory=list)
    tables: dict[bytes, tuple[Rows, ...]] = field(default_factory=dict)
    reads: Reads = field(default_factory=Reads, compare=False)
    spill: Spill | None = field(default=None, compare=False, repr=False)

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
        )

    def rows(self, rows: Rows) -> ChunkTable:
        """The rows, fetched if they are not in memory."""
        if isinstance(rows, ChunkTable):
            return rows
        assert self.spill is not None  # whoever has taken it over has given it one
        return self.spill.rows(rows)

    def get(self, node_id: bytes, coords: Coords) -> StoredRef | None:
        """The changed ref of a chunk; None if it is not changed."""
        refs = self.chunks.get(node_id)
        ref = refs.get(coords) if refs is not None else None
        if ref is None and self.tables:
            for rows in reversed(self.tables.get(node_id, ())):
                ref = self.rows(rows).get(coords) if coords in rows.box else None
                if ref is not None:
                    break
        return ref

    def touched(self) -> list[bytes]:
        """Ids of the nodes that chunks are changed of."""
        return list(dict.fromkeys((*(n for n, refs in self.chunks.items() if refs), *self.tables)))

    def layers(self, node_id: bytes) -> tuple[Rows, ...]:
        """All that is changed of a node's chunks, oldest first."""
        tables, refs = self.tables.get(node_id, ()), self.chunks.get(node_id)
        return (*tables, ChunkTable.of(refs)) if refs else tables

    def table(self, node_id: bytes) -> ChunkTable | None:
        """All changed chunks of a node, in memory; None if there is none."""
        return self._together(self.layers(node_id))

    def _together(self, layers: Sequence[Rows]) -> ChunkTable | None:
        return merge_layers([Layer(None, tuple(map(self.rows, layers)))]).table

    def parts(self, node_id: bytes) -> tuple[Rows, ...]:
        """All changed chunks of a node, in tables that share no chunk, of a leaf at most each."""
        groups, tables = self._apart(node_id)
        parts: list[Rows] = []
        for together in groups:
            if len(together) == 1:
                parts += together
            else:
                assert self.spill is not None
                for merged in self.spill.merged(together):
                    parts += self.spill.save(node_id, merged, self.unsynced)
        return (*parts, *_disjoint(tables))

    def _apart(self, node_id: bytes) -> tuple[list[list[Rows]], list[ChunkTable]]:
        """Spilled layers, with what lies over or under each; and what does not."""
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
        for together in groups:
            if len(together) > 1 and self.spill is not None:
                count += sum(map(len, self.spill.merged(together)))
            else:
                count += len(together[0])
        return count

    def put_table(self, node_id: bytes, table: Rows) -> None:
        """Lay a table of refs over all that is changed of the node."""
        tables = list(self.tables.get(node_id, ()))
        refs = self.chunks.pop(node_id, None)
        for newer in ([ChunkTable.of(refs)] if refs else []) + [table]:
            # Each is more than twice as long as the next, so that there are few, and a row is
            # merged few times; but none is merged into more than a leaf, which takes memory.
            while (
                tables
                and resident(newer)
                and resident(tables[-1])
                and len(tables[-1]) <= 2 * len(newer)
                and len(tables[-1]) + len(newer) <= LEAF_ROWS
            ):
                merged = self._together((tables.pop(), newer))
                assert merged is not None  # neither is empty
                newer = merged
            tables.append(newer)
        self.tables[node_id] = tuple(tables)
        self.keep_within_budget()

    def keep_within_budget(self) -> None:
        """Write what is too much for the memory to manifests, the largest tables first."""
        spill = self.spill
        if spill is None or not spill.writable:
            return
        room = spill.budget - sum(held(rows) for rows in self._all_rows())
        if room >= 0:
            return
        due = [
            (held(rows), node_id, rows)
            for node_id, tables in self.tables.items()
            for rows in tables
            if isinstance(rows, ChunkTable)
        ]
        for size, node_id, table in sorted(due, key=lambda each: each[0], reverse=True):
            if room >= spill.budget // 2:  # room for so much that few manifests are small
                break
            spilled = spill.save(node_id, table, self.unsynced)
            self.tables[node_id] = tuple(
                each
                for rows in self.tables[node_id]
                for each in (spilled if rows is table else (rows,))
            )
            room += size

    def _all_rows(self) -> Iterator[Rows]:
        for tables in self.tables.values():
            yield from tables

    def cut_tables(self, node_id: bytes, shape: Coords) -> None:
        """Drop the rows at or beyond `shape` from the node's tables."""
        left: list[Rows] = []
        for rows in self.tables.pop(node_id, ()):
            if isinstance(rows, Spilled) and _lies_below(rows.box, shape):
                left.append(rows)
            elif all(map(lt, rows.box.lo, shape)):
                table = self.rows(rows)
                table = select(table, inside(table.coords(), shape))
                left += [table] if len(table) else []
        if left:
            self.tables[node_id] = tuple(left)
            self.keep_within_budget()

    def forget(self, node_id: bytes) -> None:
        """Drop all that is changed of a node's chunks."""
        self.chunks.pop(node_id, None)
        self.tables.pop(node_id, None)
        self.truncated.pop(node_id, None)

    def refs(self) -> Iterator[tuple[bytes, Coords, StoredRef]]:
        """Every changed chunk: node id, coordinate, ref."""
        for node_id, refs in self.chunks.items():
            for coords, ref in refs.items():
                yield node_id, coords, ref

    def chunk_objects(self) -> set[str]:
        """Keys of all chunk objects that changed refs lie in; not those of what is spilled.

        These are durable.
        """
        objects = {ref[:2] for _, _, ref in self.refs() if isinstance(ref, NativeRef)}
        found = {chunk_key(*each) for each in objects}
        found.update(*map(native_keys, filter(resident, self._all_rows())))
        return found

    def since(self, before: ChangeSet) -> ChangeSet:
        """What this change set has beyond `before`, from which it grew."""
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
        return ChangeSet(nodes, chunks, truncated, unsynced, tables, self.reads, self.spill)

    def beyond(self, node_id: bytes, before: ChangeSet) -> tuple[Rows, ...]:
        """What to lay over all that `before` has of a node's chunks to get what this one has."""
        tables, known = self.tables.get(node_id, ()), before.tables.get(node_id, ())
        if (
            not all(map(resident, tables))
            and tables[: len(known)] == known
            and not before.chunks.get(node_id)
        ):
            return self.layers(node_id)[len(known) :]  # it has grown: nothing has to be fetched
        changed = difference(self.table(node_id), before.table(node_id))
        return () if changed is None else (changed,)


def _lies_below(box: Box, shape: Coords) -> bool:
    return all(map(le, box.hi, shape))


def _disjoint(tables: Sequence[ChunkTable]) -> list[ChunkTable]:
    """The rows that count of these tables, oldest first, in tables that share no chunk."""
    groups: list[list[int]] = []  # of tables that may share chunks, by position: oldest first
    for i, table in enumerate(tables):
        near = [g for g in groups if any(table.box.overlaps(tables[j].box) for j in g)]
        groups = [g for g in groups if g not in near]
        groups.append(sorted([i, *(j for g in near for j in g)]))
    parts: list[ChunkTable] = []
    for group in groups:
        merged = merge_layers([Layer(None, tuple(tables[i] for i in group))]).table
        parts += [] if merged is None else split(merged, LEAF_ROWS)
    return parts


@dataclass(frozen=True, slots=True)
class ForkState:
    """A copy of a workspace, as it travels.

    Parameters
    ----------
    repository_id : str
        Of the repository it belongs to.
    storage : Storage
        Where that lies.
    config : RepositoryConfig
        Of the session it was made from.
    head, base : BlobRef
        The snapshot, and the base it reads.
    start : int
        The root version the session began at.
    lineage : bytes or None
        What the session's copies have in common; None for a read-only copy.
    copy_id : str
        The session id under which the copy's own changes were written.
    before, after : ChangeSet
        The changes it started from, and those it has now.
    explicit : bool
        Whether it was asked for (`session.fork()`) and not made by pickling a session's store.
    containers : Containers
        The places elsewhere that virtual chunks may be read from; they hold no secrets.
    cache : CacheOptions
        What a copy may keep of the metadata it reads.
    """

    repository_id: str
    storage: Storage
    config: RepositoryConfig
    head: BlobRef
    base: BlobRef | None
    start: int
    lineage: bytes | None
    copy_id: str
    before: ChangeSet
    after: ChangeSet
    explicit: bool
    containers: Containers = field(default_factory=Containers)
    cache: CacheOptions = field(default_factory=CacheOptions)


@dataclass(slots=True)
class Owners:
    """What has been merged: the copy that each chunk and node came from, and what it was then.

    `tables` are older than `chunks`, which say the same of single chunks, and in the order of
    their merging. `objects` are the keys of the chunk objects that copies have brought, and
    `copies` those that were merged.
    """

    chunks: dict[tuple[bytes, Coords], tuple[str, StoredRef]] = field(default_factory=dict)
    nodes: dict[str, tuple[str, Node | None]] = field(default_factory=dict)
    tables: dict[bytes, tuple[tuple[str, Rows], ...]] = field(default_factory=dict)
    objects: set[str] = field(default_factory=set)
    copies: set[str] = field(default_factory=set)

    def of(
        self, node_id: bytes, coords: Coords, fetch: Callable[[Rows], ChunkTable]
    ) -> tuple[str, StoredRef] | None:
        """The copy that a chunk came from, and what it was then; `fetch` gives rows."""
        found = self.chunks.get((node_id, coords))
        if found is None:
            for copy_id, rows in reversed(self.tables.get(node_id, ())):
                ref = fetch(rows).get(coords) if coords in rows.box else None
                if ref is not None:
                    return copy_id, ref
        return found

    def copy(self) -> Owners:
        """A copy that shares nothing mutable."""
        mappings = dict(self.chunks), dict(self.nodes), dict(self.tables)
        return Owners(*mappings, set(self.objects), set(self.copies))

    def take(self, other: Owners) -> None:
        """Become equal to `other`."""
        self.chunks, self.nodes, self.tables = other.chunks, other.nodes, other.tables
        self.objects, self.copies = other.objects, other.copies


class Merge:
    """Brings forks' changes into a session's, and remembers which copy wrote what.

    A fork's change applies where the session is as it was when the fork was made, or where the
    very same copy has changed it before, or where both did the same; anything else is a conflict.

    Parameters
    ----------
    mine : ChangeSet
        The session's changes; modified in place.
    stored : mapping of str to Node
        The nodes of the snapshot that session and forks began with.
    owners : Owners
        What has been merged before.
    """

    def __init__(
        self,
        mine: ChangeSet,
        stored: Mapping[str, Node],
        owners: Owners,
    ) -> None:
        self.mine = mine
        self.owners = owners.copy()
        self._stored = stored

    def apply(self, before: ChangeSet, after: ChangeSet, copy_id: str) -> list[Conflict]:
        """Apply what the copy `copy_id` changed between `before` and `after`, or nothing.

        Returns the conflicts; where there are any, nothing was applied.
        """
        theirs = after.since(before)
        if copy_id in self.owners.copies:
            self._leave_out_merged(theirs, copy_id)
        self._single_out(before, theirs, copy_id)
        for node_id, refs in [*theirs.chunks.items()]:  # what was merged before counts once
            new = {c: ref for c, ref in refs.items() if self._owner(node_id, c) != (copy_id, ref)}
            theirs.chunks[node_id] = new
            if not new:
                del theirs.chunks[node_id]
        for path, node in [*theirs.nodes.items()]:
            known = self.owners.nodes.get(path) == (copy_id, node)
            if known and not (node and node.node_id in (*theirs.chunks, *theirs.tables)):
                del theirs.nodes[path]
        alive = {node.node_id for node in after.nodes.values() if node is not None}
        replaced = {
            old.node_id: path
            for path, new in theirs.nodes.items()
            if (old := self._node(before, path)) is not None
            and (new is None or new.node_id != old.node_id)
            and old.node_id not in alive  # or it was only moved
        }
        for node_id in replaced:
            theirs.chunks.pop(node_id, None)
            theirs.tables.pop(node_id, None)
        conflicts = [
            Conflict(f"/{path}", "metadata", "changed in the session and in a fork, differently")
            for path, node in theirs.nodes.items()
            if self.mine.nodes.get(path, _ABSENT) not in (before.nodes.get(path, _ABSENT), node)
            and self.owners.nodes.get(path) != (copy_id, self.mine.nodes.get(path))
        ]
        conflicts += [
            Conflict(f"/{path}", "chunks", "written in the session and deleted in a fork")
            for node_id, path in replaced.items()
            if self._moved(before, node_id)
        ]
        conflicts += self._chunk_conflicts(before, theirs, copy_id)
        conflicts += self._cut_conflicts(before, theirs)
        if not conflicts:
            self._take(theirs, after, replaced, copy_id)
        return conflicts

    def _owner(self, node_id: bytes, coords: Coords) -> tuple[str, StoredRef] | None:
        return self.owners.of(node_id, coords, self.mine.rows)

    def _moved(self, before: ChangeSet, node_id: bytes) -> tuple[Rows, ...]:
        """Chunks of a node that the session has changed otherwise than the fork began with."""
        ours, was = self.mine, before
        if ours.tables.get(node_id) == was.tables.get(node_id) and (
            ours.chunks.get(node_id, {}) == was.chunks.get(node_id, {})
        ):
            return ()
        return ours.beyond(node_id, was)

    def _leave_out_merged(self, theirs: ChangeSet, copy_id: str) -> None:
        """Of a copy's tables leave out what it has brought before, which counts once."""
        owned, single = self.owners.tables, self.owners.chunks
        for node_id, parts in list(theirs.tables.items()):
            brought = [rows for owner, rows in owned.get(node_id, ()) if owner == copy_id]
            refs = {
                coords: ref
                for (node, coords), (owner, ref) in single.items()
                if node == node_id and owner == copy_id
            }
            layers = [*brought, ChunkTable.of(refs)] if refs else brought
            left: list[Rows] = []
            for rows in parts:
                near = [layer for layer in layers if layer.box.overlaps(rows.box)]
                if not resident(rows) and rows in near:
                    continue  # as it was
                new = self._beyond(theirs.rows(rows), near) if near else rows
                left += [] if new is None else [new]
            theirs.tables[node_id] = tuple(left)
            if not left:
                del theirs.tables[node_id]

    def _beyond(self, table: ChunkTable, layers: Sequence[Rows]) -> ChunkTable | None:
        """The rows of the table that are not as these layers have them, the last of which wins."""
        known = merge_layers([Layer(None, tuple(map(self.mine.rows, layers)))]).table
        if known is None:
            return table
        return difference(table, select(known, shared_rows(known, table)))

    def _single_out(self, before: ChangeSet, theirs: ChangeSet, copy_id: str) -> None:
        """Of refs that a fork has set in bulk, look one by one at those the session has, too."""
        for node_id, parts in list(theirs.tables.items()):
            moved = self._moved(before, node_id)
            if not moved:
                continue
            merged = self.owners.tables.get(node_id, ())
            left: list[Rows] = []
            for rows in parts:
                near = [each for each in moved if each.box.overlaps(rows.box)]
                if not near:
                    left.append(rows)
                elif resident(rows) or (copy_id, rows) not in merged:
                    left += self._uncontested(theirs, node_id, rows, near)
            if left:
                theirs.tables[node_id] = tuple(left)
            else:
                del theirs.tables[node_id]

    def _uncontested(
        self, theirs: ChangeSet, node_id: bytes, rows: Rows, near: Sequence[Rows]
    ) -> list[Rows]:
        """The rows but those that the session has, too, which become single refs."""
        table = theirs.rows(rows)
        both = np.zeros(len(table), np.bool_)
        for each in near:
            both |= shared_rows(table, self.mine.rows(each))
        if not both.any():
            return [rows]
        theirs.chunks.setdefault(node_id, {}).update(select(table, both).refs())
        return [] if both.all() else [select(table, ~both)]

    def _node(self, changes: ChangeSet, path: str) -> Node | None:
        return changes.nodes[path] if path in changes.nodes else self._stored.get(path)

    def _take(
        self, theirs: ChangeSet, after: ChangeSet, replaced: Iterable[bytes], copy_id: str
    ) -> None:
        # First of all: rows that are written to a manifest name objects that must be durable.
        known = self.owners.objects
        self.mine.unsynced += [key for key in theirs.unsynced if key not in known]
        known.update(theirs.unsynced)
        self.owners.copies.add(copy_id)
        for node_id in replaced:
            self.mine.forget(node_id)
        for path, node in theirs.nodes.items():
            self.owners.nodes[path] = copy_id, node
            if node is None and path not in after.nodes:
                self.mine.nodes.pop(path, None)
            else:
                self.mine.nodes[path] = node
        for node_id, tables in theirs.tables.items():
            for table in tables:
                self.mine.put_table(node_id, table)
                owned = self.owners.tables.get(node_id, ())
                self.owners.tables[node_id] = (*owned, (copy_id, table))
        for node_id, coords, ref in theirs.refs():
            self.mine.chunks.setdefault(node_id, {})[coords] = ref
            self.owners.chunks[node_id, coords] = copy_id, ref
        for node_id, shape in theirs.truncated.items():
            cut = narrower(self.mine.truncated.get(node_id), shape)
            self.mine.truncated[node_id] = cut or shape
        self.mine.reads.add(theirs.reads)

    def _chunk_conflicts(
        self, before: ChangeSet, theirs: ChangeSet, copy_id: str
    ) -> list[Conflict]:
        nodes = {**self._stored, **self.mine.nodes, **theirs.nodes}
        paths = {node.node_id: path for path, node in nodes.items() if node is not None}
        reason = "written in a fork, to an array that the session has deleted"
        conflicts: list[Conflict] = []
        for node_id, parts in theirs.tables.items():
            if node_id not in paths:
                lost = [tuple(c) for c in theirs.rows(parts[0]).coords()[:20].tolist()]
                conflicts.append(Conflict("/?", "chunks", reason, tuple(lost)))
        for node_id, refs in theirs.chunks.items():
            if node_id not in paths:
                conflicts.append(Conflict("/?", "chunks", reason, tuple(sorted(refs)[:20])))
                continue
            twice = []
            for coords, ref in refs.items():
                ours, was = self.mine.get(node_id, coords), before.get(node_id, coords)
                if (
                    ours != was
                    and self._owner(node_id, coords) != (copy_id, ours)
                    and not same_bytes(ours, ref)
                ):
                    twice.append(coords)
            if twice:
                differs = "written with different bytes by two writers of the same session"
                where = tuple(sorted(twice)[:20])
                conflicts.append(Conflict(f"/{paths[node_id]}", "chunks", differs, where))
        return conflicts

    def _cut_conflicts(self, before: ChangeSet, theirs: ChangeSet) -> list[Conflict]:
        """Chunks that one side wrote where the other has shrunk the array."""
        conflicts = []
        for path in self.mine.nodes.keys() | theirs.nodes.keys():
            ours = self.mine.nodes.get(path)
            node = theirs.nodes.get(path, ours)
            if (
                node is None
                or node.array is None
                or ours == theirs.nodes.get(path, before.nodes.get(path))
            ):
                continue
            refs = {**self.mine.chunks.get(node.node_id, {}), **theirs.chunks.get(node.node_id, {})}
            cut = [c for c, ref in refs.items() if c not in node.array.grid and ref is not UNSET]
            for side in (self.mine, theirs):
                for rows in side.tables.get(node.node_id, ()):
                    if _lies_below(rows.box, node.array.grid.hi):
                        continue
                    table = side.rows(rows)
                    out = ~inside(table.coords(), node.array.grid.hi)
                    out &= table.kind != RefKind.UNSET
                    cut += [tuple(c) for c in table.coords()[out][:20].tolist()]
            if cut:
                reason = "written by one writer and cut off by another of the same session"
                conflicts.append(Conflict(f"/{path}", "chunks", reason, tuple(sorted(cut)[:20])))
        return conflicts
