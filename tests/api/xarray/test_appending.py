"""`write(append_dim=)` looks at the labels that are there: what it leaves, replaces and appends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import dask
import numpy as np
import pytest
import xarray as xr
import zarr
from hypothesis import example, given, settings
from hypothesis import strategies as st

import zarr_manifests as zm
from effort import examples
from in_order import in_order
from looking import messages, opened
from storages import InterruptingStorage
from zarr_manifests.errors import AlreadyExistsError, ConflictError, InvalidArgumentError
from zarr_manifests.storage import Storage
from zarr_manifests.storage.memory import MemoryStorage

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


def same(where: Any, *parts: xr.Dataset) -> None:
    expected = xr.concat(parts, "time", data_vars="minimal", join="override")
    xr.testing.assert_equal(opened(where), expected)


# --- once ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on_existing", "chunked", "zarr_format", "group"),
    [("skip", False, 3, None), ("replace", True, 3, "a/b"), ("replace", False, 2, None)],
)
def test_the_same_call_twice_makes_one_commit(
    on_existing: str, chunked: bool, zarr_format: int, group: str | None
) -> None:
    storage = MemoryStorage()
    with zm.create(storage).transaction(message="seed") as store:
        xr.Dataset().to_zarr(store, group=group, zarr_format=zarr_format, consolidated=False)  # type: ignore[call-overload]
    for numbers in ((1, 2, 3), (4, 5), (5, 6)):
        ds = days(*numbers).chunk(time=2) if chunked else days(*numbers)
        before = len(messages(storage))
        found = {write(ds, storage, on_existing=on_existing, group=group) for _ in "12"}
        assert len(found) == 1
        assert len(messages(storage)) == before + 1
    xr.testing.assert_equal(opened(storage, group=group), days(1, 2, 3, 4, 5, 6))


def test_only_what_differs_is_committed() -> None:
    storage = MemoryStorage()
    write(days(*range(10)), zm.create(storage, {"inline-chunk-bytes": 0}))
    ds = days(*range(10))
    ds["t"][4] = -1
    head = write(ds, storage, on_existing="replace")
    repository = zm.open(storage)
    old = next(info for info in repository.ancestry() if info.snapshot_id != head).snapshot_id
    found = repository.diff(old, head)
    assert not found.updated
    assert {path: chunks.tolist() for path, chunks in found.chunks.items()} == {"/t": [[2, 0]]}


@pytest.mark.parametrize(
    "how", [{"region": {"time": slice(4, 6)}}, {"append_dim": "time", "on_existing": "replace"}]
)
def test_a_damaged_chunk_is_mended_by_writing_it_again(how: dict[str, Any]) -> None:
    storage = MemoryStorage()
    write(days(*range(10)), zm.create(storage, {"inline-chunk-bytes": 8, "pack-chunk-bytes": 1}))
    head = zm.open(storage).readonly_session()
    (key,) = head.chunk_refs("t", cells=[(4, 6), (0, 3)]).locations
    storage.put(key, bytes(len(storage.get(key))))
    ds = days(4, 5).drop_vars("x") if "region" in how else days(4, 5)
    zm.write(ds, storage, message="mend", **how)
    same(storage, days(*range(10)))


# --- two at once -----------------------------------------------------------------------------

type Other = Callable[[Any], object]


def overtaken(storage: Storage, other: Other) -> zm.Repository:
    """A repository that another writer commits to right before the first swap."""
    due = [other]

    def checkpoint(point: str) -> None:
        if point == "root.swap" and due:
            due.pop()(storage)

    return zm.open(storage, runtime=in_order(checkpoint=checkpoint))


@pytest.mark.parametrize("chunk", [1, 1000])
def test_what_is_there_is_looked_at_again_on_the_tip(chunk: int) -> None:
    """Both open at [1, 2]; 2 and 5 land, then 3 and 5 must not give [1, 2, 5, 3, 5]."""

    def begun(*other: int) -> tuple[MemoryStorage, zm.Repository]:
        storage = MemoryStorage()
        encoding = {**ENCODING, "time": {**ENCODING["time"], "chunks": (chunk,)}}
        write(days(1, 2), storage, encoding=encoding)
        return storage, overtaken(storage, lambda it: write(days(*other), it, on_existing="skip"))

    storage, repository = begun(2, 5)
    with pytest.raises(InvalidArgumentError, match=r"2024-01-04 after 2024-01-06.*sort='keep'"):
        write(days(3, 5), repository, on_existing="skip")
    same(storage, days(1, 2, 5))
    write(days(3, 5), repository, on_existing="skip", sort="keep")
    same(storage, days(1, 2, 5, 3))

    storage, repository = begun(2, 5)
    write(days(5, 6, value=1), repository, on_existing="skip")
    same(storage, days(1, 2, 5), days(6, value=1))

    storage, repository = begun(2, 5)
    write(days(5, 6, value=1), repository, on_existing="replace")
    same(storage, days(1, 2), days(5, 6, value=1))

    storage, repository = begun(3, 4)
    with pytest.raises(AlreadyExistsError, match="2024-01-05 of 'time' is there already"):
        write(days(4, 5), repository)
    same(storage, days(1, 2, 3, 4))

    storage, repository = begun(3, 4)
    write(days(5, 6), repository)
    same(storage, days(1, 2, 3, 4, 5, 6))


def test_labels_that_others_have_appended_are_not_appended_by_an_open_session() -> None:
    storage = MemoryStorage()
    write(days(1, 2), storage, encoding={**ENCODING, "t": {"chunks": (1, 3)}})
    session = zm.open(storage).writable_session(append_dim="time")
    zm.to_session(days(3, 4), session, append_dim="time", on_existing="skip")
    write(days(3), storage)
    with pytest.raises(ConflictError):
        session.commit("mine")
    same(storage, days(1, 2, 3))


def test_labels_that_are_compared_do_not_count_as_read() -> None:
    storage = MemoryStorage()
    write(days(1, 2, 3), storage)
    session = zm.open(storage).writable_session(isolation="serializable")
    zm.to_session(days(2, value=1)[["t"]], session, append_dim="time", on_existing="replace")
    with zm.open(storage).transaction(message="others") as store:
        zarr.open_array(store, path="x")[:] = [4, 5, 6]
    session.commit("mine")


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


def _elsewhere(dsk: Any, keys: Any, **kwargs: Any) -> Any:
    """A scheduler that is not this process's."""
    return dask.get(dsk, keys)


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
    st.sampled_from(["threads", _elsewhere]),
)
@example([(([3, 5], "error", None), None), (([5, 3], "replace", None), None)], "threads")
def test_any_calls(calls: list[tuple[Call, int | None]], scheduler: Any) -> None:
    storage = MemoryStorage()
    repository = zm.create(storage)
    state: State = {}
    for number, (call, blocks) in enumerate(calls):
        if not state or call[1] == "error":
            blocks = None  # they would have to be in line already
        expected = after(state, call, number)
        before = len(messages(storage))
        with dask.config.set(scheduler=scheduler):
            try:
                make(repository, call, number, blocks)
            except (AlreadyExistsError, InvalidArgumentError):
                assert expected is None
                assert len(messages(storage)) == before
                continue
        assert expected is not None
        if state:
            assert len(messages(storage)) == before + (expected != state)
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


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 20), st.integers(1, 7))
def test_no_two_tasks_write_to_a_chunk(blocks: list[int], start: int, chunk: int) -> None:
    """Whatever blocks dask has: the results of two that did could not be merged."""
    repository, values = zm.create(MemoryStorage()), np.arange(float(start + sum(blocks)))
    ds = xr.Dataset({"t": ("x", values)})
    zm.write(ds[{"x": slice(start)}], repository, encoding={"t": {"chunks": (chunk,)}})
    more = ds[{"x": slice(start, None)}].chunk(x=tuple(blocks))
    zm.write(more, repository, append_dim="x", scheduler=_elsewhere)
    np.testing.assert_array_equal(opened(repository).t, values)


