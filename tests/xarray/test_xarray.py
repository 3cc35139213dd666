"""The engine and `write`: what goes in comes out, in one commit, at the version asked for."""

import itertools
import pickle
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import dask
import dask.array as da
import numpy as np
import pytest
import xarray as xr
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import zarr_manifests as zm
from effort import examples
from zarr_manifests.error_cases import NotARepositoryError
from zarr_manifests.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidArgumentError,
    NotFoundError,
    SnapshotExpiredError,
)
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.testing import CountingStorage, Fault, FaultyStorage
from zarr_manifests.xarray import ManifestsBackendEntrypoint

ENGINE = "zarr_manifests"


def winds(months: int = 6, start: str = "1982-01") -> xr.Dataset:
    """Monthly winds on a coarse grid, with gaps, as such data come."""
    time = np.datetime64(start, "M") + np.arange(months)
    rng = np.random.default_rng(months)
    shape = (months, 9, 12)
    u, v = rng.normal(0, 5, (2, *shape)).astype("f4")
    u[0, :3, :4] = np.nan
    return xr.Dataset(
        {
            "u": (("time", "lat", "lon"), u, {"units": "m/s", "long_name": "eastward wind"}),
            "v": (("time", "lat", "lon"), v, {"units": "m/s"}),
        },
        {
            "time": time.astype("M8[ns]"),
            "lat": np.linspace(80, -80, 9, dtype="f4"),
            "lon": np.linspace(0, 330, 12, dtype="f4"),
        },
        {"title": "Monthly winds", "history": ["made", "checked"]},
    )


PACKED = {
    "u": {"dtype": "i2", "scale_factor": 0.01, "_FillValue": -32768, "chunks": (2, 9, 12)},
    "v": {"chunks": (2, 9, 6)},
    "time": {"units": "days since 1970-01-01", "calendar": "standard", "dtype": "f8"},
}


def chunked(ds: xr.Dataset) -> xr.Dataset:
    return ds.chunk(time=2)


def open_repo(location: object, **options: object) -> xr.Dataset:
    return xr.open_dataset(location, engine=ENGINE, **options)


@pytest.fixture
def storage() -> MemoryStorage:
    return fresh_storage()


def fresh_storage() -> MemoryStorage:
    """With a name, so that it can be pickled."""
    return MemoryStorage(f"test-xarray-{next(_NUMBERS)}")


_NUMBERS = itertools.count()


# --- schedulers: dask in this process, and dask somewhere else -------------------------------


def lossy_get(dsk, keys, **kwargs):
    """A scheduler of other processes that runs every task twice and loses the first result."""
    dask.get(dsk, keys)
    return pickle.loads(pickle.dumps(dask.get(dsk, keys)))


SCHEDULERS = {"threads": "threads", "sync": "sync", "elsewhere": lossy_get}


@pytest.fixture(params=SCHEDULERS.values(), ids=SCHEDULERS)
def scheduler(request):
    with dask.config.set(scheduler=request.param):
        yield request.param


# --- write -----------------------------------------------------------------------------------


def test_what_is_written_is_read_back(storage):
    ds = winds()
    snapshot_id = zm.write(ds, storage, message="create", metadata={"source": "test"})
    xr.testing.assert_identical(open_repo(storage).load(), ds)
    (info, first) = zm.open(storage).ancestry()
    assert info.snapshot_id == snapshot_id
    assert (info.message, info.metadata) == ("create", {"source": "test"})
    assert first.message == "create repository"


def test_encodings_are_kept(storage):
    ds = winds()
    zm.write(ds, storage, message="create", encoding=PACKED)
    read = open_repo(storage)
    xr.testing.assert_allclose(read.load(), ds, atol=0.005)
    assert read.u.encoding["scale_factor"] == 0.01
    assert read.u.encoding["dtype"] == np.dtype("i2")
    assert read.u.encoding["chunks"] == (2, 9, 12)
    assert read.time.encoding["units"] == "days since 1970-01-01"
    raw = open_repo(storage, decode_cf=False)
    assert raw.u.dtype == np.dtype("i2")
    assert raw.u.values[0, 0, 0] == -32768


