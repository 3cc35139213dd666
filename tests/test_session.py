"""Sessions: commits, rebases and conflicts, folds, forks."""

from __future__ import annotations

import multiprocessing
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.buffer import cpu

import zarr_manifests as zm
from inside import context_of, root_of
from zarr_manifests import Fork, Repository, Session
from zarr_manifests.error_cases import FencedError, UnmergedForksError
from zarr_manifests.errors import (
    ConflictError,
    InvalidArgumentError,
    NotFoundError,
    SessionClosedError,
)
from zarr_manifests.format.root import Lease, Root
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import ManifestStore, contents_of, workspace_of
from zarr_manifests.testing import Fault, FaultyStorage

BIG = b"x" * 1000  # more than is kept inline


def put(target: Session | Fork | ManifestStore, key: str, value: bytes) -> None:
    store = target if isinstance(target, ManifestStore) else target.store
    store.set_sync(key, cpu.Buffer.from_bytes(value))


def get(target: Session | Fork | ManifestStore, key: str) -> bytes | None:
    store = target if isinstance(target, ManifestStore) else target.store
    found = store.get_sync(key)
    return None if found is None else found.to_bytes()


def contents(session: Session) -> dict[str, bytes]:
    keys = contents_of(session.store).keys_below("")
    return {key: get(session, key) or b"" for key in keys}


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


# --- commits ---------------------------------------------------------------------------------


def test_nothing_is_visible_before_the_commit_and_everything_after(repository: Repository) -> None:
    session = repository.writable_session("main")
    put(session, "a/c/0", b"1")
    put(session, "a/c/1", BIG)
    assert get(repository.readonly_session(), "a/c/0") is None
    assert get(session, "a/c/1") == BIG
    snapshot_id = session.commit("two chunks")
    assert snapshot_id == session.snapshot_id == repository.list_branches()["main"]
    read = repository.readonly_session()
    assert (get(read, "a/c/0"), get(read, "a/c/1")) == (b"1", BIG)


def test_session_goes_on_after_a_commit(repository: Repository) -> None:
    session = repository.writable_session("main")
    ids = []
    for i in range(5):
        put(session, f"a/c/{i}", bytes([i]))
        ids.append(session.commit(f"{i}"))
        assert not session.status()
    assert [info.snapshot_id for info in repository.ancestry()][:5] == ids[::-1]


def test_an_empty_commit_is_refused(repository: Repository) -> None:
    session = repository.writable_session("main")
    with pytest.raises(InvalidArgumentError, match="nothing to commit"):
        session.commit("nothing")


@pytest.mark.parametrize("message", ["", "  \n", 5, b"x", "\ud800"])
def test_a_commit_needs_a_message(repository: Repository, message: Any) -> None:
    session = repository.writable_session("main")
    put(session, "a/c/0", b"1")
    with pytest.raises(InvalidArgumentError, match="message"):
        session.commit(message)
    session.commit("the changes are still there")
    assert get(repository.readonly_session(), "a/c/0") == b"1"


_DEEP: dict[str, Any] = {}
for _ in range(2000):
    _DEEP = {"a": _DEEP}


@pytest.mark.parametrize(
    "metadata",
    [
        {"x": object()},
        {"x": "\ud800"},
        {"x": 2**70},
        {3: "x"},
        {"x": {(1, 2): 3}},  # msgpack would write it, and could not read it again
        {"x": {frozenset(): 3}},
        _DEEP,
    ],
)
def test_metadata_that_cannot_be_kept_is_refused(repository: Repository, metadata: Any) -> None:
    session = repository.writable_session("main")
    put(session, "a/c/0", b"1")
    with pytest.raises(InvalidArgumentError, match="metadata"):
        session.commit("x", metadata=metadata)
    session.commit("x")
    assert get(zm.open(repository.storage).readonly_session(), "a/c/0") == b"1"


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


def test_what_is_cut_off_is_told(repository: Repository) -> None:
    session = repository.writable_session()
    array = zarr.create_array(session.store, name="long", shape=(8,), chunks=(2,), dtype="i2")
    array[:] = 7
    array.resize((2,))
    assert session.status().truncated == {}  # none of it was there before
    array.resize((8,))
    array[:] = 7
    before = session.commit("fill")

    session = repository.writable_session()
    array = zarr.open_array(session.store, path="long")
    array.resize((3,))
    array.resize((8,))
    assert session.status()
    status = session.status()
    assert status
    assert status.truncated == {"/long": (2,)}
    assert "/long: cut to (2,) chunks" in str(status)
    session.commit("cut")
    with repository.transaction(message="and more") as store:
        array = zarr.open_array(store, path="long")
        array.resize((1,))
        array.resize((8,))
        zarr.create_array(store, name="new", shape=(8,), chunks=(2,), dtype="i2").resize((2,))
    diff = repository.diff(before, repository.list_branches()["main"])
    assert diff.truncated == {"/long": (1,)}
    with repository.transaction(message="delete") as store:
        del zarr.open_group(store)["long"]
    diff = repository.diff(before, repository.list_branches()["main"])
    assert (diff.deleted, diff.truncated) == (("/long",), {})


