"""A storage that counts its calls, at the cost of a method call and an uncontended lock.

Invariant: it behaves like the storage it wraps. Its pickle is that of the wrapped storage, so
another process does its own counting.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
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

__all__ = ["MeteredStorage", "meter_of", "metered", "place_of", "unmetered"]


class MeteredStorage:
    """Passes every call to `storage` and counts it in `meter`.

    `sync` is not counted: where written objects are durable, it needs no request.
    """

    __slots__ = ("meter", "storage")

    def __init__(self, storage: Storage, meter: Meter) -> None:
        self.storage = storage
        self.meter = meter

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
        try:
            data = self.storage.get(key, start, length)
        except BaseException:
            self._failed("read_requests")
            raise
        self.meter.read_request(len(data))
        return data

    def read_into(self, key: str, start: int, room: memoryview) -> int | None:
        if not isinstance(self.storage, ReadsInto):
            return None
        try:
            count = self.storage.read_into(key, start, room)
        except BaseException:
            self._failed("read_requests")
            raise
        if count is not None:
            self.meter.read_request(count)
        return count

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        try:
            found = self.storage.get_ranges(key, ranges)
        except BaseException:
            self._failed("read_requests")
            raise
        self.meter.request("read_requests", sum(map(len, found)))
        return found

    def get_tagged(self, key: str) -> Tagged:
        try:
            tagged = self.storage.get_tagged(key)
        except BaseException:
            self._failed("read_requests")
            raise
        self.meter.request("read_requests", len(tagged.data))
        return tagged

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        try:
            self.storage.put(key, data, durable=durable)
        except BaseException:
            self._failed("write_requests", len(data))
            raise
        self.meter.request("write_requests", 0, len(data))

    def create(self, key: str, data: bytes | memoryview, *, durable: bool = True) -> bool:
        try:
            created = self.storage.create(key, data, durable=durable)
        except BaseException:
            self._failed("write_requests", len(data))
            raise
        self.meter.request("write_requests", 0, len(data))
        return created

    def cas(
        self,
        key: str,
        data: bytes,
        token: Token | None,
        *,
        then_create: tuple[str, bytes] | None = None,
    ) -> Token | None:
        try:
            new = self.storage.cas(key, data, token, then_create=then_create)
        except BaseException:
            self._failed("write_requests", len(data))
            raise
        self.meter.request("write_requests", 0, len(data))
        if new is not None and then_create is not None:
            self.meter.request("write_requests", 0, len(then_create[1]))
        return new

    def head(self, key: str) -> ObjectInfo:
        try:
            info = self.storage.head(key)
        except BaseException:
            self._failed("read_requests")
            raise
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
        try:
            data = await self.storage.get_async(key, start, length)
        except BaseException:
            self._failed("read_requests")
            raise
        self.meter.read_request(len(data))
        return data

    async def create_async(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        try:
            created = await self.storage.create_async(key, data, durable=durable)
        except BaseException:
            self._failed("write_requests", len(data))
            raise
        self.meter.request("write_requests", 0, len(data))
        return created

    def _failed(self, kind: str, written_bytes: int = 0) -> None:
        self.meter.request(kind, 0, written_bytes)
        self.meter.add("failed_requests")


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