@pytest.mark.parametrize("packed", [None, PACKED], ids=["plain", "packed"])
def test_dask_arrays_are_written_wherever_they_are_computed(storage, scheduler, packed):
    ds = winds()
    encoding = packed or {"v": {"chunks": (1, 3, 4)}}
    zm.write(chunked(ds), storage, message="create", encoding=encoding)
    xr.testing.assert_allclose(open_repo(storage).load(), ds, atol=0.005 if packed else 0)
    assert len(list(zm.open(storage).ancestry())) == 2


def test_dask_appends_and_regions(storage, scheduler):
    ds = winds(12)
    encoding = {name: {"chunks": (2, 9, 12)} for name in ("u", "v")}
    zm.write(chunked(ds.isel(time=slice(0, 4))), storage, message="create", encoding=encoding)
    more = ds.isel(time=slice(4, 12))
    zm.write(chunked(more), storage, message="append", append_dim="time")
    patch = chunked(ds.isel(time=slice(2, 6)) * 2).drop_vars(["lat", "lon"])
    zm.write(patch, storage, message="patch", region={"time": slice(2, 6)})
    expected = xr.concat([ds[{"time": s}] * f for s, f in _PARTS], "time", join="exact")
    xr.testing.assert_equal(open_repo(storage).load(), expected)


_PARTS = ((slice(0, 2), 1), (slice(2, 6), 2), (slice(6, 12), 1))


def test_odd_dask_arrays(storage, scheduler):
    # No dimension, no cell, one cell in a chunk, blocks that span several chunks, all fill value.
    ds = xr.Dataset(
        {
            "scalar": ((), da.asarray(3.5)),
            "nothing": (("x", "none"), da.zeros((6, 0), chunks=(2, 0))),
            "fine": ("x", da.arange(6, chunks=3)),
            "gaps": ("x", da.full(6, np.nan, chunks=2)),
            "words": ("x", da.from_array(np.array(["a", "bb", "", "d", "e", "f"]), chunks=2)),
        }
    )
    zm.write(ds, storage, message="create", encoding={"fine": {"chunks": (1,)}})
    xr.testing.assert_identical(open_repo(storage).load(), ds.compute())


def test_work_that_arrays_share_is_done_once(storage):
    runs = []

    def source(block):
        runs.append(1)
        return block

    def once_get(dsk, keys, **kwargs):  # unknown, and so taken for one of other processes
        return dask.get(dsk, keys)

    base = da.ones((4, 2), chunks=(2, 2)).map_blocks(source, dtype="f8", meta=np.empty((0, 0)))
    ds = xr.Dataset({"a": (("x", "y"), base + 1), "b": (("x", "y"), base * 3)})
    with dask.config.set(scheduler=once_get):
        zm.write(ds, storage, message="create")
    assert len(runs) == 2


def test_empty_chunks_are_left_out_where_asked_for(storage, scheduler):
    ds = xr.Dataset({"t": ("x", da.from_array([0.0, 0, 0, 1], chunks=2))})
    fill = {"t": {"fill_value": 0.0}}
    repo = zm.create(storage)
    kept = {"t": {**fill["t"], "write_empty_chunks": True}}
    for group, encoding, expected in (("lean", fill, 1), ("full", kept, 2)):
        zm.write(ds, repo, message=group, group=group, encoding=encoding)
        tip, before = (info.snapshot_id for info, _ in zip(repo.ancestry(), "ab", strict=False))
        assert len(repo.diff(before, tip).chunks[f"/{group}/t"]) == expected
        xr.testing.assert_equal(open_repo(storage, group=group).load(), ds.compute())


