"""`write(append_dim=)` looks at the labels that are there: what it leaves, replaces and appends."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import cftime
import dask
import dask.array as da
import numpy as np
import pytest
import xarray as xr
import zarr
from hypothesis import example, given, settings
from hypothesis import strategies as st

import zarr_manifests as zm
from effort import examples, some_or_all
from zarr_manifests.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidArgumentError,
)
from zarr_manifests.planning.conflict.append_labels import AppendPlan
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage import Storage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.testing import CountingStorage, InterruptingStorage, in_order
from zarr_manifests.xarray import stored_group
from zarr_manifests.xarray.appending import Append

ENCODING: dict[Any, Any] = {
    "t": {"chunks": (2, 3)},
    "time": {"units": "hours since 2000-01-01", "dtype": "i8", "chunks": (1000,)},
}


def days(*numbers: int, value: float = 0.0) -> xr.Dataset:
    """Values tell which day of 2024 they are of, and which call they are from."""
    time = np.datetime64("2024-01-01", "ns") + np.array(numbers, int) * np.timedelta64(1, "D")
    t = np.array(numbers, float)[:, None] * 100 + [0.1, 0.2, 0.3] + value
    return xr.Dataset({"t": (("time", "x"), t)}, {"time": time, "x": [1, 2, 3]})


def write(ds: xr.Dataset, where: Any, **how: Any) -> str:
    how = {"message": "a day", "append_dim": "time", "encoding": ENCODING, **how}
    return zm.write(ds, where, **how)


def opened(where: Any, **options: Any) -> xr.Dataset:
    return xr.open_dataset(where, engine="zarr_manifests", **options).load()


def commits(where: Any) -> int:
    return len(list(zm.open(where).ancestry())) - 1


def same(where: Any, *parts: xr.Dataset) -> None:
    expected = xr.concat(parts, "time", data_vars="minimal", join="override")
    xr.testing.assert_equal(opened(where), expected)


# --- once ------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_existing", ["skip", "replace"])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("zarr_format", [3, 2])
@pytest.mark.parametrize("group", [None, "a/b"])
def test_the_same_call_twice_makes_one_commit(
    on_existing: str, chunked: bool, zarr_format: int, group: str | None
) -> None:
    storage = MemoryStorage()
    with zm.create(storage).transaction(message="seed") as store:
        xr.Dataset().to_zarr(store, group=group, zarr_format=zarr_format, consolidated=False)  # type: ignore[call-overload]
    for numbers in ((1, 2, 3), (4, 5), (5, 6)):
        ds = days(*numbers).chunk(time=2) if chunked else days(*numbers)
        before = commits(storage)
        found = {write(ds, storage, on_existing=on_existing, group=group) for _ in "12"}
        assert len(found) == 1
        assert commits(storage) == before + 1
    xr.testing.assert_equal(opened(storage, group=group), days(1, 2, 3, 4, 5, 6))


def test_by_default_the_second_call_is_an_error_and_leaves_nothing() -> None:
    storage = MemoryStorage()
    write(days(1, 2), storage)
    before = sorted(info.key for info in storage.list())
    with pytest.raises(AlreadyExistsError, match=r"2024-01-03 of 'time' is there already"):
        write(days(2, 3), storage)
    assert sorted(info.key for info in storage.list()) == before
    same(storage, days(1, 2))


def test_skip_leaves_what_is_there_and_replace_writes_over_it() -> None:
    for on_existing, value in (("skip", 0.0), ("replace", 9.0)):
        storage = MemoryStorage()
        write(days(1, 2, 3, 4, 5), storage)
        before = commits(storage)
        write(days(6, 4, 2, 1, value=9.0), storage, on_existing=on_existing)
        assert commits(storage) == before + 1
        again = lambda *numbers: days(*numbers, value=value)  # noqa: E731, B023
        same(storage, again(1, 2), days(3), again(4), days(5), days(6, value=9.0))


def test_a_branch() -> None:
    storage = MemoryStorage()
    write(days(1), storage)
    zm.open(storage).create_branch("dev")
    write(days(1, 2), storage, branch="dev", on_existing="skip")
    write(days(3), storage)
    assert opened(storage, version="dev").sizes["time"] == 2
    same(storage, days(1), days(3))


def test_variables_without_the_dimension_are_written_as_by_any_append() -> None:
    """Also where no row is left to append."""
    storage = MemoryStorage()
    write(days(1, 2).assign(m=("x", [1, 2, 3])), storage)
    write(days(1, 2).assign(m=("x", [4, 5, 6])), storage, on_existing="replace")
    assert opened(storage).m.values.tolist() == [4, 5, 6]


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("rows", [(1, 2), (2, 3)])
def test_a_new_variable_cannot_be_written_over_a_part_of_the_rows(
    check: bool, rows: tuple[int, int]
) -> None:
    storage = MemoryStorage()
    write(days(1, 2), storage)
    more = days(*rows, value=1)
    new = more.assign(new=("time", [7.0, 8.0]), other=("y", [1, 2]))
    with pytest.raises(InvalidArgumentError, match=r"'new' does not exist yet"):
        write(new, storage, on_existing="replace", check=check)
    same(storage, days(1, 2))
    write(new.drop_vars("new"), storage, on_existing="replace", check=check)
    assert opened(storage).other.values.tolist() == [1, 2]
    np.testing.assert_array_equal(opened(storage).t[-2:], more.t)


def test_no_rows() -> None:
    for on_existing in ("error", "skip", "replace"):
        storage = MemoryStorage()
        write(days(), storage, on_existing=on_existing)
        assert opened(storage).sizes["time"] == 0
        write(days(1), storage, on_existing=on_existing)
        head = zm.open(storage).readonly_session("main").snapshot_id
        assert write(days(), storage, on_existing=on_existing) == head
        same(storage, days(1))


def test_only_what_differs_is_committed() -> None:
    storage = MemoryStorage()
    write(days(*range(10)), storage, config={"inline-chunk-bytes": 0})
    ds = days(*range(10))
    ds["t"][4] = -1
    head = write(ds, storage, on_existing="replace")
    repository = zm.open(storage)
    old = next(info for info in repository.ancestry() if info.snapshot_id != head).snapshot_id
    found = repository.diff(old, head)
    assert not found.updated
    assert {path: chunks.tolist() for path, chunks in found.chunks.items()} == {"/t": [[2, 0]]}


# --- labels ----------------------------------------------------------------------------------


def labelled(labels: Any) -> xr.Dataset:
    return xr.Dataset({"v": ("k", np.arange(float(len(labels))))}, {"k": ("k", labels)})


NOLEAP = [cftime.DatetimeNoLeap(2001, 2, day) for day in (27, 28)]


@pytest.mark.parametrize(
    ("first", "again", "encoding"),
    [
        ([1, 2], np.array([2, 3], "i2"), {}),
        (["a", "b"], ["b", "c"], {}),
        (np.array(["a", "b"], object), np.array(["b", "ccc"], object), {}),
        # What is rounded when it is stored is found again.
        (np.array([0.1, 0.2], "f4"), [0.2, 0.3], {}),
        ([0.1, 0.2], [0.2, 0.3], {"dtype": "i2", "scale_factor": 0.01, "_FillValue": -1}),
        (
            np.array(["2024-01-01", "2024-01-02T00:10:00.123456789"], "M8[ns]"),
            np.array(["2024-01-02T00:10:00.123456789", "2024-01-03"], "M8[ns]"),
            {"units": "days since 1850-01-01", "dtype": "f8"},
        ),
        (np.array(["2024-01-01", "2024-01-02"], "M8[D]"), ["2024-01-02", "2024-01-03"], {}),
        (np.array(["0101-01-01", "2900-01-02"], "M8[s]"), ["2900-01-02", "2901-01-01"], {}),
        (NOLEAP, [NOLEAP[1], cftime.DatetimeNoLeap(2001, 3, 1)], {}),
        (np.array([1, 2], "m8[h]"), np.array([2, 3], "m8[h]"), {}),
        ([-10.0, -20.0], [-20.0, -30.0], {}),
        ([3.0, np.nan], [np.nan], {}),
    ],
)
@pytest.mark.filterwarnings("ignore::xarray.SerializationWarning")
@pytest.mark.parametrize("zarr_format", [3, 2])
def test_labels_of_all_kinds(first: Any, again: Any, encoding: Any, zarr_format: int) -> None:
    first = np.asarray(first)
    if first.dtype.kind == "M":
        again = np.array(again, "M8[s]" if first.dtype != "M8[ns]" else first.dtype)
        encoding = encoding or {"units": "seconds since 2000-01-01", "dtype": "i8"}
    storage = MemoryStorage()
    with zm.create(storage).transaction(message="seed") as store:
        labelled(first).to_zarr(
            store, encoding={"k": encoding}, zarr_format=zarr_format, consolidated=False
        )  # type: ignore[call-overload]
    with pytest.raises(AlreadyExistsError, match="of 'k' is there already"):
        zm.write(labelled(again), storage, message="again", append_dim="k")
    how: dict[str, Any] = {"message": "again", "append_dim": "k", "on_existing": "skip"}
    head = zm.write(labelled(again), storage, **how)
    assert opened(storage).sizes["k"] == 1 + len(again)
    assert zm.write(labelled(again), storage, **how) == head


def test_a_label_that_comes_twice_once_it_is_stored() -> None:
    storage = MemoryStorage()
    write(days(1), storage, encoding={"time": {"units": "days since 1850-01-01", "dtype": "f8"}})
    ds = days(2, 3)
    ds["time"] = ds.time.values[:1] + np.array([0, 1], "m8[ns]")
    with pytest.raises(InvalidArgumentError, match="more than once"):
        write(ds, storage, on_existing="skip")


def test_without_an_index_coordinate() -> None:
    storage = MemoryStorage()
    ds = days(1, 2).drop_vars("time")
    for on_existing in ("skip", "replace"):
        with pytest.raises(InvalidArgumentError, match=r"no coordinate of that name.*assign_coord"):
            write(ds, storage, on_existing=on_existing, encoding=None)
    for _ in "12":
        write(ds, storage, encoding=None)
    assert opened(storage).sizes["time"] == 4


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"on_existing": "ignore"}, "on_existing must be one of error, skip, replace"),
        ({"sort": True}, "sort must be 'keep' or None"),
        ({"append_dim": None, "on_existing": "skip"}, "go with append_dim"),
        ({"append_dim": None, "sort": "keep"}, "go with append_dim"),
        ({"region": {"x": slice(0, 1)}, "on_existing": "skip"}, "leave out region"),
    ],
)
def test_wrong_arguments(how: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        write(days(1), MemoryStorage(), **how)


def test_arrays_that_would_be_left_shorter() -> None:
    """Also where no row would be appended."""
    storage = MemoryStorage()
    write(days(1, 2).assign(n=("time", [1, 2])), storage)
    for on_existing in ("skip", "replace"):
        with pytest.raises(InvalidArgumentError, match="'n' would be left shorter"):
            write(days(1, 2), storage, on_existing=on_existing)


# --- order -----------------------------------------------------------------------------------


def test_an_unsorted_append_is_an_error_unless_asked_for() -> None:
    storage = MemoryStorage()
    write(days(5, 6), storage)
    for numbers in ((4,), (8, 7)):
        with pytest.raises(InvalidArgumentError, match="sort='keep'"):
            write(days(*numbers), storage)
    assert commits(storage) == 1
    write(days(4), storage, sort="keep")
    same(storage, days(5, 6, 4))
    with pytest.raises(InvalidArgumentError, match="is not sorted already"):
        write(days(9), storage)
    write(days(9, 8, 4), storage, sort="keep", on_existing="skip")
    same(storage, days(5, 6, 4, 9, 8))
    # Nothing that is there is in the wrong place.
    write(days(9, 8, 4, value=1), storage, on_existing="replace")
    same(storage, days(5, 6), days(4, 9, 8, value=1))


def test_a_first_write_that_is_not_sorted() -> None:
    storage = MemoryStorage()
    with pytest.raises(InvalidArgumentError, match="not sorted"):
        write(days(1, 3, 2), storage)
    write(days(3, 2), storage)
    write(days(1, 0), storage)
    same(storage, days(3, 2, 1, 0))


# --- dask ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", ["threads", "elsewhere"])
@pytest.mark.parametrize("blocks", [1, 2, 4, 5])
def test_blocks_are_brought_in_line_with_chunks(scheduler: str, blocks: int, tmp_path: Any) -> None:
    """Whatever rows are left out, and wherever the others go."""
    kind: Any = scheduler if scheduler == "threads" else _elsewhere
    with dask.config.set(scheduler=kind):
        write(days(1, 2, 3, 4, 6, 7, 8), tmp_path, config={"inline-chunk-bytes": 0})
        more = days(*range(2, 15), value=1).chunk(time=blocks)
        kept = (days(1, 2, 3, 4, 6, 7, 8), days(*range(9, 15), value=1))
        more = more.drop_isel(time=3)
        write(more, tmp_path, on_existing="skip")
        same(tmp_path, *kept)
        write(more + 1, tmp_path, on_existing="replace")
        same(tmp_path, days(1), days(2, 3, 4, 6, 7, 8, *range(9, 15), value=2))


def _elsewhere(dsk: Any, keys: Any, **kwargs: Any) -> Any:
    """A scheduler that is not this process's."""
    return dask.get(dsk, keys)


