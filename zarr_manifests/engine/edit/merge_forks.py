"""Merging the changes of forks into their session.

Invariants: a fork is merged completely or not at all; a copy's changes count once, however often it
is merged.

Copies of a session's store that report what they change through the storage
----------------------------------------------------------------------------

A commit cannot know all copies, or ask whether they are done. It guarantees this: a call in a copy
that returned before the commit began is in the commit; a later call raises; a call that raised may
or may not be in it. The guarantee rests on the order of two sequences:

- A copy writes the chunk, then its report, then checks that the session's *open token* still
  exists. If it does not, the copy raises.
- The session deletes the token, checks that it is gone, and only then lists the reports.

So if the listing misses a report, the token was gone when that report was written, and its writer
raises.

Token and reports lie under `reports/<session>/<n>`: the token, an empty object, under the
session's own id, a report under its copy's. A report is a manifest of one chunk. Nothing points to
tokens or reports; garbage collection deletes them like other unreferenced objects of the session. A
token's key is never used again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import batched
from typing import Final, NoReturn, Protocol

import numpy as np
from msgspec import Struct

from zarr_manifests.engine.edit.change_set import ChangeSet, lies_below
from zarr_manifests.engine.edit.node_edits import NodeEdits
from zarr_manifests.engine.edit.overlay import SessionView, same_chunk
from zarr_manifests.engine.edit.packs import native_ref
from zarr_manifests.engine.objects.metadata import SessionKeys, create_own
from zarr_manifests.engine.objects.spill import Rows, resident
from zarr_manifests.errors import (
    Conflict,
    ConflictKind,
    CorruptObjectError,
    ObjectNotFoundError,
    ReadOnlyError,
    SessionClosedError,
    StorageError,
    UnsupportedStorageError,
)
from zarr_manifests.format.chunk_table import (
    UNSET,
    ChunkTable,
    InlineRef,
    NativeRef,
    RefKind,
    StoredRef,
    Unset,
)
from zarr_manifests.format.manifest import Manifest
from zarr_manifests.format.nodes import Node
from zarr_manifests.format.records import BlobRef
from zarr_manifests.grid import Coords
from zarr_manifests.ids import object_key, session_of
from zarr_manifests.planning.tables.merge import (
    Layer,
    difference,
    in_box,
    inside,
    merge_layers,
    narrower,
    pick,
    rows_at,
    select,
    shared_rows,
)
from zarr_manifests.runtime import Runtime
from zarr_manifests.storage import Storage

_ABSENT: Final = object()


class Owners(Struct):
    """Which copy each merged chunk and node came from, and its value at that time.

    `tables` records chunks in bulk, in merge order; `chunks` records single chunks and is newer.
    `objects` has the keys of chunk objects that copies wrote, `copies` the ids of merged copies.
    """

    chunks: dict[tuple[bytes, Coords], tuple[str, StoredRef]] = {}
    nodes: dict[str, tuple[str, Node | None]] = {}
    tables: dict[bytes, tuple[tuple[str, Rows], ...]] = {}
    objects: set[str] = set()
    copies: set[str] = set()

    def of(
        self, node_id: bytes, coords: Coords, fetch: Callable[[Rows], ChunkTable]
    ) -> tuple[str, StoredRef] | None:
        """The copy that a chunk came from, and its ref at that time; `fetch` loads rows."""
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


def _may_share(ours: Rows, theirs: Rows) -> bool:
    """Whether both may have rows of the same chunks; fetches nothing."""
    if not ours.box.overlaps(theirs.box):
        return False
    if resident(ours) and not in_box(ours, theirs.box).any():
        return False
    return not resident(theirs) or bool(in_box(theirs, ours.box).any())


class Merge:
    """Merges the changes of forks into a session's, and records which copy wrote what.

    A fork's change applies where the session has not changed since the fork was made, where the
    same copy made the earlier change, or where both made the same change. Anything else is a
    conflict.

    Parameters
    ----------
    contents : SessionView
        The session's contents. Merged is a copy of its changes, `mine`.
    owners : Owners
        What was merged earlier, which is copied too.
    """

    def __init__(self, contents: SessionView, owners: Owners) -> None:
        self.mine, self.owners = contents.changes.copy(), owners.copy()
        self._view, self._same = contents.view, partial(same_chunk, contents)

    def apply(self, before: ChangeSet, after: ChangeSet, copy_id: str) -> list[Conflict]:
        """Apply what the copy `copy_id` changed between `before` and `after`; return the conflicts.

        If there are conflicts, nothing is applied.
        """
        theirs = after.since(before)
        if copy_id in self.owners.copies:
            self._leave_out_merged(theirs, copy_id)
        self._single_out(before, theirs, copy_id)
        for node_id, refs in [*theirs.chunks.items()]:  # skip what is merged already
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
            Conflict(
                ConflictKind.METADATA,
                f"/{path}",
                "metadata",
                "changed in two copies of one session, differently",
            )
            for path, node in theirs.nodes.items()
            if self.mine.nodes.get(path, _ABSENT) not in (before.nodes.get(path, _ABSENT), node)
            and self.owners.nodes.get(path) != (copy_id, self.mine.nodes.get(path))
        ]
        conflicts += [
            Conflict(
                ConflictKind.DELETE,
                f"/{path}",
                "chunks",
                "written in the session and deleted in a fork",
            )
            for node_id, path in replaced.items()
            if self.mine.beyond(node_id, before)
        ]
        conflicts += self._chunk_conflicts(before, theirs, copy_id)
        conflicts += self._cut_conflicts(before, theirs)
        if not conflicts:
            self._take(theirs, after, replaced, copy_id)
        return conflicts

    def _owner(self, node_id: bytes, coords: Coords) -> tuple[str, StoredRef] | None:
        return self.owners.of(node_id, coords, self.mine.rows)

    def _leave_out_merged(self, theirs: ChangeSet, copy_id: str) -> None:
        """Drop from a copy's tables the rows that an earlier merge of the copy applied."""
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
            for i, rows in enumerate(parts):
                near = [layer for layer in layers if layer.box.overlaps(rows.box)]
                if not resident(rows) and rows in near:
                    continue  # merged already
                if near:
                    left += self._beyond(self._newest(rows, parts[i + 1 :]), near)
                else:
                    left.append(rows)
            theirs.tables[node_id] = tuple(left)
            if not left:
                del theirs.tables[node_id]

    def _newest(self, rows: Rows, later: Iterable[Rows]) -> ChunkTable:
        """The rows, without those that a later layer of the same copy replaces."""
        table = self.mine.rows(rows)
        for layer in later:
            if len(table) and layer.box.overlaps(table.box):
                table = select(table, ~shared_rows(table, self.mine.rows(layer)))
        return table

    def _beyond(self, table: ChunkTable, layers: Sequence[Rows]) -> list[Rows]:
        """The rows of the table that differ from these layers, of which the last wins."""
        if not len(table):
            return []
        found = (pick(self.mine.rows(layer), table.coords()) for layer in layers)
        known = [layer for layer in found if len(layer)]
        new = difference(table, merge_layers([Layer(None, tuple(known))]).table)
        return [] if new is None else [new]

    def _single_out(self, before: ChangeSet, theirs: ChangeSet, copy_id: str) -> None:
        """Turn bulk refs of a fork into single refs where the session changed the chunk too."""
        for node_id, parts in list(theirs.tables.items()):
            was = before.layers(node_id)
            moved = [rows for rows in self.mine.layers(node_id) if rows not in was]
            merged = self.owners.tables.get(node_id, ())
            left: list[Rows] = []
            for rows in parts:
                near = [each for each in moved if _may_share(each, rows)]
                if not near:
                    left.append(rows)
                elif resident(rows) or (copy_id, rows) not in merged:
                    left += self._uncontested(before, theirs, node_id, rows, near)
            if left:
                theirs.tables[node_id] = tuple(left)
            else:
                del theirs.tables[node_id]

    def _uncontested(
        self,
        before: ChangeSet,
        theirs: ChangeSet,
        node_id: bytes,
        rows: Rows,
        near: Sequence[Rows],
    ) -> list[Rows]:
        """The rows that the session has not changed; the others become single refs."""
        table = theirs.rows(rows)
        both = np.zeros(len(table), np.bool_)
        for each in near:
            both |= shared_rows(table, self.mine.rows(each))
        if both.any():
            coords = table.coords()[both]
            changed = difference(self.mine.at(node_id, coords), before.at(node_id, coords))
            both[both] = False if changed is None else rows_at(changed, coords) >= 0
        if not both.any():
            return [rows]
        theirs.chunks.setdefault(node_id, {}).update(select(table, both).refs())
        return [] if both.all() else [select(table, ~both)]

    def _node(self, changes: ChangeSet, path: str) -> Node | None:
        return changes.nodes[path] if path in changes.nodes else self._view.nodes.get(path)

    def _take(
        self, theirs: ChangeSet, after: ChangeSet, replaced: Iterable[bytes], copy_id: str
    ) -> None:
        # This comes first: rows written to a manifest name objects that must be durable.
        known = self.owners.objects
        self.mine.unsynced += [key for key in theirs.unsynced if key not in known]
        known.update(theirs.unsynced)
        for session_id, count in theirs.durable.items():
            self.mine.durable[session_id] = max(count, self.mine.durable.get(session_id, 0))
        self.owners.copies.add(copy_id)
        for node_id in replaced:
            self.mine.forget(node_id)
        for path, node in theirs.nodes.items():
            self.owners.nodes[path] = copy_id, node
            if node is None and path not in after.nodes:
                self.mine.leave_node(path)
            else:
                self.mine.set_node(path, node)
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
        self.mine.take_zones(theirs.zones)

    def _chunk_conflicts(
        self, before: ChangeSet, theirs: ChangeSet, copy_id: str
    ) -> list[Conflict]:
        paths = self._paths(theirs)
        reason = (
            "written in a fork, to an array that was deleted, "
            "or made in a copy that is not merged yet"
        )
        conflicts: list[Conflict] = []
        for node_id in theirs.touched():
            if node_id not in paths:
                lost = theirs.rows(theirs.layers(node_id)[0]).coords()[:20].tolist()
                chunks = tuple(map(tuple, lost))
                conflicts.append(Conflict(ConflictKind.DELETE, "/?", "chunks", reason, chunks))
                continue
            twice, path, refs = [], paths[node_id], theirs.chunks.get(node_id, {})
            node = self._node(theirs, path) or self._node(self.mine, path)
            for coords, ref in refs.items():
                ours, was = self.mine.get(node_id, coords), before.get(node_id, coords)
                if (
                    ours != was
                    and self._owner(node_id, coords) != (copy_id, ours)
                    and (ours is None or not self._same(node, ours, ref))
                ):
                    twice.append(coords)
            if twice:
                differs = "written with different bytes by two writers of the same session"
                where = tuple(sorted(twice)[:20])
                conflicts.append(
                    Conflict(ConflictKind.CHUNK, f"/{paths[node_id]}", "chunks", differs, where)
                )
        return conflicts

    def _paths(self, theirs: ChangeSet) -> dict[bytes, str]:
        """The paths of the nodes whose chunks the copy has changed, if they are still there."""
        changed = {**self.mine.nodes, **theirs.nodes}
        found = {node.node_id: path for path, node in changed.items() if node is not None}
        for node_id in {*theirs.tables, *theirs.chunks} - found.keys():
            node = self._view.by_id.get(node_id)
            if node is not None and node.path not in changed:
                found[node_id] = node.path
        return found

    def _cut_conflicts(self, before: ChangeSet, theirs: ChangeSet) -> list[Conflict]:
        """Conflicts where one side wrote chunks that the other side's resize removes."""
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
                    if lies_below(rows.box, node.array.grid.hi):
                        continue
                    table = side.rows(rows)
                    out = ~inside(table.coords(), node.array.grid.hi)
                    out &= table.kind != RefKind.UNSET
                    cut += [tuple(c) for c in table.coords()[out][:20].tolist()]
            if cut:
                reason = "written by one writer and cut off by another of the same session"
                conflicts.append(
                    Conflict(
                        ConflictKind.SHAPE, f"/{path}", "chunks", reason, tuple(sorted(cut)[:20])
                    )
                )
        return conflicts


