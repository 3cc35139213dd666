"""Runs, and leaves merged to different sequences, read as the deltas they stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import zarr_manifests as zm
from specified import contents, load, reader
from zarr_manifests.engine.changes_between import chunks_there
from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of

by_hand = load("by_hand")


def check(line: Any, message: str, **bundles: Any) -> None:
    snapshot_id = line.write(message, **bundles)
    own = reader.Reader(line.storage.get)
    assert own.read(snapshot_id) == line.expected()
    snapshot = own.follow(own.heads()["main"], reader.SNAPSHOT)
    assert own.count(snapshot, by_hand.ARRAY) == line.count()
    repository = zm.open(line.storage)
    store = repository.readonly_session("main").store
    assert contents(store) == line.expected()
    table = contents_of(store).view.chunks(by_hand.ARRAY)
    found = {} if table is None else {c: ref.data for (c,), ref in table.refs()}
    assert found == line.chunks
    check_presence(line, repository)


def check_presence(line: Any, repository: zm.Repository) -> None:
    """What is there, as it is told without a listing."""
    session = repository.readonly_session("main")
    there = sorted(line.chunks)
    assert session.chunk_refs("x").coords[:, 0].tolist() == there
    some = session.chunk_refs("x", [slice(3, 9)]).coords
    assert some[:, 0].tolist() == [c for c in there if 3 <= c < 9]
    every = np.arange(by_hand.LENGTH).reshape(-1, 1)
    known = chunks_there(contents_of(session.store).view, by_hand.ARRAY, every)
    assert np.flatnonzero(known).tolist() == there
    stats = repository.du(path="x")
    assert stats.chunks == len(there)
    assert stats.nbytes == line.count()[1]


def change(line: Any, rng: np.random.Generator) -> None:
    rows = {
        int(c): None if rng.random() < 0.3 else rng.bytes(3)
        for c in rng.choice(by_hand.LENGTH, rng.integers(0, 4), replace=False)
    }
    cut = int(rng.integers(1, by_hand.LENGTH)) if rng.random() < 0.3 else None
    groups = {f"g{rng.integers(0, 3)}": rng.bytes(2).hex()} if rng.random() < 0.4 else {}
    deleted = [f"g{rng.integers(0, 3)}"] if rng.random() < 0.3 else []
    line.commit(rows, cut, groups, deleted, apart=rng.random() < 0.3)


BOXES = ((0, 4), (4, 8), (8, 12))


@pytest.mark.parametrize("pruned", [True, False], ids=["pruned", "whole"])
@pytest.mark.parametrize("seed", [20, pytest.param(21, marks=pytest.mark.sweep)])
def test_any_mix_of_runs_and_merged_leaves_reads_as_what_was_written(
    seed: int, pruned: bool
) -> None:
    rng = np.random.default_rng(seed)
    line = by_hand.Line(MemoryStorage(), pruned=pruned)
    runs, partly, bundles, old = 0, 0, 0, 0
    for step in range(40):
        match rng.integers(0, 10):
            case 0 | 9 if line.changes:
                line.merge_leaf(*BOXES[rng.integers(0, 3)])
            case 1 | 2 if len(line.changes) > 1:
                start = int(rng.integers(0, len(line.changes) - 1))
                line.roll_up(start, start + int(rng.integers(2, 5)))
            case 3:
                line.drop()
            case _:
                change(line, rng)
        bundle = None
        if line.changes and rng.random() < 0.5:
            bundle = int(rng.integers(0, len(line.changes)))
            old += line.changes[bundle].last <= line.base_sequence
        check(line, f"step {step}", bundle_from=bundle)
        merged = {leaf.merged for leaf in line.leaves}
        partly += len(merged) > 1
        runs += any(c.first < c.last for c in line.changes)
        bundles += bundle is not None
    assert runs > 3
    assert partly
    assert bundles > old > 1


def test_a_bundle_does_not_bring_back_what_has_left_the_read_list_from_its_midst() -> None:
    line = by_hand.Line(MemoryStorage())
    line.commit({0: b"old", 9: b"old"}, groups={"g": "old", "h": "old"})
    line.commit({0: b"new", 1: b"new"}, groups={"g": "new"}, deleted=["h"])
    line.merge_leaf(0, 4)
    assert line.drop() == 1
    line.commit({1: None, 9: b"newer"}, groups={"i": "1"})
    check(line, "a bundle across the gap", bundle_from=0)
    assert [change.first for change in line.changes] == [1, 3]


def test_entries_out_of_order_are_refused() -> None:
    line = by_hand.Line(MemoryStorage())
    line.commit({0: b"a"})
    line.commit({0: b"b"})
    line.changes.reverse()
    with pytest.raises(CorruptObjectError, match="out of order"):
        line.write("reversed")
    line.changes.reverse()
    line.sequence = 1
    with pytest.raises(CorruptObjectError, match="later sequence"):
        line.write("too late")
    line.sequence = 2
    line.merge_leaf(0, 1)
    line.base_sequence = 1
    with pytest.raises(CorruptObjectError, match="a leaf is merged to a later sequence"):
        line.write("a leaf too new")
