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
from typing import Final

from msgspec.structs import replace

from zarr_manifests.engine.edit.overlay import OPAQUE, SessionView, same_chunk
from zarr_manifests.engine.edit.packs import Packs, StagedRef
from zarr_manifests.errors import Conflict, ConflictKind
from zarr_manifests.format.chunk_table import UNSET, ChunkRef, ChunkTable, InlineRef
from zarr_manifests.format.nodes import Node, NodeKind
from zarr_manifests.grid import Coords
from zarr_manifests.ids import NODE_ID_BYTES
from zarr_manifests.keys import (
    DOCUMENTS,
    V3_DOCUMENT,
    ArrayMeta,
    check_document,
    directory,
    join,
    node_documents,
    parse_documents,
    split,
)
from zarr_manifests.planning.tables.merge import narrower

_MOST_SINGLE: Final = 100_000
"""Number of single refs of one node at which they become a table."""


class NodeEdits:
    """Changes nodes and chunk references in memory.

    Callers hold the lock of the contents, except for `set_document`, which takes it.

    Parameters
    ----------
    contents : SessionView
        Where to make the changes; its keys name new objects.

    Attributes
    ----------
    packs : Packs
        The staged chunks, held in memory until their pack is written.
    """

    def __init__(self, contents: SessionView) -> None:
        self.contents, self._config = contents, contents.context.config
        self._most_single = max(2, min(_MOST_SINGLE, self._config.spill_refs // 4))
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget what is staged."""
        self.packs = Packs(self._config.pack_bytes, self.new_chunk_key)

    def new_chunk_key(self) -> str:
        """An unused key for a chunk object."""
        assert self.contents.keys is not None
        return self.contents.keys.next("chunks")

    # --- chunk references --------------------------------------------------------------------

    def put(self, key: str, ref: ChunkRef) -> None:
        """Put the ref at the key, of a chunk or else of an opaque entry."""
        chunk = self.contents.chunk_at(key)
        if chunk is None:
            path = OPAQUE + key
            chunk = self.contents.node(path) or self._new_node(path, NodeKind.OPAQUE), ()
        self.put_all(chunk[0], {chunk[1]: ref})

    def put_all(self, node: Node, refs: Mapping[Coords, ChunkRef | None]) -> None:
        """Put refs of a node's chunks; None unsets a chunk."""
        contents = self.contents
        if node.array is not None and node.array.is_coordinate(node.path):
            # Those that it has already, byte for byte, are left out.
            refs = {
                at: ref
                for at, ref in refs.items()
                if not isinstance(ref, InlineRef) or contents.ref(node, at) != ref
            }
        added = {at: ref for at, ref in refs.items() if ref is not None}
        # All are looked up before any is unset, since a look-up may fail.
        gone = [at for at in refs if at not in added and contents.ref(node, at) is not None]
        for at in gone:
            self.unset(node, at)
        if added:
            self.hold(node, added)

    def hold(self, node: Node, added: Mapping[Coords, ChunkRef]) -> None:
        """Put the refs into the change set; only this adds single refs to it."""
        refs = self.contents.changes.chunks.setdefault(node.node_id, {})
        before = len(refs)
        self.packs.stage(node.node_id, added)  # first: packs forget what an interrupt leaves out
        refs.update(added)
        if before // self._most_single < len(refs) // self._most_single:
            self._gather(node.node_id)

    def _gather(self, node_id: bytes) -> None:
        """Turn single refs into a table, which takes less memory; staged refs stay single."""
        changes = self.contents.changes
        refs = changes.chunks[node_id]
        staged = {at: ref for at, ref in refs.items() if isinstance(ref, StagedRef)}
        if len(staged) < len(refs):
            rest = {at: ref for at, ref in refs.items() if at not in staged}
            changes.put_beside(node_id, ChunkTable.of(rest))
            if not staged:
                del changes.chunks[node_id]

    def unset(self, node: Node, coords: Coords) -> None:
        """Remove the ref of a chunk, if there is one."""
        if self.contents.ref(node, coords) is None:
            return
        refs = self.contents.changes.chunks.setdefault(node.node_id, {})
        refs.pop(coords, None)
        if self.contents.ref(node, coords) is not None:
            refs[coords] = UNSET
        elif not refs:
            del self.contents.changes.chunks[node.node_id]

    # --- nodes -------------------------------------------------------------------------------

    def move(self, moves: Mapping[str, str]) -> None:
        """Give nodes, by path, their new paths; their chunks stay as they are."""
        stored = self.contents.view.nodes
        moved: dict[str, Node | None] = dict.fromkeys(moves)
        for path, to in moves.items():
            node = self.contents.node(path)
            assert node is not None
            moved[to] = replace(node, path=to)
        for path, new in moved.items():
            self._change_node(path, new, differs=stored.get(path) != new)

    def _change_node(self, path: str, node: Node | None, *, differs: bool = True) -> None:
        """Set or remove the node at the path; every change of a node goes through here."""
        self.contents.stamp = object()  # also before, in case of an interrupt
        if differs:
            self.contents.changes.set_node(path, node)
        else:
            self.contents.changes.leave_node(path)
        self.contents.stamp = object()

    def _new_node(
        self, path: str, kind: NodeKind, documents: Mapping[str, bytes] | None = None
    ) -> Node:
        node = Node(
            path, self.contents.context.runtime.random_bytes(NODE_ID_BYTES), kind, documents or {}
        )
        self._change_node(path, node)
        return node

    def drop(self, path: str) -> None:
        """Delete a node and all its chunks."""
        node = self.contents.node(path)
        if node is None:
            return
        self.contents.changes.forget(node.node_id)
        self._change_node(path, None, differs=path in self.contents.view.nodes)

    # --- documents ---------------------------------------------------------------------------

    def set_document(self, path: str, key: str, data: bytes | memoryview) -> bool:
        """Store `data` as a document of the node at `path`; False if it is none of the node's.

        Raises
        ------
        UnsupportedFormatError
            If it is of an array whose chunks could not be told from other keys.
        """
        name = split(key)[1]
        if name == V3_DOCUMENT:
            check_document(path, bytes(data))
        with self.contents.lock:
            documents = {**self.documents(path), name: bytes(data)}
            self.settle_node(path, documents, name)
            return name in node_documents(documents)

    def documents(self, path: str) -> dict[str, bytes]:
        """All values at the path under document names, of the node or opaque."""
        node = self.contents.node(path)
        found = {} if node is None else dict(node.documents)
        for name in DOCUMENTS:
            opaque = self.contents.node(OPAQUE + join(path, name))
            ref = None if opaque is None else self.contents.ref(opaque, ())
            if ref is not None:
                found[name] = self.contents.reader.read(ref, 0, ref.length)
        return found

    def settle_node(self, path: str, documents: Mapping[str, bytes], changed: str) -> None:
        """Create, update or delete the node as its documents say; documents it loses become opaque.

        If the document named `changed` is not one of the node's, the caller handles it.
        """
        node, due = self.contents.node(path), node_documents(documents)
        before = {} if node is None else node.documents
        for name in due.keys() - before.keys():
            self.drop(OPAQUE + join(path, name))
        if before == due:
            return
        if node is None or not due:
            self._replace_node(path, due)
        else:
            self._update_node(node, due)
        for name in before.keys() - due.keys() - {changed}:
            data = before[name]
            # Staged instead of written, since the lock is held.
            small = len(data) <= self._config.inline_chunk_bytes
            self.put(join(path, name), InlineRef(data) if small else StagedRef.of(data))

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
        refs = self.contents.changes.chunks.get(node.node_id, {})
        for coords in [c for c in refs if any(x >= n for x, n in zip(c, after, strict=True))]:
            del refs[coords]
        self.contents.changes.cut_tables(node.node_id, after)
        if self.is_stored(node):
            cut = narrower(self.contents.changes.truncated.get(node.node_id), after)
            self.contents.changes.truncated[node.node_id] = cut if cut is not None else after

    def is_stored(self, node: Node) -> bool:
        """Whether the snapshot has the node, at any path."""
        return node.node_id in self.contents.view.by_id

    def _replace_node(self, path: str, documents: Mapping[str, bytes]) -> None:
        """Put a new node, or none, at the path; keys of the old node's chunks keep their values."""
        old = self.contents.node(path)
        kept: dict[str, ChunkRef] = {}
        if old is not None and old.array is not None:
            table = self.contents.chunks(old)
            for coords in map(tuple, table.coords().tolist() if table is not None else ()):
                ref = self.contents.ref(old, coords)
                if ref is not None:
                    kept[join(path, old.array.chunk_keys.encode(coords))] = ref
        if old is not None:
            self.drop(path)
        if documents:
            is_array = isinstance(parse_documents(documents), ArrayMeta)
            self._new_node(path, NodeKind.ARRAY if is_array else NodeKind.GROUP, documents)
        for key, ref in kept.items():
            self.put(key, ref)
        if documents:
            self._adopt(path)

    def _adopt(self, path: str) -> None:
        """Turn opaque entries that are chunks of a new or grown array into its chunks."""
        for opaque in list(self.contents.below(OPAQUE + directory(path))):
            chunk = self.contents.chunk_at(opaque.path[1:])
            ref = self.contents.ref(opaque, ()) if chunk is not None else None
            if chunk is not None and ref is not None:
                self.drop(opaque.path)
                self.hold(chunk[0], {chunk[1]: ref})
        for above in self.contents.above(path):
            if above.array is not None:
                self._take_from(above, above.array, path + "/")

    def adopt_merged(self) -> list[Conflict]:
        """Turn merged opaque entries into chunks of their arrays; return the conflicts.

        A fork made before an array was created or resized wrote its chunks as opaque entries. It is
        a conflict if the session has the chunk with other bytes.
        """
        conflicts = []
        for slot, node in list(self.contents.changes.nodes.items()):
            if node is None or node.kind is not NodeKind.OPAQUE:
                continue
            chunk, ref = self.contents.chunk_at(slot[1:]), self.contents.ref(node, ())
            if chunk is None or ref is None:
                continue
            array, coords = chunk
            here = self.contents.ref(array, coords)
            if here is not None and not same_chunk(self.contents, array, here, ref):
                reason = "written with different bytes by two writers of the same session"
                conflicts.append(
                    Conflict(ConflictKind.CHUNK, f"/{array.path}", "chunks", reason, (coords,))
                )
            self.drop(slot)
            self.hold(array, {coords: ref})
        return conflicts

    def _take_from(self, above: Node, meta: ArrayMeta, below: str) -> None:
        """Move chunks of an outer array to the array nested in its key space."""
        table = self.contents.chunks(above)
        for coords in map(tuple, table.coords().tolist() if table is not None else ()):
            key = join(above.path, meta.chunk_keys.encode(coords))
            chunk = self.contents.chunk_at(key) if key.startswith(below) else None
            ref = self.contents.ref(above, coords)
            if chunk is not None and ref is not None and chunk[0].node_id != above.node_id:
                self.unset(above, coords)
                self.hold(chunk[0], {chunk[1]: ref})
