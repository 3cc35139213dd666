"""A storage that counts its calls, at the cost of a method call and an uncontended lock.

Invariant: it behaves like the storage it wraps. Its pickle is that of the wrapped storage, so
another process does its own counting.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any

from zarr_manifests.metrics import Meter
from zarr_manifests.storage.protocol import (
    Capabilities,
    ObjectInfo,
    ReadableStorage,
    ReadsInto,
    Storage,
    Tagged,
    Token,
)


class _Failures:
    """A block that adds one to these counts if it raises an error."""

    __slots__ = ("meter", "names")

    def __init__(self, meter: Meter, *names: str) -> None:
        self.meter, self.names = meter, names

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            for name in self.names:
                self.meter.add(name)


class MeteredStorage:
    """Passes every call to `storage` and counts it in `meter`.

    `sync` is not counted: where written objects are durable, it needs no request.
    """

    __slots__ = ("_reading", "_writing", "meter", "storage")

    def __init__(self, storage: Storage, meter: Meter) -> None:
        self.storage = storage
        self.meter = meter
        # A read is counted with its bytes once it has succeeded, a write before it begins.
        self._reading = _Failures(meter, "read_requests", "failed_requests")
        self._writing = _Failures(meter, "failed_requests")

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

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        with self._reading:
            data = self.storage.get(key, start, length)
        self.meter.request("read_requests", len(data))
        return data

    def read_into(self, key: str, start: int, room: memoryview) -> int | None:
        if not isinstance(self.storage, ReadsInto):
            return None
        with self._reading:
            count = self.storage.read_into(key, start, room)
        if count is not None:
            self.meter.request("read_requests", count)
        return count

    def get_tagged(self, key: str) -> Tagged:
        with self._reading:
            tagged = self.storage.get_tagged(key)
        self.meter.request("read_requests", len(tagged.data))
        return tagged

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        self.meter.request("write_requests", len(data))
        with self._writing:
            self.storage.put(key, data, durable=durable)

    def create(self, key: str, data: bytes | memoryview, *, durable: bool = True) -> bool:
        self.meter.request("write_requests", len(data))
        with self._writing:
            return self.storage.create(key, data, durable=durable)

    def cas(
        self,
        key: str,
        data: bytes,
        token: Token | None,
        *,
        then_create: tuple[str, bytes] | None = None,
    ) -> Token | None:
        self.meter.request("write_requests", len(data))
        with self._writing:
            new = self.storage.cas(key, data, token, then_create=then_create)
        if new is not None and then_create is not None:
            self.meter.request("write_requests", len(then_create[1]))
        return new

    def head(self, key: str) -> ObjectInfo:
        with self._reading:
            info = self.storage.head(key)
        self.meter.request("read_requests")
        return info

    def list(self, prefix: str = "", after: str = "") -> Iterator[ObjectInfo]:
        self.meter.request("list_requests")
        return self.storage.list(prefix, after)

    def stray(self) -> str | None:
        self.meter.request("list_requests")
        return self.storage.stray()

    def delete_many(self, keys: Iterable[str]) -> None:
        self.meter.request("delete_requests")
        self.storage.delete_many(keys)

    def sync(self, keys: Iterable[str]) -> None:
        self.storage.sync(keys)

    async def get_async(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        with self._reading:
            data = await self.storage.get_async(key, start, length)
        self.meter.request("read_requests", len(data))
        return data

    async def create_async(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        self.meter.request("write_requests", len(data))
        with self._writing:
            return await self.storage.create_async(key, data, durable=durable)


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
