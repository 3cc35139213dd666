"""Combining reads of neighbouring ranges into one request, in event loops on remote storages.

All reads that are asked for in one turn of an event loop and the next are planned together
(`planning.tables.resolved_chunks`), within the storage's bounds. The requests then run in parallel.
Two turns, since Zarr asks for one chunk in the turn in which a request ends, and for the others in
the place of those that came with it in the next.
Invariants:

- Every caller gets its own bytes (fewer only at the end of the object), or the error of the request
  that contained its range. Errors of other requests do not affect it.
- Cancelling one caller does not affect the others. A request that nobody waits for is cancelled.
- State is per event loop and turn: loops of different threads neither wait for each other nor share
  requests.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from zarr_manifests.planning.tables.resolved_chunks import RangeRequest, coalesce
from zarr_manifests.storage.protocol import Capabilities

if TYPE_CHECKING:
    import asyncio

SPARE: Final = 0.15
"""What may be fetched in vain from a remote storage, as a share of what is wanted."""


@dataclass(slots=True, eq=False)
class _Turn[K: Hashable]:
    """Ranges asked for in two turns of the loop, by key."""

    loop: asyncio.AbstractEventLoop
    asked: dict[K, list[_Asked]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Asked:
    """A range, and the future its caller waits for."""

    start: int
    length: int
    answer: asyncio.Future[bytes]
    request: _Request | None = None


@dataclass(slots=True, eq=False)
class _Request:
    """One request, and the number of callers that wait for it."""

    task: asyncio.Task[None]
    waiting: int


class CoalescedReads[K: Hashable]:
    """Reads ranges of immutable objects, combining neighbouring ones.

    Parameters
    ----------
    read : callable
        Reads a range of the object with the given key, as `Storage.get_async` does.
    capabilities : Capabilities
        Which ranges share a request.
    """

    def __init__(
        self, read: Callable[[K, int, int], Awaitable[bytes]], capabilities: Capabilities
    ) -> None:
        self._read = read
        self._gap_bytes = capabilities.gap_bytes
        self._span_bytes = capabilities.span_bytes
        self._here = threading.local()

    async def get(self, key: K, start: int, length: int) -> bytes:
        """Like `Storage.get_async`."""
        import asyncio

        loop = asyncio.get_running_loop()
        turn: _Turn[K] | None = getattr(self._here, "turn", None)
        if turn is None or turn.loop is not loop:
            turn = self._here.turn = _Turn(loop)
            loop.call_soon(loop.call_soon, self._end, turn)  # when the next turn ends
        asked = _Asked(start, length, loop.create_future())
        turn.asked.setdefault(key, []).append(asked)
        try:
            return await asked.answer
        except asyncio.CancelledError:
            request = asked.request
            if request is not None:
                request.waiting -= 1
                if not request.waiting:
                    request.task.cancel()
            raise

    def _end(self, turn: _Turn[K]) -> None:
        if getattr(self._here, "turn", None) is turn:
            self._here.turn = None
        for key, all_asked in turn.asked.items():
            asked = [one for one in all_asked if not one.answer.done()]  # skip cancelled ones
            plans = coalesce(
                [one.start for one in asked],
                [one.length for one in asked],
                gap_bytes=self._gap_bytes,
                span_bytes=self._span_bytes,
                spare=SPARE,
            )
            for plan in plans:
                members = [asked[i] for i in plan.members]
                task = turn.loop.create_task(self._fetch(key, plan, members))
                request = _Request(task, len(members))
                for one in members:
                    one.request = request

    async def _fetch(self, key: K, plan: RangeRequest, members: list[_Asked]) -> None:
        import asyncio

        try:
            data = await self._read(key, plan.start, plan.length)
        except BaseException as error:
            for one in members:
                if one.answer.done():
                    continue
                if isinstance(error, asyncio.CancelledError):
                    one.answer.cancel()
                else:
                    one.answer.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        for one in members:
            if not one.answer.done():
                at = one.start - plan.start
                one.answer.set_result(data[at : at + one.length])