def test_rows_that_are_left_out_are_not_computed() -> None:
    storage = MemoryStorage()
    write(days(1, 2, 3, 4), storage)
    computed: list[int] = []

    def value(block: Any, block_info: Any = None) -> Any:
        computed.append(block_info[0]["chunk-location"][0])
        return block

    ds = days(1, 2, 3, 4, 5, 6).chunk(time=2)
    ds["t"].data = da.map_blocks(value, ds.t.data, dtype=float, meta=np.empty((0, 0)))
    with dask.config.set(scheduler="sync"):
        write(ds, storage, on_existing="skip")
        assert computed == [2]
        write(ds, storage, on_existing="skip")
    assert computed == [2]


def test_labels_are_not_computed_for_good_in_the_dataset_of_the_caller() -> None:
    lazy = xr.Variable("time", da.from_array(np.arange(3), 3))
    ds = xr.Dataset({"v": ("time", [1.0, 2.0, 3.0])})
    ds = ds.assign_coords(xr.Coordinates({"time": lazy}, indexes={}))
    storage = MemoryStorage()
    for _ in "12":
        zm.write(ds, storage, message="a day", append_dim="time", on_existing="skip")
    assert isinstance(ds.variables["time"].data, da.Array)
    assert opened(storage).sizes["time"] == 3


