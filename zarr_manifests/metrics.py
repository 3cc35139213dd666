"""Counters of what a repository does in this process, and the storage that counts its calls.

Any thread may add to a `Meter`; `Metrics` is its state at one moment. Invariants:

- Counts never decrease, and no addition is lost to another thread.
- Pickles carry no counts; a child of `os.fork` goes on from its parent's. `process_totals` is the
  sum over all meters, including those already garbage-collected.
- Adding costs a lock that is held for a few additions.
- A metered storage behaves like the one it wraps. Its pickle is that of the wrapped storage, so
  another process does its own counting.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import asdict

from zarr_manifests.runtime import ForkSafeLock
from zarr_manifests.storage.protocol import Capabilities, ReadableStorage, ReadsInto, Storage, Token


class Metrics(Struct, frozen=True):
    """Counts of what a repository object, its sessions and stores did so far in this process.

    Subtract earlier metrics to get the counts in between. Storage requests are counted as calls,
    one for each object, even if a backend splits or batches them.

    Parameters
    ----------
    read_requests, write_requests, list_requests, delete_requests : int
        Calls to the storage, including failed ones.
    failed_requests : int
        Calls that raised an error, including those for objects that do not exist.
    bytes_read, bytes_written : int
        Bytes of objects received and sent.
    cache_hits : int
        Lookups of metadata objects that were decoded in memory.
    cache_misses : int
        Lookups of metadata objects that were not.
    cache_evicted_bytes : int
        Estimated size of metadata dropped from memory because it was full or expired.
    chunk_cache_hits, chunk_cache_misses : int
        Lookups of chunks that were in memory, and that were not; only if a chunk cache is
        configured.
    bulk_batches, bulk_fallbacks : int
        Requests for chunks that `BulkCodecPipeline` took as a whole, and those that it left to
        Zarr.
    refs_merged : int
        Chunk refs of deltas merged by reads and compactions.
    commits : int
        Commits that landed.
    conflicts : int
        Commits that raised `ConflictError`.
    retries : int
        Attempts repeated because another commit came first or the storage did not answer.
    compactions : int
        Compactions that landed.

    Examples
    --------
    >>> import zarr, zarr_manifests as zm
    >>> repo = zm.create("memory://metrics-example")
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
    chunk_cache_hits: int = 0
    chunk_cache_misses: int = 0
    bulk_batches: int = 0
    bulk_fallbacks: int = 0
    refs_merged: int = 0
    commits: int = 0
    conflicts: int = 0
    retries: int = 0
    compactions: int = 0

    @property
    def requests(self) -> int:
        """All calls to the storage, summed."""
        return self.read_requests + self.write_requests + self.list_requests + self.delete_requests

    def to_dict(self) -> dict[str, int]:
        """The counts by name."""
        return asdict(self)

    def __sub__(self, earlier: Metrics) -> Metrics:
        if not isinstance(earlier, Metrics):
            return NotImplemented
        before = earlier.to_dict()
        return Metrics(**{name: n - before[name] for name, n in self.to_dict().items()})


_READS: Final = "read_requests"
_NAMES: Final = Metrics.__struct_fields__


class Meter:
    """Counts. Thread-safe.

    Examples
    --------
    >>> from zarr_manifests.metrics import Meter
    >>> meter = Meter()
    >>> meter.add("refs_merged", 10)
    >>> meter.read().refs_merged
    10
    """

    def __init__(self) -> None:
        self._counts = dict.fromkeys(_NAMES, 0)

    def add(self, name: str, n: int = 1) -> None:
        """Add to the count `name`, a field of `Metrics`; `KeyError` if there is none."""
        with _LOCK:
            self._counts[name] += n
            _TOTALS[name] += n

    def request(self, kind: str, nbytes: int = 0, failed: int = 0) -> None:
        """Count a storage call by the name of its count, and the bytes that it reads or writes."""
        moved = "bytes_read" if kind == _READS else "bytes_written"
        with _LOCK:
            for counts in (self._counts, _TOTALS):
                counts[kind] += 1
                counts[moved] += nbytes
                counts["failed_requests"] += failed

    def read(self) -> Metrics:
        """The counts at this moment."""
        with _LOCK:
            return Metrics(**self._counts)