def test_status_and_discard(repository: Repository) -> None:
    session = repository.writable_session("main")
    assert not session.status()
    assert str(session.status()) == "no changes"
    zarr.create_group(session.store, path="made")
    zarr.open_array(session.store, path="a").update_attributes({"x": 1})
    put(session, "a/c/0", b"1")
    put(session, "a/c/1", b"1")
    put(session, "notes.txt", b"n")
    status = session.status()
    assert status.created == ("/made", "/notes.txt")
    assert status.updated == ("/a",)
    assert status.chunks == {"/a": 2, "/notes.txt": 1}
    assert status.coordinates == {"/a": ((0,), (1,)), "/notes.txt": ((),)}
    del zarr.open_group(session.store)["a"]
    assert session.status().deleted == ("/a",)
    assert "- /a" in str(session.status())
    session.discard_changes()
    assert not session.status()
    assert not session.status()
    assert get(session, "a/zarr.json") is not None


def test_a_session_cannot_be_pickled(repository: Repository) -> None:
    with pytest.raises(TypeError, match=r"session\.fork\(\)"):
        pickle.dumps(repository.writable_session("main"))


# --- rebase and conflicts --------------------------------------------------------------------


def test_disjoint_chunks_of_two_sessions_are_both_kept(repository: Repository) -> None:
    one, two = repository.writable_session("main"), repository.writable_session("main")
    put(one, "a/c/0", b"1")
    put(two, "a/c/1", BIG)
    first, second = one.commit("one"), two.commit("two")
    read = repository.readonly_session()
    assert (get(read, "a/c/0"), get(read, "a/c/1")) == (b"1", BIG)
    assert [info.snapshot_id for info in repository.ancestry()][:2] == [second, first]
    assert get(two, "a/c/0") == b"1"  # the session goes on from what it was put on top of
    assert get(repository.readonly_session(first), "a/c/1") is None


def test_the_same_chunk_is_a_conflict_that_names_it(repository: Repository) -> None:
    one, two = repository.writable_session("main"), repository.writable_session("main")
    for i in (3, 7, 9):
        put(one, f"a/c/{i}", b"1")
    for i in (7, 8, 9):
        put(two, f"a/c/{i}", b"2")
    one.commit("one")
    with pytest.raises(ConflictError, match=r"/a: chunks \[\(7,\), \(9,\)\]") as caught:
        two.commit("two")
    (conflict,) = caught.value.conflicts
    assert (conflict.path, conflict.component) == ("/a", "chunks")
    assert conflict.chunks == ((7,), (9,))
    assert get(two, "a/c/8") == b"2"  # the session keeps its changes
    read = repository.readonly_session()
    assert (get(read, "a/c/7"), get(read, "a/c/8")) == (b"1", None)


def test_writing_and_deleting_the_same_chunk_is_a_conflict(repository: Repository) -> None:
    session = repository.writable_session("main")
    put(session, "a/c/0", b"1")
    session.commit("chunk")
    one, two = repository.writable_session("main"), repository.writable_session("main")
    one.store.delete_sync("a/c/0")
    put(two, "a/c/0", b"2")
    one.commit("one")
    with pytest.raises(ConflictError, match=r"\(0,\)"):
        two.commit("two")


def test_same_chunk_of_a_large_commit_is_found_in_its_manifest() -> None:
    """Beyond what is embedded in a delta."""
    repository = with_array(zm.create(MemoryStorage()), n=20_000)
    one, two = repository.writable_session("main"), repository.writable_session("main")
    rng = np.random.default_rng(0)
    for i in range(15_000):
        put(one, f"a/c/{i}", rng.bytes(4))
    one.commit("one")
    assert [*repository.storage.list("manifests/")]
    put(two, "a/c/14999", b"2")
    with pytest.raises(ConflictError, match=r"\(14999,\)"):
        two.commit("two")
    two.discard_changes()
    put(two, "a/c/15000", b"2")
    two.commit("two")
    assert len(contents(repository.readonly_session())) == 15_003


def test_the_same_other_key_is_a_conflict(repository: Repository) -> None:
    one, two = repository.writable_session("main"), repository.writable_session("main")
    put(one, "notes.txt", b"x")
    put(two, "notes.txt", b"x")
    one.commit("one")
    with pytest.raises(ConflictError, match=r"/notes.txt: create: also made"):
        two.commit("two")


def test_many_rebases_in_a_row(repository: Repository) -> None:
    """Eight sessions from one base, one after another."""
    sessions = [repository.writable_session("main") for _ in range(8)]
    for i, session in enumerate(sessions):
        put(session, f"a/c/{i}", bytes([i]))
    for session in sessions:
        session.commit("mine")
    read = repository.readonly_session()
    assert [get(read, f"a/c/{i}") for i in range(8)] == [bytes([i]) for i in range(8)]


