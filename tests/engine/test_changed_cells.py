"""Cells that changed between two snapshots: each once, and only where positions stay the same."""

from __future__ import annotations

import itertools
from datetime import timedelta

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import zarr_manifests as zm
from effort import examples
from zarr_manifests import Repository, Session
from zarr_manifests.errors import HistoryExpiredError, InvalidArgumentError, NotFoundError
from zarr_manifests.grid import Coords, IndexArray
from zarr_manifests.repository import changed_cells
from zarr_manifests.storage.memory import MemoryStorage

type Cells = set[Coords]
PATHS = ("a", "b")
CHUNKS = {"a": (2, 2), "b": (3, 1)}


def cells_of(boxes: IndexArray) -> Cells:
    found = [c for lo, hi in boxes.tolist() for c in itertools.product(*map(range, lo, hi))]
    assert len(found) == len(set(found))
    return set(found)


def rows_at(repository: Repository, snapshot_id: str) -> dict[Coords, tuple[int, ...]]:
    """Cells in stored chunks of any array, with the values of all."""
    session = repository.readonly_session(snapshot_id)
    rows: Cells = set()
    values = []
    for path in PATHS:
        try:
            array = zarr.open_array(session.store, path=path, mode="r")
        except FileNotFoundError:
            values.append(np.full((40, 40), -1))
            continue
        values.append(array[...])
        for chunk in session.chunk_refs(path).coords.tolist():
            sides = (
                range(k * c, min((k + 1) * c, n))
                for k, c, n in zip(chunk, array.chunks, array.shape, strict=True)
            )
            rows |= set(itertools.product(*sides))
    return {cell: tuple(int(v[cell]) for v in values) for cell in rows}


def make(session: Session, path: str, shape: Coords, chunks: Coords | None = None) -> None:
    how = {"shape": shape, "chunks": chunks or CHUNKS[path], "overwrite": True}
    zarr.create_array(session.store, name=path, dtype="i4", **how)


_STEPS = st.one_of(
    st.tuples(st.just("write"), st.sampled_from(PATHS), st.integers(0, 30)),
    st.tuples(st.just("unset"), st.sampled_from(PATHS), st.integers(0, 30)),
    st.tuples(st.just("append"), st.just("a"), st.integers(1, 4)),
    st.tuples(st.just("grow"), st.just("a"), st.integers(0, 3)),
    st.tuples(st.just("cut"), st.just("a"), st.integers(1, 4)),
    st.tuples(st.just("remake"), st.just("b"), st.integers(1, 3)),
    st.tuples(st.just("fold"), st.just("a"), st.integers(0, 2)),
)


def do(session: Session, step: tuple[str, str, int], value: int) -> None:
    what, path, i = step
    arrays = [zarr.open_array(session.store, path=p) for p in PATHS]
    array = arrays[PATHS.index(path)]
    shape = array.shape
    grid = [-(-n // c) for n, c in zip(shape, array.chunks, strict=True)]
    chunks = list(itertools.product(*map(range, grid)))
    if what == "append":
        for each in arrays:
            each.append(np.full((i, shape[1]), value, "i4"))
    elif what in ("grow", "cut"):
        n = shape[0] + i if what == "grow" else max(shape[0] - i, 0)
        for each in arrays:
            each.resize((n, min(shape[1] + i, 6) if what == "grow" else shape[1]))
    elif what == "remake":
        make(session, "b", shape, (i, 2))
    elif chunks and what == "write":
        array.set_block_selection(chunks[i % len(chunks)], value)
    elif chunks and what == "unset":
        chunk = "/".join(map(str, chunks[i % len(chunks)]))
        session.store.delete_sync(f"{path}/c/{chunk}")


@settings(max_examples=examples(80))
@given(st.lists(st.lists(_STEPS, min_size=1, max_size=3), min_size=1, max_size=7), st.data())
def test_cells_are_told_as_reading_both_snapshots_shows(
    commits: list[list[tuple[str, str, int]]], data: st.DataObject
) -> None:
    repository = zm.create(MemoryStorage())
    session = repository.writable_session("main")
    for path in PATHS:
        make(session, path, (5, 3))
    zarr.open_array(session.store, path="a")[:3] = 1
    history = [session.commit("start")]
    for value, steps in enumerate(commits, 2):
        session = repository.writable_session("main")
        for step in steps:
            if step[0] != "fold":
                do(session, step, value)
        if session.status():
            history.append(session.commit("some"))
        for _, _, mode in (step for step in steps if step[0] == "fold"):
            repository.compact("main", ("minor", "major", "full")[mode])
    first = data.draw(st.integers(-1, len(history) - 1))
    last = data.draw(st.integers(max(first, 0), len(history) - 1))
    start = None if first < 0 else history[first]
    found = changed_cells(repository, PATHS, start, history[last])
    before = {} if start is None else rows_at(repository, start)
    after = rows_at(repository, history[last])
    assert cells_of(found.added) == after.keys() - before.keys()
    assert cells_of(found.removed) == before.keys() - after.keys()
    other = {cell for cell in before.keys() & after.keys() if before[cell] != after[cell]}
    assert other <= cells_of(found.overwritten) | cells_of(found.rewritten)
    assert not cells_of(found.overwritten) & cells_of(found.rewritten)


@pytest.fixture
def repository() -> Repository:
    return zm.create(MemoryStorage())


def grown(repository: Repository, *lengths: int, chunk: int = 4) -> list[str]:
    """Snapshots after appends of these lengths to the array /a."""
    session = repository.writable_session("main")
    zarr.create_array(session.store, name="a", shape=(0, 2), chunks=(chunk, 2), dtype="i4")
    made = []
    for value, length in enumerate(lengths, 1):
        zarr.open_array(session.store, path="a").append(np.full((length, 2), value, "i4"))
        made.append(session.commit(f"append {length}"))
    return made


def test_moved_chunks_are_told_by_position(repository: Repository) -> None:
    ids = grown(repository, 8, 4)
    session = repository.writable_session("main")
    session.shift_array("a", (-1, 0))
    session.commit("move")
    found = changed_cells(repository, "a", ids[1])
    assert found.overwritten.tolist() == [[[4, 0], [8, 2]]]  # the first chunk is like the second
    assert found.removed.tolist() == [[[8, 0], [12, 2]]]


def test_what_cannot_be_answered_is_an_error(repository: Repository) -> None:
    ids = grown(repository, 3, 3)
    with pytest.raises(NotFoundError, match="/b"):
        changed_cells(repository, "b", ids[0])
    with pytest.raises(InvalidArgumentError, match="ancestor"):
        changed_cells(repository, "a", ids[1], ids[0])


def test_a_tag_keeps_what_cells_are_compared_with(repository: Repository) -> None:
    ids = grown(repository, 3, 3, 5)
    repository.create_tag("seen", ids[1])
    found = changed_cells(repository, "a", ids[1])
    repository.expire_snapshots(keep_last=1, max_age=timedelta(0))
    repository.garbage_collect(grace=timedelta(0))
    again = changed_cells(repository, "a", "seen")
    assert again.added.tolist() == found.added.tolist() == [[[6, 0], [11, 2]]]
    assert again.rewritten.tolist() == found.rewritten.tolist()
    with pytest.raises(HistoryExpiredError, match="not all there"):
        changed_cells(repository, "a", ids[0])
    repository.delete_tag("seen")
    with pytest.raises(HistoryExpiredError, match="not all there"):
        changed_cells(repository, "a", ids[1])
