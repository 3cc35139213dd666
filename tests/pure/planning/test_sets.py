"""Sets of manifests: what holds for every configuration and history."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from zarr_manifests.config import Config
from zarr_manifests.config.manifest_sets import ChunkManifests, ManifestSet, Rule, Split
from zarr_manifests.format.manifest import ManifestRef, Part
from zarr_manifests.format.records import BlobRef
from zarr_manifests.grid import Box
from zarr_manifests.planning.leaves import ArrayFacts, cut, layout_of
from zarr_manifests.planning.packing import (
    Overflow,
    PlannedManifest,
    close,
    explain,
    plan_manifests,
)
from zarr_manifests.planning.tables import BaseIndex


def key(number: int) -> str:
    return f"manifests/{1:012d}-{'ab' * 12}/{number}"


def id_of(path: str) -> bytes:
    return path.encode().ljust(12, b"\0")


def path_of(node_id: bytes) -> str:
    return node_id.rstrip(b"\0").decode()


type Chunks = set[tuple[int, int]]
PATHS = [f"/{group}/{name}" for group in "gh" for name in ("lat", "time", "u", "v", "w")]


@st.composite
def configs(draw: st.DrawFn) -> ChunkManifests:
    sizes = st.none() | st.integers(1, 40)
    names = ["s", "t", "u"][: draw(st.integers(0, 3))]
    sets = []
    for i, name in enumerate(names):
        counted = draw(st.booleans())
        sets.append(
            ManifestSet(
                name,
                None if counted else draw(sizes),
                draw(st.integers(1, 3)) if counted else None,
                overflow_to=draw(st.sampled_from([*names[i + 1 :], "default"])),
                cardinality=draw(st.none() | st.integers(1, 3)),
            )
        )
    last = ManifestSet("default", draw(st.integers(1, 50)), None, None, None)
    if draw(st.integers(0, 4)) == 0:
        last = ManifestSet("default", None, draw(st.none() | st.integers(1, 3)), None, None)
    paths = st.none() | st.sampled_from([".*", "/g/.*", ".*/(lat|time)", "/h/u"])
    ranges = st.none() | st.tuples(st.integers(0, 30), st.integers(0, 90)).map(
        lambda ends: (ends[0], ends[0] + ends[1])
    )
    rules = draw(
        st.lists(
            st.builds(Rule, st.sampled_from([*names, "default"]), paths, ranges, ranges), max_size=4
        )
    )
    splits = st.builds(
        Split,
        st.sampled_from([".*", "/g/.*", "/h/u"]),
        st.dictionaries(st.integers(0, 1), st.integers(1, 9), min_size=1).map(
            lambda found: tuple(found.items())
        ),
    )
    splitting = draw(st.none() | st.lists(splits, max_size=2).map(tuple))
    ordered = draw(st.permutations([*sets, last]))
    return ChunkManifests(sets=tuple(ordered), rules=tuple(rules), splitting=splitting)


@dataclass
class Model:
    """A repository as plain sets of chunks, re-packed again and again through the planner."""

    chunks: dict[str, Chunks] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    refs: list[ManifestRef] = field(default_factory=list)
    written: int = 0

    @property
    def base(self) -> BaseIndex:
        return BaseIndex(self.refs)

    def facts(self) -> dict[bytes, ArrayFacts]:
        return {
            id_of(path): ArrayFacts(
                id_of(path), path, (self.lengths[path], 4), len(found), ("time", "x")
            )
            for path, found in self.chunks.items()
        }

    def repack(
        self,
        config: ChunkManifests,
        changes: dict[bytes, Chunks],
        deleted: Iterable[bytes] = (),
    ) -> frozenset[str]:
        """Repack what these chunks are in, and return the keys of the manifests that are gone."""
        facts, base = self.facts(), self.base
        due = {leaf.key for node_id in deleted for leaf in base.placed(node_id)}
        new: dict[bytes, Chunks] = {}
        for node_id, chunks in changes.items():
            for one in chunks:
                leaves = base.placed_in(node_id, Box.around_coords(np.array([one])))
                due |= {leaf.key for leaf in leaves}
                if not leaves:
                    new.setdefault(node_id, set()).add(one)
        layouts = {node_id: layout_of(config, facts[node_id]) for node_id in new}
        replaced = close(config, facts, base, due, new, layouts)
        parts = []
        for node_id, layout in layouts.items():
            old = [leaf.part.box for leaf in base.placed(node_id) if leaf.key in replaced]
            inside = [
                one
                for one in sorted(self.chunks[path_of(node_id)])
                if one in new.get(node_id, ()) or any(one in box for box in old)
            ]
            placed = base.placed(node_id)
            staying = [leaf.part.box for leaf in placed if leaf.key not in replaced]
            coords = np.array(inside, np.int64).reshape(-1, 2)
            parts += cut(node_id, coords, layout, staying)
        plan = plan_manifests(config, facts, parts, base, replaced)
        check_plan(config, plan, base, replaced)
        self.refs = [ref for ref in self.refs if ref.blob.key not in replaced]
        for manifest in plan:
            self.written += 1
            blob = BlobRef(key(self.written), 9, 0)
            self.refs.append(ManifestRef(blob, manifest.leaves, packed_for=manifest.set_name))
        for one in config.sets:  # another configuration may have left more
            most = max(one.cardinality or 10**9, len(base.in_set(one.name)))
            assert len(self.base.in_set(one.name)) <= most
        return replaced

    def check(self) -> None:
        boxes: dict[str, list[Part]] = {}
        for part in itertools.chain(*(ref.parts for ref in self.refs)):
            boxes.setdefault(path_of(part.node_id), []).append(part)
        assert boxes.keys() == {path for path, found in self.chunks.items() if found}
        for path, parts in boxes.items():
            assert sum(part.count for part in parts) == len(self.chunks[path])
            for a, b in itertools.combinations(parts, 2):
                assert not a.box.overlaps(b.box)
            for part in parts:
                assert part.count == sum(c in part.box for c in self.chunks[path])


def check_plan(
    config: ChunkManifests,
    plan: Sequence[PlannedManifest],
    base: BaseIndex,
    replaced: frozenset[str],
) -> None:
    counted = {one.name for one in config.sets if one.arrays_per_manifest}
    for one in config.sets:
        new = [m for m in plan if m.set_name == one.name]
        stay = sum(ref.blob.key not in replaced for ref in base.in_set(one.name))
        if one.cardinality is not None and new:
            assert len(new) + stay <= one.cardinality
        for manifest in new:
            nodes = {leaf.node_id for leaf in manifest.leaves}
            if one.arrays_per_manifest is not None:
                assert len(nodes) <= one.arrays_per_manifest
            if one.max_manifest_size is not None and manifest.refs > one.max_manifest_size:
                assert one.name == "default"
                assert config.splitting is None
                assert len(nodes) == 1
    together = [m for m in plan if m.set_name in counted]
    arrays = [node for m in together for node in {leaf.node_id for leaf in m.leaves}]
    assert len(arrays) == len({*arrays})


@st.composite
def chunk_sets(draw: st.DrawFn, start: int = 0) -> Chunks:
    length = draw(st.integers(1, 12))
    box = set(itertools.product(range(start, start + length), range(4)))
    return draw(st.just(box) | st.sets(st.sampled_from(sorted(box))))


@settings(max_examples=examples(150))
@given(st.lists(configs(), min_size=1, max_size=2), st.data())
def test_every_history_leaves_every_chunk_in_one_leaf(
    some: list[ChunkManifests], data: st.DataObject
) -> None:
    """Over appends, overwrites, deletions, truncations and changes of configuration."""
    model = Model()
    for _ in range(data.draw(st.integers(1, 5))):
        config = data.draw(st.sampled_from(some))
        changes: dict[bytes, Chunks] = {}
        deleted: list[bytes] = []
        for path in data.draw(st.lists(st.sampled_from(PATHS), unique=True, max_size=6)):
            have = model.chunks.setdefault(path, set())
            what = data.draw(
                st.sampled_from(["write", "append", "touch", "touch", "unset", "shrink", "delete"])
            )
            if what == "delete":
                del model.chunks[path]
                deleted.append(id_of(path))
                continue
            start = model.lengths.get(path, 0) if what == "append" else 0
            chunks = data.draw(chunk_sets(start))
            if what == "touch" and have:
                chunks = set(data.draw(st.lists(st.sampled_from(sorted(have)), max_size=3)))
            if what == "unset":
                have -= chunks
            elif what == "shrink":
                end = data.draw(st.integers(0, 12))
                gone = {c for c in have if c[0] >= end}
                have -= gone
                have |= chunks
                chunks |= gone
            else:
                have |= chunks
            model.lengths[path] = max([c[0] + 1 for c in have], default=0)
            changes[id_of(path)] = chunks
        before = {ref.blob.key: ref for ref in model.refs}
        untouched = before.keys() - model.repack(config, changes, deleted)
        model.check()
        assert untouched <= {ref.blob.key for ref in model.refs}
        assert all(before[ref.blob.key] is ref for ref in model.refs if ref.blob.key in untouched)


def test_an_array_that_has_to_be_in_one_manifest_brings_all_of_its_manifests() -> None:
    every = set(itertools.product(range(12), range(4)))
    model, node = Model({"/g/u": every}, {"/g/u": 12}), id_of("/g/u")
    small = ChunkManifests(sets=(ManifestSet("default", 20, None, None, None),), rules=())
    model.repack(small, {node: every})
    assert len(model.refs) > 1
    whole = ChunkManifests(sets=(ManifestSet("default", None, 1, None, None),), rules=())
    model.repack(whole, {node: {(0, 0)}})
    assert len(model.refs) == 1


DEFAULT_YAML = """
chunk-manifests:
  sets:
    - coordinates:
        max-manifest-size: 50000
        cardinality: 1
        max-arrays-per-manifest: null
        overflow-to: default

    - default:
        max-manifest-size: 1000000
        cardinality: null
        max-arrays-per-manifest: null
        overflow-to: null

  rules:
    - metadata-chunks: [0, 5000]
      path: .*
      target: coordinates

  preload:
    max-manifest-size: 50000
    max-manifests: 1
    arrays:
      - path: .*/time
      - path: .*/latitude
      - path: .*/longitude
