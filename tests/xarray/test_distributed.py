"""Writing and reading from the processes of a distributed cluster."""

import os
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest
import xarray as xr
import zarr
from distributed import Client, LocalCluster, worker_client

import zarr_manifests as zm
from effort import swept
from zarr_manifests.error_cases import UnmergedForksError
from zarr_manifests.errors import ConflictError, InvalidArgumentError

ENGINE = "zarr_manifests"


@pytest.fixture(scope="module")
def client():
    with (
        LocalCluster(
            n_workers=2,
            threads_per_worker=2,
            processes=True,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",  # any free port
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


def field(start: int, stop: int) -> xr.Dataset:
    """Rows that tell where they are; in chunks of two rows, big enough not to be kept inline."""
    rows = np.arange(start, stop)
    values = rows[:, None] * 1000.0 + np.arange(400)
    return xr.Dataset(
        {"t": (("time", "x"), values), "n": ("time", rows * 2)},
        {"time": rows.astype("f8"), "x": np.arange(400)},
    )


def dask_field(start: int, stop: int) -> xr.Dataset:
    return field(start, stop).chunk(time=2, x=200)


ENCODING = {"t": {"chunks": (2, 200)}, "n": {"chunks": (2,)}}


def head(url: object, **options: object) -> xr.Dataset:
    return xr.open_dataset(url, engine=ENGINE, **options)


def messages(url: object) -> list[str]:
    return [info.message for info in zm.open(url).ancestry()][::-1][1:]


@pytest.mark.slow
def test_values_that_do_not_fit_are_refused_with_their_place(client, tmp_path):
    how = {"t": {"dtype": "f4", "chunks": (2, 200)}}
    zm.write(dask_field(0, 4)[["t"]], tmp_path, message="create", encoding=how)
    more = dask_field(4, 8)[["t"]]
    more["t"] = xr.where((more.x == 250) & (more.time == 7), 1e39, more.t).transpose(*more.t.dims)
    expected = r"1e\+39 at time=7.0, x=250 \(position 3, 250\) would be read back as inf"
    with pytest.raises(InvalidArgumentError, match=expected):
        zm.write(more, tmp_path, message="more", append_dim="time")
    assert messages(tmp_path) == ["create"]
    xr.testing.assert_identical(head(tmp_path).load(), field(0, 4)[["t"]].astype("f4"))


def test_a_first_write_that_fails_leaves_no_repository(client, tmp_path):
    ds = dask_field(0, 4)
    ds["t"] = ds.t.copy(data=ds.t.data.map_blocks(_fail_at_the_end, meta=np.empty((0, 0))))
    place = tmp_path / "winds"
    with pytest.raises(RuntimeError, match="the end"):
        zm.write(ds, place, message="fails", encoding=ENCODING)
    assert not zm.exists(place)
    zm.write(dask_field(0, 4), place, message="works", encoding=ENCODING)
    xr.testing.assert_identical(head(place).load(), field(0, 4))


def _fail_at_the_end(block, block_info=None):
    if block_info[0]["chunk-location"] == (1, 1):
        raise RuntimeError("the end")
    return block


def test_create_append_and_region(client, tmp_path):
    zm.write(dask_field(0, 8), tmp_path, message="create", encoding=ENCODING)
    zm.write(dask_field(8, 16), tmp_path, message="append", append_dim="time")
    patch = dask_field(4, 10).drop_vars("x") * -1
    patch["time"] = patch.time * -1
    zm.write(patch, tmp_path, message="patch", region={"time": slice(4, 10)})
    expected = field(0, 16)
    for name in ("t", "n"):
        expected[name][4:10] *= -1
    xr.testing.assert_equal(head(tmp_path).load(), expected)
    assert messages(tmp_path) == ["create", "append", "patch"]


def test_several_datasets_in_an_open_session_are_one_commit(client, tmp_path):
    repo = zm.create(tmp_path)
    with repo.writable_session() as session:
        for group in ("a", "b"):
            zm.to_session(_with_pids(dask_field(0, 4)), session, group=group, encoding=ENCODING)
        zm.to_session(_with_pids(dask_field(4, 6)), session, group="a", append_dim="time")
        assert len([*repo.ancestry()]) == 1
        session.commit("two groups")
    assert messages(tmp_path) == ["two groups"]
    for group, stop in (("a", 6), ("b", 4)):
        found = head(tmp_path, group=group).load()
        assert os.getpid() not in found.pid.values  # computed, and written, elsewhere
        xr.testing.assert_identical(found.drop_vars("pid"), field(0, stop))


def _with_pids(ds: xr.Dataset) -> xr.Dataset:
    """With the process that has computed each block."""
    pids = ds.t.data.map_blocks(_pid_block, dtype="i8", meta=np.empty((0, 0), "i8"))
    return ds.assign(pid=(ds.t.dims, pids))


def _pid_block(block: np.ndarray) -> np.ndarray:
    return np.full(block.shape, os.getpid())


def test_forks_whose_own_blocks_go_to_forks_of_theirs(client, tmp_path):
    """Each task writes a part with dask, whose tasks get forks of the task's fork."""
    session = zm.create(tmp_path).writable_session()
    zm.to_session(dask_field(0, 8) * 0, session, encoding=ENCODING)
    tasks = [client.submit(_write_part, session.fork(), start, pure=False) for start in (0, 4)]
    session.merge(*client.gather(tasks))
    session.commit("by forks of forks")
    assert messages(tmp_path) == ["by forks of forks"]
    xr.testing.assert_identical(head(tmp_path).load(), field(0, 8))


def _write_part(fork: zm.Fork, start: int) -> zm.Fork:
    with worker_client():
        zm.to_session(dask_field(start, start + 4).drop_vars("x"), fork, region="auto")
    return fork


@pytest.mark.slow
def test_a_daily_job(client, tmp_path):
    how = {"append_dim": "time", "encoding": ENCODING}
    for on_existing in ("skip", "replace"):
        for stop in (8, 11, 16):
            ds = dask_field(stop - 7, stop).isel(time=[*range(2), *range(3, 7)])
            ids = {
                zm.write(ds, tmp_path, message="a day", on_existing=on_existing, **how)
                for _ in "12"
            }
            assert len(ids) == 1
        assert messages(tmp_path) == ["a day"] * 3  # replacing the same changes nothing
    rows = [1, 2, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 15]
    xr.testing.assert_equal(head(tmp_path).load(), field(0, 16).isel(time=rows))


@pytest.mark.parametrize(
    "where", [{}, {"inline-chunk-bytes": 0}, {"inline-chunk-bytes": 0, "pack-chunk-bytes": 0}]
)
@pytest.mark.parametrize("spill_refs", [100_000, 1000, 200])
def test_blocks_of_very_many_chunks_are_written(client, tmp_path, spill_refs, where):
    """So many that workers put their refs into tables, or have no room for them in memory."""
    rows = np.arange(1, 1801, dtype="i4")
    repository = zm.create(tmp_path, {"spill-refs": spill_refs, **where})
    made = xr.Dataset({"v": ("x", da.from_array(rows, chunks=600))})
    encoding = {"v": {"chunks": (1,), "compressors": None}}
    zm.write(made, repository, message="create", encoding=encoding)
    assert np.array_equal(head(repository, mask_and_scale=False).v, rows)
    patch = xr.Dataset({"v": ("x", da.from_array(-rows[:1200], chunks=600))})
    zm.write(patch, repository, message="patch", region={"x": slice(300, 1500)})
    expected = rows.copy()
    expected[300:1500] = -rows[:1200]
    assert np.array_equal(head(repository, mask_and_scale=False).v, expected)
    assert repository.verify().ok


def test_reading_on_the_workers(client, tmp_path):
    first = zm.write(field(0, 8), tmp_path, message="create", encoding=ENCODING)
    zm.write(field(0, 8) + 1, tmp_path, message="replace", mode="w", encoding=ENCODING)
    now, then = head(tmp_path, chunks={}), head(tmp_path, chunks={}, version=first)
    assert float((now.t - then.t).sum()) == now.t.size
    xr.testing.assert_equal(then.compute(), field(0, 8))
    xr.testing.assert_equal(
        xr.open_zarr(zm.open(tmp_path).readonly_session().store).compute(),
        field(0, 8) + 1,
    )


@pytest.mark.filterwarnings("ignore:a writable store was pickled")
def test_a_store_that_was_merely_pickled_cannot_be_committed(client, tmp_path):
    session = zm.create(tmp_path).writable_session()
    dask_field(0, 8).to_zarr(session.store)
    with pytest.raises(UnmergedForksError, match=r"zarr_manifests\.write"):
        session.commit("would lose what the workers wrote")
    assert messages(tmp_path) == []


@pytest.mark.parametrize("scheduler", swept(["distributed", "processes"], but=["distributed"]))
def test_copies_that_report_let_xarray_write_by_itself(request, tmp_path, scheduler):
    if scheduler == "distributed":
        request.getfixturevalue("client")
    repo = zm.create(tmp_path)
    session = repo.writable_session(copies="report")
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # started when it is used
        own = {"scheduler": "processes", "pool": pool} if scheduler == "processes" else {}
        _write_by_itself(session, own)
    expected = field(0, 16)
    for name in ("t", "n"):
        expected[name][4:10] *= -1
    xr.testing.assert_equal(head(tmp_path).load(), expected)
    assert messages(tmp_path) == ["create", "append twice", "patch"]
    assert repo.verify().ok


def _write_by_itself(session: zm.Session, options: dict[str, object]) -> None:
    with dask.config.set(options):
        dask_field(0, 8).to_zarr(session.store, encoding=ENCODING, consolidated=False)
        session.commit("create")
        options = {"append_dim": "time", "consolidated": False}
        dask_field(8, 12).to_zarr(session.store, **options)
        delayed = (dask_field(12, 16)).to_zarr(session.store, compute=False, **options)
        delayed.compute()
        session.commit("append twice")
        patch = (dask_field(4, 10) * -1).drop_vars(["x", "time"])
        region = {"time": slice(4, 10)}
        patch.to_zarr(session.store, region=region, consolidated=False)
        session.commit("patch")


@pytest.mark.sweep
def test_an_attempt_that_died_and_the_one_after_it_agree(client, tmp_path):
    died = tmp_path / "died"
    repo = make_ones(tmp_path / "repo")
    session = repo.writable_session(copies="report")
    array = zarr.open_array(session.store, path="a", mode="r+")
    task = client.submit(write_array_and_die_once, array, 5, 2, died, retries=3)
    client.gather([task, *client.map(write_array, [array] * 3, [0, 1, 2], [3, 4, 5])])
    assert died.exists()
    session.commit("both attempts have written the same")
    check_all(repo, [3, 4, 5, 1, 1, 2, 1, 1], orphans=1)


def write_array(array: zarr.Array, at: int, value: int) -> None:
    array[at * 100 : at * 100 + 100] = value


def write_array_and_die_once(array: zarr.Array, at: int, value: int, died: Path) -> None:
    write_array(array, at, value)
    if not died.exists():
        died.touch()
        os._exit(1)


@pytest.mark.sweep
def test_a_worker_that_dies_is_made_up_for(client, tmp_path):
    died = tmp_path / "died"

    def die_once(block, block_id=None):
        if block_id == (3, 0) and not died.exists():
            Path(died).touch()
            os._exit(1)
        return block

    ds = dask_field(0, 8)
    ds["t"] = ds.t.copy(data=ds.t.data.map_blocks(die_once, dtype="f8", meta=np.empty((0, 0))))
    zm.write(ds, tmp_path / "repo", message="create", encoding=ENCODING)
    assert died.exists()
    xr.testing.assert_equal(head(tmp_path / "repo").load(), field(0, 8))
    repo = zm.open(tmp_path / "repo")
    tip, before = (info.snapshot_id for info in repo.ancestry())
    assert len(repo.diff(before, tip).chunks["/t"]) == 8


def test_a_task_that_fails_commits_nothing(client, tmp_path):
    zm.write(field(0, 4), tmp_path, message="create", encoding=ENCODING)

    def fail(block):
        raise RuntimeError("the source is gone")

    more = dask_field(4, 8)
    more["t"] = more.t.copy(data=more.t.data.map_blocks(fail, dtype="f8", meta=np.empty((0, 0))))
    with pytest.raises(RuntimeError, match="the source is gone"):
        zm.write(more, tmp_path, message="append", append_dim="time")
    assert messages(tmp_path) == ["create"]
    xr.testing.assert_equal(head(tmp_path).load(), field(0, 4))


def test_memory_of_this_process_cannot_be_written_from_others(client):
    ds = xr.Dataset({"t": ("x", da.arange(4, chunks=2))})
    with pytest.raises(InvalidArgumentError, match="memory://"):
        zm.write(ds, "memory://not-shared", message="create")
    assert not zm.exists("memory://not-shared")


# --- forks in tasks that run more than once ------------------------------------------------------


def make_ones(path: Path, chunks: int = 8) -> zm.Repository:
    """An array of so many chunks of ones, each an object of its own."""
    repo = zm.create(path, {"inline-chunk-bytes": 0, "pack-chunk-bytes": 0})
    with repo.transaction(message="ones") as store:
        zarr.create_array(store, name="a", shape=(chunks * 100,), chunks=(100,), dtype="i4")[:] = 1
    return repo


def write_chunk(fork: zm.Fork, at: int, value: int, attempt: int = 0) -> zm.Fork:
    zarr.open_array(fork.store, path="a", mode="r+")[at * 100 : at * 100 + 100] = value
    return fork


def write_and_die_once(fork: zm.Fork, at: int, value: int, died: Path) -> zm.Fork:
    """Its objects are in the storage when it dies, and it is tried again elsewhere."""
    write_chunk(fork, at, value)
    if not died.exists():
        died.touch()
        os._exit(1)
    return fork


def written(repo: zm.Repository) -> set[str]:
    return {info.key for info in repo.storage.list("chunks/")}


def check_all(repo: zm.Repository, expected: list[int], orphans: int) -> None:
    """The head has these values; what nobody merged is garbage, and goes as such."""
    repo.expire_snapshots(keep_last=1)
    repo.compact(mode="full")
    repo.expire_snapshots(keep_last=1)
    before = written(repo)
    repo.garbage_collect(timedelta(0))
    after = written(repo)
    assert len(after) == len(expected)
    assert len(before - after) >= orphans
    again = zm.open(repo.storage)
    assert again.verify().ok
    found = zarr.open_array(again.readonly_session().store, path="a", mode="r")[:]
    assert found.tolist() == np.repeat(expected, 100).tolist()


@pytest.mark.parametrize("merged", ["first", "second", "both"])
def test_of_two_attempts_of_a_task_one_counts(client, tmp_path, merged):
    """As when a scheduler runs a task twice, for it was slow or its result was lost."""
    repo = make_ones(tmp_path / "repo")
    session = repo.writable_session()
    forks = [session.fork() for _ in range(8)]
    attempts = [
        client.map(write_chunk, forks, range(8), [2] * 8, attempt=attempt, pure=False)
        for attempt in range(2)
    ]
    first, second = client.gather(attempts)
    assert len(written(repo)) == 8 + 16
    back = {"first": first, "second": second, "both": first + second}[merged]
    session.merge(*back)
    assert session.status().chunks == {"/a": 8}
    session.commit("each chunk once")
    check_all(repo, [2] * 8, orphans=8 + 8)


def test_attempts_that_differ_are_refused_and_named(client, tmp_path):
    repo = make_ones(tmp_path / "repo")
    session = repo.writable_session()
    fork = session.fork()
    one, two = client.gather(client.map(write_chunk, [fork, fork], [3, 3], [2, 3], pure=False))
    session.merge(one)
    with pytest.raises(ConflictError, match=r"/a: chunks \[\(3,\)\]"):
        session.merge(two)
    session.commit("the first")
    check_all(repo, [1, 1, 1, 2, 1, 1, 1, 1], orphans=2)


def test_what_an_attempt_wrote_before_its_worker_died_is_garbage(client, tmp_path):
    repo = make_ones(tmp_path / "repo")
    session = repo.writable_session()
    died = tmp_path / "died"
    task = client.submit(write_and_die_once, session.fork(), 5, 2, died, retries=3)
    session.merge(task.result())
    assert died.exists()
    assert len(written(repo)) == 8 + 2
    session.commit("of the second attempt")
    check_all(repo, [1, 1, 1, 1, 1, 2, 1, 1], orphans=2)


def test_an_attempt_that_comes_after_the_commit_changes_nothing(client, tmp_path):
    """A late duplicate: its objects are garbage, and it can be merged nowhere."""
    repo = make_ones(tmp_path / "repo")
    session = repo.writable_session()
    fork = session.fork()
    session.merge(client.submit(write_chunk, fork, 0, 2, pure=False).result())
    session.commit("in time")
    late = client.submit(write_chunk, fork, 0, 3, pure=False).result()
    with pytest.raises(InvalidArgumentError, match="another base"):
        session.merge(late)
    with pytest.raises(InvalidArgumentError, match="another base"):
        repo.writable_session().merge(late)
    check_all(repo, [2] + [1] * 7, orphans=2)
