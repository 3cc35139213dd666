"""`Session.chunks_where`: no chunk with a matching cell is ever left out, and others are."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from xarray.backends.zarr import FillValueCoder

import zarr_manifests as zm
from effort import examples
from zarr_manifests.errors import ConflictError, InvalidArgumentError, NotFoundError
from zarr_manifests.grid import grid_shape
from zarr_manifests.reports import ChunkSelection
from zarr_manifests.storage.memory import MemoryStorage
from zoned import OPS

type Comparison = tuple[Any, ...]
"""A column, an operator, and what to compare with, if any."""


def cell_matches(comparison: Comparison, value: Any) -> bool:
    """The comparison of one decoded cell, with plain Python numbers."""
    _, op, *literals = comparison
    if op in ("is_null", "is_not_null"):
        return (value is None) == (op == "is_null")
    if value is None:
        return False

    def holds(op: str, literal: Any) -> bool:
        if isinstance(value, np.datetime64):
            return bool(OPS[op](value.astype("M8[ns]"), np.datetime64(literal, "ns")))
        if isinstance(value, float):
            return bool(OPS[op](value, float(literal)))
        return bool(OPS[op](Fraction(value), Fraction(literal)))

    if op == "in":
        return any(holds("=", literal) for literal in literals[0])
    if op == "between":
        return holds(">=", literals[0][0]) and holds("<=", literals[0][1])
    return holds(op, literals[0])


def plain(value: Any) -> Any:
    """A decoded value: None if it is missing."""
    if isinstance(value, np.datetime64):
        return None if np.isnat(value) else value
    number = value.item() if isinstance(value, np.generic) else value
    return None if number != number else number


def matching_chunks(session: zm.Session, comparisons: list[Comparison]) -> set[tuple[int, ...]]:
    """Chunks of `a` with a cell for which all comparisons hold, found by reading everything."""
    with xr.open_dataset(session.store, engine="zarr", consolidated=False) as ds:
        ds.load()
        keep = np.ones(ds["a"].shape, bool)
        for comparison in comparisons:
            values = ds[comparison[0]]
            wide = values.broadcast_like(ds["a"]).transpose(*ds["a"].dims).values
            found = [cell_matches(comparison, plain(value)) for value in wide.reshape(-1)]
            keep &= np.array(found, bool).reshape(keep.shape)
    chunk = zarr.open_array(session.store, path="a", mode="r").chunks
    return {
        tuple(n // c for n, c in zip(at, chunk, strict=True)) for at in np.argwhere(keep).tolist()
    }


def selected(found: ChunkSelection) -> set[tuple[int, ...]]:
    chunks: list[tuple[int, ...]] = []
    for lo, hi in found.boxes.tolist():
        chunks += product(*map(range, lo, hi))
    assert len(set(chunks)) == len(chunks) == found.selected
    assert found.selected + sum(found.left_out.values()) == found.chunks
    return set(chunks)


def encoded_fill(value: Any, dtype: str) -> Any:
    return FillValueCoder.encode(np.dtype(dtype).type(value), np.dtype(dtype))


NUMBERS = {
    "i2": [0, 1, -1, 2, 3, -9, 32767, -32768],
    "u1": [0, 1, 2, 3, 200, 255],
    "i8": [0, 1, 2**53, 2**53 + 1, -(2**63), 2**63 - 1, -9],
    "f4": [0.0, -0.0, 1.5, -2.5, np.nan, np.inf, -np.inf, -9.0, 2.0**24 + 2],
    "f8": [0.0, -0.0, 0.1, np.nan, np.inf, -np.inf, -9.0, 2.0**53],
}
LITERALS = [0, 1, -1, 2, -9, 0.1, 1.5, 2**53, 2**53 + 1, 2**24 + 1, 200, 250, -0.5, 1e300]
TIMES = [
    "2000-01-01",
    "2000-01-01 00:00:01",
    "2000-01-01 00:00:00.0000005",
    "1999-12-31",
    "2000-03",
]


@st.composite
def attributes(draw: st.DrawFn, dtype: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if dtype in ("i2", "u1", "f4") and draw(st.booleans()):
        found["scale_factor"] = draw(st.sampled_from([0.1, -0.5, 2.0]))
        found["add_offset"] = draw(st.sampled_from([0.0, 1.0, -3.5]))
    if draw(st.booleans()):
        found["_FillValue"] = encoded_fill(-9 if dtype != "u1" else 200, dtype)
    elif dtype != "i8" and draw(st.booleans()):
        found["missing_value"] = draw(st.sampled_from([1, 2]))
    if dtype == "u1" and "_FillValue" not in found and draw(st.booleans()):
        found["_Unsigned"] = "false"
    return found


def values(data: st.DataObject, dtype: str, shape: tuple[int, ...]) -> Any:
    n = int(np.prod(shape))
    pool = st.sampled_from(NUMBERS[dtype])
    if dtype == "i8" and data.draw(st.booleans()):
        pool = st.integers(-3, 3)
    return np.array(data.draw(st.lists(pool, min_size=n, max_size=n)), dtype).reshape(shape)


@st.composite
def comparisons(draw: st.DrawFn, columns: list[str]) -> Comparison:
    column = draw(st.sampled_from(columns))
    if column == "time":
        op = draw(st.sampled_from([*OPS, "between", "is_null"]))
        literal = st.sampled_from(TIMES)
    else:
        op = draw(st.sampled_from([*OPS, "in", "between", "is_null", "is_not_null"]))
        literal = st.sampled_from(LITERALS)
    if op in ("is_null", "is_not_null"):
        return column, op
    return column, op, [draw(literal), draw(literal)] if op in ("in", "between") else draw(literal)


STEPS = [
    *("write", "write", "write", "delete", "attributes", "resize"),
    *("commit", "compact", "compact some", "compute", "compute"),
]
LEAVES = {
    "splitting": [{"path": ".*", "along": {0: 1}}],
    "sets": [{"default": {"max-manifest-size": 2}}],
}


class World:
    """A repository with arrays `a` and maybe `b`, that are changed step by step."""

    def __init__(self, data: st.DataObject) -> None:
        self.data, draw = data, data.draw
        config = {"chunk-manifests": LEAVES} if draw(st.booleans()) else {}
        self.repo = zm.create(MemoryStorage(), config)
        self.session = self.repo.writable_session()
        self.ndim = draw(st.integers(1, 2))
        self.shape, chunk = (draw(st.integers(3, 7)), 5)[: self.ndim], (2, 3)[: self.ndim]
        self.dims = ("time", "x")[: self.ndim]
        self.dtypes = {name: draw(st.sampled_from(list(NUMBERS))) for name in ("a", "b")}
        store = self.session.store
        for name, dtype in self.dtypes.items():
            how: dict[str, Any] = {"shape": self.shape, "chunks": chunk, "dtype": dtype}
            how |= {
                "fill_value": draw(st.sampled_from(NUMBERS[dtype])),
                "dimension_names": self.dims,
            }
            zarr.create_array(store, name=name, attributes=draw(attributes(dtype)), **how)
        steps = draw(st.sampled_from(["f8", "i4"]))
        offsets = [0, 1, -86400, 5184000, -9, *([np.nan, 5e-7] if steps == "f8" else [])]
        n = self.shape[0]
        time = np.array(draw(st.lists(st.sampled_from(offsets), min_size=n, max_size=n)), steps)
        said = {"units": "seconds since 2000-01-01", "_FillValue": encoded_fill(-9, steps)}
        how = {"chunks": (4,), "dimension_names": ("time",), "fill_value": 0}
        zarr.create_array(store, name="time", data=time, attributes=said, **how)
        x = np.array([3, 1.5, np.nan, 1.5, -1], "f4")
        if self.ndim == 2:
            zarr.create_array(store, name="x", data=x, **how | {"dimension_names": ("x",)})

    def take_step(self) -> None:
        draw = self.data.draw
        name = draw(st.sampled_from(["a", "a", "b"]))
        array = zarr.open_array(self.session.store, path=name, mode="r+")
        grid = grid_shape(array.shape, array.chunks)
        lo = tuple(draw(st.integers(0, n - 1)) for n in grid)
        hi = tuple(draw(st.integers(a + 1, n)) for a, n in zip(lo, grid, strict=True))
        match draw(st.sampled_from(STEPS)):
            case "write":
                self.write(array, name, lo, hi)
            case "delete":
                self.session.store.delete_sync(f"{name}/c/{'/'.join(map(str, lo))}")
            case "attributes":
                array.attrs.put(draw(attributes(self.dtypes[name])))
            case "resize":
                size = (draw(st.integers(2, 8)), *self.shape[1:])
                for other in ("a", "b", "time"):
                    found = zarr.open_array(self.session.store, path=other, mode="r+")
                    found.resize(size[: found.ndim])
            case how:
                self.commit()
                if how.startswith("compact"):
                    self.repo.compact(mode="full" if how == "compact" else "major")
                elif how == "compute":
                    self.repo.compute_statistics()
                self.session = self.repo.writable_session()

    def write(self, array: Any, name: str, lo: tuple[int, ...], hi: tuple[int, ...]) -> None:
        sides = zip(lo, hi, array.chunks, array.shape, strict=True)
        cells = tuple(slice(a * n, min(b * n, size)) for a, b, n, size in sides)
        array[cells] = values(self.data, self.dtypes[name], array[cells].shape)

    def commit(self) -> None:
        if self.session.status():
            self.session.commit("a step")


@settings(deadline=None, max_examples=examples(120), suppress_health_check=list(HealthCheck))
@given(st.data())
def test_no_chunk_with_a_matching_cell_is_left_out(data: st.DataObject) -> None:
    world = World(data)
    for _ in range(data.draw(st.integers(1, 8))):
        world.take_step()
    session = world.session
    if data.draw(st.booleans()):
        world.commit()
        session = world.repo.readonly_session()
    columns = ["a", "a", "a", "b", "time", *world.dims[1:]]
    where = data.draw(st.lists(comparisons(columns), min_size=1, max_size=3))
    found = session.chunks_where("a", where)
    due = matching_chunks(session, where)
    assert due <= selected(found), (where, found)
    # A missing value may be NaN in Spark, which is greater than every number.
    found = session.chunks_where("a", where, nan_matches=True)
    assert due <= selected(found)
    if len(where) == 1 and where[0][1] in (">", ">=", "!=") and where[0][0] in ("a", "b"):
        missing = (where[0][0], "is_null")
        assert matching_chunks(session, [missing]) <= selected(found)


def measured(
    stored: Any, fill: Any, attrs: dict[str, Any], chunk: int = 2, name: str = "a"
) -> tuple[Any, zm.Session]:
    """An array along `x` whose chunks all have statistics, in a session that may write."""
    repo = zm.create(MemoryStorage())
    how: dict[str, Any] = {"fill_value": fill, "attributes": attrs, "dimension_names": ("x",)}
    with repo.transaction(message="values") as store:
        zarr.create_array(store, name=name, data=stored, chunks=(chunk,), **how)
    repo.compute_statistics()
    session = repo.writable_session()
    return zarr.open_array(session.store, path=name, mode="r+"), session


def chosen(session: zm.Session, where: str, **options: Any) -> list[tuple[int, ...]]:
    return sorted(selected(session.chunks_where("a", where, **options)))


def test_statistics_of_packed_values_are_turned_with_their_scale() -> None:
    _, session = measured(np.array([1, 5, 2, 3], "i2"), 0, {"scale_factor": -0.5})
    assert chosen(session, "a <= -2") == chosen(session, "a >= -0.5") == [(0,)]


def test_statistics_of_another_fill_value_do_not_count() -> None:
    repo = zm.create(MemoryStorage())
    ds = xr.Dataset({"a": ("x", [1, np.nan, 2, 3])})
    stored = {"chunks": (2,), "dtype": "i2", "_FillValue": 5}
    zm.write(ds, repo, message="a", encoding={"a": stored})
    session = repo.writable_session()
    assert chosen(session, "a >= 4") == []
    array = zarr.open_array(session.store, path="a", mode="r+")
    array.attrs.put({"_FillValue": encoded_fill(7, "i2")})
    assert (0,) in chosen(session, "a >= 4")


def test_cells_that_an_array_has_grown_by_are_missing() -> None:
    missing = {"_FillValue": encoded_fill(np.nan, "f4")}
    array, session = measured(np.arange(5, dtype="f4"), np.nan, missing, chunk=3)
    assert chosen(session, "a IS NULL") == []
    array.resize((8,))
    assert chosen(session, "a IS NULL") == [(1,), (2,)]


def test_times_of_fractions_are_rounded_outward() -> None:
    attrs = {"units": "nanoseconds since 2000-01-01"}
    _, session = measured(np.array([500, 900, 5000, 6000], "i8"), 0, attrs)
    assert (0,) in chosen(session, "a > '2000-01-01 00:00:00.0000001'")
    assert chosen(session, "a > '2000-01-01 00:00:01'") == []
    # What a float is decoded to depends on the others beside it.
    hours, attrs = np.array([153.194, 241.25, 390.607]), {"units": "hours since 2000-01-01"}
    _, session = measured(hours, 0.0, attrs, chunk=3)
    read = xr.conventions.decode_cf_variable("a", xr.Variable("x", hours, attrs)).values
    assert chosen(session, f"a <= '{read.min()}'") == [(0,)]


def depths(chunks: int = 4) -> tuple[Any, zm.Session]:
    """An array `depth` along `x`, with chunk i from 10 i to 10 i + 4."""
    stored = (np.arange(chunks, dtype="f4")[:, None] * 10 + np.arange(5)).reshape(-1).astype("f4")
    missing = {"_FillValue": encoded_fill(np.nan, "f4")}
    return measured(stored, np.nan, missing, chunk=5, name="depth")


def test_chunks_are_left_out_for_the_reason_that_is_said() -> None:
    array, session = depths()
    array.resize((30,))
    found = session.chunks_where("/depth", "depth >= 20 AND x < 15")
    assert found.boxes.tolist() == [[[2], [3]]]
    assert found.cells == ((slice(10, 15),),)
    assert found.left_out == {"range": 3, "statistics": 2, "absence": 0}
    found = session.chunks_where("depth", {"depth": (">", 12.5)})
    assert found.left_out == {"range": 0, "statistics": 1, "absence": 2}
    assert found.reasons == {"depth > 12.5": 3}
    assert "depth &gt; 12.5" in found._repr_html_()
    assert session.chunks_where("depth", "depth IS NULL").cells == ((slice(20, 30),),)
    assert session.chunks_where("depth", "depth > 100").selected == 0


def test_a_chunk_that_was_written_again_is_read() -> None:
    array, session = depths()
    array[0] = 99
    for _ in range(2):
        found = session.chunks_where("depth", "depth > 50")
        assert (found.cells, found.unknown) == (((slice(0, 5),),), 1)
        assert "1 chunks have no statistics" in str(found)
        assert 'repo.compute_statistics(["/depth"])' in str(found)
        if session.status():
            session.commit("without statistics")


def test_columns_that_do_not_fit_are_refused() -> None:
    _, session = depths()
    zarr.create_array(session.store, name="other", shape=(20,), chunks=(7,), dtype="i2")
    with pytest.raises(NotFoundError, match="no column 'temperature'"):
        session.chunks_where("depth", "temperature > 1")
    with pytest.raises(InvalidArgumentError, match="other dimensions or chunks"):
        session.chunks_where("depth", "other > 1")
    with pytest.raises(InvalidArgumentError, match="numbers"):
        session.chunks_where("depth", "depth > 'a'")


def overwrite(array: Any) -> None:
    array[5, 3] = 500


def shrink_and_grow(array: Any) -> None:
    array.resize((12, 12))
    array.resize((20, 12))


def append(array: Any) -> None:
    array.resize((20, 12))
    array[16:] = 300


CHANGES = {"nothing": None, "cell": overwrite, "cut": shrink_and_grow, "append": append}


def compacted(*, leaves: bool = False) -> zm.Repository:
    """An array `a` of 8 by 6 chunks, where values ascend with rows, with pages of statistics.

    If asked for, each two rows of chunks are a leaf in a manifest of its own.
    """
    config: dict[str, Any] = {"inline-chunk-bytes": 0, "compaction": {"mode": "manual"}}
    if leaves:
        config["chunk-manifests"] = {
            "splitting": [{"path": ".*", "along": {0: 2}}],
            "sets": [{"default": {"max-manifest-size": 12}}],
        }
    repo = zm.create(MemoryStorage(), config)
    values = np.arange(16 * 12, dtype="f4").reshape(16, 12)
    encoding = {"a": {"chunks": (2, 2), "compressors": None}}
    zm.write(xr.Dataset({"a": (("y", "x"), values)}), repo, message="a", encoding=encoding)
    repo.compact()
    return repo


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("leaves", [False, True])
def test_pages_never_leave_out_a_chunk_that_has_changed(leaves: bool, change: str) -> None:
    repo = compacted(leaves=leaves)
    changed = CHANGES[change]
    if changed is not None:
        session = repo.writable_session()
        changed(zarr.open_array(session.store, path="a", mode="r+"))
        session.commit("changed")
    session = repo.readonly_session()
    for where in ([("a", ">", 180)], [("a", "<", 0)], [("a", "is_null")], [("a", "=", 300)]):
        found = session.chunks_where("a", where)
        assert matching_chunks(session, where) <= selected(found)
        assert found.selected < found.chunks


def test_without_pages_chunks_are_chosen_all_the_same() -> None:
    repo = compacted()
    repo.storage.delete_many([info.key for info in repo.storage.list("indexes/")])
    found = zm.open(repo.storage).readonly_session().chunks_where("a", "a < 24")
    assert {(0, 0), (0, 5)} <= selected(found)


def test_a_writer_depends_on_the_chunks_that_it_has_planned_with() -> None:
    repo = compacted()
    mine = repo.writable_session(isolation="serializable")
    assert mine.chunks_where("a", "a > 180 AND y >= 8").selected == 6
    zarr.create_group(mine.store, path="results")
    with repo.transaction(message="a chunk that cannot match") as store:
        zarr.open_array(store, path="a")[8, 0] = 0
    with pytest.raises(ConflictError):
        mine.commit("what was found")


def test_statistics_of_chunks_hold_until_values_mean_something_else() -> None:
    array, session = measured(np.array([1, np.nan, 4, -3, 8]), 0.0, {})
    array.resize((9,))
    found = session.chunk_refs("a", statistics=True)
    assert found.coords.tolist() == [[0], [1], [2]]
    assert (found.low <= [1, -3, 8]).all()
    assert (found.high >= [1, 4, 8]).all()
    assert found.nan.tolist() == [1, 0, 0]
    array.attrs["_FillValue"] = 4.0
    assert len(session.chunk_refs("a", statistics=True)) == 0
