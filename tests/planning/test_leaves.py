"""The index of a base answers what a walk over all leaves would."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.manifest import ManifestRef, Part
from zarr_manifests.grid import Box
from zarr_manifests.planning.layout.leaves import EMPTY, ArrayFacts, BaseIndex

NODE = b"n" * 12


def key(number: int) -> str:
    return f"manifests/{1:012d}-{'ab' * 12}/{number}"


def ref(number: int, *parts: Part) -> ManifestRef:
    return ManifestRef(BlobRef(key(number), 100, 0), parts)


@st.composite
def disjoint_boxes(draw: st.DrawFn) -> list[Box]:
    """A box cut again and again; some of the pieces."""
    ndim = draw(st.integers(1, 3))
    pieces = [Box((0,) * ndim, tuple(draw(st.integers(1, 9)) for _ in range(ndim)))]
    for _ in range(draw(st.integers(0, 12))):
        box = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        axis = draw(st.integers(0, ndim - 1))
        at = draw(st.integers(box.lo[axis], box.hi[axis]))
        if box.lo[axis] < at < box.hi[axis]:
            lo, hi = list(box.lo), list(box.hi)
            lo[axis] = hi[axis] = at
            pieces += [Box(box.lo, tuple(hi)), Box(tuple(lo), box.hi)]
        else:
            pieces.append(box)
    keep = draw(st.lists(st.sampled_from(pieces), min_size=1, unique=True))
    return [box for box in keep if box.size]


@settings(max_examples=examples(100), deadline=None)
@given(disjoint_boxes(), st.data())
def test_found_as_by_looking_at_every_leaf(boxes: list[Box], data: st.DataObject) -> None:
    if not boxes:
        return
    ndim = boxes[0].ndim
    base = BaseIndex([ref(i, Part(NODE, box, box.size)) for i, box in enumerate(boxes)])
    numbers = st.integers(0, 10)
    coords = data.draw(st.lists(st.tuples(*[numbers] * ndim), max_size=20))
    found = base.locate(NODE, np.array(coords, np.int64).reshape(-1, ndim))
    expected = [next((i for i, box in enumerate(boxes) if c in box), -1) for c in coords]
    assert found.tolist() == expected
    lo = data.draw(st.tuples(*[numbers] * ndim))
    hi = tuple(a + data.draw(st.integers(1, 5)) for a in lo)
    near = base.overlapping(NODE, np.array(lo), np.array(hi))
    assert {n for _, n in near} == {i for i, b in enumerate(boxes) if b.overlaps(Box(lo, hi))}
    assert all(part.box == boxes[n] for part, n in near)
    cut = data.draw(st.tuples(*[numbers] * ndim))
    beyond = {i for i, b in enumerate(boxes) if any(h > c for h, c in zip(b.hi, cut, strict=True))}
    assert set(base.beyond(NODE, cut).tolist()) == beyond


def test_a_scalar_has_one_leaf_for_its_one_chunk() -> None:
    base = BaseIndex([ref(0, Part(NODE, Box((), ()), 1))])
    assert base.locate(NODE, np.empty((1, 0), np.int64)).tolist() == [0]
    assert base.overlapping(NODE, np.empty(0, np.int64), np.empty(0, np.int64))[0][1] == 0


def test_by_node_by_key_and_by_set() -> None:
    other = b"o" * 12
    half, rest, whole = Box((0,), (5,)), Box((5,), (9,)), Box((0,), (2,))
    manifests = [
        ref(7, Part(NODE, half, 5), Part(other, whole, 2)),
        ref(3, Part(NODE, rest, 4)),
        ref(5),
    ]
    base = BaseIndex(manifests, {key(7): "coords", key(3): "default", key(99): "default"})
    assert [m.blob.key for m in base] == [key(7), key(3), key(5)]
    assert len(base) == 3
    assert base[key(3)] is manifests[1]
    assert (base.number(key(3)), base.key(1)) == (1, key(3))
    assert (base.set_of(key(7)), base.set_of(key(5))) == ("coords", None)
    assert (base.in_set("coords"), base.in_set("default"), base.in_set("else")) == (1, 1, 0)
    assert (base.refs(NODE), base.refs(other), base.refs(b"?")) == (9, 2, 0)
    assert base.manifests_of(NODE) == (key(7), key(3))
    assert base.leaves(other) == [(Part(other, whole, 2), key(7))]
    with pytest.raises(InvalidArgumentError, match="twice"):
        BaseIndex([ref(1), ref(1)])


def test_nothing_is_found_where_nothing_is() -> None:
    assert EMPTY.locate(NODE, np.zeros((2, 1), np.int64)).tolist() == [-1, -1]
    assert EMPTY.overlapping(NODE, np.zeros(1, np.int64), np.ones(1, np.int64)) == []
    assert EMPTY.beyond(NODE, (0,)).tolist() == []
    assert EMPTY.manifests_of(NODE) == ()


def test_facts() -> None:
    facts = ArrayFacts(NODE, "/g/time", (4,), 3, ("time",))
    assert (facts.metadata_chunks, facts.is_coordinate) == (4, True)
    assert ArrayFacts(NODE, "/g/x", (), 1).metadata_chunks == 1
    assert not ArrayFacts(NODE, "/g/x", (4,), 3, ("time",)).is_coordinate
    for wrong in (
        lambda: ArrayFacts(NODE, "g/time", (4,), 3),
        lambda: ArrayFacts(NODE, "/g/time", (-4,), 3),
        lambda: ArrayFacts(NODE, "/g/time", (4,), -3),
        lambda: ArrayFacts(NODE, "/g/time", (4,), 3, ("time", "lat")),
    ):
        with pytest.raises(InvalidArgumentError):
            wrong()