@pytest.mark.slow
def test_what_comes_back_from_a_block_is_small(storage):
    sizes = []

    def measuring_get(dsk, keys, **kwargs):
        results = dask.get(dsk, keys)
        if len(results) == 64:
            sizes.extend(len(pickle.dumps(state)) for state in results)
        return results

    # 200 attributed arrays beside the one that dask computes.
    ds = xr.Dataset(
        {f"v{i}": ("x", np.arange(4.0), {"note": "n" * 500}) for i in range(200)}
        | {"big": ("y", da.random.random(64_000, chunks=1000))}
    )
    with dask.config.set(scheduler=measuring_get):
        zm.write(ds, zm.create(MemoryStorage("small-results")), message="create")
    assert len(sizes) >= 64
    assert max(sizes) < 3000


def test_blocks_that_share_a_chunk_are_refused(storage, scheduler):
    ds = winds().chunk(time=3)
    with pytest.raises(ValueError, match="chunk"):
        zm.write(ds, storage, message="create", encoding={"u": {"chunks": (2, 9, 12)}})
    assert not zm.exists(storage)


def test_two_copies_that_wrote_half_a_chunk_each_cannot_be_merged(storage):
    repo = zm.create(storage)
    session = repo.writable_session()
    zarr.create_array(session.store, name="a", shape=(4,), chunks=(4,), dtype="i4")
    left, right = session.fork(), session.fork()
    zarr.open_array(left.store, path="a", mode="r+")[:2] = 1
    zarr.open_array(right.store, path="a", mode="r+")[2:] = 2
    with pytest.raises(ConflictError, match="/a: chunks"):
        session.merge(left, right)


@pytest.mark.parametrize("broken", ["source", "storage"])
def test_a_write_that_fails_midway_commits_nothing(storage, scheduler, broken):
    zm.write(winds(2), storage, message="create", config={"pack-chunk-bytes": 0})
    before = open_repo(storage).load()
    more = winds(40, "1982-03").chunk(time=2)
    location = storage
    if broken == "source":

        def fail(block, block_id):
            if block_id[0] == 10:
                raise OSError("the source is gone")
            return block

        data = more.u.data.map_blocks(fail, dtype="f4", meta=np.empty((0, 0, 0), "f4"))
        more["u"] = more.u.copy(data=data)
    else:
        location = FaultyStorage(storage, [Fault("fail_before", "create", "chunks/*", skip=7)])
    with pytest.raises(OSError, match=r"gone|chunks/"):
        zm.write(more, location, message="append", append_dim="time")
    xr.testing.assert_identical(open_repo(storage).load(), before)
    assert len(list(zm.open(storage).ancestry())) == 2
    if broken == "storage":  # it was in the midst of it
        assert len(list(storage.list("chunks/"))) >= 7


def test_append_creates_what_is_not_there(storage):
    for start in ("1982-01", "1982-07", "1983-01"):
        zm.write(winds(6, start), storage, message=start, append_dim="time")
    read = open_repo(storage)
    assert read.sizes["time"] == 18
    expected = xr.concat([winds(6, s) for s in ("1982-01", "1982-07", "1983-01")], "time")
    xr.testing.assert_equal(read.load(), expected)


def test_region_auto(storage):
    ds = winds()
    zm.write(ds, storage, message="create")
    patch = (ds * 3).isel(time=slice(2, 4), lat=slice(0, 3))
    zm.write(patch, storage, message="patch", region="auto")
    expected = ds.copy(deep=True)
    for name in ("u", "v"):
        expected[name][2:4, 0:3] = patch[name]
    xr.testing.assert_equal(open_repo(storage).load(), expected)


def test_region_is_not_changed_for_the_caller(storage):
    zm.write(winds(), storage, message="create")
    region, encoding = {"time": "auto"}, {}
    patch = winds().isel(time=slice(1, 2)).drop_vars(["lat", "lon"])
    zm.write(patch, storage, message="patch", region=region, encoding=encoding)
    assert region == {"time": "auto"}


def test_modes(storage):
    ds = winds()
    zm.write(ds, storage, message="create")
    zm.write(ds[["u"]].rename(u="w"), storage, message="add", mode="a")
    assert set(open_repo(storage).data_vars) == {"u", "v", "w"}
    zm.write(ds[["v"]] * 2, storage, message="replace", mode="w")
    xr.testing.assert_equal(open_repo(storage).load(), ds[["v"]] * 2)


