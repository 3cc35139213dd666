"""Every seed keeps every promise; `--seeds N` says how many are tried."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

import mutants
from simulated import CALLS, simulate
from simulated.process import Process
from zarr_manifests.engine import overlay

BATCH = 10
KINDS: dict[str, dict[str, int]] = {
    "streams": {
        "batches committed": 1,
        "batches that were committed": 1,
        "batches after a gap": 1,
    },
    "zones": {"chunks left out by statistics": 300, "chunks measured": 30},
    "merges": {
        "merges landed": 8,
        "branches moved by merges": 2,
        "merges refused: ConflictError": 4,
    },
    "finders": {"named again": 4, "refused a name": 4},
}
"""Who takes part besides, and what has happened in 30 seeds, at least so often."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Seeds that the commit draws, so that each commit tries others."""
    seeds = metafunc.config.getoption("--seeds")
    first = int(metafunc.config.getoption("--commit"), 16) % 10**9 * 1000
    if "batch" in metafunc.fixturenames:
        metafunc.parametrize("batch", range(first, first + max(seeds, BATCH), BATCH))
    if "few" in metafunc.fixturenames:
        metafunc.parametrize("few", range(first, first + max(seeds // 20, BATCH), BATCH))


def check(seeds: Sequence[int], *kinds: str) -> Counter[str]:
    """Try the seeds; what has happened in them."""
    failed, seen = [], Counter[str]()
    for seed in seeds:
        outcome = simulate(seed, kinds)
        seen.update(outcome.counts)
        if outcome.failure is not None:
            failed.append(f"seed {seed}: {outcome.failure}\nagain: {outcome.again}")
        else:
            assert outcome.calls >= 200
    if failed:
        pytest.fail("\n".join(failed))
    return seen


@pytest.mark.simulation
def test_seeds_keep_all_promises(batch: int) -> None:
    check(range(batch, batch + BATCH))


@pytest.mark.simulation
@pytest.mark.parametrize("kind", KINDS)
def test_seeds_with_others_keep_all_promises(few: int, kind: str) -> None:
    check(range(few, few + BATCH), kind)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
def test_others_do_what_they_are_there_for(kind: str) -> None:
    seen = check(range(40), kind)
    assert {name: least for name, least in KINDS[kind].items() if seen[name] < least} == {}


def test_the_same_seed_gives_the_same_trace() -> None:
    once = [simulate(seed).digest for seed in range(5)]
    assert [simulate(seed).digest for seed in range(5)] == once
    assert len(set(once)) == 5


@pytest.mark.sweep
def test_the_trace_is_the_same_in_another_process_whatever_strings_hash_to() -> None:
    command = [sys.executable, str(Path(__file__).parent), "--seed", "3"]
    shown = [
        subprocess.run(
            command,
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in (1, 2)
    ]
    assert shown[0] == shown[1]
    outcome = simulate(3)
    assert f"seed 3: {outcome.calls} calls, trace {outcome.digest}" in shown[0]
    assert outcome.trace[-1] in shown[0]


def test_a_run_leaves_nothing_in_memory() -> None:
    before = [one for one in gc.get_objects() if isinstance(one, Process)]
    for seed in range(5):
        simulate(seed)
    (fault,) = [one for one in mutants.MUTANTS if one.name == "old-root-reused"]
    assert mutants.run(fault, fault.seed).failure is not None
    overlay._VIEWS.clear()  # a few that the whole process keeps
    while gc.collect():  # what a finalizer held goes in the next round
        pass
    # Whatever the package keeps of a run leads to a process of it, whose runtime it has.
    left = [one for one in gc.get_objects() if isinstance(one, Process)]
    assert [one.name for one in left if not any(one is other for other in before)] == []


@pytest.mark.sweep
def test_all_that_can_happen_does_happen() -> None:
    seen = Counter[str]()
    for seed in range(80):
        outcome = simulate(seed)
        seen.update(outcome.counts.keys())
        seen.update(f"!{word}" for line in outcome.trace for word in line.split(" !")[1:])
        assert outcome.calls >= CALLS - 20
    assert {
        "acknowledged",
        "failed",
        "crashes",
        "commit append",
        "commit overwrite",
        "commit delete",
        "commit metadata",
        "commit rewrite",
        "create branch",
        "reset branch",
        "delete branch",
        "create tag",
        "save config",
        "claim branch",
        "exclusive commits",
        "collect garbage",
        "deleted",
        "end collection",
        "expire snapshots",
        "leases held to the end",
        "commits under a lease",
        "forks merged",
        "forks that clash",
        "overwritten on purpose",
        "appends put behind others",
        "chunks repacked",
        "tidied up",
        "verified",
        "nothing to recover",
        "accidents",
        "compacted in the background",
        "leases relied on",
        "no thread",
        "recovered",
        "refused",
        "!fail",
        "!fail_after",
        "!lose_answer",
        "!late",
        "!twice",
        "!late_twice",
        "!crash",
    } <= seen.keys()
