"""Renewing leases before their time is up: one timer a process and repository, one swap for all.

Invariants: the timer runs while there is something to renew and not longer; it is the business of
the process that took the leases, so a forked child has none of them, and renews nothing and gives
nothing up.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from zarr_manifests.errors import ManifestsError
from zarr_manifests.runtime import ForkSafeLock, Runtime

__all__ = ["Heart", "Held"]


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
    lost: ManifestsError | None = None
    pid: int = field(default_factory=os.getpid)

    @property
    def is_inherited(self) -> bool:
        """Whether it is the parent that holds it, of which this is a forked child."""
        return self.pid != os.getpid()


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
        """Hold one more, and call `renew` in time for all of them, again and again."""
        with self._lock:
            self.held()
            self._held[held.lease_id] = held
            self._schedule(runtime, renew)

    def drop(self, held: Held) -> None:
        """Renew it no more."""
        with self._lock:
            self.held()
            self._held.pop(held.lease_id, None)
            if not self._held and self._cancel is not None:
                self._cancel()
                self._cancel = None

    def _schedule(self, runtime: Runtime, renew: Callable[[], None]) -> None:
        """Set the timer: at a third of the shortest timeout."""
        if self._cancel is not None:
            self._cancel()
            self._cancel = None
        held = self.held()
        if not held:
            return
        delay_s = min(one.timeout_ms for one in held) / 3000

        def beat() -> None:
            try:
                renew()
            finally:
                with self._lock:
                    self._schedule(runtime, renew)

        self._cancel = runtime.later(delay_s, beat)