# Reentrant: a signal handler or finalizer may count on the thread that holds it.
_LOCK: Final = ForkSafeLock()
_TOTALS: Final = dict.fromkeys(_NAMES, 0)


def process_totals() -> Metrics:
    """Counts of all repositories of this process together."""
    with _LOCK:
        return Metrics(**_TOTALS)


# --- a storage that counts ------------------------------------------------------------------------


class MeteredStorage:
    """Passes every call to `storage` and counts it in `meter`.

    `sync` is not counted: where written objects are durable, it needs no request.
    """

    def __init__(self, storage: Storage, meter: Meter) -> None:
        self.storage, self.meter = storage, meter
        self.get = self._counted(storage.get, len)
        self.get_tagged = self._counted(storage.get_tagged, lambda tagged: len(tagged.data))
        self.head = self._counted(storage.head)
        if isinstance(storage, ReadsInto):
            self.read_into = self._counted(storage.read_into, lambda count: count or 0)
        self.list = self._counted(storage.list, kind="list_requests")
        self.stray = self._counted(storage.stray, kind="list_requests")
        self.delete_many = self._counted(storage.delete_many, kind="delete_requests")
        self.sync = storage.sync

    def __repr__(self) -> str:
        return repr(self.storage)

    def __reduce__(self) -> tuple[Any, ...]:
        return unmetered, (self.storage,)

    @property
    def url(self) -> str:
        return self.storage.url

    @property
    def capabilities(self) -> Capabilities:
        return self.storage.capabilities

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        with self._writing(len(data)):
            self.storage.put(key, data, durable=durable)

    def create(self, key: str, data: bytes | memoryview, *, durable: bool = True) -> bool:
        with self._writing(len(data)):
            return self.storage.create(key, data, durable=durable)

    def cas(
        self,
        key: str,
        data: bytes,
        token: Token | None,
        *,
        then_create: tuple[str, bytes] | None = None,
    ) -> Token | None:
        with self._writing(len(data)):
            new = self.storage.cas(key, data, token, then_create=then_create)
        if new is not None and then_create is not None:
            self.meter.request("write_requests", len(then_create[1]))
        return new

    async def get_async(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        try:
            data = await self.storage.get_async(key, start, length)
        except BaseException:
            self.meter.request(_READS, failed=1)
            raise
        self.meter.request(_READS, len(data))
        return data

    async def create_async(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        with self._writing(len(data)):
            return await self.storage.create_async(key, data, durable=durable)

    @contextmanager
    def _writing(self, nbytes: int) -> Iterator[None]:
        self.meter.request("write_requests", nbytes)
        try:
            yield
        except BaseException:
            self.meter.add("failed_requests")
            raise

    def _counted[**P, R](
        self, run: Callable[P, R], size: Callable[[R], int] = lambda _: 0, kind: str = _READS
    ) -> Callable[P, R]:
        meter = self.meter

        def counted(*args: P.args, **named: P.kwargs) -> R:
            try:
                found = run(*args, **named)
            except BaseException:
                meter.request(kind, failed=1)
                raise
            meter.request(kind, size(found))
            return found

        return counted


def metered(storage: Storage, meter: Meter | None = None) -> MeteredStorage:
    """The storage with its calls counted; unchanged if they are counted already."""
    if isinstance(storage, MeteredStorage) and meter in (None, storage.meter):
        return storage
    return MeteredStorage(unmetered(storage), meter or Meter())


def unmetered(storage: Storage) -> Storage:
    """The storage without the wrapper that counts its calls."""
    return storage.storage if isinstance(storage, MeteredStorage) else storage


def place_of(storage: ReadableStorage) -> Hashable:
    """What tells a storage from others: the URL, and for an object store how it is reached.

    Two accounts reach one URL, and one URL names a bucket on each of two servers.
    """
    bare = storage.storage if isinstance(storage, MeteredStorage) else storage
    place: Hashable = getattr(bare, "place", bare.url)
    return place


def meter_of(storage: ReadableStorage) -> Meter:
    """The meter of the storage, or a new one if its calls are not counted."""
    return storage.meter if isinstance(storage, MeteredStorage) else Meter()
