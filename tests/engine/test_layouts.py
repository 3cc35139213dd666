"""Where refs lie in real repositories after a full compaction, as worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.core.buffer import cpu

import zarr_manifests as zm
from effort import examples
from zarr_manifests import Config, Repository, Session
from zarr_manifests.config import ChunkManifests
from zarr_manifests.engine.compact import merge_leaves as repack_module
from zarr_manifests.engine.compact.scratch import ScratchStorage
from zarr_manifests.planning.layout.leaves import BaseIndex
from zarr_manifests.reports import ReadCost, ReadCosts
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of
from zarr_manifests.testing import CountingStorage

CONFIG = Path(__file__).parents[1] / "config"
type Layout = list[tuple[str, dict[str, int]]]


def written(
    config: Config | Mapping[str, Any], arrays: Mapping[str, int | tuple[int, int]]
) -> Repository:
    """A repository of 1-d arrays of so many chunks; of a pair, by shape and written."""
    repository = zm.create(MemoryStorage(), config)
    session = repository.writable_session()
    for path, count in arrays.items():
        shape, refs = count if isinstance(count, tuple) else (count, count)
        make(session, path, shape)
        virtual(session, path, np.arange(refs))
    session.commit("write")
    return repository


def make(session: Session, path: str, shape: int) -> None:
    zarr.create_array(session.store, name=path, shape=(shape,), chunks=(1,), dtype="i1")


def virtual(session: Session, path: str, chunks: np.ndarray) -> None:
    count = len(chunks)
    session.store.set_virtual_refs(
        path,
        chunks.reshape(-1, 1),
        [f"file:///archive/{path}.bin"],
        np.zeros(count, np.int64),
        chunks,
        np.ones(count, np.int64),
    )


def layout(repository: Repository, version: str | None = None) -> Layout:
    """Set, and refs of each array, of each manifest of the base."""
    view = contents_of(repository.readonly_session(version).store).view
    paths = {node.node_id: node.path for node in view.nodes.values()}
    found = []
    for ref in view.manifests:
        refs: dict[str, int] = {}
        for part in ref.parts:
            refs[paths[part.node_id]] = refs.get(paths[part.node_id], 0) + part.count
        found.append((ref.packed_for, refs))
    assert not view.snapshot.deltas
    return found


def alike(found: Layout, expected: Layout) -> bool:
    return sorted(found, key=repr_of) == sorted(expected, key=repr_of)


def repr_of(one: tuple[str, dict[str, int]]) -> tuple[str, list[tuple[str, int]]]:
    return one[0], sorted(one[1].items())


def keys(repository: Repository) -> list[str]:
    """Keys of the base's manifests."""
    view = contents_of(repository.readonly_session().store).view
    return [ref.blob.key for ref in view.manifests]


def by_content(repository: Repository) -> dict[str, str]:
    """Key of each manifest by `path:first chunk` of its leaves."""
    view = contents_of(repository.readonly_session().store).view
    paths = {node.node_id: node.path for node in view.nodes.values()}
    return {
        " ".join(sorted(f"{paths[p.node_id]}{p.box.lo[0]}" for p in ref.parts)): ref.blob.key
        for ref in view.manifests
    }


# --- the examples of the configuration -------------------------------------------------------


def test_the_long_example() -> None:
    config = Config.from_yaml((CONFIG / "long.yaml").read_text("utf-8"))
    times = [f"g{i:02}/time" for i in range(45)]
    small = [f"small/b{i:02}" for i in range(40)]
    arrays: dict[str, int | tuple[int, int]] = dict.fromkeys(times, 500)
    arrays |= dict.fromkeys(small, 200)
    arrays |= {
        "g00/latitude": 501,  # one more than the first rule takes
        "big/u": (2_000_000, 3),
        "big/v": (2_500_000, 5),
        "mid": (1_999_999, 600_000),  # one less than the third rule takes
        "mid2": 300_000,
        "mid3": 150_000,
    }
    repository = written(config, arrays)
    repository.compact(mode="full")
    expected = [
        ("coord1", dict.fromkeys(times[:20], 500)),  # 10,000
        ("coord1", dict.fromkeys(times[20:40], 500)),  # 10,000, and no third one
        # 8,000 of the second rule and 2,000 that overflow; the last 500 do not fit any more.
        ("coord2", dict.fromkeys(small, 200) | dict.fromkeys(times[40:44], 500)),
        ("big-array", {"big/u": 3}),
        ("big-array", {"big/v": 5}),
        ("default", {"mid": 600_000, "mid2": 300_000, "g00/latitude": 501, times[44]: 500}),
        ("default", {"mid3": 150_000}),
    ]
    assert alike(layout(repository), expected)


