"""Reads Zarr keys from a snapshot with changes over it.

Every key of a Zarr store is a metadata document (of a node), a chunk of an array (a ref of its
node), or an opaque entry. An opaque entry is a node of its own with one chunk; its path is the key
after a slash, which no other node's path starts with.

Invariants:

- Reads return the session's own change, else the snapshot; nothing here changes anything.
- A key is a chunk of the array with the longest path whose grid contains it.
- A writer's reads of what it has not written itself are recorded, since its commit may depend on
  them.
- A reader that follows a branch retries a read once on the new head if its snapshot has expired.

What a session holds: its uncommitted changes, and the size of each array.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from itertools import batched, chain
from operator import lt
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from msgspec.structs import replace

from zarr_manifests.engine.ancestry import Follower, collected, expired
from zarr_manifests.engine.change_set import ChangeSet, ForkState, same_bytes
from zarr_manifests.engine.chunks import ChunkReader
from zarr_manifests.engine.objects import SessionKeys
from zarr_manifests.engine.read_ahead import RefsAhead
from zarr_manifests.engine.roots import Roots
from zarr_manifests.engine.totals import amount_of, grid_of, totals_of
from zarr_manifests.engine.view import Context, ReadContext, SnapshotView
from zarr_manifests.errors import InvalidArgumentError, ManifestsError
from zarr_manifests.format.chunk_table import (
    ChunkRef,
    ChunkTable,
    InlineRef,
    NativeRef,
    RefKind,
    StoredRef,
    Unset,
    VirtualRef,
)
from zarr_manifests.format.manifest import Node, NodeKind
from zarr_manifests.grid import Box, Coords
from zarr_manifests.keys import (
    V3_DOCUMENT,
    ArrayMeta,
    absolute,
    directory,
    document_path,
    is_inside,
    join,
    no_array,
    split,
)
from zarr_manifests.metrics import metered, place_of
from zarr_manifests.planning.components import Reads
from zarr_manifests.planning.merge import Layer, fold, merge_layers, within
from zarr_manifests.planning.tables import NOTHING, check_axes, sum_of
from zarr_manifests.progress import counted
from zarr_manifests.runtime import SYSTEM, ForkSafeLock, Runtime

if TYPE_CHECKING:
    from zarr_manifests.reports import Diff, Usage
    from zarr_manifests.storage import Storage

type Entry = InlineRef | NativeRef | VirtualRef
"""The value at a key; a document is given as inline bytes."""

OPAQUE: Final = "/"
"""The path of an opaque entry is this, followed by its key."""


class _Nearest(NamedTuple):
    """The array that the last chunks were found in, and the stamp at that time."""

    stamp: object
    node: Node
    prefix: str
    match: Callable[[str, int], re.Match[str] | None] | None
    """None if another array lies below this one's path, since a key may belong to that array."""
    end: Coords


class Unread(NamedTuple):
    """A chunk whose ref takes a request to find, and the stamp at which it was looked up.

    Without a chunk, nothing was looked up, since a look for a newer snapshot is due.
    """

    stamp: object = None
    chunk: tuple[Node, Coords] | None = None
    near: bool = False