def test_a_repository_can_be_read_and_replaced_in_one_go(storage, scheduler):
    ds = winds()
    zm.write(chunked(ds), storage, message="create")
    lazy = open_repo(storage, chunks={})
    zm.write(lazy + 1, storage, message="replace", mode="w")
    xr.testing.assert_equal(open_repo(storage).load(), ds + 1)
    xr.testing.assert_equal(lazy.load(), ds)  # still what it was when it was opened


def test_groups(storage):
    repo = zm.create(storage)
    zm.write(winds(2), repo, message="a", group="ocean/surface")
    zm.write(winds(4), repo, message="b", group="/land/")
    zm.write(winds(3).mean(), repo, message="root")
    assert open_repo(storage, group="/ocean/surface").sizes["time"] == 2
    assert open_repo(storage, group="land").sizes["time"] == 4
    assert open_repo(storage).sizes == {}
    tree = xr.open_datatree(storage, engine=ENGINE)
    assert set(tree.groups) == {"/", "/ocean", "/ocean/surface", "/land"}
    xr.testing.assert_equal(tree["land"].to_dataset(inherit=False).load(), winds(4))
    subtree = xr.open_datatree(storage, engine=ENGINE, group="ocean", chunks={})
    xr.testing.assert_equal(subtree["surface"].to_dataset().compute(), winds(2))


def test_what_changes_nothing_makes_no_commit(storage, scheduler):
    ds = chunked(winds())
    first = zm.write(ds, storage, message="create")
    patch = ds.isel(time=slice(2, 4)).drop_vars(["lat", "lon"])
    again = zm.write(patch, storage, message="again", region={"time": slice(2, 4)})
    nothing = zm.write(ds.isel(time=slice(0, 0)), storage, message="none", append_dim="time")
    assert again == nothing == first
    assert len(list(zm.open(storage).ancestry())) == 2
    other = zm.write(patch * 2, storage, message="other", region={"time": slice(2, 4)})
    assert other != first


@pytest.mark.parametrize("first", range(1, 6))
@pytest.mark.parametrize("shards", [None, (10, 4)])
def test_dask_blocks_are_aligned_with_a_ragged_end(storage, first, shards):
    """No two blocks write to a chunk, wherever the append begins, and whatever the blocks are."""
    whole = xr.Dataset(
        {"t": (("time", "x"), np.arange(120.0).reshape(30, 4))}, {"time": np.arange(30)}
    )
    encoding = {"t": {"chunks": (5, 2), "shards": shards}}
    zm.write(whole.isel(time=slice(0, first)), storage, encoding=encoding)
    rest = whole.isel(time=slice(first, None)).chunk(time=7, x=3)
    zm.write(rest, storage, append_dim="time")
    xr.testing.assert_identical(open_repo(storage).load(), whole)
    changed = whole.assign(t=-whole.t).isel(time=slice(2, None)).chunk(time=4, x=1)
    zm.write(changed, storage, append_dim="time", on_existing="replace")
    expected = xr.concat([whole.isel(time=slice(0, 2)), changed.compute()], "time")
    xr.testing.assert_identical(open_repo(storage).load(), expected)


def test_a_write_says_what_it_does(storage):
    """Unless it is given a message, which may not be empty."""
    ds = xr.Dataset({name: ("x", [1.0, 2.0]) for name in "abcdef"}, {"x": [1, 2]})
    more = ds.assign_coords(x=[3, 4])
    tree = xr.DataTree.from_dict({"/one": ds, "/two": ds[["a"]]})
    zm.write(ds, storage)
    zm.write(more, storage, append_dim="x")
    zm.write(more.drop_vars("x") + 1, storage, region={"x": slice(2, 4)})
    zm.write(tree, storage, group="models", mode="w")
    zm.write(ds, storage, mode="w", message="anew")
    with pytest.raises(InvalidArgumentError, match="needs a message"):
        zm.write(ds, storage, mode="w", message="")
    said = [info.message for info in zm.open(storage).ancestry()]
    assert said[:5] == [
        "anew",
        "write a, b, c, d, e, ... to /models",
        "write a part of /",
        "append to / along x",
        "write a, b, c, d, e, ... to /",
    ]


