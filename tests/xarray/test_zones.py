"""The zone maps that `write` records are those of a slow look at each chunk as it is stored."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from typing import Any

import dask
import numpy as np
import pytest
import xarray as xr
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import zarr_manifests as zm
from effort import examples
from inside import context_of
from zarr_manifests.engine.snapshot.zones import zones_of
from zarr_manifests.grid import Coords
from zarr_manifests.planning.zones.entries import valid
from zarr_manifests.planning.zones.meaning import Meaning
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of, workspace_of
from zarr_manifests.xarray import array_target

type Row = tuple[Any, Any, int, int, int]
"""Low and high bound, both None if there is none; missing, NaN and all cells."""

CHUNKS = (3, 2)


def recorded(repository: zm.Repository, path: str) -> dict[Coords, Row]:
    """The entries that count today."""
    session = repository.readonly_session("main")
    contents = contents_of(session.store)
    node = contents.array_at(path)
    meaning = Meaning.of(node.documents)
    known = zones_of(context_of(repository), contents.view, [node.node_id])[node.node_id]
    found: dict[Coords, Row] = {}
    for zones in known.recent:
        if zones.meaning != meaning.digest:
            continue
        bounds = zones.bounds
        for row in np.flatnonzero(valid(zones, contents.chunks(node))).tolist():
            ends = [
                meaning.compared(meaning.decodable(end))[row] for end in (bounds.low, bounds.high)
            ]
            counts = (int(column[row]) for column in (bounds.missing, bounds.nan, bounds.cells))
            low, high = ends if bounds.bounded[row] else (None, None)
            found[tuple(zones.coords()[row].tolist())] = (low, high, *counts)
    return found


def stored_chunks(repository: zm.Repository, path: str) -> dict[Coords, np.ndarray[Any, Any]]:
    """Whole chunks, padding included: Zarr reads it once the array is large enough."""
    session = repository.writable_session("main")
    contents = contents_of(session.store)
    there = contents.chunks(contents.array_at(path))
    array = zarr.open_array(session.store, path=path)
    chunk = array.shards or array.chunks
    grid = [range(-(-n // c)) for n, c in zip(array.shape, chunk, strict=True)]
    array.resize(tuple(len(axis) * c for axis, c in zip(grid, chunk, strict=True)))
    found = {}
    for at in itertools.product(*grid):
        if there is not None and there.get(at) is not None:
            place = tuple(slice(a * c, (a + 1) * c) for a, c in zip(at, chunk, strict=True))
            found[at] = np.asarray(array[place])
    return found


def slowly(repository: zm.Repository, path: str) -> dict[Coords, Row]:
    """What the entries of all chunks should be."""
    contents = contents_of(repository.readonly_session("main").store)
    node = contents.array_at(path)
    assert node.array is not None
    meaning = Meaning.of(node.documents)
    marks = meaning.missing.tolist()

    def gone(value: Any) -> bool:
        return value != value or value in marks

    found: dict[Coords, Row] = {}
    for at, chunk in stored_chunks(repository, path).items():
        chunk = meaning.compared(chunk)
        sides = zip(at, node.array.chunk_shape, node.array.shape, strict=True)
        inside = chunk[tuple(slice(0, n - a * c) for a, c, n in sides)].ravel().tolist()
        kept = [value for value in chunk.ravel().tolist() if not gone(value)]
        counts = sum(map(gone, inside)), sum(value != value for value in inside), len(inside)
        found[at] = (min(kept, default=None), max(kept, default=None), *counts)
    return found


def check(repository: zm.Repository, path: str, partly: Collection[Coords] = ()) -> None:
    """All chunks have exact entries, but for those that were written partly.

    These have entries only if their bytes are still the same, where padding was overwritten by
    equal values.
    """
    expected, found = slowly(repository, path), recorded(repository, path)
    assert found.keys() | set(partly) >= expected.keys()
    for at, (low, high, *counts) in found.items():
        if at not in partly:
            assert tuple(counts) == expected[at][2:]
        assert_about(low, high, expected[at])


def assert_about(low: Any, high: Any, expected: Row) -> None:
    """Floats are rounded outward when they are stored; all else is exact."""
    least, most = expected[:2]
    if not isinstance(least, float):
        assert (low, high) == (least, most)
        return
    assert low <= least <= most <= high
    # Infinite ones may be rounded to the greatest of all others.
    low, high, least, most = np.clip([low, high, least, most], -1e38, 1e38).tolist()
    room = 0.01 * max(abs(least), abs(most)) + 1e-30  # beside infinite ones, zeros are rounded too
    assert least - low <= room
    assert high - most <= room


FIELDS: dict[str, Callable[[np.ndarray[Any, Any]], tuple[Any, dict[str, Any]]]] = {
    "float32": lambda n: (n.astype("f4"), {"dtype": "f4"}),
    "with NaN": lambda n: (np.where(n % 3 == 0, np.nan, n), {"dtype": "f8"}),
    "infinite, NaN, both zeros": lambda n: (
        np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1.5, np.nan, -2.0])[n * 5 // 3 % 8],
        {"dtype": "f4"},
    ),
    "all NaN": lambda n: (np.where(n < 9, np.nan, n), {"dtype": "f4", "_FillValue": np.nan}),
    "float32 of float64": lambda n: (n / 7, {"dtype": "f4", "_FillValue": np.float32(1e20)}),
    "packed": lambda n: (
        np.where(n % 5 == 0, np.nan, n * 0.5),
        {"dtype": "i2", "scale_factor": -0.5, "add_offset": 3.0, "_FillValue": -32768},
    ),
    "packed, fill amid": lambda n: (
        np.where(n % 5 == 4, np.nan, n * 0.5),
        {"dtype": "i2", "scale_factor": 0.25, "add_offset": 0.0, "_FillValue": -7},
    ),
    "unsigned": lambda n: (
        np.where(n % 5 == 0, np.nan, n + 120),
        {"dtype": "i1", "_Unsigned": "true", "_FillValue": np.int8(-1)},
    ),
    "integers": lambda n: (n.astype("i4"), {}),
    "booleans": lambda n: (n % 4 == 1, {}),
    "times": lambda n: (
        (n * 3600).astype("i8").astype("M8[s]").astype("M8[ns]"),
        {"units": "hours since 1970-01-01", "dtype": "i8"},
    ),
    "texts": lambda n: (n.astype("U4"), {}),
}


@st.composite
def datasets(draw: Any) -> xr.Dataset:
    rows, columns = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    numbers = draw(st.permutations(range(rows * columns)))
    values, encoding = FIELDS[draw(st.sampled_from(sorted(FIELDS)))](
        np.array(numbers).reshape(rows, columns)
    )
    ds = xr.Dataset({"t": (("x", "y"), values)}, {"x": np.arange(rows)})
    ds.t.encoding = {**encoding, "chunks": CHUNKS}
    return ds.chunk(x=3, y=2) if draw(st.booleans()) else ds


@settings(max_examples=examples(30))
@given(datasets(), st.sampled_from(["append", "replace", "region"]), st.booleans())
def test_entries_are_those_of_the_stored_chunks(ds: xr.Dataset, how: str, one_by_one: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if one_by_one:  # as large chunks
            patch.setattr(array_target, "_LARGE_BYTES", 0)
        check_writes(ds, how)


def check_writes(ds: xr.Dataset, how: str) -> None:
    repository = zm.create(MemoryStorage())
    rows = ds.sizes["x"]
    more = ds.isel(x=slice(None, None, -1)).load().assign_coords(x=ds.x + rows)
    more.t.encoding = ds.t.encoding
    with dask.config.set(scheduler="threads", num_workers=2):
        zm.write(ds, repository, message="first")
        check(repository, "t")
        check(repository, "x")
        if how == "region":
            part = more.drop_vars("x")
            zm.write(part, repository, message="again", region={"x": slice(0, rows)})
            check(repository, "t")
            return
        zm.write(more, repository, message="more", append_dim="x")
        met = {(rows // CHUNKS[0], at) for at in range(3)} if rows % CHUNKS[0] else set()
        check(repository, "t", met)
        if how == "replace":
            again = xr.concat([ds.load(), more], "x").isel(x=slice(1, None))
            again["t"] = again.t.roll(x=1)
            zm.write(again, repository, message="again", append_dim="x", on_existing="replace")
            first = {(0, at) for at in range(3)}
            assert recorded(repository, "t").keys() | first >= slowly(repository, "t").keys()
            check(repository, "t", first - recorded(repository, "t").keys())


@pytest.mark.parametrize(
    ("how", "blocks", "entries"),
    [
        ({}, 0, 4),
        ({"compressors": None}, 0, 4),  # in packs
        ({"shards": (300, 600)}, 1, 2),
    ],
)
def test_large_chunks_are_measured_when_they_are_encoded(
    how: dict[str, Any], blocks: int, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those in shards, which Zarr writes, are measured all together."""
    calls: list[int] = []
    true = array_target.measure
    monkeypatch.setattr(array_target, "measure", lambda *a: (calls.append(1), true(*a))[1])
    values = np.random.default_rng(7).normal(size=(600, 600)).astype("f4")
    values[5, 5], values[301:, 300:], values[200, 500] = np.nan, np.nan, 99
    config = {"pack-bytes": 800_000, "pack-chunk-bytes": 400_000}
    repository = zm.create(MemoryStorage(), config)
    ds = xr.Dataset({"t": (("y", "x"), values)})
    ds.t.encoding = {"chunks": (300, 300), **how}
    zm.write(ds, repository, message="first")
    assert len(calls) == blocks
    assert len(recorded(repository, "t")) == entries
    check(repository, "t")


