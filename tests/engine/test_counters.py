"""Counters that are wrong are found: planted in a commit, in a base, and in the sum of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import zarr
from zarr.core.buffer import cpu

import zarr_manifests as zm
from zarr_manifests import Repository
from zarr_manifests.engine.commit import landing as commit
from zarr_manifests.engine.compact import compaction as compact
from zarr_manifests.engine.snapshot.totals import Effect
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.format.counts import Count, Counted
from zarr_manifests.format.delta import Delta
from zarr_manifests.format.snapshot import DeltaEntry
from zarr_manifests.storage.memory import MemoryStorage

CONFIG = {"compaction": {"mode": "manual"}, "inline-chunk-bytes": 16}
type Wrong = Callable[[Count], Count]


def fill(repository: Repository, *at: int, name: str = "a", nbytes: int = 8) -> str:
    session = repository.writable_session()
    for i in at:
        session.store.set_sync(f"{name}/c/{i}", cpu.Buffer.from_bytes(bytes(range(nbytes))))
    return session.commit("fill")


@pytest.fixture
def repository() -> Repository:
    repository = zm.create(MemoryStorage(), CONFIG)
    with repository.transaction(message="arrays") as store:
        for name in "ab":
            zarr.create_array(store, name=name, shape=(9,), chunks=(1,), dtype="u1")
    fill(repository, 0, 1, 2)
    fill(repository, 0, 1, name="b")
    return repository


def told(repository: Repository) -> list[str]:
    return [problem.what for problem in repository.verify().problems]


def _planted(
    monkeypatch: pytest.MonkeyPatch, wrong: Wrong, sums: Mapping[str, int] | None = None
) -> None:
    """Have commits count wrongly."""
    true, right = commit.effect_of, dict[Any, Any]()

    class Wrongly(Effect):
        def sums(self, parent: SnapshotView, entry: DeltaEntry, delta: Delta) -> dict[str, int]:
            found = super().sums(parent, replace(entry, counts=right[entry.counts]), delta)
            return {**found, **(sums or {})}

    def planted(*given: Any) -> Effect:
        found = true(*given)
        assert found.counts
        counts = tuple(map(wrong, found.counts))
        right[counts] = found.counts
        return Wrongly(counts, found.view, found.before)

    monkeypatch.setattr(commit, "effect_of", planted)


def test_what_is_right_is_no_problem(repository: Repository) -> None:
    fill(repository, 2, 3)
    zarr.open_array(repository.writable_session().store, path="a").resize((2,))
    repository.compact("main", "full")
    fill(repository, 1, 7)
    assert repository.verify().ok


CHUNKS: Wrong = lambda count: replace(count, chunks=count.chunks + 1)  # noqa: E731
BYTES: Wrong = lambda count: replace(count, nbytes=count.nbytes - 1)  # noqa: E731
TOO_FEW: Wrong = lambda count: replace(  # noqa: E731
    count, chunks=count.chunks - 1, counted=count.counted | Counted.CHUNKS_AT_MOST
)
TOO_SMALL: Wrong = lambda count: replace(  # noqa: E731
    count, nbytes=count.nbytes - 1, counted=count.counted | Counted.BYTES_AT_MOST
)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (CHUNKS, "/a has 5 chunks, and counters say 6"),
        (BYTES, "/a has 40 bytes of chunks, and counters say 39"),
        (TOO_FEW, "/a has 5 chunks, and counters say 4 at most"),
        (TOO_SMALL, "/a has 40 bytes of chunks, and counters say 39 at most"),
    ],
)
def test_a_commit_that_counts_wrongly(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, wrong: Wrong, what: str
) -> None:
    _planted(monkeypatch, wrong)
    fill(repository, 3, 4)
    (problem,) = told(repository)
    assert what in problem


def test_a_bound_may_be_too_large(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    more: Wrong = lambda count: replace(  # noqa: E731
        count, chunks=count.chunks + 1, counted=count.counted | Counted.CHUNKS_AT_MOST
    )
    _planted(monkeypatch, more)
    fill(repository, 3, 4)
    assert all("has 5 chunks" not in problem for problem in told(repository))


def test_a_wrong_count_in_an_older_snapshot(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        _planted(patched, CHUNKS)
        wrong = fill(repository, 3, 4)
    repository.compact("main", "full")  # counts anew
    fill(repository, 5)
    keys = {problem.key for problem in repository.verify().problems}
    assert keys == {f"snapshots/{wrong.rpartition('-')[0]}/{wrong.rpartition('-')[2]}"}


def test_a_base_that_counts_wrongly(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = compact.counts_of_base

    def counts_of_base(*args: Any) -> Any:
        counts = real(*args)
        assert counts is not None
        return tuple(map(CHUNKS, counts))

    monkeypatch.setattr(compact, "counts_of_base", counts_of_base)
    repository.compact("main", "full")
    (problem,) = told(repository)
    assert "/a has 3 chunks, and counters say 4" in problem
    assert "/b has 2 chunks, and counters say 3" in problem


@pytest.mark.parametrize("name", ["arrays", "groups", "chunks", "chunk-bytes"])
def test_sums_that_are_wrong(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    _planted(monkeypatch, lambda count: count, {name: 77})
    fill(repository, 3, 4)
    (problem,) = told(repository)
    assert f"the sum of {name} is" in problem
    assert problem.endswith("and the snapshot says 77")


def test_a_bound_beside_an_exact_sum(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    _planted(monkeypatch, lambda count: count, {"chunks-at-most": 99})
    fill(repository, 3, 4)
    (problem,) = told(repository)
    assert "the sum of chunks-at-most is not known, and the snapshot says 99" in problem
