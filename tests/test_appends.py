"""Two writers append at once, and both land: the second behind the first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import zarr_manifests as zm
from effort import examples
from zarr_manifests import Session
from zarr_manifests.errors import ConflictError, InvalidArgumentError
from zarr_manifests.runtime import SYSTEM, Runtime
from zarr_manifests.storage import Storage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import workspace_of
from zarr_manifests.testing import CountingStorage, Fault, FaultKind, FaultyStorage

CHUNK = 2  # hours in a chunk of data


def hours(start: int, stop: int) -> xr.Dataset:
    """Values tell which hour they are of."""
    time = np.arange(start, stop)
    air = np.broadcast_to(time[:, None] + [0.0, 0.5], (len(time), 2))
    return xr.Dataset(
        {
            "air": (("time", "lat"), air.copy()),
            "note": ("time", np.array([f"hour {hour:03}" for hour in time])),
        },
        {
            "time": ("time", np.datetime64("2026-01-01T00", "ns") + time * np.timedelta64(1, "h")),
            "lat": [1.0, 2.0],
        },
    )


def seeded(time_chunk: int, stop: int = 4, **options: Any) -> MemoryStorage:
    storage = MemoryStorage()
    encoding: dict[Any, Any] = {
        "air": {"chunks": (CHUNK, 2)},
        "time": {"chunks": (time_chunk,), "units": "hours since 2026-01-01", "dtype": "i8"},
        "note": {"chunks": (time_chunk,)},
    }
    zm.write(hours(0, stop), storage, message="first hours", encoding=encoding, **options)
    return storage


def opened(storage: Storage) -> xr.Dataset:
    return xr.open_dataset(storage, engine="zarr_manifests").load()  # type: ignore[arg-type]


def overtaking(*others: Callable[[], object]) -> Runtime:
    """Others come first, one before each swap."""
    due = list(others)

    def checkpoint(point: str) -> None:
        if point == "root.swap" and due:
            due.pop(0)()

    return replace(SYSTEM, checkpoint=checkpoint, sleep=lambda _: None)


def append(storage: Storage, ds: xr.Dataset, **options: Any) -> str:
    where = options.pop("repository", storage)
    return zm.write(ds, where, message="append", append_dim="time", **options)


def to_store(session: Session, ds: xr.Dataset) -> None:
    ds.to_zarr(session.store, append_dim="time", consolidated=False)


def in_order(*parts: xr.Dataset) -> xr.Dataset:
    return xr.concat(parts, "time", data_vars="minimal")


# --- both land -------------------------------------------------------------------------------


@pytest.mark.parametrize("time_chunk", [100, 4, 3, 1])
@pytest.mark.parametrize("at", ["before the commit", "before the swap", "before each swap"])
def test_two_appends_at_once_both_land(at: str, time_chunk: int) -> None:
    """`time` is one chunk, or ends within one, or at one: positions shift, values do not."""
    storage = seeded(time_chunk)
    steps = [lambda: append(storage, hours(4, 6)), lambda: append(storage, hours(6, 10))]
    now = [steps[0]] if at == "before the commit" else []
    later = {"before the swap": steps[:1], "before each swap": steps}.get(at, [])
    session = zm.open(storage, runtime=overtaking(*later)).writable_session(append_dim="time")
    to_store(session, hours(20, 23))
    for other in now:
        other()
    session.commit("mine")
    stop = 10 if at == "before each swap" else 6
    expected = in_order(hours(0, stop), hours(20, 23))
    xr.testing.assert_identical(opened(storage).drop_attrs(), expected)
    # The session goes on from there, and its store reads what has landed.
    xr.testing.assert_identical(
        xr.open_zarr(session.store, consolidated=False).load().drop_attrs(), expected
    )
    to_store(session, hours(23, 24))
    session.commit("more")
    xr.testing.assert_identical(
        opened(storage).drop_attrs(), in_order(hours(0, stop), hours(20, 24))
    )


@pytest.mark.parametrize("inline", [0, 10_000])
def test_chunks_that_are_packed_or_inline(inline: int) -> None:
    storage = seeded(100, config={"inline-chunk-bytes": inline})
    repository = zm.open(storage, runtime=overtaking(lambda: append(storage, hours(4, 6))))
    append(storage, hours(20, 22), repository=repository)
    expected = in_order(hours(0, 6), hours(20, 22))
    xr.testing.assert_identical(opened(storage).drop_attrs(), expected)


def test_texts_of_any_length() -> None:
    storage = MemoryStorage()
    with zm.create(storage).transaction(message="texts") as store:
        names = zarr.create_array(
            store, name="names", shape=(2,), chunks=(8,), dtype=str, dimension_names=["time"]
        )
        names[:] = ["a", "bb"]
    sessions = [zm.open(storage).writable_session(append_dim="time") for _ in "12"]
    for text, session in zip(("one", "other"), sessions, strict=True):
        zarr.open_array(session.store, path="names").append(np.array([text, text * 2], dtype="T"))
        session.commit(text)
    found = zarr.open_array(zm.open(storage).readonly_session().store, path="names")
    assert list(found[:]) == ["a", "bb", "one", "oneone", "other", "otherother"]  # type: ignore[arg-type,call-overload]


@pytest.mark.slow
def test_writers_in_threads_append_until_all_have_landed() -> None:
    storage = seeded(1000)
    failed: list[BaseException] = []

    def write(writer: int) -> None:
        try:
            for number in range(4):
                start = 100 * writer + 2 * number
                append(storage, hours(start, start + 2), sort="keep")
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failed.append(error)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    found = opened(storage)
    assert found.sizes["time"] == 4 + 4 * 4 * 2
    at = ((found.time - found.time[0]) / np.timedelta64(1, "h")).astype(int).values
    assert (found["air"].values == at[:, None] + [0.0, 0.5]).all()
    assert found["note"].values.tolist() == [f"hour {hour:03}" for hour in at]
    for writer in range(1, 5):  # each writer's own stay in order
        own = [hour for hour in at if hour // 100 == writer]
        assert own == list(range(100 * writer, 100 * writer + 8))


def test_whole_chunks_are_not_touched() -> None:
    """Only coordinates that end within a chunk are uploaded or read again."""
    rng = np.random.default_rng(0)
    storage = MemoryStorage()
    data = xr.Dataset({"big": (("time", "x"), rng.random((2, 20_000)))}, {"time": [0, 1]})
    zm.write(data, storage, message="first", encoding={"big": {"chunks": (1, 20_000)}})
    counting = CountingStorage(storage)
    theirs = data.assign_coords(time=[2, 3])
    other = lambda: zm.write(theirs, storage, message="theirs", append_dim="time")  # noqa: E731
    repository = zm.open(counting, runtime=overtaking(other))
    session = repository.writable_session(append_dim="time")
    to_store(session, data.assign_coords(time=[4, 5]))
    workspace_of(session.store).flush()
    uploaded = {r.key for r in counting.log if r.op == "create" and r.key.startswith("chunks/")}
    assert uploaded
    counting.reset()
    session.commit("mine")
    assert not [r for r in counting.log if r.key.startswith("chunks/") and r.op != "sync"]
    assert opened(storage).time.values.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 7),
    st.lists(st.integers(1, 5), min_size=2, max_size=4),
    st.lists(st.integers(0, 2), max_size=3),
)
def test_appends_of_any_lengths(
    start: int, data_chunk: int, time_chunk: int, lengths: list[int], compactions: list[int]
) -> None:
    """All begin at once and land in turn; those that would cut through a chunk of data do not."""
    storage = MemoryStorage()
    with zm.create(storage).transaction(message="arrays") as store:
        for name, shape, chunks in (
            ("air", (start, 2), (data_chunk, 2)),
            ("time", (start,), (time_chunk,)),
        ):
            made = zarr.create_array(
                store,
                name=name,
                shape=shape,
                chunks=chunks,
                dtype="i4",
                dimension_names=["time", "x"][: len(shape)],
            )
            made[:] = np.arange(start) if name == "time" else np.arange(start)[:, None]
    sessions = [zm.open(storage).writable_session(append_dim="time") for _ in lengths]
    expected = list(range(start))
    for number, (session, length) in enumerate(zip(sessions, lengths, strict=True)):
        values = np.arange(length) + 100 * (number + 1)
        zarr.open_array(session.store, path="time").append(values)
        zarr.open_array(session.store, path="air").append(np.stack([values, values], axis=1))
    for number, (session, length) in enumerate(zip(sessions, lengths, strict=True)):
        if number in compactions:
            zm.open(storage).compact(mode="full")
        shift = len(expected) - start
        if shift and (start % data_chunk or shift % data_chunk):
            with pytest.raises(ConflictError, match="within a chunk"):
                session.commit("append")
            continue
        session.commit("append")
        expected += (np.arange(length) + 100 * (number + 1)).tolist()
    store = zm.open(storage).readonly_session().store
    time, air = (np.asarray(zarr.open_array(store, path=path)[:]) for path in ("time", "air"))
    assert time.tolist() == expected
    assert air.tolist() == [[value, value] for value in expected]


class Noting(MemoryStorage):
    """Notes which objects are not durable."""

    def __init__(self) -> None:
        super().__init__()
        self.in_doubt: set[str] = set()

    def create(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        if not durable:
            self.in_doubt.add(key)
        return super().create(key, data, durable=durable)

    def sync(self, keys: Iterable[str]) -> None:
        found = list(keys)
        self.in_doubt.difference_update(found)
        super().sync(found)


def test_what_was_written_anew_is_durable_before_the_swap() -> None:
    storage = Noting()
    config = {"inline-chunk-bytes": 0, "pack-chunk-bytes": 0}
    encoding: dict[Any, Any] = {"air": {"chunks": (CHUNK, 2)}, "time": {"chunks": (100,)}}
    hours(0, 4).pipe(zm.write, storage, message="first", encoding=encoding, config=config)
    found: list[set[str]] = []

    def note() -> None:
        found.append(set(storage.in_doubt))

    runtime = overtaking(lambda: append(storage, hours(4, 6)), note)
    session = zm.open(storage, runtime=runtime).writable_session(append_dim="time")
    to_store(session, hours(20, 22))
    dropped = set(storage.in_doubt)  # some of it is of no use any more once it has moved
    assert dropped
    session.commit("mine")
    (in_doubt,) = found
    assert in_doubt <= dropped
    assert opened(storage).sizes["time"] == 8


def test_rebasing_a_session_shifts_what_it_appends() -> None:
    storage = seeded(100)
    session = zm.open(storage).writable_session(append_dim="time")
    to_store(session, hours(20, 22))
    append(storage, hours(4, 6))
    session.rebase()
    expected = in_order(hours(0, 6), hours(20, 22))
    found = xr.open_zarr(session.store, consolidated=False).load()
    xr.testing.assert_identical(found.drop_attrs(), expected)
    assert opened(storage).sizes["time"] == 6
    append(storage, hours(6, 8))
    session.commit("behind both")
    expected = in_order(hours(0, 8), hours(20, 22))
    xr.testing.assert_identical(opened(storage).drop_attrs(), expected)


def test_what_else_was_changed_is_rebased_as_ever() -> None:
    storage = seeded(100)
    session = zm.open(storage).writable_session(append_dim="time")
    to_store(session, hours(20, 22))
    zarr.open_array(session.store, path="air").attrs["mine"] = 1
    zarr.open_array(session.store, path="air")[0, 0] = -1
    append(storage, hours(4, 6))
    with zm.open(storage).transaction(message="more") as store:
        zarr.open_array(store, path="air").attrs["theirs"] = 2
        zarr.open_array(store, path="air")[2, 0] = -2
    session.commit("mine")
    found = opened(storage)
    assert found["air"].attrs == {"mine": 1, "theirs": 2}
    assert found["air"][:, 0].values.tolist() == [-1, 1, -2, 3, 4, 5, 20, 21]


def test_zarr_v2() -> None:
    storage = MemoryStorage()
    with zm.create(storage).transaction(message="v2") as store:
        hours(0, 4).drop_vars("note").to_zarr(
            store,
            zarr_format=2,
            consolidated=False,
            encoding={"air": {"chunks": (2, 2)}, "time": {"chunks": (100,)}},
        )
    sessions = [zm.open(storage).writable_session(append_dim="time") for _ in "12"]
    for number, session in enumerate(sessions):
        to_store(session, hours(10 * number + 10, 10 * number + 12).drop_vars("note"))
    for session in sessions:
        session.commit("append")
    found = xr.open_zarr(zm.open(storage).readonly_session().store, consolidated=False)
    assert found["air"][:, 0].values.tolist() == [0, 1, 2, 3, 10, 11, 20, 21]
    assert (found.time.dt.hour == [0, 1, 2, 3, 10, 11, 20, 21]).all()


@pytest.mark.parametrize("kind", ["lose_answer", "fail_after"])
def test_an_append_whose_answer_is_lost_has_landed_once(kind: FaultKind) -> None:
    storage = seeded(100)
    lost = Fault(kind, op="cas", key="current", skip=1)  # the one after it was relocated
    runtime = overtaking(lambda: append(storage, hours(4, 6)))
    repository = zm.open(FaultyStorage(storage, [lost]), runtime=runtime)
    append(storage, hours(20, 22), repository=repository)
    expected = in_order(hours(0, 6), hours(20, 22))
    xr.testing.assert_identical(opened(storage).drop_attrs(), expected)


# --- or are conflicts ------------------------------------------------------------------------


def refused(storage: MemoryStorage, mine: Callable[[Session], None], match: str) -> None:
    """A commit of `mine`, overtaken by an append, is a conflict, and the append stays alone."""
    session = zm.open(storage).writable_session(append_dim="time")
    mine(session)
    append(storage, hours(4, 6))
    before = opened(storage)
    for go_on in (lambda: session.commit("mine", rebase="ours"), lambda: session.rebase("ours")):
        with pytest.raises(ConflictError, match=match):
            go_on()
    xr.testing.assert_identical(opened(storage), before)
    assert session.status()


def test_data_that_would_begin_within_a_chunk_is_a_conflict() -> None:
    def mine(session: Session) -> None:
        to_store(session, hours(20, 22))

    storage = seeded(100, stop=5)
    session = zm.open(storage).writable_session(append_dim="time")
    mine(session)
    append(storage, hours(5, 7))
    with pytest.raises(ConflictError, match=r"/air: growth.*within a chunk of 2"):
        session.commit("mine")
    assert opened(storage).sizes["time"] == 7


def test_values_before_the_append_that_were_changed_in_the_same_chunk_are_a_conflict() -> None:
    def mine(session: Session) -> None:
        to_store(session, hours(20, 22))
        zarr.open_array(session.store, path="time")[1] = 77

    refused(seeded(100), mine, "/time: chunks.*values before")


def test_arrays_that_share_the_dimension_move_together_or_not_at_all() -> None:
    def mine(session: Session) -> None:
        to_store(session, hours(20, 22))
        other = zarr.open_group(session.store).create_array(
            "more", shape=(6,), chunks=(2,), dtype="i4", dimension_names=["time"]
        )
        other[:] = 1

    refused(seeded(100), mine, "/more: create")

    def alone(session: Session) -> None:
        zarr.open_array(session.store, path="air").resize((6, 2))
        zarr.open_array(session.store, path="time").resize((6,))

    refused(seeded(100), alone, "/note: growth.*only one")


def test_an_array_that_was_made_longer_otherwise_is_a_conflict() -> None:
    def mine(session: Session) -> None:
        to_store(session, hours(20, 22))
        zarr.open_array(session.store, path="air").resize((6, 4))

    refused(seeded(100), mine, "/air: growth.*in another way")

    def uneven(session: Session) -> None:
        to_store(session, hours(20, 22))
        zarr.open_array(session.store, path="time").resize((7,))

    refused(seeded(100), uneven, "different lengths")


def test_appends_stay_where_they_are_unless_asked_for() -> None:
    storage = seeded(100)
    session = zm.open(storage).writable_session()
    to_store(session, hours(20, 22))
    append(storage, hours(4, 6))
    with pytest.raises(ConflictError, match="both commits append along 'time'"):
        session.commit("mine")
    with pytest.raises(ConflictError, match="with rebase=False"):
        session.commit("mine", rebase=False)
    assert opened(storage).sizes["time"] == 6
    with pytest.raises(InvalidArgumentError, match="dimension"):
        zm.open(storage).writable_session(append_dim="")
