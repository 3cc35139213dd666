"""What requests share: the repository, snapshots that are open, threads, and room for bytes."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import anyio
import anyio.to_thread

from zarr_manifests.engine.edit.overlay import SessionView
from zarr_manifests.errors import NotFoundError, SnapshotExpiredError
from zarr_manifests.ids import is_snapshot_id
from zarr_manifests.plain import plain_text
from zarr_manifests.repository import Repository, resolved
from zarr_manifests.runtime import ForkSafeLock
from zarr_manifests.session import Session
from zarr_manifests.store import contents_of

__all__ = ["Kept", "OpenSnapshot", "Room", "Served", "version_of"]

_THREADS: Final = 32
_ROOM_BYTES: Final = 256 * 1024**2
_FEW_BYTES: Final = 64 * 1024
_OPEN_SNAPSHOTS: Final = 16
_TIME: Final = re.compile(r"@\{[^{}]*\}")


def version_of(text: str) -> str:
    """The version that a part of a URL names, where a `:` stands for a `/`.

    Examples
    --------
    >>> from zarr_manifests.serving.served import version_of
    >>> version_of("fix:winds~1"), version_of("main@{2026-11-01T12:00}")
    ('fix/winds~1', 'main@{2026-11-01T12:00}')
    """
    moment = _TIME.search(text)
    start, end = moment.span() if moment else (len(text), len(text))
    return text[:start].replace(":", "/") + text[start:end] + text[end:].replace(":", "/")


@dataclass(frozen=True, slots=True)
class OpenSnapshot:
    """A snapshot that a request reads.

    Parameters
    ----------
    session : Session
        The snapshot, opened.
    fixed : bool
        Whether the request gave its id, so that the answer never changes.
    """

    session: Session
    fixed: bool

    @property
    def contents(self) -> SessionView:
        """The snapshot's keys."""
        return contents_of(self.session.store)

    @property
    def snapshot_id(self) -> str:
        """The snapshot's id."""
        return self.session.snapshot_id


class Served:
    """A repository that is served. Thread-safe.

    Parameters
    ----------
    repo : Repository
        The repository.

    Attributes
    ----------
    room : Room
        Room for the bytes of chunks that are being sent.
    """

    def __init__(self, repo: Repository) -> None:
        self.repo = repo
        self.room = Room(_ROOM_BYTES)
        self._threads = anyio.CapacityLimiter(_THREADS)
        self._sessions: Kept[str, Session] = Kept(_OPEN_SNAPSHOTS)

    def opened(self, text: str) -> OpenSnapshot:
        """The snapshot that a part of a URL names.

        Raises
        ------
        SnapshotExpiredError
            If there is none, or none any more.
        InvalidArgumentError
            If it is no name of a version, or ambiguous.
        """
        version = version_of(text)
        fixed = is_snapshot_id(version)
        try:
            snapshot_id = version if fixed else resolved(self.repo, version)
            return OpenSnapshot(self._session(snapshot_id), fixed)
        except NotFoundError as error:  # a branch that was deleted reads as nothing, not as empty
            raise SnapshotExpiredError(str(error)) from error

    def _session(self, snapshot_id: str) -> Session:
        session = self._sessions.get(snapshot_id)
        if session is None:
            session = self.repo.readonly_session(snapshot_id)
            self._sessions.put(snapshot_id, session)
        return session

    async def run[R](self, call: Callable[[], R]) -> R:
        """The result of a call that blocks, in one of a bounded number of threads."""
        return await anyio.to_thread.run_sync(call, limiter=self._threads)

    def __repr__(self) -> str:
        return f"<Served {plain_text(self.repo.storage.url)}>"


class Kept[K: Hashable, V]:
    """The values used last, up to a weight. Thread-safe.

    Parameters
    ----------
    most : int
        The weight of all of them.

    Examples
    --------
    >>> from zarr_manifests.serving.served import Kept
    >>> kept = Kept(2)
    >>> for name in "abc":
    ...     kept.put(name, name.upper())
    >>> kept.get("a"), kept.get("c")
    (None, 'C')
    """

    def __init__(self, most: int) -> None:
        self._most, self._weight = most, 0
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = ForkSafeLock()

    def get(self, key: K) -> V | None:
        """The value, if it is kept."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def put(self, key: K, value: V, weight: int = 1) -> None:
        """Keep the value, instead of those that were not used for longest."""
        with self._lock:
            if key in self._values:
                self._weight -= self._values.pop(key)[1]
            self._values[key] = value, weight
            self._weight += weight
            while self._weight > self._most and self._values:
                self._weight -= self._values.popitem(last=False)[1][1]


class Room:
    """Bytes that requests may hold at a time; who wants more waits. A few bytes need no room.

    Parameters
    ----------
    nbytes : int
        The bytes of all requests together.
    """

    def __init__(self, nbytes: int) -> None:
        self._most = self._left = nbytes
        self._freed = anyio.Condition()

    @asynccontextmanager
    async def hold(self, nbytes: int) -> AsyncIterator[None]:
        """Hold so many bytes during the block, and at most all that there are."""
        if nbytes <= _FEW_BYTES:
            yield
            return
        nbytes = min(nbytes, self._most)
        async with self._freed:
            while self._left < nbytes:
                await self._freed.wait()
            self._left -= nbytes
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                async with self._freed:
                    self._left += nbytes
                    self._freed.notify_all()
