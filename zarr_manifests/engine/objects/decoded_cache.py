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
from operator import itemgetter
from typing import Any, Final

from zarr_manifests.config import CacheOptions
from zarr_manifests.engine.objects.decoded_sizes import decoded_bytes
from zarr_manifests.metrics import Meter
from zarr_manifests.runtime import Runtime

OBJECT: Final = "object"
"""First element of the names of objects; names of other values start differently."""

ENTRY_BYTES: Final = 400
"""Bytes of an entry besides its value: its name, its place in the order."""


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
        # Least recently used first, except for the names in `_used`.
        self._objects: OrderedDict[tuple[Any, ...], _Entry] = OrderedDict()
        self._made: OrderedDict[tuple[Any, ...], _Entry] = OrderedDict()
        self._used: dict[tuple[Any, ...], None] = {}
        self._bytes = [0, 0]
        self._due_s = float("inf")  # no value expires before this time
        self._restart()
        _CACHES.add(self)

    def _restart(self) -> None:
        self._lock = threading.RLock()
        self._flights: dict[tuple[Any, ...], _Flight] = {}
        # A thread of the parent may have been between adding a value and adding its size.
        self._bytes[:] = (
            sum(entry.nbytes for entry in part.values()) for part in (self._objects, self._made)
        )

    @property
    def nbytes(self) -> int:
        """Estimated bytes that the values take."""
        with self._lock:  # not between adding one and dropping another
            return sum(self._bytes)

    def __contains__(self, name: tuple[Any, ...]) -> bool:
        with self._lock:
            return name in self._part(name)[0]

    def clear(self) -> None:
        """Forget all values."""
        with self._lock:
            self._objects.clear()
            self._made.clear()
            self._used.clear()
            self._bytes[:] = 0, 0

    def find(self, name: tuple[Any, ...]) -> Any | None:
        """The value; None if it is not cached."""
        now_s = self._now_s()
        if now_s >= self._due_s:
            with self._lock:
                self._expire(now_s)
        # Without the lock, which would double the time of each chunk's lookup.
        entry = (self._objects if name[0] == OBJECT else self._made).get(name)
        if entry is None:
            return None
        entry.used_s = now_s
        self._used[name] = None
        return entry.value

    def keep(self, name: tuple[Any, ...], value: Any) -> None:
        """Add a value as the most recently used; an existing one stays."""
        if self.find(name) is not None:
            return
        entry = _Entry(value, ENTRY_BYTES + decoded_bytes(value), self._now_s())
        with self._lock:
            self._settle()
            part, at = self._part(name)
            old = part.pop(name, None)
            part[name] = entry
            self._bytes[at] += entry.nbytes - (old.nbytes if old is not None else 0)
            self._due_s = min(self._due_s, entry.used_s + self._expire_s)
            self._shrink(name)

    def obtain(self, name: tuple[Any, ...], make: Callable[[], Any]) -> Any:
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
        return flight.value

    def _part(self, name: tuple[Any, ...]) -> tuple[OrderedDict[tuple[Any, ...], _Entry], int]:
        return (self._objects, 0) if name[0] == OBJECT else (self._made, 1)

    def _settle(self) -> None:
        """Move the values in `_used` to the end of the order."""
        used, self._used = self._used, {}
        known = [
            (part[name].used_s, name, part)
            for name in [*used]
            if name in (part := self._part(name)[0])
        ]
        for _, name, part in sorted(known, key=itemgetter(0)):
            part.move_to_end(name)

    def _expire(self, now_s: float) -> None:
        self._settle()
        self._due_s = float("inf")
        for at, part in enumerate((self._objects, self._made)):
            while part:
                due_s = next(iter(part.values())).used_s + self._expire_s
                if due_s > now_s:
                    self._due_s = min(self._due_s, due_s)
                    break
                self._drop(part, at)

    def _shrink(self, newest: tuple[Any, ...]) -> None:
        parts = self._objects, self._made
        while sum(self._bytes) > self.max_size:
            at = int(self._bytes[1] > self._bytes[0])
            if next(iter(parts[at])) == newest and len(parts[at]) == 1:
                at = 1 - at  # the value added last stays
                if not parts[at] or self._bytes[at] <= self.max_size // 2:
                    break
            self._drop(parts[at], at)

    def _drop(self, part: OrderedDict[tuple[Any, ...], _Entry], at: int) -> None:
        _, entry = part.popitem(last=False)
        self._bytes[at] -= entry.nbytes
        self._meter.add("cache_evicted_bytes", entry.nbytes)


_CACHES: weakref.WeakSet[DecodedCache] = weakref.WeakSet()


def _restart_caches() -> None:
    for cache in list(_CACHES):
        cache._restart()


os.register_at_fork(after_in_child=_restart_caches)
