"""Reads of neighbouring ranges as one request, for event loops and storages that are far away.

What is asked for in one turn of an event loop is planned together when the turn ends
(`planning.ranges`), within the bounds that the storage names, and fetched request by request, side
by side. Invariants:

- Every caller gets its own bytes, fewer only where the object ends; or the error of the one
  request that its range was part of, and of no other.
- A caller that is cancelled takes nothing from the others. A request that nobody waits for any
  more is cancelled.
- An event loop has a state of its own, which ends with the turn: loops of several threads neither
  wait for each other nor share requests.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field

from zarr_manifests.planning.tables.byte_ranges import RangeRequest, coalesce
from zarr_manifests.storage.protocol import ReadableStorage

__all__ = ["CoalescedReads"]


@dataclass(slots=True, eq=False)
class _Turn:
    """What was asked for since the loop was last free, by key."""

    loop: asyncio.AbstractEventLoop
    asked: dict[str, list[_Asked]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Asked:
    """A range, and who waits for it."""

    start: int
    length: int
    answer: asyncio.Future[bytes]
    request: _Request | None = None


@dataclass(slots=True, eq=False)
class _Request:
    """One request, and how many wait for it."""

    task: asyncio.Task[None]
    waiting: int


class CoalescedReads:
    """Reads ranges of immutable objects, neighbours together."""

    def __init__(self, storage: ReadableStorage) -> None:
        self._storage = storage
        self._gap_bytes = storage.capabilities.gap_bytes
        self._span_bytes = storage.capabilities.span_bytes
        self._here = threading.local()

    async def get(self, key: str, start: int, length: int) -> bytes:
        """As `Storage.get_async`."""
        loop = asyncio.get_running_loop()
        turn: _Turn | None = getattr(self._here, "turn", None)
        if turn is None or turn.loop is not loop:
            turn = self._here.turn = _Turn(loop)
            loop.call_soon(self._end, turn)
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

    def _end(self, turn: _Turn) -> None:
        if getattr(self._here, "turn", None) is turn:
            self._here.turn = None
        for key, all_asked in turn.asked.items():
            asked = [one for one in all_asked if not one.answer.done()]  # not cancelled meanwhile
            plans = coalesce(
                [one.start for one in asked],
                [one.length for one in asked],
                gap_bytes=self._gap_bytes,
                span_bytes=self._span_bytes,
            )
            for plan in plans:
                members = [asked[i] for i in plan.members]
                task = turn.loop.create_task(self._fetch(key, plan, members))
                request = _Request(task, len(members))
                for one in members:
                    one.request = request

    async def _fetch(self, key: str, plan: RangeRequest, members: list[_Asked]) -> None:
        try:
            data = await self._storage.get_async(key, plan.start, plan.length)
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
