"""Base of storages that wrap a storage: every call goes through one method.

Invariant: a wrapper that overrides nothing behaves exactly like the storage it wraps. Async calls
go through the same hook, under the names of their synchronous variants.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from zarr_manifests.errors import UnsupportedStorageError
from zarr_manifests.storage import Storage
from zarr_manifests.storage.protocol import (
    Capabilities,
    KeepsTemporaryFiles,
    ObjectInfo,
    Tagged,
    TakesTurns,
    Token,
    Turn,
)


@dataclass(frozen=True, slots=True, eq=False)
class Call[R]:
    """One call of a storage.

    Parameters
    ----------
    op : str
        The name of the method, without `_async`.
    keys : tuple of str
        The key, the prefix of a `list`, or all keys of a call that takes many.
    run : callable
        Makes the call synchronously; may be called repeatedly.
    sent_nbytes : int
        Number of bytes written.
    """

    op: str
    keys: tuple[str, ...]
    run: Callable[[], R]
    sent_nbytes: int = 0

    @property
    def key(self) -> str:
        """The first key; empty if there is none."""
        return self.keys[0] if self.keys else ""


class WrappedStorage:
    """A storage that passes every call on; base class of wrappers.

    A subclass overrides `_around` and `_around_async`. Picklable if the wrapped storage is.

    Parameters
    ----------
    storage : Storage
        The storage to wrap.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._storage!r})"

    def _around[R](self, call: Call[R]) -> R:
        return call.run()

    async def _around_async[R](self, call: Call[R], run: Callable[[], Awaitable[R]]) -> R:
        return await run()

    @property
    def storage(self) -> Storage:
        """The wrapped storage."""
        return self._storage

    @property
    def url(self) -> str:
        return self._storage.url

    @property
    def capabilities(self) -> Capabilities:
        return self._storage.capabilities

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return self._around(Call("get", (key,), lambda: self._storage.get(key, start, length)))

    def get_tagged(self, key: str) -> Tagged:
        return self._around(Call("get_tagged", (key,), lambda: self._storage.get_tagged(key)))

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        def run() -> None:
            self._storage.put(key, data, durable=durable)

        self._around(Call("put", (key,), run, len(data)))

    def create(self, key: str, data: bytes | memoryview, *, durable: bool = True) -> bool:
        # Copied, since the call may be repeated when the caller has reused the view's buffer.
        return self._around(self._create_call("create", key, bytes(data), durable))

    def cas(
        self,
        key: str,
        data: bytes,
        token: Token | None,
        *,
        then_create: tuple[str, bytes] | None = None,
    ) -> Token | None:
        def run() -> Token | None:
            return self._storage.cas(key, data, token, then_create=then_create)

        return self._around(Call("cas", (key,), run, len(data)))

    def head(self, key: str) -> ObjectInfo:
        return self._around(Call("head", (key,), lambda: self._storage.head(key)))

    def list(self, prefix: str = "", after: str = "") -> Iterator[ObjectInfo]:
        return self._around(Call("list", (prefix,), lambda: self._storage.list(prefix, after)))

    def stray(self) -> str | None:
        return self._around(Call("stray", ("",), self._storage.stray))

    def delete_many(self, keys: Iterable[str]) -> None:
        many = tuple(keys)
        self._around(Call("delete_many", many, lambda: self._storage.delete_many(many)))

    def sync(self, keys: Iterable[str]) -> None:
        many = tuple(keys)
        self._around(Call("sync", many, lambda: self._storage.sync(many)))

    def remove_temporary(self, before_ms: int) -> int:
        """Like the wrapped storage, if it has temporary files."""
        inner = self._storage
        return inner.remove_temporary(before_ms) if isinstance(inner, KeepsTemporaryFiles) else 0

    def turn(self, name: str) -> Turn:
        """Like the wrapped storage, if it has turns; not counted as a call."""
        inner = self._storage
        if isinstance(inner, TakesTurns):
            return inner.turn(name)
        raise UnsupportedStorageError(f"writers cannot take turns in {inner.url}")

    async def get_async(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return await self._around_async(
            Call("get", (key,), lambda: self._storage.get(key, start, length)),
            lambda: self._storage.get_async(key, start, length),
        )

    async def create_async(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        return await self._around_async(
            self._create_call("create", key, data, durable),
            lambda: self._storage.create_async(key, data, durable=durable),
        )

    def _create_call(self, op: str, key: str, data: bytes, durable: bool) -> Call[bool]:
        return Call(op, (key,), lambda: self._storage.create(key, data, durable=durable), len(data))


def received_nbytes(result: Any) -> int:
    """The number of bytes of objects in the result of a read."""
    if isinstance(result, bytes):
        return len(result)
    if isinstance(result, Tagged):
        return len(result.data)
    return sum(map(len, result)) if isinstance(result, list) else 0
