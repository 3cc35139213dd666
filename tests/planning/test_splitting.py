"""Leaves: their boxes never overlap, hold every chunk, and stay while an array grows."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from zarr_manifests.config.manifest_sets import ChunkManifests, Interval, ManifestSet, Rule, Split
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.grid import Box, Coords
from zarr_manifests.planning.layout.leaves import ArrayFacts
from zarr_manifests.planning.layout.packing import LEAF_ROWS
from zarr_manifests.planning.layout.splitting import (
    ENDLESS,
    Layout,
    cut,
    expected_leaves,
    layout_of,
    leaf_shape,
)

NODE = b"n" * 12
NAMES = ("time", "lat", "lon")


def coords_of(box: Box) -> np.ndarray:
    return box.unravel(np.arange(box.size))


def grid(*shape: int) -> np.ndarray:
    return coords_of(Box((0,) * len(shape), shape))


def last_set(size: int | None, **others: object) -> ManifestSet:
    return ManifestSet("default", size, overflow_to=None, cardinality=None, **others)


@pytest.mark.parametrize(
    ("shape", "along", "most", "expected"),
    [
        ((9000, 10, 20), (), 50_000, (250, ENDLESS, ENDLESS)),
        ((9000, 10, 20), (), 199, (1, 9, ENDLESS)),
        ((9000, 10, 20), (), 19, (1, 1, 19)),
        ((9000, 10, 20), (), 1, (1, 1, 1)),
        ((9000, 10, 20), (("time", 720),), 10**6, (720, ENDLESS, ENDLESS)),
        ((9000, 10, 20), (("time", 720),), 50_000, (250, ENDLESS, ENDLESS)),
        ((9000, 10, 20), ((1, 5),), 50_000, (500, 5, ENDLESS)),
        ((9000, 10, 20), (("lat", 5), ("lon", 4)), 50_000, (2500, 5, 4)),
        (
            (9000, 10, 20),
            (("time", 30), (0, 40), (7, 2), ("no", 3)),
            50_000,
            (30,) + (ENDLESS,) * 2,
        ),
        ((9000, 0, 20), (), 50_000, (2500, ENDLESS, ENDLESS)),
        ((), (), 5, ()),
        ((7,), (), 5, (5,)),
    ],
)
def test_shape_of_a_leaf(
    shape: Coords, along: tuple[tuple[str | int, int], ...], most: int, expected: Coords
) -> None:
    split = Split(".*", along) if along else None
    names = NAMES if len(shape) == 3 else None
    assert leaf_shape(shape, names, split, most) == expected


shapes = st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple)
alongs = st.dictionaries(st.integers(0, 3), st.integers(1, 15), min_size=1).map(
    lambda found: Split(".*", tuple(found.items()))
)


@settings(max_examples=examples(100), deadline=None)
@given(shapes, st.none() | alongs, st.integers(1, 60), st.integers(0, 50))
def test_a_leaf_is_within_its_limits_and_does_not_know_how_long_the_first_axis_is(
    shape: Coords, split: Split | None, most: int, more: int
) -> None:
    found = leaf_shape(shape, None, split, most)
    longer = (shape[0] + more, *shape[1:])
    assert leaf_shape(longer, None, split, most) == found
    assert math.prod(map(min, found, (ENDLESS, *shape[1:]))) <= most
    for axis, chunks in split.along if split else ():
        assert axis >= len(shape) or found[axis] <= chunks


@settings(max_examples=examples(100), deadline=None)
@given(shapes, st.none() | alongs, st.integers(1, 60), st.integers(1, 12))
def test_an_append_touches_only_the_last_leaves(
    shape: Coords, split: Split | None, most: int, more: int
) -> None:
    config = ChunkManifests(
        sets=(last_set(most),), rules=(), splitting=() if split is None else (split,)
    )
    longer = (shape[0] + more, *shape[1:])
    facts = ArrayFacts(NODE, "/a", shape, math.prod(shape))
    grown = ArrayFacts(NODE, "/a", longer, math.prod(longer))
    before = cut(grid(*shape), layout_of(config, facts))
    after = {leaf.box for leaf in cut(grid(*longer), layout_of(config, grown))}
    for leaf in before:
        if leaf.box.hi[0] < shape[0]:
            assert leaf.box in after, "a leaf before the end of the first axis has changed"
    assert all(len(leaf.rows) <= most for leaf in before)


@settings(max_examples=examples(100), deadline=None)
@given(shapes, st.data())
def test_every_chunk_is_in_one_leaf(shape: Coords, data: st.DataObject) -> None:
    """Also where a part of the old leaves stays, and the new ones have another shape."""
    ndim = len(shape)
    cells = st.tuples(*[st.integers(1, 8) | st.just(ENDLESS)] * ndim)
    old = cut(grid(*shape), Layout(data.draw(cells), 10**6, True, False))
    due = data.draw(st.lists(st.booleans(), min_size=len(old), max_size=len(old)))
    staying = [leaf.box for leaf, anew in zip(old, due, strict=True) if not anew]
    boxes = [leaf.box for leaf, anew in zip(old, due, strict=True) if anew]
    coords = grid(*shape)
    inside = np.array([any(tuple(c) in box for box in boxes) for c in coords.tolist()], bool)
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=len(coords), max_size=len(coords))))
    coords = coords[inside & keep]
    layout = Layout(data.draw(cells), data.draw(st.integers(1, 20)), True, False)
    found = cut(coords, layout, boxes, staying)
    rows = np.concatenate([leaf.rows for leaf in found]) if found else np.empty(0, np.int64)
    assert sorted(rows.tolist()) == list(range(len(coords)))
    for leaf in found:
        assert 0 < len(leaf.rows) <= layout.most_refs
        assert (np.diff(leaf.rows) > 0).all()
        assert all(tuple(c) in leaf.box for c in coords[leaf.rows].tolist())
        cells_of = coords[leaf.rows] // np.array(layout.cell)
        assert (cells_of == cells_of[0]).all()
    everything = [leaf.box for leaf in found] + staying
    assert not any(a.overlaps(b) for a, b in itertools.combinations(everything, 2))


def test_a_new_chunk_beside_a_leaf_that_stays_is_refused() -> None:
    layout = Layout((10,), 100, True, False)
    with pytest.raises(InvalidArgumentError, match="cell"):
        cut(np.array([[7]]), layout, [], [Box((0,), (5,))])


def test_an_array_that_fits_is_not_split() -> None:
    config = ChunkManifests(sets=(last_set(100),), rules=())
    layout = layout_of(config, ArrayFacts(NODE, "/a", (10**9,), 100))
    assert layout == Layout((ENDLESS,), 100, False, False)
    (leaf,) = cut(np.array([[0], [10**9 - 1]]), layout)
    assert leaf.box == Box((0,), (10**9,))


def test_a_sparse_array_is_not_split_into_a_leaf_for_every_chunk() -> None:
    config = ChunkManifests(sets=(last_set(100),), rules=())
    refs = 1_000
    layout = layout_of(config, ArrayFacts(NODE, "/a", (10**9, 1000), refs))
    spread = np.stack([np.arange(refs) * 10**6, np.zeros(refs, np.int64)], axis=1)
    dense = np.stack([np.arange(refs), np.zeros(refs, np.int64)], axis=1)
    for coords in (spread, dense):
        found = cut(coords, layout)
        assert 10 <= len(found) <= 20
        assert all(len(leaf.rows) <= 100 for leaf in found)


def test_what_a_layout_looks_at() -> None:
    small = ManifestSet("small", 40)
    config = ChunkManifests(
        sets=(small, ManifestSet("each", arrays_per_manifest=2, cardinality=None), last_set(100)),
        rules=(
            Rule("each", "/each/.*"),
            Rule("small", None, Interval(None, 500)),
        ),
        splitting=(Split("/.*/named", (("time", 7),)), Split("/.*/tiles", ((1, 3),))),
    )

    def layout(path: str, chunks: int) -> Layout:
        return layout_of(config, ArrayFacts(NODE, path, (chunks, 10), chunks * 10, ("time", "x")))

    assert layout("/a/b", 50).cell == (10, ENDLESS)  # too big for both: as default wants it
    assert layout("/a/b", 50).most_refs == 100
    # By name it is split so that its leaves fit into its own set.
    assert layout("/a/named", 50) == Layout((4, ENDLESS), 40, True, False)
    assert layout("/a/tiles", 50) == Layout((13, 3), 40, True, False)
    assert layout("/a/named", 500) == Layout((7, ENDLESS), 100, True, False)
    # Where arrays are counted, a table is limited only by what a reader takes.
    assert layout("/each/b", 500) == Layout((ENDLESS, ENDLESS), LEAF_ROWS, False, True)
    assert layout("/each/named", 500) == Layout((7, ENDLESS), LEAF_ROWS, True, True)
    whole = ChunkManifests(sets=(last_set(100),), rules=(), splitting=None)
    facts = ArrayFacts(NODE, "/a", (3 * LEAF_ROWS,), 3 * LEAF_ROWS)
    assert layout_of(whole, facts) == Layout((LEAF_ROWS,), LEAF_ROWS, False, True)


@settings(max_examples=examples(100), deadline=None)
@given(shapes, st.data())
def test_leaves_to_be_expected_are_those_of_a_full_array(
    shape: Coords, data: st.DataObject
) -> None:
    layout = Layout(
        data.draw(st.tuples(*[st.integers(1, 8) | st.just(ENDLESS)] * len(shape))),
        10**6,
        True,
        False,
    )
    full = ArrayFacts(NODE, "/a", shape, math.prod(shape))
    found = [(part.box, part.count) for part in expected_leaves(layout, full)]
    assert sorted(found, key=str) == sorted(
        ((leaf.box, len(leaf.rows)) for leaf in cut(grid(*shape), layout)), key=str
    )
    some = data.draw(st.integers(0, full.metadata_chunks))
    thin = expected_leaves(layout, ArrayFacts(NODE, "/a", shape, some))
    assert sum(part.count for part in thin) == some
    assert not any(a.box.overlaps(b.box) for a, b in itertools.combinations(thin, 2))
