"""The stream of the cells that commits add: each once, through restarts, and never a part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadAllAvailable

import zarr_manifests as zm
from effort import examples
from inside import root_of
from zarr_manifests import Repository
from zarr_manifests.errors import HistoryExpiredError, InvalidArgumentError
from zarr_manifests.repository import context_of
from zarr_manifests.spark.plan import ReadOptions, SparkFacts, plan_read
from zarr_manifests.spark.stream import ChangeStream, StreamOptions

NOW = timedelta(0)


def append(repo: Repository, count: int = 2, value: float = 0, branch: str = "main") -> str:
    """Append steps of a field; chunks have three steps, so that appends share them."""
    shape = (count, 4)
    with repo.transaction(branch, message=f"append {count}") as store:
        first = (
            0 if "t" not in zarr.open_group(store) else zarr.open_array(store, path="t").shape[0]
        )
        values = value + first + np.arange(count * 4).reshape(shape) / 100
        ds = xr.Dataset(
            {"a": (("t", "x"), values), "b": (("t", "x"), -values)},
            {"t": np.arange(first, first + count), "x": np.arange(4) * 10.0},
        )
        if first:
            ds.to_zarr(store, append_dim="t", consolidated=False, safe_chunks=False)
        else:
            chunks = {name: {"chunks": (3, 2)} for name in "ab"}
            ds.to_zarr(store, mode="a", consolidated=False, encoding=chunks)
    return repo.list_branches()[branch]


@pytest.fixture
def repo(tmp_path: Path) -> Repository:
    made = zm.create(tmp_path / "repo")
    append(made, 2)
    return made


def stream(repo: Repository, options: ReadOptions | None = None, **given: Any) -> ChangeStream:
    job = plan_read(repo, options or ReadOptions(), SparkFacts())
    return ChangeStream(repo, job, StreamOptions(**given))


def cells_of(
    reader: ChangeStream, start: dict[str, Any], end: dict[str, Any]
) -> list[tuple[int, float]]:
    """The cells of a batch, by their coordinates."""
    return [
        (row["t"], row["x"])
        for partition in reader.partitions(start, end)
        for batch in reader.read(partition)
        for row in batch.to_pylist()
    ]


def steps_of(reader: ChangeStream, start: dict[str, Any], end: dict[str, Any]) -> list[int]:
    """How often each step occurs in a batch, from the first step on."""
    counts = Counter(step for step, _ in cells_of(reader, start, end))
    return [counts[step] for step in range(max(counts, default=-1) + 1)]


def drained(reader: ChangeStream, start: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The ends of all batches from an offset on."""
    while (end := reader.latestOffset(start, reader.getDefaultReadLimit())) != start:
        yield end
        start = end


def read_to_now(repo: Repository, **given: Any) -> tuple[ChangeStream, dict[str, Any]]:
    """A stream that has read what there is, and its offset then."""
    reader = stream(repo, **given)
    (end,) = drained(reader, reader.initialOffset())
    reader.stop()
    return reader, end


def test_batches_have_as_many_commits_as_they_may(repo: Repository) -> None:
    ids = [append(repo, 3) for _ in range(5)]
    reader = stream(repo, starting_snapshot="main", max_commits_per_trigger=2)
    own = {"repository": context_of(repo).repository_id, "stream": "5"}
    start = own | {"snapshot": ids[0], "begun": ids[0], "first": False}
    found = [end["snapshot"] for end in drained(reader, start)]
    assert found == [ids[2], ids[4]]
    reader.stop()


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 4)),
        st.tuples(st.just("room"), st.just(0)),
        st.tuples(st.just("overwrite"), st.integers(0, 20)),
        st.tuples(st.just("compact"), st.integers(0, 2)),
        st.tuples(st.just("run"), st.integers(1, 3)),
        st.tuples(st.just("crash"), st.integers(1, 3)),
    ),
    min_size=1,
    max_size=10,
)


@dataclass
class Runs:
    """A query without Spark: its log of offsets, and how often each cell was delivered."""

    repo: Repository
    options: dict[str, Any]
    log: list[dict[str, Any]] = field(default_factory=list)
    cells: Counter[tuple[int, float]] = field(default_factory=Counter)

    def run(self, most: int, *, crashed: bool) -> None:
        """Start again, after a crash that lost the last batch, and read what there is."""
        reader = stream(self.repo, max_commits_per_trigger=most, **self.options)
        first = reader.initialOffset()
        if crashed and self.log:
            before = self.log[-2] if len(self.log) > 1 else first
            delivered = cells_of(reader, before, self.log[-1])
            self.cells.subtract(delivered)
            if most == 1:
                self.log.pop()  # where it ended is lost too
            else:
                self.cells.update(delivered)
        for end in drained(reader, self.log[-1] if self.log else first):
            self.cells.update(cells_of(reader, self.log[-1] if self.log else first, end))
            self.log.append(end)
            reader.commit(end)
        reader.stop()


def change(repo: Repository, what: str, i: int) -> None:
    if what == "append":
        append(repo, i)
    elif what == "compact":
        repo.compact("main", ("minor", "major", "full")[i])
    else:
        with repo.transaction(message=what) as store:
            arrays = [zarr.open_array(store, path=name) for name in "ab"]
            size = arrays[0].shape[0]
            if what == "overwrite":
                arrays[0][i % size] = -1.0
                return
            for array in (*arrays, zarr.open_array(store, path="t")):
                array.resize((size + 3, *array.shape[1:]))  # room that later commits write to
            zarr.open_array(store, path="t")[size:] = np.arange(size, size + 3)


