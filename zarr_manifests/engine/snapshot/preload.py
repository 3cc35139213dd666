"""Manifests fetched in the background, before they are needed.

Candidates are the manifests with leaves of the arrays that `preload.arrays` names (by default every
CF coordinate), and the live deltas with chunks of these arrays, since a lookup needs both.

They are fetched through `Objects`: a read that needs a manifest in flight waits for that fetch, and
a preload does not repeat a fetch of a read. A few *lanes* work on the plan: each background call
fetches one object and then schedules the next call.

Invariants: a preload raises no errors, since a read that needs the object raises its own; after
`cancel` no fetch begins; at most the fetch in flight delays the interpreter's exit, since a runtime
that shuts down accepts no further calls.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Final

from zarr_manifests.config.manifest_sets import Preload
from zarr_manifests.engine.objects.metadata import ObjectReader
from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import ManifestsError
from zarr_manifests.format.delta import Delta
from zarr_manifests.format.manifest import Manifest, Part
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.root import Root
from zarr_manifests.keys import absolute
from zarr_manifests.runtime import ForkSafeLock, Runtime, one_by_one

_LOG = logging.getLogger(__name__)
_LANES: Final = 16  # of the threads that reads use too


class SnapshotPreload:
    """The preload of one snapshot. Thread-safe.

    Parameters
    ----------
    objects : ObjectReader
        Fetches the objects.
    runtime : Runtime
        Runs the background calls.
    options : config.manifest_sets.Preload
        What to preload.
    view : SnapshotView
        The snapshot.
    """

    def __init__(
        self, objects: ObjectReader, runtime: Runtime, options: Preload, view: SnapshotView
    ) -> None:
        self._objects, self._runtime, self._options = objects, runtime, options
        self._view: SnapshotView | None = view
        self.snapshot_id = view.snapshot_id
        self._lock = ForkSafeLock()
        self._pid = os.getpid()
        self._cancelled = False
        self._queue: deque[BlobRef] = deque()

    def start(self) -> None:
        """Start, unless everything that could be fetched is here already."""
        view = self._view
        if view is not None and self._options.max_manifests and self._any_is_elsewhere(view):
            self._go_on()

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
            for _, ref, parts in _tables_of(view)
        )

    def _go_on(self) -> None:
        """Schedule the lane's next call; if the runtime takes no more calls, end."""
        try:
            self._runtime.background(self._run)
        except RuntimeError:  # raised by executors when the interpreter exits
            self.cancel()

    def _run(self) -> None:
        """Fetch one object, and schedule the next fetch."""
        try:
            due = self._next()
        except ManifestsError:  # the snapshot is damaged; a read will raise that
            _LOG.debug("nothing of %s is preloaded", self.snapshot_id, exc_info=True)
            due = None
        if due is None:
            return
        try:
            self._objects.load(due, _kind(due))
        except (ManifestsError, OSError):
            _LOG.debug("%s could not be preloaded", due.key, exc_info=True)
        finally:
            self._go_on()

    def _next(self) -> BlobRef | None:
        view = self._view
        if self._stopped():
            return None
        if view is not None:  # there is no second lane yet
            self._view = None
            self._queue.extend(_plan(self._objects, self._options, view))
            for _ in range(min(_LANES, len(self._queue)) - 1):
                self._go_on()
        with self._lock:
            return self._queue.popleft() if self._queue and not self._stopped() else None

    def _stopped(self) -> bool:
        return self._cancelled or self._pid != os.getpid()


def _tables_of(view: SnapshotView) -> Iterator[tuple[int, BlobRef, Sequence[Part]]]:
    """All objects with chunk tables, and their tables: position of the delta, or -1."""
    for ref in view.manifests_here():  # a preload loads no pages: each has copies of small ones
        yield -1, ref.blob, ref.parts
    for at, entry in enumerate(view.snapshot.deltas):
        if entry.embedded:
            yield at, entry.log, entry.embedded
        for ref in entry.manifests:
            yield at, ref.blob, ref.parts


def _kind(ref: BlobRef) -> type[Delta] | type[Manifest]:
    return Delta if ref.key.startswith("deltas/") else Manifest


def _plan(objects: ObjectReader, options: Preload, view: SnapshotView) -> list[BlobRef]:
    known = {part.node_id for ref in view.manifests_here() for part in ref.parts} | view.touched()
    # Of thousands of arrays few are coordinates, and only these are examined further.
    wanted = {
        node.node_id
        for node in view.nodes_here()
        if node.node_id in known and node.array is not None
        if options.arrays is not None or node.array.is_coordinate(node.path)
        if options.arrays is None or options.matches(absolute(node.path))
    }
    covered = {at for of in view.snapshot.digests for at in range(of.first, of.stop)}
    tables = (
        (ref, [p for p in parts if at not in covered or not view.in_digest(p.node_id, at)])
        for at, ref, parts in _tables_of(view)
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
    >>> from zarr_manifests.engine.snapshot.preload import plan_preload
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


class RefsPreload:
    """The preload of branches and tags, one after another. Thread-safe.

    Parameters
    ----------
    context : ReadContext
        The repository.
    root : Root
        Its root.
    """

    def __init__(self, context: ReadContext, root: Root) -> None:
        # The pool's other threads are left for reads.
        runtime = replace(context.runtime, parallel=one_by_one)
        self._context, self._root = replace(context, runtime=runtime), root
        options = context.config.chunk_manifests.preload
        self._due = deque([(True, name) for name in options.branches])
        self._due.extend((False, name) for name in options.tags)
        self._begun: list[SnapshotPreload] = []
        self._pid = os.getpid()
        self._cancelled = False

    def start(self) -> bool:
        """Start; return whether there is anything to cancel."""
        if not self._due or self._cancelled or self._pid != os.getpid():
            return False
        try:
            self._context.runtime.background(self._run)
        except RuntimeError:  # the interpreter exits
            self.cancel()
            return False
        return True

    def cancel(self) -> None:
        """Fetch nothing more. Takes no lock."""
        self._cancelled = True
        for one in list(self._begun):
            one.cancel()

    def _run(self) -> None:
        if self._cancelled:
            return
        is_branch, name = self._due.popleft()
        try:
            view = self._open(name, is_branch=is_branch)
        except (ManifestsError, OSError):
            _LOG.debug("%s could not be preloaded", name, exc_info=True)
            view = None
        if view is None:
            _LOG.debug("there is no branch or tag %s to be preloaded", name)
        else:
            options = self._context.config.chunk_manifests.preload
            one = SnapshotPreload(self._context.objects, self._context.runtime, options, view)
            self._begun.append(one)
            if not self._cancelled:
                one.start()
        self.start()

    def _open(self, name: str, *, is_branch: bool) -> SnapshotView | None:
        roots, context = self._context.roots, self._context
        if is_branch:
            tip = roots.with_branch(self._root, name).branches.get(name)
            return None if tip is None else context.open_branch(tip)
        ref = roots.with_tag(self._root, name).tags.get(name)
        return None if ref is None else context.open_view(ref)


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    alive = method()
    if alive is not None:
        alive()