# --- copies that report -------------------------------------------------------------------------


_KIND: Final = "reports"
_MOST_BYTES: Final = 1 << 16
_AT_ONCE: Final = 256

type Reported = dict[tuple[bytes, Coords], dict[str, StoredRef]]
"""By node id and coordinate: the new ref of the chunk by each copy's session id."""


# --- what the session does ---------------------------------------------------------------------


def check_reporting(storage: Storage, keys: SessionKeys) -> None:
    """Refuse a storage that cannot list or delete objects.

    Otherwise the commit would fail after all the work is done.

    Raises
    ------
    UnsupportedStorageError
        If the storage cannot do both.
    """
    key = open_token(storage, keys)
    try:
        listed = [info.key for info in storage.list(key)]
        close_token(storage, key)
    except StorageError as error:
        raise _unsuitable(storage) from error
    if listed != [key]:
        raise _unsuitable(storage)


def _unsuitable(storage: Storage) -> UnsupportedStorageError:
    return UnsupportedStorageError(
        f"{storage.url} cannot list and delete objects as copies='report' needs it; check the "
        "permissions, or use copies='merge' with zarr_manifests.write or session.fork()"
    )


def open_token(storage: Storage, keys: SessionKeys) -> str:
    """Create the session's token, so that copies can report; return its key."""
    key = keys.next(_KIND)
    create_own(storage, key, b"")
    return key


