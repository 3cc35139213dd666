"""Counts what a piece of code asks of its storage: requests, bytes and sequential rounds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from storages.wrapped import Call, WrappedStorage, received_nbytes
from zarr_manifests.runtime import asked_at, next_step
from zarr_manifests.storage import Storage
from zarr_manifests.storage.protocol import Token

_READS = frozenset({"get", "get_tagged"})
_NO_REQUESTS = frozenset({"sync"})
_NO_ROUNDS = frozenset({"sync", "create_after"})


@dataclass(frozen=True, slots=True)
class Record:
    """One call of a storage.

    Parameters
    ----------
    op : str
        The name of the method, without `_async`. `create_after` is the `then_create` of a swap
        that took effect.
    key : str
        The key, the prefix of a `list`, the first of the keys of `delete_many` and `sync`.
    nbytes : int
        Bytes of the object that were sent or received.
    asked : tuple of int
        Steps of a counting clock (`runtime.asked_at`): when the threads that led to the call were
        started, and when it was made.
    ended : int
        The step at which it returned.
    """

    op: str
    key: str
    nbytes: int
    asked: tuple[int, ...]
    ended: int


class CountingStorage(WrappedStorage):
    """Logs the calls made to a storage.

    A call that fails counts as a request. A call with several ranges or keys counts as one, and so
    does a `list`, however far it is read. `sync` is in the log but is neither a request nor a
    round: where written objects are durable, it needs none. A pickled copy starts with an empty
    log.

    Parameters
    ----------
    storage : Storage
        The storage the calls are passed to. If it is `inline`, code may make calls one by one that
        it makes in parallel elsewhere: put a `LatencyStorage` in between to count the rounds of a
        remote storage; its latency may be 0.

    Examples
    --------
    >>> from zarr_manifests.storage.memory import MemoryStorage
    >>> from storages import CountingStorage
    >>> storage = CountingStorage(MemoryStorage())
    >>> storage.put("a", b"four")
    >>> storage.get("a", 0, 2)
    b'fo'
    >>> storage.requests, storage.bytes_read, storage.rounds()
    (2, 2, 2)
    >>> [(record.op, record.key) for record in storage.log]
    [('put', 'a'), ('get', 'a')]
    """

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        # Appending to a list is atomic, so the log needs no lock.
        self._log: list[Record] = []

    def __reduce__(self) -> tuple[object, tuple[Storage]]:
        return type(self), (self._storage,)

    @property
    def log(self) -> list[Record]:
        """The calls since the start or the last `reset`, in the order in which they ended."""
        return self._log

    def reset(self) -> None:
        """Empty the log."""
        self._log = []

    @property
    def requests(self) -> int:
        """The number of calls, without `sync`."""
        return sum(record.op not in _NO_REQUESTS for record in self._log)

    @property
    def bytes_read(self) -> int:
        """Bytes of objects received."""
        return sum(record.nbytes for record in self._log if record.op in _READS)

    def rounds(self) -> int:
        """The length of the longest chain of calls that waited for each other.

        A call has waited for all calls that had returned when it was made. On a thread of
        `Runtime.parallel`, it has waited for those that had returned when `parallel` was called,
        and for earlier calls on that thread. So the result does not depend on when threads start or
        how long calls take. The create after a swap (`create_after`) is not waited for and does
        not count.
        """
        # By the steps that led to a thread: when calls of it, and of threads it asked for in turn,
        # returned; and the longest chain up to each of these, 0 before the first.
        threads: dict[tuple[int, ...], tuple[list[int], list[int]]] = {(): ([], [0])}
        for record in sorted(self._log, key=lambda record: record.ended):
            if record.op in _NO_ROUNDS:
                continue
            chain = 0
            for at, asked in enumerate(record.asked):
                ended, longest = threads.setdefault(record.asked[:at], ([], [0]))
                chain = max(chain, 1 + longest[bisect_left(ended, asked)])
            for at in range(len(record.asked)):
                ended, longest = threads[record.asked[:at]]
                ended.append(record.ended)
                longest.append(max(longest[-1], chain))
        return threads[()][1][-1]

    def cas(
        self,
        key: str,
        data: bytes,
        token: Token | None,
        *,
        then_create: tuple[str, bytes] | None = None,
    ) -> Token | None:
        new = super().cas(key, data, token, then_create=then_create)
        if new is not None and then_create is not None:
            step = next_step()
            after_key, nbytes = then_create[0], len(then_create[1])
            self._log.append(Record("create_after", after_key, nbytes, (step,), step))
        return new

    def _around[R](self, call: Call[R]) -> R:
        asked, nbytes = asked_at(), call.sent_nbytes
        try:
            result = call.run()
            nbytes += received_nbytes(result)
            return result
        finally:
            self._note(call, nbytes, asked)

    async def _around_async[R](self, call: Call[R], run: Callable[[], Awaitable[R]]) -> R:
        asked, nbytes = asked_at(), call.sent_nbytes
        try:
            result = await run()
            nbytes += received_nbytes(result)
            return result
        finally:
            self._note(call, nbytes, asked)

    def _note(self, call: Call[Any], nbytes: int, asked: tuple[int, ...]) -> None:
        self._log.append(Record(call.op, call.key, nbytes, asked, next_step()))
