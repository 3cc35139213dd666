"""What is packed anew: the examples of the rule, and what holds for all."""

from __future__ import annotations

import numpy as np
import pytest

from zarr_manifests.config.manifest_sets import ChunkManifests, ManifestSet, Rule, Split
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.manifest import ManifestRef, Part
from zarr_manifests.grid import Box
from zarr_manifests.planning.layout.closure import ArrayChange, Closure, close
from zarr_manifests.planning.layout.leaves import EMPTY, ArrayFacts, BaseIndex

A, B, C, NEW = b"a" * 12, b"b" * 12, b"c" * 12, b"d" * 12
NOTHING = np.empty((0, 1), np.int64)


def default(size: int | None = 100, **others: object) -> ManifestSet:
    return ManifestSet("default", size, overflow_to=None, cardinality=None, **others)


WHOLE = ChunkManifests(sets=(default(),), rules=(), splitting=None)
TENS = ChunkManifests(sets=(default(),), rules=(), splitting=(Split(".*", ((0, 10),)),))


def key(number: int) -> str:
    return f"manifests/{1:012d}-{'ab' * 12}/{number}"


def leaf(node_id: bytes, start: int, stop: int) -> Part:
    return Part(node_id, Box((start,), (stop,)), stop - start)


def base_of(*manifests: tuple[Part, ...]) -> BaseIndex:
    return BaseIndex(
        [ManifestRef(BlobRef(key(i), 100, 0), parts) for i, parts in enumerate(manifests, 1)]
    )


def facts_of(*nodes: bytes, chunks: int = 30) -> dict[bytes, ArrayFacts]:
    return {n: ArrayFacts(n, f"/{n[:1].decode()}", (chunks,), chunks) for n in nodes}


def changed(**chunks: list[int]) -> dict[bytes, ArrayChange]:
    return {
        name.encode() * 12: ArrayChange(np.array(found, np.int64).reshape(-1, 1))
        for name, found in chunks.items()
    }


def arrays_of(closure: Closure, base: BaseIndex) -> str:
    return "".join(due.node_id[:1].decode() for due in closure.dues(base))


# Manifest 1 has a, b; manifest 2 has a, b, c; manifest 3 has c.
THREE = base_of(
    (leaf(A, 0, 10), leaf(B, 0, 10)),
    (leaf(A, 10, 20), leaf(B, 10, 20), leaf(C, 0, 10)),
    (leaf(C, 10, 20),),
)


@pytest.mark.parametrize(
    "changes",
    [changed(a=[3]), changed(a=[3], b=[4]), changed(a=[15], b=[5], c=[1]), changed(c=[12])],
    ids=["a", "ab", "abc", "c"],
)
def test_arrays_that_are_kept_whole_bring_each_other(changes: dict[bytes, ArrayChange]) -> None:
    closure = close(WHOLE, facts_of(A, B, C), THREE, changes)
    assert arrays_of(closure, THREE) == "abc"
    assert set(closure.manifests) == {key(1), key(2), key(3)}
    assert len(closure.groups) == 1


def test_an_array_that_is_new_brings_only_itself() -> None:
    closure = close(WHOLE, facts_of(A, B, C, NEW), THREE, changed(d=[0, 1]))
    assert closure.manifests == ()
    (due,) = closure.dues(THREE)
    assert (due.node_id, due.rows.tolist()) == (NEW, [0, 1])
    assert close(WHOLE, {}, EMPTY, {}).groups == ()


@pytest.mark.parametrize(
    ("changes", "manifests", "arrays"),
    [
        (changed(a=[3]), [1], "ab"),
        (changed(a=[3], b=[4]), [1], "ab"),
        (changed(a=[3, 12]), [1, 2], "abc"),
        (changed(c=[12]), [3], "c"),
        (changed(c=[9]), [2], "abc"),
        (changed(c=[9, 12], b=[3]), [1, 2, 3], "abc"),
        (changed(c=[25]), [], "c"),
    ],
)
def test_leaves_bring_only_their_manifests(
    changes: dict[bytes, ArrayChange], manifests: list[int], arrays: str
) -> None:
    closure = close(TENS, facts_of(A, B, C), THREE, changes)
    assert sorted(closure.manifests) == [key(i) for i in manifests]
    assert arrays_of(closure, THREE) == arrays