def close_token(storage: Storage, token: str) -> None:
    """Delete the token, so that every later write in a copy raises.

    Raises
    ------
    StorageError
        If the token may still exist.
    """
    storage.delete_many([token])
    if _is_there(storage, token):
        raise StorageError(
            f"{storage.url} has not deleted {token}, so that copies of the session may go on "
            "writing; nothing was committed. Check the permissions, and commit again"
        )


def _is_there(storage: Storage, token: str) -> bool:
    try:
        storage.head(token)
    except ObjectNotFoundError:
        return False
    return True


def read_reports(storage: Storage, keys: SessionKeys, runtime: Runtime) -> Reported:
    """The last report of each copy about each chunk.

    Call it only after the token is gone.
    """
    found: Reported = {}
    for batch in batched(_listed(storage, keys), _AT_ONCE):
        reads = [partial(_read, storage, object_key(_KIND, *report)) for report in batch]
        for (copy_id, _), (chunk, ref) in zip(batch, runtime.parallel(reads), strict=True):
            found.setdefault(chunk, {})[copy_id] = ref
    return found


def _listed(storage: Storage, keys: SessionKeys) -> list[tuple[str, int]]:
    """Copy id and number of each report, in the order in which each copy wrote them."""
    prefix = f"{_KIND}/{keys.lineage_prefix.partition('/')[2]}"
    listed = [
        (copy_id, int(info.key.rpartition("/")[2]))
        for info in storage.list(prefix)
        if (copy_id := session_of(info.key)) != keys.session_id
    ]
    return sorted(listed)


