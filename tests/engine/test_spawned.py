"""Processes that share nothing but what is pickled to them: spawned, or from a fork server."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import zarr
from zarr.core.buffer import cpu

import zarr_manifests as zm
from zarr_manifests.error_cases import UnmergedForksError
from zarr_manifests.errors import ManifestsError
from zarr_manifests.store import ManifestStore

N = 12
PICKLED = pytest.mark.filterwarnings("ignore::zarr_manifests.error_cases.PickledStoreWarning")
"""Raised by the thread of the pool that pickles; `tests/engine/test_pickled_stores.py` has it."""


@pytest.fixture(scope="module", params=["spawn", "forkserver"])
def pool(request: pytest.FixtureRequest) -> Iterator[ProcessPoolExecutor]:
    context = multiprocessing.get_context(request.param)
    with ProcessPoolExecutor(2, mp_context=context) as workers:
        assert set(workers.map(_process, range(4))) - {os.getpid()}
        yield workers


@pytest.fixture
def repository(tmp_path: Path) -> zm.Repository:
    made = zm.create(tmp_path / "r", {"inline-chunk-bytes": 0, "pack-chunk-bytes": 1000})
    with made.transaction(message="array") as store:
        zarr.create_array(store, name="a", shape=(N,), chunks=(1,), dtype="u1", compressors=None)
    return made


def _process(_: int) -> int:
    return os.getpid()


def _held(repository: zm.Repository) -> list[int]:
    assert repository.verify().ok
    return zarr.open_array(repository.readonly_session().store, path="a", mode="r")[:].tolist()


def _values(store: ManifestStore) -> list[int]:
    return zarr.open_array(store, path="a", mode="r")[:].tolist()


def _fill(store: ManifestStore, at: int) -> ManifestStore:
    zarr.open_array(store, path="a")[at] = at + 1
    return store


def _fill_fork(fork: zm.Fork, at: int) -> zm.Fork:
    _fill(fork.store, at)
    return fork


def _commit(repository: zm.Repository, at: int) -> str:
    with repository.transaction(message=f"chunk {at}") as store:
        _fill(store, at)
    return next(repository.ancestry()).snapshot_id


def _commit_of(repository: zm.Repository, at: int) -> str:
    """By a session that was made here, whose lease is this process's own."""
    session = repository.writable_session(lease=60.0)
    _fill(session.store, at)
    return session.commit(f"chunk {at}")


def _look_after(repository: zm.Repository) -> tuple[bool, int]:
    dry = repository.garbage_collect(dry_run=True)
    repository.compact()
    repository.expire_snapshots(keep_last=1)
    return repository.verify().ok, dry.kept


@pytest.mark.slow
def test_repositories_commit_at_once(pool: ProcessPoolExecutor, repository: zm.Repository) -> None:
    ids = list(pool.map(_commit_of, [repository] * N, range(N)))
    assert len(set(ids)) == N
    assert set(ids) <= {info.snapshot_id for info in repository.ancestry()}
    assert _held(repository) == [*range(1, N + 1)]


def test_a_transaction_of_each(pool: ProcessPoolExecutor, repository: zm.Repository) -> None:
    with repository.transaction(message="meanwhile") as store:
        ended = pool.map(_commit, [repository] * N, range(N))
        zarr.create_group(store, path="mine")
        list(ended)
    assert _held(repository) == [*range(1, N + 1)]
    assert "mine" in zarr.open_group(repository.readonly_session().store, mode="r")


def test_forks_are_merged(pool: ProcessPoolExecutor, repository: zm.Repository) -> None:
    session = repository.writable_session()
    _fill(session.store, 0)
    forks = list(pool.map(_fill_fork, [session.fork()] * (N - 1), range(1, N)))
    session.merge(*forks)
    session.merge(forks[0])  # once more is once
    session.commit("all")
    assert _held(repository) == [*range(1, N + 1)]


@PICKLED
def test_stores_come_back_and_are_merged(
    pool: ProcessPoolExecutor, repository: zm.Repository
) -> None:
    session = repository.writable_session()
    session.merge(*pool.map(_fill, [session.store] * N, range(N)))
    session.commit("all")
    assert _held(repository) == [*range(1, N + 1)]


@PICKLED
def test_what_is_not_merged_is_missed(pool: ProcessPoolExecutor, repository: zm.Repository) -> None:
    session = repository.writable_session()
    _fill(session.store, 0)
    list(pool.map(_fill, [session.store] * 2, (3, 4)))
    with pytest.raises(UnmergedForksError):
        session.commit("without them")
    session.commit("without them", discard_unmerged=True)
    assert _held(repository) == [1] + [0] * (N - 1)


def test_readers_stay_at_their_snapshot(
    pool: ProcessPoolExecutor, repository: zm.Repository
) -> None:
    _commit(repository, 0)
    store = repository.readonly_session().store
    reading = [pool.submit(_values, store) for _ in range(3)]
    _commit(repository, 1)
    assert [one.result() for one in reading] == [[1] + [0] * (N - 1)] * 3
    assert pool.submit(_values, store).result() == [1] + [0] * (N - 1)


def test_maintenance_in_another_process(
    pool: ProcessPoolExecutor, repository: zm.Repository
) -> None:
    for at in range(N):
        _commit(repository, at)
    ok, kept = pool.submit(_look_after, repository).result()
    assert ok
    assert kept > 0
    assert _held(repository) == [*range(1, N + 1)]
    assert len([*repository.ancestry()]) < N


def test_errors_come_back_as_they_are(pool: ProcessPoolExecutor, repository: zm.Repository) -> None:
    with pytest.raises(ManifestsError, match="no branch 'nope'"):
        pool.submit(repository.readonly_session, "nope").result()


def test_a_session_says_what_to_pickle_instead(repository: zm.Repository) -> None:
    for session in (repository.writable_session(), repository.readonly_session()):
        with pytest.raises((ManifestsError, TypeError), match=r"store|fork"):
            pickle.dumps(session)


def test_pickles_are_made_while_threads_write(
    pool: ProcessPoolExecutor, repository: zm.Repository
) -> None:
    session = repository.writable_session()
    done = threading.Event()

    def write() -> None:
        at = 0
        while not done.is_set():
            data = np.full(1, at % 200, "u1").tobytes()
            session.store.set_sync("a/c/0", cpu.Buffer.from_bytes(data))
            at += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        forks = [pool.submit(_fill_fork, session.fork(), at).result() for at in range(1, 5)]
    finally:
        done.set()
        thread.join(20)
    session.merge(*forks)
    session.commit("all")
    assert _held(repository)[1:5] == [2, 3, 4, 5]
