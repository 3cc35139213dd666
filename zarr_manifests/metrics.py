"""Counting what a repository does in this process.

A `Meter` is added to, from any thread; `Metrics` is what it says at one moment. Invariants:

- A count never goes down, and an addition is never lost to another thread's.
- What is counted was done by this process: a child of `os.fork` starts at zero, and nothing of it
  is pickled. What a process has counted in all, `process_totals`, is therefore the sum of what
  its meters say and of what those said that are gone.
- Adding costs no more than a lock that is free.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from dataclasses import asdict, dataclass, fields
from typing import Final

__all__ = ["Meter", "Metrics", "process_totals"]


@dataclass(frozen=True, slots=True)
class Metrics:
    """What a repository object, its sessions and stores have done so far in this process.

    Subtract an earlier one to see what was done between. Requests to the storage are counted as
    calls: one for each object, whatever a backend makes of it.

    Parameters
    ----------
    read_requests, write_requests, list_requests, delete_requests : int
        Calls to the storage, those that failed included.
    failed_requests : int
        Those of them that raised an error, an object that is not there included.
    bytes_read, bytes_written : int
        Of objects, received and sent.
    cache_hits : int
        Metadata objects that were wanted and lay decoded in memory.
    cache_misses : int
        Metadata objects that were wanted and did not.
    cache_evicted_bytes : int
        Dropped from memory, because it was full or they were not used, by estimated size.
    disk_cache_hits, disk_cache_misses : int
        Misses of the memory that the cache directory could serve, and could not.
    disk_cache_damaged_files : int
        Files that were dropped from the cache directory because they were not what was written.
    disk_cache_failures : int
        Times the cache directory did not take an object, as when the disk is full.
    chunk_cache_hits, chunk_cache_misses : int
        Chunks that were wanted, and were kept in memory or not; counted where any may be kept.
    refs_merged : int
        Chunk refs of deltas that were brought together, by reads and by compactions.
    commits : int
        Commits that landed.
    conflicts : int
        Commits that raised `ConflictError`.
    retries : int
        Times something was tried again, because others came first or the storage did not answer.
    compactions : int
        Compactions that landed.

    Examples
    --------
    >>> import zarr, zarr_manifests as zm
    >>> repo = zm.Repository.create("memory://metrics-example")
    >>> before = repo.metrics()
    >>> with repo.transaction(message="make air") as store:
    ...     _ = zarr.create_group(store, path="air")
    >>> done = repo.metrics() - before
    >>> done.commits, done.conflicts, done.bytes_written > 0
    (1, 0, True)
    """

    read_requests: int = 0
    write_requests: int = 0
    list_requests: int = 0
    delete_requests: int = 0
    failed_requests: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    cache_evicted_bytes: int = 0
    disk_cache_hits: int = 0
    disk_cache_misses: int = 0
    disk_cache_damaged_files: int = 0
    disk_cache_failures: int = 0
    chunk_cache_hits: int = 0
    chunk_cache_misses: int = 0
    refs_merged: int = 0
    commits: int = 0
    conflicts: int = 0
    retries: int = 0
    compactions: int = 0

    @property
    def requests(self) -> int:
        """All calls to the storage."""
        return self.read_requests + self.write_requests + self.list_requests + self.delete_requests

    def to_dict(self) -> dict[str, int]:
        """The counts by name."""
        return asdict(self)

    def __sub__(self, earlier: Metrics) -> Metrics:
        if not isinstance(earlier, Metrics):
            return NotImplemented
        before = earlier.to_dict()
        return Metrics(**{name: n - before[name] for name, n in self.to_dict().items()})


_MOST_UNCOUNTED: Final = 1000
_NAMES: Final = tuple(field.name for field in fields(Metrics))


class Meter:
    """Counts. Thread-safe; at zero in a child of `os.fork`.

    Examples
    --------
    >>> from zarr_manifests.metrics import Meter
    >>> meter = Meter()
    >>> meter.add("refs_merged", 10)
    >>> meter.read().refs_merged
    10
    """

    __slots__ = ("__weakref__", "_counts", "_reads")

    def __init__(self) -> None:
        self._counts = _Counts()
        self._reads = self._counts.reads
        with _REGISTRY.lock:
            _REGISTRY.counts.add(self._counts)
            _REGISTRY.settle()  # or those that are gone would take room until somebody asks
        # Nobody asks for totals any more when the process ends.
        weakref.finalize(self, _REGISTRY.gone.append, self._counts).atexit = False

    def add(self, name: str, n: int = 1) -> None:
        """Add to the count of that name, a field of `Metrics`; `KeyError` if there is none."""
        counts = self._counts
        with counts.lock:
            counts.by_name[name] += n

    def read_request(self, read_bytes: int) -> None:
        """Count a read that was answered, as each chunk's is: without the lock."""
        reads = self._reads
        reads.append(read_bytes)
        if len(reads) > _MOST_UNCOUNTED:
            self._counts.settle()

    def request(self, kind: str, read_bytes: int = 0, written_bytes: int = 0) -> None:
        """Count a call to the storage that was answered; `kind` is the name of its count."""
        counts = self._counts
        with counts.lock:
            counts.by_name[kind] += 1
            if read_bytes:
                counts.by_name["bytes_read"] += read_bytes
            if written_bytes:
                counts.by_name["bytes_written"] += written_bytes

    def read(self) -> Metrics:
        """The counts at this moment."""
        return Metrics(**self._counts.settle())


