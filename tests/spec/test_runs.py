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
from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.storage import MemoryStorage

HERE = Path(__file__).parent


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"spec_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


reader, by_hand = load("reader"), load("by_hand")


def contents(store: zm.ManifestStore) -> dict[str, bytes]:
    async def read() -> dict[str, bytes]:
        prototype = default_buffer_prototype()
        keys = [key async for key in store.list()]
        values = [await store.get(key, prototype) for key in keys]
        return {key: value.to_bytes() for key, value in zip(keys, values, strict=True)}

    return asyncio.run(read())


def check(line: Any, message: str, digest_from: int | None = None) -> None:
    snapshot_id = line.write(message, digest_from=digest_from)
    own = reader.Reader(line.storage.get)
    assert own.read(snapshot_id) == line.expected()
    snapshot = own.follow(own.heads()["main"], reader.SNAPSHOT)
    assert own.count(snapshot, by_hand.ARRAY) == line.count()
    repository = zm.Repository.open(line.storage)
    store = repository.readonly_session("main").store
    assert contents(store) == line.expected()
    table = store.workspace.view.chunks(by_hand.ARRAY)
    found = {} if table is None else {c: ref.data for (c,), ref in table.refs()}
    assert found == line.chunks


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
@pytest.mark.parametrize("seed", range(20, 32))
def test_any_mix_of_runs_and_merged_leaves_reads_as_what_was_written(
    seed: int, pruned: bool
) -> None:
    rng = np.random.default_rng(seed if pruned else seed + 40)
    line = by_hand.Line(MemoryStorage(), pruned=pruned)
    runs, partly, dropped, digests = 0, 0, 0, 0
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
        start = int(rng.integers(0, len(line.changes) + 1))
        if pruned:  # then it does not reach below the base
            beyond = [c.first > line.base_sequence for c in line.changes]
            start = beyond.index(True) if True in beyond else len(beyond)
        digest = start if len(line.changes) - start > 1 and rng.random() < 0.5 else None
        check(line, f"step {step}", digest)
        merged = {leaf.merged for leaf in line.leaves}
        partly += len(merged) > 1
        runs += any(c.first < c.last for c in line.changes)
        digests += digest is not None
    assert runs > 2
    assert partly > 1
    assert digests > 1


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


def test_a_digest_may_say_what_the_base_has() -> None:
    line = by_hand.Line(MemoryStorage(), pruned=False)
    line.commit({0: b"a", 1: b"a"}, groups={"g": "1", "h": "1"})
    line.commit({1: b"b", 5: b"b"}, cut=5, groups={"g": "2"}, deleted=["h"])
    line.merge_leaf(0, 4)
    check(line, "all of it", digest_from=0)
    line.commit({2: b"c", 9: b"c"}, cut=9, groups={"h": "2"}, deleted=["g"])
    check(line, "part of it", digest_from=0)
    line.write_base()
    line.commit({0: None})
    check(line, "nodes of all but the last", digest_from=1)


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
