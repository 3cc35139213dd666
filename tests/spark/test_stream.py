"""The stream of the cells that commits add: each once, through restarts, and never a part."""

from __future__ import annotations

import json
import shutil
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
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxFiles

import zarr_manifests as zm
from effort import examples
from inside import root_of
from zarr_manifests import Repository
from zarr_manifests.error_cases import HistoryExpiredError
from zarr_manifests.errors import InvalidArgumentError, SnapshotExpiredError
from zarr_manifests.repository import context_of
from zarr_manifests.session import initialized_chunks
from zarr_manifests.spark import read, register
from zarr_manifests.spark.plan import ReadOptions, SparkFacts, plan_read
from zarr_manifests.spark.stream import ChangeStream, Offset, StreamOptions

type Row = tuple[Any, ...]
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


def overwrite(repo: Repository, value: float, more: int = 0) -> str:
    """Overwrite the first three steps, and append in the same commit."""
    session = repo.writable_session("main")
    zarr.open_array(session.store, path="a")[:3] = value
    if more:
        size = zarr.open_array(session.store, path="t").shape[0]
        for name in "ab":
            zarr.open_array(session.store, path=name).append(np.full((more, 4), value))
        zarr.open_array(session.store, path="t").append(np.arange(size, size + more))
    return session.commit("overwrite")


@pytest.fixture
def repo(tmp_path: Path, spark: SparkSession) -> Repository:
    register(spark)
    made = zm.create(tmp_path / "repo")
    append(made, 2)
    return made


class Sink:
    """What a stream has delivered, by batch; a batch that comes again replaces the first."""

    def __init__(self, place: Path) -> None:
        self.checkpoint = place / "checkpoint"
        self.batches: dict[int, list[Row]] = {}

    def __call__(self, frame: DataFrame, number: int) -> None:
        self.batches[number] = [tuple(row) for row in frame.collect()]

    @property
    def rows(self) -> list[Row]:
        return sorted(row for batch in self.batches.values() for row in batch)

    def run(self, spark: SparkSession, repo: Repository, **options: Any) -> None:
        """Read what is there now."""
        self.start(spark, repo, **options).awaitTermination()

    def start(
        self, spark: SparkSession, repo: Repository, now: bool = True, **options: Any
    ) -> StreamingQuery:
        named = {name.replace("_", "-"): value for name, value in options.items()}
        frame = spark.readStream.format("zarr_manifests").options(**named).load(repo.storage.url)
        writer = frame.writeStream.foreachBatch(self)
        writer = writer.option("checkpointLocation", str(self.checkpoint))
        when: Any = {"availableNow": True} if now else {"processingTime": "0 seconds"}
        return writer.trigger(**when).start()

    def lose(self, number: int, *, offset: bool = False) -> None:
        """Forget that a batch was delivered, and with `offset` where it ended."""
        for kind in ("commits", "offsets") if offset else ("commits",):
            log = self.checkpoint / kind
            for path in [log / str(number), log / f".{number}.crc"]:
                path.unlink(missing_ok=True)


def leased(repo: Repository) -> list[str]:
    """The snapshots that streams hold a lease on."""
    leases = root_of(repo).leases
    return [lease.snapshot for lease in leases if lease.owner.startswith("Spark stream")]


@pytest.fixture
def sink(tmp_path: Path) -> Sink:
    return Sink(tmp_path)


def table(spark: SparkSession, repo: Repository, **options: Any) -> list[Row]:
    return sorted(tuple(row) for row in read(spark, repo, **options).collect())


# --- with Spark ----------------------------------------------------------------------------------


