"""Changes to nodes and chunk references when a Zarr key is written or deleted.

`overlay` classifies a key as a document, a chunk or an opaque entry. Invariants:

- A key reads what was last written to it, whatever its class. When a document is written, deleted
  or changes the chunk keys, entries below it change their class and keep their value. Documents of
  a second Zarr format at a node's path are opaque until the node's own documents are deleted.
- Three writes change nothing: a byte-identical document, a byte-identical inline chunk of a
  coordinate (an xarray append rewrites all coordinates), and the unset of an absent chunk.
- Shrinking an array removes whole chunks for good: growing it later does not bring them back.
- A node that is deleted and created again has a new id and none of its old chunks.

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

from collections.abc import Mapping
from functools import partial
from itertools import batched
from typing import Final, NoReturn, Protocol

from msgspec.structs import replace

from zarr_manifests.engine.chunks import Packs, StagedRef, native_ref
from zarr_manifests.engine.objects import SessionKeys, create_own, is_there
from zarr_manifests.engine.overlay import OPAQUE, SessionView, same_chunk
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
    ChunkRef,
    ChunkTable,
    InlineRef,
    NativeRef,
    StoredRef,
    Unset,
)
from zarr_manifests.format.manifest import Manifest, Node, NodeKind
from zarr_manifests.format.records import BlobRef
from zarr_manifests.grid import Coords
from zarr_manifests.ids import NODE_ID_BYTES, object_key, session_of
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
from zarr_manifests.planning.merge import narrower
from zarr_manifests.runtime import Runtime
from zarr_manifests.storage import Storage

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
        for coords, ref in added.items():
            if isinstance(ref, StagedRef):  # first: packs forget what an interrupt leaves out
                self.packs.stage(node.node_id, coords, ref)
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
            truncated = self.contents.changes.truncated
            truncated[node.node_id] = narrower(truncated.get(node.node_id), after) or after

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
    if is_there(storage, token):
        raise StorageError(
            f"{storage.url} has not deleted {token}, so that copies of the session may go on "
            "writing; nothing was committed. Check the permissions, and commit again"
        )


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
    return sorted(
        (copy_id, int(info.key.rpartition("/")[2]))
        for info in storage.list(prefix)
        if (copy_id := session_of(info.key)) != keys.session_id
    )


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
    if not is_there(storage, token):
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
