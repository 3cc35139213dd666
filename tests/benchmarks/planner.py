"""Figures of the planner of manifests: `python tests/benchmarks/planner.py`.

Not collected by pytest: these are timings, in seconds of CPU, of one thread. It prints

- planning from nothing, and anew, of 10,000 arrays with 10 M chunks in all, and the peak of memory;
- cutting one array of 10 M chunks into leaves;
- placing 10,000 arrays by 256 rules that each match by path;
- closing and planning one changed leaf of 80, and of 8,000, and their ratio;
- a whole commit that touches one leaf of 80, and of 8,000, from reading the chunk that was there
  to going on from the new snapshot, and their ratio.
"""

from __future__ import annotations

import gc
import resource
import statistics
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
import zarr
from zarr.core.buffer import cpu

import zarr_manifests as zm
from zarr_manifests import Config
from zarr_manifests.config import Compaction
from zarr_manifests.config.manifest_sets import ChunkManifests, ManifestSet, Rule, Split
from zarr_manifests.format.manifest import ManifestRef, Part
from zarr_manifests.format.records import BlobRef
from zarr_manifests.grid import Box
from zarr_manifests.planning.leaves import ArrayFacts, cut, layout_of
from zarr_manifests.planning.packing import (
    PlannedManifest,
    close,
    explain,
    plan_manifests,
)
from zarr_manifests.planning.tables import EMPTY, BaseIndex
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of


def key(number: int) -> str:
    return f"manifests/{1:012d}-{'ab' * 12}/{number}"


type Plan = tuple[PlannedManifest, ...]


def as_base(plan: Plan) -> BaseIndex:
    made = enumerate(plan)
    return BaseIndex(
        [ManifestRef(BlobRef(key(i), 100, 0), m.leaves, packed_for=m.set_name) for i, m in made]
    )


def timed[T](call: Callable[[], T]) -> tuple[T, float]:
    gc.collect()
    start = time.process_time()
    value = call()
    return value, time.process_time() - start


