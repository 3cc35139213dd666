"""The engine and `write`: what goes in comes out, in one commit, at the version asked for."""

import itertools
import pickle
from datetime import timedelta

import dask
import dask.array as da
import numpy as np
import pytest
import xarray as xr
import zarr

import zarr_manifests as zm
from looking import opened
from storages import Fault, FaultyStorage
from zarr_manifests.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotARepositoryError,
    NotFoundError,
)
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.xarray import ManifestsBackendEntrypoint, backend

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
            "u": (("time", "lat", "lon"), u, {"units": "m/s"}),
            "v": (("time", "lat", "lon"), v),
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


_NUMBERS = itertools.count()


@pytest.fixture
def storage() -> MemoryStorage:
    """With a name, so that it can be pickled."""
    return MemoryStorage(f"test-xarray-{next(_NUMBERS)}")


# --- schedulers: dask in this process, and dask somewhere else -------------------------------


def lossy_get(dsk, keys, **kwargs):
    """A scheduler of other processes that runs every task twice and loses the first result."""
    dask.get(dsk, keys)
    return pickle.loads(pickle.dumps(dask.get(dsk, keys)))


@pytest.fixture(params=["threads", lossy_get])
def scheduler(request):
    with dask.config.set(scheduler=request.param):
        yield request.param


# --- write -----------------------------------------------------------------------------------


def test_what_is_written_is_read_back(storage):
    ds = winds()
    snapshot_id = zm.write(ds, storage, message="create", metadata={"source": "test"})
    xr.testing.assert_identical(opened(storage), ds)
    (info, first) = zm.open(storage).ancestry()
    assert info.snapshot_id == snapshot_id
    assert (info.message, info.metadata) == ("create", {"source": "test"})
    assert first.message == "create repository"


@pytest.mark.parametrize("packed", [None, PACKED], ids=["plain", "packed"])
def test_dask_arrays_are_written_wherever_they_are_computed(storage, scheduler, packed):
    ds = winds()
    encoding = packed or {"v": {"chunks": (1, 3, 4)}}
    zm.write(ds.chunk(time=2), storage, message="create", encoding=encoding)
    xr.testing.assert_allclose(opened(storage), ds, atol=0.005 if packed else 0)
    assert len(list(zm.open(storage).ancestry())) == 2


def test_empty_chunks_are_left_out_where_asked_for(storage, scheduler):
    ds = xr.Dataset({"t": ("x", da.from_array([0.0, 0, 0, 1], chunks=2))})
    repo = zm.create(storage)
    for group, kept in (("lean", {}), ("full", {"write_empty_chunks": True})):
        zm.write(ds, repo, group=group, encoding={"t": {"fill_value": 0.0, **kept}})
        assert len(repo.readonly_session().chunk_refs(f"{group}/t")) == 1 + bool(kept)
        xr.testing.assert_equal(opened(storage, group=group), ds.compute())


@pytest.mark.parametrize(
    ("spill_refs", "where"),
    [
        (100_000, {}),
        (1000, {"inline-chunk-bytes": 0}),
        (200, {"inline-chunk-bytes": 0, "pack-chunk-bytes": 0}),
    ],
    ids=["inline", "packs", "objects"],
)
def test_blocks_of_very_many_chunks_are_written(tmp_path, spill_refs, where):
    """So many that workers put their refs into tables, or have no room for them in memory."""
    rows = np.arange(1, 1201, dtype="i4")
    repository = zm.create(tmp_path, {"spill-refs": spill_refs, **where})
    encoding = {"v": {"chunks": (1,), "compressors": None}}
    made = xr.Dataset({"v": ("x", da.from_array(rows, chunks=400))})
    patch = xr.Dataset({"v": ("x", da.from_array(-rows[:800], chunks=400))})
    with dask.config.set(scheduler=lossy_get):
        zm.write(made, repository, encoding=encoding)
        zm.write(patch, repository, region={"x": slice(200, 1000)})
    rows[200:1000] = -rows[:800]
    assert np.array_equal(opened(repository, mask_and_scale=False).v, rows)
    assert repository.verify().ok


