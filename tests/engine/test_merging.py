"""What forks bring back: never lost, never applied twice, never over what came later."""

from __future__ import annotations

import asyncio
import pickle
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from stored import get, put
from zarr_manifests import Fork, Repository, Session
from zarr_manifests.errors import ConflictError, FencedError, InvalidArgumentError
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of, workspace_of

LARGE = bytes(10_000)
MANY = 4_000
FEW_IN_MEMORY: dict[str, Any] = {
    "spill-refs": 500,
    "inline-chunk-bytes": 0,
    "pack-chunk-bytes": 0,
    "compaction": {"mode": "manual"},
}


def make(target: Session | Fork, name: str, size: int = 4) -> None:
    zarr.create_array(target.store, name=name, shape=(size,), chunks=(1,), dtype="u1")


def describe(target: Session | Fork, units: str) -> None:
    zarr.open_array(target.store, path="a").attrs["units"] = units


def made(config: dict[str, Any], size: int) -> Repository:
    """With an array, in a storage that a fork finds by its name."""
    storage = MemoryStorage("merging")
    storage.delete_many([info.key for info in storage.list()])
    repository = zm.create(storage, config, virtual_containers={"raw": "memory://raw-of-forks"})
    session = repository.writable_session()
    make(session, "a", size)
    session.commit("array")
    return repository


@pytest.fixture
def session() -> Session:
    """Of a repository with an array of four chunks."""
    return made({}, 4).writable_session()


def committed(session: Session) -> Session:
    session.commit("merged")
    return zm.open(MemoryStorage("merging")).readonly_session()


def test_chunks_of_an_array_that_the_fork_did_not_know(session: Session) -> None:
    fork = session.fork()
    make(session, "new")
    put(fork, "new/c/2", b"from the fork")
    session.merge(fork)
    assert get(session, "new/c/2") == b"from the fork"
    assert get(committed(session), "new/c/2") == b"from the fork"


def test_a_fork_does_not_bring_back_what_the_session_has_deleted_since(session: Session) -> None:
    put(session, "a/c/1", b"before")
    fork = session.fork()
    put(fork, "a/c/1", b"from the fork")
    session.store.delete_sync("a/c/1")
    with pytest.raises(ConflictError, match="two writers"):
        session.merge(fork)
    assert get(session, "a/c/1") is None


def test_chunks_of_what_another_fork_has_made_larger_wait_for_that_one(session: Session) -> None:
    parent = session.fork()
    zarr.open_array(parent.store, path="a").resize((5,))
    child = parent.fork()
    put(child, "a/c/4", b"beyond")
    with pytest.raises(ConflictError, match="cut off"):
        session.merge(child)
    assert not len(session.chunk_refs("a"))
    session.merge(parent, child)
    assert get(session, "a/c/4") == b"beyond"


def test_a_fork_deletes_nothing_that_the_session_has_moved_since(session: Session) -> None:
    put(session, "a/c/1", b"before")
    fork = session.fork()
    fork.store.delete_sync("a/zarr.json")
    session.move("a", "b")
    with pytest.raises(ConflictError, match="deleted in a fork"):
        session.merge(fork)
    assert get(session, "b/c/1") == b"before"


def test_a_fork_writes_nothing_where_the_session_has_moved_chunks_away_since(
    session: Session,
) -> None:
    put(session, "a/c/3", b"before")
    session.commit("a chunk")
    fork = session.fork()
    put(fork, "a/c/3", b"from the fork")
    session.shift_array("a", (-1,))
    with pytest.raises(ConflictError, match="two writers"):
        session.merge(fork)
    assert get(session, "a/c/2") == b"before"
    assert get(session, "a/c/3") is None


@pytest.mark.parametrize("times", [0, 1])
def test_forks_that_nobody_has_opened_bring_nothing(session: Session, times: int) -> None:
    put(session, "a/c/1", b"first")
    session.merge(session.fork())  # an idle worker
    put(session, "a/c/1", b"second")
    idle = session.fork()
    for _ in range(times):
        idle = pickle.loads(pickle.dumps(idle))
    put(session, "a/c/1", b"first")
    session.merge(idle)
    assert get(session, "a/c/1") == b"first"


