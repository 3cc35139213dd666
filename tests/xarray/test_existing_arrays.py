"""What goes to existing arrays is checked and stored there as by xarray, whatever they are of."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from zarr.core.codec_pipeline import BatchedCodecPipeline
from zarr.registry import fully_qualified_name, register_pipeline

import zarr_manifests as zm
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.storage import MemoryStorage


def rows(labels: Any, **encoding: Any) -> xr.Dataset:
    ds = xr.Dataset({"t": ("time", np.arange(float(len(labels))))}, {"time": labels})
    ds.time.encoding = encoding
    return ds


def grid(day: int, x: Any) -> xr.Dataset:
    return xr.Dataset({"t": (("time", "x"), [[1.0, 2.0]])}, {"time": [day], "x": x})


def opened(where: Any) -> xr.Dataset:
    return xr.open_dataset(where, engine="zarr_manifests").load()


PACKED = {"dtype": "i2", "scale_factor": 0.5, "_FillValue": -1}


@pytest.mark.parametrize(
    ("first", "more"),
    [
        (rows(np.array([0, 1], "i2")), rows([70000])),
        (rows(np.array([0, 1], "i2")), rows([2.5])),
        (rows([1.0, 2.0], **PACKED), rows([70000.0])),
        (grid(0, [10, 11]), grid(1, [10.4, 11.4])),
    ],
    ids=["range", "fraction", "packed", "grid"],
)
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.filterwarnings("ignore:saving variable None with floating point")
def test_coordinates_that_do_not_fit_are_refused(
    first: xr.Dataset, more: xr.Dataset, chunked: bool
) -> None:
    """Also those that an append encodes before, to compare them with what is there."""
    storage = MemoryStorage()
    zm.write(first, storage, message="first")
    with pytest.raises(InvalidArgumentError, match="do not fit the array that is there"):
        zm.write(more.chunk() if chunked else more, storage, message="m", append_dim="time")
    xr.testing.assert_equal(opened(storage), first)


@pytest.mark.filterwarnings("ignore:The data type:zarr.errors.UnstableSpecificationWarning")
def test_single_bytes_are_no_characters_of_a_text() -> None:
    storage, flags = MemoryStorage(), np.array([b"a", b"b"])
    zm.write(rows(flags).assign(f=("time", flags)), storage, message="first")
    more = rows(np.array([b"c"])).assign(f=("time", np.array([b"z"])))
    zm.write(more, storage, message="more", append_dim="time")
    assert xr.open_dataset(
        storage, engine="zarr_manifests", concat_characters=False
    ).f.values.tolist() == [b"a", b"b", b"z"]
    with pytest.raises(ValueError, match="Mismatched dtypes"):
        zm.write(more.assign_coords(time=[b"de"]), storage, message="longer", append_dim="time")


class WaitingPipeline(BatchedCodecPipeline):
    """Somebody else's, which needs an event loop."""

    async def read(self, *args: Any, **options: Any) -> Any:
        await asyncio.to_thread(bool)
        return await super().read(*args, **options)

    async def write(self, *args: Any, **options: Any) -> Any:
        await asyncio.to_thread(bool)
        return await super().write(*args, **options)


@pytest.mark.parametrize("in_loop", [False, True])
def test_pipelines_of_others_run_in_zarrs_event_loop(in_loop: bool) -> None:
    register_pipeline(WaitingPipeline)
    storage = MemoryStorage()

    async def append() -> None:
        zm.write(rows([3]), storage, message="m", append_dim="time")

    with zarr.config.set({"codec_pipeline.path": fully_qualified_name(WaitingPipeline)}):
        zm.write(rows([1, 2]), storage, message="first")
        if in_loop:
            asyncio.run(append())
        else:
            zm.write(rows([3]), storage, message="m", append_dim="time")
    assert opened(storage).time.values.tolist() == [1, 2, 3]
