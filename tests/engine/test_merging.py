"""What forks bring back: never lost, never applied twice, never over what came later."""

from __future__ import annotations

import pickle

import pytest
import zarr
from zarr.core.buffer import cpu

import zarr_manifests as zm
from zarr_manifests import Fork, Session
from zarr_manifests.error_cases import UnmergedForksError
from zarr_manifests.errors import ConflictError, InvalidArgumentError
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import ManifestStore, contents_of, workspace_of

LARGE = bytes(10_000)


def put(target: Session | Fork, key: str, value: bytes) -> None:
    target.store.set_sync(key, cpu.Buffer.from_bytes(value))


def get(target: Session, key: str) -> bytes | None:
    found = target.store.get_sync(key)
    return None if found is None else found.to_bytes()


def make(target: Session | Fork, name: str) -> None:
    zarr.create_array(target.store, name=name, shape=(4,), chunks=(1,), dtype="u1")


def grow(session: Session) -> None:
    zarr.open_array(session.store, path="a").resize((9,))


def describe(target: Session | Fork, units: str) -> None:
    zarr.open_array(target.store, path="a").attrs["units"] = units


@pytest.fixture
def session() -> Session:
    """Of a repository with an array of four chunks, the first of them written."""
    session = zm.create(MemoryStorage("merging")).writable_session()
    make(session, "a")
    put(session, "a/c/0", b"committed")
    session.commit("array")
    return session


@pytest.fixture(autouse=True)
def empty_memory() -> None:
    storage = MemoryStorage("merging")
    storage.delete_many([info.key for info in storage.list()])


def committed(session: Session) -> Session:
    session.commit("merged")
    return zm.open(MemoryStorage("merging")).readonly_session()


def test_chunks_beyond_the_grid_that_the_fork_knew(session: Session) -> None:
    fork = session.fork()
    grow(session)
    put(fork, "a/c/7", b"from the fork")
    session.merge(fork)
    session.merge(fork)
    assert session.status().chunks == {"/a": 1}
    assert get(session, "a/c/7") == b"from the fork"
    assert get(committed(session), "a/c/7") == b"from the fork"


def test_chunks_of_an_array_that_the_fork_did_not_know(session: Session) -> None:
    fork = session.fork()
    make(session, "new")
    put(fork, "new/c/2", b"from the fork")
    session.merge(fork)
    assert get(session, "new/c/2") == b"from the fork"
    assert get(committed(session), "new/c/2") == b"from the fork"


def test_such_chunks_conflict_where_the_session_wrote_them_too(session: Session) -> None:
    fork = session.fork()
    grow(session)
    put(session, "a/c/7", b"from the session")
    put(fork, "a/c/7", b"from the fork")
    put(fork, "a/c/1", b"from the fork")
    with pytest.raises(ConflictError, match=r"/a: chunks \[\(7,\)\]"):
        session.merge(fork)
    assert (get(session, "a/c/7"), get(session, "a/c/1")) == (b"from the session", None)
    put(session, "a/c/7", b"from the fork")
    session.merge(fork)  # now they agree
    assert get(committed(session), "a/c/1") == b"from the fork"


def test_a_second_merge_does_not_undo_what_came_after_the_first(session: Session) -> None:
    fork = session.fork()
    put(fork, "a/c/1", b"from the fork")
    describe(fork, "K")
    session.merge(fork)
    put(session, "a/c/1", b"later")
    describe(session, "degC")
    session.merge(fork)
    assert get(session, "a/c/1") == b"later"
    assert zarr.open_array(session.store, path="a").attrs["units"] == "degC"
    put(fork, "a/c/1", b"from the fork, later still")
    with pytest.raises(ConflictError, match="chunks"):
        session.merge(fork)


def test_a_fork_changes_a_document_again_after_a_merge(session: Session) -> None:
    fork = session.fork()
    for units in ("K", "degC"):
        describe(fork, units)
        session.merge(fork)
        assert zarr.open_array(session.store, path="a").attrs["units"] == units


def test_a_chunk_that_the_session_deleted_and_a_fork_wrote_is_a_conflict(session: Session) -> None:
    put(session, "a/c/1", b"not committed")
    fork = session.fork()
    session.store.delete_sync("a/c/1")
    put(fork, "a/c/1", b"from the fork")
    with pytest.raises(ConflictError, match=r"/a: chunks \[\(1,\)\]"):
        session.merge(fork)
    assert get(session, "a/c/1") is None


def test_refs_to_objects_of_another_session_are_refused(session: Session) -> None:
    """Nothing protects these objects until a snapshot reaches them."""
    stranger = zm.open(MemoryStorage("merging")).writable_session()
    put(stranger, "a/c/1", LARGE)
    workspace_of(stranger.store).flush()
    ((a, refs),) = contents_of(stranger.store).changes.chunks.items()
    fork = session.fork()
    contents_of(fork.store).changes.chunks[a] = dict(refs)
    with pytest.raises(InvalidArgumentError, match="neither this session nor its copies"):
        session.merge(fork)
    assert not session.status()
    stranger.commit("now they are reached")
    session.rebase()
    make(session, "b")
    fork = session.fork()
    b = contents_of(fork.store).array_at("b").node_id
    contents_of(fork.store).changes.chunks.update({a: dict(refs), b: dict(refs)})
    session.merge(fork)
    found = committed(session)
    assert (get(found, "a/c/1"), get(found, "b/c/1")) == (LARGE, LARGE)


def test_chunks_outside_the_array_are_refused(session: Session) -> None:
    fork = session.fork()
    put(fork, "a/c/1", b"from the fork")
    (refs,) = contents_of(fork.store).changes.chunks.values()
    refs[4,] = refs[1,]
    with pytest.raises(InvalidArgumentError, match=r"/a: chunk \(4,\) lies outside the array"):
        session.merge(fork)
    assert not session.status()


@pytest.mark.filterwarnings("ignore:a writable store was pickled")
def test_copies_of_discarded_changes_hinder_no_commit(session: Session) -> None:
    copy: ManifestStore = pickle.loads(pickle.dumps(session.store))
    copy.set_sync("a/c/1", cpu.Buffer.from_bytes(b"x"))
    session.discard_changes()
    put(session, "a/c/2", b"y")
    later: ManifestStore = pickle.loads(pickle.dumps(session.store))
    with pytest.raises(InvalidArgumentError, match="another session"):
        session.merge(copy)
    assert get(committed(session), "a/c/1") is None
    later.set_sync("a/c/3", cpu.Buffer.from_bytes(b"z"))
    session.discard_changes()
    put(session, "a/c/2", b"again")
    last: ManifestStore = pickle.loads(pickle.dumps(session.store))
    last.set_sync("a/c/3", cpu.Buffer.from_bytes(b"z"))
    with pytest.raises(UnmergedForksError, match="1 copies"):
        session.commit("what copies wrote since is not left out")