@pytest.mark.parametrize("broken", ["source", "storage"])
def test_a_write_that_fails_midway_commits_nothing(storage, scheduler, broken):
    zm.write(winds(2), zm.create(storage, {"pack-chunk-bytes": 0}), message="create")
    before = opened(storage)
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
    xr.testing.assert_identical(opened(storage), before)
    assert len(list(zm.open(storage).ancestry())) == 2
    if broken == "storage":  # it was in the midst of it
        assert len(list(storage.list("chunks/"))) >= 7


@pytest.mark.parametrize(
    "how",
    [
        {"message": ""},
        {"append_dim": "x"},
        {"mode": "r+"},
        {"branch": "dev"},
        {"group": "a//b"},
        {"group": "../a"},
    ],
)
def test_wrong_arguments_make_no_repository(tmp_path, how):
    with pytest.raises((InvalidArgumentError, NotARepositoryError)):
        zm.write(winds(), tmp_path / "repo", **how)
    assert not (tmp_path / "repo").exists()


# --- the engine ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"version": "main@yesterday"}, InvalidArgumentError, "ISO 8601"),
        ({"version": "dev"}, NotFoundError, "there is branch 'main'"),
        ({"version": "main@2020-01-01"}, NotFoundError, "2020-01-01"),
        ({"group": "aire"}, NotFoundError, "there are: /, /air, /air/low$"),
        ({"group": "air/low/u"}, NotFoundError, "is an array"),
        ({"chunked": True}, TypeError, "chunked"),
    ],
)
def test_what_is_not_there(storage, options, error, match):
    zm.write(winds(2), storage, message="create", group="air/low")
    for opener in (xr.open_dataset, xr.open_datatree):
        with pytest.raises(error, match=match):
            opener(storage, engine=ENGINE, **options)


def test_no_repository(tmp_path, storage):
    for place in (tmp_path / "none", "memory://never-made"):
        with pytest.raises(NotARepositoryError):
            opened(place)
    session = zm.create(storage).readonly_session()
    with pytest.raises(NotFoundError, match="nothing is written"):
        opened(storage)
    with pytest.raises(InvalidArgumentError, match=r"a Session is not .*open_zarr\(session.store"):
        opened(session)


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
    for other in ("plain.zarr", "other", "file.nc", "absent"):
        assert not claims(str(tmp_path / other))
    for other in ("s3://me:x@bucket", "https://host/a.nc", "memory://unknown", "", b"CDF", 3):
        assert not claims(other)


# --- how it is read ---------------------------------------------------------------------------


def in_chunks(storage, **encoding):
    values = np.arange(24 * 8 * 9, dtype="f4").reshape(24, 8, 9)
    ds = xr.Dataset({"t": (("time", "y", "x"), values)}, {"time": np.arange(24)})
    how = {"chunks": (1, 4, 3), "compressors": None, **encoding}
    repository = zm.create(storage, {"inline-chunk-bytes": 0, "pack-chunk-bytes": 0})
    zm.write(ds, repository, encoding={"t": how})
    return ds


def test_arrays_are_read_in_bulk(storage):
    ds = in_chunks(storage)
    repository = zm.open(storage)
    xr.testing.assert_identical(opened(repository), ds)
    assert repository.metrics().bulk_batches > 0


