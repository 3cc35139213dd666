"""Sets: layouts worked out by hand, and what holds for every configuration and history."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from zarr_manifests.config import Config
from zarr_manifests.config.manifest_sets import ChunkManifests, Interval, ManifestSet, Rule, Split
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.manifest import ManifestRef, Part
from zarr_manifests.grid import Box
from zarr_manifests.planning.layout.closure import ArrayChange, close
from zarr_manifests.planning.layout.leaves import ArrayFacts, BaseIndex
from zarr_manifests.planning.layout.sets import ManifestPlan, Overflow, explain, plan_manifests
from zarr_manifests.planning.layout.splitting import expected_leaves, layout_of

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
LONG_YAML = """
chunk-manifests:
  sets:
    - coord1:
        max-manifest-size: 10000
        arrays-per-manifest: null
        overflow-to: coord2
        cardinality: 2
    - coord2:
        max-manifest-size: 10000
    - big-array:
        max-manifest-size: null
        arrays-per-manifest: 1
        cardinality: null
    - default:

  rules:
    - path: .*/(latitude|longitude|time)
      metadata-chunks: [0, 500]
      target: coord1
    - metadata-chunks: [0, 200]
      target: coord2
    - metadata-chunks: [2000000, null]
      target: big-array

  preload:
    max-manifest-size: 50000
    max-manifests: 10
    arrays:
      - path: .*/time
      - path: .*/latitude
      - path: .*/longitude
"""
DEFAULT = Config.from_yaml(DEFAULT_YAML).chunk_manifests
LONG = Config.from_yaml(LONG_YAML).chunk_manifests


def key(number: int) -> str:
    return f"manifests/{1:012d}-{'ab' * 12}/{number}"


def id_of(path: str) -> bytes:
    return path.encode().ljust(12, b"\0")


def path_of(node_id: bytes) -> str:
    return node_id.rstrip(b"\0").decode()


def facts_of(**chunks: int) -> dict[bytes, ArrayFacts]:
    """Arrays of one axis, full, by path with `__` for a slash."""
    found = {}
    for name, count in chunks.items():
        path = "/" + name.replace("__", "/")
        node_id = id_of(path)
        found[node_id] = ArrayFacts(node_id, path, (count,), count)
    return found


def full(config: ChunkManifests, facts: dict[bytes, ArrayFacts]) -> list[Part]:
    return [p for of in facts.values() for p in expected_leaves(layout_of(config, of), of)]


def layout(plan: ManifestPlan) -> list[tuple[str, str]]:
    """Each manifest's set, and `path` or `path[start:stop]` of what it holds."""
    paths = {e.node_id: e.path for e in plan.explanations}
    counts: dict[bytes, int] = {}
    for leaf in itertools.chain(*(m.leaves for m in plan.manifests)):
        counts[leaf.node_id] = counts.get(leaf.node_id, 0) + 1

    def name(leaf: Part) -> str:
        box = f"[{leaf.box.lo[0]}:{leaf.box.hi[0]}]" if counts[leaf.node_id] > 1 else ""
        return paths[leaf.node_id] + box

    return [(m.set_name, " ".join(map(name, m.leaves))) for m in plan.manifests]


def reasons(plan: ManifestPlan) -> dict[str, list[Overflow]]:
    return {e.path: list(e.overflows) for e in plan.explanations if e.overflows}


def test_the_default_layout() -> None:
    facts = facts_of(lat=10, lon=20, time=4_000, station=5_000, t=5_001, u=400_000, v=600_000)
    facts |= facts_of(w=2_500_000)
    plan = plan_manifests(DEFAULT, facts, full(DEFAULT, facts))
    assert layout(plan) == [
        ("coordinates", "/lat /lon /station /time"),
        ("default", "/w[0:1000000]"),
        ("default", "/w[1000000:2000000]"),
        ("default", "/u /v"),
        ("default", "/t /w[2000000:2500000]"),
    ]
    assert reasons(plan) == {}
    assert {e.path: e.rule for e in plan.explanations if e.rule is not None} == dict.fromkeys(
        ("/lat", "/lon", "/station", "/time"), 0
    )


def test_the_default_layout_when_coordinates_are_full() -> None:
    facts = facts_of(lat=10, time=4_000, **{f"g__a{i}": 5_000 for i in range(10)})
    plan = plan_manifests(DEFAULT, facts, full(DEFAULT, facts))
    small = " ".join(f"/g/a{i}" for i in range(9))
    assert layout(plan) == [("coordinates", f"{small} /lat /time"), ("default", "/g/a9")]
    full_now = Overflow("coordinates", "the set has its 1 manifests already")
    assert reasons(plan) == {"/g/a9": [full_now]}


