"""Leases that keep the snapshots of DataFrames readable.

A DataFrame is lazy, so the end of its use cannot be known. A lease is held for a duration from the
read on, and longer as long as this process refers to the DataFrame. Frames of one snapshot share a
lease. It ends with the process: nobody renews it then.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

from zarr_manifests.errors import ManifestsError, StorageError
from zarr_manifests.repository import Repository

__all__ = ["keep_readable"]

_LOG = logging.getLogger(__name__)
_TIMEOUT_S: Final = 120.0


@dataclass(slots=True)
class _Lease:
    """A lease that is held, until when at least, and the frames that need it."""

    stack: ExitStack
    until_s: float
    duration_s: float
    frames: list[weakref.ref[Any]] = field(default_factory=list)

    @property
    def is_needed(self) -> bool:
        self.frames = [frame for frame in self.frames if frame() is not None]
        return bool(self.frames) or time.monotonic() < self.until_s


type _Key = tuple[int, str, str]
_lock: Final = threading.Lock()
_held: Final[dict[_Key, _Lease]] = {}


def keep_readable(
    repository: Repository, snapshot_id: str, duration_s: float, frame: object
) -> None:
    """Hold a lease on a snapshot for a duration, and as long as `frame` exists.

    Where the storage refuses to be written, no lease is taken, and the log says so.

    Raises
    ------
    SnapshotExpiredError
        If the snapshot has expired.
    """
    key = (os.getpid(), repository.url, snapshot_id)
    until_s = time.monotonic() + duration_s
    with _lock:
        lease = _held.get(key)
        if lease is None:
            stack = ExitStack()
            try:
                stack.enter_context(repository.lease(snapshot_id, _TIMEOUT_S, owner="Spark read"))
            except StorageError:
                _LOG.warning("no lease on %s, which cannot be written", repository, exc_info=True)
                return
            lease = _held[key] = _Lease(stack, until_s, duration_s)
            _look_again(key, duration_s)
        lease.until_s = max(lease.until_s, until_s)
        lease.frames.append(weakref.ref(frame))


def _look_again(key: _Key, delay_s: float) -> None:
    timer = threading.Timer(delay_s, _end_if_done, [key])
    timer.daemon = True
    timer.start()


def _end_if_done(key: _Key) -> None:
    """Give up a lease that is not needed any more, or look again later."""
    with _lock:
        lease = _held[key]
        if lease.is_needed:
            _look_again(key, max(lease.until_s - time.monotonic(), lease.duration_s))
            return
        del _held[key]
    try:
        lease.stack.close()
    except ManifestsError:
        # Nobody renews it now, so a collection may remove it when its time is up.
        _LOG.warning("the lease on snapshot %s was not given up", key[-1], exc_info=True)