class _Counts:
    """What a meter has counted; it outlives the meter until the registry has taken it over."""

    __slots__ = ("by_name", "lock", "reads")

    def __init__(self) -> None:
        self.by_name = dict.fromkeys(_NAMES, 0)
        self.reads: deque[int] = deque()  # bytes of each that is not counted by name yet
        # Reentrant: a signal's handler or a finalizer may count on the thread that holds it.
        self.lock = threading.RLock()

    def settle(self) -> dict[str, int]:
        """All of it by name."""
        with self.lock:
            number = nbytes = 0
            try:
                with contextlib.suppress(IndexError):  # there is none left
                    while True:
                        nbytes += self.reads.popleft()
                        number += 1
            finally:
                self.by_name["bytes_read"] += nbytes
                self.by_name["read_requests"] += number
            return dict(self.by_name)

    def restart(self) -> None:
        self.lock = threading.RLock()
        self.reads.clear()
        self.by_name.update(dict.fromkeys(_NAMES, 0))


class _Registry:
    """What all meters of the process have counted, and those that are gone.

    A meter goes wherever garbage is collected, be it on a thread that holds another meter's lock,
    which `process_totals` wants while it holds this one. So no lock is taken for it: it is noted
    that it has gone, and whoever holds the lock next takes its counts over. Until then they are
    among the others', so that they are counted once at every moment.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.counts: set[_Counts] = set()
        self.gone: deque[_Counts] = deque()
        self.retired = dict.fromkeys(_NAMES, 0)

    def settle(self) -> None:
        """Take over the counts of meters that are gone; the lock is held."""
        while self.gone:
            counts = self.gone.popleft()
            self.counts.discard(counts)
            for name, n in counts.settle().items():
                self.retired[name] += n

    def restart(self) -> None:
        self.lock = threading.RLock()
        self.retired = dict.fromkeys(_NAMES, 0)
        for counts in list(self.counts):
            counts.restart()


_REGISTRY: Final = _Registry()
os.register_at_fork(after_in_child=_REGISTRY.restart)


def process_totals() -> Metrics:
    """What all repositories together have done in this process."""
    with _REGISTRY.lock:
        _REGISTRY.settle()
        totals = dict(_REGISTRY.retired)
        for counts in list(_REGISTRY.counts):
            for name, n in counts.settle().items():
                totals[name] += n
    return Metrics(**totals)