class SessionView:
    """Reads a snapshot with a change set over it. Thread-safe.

    Parameters
    ----------
    context : ReadContext
        The repository.
    view : SnapshotView
        The snapshot.
    keys : SessionKeys, optional
        The object keys of a writer, whose reads are recorded.

    Attributes
    ----------
    changes : ChangeSet
        The changes over the snapshot.
    reader : ChunkReader
        Reads chunk bytes.
    follower : Follower or None
        Says when to look for a newer snapshot; only a reader has one.
    inline : bool
        Whether the storage answers at once, so that an event loop may call it directly.
    stamp : object
        Replaced at each change of a node, and when the snapshot or the changes are replaced.
    """

    view: SnapshotView
    keys: SessionKeys | None
    changes: ChangeSet
    reader: ChunkReader

    def __init__(
        self,
        context: ReadContext,
        view: SnapshotView,
        keys: SessionKeys | None = None,
        changes: ChangeSet | None = None,
    ) -> None:
        self.context = context
        self.lock = ForkSafeLock()
        self.follower: Follower | None = None
        self.inline = context.storage.capabilities.inline
        self._found: Node | None = None
        self._nearest: _Nearest | None = None
        self.start_at(view, keys, changes)

    def start_at(
        self, view: SnapshotView, keys: SessionKeys | None = None, changes: ChangeSet | None = None
    ) -> None:
        """Start from this snapshot, with these changes or none."""
        self.keys = keys
        self._ahead = RefsAhead(self.context.runtime)
        self.rebase(view, ChangeSet() if changes is None else changes)

    def rebase(self, view: SnapshotView, changes: ChangeSet) -> None:
        """Replace the snapshot and the changes."""
        self.stamp = object()  # also before, since other threads may look something up meanwhile
        self.view, self.changes = view, changes
        self.reader = ChunkReader(self.context, view.snapshot_id)
        self.stamp = object()

    # --- following a branch ------------------------------------------------------------------

    def look(self) -> None:
        """Move to the branch's head, if the reader follows a branch and a look is due."""
        if self.follower is not None and self.follower.due():
            self.follow()

    def follow(self) -> bool:
        """Move to the branch's head; whether it was newer."""
        assert self.follower is not None
        view = self.follower.head(self.view)
        if view is self.view:
            return False
        self.start_at(view)
        return True

    def guarded[R](self, call: Callable[[], R]) -> R:
        """Call `call`; retry once on the new head if the snapshot expired and the reader follows.

        Raises
        ------
        SnapshotExpiredError
            If the snapshot has expired and the reader follows no branch.
        FencedError
            If a collection deleted an object that the session itself wrote.
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
        """Whether the snapshot has expired and there is a newer one to retry on.

        Raises
        ------
        SnapshotExpiredError
            If the snapshot has expired and the reader follows no branch.
        FencedError
            If a collection deleted an object that the session itself wrote.
        """
        if self.view is not view:
            return True  # another thread has moved on already
        better = better_error(self.context, view.snapshot_id, self.keys, error)
        if better is None:
            return False
        if self.follower is not None and (self.follow() or self.view is not view):
            return True
        raise better from error

    # --- lookup ------------------------------------------------------------------------------

    def node(self, path: str) -> Node | None:
        """The node at that path."""
        if path in self.changes.nodes:
            return self.changes.nodes[path]
        return self.view.nodes.find(path)

    def nodes(self) -> dict[str, Node]:
        """All nodes by path."""
        merged: dict[str, Node | None] = {**self.view.nodes, **self.changes.nodes}
        return {path: node for path, node in merged.items() if node is not None}

    def below(self, start: str) -> Iterator[Node]:
        """The nodes whose paths start with `start`, which ends with a slash or is empty."""
        due = [start]
        while due:
            at = due.pop()
            paths = self._paths_in(at)
            for path in paths if at else ("", *paths):
                node = self.node(path)
                if node is not None:
                    yield node
            stored, changed = self.view.paths, self.changes.paths
            due += {**stored.directories(at), **changed.directories(at)}

    def above(self, path: str) -> Iterator[Node]:
        """The nodes above the path, nearest first."""
        end = len(path)
        while end > 0:
            end = max(path.rfind("/", 0, end), 0)
            node = self.node(path[:end])
            if node is not None:
                yield node

    def _paths_in(self, start: str) -> Iterable[str]:
        """Paths right in this directory, also of deleted nodes."""
        # Copied, since another thread may change nodes meanwhile.
        return {**self.view.paths.paths(start), **self.changes.paths.paths(start)}

    def _unlisted_in(self, start: str) -> Iterable[str]:
        """Directories right in this directory that may have nodes and no node at their own path."""
        changed = self.changes.paths
        gone = [p for p in changed.paths(start) if self.changes.nodes.get(p) is None]
        found = {**self.view.paths.unlisted(start), **changed.directories(start)}
        return {**found, **{directory(path): None for path in gone}}

    def members(self, path: str) -> dict[str, Node]:
        """The groups and arrays right below the group at the path, by path."""
        paths = self._paths_in(directory(path))
        return {p: node for p in paths if (node := self.node(p)) is not None}

    def arrays_in(self, path: str) -> dict[str, Node]:
        """The arrays right below the group at the path, by name.

        As in Zarr, only those of its format; all of them if there is no document of the group.
        """
        group = self.node(path)
        members = {split(at)[1]: node for at, node in self.members(path).items() if node.array}
        if group is None:
            return members
        is_v3 = V3_DOCUMENT in group.documents
        return {n: node for n, node in members.items() if (V3_DOCUMENT in node.documents) == is_v3}

    def within(self, path: str) -> dict[str, Node]:
        """The node at the path and all nodes and opaque entries below it, by path."""
        start = directory(path)
        at = [node for p in (path, OPAQUE + path) if (node := self.node(p)) is not None]
        return {node.path: node for node in (*at, *self.below(start), *self.below(OPAQUE + start))}

    def array_at(self, path: str) -> Node:
        """The array at that path, with or without a leading slash.

        Raises
        ------
        NotFoundError
            If there is none.
        """
        node = self.node(path.strip("/"))
        if node is None or node.array is None:
            raise no_array(path, (p for p, n in self.nodes().items() if n.array is not None))
        return node

    def find(self, key: str) -> Entry | None:
        """The value at the key, or None."""
        if self.keys is None and (known := self._ahead.find(self.view, key)) is not None:
            return known
        view, near = self.view, self._nearby(key)
        found = near or self._look_up(key)
        return self._read_ref(view, found, near=bool(near)) if isinstance(found, tuple) else found

    def find_at_hand(self, key: str) -> Entry | Unread | None:
        """The value at the key if it takes no request and little work to find, else an `Unread`."""
        if self.follower is not None and self.follower.over:
            return Unread()
        if self.keys is None and (known := self._ahead.find(self.view, key)) is not None:
            return known
        stamp, view = self.stamp, self.view
        chunk = self._nearby(key)
        near = chunk is not None
        if chunk is None:
            if not all(map(view.pages.is_here, _paths_of(key))):
                return Unread()
            found = self._look_up(key)
            if not isinstance(found, tuple):
                return found
            chunk = found
        if not self._knows(*chunk):
            return Unread(stamp, chunk, near=near)
        return self._read_ref(view, chunk, near=near)

    def fetch_ahead(self, key: str) -> None:
        """Begin to fetch the chunks after this one, if the ones before were read in order."""
        if self.keys is None and (refs := self._ahead.due(self.view, key)):
            self.reader.fetch_ahead(refs)

    def find_unread(self, key: str, unread: Unread) -> Entry | None:
        """The value at the key, continuing from the `Unread` that `find_at_hand` returned."""
        self.look()
        if unread.chunk is None or unread.stamp is not self.stamp:
            return self.find(key)
        return self._read_ref(self.view, unread.chunk, near=unread.near)

    def _look_up(self, key: str) -> InlineRef | tuple[Node, Coords] | None:
        """The document at the key, or the node and coordinate of its chunk, or None."""
        check_key(key)
        path = document_path(key)
        if path is not None:
            node, name = self.node(path), split(key)[1]
            if self.keys is not None and path not in self.changes.nodes:
                self.changes.reads.documents.add(path)
            if node is not None and name in node.documents:
                return InlineRef(node.documents[name])
        # The name of a document is no name of a chunk.
        chunk = self._search(key) if path is None else None
        if chunk is None and (opaque := self.node(OPAQUE + key)) is not None:
            chunk = opaque, ()
        return chunk

    def _read_ref(
        self, view: SnapshotView, chunk: tuple[Node, Coords], *, near: bool
    ) -> ChunkRef | None:
        """The chunk's ref, recorded as read; `view` is the snapshot the chunk was looked up in."""
        if self.keys is not None:
            self.note_read(*chunk)
        ref = self.ref(*chunk)
        # In another view the node may differ. If the chunk is not near, a nested array may own some
        # of the array's chunk keys.
        if self.keys is None and ref is not None and near and view is self.view:
            self._ahead.note(view, *chunk)
        return ref

    def _knows(self, node: Node, coords: Coords) -> bool:
        """Whether the chunk's ref can be found without a request and with little work."""
        if self.changes.tables:  # some may be spilled
            return False
        changed = self.changes.get(node.node_id, coords)
        return changed is not None or self.view.knows(node.node_id, coords)

    def note_read(self, node: Node, coords: Coords) -> None:
        """Record that a chunk was read, unless the writer wrote it: its commit may depend on it."""
        if self.changes.get(node.node_id, coords) is None:
            self.changes.reads.note(node.node_id, coords)

    def ref(self, node: Node, coords: Coords) -> ChunkRef | None:
        """The ref of a chunk of the node; None if it is absent."""
        changes = self.changes
        if changes.chunks or changes.tables or changes.truncated:
            ref = changes.get(node.node_id, coords)
            if ref is not None:
                return None if isinstance(ref, Unset) else ref
            cut = changes.truncated.get(node.node_id)
            if cut is not None and any(c >= n for c, n in zip(coords, cut, strict=True)):
                return None
        return self.view.lookup(node.node_id, coords)

    def chunks(self, node: Node, box: Box | None = None) -> ChunkTable | None:
        """The existing chunks of the node, or those in the box; None if there are none."""
        node_id = node.node_id
        with self.lock:
            view, changes = self.view, self.changes
            cut, layers = changes.truncated.get(node_id), changes.layers(node_id, box)
        stored = view.chunks(node_id) if box is None else view.chunks_in(node_id, box)
        if stored is not None:
            check_axes(stored.box, len(node.array.shape) if node.array else 0)
        if cut is None and not layers:
            return stored
        tables = [*map(changes.rows, layers)]
        if box is not None:
            tables = [within(table, box) for table in tables]
        changed = merge_layers([Layer(cut, tuple(tables))])
        return fold([] if stored is None else [stored], changed)

    def chunk_at(self, key: str) -> tuple[Node, Coords] | None:
        """The array and coordinate that the chunk key names; the chunk may be absent."""
        return self._nearby(key) or self._search(key)

    def _nearby(self, key: str) -> tuple[Node, Coords] | None:
        """Like `chunk_at`, but only for the array that the last chunks were found in."""
        nearest = self._nearest
        if nearest is not None:
            stamp, node, prefix, match, end = nearest
            if (
                match is not None
                and stamp is self.stamp
                and key.startswith(prefix)
                and (found := match(key, len(prefix)))
            ):
                coords = tuple(map(int, found.groups()))
                if all(map(lt, coords, end)):
                    return node, coords
        return None

    def _search(self, key: str) -> tuple[Node, Coords] | None:
        stamp = self.stamp  # read first, since other threads may change it meanwhile
        changed, stored = self.changes.nodes, self.view.nodes
        end = len(key)
        while end > 0:
            end = key.rfind("/", 0, end)
            path = key[:end] if end > 0 else ""
            node = changed[path] if path in changed else stored.find(path)
            if node is not None and (meta := node.array) is not None:
                pattern = meta.chunk_keys.pattern(len(meta.shape))
                found = pattern.fullmatch(key, end + 1 if end > 0 else 0)
                coords = None if found is None else tuple(map(int, found.groups()))
                # `coords in meta.grid`, of coordinates of as many axes, none negative
                if coords is not None and all(map(lt, coords, meta.grid.hi)):
                    self._note_found(node, meta, stamp)
                    return node, coords
        return None

    def has_arrays_below(self, node: Node) -> bool:
        """Whether keys below the array may be those of another array, whose path is longer."""
        below = self.below(directory(node.path))
        return any(other.array is not None and other is not node for other in below)

    def _note_found(self, node: Node, meta: ArrayMeta, stamp: object) -> None:
        """Remember the array if two chunks in a row are its: the next one most likely is too."""
        again, self._found = self._found is node, node
        known = self._nearest
        if not again or (known is not None and known.node is node and known.stamp is stamp):
            return
        match = None
        if not self.has_arrays_below(node):
            match = meta.chunk_keys.pattern(len(meta.shape)).fullmatch
        self._nearest = _Nearest(stamp, node, directory(node.path), match, meta.grid.hi)

    def keys_below(self, prefix: str) -> Iterator[str]:
        """All keys that start with `prefix`, in no particular order."""
        start = prefix[: prefix.rfind("/") + 1]
        around = [*self.below(start), *self.below(OPAQUE + start), *self.above(start)]
        for path, node in {node.path: node for node in around}.items():
            if node.kind is NodeKind.OPAQUE:
                if path[1:].startswith(prefix):
                    yield path[1:]
                continue
            yield from (key for key in node.document_keys if key.startswith(prefix))
            below = directory(path)
            if node.array and (below.startswith(prefix) or prefix.startswith(below)):
                for key in self.chunk_keys(node, node.array):
                    if key.startswith(prefix):
                        yield key

    def chunk_keys(self, node: Node, meta: ArrayMeta) -> Iterator[str]:
        """The keys of the node's existing chunks."""
        table = self.chunks(node)
        for coords in table.coords().tolist() if table is not None else ():
            yield join(node.path, meta.chunk_keys.encode(tuple(coords)))

    def children(self, prefix: str, *, chunks: bool = True) -> set[str]:
        """The next segments of all keys below `prefix`, which ends with / or is empty.

        Without `chunks`, the keys of chunks are left out.
        """
        found: set[str] = set()
        for start in (prefix, OPAQUE + prefix):
            found.update(p[len(start) :] for p in self._paths_in(start) if self.node(p))
            for inner in self._unlisted_in(start):
                name = inner[len(start) : -1]
                if inner != OPAQUE and name not in found and any(self.below(inner)):
                    found.add(name)
        for node in self.above(prefix) if prefix else filter(None, [self.node("")]):
            if directory(node.path) == prefix:
                found.update(node.documents)
            if chunks and node.array is not None:
                for key in self.chunk_keys(node, node.array):
                    if key.startswith(prefix):
                        found.add(key[len(prefix) :].partition("/")[0])
        return found


