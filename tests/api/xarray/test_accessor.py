"""`ds.zm.summarize`: answers for what a dataset selects, and refusals of what may be changed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xarray as xr
import zarr

import zarr_manifests as zm
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.storage.memory import MemoryStorage

TIMES = pd.date_range("2001-01-30", periods=6, freq="D")


@pytest.fixture
def repo() -> zm.Repository:
    values = np.random.default_rng(0).integers(0, 100, (6, 4, 5)).astype("f8") / 4
    values[1, 2, 3] = np.nan
    coords = {"time": TIMES, "lat": [60.0, 30, 0, -30], "lon": np.arange(5.0)}
    ds = xr.Dataset({"t": (("time", "lat", "lon"), values)}, coords)
    packed = {"dtype": "i2", "scale_factor": 0.25, "_FillValue": -1, "chunks": (2, 2, 2)}
    found = zm.create(MemoryStorage())
    zm.write(ds.assign(area=("lat", [1.0, 2, 2, 1])), found, message="t", encoding={"t": packed})
    return found


def opened(repo: zm.Repository, **how: Any) -> xr.Dataset:
    return xr.open_dataset(repo, engine="zarr_manifests", **how)


SELECTIONS: list[Callable[[xr.Dataset], xr.Dataset]] = [
    lambda ds: ds,
    lambda ds: ds.sel(time=slice("2001-01-31", "2001-02-02"), lat=[0, 60]),
    lambda ds: ds.isel(lat=1).sel(lon=slice(1, 3)),
    lambda ds: ds.isel(time=slice(None, None, -2)).isel(lon=slice(1, None)).isel(lon=[2, 0]),
    lambda ds: ds.assign_coords(lon=ds.lon + 100).sel(lon=slice(102, None)),
    lambda ds: ds.sortby("lat").sel(lat=slice(0, 60)),
    lambda ds: ds.isel(time=-1, lat=0, lon=2),
]


def test_the_engine_brings_it(tmp_path: Path) -> None:
    zm.write(xr.Dataset({"t": ("x", [1.0, 2.0])}), tmp_path / "repo")
    opens = f"xr.open_dataset({str(tmp_path / 'repo')!r}, engine='zarr_manifests', cache=False)"
    told = f"import xarray as xr; print({opens}.zm.summarize('t')['sum'].item())"
    assert subprocess.check_output([sys.executable, "-c", told], text=True) == "3.0\n"


@pytest.mark.parametrize("number", range(len(SELECTIONS)))
def test_answers_are_for_what_a_dataset_selects(repo: zm.Repository, number: int) -> None:
    ds = SELECTIONS[number](opened(repo))
    values = SELECTIONS[number](opened(repo).load())["t"]
    found = ds.zm.summarize("t")
    assert int(found["count"]) == int(values.count())
    for name in ("min", "max", "mean", "sum"):
        assert float(found[name]) == pytest.approx(float(getattr(values, name)()), rel=1e-12)
    for dim in values.dims:
        found = ds.zm.summarize("t", by=dim)
        expected = values.max([other for other in values.dims if other != dim]).sortby(dim)
        xr.testing.assert_allclose(found["max"].drop_attrs().sortby(dim), expected.drop_attrs())
    if "time" in values.dims:
        months = ds.zm.summarize("t", by="time.month")["mean"]
        np.testing.assert_allclose(months, values.groupby("time.month").mean(...))


def test_indexers_and_weights_go_with_a_selection(repo: zm.Repository) -> None:
    values = opened(repo).load()["t"].sel(lon=[1, 2], lat=slice(60, 0), time=TIMES[1:4])
    expected = values.weighted(np.cos(np.deg2rad(values.lat))).mean().item()
    chosen = {"time": slice(TIMES[1], TIMES[3])}
    ds = opened(repo)
    part = ds.sel(lon=[1, 2], lat=slice(60, 0))
    found = part.zm.summarize("t", chosen, weights={"lat": "cos"})
    assert found["mean"].item() == pytest.approx(expected, rel=1e-12)
    more = chosen | {"lon": [1, 2], "lat": slice(60, 0)}
    found = opened(repo, chunks={}).zm.summarize("t", more, weights={"lat": "cos"})
    assert found["mean"].item() == pytest.approx(expected, rel=1e-12)
    assert ds.zm.summarize("t", weights={"lat": "area"})["weight"].item() == pytest.approx(178)
    assert ds.zm.summarize("t").attrs["chunks_answered"] == 18


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda ds: ds.load(), "loaded, computed"),
        (lambda ds: ds + 1, "loaded, computed"),
        (lambda ds: ds.where(ds.lat > 0), "loaded, computed"),
        (lambda ds: ds.transpose(), "rearranged"),
        (lambda ds: ds.isel(lat=("p", [0, 1]), lon=("p", [0, 1])), "rearranged"),
        (lambda ds: ds.rename(lat="y"), "other names"),
        (
            lambda ds: ds.isel(lon=slice(4)).drop_vars(["lat", "lon"]).rename(lat="lon", lon="lat"),
            "other names",
        ),
        (lambda ds: ds.swap_dims(time="q"), "other names"),
        (lambda ds: ds.chunk().isel(time=0), "dask computes it"),
        (lambda ds: ds.chunk() * 2, "dask computes it"),
    ],
)
def test_what_may_not_be_what_is_stored_is_refused(
    repo: zm.Repository, change: Callable[[xr.Dataset], xr.Dataset], said: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        change(opened(repo)).zm.summarize("t")


def test_changed_values_undecoded_ones_and_other_stores_are_refused(
    repo: zm.Repository, tmp_path: Any
) -> None:
    ds = opened(repo)
    ds["t"][0, 0, 0] = 1000.0
    plain = tmp_path / "plain.zarr"
    opened(repo).to_zarr(plain, consolidated=False)
    raw = opened(repo, mask_and_scale=False)
    for changed, said in (
        (ds, "loaded"),
        (raw, "without decoding"),
        (raw.drop_attrs(), "without decoding"),
        (xr.decode_cf(raw.assign(t=raw.t.assign_attrs(scale_factor=100.0))), "other attributes"),
        (xr.open_zarr(plain, chunks=None, consolidated=False), "not of a repository"),
    ):
        with pytest.raises(InvalidArgumentError, match=said):
            changed.zm.summarize("t")
    with pytest.raises(InvalidArgumentError, match="the dataset's 'lat' selects a position twice"):
        opened(repo).isel(lat=[0, 1, 0]).zm.summarize("t")
    with pytest.raises(InvalidArgumentError, match="has no dimension 'depth'"):
        opened(repo).zm.summarize("t", by="depth")
    with pytest.raises(InvalidArgumentError, match="one label of it is selected"):
        opened(repo).isel(lat=0).zm.summarize("t", by="lat")


def test_weights_and_labels_are_those_of_the_dataset(repo: zm.Repository) -> None:
    ds = opened(repo).isel(lat=slice(None, None, -1), lon=[4, 1])
    values = opened(repo).load()["t"].isel(lat=slice(None, None, -1), lon=[4, 1])
    weighted = values.weighted(np.cos(np.deg2rad(values.lat))).mean().item()
    found = ds.assign_coords(mean=7.0, count=8).zm.summarize("t", weights={"lat": "cos"})
    assert found["mean"].item() == pytest.approx(weighted, rel=1e-12)
    assert found["count"].item() == values.count()
    for numbers in (np.ones(2), ds.lon):
        with pytest.raises(InvalidArgumentError, match="the weights of 'lon' are no name"):
            ds.zm.summarize("t", weights={"lon": numbers})
    with pytest.raises(InvalidArgumentError, match="give labels by dimension"):
        ds.zm.summarize("t", "lat > 3")
    found = opened(repo).zm.summarize("t", {"lat": 30})
    assert found["sum"].item() == opened(repo).t.sel(lat=30).sum().item()


def test_an_array_that_was_changed_since_is_refused(repo: zm.Repository) -> None:
    session = repo.writable_session()
    ds = xr.open_zarr(session.store, consolidated=False, chunks=None)
    assert ds.zm.summarize("t")["count"].item() == 119
    zarr.open_array(session.store, path="t").attrs["scale_factor"] = 100.0
    with pytest.raises(InvalidArgumentError, match="its array has changed since"):
        ds.zm.summarize("t")


def test_arrays_of_zarr_v2_and_without_coordinates_are_summarized() -> None:
    repo = zm.create(MemoryStorage())
    with repo.transaction(message="v2") as store:
        group = zarr.create_group(store, zarr_format=2)
        made = group.create_array("a", shape=(4,), chunks=(2,), dtype="i4", fill_value=3)
        made.attrs["_ARRAY_DIMENSIONS"] = ["x"]
        made[:] = [1, 2, 3, 4]
    found = opened(repo).isel(x=slice(1, None)).zm.summarize("a", by="x")
    assert found["count"].values.tolist() == [1, 0, 1]  # of v2, the fill value is missing
    assert "x" not in found.coords