def field(values: Any, **encoding: Any) -> xr.Dataset:
    ds = xr.Dataset({"t": ("x", np.asarray(values))})
    ds.t.encoding = {"chunks": (4,), **encoding}
    return ds


def test_a_chunk_that_is_written_partly_has_no_entry() -> None:
    repository = zm.create(MemoryStorage())
    zm.write(field(np.arange(10)), repository, message="first")
    assert sorted(recorded(repository, "t")) == [(0,), (1,), (2,)]
    part = field(np.arange(7) * 100)
    zm.write(part, repository, message="part", region={"x": slice(3, 10)})
    assert sorted(recorded(repository, "t")) == [(1,), (2,)]
    check(repository, "t", {(0,)})
    zm.write(field(np.arange(6)), repository, message="start", region={"x": slice(0, 6)})
    assert sorted(recorded(repository, "t")) == [(0,), (2,)]
    check(repository, "t", {(1,)})


def test_a_chunk_that_an_append_fills_up_has_no_entry() -> None:
    repository = zm.create(MemoryStorage())
    zm.write(field(np.arange(6)), repository, message="first")
    zm.write(field(np.arange(5)), repository, message="more", append_dim="x")
    assert sorted(recorded(repository, "t")) == [(0,), (2,)]
    check(repository, "t", {(1,)})