def test_the_short_example() -> None:
    config = Config.from_yaml((CONFIG / "short.yaml").read_text("utf-8"))
    arrays = {"lat": 1, "lon": 1, "time": 5_000, "t": 5_001}
    arrays |= {"u": 400_000, "v": 400_000, "radar": 1_200_000}
    repository = written(config, arrays)
    repository.compact(mode="full")
    expected = [
        ("coordinates", {"lat": 1, "lon": 1, "time": 5_000}),
        ("default", {"radar": 1_000_000}),
        ("default", {"u": 400_000, "v": 400_000, "radar": 200_000}),
        ("default", {"t": 5_001}),
    ]
    assert alike(layout(repository), expected)


def test_coordinates_that_are_too_many_overflow() -> None:
    config = Config.from_yaml((CONFIG / "short.yaml").read_text("utf-8"))
    repository = written(config, {**{f"x{i:02}": 5_000 for i in range(11)}, "tiny": 7})
    repository.compact(mode="full")
    # 50,000 refs have room: the small one, and nine of 5,000.
    expected = [
        ("coordinates", {f"x{i:02}": 5_000 for i in range(9)} | {"tiny": 7}),
        ("default", {"x09": 5_000, "x10": 5_000}),
    ]
    assert alike(layout(repository), expected)


def test_sparse_arrays_go_by_what_has_been_written() -> None:
    config = {
        "chunk-manifests": {
            "sets": [{"small": {"max-manifest-size": 50_000}}],
            "rules": [{"initialized-chunks": [0, 1_000], "target": "small"}],
        }
    }
    repository = written(
        config, {"empty": (9_000, 0), "sparse": (9_000, 1_000), "full": (9_000, 1_001)}
    )
    repository.compact(mode="full")
    assert alike(layout(repository), [("small", {"sparse": 1_000}), ("default", {"full": 1_001})])
    # What is written later counts, and what is there already.
    session = repository.writable_session()
    virtual(session, "sparse", np.arange(1_000, 1_002))
    session.commit("more")
    repository.compact(mode="full")
    assert alike(layout(repository), [("default", {"sparse": 1_002, "full": 1_001})])


# --- closure ---------------------------------------------------------------------------------

BY_TENS = {
    "chunk-manifests": {
        "sets": [{"default": {"max-manifest-size": 25}}],
        "rules": [],
        "splitting": [{"path": ".*", "along": {0: 10}}],
    }
}
WHOLE = {"commits": {"mode": "rewrite"}, "chunk-manifests": {"splitting": "none"}}


@pytest.fixture
def three() -> tuple[MemoryStorage, dict[str, str]]:
    """Manifest 1 has a, b; manifest 2 has a, b, c; manifest 3 has c."""
    repository = zm.create(MemoryStorage(), BY_TENS)
    session = repository.writable_session()
    for path, first, second in (("a", 10, 8), ("b", 10, 8), ("c", 8, 8)):
        make(session, path, 40)
        virtual(session, path, np.r_[0:first, 10 : 10 + second])
    session.commit("write")
    repository.compact(mode="full")
    found = by_content(repository)
    assert sorted(found) == ["a0 b0", "a10 b10 c0", "c10"]
    storage = repository.storage
    assert isinstance(storage, MemoryStorage)
    return storage, found