def test_a_fork_that_nobody_has_opened_brings_no_older_state_of_its_parent(
    session: Session,
) -> None:
    parent = session.fork()
    put(parent, "a/c/1", b"first")
    child = parent.fork()
    put(parent, "a/c/1", b"second")
    session.merge(parent)
    session.merge(child)
    assert get(session, "a/c/1") == b"second"


def test_forks_of_a_second_round_may_have_an_idle_one(session: Session) -> None:
    session.merge(session.fork())
    put(session, "a/c/1", b"first")
    idle, busy = session.fork(), session.fork()
    put(busy, "a/c/1", b"second")
    session.merge(busy, idle)
    assert get(session, "a/c/1") == b"second"


def test_what_a_fork_has_deleted_again_is_deleted_by_its_next_merge(session: Session) -> None:
    fork = session.fork()
    put(fork, "a/c/1", b"from the fork")
    make(fork, "new")
    session.merge(fork)
    fork.store.delete_sync("a/c/1")
    del zarr.open_group(fork.store)["new"]
    session.merge(fork)
    assert get(session, "a/c/1") is None
    assert "new" not in zarr.open_group(session.store)


def test_such_chunks_conflict_where_the_session_wrote_them_too(session: Session) -> None:
    fork = session.fork()
    zarr.open_array(session.store, path="a").resize((9,))
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
    for units in ("m", "K"):
        describe(fork, units)
        session.merge(fork)
        assert zarr.open_array(session.store, path="a").attrs["units"] == units
    put(session, "a/c/1", b"later")
    describe(session, "degC")
    session.merge(fork)
    assert get(session, "a/c/1") == b"later"
    assert zarr.open_array(session.store, path="a").attrs["units"] == "degC"
    put(fork, "a/c/1", b"from the fork, later still")
    with pytest.raises(ConflictError):
        session.merge(fork)


def test_refs_to_objects_of_another_session_are_refused(session: Session) -> None:
    """Nothing protects these objects until a snapshot reaches them."""
    stranger = zm.open(MemoryStorage("merging")).writable_session()
    put(stranger, "a/c/1", LARGE)
    workspace_of(stranger.store).flush()
    ((a, refs),) = contents_of(stranger.store).changes.chunks.items()
    fork = session.fork()
    contents_of(fork.store).changes.chunks[a] = dict(refs)
    with pytest.raises(InvalidArgumentError, match="session"):
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
    with pytest.raises(InvalidArgumentError, match=r"/a: chunk \(4,\)"):
        session.merge(fork)
    assert not session.status()


# --- many refs -------------------------------------------------------------------------------


@pytest.fixture
def repository() -> Repository:
    """With an array of so many chunks that changes are spilled."""
    return made(FEW_IN_MEMORY, MANY)


def sent(fork: Fork) -> Fork:
    return pickle.loads(pickle.dumps(fork))  # type: ignore[no-any-return]


def refer(target: Session | Fork, first: int, stop: int, version: int = 1) -> None:
    rows = np.arange(first, stop)
    target.store.set_virtual_refs(
        "a", rows[:, None], ["virtual://raw/x"], rows * 0, rows * 1_000 + version, rows * 0 + 1
    )


def versions(session: Session) -> dict[int, int]:
    """Which version of each chunk is there."""
    return dict(divmod(at, 1_000) for at in session.chunk_refs("a").offset.tolist())


def worked(session: Session, first: int, stop: int, version: int = 1) -> Fork:
    """A fork as it comes back from a task."""
    fork = sent(session.fork())
    refer(fork, first, stop, version)
    return sent(fork)


@pytest.mark.parametrize("many", [300, 900])
def test_what_the_session_wrote_since_conflicts_and_what_it_wrote_before_does_not(
    repository: Repository, many: int
) -> None:
    session = repository.writable_session()
    refer(session, 0, 350)
    fork = worked(session, 100, 100 + many, version=2)
    late = sent(fork)
    session.merge(fork)
    expected = dict.fromkeys(range(350), 1) | dict.fromkeys(range(100, 100 + many), 2)
    assert versions(session) == expected
    refer(session, 150, 151, version=3)
    session.merge(worked(session, 2_000, 2_010), late)  # what was merged is not merged again
    session.commit("both")
    again = repository.writable_session()
    assert versions(again) == expected | {150: 3} | dict.fromkeys(range(2_000, 2_010), 1)
    fork = worked(again, 0, many, version=4)
    refer(again, 7, 8, version=5)
    with pytest.raises(ConflictError):
        again.merge(fork)