# --- two at once -----------------------------------------------------------------------------

type Other = Callable[[Any], object]


def overtaken(storage: Storage, other: Other) -> zm.Repository:
    """A repository that another writer commits to right before the first swap."""
    due = [other]

    def checkpoint(point: str) -> None:
        if point == "root.swap" and due:
            due.pop()(storage)

    return zm.open(storage, runtime=in_order(checkpoint=checkpoint))


@pytest.mark.parametrize("chunk", [1, 2, 1000])
def test_what_is_there_is_looked_at_again_on_the_tip(chunk: int) -> None:
    """Both open at [1, 2]; 2 and 5 land, then 3 and 5 must not give [1, 2, 5, 3, 5]."""

    def begun(other: Sequence[int]) -> tuple[MemoryStorage, zm.Repository]:
        storage = MemoryStorage()
        encoding = {**ENCODING, "time": {**ENCODING["time"], "chunks": (chunk,)}}
        write(days(1, 2), storage, encoding=encoding)
        return storage, overtaken(
            storage, lambda each: write(days(*other), each, on_existing="skip")
        )

    storage, repository = begun([2, 5])
    with pytest.raises(InvalidArgumentError, match="2024-01-04 after 2024-01-06"):
        write(days(3, 5), repository, on_existing="skip")
    same(storage, days(1, 2, 5))
    write(days(3, 5), repository, on_existing="skip", sort="keep")
    same(storage, days(1, 2, 5, 3))

    storage, repository = begun([2, 5])
    write(days(5, 6, value=1), repository, on_existing="skip")
    same(storage, days(1, 2, 5), days(6, value=1))

    storage, repository = begun([2, 5])
    write(days(5, 6, value=1), repository, on_existing="replace")
    same(storage, days(1, 2), days(5, 6, value=1))

    storage, repository = begun([3, 4])
    with pytest.raises(AlreadyExistsError, match="2024-01-05 of 'time' is there already"):
        write(days(4, 5), repository)
    same(storage, days(1, 2, 3, 4))

    storage, repository = begun([3, 4])
    write(days(5, 6), repository)
    same(storage, days(1, 2, 3, 4, 5, 6))

    storage, repository = begun([4])
    with pytest.raises(InvalidArgumentError, match=r"2024-01-04 after 2024-01-05.*sort='keep'"):
        write(days(3), repository)
    same(storage, days(1, 2, 4))


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("labels", [False, True])
def test_days_of_many_writers_all_land(there: bool, labels: bool) -> None:
    """Each is overtaken by the day before right before it lands, also where nothing is there."""
    storage = MemoryStorage()
    zm.create(storage)

    def land(day: int, where: Any) -> None:
        ds = days(day) if labels else days(day).drop_vars("time")
        zm.write(ds, where, append_dim="time")

    if there:
        land(1, storage)
    other: Other = lambda each: land(2, each)  # noqa: E731
    for day in range(3, 7):
        repository = overtaken(storage, other)
        other = lambda _, day=day, repository=repository: land(day, repository)  # noqa: E731
    other(storage)
    expected = days(*([1] if there else []), 2, 3, 4, 5, 6)
    xr.testing.assert_equal(opened(storage), expected if labels else expected.drop_vars("time"))