def test_racing_threads_lose_no_commit() -> None:
    repository = with_array(zm.create(MemoryStorage(), {"compaction": {"max-delta-count": 6}}))

    def work(worker: int) -> list[str]:
        ids = []
        for i in range(6):
            session = repository.writable_session("main")
            put(session, f"a/c/{worker * 6 + i}", bytes([worker, i]))
            ids.append(session.commit(f"{worker} {i}"))
        return ids

    with ThreadPoolExecutor(6) as pool:
        acknowledged = {i for ids in pool.map(work, range(6)) for i in ids}
    assert len(acknowledged) == 36
    assert acknowledged <= {info.snapshot_id for info in repository.ancestry()}
    read = zm.open(repository.storage).readonly_session()
    for worker in range(6):
        for i in range(6):
            assert get(read, f"a/c/{worker * 6 + i}") == bytes([worker, i])


def test_branch_reset_under_a_session(repository: Repository) -> None:
    base = repository.list_branches()["main"]
    writer = repository.writable_session("main")
    put(writer, "a/c/0", b"1")
    writer.commit("moves on")
    session = repository.writable_session("main")
    put(session, "a/c/1", b"2")
    repository.reset_branch("main", base, force=True)
    with pytest.raises(ConflictError, match=r"no longer in the branch's history; was .* reset"):
        session.commit("on what was left behind")
    assert repository.list_branches()["main"] == base


def test_reset_back_and_forth_is_no_conflict(repository: Repository) -> None:
    base = repository.list_branches()["main"]
    session = repository.writable_session("main")
    put(session, "a/c/1", b"2")
    other = repository.writable_session("main")
    put(other, "a/c/1", b"3")
    other.commit("moves on")
    repository.reset_branch("main", base, force=True)
    session.commit("on the base it knows")
    assert get(repository.readonly_session(), "a/c/1") == b"2"


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


def test_branch_made_again_elsewhere_under_a_session(repository: Repository) -> None:
    base = repository.list_branches()["main"]
    writer = repository.writable_session("main")
    put(writer, "a/c/0", b"1")
    writer.commit("moves on")
    repository.create_branch("side")
    session = repository.writable_session("side")
    put(session, "a/c/1", b"2")
    repository.delete_branch("side")
    repository.create_branch("side", base)
    with pytest.raises(ConflictError, match="history"):
        session.commit("on what was left behind")


def test_other_branches_tags_and_commits_there_are_no_conflict(repository: Repository) -> None:
    session = repository.writable_session("main")
    put(session, "a/c/0", b"1")
    repository.create_branch("side")
    side = repository.writable_session("side")
    put(side, "a/c/0", b"2")
    resize(side, 5)
    side.commit("same chunk, other branch")
    repository.create_tag("t")
    session.commit("main")
    assert get(repository.readonly_session("main"), "a/c/0") == b"1"
    assert get(repository.readonly_session("side"), "a/c/0") == b"2"
    assert list(repository.list_tags()) == ["t"]


# --- the fence -------------------------------------------------------------------------------


def _update_root(repository: Repository, **changes: Any) -> None:
    """Another process's maintenance."""
    roots = context_of(zm.open(repository.storage)).roots

    def change(root: Root) -> Root:
        return replace(root, **changes)

    roots.update(change, "maintenance", "", "", 1)


def test_a_session_behind_the_fence_can_no_longer_commit(repository: Repository) -> None:
    session = repository.writable_session("main")
    put(session, "a/c/0", b"1")
    begun = context_of(repository).roots.latest.root.version
    _update_root(repository, fence=begun + 1)
    with pytest.raises(FencedError, match=f"began at version {begun}, before .* {begun + 1}"):
        session.commit("too late")
    assert get(repository.readonly_session(), "a/c/0") is None
    fresh = repository.writable_session("main")
    put(fresh, "a/c/0", b"2")
    fresh.commit("in time")
    assert get(repository.readonly_session(), "a/c/0") == b"2"


def test_a_session_at_the_fence_commits(repository: Repository) -> None:
    session = repository.writable_session("main")
    put(session, "a/c/0", b"1")
    _update_root(repository, fence=context_of(repository).roots.latest.root.version)
    session.commit("just in time")


def test_a_lease_lets_a_session_through_the_fence(repository: Repository) -> None:
    session = repository.writable_session("main")
    put(session, "a/c/0", b"1")
    keys = workspace_of(session.store).keys
    assert keys is not None
    lease = Lease(b"l" * 16, keys.session_id, session.snapshot_id, 2**40, "test")
    begun = context_of(repository).roots.latest.root.version
    _update_root(repository, fence=begun + 1, leases=(lease,))
    session.commit("with a lease")
    assert get(repository.readonly_session(), "a/c/0") == b"1"
    assert root_of(zm.open(repository.storage)).leases == (lease,)


# --- folds -----------------------------------------------------------------------------------


