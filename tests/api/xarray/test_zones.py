"""The statistics of chunks that `write` records are those of a slow look at what is stored."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import dask
import numpy as np
import pytest
import xarray as xr
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs.numcodecs import BitRound

import zarr_manifests as zm
from effort import examples
from zarr_manifests.storage.memory import MemoryStorage

type Values = np.ndarray[Any, Any]
type Chunk = tuple[int, ...]

ROWS, COLUMNS = 3, 2  # of a chunk


def coords(repository: zm.Repository, path: str = "t", **how: Any) -> set[Chunk]:
    return {*map(tuple, repository.readonly_session().chunk_refs(path, **how).coords.tolist())}


def check(repository: zm.Repository, path: str = "t", partly: Collection[Chunk] = ()) -> None:
    """All chunks have exact statistics, but for those that were written partly."""
    assert coords(repository, path, statistics=True) | {*partly} >= coords(repository, path)
    found = repository.readonly_session().chunk_refs(path, statistics=True)
    stored = xr.open_dataset(repository, engine="zarr_manifests", decode_cf=False)[path]
    mark = stored.attrs.get("_FillValue", np.nan)
    array = zarr.open_array(repository.writable_session().store, path=path)
    chunk = array.shards or array.chunks
    for row, at in enumerate(map(tuple, found.coords.tolist())):
        if at in partly:
            continue
        inside = np.asarray(
            array[tuple(slice(a * c, (a + 1) * c) for a, c in zip(at, chunk, strict=True))]
        )
        counts = gone(inside, mark).sum(), (inside != inside).sum(), inside.size
        assert (found.missing[row], found.nan[row], found.cells[row]) == counts
        kept = inside[~gone(inside, mark)]
        assert found.bounded[row] == (kept.size > 0)
        if kept.size:
            ends = np.sort(kept)[[0, -1]]
            exact = np.char.encode(ends, "utf-8") if ends.dtype.kind == "U" else ends
            assert [found.low[row], found.high[row]] == exact.tolist()
        if kept.dtype.kind in "fi":
            assert found.sums[row] == pytest.approx(kept.sum(dtype="f8"), rel=1e-12)
        else:
            assert np.isnan(found.sums[row])


def gone(values: Values, mark: Any) -> Values:
    return (values != values) | (values == mark)


FIELDS: dict[str, Callable[[Values], tuple[Any, dict[str, Any]]]] = {
    "with NaN": lambda n: (np.where(n % 3 == 0, np.nan, n), {"dtype": "f8"}),
    "float32 of float64": lambda n: (n / 7, {"dtype": "f4", "_FillValue": np.float32(1e20)}),
    "packed": lambda n: (
        np.where(n % 5 == 0, np.nan, n * 0.5),
        {"dtype": "i2", "scale_factor": -0.5, "add_offset": 3.0, "_FillValue": 99},
    ),
    "times": lambda n: (n * np.timedelta64(1, "h"), {"units": "hours", "dtype": "i8"}),
}


@st.composite
def datasets(draw: Any) -> xr.Dataset:
    rows, columns = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    numbers = draw(st.permutations(range(rows * columns)))
    values, encoding = FIELDS[draw(st.sampled_from(sorted(FIELDS)))](
        np.array(numbers).reshape(rows, columns)
    )
    ds = xr.Dataset({"t": (("x", "y"), values)}, {"x": np.arange(rows)})
    ds.t.encoding = {**encoding, "chunks": (ROWS, COLUMNS)}
    return ds.chunk(x=ROWS, y=COLUMNS) if draw(st.booleans()) else ds


@pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")
@settings(max_examples=examples(30))
@given(datasets(), st.sampled_from(["append", "replace", "region"]))
def test_statistics_are_those_of_the_stored_chunks(ds: xr.Dataset, how: str) -> None:
    repository = zm.create(MemoryStorage())
    rows = ds.sizes["x"]
    more = ds.isel(x=slice(None, None, -1)).load().assign_coords(x=ds.x + rows)
    more.t.encoding = ds.t.encoding
    with dask.config.set(scheduler="threads", num_workers=2):
        zm.write(ds, repository)
        check(repository)
        check(repository, "x")
        if how == "region":
            zm.write(more.drop_vars("x"), repository, region={"x": slice(0, rows)})
            check(repository)
            return
        zm.write(more, repository, append_dim="x")
        check(repository, "t", {(rows // ROWS, at) for at in range(3)} if rows % ROWS else set())
        if how == "replace":
            again = xr.concat([ds.load(), more], "x").isel(x=slice(1, None))
            again["t"] = again.t.roll(x=1)
            zm.write(again, repository, append_dim="x", on_existing="replace")
            check(repository, "t", {(0, at) for at in range(3)})


@pytest.mark.parametrize(
    ("how", "entries"),
    [({}, 4), ({"compressors": None}, 4), ({"shards": (300, 600)}, 2)],
    ids=["compressed", "packs", "shards"],
)
def test_large_chunks_have_statistics(how: dict[str, Any], entries: int) -> None:
    values = np.random.default_rng(7).normal(size=(600, 600)).astype("f4")
    values[5, 5], values[301:, 300:], values[200, 500] = np.nan, np.nan, 99
    repository = zm.create(MemoryStorage(), {"pack-bytes": 800_000, "pack-chunk-bytes": 400_000})
    ds = xr.Dataset({"t": (("y", "x"), values)})
    zm.write(ds, repository, encoding={"t": {"chunks": (300, 300), **how}})
    assert len(coords(repository, statistics=True)) == entries
    check(repository)


def test_chunks_that_came_back_have_their_statistics() -> None:
    """Also after a compaction, which finds newer ones of the chunks that they replaced."""
    repository = zm.create(MemoryStorage())
    for value in (1.0, 2.0):
        ds = xr.Dataset({"t": ("x", np.full(4, value))})
        zm.write(ds, repository, mode="a", encoding={} if value > 1 else {"t": {"chunks": (2,)}})
    repository.revert(next(iter(repository.ancestry())).snapshot_id)
    repository.compact(mode="full")
    assert len(coords(repository, statistics=True)) == 2
    check(repository)


def test_codecs_that_may_change_values_have_no_statistics() -> None:
    repository = zm.create(MemoryStorage())
    ds = xr.Dataset({"t": ("x", np.linspace(0, 1, 8, dtype="f4"))})
    zm.write(ds, repository, encoding={"t": {"filters": [BitRound(keepbits=3)]}})
    assert coords(repository, statistics=True) == set()