def better_error(
    context: ReadContext, snapshot_id: str, keys: SessionKeys | None, error: ManifestsError
) -> ManifestsError | None:
    """What says more than the error: that the snapshot has expired, or the session was too slow."""
    gone = expired(context, snapshot_id, error)
    return gone if gone is not None or keys is None else collected(context, keys, error)


def _paths_of(key: str) -> Iterator[str]:
    """The paths of all nodes that may have the key."""
    yield OPAQUE + key
    path = document_path(key)
    if path is not None:
        yield path
        return
    end = len(key)
    while end > 0:
        end = max(key.rfind("/", 0, end), 0)
        yield key[:end]


def unrecorded(contents: SessionView) -> SessionView:
    """The same contents, whose reads are not recorded: no commit depends on them."""
    with contents.lock:
        changes = replace(contents.changes, reads=Reads())
        return SessionView(contents.context, contents.view, contents.keys, changes)


def same_chunk(contents: SessionView, node: Node | None, one: StoredRef, other: StoredRef) -> bool:
    """Whether both have the same bytes, which are read where checksums cannot tell.

    Virtual chunks then have to be the same range of the same file.
    """
    if one == other or not same_bytes(one, other):
        return one == other
    if node is None or node.array is None or not node.array.checks_itself:
        return True
    return contents.reader.alike(one, other)


