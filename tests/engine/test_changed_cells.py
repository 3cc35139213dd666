"""Cells that changed between two snapshots: each once, and only where positions stay the same."""

from __future__ import annotations

import itertools
from contextlib import suppress
from datetime import timedelta

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import zarr_manifests as zm
from effort import examples
from inside import context_of
from zarr_manifests import Repository, Session
from zarr_manifests.engine.history.changed_cells import compared_cells
from zarr_manifests.error_cases import HistoryExpiredError
from zarr_manifests.errors import InvalidArgumentError, NotFoundError
from zarr_manifests.grid import Coords, IndexArray
from zarr_manifests.reports import ArrayShape, CellChanges, Operation
from zarr_manifests.repository import changed_cells
from zarr_manifests.session import initialized_chunks
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.testing import CountingStorage

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
        for chunk in initialized_chunks(session, path).tolist():
            sides = (
                range(k * c, min((k + 1) * c, n))
                for k, c, n in zip(chunk, array.chunks, array.shape, strict=True)
            )
            rows |= set(itertools.product(*sides))
    return {cell: tuple(int(v[cell]) for v in values) for cell in rows}


def make(session: Session, path: str, shape: Coords, chunks: Coords | None = None) -> None:
    zarr.create_array(
        session.store, name=path, shape=shape, chunks=chunks or CHUNKS[path], dtype="i4"
    )


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
        make_again(session, shape, (i, 2))
    elif chunks and what == "write":
        array.set_block_selection(chunks[i % len(chunks)], value)
    elif chunks and what == "unset":
        chunk = "/".join(map(str, chunks[i % len(chunks)]))
        session.store.delete_sync(f"{path}/c/{chunk}")


def make_again(session: Session, shape: Coords, chunks: Coords) -> None:
    zarr.create_array(
        session.store, name="b", shape=shape, chunks=chunks, dtype="i4", overwrite=True
    )


@pytest.mark.slow
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
    in_one = [{what for what, _, _ in steps} for steps in commits]
    if any("cut" in kinds and kinds & {"write", "append"} for kinds in in_one):
        with suppress(InvalidArgumentError):  # which cannot be told from a move
            changed_cells(repository, PATHS, start, history[last])
        return
    found = changed_cells(repository, PATHS, start, history[last])
    before = {} if start is None else rows_at(repository, start)
    after = rows_at(repository, history[last])
    assert cells_of(found.added) == after.keys() - before.keys()
    assert cells_of(found.removed) == before.keys() - after.keys()
    other = {cell for cell in before.keys() & after.keys() if before[cell] != after[cell]}
    assert other <= cells_of(found.overwritten) | cells_of(found.rewritten)
    assert not cells_of(found.overwritten) & cells_of(found.rewritten)
    if start is not None:
        ends = repository._refs.named(start, history[last])
        compared = compared_cells(context_of(repository), *ends, PATHS)
        assert (compared.start, compared.end) == (start, history[last])
        for name in ("added", "overwritten", "rewritten", "removed"):
            assert getattr(compared, name).tolist() == getattr(found, name).tolist(), name


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


def test_chunks_that_appends_share_give_each_cell_once(repository: Repository) -> None:
    ids = grown(repository, 3, 3, 5)
    ends = [[[0, 0], [3, 2]]], [[[3, 0], [6, 2]]], [[[6, 0], [11, 2]]]
    for start, end, box in zip([None, *ids], ids, ends, strict=False):
        found = changed_cells(repository, "a", start, end)
        assert found.added.tolist() == box
        assert found.only_added
    whole = changed_cells(repository, ["/a"], ids[0])
    assert (whole.start, whole.end, whole.paths) == (ids[0], ids[2], ("/a",))
    assert (whole.old_shape, whole.new_shape) == ((3, 2), (11, 2))
    assert whole.added.tolist() == [[[3, 0], [11, 2]]]


def test_growth_alone_uncovers_what_the_chunk_at_the_edge_holds(repository: Repository) -> None:
    ids = grown(repository, 3)
    session = repository.writable_session("main")
    zarr.open_array(session.store, path="a").resize((9, 2))
    found = changed_cells(repository, "a", ids[0], session.commit("grow"))
    assert found.added.tolist() == [[[3, 0], [4, 2]]]
    assert not len(found.rewritten)
    back = changed_cells(repository, "a", found.end, repository.revert(found.end))
    assert back.removed.tolist() == [[[3, 0], [4, 2]]]
    assert not back.only_added


