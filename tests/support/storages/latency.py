"""Delaying the calls of a storage, like a remote object store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from msgspec.structs import replace

from storages.wrapped import Call, WrappedStorage
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage import Storage
from zarr_manifests.storage.protocol import Capabilities, Token, check_key


class LatencyStorage(WrappedStorage):
    """Waits before every call except `sync`, and reports that it is not `inline`.

    The `then_create` of a swap runs in the background after the swap, as on a remote storage.

    Parameters
    ----------
    storage : Storage
        The storage the calls are passed to.
    latency_s : float
        Seconds to wait.

    Examples
    --------
    >>> from zarr_manifests.storage.memory import MemoryStorage
    >>> from storages import LatencyStorage
    >>> storage = LatencyStorage(MemoryStorage(), latency_s=0.001)
    >>> storage.create("a", b"1"), storage.capabilities.inline
    (True, False)
    """

    def __init__(self, storage: Storage, *, latency_s: float) -> None:
        super().__init__(storage)
        self._latency_s = latency_s

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return partial(type(self), latency_s=self._latency_s), (self._storage,)

    @property
    def capabilities(self) -> Capabilities:
        return replace(self._storage.capabilities, inline=False)

    def cas(
        self,
        key: str,
        data: bytes,
        token: Token | None,
        *,
        then_create: tuple[str, bytes] | None = None,
    ) -> Token | None:
        if then_create is None:
            return super().cas(key, data, token)
        after_key, after_data = then_create
        check_key(after_key)
        new = super().cas(key, data, token)
        if new is not None:
            call = self._create_call("create", after_key, after_data, durable=True)
            try:
                SYSTEM.background(lambda: self._finish(call))
            except RuntimeError:  # the interpreter is exiting
                self._finish(call)
        return new

    def _finish(self, call: Call[bool]) -> None:
        self._around(call)

    def _around[R](self, call: Call[R]) -> R:
        if call.op != "sync":
            SYSTEM.sleep(self._latency_s)
        return call.run()

    async def _around_async[R](self, call: Call[R], run: Callable[[], Awaitable[R]]) -> R:
        await asyncio.sleep(self._latency_s)
        return await run()
