"""Counts, extremes, sums and means of arrays, against what xarray computes of all values."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xarray as xr
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import zarr_manifests as zm
from cli_calls import call, lines, objects
from effort import examples
from storages import CountingStorage
from zarr_manifests.errors import InvalidArgumentError, NotFoundError
from zarr_manifests.storage.memory import MemoryStorage

TIMES = pd.date_range("2001-01-28", periods=9, freq="D")
FOLDER = tempfile.TemporaryDirectory(prefix="summarized-")
LATS = np.array([60.0, 50.0, 40.0, 30.0, 20.0])
ENCODINGS: dict[str, dict[str, Any]] = {
    "float64": {"dtype": "f8"},
    "float32": {"dtype": "f4", "_FillValue": np.float32(-9)},
    "integers": {"dtype": "i8"},
    "small": {"dtype": "u1", "_FillValue": 255},
    "packed": {"dtype": "i2", "scale_factor": -0.5, "add_offset": 3.0, "_FillValue": 99},
    "flags": {"dtype": "bool"},
}
SELECTIONS: list[dict[str, Any]] = [
    {},
    {"time": slice("2001-01-30", "2001-02-03")},
    {"lat": slice(60, 35)},
    {"lat": [20.0, 60.0]},
    {"time": slice("2001-01-30", None), "lat": slice(50, 30)},
    {"lat": 40.0},
]
GROUPS: list[Any] = [None, "time", ["time", "lat"], "time.month", "time.2D", "lat"]


def dataset(kind: str, seed: int, *, sparse: bool = False) -> xr.Dataset:
    rng = np.random.default_rng(seed)
    shape = (len(TIMES), len(LATS))
    numbers: Any = rng.integers(0, 50, shape)
    if kind == "flags":
        numbers = numbers > 25
    elif kind != "integers":
        numbers = numbers * (0.5 if kind == "packed" else 0.1 if "float" in kind else 1.0)
        numbers[rng.random(shape) < (0.9 if sparse else 0.2)] = np.nan
    ds = xr.Dataset({"air": (("time", "lat"), numbers)}, {"time": TIMES, "lat": LATS})
    ds["air"].encoding = ENCODINGS[kind]
    return ds


def by_xarray(
    ds: xr.Dataset, indexers: dict[str, Any], by: Any, weights: dict[str, str] | None = None
) -> xr.Dataset:
    """The same answer, of all values in memory."""
    air = ds["air"].sel(indexers)
    if air.dtype == np.float32:
        air = air.astype("f8")
    if weights is not None:
        cos = np.cos(np.deg2rad(ds["lat"])).sel(
            {dim: at for dim, at in indexers.items() if dim == "lat"}
        )
        cos = cos.broadcast_like(air)
        one, other = (
            by_xarray(xr.Dataset({"air": part}), {}, by)["sum"]
            for part in (air * cos, cos.where(air.notnull()))
        )
        with np.errstate(all="ignore"):
            plain = by_xarray(ds, indexers, by)
            return plain.assign(mean=(one / other).where(plain["count"] > 0), weight=other)
    how = dict(name.partition(".")[::2] for name in ([by] if isinstance(by, str) else by or []))
    over = [dim for dim in air.dims if dim not in how]
    grouped: Any = air
    for dim, group in how.items():
        if group == "month":
            grouped, over = air.groupby(f"{dim}.{group}"), [*air.dims]
        elif group:
            grouped, over = air.resample({dim: group}), [*air.dims]
    with np.errstate(all="ignore"):
        return xr.Dataset(
            {
                "count": grouped.count(over),
                "min": grouped.min(over),
                "max": grouped.max(over),
                "sum": grouped.sum(over).fillna(0),  # which sums nothing, if there is no dimension
                "mean": grouped.mean(over),
            }
        )


def assert_same(found: xr.Dataset, expected: xr.Dataset) -> None:
    for name in expected.data_vars.keys() & {*found.data_vars, "mean"}:
        one, other = found[name], expected[name]
        assert one.dims == other.dims
        for dim in one.dims:
            np.testing.assert_array_equal(one[dim].values, other[dim].values)
        if name in ("count", "min", "max"):
            counted = found["count"].values > 0
            np.testing.assert_array_equal(one.values[counted], other.values[counted])
        else:
            np.testing.assert_allclose(one.values, other.values, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(max_examples=examples(150))
@given(
    st.sampled_from(sorted(ENCODINGS)),
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from(SELECTIONS),
    st.sampled_from(GROUPS),
    st.sampled_from(["written", "computed", "none", "half"]),
    st.sampled_from([None, {"lat": "cos"}]),
    st.sampled_from(["lat: cos", "time: cos lat: cos", ""]),
    st.sampled_from([9, 9, 8, 7]),
    st.booleans(),
    st.sampled_from(["", "main", "branch"]),
    st.sampled_from(["plain", "plain", "shards", "virtual"]),
)
def test_answers_are_those_of_xarray(
    kind: str,
    rows: int,
    columns: int,
    indexers: Any,
    by: Any,
    how: str,
    weights: Any,
    declared: str,
    length: int,
    compacts: bool,
    again: str,
    stored: str,
) -> None:
    if not isinstance(indexers.get("lat", slice(0)), slice | list) and by in (
        "lat",
        ["time", "lat"],
    ):
        return
    ds = dataset(kind, 1)
    ds["air"].attrs["statistics_weights"] = declared
    chunks: dict[str, Any] = {"chunks": (rows, columns)}
    if stored == "shards":
        chunks["shards"] = (2 * rows, 2 * columns)
    if stored == "virtual":
        folder = tempfile.mkdtemp(dir=FOLDER.name)
        ds.to_zarr(folder, encoding={"air": {**ds["air"].encoding, **chunks}}, consolidated=False)
        repo = zm.create(MemoryStorage(), virtual_containers={"plain": f"file://{folder}"})
        zm.virtual.import_zarr(repo, folder)
        how = "computed" if how == "written" else how
    else:
        repo = zm.create(MemoryStorage())
        measured = how in ("written", "half")
        zm.write(ds, repo, message="all", encoding={"air": chunks}, statistics=measured)
    if again:
        later = dataset(kind, 2, sparse=True).isel(time=slice(3, 7))
        later["air"].attrs = ds["air"].attrs
        if again == "branch":
            repo.create_branch("later")
            zm.write(ds, repo, message="beside", group="beside")
        branch = "later" if again == "branch" else "main"
        changed: dict[str, Any] = {"region": "auto", "statistics": how == "written"}
        zm.write(later, repo, message="some", branch=branch, **changed)
        repo.merge(branch) if again == "branch" else None
    if how == "computed":
        repo.compute_statistics()
    if compacts:
        repo.compact()
        repo.compute_statistics() if how == "computed" else None
    if length < len(TIMES):
        with repo.transaction(message="cut") as store:
            for name in ("air", "time"):
                array = zarr.open_array(store, path=name)
                array.resize((length, *array.shape[1:]))
    ds = xr.open_dataset(repo, engine="zarr_manifests").load()
    found = repo.readonly_session().summarize("air", indexers, by=by, weights=weights)
    assert_same(found, by_xarray(ds, indexers, by, weights))
    even = columns == 1 and stored != "shards"
    known = weights is None or even or declared == "lat: cos"
    known = known and length == len(TIMES)
    # What Zarr keeps of a shard beyond the edge is not known where it is written.
    known = known and (how == "computed" or stored != "shards")
    if how in ("written", "computed") and not indexers and by is None and not again and known:
        assert found.attrs["chunks_read"] == 0


def array_of(values: Any, *, chunks: Any, fill: Any = 0, **how: Any) -> tuple[Any, zm.Session]:
    """An array of one repository with statistics, in a session that can change it."""
    repo = zm.create(MemoryStorage())
    with repo.transaction(message="values") as store:
        names = ("x", "y", "z")[: values.ndim]
        given = {"shape": values.shape, "dtype": values.dtype, "chunks": chunks, "fill_value": fill}
        made = zarr.create_array(store, name="a", dimension_names=names, **given, **how)
        made[...] = values
    repo.compute_statistics()
    session = repo.writable_session()
    return zarr.open_array(session.store, path="a", mode="r+"), session


def test_chunks_that_are_not_stored_count_as_the_fill_value_says() -> None:
    array, session = array_of(np.arange(6, dtype="f4"), chunks=(2,), fill=7)
    array.resize((12,))
    found = session.summarize("a", {"x": slice(0, 11)}, by="x")
    assert found["max"].values.tolist() == [0, 1, 2, 3, 4, 5, 7, 7, 7, 7, 7]
    whole = session.summarize("a")
    assert (float(whole["sum"]), int(whole["count"])) == (57, 12)
    assert (whole.attrs["chunks_answered"], whole.attrs["chunks_read"]) == (3, 0)
    array, session = array_of(np.ones(4, "f4"), chunks=(2,), fill=np.nan)
    array.resize((9,))
    found = session.summarize("a")
    assert [int(found[name]) for name in ("count", "missing", "sum")] == [4, 5, 4]


def test_a_clipped_chunk_is_read_again_once_the_array_has_grown() -> None:
    values = np.arange(50, dtype="i4").reshape(5, 10)
    array, session = array_of(values, chunks=(10, 10), fill=-1)
    assert session.summarize("a").attrs["chunks_read"] == 0
    # As many cells as before are inside, but other ones.
    array.resize((5, 5))
    array.resize((10, 5))
    found = session.summarize("a")
    assert found.attrs["chunks_read"] == 1
    assert int(found["sum"]) == int(array[...].sum())
    assert int(found["min"]) == -1


def test_a_leaf_with_several_groups_answers_chunk_by_chunk() -> None:
    values = np.arange(12.0).reshape(4, 3)
    repo = zm.create(MemoryStorage())
    with repo.transaction(message="values") as store:
        how: dict[str, Any] = {"shape": (4, 3), "chunks": (1, 3), "dtype": "f8"}
        made = zarr.create_array(store, name="a", dimension_names=("x", "y"), **how)
        made[...] = values
    repo.compact()
    repo.compute_statistics()
    found = repo.readonly_session().summarize("a", by="x")
    assert found["sum"].values.tolist() == values.sum(axis=1).tolist()
    assert found.attrs["chunks_read"] == 0


def test_a_whole_leaf_answers_without_what_is_known_of_its_chunks() -> None:
    storage = CountingStorage(MemoryStorage())
    values = np.arange(1600.0).reshape(40, 40)
    repo = zm.create(storage)
    with repo.transaction(message="values") as store:
        how: dict[str, Any] = {"shape": (40, 40), "chunks": (1, 1), "dtype": "f8"}
        zarr.create_array(store, name="a", dimension_names=("x", "y"), **how)[...] = values
    repo.compact()
    repo.compute_statistics()

    def read(indexers: dict[str, Any] | None, expected: float) -> int:
        session = zm.open(storage).readonly_session()
        before = storage.bytes_read
        found = session.summarize("a", indexers)
        assert (float(found["sum"]), found.attrs["chunks_read"]) == (expected, 0)
        return storage.bytes_read - before

    whole, most = read(None, values.sum()), read({"x": slice(1, None)}, values[1:].sum())
    assert whole < 2_000 < most


def test_of_nothing_nothing_is_counted() -> None:
    _, session = array_of(np.arange(6, dtype="f4").reshape(2, 3), chunks=(2, 2))
    found = session.summarize("a", {"x": slice(5, 9)})
    assert [int(found["count"]), int(found["missing"])] == [0, 0]
    assert np.isnan([float(found[name]) for name in ("min", "max", "mean")]).all()
    assert session.summarize("a", {"x": slice(5, 9)}, by="x").sizes == {"x": 0}


def test_a_leaf_does_not_answer_for_cells_that_were_cut_off() -> None:
    repo = zm.create(MemoryStorage())
    values = np.arange(64.0).reshape(8, 8)
    with repo.transaction(message="values") as store:
        how: dict[str, Any] = {"shape": (8, 8), "chunks": (4, 4), "dtype": "f8"}
        zarr.create_array(store, name="a", **how)[...] = values
    repo.compact()
    repo.compute_statistics()
    with repo.transaction(message="cut") as store:
        zarr.open_array(store, path="a").resize((7, 8))
    found = repo.readonly_session().summarize("a")
    assert float(found["sum"]) == values[:7].sum()
    assert (found.attrs["chunks_answered"], found.attrs["chunks_read"]) == (2, 2)


def test_what_is_written_in_the_session_counts() -> None:
    array, session = array_of(np.arange(8, dtype="i2"), chunks=(2,))
    array[2:4] = 100
    found = session.summarize("a")
    assert (int(found["sum"]), int(found["max"])) == (223, 100)
    assert (found.attrs["chunks_answered"], found.attrs["chunks_read"]) == (3, 1)


def test_shards_and_scalars_are_answered() -> None:
    values = np.arange(64, dtype="f8").reshape(8, 8)
    _, session = array_of(values, chunks=(2, 2), shards=(4, 4))
    found = session.summarize("a", {"y": slice(0, 4)}, by="x")
    np.testing.assert_array_equal(found["sum"], values[:, :4].sum(axis=1))
    _, session = array_of(np.array(5.0), chunks=())
    assert float(session.summarize("a")["mean"]) == 5
    _, session = array_of(np.array(2**63 - 1), chunks=())  # a sum that its entry does not know
    assert int(session.summarize("a")["sum"]) == 2**63 - 1


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (np.array([2**53 + 1, 1, 1]), "i8"),
        (np.array([2**61] * 4), "f8"),
        (np.array([2**62, 2**62, -(2**62), 5, -(2**62), 2]), "i8"),
        (np.array([-(2**63), -1, -(2**63)]), "f8"),
        (np.array([2**63, 5, 7], "u8"), "u8"),
        (np.full(4, 2**63, "u8"), "f8"),
        (np.full(6, np.datetime64("2020-01-01", "ns").astype(int)), "f8"),
    ],
)
@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("stored", [3, 9])
def test_integers_are_added_exactly_and_rounded_at_the_end(
    values: Any, dtype: str, length: int, stored: int
) -> None:
    array, session = array_of(values[:stored], chunks=(length,), fill=values[-1])
    array.resize(values.shape)  # so that chunks that are not stored count, too
    found, known = session.summarize("a"), array[...].tolist()
    assert found["sum"].dtype == dtype
    assert found["sum"].item() == np.array(sum(known), dtype).item()
    assert found["mean"].item() == float(np.array(sum(known), "f8") / len(known))
    each = session.summarize("a", by="x")["sum"]
    assert each.values.tolist() == known


@pytest.mark.parametrize("lazy", [False, True])
def test_large_chunks_are_weighed_where_they_are_written(lazy: bool) -> None:
    values = np.random.default_rng(0).normal(size=(3, 200, 300))
    values[1, :, 7] = np.nan
    ds = xr.Dataset({"a": (("t", "lat", "x"), values)}, {"lat": np.linspace(-80, 80, 200)})
    ds["a"].attrs["statistics_weights"] = "lat: cos"
    repo = zm.create(MemoryStorage())
    encoding = {"a": {"chunks": (1, 200, 300)}}
    zm.write(ds.chunk(t=1) if lazy else ds, repo, message="large", encoding=encoding)
    found = repo.readonly_session().summarize("a", by="t", weights={"lat": "cos"})
    assert found.attrs["chunks_read"] == 0
    weights = np.cos(np.deg2rad(ds.lat))
    np.testing.assert_allclose(found["mean"], ds.a.weighted(weights).mean(["lat", "x"]), 1e-12)


@pytest.mark.parametrize("dtype", [">i4", ">f8"])
def test_chunks_of_zarr_v2_in_the_other_byte_order_are_measured(dtype: str) -> None:
    repo = zm.create(MemoryStorage())
    with repo.transaction(message="big-endian") as store:
        group = zarr.create_group(store, zarr_format=2)
        for name, values in (("a", [1, 2, 3, 4]), ("lat", [60, 30, 0, -30])):
            made = group.create_array(name, shape=(4,), chunks=(2,), dtype=dtype, fill_value=None)
            made.attrs["_ARRAY_DIMENSIONS"] = ["lat"]
            made[:] = values
    repo.compute_statistics()
    session = repo.readonly_session()
    found = session.summarize("a", weights={"lat": "cos"})
    weights = np.cos(np.deg2rad([60, 30, 0, -30]))
    assert found["mean"].item() == pytest.approx(np.average([1, 2, 3, 4], weights=weights))
    assert (found["sum"].item(), found["max"].item()) == (10, 4)
    assert session.chunks_where("a", "a = 4").selected == 1


def test_tasks_are_not_asked_for_what_is_not_committed() -> None:
    array, session = array_of(np.ones(40, "i4"), chunks=(1,))
    array[::2] = 5
    run: Any = map
    assert session.summarize("a", run=run)["sum"].item() == 120


def test_a_scalar_has_statistics_and_a_sum_that_integers_do_not_know() -> None:
    repo = zm.create(MemoryStorage())
    with repo.transaction(message="scalar") as store:
        made = zarr.create_array(store, name="a", shape=(), dtype="f8")
        made[...] = 5
        zarr.create_array(store, name="b", data=np.array([-(2.0**63), 1]), chunks=(1,))
    repo.compute_statistics(["a"])
    session = repo.readonly_session()
    assert session.summarize("a")["sum"].item() == 5
    assert session.summarize("b")["min"].item() == -(2.0**63)


def test_missing_integers_are_not_in_a_large_sum() -> None:
    array, session = array_of(np.array([2**62, 2**62, 7, 2**62, 7]), chunks=(3,))
    array.attrs["_FillValue"] = 7
    found = session.summarize("a")
    assert (found["count"].item(), found["missing"].item()) == (3, 2)
    assert found["sum"].item() == 3.0 * 2**62


@pytest.mark.parametrize(
    ("indexers", "by", "said"),
    [
        ({"y": 1}, None, "no dimension 'y'; it has x"),
        ({"x": 9}, None, "x=9"),
        ({"x": [1, 1]}, None, "selects a position twice"),
        ({"x": 1}, "x", "one label of it is selected"),
        (None, "time", "no dimension 'time'"),
        (None, "x.month", "'x' has no labels"),
        (None, [3], "by= names dimensions"),
        (None, {"x": "month"}, "by= names dimensions"),
        (None, xr.DataArray([1, 2]), "by= names dimensions"),
        ({"x": (1, 2)}, None, r"give slice\(first, last\)"),
    ],
)
def test_what_cannot_be_summarized_is_told(indexers: Any, by: Any, said: str) -> None:
    _, session = array_of(np.arange(4.0), chunks=(2,))
    with pytest.raises(InvalidArgumentError, match=said):
        session.summarize("a", indexers, by=by)


def test_only_numbers_are_summarized() -> None:
    repo = zm.create(MemoryStorage())
    names = np.array(["a", "b", "c"])
    ds = xr.Dataset({"name": ("t", names), "n": ("t", [1, 2, 3])}, {"t": TIMES[:3]})
    ds["lag"] = ("t", pd.to_timedelta([1, 2, 3], "D"))
    noleap = xr.date_range("2001", periods=3, calendar="noleap")
    zm.write(ds.assign_coords(t=noleap), repo, group="noleap", message="noleap")
    zm.write(ds, repo, message="texts and times")
    session = repo.readonly_session()
    with pytest.raises(InvalidArgumentError, match="/name holds no numbers"):
        session.summarize("name")
    bounds = xr.Dataset({"t_bnds": (("t", "edge"), [[1.0, 2], [2, 3]])}, {"t": TIMES[:2]})
    bounds.t.attrs["bounds"] = "t_bnds"
    bounds["n"] = ("gap", [1, 2])
    gap = np.array(["2001-01-01", "NaT"], "M8[ns]")
    zm.write(bounds.assign_coords(gap=gap), repo, group="odd", message="odd", check=False)
    session = repo.readonly_session()
    with pytest.raises(InvalidArgumentError, match="'gap' has positions without a label"):
        session.summarize("odd/n", by="gap.month")
    for path in ("t", "lag", "odd/t_bnds"):
        with pytest.raises(InvalidArgumentError, match=f"/{path} holds times"):
            session.summarize(path)
    with pytest.raises(InvalidArgumentError, match="'noleap' are not compared as text"):
        session.summarize("noleap/n", "t > '2001-01-01'")
    for by in ("t.mean", ["t.month", "t"]):
        with pytest.raises(InvalidArgumentError, match=r"twice|a part of a time"):
            session.summarize("n", by=by)
    changed = repo.writable_session()
    packed = zarr.create_array(changed.store, name="packed", data=np.array([1.5, 2.5]), chunks=(1,))
    packed.attrs["scale_factor"] = 2
    with pytest.raises(InvalidArgumentError, match=r"packed by whole numbers.*such as 2\.0"):
        changed.summarize("packed")
    with pytest.raises(NotFoundError, match="missing"):
        session.summarize("missing")
    with pytest.raises(InvalidArgumentError, match=r"a part of a time.* of times$"):
        session.summarize("n", by="t.fortnight")
    assert session.summarize("n", by="t.year")["sum"].values.tolist() == [6]


def test_the_command_line_shows_a_table_and_what_was_read(tmp_path: Any) -> None:
    ds = xr.Dataset({"air": (("time", "lat"), np.arange(45.0).reshape(9, 5))})
    ds = ds.assign_coords(time=TIMES, lat=LATS)
    zm.write(ds, zm.create(tmp_path), message="air", encoding={"air": {"chunks": (1, 5)}})
    table = lines("summarize", tmp_path, "air", "--by", "time.month")
    assert table[0].split() == ["month", "count", "missing", "min", "max", "sum", "mean"]
    assert table[1].split() == ["1", "20", "0", "0", "19", "190", "9.5"]
    assert table[-1] == "9 chunks answered by statistics, 0 read"
    where = ("--where", "lat > 30 AND time < '2001-01-30'", "-w", "lat=cos")
    row, told = objects("summarize", tmp_path, "air", *where)
    assert (row["count"], row["sum"], told["chunks_read"]) == (6, 21, 2)
    assert row["weight"] == pytest.approx(2 * np.cos(np.deg2rad([60, 50, 40])).sum())
    for words, said in (
        (("--where", "air > 3"), "is about values"),
        (("--by", "depth"), "no dimension 'depth'"),
        (("-w", "lat=area"), "weights={'lat': 'area'} are none of /air"),
        (("--where", "lat >> 3"), "\n  lat >> 3\n  ^\na where is comparisons"),
    ):
        result = call("summarize", tmp_path, "air", *words)
        assert result.exit_code == 2
        assert said in result.stderr


def test_sums_by_other_weights_than_those_asked_for_do_not_answer() -> None:
    values = np.arange(10.0).reshape(2, 5)
    ds = xr.Dataset({"t": (("x", "lat"), values, {"statistics_weights": "lat: area"})})
    ds = ds.assign_coords(lat=LATS, area=("lat", [1.0, 0, 0, 0, 3]))
    repo = zm.create(MemoryStorage())
    zm.write(ds, repo, message="weighed", encoding={"t": {"chunks": (1, 5)}})
    session = repo.readonly_session()
    for said, weights, read in (("area", ds.area, 0), ("cos", np.cos(np.deg2rad(LATS)), 2)):
        found = session.summarize("t", by="x", weights={"lat": said})
        expected = [np.average(row, weights=weights) for row in values]
        np.testing.assert_allclose(found["mean"], expected, 1e-12)
        assert found.attrs["chunks_read"] == read


def test_weights_are_numbers_a_variable_or_the_cosine_of_a_coordinate() -> None:
    depth, values = np.array([0.0, 10.0, 30.0, 60.0]), np.array([1.0, 2.0, np.nan, 8.0])
    ds = xr.Dataset({"t": ("depth", values), "thick": ("depth", [10.0, 20, 30, 40])})
    repo = zm.create(MemoryStorage())
    zm.write(ds.assign_coords(depth=depth), repo, message="t", encoding={"t": {"chunks": (2,)}})
    session, there = repo.readonly_session(), ~np.isnan(values)
    for said, weights in (
        ("thick", ds["thick"].values),
        ("depth", depth),
        ("cos", np.cos(np.deg2rad(depth))),
        ([1, 0, 5, 3], np.array([1, 0, 5, 3])),
    ):
        found = session.summarize("t", weights={"depth": said})
        expected = np.average(values[there], weights=weights[there])
        assert float(found["mean"]) == pytest.approx(expected, rel=1e-12)
    for wrong, told in (
        ({"depth": "missing"}, "weights={'depth': 'missing'} are none of /t"),
        ({"depth": "t"}, "are none of /t"),  # of which a value is missing
        ({"depth": [1, -1, 1, 1]}, "none is negative or missing"),
        ({"depth": [1, 2]}, "a number for each position"),
        ({"lat": "cos"}, "whose dimensions are depth"),
        (ds["thick"], "weights=DataArray is no mapping"),
        ({"depth": ds["thick"]}, "without labels"),
        ({}, "are none of /t"),
    ):
        with pytest.raises(InvalidArgumentError, match=told):
            session.summarize("t", weights=wrong)
    ds["depth"] = ("depth", depth, {"units": "m"})
    zm.write(ds, repo, message="metres", mode="w")
    with pytest.raises(InvalidArgumentError, match="'cos' of its coordinate in degrees"):
        repo.readonly_session().summarize("t", weights={"depth": "cos"})


def test_weights_last_through_a_compaction_beside_older_ones() -> None:
    """Those of a chunk that was replaced are of other latitudes, and are read last."""
    repository = zm.create(MemoryStorage())

    def append(number: int, lat: list[float]) -> None:
        cells = (("time", "lat"), [[2.0, 5.0]], {"statistics_weights": "lat: cos"})
        day = xr.Dataset({"t": cells}, {"time": [number], "lat": lat})
        new = {} if number else {"t": {"chunks": (1, 2)}}
        zm.write(day, repository, append_dim="time", encoding=new)

    append(0, [0.0, 60.0])
    repository.compact(mode="full")
    with repository.transaction(message="other latitudes") as store:
        zarr.open_array(store, path="lat")[:] = [0.0, 30.0]
        zarr.open_array(store, path="t")[0] = 7.0
    append(1, [0.0, 30.0])
    repository.compact(mode="full")
    session = repository.readonly_session()
    found = session.summarize("t", {"time": [1]}, weights={"lat": "cos"})
    assert found.attrs["chunks_read"] == 0
    assert found["mean"] == pytest.approx(np.average([2, 5], weights=np.cos(np.radians([0, 30]))))
