"""Runs a row of the comparison: each contestant in a process of its own, rounds interleaved.

- The processes of a row live as long as the row does. A round asks them one after another, in the
  same order, so that whatever else the machine does hits all of them alike; the first round warms
  up and does not count.
- A figure is what one round says: seconds (or bytes) for each thing done, and the most memory that
  was taken on top of what the process held before the measured part.
- Memory is that of the process which does the measured part. Where it is done by several, it is the
  most that one of them took; where much of it lies in a process of another kind (Spark's), none is
  told.
- A row's ratio to a peer is the median, over the rounds, of the peer's figure divided by ours in
  the same round. More than 1 is for us, whatever the unit: less is better in all.
"""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

OURS = "zarr_manifests"
BEFORE = "before"
"""An earlier state of this package, from another checkout."""
_CHECKOUT = Path(__file__).resolve().parents[2]
_TOUCHED_BYTES = 1024**3
MISSED = 0.5
"""A row that reaches less than this part of its ratio makes the run fail."""


@dataclass(frozen=True)
class Figure:
    """What one round of one contestant came to."""

    value: float
    cpu_seconds: float = 0.0
    """Of all threads; what the machine does besides leaves it as it is."""
    peak_bytes: int | None = None
    """None where it cannot be compared."""
    extras: Mapping[str, float] = field(default_factory=dict)
    """What else there is to say, by a name that begins with `bytes`, `seconds` or neither."""
    series: Sequence[float] = ()
    """How the figure went, in equal steps from the beginning of the round to its end."""


@dataclass(frozen=True)
class Case:
    """What a workload is told: who, where, how much."""

    contestant: str
    folder: Path
    sizes: Mapping[str, int]
    pipeline: str = "default"


Workload = Callable[[Case], Iterator[Figure]]
"""Prepares at the first `next`, and gives one figure for each."""


@dataclass(frozen=True)
class Row:
    """One line of the comparison.

    `sizes` are those of the full run, of a quick one and of a rehearsal. `due` are the ratios to
    reach, by contestant; `peak_due_bytes` is what our memory should stay below in a full run, and
    `limits` what our extras should, by name; `value` is the figure itself.
    """

    name: str
    title: str
    workload: Workload
    contestants: tuple[str, ...]
    sizes: Mapping[str, tuple[int, int, int]]
    unit: str
    pipeline: str = "-"
    durability: str = "ours fsynced, theirs not"
    cache: str = "files warm"
    due: Mapping[str, float] = field(default_factory=dict)
    peak_due_bytes: int | None = None
    limits: Mapping[str, float] = field(default_factory=dict)
    in_memory: bool = False
    """Whether the files lie on a filesystem in memory, where an fsync costs nothing."""
    most_rounds: int = 1000
    warmed: bool = True
    """Whether a first round does not count."""


@dataclass(frozen=True)
class Outcome:
    """A row's figures by contestant, one a round."""

    row: Row
    sizes: Mapping[str, int]
    figures: Mapping[str, Sequence[Figure]]
    full: bool

    def median(self, contestant: str) -> float:
        """The middle one of a contestant's figures."""
        return statistics.median(figure.value for figure in self.figures[contestant])

    def peak_bytes(self, contestant: str) -> int | None:
        """The most memory of all rounds; None where it was not taken."""
        found = [figure.peak_bytes for figure in self.figures[contestant]]
        return max((peak for peak in found if peak is not None), default=None)

    def extras(self, contestant: str) -> Mapping[str, float]:
        """What else the last round said."""
        return self.figures[contestant][-1].extras

    def series(self, contestant: str) -> Sequence[float]:
        """How the figure went in the last round; empty where it was not noted."""
        return self.figures[contestant][-1].series

    def ratios(self, contestant: str) -> list[float]:
        """The contestant's figure divided by ours, round by round."""
        pairs = zip(self.figures[contestant], self.figures[OURS], strict=True)
        return sorted(theirs.value / ours.value for theirs, ours in pairs)

    def cpu_ratio(self, contestant: str) -> float | None:
        """The middle one of the ratios of processor time; None where it was not taken."""
        pairs = zip(self.figures[contestant], self.figures[OURS], strict=True)
        found = [t.cpu_seconds / o.cpu_seconds for t, o in pairs if t.cpu_seconds and o.cpu_seconds]
        return statistics.median(found) if found else None

    def ratio(self, contestant: str) -> float:
        """The middle one of the ratios."""
        return statistics.median(self.ratios(contestant))

    def faults(self, part: float = 1.0) -> list[str]:
        """What does not reach that part of what is due."""
        found = [
            f"{self.row.name}: {self.ratio(peer):.2f} times {peer}, due are {due:g}"
            for peer, due in self.row.due.items()
            if peer in self.figures and self.ratio(peer) < due * part
        ]
        most, peak = self.row.peak_due_bytes, self.peak_bytes(OURS)
        if most is not None and peak is not None and self.full and peak > most / part:
            text = f"{peak / 1e6:.0f} MB of memory, at most {most / 1e6:.0f} are due"
            found.append(f"{self.row.name}: {text}")
        for name, limit in self.row.limits.items() if self.full else ():
            value = self.median(OURS) if name == "value" else self.extras(OURS)[name]
            if value > limit / part:
                found.append(f"{self.row.name}: {name} is {value:.3g}, at most {limit:.3g} are due")
        return found

    def as_json(self) -> dict[str, Any]:
        """All that was measured."""
        return {
            "name": self.row.name,
            "title": self.row.title,
            "unit": self.row.unit,
            "pipeline": self.row.pipeline,
            "durability": self.row.durability,
            "cache": self.row.cache,
            "sizes": dict(self.sizes),
            "due": dict(self.row.due),
            "figures": {who: [asdict(f) for f in each] for who, each in self.figures.items()},
            "ratios": {who: self.ratios(who) for who in self.figures if who != OURS},
            "peak_bytes": {who: self.peak_bytes(who) for who in self.figures},
        }


