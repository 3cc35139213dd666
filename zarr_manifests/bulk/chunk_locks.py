"""Turns of writes that read a chunk, change a part of it and write it.

Without them, of two such writes of one chunk in one session the later one undoes the earlier one.
A write takes the locks of all its chunks in their order, so that no two wait for each other. Some
chunks share a lock.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

from zarr_manifests.bulk.here import is_here

__all__ = ["in_turn", "locks_of"]

_LOCKS: Final = [threading.Lock() for _ in range(256)]
_PAUSE_S: Final = 0.001


def _renew() -> None:
    _LOCKS[:] = [threading.Lock() for _ in _LOCKS]


os.register_at_fork(after_in_child=_renew)


def locks_of(owner: object, keys: Iterable[str]) -> list[threading.Lock]:
    """The locks of a session's chunks, in the order in which to take them."""
    return [_LOCKS[at] for at in sorted({hash((id(owner), key)) % len(_LOCKS) for key in keys})]


async def in_turn(locks: Sequence[threading.Lock], write: Callable[[], Awaitable[None]]) -> None:
    """Write while holding the locks; an event loop goes on until they are free."""
    if not locks:
        await write()
    elif is_here():
        with locks[0]:
            await in_turn(locks[1:], write)
    else:
        while not locks[0].acquire(blocking=False):  # noqa: ASYNC110 - threads may hold it, too
            await asyncio.sleep(_PAUSE_S)
        try:
            await in_turn(locks[1:], write)
        finally:
            locks[0].release()
