"""Immutable metadata objects: fetched once, decoded once, written once; and what is kept of them.

Loads go through a cache of decoded values and are single-flight. Values made from objects, such as
the chunk tables of a manifest, are in the same cache. Writes use `create_own`.

The cache of decoded values
---------------------------

Invariants:

- *Bounded.* Values take at most `max_size`, estimated by `decoded_bytes`; a larger value may stay
  as the one added last, with at most half of `max_size` besides. There are two parts: objects,
  which cost a request to get again, and values made from them (chunk tables, overlays). The least
  recently used value of the larger part is dropped first. So objects, such as the deltas of the
  last commits, keep half of the room, however large the tables of a scan are.
- *Expiring.* Values that were not used for `expire_ms` are dropped at the next lookup.
- *Single-flight.* While one thread makes a value, others that want it wait. An error is raised in
  all of them. If the maker is interrupted (not by an `Exception`), those who wait start over.
  Making a value must never wait for a pool thread, since all of these may be waiting here.
- *Fork-safe.* A child of `os.fork` keeps the cached values, has a free lock, and waits for no
  thread of its parent.

Chunk bytes have a cache of the same kind (`ChunkCache`).

Sizes are estimated. A value is traversed, and every object in it counts once, with the size that
Python reports. An array counts with the buffer it is a view of; a constant column's buffer holds a
single number. Objects shared by the whole process (small numbers, classes, the empty tuple) are not
excluded, since they matter little beside bytes, strings, arrays and containers. The way to traverse
a type is computed once per type, and of a long sequence, whose items are alike, only a sample is
measured. Snapshots and read list entries, which every commit reads and writes, tell their own.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any, Final, Protocol, cast

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from zarr_manifests.config import CacheOptions
from zarr_manifests.errors import CorruptObjectError, ObjectNotFoundError, StorageError
from zarr_manifests.format.chunk_table import ChunkTable, NativeRef, VirtualRef
from zarr_manifests.format.manifest import (
    Block,
    Manifest,
    ManifestRef,
    Part,
    decode_table,
    grouped,
)
from zarr_manifests.format.records import BlobRef
from zarr_manifests.ids import new_session_id, object_key
from zarr_manifests.metrics import Meter, meter_of
from zarr_manifests.runtime import Runtime, one_by_one
from zarr_manifests.storage import Storage
from zarr_manifests.storage.protocol import ReadableStorage, coalesce

OBJECT: Final = "object"
"""First element of the names of objects; names of other values start differently."""

ENTRY_BYTES: Final = 400
"""Bytes of an entry besides its value: its name, its place in the order."""


type _Name = tuple[Any, ...]


class _Entry:
    __slots__ = ("nbytes", "used_s", "value")

    def __init__(self, value: Any, nbytes: int, used_s: float) -> None:
        self.value, self.nbytes, self.used_s = value, nbytes, used_s


class _Flight:
    """A value that a thread is making: the one that holds the lock."""

    __slots__ = ("ended", "error", "making", "value")

    def __init__(self) -> None:
        self.making = threading.Lock()
        self.ended = False
        self.value: Any = None
        self.error: Exception | None = None


class DecodedCache:
    """Values by name; the first element of a name (a tuple) selects the part of the cache."""

    def __init__(self, options: CacheOptions, runtime: Runtime, meter: Meter | None = None) -> None:
        self.max_size = options.max_size
        self._expire_s = options.expire_ms / 1000 or float("inf")
        self._now_s = runtime.monotonic_s
        self._meter = meter or Meter()
        # Least recently used first: objects, and values made from them.
        self._parts = OrderedDict[_Name, _Entry](), OrderedDict[_Name, _Entry]()
        self._bytes = [0, 0]
        self._due_s = float("inf")  # no value expires before this time
        self._restart()
        _CACHES.add(self)

    def _restart(self) -> None:
        self._lock = threading.RLock()
        self._flights: dict[_Name, _Flight] = {}
        # A thread of the parent may have been between adding a value and adding its size.
        self._bytes[:] = (sum(entry.nbytes for entry in part.values()) for part in self._parts)

    @property
    def nbytes(self) -> int:
        """Estimated bytes that the values take."""
        with self._lock:  # not between adding one and dropping another
            return sum(self._bytes)

    def __contains__(self, name: _Name) -> bool:
        with self._lock:
            return name in self._parts[name[0] != OBJECT]

    def find(self, name: _Name) -> Any | None:
        """The value; None if it is not cached."""
        now_s = self._now_s()
        if now_s >= self._due_s:
            with self._lock:
                self._expire(now_s)
        # Without the lock, which would double the time of each chunk's lookup. Names have no hash
        # or comparison in Python, so each of these steps is atomic.
        part = self._parts[name[0] != OBJECT]
        entry = part.get(name)
        if entry is None:
            return None
        entry.used_s = now_s
        with suppress(KeyError):  # another thread has just dropped it
            part.move_to_end(name)
        return entry.value

    def keep(self, name: _Name, value: Any) -> None:
        """Add a value as the most recently used; an existing one stays."""
        if self.find(name) is not None:
            return
        entry = _Entry(value, ENTRY_BYTES + decoded_bytes(value), self._now_s())
        with self._lock:
            at = int(name[0] != OBJECT)
            old = self._parts[at].pop(name, None)
            self._parts[at][name] = entry
            self._bytes[at] += entry.nbytes - (old.nbytes if old is not None else 0)
            self._due_s = min(self._due_s, entry.used_s + self._expire_s)
            self._shrink(name)

    def obtain[T](self, name: _Name, make: Callable[[], T]) -> T:
        """Return the value; if it is missing, one thread calls `make` for it."""
        flight = self._flights.setdefault(name, _Flight())
        with flight.making:
            if not flight.ended:  # nobody has made it, or an interrupt ended the attempt
                try:
                    flight.value = self.find(name)
                    if flight.value is None:
                        flight.value = make()
                        self.keep(name, flight.value)
                except Exception as error:  # noqa: BLE001 - raised below, and where others wait
                    flight.error = error
                self._flights.pop(name, None)  # before its end: no later caller finds an old error
                flight.ended = True
        if flight.error is not None:
            raise flight.error
        value: T = flight.value
        return value

    def _expire(self, now_s: float) -> None:
        firsts = list[float]()
        with suppress(RuntimeError):  # another thread uses the first one: the next lookup goes on
            for at, part in enumerate(self._parts):
                while part:
                    due_s = next(iter(part.values())).used_s + self._expire_s
                    if due_s > now_s:
                        firsts.append(due_s)
                        break
                    self._drop(at)
            self._due_s = min(firsts, default=float("inf"))

    def _shrink(self, newest: _Name) -> None:
        while sum(self._bytes) > self.max_size:
            at = int(self._bytes[1] > self._bytes[0])
            if newest in self._parts[at] and len(self._parts[at]) == 1:
                at = 1 - at  # the value added last stays
                if not self._parts[at] or self._bytes[at] <= self.max_size // 2:
                    break
            self._drop(at)

    def _drop(self, at: int) -> None:
        _, entry = self._parts[at].popitem(last=False)
        self._bytes[at] -= entry.nbytes
        self._meter.add("cache_evicted_bytes", entry.nbytes)


_CACHES: weakref.WeakSet[DecodedCache] = weakref.WeakSet()


def _restart_caches() -> None:
    for cache in list(_CACHES):
        cache._restart()


os.register_at_fork(after_in_child=_restart_caches)


# --- sizes ----------------------------------------------------------------------------------------

type _Parts = Callable[[Any], Sequence[Any]]
_MOST: Final = 16


def decoded_bytes(value: Any) -> int:
    """Return the estimated bytes of memory of the value and everything in it.

    Examples
    --------
    >>> import numpy as np
    >>> from zarr_manifests.engine.objects import decoded_bytes
    >>> 80_000 <= decoded_bytes((np.zeros(10_000), b"")) <= 81_000
    True
    """
    total, due = 0.0, list[tuple[Any, float]]([(value, 1.0)])
    seen: set[int] = set()
    while due:
        item, weight = due.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        kind = type(item)
        if hasattr(kind, "memory"):
            own, rest = item.memory()
            total += weight * own
            due.extend([(part, weight) for part in rest if part])
            continue
        total += weight * sys.getsizeof(item)
        if kind not in _PARTS:
            _PARTS[kind] = _parts_of(kind)
        get = _PARTS[kind]
        if get is None:
            continue
        parts = get(item)
        if len(parts) > _MOST:
            some = parts[:: len(parts) // _MOST | 1]  # odd: samples both of alternating items
            parts, weight = some, weight * len(parts) / len(some)
        due.extend([(part, weight) for part in parts])
    return int(total)


def _parts_of(kind: type) -> _Parts | None:
    """How to get the parts of a value of this type; None if it has none."""
    if issubclass(kind, tuple | list):
        return lambda item: item
    if issubclass(kind, Mapping):
        return lambda item: (*item.keys(), *item.values())
    if issubclass(kind, np.ndarray):
        return lambda item: () if item.base is None else (item.base,)
    names = getattr(kind, "__struct_fields__", ())
    if len(names) > 1:
        return attrgetter(*names)
    return (lambda item: (getattr(item, names[0]),)) if names else None


_PARTS: dict[type, _Parts | None] = {}


# --- chunks ---------------------------------------------------------------------------------------


class ChunkCache:
    """Chunk bytes by their `NativeRef` or `VirtualRef`.

    A chunk is identified by the range of its object and its checksum, a virtual chunk by all that
    its ref records. So the cache never returns another chunk, nor another version of one. Only
    whole chunks that match their checksums are kept, and none larger than `chunk_bytes`. Of virtual
    chunks, only remote ones are whose refs record an etag, a time or a checksum; while one is kept,
    a change of its file is not noticed. Inline chunks are in the metadata.
    The cache is shared by all sessions of a repository object. It is not pickled: a copy in another
    process starts empty.
    """

    def __init__(self, options: CacheOptions, runtime: Runtime, meter: Meter) -> None:
        bounds = CacheOptions(max_size=options.chunk_bytes, expire_ms=options.expire_ms)
        self._kept = DecodedCache(bounds, runtime, meter)
        self._meter = meter

    def find(self, ref: NativeRef | VirtualRef) -> bytes | None:
        """The chunk's bytes; None if they are not cached."""
        data: bytes | None = self._kept.find(_chunk_name(ref))
        self._meter.add("chunk_cache_misses" if data is None else "chunk_cache_hits")
        return data

    def holds(self, ref: NativeRef | VirtualRef) -> bool:
        """Whether the chunk is there, as far as can be told without reading it."""
        return _chunk_name(ref) in self._kept

    def keep(self, ref: NativeRef | VirtualRef, data: bytes) -> None:
        """Keep a whole chunk; the caller has compared its checksum."""
        if ENTRY_BYTES + decoded_bytes(data) <= self._kept.max_size:
            self._kept.keep(_chunk_name(ref), data)


