"""Run a seed again and print its trace, or run many.

`python tests/simulation --seed 7` replays one. `--seeds 10000` runs that many, `--minutes 10` runs
for that long, both from `--first` on and on all cores. With `--streams`, streams take part; with
`--zones`, cells have zone maps; with `--merges`, branches are merged; with `--finders`, what was
left behind is named again. The exit status is 1 if a seed fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from itertools import count
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

from simulated import KINDS, Outcome, simulate


def _show(outcome: Outcome, *, trace: bool) -> None:
    if trace:
        sys.stdout.write("\n".join(outcome.trace) + "\n")
    counts = ", ".join(f"{name} {outcome.counts[name]}" for name in sorted(outcome.counts))
    sys.stdout.write(
        f"seed {outcome.seed}: {outcome.calls} calls, trace {outcome.digest}\n{counts}\n"
    )
    if outcome.failure is not None:
        sys.stdout.write("".join(traceback.format_exception(outcome.failure)))
        sys.stdout.write(f"\nagain: {outcome.again}\n")


def _run_many(seeds: Sequence[int] | count[int], until_s: float, kinds: Sequence[str]) -> int:
    done = failed = 0
    for seed in seeds:
        if time.monotonic() > until_s:
            break
        outcome = simulate(seed, kinds)
        done += 1
        if outcome.failure is not None:
            failed += 1
            _show(outcome, trace=False)
    sys.stdout.write(f"{done} seeds, {failed} failed\n")
    return 1 if failed else 0


def _share(arguments: Sequence[str], workers: int) -> int:
    """The same in several processes, each with its share of the seeds."""
    command = [sys.executable, str(Path(__file__).parent), *arguments]
    running = [subprocess.Popen([*command, "--worker", f"{i}/{workers}"]) for i in range(workers)]
    return max([process.wait() for process in running])


def main(arguments: Sequence[str]) -> int:
    """Do what the command line says; the exit status."""
    parser = argparse.ArgumentParser("python tests/simulation")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--seed", type=int, help="run this one and print its trace")
    what.add_argument("--seeds", type=int, help="run so many")
    what.add_argument("--minutes", type=float, help="run for that long")
    parser.add_argument("--first", type=int, default=0, help="the first of many")
    for kind in KINDS:
        parser.add_argument(f"--{kind}", action="store_true", help="with who makes these")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    kinds = [kind for kind in KINDS if getattr(given, kind)]
    if given.seed is not None:
        outcome = simulate(given.seed, kinds)
        _show(outcome, trace=True)
        return 1 if outcome.failure is not None else 0
    if not given.worker:
        return _share(arguments, os.cpu_count() or 1)
    worker, workers = map(int, given.worker.split("/"))
    if given.seeds is not None:
        until_s = float("inf")
        seeds: Sequence[int] | count[int] = range(
            given.first + worker, given.first + given.seeds, workers
        )
    else:
        seeds, until_s = count(given.first + worker, workers), time.monotonic() + given.minutes * 60
    return _run_many(seeds, until_s, kinds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
