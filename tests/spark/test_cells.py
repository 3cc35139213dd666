"""Writes from rows without Spark: every cell gets the value of its row, and no other does."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

import zarr_manifests as zm
from row_writes import rows_of, write_table
from zarr_manifests import Repository

DIMS = ["time", "lat", "lon"]
TIMES = np.arange("2024-01", "2024-07", dtype="M8[M]").astype("M8[ns]")


def winds(times: Any = TIMES, lat: int = 5, lon: int = 8) -> xr.Dataset:
    shape = (len(times), lat, lon)
    values = np.arange(np.prod(shape), dtype="f4").reshape(shape)
    coords = {"time": times, "lat": np.linspace(60, -60, lat), "lon": np.arange(lon) * 10.0}
    return xr.Dataset({"u": (DIMS, values)}, coords)


def opened(repo: Repository, group: str | None = None) -> xr.Dataset:
    return xr.open_dataset(repo, engine="zarr_manifests", group=group).load()


@pytest.fixture
def repo(tmp_path: Path) -> Repository:
    encoding = {"u": {"chunks": (2, 3, 4)}}
    zm.write(winds(), tmp_path / "r", message="half a year", encoding=encoding)
    return Repository.open(tmp_path / "r")


def with_column(table: pa.Table, name: str, values: Any) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, pa.array(values))


# --- every dataset, shuffled, is written as it is ------------------------------------------------


@st.composite
def stored(draw: st.DrawFn) -> tuple[xr.Dataset, dict[str, Any]]:
    """A dataset, and how to store it."""
    sizes = {dim: draw(st.integers(1, 7), label=dim) for dim in DIMS[: draw(st.integers(1, 3))]}
    dims = list(sizes)
    labels = {
        "time": lambda n: np.datetime64("2020-01-01", "ns") + np.arange(n) * np.timedelta64(6, "h"),
        "lat": lambda n: np.cos(np.arange(n)) * (np.arange(n) + 1),  # neither even nor sorted
        "lon": lambda n: np.arange(n)[::-1].astype("f4") / 10,
    }
    ds = xr.Dataset(coords={dim: labels[dim](n) for dim, n in sizes.items()})
    encoding: dict[str, Any] = {}
    for name in "ab"[: draw(st.integers(1, 2))]:
        own = draw(st.permutations(dims))
        shape = tuple(sizes[dim] for dim in own)
        values: Any = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 100, shape)
        kind = draw(st.sampled_from(["f4", "f8", "f2", "i2", "u1", "i8", "b1", "packed", "text"]))
        chunks = tuple(draw(st.integers(1, 4)) for _ in own)
        how: dict[str, Any] = {"chunks": chunks}
        if draw(st.booleans()):
            how["shards"] = tuple(n * draw(st.integers(1, 3)) for n in chunks)
        if kind == "packed":
            values = values / 2
            how |= {"dtype": "i2", "scale_factor": 0.5, "add_offset": 10.0, "_FillValue": -1}
        elif kind == "text":
            values = values.astype(str).astype(object)
        else:
            values = values.astype(kind)
        if kind in ("f4", "f8", "packed"):
            gaps = np.random.default_rng(draw(st.integers(0, 99))).random(shape) < 0.2
            values = np.where(gaps, np.nan, values).astype(values.dtype)
        ds[name], encoding[name] = (own, values), how
    return ds, encoding


def within(bounds: Sequence[Any]) -> slice:
    lo, hi = sorted(bounds)
    return slice(lo, hi + 1)


@given(stored(), st.data())
def test_rows_are_the_dataset(case: tuple[xr.Dataset, dict[str, Any]], data: st.DataObject) -> None:
    """Created, over a region and appended: what is read is what a write with xarray would give."""
    ds, encoding = case
    dims = [str(dim) for dim in ds["a"].dims]
    buffer = data.draw(st.sampled_from([1, 40, 10**6]), label="buffer")
    seed = data.draw(st.integers(0, 9))
    how = {"dims": dims, "buffer_bytes": buffer, "parallelism": data.draw(st.integers(1, 3))}
    how["max_tasks"] = data.draw(st.sampled_from([1, 2, 1000]))
    with tempfile.TemporaryDirectory() as folder:
        repo = Repository.create(folder)
        cells = write_table(
            repo,
            rows_of(ds, dims, seed),
            target="g",
            mode="create",
            template=ds,
            encoding=encoding,
            **how,
        )
        assert cells == ds["a"].size
        xr.testing.assert_equal(opened(repo, "g"), ds)

        part = {
            dim: within([data.draw(st.integers(0, ds.sizes[dim] - 1)) for _ in range(2)])
            for dim in dims
        }
        changed = ds.copy(deep=True)
        for name in ds.data_vars:
            flat = changed[name].values.ravel()
            changed[name].values[:] = np.roll(flat, 1).reshape(changed[name].shape)
        rows = rows_of(changed.isel(part), dims, seed)
        write_table(repo, rows, target="/g", mode="overwrite-region", **how)
        for name in ds.data_vars:
            ds[name][part] = changed[name][part]
        xr.testing.assert_equal(opened(repo, "g"), ds)

        if "time" in dims:
            more = changed.assign_coords(time=changed.time + np.timedelta64(9, "D"))
            write_table(repo, rows_of(more, dims, seed), target="g", append_dim="time", **how)
            both = xr.concat([ds, more], "time", data_vars="all")
            both = both.assign({name: both[name].transpose(*ds[name].dims) for name in ds})
            xr.testing.assert_equal(opened(repo, "g"), both)


@given(st.data())
def test_cells_without_rows(data: st.DataObject) -> None:
    """They are filled or kept, in the region, and kept outside of it."""
    ds = winds(lat=4, lon=5)
    chunks = tuple(data.draw(st.integers(1, 4)) for _ in DIMS)
    part = {
        dim: within([data.draw(st.integers(0, n - 1)) for _ in range(2)])
        for dim, n in ds.sizes.items()
    }
    missing = data.draw(st.sampled_from(["fill", "keep"]))
    buffer = data.draw(st.sampled_from([1, 40, 10**6]))
    with tempfile.TemporaryDirectory() as folder:
        zm.write(ds, folder, message="all", encoding={"u": {"chunks": chunks}})
        repo = Repository.open(folder)
        rows = rows_of(-ds.isel(part), DIMS)
        rows = rows.slice(0, data.draw(st.integers(1, rows.num_rows)))
        region = {
            dim: tuple(np.sort(ds[dim].values[[at.start, at.stop - 1]]).tolist())
            for dim, at in part.items()
            if dim != "time"
        }
        region["time"] = tuple(ds["time"].values[[part["time"].start, part["time"].stop - 1]])
        write_table(
            repo,
            rows,
            target="u",
            dims=DIMS,
            mode="overwrite-region",
            region=region,
            missing=missing,
            buffer_bytes=buffer,
        )
        expected = ds.u.copy(deep=True)
        if missing == "fill":
            expected[part] = np.nan
        frame = rows.to_pandas()
        at = [
            ds.indexes[dim].get_indexer(
                frame[dim].astype(ds[dim].dtype)
                if dim != "time"
                else frame[dim].dt.tz_localize(None)
            )
            for dim in DIMS
        ]
        expected.values[tuple(at)] = frame["u"]
        np.testing.assert_array_equal(opened(repo).u.values, expected.values)