def test_a_set_that_counts_arrays_keeps_them_together() -> None:
    each = ManifestSet("each", arrays_per_manifest=1, cardinality=None)
    config = ChunkManifests(sets=(each, default()), rules=(Rule("each", "/a"),), splitting=())
    closure = close(config, facts_of(A, B, C), THREE, changed(a=[3]))
    assert set(closure.manifests) == {key(1), key(2)}, "c and b are not of that set"
    closure = close(config, facts_of(A, B, C), THREE, changed(c=[15]))
    assert closure.manifests == (key(3),)


def test_new_chunks_belong_to_the_leaves_in_their_cell() -> None:
    base = base_of((leaf(A, 0, 10),), (leaf(A, 10, 14),), (leaf(B, 0, 4),))
    assert close(TENS, facts_of(A, B), base, changed(a=[14])).manifests == (key(2),)
    assert close(TENS, facts_of(A, B), base, changed(a=[20])).manifests == ()
    # A layout that has become coarser brings all leaves of the cell, in one group.
    coarse = ChunkManifests(sets=(default(),), rules=(), splitting=(Split(".*", ((0, 50),)),))
    closure = close(coarse, facts_of(A, B), base, changed(a=[20]))
    assert [group.manifests for group in closure.groups] == [(key(1), key(2))]


def test_a_truncation_changes_what_reaches_beyond_it() -> None:
    base = base_of((leaf(A, 0, 10),), (leaf(A, 10, 20),), (leaf(A, 20, 30),))

    def manifests(cut: int) -> tuple[str, ...]:
        changes = {A: ArrayChange(NOTHING, (cut,))}
        return tuple(sorted(close(TENS, facts_of(A), base, changes).manifests))

    assert manifests(30) == ()
    assert manifests(20) == (key(3),)
    assert manifests(15) == (key(2), key(3))
    assert manifests(0) == (key(1), key(2), key(3))


def test_a_deleted_array_is_packed_no_more() -> None:
    closure = close(TENS, facts_of(B, C), THREE, {}, deleted=[A])
    assert set(closure.manifests) == {key(1), key(2)}
    assert close(WHOLE, facts_of(B, C), THREE, {}, deleted=[A]).refs == 60


def test_steps_share_nothing_and_always_go_on() -> None:
    count = 12
    base = base_of(
        *((leaf(A, 10 * i, 10 * i + 10), leaf(B, 10 * i, 10 * i + i)) for i in range(count))
    )
    facts = facts_of(A, B, chunks=10 * count + 10)
    closure = close(TENS, facts, base, changed(a=[5, 25, 45, 46, 85, 125]))
    assert closure.refs == 10 + 1 + 12 + 1 + 14 + 2 + 18 + 1 + 1
    steps = []
    rest = closure
    while rest:
        first, rest = rest.step(budget_refs=25)
        assert first
        assert first.refs <= 25 or len(first.groups) == 1
        steps.append(first)
    keys = [k for step in steps for k in step.manifests]
    assert len(keys) == len(set(keys))
    assert set(keys) == set(closure.manifests) == {key(i) for i in (1, 3, 5, 9)}
    rows = [due.rows.tolist() for step in steps for due in step.dues(base) if due.node_id == A]
    assert sorted(row for some in rows for row in some) == list(range(6))
    first, rest = closure.step(budget_refs=0)
    assert len(first.groups) == 1
    assert closure.step(budget_refs=10**9) == (closure, Closure((), closure.layouts))


FEW = ManifestSet("few", 10, cardinality=4)


