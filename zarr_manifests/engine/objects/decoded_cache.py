"""A bounded in-memory cache of values decoded from immutable objects.

Invariants:

- *Bounded.* Values take at most `max_size`, estimated by `decoded_sizes`; a larger value may stay
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
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from zarr_manifests.config import CacheOptions
from zarr_manifests.engine.objects.decoded_sizes import decoded_bytes
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

    def clear(self) -> None:
        """Forget all values."""
        with self._lock:
            for part in self._parts:
                part.clear()
            self._bytes[:] = 0, 0

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
