"""A base, and deltas on top of it: what many commits write, keep and read as.

Each commit writes its own changes only; the base is linked by all snapshots until a compaction
makes a new one; the changes of any range of commits can be read; and what is live of a hundred
commits is no more than the base and what they changed.
"""

from __future__ import annotations

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from zarr_manifests import Repository, Session
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of
from zarr_manifests.testing import CountingStorage

GRID = 20_000


def created(refs: int = 0, **compaction: object) -> Repository:
    """An array of 20,000 chunks, of which so many are there, in the base."""
    repository = zm.create(MemoryStorage(), {"compaction": compaction})
    session = repository.writable_session()
    zarr.create_array(session.store, name="a", shape=(GRID,), chunks=(1,), dtype="i1")
    if refs:
        point(session, np.arange(refs), 0)
    session.commit("array")
    repository.compact(mode="full")
    return repository


def point(session: Session, chunks: np.ndarray, mark: int) -> None:
    """Chunk i of a commit lies at offset i of a file, and has `mark + 1` bytes."""
    count = len(chunks)
    session.store.set_virtual_refs(
        "a",
        chunks.reshape(-1, 1),
        ["file:///archive/a.bin"],
        np.zeros(count, np.int64),
        chunks,
        np.full(count, mark + 1),
    )


def commit(repository: Repository, chunks: np.ndarray, mark: int) -> str:
    session = repository.writable_session()
    point(session, chunks, mark)
    return session.commit(f"commit {mark}")


def marks(repository: Repository, snapshot_id: str | None = None) -> dict[int, int]:
    """The mark of each chunk that is there."""
    fresh = zm.open(repository.storage)
    refs = fresh.readonly_session(snapshot_id).store.get_virtual_refs("a")
    assert refs.offset.tolist() == refs.index[:, 0].tolist()
    return dict(zip(refs.index[:, 0].tolist(), (refs.length - 1).tolist(), strict=True))


def view_of(repository: Repository, snapshot_id: str | None = None) -> SnapshotView:
    session = zm.open(repository.storage).readonly_session(snapshot_id)
    return contents_of(session.store).view


def live_refs(view: SnapshotView) -> tuple[int, int]:
    """Chunk refs in the base, and in the deltas and runs on top of it."""
    base = sum(part.count for ref in view.manifests for part in ref.parts)
    return base, sum(part.count for entry in view.snapshot.deltas for part in entry.parts())


def test_twenty_commits_leave_the_base_alone_and_are_all_read() -> None:
    repository = created(1_000)
    base = view_of(repository).snapshot.base
    assert base is not None
    expected = dict.fromkeys(range(1_000), 0)
    written = []
    for n in range(1, 21):
        counting = CountingStorage(repository.storage)
        commit(zm.open(counting), np.arange(990 + 10 * n, 1_000 + 10 * n), n)
        created_keys = [r.key for r in counting.log if r.op == "create"]
        assert not any(key.startswith(("nodes/", "manifests/")) for key in created_keys)
        written.append(sum(r.nbytes for r in counting.log if r.key.startswith("deltas/")))
        expected |= dict.fromkeys(range(990 + 10 * n, 1_000 + 10 * n), n)
        view = view_of(repository)
        assert view.snapshot.base is not None
        assert view.snapshot.base.key == base.key
        assert len(view.snapshot.deltas) == n
        assert live_refs(view) == (1_000, 10 * n)
        assert marks(repository) == expected, "every delta since the base, not the last one alone"
    assert max(written) <= 1.2 * min(written), "the twentieth costs what the first did"


@pytest.mark.slow
def test_sixty_commits_are_compacted_on_the_way_and_lose_nothing() -> None:
    repository = created()
    expected: dict[int, int] = {}
    states = {}
    for n in range(60):
        chunks = np.arange(7 * n, 7 * n + 20)  # some of the commit before are written again
        states[commit(repository, chunks, n)] = expected = expected | dict.fromkeys(
            chunks.tolist(), n
        )
    kinds = [info.kind for info in repository.ancestry()]
    assert kinds.count("rewrite") == 2, "by hand at first, and once by itself"
    assert len(view_of(repository).snapshot.deltas) < 20
    assert marks(repository) == expected
    for snapshot_id, state in states.items():
        assert marks(repository, snapshot_id) == state


@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize("mode", ["log", "net"])
def test_the_changes_from_the_third_commit_to_the_fifth(compacted: bool, mode: str) -> None:
    repository = created(100)
    ids = []
    for n in range(1, 6):
        ids.append(commit(repository, np.arange(100 * n, 100 * n + 5 * n), n))
        if compacted:
            repository.compact(mode="full")
    found = list(repository.changes(ids[2], ids[4], mode))  # type: ignore[arg-type]
    assert {(change.path, str(change.operation)) for change in found} == {("/a", "overwrite")}
    chunks = [c[0] for change in found for c in change.coordinates.tolist()]
    assert sorted(chunks) == [*range(400, 420), *range(500, 525)]
    if mode == "log":
        assert [change.snapshot_id for change in found] == ids[3:]
        assert [len(change.coordinates) for change in found] == [20, 25]


def test_base_and_delta_are_apart() -> None:
    """The first snapshots have no base; what comes after one links it, and adds its own delta."""
    repository = zm.create(MemoryStorage(), {"compaction": {"mode": "manual"}})
    session = repository.writable_session()
    zarr.create_array(session.store, name="a", shape=(GRID,), chunks=(1,), dtype="i1")
    point(session, np.arange(10), 0)
    first = session.commit("first")
    assert view_of(repository, first).snapshot.base is None
    assert live_refs(view_of(repository, first)) == (0, 10)
    compacted = repository.compact(mode="full").snapshot_id
    assert live_refs(view_of(repository, compacted)) == (10, 0)
    ids = [commit(repository, np.arange(5, 8), n) for n in (1, 2)]
    views = [view_of(repository, snapshot_id) for snapshot_id in (compacted, *ids)]
    assert len({view.snapshot.base.key for view in views if view.snapshot.base}) == 1
    assert [live_refs(view) for view in views] == [(10, 0), (10, 3), (10, 6)]
    logs = [view.snapshot.log.key for view in views]
    assert len(set(logs)) == 3
    assert [entry.log.key for entry in views[2].snapshot.deltas] == logs[1:]


def test_a_hundred_commits_on_ten_thousand_refs_keep_no_more_than_twice_as_many() -> None:
    repository = created(10_000)
    expected = dict.fromkeys(range(10_000), 0)
    for n in range(1, 101):
        chunks = np.arange(9_900 + 100 * n, 10_000 + 100 * n) % GRID
        commit(repository, chunks, n)
        expected |= dict.fromkeys(chunks.tolist(), n)
        assert sum(live_refs(view_of(repository))) <= 20_000
    assert marks(repository) == expected
    assert len(expected) == 20_000
    repository.compact(mode="full")
    assert live_refs(view_of(repository)) == (20_000, 0)
