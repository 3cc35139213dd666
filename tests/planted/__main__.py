"""Plants each fault, and runs the tests that call the function it is in, until one fails.

    python tests/planted [--touched FILE] [NAME ...]

NAME is a fault's or a room's; without one, all are planted. Which test calls which function is
noted first, by a run of what `make test` runs, or read from FILE if an earlier run wrote it there.
Prints the test that found each fault, and ends with 1 if one was not found.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from planted.rooms import ROOMS, Fault

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOUND = HERE / "found_by.json"
"""Which test found each fault, in the last run that planted it."""
NIGHTLY = ("sweep", "servers", "browser", "spark", "cluster", "faults", "benchmarks")
MOST_S = 300.0
"""Of the tests that call a fault's function, the first that take so long together are run."""

HANGS_S = 3 * MOST_S
"""A fault that makes tests wait for ever is found, too."""

_USAGE_ERROR = 4  # as pytest ends

type Touched = dict[str, tuple[float, list[str]]]


def pytest(
    *args: str, timeout_s: float | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    path = [str(HERE / "planted/hook"), str(HERE), str(ROOT)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), **variables}
    # Assertions stay as they are: to rewrite those of a module, pytest loads it around the hook.
    how = ["-q", "-p", "no:cacheprovider", "--assert=plain", "--hypothesis-profile=planted"]
    command = [sys.executable, "-m", "pytest", *how, *args]
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=timeout_s
    )


def touched_by_all() -> Touched:
    """Which functions each test of `make test` calls, and how long the test takes."""
    with tempfile.TemporaryDirectory() as folder:
        args = [
            "-p",
            "planted.touched",
            "-n",
            "auto",
            "--dist",
            "worksteal",
            "-m",
            " and ".join(f"not {mark}" for mark in NIGHTLY),
        ]
        done = pytest(*args, PLANTED_TOUCHED=folder)
        print(done.stdout.strip().rpartition("\n")[2], flush=True)
        parts = [json.loads(part.read_text()) for part in Path(folder).iterdir()]
    return {test: noted for part in parts for test, noted in part.items()}


def function_of(fault: Fault) -> str:
    """The innermost function around a fault, as it is noted; else its module."""
    source = (ROOT / "zarr_manifests" / fault.path).read_text(encoding="utf-8")
    line = source[: source.index(fault.old)].count("\n") + 1
    starts = [0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            start = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            if start <= line <= (node.end_lineno or 0):
                starts.append(start)
    return f"{fault.path}:{max(starts) or ''}"


def tests_of(fault: Fault, touched: Touched, before: str | None) -> list[str]:
    """The tests that call the fault's function: the one that found it before, then the others.

    Of these come first those that call little else.
    """
    function = function_of(fault)
    whole = function.endswith(":")  # a constant of the module, or of a class
    calling = [
        (test != before, len(called), taken_s, test)
        for test, (taken_s, called) in touched.items()
        if test == before  # perhaps in another process, whose calls are not noted
        or function in called
        or (whole and any(one.startswith(function) for one in called))
    ]
    chosen: list[str] = []
    total_s = 0.0
    for _, _, taken_s, test in sorted(calling):
        total_s += taken_s
        if chosen and total_s > MOST_S:
            break
        chosen.append(test)
    return chosen


def found_by(fault: Fault, tests: list[str]) -> str:
    """The first test that fails with the fault; "" if none does."""
    if not tests:
        return ""
    # File by file: fixtures of a module that are made twice may fail whatever is planted.
    files = [*dict.fromkeys(test.partition("::")[0] for test in tests)]
    tests = sorted(tests, key=lambda test: files.index(test.partition("::")[0]))
    planted = json.dumps(["zarr_manifests/" + fault.path, fault.old, fault.new])
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as listed:
        listed.write("\n".join(tests))
        listed.flush()
        try:
            done = pytest("-x", f"@{listed.name}", PLANTED_FAULT=planted, timeout_s=HANGS_S)
        except subprocess.TimeoutExpired:
            return f"one of {len(tests)} tests, which does not end"
    if done.returncode == 0:
        return ""
    if done.returncode == _USAGE_ERROR:
        print(f"{done.stderr[-2000:]}\n{fault.name}: note anew what the tests touch", flush=True)
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (.*)$", done.stdout, re.MULTILINE)
    told = [test for test in tests if failed and failed[1].startswith(test)]
    return max(told, key=len, default=(done.stdout + done.stderr)[-300:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--touched", type=Path, metavar="FILE")
    args = parser.parse_args()
    faults = {
        fault.name: fault
        for room, of_room in ROOMS.items()
        for fault in of_room
        if not args.names or room in args.names or fault.name in args.names
    }
    if args.touched is not None and args.touched.exists():
        touched = json.loads(args.touched.read_text())
    else:
        touched = touched_by_all()
        if args.touched is not None:
            args.touched.write_text(json.dumps(touched))
    known: dict[str, str] = json.loads(FOUND.read_text(encoding="utf-8")) if FOUND.exists() else {}
    begun = time.monotonic()
    missed = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        tests = {name: tests_of(fault, touched, known.get(name)) for name, fault in faults.items()}
        tries = {pool.submit(found_by, fault, tests[name]): name for name, fault in faults.items()}
        for ended in as_completed(tries):
            name, test = tries[ended], ended.result()
            missed += not test
            known[name] = test
            print(f"{name}: {test or f'NOT FOUND by {len(tests[name])} tests'}", flush=True)
    kept = {name: test for name, test in sorted(known.items()) if test}
    FOUND.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    taken_min = (time.monotonic() - begun) / 60
    print(f"{len(faults) - missed} of {len(faults)} faults found in {taken_min:.0f} minutes")
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main())
