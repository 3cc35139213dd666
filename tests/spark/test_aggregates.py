"""Aggregates on Spark, against xarray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from pyspark.sql import SparkSession

import zarr_manifests as zm
import zarr_manifests.spark as zms
from zarr_manifests import summarizing
from zarr_manifests.errors import InvalidArgumentError

NO_SPARK: Any = None


@pytest.fixture
def air(tmp_path: Path) -> tuple[str, xr.Dataset]:
    """Half of the chunks of one array have no statistics; the other array has all."""
    times = pd.date_range("2001-01-25", periods=12, freq="D")
    values = np.random.default_rng(0).normal(size=(12, 6))
    values[3, 2] = np.nan
    ds = xr.Dataset({"t": (("time", "x"), values), "n": (("time", "x"), values > 0)})
    ds = ds.assign_coords(time=times, x=np.arange(6.0))
    place = str(tmp_path / "air")
    encoding = {name: {"chunks": (2, 3)} for name in ("t", "n")}
    zm.write(ds.isel(time=slice(0, 6)), place, message="known", encoding=encoding)
    zm.write(ds[["t", "n"]].isel(time=slice(6, None)), place, append_dim="time", statistics=False)
    return place, ds


@pytest.mark.parametrize("at_least", [1, 1000], ids=["in tasks", "here"])
def test_aggregates_are_those_of_xarray(
    spark: SparkSession,
    air: tuple[str, xr.Dataset],
    at_least: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, ds = air
    monkeypatch.setattr(summarizing, "_FOR_TASKS", at_least)
    values = {"t": ["mean", "max", "count"], "/n": ["sum"]}
    found = zms.aggregate(spark, place, values, by={"time": "month"}, where="x >= 2")
    assert found.columns == ["month", "t_mean", "t_max", "t_count", "n_sum"]
    rows = found.orderBy("month").collect()
    months = ds.sel(x=slice(2, None)).groupby("time.month")
    assert [row.month for row in rows] == [1, 2]
    np.testing.assert_allclose([row.t_mean for row in rows], months.mean(...)["t"], 1e-12)
    np.testing.assert_array_equal([row.t_max for row in rows], months.max(...)["t"])
    np.testing.assert_array_equal([row.t_count for row in rows], months.count(...)["t"])
    np.testing.assert_array_equal([row.n_sum for row in rows], months.sum(...)["n"])
    (whole,) = zms.aggregate(spark, place, {"t": ["mean"]}, weights={"x": "x"}).collect()
    assert whole.asDict() == {"t_mean": pytest.approx(float(ds.t.weighted(ds.x).mean()))}


def test_what_cannot_be_aggregated_is_told(air: tuple[str, xr.Dataset]) -> None:
    for values, said in (
        ({"t": ["meen"]}, "did you mean mean?"),
        ({}, "names nothing"),
        ({"t": ["mean"]}, "is about values"),
    ):
        with pytest.raises(InvalidArgumentError, match=said):
            zms.aggregate(NO_SPARK, air[0], values, where="t > 1")
