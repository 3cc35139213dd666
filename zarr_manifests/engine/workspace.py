"""Writes at Zarr keys over a snapshot: stores chunk bytes and keeps the changes until a commit.

`node_edits` updates nodes and chunk references; this module decides where bytes go, and who may
write. Invariants: a chunk is referenced only after its bytes are stored or staged; a copy that was
not made with `fork` is detected at the commit, or reports what it changes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final, cast

import numpy as np
from msgspec.structs import replace

from zarr_manifests.engine.bulk_chunks import ArrayKeys
from zarr_manifests.engine.change_set import ChangeSet, ForkState, Spill
from zarr_manifests.engine.chunks import Pack, StagedRef, native_ref, native_rows, sync_parts
from zarr_manifests.engine.node_edits import NodeEdits, change_reported, refuse_in_copy
from zarr_manifests.engine.objects import SessionKeys, create_own
from zarr_manifests.engine.overlay import OPAQUE, SessionView, check_key, node_path
from zarr_manifests.engine.view import Context, SnapshotView
from zarr_manifests.errors import InvalidArgumentError, SessionClosedError
from zarr_manifests.format.chunk_table import ChunkRef, ChunkTable, Column, InlineRef, NativeRef
from zarr_manifests.format.manifest import Node, NodeKind
from zarr_manifests.grid import Box, Coords
from zarr_manifests.ids import crc32c_of_each
from zarr_manifests.keys import ArrayMeta, check_inside, document_path, split
from zarr_manifests.planning.merge import rearranged
from zarr_manifests.planning.regions import Places, plan_move, reindexed, shifted
from zarr_manifests.runtime import ForkSafeLock, forks_made

UNKNOWN: Final = "whether its last commit took effect is not known"
"""Why a workspace is closed whose commit was interrupted, or whose answer was lost."""

INTERRUPTED: Final = "a write was interrupted and may be incomplete; write again in a new session"
"""Why a workspace is closed in which an interrupt, such as Ctrl-C, came into a write."""

type _Object = tuple[str, bytes | memoryview]

type TipCheck = Callable[[SnapshotView], None]
"""Checks a tip that has moved; raises `ConflictError` if the changes must not go on top of it."""


class Workspace:
    """What a store writes to: a snapshot with changes over it. Thread-safe.

    Parameters
    ----------
    context : Context
        The repository.
    view : SnapshotView
        The snapshot.
    keys : SessionKeys
        Names new objects.
    origin : ForkState, optional
        The state this workspace was revived from, if it is a copy; it continues its changes.

    Attributes
    ----------
    contents : SessionView
        The snapshot with the changes over it, to read.
    edits : NodeEdits
        Makes the changes.
    most_packed : int
        Size of the largest chunk stored in a pack; larger chunks are written at once.
    pid : int
        The process that owns the session; in a child of `os.fork` the workspace is a copy.
    pickled : bool
        Whether copies were made by pickling a store instead of by `fork`.
    token : str or None
        The session's open token, if its copies report what they change (`merge_forks`).
    frozen : ChangeSet or None
        The changes when the first reporting copy was made; None if there is none.
    merged : dict of str to ChangeSet
        What was merged of each copy, by copy id.
    tip_checks : list of TipCheck
        What a tip has to pass before the changes are put on top of it.
    closed : str or None
        Why the workspace takes no more writes; None if it does.
    landing : bool
        Whether a commit of the changes has begun that neither failed nor was moved on from.
    """

    def __init__(
        self,
        context: Context,
        view: SnapshotView,
        keys: SessionKeys,
        origin: ForkState | None = None,
    ) -> None:
        self.context, self.storage, self.runtime = context, context.storage, context.runtime
        self._inline_chunk_bytes = context.config.inline_chunk_bytes
        self.most_packed = max(self._inline_chunk_bytes, context.config.pack_chunk_bytes)
        self.origin = origin
        self.closed: str | None = None
        self.token: str | None = None
        self.contents = SessionView(context, view, keys)
        self.edits = NodeEdits(self.contents)
        self.start_at(view, keys)
        if origin is not None:
            self.token = None if origin.explicit else origin.token
            changes = replace(origin.after.copy(), spill=self.contents.changes.spill)
            self.contents.rebase(view, changes)

    @property
    def lock(self) -> ForkSafeLock:
        """Guards the changes."""
        return self.contents.lock

    @property
    def keys(self) -> SessionKeys:
        """Names new objects."""
        assert self.contents.keys is not None
        return self.contents.keys

    def start_at(self, view: SnapshotView, keys: SessionKeys) -> None:
        """Start from this snapshot, without changes."""
        spill = Spill(self.context.objects, keys, self.context.config.spill_refs)
        self.contents.start_at(view, keys, ChangeSet(spill=spill))
        self.edits.begin_anew()
        self.pid = os.getpid()
        self._forks_before = forks_made()
        self._noticeable_in: int | None = None
        self.pickled = False
        self.frozen: ChangeSet | None = None
        self.merged: dict[str, ChangeSet] = {}
        self.tip_checks: list[TipCheck] = []
        self.landing = False  # last: the changes are others now

    @property
    def copied(self) -> bool:
        """Whether other processes may have copies that were not made with `fork`."""
        return self.pickled or self._forks_before != forks_made()

    @property
    def is_first_pickle(self) -> bool:
        """Whether a copy made by pickling now is the first that needs to be merged."""
        return self.origin is None and self.token is None and not self.pickled

    def set(self, key: str, data: bytes | memoryview) -> None:
        """Write `data` at the key; a memoryview must be larger than `most_packed`."""
        for name, content in self._objects_of(key, data):
            self._create(name, content)

    async def set_async(self, key: str, data: bytes) -> None:
        """Like `set`, for an event loop: only uploads are awaited."""
        if self.reports:
            await asyncio.to_thread(self.set, key, data)
            return
        for name, content in self._objects_of(key, data):
            if not await self.storage.create_async(name, bytes(content), durable=False):
                await asyncio.to_thread(self._create, name, content)

    def set_chunks(
        self,
        keys: Sequence[str],
        at: ArrayKeys,
        chunks: Sequence[bytes | memoryview | None],
    ) -> None:
        """Write chunks of an array at the keys, or delete those that are None; all or none.

        None of the keys is given twice. A memoryview must be larger than `most_packed`. Chunks that
        share packs are at most `pack-bytes` together.
        """
        self._before_change(keys[0])
        packed = [data for data in chunks if data is not None]
        lengths = np.fromiter(map(len, packed), np.int64, len(packed))
        if (
            len(packed) == len(chunks)
            and 2 * int(lengths.sum()) >= self.context.config.pack_bytes
            and self._inline_chunk_bytes < int(lengths.min())
            and int(lengths.max()) <= self.most_packed
        ):
            order = np.lexsort(at.coords.T[::-1]).tolist()  # as packs are
            packed, lengths = [packed[i] for i in order], lengths[order]
            checksums = crc32c_of_each(packed)
            self.set_pack(
                [keys[i] for i in order], at.part(order), b"".join(packed), checksums, lengths
            )
            return
        for name, content in self._objects(keys, at, chunks):
            self._create(name, content)

    def set_pack(
        self,
        keys: Sequence[str],
        at: ArrayKeys,
        data: bytes | memoryview,
        checksums: Column,
        lengths: Column | None = None,
    ) -> None:
        """Write small chunks of an array as a pack of their own, in C order; all or none.

        `data` is theirs, one after another; without `lengths` they are of the same length.
        """
        self._before_change(keys[0])
        if lengths is None:
            lengths = np.full(len(keys), len(data) // len(keys))
        while True:
            name = self.edits.new_chunk_key()
            self.runtime.checkpoint("chunks.create")
            create_own(self.storage, name, data, durable=False)
            table = native_rows(name, at.coords, lengths, checksums)
            with self.lock:
                self.check_open()  # again, now that the chunks are stored
                if table.sources[0] != self.keys.session_id:
                    continue  # a commit came in between, as in `_record`
                self.contents.changes.unsynced.append(name)
                if at.stamp is self.contents.stamp:
                    self.contents.changes.put_beside(at.node.node_id, table)
                else:
                    for row, key in enumerate(keys):
                        self.edits.put(key, cast(NativeRef, table.ref(row)))
                return

    def check_open(self) -> None:
        """Refuse changes if the session is closed: no commit would have them.

        Raises
        ------
        SessionClosedError
            If it is closed.
        """
        if self.closed is not None:
            raise SessionClosedError(f"the session is closed: {self.closed}")

    def _create(self, name: str, content: bytes | memoryview) -> None:
        self.runtime.checkpoint("chunks.create")
        create_own(self.storage, name, content, durable=False)

    def _objects_of(self, key: str, data: bytes | memoryview) -> Iterable[_Object]:
        """Set the value at a key, as `_objects` does."""
        self._before_change(check_inside(key))
        path = document_path(key)
        if self.reports:
            change_reported(self, key, path, data)
        elif path is None or not self.edits.set_document(path, key, data):
            return self._objects((key,), None, (data,))
        return ()

    def _objects(
        self, keys: Sequence[str], at: ArrayKeys | None, chunks: Sequence[bytes | memoryview | None]
    ) -> Iterator[_Object]:
        """Yield the objects to write, and record the chunks once they are written or staged.

        A full pack is written without the lock, so that other threads go on in the meantime. If a
        commit comes in between, the chunks are stored again: it gives the session a new id, and the
        next commit takes only objects under that id. A staged chunk has no key yet.
        """
        done = False
        while not done:
            refs, staged = [], 0
            for data in chunks:
                ref = None if data is None else self._place(data)
                refs.append(ref)
                if isinstance(ref, StagedRef):
                    staged += len(ref.data)
                elif isinstance(ref, NativeRef) and data is not None:
                    yield ref.key, data
            pack = None
            with self.lock:  # taken once for most chunks, since writers wait for it
                if staged:
                    pack = self.edits.packs.full(self.contents.changes, staged)
                if pack is None:
                    done = self._recorded(keys, at, chunks, refs)
            if pack is not None:
                try:
                    yield pack.key, pack.data()
                    pack.written = True
                finally:
                    self._settle(pack)
                with self.lock:
                    done = self._recorded(keys, at, chunks, refs)

    def _recorded(
        self,
        keys: Sequence[str],
        at: ArrayKeys | None,
        chunks: Sequence[bytes | memoryview | None],
        refs: Sequence[ChunkRef | None],
    ) -> bool:
        """Record stored chunks; False if they have to be stored again."""
        self.check_open()  # again, now that the chunks are stored
        written = [ref for ref in refs if isinstance(ref, NativeRef)]
        if written and any(ref.source != self.keys.session_id for ref in written):
            return False
        self.contents.changes.unsynced += [ref.key for ref in written]
        if at is not None and at.stamp is self.contents.stamp:
            found = dict(zip(map(tuple, at.coords.tolist()), refs, strict=True))
            self.contents.guarded(partial(self.edits.put_all, at.node, found))
            return True
        for key, data, ref in zip(keys, chunks, refs, strict=True):
            if ref is None or data is None:
                self.delete(key)
                continue
            path = document_path(key)
            # A `.zattrs` may have become a document since, if its array was created meanwhile.
            if path is None or not self.edits.set_document(path, key, data):
                self.edits.put(key, ref)
        return True

    def _before_change(self, key: str) -> None:
        """Refuse an invalid key; mark the first change of a copy that was not made with `fork`.

        The changes of a pickled store or a child of `os.fork` are lost unless they are merged. The
        first change writes an empty object under the copy's id, so that the session's commit
        detects it.
        """
        check_key(key)
        if self._unasked and self.token is None and self._noticeable_in != os.getpid():
            self._noticeable_in = os.getpid()
            self.storage.create(self.keys.next("chunks"), b"")
        forked = self.frozen is None and self._forks_before != forks_made()
        if forked and self.token is not None and not self._unasked:
            with self.lock:  # a child may report; it does not see later changes
                self.flush()
                self.frozen = self.contents.changes.copy()

    @property
    def _unasked(self) -> bool:
        """Whether it is a copy that was not made with `fork`."""
        return self.pid != os.getpid() if self.origin is None else not self.origin.explicit

    @property
    def reports(self) -> bool:
        """Whether it is a copy that reports its changes to its session."""
        return self.token is not None and self._unasked

    def _settle(self, *packs: Pack) -> None:
        with self.lock:
            self.edits.packs.settle(packs, self.contents.changes)

    @contextmanager
    def packed(self) -> Iterator[tuple[ChangeSet, Sequence[Pack]]]:
        """The changes without staged chunks, and the packs to write for them.

        At the end of the block, written packs are settled; the chunks of the others stay staged.
        The lock is held for the whole block.
        """
        with self.lock:
            changes = self.contents.changes.copy()
            packs = self.edits.packs.all(changes)
            for pack in packs:
                pack.settle(changes)
            try:
                yield changes, packs
            finally:
                self._settle(*packs)

    def flush(self) -> None:
        """Write all staged chunks, so that other processes can read them; not durable."""
        with self.packed() as (_, packs):
            self.runtime.parallel(
                [partial(pack.write, self.storage, durable=False) for pack in packs]
            )

    def make_durable(self, inherited: Container[str]) -> None:
        """Make the chunk objects durable that were written, except the inherited ones.

        Whoever commits the changes then need not know their keys.
        """
        changes = self.contents.changes
        due = [key for key in changes.unsynced if key not in inherited]
        self.runtime.parallel([partial(self.storage.sync, part) for part in sync_parts(due)])
        changes.unsynced = [key for key in changes.unsynced if key in inherited]

    def _place(self, data: bytes | memoryview) -> ChunkRef:
        if len(data) <= self._inline_chunk_bytes:
            return InlineRef(bytes(data))
        if len(data) <= self.most_packed:
            return StagedRef.of(bytes(data))
        return native_ref(self.edits.new_chunk_key(), data)

    def delete(self, key: str) -> None:
        """Remove what is at the key, if anything."""
        self._before_change(key)
        path, name = document_path(key), split(key)[1]
        if self.reports:
            change_reported(self, key, path, None)
            return
        with self.lock:
            node = self.contents.node(path) if path is not None else None
            if path is not None and node is not None and name in node.documents:
                documents = self.edits.documents(path)
                del documents[name]
                self.edits.settle_node(path, documents, name)
                return
            chunk = self.contents.chunk_at(key)
            if chunk is not None:
                self.edits.unset(*chunk)
            elif self.contents.node(OPAQUE + key) is not None:
                self.edits.drop(OPAQUE + key)

    def delete_below(self, prefix: str) -> None:
        """Remove every key below the directory `prefix`, which ends with / or is empty."""
        self._before_change(prefix)
        if self.reports:
            refuse_in_copy(f"what is below {prefix!r} cannot be removed")
        with self.lock:
            top = prefix.removesuffix("/")
            for path, node in self.contents.within(top).items():
                if node.kind is not NodeKind.OPAQUE or path[1:].startswith(prefix):
                    self.edits.drop(path)
            for node in self.contents.above(top):
                if node.array is not None:
                    for key in list(self.contents.chunk_keys(node, node.array)):
                        if key.startswith(prefix):
                            self.delete(key)

    def put_table(self, path: str, grid: Box, table: ChunkTable) -> None:
        """Set a table of refs on the array at `path`, whose grid must be `grid`.

        Raises
        ------
        NotFoundError
            If the array no longer exists.
        """
        self._before_change(path)
        if self.reports:
            refuse_in_copy(f"many refs of /{path} cannot be set at once")
        with self.lock:
            node = self.contents.array_at(path)
            if node.array is None or node.array.grid != grid:
                raise InvalidArgumentError(
                    f"/{path} was changed by another thread meanwhile; set the refs again"
                )
            self._settle_staged(node)
            self.contents.changes.put_table(node.node_id, table)

    def settled_chunks(self, node: Node) -> ChunkTable | None:
        """All chunks of the node, after writing staged ones: a table would store those inline.

        Callers of this and of `put_chunks` hold the lock.
        """
        self._settle_staged(node)
        return self.contents.chunks(node)

    def _settle_staged(self, node: Node) -> None:
        staged = self.contents.changes.chunks.get(node.node_id, {}).values()
        if any(isinstance(ref, StagedRef) for ref in staged):
            self.flush()

    def put_chunks(self, node: Node, table: ChunkTable | None) -> None:
        """Replace all chunks of the array, which has at least one axis."""
        changes = self.contents.changes
        changes.forget(node.node_id)
        if table is not None:
            changes.put_table(node.node_id, table)
        if self.edits.is_stored(node):
            changes.truncated[node.node_id] = (0,) * len(node.array_meta.shape)


# --- moving nodes and chunks, without touching a byte of any chunk -------------------------------
#
# A node's chunks are known by its id, so a move changes paths only: the node and all that lies
# below it, opaque entries too, get new paths and keep their ids. Shifting and reindexing an array
# give its chunk refs new coordinates: everything stored is cut off, and the refs are recorded anew
# at their new places, so that whoever wrote to the array meanwhile is in conflict.


def move_node(workspace: Workspace, old: str, new: str) -> None:
    """Give the node at `old`, and all below it, its place at `new`."""
    old, new = node_path(old), node_path(new)
    with workspace.lock:
        above = {node.path: node for node in workspace.contents.above(new)}
        near = above | workspace.contents.within(old) | workspace.contents.within(new)
        workspace.edits.move(plan_move(near, old, new))


def shift_chunks(workspace: Workspace, path: str, offset: Iterable[int]) -> None:
    """Move all chunks of an array by that many chunks along each axis."""
    with workspace.lock:
        node, meta = _array(workspace, path)
        steps = _steps(offset)
        if steps is None or len(steps) != len(meta.shape):
            raise InvalidArgumentError(
                f"/{node.path} has {len(meta.shape)} axes: give a whole number of chunks for each, "
                f"not {offset!r}"
            )
        table = workspace.settled_chunks(node)
        if table is not None and any(steps):
            keep, coords = shifted(table.coords(), steps, meta.grid.hi)
            workspace.put_chunks(node, rearranged(table, keep, coords))


def _steps(offset: object) -> Coords | None:
    """The whole numbers of an offset; None if it is something else."""
    steps = tuple(offset) if isinstance(offset, Iterable) else (None,)
    whole = (isinstance(s, int | np.integer) and not isinstance(s, bool) for s in steps)
    return tuple(map(int, steps)) if all(whole) else None


def reindex_chunks(workspace: Workspace, path: str, places: Places) -> None:
    """Move the chunks of an array to where `places` says."""
    with workspace.lock:
        node, meta = _array(workspace, path)
        table = workspace.settled_chunks(node)
        before = np.zeros((0, len(meta.shape)), np.int64) if table is None else table.coords()
        name = f"/{node.path}"
        keep, coords = reindexed(before, places, meta.grid, name)
        if table is not None and not (keep.all() and (coords == before).all()):
            workspace.put_chunks(node, rearranged(table, keep, coords))


def _array(workspace: Workspace, path: str) -> tuple[Node, ArrayMeta]:
    node = workspace.contents.array_at(node_path(path))
    if not node.array_meta.shape:
        raise InvalidArgumentError(f"/{node.path} is a scalar: its chunk cannot be moved")
    return node, node.array_meta