@pytest.mark.parametrize(
    ("encoding", "task_bytes", "chunks"),
    [
        ({}, 4 * 3 * 4, ((1,) * 24, (4, 4), (3, 3, 3))),
        ({}, 4 * 9 * 4, ((1,) * 24, (4, 4), (9,))),
        ({}, 8 * 9 * 4 * 10, ((8, 8, 8), (8,), (9,))),
        ({"shards": (6, 8, 9)}, 6 * 8 * 9 * 4 * 2, ((12, 12), (8,), (9,))),
    ],
)
def test_tasks_are_boxes_of_whole_chunks(storage, encoding, task_bytes, chunks, monkeypatch):
    """As many as go into that many bytes, evenly; shards are never parted."""
    ds = in_chunks(storage, **encoding)
    monkeypatch.setattr(backend, "_TASK_BYTES", task_bytes)
    lazy = xr.open_dataset(storage, engine=ENGINE, chunks={})
    assert lazy.t.chunks == chunks
    np.testing.assert_array_equal(lazy.t, ds.t)


def test_groups_are_opened_like_the_root(storage):
    ds = in_chunks(storage)
    zm.write(ds, storage, group="a/b")
    repository = zm.open(storage)
    for group, node in ((None, "a/b"), ("a", "b")):
        before = repository.metrics().bulk_batches
        tree = xr.open_datatree(repository, engine=ENGINE, group=group, chunks={})
        np.testing.assert_array_equal(tree[node].to_dataset().t, ds.t)
        assert repository.metrics().bulk_batches > before


# --- other openers ----------------------------------------------------------------------------


DS = xr.Dataset({"t": ("x", np.arange(3.0))})


@pytest.fixture
def place(tmp_path):
    zm.write(DS, tmp_path / "winds", message="first")
    return tmp_path / "winds"


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_plain_store_is_not_overwritten(tmp_path, zarr_format):
    store = tmp_path / "plain store"
    DS.to_zarr(store, consolidated=False, zarr_format=zarr_format)
    for location in (store, LocalStorage(store)):
        with pytest.raises(NotARepositoryError, match="no repository"):
            zm.open(location)
        with pytest.raises(AlreadyExistsError, match="is not empty"):
            zm.write(DS, location, message="on top")
    assert xr.open_zarr(store, consolidated=False).t.size == 3


@pytest.mark.parametrize("inside", ["wind", "chunks", "wind/deep"])
def test_a_group_is_no_folder(place, inside):
    zm.write(DS, place, message="group", group="wind")
    before = sorted(place.rglob("*"))
    with pytest.raises(NotARepositoryError, match=r"inside the repository .*winds.* group="):
        opened(place / inside)
    with pytest.raises(AlreadyExistsError, match=r"inside the repository .*winds.* group="):
        zm.write(DS, place / inside, message="into the group?")
    assert sorted(place.rglob("*")) == before


def test_what_zarr_leaves_in_a_repository_does_no_harm(place):
    """Nothing deletes it."""
    zarr.open(place)
    left = {path for path in place.iterdir() if not path.name.startswith(".")}
    assert place / "zarr.json" in left
    repo = zm.open(place, create=True)
    repo.create_branch("dev")
    zm.write(DS + 1, place, message="second", mode="a")
    zm.write(DS, repo, message="third", group="g", mode="w")
    repo.compact()
    repo.expire_snapshots(keep_last=1)
    repo.garbage_collect(timedelta(0))
    assert repo.verify().ok
    assert left <= set(place.iterdir())
    xr.testing.assert_identical(opened(place), DS + 1)
    with pytest.raises(AlreadyExistsError):
        zm.create(place)
    (place / "current").unlink()
    zm.recover(place)
    xr.testing.assert_identical(opened(place), DS + 1)


def open_repo(location: object, **options: object) -> xr.Dataset:
    return xr.open_dataset(location, engine=ENGINE, **options)


def test_append_creates_what_is_not_there(storage):
    for start in ("1982-01", "1982-07", "1983-01"):
        zm.write(winds(6, start), storage, message=start, append_dim="time")
    read = open_repo(storage)
    assert read.sizes["time"] == 18
    expected = xr.concat([winds(6, s) for s in ("1982-01", "1982-07", "1983-01")], "time")
    xr.testing.assert_equal(read.load(), expected)
