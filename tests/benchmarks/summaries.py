"""Answers from statistics, against xarray and dask over the same values in Zarr's own store."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
import zarr
from distant import HttpStorage, served
from runner import Case, Figure, Watch
from wheres import fill

import zarr_manifests as zm
from zarr_manifests.engine.edit.bulk_chunks import find_chunks
from zarr_manifests.engine.edit.chunk_statistics import cell_weights
from zarr_manifests.format.zone_maps import Bounds, Weighted
from zarr_manifests.grid import Box
from zarr_manifests.planning.zones.meaning import Meaning, zones_of_chunks
from zarr_manifests.store import contents_of

_WEIGHTS = {"lat": "cos"}
_LENGTH = 1 << 20


def weighing(case: Case) -> Iterator[Figure]:
    """The global mean of each day, weighted by area; and of the days that hold values, by xarray.

    Most days are statistics of chunks that are elsewhere: only the last ones have values.
    """
    days, real = case.sizes["days"], case.sizes["real_days"]
    lat, lon = np.linspace(90, -90, case.sizes["rows"]), np.arange(2.0 * case.sizes["rows"])
    times = pd.date_range("2000-01-01", periods=days, freq="D")
    rng = np.random.default_rng(0)
    base = 280 + 30 * np.cos(np.deg2rad(lat))[:, None] + rng.normal(size=(len(lat), len(lon)))
    values = np.stack([np.roll(base + i % 30, 3 * i, 1) for i in range(real)]).astype("f4")
    ds = xr.Dataset({"t2m": (("time", "lat", "lon"), values)}, {"lat": lat, "lon": lon})
    ds = ds.assign_coords(time=times[-real:])
    ds["t2m"].attrs["statistics_weights"] = "lat: cos"
    ds["t2m"].encoding = {"chunks": (1, len(lat), len(lon))}
    plain = case.folder / "plain.zarr"
    ds.to_zarr(plain, consolidated=False)
    repo = zm.create(case.folder / "r", virtual_containers={"raw": "file:///raw"})
    _prepend(repo, ds, times)
    while True:
        with Watch() as watch:
            found = (
                zm.open(repo.storage)
                .readonly_session()
                .summarize("t2m", by="time", weights=_WEIGHTS)
            )
        assert found.attrs["chunks_read"] == 0
        mean = found["mean"].isel(time=slice(-real, None))
        seconds = {}
        for name, answer in _answers(repo, plain, times[-real:]).items():
            with Watch() as other:
                expected = answer()
            seconds[name] = other.figure().value
            np.testing.assert_allclose(mean.values, expected, rtol=1e-6)
        part = 100 * seconds["statistics"] / seconds["xarray"]
        extras = {"percent of xarray's time, days with values": part}
        yield replace(watch.figure(), extras=extras)


def _prepend(repo: zm.Repository, ds: xr.Dataset, times: pd.DatetimeIndex) -> None:
    """Write the values as the last ones of all days; the others have statistics and no values."""
    session = repo.writable_session()
    whole = ds.reindex(time=times[:1]).assign_coords(time=times[:1])
    whole["t2m"].encoding = ds["t2m"].encoding
    whole["time"].encoding["chunks"] = (1024,)
    zm.to_session(whole, session)
    array = zarr.open_array(session.store, path="t2m", mode="r+")
    array.resize((len(times), *array.shape[1:]))
    stamps = zarr.open_array(session.store, path="time", mode="r+")
    stamps.resize((len(times),))
    stamps[:] = np.arange(len(times))
    first = len(times) - ds.sizes["time"]
    zm.to_session(
        ds.drop_vars(("lat", "lon", "time")), session, region={"time": slice(first, None)}
    )
    contents = contents_of(session.store)
    node = contents.array_at("t2m")
    weights = cell_weights(contents, node, _WEIGHTS)
    assert weights is not None
    coords = Box((0, 0, 0), (first, 1, 1)).unravel(np.arange(first))
    offset = np.arange(first) * _LENGTH
    files, etags = ["file:///raw/all"], ["1"]
    session.store.set_virtual_refs(
        "t2m", coords, files, 0 * offset, offset, 0 * offset + _LENGTH, etags=etags
    )
    cells, none = array.shape[1] * array.shape[2], np.zeros(first, np.int64)
    low = 250 + np.arange(first, dtype="f4") % 30
    sums = (low.astype("f8") + 20) * cells
    weighted = Weighted(weights.digest, sums * 0.6, np.full(first, cells * 0.6))
    bounds = Bounds(low, low + 60, none == 0, none, none, sums, none, weighted)
    _, table = find_chunks(contents, "t2m", Box((0, 0, 0), (first, 1, 1)), None)
    assert table is not None
    zones = zones_of_chunks(Meaning.of(node.documents).digest, table, bounds)
    assert zones is not None
    contents.changes.add_zones(node.node_id, zones)
    session.commit("all days")
    repo.compact()


def _answers(
    repo: zm.Repository, plain: Path, days: pd.DatetimeIndex
) -> dict[str, Callable[[], Any]]:
    """The means of these days, in both ways."""

    def by_xarray() -> Any:
        ds = xr.open_zarr(plain, consolidated=False)
        cos = np.cos(np.deg2rad(ds["lat"]))
        return ds["t2m"].weighted(cos).mean(["lat", "lon"]).compute().values

    def by_statistics() -> Any:
        session, chosen = zm.open(repo.storage).readonly_session(), {"time": slice(days[0], None)}
        return session.summarize("t2m", chosen, by="time", weights=_WEIGHTS)["mean"].values

    return {"xarray": by_xarray, "statistics": by_statistics}


def boxing(case: Case) -> Iterator[Figure]:
    """The mean of a box whose edges cut chunks."""
    count, chunk = case.sizes["chunks_of_an_axis"], case.sizes["chunk"]
    rng = np.random.default_rng(0)
    chunks = (chunk, 2 * chunk, 2 * chunk)
    days, side, _ = shape = tuple(count * length for length in chunks)
    repo, plain = zm.create(case.folder / "r"), case.folder / "plain.zarr"
    session = repo.writable_session()
    dims = ("time", "lat", "lon")
    for store in (session.store, zarr.storage.LocalStore(plain)):
        array = zarr.create_array(
            store, name="t", shape=shape, chunks=chunks, dtype="f4", dimension_names=dims
        )
        for first in range(0, days, chunk):
            array[first : first + chunk] = np.round(rng.normal(size=array[:chunk].shape), 2)
    session.commit("values")
    repo.compute_statistics()
    cut = chunk // 2
    box = {"time": slice(cut, days - cut), "lat": slice(cut, side - cut), "lon": slice(cut, None)}
    while True:
        with Watch() as other:
            ds = xr.open_zarr(plain, consolidated=False)
            float(ds["t"].isel(box).mean(dtype="f8").compute())
        with Watch() as watch:
            found = zm.open(repo.storage).readonly_session().summarize("t", box)
        assert found.attrs["chunks_answered"] > 0
        part = 100 * watch.figure().value / other.figure().value
        read = 100 * found.attrs["chunks_read"] / array.nchunks
        extras = {"percent of xarray's time": part, "percent of the chunks read": read}
        yield replace(watch.figure(), extras=extras)


def extremes_far(case: Case) -> Iterator[Figure]:
    """The extremes of an array of a million chunks, far away, with nothing in memory."""
    shutil.rmtree(case.folder / "r", ignore_errors=True)
    side = max(1, case.sizes["chunks"] // 500)
    fill(replace(case, folder=case.folder / "r"), (side, 500))
    with served(case.folder / "r", case.sizes["delay_ms"]) as port:
        while True:
            asked: list[int] = []

            class Counting(HttpStorage):
                def _asked(self, path: str, headers: dict[str, str]) -> bytes:
                    data = super()._asked(path, headers)
                    asked.append(len(data))  # noqa: B023 - used before the next round
                    return data

            with Watch() as watch:
                repo = zm.open(Counting(port, case.folder / "r"))
                found = repo.readonly_session().summarize("a")
            assert float(found["min"]) < float(found["max"])
            extras = {"requests": float(len(asked)), "bytes read": float(sum(asked))}
            yield replace(watch.figure(), extras=extras)
