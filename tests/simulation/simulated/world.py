"""Many processes in one, in an order that a seed decides.

Each task of a `World` runs on a thread of its own, and at any time exactly one of them runs: it
holds the baton. At each yield point (a storage call, its answer, a sleep, a checkpoint) it draws
who goes on. Nothing else decides anything: chance comes from generators that the seed begins,
time is a number that the yield points advance. So the same seed gives the same schedule, call by
call, on every machine, which the hash of the trace tells.

Time advances by milliseconds at a yield point, and now and then jumps by minutes or hours; if
everybody sleeps it goes on to the first who wakes. Each process has a clock of its own beside it,
which is set forward and back but for worlds in which all clocks agree.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

START_MS: Final = 1_700_000_000_000
_JUMPS_MS: Final = (60_000, 3_600_000, 30 * 3_600_000)
_STALLS: Final = (20, 60, 200)
_LATE_STEPS: Final = (1, 5, 30, 120, 400)  # a step takes some eight milliseconds
_STUCK_S: Final = 120  # a run takes a fraction of a second


class BrokenPromiseError(AssertionError):
    """A promise that was not kept."""


class Stopped(BaseException):
    """The simulation is over; no task makes another step."""


@dataclass(slots=True, eq=False)
class _Task:
    name: str
    wake_ms: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class World:
    """The scheduler, the time and the trace of one run.

    Parameters
    ----------
    seed : int
        Decides everything.
    max_calls : int
        After so many storage calls nobody begins anything new.
    zones : bool
        Whether cells are numbers that have zone maps, by which readers choose chunks.
    """

    def __init__(self, seed: int, max_calls: int, *, zones: bool = False) -> None:
        self.seed, self.max_calls, self.zones = seed, max_calls, zones
        self.rng = random.Random(seed)  # of the schedule
        self.time_ms = START_MS
        self.calls = 0
        self.trace: list[str] = []
        self.failure: BaseException | None = None
        self.stickiness = self.rng.choice((0.0, 0.3, 0.7, 0.9))
        self.stall_rate = self.rng.choice((0.0, 0.002, 0.01))
        self.jump_rate = self.rng.choice((0.0, 0.0, 0.005))
        self.clocks_agree = self.rng.random() < 0.4
        self.late: list[tuple[int, Callable[[], None]]] = []
        self._tasks: list[_Task] = []
        self._here: _Task | None = None
        self._over = threading.Lock()
        self._steps = 0

    @property
    def open(self) -> bool:
        """Whether there is time to begin something."""
        return self.calls < self.max_calls

    @property
    def here(self) -> str:
        """Name of the task that runs."""
        return self._here.name if self._here is not None else "-"

    def note(self, what: str) -> None:
        """Add a line to the trace."""
        self.trace.append(
            f"{len(self.trace):5d} {self.time_ms - START_MS:9d}ms {self.here}: {what}"
        )

    def digest(self) -> str:
        """The hash of the trace."""
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()[:16]

    def fork_rng(self, name: str) -> random.Random:
        """A generator of chance of its own, for who asks by that name."""
        return random.Random(f"{self.seed}/{name}")

    # --- running -----------------------------------------------------------------------------

    def run(self, tasks: dict[str, Callable[[], None]]) -> None:
        """Run all tasks to their end; raises the first that fails.

        Raises
        ------
        BrokenPromiseError
            What a task has found.
        """
        threads = []
        for name, call in tasks.items():
            task = _Task(name)
            task.lock.acquire()
            self._tasks.append(task)
            threads.append(
                threading.Thread(target=self._live, args=(task, call), name=name, daemon=True)
            )
        self._over.acquire()
        for thread in threads:
            thread.start()
        self._hand_over()
        if not self._over.acquire(timeout=_STUCK_S):
            raise BrokenPromiseError("somebody waits for what can never come: a lock is shared")
        for thread in threads:
            thread.join()
        self._here = None
        if self.failure is not None:
            raise self.failure

    def _live(self, task: _Task, call: Callable[[], None]) -> None:
        task.lock.acquire()
        try:
            if self.failure is None:
                call()
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - `run` raises it
            if self.failure is None:
                self.note(f"FAILED {type(error).__name__}: {error}")
                self.failure = error
        finally:
            self._tasks.remove(task)
            if self._tasks:
                self._hand_over()
            else:
                self._over.release()

    def _hand_over(self) -> None:
        """Let one of the tasks that are not over go on."""
        task = self._choose()
        self._here = task
        task.lock.release()

    def _choose(self) -> _Task:
        ready = [task for task in self._tasks if task.wake_ms <= self.time_ms]
        if not ready:
            self.time_ms = min(task.wake_ms for task in self._tasks)
            ready = [task for task in self._tasks if task.wake_ms <= self.time_ms]
        return ready[0] if len(ready) == 1 else ready[self.rng.randrange(len(ready))]

    # --- what a task calls -------------------------------------------------------------------

    def pause(self) -> None:
        """A yield point: others may go on first."""
        if self.failure is not None:
            raise Stopped
        me = self._here
        if me is None:
            return  # nobody else is there
        self._steps += 1
        chance = self.rng.random()
        self.time_ms += int(chance * 16)
        if self.late:
            self._deliver()
        if chance < self.jump_rate:
            self.time_ms += self.rng.choice(_JUMPS_MS)
        elif chance > 1 - self.stall_rate:
            # Long enough for others to do much; not noted as time alone does not tell it.
            me.wake_ms = self.time_ms + 8 * self.rng.choice(_STALLS)
        elif self.rng.random() < self.stickiness:
            return
        self._switch(me)

    def sleep(self, seconds: float) -> None:
        """Let others go on until that time has passed."""
        if self.failure is not None:
            raise Stopped
        me = self._here
        if me is None:
            self.time_ms += int(seconds * 1000)
            return
        me.wake_ms = self.time_ms + int(seconds * 1000)
        self._switch(me)

    def _switch(self, me: _Task) -> None:
        task = self._choose()
        if task is not me:
            self._here = task
            task.lock.release()
            me.lock.acquire()
        if self.failure is not None:
            raise Stopped

    def soon(self, call: Callable[[], None]) -> None:
        """Make the call at a later step, as the network does with what it held back."""
        self.late.append((self._steps + self.rng.choice(_LATE_STEPS), call))

    def _deliver(self) -> None:
        due = [call for at, call in self.late if at <= self._steps]
        self.late = [entry for entry in self.late if entry[0] > self._steps]
        for call in due:
            call()

    def flush(self) -> None:
        """Deliver all that was held back."""
        for _, call in self.late:
            call()
        self.late = []
