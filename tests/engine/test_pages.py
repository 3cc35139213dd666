"""A root that has very many refs: they lie in pages, and cost next to nothing where they do not
matter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.buffer import cpu

import zarr_manifests as zm
from inside import root_of
from zarr_manifests import Repository
from zarr_manifests.engine.root.roots import Roots
from zarr_manifests.error_cases import FencedError
from zarr_manifests.errors import AlreadyExistsError, NotFoundError
from zarr_manifests.format.root import LOG_TAIL, Lease, LogEntry, Root
from zarr_manifests.ids import new_session_id, snapshot_id_of
from zarr_manifests.planning.upkeep.paging import PAGES_MOST, ROOT_BYTES
from zarr_manifests.runtime import SYSTEM, Runtime
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import workspace_of
from zarr_manifests.testing import CountingStorage, LatencyStorage, copy_of

TAGS, BRANCHES = 10_000, 5_000


def stopped_clock() -> Runtime:
    return replace(SYSTEM, monotonic_s=lambda: 1000.0)


def put(repository: Repository, branch: str, key: str, value: bytes) -> str:
    session = repository.writable_session(branch)
    session.store.set_sync(key, cpu.Buffer.from_bytes(value))
    return session.commit("put")


def swap(storage: MemoryStorage, new: Mapping[str, object]) -> None:
    """Swap in a root that differs so: the fast way to very many refs."""
    roots = Roots(storage, SYSTEM)
    at = roots.read()
    roots.archive(at)
    entry = LogEntry(at.root.version + 1, 1, "create branch", "main", "", b"o" * 16)
    assert roots.swap(at, replace(at.root, **new).with_log(entry), b"o" * 16)


def name_of(what: str, i: int) -> str:
    """A name that does not compress away."""
    return f"{what}/{i:06d}-{sha256(bytes(what, 'ascii') + bytes([i % 251, i // 251])).hexdigest()}"


def names(what: str, n: int) -> list[str]:
    return [name_of(what, int(i)) for i in np.random.default_rng(0).permutation(n)]


@pytest.fixture(scope="module")
def made() -> MemoryStorage:
    storage = MemoryStorage()
    repository = zm.create(storage)
    session = repository.writable_session("main")
    zarr.create_array(session.store, name="x", data=np.arange(5.0), dimension_names=("x",))
    session.commit("x")
    branch = root_of(storage).branches["main"].bare()
    swap(storage, {"tags": dict.fromkeys(names("tag", TAGS), branch.head)})
    branches = dict.fromkeys(names("branch", BRANCHES), branch)
    swap(storage, {"branches": {**branches, "main": branch}})
    for i in range(LOG_TAIL):
        put(repository, "main", "note", bytes([i]))
    return storage


@pytest.fixture
def storage(made: MemoryStorage) -> MemoryStorage:
    copy = MemoryStorage()
    for info in made.list():
        copy.put(info.key, made.get(info.key))
    return copy


def test_the_root_is_bounded(made: MemoryStorage) -> None:
    root = root_of(made)
    assert len(root.log) == LOG_TAIL
    assert len(root.bare().encode()) <= ROOT_BYTES
    assert len(made.get("current")) <= ROOT_BYTES + 16 * 1024
    assert all(len(pages) <= PAGES_MOST + 1 for pages in root.pages.values())
    assert len(made.get(f"root/{root.version:020d}")) <= ROOT_BYTES


def test_all_refs_are_there_after_reopening(made: MemoryStorage) -> None:
    repository = zm.open(made)
    tags, branches = repository.list_tags(), repository.list_branches()
    assert tags.keys() == set(names("tag", TAGS))
    assert branches.keys() == {*names("branch", BRANCHES), "main"}
    assert len(set(tags.values())) == 1


def test_a_commit_costs_what_it_costs_without_refs(made: MemoryStorage) -> None:
    costs = []
    small = MemoryStorage()
    repository = zm.create(small)
    for i in range(LOG_TAIL):
        put(repository, "main", "note", bytes([i]))
    big = MemoryStorage()
    for info in made.list():
        big.put(info.key, made.get(info.key))
    for storage in (small, big):
        counting = CountingStorage(LatencyStorage(storage, latency_s=0))
        session = zm.open(counting).writable_session("main")
        session.store.set_sync("note", cpu.Buffer.from_bytes(b"again"))
        counting.reset()
        session.commit("again")
        assert counting.rounds() == 2
        assert not any(record.key.startswith("pages/") for record in counting.log)
        costs.append((counting.requests, counting.bytes_written))
    assert costs[0][0] == costs[1][0]
    assert costs[1][1] <= costs[0][1] + 3 * ROOT_BYTES  # current and two archives


def test_opening_main_costs_one_request(made: MemoryStorage) -> None:
    counting = CountingStorage(made)
    zm.open(counting, runtime=stopped_clock()).readonly_session("main")
    assert [record.key for record in counting.log] == ["current"]


@pytest.mark.parametrize(
    "ref", ["refs/tags/" + name_of("tag", 4711), "refs/heads/" + name_of("branch", 1234)]
)
def test_a_ref_in_a_page_costs_a_round_more(made: MemoryStorage, ref: str) -> None:
    counting = CountingStorage(LatencyStorage(made, latency_s=0))
    session = zm.open(counting, runtime=stopped_clock()).readonly_session(ref)
    np.testing.assert_array_equal(zarr.open_array(session.store, path="x")[:], np.arange(5.0))
    assert [record.key.split("/")[0] for record in counting.log] == [
        "current",
        "pages",
        "snapshots",
    ]
    assert counting.bytes_read <= 96 * 1024


def test_a_new_tag_writes_one_page_at_most(storage: MemoryStorage) -> None:
    counting = CountingStorage(storage)
    repository = zm.open(counting)
    written = []
    for i in range(250):
        counting.reset()
        repository.create_tag(name_of("tag", i * 37) + "-new")
        pages = [r for r in counting.log if r.op == "create" and r.key.startswith("pages/")]
        assert len(pages) <= 3  # one, or two halves, and perhaps two neighbours made one
        written.append(sum(record.nbytes for record in pages))
        assert len(storage.get("current")) <= ROOT_BYTES + 16 * 1024
    assert any(written)
    assert sum(written) / len(written) <= 32 * 1024
    reopened = zm.open(storage)
    assert len(reopened.list_tags()) == TAGS + 250
    assert len(root_of(storage).bare().encode()) <= ROOT_BYTES


def test_a_deleted_tag_is_never_used_again_wherever_it_lies(storage: MemoryStorage) -> None:
    repository = zm.open(storage)
    gone = [name_of("tag", i * 41) for i in range(200)]
    for name in gone:
        repository.delete_tag(name)
    root = root_of(storage)
    assert len(root.deleted_tags) < len(gone)  # some are in pages by now
    reopened = zm.open(storage)
    assert len(reopened.list_tags()) == TAGS - len(gone)
    for name in gone:
        with pytest.raises(AlreadyExistsError, match="never used again"):
            reopened.create_tag(name)
        with pytest.raises(NotFoundError):
            reopened.readonly_session(name)
        with pytest.raises(NotFoundError):
            reopened.delete_tag(name)
    with pytest.raises(AlreadyExistsError, match="tags do not move"):
        reopened.create_tag(name_of("tag", 1))


@pytest.mark.slow
def test_branches_in_pages_take_commits(storage: MemoryStorage) -> None:
    repository = zm.open(storage)
    heads = {}
    for i in range(120):
        name = name_of("branch", i * 41)
        heads[name] = put(repository, name, "note", b"of %d" % i)
    heads[name_of("branch", 0)] = put(repository, name_of("branch", 0), "note", b"again")
    reopened = zm.open(storage)
    found = reopened.list_branches()
    assert {name: found[name] for name in heads} == heads
    assert len(found) == BRANCHES + 1
    assert len(root_of(storage).bare().encode()) <= ROOT_BYTES


def test_branches_in_pages_are_deleted_and_made_again(storage: MemoryStorage) -> None:
    repository = zm.open(storage)
    gone = [name_of("branch", i * 41) for i in range(100)]
    head = snapshot_id_of(root_of(storage).branches["main"].head.key)
    for name in gone:
        repository.delete_branch(name)
        with pytest.raises(NotFoundError):
            repository.readonly_session(name)
    with pytest.raises(NotFoundError):
        repository.delete_branch(gone[0])
    repository.create_branch(gone[0], head)
    with pytest.raises(AlreadyExistsError):
        repository.create_branch(name_of("branch", 1))
    repository.reset_branch(name_of("branch", 1), head)
    reopened = zm.open(storage)
    found = reopened.list_branches()
    assert len(found) == BRANCHES + 1 - 99
    assert found[gone[0]] == found[name_of("branch", 1)] == head
    assert found[name_of("branch", 2)] != head


def test_a_snapshot_that_only_a_tag_in_a_page_holds_is_in_history(storage: MemoryStorage) -> None:
    repository = zm.open(storage)
    lost = put(repository, "main", "note", b"held by a tag")
    repository.create_tag(name_of("tag", 3) + "-held")
    parent = next(iter(repository.ancestry(lost))).parent_id
    repository.reset_branch("main", parent, force=True)
    for i in range(150):
        repository.create_tag(f"{name_of('tag', 3)}-{sha256(bytes([i])).hexdigest()}")
    assert name_of("tag", 3) + "-held" not in root_of(storage).tags
    repository.create_branch("found-again", lost)
    assert repository.list_branches()["found-again"] == lost


def test_archives_are_the_same_whoever_writes_them(storage: MemoryStorage) -> None:
    """A branch that was brought back from its page does not get into an archive of before."""
    before = root_of(storage)
    storage.delete_many([f"root/{before.version:020d}"])
    put(zm.open(storage), name_of("branch", 777), "note", b"x")
    assert storage.get(f"root/{before.version:020d}") == before.bare().encode()


def test_long_names_make_the_log_shorter_and_not_the_root_larger() -> None:
    storage = MemoryStorage()
    repository = zm.create(storage)
    rng = np.random.default_rng(0)
    for _ in range(40):
        repository.create_tag(rng.bytes(127).hex())
        assert len(root_of(storage).bare().encode()) <= ROOT_BYTES
    assert 8 <= len(root_of(storage).log) < LOG_TAIL
    assert len(zm.open(storage).list_tags()) == 40


# --- leases ------------------------------------------------------------------------------------

LEASES = 3_000


def lease(i: int, session: str | None = None) -> Lease:
    random = sha256(b"%d" % i).digest()
    session = session or new_session_id(1 + i % 7, random[:12])
    return Lease(random[:16], session, f"{session}-0", 10**12 + i, f"host-{i}.example.org")


def fenced(root: Root, leases: tuple[Lease, ...], **changes: Any) -> dict[str, Any]:
    """Nobody who began before now may commit without a lease."""
    return {"leases": leases, "fence": root.version + 1, **changes}


@pytest.fixture(scope="module")
def leased() -> MemoryStorage:
    storage = MemoryStorage()
    zm.create(storage)
    leases = tuple(lease(i) for i in range(LEASES))
    swap(storage, {"leases": leases})
    return storage


def test_leases_leave_the_root_like_refs(leased: MemoryStorage) -> None:
    root = root_of(leased)
    assert len(root.bare().encode()) <= ROOT_BYTES
    assert 0 < len(root.pages["leases"]) <= PAGES_MOST + 1
    whole = Roots(leased, SYSTEM).whole(root)
    assert {one.name: one for one in whole.leases} == {
        lease(i).name: lease(i) for i in range(LEASES)
    }


def test_a_commit_costs_what_it_costs_without_leases(leased: MemoryStorage) -> None:
    counting = CountingStorage(LatencyStorage(copy_of(leased), latency_s=0))
    session = zm.open(counting).writable_session("main")
    session.store.set_sync("note", cpu.Buffer.from_bytes(b"x"))
    counting.reset()
    session.commit("x")
    assert counting.rounds() == 2
    assert not any(record.key.startswith("pages/") for record in counting.log)


def test_a_lease_in_a_page_lets_its_session_commit(leased: MemoryStorage) -> None:
    storage = copy_of(leased)
    counting = CountingStorage(storage)
    mine = zm.open(counting).writable_session("main")
    others = zm.open(storage).writable_session("main")
    for session in (mine, others):
        session.store.set_sync("note", cpu.Buffer.from_bytes(b"x"))
    at = root_of(storage)
    own = lease(-1, workspace_of(mine.store).keys.session_id)
    swap(storage, fenced(at, (*Roots(storage, SYSTEM).whole(at).leases, own)))
    assert own not in root_of(storage).leases
    with pytest.raises(FencedError):
        others.commit("without a lease")
    counting.reset()
    mine.commit("with a lease")
    assert sum(record.key.startswith("pages/") for record in counting.log) == 1


def test_a_lease_given_up_is_gone_wherever_it_lies(leased: MemoryStorage) -> None:
    storage = copy_of(leased)
    roots = Roots(storage, SYSTEM)
    session = zm.open(storage).writable_session("main")
    session.store.set_sync("note", cpu.Buffer.from_bytes(b"x"))
    own = lease(-1, workspace_of(session.store).keys.session_id)
    swap(storage, {"leases": (*roots.whole(root_of(storage)).leases, own)})
    gone = (own.name, *(lease(i).name for i in range(0, LEASES, 3)))
    at = root_of(storage)
    assert roots.with_leases(at, own.session).holds_lease(own.session)
    kept = tuple(one for one in at.leases if one.name not in gone)
    swap(storage, fenced(at, kept, deleted_leases=gone))
    root = root_of(storage)
    assert len(root.deleted_leases) < len(gone)  # their pages were written without them
    assert len(root.bare().encode()) <= ROOT_BYTES
    left = {one.name for one in roots.whole(root).leases}
    assert left == {lease(i).name for i in range(LEASES) if i % 3}
    with pytest.raises(FencedError):
        session.commit("too late")


def test_a_renewed_lease_counts_before_the_one_in_its_page(leased: MemoryStorage) -> None:
    storage = copy_of(leased)
    renewed = replace(lease(17), expires_ms=5)
    swap(storage, {"leases": (*root_of(storage).leases, renewed)})
    whole = Roots(storage, SYSTEM).whole(root_of(storage))
    assert [one for one in whole.leases if one.name == renewed.name] == [renewed]
    more = tuple(lease(LEASES + i) for i in range(2_000))
    swap(storage, {"leases": (*root_of(storage).leases, *more)})
    assert renewed not in root_of(storage).leases
    whole = Roots(storage, SYSTEM).whole(root_of(storage))
    assert [one for one in whole.leases if one.name == renewed.name] == [renewed]
    assert len(whole.leases) == LEASES + len(more)


def test_a_million_operations_leave_a_log_of_as_many_bytes(made: MemoryStorage) -> None:
    """The tail has 32 of them, and the archives the rest."""
    root = root_of(made)
    for version in range(10**6, 10**6 + 100):
        entry = LogEntry(version, version, "commit append", "main", "s" * 38, b"o" * 16)
        root = root.with_log(entry)
    assert [entry.version for entry in root.log] == [*range(10**6 + 68, 10**6 + 100)]
    assert len(root.bare().encode()) <= ROOT_BYTES