def test_other_units_count_as_other_values(repository: Repository) -> None:
    ids = grown(repository, 3)
    session = repository.writable_session("main")
    zarr.open_array(session.store, path="a").attrs["units"] = "K"
    named = session.commit("units")
    assert changed_cells(repository, "a", ids[0]).overwritten.tolist() == [[[0, 0], [3, 2]]]
    zarr.open_array(session.store, path="a").attrs["comment"] = "none"
    found = changed_cells(repository, "a", named, session.commit("comment"))
    assert found.only_added
    assert not len(found.added)


def test_a_rename_and_compactions_change_no_cell(repository: Repository) -> None:
    ids = grown(repository, 3, 3)
    repository.compact("main", "full")
    repository.compact(mode="packs")
    session = repository.writable_session("main")
    session.move("a", "b")
    session.commit("move")
    found = changed_cells(repository, "b", ids[1])
    assert found.old_shape == found.new_shape == (6, 2)
    assert not sum(map(len, (found.added, found.overwritten, found.rewritten, found.removed)))


@pytest.mark.parametrize("way", ["shift", "reindex", "prepend"])
def test_moved_chunks_are_refused(repository: Repository, way: str) -> None:
    ids = grown(repository, 8)
    session = repository.writable_session("main")
    if way == "prepend":
        zarr.open_array(session.store, path="a").resize((12, 2))
    if way == "reindex":
        session.reindex_array("a", {(0, 0): (1, 0), (1, 0): (0, 0)})
    else:
        session.shift_array("a", (1, 0))
    moved = session.commit("move")
    with pytest.raises(InvalidArgumentError, match=f"commit {moved} has moved chunks of /a"):
        changed_cells(repository, "a", ids[0])
    assert changed_cells(repository, "a", moved).only_added
    assert len(changed_cells(repository, "a").added)


def test_a_move_of_chunks_that_came_in_the_same_range_is_refused(repository: Repository) -> None:
    ids = grown(repository, 8)
    session = repository.writable_session("main")
    zarr.open_array(session.store, path="a").append(np.full((8, 2), 2, "i4"))
    for chunk in range(3):
        session.store.delete_sync(f"a/c/{chunk}/0")
    session.commit("only the last chunk is left")
    zarr.open_array(session.store, path="a").resize((20, 2))
    session.commit("room")
    session.shift_array("a", (1, 0))
    session.commit("move")
    zarr.open_array(session.store, path="a").resize((24, 2))
    room = session.commit("room")
    session.shift_array("a", (-1, 0))
    session.commit("back")
    for start in (ids[0], room):
        with pytest.raises(InvalidArgumentError, match="has moved chunks of /a"):
            changed_cells(repository, "a", start)


@pytest.mark.parametrize("apart", [False, True])
def test_a_shorter_array_has_lost_cells(repository: Repository, apart: bool) -> None:
    ids = grown(repository, 6, 6, 6)
    session = repository.writable_session("main")
    zarr.open_array(session.store, path="a").resize((5, 2))
    if apart:
        session.commit("cut")
    zarr.open_array(session.store, path="a").resize((11, 1))
    found = changed_cells(repository, "a", ids[-1], session.commit("and grow"))
    assert found.removed.tolist() == [[[0, 1], [8, 2]], [[8, 0], [18, 2]]]
    assert not len(found.added) + len(found.overwritten) + len(found.rewritten)


def test_appends_put_behind_others_are_added_where_they_are(repository: Repository) -> None:
    session = repository.writable_session("main")
    zarr.create_array(
        session.store, name="a", shape=(4,), chunks=(4,), dtype="i4", dimension_names=["t"]
    )[:] = 1
    start = session.commit("start")
    mine, other = repository.writable_session(append_dim="t"), repository.writable_session()
    for each, length in ((mine, 8), (other, 4)):
        zarr.open_array(each.store, path="a").append(np.full(length, length, "i4"))
    theirs = other.commit("theirs")
    found = changed_cells(repository, "a", theirs, mine.commit("mine"))
    assert (found.old_shape, found.new_shape) == ((8,), (16,))
    assert found.added.tolist() == [[[8], [16]]]
    assert changed_cells(repository, "a", start).added.tolist() == [[[4], [16]]]