def folding(n: int = 100, **options: Any) -> Repository:
    """One that merges everything into the base at the third delta."""
    config = {"compaction": {"max-delta-count": 3, "size-ratio": 0}, **options}
    return with_array(zm.create(MemoryStorage(), config), n=n)


def test_fold_changes_no_contents_in_the_head_and_in_any_old_snapshot() -> None:
    repository = folding()
    session = repository.writable_session("main")
    zarr.create_array(session.store, name="b", shape=(4, 4), chunks=(2, 2), dtype="f4")
    history = [(session.commit("b"), contents(session))]
    for i in range(13):
        put(session, f"a/c/{i}", bytes([i]) if i % 2 else BIG)
        if i % 3 == 0:
            zarr.open_array(session.store, path="b")[:] = i
        if i % 4 == 3:
            session.store.delete_sync(f"a/c/{i - 2}")
        before = contents(session)
        history.append((session.commit(f"{i}"), before))
        assert contents(session) == before
    assert sum(info.kind == "rewrite" for info in repository.ancestry()) >= 4
    fresh = zm.open(repository.storage)
    assert contents(fresh.readonly_session()) == history[-1][1]
    for snapshot_id, expected in history:
        assert contents(fresh.readonly_session(snapshot_id)) == expected


def test_fold_is_a_rewrite_in_history_and_the_commit_is_its_parent() -> None:
    repository = folding()
    session = repository.writable_session("main")
    for i in range(2):
        put(session, f"a/c/{i}", b"1")
        committed = session.commit(f"{i}")
    infos = [*repository.ancestry()]
    assert [info.kind for info in infos[:2]] == ["rewrite", "overwrite"]
    assert infos[1].snapshot_id == committed
    assert infos[0].message == "compact 3 deltas"
    assert session.snapshot_id == infos[0].snapshot_id
    view = contents_of(session.store).view
    assert view.snapshot.deltas == ()
    assert view.snapshot.base is not None


def test_untouched_manifests_keep_their_keys() -> None:
    """The arrays are too large to share a manifest."""
    manifests = {"sets": [{"default": {"max-manifest-size": 6_000}}], "rules": []}
    repository = folding(n=6_000, chunk_manifests=manifests)
    session = repository.writable_session("main")
    zarr.create_array(session.store, name="b", shape=(6_000,), chunks=(1,), dtype="u1")
    for name in "ab":
        for i in range(5_500):
            put(session, f"{name}/c/{i}", b"1")
    session.commit("both")

    def fold_with(key: str) -> dict[str, set[str]]:
        while contents_of(session.store).view.snapshot.deltas:
            put(session, key, np.random.default_rng(0).bytes(3))
            session.commit("more")
        view = contents_of(session.store).view
        paths = {node.node_id: path for path, node in view.nodes.items()}
        found: dict[str, set[str]] = {}
        for manifest in view.manifests:
            for part in manifest.parts:
                found.setdefault(paths[part.node_id], set()).add(manifest.blob.key)
        return found

    before = fold_with("a/c/0")
    put(session, "a/c/1", b"2")
    session.commit("only a")
    after = fold_with("a/c/2")
    assert before["b"] == after["b"]
    assert len(after["b"]) == 1
    assert before["a"] != after["a"]
    assert get(repository.readonly_session(), "b/c/5499") == b"1"


def test_a_large_array_is_split_into_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """And reads, shrinks, grows and folds on as if it were whole."""
    manifests = {"sets": [{"default": {"max-manifest-size": 7}}], "rules": []}
    config = {"compaction": {"max-delta-count": 1}, "chunk-manifests": manifests}
    repository = zm.create(MemoryStorage(), config)
    session = repository.writable_session("main")
    zarr.create_array(session.store, name="a", shape=(9, 5), chunks=(1, 1), dtype="u1")
    expected = {}
    for step in range(6):
        for i in range(9 + step):
            for j in range(5):
                if (i + j + step) % 3:
                    key, value = f"a/c/{i}/{j}", bytes([i, j, step])
                    put(session, key, value)
                    expected[key] = value
        n = 10 + step if step != 3 else 4
        zarr.open_array(session.store, path="a").resize((n, 5))
        expected = {k: v for k, v in expected.items() if int(k.split("/")[2]) < n}
        session.commit(f"{step}")
        zarr.open_array(session.store, path="a").resize((max(n, 10 + step), 5))
        read = contents(session)
        assert {k: v for k, v in read.items() if "/c/" in k} == expected
    view = contents_of(session.store).view
    leaves = [part for ref in view.manifests for part in ref.parts]
    assert len(leaves) > 5
    assert max(part.count for part in leaves) <= 7
    fresh = contents(zm.open(repository.storage).readonly_session())
    assert {k: v for k, v in fresh.items() if "/c/" in k} == expected


