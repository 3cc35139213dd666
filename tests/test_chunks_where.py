"""`Session.chunks_where`: no chunk with a matching cell is ever left out, and others are."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import xarray as xr
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from xarray.backends.zarr import FillValueCoder

import zarr_manifests as zm
from effort import examples
from inside import context_of
from zarr_manifests.demo import open_relief, open_winds
from zarr_manifests.engine.edit.record_zones import record_zones
from zarr_manifests.engine.snapshot.zones import PagedLeaves, zones_of
from zarr_manifests.errors import ConflictError, InvalidArgumentError, NotFoundError
from zarr_manifests.grid import Box, grid_shape
from zarr_manifests.planning.zones.meaning import Meaning
from zarr_manifests.planning.zones.measure import measure
from zarr_manifests.planning.zones.where import Comparison, Moment
from zarr_manifests.reports import ChunkSelection
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of, workspace_of
from zarr_manifests.testing import CountingStorage
from zoned import OPS


def record(session: zm.Session, path: str, lo: tuple[int, ...], hi: tuple[int, ...]) -> None:
    """Measure chunks as they are stored, and record their bounds."""
    node = contents_of(session.store).array_at(path)
    assert node.array is not None
    array = zarr.open_array(session.store, path=path, mode="r")
    sides = zip(lo, hi, array.chunks, array.shape, strict=True)
    cells = tuple(slice(a * n, min(b * n, size)) for a, b, n, size in sides)
    meaning = Meaning.of(node.documents)
    if not meaning.measurable:
        return
    values = meaning.compared(np.asarray(array[cells]))
    bounds = measure(values, array.chunks, meaning.fill, meaning.missing)
    record_zones(workspace_of(session.store), path, Box(lo, hi), meaning.digest, bounds)


def cell_matches(comparison: Comparison, value: Any) -> bool:
    """The comparison of one decoded cell, with plain Python numbers."""
    if comparison.op in ("is_null", "is_not_null"):
        return (value is None) == (comparison.op == "is_null")
    if value is None:
        return False

    def holds(op: str, literal: Any) -> bool:
        if isinstance(value, np.datetime64):
            moment = literal if isinstance(literal, Moment) else Moment(literal)
            return bool(OPS[op](int(value.astype("M8[ns]").astype(int)), moment.nanoseconds()))
        if isinstance(value, float):
            return bool(OPS[op](value, float(literal)))
        return bool(OPS[op](Fraction(value), Fraction(literal)))

    match comparison.op, comparison.values:
        case "in", values:
            return any(holds("=", literal) for literal in values)
        case "between", (low, high):
            return holds(">=", low) and holds("<=", high)
    return holds(comparison.op, comparison.values[0])


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
            values = ds[comparison.column]
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
    n = {"between": 2, "in": 2, "is_null": 0, "is_not_null": 0}.get(op, 1)
    return Comparison(column, op, tuple(draw(literal) for _ in range(n)))


STEPS = [
    *("write", "write", "write", "record", "delete", "attributes", "resize"),
    *("commit", "compact", "compact some", "compute"),
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
        for name, dtype in self.dtypes.items():
            zarr.create_array(
                self.session.store,
                name=name,
                shape=self.shape,
                chunks=chunk,
                dtype=dtype,
                fill_value=draw(st.sampled_from(NUMBERS[dtype])),
                attributes=draw(attributes(dtype)),
                dimension_names=self.dims,
            )
        steps = draw(st.sampled_from(["f8", "i4"]))
        time = zarr.create_array(
            self.session.store,
            name="time",
            shape=self.shape[:1],
            chunks=(4,),
            dtype=steps,
            fill_value=0,
            dimension_names=("time",),
            attributes={"units": "seconds since 2000-01-01", "_FillValue": encoded_fill(-9, steps)},
        )
        offsets = [0, 1, -86400, 5184000, -9, *([np.nan, 5e-7] if steps == "f8" else [])]
        n = self.shape[0]
        time[:] = np.array(draw(st.lists(st.sampled_from(offsets), min_size=n, max_size=n)), steps)
        if self.ndim == 2:
            x = zarr.create_array(
                self.session.store,
                name="x",
                shape=(5,),
                chunks=(5,),
                dtype="f4",
                fill_value=0,
                dimension_names=("x",),
            )
            x[:] = np.array([3, 1.5, np.nan, 1.5, -1], "f4")

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
            case "record":
                record(self.session, name, lo, hi)
            case "delete":
                key = "/".join(map(str, lo))
                zarr.core.sync.sync(self.session.store.delete(f"{name}/c/{key}"))
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
        if self.data.draw(st.booleans()):
            record(self.session, name, lo, hi)

    def commit(self) -> None:
        if self.session.status():
            self.session.commit("a step")


@pytest.mark.slow
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
    if len(where) == 1 and where[0].op in (">", ">=", "!=") and where[0].column in ("a", "b"):
        missing = Comparison(where[0].column, "is_null")
        assert matching_chunks(session, [missing]) <= selected(found)


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(200), suppress_health_check=list(HealthCheck))
@given(st.data())
def test_recorded_bounds_never_leave_out_a_match(data: st.DataObject) -> None:
    """One array with statistics of all chunks, and one change at most."""
    draw = data.draw
    session = zm.create(MemoryStorage()).writable_session()
    dtype = draw(st.sampled_from(["i2", "u1", "f4", "i8"]))
    array = zarr.create_array(
        session.store,
        name="a",
        shape=(5,),
        chunks=(3,),
        dtype=dtype,
        fill_value=draw(st.sampled_from([0, *NUMBERS[dtype]])),
        attributes=draw(attributes(dtype)),
        dimension_names=("x",),
    )
    array[:] = values(data, dtype, (5,))
    record(session, "a", (0,), (2,))
    match draw(st.sampled_from(["nothing", "grow", "attributes"])):
        case "grow":
            array.resize((8,))
        case "attributes":
            array.attrs.put(draw(attributes(dtype)))
    with xr.open_dataset(session.store, engine="zarr", consolidated=False) as ds:
        cells = [plain(value) for value in ds["a"].values.reshape(-1)]
    near = [value for value in cells if value is not None and abs(value) < 1e37]
    op = draw(st.sampled_from([*OPS, "is_null", "is_not_null"]))
    literals = () if op.startswith("is_") else (draw(st.sampled_from([*near, 0, 1])),)
    where = [Comparison("a", op, literals)]
    assert matching_chunks(session, where) <= selected(session.chunks_where("a", where))
    if op in (">", ">=", "!="):
        found = selected(session.chunks_where("a", where, nan_matches=True))
        assert matching_chunks(session, [Comparison("a", "is_null")]) <= found


def recorded(
    stored: Any, fill: Any, attrs: dict[str, Any], chunk: int = 2
) -> tuple[Any, zm.Session]:
    """An array `a` along `x` whose chunks all have statistics."""
    session = zm.create(MemoryStorage()).writable_session()
    array = zarr.create_array(
        session.store,
        name="a",
        shape=stored.shape,
        chunks=(chunk,),
        dtype=stored.dtype,
        fill_value=fill,
        attributes=attrs,
        dimension_names=("x",),
    )
    array[:] = stored
    record(session, "a", (0,), grid_shape(stored.shape, (chunk,)))
    return array, session


def chosen(session: zm.Session, where: str, **options: Any) -> list[tuple[int, ...]]:
    return sorted(selected(session.chunks_where("a", where, **options)))


def test_a_negative_scale_swaps_the_bounds() -> None:
    _, session = recorded(np.array([1, 9, 20, 30], "i2"), 0, {"scale_factor": -1.0})
    assert chosen(session, "a > -5") == [(0,)]
    assert chosen(session, "a = -9 ") == [(0,)]
    assert chosen(session, "a < -25") == [(1,)]


def test_missing_values_are_found_and_may_be_greater_than_numbers() -> None:
    nothing = {"_FillValue": encoded_fill(np.nan, "f4")}
    stored = np.array([1, np.nan, 2, 3, np.nan, np.nan], "f4")
    _, session = recorded(stored, 0, nothing)
    assert chosen(session, "a IS NULL") == [(0,), (2,)]
    assert chosen(session, "a IS NOT NULL") == [(0,), (1,)]
    assert chosen(session, "a > 100") == []
    assert chosen(session, "a > 100", nan_matches=True) == [(0,), (2,)]


def test_cells_that_growth_uncovers_are_missing() -> None:
    attrs = {"_FillValue": encoded_fill(-9, "i2")}
    array, session = recorded(np.array([1, 2, 3], "i2"), -9, attrs)
    assert chosen(session, "a IS NULL") == []
    array.resize((4,))
    assert chosen(session, "a IS NULL") == [(1,)]


def test_bounds_that_decode_to_missing_say_nothing() -> None:
    """Where int64 has no fill value, xarray still reads the least integer as not-a-time."""
    stored = np.array([-(2**63), 5, 6, 7], "i8")
    attrs = {"units": "seconds since 2000-01-01"}
    _, session = recorded(stored, 0, attrs)
    assert (0,) in chosen(session, "a IS NULL")
    assert (0,) in chosen(session, "a = '2000-01-01 00:00:05'")


def test_statistics_of_another_fill_value_do_not_count() -> None:
    array, session = recorded(
        np.array([1, 5, 2, 3], "i2"), 0, {"_FillValue": encoded_fill(5, "i2")}
    )
    assert chosen(session, "a >= 4") == []
    array.attrs.put({"_FillValue": encoded_fill(7, "i2")})
    assert (0,) in chosen(session, "a >= 4")


def test_times_of_fractions_are_rounded_outward() -> None:
    attrs = {"units": "nanoseconds since 2000-01-01"}
    _, session = recorded(np.array([500, 900, 5000, 6000], "i8"), 0, attrs)
    assert (0,) in chosen(session, "a > '2000-01-01 00:00:00.0000001'")
    assert chosen(session, "a > '2000-01-01 00:00:01'") == []


def test_the_bounds_of_a_page_count_only_for_its_leaf() -> None:
    repo, session = depths()
    session.commit("statistics")
    repo.compact()
    old = repo.readonly_session()
    assert old.chunks_where("depth", "depth > 100").selected == 0
    assert old.chunks_where("depth", "depth > 100").unknown == 0
    session = repo.writable_session()
    array = zarr.open_array(session.store, path="depth", mode="r+")
    array[7] = 200
    assert session.chunks_where("depth", "depth > 100").cells == ((slice(5, 10),),)
    session.commit("over the page")
    for _ in range(2):
        found = repo.readonly_session().chunks_where("depth", "depth > 100")
        assert found.cells == ((slice(5, 10),),)
        repo.compact()
    # The newest index has no entry for the chunk that the old snapshot has there.
    found = old.chunks_where("depth", "depth > 100")
    assert (found.selected, found.unknown) == (1, 1)


# --- what is left out -----------------------------------------------------------------------------


def depths(chunks: int = 4) -> tuple[zm.Repository, zm.Session]:
    """An array `depth` along `x`, with chunk i from 10 i to 10 i + 4."""
    repo = zm.create(MemoryStorage())
    session = repo.writable_session()
    array = zarr.create_array(
        session.store,
        name="depth",
        shape=(5 * chunks,),
        chunks=(5,),
        dtype="f4",
        fill_value=np.nan,
        attributes={"_FillValue": encoded_fill(np.nan, "f4")},
        dimension_names=("x",),
    )
    array[:] = (np.arange(chunks)[:, None] * 10 + np.arange(5)).reshape(-1)
    record(session, "depth", (0,), (chunks,))
    return repo, session


def test_chunks_are_left_out_for_the_reason_that_is_said() -> None:
    repo, session = depths()
    zarr.open_array(session.store, path="depth", mode="r+").resize((30,))
    session.commit("two chunks that are not written")
    found = repo.readonly_session().chunks_where("/depth", "depth >= 20 AND x < 15")
    assert found.boxes.tolist() == [[[2], [3]]]
    assert found.cells == ((slice(10, 15),),)
    assert found.left_out == {"range": 3, "statistics": 2, "absence": 0}
    found = session.chunks_where("depth", {"depth": (">", 12.5)})
    assert found.left_out == {"range": 0, "statistics": 1, "absence": 2}
    assert found.reasons == {"depth > 12.5": 3}
    assert found.bytes > found.selected_bytes > 0
    assert "3 of 6 chunks may match" in str(found)
    assert found.picture() == "·███··"
    html = found._repr_html_()
    assert "depth &gt; 12.5" in html
    assert found.picture() not in html
    drawn = ElementTree.fromstring(html[html.index("<svg") :])
    assert drawn.attrib["viewBox"] == "0 0 6 1"
    rects = [(part.get("x"), part.get("width"), part.get("fill")) for part in drawn]
    assert [(x, width) for x, width, _ in rects] == [("0", "1"), ("1", "3"), ("4", "2")]
    assert rects[0][2] == rects[2][2] != rects[1][2]
    missing = session.chunks_where("depth", "depth IS NULL")
    assert missing.cells == ((slice(20, 30),),)
    assert session.chunks_where("depth", "depth > 100").selected == 0


def test_a_chunk_that_was_written_again_is_read() -> None:
    _, session = depths()
    session.commit("statistics")
    array = zarr.open_array(session.store, path="depth", mode="r+")
    array[0] = 99
    for _ in range(2):
        found = session.chunks_where("depth", "depth > 50")
        assert (found.cells, found.unknown) == (((slice(0, 5),),), 1)
        assert "1 chunks have no statistics" in str(found)
        assert 'repo.compute_statistics(["/depth"])' in str(found)
        if session.status():
            session.commit("without statistics")


def test_chunks_over_the_whole_map_are_named_as_the_reason() -> None:
    _, session = depths(1)
    text = str(session.chunks_where("depth", "depth > 2"))
    assert "no chunk is left out by its values, because chunks of 5" in text
    assert "each spans all of x" in text


def test_columns_that_do_not_fit_are_refused() -> None:
    _, session = depths()
    zarr.create_array(session.store, name="other", shape=(20,), chunks=(7,), dtype="i2")
    with pytest.raises(NotFoundError, match="no column 'temperature'"):
        session.chunks_where("depth", "temperature > 1")
    with pytest.raises(InvalidArgumentError, match="other dimensions or chunks"):
        session.chunks_where("depth", "other > 1")
    with pytest.raises(InvalidArgumentError, match="its values are numbers"):
        session.chunks_where("depth", "depth > 'a'")
    with pytest.raises(InvalidArgumentError, match="no time zone"):
        session.chunks_where("depth", "depth > 1", time_zone="nowhere")


def test_damaged_statistics_leave_nothing_out() -> None:
    repo, session = depths()
    session.commit("statistics")
    storage: Any = repo.storage
    damaged = 0
    for key in [info.key for info in storage.list("indexes/")]:
        storage.delete_many([key])
        storage.create(key, b"damaged")
        damaged += 1
    assert damaged
    found = zm.open(storage).readonly_session().chunks_where("depth", "depth > 100")
    assert (found.selected, found.unknown) == (4, 4)


def test_times_that_cannot_be_decoded_can_be_compared_as_numbers() -> None:
    session = zm.create(MemoryStorage()).writable_session()
    time = zarr.create_array(
        session.store,
        name="time",
        shape=(4,),
        chunks=(2,),
        dtype="i4",
        fill_value=0,
        dimension_names=("time",),
        attributes={"units": "hour since 0000-01-01", "calendar": "nonsense"},
    )
    time[:] = [0, 1, 2, 3]
    with pytest.raises(InvalidArgumentError, match="decode_times=False"):
        session.chunks_where("time", "time > '2000'")
    found = session.chunks_where("time", "time >= 2", decode_times=False)
    assert found.cells == ((slice(2, 4),),)


def speeds() -> xr.Dataset:
    winds = open_winds()
    return np.hypot(winds.u, winds.v).rename("speed").to_dataset()


@pytest.mark.parametrize(
    ("opened", "chunk_shape", "where", "chunks", "selected"),
    [
        (open_relief, (10, 10), "relief < -4000", 648, 371),  # 43 % are left out, for 31 % of cells
        (open_relief, (10, 10), "relief < -6000", 648, 34),  # 95 %
        (speeds, (1, 12, 18), "speed > 12", 2112, 570),  # 73 %, for 1.7 % of cells
        (speeds, (1, 37, 72), "speed > 12", 132, 128),  # whole maps
    ],
)
def test_only_the_matching_chunks_of_packaged_data_are_fetched(
    opened: Callable[[], xr.Dataset],
    chunk_shape: tuple[int, ...],
    where: str,
    chunks: int,
    selected: int,
) -> None:
    storage, ds = CountingStorage(MemoryStorage()), opened()
    (name,) = map(str, ds.data_vars)
    encoding = {name: {"chunks": chunk_shape, "compressors": None}}
    created = zm.create(storage, {"inline-chunk-bytes": 0})
    zm.write(ds, created, message="m", encoding=encoding)

    def fetched(boxes: Any) -> int:
        """Requests for chunks that it takes to read these boxes of cells, one for each chunk."""
        array = zarr.open_array(zm.open(storage).readonly_session().store, path=name)
        storage.reset()
        for box in boxes:
            assert np.array_equal(array[box], ds[name].values[box])
        return sum(record.key.startswith("chunks/") for record in storage.log)

    storage.reset()
    found = zm.open(storage).readonly_session().chunks_where(name, where)
    assert not [record for record in storage.log if record.key.startswith("chunks/")]
    assert (found.chunks, found.selected) == (chunks, selected)
    assert fetched(found.cells) == selected
    assert fetched([(slice(None),) * len(chunk_shape)]) == chunks
    others = np.ones(ds[name].shape, bool)
    for box in found.cells:
        others[box] = False
    assert not (others & ds.eval(where).values).any()


def compacted(
    monkeypatch: pytest.MonkeyPatch, inline_chunk_bytes: int = 0, *, leaves: bool = False
) -> tuple[CountingStorage, zm.Repository]:
    """An array `a` of 8 by 6 chunks in pages of at most 12, where values ascend with rows.

    If asked for, each two rows of chunks are a leaf in a manifest of its own.
    """
    monkeypatch.setattr("zarr_manifests.planning.zones.entries.PAGE_ROWS", 12)
    storage = CountingStorage(MemoryStorage())
    config: dict[str, Any] = {
        "inline-chunk-bytes": inline_chunk_bytes,
        "compaction": {"mode": "manual"},
    }
    if leaves:
        config["chunk-manifests"] = {
            "splitting": [{"path": ".*", "along": {0: 2}}],
            "sets": [{"default": {"max-manifest-size": 12}}],
        }
    repo = zm.create(storage, config)
    values = np.arange(16 * 12, dtype="f4").reshape(16, 12)
    encoding = {"a": {"chunks": (2, 2), "compressors": None}}
    zm.write(xr.Dataset({"a": (("y", "x"), values)}), repo, message="a", encoding=encoding)
    repo.compact()
    return storage, repo


def requests(storage: CountingStorage, prefix: str) -> int:
    return sum(record.key.startswith(prefix) for record in storage.log)


def overwrite(array: Any) -> None:
    array[5, 3] = 500


def shrink_and_grow(array: Any) -> None:
    array.resize((12, 12))
    array.resize((20, 12))


def append(array: Any) -> None:
    array.resize((20, 12))
    array[16:] = 300


CHANGES = {"nothing": None, "cell": overwrite, "cut": shrink_and_grow, "append": append}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("inline_chunk_bytes", [0, 512])
@pytest.mark.parametrize("where", ["a > 180", "a > 100", "a < 0", "a > 100 AND y < 13 AND x > 3"])
def test_pages_say_the_same_as_chunk_tables(
    monkeypatch: pytest.MonkeyPatch, inline_chunk_bytes: int, where: str, leaves: bool, change: str
) -> None:
    _, repo = compacted(monkeypatch, inline_chunk_bytes, leaves=leaves)
    changed = CHANGES[change]
    if changed is not None:
        session = repo.writable_session()
        changed(zarr.open_array(session.store, path="a", mode="r+"))
        session.commit("changed")
        if change == "append":
            repo.compute_statistics()
    found = repo.readonly_session().chunks_where("a", where)
    monkeypatch.setattr("zarr_manifests.selecting.pruning.paged_leaves", lambda *_: PagedLeaves())
    listed = repo.readonly_session().chunks_where("a", where)
    assert selected(found) == selected(listed)
    assert found.left_out == listed.left_out
    assert found.reasons == listed.reasons
    assert (found.bytes, found.selected_bytes) == (listed.bytes, listed.selected_bytes)
    assert found.unknown == listed.unknown
    assert (found.unknown > 0) == (change == "cell" and "AND" not in where)


@pytest.mark.parametrize("writable", [False, True])
def test_a_compacted_array_is_planned_without_its_chunk_tables(
    monkeypatch: pytest.MonkeyPatch, writable: bool
) -> None:
    storage, _ = compacted(monkeypatch)
    repo = zm.open(storage)
    session = repo.writable_session() if writable else repo.readonly_session()
    storage.reset()
    found = session.chunks_where("a", "a > 180")
    assert (found.selected, found.bytes) == (6, 48 * 16)
    assert requests(storage, "manifests/") == 0


def test_a_writer_depends_on_the_chunks_that_it_has_planned_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, repo = compacted(monkeypatch)
    mine = repo.writable_session(isolation="serializable")
    assert mine.chunks_where("a", "a > 180 AND y >= 8").selected == 6
    zarr.create_group(mine.store, path="results")
    with repo.transaction(message="a chunk that cannot match") as store:
        zarr.open_array(store, path="a")[8, 0] = 0
    with pytest.raises(ConflictError):
        mine.commit("what was found")


def test_a_writer_plans_with_its_own_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    storage, _ = compacted(monkeypatch)
    session = zm.open(storage).writable_session()
    zarr.open_array(session.store, path="a")[0, 0] = 500
    assert (0, 0) in selected(session.chunks_where("a", "a > 180"))
    storage.reset()
    session.chunks_where("a", "a > 180")
    assert requests(storage, "chunks/") == 0


def test_pages_whose_bounds_do_not_match_are_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zarr_manifests.engine.compact.zone_index._OBJECT_BYTES", 1)
    storage, _ = compacted(monkeypatch)

    def fetched(where: str) -> tuple[int, int]:
        """Requests for zone maps, and the bytes of them."""
        session = zm.open(storage).readonly_session()
        storage.reset()
        session.chunks_where("a", where)
        found = [record.nbytes for record in storage.log if record.key.startswith("indexes/")]
        return len(found), sum(found)

    none, listed = fetched("a > 1000")
    every, whole = fetched("a >= 0")
    assert every == none + 4
    for where, pages in (("a > 180", 1), ("a > 100", 2)):
        count, nbytes = fetched(where)
        assert count == none + pages
        assert listed < nbytes < whole


def test_only_leaves_that_newer_chunks_lie_in_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zarr_manifests.engine.compact.zone_index._OBJECT_BYTES", 1)
    storage, repo = compacted(monkeypatch, leaves=True)
    keys = [ref.blob.key for ref in contents_of(repo.readonly_session().store).view.manifests]
    assert len(keys) == 4
    writer = repo.writable_session()
    array = zarr.open_array(writer.store, path="a", mode="r+")
    array[5, 0] = 500
    assert [2, 0] in writer.chunks_where("a", "a > 400").boxes[:, 0].tolist()
    writer.commit("one cell of the second leaf")

    def read(where: str) -> tuple[Any, int, int]:
        session = zm.open(storage).readonly_session()
        storage.reset()
        found = session.chunks_where("a", where)
        leaves = {record.key for record in storage.log} & {*keys}
        return found.boxes.tolist(), len(leaves), requests(storage, "indexes/")

    boxes, leaves, indexes = read("a > 400")
    assert (boxes, leaves) == ([[[2, 0], [3, 1]]], 1)
    every, leaves, more = read("a >= 0")
    assert (sum((hi[0] - lo[0]) * (hi[1] - lo[1]) for lo, hi in every), leaves) == (48, 1)
    assert more == indexes + 3, "pages of untouched leaves are read only if they may match"
    # A where that the newer chunk is no part of reads no leaf at all.
    assert read("a > 180 AND y >= 8")[1] == 0


def test_a_damaged_page_is_made_up_for_by_chunk_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    storage, repo = compacted(monkeypatch, leaves=True)
    node = contents_of(repo.readonly_session().store).array_at("a")
    (pages,) = zones_of(
        context_of(repo), contents_of(repo.readonly_session().store).view, [node.node_id]
    ).values()
    assert pages.pages is not None
    storage.delete_many([pages.pages.pages[0].blob.key])
    found = zm.open(storage).readonly_session().chunks_where("a", "a < 24")
    assert {(0, 0), (0, 5)} <= selected(found)


@pytest.mark.parametrize("dtype", ["f2", "f4"])
@pytest.mark.parametrize("op", ["=", "!=", "<", "<=", ">", ">="])
@pytest.mark.parametrize("literal", [0.1, 0.3, 1e300])
def test_narrow_floats_match_as_numpy_and_as_spark_compare_them(
    dtype: str, op: str, literal: float
) -> None:
    """In their own type, 0.1 is 0.1; as 64-bit floats, it is not."""
    values = np.array([0.1, 0.3, 0.5, 1.0], dtype)
    storage = MemoryStorage()
    how = {"t": {"chunks": (1,)}}
    zm.write(xr.Dataset({"t": ("x", values)}), storage, message="m", encoding=how)
    session = zm.open(storage).readonly_session()
    found = session.chunks_where("t", f"t {op} {literal!r}").boxes
    chosen = {int(at) for box in found for at in range(box[0][0], box[1][0])}
    compare = OPS[op]
    with np.errstate(over="ignore"):
        alike = compare(values, literal) | compare(values.astype("f8"), literal)
    assert chosen >= set(np.flatnonzero(alike).tolist())
    assert op != "=" or len(chosen) == alike.sum()