def change(storage: MemoryStorage, config: Mapping[str, Any], *chunks: tuple[str, int]) -> set[str]:
    """Commit one changed chunk of each, and pack anew what that needs; the keys that are kept."""
    repository = zm.open(storage, config)
    session = repository.writable_session()
    for path, chunk in chunks:
        virtual(session, path, np.array([chunk]))
    session.commit("change")
    assert not contents_of(repository.readonly_session().store).view.snapshot.deltas
    return set(keys(repository))


@pytest.mark.parametrize(
    ("chunks", "kept"),
    [
        ([("a", 3)], ["a10 b10 c0", "c10"]),
        ([("a", 13)], ["a0 b0", "c10"]),
        ([("c", 13)], ["a0 b0", "a10 b10 c0"]),
        ([("a", 3), ("c", 13)], ["a10 b10 c0"]),
        ([("a", 3), ("b", 13), ("c", 13)], []),
    ],
)
def test_manifests_without_a_changed_leaf_keep_their_keys(
    three: tuple[MemoryStorage, dict[str, str]], chunks: list[tuple[str, int]], kept: list[str]
) -> None:
    storage, before = three
    after = change(storage, {"commits": {"mode": "rewrite"}}, *chunks)
    assert after & set(before.values()) == {before[name] for name in kept}


@pytest.mark.parametrize("changed", ["a", "ab", "abc", "c"])
def test_arrays_that_stay_whole_bring_all_their_manifests(
    three: tuple[MemoryStorage, dict[str, str]], changed: str
) -> None:
    storage, before = three
    assert not change(storage, WHOLE, *((path, 3) for path in changed)) & set(before.values())


def test_a_new_array_brings_itself_alone(three: tuple[MemoryStorage, dict[str, str]]) -> None:
    storage, before = three
    repository = zm.open(storage, WHOLE)
    session = repository.writable_session()
    make(session, "d", 20)
    virtual(session, "d", np.arange(20))
    session.commit("new")
    after = by_content(repository)
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"d0"}


@pytest.mark.parametrize("mode", ["major", "full", "rewrite"])
def test_an_append_changes_the_last_manifest_only(mode: str) -> None:
    repository = written(BY_TENS, {"a": (60, 46)})
    repository.compact(mode="full")
    before = by_content(repository)
    assert sorted(before) == ["a0 a10", "a20 a30", "a40"]
    if mode == "rewrite":
        repository = zm.open(repository.storage, {"commits": {"mode": "rewrite"}})
    session = repository.writable_session()
    virtual(session, "a", np.arange(46, 58))
    session.commit("append")
    if mode == "major":
        repository.compact(mode=mode)
    if mode == "full":  # which packs all leaves anew, where the last may share a manifest
        assert repository.compact(mode=mode).manifests_written == 3
        return
    after = by_content(repository)
    assert {before["a0 a10"], before["a20 a30"]} < set(after.values())
    assert before["a40"] not in after.values()
    assert sorted(after) == ["a0 a10", "a20 a30", "a40 a50"]


# --- steps -----------------------------------------------------------------------------------

FEW = {
    "sets": [
        {"few": {"max-manifest-size": 40, "cardinality": 3}},
        {"default": {"max-manifest-size": 100}},
    ],
    "rules": [{"target": "few", "path": "/few/.*"}],
}


