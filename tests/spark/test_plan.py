"""Planning reads without Spark: limits, and what is asked for."""

from __future__ import annotations

import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xarray as xr
import zarr

import zarr_manifests as zm
from zarr_manifests import Repository
from zarr_manifests.errors import InvalidArgumentError, ManifestsError, NotFoundError
from zarr_manifests.spark.plan import ReadOptions, SparkFacts, plan_read

FACTS = SparkFacts(parallelism=2)


def test_planning_takes_memory_and_steps_by_axis_and_not_by_cell(tmp_path: Path) -> None:
    """An array of 10^13 cells in 10^10 chunks has axes of 10^6 and 10^7."""
    repo = zm.create(tmp_path / "repo")
    with repo.transaction(message="large") as store:
        how = {"shape": (10**6, 10**7), "chunks": (10, 100), "dtype": "f4", "fill_value": 5}
        zarr.create_array(store, name="t", dimension_names=["y", "x"], **how)
    options, steps = ReadOptions(where="x >= 5 AND y < 900000 AND t > 3"), 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal steps
        steps += 1

    tracemalloc.start()
    try:
        job = plan_read(repo, options, FACTS)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # A where is compared with each position of both axes.
    assert most < 200e6
    assert 5_000 < job.tasks <= 10_000
    sys.setprofile(count)
    try:
        plan_read(repo, options, FACTS)
    finally:
        sys.setprofile(None)
    assert steps < 200_000  # calls and returns of functions, a fraction of the 10^6 positions


def test_arrays_whose_dimensions_have_no_names_are_told_of(tmp_path: Path) -> None:
    repo = zm.create(tmp_path / "repo")
    with repo.transaction(message="an array") as store:
        zarr.create_array(store, name="t", shape=(2,), dtype="i4")
    with pytest.raises(InvalidArgumentError, match="no variables, which are arrays whose dim"):
        plan_read(repo, ReadOptions(), FACTS)


def test_sixteen_million_rows_are_several_tasks(tmp_path: Path) -> None:
    repo = zm.create(tmp_path / "repo")
    with repo.transaction(message="an array of 64 chunks") as store:
        how = {"shape": (64, 250_000), "chunks": (1, 250_000), "dtype": "f4"}
        zarr.create_array(store, name="t", dimension_names=["y", "x"], **how)
    assert 4 < plan_read(repo, ReadOptions(), SparkFacts()).tasks < 20


def test_chunks_without_a_value_are_not_read(tmp_path: Path) -> None:
    some = np.where(np.arange(48) % 24 < 6, 1.0, np.nan)
    ds = xr.Dataset({"a": ("x", some), "b": ("x", np.roll(some, 1))})
    how = {"a": {"chunks": 6}, "b": {"chunks": 12}}
    zm.write(ds, tmp_path / "repo", message="write", encoding=how)
    job = plan_read(tmp_path / "repo", ReadOptions(nan="drop"), FACTS)
    assert job.chunks().tolist() == [[[0], [1]], [[2], [3]]]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """Variables of other dimensions, of names that differ in case, and of odd dimensions."""
    repo = zm.create(tmp_path_factory.mktemp("mixed") / "repo")
    u = xr.DataArray(np.zeros((2, 37)), dims=("time", "lat"))
    coords = {"time": pd.date_range("1999-01-15 12:00", periods=2), "lat": np.linspace(90, -90, 37)}
    land = ("lat", np.ones(37, bool))
    zm.write(xr.Dataset({"u": u, "U": u, "land": land}, coords), repo, message="air", group="air")
    with repo.transaction(message="an array without names, and others with odd ones") as store:
        zarr.create_array(store, name="air/nameless", shape=(2,), dtype="f4")
        for name, dims in (("square", ["x", "x"]), ("i", ["i", "j"])):
            zarr.create_array(
                store, name=f"air/{name}", shape=(2, 2), dtype="f4", dimension_names=dims
            )
        kind = [("a", "i4"), ("b", "f4")]
        zarr.create_array(store, name="air/odd", shape=(2,), dtype=kind, dimension_names=["x"])
    return repo


@pytest.mark.filterwarnings("ignore:The data type:zarr.errors.UnstableSpecificationWarning")
@pytest.mark.parametrize(
    ("variables", "error", "message"),
    [
        ("w", NotFoundError, "no variable 'w' in group /air; there are: U, "),
        (None, InvalidArgumentError, "same dimensions"),
        ("nameless", InvalidArgumentError, "'nameless' in group /air have no"),
        ("square", InvalidArgumentError, r"have a name twice \(x, x\)"),
        ("odd", InvalidArgumentError, "'odd' has values of type"),
    ],
)
def test_variables_that_cannot_be_rows_are_told(
    mixed: Repository, variables: Any, error: type[ManifestsError], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan_read(mixed, ReadOptions(group="air", variables=variables), FACTS)
