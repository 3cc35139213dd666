"""Delaying the calls of a storage, like a remote object store."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

from storages.wrapped import Call, WrappedStorage
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.runtime import SYSTEM, Runtime
from zarr_manifests.storage import Storage
from zarr_manifests.storage.protocol import Capabilities, Token, check_key

__all__ = ["LatencyStorage"]


class LatencyStorage(WrappedStorage):
    """Waits before every call except `sync`, and reports that it is not `inline`.

    The `then_create` of a swap runs in the background after the swap, as on a remote storage.

    Parameters
    ----------
    storage : Storage
        The storage the calls are passed to.
    latency_s : float
        Seconds to wait.
    runtime : Runtime
        Used to wait and to run background calls. The storage can only be pickled with the default
        runtime.

    Raises
    ------
    InvalidArgumentError
        If the latency is negative.

    Examples
    --------
    >>> from zarr_manifests.storage.memory import MemoryStorage
    >>> from storages import LatencyStorage
    >>> storage = LatencyStorage(MemoryStorage(), latency_s=0.001)
    >>> storage.create("a", b"1"), storage.capabilities.inline
    (True, False)
    """

    def __init__(
        self, storage: Storage, *, latency_s: float = 0.02, runtime: Runtime = SYSTEM
    ) -> None:
        if not latency_s >= 0:
            raise InvalidArgumentError(f"a latency of {latency_s} s is negative")
        super().__init__(storage)
        self._latency_s = latency_s
        self._runtime = runtime

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        runtime = None if self._runtime is SYSTEM else self._runtime
        return _reopen, (type(self), self._storage, self._latency_s, runtime)

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(self._storage.capabilities, inline=False)

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
                self._runtime.background(lambda: self._finish(call))
            except RuntimeError:  # the interpreter is exiting
                self._finish(call)
        return new

    def _finish(self, call: Call[bool]) -> None:
        self._around(call)

    def _around[R](self, call: Call[R]) -> R:
        if call.op != "sync":
            self._runtime.sleep(self._latency_s)
        return call.run()

    async def _around_async[R](self, call: Call[R], run: Callable[[], Awaitable[R]]) -> R:
        await asyncio.sleep(self._latency_s)
        return await run()


def _reopen(
    kind: type[LatencyStorage], storage: Storage, latency_s: float, runtime: Runtime | None
) -> LatencyStorage:
    return kind(storage, latency_s=latency_s, runtime=runtime or SYSTEM)