@pytest.mark.parametrize("on_existing", ["error", "skip", "replace"])
@some_or_all
def test_the_same_day_by_two_writers_at_every_moment(on_existing: str, every: int) -> None:
    """Also where neither finds a repository that has data."""
    for first in ((1, 2), ()):
        for at in count(1, every):
            below = MemoryStorage()
            zm.create(below)
            if first:
                write(days(*first), below)

            def theirs(below: MemoryStorage = below) -> object:
                return write(days(3, 4), below, on_existing="skip")

            storage = InterruptingStorage(below, theirs, at)
            repository = zm.open(storage, runtime=in_order())
            try:
                write(days(3, 4), repository, on_existing=on_existing)
            except AlreadyExistsError:
                assert on_existing == "error"
            same(below, *([days(*first)] if first else []), days(3, 4))
            assert commits(below) == bool(first) + 1
            if len(storage.ops) < at:
                break
        assert at > 5


def relabel(storage: Any, start: int, *numbers: int) -> None:
    hours = days(*numbers).time.values - np.datetime64("2000-01-01")
    with zm.open(storage).transaction(message="other labels") as store:
        time = zarr.open_array(store, path="time")
        time[start : start + len(numbers)] = hours // np.timedelta64(1, "h")


@pytest.mark.parametrize("on_existing", ["skip", "replace"])
@some_or_all
def test_a_job_that_dies_at_any_moment_and_is_started_again(on_existing: str, every: int) -> None:
    """Also right after its commit has landed, which it does not know."""
    for at in count(1, every):
        below = MemoryStorage()
        write(days(1, 2), below)

        def die() -> None:
            raise KeyboardInterrupt

        storage = InterruptingStorage(below, die, at)
        with suppress(KeyboardInterrupt):
            repository = zm.open(storage, runtime=in_order())
            write(days(2, 3), repository, on_existing=on_existing)
        write(days(2, 3), below, on_existing=on_existing)
        same(below, days(1, 2, 3))
        assert commits(below) == 2
        if len(storage.ops) < at:
            break
    assert at > 5


