"""Reads and writes of arrays on the caller's thread, without Zarr's event loop.

Zarr hands each call over to the thread of its loop, which hands chunks to a third one. Where the
storage does not wait and the request is one that is taken in bulk, nothing has to be awaited: the
coroutine ends at its first step. Any other call goes Zarr's way.

Writes that read a chunk, change a part of it and write it take turns. Else, of two such writes of
one chunk in one session, the later one undoes the earlier one. A write takes the locks of all its
chunks in their order, so that no two wait for each other. Some chunks share a lock.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import closing
from contextvars import ContextVar, copy_context
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zarr
from zarr.abc.store import Store
from zarr.storage import StorePath
from zarr.storage._utils import normalize_path

from zarr_manifests.store import ManifestStore, contents_of


class LazyPath(StorePath):
    """An array's `StorePath`, below which Zarr makes one path for each chunk of a request.

    Normalizing them takes as long as reading 4 KB.

    Examples
    --------
    >>> from zarr.storage import MemoryStore
    >>> from zarr_manifests.bulk.here import LazyPath
    >>> path = LazyPath(MemoryStore(), "a") / "c/0"
    >>> path.path, path.joined
    ('a/c/0', 'a/c/0')
    """

    __slots__ = ("joined",)

    def __init__(self, store: Store, path: str = "") -> None:
        self.store = store
        self.joined = path

    @property
    def path(self) -> str:  # type: ignore[override]  # an attribute there
        """The normalized path."""
        return normalize_path(self.joined)

    def __truediv__(self, other: str) -> LazyPath:
        return LazyPath(self.store, f"{self.joined}/{other}" if self.joined else other)


_HERE: Final[ContextVar[bool]] = ContextVar("zarr_manifests_here", default=False)


class NotHereError(Exception):
    """The request has to be awaited; nothing of it was done."""


def is_here() -> bool:
    """Whether the request is to be answered on this thread, or refused by `NotHereError`."""
    return _HERE.get()


def read_here(array: zarr.Array[Any]) -> npt.NDArray[Any]:
    """All values of an array that `use_bulk` was called with.

    Examples
    --------
    >>> import numpy as np, zarr, zarr_manifests as zm
    >>> from zarr_manifests.bulk import use_bulk
    >>> from zarr_manifests.bulk.here import read_here
    >>> store = zm.create("memory://read-here-example").writable_session().store
    >>> a = zarr.create_array(store, name="a", data=np.array([1, 2, 3]))
    >>> use_bulk(a)
    >>> read_here(a)
    array([1, 2, 3])
    """
    held = array.async_array
    return np.asarray(_run(array, lambda: held.getitem(...), lambda: array[...]))


def write_here(array: zarr.Array[Any], place: Any, values: Any) -> None:
    """Do what `array[place] = values` does, for an array that `use_bulk` was called with.

    Examples
    --------
    >>> import numpy as np, zarr, zarr_manifests as zm
    >>> from zarr_manifests.bulk import use_bulk
    >>> from zarr_manifests.bulk.here import write_here
    >>> store = zm.create("memory://write-here-example").writable_session().store
    >>> a = zarr.create_array(store, name="a", data=np.array([1, 2, 3]))
    >>> use_bulk(a)
    >>> write_here(a, (slice(1, None),), np.array([5, 6]))
    >>> a[:]
    array([1, 5, 6])
    """
    held = array.async_array
    _run(array, lambda: held.setitem(place, values), lambda: array.__setitem__(place, values))


def _run[T](
    array: zarr.Array[Any],
    here: Callable[[], Coroutine[Any, Any, T]],
    there: Callable[[], T],
) -> T:
    if not _may_be_here(array):
        return there()
    try:
        copy_context().run(_to_its_end, here)
    except StopIteration as ended:
        result: T = ended.value
        return result
    except NotHereError:
        pass
    return there()


def _to_its_end(start: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Take the first step of a coroutine, which is its only one; called in a copy of the context.

    The thread's own context stays as it is, so that an interrupt leaves nothing in it.
    """
    _HERE.set(True)
    with closing(start()) as coroutine:
        coroutine.send(None)


def _may_be_here(array: zarr.Array[Any]) -> bool:
    store = array.store
    if type(store) is not ManifestStore or not contents_of(store).inline:
        return False
    # Another pipeline than ours, which `use_bulk` leaves alone, may wait for Zarr's event loop.
    if type(array.async_array.store_path) is not LazyPath:
        return False
    # Of a document that Zarr had to repair, it stores the repair first, which it awaits.
    return getattr(array.metadata, "_stored_document", None) is None


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