@settings(max_examples=examples(25))
@given(_STEPS, st.booleans())
def test_batches_are_the_final_table_whatever_comes(
    steps: list[tuple[str, int]], from_the_first_commit: bool
) -> None:
    with TemporaryDirectory() as place:
        repo = zm.create(f"{place}/repo")
        begun = repo.list_branches()["main"] if from_the_first_commit else None
        append(repo, 2)
        how = {"streaming_overwrite_mode": "added-only", "starting_snapshot": begun}
        runs = Runs(repo, how)
        for what, i in steps:
            if what in ("run", "crash"):
                runs.run(i, crashed=what == "crash")
            else:
                change(repo, what, i)
        runs.run(3, crashed=False)
        assert set(runs.cells.values()) <= {0, 1}
        found = {cell for cell, count in runs.cells.items() if count}
        assert found == stored_cells(repo)


def stored_cells(repo: Repository) -> set[tuple[int, float]]:
    """The cells in stored chunks of the head, by their coordinates."""
    session = repo.readonly_session()
    size = zarr.open_array(session.store, path="a", mode="r").shape[0]
    return {
        (t, x * 10.0)
        for name in "ab"
        for i, j in session.chunk_refs(name).coords.tolist()
        for t in range(i * 3, min(i * 3 + 3, size))
        for x in range(j * 2, j * 2 + 2)
    }


def test_available_now_ends_at_what_was_the_head(repo: Repository) -> None:
    reader = stream(repo, max_commits_per_trigger=1)
    start = reader.initialOffset()
    middle = append(repo, 1)
    reader.prepareForTriggerAvailableNow()
    append(repo, 1)
    assert [end["snapshot"] for end in drained(reader, start)] == [middle]
    reader.stop()


def test_a_stream_begins_before_its_variables(tmp_path: Path) -> None:
    repo = zm.create(tmp_path / "other")
    first = repo.list_branches()["main"]
    with repo.transaction(message="nothing yet") as store:
        zarr.create_group(store)
    for _ in range(2):
        append(repo, 2)
    reader = stream(repo, starting_snapshot=first, max_commits_per_trigger=1)
    start, found = reader.initialOffset(), []
    for end in drained(reader, start):
        found.append(steps_of(reader, start, end))
        start = end
    assert found == [[], [4, 4], [0, 0, 4, 4]]
    reader.stop()


def test_an_expired_offset_names_the_first_snapshot_that_is_left(repo: Repository) -> None:
    reader, end = read_to_now(repo)
    assert root_of(repo).leases == ()
    left = append(repo, 1)
    repo.expire_snapshots(keep_last=1)
    for _ in range(2):
        with pytest.raises(HistoryExpiredError, match=f"has expired.*begins at {left}"):
            reader.latestOffset(end, ReadAllAvailable())
        repo.garbage_collect(NOW)


def test_a_tag_keeps_an_offset(repo: Repository) -> None:
    _, end = read_to_now(repo)
    repo.create_tag("read", end["snapshot"])
    append(repo, 3)
    repo.compact(mode="full")
    repo.expire_snapshots(keep_last=1)  # the compaction is all that is left
    append(repo, 2)
    repo.garbage_collect(NOW)
    again = stream(repo)
    (last,) = drained(again, end)
    assert steps_of(again, end, last) == [0, 0, 4, 4, 4, 4, 4]
    assert again.latestOffset(last, ReadAllAvailable()) == last
    again.stop()


def test_what_was_overwritten_since_a_tagged_offset_ends_the_stream(repo: Repository) -> None:
    append(repo, 4)
    reader, end = read_to_now(repo)
    repo.create_tag("read", end["snapshot"])
    change(repo, "overwrite", 0)
    append(repo, 1)
    repo.expire_snapshots(keep_last=1)
    (last,) = drained(reader, end)
    with pytest.raises(InvalidArgumentError, match="overwrote"):
        reader.partitions(end, last)
    reader.stop()


def test_a_branch_that_was_reset_ends_the_stream(repo: Repository) -> None:
    before = repo.list_branches()["main"]
    append(repo, 1)
    reader, end = read_to_now(repo)
    repo.reset_branch("main", before, force=True)
    append(repo, 3)
    with pytest.raises(InvalidArgumentError, match="the branch was reset"):
        reader.latestOffset(end, ReadAllAvailable())
    reader.stop()


def test_offsets_of_others_are_refused(repo: Repository, tmp_path: Path) -> None:
    other = zm.create(tmp_path / "other")
    append(other, 2)
    reader = stream(repo)
    foreign = stream(other).initialOffset()
    with pytest.raises(InvalidArgumentError, match="belongs to a stream of repository"):
        reader.latestOffset(foreign, ReadAllAvailable())
    with pytest.raises(InvalidArgumentError, match="an offset of another source"):
        reader.latestOffset({"index": 3}, ReadAllAvailable())


def test_columns_that_change_end_the_stream(repo: Repository) -> None:
    reader, end = read_to_now(repo, streaming_overwrite_mode="added-only")
    with repo.transaction(message="other type") as store:
        ds = xr.open_zarr(repo.readonly_session().store, consolidated=False).load()
        ds.astype("f4").drop_encoding().to_zarr(store, mode="w", consolidated=False)
    (last,) = drained(reader, end)
    with pytest.raises(InvalidArgumentError, match="the stream has the columns"):
        reader.partitions(end, last)
    reader.stop()


def test_a_where_selects_among_the_cells_that_were_added(repo: Repository) -> None:
    reader = stream(repo, ReadOptions(where="x >= 10 AND a < 2.045"))
    start = reader.initialOffset()
    (end,) = drained(reader, start)
    assert steps_of(reader, start, end) == [3, 3]
    append(repo, 3)
    (last,) = drained(reader, end)
    assert steps_of(reader, end, last) == [0, 0, 3]
    reader.stop()