def few(*manifests: int, one: ManifestSet = FEW) -> tuple[ChunkManifests, BaseIndex, list[bytes]]:
    """A set of limited number with manifests of so many refs, each of an array of its own."""
    nodes = [bytes([65 + i]) * 12 for i in range(len(manifests) + 3)]
    parts = [(leaf(node, 0, n),) for node, n in zip(nodes, manifests, strict=False)]
    refs = [ManifestRef(BlobRef(key(i), 100, 0), some) for i, some in enumerate(parts, 1)]
    sets = dict.fromkeys((ref.blob.key for ref in refs), "few")
    config = ChunkManifests(sets=(one, default()), rules=(Rule("few"),), splitting=())
    return config, BaseIndex(refs, sets), nodes


def one_changed(nodes: list[bytes]) -> dict[bytes, ArrayChange]:
    return {node: ArrayChange(np.array([[0]])) for node in nodes}


def test_what_shares_a_set_is_packed_together_while_it_fits_into_a_step() -> None:
    config, base, nodes = few(8, 2, 5, 9)
    closure = close(config, facts_of(*nodes, chunks=10), base, one_changed(nodes))
    (group,) = closure.groups
    assert closure.refs == group.refs == 8 + 2 + 5 + 9 + len(nodes)
    assert closure.step(31) == (closure, Closure((), closure.layouts))


def test_what_shares_a_set_and_is_too_much_for_a_step_is_taken_apart() -> None:
    config, base, nodes = few(8, 2, 5, 9)
    rest = close(config, facts_of(*nodes, chunks=10), base, one_changed(nodes))
    steps = []
    while rest:
        step, rest = rest.step(budget_refs=12)
        assert step.refs <= 12
        steps.append((step.manifests, sorted(due.node_id[:1] for due in step.dues(base))))
    # The emptiest manifest with what is in none, then one after the other.
    assert steps == [
        ((key(2), key(3)), [b"B", b"C", b"E", b"F", b"G"]),
        ((key(1),), [b"A"]),
        ((key(4),), [b"D"]),
    ]


def test_one_piece_may_be_more_than_a_step() -> None:
    config, base, nodes = few(8, 9)
    rest = close(config, facts_of(*nodes, chunks=10), base, one_changed(nodes[:2]))
    first, rest = rest.step(budget_refs=5)
    second, rest = rest.step(budget_refs=5)
    assert (first.manifests, second.manifests, bool(rest)) == ((key(1),), (key(2),), False)


def test_a_manifest_of_any_size_is_packed_with_all_that_comes_into_it() -> None:
    config, base, nodes = few(8, one=ManifestSet("few", None, cardinality=1))
    closure = close(config, facts_of(*nodes, chunks=10), base, one_changed(nodes))
    first, rest = closure.step(budget_refs=5)
    assert first.refs == 8 + len(nodes)
    assert not rest


def test_arrays_that_are_laid_out_anew_stay_in_one_piece() -> None:
    one = ManifestSet("few", 10, cardinality=9)
    config = ChunkManifests(sets=(one, default()), rules=(Rule("few"),), splitting=())
    parts = [(leaf(A, 0, 4), leaf(B, 0, 4)), (leaf(A, 4, 8),), (leaf(C, 0, 8),), (leaf(B, 4, 8),)]
    refs = [ManifestRef(BlobRef(key(i), 100, 0), some) for i, some in enumerate(parts, 1)]
    base = BaseIndex(refs, {ref.blob.key: "few" for ref in refs})
    closure = close(config, facts_of(A, B, C), base, changed(a=[1, 5], b=[1, 5], c=[1]))
    rest = closure.with_whole_arrays(base)
    assert rest.refs == closure.refs
    steps = []
    while rest:
        step, rest = rest.step(budget_refs=1)
        steps.append(arrays_of(step, base))
    assert sorted(steps) == ["ab", "c"]
    assert len(closure.groups) == len(closure.with_whole_arrays(base).groups) == 1