def test_batches_are_the_final_table_through_restarts_and_lost_batches(
    repo: Repository, spark: SparkSession, sink: Sink
) -> None:
    options = {"streaming_overwrite_mode": "added-only", "max_commits_per_trigger": 2}
    sink.run(spark, repo, **options)
    assert sink.rows == table(spark, repo)
    for count in (2, 1, 3):
        append(repo, count)
    repo.compact("main", "full")
    sink.run(spark, repo, **options)
    assert {number: len(rows) for number, rows in sink.batches.items()} == {0: 8, 1: 12, 2: 12}
    assert sink.rows == table(spark, repo)
    sink.lose(2)
    del sink.batches[2]
    append(repo, 4)
    sink.run(spark, repo, **options)
    assert {number: len(rows) for number, rows in sink.batches.items()} == {
        0: 8, 1: 12, 2: 12, 3: 16
    }  # fmt: skip
    sink.lose(3, offset=True)
    del sink.batches[3]
    append(repo, 1)
    overwrite(repo, 99.0, more=2)
    sink.run(spark, repo, **options)
    assert not [
        row for batch in sink.batches.values() for row in batch if row[2] == 99 and row[0] < 3
    ]
    keys = [row[:2] for row in sink.rows]
    assert len(keys) == len(set(keys))
    assert keys == [row[:2] for row in table(spark, repo)]
    assert leased(repo) == []


def test_the_first_batch_that_is_lost_starts_where_the_stream_began(
    repo: Repository, spark: SparkSession, sink: Sink
) -> None:
    begun = repo.list_branches()["main"]
    repo.create_branch("side", begun)
    append(repo, 2, 5)
    sink.run(spark, repo, starting_snapshot="side")
    first = sink.batches.pop(0)
    assert sorted(first) == [row for row in table(spark, repo) if row[0] >= 2]
    sink.lose(0)
    # The name means another snapshot now.
    repo.reset_branch("side", repo.list_branches()["main"])
    append(repo, 1)
    sink.run(spark, repo, starting_snapshot="side")
    assert sorted(sink.batches[0]) == sorted(first)
    assert sink.rows == [row for row in table(spark, repo) if row[0] >= 2]
    offset = json.loads((sink.checkpoint / "offsets" / "0").read_text().splitlines()[2])
    assert offset.keys() == {"repository", "stream", "snapshot", "begun"}
    assert offset["begun"] == begun
    assert str(repo.storage.url) not in json.dumps(offset)


def test_a_commit_that_overwrites_stops_the_stream_unless_told_otherwise(
    repo: Repository, spark: SparkSession, sink: Sink
) -> None:
    sink.run(spark, repo)
    append(repo, 4)
    bad = overwrite(repo, 9.0, more=1)
    append(repo, 2)
    with pytest.raises(StreamingQueryException, match=f"(?s)commit {bad} .*overwrote 12 cells"):
        sink.run(spark, repo)
    assert list(sink.batches) == [0]
    sink.run(spark, repo, streaming_overwrite_mode="skip")
    steps = Counter(row[0] for row in sink.rows)
    assert steps == dict.fromkeys([0, 1, 2, 3, 4, 5, 7, 8], 4)
    assert not [row for row in sink.rows if row[2] == 9.0]


def test_a_running_stream_keeps_what_it_has_not_read(
    repo: Repository, spark: SparkSession, sink: Sink, tmp_path: Path
) -> None:
    query = sink.start(spark, repo, now=False, keep_for="1h")
    try:
        query.processAllAvailable()
        held = leased(repo)
        assert held == [repo.list_branches()["main"]]
        for _ in range(3):
            append(repo, 1)
        repo.expire_snapshots(keep_last=1)
        repo.garbage_collect(NOW)
        query.processAllAvailable()
        assert sink.rows == table(spark, repo)
        head = repo.list_branches()["main"]
        assert leased(repo) == [head]
    finally:
        query.stop()
    # It is kept for an hour after the end.
    for _ in range(2):
        append(repo, 1)
    repo.expire_snapshots(keep_last=1)
    repo.garbage_collect(NOW)
    assert leased(repo) == [head]
    sink.run(spark, repo)
    assert sink.rows == table(spark, repo)
    assert leased(repo) == []