def test_commits_of_others_during_a_fold_stay_on_top() -> None:
    repository = zm.create(MemoryStorage(), {"compaction": {"max-delta-count": 3}})
    with_array(repository)
    other = zm.open(repository.storage, {"compaction": {"max-delta-count": 1000}})
    raced = []

    def race(name: str) -> None:
        # Just before the fold's own swap, after it has read what it folds.
        session = repository.readonly_session()
        if name == "root.swap" and len(contents_of(session.store).view.snapshot.deltas) >= 3:
            if raced:
                return
            raced.append(True)
            intruder = other.writable_session("main")
            put(intruder, "a/c/50", b"intruder")
            intruder.commit("intruder")

    runtime = replace(context_of(repository).runtime, checkpoint=race)
    writer = zm.open(repository.storage, runtime=runtime).writable_session("main")
    for i in range(2):
        put(writer, f"a/c/{i}", b"1")
        writer.commit(f"{i}")
    assert raced
    infos = [*repository.ancestry()]
    assert [info.kind for info in infos[:2]] == ["rewrite", "overwrite"]
    assert infos[1].message == "intruder"
    read = repository.readonly_session()
    assert [get(read, f"a/c/{i}") for i in (0, 1, 50)] == [b"1", b"1", b"intruder"]
    (delta,) = contents_of(read.store).view.snapshot.deltas
    intruder = context_of(other).objects.load(head_ref(other, 1), Snapshot)
    assert delta.log.bare() == intruder.log
    assert get(writer, "a/c/50") == b"intruder"


def head_ref(repository: Repository, generation: int) -> Any:
    """Pointer to the head's n-th ancestor."""
    ref = root_of(repository).branches["main"].head
    for _ in range(generation):
        ref = context_of(repository).objects.load(ref, Snapshot).parent
    return ref


@pytest.mark.parametrize("change", ["chunk", "metadata"])
def test_a_commit_is_put_on_top_of_a_fold(change: str) -> None:
    repository = folding()
    session = repository.writable_session("main")  # begins before the fold
    writer = zm.open(repository.storage, {"compaction": {"max-delta-count": 1}}).writable_session(
        "main"
    )
    if change == "chunk":
        put(writer, "a/c/1", b"w")
        writer.commit("and fold")
        put(session, "a/c/2", b"s")
    else:
        # Only the rewrite lies between: metadata changes go on top of that as well.
        assert repository.compact("main", "full").snapshot_id is not None
        resize(session, 7)
    session.commit("on top of the fold")
    read = repository.readonly_session()
    if change == "chunk":
        assert (get(read, "a/c/1"), get(read, "a/c/2")) == (b"w", b"s")
    else:
        assert zarr.open_array(read.store, path="a", mode="r").shape == (7,)


def test_shrink_and_grow_across_commits_and_folds() -> None:
    """A chunk that was cut off does not come back, in whatever commit the array grows again."""
    for commits in range(5):
        repository = folding()
        session = repository.writable_session("main")
        for i in range(8):
            put(session, f"a/c/{i}", BIG + bytes([i]))
        session.commit("eight")
        resize(session, 4)
        for n in range(commits):
            put(session, "a/c/0", bytes([n]))
            session.commit("between")
        resize(session, 10)
        session.commit("grown")
        put(session, "a/c/6", b"new")
        session.commit("a new one")
        for read in (session, zm.open(repository.storage).readonly_session()):
            values = [get(read, f"a/c/{i}") for i in range(10)]
            assert [i for i, value in enumerate(values) if value is not None] == [0, 1, 2, 3, 6]
            assert values[6] == b"new"


def test_an_array_made_again_does_not_see_old_chunks() -> None:
    for commits in range(5):
        repository = folding()
        session = repository.writable_session("main")
        for i in range(8):
            put(session, f"a/c/{i}", BIG + bytes([i]))
        first = session.commit("eight")
        zarr.create_array(
            session.store, name="a", shape=(100,), chunks=(1,), dtype="u1", overwrite=True
        )
        for n in range(commits):
            put(session, "a/c/9", bytes([n]))
            session.commit("between")
        if session.status():
            session.commit("made again")
        read = zm.open(repository.storage).readonly_session()
        assert [i for i in range(100) if get(read, f"a/c/{i}") is not None] == (
            [9] if commits else []
        )
        assert get(repository.readonly_session(first), "a/c/7") == BIG + b"\7"


def test_a_fold_behind_the_fence_is_dropped() -> None:
    """Its objects may be collected as soon as it has written them."""
    repository = folding()
    fenced = []

    def raise_fence(name: str) -> None:
        latest = root_of(zm.open(repository.storage))
        head = latest.branches["main"].head
        snapshot = context_of(repository).objects.load(head, Snapshot)
        if name == "root.swap" and len(snapshot.deltas) >= 3 and not fenced:
            fenced.append(True)
            _update_root(repository, fence=latest.version + 1)

    runtime = replace(context_of(repository).runtime, checkpoint=raise_fence)
    writer = zm.open(repository.storage, runtime=runtime).writable_session("main")
    for i in range(2):
        put(writer, f"a/c/{i}", b"1")
        writer.commit(f"{i}")
    assert fenced
    assert next(info.kind for info in repository.ancestry()) == "overwrite"
    assert get(repository.readonly_session(), "a/c/1") == b"1"