def check_key(key: str) -> None:
    """Refuse a key with a `.` or `..` segment, which no Zarr hierarchy has."""
    if (".." in key or "./" in key) and not {".", ".."}.isdisjoint(key.split("/")):
        raise InvalidArgumentError(f"key {key[:80]!r} is refused: it has a '.' or '..' segment")


def node_path(path: object) -> str:
    """A path as nodes have it: without slashes at its ends.

    Raises
    ------
    InvalidArgumentError
        If it is no text, or no such path.
    """
    if not isinstance(path, str):
        raise InvalidArgumentError(f"{path!r} is not the path of a group or array")
    stripped = path.strip("/")
    if stripped and not is_inside(stripped):
        raise InvalidArgumentError(f"{path[:80]!r} is not the path of a group or array")
    return stripped


# --- contents -------------------------------------------------------------------------------------

_AT_ONCE: Final = 256
_NAMED: Final = 3


def status_of(contents: SessionView) -> Diff:
    """The uncommitted changes; no chunk is read."""
    from zarr_manifests.reports import Diff  # rarely needed, and many classes

    with contents.lock:
        view, changes = contents.view, contents.changes.copy()
    return Diff.of(changes.on(view.nodes, view.by_id))


def summary(contents: SessionView) -> str:
    """What the uncommitted changes are about, in one line: the message of a commit without one."""
    with contents.lock:
        changes = contents.changes
        paths = {node.node_id: path for path, node in contents.nodes().items()}
        written = {paths[node_id] for node_id in changes.touched() if node_id in paths}
        found = sorted(map(absolute, changes.nodes.keys() | written))
    if not found:
        return "no changes"
    more = len(found) - _NAMED
    return f"change {', '.join(found[:_NAMED])}" + (f" and {more:,} more" if more > 0 else "")