def test_options_of_streams_and_of_reads_are_apart(
    repo: Repository, spark: SparkSession, sink: Sink
) -> None:
    with pytest.raises(AnalysisException, match="only a stream takes"):
        spark.read.format("zarr_manifests").option("keep-for", "1d").load(repo.storage.url).count()
    with pytest.raises(StreamingQueryException, match="a stream follows a branch"):
        sink.run(spark, repo, version=repo.list_branches()["main"])
    with pytest.raises(AnalysisException, match="expected fail, skip or added-only"):
        sink.run(spark, repo, streaming_overwrite_mode="ignore")
    with pytest.raises(AnalysisException, match="expected a duration"):
        sink.run(spark, repo, keep_for="long")


# --- the reader alone ----------------------------------------------------------------------------


@pytest.fixture
def plain(tmp_path: Path) -> Repository:
    made = zm.create(tmp_path / "plain")
    append(made, 2)
    return made


def stream(repo: Repository, options: ReadOptions | None = None, **given: Any) -> ChangeStream:
    options = options or ReadOptions()
    job = plan_read(repo, options, SparkFacts())
    names = [column.name for column in job.variables]
    return ChangeStream(repo, options, SparkFacts(), StreamOptions(**given), job.schema, names)


def steps_of(reader: ChangeStream, start: dict[str, Any], end: dict[str, Any]) -> list[int]:
    """How often each step occurs in a batch, from the first step on."""
    counts: Counter[int] = Counter()
    for partition in reader.partitions(start, end):
        for batch in reader.read(partition):
            counts.update(batch.column("t").to_pylist())
    return [counts[step] for step in range(max(counts, default=-1) + 1)]


