"""A small dataset of hours on a grid, as rows and as files of rows."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xarray as xr

import zarr_manifests as zm
from zarr_manifests import Repository
from zarr_manifests.storage import Storage

SCHEMA = "time timestamp, lat double, lon double, u float, v float"
DIMS = ("time", "lat", "lon")
_HOURS = np.datetime64("2024-01-01", "ns") + np.arange(480) * np.timedelta64(1, "h")


def hours(stop: int, start: int = 0) -> xr.Dataset:
    """Two variables, whose values say which cell they are of."""
    shape = (stop - start, 3, 4)
    values = np.arange(start * 12, stop * 12, dtype="f4").reshape(shape)
    return xr.Dataset(
        {"u": (DIMS, values), "v": (DIMS, -values)},
        {
            "time": _HOURS[start:stop],
            "lat": np.array([60.0, 45.0, 30.0]),
            "lon": np.arange(4) * 10.0,
        },
    )


def made(place: str | Path | Storage, stop: int = 4) -> Repository:
    """A repository with the first hours; its chunks have three, so that appends share them."""
    repo = zm.create(place, zm.Config(inline_chunk_bytes=0))
    encoding: dict[Hashable, Any] = {name: {"chunks": (3, 2, 4)} for name in ("u", "v")}
    zm.write(hours(stop), repo, message="first hours", encoding=encoding)
    return repo


def found(repo: Repository) -> xr.Dataset:
    """What is in the repository."""
    place: Any = repo
    return xr.open_dataset(place, engine="zarr_manifests", chunks={}).compute()


def put_file(ds: xr.Dataset, folder: Path, number: int) -> None:
    """Its cells as rows of a file, in no order; files are seen in the order of their numbers."""
    frame = ds.to_dataframe().reset_index().sample(frac=1, random_state=1)
    frame["time"] = frame["time"].dt.tz_localize("UTC").astype("datetime64[us, UTC]")
    folder.mkdir(exist_ok=True)
    hidden = folder / f".{number}"
    pq.write_table(pa.Table.from_pandas(frame[["time", "lat", "lon", "u", "v"]]), hidden)
    hidden.rename(folder / f"{number:03d}.parquet")