def usage_of(contents: SessionView, path: str | None = None) -> Usage:
    """Exact chunks and bytes of every array and opaque entry, or of one array, by where they are.

    No chunk is read. `progress` is told of how many of these.
    """
    from zarr_manifests.reports import Usage  # rarely needed, and many classes

    if path is None:
        nodes = [node for node in contents.nodes().values() if node.kind is not NodeKind.GROUP]
    else:
        nodes = [contents.array_at(path)]
    calls = (partial(contents.chunks, node) for node in nodes)
    tables = chain.from_iterable(map(contents.context.runtime.parallel, batched(calls, _AT_ONCE)))
    told = counted("reading refs of arrays", tables, len(nodes))
    known = totals_of(contents.view)
    growth = {array.path: array.growth for array in known.arrays}
    arrays = []
    for node, table in zip(nodes, told, strict=True):
        at = absolute(node.path)
        kinds = RefKind.INLINE, RefKind.NATIVE, RefKind.VIRTUAL
        inline, native, virtual = (amount_of(table, kind) for kind in kinds)
        whole = sum_of((inline, native, virtual))
        grown = growth.get(at, NOTHING)
        arrays.append(Usage(at, whole, grown, grid_of(node), inline, native, virtual))
    arrays.sort(key=lambda array: array.path)
    total = sum_of(array.total for array in arrays)
    whole_growth = known.growth if path is None else arrays[0].growth
    of = known.snapshot_id
    return Usage("", total, whole_growth, arrays=tuple(arrays), snapshot_id=of)


