"""A storage under which others commit first."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from storages import Call, WrappedStorage
from zarr_manifests.storage import Storage


class OvertakenStorage(WrappedStorage):
    """Calls `action` once, before the first snapshot is written: all that it needs is planned."""

    def __init__(self, storage: Storage, action: Callable[[], object]) -> None:
        super().__init__(storage)
        self._actions = [action]

    def __reduce__(self) -> Any:
        """Tasks commit nothing, and have the storage itself."""
        return WrappedStorage, (self.storage,)

    def _act(self, call: Call[Any]) -> None:
        if call.op != "get" and call.key.startswith("snapshots/") and self._actions:
            self._actions.pop()()

    def _around[R](self, call: Call[R]) -> R:
        self._act(call)
        return super()._around(call)

    async def _around_async[R](self, call: Call[R], run: Callable[[], Awaitable[R]]) -> R:
        self._act(call)
        return await super()._around_async(call, run)