def drained(reader: ChangeStream, start: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The ends of all batches from an offset on."""
    while (end := reader.latestOffset(start, reader.getDefaultReadLimit())) != start:
        yield end
        start = end


def test_batches_have_as_many_commits_and_bytes_as_they_may(plain: Repository) -> None:
    ids = [append(plain, 3) for _ in range(5)]
    reader = stream(plain, starting_snapshot="main", max_commits=2)
    assert isinstance(reader.getDefaultReadLimit(), ReadMaxFiles)
    start = Offset(context_of(plain).repository_id, "5", ids[0], ids[0]).pack()
    found = [Offset.parse(end).snapshot for end in drained(reader, start)]
    assert found == [ids[2], ids[4]]
    assert Offset.parse(reader.latestOffset(start, ReadAllAvailable())).snapshot == ids[4]
    written = next(iter(plain.ancestry())).written["chunk-bytes"]
    reader = stream(plain, max_bytes=3 * written)
    assert isinstance(reader.getDefaultReadLimit(), ReadMaxBytes)
    assert [Offset.parse(end).snapshot for end in drained(reader, start)] == [ids[3], ids[4]]
    reader = stream(plain, max_bytes=1)
    assert [Offset.parse(end).snapshot for end in drained(reader, start)] == ids[1:]
    assert isinstance(stream(plain).getDefaultReadLimit(), ReadAllAvailable)
    for each in (reader, reader):
        each.stop()


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
    max_size=12,
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
        reader = stream(self.repo, max_commits=most, **self.options)
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


@settings(max_examples=examples(40))
@given(_STEPS, st.booleans(), st.sampled_from(["added-only", "added-only", "skip"]))
def test_batches_are_the_final_table_whatever_comes(
    steps: list[tuple[str, int]], from_the_first_commit: bool, mode: str
) -> None:
    with TemporaryDirectory() as place:
        repo = zm.create(f"{place}/repo")
        begun = repo.list_branches()["main"] if from_the_first_commit else None
        append(repo, 2)
        runs = Runs(repo, {"overwrite_mode": mode, "starting_snapshot": begun})
        for what, i in steps:
            if what in ("run", "crash"):
                runs.run(i, crashed=what == "crash")
            else:
                change(repo, what, i)
        runs.run(3, crashed=False)
        assert set(runs.cells.values()) <= {0, 1}
        found = {cell for cell, count in runs.cells.items() if count}
        expected = stored_cells(repo)
        assert found <= expected
        if mode == "added-only" or "overwrite" not in dict(steps):
            assert found == expected


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


def stored_cells(repo: Repository) -> set[tuple[int, float]]:
    """The cells in stored chunks of the head, by their coordinates."""
    session = repo.readonly_session()
    size = zarr.open_array(session.store, path="a", mode="r").shape[0]
    return {
        (t, x * 10.0)
        for name in "ab"
        for i, j in initialized_chunks(session, name).tolist()
        for t in range(i * 3, min(i * 3 + 3, size))
        for x in range(j * 2, j * 2 + 2)
    }


def test_available_now_ends_at_what_was_the_head(plain: Repository) -> None:
    reader = stream(plain, max_commits=1)
    start = reader.initialOffset()
    middle = append(plain, 1)
    reader.prepareForTriggerAvailableNow()
    append(plain, 1)
    assert [Offset.parse(end).snapshot for end in drained(reader, start)] == [middle]
    end = Offset(context_of(plain).repository_id, "5", middle, None).pack()
    assert reader.latestOffset(end, ReadAllAvailable()) == end
    reader.stop()


def test_compactions_make_no_batch(plain: Repository) -> None:
    reader = stream(plain)
    (end,) = drained(reader, reader.initialOffset())
    plain.compact("main", "full")
    assert reader.latestOffset(end, ReadAllAvailable()) == end
    append(plain, 2)
    plain.compact("main", "full")
    (last,) = drained(reader, end)
    assert steps_of(reader, end, last) == [0, 0, 4, 4]
    reader.stop()


def test_a_stream_begins_before_its_variables(plain: Repository, tmp_path: Path) -> None:
    repo = zm.create(tmp_path / "other")
    reader = None
    first = repo.list_branches()["main"]
    with repo.transaction(message="nothing yet") as store:
        zarr.create_group(store)
    for _ in range(2):
        append(repo, 2)
    reader = stream(repo, starting_snapshot=first, max_commits=1)
    start, found = reader.initialOffset(), []
    for end in drained(reader, start):
        found.append(steps_of(reader, start, end))
        start = end
    assert found == [[], [4, 4], [0, 0, 4, 4]]
    reader.stop()


def test_an_expired_offset_names_the_first_snapshot_that_is_left(plain: Repository) -> None:
    reader = stream(plain)
    (end,) = drained(reader, reader.initialOffset())
    reader.stop()
    assert leased(plain) == []
    left = append(plain, 1)
    for collected in (False, True):
        plain.expire_snapshots(keep_last=1)
        if collected:
            plain.garbage_collect(NOW)
        with pytest.raises(HistoryExpiredError, match=f"has expired.*begins at {left}"):
            reader.latestOffset(end, ReadAllAvailable())
        with pytest.raises(HistoryExpiredError, match=f"has expired.*begins at {left}"):
            reader.partitions(end, Offset(context_of(plain).repository_id, "5", left, None).pack())


@pytest.mark.parametrize("mode", ["fail", "skip", "added-only"])
def test_a_tag_keeps_an_offset(plain: Repository, mode: str) -> None:
    reader = stream(plain, overwrite_mode=mode)
    (end,) = drained(reader, reader.initialOffset())
    reader.stop()
    plain.create_tag("read", Offset.parse(end).snapshot)
    append(plain, 3)
    plain.compact(mode="full")
    plain.expire_snapshots(keep_last=1)  # the compaction is all that is left
    append(plain, 2)
    plain.garbage_collect(NOW)
    again = stream(plain, overwrite_mode=mode)
    (last,) = drained(again, end)
    assert steps_of(again, end, last) == [0, 0, 4, 4, 4, 4, 4]
    assert again.latestOffset(last, ReadAllAvailable()) == last
    again.stop()
    plain.delete_tag("read")
    plain.expire_snapshots(keep_last=1)
    with pytest.raises(HistoryExpiredError, match="keep-for or a tag"):
        again.latestOffset(end, ReadAllAvailable())


def test_what_was_overwritten_since_a_tagged_offset_ends_the_stream(plain: Repository) -> None:
    append(plain, 4)
    reader = stream(plain)
    (end,) = drained(reader, reader.initialOffset())
    reader.stop()
    plain.create_tag("read", Offset.parse(end).snapshot)
    overwrite(plain, 9.0, more=1)
    plain.expire_snapshots(keep_last=1)
    (last,) = drained(reader, end)
    with pytest.raises(InvalidArgumentError, match="overwrote"):
        reader.partitions(end, last)
    reader.stop()


def test_a_branch_that_was_reset_ends_the_stream(plain: Repository) -> None:
    before = plain.list_branches()["main"]
    append(plain, 1)
    reader = stream(plain)
    (end,) = drained(reader, reader.initialOffset())
    plain.create_branch("side")
    plain.reset_branch("main", before, force=True)
    append(plain, 3)
    with pytest.raises(InvalidArgumentError, match="the branch was reset"):
        reader.latestOffset(end, ReadAllAvailable())
    plain.delete_branch("side")
    plain.garbage_collect(NOW)
    with pytest.raises((InvalidArgumentError, SnapshotExpiredError)):
        reader.latestOffset(end, ReadAllAvailable())
    reader.stop()


def test_offsets_of_others_are_refused(plain: Repository, tmp_path: Path) -> None:
    other = zm.create(tmp_path / "other")
    append(other, 2)
    reader = stream(plain)
    foreign = stream(other).initialOffset()
    with pytest.raises(InvalidArgumentError, match="belongs to a stream of repository"):
        reader.latestOffset(foreign, ReadAllAvailable())
    with pytest.raises(InvalidArgumentError, match="an offset of another source"):
        reader.latestOffset({"index": 3}, ReadAllAvailable())


def test_columns_that_change_end_the_stream(plain: Repository) -> None:
    reader = stream(plain, overwrite_mode="added-only")
    (end,) = drained(reader, reader.initialOffset())
    with plain.transaction(message="other type") as store:
        ds = xr.open_zarr(plain.readonly_session().store, consolidated=False).load()
        ds.astype("f4").drop_encoding().to_zarr(store, mode="w", consolidated=False)
    (last,) = drained(reader, end)
    with pytest.raises(InvalidArgumentError, match="the stream has the columns"):
        reader.partitions(end, last)
    reader.stop()


def test_a_stream_of_another_branch(plain: Repository) -> None:
    plain.create_branch("side")
    reader = stream(plain, ReadOptions(version="side", variables=["b"], ranges={"x": (0, 10)}))
    start = reader.initialOffset()
    (end,) = drained(reader, start)
    assert steps_of(reader, start, end) == [2, 2]
    append(plain, 1)
    assert reader.latestOffset(end, ReadAllAvailable()) == end
    append(plain, 2, branch="side")
    (last,) = drained(reader, end)
    assert steps_of(reader, end, last) == [0, 0, 2, 2]
    assert leased(plain) == [Offset.parse(end).snapshot]
    reader.commit(last)
    assert leased(plain) == [Offset.parse(last).snapshot]
    reader.stop()
    assert leased(plain) == []


def test_a_where_selects_among_the_cells_that_were_added(plain: Repository) -> None:
    reader = stream(plain, ReadOptions(where="x >= 10 AND a < 2.045"))
    start = reader.initialOffset()
    (end,) = drained(reader, start)
    assert steps_of(reader, start, end) == [3, 3]
    append(plain, 3)
    (last,) = drained(reader, end)
    assert steps_of(reader, end, last) == [0, 0, 3]
    reader.stop()
    whole = stream(plain, ReadOptions(layout="chunk"))
    with pytest.raises(InvalidArgumentError, match="only read takes layout='chunk'"):
        whole.partitions(start, end)
    whole.stop()


def test_a_place_that_cannot_be_written_is_streamed_without_lease(
    plain: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zarr_manifests.error_cases import UnsupportedStorageError

    def refuse(*_: Any, **__: Any) -> Any:
        raise UnsupportedStorageError("read only")

    reader = stream(plain)
    monkeypatch.setattr(Repository, "lease", refuse)
    start = reader.initialOffset()
    (end,) = drained(reader, start)
    assert steps_of(reader, start, end) == [4, 4]
    shutil.rmtree(tmp_path / "other", ignore_errors=True)
