"""Answers from statistics, against xarray and dask over the same values elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
import zarr
from contestants import CONTESTANTS, Ours
from distant import HttpStorage, served
from runner import Case, Figure, Watch
from wheres import fill

import zarr_manifests as zm
from zarr_manifests.engine.bulk_chunks import find_chunks
from zarr_manifests.engine.chunk_statistics import cell_weights
from zarr_manifests.format.zone_maps import Bounds
from zarr_manifests.grid import Box
from zarr_manifests.planning.meaning import Meaning, zones_of_chunks
from zarr_manifests.store import contents_of

_WEIGHTS = {"lat": "cos"}
_DIMS = ("time", "lat", "lon")
_LENGTH = 1 << 20


def weighing(case: Case) -> Iterator[Figure]:
    """The global mean of each day, weighted by area, of statistics of chunks that are elsewhere."""
    days, rows = case.sizes["days"], case.sizes["rows"]
    lat, lon = np.linspace(90, -90, rows), np.arange(2.0 * rows)
    times = pd.date_range("2000-01-01", periods=days, freq="D")
    first = np.zeros((1, rows, 2 * rows), np.float32)
    ds = xr.Dataset({"t2m": (_DIMS, first)}, {"time": times[:1], "lat": lat, "lon": lon})
    ds["t2m"].encoding = {"chunks": first.shape}
    ds["time"].encoding["chunks"] = (1024,)
    repo = zm.create(case.folder / "r", virtual_containers={"raw": "file:///raw"})
    session = repo.writable_session()
    zm.to_session(ds, session)
    zarr.open_array(session.store, path="t2m", mode="r+").resize((days, *first.shape[1:]))
    stamps = zarr.open_array(session.store, path="time", mode="r+")
    stamps.resize((days,))
    stamps[:] = np.arange(days)
    _measure(session, days, first.size)
    session.commit("all days")
    repo.compact()
    while True:
        with Watch() as watch:
            session = zm.open(repo.storage).readonly_session()
            found = session.summarize("t2m", by="time", weights=_WEIGHTS)
        assert (found.attrs["chunks_answered"], found.attrs["chunks_read"]) == (days, 0)
        yield watch.figure()


def _measure(session: zm.Session, days: int, cells: int) -> None:
    """Refer to a chunk for each day, and give it statistics."""
    contents = contents_of(session.store)
    node = contents.array_at("t2m")
    weights = cell_weights(contents, node, _WEIGHTS)
    assert weights is not None
    coords = Box((0, 0, 0), (days, 1, 1)).unravel(np.arange(days))
    offset = np.arange(days) * _LENGTH
    files, etags = ["file:///raw/all"], ["1"]
    session.store.set_virtual_refs(
        "t2m", coords, files, 0 * offset, offset, 0 * offset + _LENGTH, etags=etags
    )
    none = np.zeros(days, np.int64)
    low = 250 + np.arange(days, dtype="f4") % 30
    sums = (low.astype("f8") + 20) * cells
    known: Any = {"weighted": sums * 0.6, "weights": np.full(days, cells * 0.6)}
    known |= {"digest": weights.digest}
    bounds = Bounds(low, low + 60, none == 0, none, none, sums, none, **known)
    _, table = find_chunks(contents, "t2m", Box((0, 0, 0), (days, 1, 1)), None)
    assert table is not None
    zones = zones_of_chunks(Meaning.of(node.documents).digest, table, bounds)
    assert zones is not None
    contents.changes.add_zones(node.node_id, zones)


def taking_means(
    case: Case, *, weights: dict[str, str] | None = None, cut: bool = False
) -> Iterator[Figure]:
    """The mean of each day, weighted, or of a box whose edges cut chunks; by xarray elsewhere.

    Each opens its store anew. Others than this one read by xarray and dask.
    """
    days, side, chunk = (case.sizes[name] for name in ("days", "side", "chunk"))
    chunks = (chunk, 2 * chunk, 2 * chunk) if cut else (chunk, side, 2 * side)
    shape = (days, side, side if cut else 2 * side)
    contestant = CONTESTANTS[case.contestant](case.folder)
    contestant.create()
    store, commit = contestant.writer()
    lat = np.linspace(90, -90, side)
    ds = xr.Dataset(coords={"time": np.arange(days), "lat": lat, "lon": np.arange(shape[2])})
    ds.to_zarr(store, consolidated=False, mode="w")
    array = zarr.create_array(
        store, name="t", shape=shape, chunks=chunks, dtype="f4", dimension_names=_DIMS
    )
    array.attrs["statistics_weights"] = "lat: cos"
    rng = np.random.default_rng(0)
    for first in range(0, days, chunk):
        array[first : first + chunk] = np.round(rng.normal(size=array[:chunk].shape), 2)
    commit()
    if isinstance(contestant, Ours):
        contestant.open().compute_statistics()
    edge = chunk // 2
    inner = slice(edge, -edge if edge else None)
    box: dict[str, Any] = {"time": inner, "lat": inner, "lon": slice(edge, None)} if cut else {}
    expected = array[tuple(box.values()) if cut else ...].astype("f8")
    if weights is None:
        expected = expected.mean()
    else:
        expected = (expected.mean(2) * np.cos(np.deg2rad(lat))).sum(1) / np.cos(
            np.deg2rad(lat)
        ).sum()
    while True:
        with Watch() as watch:
            if isinstance(contestant, Ours):
                labels = {"lat": slice(lat[edge], lat[-1 - edge])} | {
                    dim: slice(edge, size - 1 - edge if dim == "time" else None)
                    for dim, size in zip(_DIMS, shape, strict=True)
                    if dim != "lat"
                }
                asked: Any = (labels, None) if cut else (None, "time")
                session = contestant.open().readonly_session()
                found = session.summarize("t", asked[0], by=asked[1], weights=weights)
                mean = found["mean"].values
            else:
                t = xr.open_zarr(contestant.reader(), consolidated=False)["t"].isel(box)
                if weights is None:
                    mean = t.mean(dtype="f8").compute().values
                else:
                    mean = (
                        t.weighted(np.cos(np.deg2rad(t.lat))).mean(["lat", "lon"]).compute().values
                    )
        np.testing.assert_allclose(mean, expected, rtol=1e-5, atol=1e-7)
        yield watch.figure()


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