def test_the_commit_stands_if_the_fold_fails(caplog: pytest.LogCaptureFixture) -> None:
    storage = MemoryStorage()
    with_array(zm.create(storage, {"compaction": {"max-delta-count": 3}}))
    faulty = FaultyStorage(storage, [Fault("fail_before", op="create", key="nodes/*")])
    session = zm.open(faulty).writable_session("main")
    for i in range(2):
        put(session, f"a/c/{i}", b"1")
        committed = session.commit(f"{i}")
    assert "compacting 'main' failed" in caplog.text
    assert zm.open(storage).list_branches()["main"] == committed
    put(session, "a/c/2", b"1")  # the session goes on
    session.commit("folds this time")
    assert next(zm.open(storage).ancestry()).kind == "rewrite"
    assert len(contents(zm.open(storage).readonly_session())) == 5


def test_an_interrupted_fold_leaves_the_session_at_its_commit() -> None:
    storage = MemoryStorage()
    with_array(zm.create(storage, {"compaction": {"max-delta-count": 2}}))
    swaps = []

    def interrupt(name: str) -> None:
        swaps.append(name == "root.swap")
        if sum(swaps) == 2:
            swaps.append(True)
            raise KeyboardInterrupt

    runtime = replace(SYSTEM, checkpoint=interrupt)
    session = zm.open(storage, runtime=runtime).writable_session("main")
    put(session, "a/c/0", b"1")
    with pytest.raises(KeyboardInterrupt):
        session.commit("lands")
    assert next(zm.open(storage).ancestry()).message == "lands"
    assert not session.status()
    put(session, "a/c/1", b"1")
    session.commit("goes on")
    messages = [info.message for info in zm.open(storage).ancestry()]
    assert messages.count("lands") == 1
    assert get(zm.open(storage).readonly_session(), "a/c/1") == b"1"


def test_a_commit_that_landed_is_acknowledged_even_if_it_cannot_be_opened() -> None:
    """As when what it is based on has been dropped from the cache and cannot be read again."""
    storage = MemoryStorage()
    with_array(zm.create(storage, {"compaction": {"max-delta-count": 1}}))
    base = zm.open(storage).writable_session("main")
    put(base, "a/c/0", b"1")
    base.commit("fold")
    faulty = FaultyStorage(storage, [Fault("fail_before", op="get", key="nodes/*", count=None)])
    repository = zm.open(faulty, {"compaction": {"max-delta-count": 50}})
    session = repository.writable_session("main")
    context_of(repository).objects.cache.max_size = 0
    for branch in (root := context_of(repository).roots.latest.root).branches.values():
        assert branch.base is not None
    bare = replace(context_of(repository).roots.latest, root=root.bare())
    context_of(repository).roots._latest = bare
    put(session, "a/c/1", b"1")
    snapshot_id = session.commit("lands")
    assert next(zm.open(storage).ancestry()).snapshot_id == snapshot_id
    assert get(session, "a/c/1") == b"1"
    with pytest.raises(SessionClosedError, match="landed"):
        session.commit("again")
    with pytest.raises(SessionClosedError, match="landed"):
        put(session, "a/c/2", b"1")


# --- forks -----------------------------------------------------------------------------------


def travel(fork: Fork) -> Fork:
    copy = pickle.loads(pickle.dumps(fork))
    assert isinstance(copy, Fork)
    return copy


@pytest.fixture
def local(tmp_path: Path) -> Repository:
    return with_array(zm.create(tmp_path / "repository"))


def test_fork_and_merge(local: Repository) -> None:
    session = local.writable_session("main")
    put(session, "a/c/0", b"before the fork")
    forks = [travel(session.fork()) for _ in range(3)]
    put(session, "a/c/1", b"after the fork")
    for i, fork in enumerate(forks):
        assert get(fork, "a/c/0") == b"before the fork"
        assert get(fork, "a/c/1") is None
        put(fork, f"a/c/{10 + i}", bytes([i]))
        put(fork, f"a/c/{20 + i}", BIG + bytes([i]))
    session.merge(*[travel(fork) for fork in forks])
    session.commit("all")
    read = local.readonly_session()
    assert [get(read, f"a/c/{i}") for i in (0, 1)] == [b"before the fork", b"after the fork"]
    for i in range(3):
        assert get(read, f"a/c/{10 + i}") == bytes([i])
        assert get(read, f"a/c/{20 + i}") == BIG + bytes([i])


def test_a_fork_that_is_not_merged_changes_nothing(local: Repository) -> None:
    session = local.writable_session("main")
    put(session, "a/c/0", b"mine")
    put(session.fork(), "a/c/1", BIG)
    session.commit("without the fork")
    assert get(local.readonly_session(), "a/c/1") is None


