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
    found = zms.aggregate(spark, place, values, by="time.month", where="x >= 2")
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


def test_columns_have_the_types_of_rows_and_times_their_labels(
    spark: SparkSession, tmp_path: Path
) -> None:
    steps = {"all": ("all", [0, 1]), "t": ("t", pd.date_range("2001", periods=2))}
    large = np.array([[2**63 + 5, 1], [2, 3]], "u8")
    ds = xr.Dataset({"n": (("all", "t"), large), "x": ("t", [1.0, np.nan])}, steps)
    late = ds.assign_coords(t=pd.date_range("2001-01-02", periods=2))
    noleap = ds[["x"]].assign_coords(t=xr.date_range("2001", periods=2, calendar="noleap"))
    zm.write(ds, str(tmp_path), message="n")
    for group, some in (("late", late), ("noleap", noleap)):
        zm.write(some, str(tmp_path), group=group, message=group)
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        found = zms.aggregate(spark, tmp_path, {"n": ["max", "sum"]}, by=["all", "t"])
        read = zms.read(spark, tmp_path, "n").orderBy("all", "t")
        assert found.select("all", "t", "n_max").toArrow() == read.toArrow().rename_columns(
            ["all", "t", "n_max"]
        )
        wanted = {field.dataType for field in zms.read(spark, tmp_path, "n").schema}
        assert {field.dataType for field in found.schema} == wanted
        assert found.orderBy("all", "t").first()["n_sum"] == 2**63 + 5
        empty = zms.aggregate(spark, tmp_path, {"n": ["max"]}, by="t", where="t > '2020'")
        assert (empty.columns, empty.count()) == (["t", "n_max"], 0)
        both = {"x": ["count", "mean"], "late/x": ["count", "mean"]}
        rows = zms.aggregate(spark, tmp_path, both, by="t").orderBy("t").collect()
        none = [0, None]
        assert [[*row[1:]] for row in rows] == [[1, 1, *none], [*none, 1, 1], [*none, *none]]
        rows = zms.aggregate(spark, tmp_path, {"noleap/x": ["mean"]}, by="t").collect()
        assert [row.t for row in rows] == ["2001-01-01T00:00:00", "2001-01-02T00:00:00"]
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")


def test_what_cannot_be_aggregated_is_told(air: tuple[str, xr.Dataset]) -> None:
    for values, said in (
        ({"t": ["meen"]}, "did you mean mean?"),
        ({}, "names nothing"),
        ({"t": "mean"}, "and so on, not"),
        ({"t": ["mean"]}, "is about values"),
    ):
        with pytest.raises(InvalidArgumentError, match=said):
            zms.aggregate(NO_SPARK, air[0], values, where="t > 1")
