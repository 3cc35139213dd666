"""Sessions: commits, rebases and conflicts, folds, forks."""

from __future__ import annotations

import multiprocessing
import pickle
from contextlib import suppress
from pathlib import Path

import pytest
import zarr

import zarr_manifests as zm
from stored import contents, get, put
from zarr_manifests import Fork, Repository, Session
from zarr_manifests.errors import (
    ConflictError,
    InvalidArgumentError,
    NotFoundError,
    SessionClosedError,
    UnmergedForksError,
)
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import ManifestStore

BIG = b"x" * 1000  # more than is kept inline


def with_array(repository: Repository, name: str = "a", n: int = 100) -> Repository:
    """An array of n chunks of one byte, without chunks, committed."""
    session = repository.writable_session("main")
    zarr.create_array(session.store, name=name, shape=(n,), chunks=(1,), dtype="u1")
    session.commit(f"array {name}")
    return repository


def resize(session: Session, n: int, name: str = "a") -> None:
    zarr.open_array(session.store, path=name).resize((n,))


@pytest.fixture
def repository() -> Repository:
    return with_array(zm.create(MemoryStorage()))


@pytest.mark.parametrize("fails", [False, True])
def test_after_its_block_a_transaction_takes_no_changes(
    repository: Repository, fails: bool
) -> None:
    with suppress(ZeroDivisionError), repository.transaction(message="x") as store:
        array = zarr.open_array(store, path="a")
        array[0] = 7
        assert not fails or 1 / 0
    with pytest.raises(SessionClosedError, match="its transaction has ended"):
        array[1] = 8
    assert array[0] == 7
    head = zarr.open_array(repository.readonly_session().store, path="a", mode="r")
    assert head[1] != 8
    assert (head[0] == 7) is not fails


def test_branch_deleted_under_a_session(repository: Repository) -> None:
    repository.create_branch("side")
    session = repository.writable_session("side")
    put(session, "a/c/1", b"2")
    repository.delete_branch("side")
    with pytest.raises(ConflictError, match="branch 'side' was deleted"):
        session.commit("nowhere to go")
    repository.create_branch("side", session.snapshot_id)
    session.commit("again")
    assert get(repository.readonly_session("side"), "a/c/1") == b"2"
    with pytest.raises(NotFoundError):
        repository.readonly_session("gone")


def travel(fork: Fork) -> Fork:
    copy = pickle.loads(pickle.dumps(fork))
    assert isinstance(copy, Fork)
    return copy


@pytest.fixture
def local(tmp_path: Path) -> Repository:
    return with_array(zm.create(tmp_path / "repository"))


def test_deletes_in_a_fork_are_merged(local: Repository) -> None:
    session = local.writable_session("main")
    put(session, "a/c/0", b"committed")
    session.commit("base")
    put(session, "a/c/1", b"not committed")
    put(session, "notes.txt", b"not committed")
    fork = travel(session.fork())
    for key in ("a/c/0", "a/c/1", "notes.txt"):
        fork.store.delete_sync(key)
    session.merge(travel(fork))
    session.commit("deleted")
    assert sorted(contents(local.readonly_session())) == ["a/zarr.json", "zarr.json"]


@pytest.mark.parametrize(("name", "shrinks"), [("a", "session"), ("new", "fork")])
def test_chunks_written_where_the_other_has_shrunk_the_array(
    local: Repository, name: str, shrinks: str
) -> None:
    session = local.writable_session("main")
    zarr.create_array(session.store, name="new", shape=(8,), chunks=(1,), dtype="u1")
    put(session, f"{name}/c/5", b"x")
    fork = travel(session.fork())
    one, two = (session, fork) if shrinks == "session" else (fork, session)
    zarr.open_array(one.store, path=name).resize((3,))
    put(two, f"{name}/c/5", b"y")
    with pytest.raises(ConflictError, match=rf"/{name}: chunks \[\(5,\)\]"):
        session.merge(fork)


def test_forks_of_others_are_refused(tmp_path: Path, local: Repository) -> None:
    session = local.writable_session("main")
    put(session, "a/c/0", b"x")
    elsewhere = with_array(zm.create(tmp_path / "elsewhere")).writable_session("main")
    with pytest.raises(InvalidArgumentError, match="another repository"):
        session.merge(elsewhere.fork())
    with pytest.raises(InvalidArgumentError, match="another session"):
        session.merge(local.writable_session("main").fork())
    fork = session.fork()
    session.commit("moves the session on")
    with pytest.raises(InvalidArgumentError, match="another base"):
        session.merge(fork)
    with pytest.raises(InvalidArgumentError, match="another session"):
        session.merge(local.readonly_session().store)


def _work_on_store(store: ManifestStore, worker: int) -> ManifestStore:
    put(store, f"a/c/{worker}", BIG + bytes([worker]))
    return store


@pytest.mark.filterwarnings("ignore:a writable store was pickled")
def test_pickled_stores_in_processes(local: Repository) -> None:
    session = local.writable_session("main")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        done = [pool.apply_async(_work_on_store, (session.store, w)) for w in range(3)]
        copies = [result.get() for result in done]
    put(session, "a/c/99", b"mine")
    with pytest.raises(UnmergedForksError, match="cop"):
        session.commit("without them")
    session.merge(*copies)
    session.commit("with them")
    read = zm.open(local.storage).readonly_session()
    assert [get(read, f"a/c/{w}") for w in range(3)] == [BIG + bytes([w]) for w in range(3)]
    assert get(read, "a/c/99") == b"mine"
