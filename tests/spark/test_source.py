"""Recipes, by which tasks decode without xarray, against xarray; and what a task imports."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xarray as xr
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from xarray.backends.zarr import FillValueCoder

import zarr_manifests as zm
from effort import examples
from zarr_manifests.spark.plan import ReadOptions, SparkFacts, plan_read
from zarr_manifests.spark.source import Source

WHOLE = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", ">i2")
NUMBERS = (*WHOLE, "u8", "f2", "f4", "f8", ">f4")
PACKED = {"scale_factor": 0.01, "add_offset": 273.15}
ATTRIBUTES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({}, (*NUMBERS, "b1")),
    ({"_FillValue": 9}, NUMBERS),
    ({"missing_value": [7, 8]}, NUMBERS),
    ({"missing_value": 1e20}, NUMBERS),
    ({"scale_factor": 0.1}, NUMBERS),
    (PACKED | {"_FillValue": 99}, NUMBERS),
    ({"_Unsigned": "true", "_FillValue": -1}, ("i1", "i2", "i4", "i8")),
    ({"_Unsigned": "false", "_FillValue": 5}, ("u1", "u2", "u4", "u8")),
    ({"units": "days", "_FillValue": 3}, NUMBERS),
    ({"units": "days since 2000-01-01"}, WHOLE),
    ({"units": "hours since 1900-01-01T06:00", "_FillValue": 100}, WHOLE),
    ({"units": "microseconds since 1582-10-15", "calendar": "standard"}, WHOLE),
    ({"units": "seconds", "dtype": "timedelta64[ns]", "missing_value": 0}, WHOLE),
]
CASES = [(attributes, dtype) for attributes, dtypes in ATTRIBUTES for dtype in dtypes]


@pytest.fixture(scope="module")
def sources() -> list[Source]:
    """A group with one variable for each case."""
    repo = zm.create("memory://recipes")
    with repo.transaction(message="variables") as store:
        for number, (attributes, dtype) in enumerate(CASES):
            group = zarr.create_group(store, path=str(number))
            array = group.create_array("v", shape=(4,), dtype=dtype, dimension_names=["x"])
            array.attrs.update(attributes)
            if "_FillValue" in attributes:
                fill = np.array(attributes["_FillValue"]).astype(array.dtype)[()]
                array.attrs["_FillValue"] = FillValueCoder.encode(fill, array.dtype)
    return [Source(repo.readonly_session(), str(number)) for number in range(len(CASES))]


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::xarray.SerializationWarning")
@given(st.data(), st.sampled_from(range(len(CASES))))
@settings(deadline=None, max_examples=examples(500))
def test_recipes_decode_as_xarray(sources: list[Source], data: st.DataObject, case: int) -> None:
    source, (attributes, dtype) = sources[case], CASES[case]
    recipe = source.recipe("v")
    assert recipe is not None, (attributes, dtype)
    some = st.sampled_from(np.array([0, 1, 3, 5, 7, 8, 9, 99, 100]).astype(dtype).tolist())
    elements = some | hnp.from_dtype(np.dtype(dtype))
    values = data.draw(hnp.arrays(dtype, st.integers(1, 5), elements=elements))
    found = recipe.decode(values)
    if found is None:  # far times, of which xarray decides
        assert "since" in attributes["units"] or "dtype" in attributes
        return
    expected = source.decode("v", values)
    assert (found.dtype, found.tobytes()) == (expected.dtype, expected.tobytes())


def test_what_tasks_cannot_decode_has_no_recipe() -> None:
    repo = zm.create("memory://no-recipes")
    raw = xr.Dataset(
        {
            "text": ("x", ["a", "b"]),
            "float_time": ("x", [0.0, 0.5], {"units": "days since 2000-01-01"}),
            "noleap": ("x", [0, 1], {"units": "days since 2000-01-01", "calendar": "noleap"}),
            "no_calendar": ("x", [0, 1], {"units": "days since the flood"}),
            "large": ("x", [0, 1], {"missing_value": 2**70}),
        }
    )
    with repo.transaction(message="write") as store:
        raw.to_zarr(store, consolidated=False)
    source = Source(repo.readonly_session(), "/")
    assert [source.recipe(name) for name in raw.data_vars] == 5 * [None]


TASK = """
import pickle, sys
import numpy as np, pyarrow as pa
import pyspark.worker
job = pickle.load(sys.stdin.buffer)
from zarr_manifests.spark.worker import run_arrow
numbers = pa.Array.from_buffers(pa.int64(), 1, [None, pa.py_buffer(np.zeros(1, np.int64))])
batches = run_arrow(job, [pa.RecordBatch.from_arrays([numbers], ["id"])])
rows = sum(batch.num_rows for batch in batches)
print(rows, [name for name in ("xarray", "pandas") if name in sys.modules])
"""


def test_a_task_imports_neither_xarray_nor_pandas(tmp_path: Path) -> None:
    values = np.arange(20.0).reshape(4, 5)
    values[0, 0] = np.nan
    ds = xr.Dataset(
        {"u": (("time", "y"), values), "v": (("time", "y"), values)},
        {"time": pd.date_range("2000-01-01", periods=4), "y": np.arange(5.0)},
    )
    zm.write(
        ds,
        tmp_path / "repo",
        message="write",
        encoding={"v": PACKED | {"dtype": "i2", "_FillValue": -9}},
    )
    job = plan_read(tmp_path / "repo", ReadOptions(nan="drop"), SparkFacts())
    done = subprocess.run(
        [sys.executable, "-c", TASK], input=pickle.dumps(job), capture_output=True, check=False
    )
    assert done.stdout.decode().split(maxsplit=1) == ["19", "[]\n"], done.stderr.decode()