def test_the_long_layout() -> None:
    times = {f"g{i:02d}__time": 500 for i in range(41)}
    facts = facts_of(
        x__mask=150,
        x__flag=200,
        x__latitude=501,
        x__rain=999_499,
        x__wind=1_000_000,
        x__large=1_999_999,
        y__huge=2_500_000,
        y__vast=2_000_000,
        **times,
    )
    plan = plan_manifests(LONG, facts, full(LONG, facts))
    assert layout(plan) == [
        ("coord1", " ".join(f"/g{i:02d}/time" for i in range(20))),
        ("coord1", " ".join(f"/g{i:02d}/time" for i in range(20, 40))),
        ("coord2", "/g40/time /x/flag /x/mask"),
        ("big-array", "/y/huge[0:1000000] /y/huge[1000000:2000000] /y/huge[2000000:2500000]"),
        ("big-array", "/y/vast[0:1000000] /y/vast[1000000:2000000]"),
        ("default", "/x/large[0:1000000]"),
        ("default", "/x/wind"),
        ("default", "/x/large[1000000:1999999]"),
        ("default", "/x/latitude /x/rain"),
    ]
    full_now = Overflow("coord1", "the set has its 2 manifests already")
    assert reasons(plan) == {"/g40/time": [full_now]}
    rules = {e.path: (e.rule, e.wanted) for e in plan.explanations}
    assert rules["/g40/time"] == (0, "coord1")
    assert rules["/x/flag"] == (1, "coord2")
    assert rules["/y/huge"] == (2, "big-array")
    assert rules["/x/latitude"] == (None, "default")


def test_too_big_for_one_set_after_another() -> None:
    config = ChunkManifests(
        sets=(
            ManifestSet("default", 1_000, None, None, None),
            ManifestSet("b", 100, cardinality=None),
            ManifestSet("a", 10, overflow_to="b", cardinality=None),
        ),
        rules=(Rule("a"),),
    )
    facts = facts_of(p=10, q=11, r=101, s=1_001)
    plan = plan_manifests(config, facts, full(config, facts))
    assert layout(plan) == [
        ("a", "/p"),
        ("b", "/q"),
        ("default", "/s[0:1000]"),
        ("default", "/r /s[1000:1001]"),
    ]
    assert reasons(plan)["/r"] == [
        Overflow("a", "its 101 chunk refs are more than the 10 of a manifest"),
        Overflow("b", "its 101 chunk refs are more than the 100 of a manifest"),
    ]


def test_without_splitting_what_is_too_big_is_whole_and_alone() -> None:
    config = ChunkManifests(
        sets=(ManifestSet("default", 1_000, None, None, None),), rules=(), splitting=None
    )
    facts = facts_of(a=500, b=1_001, c=2_500_000, d=500)
    plan = plan_manifests(config, facts, full(config, facts))
    assert layout(plan) == [
        ("default", "/b"),
        ("default", "/c[0:1000000] /c[1000000:2000000] /c[2000000:2500000]"),
        ("default", "/a /d"),
    ]


def test_arrays_split_along_time_share_the_manifests_of_a_time() -> None:
    config = ChunkManifests(
        sets=(ManifestSet("default", 30, None, None, None),),
        rules=(),
        splitting=(Split(".*", ((0, 10),)),),
    )
    facts = facts_of(u=25, v=25, w=25)
    plan = plan_manifests(config, facts, full(config, facts))
    assert layout(plan) == [
        ("default", "/u[0:10] /v[0:10] /w[0:10]"),
        ("default", "/u[10:20] /v[10:20] /w[10:20]"),
        ("default", "/u[20:25] /v[20:25] /w[20:25]"),
    ]


def test_big_arrays_are_paired_with_small_ones() -> None:
    config = ChunkManifests(
        sets=(
            ManifestSet("pairs", None, 2, cardinality=2),
            ManifestSet("default", 99, None, None, None),
        ),
        rules=(Rule("pairs"),),
        splitting=(Split("/a", ((0, 40),)),),
    )
    facts = facts_of(a=100, b=90, c=20, d=10, e=50)
    plan = plan_manifests(config, facts, full(config, facts))
    assert layout(plan) == [
        ("pairs", "/a[0:40] /a[40:80] /a[80:100] /d"),
        ("pairs", "/b /c"),
        ("default", "/e"),
    ]
    assert reasons(plan) == {"/e": [Overflow("pairs", "the set has its 2 manifests already")]}


