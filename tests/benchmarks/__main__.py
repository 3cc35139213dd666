"""Compares this project with others: `python tests/benchmarks [--only ROW ...] [--quick]`.

It prints each row as it ends, writes all figures to `artifacts/benchmarks.json` and draws
`artifacts/benchmarks.png`. It fails if a row misses half of the ratio that is due, or if a peer is
not installed.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import tempfile
from pathlib import Path

from contestants import missing
from report import describe, draw, save
from rows import ROWS
from runner import MISSED, OURS, Outcome, Row, run


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", default=["*"], metavar="ROW", help="names, or globs")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, 3 rounds")
    parser.add_argument(
        "--rehearse", action="store_true", help="tiny sizes, 1 round, nothing is due"
    )
    parser.add_argument("--rounds", type=int, help="how many count (5)")
    parser.add_argument("--against", nargs="*", metavar="PEER", help="only compare with these")
    parser.add_argument("--list", action="store_true", help="only list the rows")
    parser.add_argument("--to", type=Path, default=Path("artifacts"), help="folder of the results")
    parser.add_argument("--place", type=Path, help="folder on the disk to measure on")
    return parser.parse_args()


def _contestants(row: Row, against: list[str] | None) -> list[str]:
    chosen = [name for name in row.contestants if against is None or name in (OURS, *against)]
    absent = missing(chosen)
    if absent:
        sys.exit(f"{', '.join(absent)} not installed: run `make bench`, or say --against whom")
    return chosen


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
    scale = 2 if arguments.rehearse else 1 if arguments.quick else 0
    rounds = arguments.rounds or (5, 3, 1)[scale]
    running = [(row, _contestants(row, arguments.against)) for row in rows]
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="benchmarks-", dir=arguments.place) as place:
        for row, names in running:
            outcomes.append(run(row, names, scale=scale, rounds=rounds, place=Path(place)))
            print(describe(outcomes[-1]), flush=True)
    save(outcomes, arguments.to / "benchmarks.json")
    draw(outcomes, arguments.to / "benchmarks.png")
    if arguments.rehearse:
        return 0
    for outcome in outcomes:
        for fault in outcome.faults():
            print("not reached:", fault)
    missed = [fault for outcome in outcomes for fault in outcome.faults(MISSED)]
    for fault in missed:
        print("MISSED BY HALF:", fault)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