@pytest.mark.parametrize("mode", ["full", "rewrite"])
def test_a_set_of_limited_number_is_packed_in_steps(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After none of them it has more manifests than it may have; and all reads as before."""
    config = {"chunk-manifests": FEW, "compaction": {"mode": "manual"}}
    sizes = {f"few/a{i}": (40, 10 + i) for i in range(9)} | {"b": 150}
    repository = written(config, sizes)
    repository.compact(mode="full")
    assert sorted(name for name, _ in layout(repository)) == ["default"] * 2 + ["few"] * 3
    sets = {name for name, refs in layout(repository) if "few/a8" in refs}
    assert sets == {"default"}, "the biggest has overflowed"
    steps: list[tuple[int, int, int]] = []
    real = repack_module.plan_manifests

    def spy(config: ChunkManifests, facts: Any, parts: Any, base: BaseIndex, gone: Any) -> Any:
        plan = real(config, facts, parts, base, gone)
        kept = sum(base.set_of(key) == "few" for key in plan.kept(base))
        made = sum(manifest.set_name == "few" for manifest in plan.manifests)
        steps.append((sum(part.count for part in parts), made, kept + made))
        return plan

    monkeypatch.setattr(repack_module, "plan_manifests", spy)
    monkeypatch.setattr(repack_module, "STEP_REFS", 50)
    if mode == "rewrite":
        repository = zm.open(repository.storage, {"commits": {"mode": "rewrite"}})
    session = repository.writable_session()
    for i in range(9):
        virtual(session, f"few/a{i}", np.array([0, 30]))
    make(session, "few/new", 5)
    virtual(session, "few/new", np.arange(5))
    session.commit("more of each")
    if mode == "full":
        repository.compact(mode="full")
    assert sum(made > 0 for _, made, _ in steps) >= 3
    assert max(refs for refs, made, _ in steps if made) <= 50
    assert {count for _, _, count in steps} <= {1, 2, 3}
    found = layout(repository)
    assert sum(name == "few" for name, _ in found) == 3
    assert {name for name, refs in found if "few/new" in refs} == {"few"}
    store = zm.open(repository.storage).readonly_session().store
    for path, refs in [*sizes.items(), ("few/new", 5)]:
        count = refs if isinstance(refs, int) else refs[1]
        expected = sorted({*range(count), *([0, 30] if path.startswith("few/a") else [])})
        there = store.get_virtual_refs(path)
        assert there.index[:, 0].tolist() == there.offset.tolist() == expected


# --- other configurations, and what is old ---------------------------------------------------


def test_another_configuration_counts_at_the_next_full_compaction() -> None:
    repository = written(BY_TENS, {"a": 30, "b": 30})
    repository.compact(mode="full")
    old = repository.readonly_session()
    before = keys(repository)
    assert alike(layout(repository), [("default", {"a": 10, "b": 10})] * 3)
    splitting = {"splitting": [{"path": "/a", "along": {0: 15}}], "sets": [{"default": None}]}
    repository.save_config({"chunk-manifests": splitting})
    assert keys(repository) == before
    repository.compact(mode="full")
    assert not set(keys(repository)) & set(before)
    assert alike(layout(repository), [("default", {"a": 30, "b": 30})])
    view = contents_of(repository.readonly_session().store).view
    boxes = {(view.nodes[n].path, p.box.lo, p.box.hi) for n in "ab" for r in view.manifests
             for p in r.parts if p.node_id == view.nodes[n].node_id}  # fmt: skip
    assert boxes == {("a", (0,), (15,)), ("a", (15,), (30,)), ("b", (0,), (30,))}
    snapshot_id = old.snapshot_id
    again = zm.open(repository.storage).readonly_session(snapshot_id)
    for session in (old, again, repository.readonly_session()):
        for path in "ab":
            refs = session.store.get_virtual_refs(path)
            assert refs.index[:, 0].tolist() == refs.offset.tolist() == list(range(30))


paths = st.sampled_from(["a", "b", "g/c"])
numbers = st.integers(0, 7)
operations = st.one_of(
    st.tuples(st.just("set"), paths, numbers, st.binary(min_size=1, max_size=3)),
    st.tuples(st.just("delete"), paths, numbers),
    st.tuples(st.just("resize"), paths, st.integers(1, 8)),
    st.tuples(st.just("remove"), paths),
)


def apply(session: Session, operation: tuple[Any, ...]) -> None:
    kind, path, *rest = operation
    store = session.store
    if kind == "remove":
        for key in [key for key in every_key(session) if key.startswith(f"{path}/")]:
            store.delete_sync(key)
        return
    if f"{path}/zarr.json" not in every_key(session):
        make(session, path, 8)
    if kind == "set":
        store.set_sync(f"{path}/c/{rest[0]}", cpu.Buffer.from_bytes(rest[1]))
    elif kind == "delete":
        store.delete_sync(f"{path}/c/{rest[0]}")
    else:
        zarr.open_array(store, path=path).resize((rest[0],))


def every_key(session: Session) -> set[str]:
    return set(contents_of(session.store).keys_below(""))


def contents(session: Session) -> dict[str, bytes]:
    found = {key: session.store.get_sync(key) for key in every_key(session)}
    return {key: value.to_bytes() for key, value in found.items() if value is not None}


@settings(max_examples=examples(25), deadline=None)
@given(st.lists(st.lists(operations, min_size=1, max_size=4), min_size=1, max_size=6))
def test_rewriting_after_each_commit_changes_nothing_but_the_layout(
    commits: list[list[tuple[Any, ...]]],
) -> None:
    small = {"sets": [{"default": {"max-manifest-size": 5}}], "rules": []}
    modes = [
        zm.create(MemoryStorage(), {"commits": {"mode": mode}, "chunk-manifests": small})
        for mode in ("delta", "rewrite")
    ]
    states: list[dict[str, bytes]] = []
    for number, operations in enumerate(commits):
        found = []
        for repository in modes:
            session = repository.writable_session()
            for operation in operations:
                apply(session, operation)
            if session.status():
                session.commit(str(number))
            found.append(contents(zm.open(repository.storage).readonly_session()))
        assert found[0] == found[1]
        states.append(found[0])
    for repository in modes:
        for info in repository.ancestry():
            if info.message.isdigit():
                old = contents(repository.readonly_session(info.snapshot_id))
                assert old == states[int(info.message)]


# --- explaining and planning -----------------------------------------------------------------


def test_what_is_explained_is_read_off_the_snapshot() -> None:
    repository = written({}, {"lat": 3, "t": 5_001, "radar": 1_000})
    repository.compact(mode="full")
    session = repository.writable_session()
    virtual(session, "lat", np.array([1]))
    session.commit("more")
    counting = CountingStorage(repository.storage)
    found = zm.open(counting).explain_manifests()
    assert not [record for record in counting.log if record.key.startswith("manifests/")]
    assert found.snapshot_id == session.snapshot_id
    arrays = {array.path: array for array in found.arrays}
    assert list(arrays) == ["/lat", "/radar", "/t"]
    lat, t = arrays["/lat"], arrays["/t"]
    assert (lat.rule, lat.wanted, lat.refs, lat.pending_refs) == (0, "coordinates", 3, 1)
    assert (t.rule, t.wanted, t.overflows, t.pending_refs) == (None, "default", (), 0)
    assert lat.manifests == arrays["/radar"].manifests != t.manifests
    one = found.manifests[lat.manifests[0]]
    assert (one.set_name, one.refs, one.arrays) == ("coordinates", 1_003, 2)
    assert one.key is not None
    assert one.nbytes == len(counting.get(one.key))
    (leaf,) = t.leaves
    assert (leaf.lo, leaf.hi, leaf.refs) == ((0,), (5_001,), 5_001)


def test_why_arrays_overflowed() -> None:
    sets = [{"tiny": {"max-manifest-size": 10}}]
    rules = [{"target": "tiny", "path": "/[abc]"}]
    repository = written(
        {"chunk-manifests": {"sets": sets, "rules": rules}}, {"a": 11, "b": 10, "c": 9}
    )
    repository.compact(mode="full")
    arrays = {array.path: array for array in repository.explain_manifests().arrays}
    whys = {path: [(o.set_name, o.why) for o in array.overflows] for path, array in arrays.items()}
    assert whys == {
        "/a": [("tiny", "its 11 chunk refs are more than the 10 of a manifest")],
        "/b": [("tiny", "the set has its 1 manifests already")],
        "/c": [],
    }


@pytest.mark.parametrize("pending", [False, True])
def test_a_plan_is_what_a_full_compaction_does(pending: bool) -> None:
    arrays = {"lat": 3, "a": 30, "b": 70, "g/c": 300}
    repository = written({}, arrays)
    if not pending:
        repository.compact(mode="full")
    objects = {info.key for info in repository.storage.list()}
    other = Config.from_dict(BY_TENS)
    plan = repository.explain_manifests(config=other)
    assert {info.key for info in repository.storage.list()} == objects
    assert len(plan.manifests) > 10
    assert all(manifest.key is None for manifest in plan.manifests)
    assert repository.explain_manifests() != plan
    repository.save_config(other)
    repository.compact(mode="full")
    done = repository.explain_manifests()
    assert [replace(manifest, key=None) for manifest in done.manifests] == list(plan.manifests)
    assert done.arrays == plan.arrays
    assert plan.costs is not None
    for planned, now in zip(
        costs_of(plan.costs), costs_of(repository.explain_manifests(costs=True).costs), strict=True
    ):
        assert planned.requests == now.requests
        # Ids that are drawn compress a little better or worse.
        assert planned.nbytes == pytest.approx(now.nbytes, rel=0.1)


def costs_of(costs: ReadCosts) -> list[ReadCost]:
    return [costs.opening, costs.coordinates, costs.last_step]


@pytest.mark.parametrize("where", ["branch", "tag", "snapshot"])
def test_costs_are_what_a_new_process_fetches(where: str) -> None:
    """Of a repository too large for its root, with deltas on top that touch a coordinate."""
    config = {"chunk-manifests": {"sets": [{"default": {"max-manifest-size": 20_000}}]}}
    repository = written(config, {"a": 60_000, "b": 30_000})
    session = repository.writable_session()
    noise = np.random.default_rng(5).bytes(20_000).hex()
    zarr.create_group(session.store, path="g", attributes={"about": noise})
    zarr.create_array(session.store, name="t", data=np.arange(1, 31), chunks=(1,),
                      dimension_names=("t",))  # fmt: skip
    session.commit("a coordinate")
    repository.compact(mode="full")
    session = repository.writable_session()
    zarr.open_array(session.store, path="t")[3] = 7
    virtual(session, "a", np.random.default_rng(5).permutation(60_000)[:20_000])
    snapshot_id = session.commit("more")
    repository.create_tag("v1", snapshot_id)
    version = {"branch": "main", "tag": "v1", "snapshot": snapshot_id}[where]
    counting = CountingStorage(repository.storage)
    cold = zm.open(counting)
    cold.explain_manifests(version)
    counting.reset()
    costs = cold.explain_manifests(version, costs=True).costs
    assert costs is not None
    requests = [(r.key.partition("/")[0], r.nbytes) for r in counting.log[1:]]
    opening = requests[: costs.opening.requests]
    assert sorted(kind for kind, _ in opening) == ["current", "nodes", "snapshots"]
    assert sum(nbytes for _, nbytes in opening) == costs.opening.nbytes
    assert costs.coordinates == ReadCost(0, 0), "copies of the leaf and the delta came along"
    last = requests[costs.opening.requests :]
    assert [kind for kind, _ in last] == ["manifests"] * 2, "of a; b's leaf is with the coordinate"
    assert costs.last_step == ReadCost(2, sum(nbytes for _, nbytes in last))
    other = repository.explain_manifests(version, config={"chunk-manifests": {"sets": ["default"]}})
    assert other.snapshot_id == snapshot_id
    assert [manifest.refs for manifest in other.manifests] == [90_030]
    assert other.costs is not None
    assert (other.costs.opening.requests, other.costs.last_step) == (3, ReadCost(0, 0))
    assert set(repository.list_branches()) == {"main"}


def test_nobody_sees_a_plan_and_it_sees_nobody() -> None:
    repository = written({}, {"a": 30})
    scratch = ScratchStorage(repository.storage)
    before = {info.key: repository.storage.get(info.key) for info in repository.storage.list()}
    zm.open(scratch).compact(mode="full")
    assert {info.key for info in scratch.list()} > before.keys()
    for key, data in before.items():
        assert repository.storage.get(key) == data
    repository.create_tag("later")
    assert zm.open(scratch).list_tags() == {}
    assert len(list(scratch.list("manifests/"))) == 1
    (made,) = scratch.list("manifests/")
    assert scratch.head(made.key) == made
    assert scratch.get_ranges(made.key, [(0, 4)]) == [scratch.get(made.key, 0, 4)]
    old = next(iter(repository.storage.list("snapshots/"))).key
    assert scratch.head(old).nbytes == len(scratch.get_ranges(old, [(0, 10**6)])[0])
