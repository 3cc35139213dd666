"""Graphs of history, maps of chunks and their pictures: they say what is there, and stay small."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import count, pairwise
from typing import Any

import matplotlib
import numpy as np
import pytest
import zarr
from matplotlib import pyplot

import zarr_manifests as zm
from notebooks import is_blank
from zarr_manifests import Repository
from zarr_manifests.engine.edit import map_chunks as gathering
from zarr_manifests.picturing.chunk_map import ChunkMap, Folding
from zarr_manifests.picturing.draw import draw_chunks, draw_diff, draw_history
from zarr_manifests.picturing.graph import graph_svg
from zarr_manifests.picturing.lanes import GraphRow, lanes, lines, width_of
from zarr_manifests.repository import graph_of, resolved
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.session import chunk_map_of
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.versions import RefName, refs_by_snapshot, short_ids

START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _without_screen() -> Iterator[None]:
    matplotlib.use("Agg")
    yield
    pyplot.close("all")


# --- lanes -----------------------------------------------------------------------------------


@dataclass
class Fake:
    number: int
    parent: int | None
    at: int
    merged: int | None = None
    kind: str = "append"
    message: str = "a commit"
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.merged is not None:
            self.metadata = {"merged-from": name(self.merged)}

    @property
    def id(self) -> str:
        return name(self.number)

    @property
    def parent_id(self) -> str | None:
        return None if self.parent is None else name(self.parent)

    @property
    def written_at(self) -> datetime:
        return START + timedelta(minutes=self.at)


def name(number: int) -> str:
    return f"{number:012d}-{number:024x}-1"


def drawn(commits: list[Fake], heads: list[int], rows: int = 10**6) -> tuple[GraphRow[Fake], ...]:
    by_id = {commit.id: commit for commit in commits}

    def ancestry(start: str) -> Iterator[Fake]:
        at: str | None = start
        while at in by_id:
            yield by_id[at]
            at = by_id[at].parent_id

    refs = refs_by_snapshot({f"branch-{head}": name(head) for head in heads}, {})
    return lanes(lines(map(name, heads), ancestry, 10**6), refs, rows)


def random_history(seed: int) -> tuple[list[Fake], list[int]]:
    random = np.random.default_rng(seed)
    commits = [Fake(0, None, 0)]
    heads = [0]
    for number in range(1, int(random.integers(2, 60))):
        branch = int(random.integers(len(heads)))
        parent = heads[branch]
        merged = int(random.choice(heads)) if random.random() < 0.2 else None
        clock = number + int(random.integers(-5, 6))  # clocks differ
        commits.append(Fake(number, parent, clock, None if merged == parent else merged))
        heads[branch] = number
        if random.random() < 0.15:
            heads.append(int(random.choice([parent, number])))
    return commits, list(dict.fromkeys(heads))


@pytest.mark.parametrize("seed", range(40))
def test_every_line_of_a_graph_leads_from_a_commit_down_to_what_it_comes_from(seed: int) -> None:
    commits, heads = random_history(seed)
    rows = drawn(commits, heads)
    assert sorted(row.commits[0].number for row in rows) == [one.number for one in commits]
    place = {row.commits[0].id: at for at, row in enumerate(rows)}
    for upper, lower in pairwise(rows):  # each piece goes on where it ended, and none meet there
        assert sorted(b for _, b in upper.below) == sorted(a for a, _ in lower.above)
        assert len({b for _, b in upper.below}) == len(upper.below)
    assert not rows[0].above
    assert not rows[-1].below
    for at, row in enumerate(rows):
        commit = row.commits[0]
        due = [commit.parent_id, commit.metadata.get("merged-from")]
        older = {place[one] for one in due if one is not None}
        assert all(below > at for below in older)
        reached = set()
        for lane in [b for a, b in row.below if a == row.lane]:
            below = at + 1
            while (end := dict(rows[below].above)[lane]) == lane != rows[below].lane:
                below += 1
            assert end == rows[below].lane
            reached.add(below)
        assert reached == older


def test_long_runs_are_folded_and_nothing_is_lost() -> None:
    commits = [Fake(i, i - 1 if i else None, i) for i in range(5000)]
    commits += [Fake(5000, 2500, 2501), Fake(5001, 4999, 6000, merged=5000)]
    rows = drawn(commits, [5001], rows=60)
    assert len(rows) <= 60
    assert sum(len(row.commits) for row in rows) == 5002
    alone = {row.commits[0].number for row in rows if len(row.commits) == 1}
    assert {5001, 5000, 4999, 2500, 0} <= alone
    assert width_of(rows) == 2
    assert len(drawn(commits[:50], [49])) == 50
    many = [Fake(0, None, 0), *(Fake(i, 0, i) for i in range(1, 100))]
    assert len(drawn(many, list(range(1, 100)), rows=20)) == 20


def test_metadata_that_pretends_a_circle_is_drawn_without_it() -> None:
    commits = [Fake(0, None, 0, merged=2), Fake(1, 0, 1), Fake(2, 1, 2)]
    rows = drawn(commits, [2])
    assert [row.commits[0].number for row in rows] == [2, 1, 0]
    for merged in ({"merged-from": 7}, {"merged-from": "main"}, {"merged-from": name(99)}):
        commits[2] = replace(commits[2], merged=None, metadata=merged)
        assert len(drawn(commits, [2])) == 3


def test_the_graph_of_a_repository_has_its_branches_tags_and_merges() -> None:
    repo = zm.create(MemoryStorage())
    put(repo, "main", "a", 0)
    repo.create_branch("side")
    put(repo, "side", "b", 0)
    put(repo, "main", "a", 1)
    repo.merge("side", message="bring b")
    repo.create_tag("v1", "main~1")
    repo.delete_branch("side")
    rows = graph_of(repo)
    told = [(row.lane, row.commits[0].message, [*map(str, row.refs)]) for row in rows]
    assert told == [
        (0, "bring b", ["main"]),
        (0, "a[1]", ["tag v1"]),
        (1, "b[0]", []),
        (0, "a[0]", []),
        (0, "create repository", []),
    ]
    assert (0, 1) in rows[0].below
    assert (1, 0) in rows[3].above
    assert graph_svg(rows[0], 2).count("<circle") == 1


def put(repo: Repository, branch: str, path: str, at: int) -> None:
    with repo.transaction(branch, message=f"{path}[{at}]") as store:
        array = zarr.open_array(
            store, path=path, mode="a", shape=(40, 30), chunks=(1, 1), dtype="i4"
        )
        array[at] = 1 + at


# --- maps of chunks --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_folding_loses_no_chunk(seed: int) -> None:
    random = np.random.default_rng(seed)
    grid = tuple(int(n) for n in random.integers(0, [1, 2, 40, 3000][seed % 4], random.integers(5)))
    folding = Folding.of(grid, 20)
    rows, columns = folding.shape
    assert rows <= 20
    assert rows * columns <= 4 * 20 * 20
    assert folding.whole.sum() == np.prod(grid, dtype=object)
    if not 0 < np.prod(grid, dtype=object) < 10**5:
        return
    every = np.array([*np.ndindex(*grid)], np.int64).reshape(int(np.prod(grid)), len(grid))
    np.testing.assert_array_equal(folding.place(every), folding.whole)
    weights = random.integers(0, 9, len(every))
    assert folding.place(every, weights).sum() == weights.sum()
    assert folding.is_folded == (folding.whole.max(initial=0) > 1)


def test_a_map_says_which_chunks_exist_how_large_and_when_they_last_changed() -> None:
    clock = [1_700_000_000_000]

    def now() -> int:
        clock[0] += 1000
        return clock[0]

    repo = zm.create(MemoryStorage(), runtime=replace(SYSTEM, now_ms=now))
    put(repo, "main", "a", 0)
    put(repo, "main", "a", 1)
    with repo.transaction(message="a column again, and a row less") as store:
        array = zarr.open_array(store, path="a")
        array[0:2, 3] = 7
        array[1, 5:] = 0
    session = repo.writable_session()
    session.move("a", "b")
    session.commit("rename it")
    repo.compact("main", "full")
    expected = last_changes(repo)
    assert len({*expected.values()}) == 3
    for side in (96, 7):
        check(repo, chunk_map_of(repo.readonly_session(), "b", side=side), expected)
    session = repo.writable_session()
    zarr.open_array(session.store, path="b")[20] = 5
    found = chunk_map_of(session, "b")
    assert found.chunks[20].tolist() == [1] * 30
    assert (found.changed_ms[20] > max(expected.values())).all()
    assert found.changed_ms[0, 0] == expected[0, 0]


def last_changes(repo: Repository) -> dict[tuple[int, ...], int]:
    """When each chunk was last changed, by the records of all commits."""
    times = {info.id: round(info.written_at.timestamp() * 1000) for info in repo.ancestry()}
    return {
        tuple(at): times[change.snapshot_id or ""]
        for change in repo.changes()
        for at in change.coordinates.tolist()
    }


def check(repo: Repository, found: ChunkMap, changed: Mapping[tuple[int, ...], int]) -> None:
    refs = repo.readonly_session().chunk_refs("b")
    np.testing.assert_array_equal(found.chunks, found.folding.place(refs.coords))
    np.testing.assert_array_equal(found.nbytes, found.folding.place(refs.coords, refs.length))
    newest = np.zeros(found.folding.shape, np.int64)
    for at, then in changed.items():
        here = found.folding.place(np.array([at])) > 0
        newest[here] = np.maximum(newest[here], then)
    there = found.chunks > 0
    np.testing.assert_array_equal(found.changed_ms[there], newest[there])


def test_a_map_looks_at_a_bounded_number_of_commits_and_through_expiry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    repo = zm.create(MemoryStorage())
    for at in range(6):
        put(repo, "main", "a", at)
    times = [round(info.written_at.timestamp() * 1000) for info in repo.ancestry()]
    monkeypatch.setattr(gathering, "_MOST_COMMITS", 2)
    found = chunk_map_of(repo.readonly_session(), "a")
    assert (found.changed_ms[:, 0] > 0).tolist() == [False] * 4 + [True] * 2 + [False] * 34
    assert found.since_ms == times[1]
    assert (found.chunks[:6] == 1).all()
    monkeypatch.undo()
    repo.expire_snapshots(keep_last=3)
    repo.garbage_collect(timedelta(0))
    again = chunk_map_of(zm.open(repo.storage).readonly_session(), "a")
    assert (again.changed_ms[3:6, 0] > 0).all()


def test_a_map_of_a_million_chunks_is_gathered_in_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "_SLAB_CHUNKS", 200)
    repo = zm.create(MemoryStorage())
    with repo.transaction(message="many") as store:
        zarr.create_array(store, name="a", shape=(40, 50), chunks=(1, 1), dtype="u1")[:] = 1
        zarr.create_array(store, name="scalar", shape=(), dtype="u1")[...] = 1
        zarr.create_array(store, name="none", shape=(0, 4), chunks=(1, 1), dtype="u1")
    session = repo.readonly_session()
    calls = []
    find = gathering.find_chunks
    monkeypatch.setattr(
        gathering, "find_chunks", lambda *args: calls.append(args[2]) or find(*args)
    )
    found = chunk_map_of(session, "/a", side=10)
    assert len(calls) > 9
    assert all(box.size <= 200 for box in calls)
    np.testing.assert_array_equal(found.chunks, found.folding.whole)
    assert chunk_map_of(session, "scalar").chunks.tolist() == [[1]]
    assert chunk_map_of(session, "none").chunks.size == 0


# --- pictures --------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_picture_takes_one_call_and_is_not_blank() -> None:
    repo = zm.create(MemoryStorage())
    put(repo, "main", "a", 3)
    repo.create_branch("side")
    put(repo, "side", "a", 4)
    axes = repo.ancestry().plot()
    assert axes.get_title(loc="left").startswith("History")
    assert not is_blank(axes.figure)
    sizes, times = repo.readonly_session("side").plot_chunks("a")
    assert sizes.figure.get_suptitle().startswith("/a: 60 of 1,200 chunks, ")
    assert [one.get_xlabel() for one in (sizes, times)] == ["axis 1 (chunks)"] * 2
    bars = [one for one in sizes.figure.axes if one not in (sizes, times)]
    units = [bar.get_ylabel() for bar in bars]
    assert units == ["bytes in a chunk", "last changed (UTC)"]
    assert not is_blank(sizes.figure)
    (changed,) = repo.diff("main", "side").plot()
    assert changed.get_title(loc="left") == "/a: 30 of 1,200 chunks"
    assert not is_blank(changed.figure)
    (words,) = repo.diff("main", "main").plot()
    assert words.texts[0].get_text() == "no changes"
    assert not is_blank(words.figure)
    for nothing in ((), (0, 3)):
        with repo.transaction(message="an array without chunks") as store:
            zarr.create_array(store, name=f"e{len(nothing)}", shape=nothing, dtype="u1")
        empty = repo.readonly_session().plot_chunks(f"e{len(nothing)}")
        assert not is_blank(empty[0].figure)


def test_ids_are_as_short_in_pictures_and_pages_as_in_the_log() -> None:
    numbers = count()

    def random_bytes(size: int) -> bytes:  # all alike but for the fifth byte, as of old ids
        return bytes([7, 7, 7, 7, next(numbers) % 256]).ljust(size, b"x")[:size]

    repo = zm.create(MemoryStorage(), runtime=replace(SYSTEM, random_bytes=random_bytes))
    for at in range(3):
        put(repo, "main", "a", at)
    short = [*short_ids(info.id for info in repo.ancestry()).values()]
    assert min(map(len, short)) > 8
    assert [resolved(repo, each) for each in short] == [info.id for info in repo.ancestry()]
    told = {text.get_text() for text in repo.ancestry().plot().texts}
    html = repo.ancestry()._repr_html_()
    for each in short:
        assert each in told
        assert f"<code>{each}</code>" in html


def test_the_axes_of_a_difference_have_the_names_of_the_later_version() -> None:
    repo = zm.create(MemoryStorage())
    for names in (("old", "x"), ("time", None)):
        with repo.transaction(message="make t") as store:
            made = zarr.create_array(
                store,
                name="t",
                shape=(4, 6),
                chunks=(2, 2),
                dtype="i4",
                dimension_names=names,
                overwrite=True,
            )
            made[:] = 1
    diff = repo.diff("main~1", "main")
    assert diff.dimensions == {"/t": ("time", None)}
    (axes,) = diff.plot()
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("time (chunks)", "axis 1 (chunks)")


def test_pictures_of_very_much_have_few_marks() -> None:
    commits = [Fake(i, i - 1 if i else None, i) for i in range(3000)]
    axes = draw_history(drawn(commits, [2999, 17], rows=40))
    assert len(axes.lines) + len(axes.collections) + len(axes.texts) < 400
    folding = Folding.of((1000, 1000), 96)
    whole = folding.whole
    found = ChunkMap("/a", ("y", "x"), folding, whole, 7 * whole, whole * 10**9, 5)
    sizes, times = draw_chunks(found)
    cells = [mesh.get_array().size for one in (sizes, times) for mesh in one.collections]
    assert cells == [96 * 96] * 2
    coords = np.array(list(np.ndindex(300, 300)), np.int64)
    axes = draw_diff("much", "", {f"/{i}": coords for i in range(50)}, {"/0": (1000, 1000)}, {})
    assert len(axes) == 6
    assert "44 more arrays" in axes[0].figure.get_suptitle()


def test_hostile_names_are_only_text_in_a_picture() -> None:
    evil = "$\\frac{\x1b[2J\u202e$ <b>"
    commits = [Fake(0, None, 0, message=evil, kind=evil)]
    refs = RefName("branch", evil), RefName("tag", evil)
    rows = tuple(replace(row, refs=refs) for row in drawn(commits, [0]))
    axes = draw_history(rows)
    folding = Folding.of((4, 4), 96)
    some = folding.place(np.array([[1, 1], [2, 3]]))
    chunks = draw_chunks(ChunkMap(evil, (evil, None), folding, some, some, some, 0))
    changed = draw_diff(
        "title", evil, {evil: np.array([[1, 1]])}, {evil: (4, 4)}, {evil: (evil, None)}
    )
    none = draw_diff("title", evil, {}, {}, {})
    for figure in (axes.figure, chunks[0].figure, changed[0].figure, none[0].figure):
        assert not is_blank(figure)
        for text in figure.findobj(matplotlib.text.Text):
            assert all(line.isprintable() for line in text.get_text().split("\n"))


def test_without_matplotlib_each_call_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    repo = zm.create(MemoryStorage())
    put(repo, "main", "a", 3)
    session, diff = repo.readonly_session(), repo.diff("main~1", "main")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    calls = {
        "ancestry().plot()": repo.ancestry().plot,
        "plot_chunks()": lambda: session.plot_chunks("a"),
        "diff.plot()": diff.plot,
    }
    for what, call in calls.items():
        with pytest.raises(ImportError) as error:
            call()
        assert str(error.value).startswith(f"{what} needs matplotlib")
        assert 'pip install "zarr-manifests[plot]"' in str(error.value)


def test_a_blank_picture_is_found() -> None:
    figure, axes = pyplot.subplots()
    axes.set_axis_off()
    assert is_blank(figure)
    assert is_blank(pyplot.figure())
    axes.plot([0, 1], [1, 0])
    assert not is_blank(figure)
    figure, axes = pyplot.subplots()  # a frame alone is no picture
    assert is_blank(figure)
    axes.imshow(np.ones((4, 4)), extent=(-1, 2, -1, 2), aspect="auto")
    assert is_blank(figure)
