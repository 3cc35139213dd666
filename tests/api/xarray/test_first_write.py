"""A first write makes the repository; one that fails commits nothing, whatever fails."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import xarray as xr

import zarr_manifests as zm
from looking import opened
from storages import FaultKind, FaultyStorage, SimulatedCrash
from zarr_manifests.errors import (
    ConflictError,
    InvalidArgumentError,
    ManifestsError,
)
from zarr_manifests.storage.memory import MemoryStorage

CHUNKS = {"t": {"chunks": (2, 4000)}}


def field() -> xr.Dataset:
    """Chunks too big to be kept in the repository's own objects."""
    values = np.random.default_rng(0).random((6, 4000))
    return xr.Dataset({"t": (("x", "y"), values)}, {"x": np.arange(6)})


@pytest.mark.parametrize(
    ("ds", "how"),
    [
        (field(), {"encoding": {"t": {"zlib": True}}}),
        (field(), {"encoding": {"t": {"dtype": "i2"}}}),
        (field().chunk(x=(1, 3, 2)), {}),
        (field().assign_attrs(a=object()), {}),
        (field(), {"metadata": {"a": object()}}),
    ],
    ids=["encoding", "values", "chunks", "attribute", "metadata"],
)
def test_what_fails_commits_nothing(ds: xr.Dataset, how: dict[str, Any]) -> None:
    storage = MemoryStorage()
    with pytest.raises((ValueError, TypeError)):
        zm.write(ds, storage, message="fails", **how)
    assert not zm.exists(storage) or len([*zm.open(storage).ancestry()]) == 1


@pytest.mark.parametrize("group", ["other", None])
def test_two_first_writers(group: str | None) -> None:
    """Both are in the repository that one of them has made, if there is room for both."""
    storage, made = MemoryStorage(), []

    def meanwhile(values: Any) -> Any:
        if not made:
            made.append(zm.write(field() * 2, storage, message="other", group=group))
        return values

    lazy = field().chunk()
    lazy["t"] = lazy.t.copy(data=lazy.t.data.map_blocks(meanwhile, meta=np.empty((0, 0))))
    if group is None:
        with pytest.raises(ConflictError):
            zm.write(lazy, storage, message="mine")
    else:
        zm.write(lazy, storage, message="mine")
        xr.testing.assert_identical(opened(storage), field())
    xr.testing.assert_identical(opened(storage, group=group), field() * 2)
    repository = zm.open(storage)
    assert not repository.verify().problems
    assert [info.message for info in repository.ancestry()][-2] == "other"


@pytest.mark.parametrize(
    "kind", ["fail_before", "fail_after", "lose_answer", "crash_before", "crash_after"]
)
def test_a_fault_at_every_call(kind: FaultKind) -> None:
    probe = FaultyStorage(MemoryStorage())
    zm.write(field(), probe, message="first", encoding=CHUNKS)
    for number in range(1, len(probe.calls) + 1):
        storage = MemoryStorage()
        faulty = FaultyStorage(storage)
        faulty.fail_at(number, kind)
        acknowledged = True
        try:
            zm.write(field(), faulty, message="first", encoding=CHUNKS)
        except (SimulatedCrash, ManifestsError):
            acknowledged = False
        written = zm.exists(storage) and len([*zm.open(storage).ancestry()]) > 1
        assert written or not acknowledged, (number, probe.calls[number - 1])
        if not written:
            zm.write(field(), storage, message="again", encoding=CHUNKS)
        repo = zm.open(storage)
        assert not repo.verify().problems
        repo.garbage_collect(timedelta(0))
        assert not repo.verify().problems
        xr.testing.assert_identical(opened(storage), field())


def test_bounds_of_a_first_hour_have_room_for_others() -> None:
    """They lie on whole hours, and those of the next on quarters."""
    storage, parts = MemoryStorage(), []
    for minute, half in ((0, 60), (15, 30)):
        at = np.array([f"2026-01-01T05:{minute:02d}"], "M8[ns]")
        bounds = at[:, None] + np.array([-half, half], "m8[m]")
        ds = xr.Dataset(
            {"air": ("time", [1.0]), "time_bnds": (("time", "nv"), bounds)},
            {"time": ("time", at, {"bounds": "time_bnds"})},
        )
        zm.write(ds, storage, append_dim="time")
        parts.append(ds)
    found = xr.open_zarr(zm.open(storage).readonly_session().store)
    xr.testing.assert_equal(found.load(), xr.concat(parts, "time"))


def test_a_first_step_of_no_hours_has_room_for_others() -> None:
    def steps(*hours: int) -> xr.Dataset:
        return xr.Dataset(
            {"t": ("step", np.arange(len(hours)))},
            {"step": np.array(hours, "m8[h]").astype("m8[ns]")},
        )

    storage = MemoryStorage()
    for hour in (0, 6, 12):
        zm.write(steps(hour), storage, append_dim="step", message=f"{hour} h")
    assert opened(storage).step.equals(steps(0, 6, 12).step)


@pytest.mark.parametrize("encoding", [{"chunks": (4, 7)}, {"chunks": [2, 7], "shards": (4, 14)}])
@pytest.mark.parametrize("blocks", [3, (1, 5, 4), 10])
def test_dask_blocks_of_any_size_make_an_array(encoding: dict[str, Any], blocks: Any) -> None:
    ds = xr.Dataset({"t": (("x", "y"), np.arange(300.0).reshape(10, 30))})
    storage = MemoryStorage()
    zm.write(ds.chunk(x=blocks, y=11), storage, message="t", encoding={"t": encoding})
    assert opened(storage).t.encoding["chunks"] == tuple(encoding["chunks"])
    xr.testing.assert_equal(opened(storage).load(), ds)


def test_names_in_encoding_are_compared() -> None:
    with pytest.raises(InvalidArgumentError, match=r"'zz', which is not a variable.*: t, x"):
        zm.write(field(), MemoryStorage(), message="fails", encoding={"zz": {}})


@pytest.mark.parametrize(
    ("encoding", "chunks"),
    [
        ({}, 64),
        ({"time": {"units": "hours since 1970-01-01"}}, 64),
        ({"time": {"chunks": (7,)}}, 7),
    ],
)
def test_labels_that_are_appended_one_by_one_share_chunks(
    encoding: dict[str, Any], chunks: int
) -> None:
    storage, days = MemoryStorage(), 70
    times = np.arange(days).astype("M8[D]").astype("M8[ns]")
    whole = xr.Dataset({"t": ("time", np.arange(days) * 1.5)}, {"time": times})
    for day in range(days):
        zm.write(whole.isel(time=[day]), storage, append_dim="time", encoding=encoding)
    usage = zm.open(storage).du()
    assert usage["time"].chunks == -(-days // chunks)
    assert usage["t"].chunks == days  # values have the chunks that xarray gives them
    xr.testing.assert_identical(opened(storage), whole)
