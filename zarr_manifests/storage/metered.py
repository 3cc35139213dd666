"""A storage that counts its calls, at the cost of a method call and an uncontended lock.

Invariant: it behaves like the storage it wraps. Its pickle is that of the wrapped storage, so
another process does its own counting.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from zarr_manifests.metrics import Meter
from zarr_manifests.storage.protocol import (
    Capabilities,
    ReadableStorage,
    ReadsInto,
    Storage,
    Token,
)


class _Counted:
    """A block that is one request; counts it and its bytes, and whether it raises an error."""

    __slots__ = ("kind", "meter", "nbytes")

    def __init__(self, meter: Meter, kind: str, nbytes: int = 0) -> None:
        self.meter, self.kind, self.nbytes = meter, kind, nbytes

    def __enter__(self) -> None:
        self.meter.request(self.kind, self.nbytes)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.meter.add("failed_requests")


class MeteredStorage:
    """Passes every call to `storage` and counts it in `meter`.

    `sync` is not counted: where written objects are durable, it needs no request.
    """

    def __init__(self, storage: Storage, meter: Meter) -> None:
        self.storage, self.meter = storage, meter
        self.get = self._read(storage.get, len)
        self.get_tagged = self._read(storage.get_tagged, lambda tagged: len(tagged.data))
        self.head = self._read(storage.head, lambda _: 0)
        if isinstance(storage, ReadsInto):
            self.read_into = self._read(storage.read_into, lambda count: count or 0)
        self.list = self._counted("list_requests", storage.list)
        self.stray = self._counted("list_requests", storage.stray)
        self.delete_many = self._counted("delete_requests", storage.delete_many)
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
        with _Counted(self.meter, "write_requests", len(data)):
            self.storage.put(key, data, durable=durable)

    def create(self, key: str, data: bytes | memoryview, *, durable: bool = True) -> bool:
        with _Counted(self.meter, "write_requests", len(data)):
            return self.storage.create(key, data, durable=durable)

    def cas(
        self,
        key: str,
        data: bytes,
        token: Token | None,
        *,
        then_create: tuple[str, bytes] | None = None,
    ) -> Token | None:
        with _Counted(self.meter, "write_requests", len(data)):
            new = self.storage.cas(key, data, token, then_create=then_create)
        if new is not None and then_create is not None:
            self.meter.request("write_requests", len(then_create[1]))
        return new

    async def get_async(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        with _Counted(self.meter, "read_requests"):
            data = await self.storage.get_async(key, start, length)
        self.meter.add("bytes_read", len(data))
        return data

    async def create_async(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        with _Counted(self.meter, "write_requests", len(data)):
            return await self.storage.create_async(key, data, durable=durable)

    def _counted[**P, R](self, kind: str, call: Callable[P, R]) -> Callable[P, R]:
        request = _Counted(self.meter, kind)

        def counted(*args: P.args, **named: P.kwargs) -> R:
            with request:
                return call(*args, **named)

        return counted

    def _read[**P, R](self, call: Callable[P, R], size: Callable[[R], int]) -> Callable[P, R]:
        meter, request = self.meter, _Counted(self.meter, "read_requests")

        def read(*args: P.args, **named: P.kwargs) -> R:
            with request:
                found = call(*args, **named)
            meter.add("bytes_read", size(found))
            return found

        return read


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
