"""From a seed to a schedule: who takes part, in what weather, on what kind of storage."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from msgspec.structs import replace

import zarr_manifests as zm
from simulated.accidents import Recoverer, recover
from simulated.actors import (
    Actor,
    Brancher,
    Compactor,
    Configurer,
    Finder,
    Merger,
    Reader,
    Scribbler,
    Transferrer,
    check_choices,
    check_session,
    setup,
)
from simulated.farm import Farm, Foreman, Worker
from simulated.judge import Judge, Known
from simulated.keepers import (
    Backgrounder,
    Collector,
    ExclusiveWriter,
    Expirer,
    LeaseReader,
    LeaseWriter,
    Repacker,
    Restorer,
    Surveyor,
    Verifier,
)
from simulated.process import Process
from simulated.rivals import Appender, Resolver, Witness
from simulated.storage import Shelf, Weather
from simulated.streams import Driver
from simulated.world import BrokenPromiseError, World
from storages import SimulatedCrash
from zarr_manifests.errors import SnapshotExpiredError
from zarr_manifests.format.root import ROOT_KEY
from zarr_manifests.repository import Repository
from zarr_manifests.runtime import SYSTEM

CALLS: Final = 220
"""After so many storage calls nothing new is begun."""

_ACCOUNTS: Final = 5
_CELLS: Final = 8
_CALM: Final = Weather()
_WEATHERS: Final = (
    _CALM,
    Weather(5, 5, 10, late=5, twice=5, crash=5, outage=2, late_twice=3, no_thread=50),
    Weather(20, 20, 20, late=10, twice=20, crash=2, late_twice=10),
    Weather(2, 10, 30, late=20, twice=10, crash=20, outage=10, late_twice=5, no_thread=200),
)
_ALWAYS: Final[tuple[Actor, ...]] = (Transferrer("mover"), Scribbler("scribe"))
_SOMETIMES: Final[tuple[Actor, ...]] = (
    Transferrer("mover-2"),
    Scribbler("scribe-2", 0.5),
    Compactor("compactor"),
    Compactor("compactor-2"),
    Reader("reader"),
    Reader("reader-2"),
    Brancher("brancher"),
    Configurer("configurer"),
)
_RIVALS: Final[tuple[tuple[Actor, ...], ...]] = (
    (Resolver("resolver"), Resolver("resolver-2")),
    (Witness("witness"), Witness("witness-2")),
    (Appender("appender"), Appender("appender-2")),
)
_KEEPERS: Final[tuple[Actor, ...]] = (
    Collector("collector"),
    Collector("collector-2"),
    Expirer("expirer"),
    Restorer("restorer"),
    LeaseReader("lease-reader"),
    LeaseWriter("lease-writer"),
    ExclusiveWriter("owner"),
    ExclusiveWriter("owner-2"),
)
_APART: Final[tuple[tuple[Actor, float], ...]] = (
    (Repacker("repacker"), 0.25),
    (Backgrounder("backgrounder"), 0.25),
    (Verifier("verifier"), 0.5),
)
KINDS: Final[dict[str, tuple[Actor, ...]]] = {
    "streams": (Driver("driver"), Driver("driver-2")),
    "zones": (Surveyor("surveyor"), Surveyor("surveyor-2"), Reader("chooser")),
    "merges": (
        Merger("merger"),
        Merger("merger-2"),
        Scribbler("scribe-3", 0.3),
        Brancher("brancher-2"),
    ),
    "finders": (
        Finder("finder"),
        Finder("finder-2"),
        Brancher("brancher-2"),
        Collector("collector-4"),
        Restorer("restorer-2"),
    ),
}
"""Who takes part besides, by what a schedule may have."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a run.

    Parameters
    ----------
    seed : int
        Of the run.
    calls : int
        Storage calls made.
    digest : str
        Hash of the trace.
    trace : sequence of str
        Every storage call, swap and answer.
    counts : mapping of str to int
        What happened how often.
    failure : BaseException or None
        What was found to be wrong.
    again : str
        The command that runs the seed again and prints its trace.
    """

    seed: int
    calls: int
    digest: str
    trace: Sequence[str]
    counts: Mapping[str, int]
    failure: BaseException | None
    again: str


def simulate(seed: int, kinds: Collection[str] = (), *, calls: int = CALLS) -> Outcome:
    """Run the schedule of a seed.

    Parameters
    ----------
    seed : int
        Any number.
    kinds : collection of str
        Who takes part besides, of `KINDS`; it is another schedule then. With `zones`, cells have
        zone maps, by which readers choose chunks.
    calls : int
        For how many storage calls new things are begun.

    Examples
    --------
    >>> from simulated import simulate
    >>> outcome = simulate(1)
    >>> outcome.failure is None, outcome.calls >= 200
    (True, True)
    """
    rng = random.Random(f"cast/{seed}")
    world = World(seed, calls, zones="zones" in kinds)
    shelf = Shelf(inline=rng.random() < 0.4)
    runtime = replace(
        SYSTEM, parallel=lambda calls: [call() for call in calls], who=lambda: "simulation"
    )
    judge = Judge(world, shelf, runtime, total=_ACCOUNTS * 100)
    failure: BaseException | None = None
    try:
        with _quiet():
            more = [actor for kind in KINDS if kind in kinds for actor in KINDS[kind]]
            _run(world, judge, rng, more)
    except (Exception, SimulatedCrash) as error:  # noqa: BLE001 - the outcome
        failure = error
        world.failure = None  # its traceback holds the run, and finalizers of the package the world
    options = "".join(f" --{kind}" for kind in KINDS if kind in kinds)
    again = f"python tests/simulation --seed {seed}{options}"
    return Outcome(seed, world.calls, world.digest(), world.trace, judge.counts, failure, again)


@contextmanager
def _quiet() -> Iterator[None]:
    """Let the package not warn of what is made to go wrong."""
    log = logging.getLogger("zarr_manifests")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _run(world: World, judge: Judge, rng: random.Random, more: Sequence[Actor]) -> None:
    first = Process(world, judge, "setup", _CALM)
    zm.create(first.wire, _config(rng), runtime=first.runtime)
    setup(first, _ACCOUNTS, _CELLS)
    world.calls = 0
    weather = rng.choice(_WEATHERS)
    cast = [*_ALWAYS, *rng.sample(_SOMETIMES, rng.randrange(1, 6))]
    if rng.random() < 0.25:
        farm = Farm()
        cast += [Foreman("foreman", farm), Worker("worker", farm), Worker("worker-2", farm)]
    if rng.random() < 0.4:
        cast += [one for pair in rng.sample(_RIVALS, rng.randrange(1, 3)) for one in pair]
    if rng.random() < 0.6:
        cast += rng.sample(_KEEPERS, rng.randrange(2, 6))
    # Drawn apart, so that who else takes part is as it would be without.
    for actor, share in _APART:
        if random.Random(f"{actor.name}/{world.seed}").random() < share:
            cast.append(actor)
    if random.Random(f"recoverer/{world.seed}").random() < 0.15:
        cast += [Recoverer("recoverer"), Expirer("expirer-2"), Collector("collector-3")]
    cast += more
    world.run({actor.name: _life(world, judge, actor, weather) for actor in cast})
    world.flush()
    last = Process(world, judge, "last", _CALM)
    recover(last)
    repository = last.repository()

    def check(known: Known) -> None:
        if world.rng.random() < 0.2:
            session = repository.readonly_session(known.snapshot_id)
            check_session(session, known.state)
            check_choices(last, session, known.state)

    judge.finish(check)
    chance = world.rng.random()
    if chance < 0.15:
        _tidy_up(last, repository)
    elif chance < 0.3:
        _lose_the_root(Process(world, judge, "doomed", _CALM), last)
    elif chance < 0.4:
        _ask_for_the_expired(last, repository)


def _tidy_up(process: Process, repository: Repository) -> None:
    """After a collection only what is needed is left, and all of that is sound."""
    for lease in process.judge.leases():
        process.skew_ms = max(process.skew_ms, lease.expires_ms - process.world.time_ms + 1)
    repository.garbage_collect(timedelta(0))
    left = process.judge.garbage()
    if left:
        raise BrokenPromiseError(f"a collection has left garbage: {left}")
    report = repository.verify()
    if not report.ok:
        raise BrokenPromiseError(f"not all is sound: {report}")
    process.judge.count("tidied up")


def _ask_for_the_expired(process: Process, repository: Repository) -> None:
    """What is in no history any more gets no lease, and no name once it is collected."""
    judge = process.judge
    before = judge.root.version if judge.root is not None else 0
    here = set(judge.places())
    repository.expire_snapshots(keep_last=1)
    gone = sorted(here - judge.in_history().keys())
    refused: list[Callable[[], object]] = []
    if gone:
        refused.append(lambda: repository.lease(gone[-1]).__enter__())

    def restore() -> None:
        repository.garbage_collect(timedelta(0))
        zm.recover(repository, before)

    refused.append(restore)
    if gone:
        refused.append(lambda: repository.create_branch("expired", gone[0]))
    for ask in refused:
        try:
            ask()
        except SnapshotExpiredError:
            judge.count("refused")
        else:
            raise BrokenPromiseError("what has expired was given out")


def _lose_the_root(doomed: Process, last: Process) -> None:
    """A collector dies between two deletions; then the root is lost, and recovered."""
    doomed.wire.doomed = True
    died = False
    try:
        doomed.repository().expire_snapshots(keep_last=1)
        doomed.repository().garbage_collect(timedelta(0))
    except SimulatedCrash:
        died = True
        doomed.judge.count("collectors that died")
    judge = last.judge
    newest = judge.root.version if judge.root is not None else 0
    judge.shelf.lose([ROOT_KEY])
    report = zm.recover(last.wire, runtime=last.runtime)
    if died and report.recovered != newest:
        raise BrokenPromiseError(f"the root that deletions began with is lost: {report}")


def _life(world: World, judge: Judge, actor: Actor, weather: Weather) -> Callable[[], None]:
    """All lives of an actor, one after the other."""

    def live() -> None:
        number = 0
        while world.open:
            number += 1
            process = Process(world, judge, f"{actor.name}-{number}", weather)
            try:
                while world.open:
                    process.jump_clock()
                    process.beat()
                    actor.act(process)
                    world.sleep(process.rng.random() * 0.2)
            except SimulatedCrash as crash:
                world.note(f"crash {crash}")
                judge.count("crashes")
                world.sleep(process.rng.random())

    return live


def _config(rng: random.Random) -> dict[str, Any]:
    mode = rng.choice(("auto", "manual", "manual"))
    return {
        "inline-chunk-bytes": rng.choice((0, 16, 512)),
        "pack-chunk-bytes": rng.choice((0, 30, 1000)),
        "pack-bytes": rng.choice((48, 10_000)),
        "commits": {
            "attempts": rng.choice((2, 100)),
            "mode": "rewrite" if rng.random() < 0.1 else "delta",
        },
        "compaction": {
            "mode": mode,
            "min-delta-count": rng.choice((2, 4)),
            "max-delta-count": rng.choice((3, 6, 50)),
            "interval-commits": rng.choice((2, 5)),
            "fan-in": rng.choice((2, 3, 4)),
            "size-ratio": rng.choice((0, 0.25, 3)),
        },
        "chunk-manifests": {
            "sets": [{"default": {"max-manifest-size": rng.choice((3, 5, 1000))}}],
        },
    }