@pytest.mark.parametrize("many", [12, 900])
def test_a_fork_frozen_twice_and_merged_twice_counts_once(
    repository: Repository, many: int
) -> None:
    session = repository.writable_session()
    fork = sent(session.fork())

    def write(target: Fork, first: int, stop: int) -> Fork:
        for at in range(first, stop):
            put(target, f"a/c/{at}", b"data")
        return sent(target)

    session.merge(write(fork, 0, many))
    half = write(fork, many, 2 * many)
    session.merge(half, half)
    session.merge(sent(half), write(fork, 10, 11))
    session.merge(write(sent(sent(fork)), MANY - 1, MANY))
    assert len(session.status().chunks["/a"]) == 2 * many + 1
    session.commit("once")
    assert repository.du(estimate=True).total.chunks == 2 * many + 1
    assert repository.verify().ok


def test_a_copy_whose_chunks_were_collected_is_fenced_off(repository: Repository) -> None:
    fork = repository.writable_session().fork()
    put(fork, "a/c/0", b"data")
    with repository.transaction(message="another") as store:
        zarr.create_group(store, path="g")
    assert repository.garbage_collect(timedelta(0)).objects["chunks"] == 1
    with pytest.raises(FencedError):
        pickle.dumps(fork)


def test_refs_to_objects_of_strangers_are_found_in_what_was_spilled(repository: Repository) -> None:
    """Nothing protects these objects until a snapshot reaches them."""
    stranger = repository.writable_session()
    put(stranger, "a/c/5", b"theirs")
    workspace_of(stranger.store).flush()
    ((node, refs),) = contents_of(stranger.store).changes.chunks.items()
    planted = dict(refs)

    def with_theirs(session: Session) -> Fork:
        fork = sent(session.fork())
        refer(fork, 100, 601)
        contents_of(fork.store).changes.chunks[node] = dict(planted)
        refer(fork, 700, 1_300)
        return sent(fork)

    session = repository.writable_session()
    fork = with_theirs(session)
    with pytest.raises(InvalidArgumentError, match="neither this session nor its copies"):
        session.merge(fork)
    stranger.commit("now they are reached")
    session = repository.writable_session()
    session.merge(with_theirs(session))
    session.commit("fine")
    assert repository.verify().ok


def test_what_the_session_wrote_conflicts_with_a_fork_that_cut_it_off_for_a_while(
    session: Session,
) -> None:
    put(session, "a/c/3", b"before")
    session.commit("before")
    session = zm.open(MemoryStorage("merging")).writable_session()
    fork = session.fork()
    put(session, "a/c/3", b"since")
    array = zarr.open_array(fork.store, path="a")
    array.resize((2,))
    array.resize((4,))
    with pytest.raises(ConflictError, match="cut off"):
        session.merge(fork)
    assert get(session, "a/c/3") == b"since"


@pytest.mark.parametrize("fork_deletes", [False, True])
def test_an_array_in_a_group_that_is_deleted_beside_it_conflicts(
    session: Session, fork_deletes: bool
) -> None:
    zarr.create_group(session.store, path="g")
    fork = session.fork()
    deleting, making = (fork, session) if fork_deletes else (session, fork)
    asyncio.run(deleting.store.delete_dir("g"))
    make(making, "g/a")
    with pytest.raises(ConflictError, match="g/a: metadata: /g was deleted"):
        session.merge(fork)
    assert (get(session, "g/a/zarr.json") is not None) is fork_deletes


def test_a_fork_of_a_session_that_has_deleted_a_group_may_use_its_path(session: Session) -> None:
    zarr.create_group(session.store, path="g")
    session.commit("group")
    session = zm.open(MemoryStorage("merging")).writable_session()
    asyncio.run(session.store.delete_dir("g"))
    fork = session.fork()
    make(fork, "g/a")
    put(fork, "g/note.txt", b"1")
    session.merge(fork)
    assert get(session, "g/note.txt") == b"1"


def test_a_deletion_in_a_fork_of_what_the_session_has_moved_back_since_is_a_conflict(
    session: Session,
) -> None:
    session.move("a", "b")
    fork = session.fork()
    asyncio.run(fork.store.delete_dir("b"))
    session.move("b", "a")
    with pytest.raises(ConflictError, match="/b: chunks: written in the session and deleted"):
        session.merge(fork)
    assert get(session, "a/zarr.json") is not None