def test_a_label_that_was_changed_meanwhile() -> None:
    """Chunks of one label, so that the two commits write to no chunk both."""
    storage = MemoryStorage()
    encoding = {"time": {**ENCODING["time"], "chunks": (1,)}, "t": {"chunks": (1, 3)}}
    write(days(1, 2), storage, encoding=encoding)

    def corrected(storage: Any) -> None:
        relabel(storage, 1, 5)

    with pytest.raises(AlreadyExistsError, match="2024-01-06"):
        write(days(5), overtaken(storage, corrected))
    found = opened(storage)
    assert found.time.values.tolist() == days(1, 5).time.values.tolist()

    def back(storage: Any) -> None:
        relabel(storage, 1, 2)

    write(days(5, value=1), overtaken(storage, back), on_existing="replace")
    same(storage, days(1, 2), days(5, value=1))


def test_a_label_that_moved_away_is_not_replaced_where_it_was() -> None:
    storage = MemoryStorage()
    write(days(1, 2), storage)

    def turned(storage: Any) -> None:
        relabel(storage, 0, 2, 1)

    write(days(2, value=1), overtaken(storage, turned), on_existing="replace")
    found = opened(storage)
    assert found.time.values.tolist() == days(2, 1).time.values.tolist()
    expected = [days(2, value=1).t.values[0], days(2).t.values[0]]
    assert found.t.values.tolist() == np.array(expected).tolist()