def test_branches(storage):
    repo = zm.create(storage)
    zm.write(winds(2), repo, message="on main")
    repo.create_branch("trial")
    zm.write(winds(3, "1982-03"), storage, message="t", branch="trial", append_dim="time")
    assert open_repo(storage).sizes["time"] == 2
    assert open_repo(storage, version="trial").sizes["time"] == 5
    with pytest.raises(NotFoundError, match="there are: main, trial"):
        zm.write(winds(2), storage, message="m", branch="tiral", mode="w")


def test_config_is_for_the_new_repository(storage):
    zm.write(winds(), storage, message="create", config={"inline-chunk-bytes": 0})
    assert zm.open(storage).config.inline_chunk_bytes == 0


WRONG = {
    "no message": ({"message": " "}, InvalidArgumentError, "message"),
    "metadata": ({"metadata": {"x": object()}}, InvalidArgumentError, "metadata"),
    "mode": ({"mode": "x"}, InvalidArgumentError, "mode must be one of"),
    "dimension": ({"append_dim": "tiem"}, InvalidArgumentError, "there are: time, lat, lon"),
    "append and w": ({"append_dim": "time", "mode": "w"}, InvalidArgumentError, "'a' or 'a-'"),
    "region and w": ({"region": "auto", "mode": "w"}, InvalidArgumentError, "region goes with"),
    "again": ({}, AlreadyExistsError, "append_dim to append"),
    "again, w-": ({"mode": "w-"}, AlreadyExistsError, "append_dim to append"),
    "array": ({"ds": winds().u.values}, InvalidArgumentError, "a DataArray or a DataTree"),
    "nothing there": ({"region": "auto", "group": "g"}, NotFoundError, "group '/g'"),
    "credentials": ({"location": "s3://me:secret@bucket"}, InvalidArgumentError, "refused"),
}


