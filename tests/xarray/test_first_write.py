"""A first write that fails leaves no repository behind, whatever fails."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

import zarr_manifests as zm
from zarr_manifests.error_cases import StorageFullError
from zarr_manifests.errors import (
    AlreadyExistsError,
    CommitOutcomeUnknownError,
    InvalidArgumentError,
    ManifestsError,
)
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.testing import Fault, FaultKind, FaultyStorage, SimulatedCrash

CHUNKS = {"t": {"chunks": (2, 4000)}}


def field() -> xr.Dataset:
    """Chunks too big to be kept in the repository's own objects."""
    values = np.random.default_rng(0).random((6, 4000))
    return xr.Dataset({"t": (("x", "y"), values)}, {"x": np.arange(6)})


def failing(after: Any = None) -> xr.Dataset:
    """A field whose last block raises, once others have been written."""

    def block(values: Any, block_info: Any = None) -> Any:
        if block_info[0]["chunk-location"][0] == 2:
            if after is not None:
                after()
            raise RuntimeError("a task has failed")
        return values

    lazy = field().chunk(x=2)
    lazy["t"] = lazy.t.copy(data=lazy.t.data.map_blocks(block, meta=np.empty((0, 0))))
    return lazy


def keys(storage: Any) -> list[str]:
    return [info.key for info in storage.list()]


def opened(storage: Any, **options: Any) -> xr.Dataset:
    return xr.open_dataset(storage, engine="zarr_manifests", **options).load()


FAULTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "an unknown variable": (field(), {"encoding": {"zz": {}}}),
    "an unknown key": (field(), {"encoding": {"t": {"zlib": True}}}),
    "a value": (field(), {"encoding": {"t": {"dtype": "i2"}}}),
    "chunks": (field().chunk(x=3), {"encoding": CHUNKS}),
    "a name": (field().rename(t=1), {}),
    "an attribute": (field().assign_attrs(a=object()), {}),
    "the metadata": (field(), {"metadata": {"a": object()}}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_fails_before_any_data_touches_nothing(tmp_path: Path, fault: str) -> None:
    ds, how = FAULTS[fault]
    for location in (tmp_path / "deep" / "winds", MemoryStorage()):
        with pytest.raises((ValueError, TypeError)):
            zm.write(ds, location, message="fails", **how)
        assert not zm.exists(location)
    assert list(tmp_path.iterdir()) == []


def test_names_in_encoding_are_compared() -> None:
    with pytest.raises(InvalidArgumentError, match=r"'zz', which is not a variable.*: t, x"):
        zm.write(field(), MemoryStorage(), message="fails", encoding={"zz": {}})


def test_unknown_keys_of_encoding_are_told() -> None:
    with pytest.raises(InvalidArgumentError, match=r"zlib.*compressors"):
        zm.write(field(), MemoryStorage(), message="fails", encoding={"t": {"zlib": True}})


@pytest.mark.parametrize(
    ("values", "encoding"),
    [
        (np.array(["NaT", "2262-04-11", "1677-09-22"], "M8[ns]"), {}),
        (np.arange(3.0), {"n": {"compressors": "x"}}),
        (np.arange(3.0), {"n": {"dtype": "nope"}}),
        (np.arange(3.0), {"n": 5}),
        (np.arange(3.0), {"n": None}),
    ],
)
def test_what_xarray_cannot_write_is_told(values: Any, encoding: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        zm.write(xr.Dataset({"n": ("y", values)}), MemoryStorage(), message="n", encoding=encoding)


def test_a_task_that_fails_leaves_no_object(tmp_path: Path) -> None:
    storage = MemoryStorage()
    with pytest.raises(RuntimeError, match=r"a task"):
        zm.write(failing(), storage, message="fails", encoding=CHUNKS)
    assert keys(storage) == []
    folder = tmp_path / "winds"
    with pytest.raises(RuntimeError, match=r"a task"):
        zm.write(failing(), folder, message="fails", encoding=CHUNKS)
    assert {p.name for p in folder.rglob("*") if p.is_file()} <= {".lock", ".lock-swap"}
    zm.write(field(), folder, message="works", encoding=CHUNKS)
    xr.testing.assert_identical(opened(folder), field())
    assert not zm.open(folder).verify().problems


def test_a_swap_that_fails_leaves_no_object_either() -> None:
    storage = MemoryStorage()
    full = Fault("fail_before", op="cas", count=None, error=StorageFullError)
    with pytest.raises(StorageFullError):
        zm.write(field(), FaultyStorage(storage, [full]), message="fails", encoding=CHUNKS)
    assert keys(storage) == []


def test_what_others_make_meanwhile_stays(tmp_path: Path) -> None:
    storage = MemoryStorage()
    other = field() * 2

    def meanwhile() -> None:
        zm.write(other, storage, message="other", group="other", encoding=CHUNKS)

    with pytest.raises(RuntimeError, match=r"a task"):
        zm.write(failing(meanwhile), storage, message="fails", encoding=CHUNKS)
    xr.testing.assert_identical(opened(storage, group="other"), other)
    assert not zm.open(storage).verify().problems


@pytest.mark.parametrize("group", ["other", None])
def test_two_first_writers(group: str | None) -> None:
    """The second one goes on in the repository of the first, if there is room for both."""
    storage, made = MemoryStorage(), []

    def meanwhile(values: Any) -> Any:
        if not made:
            made.append(zm.write(field() * 2, storage, message="other", group=group))
        return values

    lazy = field().chunk()
    lazy["t"] = lazy.t.copy(data=lazy.t.data.map_blocks(meanwhile, meta=np.empty((0, 0))))
    if group is None:
        with pytest.raises(AlreadyExistsError, match=r"has data already"):
            zm.write(lazy, storage, message="mine")
    else:
        zm.write(lazy, storage, message="mine")
        xr.testing.assert_identical(opened(storage), field())
    xr.testing.assert_identical(opened(storage, group=group), field() * 2)
    repository = zm.open(storage)
    assert not repository.verify().problems
    assert [info.message for info in repository.ancestry()][-2] == "other"


def test_a_first_write_is_as_any_other() -> None:
    storage = MemoryStorage()
    snapshot_id = zm.write(field(), storage, message="first", encoding=CHUNKS)
    repository = zm.open(storage)
    history = [(info.snapshot_id, info.message) for info in repository.ancestry()]
    assert history[0] == (snapshot_id, "first")
    assert [message for _, message in history] == ["first", "create repository"]
    assert [key for key in keys(storage) if key.startswith("root/")] == [
        f"root/{version:020d}" for version in (1, 2)
    ]
    assert not repository.verify().problems
    assert zm.write(xr.Dataset(), MemoryStorage(), message="of nothing")


@pytest.mark.parametrize(
    "kind",
    ["fail_before", "fail_after", "lose_answer", "duplicate_late", "crash_before", "crash_after"],
)
def test_a_fault_at_every_call(kind: FaultKind) -> None:
    probe = FaultyStorage(MemoryStorage())
    zm.write(field(), probe, message="first", encoding=CHUNKS)
    ends = set()
    for number in range(1, len(probe.calls) + 1):
        storage = MemoryStorage()
        faulty = FaultyStorage(storage)
        faulty.fail_at(number, kind)
        outcome: object = None
        try:
            zm.write(field(), faulty, message="first", encoding=CHUNKS)
        except (ManifestsError, SimulatedCrash) as error:
            outcome = error
        there = zm.exists(storage)
        if outcome is None:
            assert there
        elif not isinstance(outcome, SimulatedCrash | CommitOutcomeUnknownError):
            assert not there, (number, probe.calls[number - 1])
        ends.add(there)
        if there:
            xr.testing.assert_identical(opened(storage), field())
        else:
            zm.write(field(), storage, message="again", encoding=CHUNKS)
        repo = zm.open(storage)
        assert not repo.verify().problems
        repo.garbage_collect(timedelta(0))
        assert not repo.verify().problems
        xr.testing.assert_identical(opened(storage), field())
    assert len(probe.calls) > 8
    assert ends


@pytest.mark.parametrize("units", [None, "days since 2026-01-01T05:00", "hours since 1900-01-01"])
@pytest.mark.parametrize("in_argument", [False, True], ids=["own", "argument"])
def test_hours_are_written_one_by_one(units: str | None, in_argument: bool) -> None:
    """Of the first, xarray makes days since that time. Units that are asked for stay."""
    storage = MemoryStorage()
    first, second = (
        xr.Dataset(
            {"air": ("time", [hour])}, {"time": [np.datetime64(f"2026-01-01T0{hour}", "ns")]}
        )
        for hour in (5, 6)
    )
    how = {} if units is None else {"units": units, "dtype": "int32"}
    encoding = {"time": how or {"dtype": "int64"}} if in_argument else None
    first.time.encoding = {} if in_argument else how
    zm.write(first, storage, append_dim="time", encoding=encoding)
    if in_argument and units is not None and units.startswith("days"):
        with pytest.raises(InvalidArgumentError, match="days since 2026-01-01"):
            zm.write(second, storage, append_dim="time")
        return
    zm.write(second, storage, append_dim="time")
    found = xr.open_zarr(zm.open(storage).readonly_session("main").store)
    xr.testing.assert_equal(found.load(), xr.concat([first, second], "time"))
    kept = units is not None and units.startswith("hours")
    assert found.time.encoding["units"].startswith("hours" if kept else "seconds since 2026-01-01")


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