def arrays(count: int) -> dict[bytes, ArrayFacts]:
    """Nine of ten are small; 10 M chunks in all."""
    small = 10
    big = (10_000_000 - count * 9 // 10 * small) // (count // 10)
    facts = {}
    for i in range(count):
        node_id = i.to_bytes(12, "big")
        chunks = big if i % 10 == 0 else small
        rest = (chunks // 10, 10) if i % 10 == 0 else (1, small)
        facts[node_id] = ArrayFacts(
            node_id, f"/g{i % 100}/a{i}", (1, *rest), chunks, ("time", "lat", "lon")
        )
    return facts


def coords_of(grid_shape: tuple[int, ...]) -> np.ndarray:
    box = Box((0,) * len(grid_shape), grid_shape)
    return box.unravel(np.arange(box.size))


def plan_all(
    facts: dict[bytes, ArrayFacts], chunks: dict[bytes, np.ndarray], base: BaseIndex = EMPTY
) -> Plan:
    """The whole way: what is due, cut into leaves, placed."""
    config = ChunkManifests()
    layouts = {node_id: layout_of(config, of) for node_id, of in facts.items()}
    due = [ref.blob.key for ref in base]
    replaced = close(config, facts, base, due, () if due else chunks, layouts)
    leaves = [
        leaf
        for node_id, coords in chunks.items()
        for leaf in cut(node_id, coords, layouts[node_id])
    ]
    return plan_manifests(config, facts, leaves, base, replaced)


def many_arrays() -> None:
    facts = arrays(10_000)
    chunks = sum(of.initialized_chunks for of in facts.values())
    leaves = [
        Part(node_id, Box((0,) * 3, of.grid_shape), of.initialized_chunks)
        for node_id, of in facts.items()
    ]
    _, alone = timed(lambda: plan_manifests(ChunkManifests(), facts, leaves))
    given = {node_id: coords_of(of.grid_shape) for node_id, of in facts.items()}
    plan, fresh = timed(lambda: plan_all(facts, given))
    base, indexed = timed(lambda: as_base(plan))
    again, anew = timed(lambda: plan_all(facts, given, base))
    _, explained = timed(lambda: [explain(ChunkManifests(), of, base) for of in facts.values()])
    assert [m.leaves for m in again] == [m.leaves for m in plan]
    print(f"{len(facts):,} arrays, {chunks:,} chunks, {len(plan)} manifests")
    print(f"  placing leaves                       {alone:6.2f} s")
    print(f"  closing, cutting, placing: nothing yet {fresh:4.2f} s, all anew {anew:.2f} s")
    print(f"  index of the base {indexed:.2f} s, explain {explained:.2f} s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"  peak of the process                  {peak:6.0f} MB")
    before = sum(coords.nbytes for coords in given.values()) / 1e6
    tracemalloc.start()
    plan_all(facts, given, base)
    peak = tracemalloc.get_traced_memory()[1] / 1e6
    print(f"  peak of planning {peak:.0f} MB, beside {before:.0f} MB of coordinates given")
    tracemalloc.stop()


def one_leaf(leaves: int) -> tuple[Callable[[], None], str]:
    """Change one chunk of an array split along time, each leaf in a manifest of its own."""
    node_id = bytes(12)
    facts = {node_id: ArrayFacts(node_id, "/air", (leaves * 10, 2, 5), leaves * 100)}
    default = ManifestSet("default", 100, None, None, None)
    config = ChunkManifests(sets=(default,), rules=(), splitting=(Split("/air", ((0, 10),)),))
    parts = [Part(node_id, Box((i * 10, 0, 0), (i * 10 + 10, 2, 5)), 100) for i in range(leaves)]
    base = as_base(plan_manifests(config, facts, parts))
    layout = layout_of(config, facts[node_id])

    def run() -> None:
        (leaf,) = base.placed_in(node_id, Box((leaves * 5, 1, 1), (leaves * 5 + 1, 2, 2)))
        replaced = close(config, facts, base, [leaf.key], (), {node_id: layout})
        box = leaf.part.box
        near = base.placed_in(node_id, box)
        staying = [other.part.box for other in near if other.key not in replaced]
        new = cut(node_id, box.unravel(np.arange(leaf.part.count)), layout, staying)
        assert len(plan_manifests(config, facts, new, base, replaced)) == 1

    run()
    return run, f"{leaves:,} leaves"


def one_changed_leaf() -> None:
    cases = [one_leaf(80), one_leaf(8_000)]
    samples: list[list[float]] = [[], []]
    for _ in range(300):
        for (run, _), found in zip(cases, samples, strict=True):
            start = time.process_time()
            run()
            found.append(time.process_time() - start)
    medians = [statistics.median(found) for found in samples]
    for (_, name), seconds in zip(cases, medians, strict=True):
        print(f"one changed leaf of {name:13}        {seconds * 1e6:8.0f} us of CPU")
    print(f"  ratio                                {medians[1] / medians[0]:6.2f}")


def many_rules() -> None:
    sets = tuple(ManifestSet(f"s{i}", 50_000) for i in range(63))
    rules = tuple(Rule(sets[i % 63].name, rf".*/station{i}/[uv][0-9]*") for i in range(256))
    config = ChunkManifests(sets=sets, rules=rules)
    facts = {}
    for i in range(10_000):
        node_id = i.to_bytes(12, "big")
        facts[node_id] = ArrayFacts(node_id, f"/g{i % 100}/station{i % 300}/u{i}", (1_000,), 1_000)
    leaves = [Part(node_id, Box((0,), (1_000,)), 1_000) for node_id in facts]
    plan, seconds = timed(lambda: plan_manifests(config, facts, leaves))
    assert len(plan) >= len(sets)
    print(f"{len(facts):,} arrays by {len(rules)} rules             {seconds:6.2f} s")


def repository_of(leaves: int) -> Callable[[], None]:
    """Commits that each change one chunk of an array in so many leaves, each in a manifest."""
    default = ManifestSet("default", 10, None, None, None)
    planned = ChunkManifests(sets=(default,), rules=(), splitting=(Split("/air", ((0, 10),)),))
    config = Config(chunk_manifests=planned, compaction=Compaction(mode="manual"))
    repository = zm.create(MemoryStorage(), config)
    session = repository.writable_session()
    count = leaves * 10
    zarr.create_array(session.store, name="air", shape=(count,), chunks=(1,), dtype="i8")
    numbers = np.arange(count)
    session.store.set_virtual_refs(
        "air",
        numbers.reshape(-1, 1),
        ["file:///air.bin"],
        numbers * 0,
        numbers * 8,
        numbers * 0 + 8,
    )
    session.commit("all")
    repository.compact(mode="full")
    assert len(repository.explain_manifests().manifests) == leaves
    state = {"at": leaves * 5, "session": repository.writable_session()}

    def run() -> None:
        session = state["session"]
        state["at"] += 1
        view = contents_of(session.store).view
        assert view.lookup(view.nodes["air"].node_id, (state["at"],)) is not None
        session.store.set_sync(f"air/c/{state['at']}", cpu.Buffer.from_bytes(b"8 bytes."))
        session.commit("one chunk")

    for _ in range(3):
        run()
    return run


def one_commit() -> None:
    # Both get the same number of deltas, which a commit names and so pays for.
    cases = {leaves: repository_of(leaves) for leaves in (80, 8_000)}
    samples: dict[int, list[float]] = {leaves: [] for leaves in cases}
    for _ in range(60):
        for leaves, run in cases.items():
            start = time.process_time()
            run()
            samples[leaves].append(time.process_time() - start)
    medians = {leaves: statistics.median(found) for leaves, found in samples.items()}
    for leaves, seconds in medians.items():
        print(f"commit that touches one of {leaves:,} leaves {seconds * 1e3:8.2f} ms of CPU")
    print(f"  ratio                                {medians[8_000] / medians[80]:6.2f}")


def one_big_array() -> None:
    facts = ArrayFacts(bytes(12), "/air", (10_000, 20, 50), 10_000_000)
    coords = coords_of(facts.grid_shape)
    leaves, seconds = timed(lambda: cut(bytes(12), coords, layout_of(ChunkManifests(), facts)))
    print(f"cutting 10 M chunks of one array into {len(leaves)}   {seconds:6.2f} s")


if __name__ == "__main__":
    many_arrays()
    many_rules()
    one_changed_leaf()
    one_big_array()
    one_commit()