def _chunk_name(ref: NativeRef | VirtualRef) -> tuple[Any, ...]:
    """What identifies the chunk's bytes: all that its ref records."""
    if isinstance(ref, NativeRef):
        return "chunk", ref
    source = ref.source
    version = source.etag, source.modified_ms, source.nbytes
    place = source.container, source.path, ref.offset, ref.length, ref.crc32c
    return "chunk", repr((*place, *version)).encode()


_DISK_ABREAST: Final = 8
_BYTES_A_THREAD: Final = 32 * 1024
_CREATIONS: Final = 5
_LINEAGE_BYTES: Final = 6


class SessionKeys:
    """Generates the keys of one writer's objects: `<kind>/<session>/<n>`.

    The first 48 random bits of a session id are its lineage, which copies of the session share; the
    other 48 bits differ from copy to copy. `epoch` is the epoch of the session's claim of its
    branch, if it has claimed it.
    """

    def __init__(
        self,
        start: int,
        runtime: Runtime,
        lineage: bytes | None = None,
        *,
        epoch: int | None = None,
    ) -> None:
        self._runtime = runtime
        self.start = start
        self.epoch = epoch
        self.lineage = lineage or runtime.random_bytes(_LINEAGE_BYTES)
        self._own = self._draw()

    def _draw(self) -> _Own:
        own = self._runtime.random_bytes(_LINEAGE_BYTES)
        return _Own(os.getpid(), new_session_id(self.start, self.lineage + own))

    def next(self, kind: str) -> str:
        """A new key, never used before."""
        own = self._current()
        return object_key(kind, own.session_id, next(own.numbers))

    def key_for(self, kind: str, data: bytes) -> str:
        """The key under which these bytes were already written, or a new one."""
        found = [key for key in self._current().written if key.startswith(f"{kind}/")]
        digest = _digest(data) if found else b""  # a first commit has none to compare with
        same = (key for key in found if self._current().written[key] == digest)
        return next(same, None) or self.next(kind)

    def has_written(self, key: str) -> bool:
        """Whether this session has written an object under the key."""
        return key in self._current().written

    def note_written(self, key: str, data: bytes) -> None:
        """Note that these bytes are stored under a key of this session."""
        self._current().written[key] = _digest(data)

    @property
    def session_id(self) -> str:
        """The session id in this process."""
        return self._current().session_id

    def _current(self) -> _Own:
        if self._own.pid != os.getpid():
            self._own = self._draw()
        return self._own

    @property
    def lineage_prefix(self) -> str:
        """The common prefix of chunk keys of this session and all its copies."""
        return f"chunks/{self.start:012d}-{self.lineage.hex()}"


