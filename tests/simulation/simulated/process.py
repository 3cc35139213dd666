"""A simulated process: its own repository, caches, clock, chance and wire, and nothing shared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Final

from msgspec.structs import replace

import zarr_manifests as zm
from simulated.attempts import Attempt, RefChange, Terms
from simulated.judge import Judge
from simulated.model import Change
from simulated.storage import Weather, Wire
from simulated.world import BrokenPromiseError, World
from storages import SimulatedCrash
from zarr_manifests import Txn
from zarr_manifests.errors import (
    CommitOutcomeUnknownError,
    FencedError,
    ManifestsError,
    SnapshotExpiredError,
)
from zarr_manifests.repository import Repository
from zarr_manifests.runtime import SYSTEM, Runtime
from zarr_manifests.session import Session
from zarr_manifests.store import workspace_of

_FRESH_MS: Final = 200
_NUMBERS: Final = count(1)
_TERMS: Final = Terms()
_HOUR_MS: Final = 3_600_000
_CLOCK_JUMPS_MS: Final = (
    *(-400 * 24 * _HOUR_MS, -2 * _HOUR_MS, -5_000),
    *(5_000, 2 * _HOUR_MS, 40 * _HOUR_MS, 400 * 24 * _HOUR_MS),
)


class Process:
    """One life of an actor, from start to crash.

    Parameters
    ----------
    world : World
        Where it lives.
    judge : Judge
        Who is told what it does.
    name : str
        Of the actor, and which life it is.
    weather : Weather
        How often its calls go wrong.
    """

    def __init__(self, world: World, judge: Judge, name: str, weather: Weather) -> None:
        self.world, self.judge, self.name = world, judge, name
        self.rng = world.fork_rng(name)
        # What the package remembers by URL, for the whole process, must not be shared.
        url = f"memory://simulated-{next(_NUMBERS)}"
        self.wire = Wire(world, judge.shelf, weather, world.fork_rng(f"{name}/wire"), url)
        self.skew_ms = 0
        self.runtime = self._runtime()
        self._repository: Repository | None = None
        self._opened = 0, 0
        self._timers: list[tuple[int, Callable[[], None]]] = []
        self._messages = count(1)

    def _runtime(self) -> Runtime:
        chance = self.world.fork_rng(f"{self.name}/runtime")
        return replace(
            SYSTEM,
            now_ms=lambda: int(self.world.time_ms) + self.skew_ms,
            monotonic_s=lambda: self.world.time_ms / 1000,
            who=lambda: "simulation",
            random_bytes=chance.randbytes,
            jitter=lambda limit_s: chance.uniform(0.0, limit_s),
            sleep=self.world.sleep,
            parallel=self._parallel,
            background=self._background,
            checkpoint=lambda name: self.jump_clock(0.005),
            later=self._later,
        )

    def _background(self, call: Callable[[], None]) -> None:
        self._thread()
        call()

    def _thread(self) -> None:
        """Now and then there is no thread to be had."""
        chance = self.wire.weather.no_thread
        if self.world.open and chance and self.rng.random() * 1000 < chance:
            self.wire.disturb()
            self.judge.count("no thread")
            raise RuntimeError("can't start new thread")

    def _later(self, delay_s: float, call: Callable[[], None]) -> Callable[[], None]:
        self._thread()
        timer = (self.world.time_ms + int(delay_s * 1000), call)
        self._timers.append(timer)

        def cancel() -> None:
            if timer in self._timers:
                self._timers.remove(timer)

        return cancel

    def _parallel[R](self, calls: Sequence[Callable[[], R]]) -> list[R]:
        """In any order, to the end, and the first error after that."""
        order = list(range(len(calls)))
        self.rng.shuffle(order)
        results: dict[int, R] = {}
        errors: dict[int, Exception] = {}
        for i in order:
            try:
                results[i] = calls[i]()
            except BrokenPromiseError:
                raise
            except Exception as error:  # noqa: BLE001 - raised below
                errors[i] = error
        if errors:
            raise errors[min(errors)]
        return [results[i] for i in range(len(calls))]

    def beat(self) -> None:
        """Let timers go off.

        Only where nothing else of the process is at work: on one thread nobody can wait for what
        this thread itself is fetching.
        """
        for timer in [timer for timer in self._timers if timer[0] <= self.world.time_ms]:
            if timer in self._timers:
                self._timers.remove(timer)
                timer[1]()

    def jump_clock(self, chance: float = 0.02) -> None:
        """Now and then somebody sets the clock: between two acts, or in the middle of one."""
        if not self.world.clocks_agree and self.rng.random() < chance:
            self.skew_ms += self.rng.choice(_CLOCK_JUMPS_MS)

    def wait(self, seconds: float) -> None:
        """Do nothing for that time, but for what timers do."""
        until_ms = self.world.time_ms + int(seconds * 1000)
        while self.world.time_ms < until_ms and self.world.open:
            due = min([until_ms, *(at for at, _ in self._timers)])
            self.world.sleep(max(1, due - self.world.time_ms) / 1000)
            self.check_alive()
            self.jump_clock(0.01)
            self.beat()

    # --- the repository ----------------------------------------------------------------------

    def repository(self) -> Repository:
        """The repository, open; now and then opened again."""
        if self._repository is None or self.rng.random() < 0.1:
            self._opened = self.world.time_ms, len(self.judge.heads)
            self._repository = zm.open(self.wire, runtime=self.runtime)
        return self._repository

    def read(self, branch: str) -> Session:
        """A read-only session at the head of a branch, which must be one that it has now."""
        now_ms, since = self.world.time_ms, len(self.judge.heads)
        repository = self.repository()
        opened_ms, opened = self._opened
        if opened_ms + _FRESH_MS >= now_ms:
            since = opened  # the first session may begin at the root that was opened
        session = repository.readonly_session(branch)
        heads = {heads.get(branch) for heads in self.judge.heads[since - 1 :]}
        if session.snapshot_id not in heads:
            raise BrokenPromiseError(
                f"{branch} was opened at {session.snapshot_id}, a head of the past"
            )
        return session

    def commit(
        self,
        session: Session,
        branch: str,
        changes: Sequence[Change],
        *,
        amend: bool = False,
        terms: Terms = _TERMS,
        allowed: tuple[type[ManifestsError], ...] = (),
        txn: Txn | None = None,
    ) -> bool:
        """Commit, and tell the judge before and after; whether it has landed."""
        message = f"{self.name}.{next(self._messages)}"
        attempt = Attempt(message, branch, session.snapshot_id, tuple(changes), amend, terms)
        keys = workspace_of(session.store).keys
        if keys is not None:
            attempt.start, attempt.epoch = keys.start, keys.epoch
        attempt.txn = txn
        self.judge.begin(attempt)
        disturbed, since = self.wire.disturbed, len(self.judge.heads)
        try:
            if amend:
                made = session.amend(message)
            else:
                made = session.commit(message, rebase=terms.policy, txn=txn)
        except CommitOutcomeUnknownError:
            self.judge.unknown(attempt)
            self.expect_disturbed(disturbed, "commit")
            return False
        except ManifestsError as error:
            self.judge.failed(attempt)
            self.world.note(f"{message} failed: {type(error).__name__}")
            if txn is not None and self.judge.verdict(attempt, error, since):
                return False
            self.expect(error, disturbed, allowed, session)
            return False
        self.judge.acknowledged(attempt, made)
        self.world.note(f"{message} acknowledged as {made}")
        return True

    def change_ref(
        self,
        change: RefChange,
        call: Callable[[], object],
        allowed: tuple[type[ManifestsError], ...],
    ) -> None:
        """Create, move or delete a branch or tag, and tell the judge before and after."""
        self.judge.begin_ref(change)
        disturbed = self.wire.disturbed
        try:
            call()
        except CommitOutcomeUnknownError:
            self.judge.unknown(change)
            self.expect_disturbed(disturbed, change.operation)
        except ManifestsError as error:
            self.judge.failed(change)
            self.world.note(f"{change.operation} failed: {type(error).__name__}")
            self.expect(error, disturbed, allowed)
        else:
            self.judge.ref_done(change)

    # --- errors ------------------------------------------------------------------------------

    def expect(
        self,
        error: ManifestsError,
        disturbed: int,
        allowed: tuple[type[ManifestsError], ...],
        session: Session | None = None,
    ) -> None:
        """Only these errors may come where no call has gone wrong.

        And those of a session that has expired, or that the fence has passed.
        """
        if self.wire.disturbed != disturbed or isinstance(error, allowed):
            return
        if session is not None:
            if isinstance(error, SnapshotExpiredError):
                if session.snapshot_id not in self.judge.kept():
                    return
            elif isinstance(error, FencedError) and self.judge.is_fenced(session):
                return
        raise BrokenPromiseError(f"{type(error).__name__} out of nothing: {error}") from error

    @contextmanager
    def expecting(
        self,
        allowed: Callable[[], tuple[type[ManifestsError], ...]] = tuple,
        session: Session | None = None,
    ) -> Iterator[None]:
        """A block that ends with such an error; which ones may come is asked when one has."""
        disturbed = self.wire.disturbed
        try:
            yield
        except ManifestsError as error:
            self.expect(error, disturbed, allowed(), session)

    def expect_disturbed(self, disturbed: int, what: str) -> None:
        """Nobody may be left in doubt where no call has gone wrong."""
        if self.wire.disturbed == disturbed:
            raise BrokenPromiseError(f"the outcome of {what} is not known, and nothing went wrong")

    def check_alive(self) -> None:
        """Raise if the process is dead."""
        if self.wire.dead:
            raise SimulatedCrash("the process is dead")