"""


DEFAULT = Config.from_yaml(DEFAULT_YAML).chunk_manifests


def facts_of(**chunks: int) -> dict[bytes, ArrayFacts]:
    """Arrays of one axis, full, by path with `__` for a slash."""
    found = {}
    for name, count in chunks.items():
        path = "/" + name.replace("__", "/")
        node_id = id_of(path)
        found[node_id] = ArrayFacts(node_id, path, (count,), count)
    return found


def full(config: ChunkManifests, facts: dict[bytes, ArrayFacts]) -> list[Part]:
    return [
        leaf
        for of in facts.values()
        for leaf in cut(of.node_id, np.arange(of.metadata_chunks)[:, None], layout_of(config, of))
    ]


def test_explaining_a_base() -> None:
    facts = facts_of(a=10, b=60_000, c=20, d=30, empty=0)
    leaves = full(DEFAULT, facts)
    names = [("coordinates", "a"), ("default", "b"), ("default", "c"), ("", "d")]
    refs = [
        ManifestRef(
            BlobRef(key(i), 9, 0),
            tuple(leaf for leaf in leaves if leaf.node_id == id_of(f"/{name}")),
            packed_for=packed_for,
        )
        for i, (packed_for, name) in enumerate(names)
    ]
    base = BaseIndex(refs)
    config = ChunkManifests(sets=DEFAULT.sets, rules=(Rule("coordinates"),))
    passed = {of.path: explain(config, of, base)[2] for of in facts.values()}
    assert passed["/a"] == passed["/empty"] == ()
    assert "60,000" in passed["/b"][0].why
    assert passed["/c"] == (Overflow("coordinates", "the set has its 1 manifests already"),)
    assert [one.set_name for one in passed["/d"]] == ["coordinates", "default"]


def test_a_full_set_takes_no_manifest_beside_those_that_stay() -> None:
    facts = facts_of(a=10, b=10)
    a, b = full(DEFAULT, facts)
    base = BaseIndex([ManifestRef(BlobRef(key(0), 9, 0), (a,), packed_for="coordinates")])
    config = ChunkManifests(sets=DEFAULT.sets, rules=(Rule("coordinates"),))
    beside = plan_manifests(config, facts, [b], base, [])
    assert [one.set_name for one in beside] == ["default"]
    anew = plan_manifests(config, facts, [a, b], base, [key(0)])
    assert [one.set_name for one in anew] == ["coordinates"]
