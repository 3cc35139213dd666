"""A bounded in-memory cache of values decoded from immutable objects.

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

import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any, Final

import numpy as np

from zarr_manifests.config import CacheOptions
from zarr_manifests.format.chunk_table import NativeRef, VirtualRef
from zarr_manifests.metrics import Meter
from zarr_manifests.runtime import Runtime

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
    >>> from zarr_manifests.engine.caches import decoded_bytes
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
    whole chunks that match their checksums are kept: a virtual chunk, if it is remote and its ref
    records an etag, a time or a checksum (while it is kept, a change of its file is not noticed),
    and no inline chunk, which is in the metadata. A chunk larger than `chunk_bytes` is not kept.
    The cache is shared by all sessions of a repository object. It is not pickled: a copy in another
    process starts empty.
    """

    def __init__(self, options: CacheOptions, runtime: Runtime, meter: Meter) -> None:
        bounds = CacheOptions(max_size=options.chunk_bytes, expire_ms=options.expire_ms)
        self._kept = DecodedCache(bounds, runtime, meter)
        self._meter = meter

    def find(self, ref: NativeRef | VirtualRef) -> bytes | None:
        """The chunk's bytes; None if they are not cached."""
        data: bytes | None = self._kept.find(_name(ref))
        self._meter.add("chunk_cache_misses" if data is None else "chunk_cache_hits")
        return data

    def holds(self, ref: NativeRef | VirtualRef) -> bool:
        """Whether the chunk is there, as far as can be told without reading it."""
        return _name(ref) in self._kept

    def keep(self, ref: NativeRef | VirtualRef, data: bytes) -> None:
        """Keep a whole chunk; the caller has compared its checksum."""
        if ENTRY_BYTES + decoded_bytes(data) <= self._kept.max_size:
            self._kept.keep(_name(ref), data)


def _name(ref: NativeRef | VirtualRef) -> tuple[Any, ...]:
    """What identifies the chunk's bytes: all that its ref records."""
    if isinstance(ref, NativeRef):
        return "chunk", ref
    source = ref.source
    version = source.etag, source.modified_ms, source.nbytes
    place = source.container, source.path, ref.offset, ref.length, ref.crc32c
    return "chunk", repr((*place, *version)).encode()