def test_an_append_that_left_no_chunk_is_seen() -> None:
    """What is all fill value is not stored, so that both commits grow, and write no chunk both."""
    storage = MemoryStorage()
    repository = zm.create(storage)

    def labelled(*labels: int, value: float) -> xr.Dataset:
        return xr.Dataset({"v": ("k", [value] * len(labels))}, {"k": [*labels]})

    def append(where: Any, label: int, value: float) -> str:
        return zm.write(labelled(label, value=value), where, message="append", append_dim="k")

    encoding = {name: {"chunks": (1,)} for name in ("k", "v")}
    zm.write(labelled(-2, -1, value=1.0), repository, message="first", encoding=encoding)
    append(overtaken(storage, lambda each: append(each, 0, np.nan)), 5, 1.0)
    assert opened(storage).k.values.tolist() == [-2, -1, 0, 5]
    np.testing.assert_array_equal(opened(storage).v, [1, 1, np.nan, 1])


def test_what_else_others_commit_is_not_in_the_way() -> None:
    """The rows are written once."""
    storage = MemoryStorage()
    write(days(1, 2), storage)
    for number, on_existing in enumerate(("error", "skip", "replace")):
        calls: list[int] = []

        def counted(block: Any, calls: list[int] = calls) -> Any:
            calls.append(1)
            return block

        def aside(storage: Any, number: int = number) -> None:
            write(days(1), storage, group=f"aside{number}")

        ds = days(2, 3) if on_existing == "replace" else days(3 + number)
        data = da.from_array(ds.t.values, (-1, -1))
        ds["t"].data = da.map_blocks(counted, data, dtype=float, meta=np.empty((0, 0)))
        with dask.config.set(scheduler="sync"):
            write(ds, overtaken(storage, aside), on_existing=on_existing)
        assert len(calls) == 1
    assert opened(storage).sizes["time"] == 4


def test_relocated_or_written_again() -> None:
    """Where whole chunks shift, what was computed is kept; else it is computed again."""
    for theirs, times in (((3, 4), 1), ((3,), 2)):
        storage = MemoryStorage()
        write(days(1, 2), storage)
        calls: list[int] = []

        def counted(block: Any, calls: list[int] = calls) -> Any:
            calls.append(1)
            return block

        ds = days(7, 8)
        data = da.from_array(ds.t.values, (-1, -1))
        ds["t"].data = da.map_blocks(counted, data, dtype=float, meta=np.empty((0, 0)))
        with dask.config.set(scheduler="sync"):
            other = lambda each: write(days(*theirs), each)  # noqa: B023, E731
            write(ds, overtaken(storage, other))
        assert len(calls) == times
        same(storage, days(1, 2, *theirs, 7, 8))