def test_what_does_not_grow_is_stored_once() -> None:
    field = np.random.default_rng(0).random((50, 40))
    fixed = {"lat": (("y", "x"), field), "mask": (("y", "x"), field > 0.5)}
    repository = zm.create(MemoryStorage())
    for number in range(2):
        ds = xr.Dataset({"t": (("time", "y", "x"), field[None] + number)}, {"time": [number]})
        zm.write(ds.assign(fixed).set_coords("lat"), repository, message="a", append_dim="time")
    assert repository.diff("main~1", "main").chunks.keys() == {"/t", "/time"}
    found = opened(repository)
    np.testing.assert_array_equal(found.lat, field)
    np.testing.assert_array_equal(found["mask"], field > 0.5)
    other = ds.assign(mask=(("y", "x"), field > 0.9)).assign_coords(time=[2])
    zm.write(other, repository, message="b", append_dim="time")
    np.testing.assert_array_equal(opened(repository)["mask"], field > 0.9)


def test_an_append_does_not_replace_coordinates_of_two_dimensions() -> None:
    ds = xr.Dataset({"t": (("time", "y", "x"), np.zeros((1, 2, 2)))}, {"time": [0]})
    ds = ds.assign_coords(lat=(("y", "x"), np.arange(4.0).reshape(2, 2)))
    repository = zm.create(MemoryStorage())
    zm.write(ds, repository, message="a")
    later = ds.assign_coords(time=[1], lat=ds.lat + 1)
    with pytest.raises(InvalidArgumentError, match="the values of 'lat' differ"):
        zm.write(later, repository, message="b", append_dim="time")
    zm.write(later.assign_coords(lat=ds.lat * (1 + 1e-9)), repository, append_dim="time")
    assert opened(repository).sizes["time"] == 2


def test_rows_of_another_calendar_are_replaced() -> None:
    time = xr.date_range("2001-01-01", periods=3, calendar="noleap", use_cftime=True)
    ds = xr.Dataset({"t": ("time", [1.0, 2.0, 3.0])}, {"time": time})
    repository = zm.create(MemoryStorage())
    zm.write(ds, repository, message="a")
    how: Any = {"append_dim": "time", "on_existing": "replace"}
    zm.write(ds.isel(time=[1]) * 10, repository, message="b", **how)
    assert opened(repository).t.values.tolist() == [1.0, 20.0, 3.0]


def test_what_another_may_not_have_made_durable_is_made_durable() -> None:
    class Synced(MemoryStorage):
        keys: tuple[str, ...] = ()

        def sync(self, keys: Any) -> None:
            self.keys = (*self.keys, *keys)

    storage = Synced()
    zm.write(days(0), storage)
    storage.keys = ()
    zm.write(days(0), storage, append_dim="time", on_existing="skip")
    assert storage.keys == ("current",)


def test_a_region_without_labels_is_not_guessed() -> None:
    def part(times: list[int], value: float) -> xr.Dataset:
        return xr.Dataset({"v": ("time", np.full(len(times), value))})

    repository = zm.create(MemoryStorage())
    zm.write(part([0, 1, 2], 0), repository, message="a")
    with pytest.raises(InvalidArgumentError, match="no labels of 'time'"):
        zm.write(part([2], 9), repository, message="b", region={"time": "auto"})
    zm.write(part([0, 1, 2], 7), repository, message="c", region={"time": "auto"})
    assert opened(repository).v.values.tolist() == [7, 7, 7]