def test_overlapping_chunks_with_different_bytes_are_named(local: Repository) -> None:
    session = local.writable_session("main")
    one, two = session.fork(), session.fork()
    for i in (3, 4, 5):
        put(one, f"a/c/{i}", b"one")
    for i in (4, 5, 6):
        put(two, f"a/c/{i}", b"two" * 500)
    session.merge(one)
    with pytest.raises(ConflictError, match=r"/a: chunks \[\(4,\), \(5,\)\]"):
        session.merge(two)
    assert get(session, "a/c/4") == b"one"
    assert get(session, "a/c/6") is None  # nothing of it was merged


def test_merge_is_all_or_nothing(local: Repository) -> None:
    session = local.writable_session("main")
    one, two = session.fork(), session.fork()
    put(one, "a/c/3", b"one")
    put(two, "a/c/3", b"two")
    with pytest.raises(ConflictError):
        session.merge(one, two)
    assert not session.status()


def test_overlapping_chunks_with_the_same_bytes_agree(local: Repository) -> None:
    """As when a task was retried and both attempts come back."""
    session = local.writable_session("main")
    forks = [travel(session.fork()) for _ in range(2)]
    for fork in forks:
        put(fork, "a/c/3", BIG)
        put(fork, "a/c/4", b"small")
    session.merge(*forks)
    session.commit("twice the same")
    assert get(local.readonly_session(), "a/c/3") == BIG
    assert get(local.readonly_session(), "a/c/4") == b"small"


def test_merging_the_same_copy_twice_counts_once(local: Repository) -> None:
    session = local.writable_session("main")
    fork = session.fork()
    put(fork, "a/c/3", BIG)
    session.merge(fork)
    session.merge(fork, fork)
    put(fork, "a/c/3", BIG + b"more")
    put(fork, "a/c/4", b"more")
    session.merge(fork)  # what the same copy has changed since
    assert session.status().chunks == {"/a": 2}
    session.commit("once")
    read = local.readonly_session()
    assert (get(read, "a/c/3"), get(read, "a/c/4")) == (BIG + b"more", b"more")
    objects = [*local.storage.list("chunks/")]
    assert next(local.ancestry()).written["chunk-objects"] == len(objects) == 2


def test_forks_make_arrays_and_attributes(local: Repository) -> None:
    session = local.writable_session("main")
    one, two = travel(session.fork()), travel(session.fork())
    zarr.create_array(one.store, name="one", shape=(4,), chunks=(2,), dtype="i4")[:] = 1
    zarr.create_array(two.store, name="two", shape=(4,), chunks=(2,), dtype="i4")[:] = 2
    zarr.open_array(two.store, path="a").update_attributes({"by": "two"})
    session.merge(travel(one), travel(two))
    session.commit("arrays")
    group = zarr.open_group(local.readonly_session().store, mode="r")
    np.testing.assert_array_equal(group["one"][:], 1)  # type: ignore[index]
    np.testing.assert_array_equal(group["two"][:], 2)  # type: ignore[index]
    assert group["a"].attrs["by"] == "two"


def test_the_same_document_changed_by_two_writers_is_a_conflict(local: Repository) -> None:
    session = local.writable_session("main")
    one, two = session.fork(), session.fork()
    zarr.open_array(one.store, path="a").update_attributes({"by": "one"})
    zarr.open_array(two.store, path="a").update_attributes({"by": "two"})
    session.merge(one)
    with pytest.raises(ConflictError, match=r"/a: metadata"):
        session.merge(two)


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
    for key in ("a/c/0", "a/c/1", "notes.txt"):
        assert get(session, key) is None, key
    session.commit("deleted")
    assert sorted(contents(local.readonly_session())) == ["a/zarr.json", "zarr.json"]


def test_a_shrink_in_a_fork_is_merged_for_good(local: Repository) -> None:
    session = local.writable_session("main")
    zarr.create_array(session.store, name="new", shape=(8,), chunks=(1,), dtype="u1")
    for name in ("a", "new"):
        for i in range(8):
            put(session, f"{name}/c/{i}", bytes([i]))
    fork = travel(session.fork())
    for name in ("a", "new"):
        document = zarr.open_array(fork.store, path=name)
        document.resize((3,))
    session.merge(travel(fork))
    for name in ("a", "new"):
        resize(session, 8, name)
    session.commit("shrunk in the fork, grown here")
    read = local.readonly_session()
    for name in ("a", "new"):
        found = [i for i in range(8) if get(read, f"{name}/c/{i}") is not None]
        assert found == [0, 1, 2], name


@pytest.mark.parametrize("shrinks", ["session", "fork"])
@pytest.mark.parametrize("name", ["a", "new"])
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


def test_chunks_written_where_the_session_has_deleted_the_array(local: Repository) -> None:
    session = local.writable_session("main")
    fork = session.fork()
    put(fork, "a/c/3", b"x")
    del zarr.open_group(session.store)["a"]
    with pytest.raises(ConflictError, match="deleted"):
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