@dataclass(frozen=True)
class Growth:
    """How many times as much one of our figures may be as another, in a full run.

    `before` and `after` name a row, and the extra that is meant if it is not the figure itself.
    """

    title: str
    before: tuple[str, str | None]
    after: tuple[str, str | None]
    most: float

    def found(self, outcomes: Sequence[Outcome]) -> float | None:
        """How many times it is; None if it was not measured, or with less than all."""
        before, after = (_ours(outcomes, *place) for place in (self.before, self.after))
        return None if before is None or after is None else after / before

    def faults(self, outcomes: Sequence[Outcome], part: float = 1.0) -> list[str]:
        """What does not reach that part of what is due."""
        found = self.found(outcomes)
        if found is None or found <= self.most / part:
            return []
        return [f"{self.title}: {found:.2f} times, at most {self.most:g} are due"]


def _ours(outcomes: Sequence[Outcome], name: str, extra: str | None) -> float | None:
    outcome = next((each for each in outcomes if each.row.name == name and each.full), None)
    if outcome is None:
        return None
    return outcome.median(OURS) if extra is None else outcome.extras(OURS)[extra]


class Watch:
    """Seconds and memory of the block it is entered for."""

    seconds = 0.0
    cpu_seconds = 0.0
    peak_bytes = 0

    def __enter__(self) -> Watch:
        gc.collect()
        _forget_peak()
        self._held = _memory("VmRSS")
        self._start = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        wall, cpu = self._start
        self.seconds, self.cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
        self.peak_bytes = max(0, _memory("VmHWM") - self._held)

    def figure(self, each: int = 1, **more: Any) -> Figure:
        """The seconds for each of so many."""
        return Figure(self.seconds / each, self.cpu_seconds / each, self.peak_bytes, **more)


def _forget_peak() -> None:
    place = Path("/proc/self/clear_refs")
    if place.exists():
        place.write_text("5")  # the peak of the resident memory begins anew


def _memory(name: str) -> int:
    """A line of the process's status in bytes; 0 where the system has no such."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)


def _serve(pipe: Connection, workload: Workload, case: Case, path: str) -> None:
    """Give a figure for each question, in a process of its own."""
    os.environ["PYTHONPATH"] = path  # for the processes that it starts
    os.chdir(path)  # and for those that begin by `python -m`, as workers of Spark do
    rounds = workload(case)
    while pipe.recv():
        try:
            pipe.send(next(rounds))
        except Exception:
            pipe.send(traceback.format_exc())
            raise
    rounds.close()


@contextmanager
def _contestants(
    row: Row, names: Sequence[str], place: Path, sizes: Mapping[str, int], before: Path | None
) -> Any:
    context = multiprocessing.get_context("spawn")
    running = {}
    try:
        for name in names:
            ours, theirs = context.Pipe()
            folder = place / name
            folder.mkdir()
            case = Case(OURS if name == BEFORE else name, folder, sizes, row.pipeline)
            checkout = before.resolve() if before and name == BEFORE else _CHECKOUT
            process = context.Process(
                target=_serve, args=(theirs, row.workload, case, str(checkout))
            )
            sys.path.insert(0, str(checkout))  # what is started finds this package there
            process.start()
            del sys.path[0]
            theirs.close()
            running[name] = ours, process
        yield {name: pipe for name, (pipe, _) in running.items()}
    finally:
        for pipe, process in running.values():
            with suppress(OSError):  # it has ended by itself
                pipe.send(False)
            process.join(60)
            if process.is_alive():
                process.kill()
                process.join()


def run(
    row: Row,
    names: Sequence[str],
    *,
    scale: int,
    rounds: int,
    place: Path,
    before: Path | None = None,
    step: Callable[[str], None] = lambda text: None,
    done: Callable[[], None] = lambda: None,
) -> Outcome:
    """All rounds of a row; `scale` says which of its sizes.

    `step` is told what is done next, by whom, and `done` is called after it.
    """
    sizes = {name: each[scale] for name, each in row.sizes.items()}
    figures: dict[str, list[Figure]] = {name: [] for name in names}
    folder = Path(tempfile.mkdtemp(prefix=f"{row.name}-", dir=_home(row, place)))
    _touch_memory()
    try:
        with _contestants(row, names, folder, sizes, before) as pipes:
            for number in range(int(not row.warmed), rounds_of(row, rounds) + 1):
                for name, pipe in pipes.items():
                    step(f"{row.name}: {name}, {f'round {number}' if number else 'warm-up'}")
                    pipe.send(True)
                    try:
                        answer = pipe.recv()
                    except (EOFError, ConnectionError):
                        answer = "its process ended"
                    if not isinstance(answer, Figure):
                        raise RuntimeError(f"{row.name}, {name}: {answer}")
                    if number:
                        figures[name].append(answer)
                    done()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Outcome(row, sizes, figures, full=scale == 0)


def _touch_memory() -> None:
    """Use a gigabyte, so that no contestant is the first to do so.

    The first use of a page of a virtual machine's memory can take 11 µs, later ones 0.3.
    """
    np.empty(_TOUCHED_BYTES, np.uint8)[:: mmap.PAGESIZE] = 0


def rounds_of(row: Row, rounds: int) -> int:
    """How many rounds of the row count."""
    return min(rounds, row.most_rounds)


def _home(row: Row, place: Path) -> Path:
    memory = Path("/dev/shm")
    return memory if row.in_memory and os.access(memory, os.W_OK) else place
