"""Leases that keep the snapshots of DataFrames readable.

A DataFrame is lazy, so the end of its use cannot be known. Its lease has a duration, and is
prolonged in three ways:

- `keep_readable`: the process that calls `read` holds a lease for the duration, and longer as long
  as it refers to the DataFrame. Frames of one snapshot share it. It ends with the process.
- `leave_lease`: Spark plans a data source in a process that ends at once. It leaves a lease behind,
  which nobody gives up: it ends when its duration is over.
- `renew_lease`: a task that begins when half of the duration or more is over leaves such a lease
  again. So a lease covers a job of any length, as long as tasks keep beginning.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Hashable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Final, Protocol

from zarr_manifests import repositories
from zarr_manifests.errors import ManifestsError, StorageError
from zarr_manifests.repository import Repository
from zarr_manifests.spark.job import Job, Leased
from zarr_manifests.storage import Storage
from zarr_manifests.storage.metered import place_of

__all__ = ["LeasedJob", "keep_readable", "leave_lease", "renew_lease", "with_lease"]

_LOG = logging.getLogger(__name__)
_TIMEOUT_S: Final = 120.0
_RENEWED: Final = 0.5 + 0.3 * os.urandom(1)[0] / 255
"""After which share of the duration this process renews: not all workers at the same moment."""


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


type _Key = tuple[int, Hashable, str]
_lock: Final = threading.Lock()
_held: Final[dict[_Key, _Lease]] = {}
_left_s: Final[dict[tuple[Hashable, str, timedelta], float]] = {}
"""When this process left a lease behind: by repository, snapshot and duration."""


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
    key = (os.getpid(), place_of(repository.storage), snapshot_id)
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
        lease = _held.get(key)
        if lease is None:  # the process is at its end
            return
        if lease.is_needed:
            _look_again(key, max(lease.until_s - time.monotonic(), lease.duration_s))
            return
        del _held[key]
    try:
        lease.stack.close()
    except ManifestsError:
        # Nobody renews it now, so a collection may remove it when its time is up.
        _LOG.warning("the lease on snapshot %s was not given up", key[-1], exc_info=True)


def _end_all() -> None:
    """Give up the leases of this process at its end.

    Later they would be given up too, by their generators, but a thread that renews them may be
    gone by then, and the lock file with it.
    """
    with _lock:
        mine = [key for key in _held if key[0] == os.getpid()]
        leases = [_held.pop(key) for key in mine]
    for lease in leases:
        try:
            lease.stack.close()
        except ManifestsError:
            _LOG.info("a lease was not given up at exit", exc_info=True)


atexit.register(_end_all)


def with_lease(job: Job, duration: timedelta | None) -> Job:
    """The job with a lease on its snapshot that is held from now on; tasks go on with it."""
    lease = None if duration is None else Leased(time.time(), duration)
    return replace(job, lease=lease)


def leave_lease(repository: Repository, snapshot_id: str, duration: timedelta) -> None:
    """Take a lease on a snapshot that outlives this process, until its duration is over.

    There is one for each snapshot and duration. Where the storage refuses to be written, no lease
    is taken, and the log says so.

    Raises
    ------
    SnapshotExpiredError
        If the snapshot has expired.
    """
    owner = f"Spark jobs on {snapshot_id}, {duration}"
    try:
        with repository.lease(snapshot_id, duration, owner=owner, instead=True) as lease:
            lease.keep()
    except StorageError:
        _LOG.warning("no lease on %s, which cannot be written", repository, exc_info=True)


class LeasedJob(Protocol):
    """A job that reads a snapshot in tasks."""

    @property
    def storage(self) -> Storage:
        """The repository's storage."""
        ...

    @property
    def snapshot_id(self) -> str:
        """The snapshot."""
        ...

    @property
    def lease(self) -> Leased | None:
        """The lease that it began with."""
        ...


def renew_lease(job: LeasedJob) -> None:
    """Leave a lease on the job's snapshot, if the last one is known to have lasted for long.

    A task goes on without it: what it reads may still be there, and else its error says so.
    """
    if job.lease is None:
        return
    duration = job.lease.duration
    key = (place_of(job.storage), job.snapshot_id, duration)
    since_s = max(job.lease.since_s, _left_s.get(key, 0.0))
    if time.time() < since_s + _RENEWED * duration.total_seconds():
        return
    _left_s[key] = time.time()
    try:
        leave_lease(repositories.open(job.storage), job.snapshot_id, duration)
    except ManifestsError:
        _LOG.warning("the lease on snapshot %s was not renewed", job.snapshot_id, exc_info=True)
