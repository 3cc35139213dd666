"""Runs, and leaves merged to different sequences, read as the deltas they stand for."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from zarr.core.buffer import default_buffer_prototype

import zarr_manifests as zm
from zarr_manifests.engine.history.changes_between import chunks_there
from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.reports import Usage
from zarr_manifests.repository import build_index
from zarr_manifests.session import initialized_chunks
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import ManifestStore, contents_of

HERE = Path(__file__).parent


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"spec_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


reader, by_hand = load("reader"), load("by_hand")


def contents(store: ManifestStore) -> dict[str, bytes]:
    async def read() -> dict[str, bytes]:
        prototype = default_buffer_prototype()
        keys = [key async for key in store.list()]
        values = [await store.get(key, prototype) for key in keys]
        return {key: value.to_bytes() for key, value in zip(keys, values, strict=True)}

    return asyncio.run(read())


def check(line: Any, message: str, **digests: Any) -> None:
    snapshot_id = line.write(message, **digests)
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


def check_presence(line: Any, repository: zm.Repository) -> Usage:
    """What is there, as it is told without a listing."""
    session = repository.readonly_session("main")
    there = sorted(line.chunks)
    assert initialized_chunks(session, "x")[:, 0].tolist() == there
    some = initialized_chunks(session, "x", [slice(3, 9)])
    assert some[:, 0].tolist() == [c for c in there if 3 <= c < 9]
    every = np.arange(by_hand.LENGTH).reshape(-1, 1)
    known = chunks_there(contents_of(session.store).view, by_hand.ARRAY, every)
    assert np.flatnonzero(known).tolist() == there
    stats = repository.du(path="x")
    assert stats.chunks == len(there)
    assert stats.nbytes in (None, line.count()[1])
    return stats


def check_indexed(line: Any) -> bool:
    """The same with an index; whether it told the bytes, too."""
    copy = MemoryStorage()
    for info in line.storage.list(""):
        copy.put(info.key, line.storage.get(info.key))
    assert build_index(zm.open(copy)).indexed == len(line.leaves)
    stats = check_presence(line, zm.open(copy))
    return stats.nbytes is not None


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


@pytest.mark.slow
@pytest.mark.parametrize("pruned", [True, False], ids=["pruned", "whole"])
@pytest.mark.parametrize("seed", range(20, 32))
def test_any_mix_of_runs_and_merged_leaves_reads_as_what_was_written(
    seed: int, pruned: bool
) -> None:
    rng = np.random.default_rng(seed)
    line = by_hand.Line(MemoryStorage(), pruned=pruned)
    runs, partly, dropped, digests, old, told = 0, 0, 0, 0, 0, 0
    for step in range(40):
        match rng.integers(0, 10):
            case 0 | 9 if line.changes:
                line.merge_leaf(*BOXES[rng.integers(0, 3)])
            case 1 | 2 if len(line.changes) > 1:
                start = int(rng.integers(0, len(line.changes) - 1))
                line.roll_up(start, start + int(rng.integers(2, 5)))
            case 3:
                dropped += line.drop()
            case _:
                change(line, rng)
        digest = None
        if line.changes and rng.random() < 0.5:
            digest = int(rng.integers(0, len(line.changes)))
            old += line.changes[digest].last <= line.base_sequence
        check(line, f"step {step}", digest_from=digest)
        merged = {leaf.merged for leaf in line.leaves}
        partly += len(merged) > 1
        told += bool(merged) and check_indexed(line)
        runs += any(c.first < c.last for c in line.changes)
        digests += digest is not None
    assert runs > 3
    assert partly
    assert digests > old > 1
    assert told > 1


def test_what_is_older_than_a_leaf_does_not_count_in_its_box() -> None:
    line = by_hand.Line(MemoryStorage())
    line.commit({0: b"old", 5: b"old", 9: b"old"})
    line.commit({0: b"new", 5: None, 2: b"two"}, cut=4, groups={"g": "2"})
    line.commit({6: b"six"}, cut=8)
    check(line, "all live")
    line.merge_leaf(0, 8)
    assert line.drop() == 0  # the first still says where 9 was, the second that it was cut off
    check(line, "a leaf of its own")
    line.changes = [line.changes[0], line.changes[2]]  # what the second says the leaf has
    check(line, "without the second")


def test_a_digest_that_the_base_has_overtaken_says_nothing_of_nodes() -> None:
    line = by_hand.Line(MemoryStorage())
    line.commit({0: b"a", 6: b"a"}, groups={"g": "1", "h": "1"})
    line.commit({1: b"b"}, groups={"g": "2"})
    check(line, "a digest", digest_from=0)
    line.commit({2: b"c"}, groups={"g": "3"}, deleted=["h"])
    line.merge_leaf(0, 4)
    line.changes.pop()  # what the base has of nodes is newer than the digest
    check(line, "all of it is in the base", keep_digests=True)
    line.commit({3: b"d"}, groups={"i": "4"})
    check(line, "and one more", keep_digests=True)
    assert len(line.digests) == 1


def test_a_digest_that_reaches_beyond_the_base_counts() -> None:
    line = by_hand.Line(MemoryStorage())
    line.commit({0: b"a", 6: b"a"}, groups={"g": "1", "h": "1"})
    line.commit({0: b"b", 7: b"b"}, groups={"g": "2"}, deleted=["h"])
    line.write("of which the base will be")
    nodes, chunks = dict(line.groups), dict(line.chunks)
    line.commit({1: b"c", 6: None}, groups={"g": "3", "i": "3"}, cut=7)
    check(line, "a digest of all", digest_from=0)
    line.leaves = [by_hand.Leaf(0, 4, 2, {c: v for c, v in chunks.items() if c < 4})]
    line.base_sequence, line.base_groups, line.base_count = 2, nodes, (3, 3)
    check(line, "over a base of two of them", keep_digests=True)
    assert len(line.digests) == 1


def test_a_digest_does_not_bring_back_what_has_left_the_read_list_from_its_midst() -> None:
    line = by_hand.Line(MemoryStorage())
    line.commit({0: b"old", 9: b"old"}, groups={"g": "old", "h": "old"})
    line.commit({0: b"new", 1: b"new"}, groups={"g": "new"}, deleted=["h"])
    line.merge_leaf(0, 4)
    assert line.drop() == 1
    line.commit({1: None, 9: b"newer"}, groups={"i": "1"})
    check(line, "a digest across the gap", digest_from=0)
    assert [change.first for change in line.changes] == [1, 3]
    assert len(line.digests) == 1


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