def test_manifests_that_stay_count() -> None:
    facts = facts_of(a=10, b=10)
    leaves = {p.node_id: p for p in full(DEFAULT, facts)}
    kept = ManifestRef(BlobRef(key(1), 9, 0), (leaves[id_of("/a")],))
    base = BaseIndex([kept], {key(1): "coordinates"})
    plan = plan_manifests(DEFAULT, facts, [leaves[id_of("/b")]], base)
    assert layout(plan) == [("default", "/b")]
    assert plan.kept(base) == (key(1),)
    plan = plan_manifests(DEFAULT, facts, leaves.values(), base, [key(1)])
    assert layout(plan) == [("coordinates", "/a /b")]
    assert plan.kept(base) == ()


def test_a_leaf_of_a_big_array_does_not_pass_for_a_small_array() -> None:
    """Only one of its leaves is packed anew, and that would fit into the small set."""
    facts = facts_of(a=2_000_010)
    config = ChunkManifests(sets=DEFAULT.sets, rules=(Rule("coordinates"),))
    leaves = full(config, facts)
    refs = [ManifestRef(BlobRef(key(i), 9, 0), (leaf,)) for i, leaf in enumerate(leaves)]
    base = BaseIndex(refs, {key(i): "default" for i in range(3)})
    plan = plan_manifests(config, facts, [leaves[2]], base, [key(2)])
    assert layout(plan) == [("default", "/a")]
    assert plan.kept(base) == (key(0), key(1))


def test_a_leaf_may_come_only_once() -> None:
    facts = facts_of(a=10)
    (leaf,) = full(DEFAULT, facts)
    with pytest.raises(InvalidArgumentError, match="/a: a leaf comes twice"):
        plan_manifests(DEFAULT, facts, [leaf, leaf])


def test_explaining_a_base() -> None:
    facts = facts_of(a=10, b=60_000, c=20, d=30, empty=0)
    leaves = {p.node_id: p for p in full(DEFAULT, facts)}
    names = [("coordinates", "a"), ("default", "b"), ("default", "c"), (None, "d")]
    refs = [
        ManifestRef(BlobRef(key(i), 9, 0), (leaves[id_of(f"/{name}")],))
        for i, (_, name) in enumerate(names)
    ]
    base = BaseIndex(refs, {key(i): s for i, (s, _) in enumerate(names) if s})
    config = ChunkManifests(sets=DEFAULT.sets, rules=(Rule("coordinates"),))
    found = {e.path: e for e in explain(config, reversed(facts.values()), base)}
    assert list(found) == ["/a", "/b", "/c", "/d", "/empty"]
    assert [(p.set_name, p.key) for p in found["/a"].places] == [("coordinates", key(0))]
    assert found["/a"].overflows == found["/empty"].overflows == ()
    assert "60,000" in found["/b"].overflows[0].why
    assert found["/c"].overflows == (
        Overflow("coordinates", "the set has its 1 manifests already"),
    )
    assert found["/d"].places[0].set_name is None
    assert found["/empty"].places == ()


# --- what holds for every configuration --------------------------------------------------------

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
        lambda ends: Interval(ends[0], ends[0] + ends[1])
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

    chunks: dict[str, set[tuple[int, int]]] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    refs: list[ManifestRef] = field(default_factory=list)
    sets: dict[str, str] = field(default_factory=dict)
    written: int = 0

    @property
    def base(self) -> BaseIndex:
        return BaseIndex(self.refs, self.sets)

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
        changes: dict[bytes, ArrayChange],
        deleted: Iterable[bytes] = (),
        budget_refs: int = 10**9,
    ) -> None:
        closure, facts = (
            close(config, self.facts(), self.base, changes, list(deleted)),
            self.facts(),
        )
        while closure:
            step, closure = closure.step(budget_refs)
            assert step.refs <= budget_refs or not any(group.pieces for group in step.groups)
            base = self.base
            leaves = []
            for due in step.dues(base):
                path = path_of(due.node_id)
                if path not in self.chunks:
                    continue
                rows = changes[due.node_id].coords[due.rows] if len(due.rows) else ()
                here = {tuple(row) for row in np.asarray(rows).tolist()}
                inside = sorted(
                    c
                    for c in self.chunks[path]
                    if c in here or any(c in p.box for p, _ in due.leaves)
                )
                if inside:
                    cuts = due.cut(np.array(inside, np.int64), base)
                    leaves += [Part(due.node_id, one.box, len(one.rows)) for one in cuts]
            self.apply(config, plan_manifests(config, facts, leaves, base, step.manifests), base)
            for one in config.sets:  # another configuration may have left more
                most = max(one.cardinality or 10**9, base.in_set(one.name))
                assert self.base.in_set(one.name) <= most

    def apply(self, config: ChunkManifests, plan: ManifestPlan, base: BaseIndex) -> None:
        check_plan(config, plan, base)
        kept = set(plan.kept(base))
        self.refs = [ref for ref in self.refs if ref.blob.key in kept]
        for manifest in plan.manifests:
            self.written += 1
            name = key(self.written)
            self.refs.append(ManifestRef(BlobRef(name, 9, 0), manifest.leaves))
            self.sets[name] = manifest.set_name

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


