"""Renewing leases before their time is up: one timer a process and repository, one swap for all.

Invariants:

- The timer runs while there is something to renew and not longer. A new timer runs before the old
  one is called off. Where there is no thread for the next one, the thread of the last one waits.
- It is the business of the process that took the leases. A forked child has none of them, renews
  nothing and gives nothing up.
- A lease that was not renewed within its timeout is not relied on, though it may still be there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from zarr_manifests.errors import LeaseError, ManifestsError
from zarr_manifests.runtime import ForkSafeLock, Runtime

__all__ = ["Heart", "Held", "Term"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Term:
    """Until when a lease can be relied on, by both clocks of its holder.

    A collection goes by the wall clock, which somebody may set. The other one cannot be set, and
    stands still while the machine sleeps. So the term is over when either says so.

    Parameters
    ----------
    until_s : float
        By the clock that never goes back.
    until_ms : int
        By the wall clock, as the root has it.
    """

    until_s: float
    until_ms: int

    def is_over(self, runtime: Runtime) -> bool:
        """Whether the lease may be removed by now."""
        return runtime.monotonic_s() >= self.until_s or runtime.now_ms() >= self.until_ms


@dataclass(slots=True, eq=False)
class Held:
    """A lease that this process renews.

    Parameters
    ----------
    lease_id : bytes
        Its id.
    session : str
        Whose objects it keeps.
    snapshot : str
        Which snapshot it keeps.
    timeout_ms : int
        For how long it is renewed each time.
    owner : str
        A text about who holds it.
    term : Term or None
        How long it lasts, as the last renewal has made it; None if it was not taken yet.
    lost : ManifestsError or None
        Why it is held no more, although it was not given up.
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
        """Whether it is the parent that holds it, of which this is a forked child."""
        return self.pid != os.getpid()

    def check(self, runtime: Runtime) -> None:
        """Raise if it was lost, or cannot be relied on.

        Raises
        ------
        FencedError
            If a collection took it away.
        SnapshotExpiredError
            If the snapshot is in history no more.
        LeaseError
            If it was not renewed within its timeout.
        """
        if self.lost is not None:
            raise self.lost
        if self.term is None or not self.term.is_over(runtime):
            return
        over = f"the lease on snapshot {self.snapshot} was not renewed within {self.timeout_ms} ms"
        if self.is_inherited:
            raise LeaseError(f"{over} as far as this child knows: ask the process that took it")
        raise LeaseError(
            f"{over}: a collection may take it away. Renewing is tried again; if a later check "
            "raises nothing, nothing was lost"
        )


class Heart:
    """What one process holds of one repository's leases. Thread-safe."""

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
        """Hold one more, and call `renew` in time for all of them, again and again.

        Raises
        ------
        RuntimeError
            If there is no thread to be had; it is not held then.
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
        """Renew it no more."""
        with self._lock:
            self.held()
            self._held.pop(held.lease_id, None)
            if not self._held and self._cancel is not None:
                self._cancel()
                self._cancel = None

    def _schedule(self, runtime: Runtime, renew: Callable[[], None]) -> None:
        """Set the timer anew, if there is anything to renew."""
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
        """Renew, and see to it that this is done again."""
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