def test_what_cannot_be_answered_is_an_error(repository: Repository) -> None:
    ids = grown(repository, 3, 3)
    with pytest.raises(NotFoundError, match="no array /b"):
        changed_cells(repository, "b", ids[0])
    with pytest.raises(InvalidArgumentError, match="not an ancestor"):
        changed_cells(repository, "a", ids[1], ids[0])
    session = repository.writable_session("main")
    make(session, "b", (2, 2))
    session.commit("b")
    with pytest.raises(InvalidArgumentError, match="one shape"):
        changed_cells(repository, PATHS)
    repository.expire_snapshots(keep_last=1, max_age=timedelta(0))
    repository.garbage_collect(grace=timedelta(0))
    with pytest.raises(HistoryExpiredError, match="not all there any more"):
        changed_cells(repository, "a", ids[0])


def test_a_tag_keeps_what_cells_are_compared_with(repository: Repository) -> None:
    ids = grown(repository, 3, 3, 5)
    repository.create_tag("seen", ids[1])
    found = changed_cells(repository, "a", ids[1])
    session = repository.writable_session("main")
    make(session, "b", (2, 2))
    session.commit("b")
    repository.expire_snapshots(keep_last=1, max_age=timedelta(0))
    repository.garbage_collect(grace=timedelta(0))
    again = changed_cells(repository, "a", "seen")
    assert again.start == ids[1]
    assert again.added.tolist() == found.added.tolist() == [[[6, 0], [11, 2]]]
    assert again.rewritten.tolist() == found.rewritten.tolist()
    assert again.only_added
    with pytest.raises(HistoryExpiredError, match="not all there any more"):
        changed_cells(repository, "a", ids[0])
    repository.delete_tag("seen")
    with pytest.raises(HistoryExpiredError, match="not all there any more"):
        changed_cells(repository, "a", ids[1])


@pytest.mark.slow
def test_appends_read_neither_chunks_nor_leaves_of_what_was_there() -> None:
    storage = CountingStorage(MemoryStorage())
    repository = zm.create(storage)
    session = repository.writable_session("main")
    array = zarr.create_array(session.store, name="a", shape=(6000,), chunks=(1,), dtype="i4")
    array[:] = 1
    session.commit("many chunks")
    repository.compact("main", "full")
    start = repository.list_branches()["main"]
    session = repository.writable_session("main")
    zarr.open_array(session.store, path="a").append(np.full(4, 9, "i4"))
    session.commit("four more")
    again = zm.open(storage)
    storage.reset()
    assert changed_cells(again, "a", start).added.tolist() == [[[6000], [6004]]]
    read = {record.key.partition("/")[0] for record in storage.log}
    assert read <= {"current", "snapshots", "deltas", "nodes"}
    assert storage.rounds() <= 5


def test_records_have_the_shapes_before_and_after(repository: Repository) -> None:
    ids = grown(repository, 3, 3)
    records = list(repository.changes(ids[0], ids[1]))
    shapes = ArrayShape((3, 2), (4, 2)), ArrayShape((6, 2), (4, 2))
    assert {(c.before, c.after) for c in records} == {shapes}
    made = [c for c in repository.changes(None, ids[0]) if c.path == "/a"]
    assert made[0].operation is Operation.CREATE
    assert (made[0].before, made[0].after) == (None, ArrayShape((3, 2), (4, 2)))
    session = repository.writable_session("main")
    zarr.create_array(
        session.store, name="a", shape=(6, 2), chunks=(1, 2), dtype="i4", overwrite=True
    )
    session.commit("other chunks")
    net = list(repository.changes(ids[1], mode="net"))
    assert {(c.operation, c.before, c.after) for c in net} == {
        (Operation.DELETE, shapes[1], None),
        (Operation.CREATE, None, ArrayShape((6, 2), (1, 2))),
    }
    assert isinstance(changed_cells(repository, "a", ids[1]), CellChanges)