def check_plan(config: ChunkManifests, plan: ManifestPlan, base: BaseIndex) -> None:
    kept = plan.kept(base)
    for one in config.sets:
        new = [m for m in plan.manifests if m.set_name == one.name]
        stay = sum(base.set_of(name) == one.name for name in kept)
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
    for one in plan.explanations:
        placed = {leaf for place in one.places for leaf in place.leaves}
        assert placed == {
            leaf for m in plan.manifests for leaf in m.leaves if leaf.node_id == one.node_id
        }
        for place in one.places:
            assert plan.manifests[place.manifest or 0].set_name == place.set_name
            assert place.set_name == one.wanted or one.overflows
        counted = [s.name for s in config.sets if s.arrays_per_manifest]
        assert len([p for p in one.places if p.set_name in counted]) <= 1


@st.composite
def chunk_sets(draw: st.DrawFn, start: int = 0) -> set[tuple[int, int]]:
    length = draw(st.integers(1, 12))
    box = itertools.product(range(start, start + length), range(4))
    return (
        set(draw(st.lists(st.sampled_from(list(box)), unique=True)))
        if draw(st.booleans())
        else set(box)
    )


def as_change(chunks: set[tuple[int, int]], cut: tuple[int, int] | None = None) -> ArrayChange:
    return ArrayChange(np.array(sorted(chunks), np.int64).reshape(-1, 2), cut)


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(configs(), min_size=1, max_size=2), st.data())
def test_every_history_leaves_every_chunk_in_one_leaf(
    some: list[ChunkManifests], data: st.DataObject
) -> None:
    """Over appends, overwrites, deletions, truncations, steps and changes of configuration."""
    model = Model()
    for _ in range(data.draw(st.integers(1, 5))):
        config = data.draw(st.sampled_from(some))
        changes: dict[bytes, ArrayChange] = {}
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
            cut = None
            start = model.lengths.get(path, 0) if what == "append" else 0
            chunks = data.draw(chunk_sets(start))
            if what == "touch" and have:
                chunks = set(data.draw(st.lists(st.sampled_from(sorted(have)), max_size=3)))
            if what == "unset":
                have -= chunks
            elif what == "shrink":
                cut = (data.draw(st.integers(0, 12)), 4)
                have &= {c for c in have if c[0] < cut[0]}
                have |= chunks
            else:
                have |= chunks
            model.lengths[path] = max([c[0] + 1 for c in have], default=0)
            changes[id_of(path)] = as_change(chunks, cut)
        before = {ref.blob.key: ref for ref in model.refs}
        budget = data.draw(st.sampled_from([10**9, 0, 20]))
        closure = close(config, model.facts(), model.base, changes, deleted)
        model.repack(config, changes, deleted, budget)
        model.check()
        untouched = before.keys() - set(closure.manifests)
        assert untouched <= {ref.blob.key for ref in model.refs}
        assert all(before[ref.blob.key] is ref for ref in model.refs if ref.blob.key in untouched)


