"""What commits write and read on a base of a million chunk refs, with their compactions.

By counts of bytes, objects and rounds. `tests/benchmarks/commits.py` makes the same commits, and
more of them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zarr_manifests as zm
from zarr_manifests import Session
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of
from zarr_manifests.testing import CountingStorage, LatencyStorage


def _load() -> Any:
    path = Path(__file__).parents[1] / "benchmarks" / "commits.py"
    spec = importlib.util.spec_from_file_location("benchmark_commits", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


bench = _load()
REFS = bench.BASE_REFS
COMMITS = 1_000


@pytest.fixture(scope="module")
def base() -> Callable[[], MemoryStorage]:
    """Makes copies of a repository with a million chunk refs in its base."""
    made = MemoryStorage()
    bench.put_base(made, room=100 * COMMITS)

    def copy() -> MemoryStorage:
        storage = MemoryStorage()
        for info in made.list():
            if info.key != "current":
                storage.put(info.key, made.get(info.key))
        assert storage.cas("current", made.get("current"), None) is not None
        return storage

    return copy


@pytest.mark.slow
def test_an_append_costs_what_it_appends(base: Callable[[], MemoryStorage]) -> None:
    storage = LatencyStorage(base(), latency_s=0.01)
    costs = bench.commit_all(storage, bench.append(REFS), range(200))
    assert costs.metadata_bytes / 200 <= 32 * 1024
    assert costs.largest_read <= 64 * 1024
    assert sum(costs.compacted) >= 4
    plain = [n for n, more in zip(costs.rounds, costs.compacted, strict=True) if not more]
    # On a busy machine a thread may begin so late that its request counts as a further round.
    assert sum(n > 2 for n in plain) <= 4
    assert sum(costs.rounds) / 200 <= 2.1
    assert costs.most_deltas <= 50


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["next", "scattered"])
def test_a_thousand_commits_copy_each_ref_a_few_times(
    base: Callable[[], MemoryStorage], kind: str
) -> None:
    change = bench.write_next(REFS) if kind == "next" else bench.scatter(REFS)
    costs = bench.commit_all(base(), change, range(COMMITS))
    assert costs.refs_written <= 12 * costs.refs_bytes
    assert costs.other_bytes / COMMITS <= 16 * 1024
    assert costs.most_runs <= 20
    assert costs.most_deltas <= 50
    assert sum(costs.compacted) == COMMITS // 50


def _read_all(storage: MemoryStorage) -> tuple[int, Session]:
    """Bytes of metadata that are read to find all chunks, and the session."""
    counting = CountingStorage(storage)
    session = zm.open(counting).readonly_session("main")
    view = contents_of(session.store).view
    counting.reset()
    assert view.chunks(view.nodes["huge"].node_id) is not None
    return counting.bytes_read, session


def test_reading_everything_reads_deltas_once(base: Callable[[], MemoryStorage]) -> None:
    storage = base()
    without, _ = _read_all(storage)
    bench.commit_all(storage, bench.scatter(REFS), range(49))
    found, session = _read_all(storage)
    entries = contents_of(session.store).view.snapshot.deltas
    assert len(entries) == 49
    own = sum(e.log.length + sum(m.blob.length for m in e.manifests) for e in entries)
    assert own < found <= 1.1 * without + own
