"""Immutable metadata objects: fetched once, decoded once, written once.

Fetches go through an LRU of decoded values, bounded by encoded bytes, and are *single-flight*:
while one thread fetches an object, others that want it wait for that fetch. Writes are
put-if-absent under keys that only this writer uses, so "already there" can only be a lost answer
to the writer's own call; the bytes are read back and compared before that is believed.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

from zarr_manifests.errors import CorruptObjectError, ObjectNotFoundError, StorageError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.runtime import ForkSafeLock, Runtime
from zarr_manifests.storage import Storage

__all__ = ["Objects", "Upload"]


class _Decodable(Protocol):
    @classmethod
    def from_object(cls, data: bytes, ref: BlobRef) -> Any: ...


type _Name = tuple[str, int, int, type[Any]]


def _name(ref: BlobRef, kind: type[Any]) -> _Name:
    """What a cached value is known by: all that a pointer says, and what it was decoded as."""
    return ref.key, ref.length, ref.crc32c, kind


class Objects:
    """Reads and writes the immutable metadata objects of one repository."""

    def __init__(self, storage: Storage, runtime: Runtime, cache_bytes: int = 256 << 20) -> None:
        self.storage = storage
        self._runtime = runtime
        self._cache_bytes = cache_bytes
        self._cached_bytes = 0
        self._cache: OrderedDict[_Name, tuple[Any, int]] = OrderedDict()
        self._in_flight: dict[_Name, Future[Any]] = {}
        self._pid = os.getpid()
        self._lock = ForkSafeLock()

    def load[T: _Decodable](self, ref: BlobRef, kind: type[T]) -> T:
        """The decoded object that `ref` points to.

        Raises
        ------
        CorruptObjectError
            If it is missing, or is not what the pointer says.
        """
        name = _name(ref, kind)
        with self._lock:
            if self._pid != os.getpid():  # the threads that fetch are the parent's
                self._pid, self._in_flight = os.getpid(), {}
            if name in self._cache:
                self._cache.move_to_end(name)
                return cast(T, self._cache[name][0])
            waiting = self._in_flight.get(name)
            if waiting is None:
                mine = self._in_flight[name] = Future()
        if waiting is not None:
            return cast(T, waiting.result())
        try:
            value = kind.from_object(self._bytes(ref), ref)
        except BaseException as error:
            with self._lock:
                del self._in_flight[name]
            mine.set_exception(error)
            raise
        self.remember(ref, value)
        mine.set_result(value)
        return cast(T, value)

    def cached[T](self, ref: BlobRef, kind: type[T]) -> T | None:
        """What is remembered of that kind under the pointer; None if nothing is."""
        with self._lock:
            return cast(T | None, self._cache.get(_name(ref, kind), (None, 0))[0])

    def prefetch(self, wanted: Sequence[tuple[BlobRef, type[_Decodable]]]) -> None:
        """Fetch what is neither cached nor carried along, in one parallel round."""
        with self._lock:
            due = {
                r.key: (r, k)
                for r, k in wanted
                if r.copy is None and _name(r, k) not in self._cache
            }
        self._runtime.parallel([partial(self.load, ref, kind) for ref, kind in due.values()])

    def remember(self, ref: BlobRef, value: Any) -> None:
        """Keep a decoded object, for as long as there is room."""
        name = _name(ref, type(value))
        with self._lock:
            self._in_flight.pop(name, None)
            if name not in self._cache:
                self._cache[name] = (value, ref.length)
                self._cached_bytes += ref.length
            while self._cached_bytes > self._cache_bytes and len(self._cache) > 1:
                _, (_, nbytes) = self._cache.popitem(last=False)
                self._cached_bytes -= nbytes

    def _bytes(self, ref: BlobRef) -> bytes:
        if ref.copy is not None:
            return ref.copy
        self._runtime.checkpoint("objects.get")
        try:
            return self.storage.get(ref.key, 0, ref.length + 1)
        except ObjectNotFoundError as error:
            raise CorruptObjectError(
                f"{ref.key} is referenced and not there ({self.storage.url}); restore it from a "
                "backup, or open another snapshot"
            ) from error

    def create(self, key: str, data: bytes) -> None:
        """Write one of this writer's own objects, durably.

        Raises
        ------
        StorageError
            If it could not be written, or something else lies there.
        """
        self._runtime.checkpoint("objects.create")
        if not self.storage.create(key, data) and self.storage.get(key) != data:
            raise StorageError(
                f"{key} exists with other bytes in {self.storage.url}; two writers share a "
                "session id, which only a broken source of randomness explains"
            )


@dataclass(frozen=True, slots=True)
class Upload:
    """An encoded object and where it goes."""

    key: str
    data: bytes

    @property
    def ref(self) -> BlobRef:
        """The pointer to it."""
        return BlobRef.to(self.key, self.data)
