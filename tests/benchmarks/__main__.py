"""Compares this project with others: `python tests/benchmarks [--only ROW ...] [--quick]`.

It prints each row as it ends, writes all figures to `artifacts/benchmarks.json`, a table of them to
`artifacts/benchmarks.md`, and draws `artifacts/benchmarks.png`. It fails if a row misses half of
the target ratio, if a figure grows twice as much as it may, or if a peer is not installed.
"""

from __future__ import annotations

import argparse
import compileall
import fnmatch
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

from contestants import missing
from picture import draw
from report import describe, describe_growth, save, tabulate
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rows import GROWTHS, ROWS
from runner import BEFORE, MISSED, OURS, Outcome, Row, rounds_of, run

import zarr_manifests as zm


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", default=["*"], metavar="ROW", help="names, or globs")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, 3 rounds")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, 1 round, no targets")
    parser.add_argument("--rounds", type=int, help="how many count (5)")
    parser.add_argument("--against", nargs="*", metavar="PEER", help="only compare with these")
    parser.add_argument(
        "--before", type=Path, metavar="CHECKOUT", help="compare with an earlier state of this"
    )
    parser.add_argument("--list", action="store_true", help="only list the rows")
    parser.add_argument("--to", type=Path, default=Path("artifacts"), help="folder of the results")
    parser.add_argument("--place", type=Path, help="folder on the disk to measure on")
    return parser.parse_args()


def _contestants(row: Row, arguments: argparse.Namespace) -> list[str]:
    against = arguments.against
    chosen = [name for name in row.contestants if against is None or name in (OURS, *against)]
    absent = missing(chosen)
    if absent:
        sys.exit(f"{', '.join(absent)} not installed: run `make bench`, or say --against whom")
    return chosen if arguments.before is None else [*chosen, BEFORE]


def _run(
    rows: Sequence[Row], arguments: argparse.Namespace, scale: int, progress: Progress
) -> Iterator[Outcome]:
    rounds = arguments.rounds or (5, 3, 1)[scale]
    running = [(row, _contestants(row, arguments)) for row in rows]
    total = sum(len(names) * (rounds_of(row, rounds) + row.warmed) for row, names in running)
    task = progress.add_task("", total=total)

    def step(text: str) -> None:
        progress.update(task, description=text)

    def done() -> None:
        progress.advance(task)

    with tempfile.TemporaryDirectory(prefix="benchmarks-", dir=arguments.place) as place:
        for row, names in running:
            start = time.perf_counter()
            where = Path(place)
            outcome = run(
                row,
                names,
                scale=scale,
                rounds=rounds,
                place=where,
                before=arguments.before,
                step=step,
                done=done,
            )
            print(describe(outcome, time.perf_counter() - start), flush=True)
            yield outcome


def _judge(outcomes: Sequence[Outcome]) -> int:
    """Print what was not reached; whether anything was missed by half."""
    for text in filter(None, (describe_growth(growth, outcomes) for growth in GROWTHS)):
        print(text)
    judges = [*(each.faults for each in outcomes), *(partial(g.faults, outcomes) for g in GROWTHS)]
    missed = [fault for faults in judges for fault in faults(part=MISSED)]
    for fault in (fault for faults in judges for fault in faults(part=1.0)):
        print("MISSED BY HALF:" if fault in missed else "not reached:", fault)
    return 1 if missed else 0


def main() -> int:
    """Run the rows that were asked for."""
    arguments = _arguments()
    rows = [r for r in ROWS if any(fnmatch.fnmatch(r.name, glob) for glob in arguments.only)]
    if not rows:
        sys.exit(f"there is no such row; there are: {', '.join(row.name for row in ROWS)}")
    if arguments.list:
        for row in rows:
            print(f"{row.name:20} {row.title}")
        return 0
    # As pip does when it installs a package. In a checkout without bytecode, each process of a row
    # would compile what it imports.
    compileall.compile_dir(Path(zm.__file__).parent, quiet=1)
    if arguments.before is not None:
        compileall.compile_dir(arguments.before / "zarr_manifests", quiet=1)
    scale = 2 if arguments.rehearse else 1 if arguments.quick else 0
    terminal = Console(stderr=True)
    columns = "{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    progress = Progress(
        *columns,
        console=terminal,
        redirect_stdout=sys.stdout.isatty(),  # rows that are piped elsewhere go there
        transient=True,
        disable=not terminal.is_terminal,
    )
    outcomes: list[Outcome] = []
    try:
        with progress:
            outcomes.extend(_run(rows, arguments, scale, progress))
    finally:
        if outcomes:  # where a row fails, what was measured before it is kept
            save(outcomes, GROWTHS, arguments.to / "benchmarks.json")
            tabulate(outcomes, GROWTHS, arguments.to / "benchmarks.md")
            draw(outcomes, arguments.to / "benchmarks.png")
    return 0 if arguments.rehearse else _judge(outcomes)


if __name__ == "__main__":
    sys.exit(main())
