"""Usage: what snapshots say of how much there is, without a manifest, and never a wrong number.

What there really is is counted from the manifests of the snapshot and of its parent. A number that
is called exact must be that; any other must not be less.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from typing import Any

import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import zarr_manifests as zm
from effort import examples
from stored import put
from zarr_manifests import Repository, Session
from zarr_manifests.errors import ConflictError, InvalidArgumentError, NotFoundError
from zarr_manifests.reports import Amount, Usage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of

CONFIG = {"compaction": {"mode": "manual"}, "inline-chunk-bytes": 16}
SHAPES = {"line": (12,), "plane": (4, 5), "group/line": (9,), "x": (6,), "point": ()}


def make(session: Session, path: str, shape: tuple[int, ...]) -> None:
    zarr.create_array(
        session.store,
        name=path,
        shape=shape,
        chunks=(1,) * len(shape),
        dtype="u1",
        compressors=None,
        dimension_names=[path] if path == "x" else None,
        overwrite=True,
    )


def fill(session: Session, path: str, *coords: int, nbytes: int = 8) -> None:
    for at in coords:
        put(session.store, f"{path}/c/{at}", bytes(range(nbytes)))


def exactly(refs: int, nbytes: int) -> Amount:
    return Amount(refs, nbytes, chunks_exact=True, nbytes_exact=True)


def sure(found: Amount, refs: int, nbytes: int) -> None:
    """What is exact is right, and what is not is not too small."""
    assert found.chunks == refs if found.chunks_exact else found.chunks >= refs
    if found.nbytes_exact:
        assert found.nbytes == nbytes
    else:
        assert found.nbytes >= nbytes


def ids(repository: Repository, snapshot_id: str) -> dict[str, bytes]:
    """Paths of arrays; one that is made anew is another."""
    nodes = contents_of(repository.readonly_session(snapshot_id).store).nodes().values()
    return {f"/{node.path}": node.node_id for node in nodes if node.array is not None}


def check(storage: MemoryStorage, snapshot_id: str) -> Usage:
    """The totals of a snapshot, compared with what is in its manifests and in its parent's."""
    repository = zm.open(storage)
    info = next(repository.ancestry(snapshot_id))
    parent = info.parent_id
    totals = repository.du(snapshot_id, estimate=True)
    now = {u.path: u for u in repository.du(snapshot_id).arrays}
    assert [array.path for array in totals.arrays] == sorted(now)
    node_ids = ids(repository, snapshot_id)
    was = {} if parent is None else {i: path for path, i in ids(repository, parent).items()}
    before = {} if parent is None else {u.path: u for u in repository.du(parent).arrays}
    sums = [0, 0, sum(u.chunks for u in before.values()), sum(u.nbytes for u in before.values())]
    for array in totals.arrays:
        usage, old = now[array.path], before.get(was.get(node_ids[array.path], ""))
        chunks, nbytes = (old.chunks, old.nbytes) if old else (0, 0)
        sure(array.total, usage.chunks, usage.nbytes)
        sure(array.growth, usage.chunks - chunks, usage.nbytes - nbytes)
        sums[0] += usage.chunks
        sums[1] += usage.nbytes
    sure(totals.total, sums[0], sums[1])
    sure(totals.growth, sums[0] - sums[2], sums[1] - sums[3])
    if parent is not None:
        assert info.totals["arrays"] == len(node_ids)
        name = "chunks" if totals.total.chunks_exact else "chunks-at-most"
        assert info.totals[name] == totals.total.chunks
    return totals


def change(session: Session, draw: Callable[[Any], Any]) -> None:
    path = draw(st.sampled_from(sorted(SHAPES)))
    doing = draw(st.sampled_from(["write"] * 4 + ["erase", "resize", "delete", "make", "shift"]))
    try:
        array = zarr.open_array(session.store, path=path, mode="r+")
    except FileNotFoundError:
        make(session, path, SHAPES[path])
        array = zarr.open_array(session.store, path=path, mode="r+")
    if doing in ("write", "erase"):
        region = [draw(st.tuples(*[st.integers(0, n)] * 2).map(sorted)) for n in array.shape]
        data = bytes(draw(st.sampled_from([3, 40])))
        for coords in product(*[range(lo, hi) for lo, hi in region]):
            key = "/".join([path, "c", *map(str, coords)])
            put(session.store, key, data) if doing == "write" else session.store.delete_sync(key)
    elif doing == "delete":
        asyncio.run(session.store.delete_dir(path))
    elif doing == "make":
        make(session, path, SHAPES[path])
    elif doing == "resize" and array.shape:
        array.resize(tuple(draw(st.integers(0, n)) for n in SHAPES[path]))
    elif array.shape:
        session.shift_array(path, [draw(st.integers(-2, 2)) for _ in array.shape])


