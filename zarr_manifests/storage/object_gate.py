"""At most so many requests of one storage at a time, from threads and event loops alike.

Invariant: who waits holds no permit, and a thread that waits in an event loop is none: the loop
goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future

__all__ = ["Gate"]


class Gate:
    """Lets callers in, in the order they came, while there is room.

    Parameters
    ----------
    permits : int
        How many may be in at a time.
    """

    def __init__(self, permits: int) -> None:
        self._free = permits
        self._lock = threading.Lock()
        self._waiting: deque[Future[None]] = deque()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Wait for room, and leave at the end of the block."""
        turn = self._line_up()
        try:
            turn.result()
        except BaseException:  # an interrupt
            self._give_up(turn)
            raise
        try:
            yield
        finally:
            self._leave()

    @contextlib.asynccontextmanager
    async def entered_async(self) -> AsyncIterator[None]:
        """Wait for room without blocking the loop, and leave at the end of the block."""
        turn = self._line_up()
        try:
            await asyncio.wrap_future(turn)
        except BaseException:  # the task was cancelled
            self._give_up(turn)
            raise
        try:
            yield
        finally:
            self._leave()

    def _line_up(self) -> Future[None]:
        turn: Future[None] = Future()
        with self._lock:
            if not self._free:
                self._waiting.append(turn)
                return turn
            self._free -= 1
        turn.set_result(None)
        return turn

    def _give_up(self, turn: Future[None]) -> None:
        if not turn.cancel() and not turn.cancelled():  # it was let in meanwhile
            self._leave()

    def _leave(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._free += 1
                    return
                turn = self._waiting.popleft()
            if turn.set_running_or_notify_cancel():
                turn.set_result(None)
                return