@pytest.mark.parametrize("shards", [None, (4,)])
def test_what_an_array_kept_beyond_its_edge_is_within_the_bounds(shards: Any) -> None:
    repository = zm.create(MemoryStorage())
    how = {"shards": shards, "chunks": (2,)} if shards else {}
    zm.write(field([1, 2, 3, 4, 5, 99, 98], **how), repository, message="first")
    session = repository.writable_session("main")
    zarr.open_array(session.store, path="t").resize((5,))
    session.commit("shrink")
    part = field([7, 7, 7, 7, 7])
    zm.write(part, repository, message="again", region={"x": slice(0, 5)})
    found = recorded(repository, "t")
    assert sorted(found) == ([(0,), (1,)] if shards is None else [(0,)])
    check(repository, "t", slowly(repository, "t").keys() - found)


def test_codecs_that_may_change_values_have_no_entries() -> None:
    from zarr.codecs.numcodecs import BitRound

    repository = zm.create(MemoryStorage())
    ds = field(np.linspace(0, 1, 8, dtype="f4"), filters=[BitRound(keepbits=3)])
    zm.write(ds, repository, message="first")
    assert recorded(repository, "t") == {}


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("values", [np.float32(2.5), np.inf, np.int16(3), True])
def test_an_array_without_axes_has_an_entry(values: Any, lazy: bool) -> None:
    repository = zm.create(MemoryStorage())
    ds = xr.Dataset({"t": ((), values)})
    zm.write(ds.chunk() if lazy else ds, repository, message="first")
    assert list(recorded(repository, "t")) == [()]
    check(repository, "t")


def test_one_value_for_many_cells_has_no_entry() -> None:
    repository = zm.create(MemoryStorage())
    zm.write(field(np.arange(8)), repository, message="first")
    session = repository.writable_session("main")
    array = zarr.open_array(session.store, path="t")
    target = array_target.ArrayTarget(array, workspace_of(session.store), statistics=True)
    target[:4,] = np.array([5])
    target.record()
    session.commit("again")
    assert sorted(recorded(repository, "t")) == [(1,)]
    check(repository, "t", {(0,)})


def test_blocks_of_one_chunk_are_recorded_in_their_places() -> None:
    """Those at the edges, which have padding, beside those that are whole."""
    repository = zm.create(MemoryStorage())
    numbers = np.random.default_rng(3).permutation(7 * 11 * 3).reshape(7, 11, 3) / 4
    ds = xr.Dataset({"t": (("z", "y", "x"), np.asfortranarray(numbers))}).chunk(z=2, y=4, x=3)
    ds["t"].encoding = {"dtype": "f4", "chunks": (2, 4, 3), "fill_value": -5.0}
    zm.write(ds, repository, message="first")
    assert len(recorded(repository, "t")) == 4 * 3
    check(repository, "t")
    zm.write(-ds.isel(z=[2, 3]), repository, message="again", region={"z": slice(2, 4)})
    assert sorted(recorded(repository, "t"))[3:6] == [(1, 0, 0), (1, 1, 0), (1, 2, 0)]
    check(repository, "t")


def test_without_statistics_nothing_is_recorded() -> None:
    repository = zm.create(MemoryStorage())
    zm.write(field(np.arange(8)), repository, message="first", statistics=False)
    assert recorded(repository, "t") == {}


def test_chunks_of_fill_values_that_are_not_stored_have_no_entries() -> None:
    repository = zm.create(MemoryStorage())
    values = np.r_[np.zeros(4), np.arange(4.0)]
    zm.write(field(values, fill_value=0.0), repository, message="first")
    assert sorted(recorded(repository, "t")) == [(1,)]
    check(repository, "t")


@pytest.mark.slow
def test_tasks_in_other_processes_record_what_they_write(tmp_path: Any) -> None:
    ds = field(np.arange(10.0)).assign(u=("x", np.arange(10))).chunk(x=4)
    ds["m"] = ("x", np.arange(10) * 2)
    where = str(tmp_path / "repository")
    with dask.config.set(scheduler="processes", num_workers=2):
        zm.write(ds, where, message="first", encoding={"u": {"chunks": (4,)}})
    repository = zm.open(where)
    for path in ("t", "u", "m"):
        check(repository, path)
        assert recorded(repository, path)
