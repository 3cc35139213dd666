"""Two writers append at once, and both land: the second behind the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import zarr_manifests as zm
from effort import examples
from stored import overtaking
from zarr_manifests import Session
from zarr_manifests.errors import ConflictError, InvalidArgumentError
from zarr_manifests.storage import Storage
from zarr_manifests.storage.memory import MemoryStorage

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


def append(storage: Storage, ds: xr.Dataset, **options: Any) -> str:
    where = options.pop("repository", storage)
    return zm.write(ds, where, message="append", append_dim="time", **options)


def to_store(session: Session, ds: xr.Dataset) -> None:
    ds.to_zarr(session.store, append_dim="time", consolidated=False)


def in_order(*parts: xr.Dataset) -> xr.Dataset:
    return xr.concat(parts, "time", data_vars="minimal")


@pytest.mark.parametrize(
    ("at", "time_chunk"),
    [("before the commit", 100), ("before the swap", 4), ("before each swap", 3)],
)
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
    assert opened(storage).sizes["time"] == 6
    with pytest.raises(InvalidArgumentError, match="dimension"):
        zm.open(storage).writable_session(append_dim="")
