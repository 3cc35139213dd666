"""Renewing leases in time: one timer per process and repository, one swap for all leases.

Invariants:

- The timer runs only while there is a lease to renew. A new timer starts before the old one is
  cancelled. If no thread can be started for the next timer, the thread of the last one waits.
- Only the process that took the leases renews them. A forked child has none of them: it renews and
  releases nothing.
- A lease that was not renewed within its timeout is not relied on, even if it still exists.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from msgspec import Struct, field

from zarr_manifests.errors import LeaseError, ManifestsError
from zarr_manifests.runtime import ForkSafeLock, Runtime

_LOG = logging.getLogger(__name__)


class Term(Struct, frozen=True):
    """Until when a lease can be relied on, by two clocks of its holder.

    A collection uses the wall clock, which can be set. The monotonic clock cannot be set, but may
    stand still while the machine sleeps. So the term is over when either clock says so.

    Parameters
    ----------
    until_s : float
        By the monotonic clock.
    until_ms : int
        By the wall clock, as stored in the root.
    """

    until_s: float
    until_ms: int

    def is_over(self, runtime: Runtime) -> bool:
        """Whether the lease may have been removed."""
        return runtime.monotonic_s() >= self.until_s or runtime.now_ms() >= self.until_ms


class Held(Struct, eq=False):
    """A lease that this process renews.

    Parameters
    ----------
    lease_id : bytes
        Its id.
    session : str
        Id of the session whose objects it keeps.
    snapshot : str
        Id of the snapshot it keeps.
    timeout_ms : int
        How long each renewal lasts.
    owner : str
        A description of the holder.
    term : Term or None
        The term of the last renewal; None if it was not taken yet.
    lost : ManifestsError or None
        Why it was lost, if it was.
    pid : int
        The process that holds it.
    """

    lease_id: bytes
    session: str
    snapshot: str
    timeout_ms: int
    owner: str
    term: Term | None = None
    lost: ManifestsError | None = None
    pid: int = field(default_factory=os.getpid)

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child, and its parent holds the lease."""
        return self.pid != os.getpid()

    def check(self, runtime: Runtime) -> None:
        """Raise if the lease was lost, or cannot be relied on.

        Raises
        ------
        FencedError
            If a collection removed it.
        SnapshotExpiredError
            If the snapshot is no longer in history.
        LeaseError
            If it was not renewed within its timeout.
        """
        if self.lost is not None:
            raise self.lost
        if self.term is None or not self.term.is_over(runtime):
            return
        raise LeaseError(
            f"the lease on snapshot {self.snapshot} was not renewed within {self.timeout_ms} ms by "
            "this process, so a collection may remove it. Renewal is tried again by the process "
            "that took it: if a later check raises nothing, nothing was lost"
        )


class Heart:
    """The leases of one repository that this process holds. Thread-safe."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._held: dict[bytes, Held] = {}
        self._cancel: Callable[[], None] | None = None
        self._pid = os.getpid()

    def held(self) -> list[Held]:
        """The leases that are held and not lost."""
        with self._lock:
            if self._pid != os.getpid():
                self._pid, self._held, self._cancel = os.getpid(), {}, None
            return [held for held in self._held.values() if held.lost is None]

    def add(self, held: Held, runtime: Runtime, renew: Callable[[], None]) -> None:
        """Hold a lease, and call `renew` regularly while any is held.

        Raises
        ------
        RuntimeError
            If no thread can be started; the lease is then not held.
        """
        with self._lock:
            self.held()
            self._held[held.lease_id] = held
            try:
                self._schedule(runtime, renew)
            except BaseException:
                del self._held[held.lease_id]
                raise

    def drop(self, held: Held) -> None:
        """Stop renewing the lease."""
        with self._lock:
            self.held()
            self._held.pop(held.lease_id, None)
            if not self._held and self._cancel is not None:
                self._cancel()
                self._cancel = None

    def _schedule(self, runtime: Runtime, renew: Callable[[], None]) -> None:
        """Restart the timer if there is anything to renew, else stop it."""
        delay_s = self._delay_s()
        cancel = None
        if delay_s is not None:
            cancel = runtime.later(delay_s, lambda: self._beat(runtime, renew))
        if self._cancel is not None:
            self._cancel()
        self._cancel = cancel

    def _delay_s(self) -> float | None:
        """A third of the shortest timeout; None if nothing is held."""
        held = self.held()
        return min(one.timeout_ms for one in held) / 3000 if held else None

    def _beat(self, runtime: Runtime, renew: Callable[[], None]) -> None:
        """Renew, and schedule the next renewal."""
        while True:
            failure: Exception | None = None
            try:
                renew()
            except Exception as error:  # noqa: BLE001 - raised once the timer is set
                failure = error
            try:
                with self._lock:
                    self._schedule(runtime, renew)
            except RuntimeError:
                _LOG.warning("no thread for the next renewal of leases: this one waits for it")
            else:
                if failure is not None:
                    raise failure
                return
            runtime.sleep(self._delay_s() or 0.0)