def test_leaves_are_cut_anew_within_what_stays() -> None:
    base = base_of((leaf(A, 0, 10),), (leaf(A, 10, 20),), (leaf(A, 20, 30),))
    five = ChunkManifests(sets=(default(),), rules=(), splitting=(Split(".*", ((0, 15),)),))
    facts = facts_of(A)
    closure = close(five, facts, base, changed(a=[12]))
    (due,) = closure.dues(base)
    cuts = due.cut(np.arange(10, 20).reshape(-1, 1), base)
    assert [one.box for one in cuts] == [Box((10,), (15,)), Box((15,), (20,))]


def test_leaves_with_one_that_stays_between_them_are_not_joined() -> None:
    base = base_of((leaf(A, 0, 10),), (leaf(A, 10, 20),), (leaf(A, 20, 30),))
    config = ChunkManifests(sets=(default(),), rules=(), splitting=(Split(".*", ((0, 40),)),))
    facts = facts_of(A)
    (due,) = close(config, facts, base, changed(a=[2, 22])).dues(base)
    coords = np.array([*range(10), *range(20, 30)]).reshape(-1, 1)
    assert [one.box for one in due.cut(coords, base)] == [
        Box((0,), (10,)),
        Box((20,), (30,)),
    ]
    (due,) = close(config, facts, base, changed(a=[2, 12])).dues(base)
    coords = np.arange(20).reshape(-1, 1)
    assert [one.box for one in due.cut(coords, base)] == [
        Box((0,), (10,)),
        Box((10,), (20,)),
    ]
    (due,) = close(config, facts, base, changed(a=[2, 12, 22])).dues(base)
    coords = np.arange(30).reshape(-1, 1)
    assert [one.box for one in due.cut(coords, base)] == [Box((0,), (30,))]


def test_new_arrays_come_into_a_full_set_if_it_is_opened_again() -> None:
    small = ManifestSet("small", 40)
    config = ChunkManifests(sets=(small, default()), rules=(Rule("small"),))
    parts = [(leaf(A, 0, 20),), (leaf(B, 0, 5),)]
    refs = [ManifestRef(BlobRef(key(i), 100, 0), some) for i, some in enumerate(parts, 1)]
    base = BaseIndex(refs, {key(1): "small", key(2): "default"})

    def manifests(chunks: int, *, reopen: bool, **also: list[int]) -> list[tuple[str, ...]]:
        facts = facts_of(A, B) | facts_of(C, NEW, chunks=chunks)
        changes = changed(c=list(range(chunks)), d=list(range(chunks)), **also)
        closure = close(config, facts, base, changes, reopen=reopen)
        return [group.manifests for group in closure.groups]

    assert manifests(20, reopen=False) == [()], "both new arrays in one step"
    assert manifests(20, reopen=True) == [(key(1),)]
    assert manifests(21, reopen=True) == [()], "no room even for one"
    assert manifests(21, reopen=True, a=[3]) == [(key(1),)]
    assert manifests(20, reopen=True, b=[3]) == [(key(2),), (key(1),)]


def test_facts_are_asked_only_of_what_changes() -> None:
    """Whatever the size of the base: a mapping may look each array up when it is asked for."""
    asked: list[bytes] = []

    class Facts(dict[bytes, ArrayFacts]):
        def __getitem__(self, node_id: bytes) -> ArrayFacts:
            asked.append(node_id)
            return super().__getitem__(node_id)

        def get(self, node_id: bytes, default: object = None) -> ArrayFacts | None:  # type: ignore[override]
            asked.append(node_id)
            return super().get(node_id)

    nodes = [bytes([i]) * 12 for i in range(200)]
    base = base_of(*((leaf(node, 0, 5), leaf(node, 5, 10)) for node in nodes))
    facts = Facts({n: ArrayFacts(n, f"/{n.hex()}", (10,), 10) for n in nodes})
    change = {nodes[7]: ArrayChange(np.array([[3]]))}
    for config in (TENS, WHOLE):
        asked.clear()
        assert close(config, facts, base, change).manifests == (key(8),)
        assert set(asked) <= {nodes[7]}, config