class _Own(Struct):
    """The part of a session's keys that belongs to one process."""

    pid: int
    session_id: str
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    written: dict[str, bytes] = {}
    """Key -> digest of the bytes written there."""


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()


def create_own(
    storage: Storage, key: str, data: bytes | memoryview, *, durable: bool = True
) -> None:
    """Write an object under a key that only this writer uses.

    If the key exists, the answer to an earlier call must have been lost. The existing bytes are
    compared to make sure.

    Raises
    ------
    StorageError
        If it could not be written, or other bytes are stored there.
    """
    if create_or_find(storage, key, data, durable=durable) is not None:
        raise StorageError(
            f"{key} exists with other bytes in {storage.url}; two writers share a "
            "session id, which only a broken source of randomness explains"
        )


def create_or_find(
    storage: Storage, key: str, data: bytes | memoryview, *, durable: bool = True
) -> bytes | None:
    """Write an object if its key is free; the first bytes of what is there instead, if anything.

    Raises
    ------
    StorageError
        If it could not be written.
    """
    for _ in range(_CREATIONS):
        if storage.create(key, data, durable=durable):
            return None
        try:
            found = storage.get(key, 0, len(data) + 1)
        except ObjectNotFoundError:  # contradicts the answer before
            continue
        return None if found == data else found
    raise StorageError(
        f"{key} cannot be written to {storage.url}: the storage says that it exists, and that it "
        "does not; try again later"
    )