@settings(max_examples=examples(150), deadline=None)
@given(configs(), st.dictionaries(st.sampled_from(PATHS), chunk_sets()), st.randoms())
def test_the_order_of_leaves_does_not_matter(
    config: ChunkManifests, chunks: dict[str, set[tuple[int, int]]], chance: random.Random
) -> None:
    model = Model(
        chunks, {path: max([c[0] + 1 for c in f], default=0) for path, f in chunks.items()}
    )
    changes = {id_of(path): as_change(found) for path, found in chunks.items()}
    model.repack(config, changes)
    model.check()
    leaves = [part for ref in model.refs for part in ref.parts]
    facts = model.facts()
    plan = plan_manifests(config, facts, leaves)
    chance.shuffle(leaves)
    shuffled = dict(sorted(facts.items(), key=lambda _: chance.random()))
    assert plan_manifests(config, shuffled, iter(leaves)) == plan
    assert [m.leaves for m in plan.manifests] == [ref.parts for ref in model.refs]


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.integers(1, 20), max_size=9))
def test_manifests_are_few(sizes: list[int]) -> None:
    config = ChunkManifests(sets=(ManifestSet("default", 20, None, None, None),), rules=())
    facts = facts_of(**{f"a{i}": size for i, size in enumerate(sizes)})
    plan = plan_manifests(config, facts, full(config, facts))
    fewest = fewest_bins(sorted(sizes, reverse=True), (), 20, len(sizes))
    assert fewest <= len(plan.manifests) <= math.floor(11 / 9 * fewest + 1)


def fewest_bins(sizes: list[int], rooms: tuple[int, ...], capacity: int, best: int) -> int:
    """By trying everything."""
    if len(rooms) >= best or not sizes:
        return min(best, len(rooms))
    for i, room in enumerate(rooms):
        if room >= sizes[0]:
            rest = (*rooms[:i], room - sizes[0], *rooms[i + 1 :])
            best = fewest_bins(sizes[1:], rest, capacity, best)
    return fewest_bins(sizes[1:], (*rooms, capacity - sizes[0]), capacity, best)


def test_an_append_to_one_of_many_leaves_writes_one_manifest() -> None:
    config = ChunkManifests(
        sets=(ManifestSet("default", 100, None, None, None),),
        rules=(),
        splitting=(Split(".*", (("time", 25),)),),
    )
    steps = 200
    model = Model({"/g/u": set(itertools.product(range(steps), range(4)))}, {"/g/u": steps})
    model.repack(config, {id_of("/g/u"): as_change(model.chunks["/g/u"])})
    assert len(model.refs) == 8
    before = [ref.blob.key for ref in model.refs]
    for step in range(3):
        new = {(steps + step, x) for x in range(4)}
        model.chunks["/g/u"] |= new
        model.lengths["/g/u"] += 1
        model.repack(config, {id_of("/g/u"): as_change(new)})
        model.check()
        after = [ref.blob.key for ref in model.refs]
        assert after[:8] == before
        assert len(after) == 9


def test_filling_an_array_that_has_its_final_shape_changes_the_last_leaf_only() -> None:
    config = ChunkManifests(sets=(ManifestSet("default", 100, None, None, None),), rules=())
    model = Model({"/g/u": set(itertools.product(range(30), range(4)))}, {"/g/u": 100_000})
    model.repack(config, {id_of("/g/u"): as_change(model.chunks["/g/u"])})
    for start in range(30, 150, 10):
        before = {ref.blob.key for ref in model.refs}
        new = set(itertools.product(range(start, start + 10), range(4)))
        model.chunks["/g/u"] |= new
        model.repack(config, {id_of("/g/u"): as_change(new)})
        model.check()
        after = {ref.blob.key for ref in model.refs}
        assert len(before - after) <= 1
    assert len(after) == 6


def test_a_change_of_splitting_reaches_what_is_packed_anew() -> None:
    def config(along: int) -> ChunkManifests:
        last = ManifestSet("default", 40, None, None, None)
        return ChunkManifests(sets=(last,), rules=(), splitting=(Split(".*", ((0, along),)),))

    model = Model({"/g/u": set(itertools.product(range(30), range(4)))}, {"/g/u": 30})
    model.repack(config(10), {id_of("/g/u"): as_change(model.chunks["/g/u"])})
    model.repack(config(5), {id_of("/g/u"): as_change({(12, 0)})})
    model.check()
    boxes = sorted((p.box.lo[0], p.box.hi[0]) for ref in model.refs for p in ref.parts)
    assert boxes == [(0, 10), (10, 15), (15, 20), (20, 30)]


def test_boxes_are_of_chunks_that_exist() -> None:
    model = Model({"/g/u": {(3, 1), (4, 2)}}, {"/g/u": 30})
    model.repack(DEFAULT, {id_of("/g/u"): as_change(model.chunks["/g/u"])})
    assert model.refs[0].parts == (Part(id_of("/g/u"), Box((3, 1), (5, 3)), 2),)