def _read(storage: Storage, key: str) -> tuple[tuple[bytes, Coords], StoredRef]:
    try:
        data = storage.get(key, 0, _MOST_BYTES + 1)
    except ObjectNotFoundError as error:
        raise CorruptObjectError(
            f"{key}, a report of a copy, is gone; what the copy wrote cannot be committed"
        ) from error
    if len(data) > _MOST_BYTES:
        raise CorruptObjectError(f"{key} is longer than a report can be")
    manifest = Manifest.from_object(data, BlobRef.to(key, data))
    node_ids = {part.node_id for part in manifest.directory()}
    rows = [
        row for node_id in node_ids for table in manifest.tables(node_id) for row in table.refs()
    ]
    if len(node_ids) != 1 or len(rows) != 1:
        raise CorruptObjectError(f"{key} is not a report of one chunk")
    ((coords, ref),) = rows
    if not isinstance(ref, Unset) and not (
        isinstance(ref, NativeRef) and ref.source == session_of(key)
    ):
        raise CorruptObjectError(f"{key} reports a chunk that its copy has not written")
    return (node_ids.pop(), coords), ref


# --- what a copy does --------------------------------------------------------------------------


class Copy(Protocol):
    """The part of a copy's workspace that reporting needs."""

    storage: Storage
    edits: NodeEdits
    token: str | None


def change_reported(
    copy: Copy, key: str, path: str | None, data: bytes | memoryview | None
) -> None:
    """Write a chunk in a copy as its own object, or unset it if `data` is None, and report that.

    A chunk that is absent is unset too, since another copy may have set it. `path` is the path of
    the node if the key has the name of a metadata document, else None.

    Raises
    ------
    ReadOnlyError
        If the key is not a chunk of an existing array.
    SessionClosedError
        If the session has begun to commit, or has ended. The change may or may not be committed.
    """
    edits, contents, storage = copy.edits, copy.edits.contents, copy.storage
    if data is None:
        if contents.chunk_at(key) is None and contents.find(key) is None:
            return
    elif path is not None:
        known = contents.find(key)
        if isinstance(known, InlineRef) and known.data == data:
            return  # libraries rewrite unchanged documents
    is_document = path is not None and contents.node(path) is not None
    chunk = None if is_document else contents.chunk_at(key)
    node, coords = chunk or refuse_in_copy(f"{key!r} cannot be changed")
    ref: NativeRef | Unset = UNSET
    if data is not None:
        ref = native_ref(edits.new_chunk_key(), data)
        create_own(storage, ref.key, data, durable=False)
    with contents.lock:
        if isinstance(ref, Unset):
            edits.unset(node, coords)
        else:
            edits.hold(node, {coords: ref})
    keys, token = contents.keys, copy.token
    assert keys is not None
    assert token is not None
    report = Manifest.of([(node.node_id, ChunkTable.of({coords: ref}))]).encode()[0]
    create_own(storage, keys.next(_KIND), report, durable=False)
    # Only after the report: if the session's listing missed it, the token is gone by now.
    if not _is_there(storage, token):
        raise SessionClosedError(
            "the session that this store was copied from has begun to commit, or has ended; "
            "whether what was just written is in its commit is not certain. Commit when all the "
            "work is done, and write what came too late in another session"
        )


def refuse_in_copy(what: str) -> NoReturn:
    """Raise the error for what a reporting copy may not do."""
    raise ReadOnlyError(
        f"{what} in a copy of a session's store: with copies='report', copies write and unset "
        "chunks of existing arrays only. Do it in the session, before its "
        "store is pickled, or use session.fork() and merge"
    )
