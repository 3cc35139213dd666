"""Cells that came, changed or went, against sets of cells."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.grid import Coords, IndexArray
from zarr_manifests.planning.upkeep.cell_changes import (
    ArrayShape,
    CellChanges,
    ChangedArray,
    classify_cells,
)

type Cells = set[Coords]


def cells_of(boxes: IndexArray) -> Cells:
    """The cells in the boxes, each of which must be in one box only."""
    found: list[Coords] = []
    for lo, hi in boxes.tolist():
        assert all(a < b for a, b in zip(lo, hi, strict=True))
        found += itertools.product(*map(range, lo, hi))
    assert len(found) == len(set(found))
    assert boxes[:, 0].tolist() == sorted(boxes[:, 0].tolist())
    return set(found)


def coords_of(chunks: Iterable[Coords], ndim: int) -> IndexArray:
    found = sorted(chunks)
    return np.array(found, np.int64).reshape(len(found), ndim)


@dataclass
class Model:
    """One array: its shape, the shape of its chunks, and when each stored chunk was written."""

    shape: Coords
    chunk: Coords
    born: int = 0
    stored: dict[Coords, int] = field(default_factory=dict)

    @property
    def grid(self) -> Coords:
        return tuple(-(-n // c) for n, c in zip(self.shape, self.chunk, strict=True))

    def held(self) -> Cells:
        return {cell for chunk in self.stored for cell in self.cells(chunk)}

    def cells(self, chunk: Coords) -> Cells:
        sides = (
            range(k * c, min((k + 1) * c, n))
            for k, c, n in zip(chunk, self.chunk, self.shape, strict=True)
        )
        return set(itertools.product(*sides))

    def resize(self, shape: Coords) -> None:
        self.shape = shape
        grid = self.grid
        self.stored = {k: v for k, v in self.stored.items() if all(map(int.__lt__, k, grid))}

    def copy(self) -> Model:
        return Model(self.shape, self.chunk, self.born, dict(self.stored))


def changed(before: Model | None, after: Model | None, since: int, ndim: int) -> ChangedArray:
    """What the engine finds out about an array."""
    old = {} if before is None else before.stored
    new = {} if after is None else after.stored
    same = before is not None and after is not None and before.born == after.born
    written = {k for k, at in new.items() if at > since or not same}
    dropped = {k for k in old if k not in new or not same}
    exposed = set()
    if same:
        assert before is not None
        assert after is not None
        for k in new.keys() & old.keys() - written:
            if before.cells(k) != after.cells(k):
                exposed.add(k)

    def there(stored: dict[Coords, int], model: Model | None):
        def asked(coords: IndexArray):
            assert len(coords)
            assert model is not None
            assert all(all(map(int.__lt__, k, model.grid)) for k in coords.tolist())
            return np.array([tuple(k) in stored for k in coords.tolist()])

        return asked

    def shape(model: Model | None) -> ArrayShape | None:
        return None if model is None else ArrayShape(model.shape, model.chunk)

    return ChangedArray(
        shape(before),
        shape(after),
        coords_of(written, ndim),
        coords_of(dropped, ndim),
        coords_of(exposed, ndim),
        there(old, before),
        there(new, after),
    )


def compare(before: list[Model | None], after: list[Model | None], since: int) -> CellChanges:
    ndim = next(len(m.shape) for m in (*before, *after) if m is not None)
    arrays = [changed(b, a, since, ndim) for b, a in zip(before, after, strict=True)]
    return classify_cells([f"/{n}" for n in range(len(arrays))], arrays)


def rows_of(models: list[Model | None]) -> Cells:
    return set().union(*(m.held() for m in models if m is not None))


_STEPS = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 1), st.integers(0, 30), st.just(0)),
    st.tuples(st.just("unset"), st.integers(0, 1), st.integers(0, 30), st.just(0)),
    st.tuples(st.just("resize"), st.just(0), st.integers(0, 9), st.integers(1, 5)),
    st.tuples(st.just("append"), st.just(0), st.integers(1, 4), st.just(0)),
    st.tuples(st.just("remake"), st.integers(0, 1), st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.just("delete"), st.just(1), st.just(0), st.just(0)),
)


def do(models: list[Model | None], step: tuple[str, int, int, int], now: int) -> None:
    what, which, i, j = step
    first, model = models[0], models[which]
    assert first is not None
    if what == "resize":
        for each in models:
            if each is not None:
                each.resize((i, j))
    elif what == "append":
        append([each for each in models if each is not None], i, now)
    elif what == "remake":
        models[which] = Model(first.shape, (i, j), now)
    elif what == "delete":
        models[which] = None
    elif model is not None:
        chunks = list(itertools.product(*map(range, model.grid)))
        if chunks and what == "write":
            model.stored[chunks[i % len(chunks)]] = now
        elif chunks:
            model.stored.pop(chunks[i % len(chunks)], None)


def append(models: list[Model], length: int, now: int) -> None:
    start, width = models[0].shape
    for model in models:
        model.resize((start + length, width))
        for k in itertools.product(*map(range, model.grid)):
            if (k[0] + 1) * model.chunk[0] > start:
                model.stored[k] = now


@given(st.lists(_STEPS, max_size=14), st.data())
def test_every_cell_is_in_the_class_that_sets_of_cells_say(
    steps: list[tuple[str, int, int, int]], data: st.DataObject
) -> None:
    models: list[Model | None] = [Model((5, 3), (2, 2)), Model((5, 3), (3, 1))]
    for k in ((0, 0), (2, 1)):
        models[0].stored[k] = 0  # type: ignore[union-attr]
    since = data.draw(st.integers(0, len(steps)))
    before = [m and m.copy() for m in models]
    for now, step in enumerate(steps, 1):
        do(models, step, now)
        if now == since:
            before = [m and m.copy() for m in models]
    found = compare(before, models, since)
    old, new = rows_of(before), rows_of(models)
    assert cells_of(found.added) == new - old
    assert cells_of(found.removed) == old - new
    touched: Cells = set()
    for was, model in zip(before, models, strict=True):
        same = was is not None and model is not None and was.born == model.born
        if model is not None:
            written = {k for k, at in model.stored.items() if at > since or not same}
            touched |= set().union(*(model.cells(k) for k in written))
        if was is not None:
            gone = was.stored if not same else was.stored.keys() - model.stored.keys()  # type: ignore[union-attr]
            touched |= set().union(*(was.cells(k) for k in gone))
    overwritten, rewritten = cells_of(found.overwritten), cells_of(found.rewritten)
    assert overwritten | rewritten == touched & old & new
    assert not overwritten & rewritten


_APPENDS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.just(0), st.integers(1, 4), st.just(0)),
        st.tuples(st.just("resize"), st.just(0), st.integers(0, 3), st.integers(0, 2)),
        st.tuples(st.just("write"), st.integers(0, 1), st.integers(0, 30), st.just(0)),
    ),
    max_size=12,
)


@given(_APPENDS, st.data())
def test_added_cells_of_all_ranges_are_the_final_table_each_once(
    steps: list[tuple[str, int, int, int]], data: st.DataObject
) -> None:
    models: list[Model | None] = [Model((3, 2), (2, 2)), Model((3, 2), (4, 1))]
    before: list[Model | None] = [None, None]
    given_out: list[Coords] = []
    since = 0
    for now, (what, which, i, j) in enumerate(steps, 1):
        first = models[0]
        assert first is not None
        if what == "resize":  # only ever larger
            i, j = first.shape[0] + i, first.shape[1] + j
        do(models, (what, which, i, j), now)
        if data.draw(st.booleans()):
            found = compare(before, models, since)
            assert not len(found.removed)
            given_out += cells_of(found.added)
            before, since = [m and m.copy() for m in models], now
    given_out += cells_of(compare(before, models, since).added)
    assert len(given_out) == len(set(given_out))
    assert set(given_out) == rows_of(models)


def test_a_chunk_that_two_appends_fill_gives_each_cell_once() -> None:
    model = Model((3, 2), (4, 2))
    model.stored[0, 0] = 1
    first = compare([None], [model], 0)
    assert first.added.tolist() == [[[0, 0], [3, 2]]]
    before = model.copy()
    do([model], ("append", 0, 3, 0), 2)
    second = compare([before], [model], 1)
    assert second.added.tolist() == [[[3, 0], [6, 2]]]
    assert second.rewritten.tolist() == [[[0, 0], [3, 2]]]
    assert second.only_added


def test_arrays_of_different_shapes_are_no_columns_of_one_table() -> None:
    with pytest.raises(InvalidArgumentError, match=r"one shape: /0 \(2, 2\); /1 \(3, 2\)"):
        compare([None, None], [Model((2, 2), (1, 1)), Model((3, 2), (1, 1))], 0)


def test_an_array_without_axes_is_one_cell() -> None:
    one = Model((), (), stored={(): 1})
    assert compare([None], [one], 0).added.shape == (1, 2, 0)
    assert compare([one], [Model((), (), stored={(): 2})], 1).overwritten.shape == (1, 2, 0)


def test_a_million_scattered_chunks_take_seconds_and_few_boxes() -> None:
    ticks = np.stack(np.meshgrid(np.arange(1000), np.arange(1000), indexing="ij"), -1)
    chunks = ticks.reshape(-1, 2)
    shape = ArrayShape((10_000, 10_000), (10, 10))
    nothing = np.empty((0, 2), np.int64)

    def all_of(coords: IndexArray):
        return np.ones(len(coords), np.bool_)

    array = ChangedArray(None, shape, chunks, nothing, nothing, all_of, all_of)
    assert classify_cells(["/a"], [array]).added.tolist() == [[[0, 0], [10_000, 10_000]]]