def test_attempts_are_bounded() -> None:
    storage = MemoryStorage()
    write(days(1, 2), storage)
    after = iter(range(3, 100))

    def checkpoint(point: str) -> None:
        if point == "root.swap":
            write(days(next(after)), storage)

    runtime = in_order(checkpoint=checkpoint)
    repository = zm.open(storage, {"commits": {"attempts": 3}}, runtime=runtime)
    with pytest.raises(ConflictError, match="along 'time'"):
        write(days(100), repository, on_existing="skip")
    assert next(after) < 20


def test_one_of_two_threads_appends_a_day() -> None:
    storage = MemoryStorage()
    write(days(0), storage)
    found: list[str] = []
    for number in range(1, 6):
        SYSTEM.parallel(
            [
                lambda number=number: found.append(write(days(number), storage, on_existing="skip"))  # type: ignore[misc]
                for _ in "12"
            ]
        )
    same(storage, days(*range(6)))
    assert commits(storage) == 6
    assert len(set(found)) == 5


# --- cost ------------------------------------------------------------------------------------


def _unseen(planned: AppendPlan, *_: Any) -> AppendPlan:
    return planned


def test_looking_costs_a_request_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the coordinate is small, none: it comes with the snapshot."""
    for length, more in ((10, 0), (5000, 1)):
        storage = MemoryStorage()
        write(days(*range(length)), storage, encoding={**ENCODING, "time": {"chunks": (10_000,)}})
        counting = CountingStorage(storage)
        with monkeypatch.context() as patched:
            plan = partial(_unseen, AppendPlan(length, (0,)))
            patched.setattr(Append, "plan", staticmethod(plan))
            write(days(length), counting)
        without = counting.requests, counting.rounds()
        counting.reset()
        write(days(length + 1), counting)
        assert counting.requests <= without[0] + more
        assert counting.rounds() <= without[1] + more
        counting.reset()
        write(days(length + 1), counting, on_existing="skip")
        assert {r.op for r in counting.log} <= {"head", "get", "get_tagged", "get_ranges"}


def test_an_append_parses_no_document_that_the_append_before_has_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one parses each once, for what looks at the group and for what writes."""
    monkeypatch.setattr(stored_group, "_PARSED", {})
    storage, both = MemoryStorage(), {name: ("time", [1.0]) for name in "tuv"}
    write(xr.Dataset(both, {"time": [0]}), storage, encoding={})
    arrays, made = Counter[str](), zarr.Array.from_dict

    def from_dict(where: Any, fields: Any) -> Any:
        arrays.update([where.path])
        return made(where, fields)

    monkeypatch.setattr(zarr.Array, "from_dict", from_dict)
    write(xr.Dataset(both, {"time": [1]}), storage, encoding={})
    assert arrays == {"t": 1, "time": 1}  # the others have the same document
    for day in (2, 3):
        write(xr.Dataset(both, {"time": [day]}), storage, encoding={})
    assert arrays.total() == 2
    assert opened(storage).time.values.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("side", [1, 200])
def test_an_append_takes_no_turn_of_zarrs_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: int, zarr_format: int
) -> None:
    """Nothing on a disk has to be awaited: chunks and labels are read and written in the call."""

    def day(number: int) -> xr.Dataset:
        values = np.full((1, side, side), number, np.float32)
        every = dict.fromkeys("tuv", (("time", "y", "x"), values))
        labels = {"time": [np.datetime64("2000-01-01", "ns") + np.timedelta64(number, "D")]}
        return xr.Dataset(every, {**labels, "y": np.arange(side), "x": np.arange(side)})

    repo, turns = zm.create(tmp_path), Counter[str]()
    with repo.transaction(message="a group") as store:
        zarr.create_group(store, zarr_format=zarr_format)
    zm.write(day(0), repo, message="first", mode="a")
    submit = asyncio.run_coroutine_threadsafe

    def counted(coroutine: Any, loop: Any) -> Any:
        turns.update([coroutine.__qualname__])
        return submit(coroutine, loop)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", counted)
    zm.write(day(1), repo, message="second", append_dim="time")
    assert turns == {}
    monkeypatch.undo()
    with xr.open_dataset(repo, engine="zarr_manifests") as found:
        xr.testing.assert_equal(
            found.load(), xr.concat([day(0), day(1)], "time", data_vars="minimal")
        )


