"""What requests share: the repository, snapshots that are open, threads, and room for bytes."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import anyio
import anyio.to_thread

from zarr_manifests.engine.edit.overlay import SessionView
from zarr_manifests.errors import NotFoundError, SnapshotExpiredError
from zarr_manifests.ids import is_snapshot_id
from zarr_manifests.repository import Repository, resolved
from zarr_manifests.session import Session
from zarr_manifests.store import contents_of

_THREADS: Final = 32
_ROOM_BYTES: Final = 256 * 1024**2
_FEW_BYTES: Final = 64 * 1024
_OPEN_SNAPSHOTS: Final = 16
_TIME: Final = re.compile(r"(@\{[^{}]*\})")


def version_of(text: str) -> str:
    """The version that a part of a URL names, where a `:` stands for a `/`.

    Examples
    --------
    >>> from zarr_manifests.serving.served import version_of
    >>> version_of("fix:winds~1"), version_of("main@{2026-11-01T12:00}")
    ('fix/winds~1', 'main@{2026-11-01T12:00}')
    """
    name, *time = _TIME.split(text, 1)
    return name.replace(":", "/") + "".join(time[:1]) + "".join(time[1:]).replace(":", "/")


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
        For the bytes of all answers.
    """

    def __init__(self, repo: Repository) -> None:
        self.repo = repo
        self.room = Room(_ROOM_BYTES)
        self._threads = anyio.CapacityLimiter(_THREADS)
        self._session = lru_cache(_OPEN_SNAPSHOTS)(repo.readonly_session)

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

    async def run[R](self, call: Callable[[], R]) -> R:
        """The result of a call that blocks, in one of a bounded number of threads."""
        return await anyio.to_thread.run_sync(call, limiter=self._threads)


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
