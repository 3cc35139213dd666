"""`Session.chunks_where`: no chunk with a matching cell is ever left out, and others are."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xarray as xr
import zarr
from xarray.backends.zarr import FillValueCoder

import zarr_manifests as zm
from zarr_manifests.errors import ConflictError, InvalidArgumentError, NotFoundError
from zarr_manifests.reports import ChunkSelection
from zarr_manifests.storage.memory import MemoryStorage
from zoned import OPS


def matching_chunks(session: zm.Session, op: str, *literal: float) -> set[tuple[int, ...]]:
    """Chunks of `a`, of two by two cells, with a cell that matches, found by reading all."""
    with xr.open_dataset(session.store, engine="zarr", consolidated=False) as ds:
        values = ds["a"].load().values
    keep = OPS[op](values, *literal) if literal else np.isnan(values)
    return {(i // 2, j // 2) for i, j in np.argwhere(keep).tolist()}


def selected(found: ChunkSelection) -> set[tuple[int, ...]]:
    chunks: list[tuple[int, ...]] = []
    for lo, hi in found.boxes.tolist():
        chunks += product(*map(range, lo, hi))
    assert len(set(chunks)) == len(chunks) == found.selected
    assert found.selected + sum(found.left_out.values()) == found.chunks
    return set(chunks)


def encoded_fill(value: Any, dtype: str) -> Any:
    return FillValueCoder.encode(np.dtype(dtype).type(value), np.dtype(dtype))


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


@pytest.mark.parametrize("calendar", ["standard", "noleap"])
def test_a_date_in_a_mapping_means_its_whole_period(calendar: str) -> None:
    """As one label, in a list and at both ends, and as `summarize` selects it."""
    times = xr.date_range("2001-02-01", periods=24 * 59, freq="h", calendar=calendar)
    repo = zm.create(MemoryStorage())
    hours = xr.Dataset({"a": ("time", np.arange(24.0 * 59))}, {"time": times})
    zm.write(hours, repo, message="hours", encoding={"a": {"chunks": 1}})
    session = repo.readonly_session()

    def count(label: Any) -> int:
        return session.chunks_where("a", {"time": label}).selected

    for label in ("2001-03-02", "2001-03", "2001", "2001-03-02T06"):
        due = int(session.summarize("a", {"time": label})["count"])
        assert count(label) == count([label]) == count((label, label)) == due
    assert count(pd.Timestamp("2001-03-02").date()) == 24
    assert count(pd.Timestamp("2001-03-02")) == 1
    assert count(["2001-03-02", "2001-03-04"]) == 48
    if calendar == "standard":  # texts, and operators, compare with the first instant
        assert session.chunks_where("a", "time = '2001-03-02'").selected == 1
        assert count(("<=", "2001-02-02")) == 25


def test_statistics_of_packed_values_are_turned_with_their_scale() -> None:
    _, session = measured(np.array([1, 5, 2, 3], "i2"), 0, {"scale_factor": -0.5})
    assert chosen(session, "a <= -2") == chosen(session, "a >= -0.5") == [(0,)]


def test_a_selection_is_told_to_programs() -> None:
    _, session = measured(np.array([1, 5, 2, 3], "i2"), 0, {"scale_factor": -0.5})
    found = session.chunks_where("a", "a <= -2").to_dict()
    assert (found["selected"], found["cells"]) == (1, [[[0, 2]]])


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


def test_cells_that_an_array_has_grown_by_have_the_fill_value() -> None:
    array, session = measured(np.arange(5, 10, dtype="f4"), 0, {}, chunk=3)
    assert chosen(session, "a < 1") == []
    array.resize((6,))
    assert chosen(session, "a < 1") == [(1,)]
    assert chosen(session, "a > 7.5") == [(1,)]


@pytest.mark.parametrize("data", [[5.0, 6, 7, 8, 9], [np.nan, np.nan, np.nan, np.nan, 9]])
def test_values_that_were_cut_off_are_found_once_the_array_grows_again(data: list[float]) -> None:
    repo = zm.create(MemoryStorage())
    how: dict[str, Any] = {"data": np.array(data), "chunks": (3,), "dimension_names": ("x",)}
    with repo.transaction(message="values") as store:
        zarr.create_array(store, name="a", **how).resize((4,))
    repo.compute_statistics()
    session = repo.writable_session()
    assert chosen(session, "a > 8") == []
    zarr.open_array(session.store, path="a", mode="r+").resize((5,))
    assert chosen(session, "a > 8") == [(1,)]


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


def test_arrays_beside_it_and_coordinates_count_with_it() -> None:
    values = np.arange(24, dtype="f4").reshape(6, 4)
    times = np.datetime64("2000-01-01", "ns") + np.arange(6) * np.timedelta64(1, "D")
    both = {"a": (("time", "x"), values), "b": (("time", "x"), -values)}
    ds = xr.Dataset(both, {"time": times, "x": [3.0, 1.5, 7.0, 2.0]})
    repo = zm.create(MemoryStorage())
    encoding = {name: {"chunks": (2, 2)} for name in both}
    zm.write(ds, repo, message="a and b", encoding=encoding)
    session = repo.readonly_session()
    assert chosen(session, "b < -20") == [(2, 0), (2, 1)]
    assert chosen(session, "b < -20 AND x = 7") == [(2, 1)]
    assert chosen(session, "time >= '2000-01-05' AND x < 2") == [(2, 0)]
    assert chosen(session, "b < -20 AND time < '2000-01-03'") == []
    assert chosen(session, "a >= 0 AND x = 9") == []


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
    for where in ((">", 180), ("<", 0), ("is_null",), ("=", 300)):
        found = session.chunks_where("a", [("a", *where)])
        assert matching_chunks(session, *where) <= selected(found)
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


def test_an_array_that_xarray_cannot_open_is_told() -> None:
    repo = zm.create(MemoryStorage())
    with repo.transaction(message="t") as store:
        zarr.create_array(store, name="t", shape=(6,), chunks=(2,), dtype="i4", zarr_format=2)
    with pytest.raises(InvalidArgumentError, match="has no _ARRAY_DIMENSIONS"):
        repo.readonly_session().chunks_where("t", "t > 3")
