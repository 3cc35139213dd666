"""What is at Zarr keys, of a snapshot with changes laid over it.

Every key of a Zarr store is one of: a metadata document (a node), a chunk of an array (a ref of
that node), or an opaque entry (a node of its own with one chunk, whose path is the key behind a
slash, so that it can never be taken for a node's path).

Invariants:

- Reads return the session's own change, else the snapshot; nothing here changes anything.
- A key is a chunk of the array with the longest path that has a place for it.
- What a writer reads and has not written itself is noted, since its commit may depend on it.
- A reader that follows a branch retries a read once on the new head if its snapshot has expired.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Set
from operator import lt
from typing import Final, NamedTuple

from zarr_manifests.engine.edit.change_set import ChangeSet
from zarr_manifests.engine.history.follow import Follower, collected, expired
from zarr_manifests.engine.objects.chunks import SessionKeys
from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.engine.snapshot.read_ahead import RefsAhead
from zarr_manifests.engine.snapshot.view import SnapshotView, check_axes
from zarr_manifests.errors import InvalidArgumentError, ManifestsError, NotFoundError
from zarr_manifests.format.chunk_table import (
    ChunkRef,
    ChunkTable,
    InlineRef,
    NativeRef,
    Unset,
    VirtualRef,
)
from zarr_manifests.format.nodes import Node, NodeKind
from zarr_manifests.grid import Coords
from zarr_manifests.keys import ArrayMeta, document_path, join, split
from zarr_manifests.planning.tables.merge import Layer, fold, merge_layers
from zarr_manifests.runtime import ForkSafeLock

__all__ = ["OPAQUE", "Entry", "SessionView", "Unread", "check_key"]

type Entry = InlineRef | NativeRef | VirtualRef
"""What is at a key: a document is given as inline bytes."""

OPAQUE: Final = "/"
"""The path of an opaque entry is its key behind this."""


class _Nearest(NamedTuple):
    """The array in which chunks were found last, and what the nodes were then."""

    stored: Mapping[str, Node]
    changed: Mapping[str, Node | None]
    stamp: object
    node: Node
    prefix: str
    match: Callable[[str, int], re.Match[str] | None] | None
    """None if an array lies below the path of this one, so that it may have a place for a key."""
    end: Coords


class Unread(NamedTuple):
    """A chunk of which it takes a request to say where it is, and what it was looked up in.

    Without a chunk, nothing was looked up, since it is time to look for a newer snapshot.
    """

    view: SnapshotView | None = None
    changed: Mapping[str, Node | None] | None = None
    stamp: object = None
    chunk: tuple[Node, Coords] | None = None
    near: bool = False


class SessionView:
    """A snapshot and a change set, to read. Thread-safe.

    Parameters
    ----------
    context : ReadContext
        The repository.

    Attributes
    ----------
    view : SnapshotView
        The snapshot.
    keys : SessionKeys or None
        Names for new objects; without them nothing can be changed.
    changes : ChangeSet
        What was changed on the snapshot.
    follower : Follower or None
        Says when to look for a newer snapshot; only a reader has one.
    """

    view: SnapshotView
    keys: SessionKeys | None
    changes: ChangeSet

    def __init__(self, context: ReadContext) -> None:
        self.context = context
        self.lock = ForkSafeLock()
        self.follower: Follower | None = None
        self._stamp = object()  # another one after each change of a node
        self._found: Node | None = None
        self._nearest: _Nearest | None = None
        self._above: tuple[Mapping[str, Node], Set[str]] | None = None

    def start_at(self, view: SnapshotView, keys: SessionKeys | None) -> None:
        """Go on from this snapshot."""
        self.view = view
        self.keys = keys
        self._ahead = RefsAhead()

    # --- going on to what is newer -----------------------------------------------------------

    def look(self) -> None:
        """Go on to the branch's head, if the reader follows it and it is time to look."""
        if self.follower is not None and self.follower.due():
            self.follow()

    def follow(self) -> bool:
        """Go on to the branch's head; whether there was a newer one."""
        assert self.follower is not None
        view = self.follower.head(self.view)
        if view is self.view:
            return False
        self.start_at(view, self.keys)
        return True

    def guarded[R](self, call: Callable[[], R]) -> R:
        """Read, and once more if the snapshot has expired and the reader follows the branch.

        Raises
        ------
        SnapshotExpiredError
            If it has expired and the reader does not.
        FencedError
            If what is missing the session wrote itself, and a collection took it.
        """
        self.look()
        view = self.view
        try:
            return call()
        except ManifestsError as error:
            if not self.moved_on(view, error):
                raise
            return call()

    def moved_on(self, view: SnapshotView, error: ManifestsError) -> bool:
        """Whether there is a newer snapshot to try, since the one that was read has expired.

        Raises
        ------
        SnapshotExpiredError
            If it has expired and the reader does not follow a branch.
        FencedError
            If what is missing the session wrote itself, and a collection took it.
        """
        if self.view is not view:
            return True  # another read that failed has found the newer one
        gone = expired(self.context, view.snapshot_id, error)
        if gone is None:
            fenced = None if self.keys is None else collected(self.context, self.keys, error)
            if fenced is not None:
                raise fenced from error
            return False
        if self.follower is not None and (self.follow() or self.view is not view):
            return True
        raise gone from error

    # --- what is there -----------------------------------------------------------------------

    def node(self, path: str) -> Node | None:
        """The node at that path."""
        if path in self.changes.nodes:
            return self.changes.nodes[path]
        return self.view.nodes.get(path)

    def nodes(self) -> dict[str, Node]:
        """All nodes by path."""
        merged: dict[str, Node | None] = {**self.view.nodes, **self.changes.nodes}
        return {path: node for path, node in merged.items() if node is not None}

    def array_at(self, path: str) -> Node:
        """The array at that path, with or without a leading slash.

        Raises
        ------
        NotFoundError
            If there is none.
        """
        node = self.node(path.strip("/"))
        if node is None or node.array is None:
            known = sorted(f"/{n.path}" for n in self.nodes().values() if n.array is not None)
            listed = ", ".join(known[:10]) or "none"
            raise NotFoundError(f"there is no array {path!r}; there are: {listed}")
        return node

    def find(self, key: str) -> Entry | None:
        """What is at the key; None if nothing is."""
        if self.keys is None and (known := self._ahead.find(self.view, key)) is not None:
            return known
        view, chunk = self.view, self._nearby(key)
        if chunk is not None:
            return self._read_ref(view, chunk, near=True)
        found = self._look_up(key)
        return self._read_ref(view, found, near=False) if isinstance(found, tuple) else found

    def find_at_hand(self, key: str) -> Entry | Unread | None:
        """What is at the key, if that takes no request and no long work; else an `Unread` of it."""
        if self.follower is not None and self.follower.over:
            return Unread()
        if self.keys is None and (known := self._ahead.find(self.view, key)) is not None:
            return known
        view, changed, stamp = self.view, self.changes.nodes, self._stamp
        chunk = self._nearby(key)
        near = chunk is not None
        if chunk is None:
            found = self._look_up(key)
            if not isinstance(found, tuple):
                return found
            chunk = found
        if not self._knows(*chunk):
            return Unread(view, changed, stamp, chunk, near=near)
        return self._read_ref(view, chunk, near=near)

    def find_unread(self, key: str, unread: Unread) -> Entry | None:
        """What is at the key, of which `find_at_hand` gave this, after a look for what is newer."""
        self.look()
        same = unread.view is self.view and unread.changed is self.changes.nodes
        if unread.chunk is None or not same or unread.stamp is not self._stamp:
            return self.find(key)
        return self._read_ref(self.view, unread.chunk, near=unread.near)

    def _look_up(self, key: str) -> InlineRef | tuple[Node, Coords] | None:
        """The document at the key, or the array or opaque entry and the coordinate it stands for.

        None if there is nothing of the kind.
        """
        check_key(key)
        path = document_path(key)
        if path is not None:
            node, name = self.node(path), split(key)[1]
            if self.keys is not None and path not in self.changes.nodes:
                self.changes.reads.documents.add(path)
            if node is not None and name in node.documents:
                return InlineRef(node.documents[name])
        chunk = self._search(key)
        if chunk is None and (opaque := self.node(OPAQUE + key)) is not None:
            chunk = opaque, ()
        return chunk

    def _read_ref(
        self, view: SnapshotView, chunk: tuple[Node, Coords], *, near: bool
    ) -> ChunkRef | None:
        """Where the chunk is, noted as read; `view` is that in which it was looked up."""
        if self.keys is not None:
            self._note_read(*chunk)
            return self.ref(*chunk)
        ref = self.ref(*chunk)
        # Of another view the array would be another one; and of one that is not near, some chunks'
        # keys may be those of an array below it.
        if ref is not None and near and view is self.view:
            self._ahead.note(view, *chunk)
        return ref

    def _knows(self, node: Node, coords: Coords) -> bool:
        """Whether it takes no request, nor any long work, to say where the chunk is."""
        if self.changes.tables:  # some may have been written away
            return False
        changed = self.changes.get(node.node_id, coords)
        return changed is not None or self.view.knows(node.node_id, coords)

    def _note_read(self, node: Node, coords: Coords) -> None:
        """Note that a chunk is read, unless it is the writer's own: a commit may depend on it."""
        if self.changes.get(node.node_id, coords) is None:
            self.changes.reads.note(node.node_id, coords)

    def ref(self, node: Node, coords: Coords) -> ChunkRef | None:
        """Where a chunk of the node is; None if it is absent."""
        changes = self.changes
        if changes.chunks or changes.tables or changes.truncated:
            ref = changes.get(node.node_id, coords)
            if ref is not None:
                return None if isinstance(ref, Unset) else ref
            cut = changes.truncated.get(node.node_id)
            if cut is not None and any(c >= n for c, n in zip(coords, cut, strict=True)):
                return None
        return self.view.lookup(node.node_id, coords)

    def chunks(self, node: Node) -> ChunkTable | None:
        """All chunks of the node that are there; None if there is none."""
        stored = self.view.chunks(node.node_id)
        if stored is not None:
            check_axes(stored.box, len(node.array.shape) if node.array else 0)
        with self.lock:
            cut = self.changes.truncated.get(node.node_id)
            changes, layers = self.changes, self.changes.layers(node.node_id)
        if cut is None and not layers:
            return stored
        tables = tuple(map(changes.rows, layers))
        return fold([stored] if stored is not None else [], merge_layers([Layer(cut, tables)]))

    def chunk_at(self, key: str) -> tuple[Node, Coords] | None:
        """The array and coordinate of which the key is a chunk, whether it is there or not."""
        return self._nearby(key) or self._search(key)

    def _nearby(self, key: str) -> tuple[Node, Coords] | None:
        """The same if it is the array of the last chunks that were searched for, else None."""
        nearest = self._nearest
        if nearest is not None:
            stored, changed, stamp, node, prefix, match, end = nearest
            if (
                match is not None
                and stamp is self._stamp
                and changed is self.changes.nodes
                and stored is self.view.nodes
                and key.startswith(prefix)
                and (found := match(key, len(prefix)))
            ):
                coords = tuple(map(int, found.groups()))
                if all(map(lt, coords, end)):
                    return node, coords
        return None

    def _search(self, key: str) -> tuple[Node, Coords] | None:
        stamp = self._stamp  # before anything is looked at, since others may change it meanwhile
        changed, stored = self.changes.nodes, self.view.nodes
        end = len(key)
        while end > 0:
            end = key.rfind("/", 0, end)
            path = key[:end] if end > 0 else ""
            node = changed[path] if path in changed else stored.get(path)
            if node is not None and (meta := node.array) is not None:
                pattern = meta.chunk_keys.pattern(len(meta.shape))
                found = pattern.fullmatch(key, end + 1 if end > 0 else 0)
                coords = None if found is None else tuple(map(int, found.groups()))
                # `coords in meta.grid`, of coordinates of as many axes, none negative
                if coords is not None and all(map(lt, coords, meta.grid.hi)):
                    self._note_found(node, meta, stored, changed, stamp)
                    return node, coords
        return None

    def _note_found(
        self,
        node: Node,
        meta: ArrayMeta,
        stored: Mapping[str, Node],
        changed: Mapping[str, Node | None],
        stamp: object,
    ) -> None:
        """Note the array of two chunks one after another as most likely that of the next one."""
        again, self._found = self._found is node, node
        if not again or (
            (known := self._nearest) is not None
            and (known.node is node and known.stamp is stamp)
            and (known.changed is changed and known.stored is stored)
        ):
            return
        if self._above is None or self._above[0] is not stored:
            self._above = stored, _above_arrays(stored)
        prefix = node.path + "/" if node.path else ""
        nested = node.path in self._above[1] or any(
            path.startswith(prefix) and other is not node and other and other.array is not None
            for path, other in list(changed.items())
        )
        match = None if nested else meta.chunk_keys.pattern(len(meta.shape)).fullmatch
        self._nearest = _Nearest(stored, changed, stamp, node, prefix, match, meta.grid.hi)

    def keys_below(self, prefix: str) -> Iterator[str]:
        """All keys that start with `prefix`, in no particular order."""
        for path, node in self.nodes().items():
            if node.kind is NodeKind.OPAQUE:
                if path[1:].startswith(prefix):
                    yield path[1:]
                continue
            yield from (key for key in node.document_keys if key.startswith(prefix))
            below = path + "/" if path else ""
            if node.array and (below.startswith(prefix) or prefix.startswith(below)):
                for key in self._chunk_keys(node, node.array):
                    if key.startswith(prefix):
                        yield key

    def _chunk_keys(self, node: Node, meta: ArrayMeta) -> Iterator[str]:
        table = self.chunks(node)
        for coords in table.coords().tolist() if table is not None else ():
            yield join(node.path, meta.chunk_keys.encode(tuple(coords)))

    def children(self, prefix: str) -> set[str]:
        """The next segments of all keys below the directory `prefix` (ends with / or is empty)."""
        found = set()
        skip = len(prefix)
        for path, node in self.nodes().items():
            names = (path[1:],) if node.kind is NodeKind.OPAQUE else node.document_keys
            for name in names:
                if name.startswith(prefix):
                    found.add(name[skip:].partition("/")[0])
            below = path + "/" if path else ""
            if node.array is not None and prefix.startswith(below):
                for key in self._chunk_keys(node, node.array):
                    if key.startswith(prefix):
                        found.add(key[skip:].partition("/")[0])
        return found


def _above_arrays(nodes: Mapping[str, Node]) -> Set[str]:
    """Paths that an array lies below."""
    found: set[str] = set()
    for path, node in nodes.items():
        if node.array is not None:
            end = len(path)
            while end > 0:
                end = max(path.rfind("/", 0, end), 0)
                found.add(path[:end])
    return found


def check_key(key: str) -> None:
    """Refuse a key that would climb: no Zarr hierarchy has one, so it is a caller's mistake."""
    if (".." in key or "./" in key) and not {".", ".."}.isdisjoint(key.split("/")):
        raise InvalidArgumentError(f"key {key[:80]!r} is refused: it has a '.' or '..' segment")