def step(repository: Repository, draw: Callable[[Any], Any]) -> None:
    """A commit, or a compaction."""
    doing = draw(st.sampled_from(["commit"] * 6 + ["compact"] * 3 + ["revert", "amend"]))
    if doing == "compact":
        ratio = {"size-ratio": draw(st.sampled_from([0.0, 0.3, 1.0])), "fan-in": 2}
        sets = [{"default": {"max-manifest-size": draw(st.sampled_from([4, 1000]))}}]
        config = {"compaction": ratio, "chunk-manifests": {"sets": sets}}
        mode = draw(st.sampled_from(["minor", "minor", "major", "full"]))
        zm.open(repository.storage, config).compact(mode=mode)
        return
    if doing == "revert":
        done = [info for info in repository.ancestry() if info.kind != "rewrite"][:-1]
        if done:
            with suppress(ConflictError, InvalidArgumentError):
                repository.revert(draw(st.sampled_from(done)).snapshot_id)
        return
    session = repository.writable_session()
    for _ in range(draw(st.integers(1, 3))):
        change(session, draw)
    if session.status():
        try:
            session.amend("amended") if doing == "amend" else session.commit("changes")
        except InvalidArgumentError:
            session.commit("changes")  # a rewrite cannot be amended


@settings(max_examples=examples(40))
@given(st.data())
def test_what_is_called_exact_is(data: st.DataObject) -> None:
    storage = MemoryStorage()
    warm = zm.create(storage, CONFIG)
    for _ in range(data.draw(st.integers(1, 8))):
        step(warm if data.draw(st.booleans()) else zm.open(storage), data.draw)
        check(storage, warm.list_branches()["main"])
    zm.open(storage).compact(mode="full")
    assert check(storage, warm.list_branches()["main"]).exact


def test_what_was_made_and_appended_is_known() -> None:
    """Beside a base of which nothing has been read."""
    storage = MemoryStorage()
    repository = zm.create(storage, CONFIG)
    session = repository.writable_session()
    make(session, "line", (12,))
    fill(session, "line", *range(8))
    session.commit("fill")
    repository.compact(mode="full")
    session = zm.open(storage).writable_session()
    fill(session, "line", 8, 9)
    make(session, "other", (5,))
    fill(session, "other", 0, 3, nbytes=40)
    totals = check(storage, session.commit("change"))
    assert totals["line"].total == exactly(10, 80)
    assert totals["/line"].growth == exactly(2, 16)
    assert totals["other"].total == totals["other"].growth == exactly(2, 80)
    assert totals.total == exactly(12, 160)
    assert totals.growth == exactly(4, 96)
    with pytest.raises(NotFoundError, match="/nowhere"):
        totals["nowhere"]


def test_sums_are_exact_once_what_was_not_counted_is_gone() -> None:
    """The snapshot's own as well, which are read in listings of history."""
    storage = MemoryStorage()
    few = {"sets": [{"default": {"max-manifest-size": 4}}]}
    repository = zm.create(storage, CONFIG | {"chunk-manifests": few})
    session = repository.writable_session()
    for path in ("line", "x"):
        make(session, path, SHAPES[path])
        fill(session, path, *range(5))
    session.commit("fill")
    repository.compact(mode="full")
    session = zm.open(storage).writable_session()
    fill(session, "line", 0)
    assert not check(storage, session.commit("once more")).total.chunks_exact
    session = repository.writable_session()
    asyncio.run(session.store.delete_dir("line"))
    assert check(storage, session.commit("delete")).total == exactly(5, 40)
    assert next(repository.ancestry()).totals["chunks"] == 5


@pytest.mark.parametrize("theirs", [(4,), (3,), (2, 5)])
def test_a_commit_on_top_of_others_counts_what_they_left(theirs: tuple[int, ...]) -> None:
    storage = MemoryStorage()
    repository = zm.create(storage, CONFIG)
    session = repository.writable_session()
    make(session, "line", (12,))
    session.commit("array")
    mine, other = (zm.open(storage).writable_session() for _ in range(2))
    fill(other, "line", *theirs, nbytes=40)
    check(storage, other.commit("theirs"))
    fill(mine, "line", 3)
    totals = check(storage, mine.commit("mine", rebase="ours"))
    left = set(theirs) - {3}
    assert totals.total == exactly(len(left) + 1, 40 * len(left) + 8)
    assert totals["line"].growth.chunks == 1 - (3 in theirs)