def is_there(storage: ReadableStorage, key: str) -> bool:
    """Whether the storage has an object with that key, by one request."""
    try:
        storage.head(key)
    except ObjectNotFoundError:
        return False
    return True


class NotAtHandError(Exception):
    """The object would have to be fetched."""


class _Decodable(Protocol):
    @classmethod
    def from_object(cls, data: bytes, ref: BlobRef) -> Any: ...


type Wanted = tuple[BlobRef | ManifestRef, Any]
"""An object, and the type it is decoded as; or a manifest, and the part of one of its tables."""


def _name(ref: BlobRef, kind: type[Any]) -> tuple[Any, ...]:
    """The cache name of a decoded object: the whole pointer, and the type it is decoded as."""
    return OBJECT, ref.name, ref.length, ref.crc32c, kind


class ObjectReader:
    """Reads the immutable metadata objects of one repository.

    Attributes
    ----------
    cache : DecodedCache
        Decoded values, in memory.
    meter : Meter
        Counts what is done here, and the calls of a metered storage.
    """

    storage: ReadableStorage
    _refs = True

    def __init__(
        self, storage: ReadableStorage, runtime: Runtime, options: CacheOptions | None = None
    ) -> None:
        self.storage = storage
        self.meter = meter_of(storage)
        self._runtime = runtime
        self.cache = DecodedCache(options or CacheOptions(), runtime, self.meter)

    def load[T: _Decodable](self, ref: BlobRef, kind: type[T], fetched: bytes | None = None) -> T:
        """Return the decoded object that `ref` points to; `fetched` has its bytes, if available.

        Raises
        ------
        CorruptObjectError
            If it is missing, or does not match the pointer.
        """
        name = _name(ref, kind)
        found = self.cache.find(name)
        if found is not None:
            self.meter.add("cache_hits")
            return cast(T, found)
        self.meter.add("cache_misses")
        return cast(T, self._obtain(name, partial(self._decoded, ref, kind, fetched)))

    def _obtain[T](self, name: tuple[Any, ...], make: Callable[[], T]) -> T:
        return self.cache.obtain(name, make)

    def load_all(self, wanted: Sequence[Wanted]) -> dict[Any, Any]:
        """Return what is wanted, by name; missing objects are fetched in one parallel round.

        For a table that is not in memory, that is its block, and that of the ids it shares; or the
        whole manifest, if that is small, wanted as well, or in memory. The result holds what the
        cache may drop.
        """
        loaded: dict[Any, Any] = {}
        due: dict[str, tuple[BlobRef, type[_Decodable]]] = {}
        for of, kind in wanted:
            if isinstance(of, BlobRef):
                due[of.name] = of, kind
                continue
            name = _table_name(of.blob, kind)
            table = self.cache.find(name)
            if table is None:
                due.update((holder[0].name, holder) for holder in self._holders(of, kind))
            else:
                loaded[name] = table
        whole = {ref.key for ref, _ in due.values() if not ref.offset}
        for place, (ref, kind) in [*due.items()]:
            here = self.recall(ref, kind)
            self.meter.add("cache_hits", int(here is not None))
            if here is None and ref.copy is not None:
                here = self.load(ref, kind)
            if here is not None:
                loaded[place] = here
            if here is not None or (ref.offset and ref.key in whole):
                del due[place]
        requests = self._requests([*due.values()])
        most = len(requests)
        if self.storage.capabilities.turns:
            # More parallel reads do not make a disk faster, and threads cost more than small reads.
            nbytes = sum(ref.length for ref, _ in due.values())
            most = min(_DISK_ABREAST, 1 + nbytes // _BYTES_A_THREAD)
        groups = [requests[i::most] for i in range(min(most, len(requests)))]
        calls = [partial(self._load_each, group) for group in groups]
        for found in self._runtime.parallel(calls):
            loaded |= found
        return loaded

    def _requests(
        self, wanted: Sequence[tuple[BlobRef, type[_Decodable]]]
    ) -> list[list[tuple[BlobRef, type[_Decodable]]]]:
        """Each of the objects alone; the blocks of an object that one request reads together."""
        found = [[one] for one in wanted if not one[0].offset]
        blocks = grouped((one[0].key, one) for one in wanted if one[0].offset)
        room = self.storage.capabilities
        for of in blocks.values():
            starts, lengths = [ref.offset for ref, _ in of], [ref.length for ref, _ in of]
            some = coalesce(starts, lengths, gap_bytes=room.gap_bytes, span_bytes=room.span_bytes)
            found += [[of[i] for i in sorted(each.members)] for each in some]
        return found

    def _load_each(
        self, requests: Sequence[Sequence[tuple[BlobRef, type[_Decodable]]]]
    ) -> dict[str, Any]:
        loaded = {}
        for each in requests:
            (first, _), data, start = each[0], None, min(ref.offset for ref, _ in each)
            if len(each) > 1:
                data = self._range(first, start, max(r.offset + r.length for r, _ in each) - start)
            for ref, kind in each:
                at = ref.offset - start
                part = None if data is None else data[at : at + ref.length]
                loaded[ref.name] = self.load(ref, kind, part)
        return loaded

    def recall[T](self, ref: BlobRef, kind: type[T]) -> T | None:
        """The cached value of that type for the pointer, or None; fetches and counts nothing."""
        return cast("T | None", self.cache.find(_name(ref, kind)))

    def remember(self, ref: BlobRef, value: Any) -> None:
        """Keep a decoded object while there is room."""
        self.cache.keep(_name(ref, type(value)), value)

    def derived[T](self, ref: BlobRef, kind: type[T], make: Callable[[], T]) -> T:
        """A value of that type that depends on the object alone; made if it is not kept."""
        found = self.recall(ref, kind)
        if found is None:
            found = make()
            self.remember(ref, found)
        return found

    def _holders(
        self, ref: ManifestRef, part: Part
    ) -> list[tuple[BlobRef, type[Block | Manifest]]]:
        """What to load for a table."""
        block = None if self._is_read_whole(ref) else ref.block(part)
        if block is None:
            return [(ref.blob, Manifest)]
        ids = ref.ids_block() if self._refs else None
        return [(each, Block) for each in (block[0], ids) if each is not None]

    def _is_read_whole(self, ref: ManifestRef) -> bool:
        return ref.blob.copy is not None or self.has(ref.blob, Manifest)

    def table(self, ref: ManifestRef, part: Part, loaded: Mapping[Any, Any]) -> ChunkTable:
        """One of the manifest's tables, from what `load_all` found, as far as that has it."""
        held: ChunkTable | None = loaded.get(_table_name(ref.blob, part)) if loaded else None
        if held is not None:
            return held

        def find() -> tuple[bytes, tuple[bytes, ...]]:
            whole, at = loaded.get(ref.blob.key), ref.block(part)
            if at is None or whole or (at[0].name not in loaded and self._is_read_whole(ref)):
                whole = whole or self.load(ref.blob, Manifest)
                return whole.data(part), whole.ids
            (block, number), ids = at, ref.ids_block() if self._refs else None
            of_block, of_ids = (
                () if each is None else (loaded.get(each.name) or self.load(each, Block)).tables
                for each in (block, ids)
            )
            if number >= len(of_block):
                raise CorruptObjectError(f"{ref.blob.key} has no such table in a block")
            return of_block[number], of_ids

        return self.table_in(ref.blob, part, find)

    def table_in(
        self, ref: BlobRef, part: Part, find: Callable[[], tuple[bytes, tuple[bytes, ...]]]
    ) -> ChunkTable:
        """A chunk table in the object; `find` returns it encoded, and the ids that it shares."""
        found = self.table_here(ref, part)
        if found is None:
            decode = partial(decode_table, part, refs=self._refs)
            found = self._obtain(_table_name(ref, part), lambda: decode(*find()))
        return found

    def table_here(self, ref: BlobRef, part: Part) -> ChunkTable | None:
        """A chunk table in the object, if it is in memory."""
        return self.cache.find(_table_name(ref, part))

    def has(self, ref: BlobRef | ManifestRef, kind: Any) -> bool:
        """Whether loading that, an object or a table of a manifest, needs no request now."""
        if isinstance(ref, ManifestRef):
            here = self.table_here(ref.blob, kind) is not None
            return here or all(self.has(*holder) for holder in self._holders(ref, kind))
        return ref.copy is not None or _name(ref, kind) in self.cache

    def _decoded(self, ref: BlobRef, kind: type[_Decodable], fetched: bytes | None = None) -> Any:
        return kind.from_object(self._bytes(ref) if fetched is None else fetched, ref)

    def _bytes(self, ref: BlobRef) -> bytes:
        if ref.copy is not None:
            return ref.copy
        return self._range(ref, ref.offset, ref.length if ref.offset else ref.length + 1)

    def _range(self, ref: BlobRef, start: int, length: int) -> bytes:
        self._runtime.checkpoint("objects.get")
        try:
            return self.storage.get(ref.key, start, length)
        except ObjectNotFoundError as error:
            raise CorruptObjectError(
                f"{ref.key} is referenced and not there ({self.storage.url}); restore it from a "
                "backup, or open another snapshot"
            ) from error


class Objects(ObjectReader):
    """Reads the metadata objects of one repository, and writes this writer's own."""

    storage: Storage

    def create(self, key: str, data: bytes) -> None:
        """Durably write an object under one of this writer's own keys.

        Raises
        ------
        StorageError
            If it could not be written, or other bytes are stored there.
        """
        self._runtime.checkpoint("objects.create")
        create_own(self.storage, key, data)


class AtHand(ObjectReader):
    """A view of the objects that loads only what is cached or copied into a pointer."""

    def __init__(self, objects: ObjectReader) -> None:
        self.storage, self.meter, self.cache = objects.storage, objects.meter, objects.cache
        self._runtime = replace(objects._runtime, parallel=one_by_one)

    def load[T: _Decodable](self, ref: BlobRef, kind: type[T], fetched: bytes | None = None) -> T:
        """Return the decoded object that `ref` points to; `fetched` has its bytes, if available.

        Raises
        ------
        NotAtHandError
            If it would have to be fetched. (It joins no flight, which others may wait for.)
        """
        found = self.recall(ref, kind)
        if found is not None:
            return found
        data = ref.copy if fetched is None else fetched
        if data is None:
            raise NotAtHandError(ref.key)
        return cast(T, kind.from_object(data, ref))

    def _obtain[T](self, name: tuple[Any, ...], make: Callable[[], T]) -> T:
        found: T | None = self.cache.find(name)
        if found is None:
            found = make()
            self.cache.keep(name, found)
        return found

    def _range(self, ref: BlobRef, start: int, length: int) -> bytes:
        raise NotAtHandError(ref.key)


class Passing(ObjectReader):
    """A view of the objects that keeps only the chunk tables that were decoded last.

    Without `refs`, tables say which chunks they have, and not where these are.
    """

    def __init__(self, objects: ObjectReader, max_size: int, *, refs: bool) -> None:
        self.storage, self.meter, self.cache = objects.storage, objects.meter, objects.cache
        self._runtime, self._refs = objects._runtime, refs
        self._recent = DecodedCache(CacheOptions(max_size, 0), self._runtime, self.meter)

    def _obtain[T](self, name: tuple[Any, ...], make: Callable[[], T]) -> T:
        cache = self.cache if name[0] == OBJECT else self._recent
        return cache.obtain(name, make)


def _table_name(ref: BlobRef, part: Part) -> tuple[Any, ...]:
    box = part.box  # without the part itself, whose hash is made in Python
    return "table", ref.key, ref.length, ref.crc32c, part.node_id, box.lo, box.hi, part.count


class Upload(Struct, frozen=True):
    """An encoded object and its key."""

    key: str
    data: bytes

    @classmethod
    def of(cls, keys: SessionKeys, kind: str, data: bytes) -> Upload:
        """The bytes under the key where the session has written them already, or a new key."""
        return cls(keys.key_for(kind, data), data)

    @property
    def ref(self) -> BlobRef:
        """The pointer to it."""
        return BlobRef.to(self.key, self.data)
