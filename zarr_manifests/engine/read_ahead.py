"""Refs of the chunks that are likely to be read next, when chunks are read in order.

A lookup takes longer than a read of a few KB from the page cache, especially if threads share the
chunks of an array, since they contend for the same objects. So once some chunks of an array were
read in C order, the refs of the next ones are made by key in one vectorized step.

Invariants:

- Only for readers, since a view never changes. Refs are kept for one view, and equal the results of
  its lookups.
- A lookup waits for nothing that is fetched for it. Where bytes are fetched ahead, so are tables
  with their refs, in the background; else no table is.
- At most as many refs are made in vain as were used before: windows double while they are used up.
  Where bytes are fetched ahead, the next window is made in the middle of one, and is smaller at
  first: up to `MOST` chunks, three quarters are in vain at most, or 96 chunks if that is more, and
  one and a half times later.
- At most two windows are kept, each of `MOST` or `MOST_FAR` refs; the older one is for threads that
  lag behind.

Thread-safe without a lock: state is replaced as a whole, and losing a window changes no result.

Manifests fetched in the background, before they are needed
-----------------------------------------------------------

Candidates are the manifests with leaves of the arrays that `preload.arrays` names (by default every
CF coordinate), and the live deltas with chunks of these arrays, since a lookup needs both.

They are fetched through `Objects`: a read that needs a manifest in flight waits for that fetch, and
a preload does not repeat a fetch of a read. A few *lanes* work on the plan: each background call
fetches one object and then schedules the next call.

Invariants: a preload raises no errors, since a read that needs the object raises its own; after
`cancel` no fetch begins; at most the fetches in flight delay the interpreter's exit, since a
runtime that shuts down accepts no further calls.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import Final, NamedTuple

from zarr_manifests.config.manifest_sets import Preload
from zarr_manifests.engine.objects import ObjectReader
from zarr_manifests.engine.view import ReadContext, SnapshotView
from zarr_manifests.errors import ManifestsError
from zarr_manifests.format.chunk_table import NativeRef, VirtualRef
from zarr_manifests.format.manifest import Delta, Manifest, Node, Part
from zarr_manifests.format.records import BlobRef
from zarr_manifests.grid import Coords
from zarr_manifests.keys import absolute, join
from zarr_manifests.runtime import Runtime

MOST: Final = 256
MOST_FAR: Final = 512
"""The same where bytes are fetched ahead, too."""
_BEGINS: Final = 4
"""Number of chunks that have to be read in order first."""
_FETCHES: Final = 32
"""Number of chunks that have to be read in order before bytes are fetched ahead."""
_LEAST_FAR: Final = 64
"""Number of chunks whose bytes are fetched ahead first."""
_RESTS: Final = 60
"""Number of further chunks after a window was useless, or could not be made."""
_NEAR: Final = 8
"""Threads that share the chunks of an array read them in nearly their order. So many chunks that a
run has passed already do not end it."""


class _Run(NamedTuple):
    """Chunks that were read in order: the node, how many, the next one, and how many came late."""

    node_id: bytes
    length: int
    next: int
    late: int = 0


class _Window(NamedTuple):
    """The newest refs made ahead: of which node, and the key at which to make the next ones."""

    node: Node
    due: str
    """The key in the middle, or the last one if the tables for more have to be fetched."""
    used: int
    """Chunks of the run up to the middle."""
    last: Coords
    reach: int
    """Chunks of the run up to the last one."""


class RefsAhead:
    """The refs that one reader is likely to ask for next."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._kept: tuple[SnapshotView | None, dict[str, NativeRef | VirtualRef]] = None, {}
        self._newest: dict[str, NativeRef | VirtualRef] = {}
        self._run = _Run(b"", 0, 0)
        self._window: _Window | None = None
        self._asked = 0

    def find(self, view: SnapshotView, key: str) -> NativeRef | VirtualRef | None:
        """The ref of the key in that view, if it is known already."""
        of, refs = self._kept
        return refs.get(key) if of is view else None

    def note(self, view: SnapshotView, node: Node, coords: Coords) -> None:
        """Note that this chunk of the view was looked up, exists, and was not known."""
        run = self._run
        if node.array is None:
            return
        at = node.array.grid.ravel_one(coords)
        ahead = at - run.next if run.node_id == node.node_id else _NEAR
        if -run.length <= ahead < 0 and run.late < _NEAR:  # its lookup has taken a while
            self._run = run._replace(late=run.late + 1)
            return
        follows = 0 <= ahead < _NEAR
        length = run.length + 1 if follows else 1
        self._asked = self._asked if follows else 0
        self._run = _Run(node.node_id, length, at + 1)
        if length < _BEGINS:
            return
        most = min(length, MOST)
        while (made := self._make(view, node, coords, length, most)) is None and most > _BEGINS:
            most //= 4  # the tables of the nearest ones are in memory
        if not made:
            self._run = _Run(node.node_id, -_RESTS, at + 1)

    def due(self, view: SnapshotView, key: str) -> Collection[NativeRef | VirtualRef]:
        """The refs whose bytes should be fetched now that this chunk is read, each told once.

        In the middle of a window the next one is made, so that its bytes come in time.
        """
        window = self._window
        self._asked += 1
        if window is None or key != window.due or self._kept[0] is not view:
            return ()
        used = window.used
        if 8 * self._asked < 7 * used:  # some of them are asked for, here and there
            return ()
        least = _LEAST_FAR if used >= _FETCHES else 0
        most = min(used if used >= MOST else max(used // 2, least), MOST_FAR)
        made = self._make(view, window.node, window.last, window.reach, most)
        if used < _FETCHES:
            return ()
        if made is None and key != (end := _key_of(window.node, window.last)):
            self._fetch(view, window.node, window.last, most)
            self._window = window._replace(due=end)
        return self._newest.values() if made else ()

    def _fetch(self, view: SnapshotView, node: Node, coords: Coords, most: int) -> None:
        """Begin to fetch the tables that have the refs after this chunk."""
        grid = node.array_meta.grid

        def run() -> None:
            with suppress(ManifestsError):  # who reads a chunk gets the error
                view.following(node.node_id, coords, most, grid, fetch=True)

        with suppress(RuntimeError):  # no more threads: the program is ending
            self._runtime.background(run)

    def _make(
        self, view: SnapshotView, node: Node, coords: Coords, reach: int, most: int
    ) -> bool | None:
        """Make the refs after this chunk, the last of so many in order; whether there are any.

        None if their tables have to be fetched.
        """
        self._window = None
        grid = node.array_meta.grid
        following = view.following(node.node_id, coords, most, grid)
        if not following:
            return None if following is None else False
        new = {_key_of(node, where): ref for where, ref in following}
        older = self._newest if self._kept[0] is view else {}
        self._newest, self._kept = new, (view, {**older, **new})
        half, last = len(following) // 2, following[-1][0]
        self._run = _Run(node.node_id, reach + len(following), grid.ravel_one(last) + 1)
        middle = _key_of(node, following[half][0])
        self._window = _Window(node, middle, reach + half, last, reach + len(following))
        return True


def _key_of(node: Node, coords: Coords) -> str:
    return join(node.path, node.array_meta.chunk_keys.encode(coords))


# --- manifests of coordinates -------------------------------------------------------------------


_LANES: Final = 16  # of the threads that reads use too


class SnapshotPreload:
    """The preload of one snapshot. Thread-safe.

    Parameters
    ----------
    context : ReadContext
        The repository, whose configuration says what to preload.
    view : SnapshotView
        The snapshot.
    """

    def __init__(self, context: ReadContext, view: SnapshotView) -> None:
        self._objects, self._runtime = context.objects, context.runtime
        self._options = context.config.chunk_manifests.preload
        self._view: SnapshotView | None = view
        self._cancelled = False

    def start(self) -> None:
        """Start, unless everything that could be fetched is here already."""
        view = self._view
        if view is not None and self._options.max_manifests and self._any_is_elsewhere(view):
            self._soon(self._run)

    def cancel(self) -> None:
        """Fetch nothing more. Takes no lock, since it may be called during garbage collection."""
        self._cancelled = True
        self._view = None

    def cancel_with(self, owner: object) -> None:
        """Cancel when `owner` is garbage collected; neither keeps the other in memory."""
        cancel = weakref.WeakMethod(self.cancel)
        weakref.finalize(owner, _call, cancel).atexit = False

    def _any_is_elsewhere(self, view: SnapshotView) -> bool:
        """Whether anything may have to be fetched; a quick check before planning."""
        any_axes = self._options.arrays is not None  # coordinates have one
        return any(
            ref.copy is None
            and (any_axes or any(len(part.box.lo) == 1 for part in parts))
            and self._objects.recall(ref, _kind(ref)) is None
            for ref, parts in _tables_of(view)
        )

    def _run(self) -> None:
        """Fetch what is planned."""
        view, self._view = self._view, None
        if view is None:
            return
        with suppress(ManifestsError):  # the snapshot is damaged; a read will raise that
            due = deque(_plan(self._objects, self._options, view))
            for _ in range(min(_LANES, len(due))):
                self._soon(partial(self._fetch, due))

    def _fetch(self, due: deque[BlobRef]) -> None:
        """Fetch one object, and schedule the next fetch."""
        with suppress(IndexError, ManifestsError, OSError):
            ref = due.popleft()
            if not self._cancelled:
                self._objects.load(ref, _kind(ref))
        if due and not self._cancelled:
            self._soon(partial(self._fetch, due))

    def _soon(self, call: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # no more threads: the program is ending
            self._runtime.background(call)


def _tables_of(view: SnapshotView) -> Iterator[tuple[BlobRef, Sequence[Part]]]:
    """All objects with chunk tables that did not come with the snapshot, and their tables."""
    # A preload loads no pages: each has copies of small ones.
    for ref in view.pages.manifests_here():
        yield ref.blob, ref.parts
    for at, entry in enumerate(view.snapshot.deltas):
        if entry.embedded and at not in view.opening:
            yield entry.log, entry.embedded
        for ref in entry.manifests:
            yield ref.blob, ref.parts


def _kind(ref: BlobRef) -> type[Delta] | type[Manifest]:
    return Delta if ref.key.startswith("deltas/") else Manifest


def _plan(objects: ObjectReader, options: Preload, view: SnapshotView) -> list[BlobRef]:
    here = view.pages.manifests_here()
    known = {part.node_id for ref in here for part in ref.parts} | view.touched()
    # Of thousands of arrays few are coordinates, and only these are examined further.
    wanted = {
        node.node_id
        for node in view.nodes.here()
        if node.node_id in known and node.array is not None
        if options.arrays is not None or node.array.is_coordinate(node.path)
        if options.arrays is None or options.matches(absolute(node.path))
    }
    tables = (
        (ref, parts)
        for ref, parts in _tables_of(view)
        if ref.copy is None and objects.recall(ref, _kind(ref)) is None
    )
    return plan_preload(options, wanted, tables)


def plan_preload(
    options: Preload, wanted: Collection[bytes], tables: Iterable[tuple[BlobRef, Sequence[Part]]]
) -> list[BlobRef]:
    """Choose objects with chunk tables of wanted nodes: the smallest, within the limits.

    Examples
    --------
    >>> from zarr_manifests.config.manifest_sets import Preload
    >>> from zarr_manifests.engine.read_ahead import plan_preload
    >>> from zarr_manifests.format.records import BlobRef
    >>> from zarr_manifests.format.manifest import Part
    >>> from zarr_manifests.grid import Box
    >>> blob = BlobRef("manifests/000000000001-0123456789abcdef01234567/1", 100, 0)
    >>> time = Part(b"time" + bytes(8), Box((0,), (3,)), 3)
    >>> len(plan_preload(Preload(), {time.node_id}, [(blob, [time])]))
    1
    """
    found = {}
    for blob, parts in tables:
        refs = sum(part.count for part in parts)
        if refs <= options.max_manifest_size and any(part.node_id in wanted for part in parts):
            found[blob.key] = (refs, blob.length, blob.key), blob
    ordered = sorted(found.values(), key=itemgetter(0))
    return [blob for _, blob in ordered[: options.max_manifests]]


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    alive = method()
    if alive is not None:
        alive()
