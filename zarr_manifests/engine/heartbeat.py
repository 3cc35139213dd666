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
from zarr_manifests.format.root import Lease
from zarr_manifests.runtime import ForkSafeLock, Runtime

_LOG = logging.getLogger(__name__)


class HeldLease(Struct, eq=False):
    """A lease on a snapshot that this process renews, as `Repository.lease` returns it.

    A collection uses the wall clock, which can be set. The monotonic clock cannot be set, but may
    stand still while the machine sleeps. So a lease is over when either clock says so.

    Parameters
    ----------
    runtime : Runtime
        Clocks.
    stored : Lease
        The lease as it was last stored in the root.
    timeout_ms : int
        How long each renewal lasts.
    until_s : float
        When the last renewal ends by the monotonic clock; `stored` says it by the wall clock.
    error : ManifestsError or None
        Why it was lost, if it was.
    kept : bool
        Whether it is left behind at the end of the block.
    pid : int
        The process that holds it.
    """

    runtime: Runtime
    stored: Lease
    timeout_ms: int
    until_s: float = 0.0
    error: ManifestsError | None = None
    kept: bool = False
    pid: int = field(default_factory=os.getpid)

    def __repr__(self) -> str:
        state = "lost" if self.lost else "held"
        return f"<HeldLease on {self.snapshot_id}, {state}>"

    @property
    def snapshot_id(self) -> str:
        """Id of the leased snapshot."""
        return self.stored.snapshot

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child, and its parent holds the lease."""
        return self.pid != os.getpid()

    @property
    def is_over(self) -> bool:
        """Whether the time of the last renewal is up, so that a collection may have removed it."""
        runtime = self.runtime
        return runtime.monotonic_s() >= self.until_s or runtime.now_ms() >= self.stored.expires_ms

    @property
    def lost(self) -> bool:
        """Whether the lease no longer protects the snapshot, so that `check` raises."""
        return self.error is not None or self.is_over

    def check(self) -> None:
        """Raise if the lease was lost, or was not renewed within its timeout.

        It compares clocks and sends no request. As long as it raises nothing, no object that the
        snapshot needs was deleted, provided that the clocks of this machine and of the collector
        agree. A lease that was renewed late may still be held: `check` then raises nothing again.

        Raises
        ------
        FencedError
            If a collection removed it.
        SnapshotExpiredError
            If the snapshot is no longer in history.
        LeaseError
            If it was not renewed within its timeout.
        """
        if self.error is not None:
            raise self.error
        if self.is_over:
            raise LeaseError(
                f"the lease on snapshot {self.snapshot_id} was not renewed within "
                f"{self.timeout_ms} ms by this process, so a collection may remove it. Renewal is "
                "tried again by the process that took it: if a later check raises nothing, nothing "
                "was lost"
            )

    def keep(self, kept: bool = True) -> None:
        """Leave the lease behind at the end of the block, or do not.

        It is then renewed once more, and not given up: it lasts for its timeout from there on.

        Examples
        --------
        >>> import zarr_manifests as zm
        >>> repo = zm.create("memory://kept-lease-example")
        >>> with repo.lease(repo.list_branches()["main"], timeout=3600) as lease:
        ...     lease.keep()  # for an hour from the end of the block
        """
        self.kept = kept


class Heart:
    """The leases of one repository that this process holds. Thread-safe."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._held: dict[HeldLease, None] = {}
        self._cancel: Callable[[], None] | None = None
        self._pid = os.getpid()

    def held(self) -> list[HeldLease]:
        """The leases that are held and not lost."""
        with self._lock:
            if self._pid != os.getpid():
                self._pid, self._held, self._cancel = os.getpid(), {}, None
            return [held for held in self._held if held.error is None]

    def add(self, held: HeldLease, runtime: Runtime, renew: Callable[[], None]) -> None:
        """Hold a lease, and call `renew` regularly while any is held.

        Raises
        ------
        RuntimeError
            If no thread can be started; the lease is then not held.
        """
        with self._lock:
            self.held()
            self._held[held] = None
            try:
                self._schedule(runtime, renew)
            except BaseException:
                del self._held[held]
                raise

    def drop(self, held: HeldLease) -> None:
        """Stop renewing the lease."""
        with self._lock:
            self.held()
            self._held.pop(held, None)
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