# --- snapshots that travel to other processes -----------------------------------------------------

_VIEWS: OrderedDict[tuple[Hashable, str], SnapshotView] = OrderedDict()
_VIEWS_KEPT: Final = 8
_VIEWS_LOCK = ForkSafeLock()


def freeze_reader(contents: SessionView) -> ForkState:
    """The snapshot as a read-only copy that can be pickled."""
    context = contents.context
    return ForkState(
        context.repository_id,
        cast("Storage", context.storage),  # pickled whole: whoever unpickles it opens it anew
        context.config,
        contents.view.ref,
        contents.view.snapshot.base,
        containers=context.containers,
        cache=context.cache,
    )


def revive_reader(state: ForkState, runtime: Runtime = SYSTEM) -> SessionView:
    """The snapshot of the copied state, to read."""
    return SessionView(*revived(state, runtime))


def revived(state: ForkState, runtime: Runtime) -> tuple[Context, SnapshotView]:
    """The repository of a copied state, and its snapshot."""
    storage = metered(state.storage)
    context = Context.of(
        state.repository_id,
        storage,
        runtime,
        Roots(storage, runtime),
        state.config,
        state.containers,
        state.cache,
    )
    return context, _view(context, state)


def _view(context: ReadContext, state: ForkState) -> SnapshotView:
    """The snapshot, opened once per process for all copies of it."""
    place = (place_of(state.storage), state.head.key)
    with _VIEWS_LOCK:
        view = _VIEWS.get(place)
        if view is not None:
            _VIEWS.move_to_end(place)
            return view
    view = context.open_view(state.head, state.base)
    with _VIEWS_LOCK:
        _VIEWS[place] = view
        if len(_VIEWS) > _VIEWS_KEPT:
            _VIEWS.popitem(last=False)
    return view
