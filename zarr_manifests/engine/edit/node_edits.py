"""Changes to nodes and chunk references when a Zarr key is written or deleted.

`overlay` classifies a key as a document, a chunk or an opaque entry. Invariants:

- A key reads what was last written to it, whatever its class. When a document is written, deleted
  or changes the chunk keys, entries below it change their class and keep their value. Documents of
  a second Zarr format at a node's path are opaque until the node's own documents are deleted.
- Three writes change nothing: a byte-identical document, a byte-identical inline chunk of a
  coordinate (an xarray append rewrites all coordinates), and the unset of an absent chunk.
- Shrinking an array removes whole chunks for good: growing it later does not bring them back.
- A node that is deleted and created again has a new id and none of its old chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from zarr_manifests.engine.edit.change_set import ChangeSet, same_bytes
from zarr_manifests.engine.edit.overlay import OPAQUE, SessionView
from zarr_manifests.engine.edit.packs import Packs, StagedRef
from zarr_manifests.engine.objects.chunks import ChunkReader, SessionKeys
from zarr_manifests.engine.snapshot.context import Context
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import Conflict, ConflictKind
from zarr_manifests.format.chunk_table import UNSET, ChunkRef, ChunkTable, InlineRef
from zarr_manifests.format.nodes import Node, NodeKind
from zarr_manifests.grid import Coords
from zarr_manifests.ids import NODE_ID_BYTES
from zarr_manifests.keys import (
    DOCUMENTS,
    V3_DOCUMENT,
    ArrayMeta,
    directory,
    join,
    node_documents,
    parse_documents,
    split,
)
from zarr_manifests.planning.tables.merge import narrower

__all__ = ["NodeEdits"]

_MOST_SINGLE: Final = 100_000
"""Number of single refs of one node at which they become a table."""


class NodeEdits(SessionView):
    """A snapshot with changes to its nodes and chunk references in memory.

    Parameters
    ----------
    context : Context
        The repository.

    Attributes
    ----------
    inline_chunk_bytes : int
        Size of the largest chunk stored in a manifest.
    packs : Packs
        The staged chunks, held in memory until their pack is written.
    reader : ChunkReader
        Reads chunk bytes.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.storage = context.storage
        self.runtime = context.runtime
        self.inline_chunk_bytes = context.config.inline_chunk_bytes
        self._most_single = max(2, min(_MOST_SINGLE, context.config.spill_refs // 4))

    def start_at(self, view: SnapshotView, keys: SessionKeys | None) -> None:
        """Start from this snapshot, without changes."""
        super().start_at(view, keys)
        self.packs = Packs(self.context.config.pack_bytes, self._new_chunk_key)
        self.reader = self._reader(view)

    def rebase(self, view: SnapshotView, changes: ChangeSet) -> None:
        """Replace the snapshot and the changes; new objects keep using the session's keys."""
        self.view, self.changes = view, changes
        self.packs.relocate(changes)
        self.reader = self._reader(view)

    def _reader(self, view: SnapshotView) -> ChunkReader:
        of = self.context
        return ChunkReader(self.storage, view.snapshot_id, of.containers, of.chunks)

    def _new_chunk_key(self) -> str:
        assert self.keys is not None  # the store refuses read-only writes earlier
        return self.keys.next("chunks")

    # --- chunk references --------------------------------------------------------------------

    def _put(self, key: str, ref: ChunkRef) -> None:
        chunk = self.chunk_at(key)
        if chunk is None:
            opaque = self.node(OPAQUE + key) or self._new_node(OPAQUE + key, NodeKind.OPAQUE)
            chunk = opaque, ()
        node, coords = chunk
        if (
            isinstance(ref, InlineRef)
            and node.array is not None
            and node.array.is_coordinate(node.path)
            and self.ref(node, coords) == ref
        ):
            return
        self._hold(node, coords, ref)

    def _hold(self, node: Node, coords: Coords, ref: ChunkRef) -> None:
        """Put the ref into the change set; the only function that adds single refs to it."""
        refs = self.changes.chunks.setdefault(node.node_id, {})
        refs[coords] = ref
        if isinstance(ref, StagedRef):
            self.packs.stage(ref, node.node_id, coords)
        if len(refs) % self._most_single == 0:
            self._gather(node.node_id)

    def _gather(self, node_id: bytes) -> None:
        """Turn single refs into a table, which takes less memory; staged refs stay single."""
        refs = self.changes.chunks[node_id]
        staged = {at: ref for at, ref in refs.items() if isinstance(ref, StagedRef)}
        if len(staged) < len(refs):
            del self.changes.chunks[node_id]
            rest = {at: ref for at, ref in refs.items() if at not in staged}
            self.changes.put_table(node_id, ChunkTable.of(rest))
            if staged:
                self.changes.chunks[node_id] = {**staged}

    def _unset(self, node: Node, coords: Coords) -> None:
        if self.ref(node, coords) is None:
            return
        refs = self.changes.chunks.setdefault(node.node_id, {})
        refs.pop(coords, None)
        if self.ref(node, coords) is not None:
            refs[coords] = UNSET
        elif not refs:
            del self.changes.chunks[node.node_id]

    # --- nodes -------------------------------------------------------------------------------

    def put_node(self, path: str, node: Node | None) -> None:
        """Set or remove the node at the path; its chunks stay as they are."""
        with self.lock:
            self._change_node(path, node, differs=self.view.nodes.get(path) != node)

    def _change_node(self, path: str, node: Node | None, *, differs: bool = True) -> None:
        """Set or remove the node at the path; every change of a node goes through here."""
        self._stamp = object()  # also before, in case of an interrupt
        if differs:
            self.changes.set_node(path, node)
        else:
            self.changes.leave_node(path)
        self._stamp = object()

    def _new_node(
        self, path: str, kind: NodeKind, documents: Mapping[str, bytes] | None = None
    ) -> Node:
        node = Node(path, self.runtime.random_bytes(NODE_ID_BYTES), kind, documents or {})
        self._change_node(path, node)
        return node

    def _drop(self, path: str) -> None:
        """Delete a node and all its chunks."""
        node = self.node(path)
        if node is None:
            return
        self.changes.forget(node.node_id)
        self._change_node(path, None, differs=path in self.view.nodes)

    # --- documents ---------------------------------------------------------------------------

    def _set_document(self, path: str, key: str, data: bytes | memoryview) -> bool:
        """Store `data` as a document of the node at `path`; False if it is none of the node's."""
        name = split(key)[1]
        with self.lock:
            documents = {**self._documents(path), name: bytes(data)}
            self._settle_node(path, documents, name)
            return name in node_documents(documents)

    def _documents(self, path: str) -> dict[str, bytes]:
        """All values at the path under document names, of the node or opaque."""
        node = self.node(path)
        found = {} if node is None else dict(node.documents)
        for name in DOCUMENTS:
            opaque = self.node(OPAQUE + join(path, name))
            ref = None if opaque is None else self.ref(opaque, ())
            if ref is not None:
                found[name] = self.reader.read(ref, 0, ref.length)
        return found

    def _settle_node(self, path: str, documents: Mapping[str, bytes], changed: str) -> None:
        """Create, update or delete the node as its documents say; documents it loses become opaque.

        If the document named `changed` is not one of the node's, the caller handles it.
        """
        node, due = self.node(path), node_documents(documents)
        before = {} if node is None else node.documents
        for name in due.keys() - before.keys():
            self._drop(OPAQUE + join(path, name))
        if before == due:
            return
        if node is None or not due:
            self._replace_node(path, due)
        else:
            self._update_node(node, due)
        for name in before.keys() - due.keys() - {changed}:
            data = before[name]
            # Staged instead of written, since the lock is held.
            small = len(data) <= self.inline_chunk_bytes
            self._put(join(path, name), InlineRef(data) if small else StagedRef.of(data))

    def _update_node(self, node: Node, documents: Mapping[str, bytes]) -> None:
        was, now = node.meta, parse_documents(documents)
        if isinstance(was, ArrayMeta) and isinstance(now, ArrayMeta):
            # A change of the Zarr format is not a resize: chunks off the grid become opaque.
            resize = (V3_DOCUMENT in node.documents) == (V3_DOCUMENT in documents)
            stays = was.same_chunking(now) and (resize or was.grid == now.grid)
            if stays:
                self._truncate(node, was.grid.hi, now.grid.hi)
        else:
            stays = type(was) is type(now)
        if not stays:
            self._replace_node(node.path, documents)
            return
        self._change_node(node.path, replace(node, documents=documents))
        if isinstance(now, ArrayMeta):
            self._adopt(node.path)

    def _truncate(self, node: Node, before: Coords, after: Coords) -> None:
        if all(b <= a for b, a in zip(before, after, strict=True)):
            return
        refs = self.changes.chunks.get(node.node_id, {})
        for coords in [c for c in refs if any(x >= n for x, n in zip(c, after, strict=True))]:
            del refs[coords]
        self.changes.cut_tables(node.node_id, after)
        if self._is_stored(node):
            cut = narrower(self.changes.truncated.get(node.node_id), after)
            self.changes.truncated[node.node_id] = cut if cut is not None else after

    def _is_stored(self, node: Node) -> bool:
        """Whether the snapshot has the node, at any path."""
        return node.node_id in self.view.by_id

    def _replace_node(self, path: str, documents: Mapping[str, bytes]) -> None:
        """Put a new node, or none, at the path; keys of the old node's chunks keep their values."""
        old = self.node(path)
        kept: dict[str, ChunkRef] = {}
        if old is not None and old.array is not None:
            table = self.chunks(old)
            for coords in map(tuple, table.coords().tolist() if table is not None else ()):
                ref = self.ref(old, coords)
                if ref is not None:
                    kept[join(path, old.array.chunk_keys.encode(coords))] = ref
        if old is not None:
            self._drop(path)
        if documents:
            is_array = isinstance(parse_documents(documents), ArrayMeta)
            self._new_node(path, NodeKind.ARRAY if is_array else NodeKind.GROUP, documents)
        for key, ref in kept.items():
            self._put(key, ref)
        if documents:
            self._adopt(path)

    def _adopt(self, path: str) -> None:
        """Turn opaque entries that are chunks of a new or grown array into its chunks."""
        for opaque in list(self.below(OPAQUE + directory(path))):
            chunk = self.chunk_at(opaque.path[1:])
            ref = self.ref(opaque, ()) if chunk is not None else None
            if chunk is not None and ref is not None:
                self._drop(opaque.path)
                self._hold(*chunk, ref)
        for above in self.above(path):
            if above.array is not None:
                self._take_from(above, above.array, path + "/")

    def adopt_merged(self) -> list[Conflict]:
        """Turn merged opaque entries into chunks of their arrays; return the conflicts.

        A fork made before an array was created or resized wrote its chunks as opaque entries. It is
        a conflict if the session has the chunk with other bytes.
        """
        conflicts = []
        for slot, node in list(self.changes.nodes.items()):
            if node is None or node.kind is not NodeKind.OPAQUE:
                continue
            chunk, ref = self.chunk_at(slot[1:]), self.ref(node, ())
            if chunk is None or ref is None:
                continue
            array, coords = chunk
            if self.ref(array, coords) is not None and not same_bytes(self.ref(array, coords), ref):
                reason = "written with different bytes by two writers of the same session"
                conflicts.append(
                    Conflict(ConflictKind.CHUNK, f"/{array.path}", "chunks", reason, (coords,))
                )
            self._drop(slot)
            self._hold(array, coords, ref)
        return conflicts

    def _take_from(self, above: Node, meta: ArrayMeta, below: str) -> None:
        """Move chunks of an outer array to the array nested in its key space."""
        table = self.chunks(above)
        for coords in map(tuple, table.coords().tolist() if table is not None else ()):
            key = join(above.path, meta.chunk_keys.encode(coords))
            chunk = self.chunk_at(key) if key.startswith(below) else None
            ref = self.ref(above, coords)
            if chunk is not None and ref is not None and chunk[0].node_id != above.node_id:
                self._unset(above, coords)
                self._hold(*chunk, ref)
