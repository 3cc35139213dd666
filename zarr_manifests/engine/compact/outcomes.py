"""Compactions on request, and the compaction that a commit makes due.

In the background a commit only puts its branch into a queue, which a few threads process. Such a
compaction uses its own thread and its own view of the repository; it shares no thread pool or cache
with readers and writers. Invariants: a branch is in the queue at most once; there are never more
threads than the repository's configuration allows; the queue is finished before the interpreter
exits; a forked child starts with an empty queue.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from typing import Final

from zarr_manifests.config import CacheOptions, Compaction
from zarr_manifests.engine.compact.compaction import compact_branch
from zarr_manifests.engine.history.differences import deltas_between
from zarr_manifests.engine.root.create import with_reserve
from zarr_manifests.engine.snapshot.context import Context
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import InvalidArgumentError, ManifestsError
from zarr_manifests.planning.upkeep.compaction_triggers import (
    CompactionMode,
    is_due,
    opening_is_slow,
)
from zarr_manifests.reports import CompactionReport
from zarr_manifests.runtime import Run, one_by_one, start_thread

_LOG = logging.getLogger(__name__)
_TASKS_CACHE_BYTES: Final = 32 << 20
_ALONE_CACHE_BYTES: Final = 64 << 20
_OVERDUE: Final = 4
"""At this multiple of `max_delta_count` a writer compacts even if another process should."""


def compact(
    context: Context,
    branch: str,
    mode: str,
    *,
    dry_run: bool,
    run: Run | None = None,
) -> CompactionReport:
    """Compact a branch on request, shutting out running compactions.

    Raises
    ------
    NotFoundError
        If there is no such branch.
    InvalidArgumentError
        If there is no such mode.
    """
    if mode not in set(CompactionMode):
        raise InvalidArgumentError(f"mode {mode!r} is not one of minor, major, full, packs")
    context.roots.branch(context.roots.read().root, branch)  # there is one
    if run is not None:
        # Planning reads each object once, and tasks have caches of the same size.
        context = context.unshared_by(context.runtime, CacheOptions(max_size=_TASKS_CACHE_BYTES))
        context.roots.read()
    what = context, branch, CompactionMode(mode)
    compaction = partial(compact_branch, *what, dry_run=dry_run, claim=True, run=run)
    return with_reserve(context.storage, compaction)[0]


def compact_if_due(context: Context, branch: str, view: SnapshotView) -> SnapshotView | None:
    """Compact the branch if the commit that made `view` makes it due; return the compacted head.

    None if no compaction is due, if the background does it, or if it failed; the next commit then
    makes it due again.
    """
    rewrite, options = context.config.commits.mode == "rewrite", context.config.compaction
    if not rewrite and (options.mode == "manual" or not _is_due(view, options)):
        return None
    if not rewrite and options.mode == "async":
        compact_soon(context, branch)
        return None
    try:
        with context.roots.only_here("compaction") as alone:
            overdue = len(view.snapshot.deltas) > _OVERDUE * options.max_delta_count
            if not (alone or rewrite or overdue):
                return None  # another process compacts for all, unless it was stopped
            ratio = 0.0 if rewrite else None
            _, head = compact_branch(context, branch, CompactionMode.MAJOR, size_ratio=ratio)
        # The branch may have been reset in the meantime; the head is then unrelated to this commit.
        if head is not None and deltas_between(context, view, head) is not None:
            return context.open_view(head)
    except ManifestsError:
        _LOG.warning("compacting %r failed", branch, exc_info=True)
    return None


def _is_due(view: SnapshotView, options: Compaction) -> bool:
    snapshot = view.snapshot
    return opening_is_slow(*view.node_changes()) or is_due(
        sum(entry.first == entry.last for entry in snapshot.deltas),
        snapshot.sequence,
        min_delta_count=options.min_delta_count,
        max_delta_count=options.max_delta_count,
        interval_commits=options.interval_commits,
    )


# --- in the background ----------------------------------------------------------------------------


class _Queue:
    """Branches that are due, and the number of running threads."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.lock = threading.Lock()
        self.due: OrderedDict[tuple[str, str], Context] = OrderedDict()
        self.threads = 0


_QUEUE = _Queue()
os.register_at_fork(after_in_child=_QUEUE.reset)  # the parent's threads are not here


def compact_soon(context: Context, branch: str) -> None:
    """Compact the branch on a thread in the background; returns at once."""
    most = context.config.compaction.async_threads
    with _QUEUE.lock:
        _QUEUE.due[context.repository_id, branch] = context
        if _QUEUE.threads >= most:
            return
    try:
        start_thread(partial(_work, most))
    except RuntimeError:  # no more threads, or the interpreter is about to exit
        _LOG.warning("no thread to compact %r on", branch, exc_info=True)


def _work(most: int) -> None:
    """Process the queue until it is empty, unless `most` threads do already."""
    with _QUEUE.lock:  # it counts itself: an interrupt may come before or after it is started
        if _QUEUE.threads >= most:
            return
        _QUEUE.threads += 1
    while True:
        with _QUEUE.lock:
            if not _QUEUE.due:
                _QUEUE.threads -= 1
                return
            (_, branch), context = _QUEUE.due.popitem(last=False)
        try:
            compact_alone(context, branch)
        except Exception:  # noqa: BLE001 - nobody is there to catch it
            # The next commit makes it due again.
            _LOG.warning("compacting %r in the background failed", branch, exc_info=True)


def compact_alone(context: Context, branch: str) -> None:
    """Compact the branch now, on this thread, without sharing anything, as in the background."""
    # Pools refuse work once the interpreter exits, and their threads are for the foreground.
    runtime = replace(context.runtime, parallel=one_by_one)
    alone = context.unshared_by(runtime, CacheOptions(max_size=_ALONE_CACHE_BYTES))
    alone.roots.read()
    compact_branch(alone, branch, CompactionMode.MAJOR)
