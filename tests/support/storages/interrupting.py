"""Running something at one moment between the calls of a storage."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from storages.wrapped import Call, WrappedStorage
from zarr_manifests.storage import Storage


class InterruptingStorage(WrappedStorage):
    """Calls a function right before one call; a loop over `at` tries every moment.

    Parameters
    ----------
    storage : Storage
        The storage the calls are passed to.
    action : callable
        What others do at that moment, on a storage of their own. Called once.
    at : int
        The number of the call before which it is called; 0 for none, until `arm` sets it.

    Attributes
    ----------
    ops : list of str
        The names of the calls made, since `arm` if it was called.

    Examples
    --------
    >>> from zarr_manifests.storage.memory import MemoryStorage
    >>> from storages import InterruptingStorage
    >>> below = MemoryStorage()
    >>> storage = InterruptingStorage(below, lambda: below.create("a", b"theirs"), at=2)
    >>> list(storage.list()), storage.create("a", b"ours"), below.get("a"), storage.ops
    ([], False, b'theirs', ['list', 'create'])
    """

    def __init__(self, storage: Storage, action: Callable[[], object], at: int = 0) -> None:
        super().__init__(storage)
        self._action = action
        self.arm(at)

    def arm(self, at: int) -> None:
        """Count calls from now on, and act before the call with that number."""
        self.ops: list[str] = []
        self._at = at

    def _count(self, op: str) -> None:
        self.ops.append(op)
        if len(self.ops) == self._at:
            self._action()

    def _around[R](self, call: Call[R]) -> R:
        self._count(call.op)
        return super()._around(call)

    async def _around_async[R](self, call: Call[R], run: Callable[[], Awaitable[R]]) -> R:
        self._count(call.op)
        return await super()._around_async(call, run)
