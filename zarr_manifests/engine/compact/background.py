"""Compactions in the background.

A commit that makes a compaction due only puts its branch into a queue, which a few threads process.
Such a compaction uses its own thread and its own view of the repository; it shares no thread pool
or cache with readers and writers. Invariants: a branch is in the queue at most once; there are
never more threads than the repository's configuration allows; the queue is finished before the
interpreter exits; a forked child starts with an empty queue.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from zarr_manifests.config import CacheOptions
from zarr_manifests.engine.compact.compaction import compact_branch
from zarr_manifests.engine.snapshot.context import Context
from zarr_manifests.planning.upkeep.compaction_triggers import CompactionMode
from zarr_manifests.runtime import start_thread

_LOG = logging.getLogger(__name__)
_CACHE_BYTES = 64 << 20


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
    compact_branch(_alone(context), branch, CompactionMode.MAJOR)


def _alone(context: Context) -> Context:
    """The same repository, for use by a single thread."""
    runtime = replace(context.runtime, parallel=_in_turn)
    alone = context.unshared_by(runtime, CacheOptions(max_size=_CACHE_BYTES))
    alone.roots.read()
    return alone


def _in_turn[R](calls: Sequence[Callable[[], R]]) -> list[R]:
    # Pools refuse work once the interpreter exits, and their threads are for the foreground.
    return [call() for call in calls]