def test_a_copied_repository_is_another_one_only_by_id(tmp_path: Path, local: Repository) -> None:
    """Storage that moved: the id decides, not the place."""
    session = local.writable_session("main")
    fork = session.fork()
    put(fork, "a/c/0", b"x")
    state = pickle.dumps(fork)
    assert isinstance(local.storage, LocalStorage)
    shutil.copytree(local.storage.path, tmp_path / "copy")
    session.merge(pickle.loads(state))
    assert get(session, "a/c/0") == b"x"


def test_forks_in_threads(local: Repository) -> None:
    session = local.writable_session("main")

    def work(worker: int) -> Fork:
        fork = session.fork()
        for i in range(10):
            put(fork, f"a/c/{worker * 10 + i}", BIG + bytes([worker, i]))
        return fork

    with ThreadPoolExecutor(8) as pool:
        session.merge(*pool.map(work, range(8)))
    session.commit("from threads")
    read = local.readonly_session()
    for worker in range(8):
        for i in range(10):
            assert get(read, f"a/c/{worker * 10 + i}") == BIG + bytes([worker, i])


def _work_in_process(fork: Fork, worker: int) -> Fork:
    for i in range(3):
        put(fork, f"a/c/{worker * 3 + i}", BIG + bytes([worker, i]))
    return fork


def _work_on_store(store: ManifestStore, worker: int) -> ManifestStore:
    put(store, f"a/c/{worker}", BIG + bytes([worker]))
    return store


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_forks_in_processes(local: Repository, method: str) -> None:
    session = local.writable_session("main")
    put(session, "a/c/99", b"mine")
    with multiprocessing.get_context(method).Pool(2) as pool:
        done = [pool.apply_async(_work_in_process, (session.fork(), w)) for w in range(3)]
        session.merge(*[result.get(60) for result in done])
    session.commit("from processes")
    read = zm.open(local.storage).readonly_session()
    for worker in range(3):
        for i in range(3):
            assert get(read, f"a/c/{worker * 3 + i}") == BIG + bytes([worker, i])
    assert get(read, "a/c/99") == b"mine"


@pytest.mark.filterwarnings("ignore:a writable store was pickled")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_pickled_stores_in_processes(local: Repository, method: str) -> None:
    session = local.writable_session("main")
    store = session.store
    with multiprocessing.get_context(method).Pool(2) as pool:
        done = [pool.apply_async(_work_on_store, (store, w)) for w in range(3)]
        copies = [result.get(60) for result in done]
    put(session, "a/c/99", b"mine")
    with pytest.raises(UnmergedForksError, match=r"[23] copies"):
        session.commit("without them")
    session.merge(*copies)
    session.commit("with them")
    read = zm.open(local.storage).readonly_session()
    assert [get(read, f"a/c/{w}") for w in range(3)] == [BIG + bytes([w]) for w in range(3)]
    assert get(read, "a/c/99") == b"mine"


@pytest.mark.filterwarnings("ignore:a writable store was pickled")
def test_unmerged_pickled_copies_can_be_left_out_on_purpose(local: Repository) -> None:
    session = local.writable_session("main")
    copy = pickle.loads(pickle.dumps(session.store))
    assert copy == session.store
    put(session, "a/c/0", b"mine")
    put(copy, "a/c/1", b"x")  # small: noticed nevertheless
    with pytest.raises(UnmergedForksError, match="1 copies"):
        session.commit("without it")
    session.commit("without it", discard_unmerged=True)
    assert get(local.readonly_session(), "a/c/1") is None
    assert get(local.readonly_session(), "a/c/0") == b"mine"


@pytest.mark.filterwarnings("ignore:a writable store was pickled")
def test_a_pickled_store_that_only_reads_hinders_nothing(local: Repository) -> None:
    session = local.writable_session("main")
    copy = pickle.loads(pickle.dumps(session.store))
    assert get(copy, "a/zarr.json") is not None
    put(session, "a/c/0", b"mine")
    session.commit("mine")


def test_pickled_readonly_store_reads_and_cannot_write(local: Repository) -> None:
    session = local.readonly_session()
    copy = pickle.loads(pickle.dumps(session.store))
    assert copy == session.store
    assert copy.read_only
    assert get(copy, "a/zarr.json") == get(session, "a/zarr.json")
    with pytest.raises(PermissionError):
        put(copy, "a/c/0", b"x")


def test_a_session_in_doubt_is_closed(repository: Repository) -> None:
    session = repository.writable_session("main")
    put(session, "a/c/0", b"1")

    def interrupt(name: str) -> None:
        if name == "root.swap":
            raise KeyboardInterrupt

    runtime = replace(context_of(repository).runtime, checkpoint=interrupt)
    session = zm.open(repository.storage, runtime=runtime).writable_session("main")
    put(session, "a/c/0", b"1")
    with pytest.raises(KeyboardInterrupt):
        session.commit("interrupted")
    with pytest.raises(SessionClosedError, match="not known"):
        session.commit("again")