@pytest.mark.parametrize(("arguments", "error", "match"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(storage, arguments, error, match):
    zm.write(winds(), storage, message="create")
    call = {"ds": winds(), "location": storage, "message": "m", **arguments}
    with pytest.raises(error, match=match):
        zm.write(call.pop("ds"), call.pop("location"), **call)
    assert len(list(zm.open(storage).ancestry())) == 2


def test_wrong_arguments_make_no_repository(tmp_path):
    for arguments in ({"message": ""}, {"message": "m", "append_dim": "x"}):
        with pytest.raises(InvalidArgumentError):
            zm.write(winds(), tmp_path / "repo", **arguments)
    repo = zm.create(MemoryStorage())
    with pytest.raises(InvalidArgumentError, match="not a Repository"):
        zm.write(winds(), repo, message="m", config={})
    assert not (tmp_path / "repo").exists()


# --- the engine ------------------------------------------------------------------------------


def test_versions(tmp_path):
    url = f"file://{tmp_path}/repo"
    first = zm.write(winds(2), url, message="two")
    repo = zm.open(url)
    repo.create_tag("v1", first)
    written_at = next(iter(repo.ancestry())).written_at
    zm.write(winds(2, "1982-03"), url, message="four", append_dim="time")
    assert open_repo(url).sizes["time"] == 4
    for place in (url, tmp_path / "repo", str(tmp_path / "repo"), repo, repo.storage):
        for version in (first, "v1", f"main@{written_at}"):
            xr.testing.assert_identical(open_repo(place, version=version).load(), winds(2))
    later = datetime.now(UTC) + timedelta(days=1)
    assert open_repo(url, version=f"main@{later}").sizes["time"] == 4


MISSING = {
    "time": ({"version": "main@yesterday"}, InvalidArgumentError, "datetime or ISO 8601 text"),
    "version": ({"version": "dev"}, NotFoundError, "there is branch 'main'"),
    "branch": ({"version": "refs/heads/dev"}, NotFoundError, "there are: main"),
    "tag": ({"version": "refs/tags/v9"}, NotFoundError, "there are: none"),
    "before": ({"version": "main@2020-01-01"}, NotFoundError, "2020-01-01"),
    "group": ({"group": "aire"}, NotFoundError, "there are: /, /air, /air/low$"),
    "array": ({"group": "air/low/u"}, NotFoundError, "is an array"),
    "option": ({"chunked": True}, TypeError, "chunked"),
}


@pytest.mark.parametrize(("options", "error", "match"), MISSING.values(), ids=MISSING)
@pytest.mark.parametrize("opener", [xr.open_dataset, xr.open_datatree])
def test_what_is_not_there(storage, opener, options, error, match):
    zm.write(winds(2), storage, message="create", group="air/low")
    with pytest.raises(error, match=match):
        opener(storage, engine=ENGINE, **options)


def test_a_snapshot_that_is_not_there(storage):
    other = zm.write(winds(2), MemoryStorage(), message="create")
    zm.write(winds(2), storage, message="create")
    with pytest.raises(SnapshotExpiredError, match=other):
        open_repo(storage, version=other)


def test_no_repository(tmp_path, storage):
    with pytest.raises(NotARepositoryError):
        open_repo(tmp_path / "none")
    with pytest.raises(NotARepositoryError):
        open_repo("memory://never-made")
    zm.create(storage)
    with pytest.raises(NotFoundError, match="nothing is written"):
        open_repo(storage)


def test_only_repositories_are_claimed(tmp_path):
    claims = ManifestsBackendEntrypoint().guess_can_open
    zm.write(winds(2), tmp_path / "repo", message="create")
    winds(2).to_zarr(tmp_path / "plain.zarr", consolidated=False)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "current").write_bytes(b"something else")
    (tmp_path / "file.nc").write_bytes(b"CDF\x01")
    repo = zm.create("memory://claimed")
    assert claims(tmp_path / "repo")
    assert claims(f"file://{tmp_path}/repo")
    assert claims("memory://claimed")
    assert claims(repo)
    assert claims(repo.storage)
    for other in ("plain.zarr", "other", "file.nc", "absent", ""):
        assert not claims(str(tmp_path / other))
    for other in ("s3://me:x@bucket", "https://host/a.nc", "memory://unknown", "", b"CDF", 3):
        assert not claims(other)


def test_the_engine_need_not_be_named(tmp_path):
    zm.write(winds(2), tmp_path / "repo", message="create")
    xr.testing.assert_identical(xr.open_dataset(tmp_path / "repo").load(), winds(2))
    winds(2).to_zarr(tmp_path / "plain.zarr", consolidated=False)
    plain = xr.open_dataset(tmp_path / "plain.zarr", consolidated=False)
    xr.testing.assert_identical(plain.load(), winds(2))


def test_decoding_options(storage):
    zm.write(winds(), storage, message="create", encoding=PACKED)
    assert open_repo(storage, decode_times=False).time.dtype == np.dtype("f8")
    assert "v" not in open_repo(storage, drop_variables="v")
    assert open_repo(storage, chunks={"time": 2}).u.chunks[0] == (2, 2, 2)
    assert open_repo(storage, mask_and_scale=False).u.dtype == np.dtype("i2")
    coder = xr.coders.CFDatetimeCoder(use_cftime=True)
    assert open_repo(storage, decode_times=coder).time.values[0].year == 1982


def test_dask_does_not_take_two_snapshots_for_one(storage):
    url = "memory://two-snapshots"
    ds = xr.Dataset({"t": ("x", np.arange(4.0))})
    zm.write(ds, url, message="a", encoding={"t": {"chunks": (2,)}})
    before, same = open_repo(url, chunks={}), open_repo(url, chunks={})
    zm.write(ds + 1, url, message="b", region={"x": slice(0, 4)})
    after = open_repo(url, chunks={})
    np.testing.assert_array_equal((after.t - before.t).values, np.ones(4))
    assert before.t.data.name == same.t.data.name
    whole = open_repo(url, chunks={"x": 4}).t.data.name
    assert open_repo(url, chunks={"x": 2}).t.data.name != whole
    np.testing.assert_array_equal(open_repo(url).chunk(x=2).t.values, np.arange(4.0) + 1)


def test_a_small_repository_opens_with_its_coordinates_in_one_request():
    counted = CountingStorage(MemoryStorage())
    ds = winds(24)
    zm.write(ds, counted, message="create", encoding={"u": {"chunks": (6, 9, 12)}})
    counted.reset()
    read = open_repo(counted)
    xr.testing.assert_identical(read.coords.to_dataset().load(), ds.coords.to_dataset())
    assert [(record.op, record.key) for record in counted.log] == [("get_tagged", "current")]
    counted.reset()
    np.testing.assert_array_equal(read.u[7].values, ds.u.values[7])
    assert counted.requests == 1
    assert counted.log[0].key.startswith("chunks/")


# --- a session's store -----------------------------------------------------------------------


def test_the_store_without_further_arguments(storage):
    repo = zm.create(storage)
    ds = winds(4)
    with repo.transaction(message="create") as store:
        chunked(ds).to_zarr(store)
    with repo.transaction(message="append") as store:
        chunked(winds(2, "1982-05")).to_zarr(store, append_dim="time")
    with repo.transaction(message="patch") as store:
        (ds * 2).isel(time=slice(0, 2)).to_zarr(store, region="auto")
    read = xr.open_zarr(repo.readonly_session().store)
    assert read.u.chunks is not None
    expected = xr.concat([ds, winds(2, "1982-05")], "time")
    for name in ("u", "v"):
        expected[name][:2] *= 2
    xr.testing.assert_equal(read.compute(), expected)


# --- anything ---------------------------------------------------------------------------------


@st.composite
def datasets(draw: st.DrawFn) -> xr.Dataset:
    sizes = draw(st.dictionaries(st.sampled_from("xyz"), st.integers(1, 5), min_size=1, max_size=3))
    dtypes = st.sampled_from(["i1", "u2", "i8", "f4", "f8", "bool", "c16", "M8[ns]", "m8[s]", "U3"])
    ds = xr.Dataset()
    for name in draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True)):
        dims = draw(st.lists(st.sampled_from(sorted(sizes)), max_size=3, unique=True))
        dtype, shape = np.dtype(draw(dtypes)), tuple(sizes[dim] for dim in dims)
        if dtype.kind in "mM":
            ticks = draw(npst.arrays("i4", shape)).astype("i8")
            values = ticks.view(dtype) if shape else ticks.astype(dtype)
        elif dtype.kind == "U":
            values = draw(npst.arrays(dtype, shape, elements=st.text("abc", max_size=3)))
        else:
            values = draw(npst.arrays(dtype, shape))
        ds[name] = (dims, values)
    if draw(st.booleans()):
        dim = draw(st.sampled_from(sorted(ds.sizes) or ["x"]))
        ds = ds.assign_coords({dim: np.arange(ds.sizes.get(dim, 2), dtype="f8")})
    return ds


@settings(max_examples=examples(25))
@given(datasets(), st.data())
def test_any_dataset_comes_back(ds, data):
    chunks = {dim: data.draw(st.integers(1, size)) for dim, size in ds.sizes.items()}
    written = ds.chunk(chunks) if data.draw(st.booleans()) else ds
    with dask.config.set(scheduler=data.draw(st.sampled_from(["sync", lossy_get]))):
        storage = fresh_storage()
        zm.write(written, storage, message="create")
    xr.testing.assert_identical(open_repo(storage).load(), ds)


def test_xarray_is_imported_only_when_used():
    code = "import sys, zarr_manifests; print('xarray' in sys.modules, 'dask' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