# --- a model ---------------------------------------------------------------------------------

type State = dict[int, int]
"""By label, in order: the call that its values are from."""
type Call = tuple[list[int], str, str | None]
"""Labels, `on_existing`, `sort`."""

CALLS = st.tuples(
    st.lists(st.integers(0, 8), max_size=5),
    st.sampled_from(["error", "skip", "replace"]),
    st.sampled_from([None, "keep"]),
)


def after(there: State, call: Call, number: int) -> State | None:
    """What is there after a call; None if it is an error."""
    labels, on_existing, sort = call
    new = [label for label in labels if label not in there]
    if len({*labels}) < len(labels) or (on_existing == "error" and len(new) < len(labels)):
        return None
    result = [*there, *new]
    ends = [part[-1] - part[0] for part in ([*there], new) if part]
    descends = next((end < 0 for end in ends if end), False)
    if sort is None and new and result != sorted(result, reverse=descends):
        return None
    written = labels if on_existing == "replace" else new
    return {label: number if label in written else there[label] for label in result}


def make(where: Any, call: Call, number: int, blocks: int | None = None, **how: Any) -> str:
    labels, on_existing, sort = call
    ds = days(*labels, value=number)
    ds = ds.chunk(time=blocks) if blocks else ds
    return write(ds, where, on_existing=on_existing, sort=sort, **how)


def holds(where: Any, state: State) -> bool:
    found = opened(where)
    expected = [days(label, value=number) for label, number in state.items()]
    return found.equals(xr.concat(expected, "time", data_vars="minimal", join="override"))


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(st.tuples(CALLS, st.sampled_from([None, 1, 2, 3])), min_size=1, max_size=6),
    st.sampled_from(["threads", "elsewhere"]),
)
def test_any_calls(calls: list[tuple[Call, int | None]], scheduler: Any) -> None:
    storage = MemoryStorage()
    repository = zm.create(storage)
    state: State = {}
    for number, (call, blocks) in enumerate(calls):
        if not state or call[1] == "error":
            blocks = None  # they would have to be in line already
        expected = after(state, call, number)
        before = commits(storage)
        with dask.config.set(scheduler=scheduler if scheduler == "threads" else _elsewhere):
            try:
                make(repository, call, number, blocks)
            except (AlreadyExistsError, InvalidArgumentError):
                assert expected is None
                assert commits(storage) == before
                continue
        assert expected is not None
        if state:
            assert commits(storage) == before + (expected != state)
        state = expected
        if state:
            assert holds(repository, state)


@settings(max_examples=examples(40), deadline=None)
@given(CALLS, CALLS, st.integers(1, 14), st.sampled_from([1, 2, 1000]))
@example(([5, 7], "skip", None), ([4, 7], "skip", None), 6, 1000)
@example(([7, 8], "error", None), ([5, 7], "error", None), 6, 1)
@example(([3], "replace", None), ([5, 6], "error", None), 6, 2)
def test_of_two_at_once_it_is_as_if_one_came_first(
    mine: Call, theirs: Call, at: int, chunk: int
) -> None:
    below = MemoryStorage()
    encoding = {**ENCODING, "time": {**ENCODING["time"], "chunks": (chunk,)}}
    write(days(3, 4), below, encoding=encoding)
    start: State = {3: 0, 4: 0}
    done: list[bool] = []

    def other() -> None:
        try:
            make(below, theirs, 1)
            done.append(True)
        except (AlreadyExistsError, InvalidArgumentError):
            done.append(False)

    storage = InterruptingStorage(below, other, at)
    repository = zm.open(storage, runtime=in_order())
    refused = (AlreadyExistsError, InvalidArgumentError)
    landed = False
    with suppress(*refused):
        make(repository, mine, 2)
        landed = True
    found = []
    for order in ((2, 1), (1, 2)) if done else ((2,),):
        state, made = start, {}
        for number in order:
            result = after(state, mine if number == 2 else theirs, number)
            made[number], state = result is not None, result or state
        found.append((made, state))
    result = {2: landed, **({1: done[0]} if done else {})}
    assert any(result == made and holds(below, state) for made, state in found)
