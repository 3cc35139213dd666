"""Sets of manifests: what holds for every configuration and history."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from zarr_manifests.config import Config
from zarr_manifests.config.manifest_sets import ChunkManifests, ManifestSet, Rule, Split
from zarr_manifests.format.manifest import ManifestRef, Part
from zarr_manifests.format.records import BlobRef
from zarr_manifests.planning.layout.closure import ArrayChange, close
from zarr_manifests.planning.layout.leaves import ArrayFacts, BaseIndex, cut, layout_of
from zarr_manifests.planning.layout.packing import ManifestPlan, Overflow, explain, plan_manifests


def key(number: int) -> str:
    return f"manifests/{1:012d}-{'ab' * 12}/{number}"


def id_of(path: str) -> bytes:
    return path.encode().ljust(12, b"\0")


def path_of(node_id: bytes) -> str:
    return node_id.rstrip(b"\0").decode()


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

    chunks: dict[str, set[tuple[int, int]]] = field(default_factory=dict)
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
        changes: dict[bytes, ArrayChange],
        deleted: Iterable[bytes] = (),
        budget_refs: int = 10**9,
    ) -> None:
        facts = self.facts()
        closure = close(config, facts, self.base, changes, list(deleted))
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
        kept = {ref.blob.key for ref in base} - plan.replaced
        self.refs = [ref for ref in self.refs if ref.blob.key in kept]
        for manifest in plan.manifests:
            self.written += 1
            blob = BlobRef(key(self.written), 9, 0)
            self.refs.append(ManifestRef(blob, manifest.leaves, packed_for=manifest.set_name))

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
    kept = {ref.blob.key for ref in base} - plan.replaced
    for one in config.sets:
        new = [m for m in plan.manifests if m.set_name == one.name]
        stay = sum(base[name].packed_for == one.name for name in kept)
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
        counted = [s.name for s in config.sets if s.arrays_per_manifest]
        assert len([p for p in one.places if p.set_name in counted]) <= 1


@st.composite
def chunk_sets(draw: st.DrawFn, start: int = 0) -> set[tuple[int, int]]:
    length = draw(st.integers(1, 12))
    box = set(itertools.product(range(start, start + length), range(4)))
    return draw(st.just(box) | st.sets(st.sampled_from(sorted(box))))


def as_change(chunks: set[tuple[int, int]], cut: tuple[int, int] | None = None) -> ArrayChange:
    return ArrayChange(np.array(sorted(chunks), np.int64).reshape(-1, 2), cut)


@settings(max_examples=examples(150))
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


def test_an_array_that_has_to_be_in_one_manifest_brings_all_of_its_manifests() -> None:
    every = set(itertools.product(range(12), range(4)))
    model, node = Model({"/g/u": every}, {"/g/u": 12}), id_of("/g/u")
    small = ChunkManifests(sets=(ManifestSet("default", 20, None, None, None),), rules=())
    model.repack(small, {node: as_change(every)})
    assert len(model.refs) > 1
    whole = ChunkManifests(sets=(ManifestSet("default", None, 1, None, None),), rules=())
    model.repack(whole, {node: as_change({(0, 0)})})
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
        Part(of.node_id, leaf.box, len(leaf.rows))
        for of in facts.values()
        for leaf in cut(np.arange(of.metadata_chunks)[:, None], layout_of(config, of))
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


def test_a_full_set_takes_no_manifest_beside_those_that_stay() -> None:
    facts = facts_of(a=10, b=10)
    a, b = full(DEFAULT, facts)
    base = BaseIndex([ManifestRef(BlobRef(key(0), 9, 0), (a,), packed_for="coordinates")])
    config = ChunkManifests(sets=DEFAULT.sets, rules=(Rule("coordinates"),))
    beside = plan_manifests(config, facts, [b], base, [])
    assert [one.set_name for one in beside.manifests] == ["default"]
    anew = plan_manifests(config, facts, [a, b], base, [key(0)])
    assert [one.set_name for one in anew.manifests] == ["coordinates"]
