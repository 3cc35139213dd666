"""Usage: what snapshots say of how much there is, without a manifest, and never a wrong number.

What there really is is counted from the manifests of the snapshot and of its parent. A number that
is called exact must be that; any other must not be less.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import event, given, settings
from hypothesis import strategies as st
from zarr.core.buffer import cpu

import zarr_manifests as zm
from effort import examples
from zarr_manifests import Session
from zarr_manifests.engine.commit import landing as commit
from zarr_manifests.engine.snapshot import totals as totals_module
from zarr_manifests.errors import ConflictError, InvalidArgumentError, NotFoundError
from zarr_manifests.keys import ArrayMeta
from zarr_manifests.reports import Amount, Usage
from zarr_manifests.repository import build_index
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of, workspace_of
from zarr_manifests.testing import CountingStorage

CONFIG = {"compaction": {"mode": "manual"}, "inline-chunk-bytes": 16}
SHAPES = {"line": (12,), "plane": (4, 5), "group/line": (9,), "x": (6,), "point": ()}


def put(session: Session, key: str, nbytes: int = 8) -> None:
    session.store.set_sync(key, cpu.Buffer.from_bytes(bytes(range(nbytes))))


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
        put(session, f"{path}/c/{at}", nbytes)


def exactly(refs: int, nbytes: int) -> Amount:
    return Amount(refs, nbytes, chunks_exact=True, nbytes_exact=True)


def at_most(refs: int, nbytes: int) -> Amount:
    return Amount(refs, nbytes, chunks_exact=False, nbytes_exact=False)


def sure(found: Amount, refs: int, nbytes: int) -> None:
    """What is exact is right, and what is not is not too small."""
    assert found.chunks == refs if found.chunks_exact else found.chunks >= refs
    if found.nbytes_exact:
        assert found.nbytes == nbytes
    else:
        assert found.nbytes is None or found.nbytes >= nbytes


def check(storage: MemoryStorage, snapshot_id: str) -> Usage:
    """The totals of a snapshot, compared with what is in its manifests and in its parent's."""
    repository = zm.open(storage)
    (info, *older) = repository.ancestry(snapshot_id)
    totals = repository.du(snapshot_id, estimate=True)
    now = {u.path: u for u in repository.du(snapshot_id).arrays}
    before = {}
    if older:
        before = {u.path: u for u in repository.du(info.parent_id).arrays}
    assert [array.path for array in totals.arrays] == sorted(now)
    nodes = contents_of(repository.readonly_session(snapshot_id).store).nodes()
    was = repository.readonly_session(info.parent_id or snapshot_id)
    ids = {f"/{n.path}".replace("//", "/"): n.node_id for n in nodes.values()}
    paths = {
        n.node_id: f"/{n.path}".replace("//", "/") for n in contents_of(was.store).nodes().values()
    }
    for array in totals.arrays:
        usage, old = now[array.path], before.get(paths.get(ids[array.path], ""))
        chunks, nbytes = (old.chunks, old.nbytes) if old else (0, 0)
        sure(array.total, usage.chunks, usage.nbytes)
        sure(array.growth, usage.chunks - chunks, usage.nbytes - nbytes)
    chunks, nbytes = (sum(getattr(u, name) for u in now.values()) for name in ("chunks", "nbytes"))
    sure(totals.total, chunks, nbytes)
    gone = (sum(getattr(u, name) for u in before.values()) for name in ("chunks", "nbytes"))
    sure(totals.growth, *(a - b for a, b in zip((chunks, nbytes), gone, strict=True)))
    if older:
        check_sums(info.totals, totals)
        arrays = [n for n in nodes.values() if n.array is not None]
        assert info.totals["arrays"] == len(arrays)
    return totals


def check_sums(sums: Any, totals: Usage) -> None:
    """What the snapshot carries says the same of all together."""
    total = totals.total
    assert sums.get("chunks") == (total.chunks if total.chunks_exact else None)
    assert sums.get("chunks-at-most") == (None if total.chunks_exact else total.chunks)
    assert sums.get("chunk-bytes") == (total.nbytes if total.nbytes_exact else None)
    assert sums.get("chunk-bytes-at-most") == (None if total.nbytes_exact else total.nbytes)


# --- anything, in any order ------------------------------------------------------------------


class World:
    """A repository, in which each step is a commit or a compaction by a fresh or a warm process."""

    def __init__(self) -> None:
        self.storage = MemoryStorage()
        self.warm = zm.create(self.storage, CONFIG)
        self.repository = self.warm
        self.branch = "main"

    def head(self) -> str:
        return self.repository.list_branches()[self.branch]

    def session(self) -> Session:
        return self.repository.writable_session(self.branch)

    def change(self, session: Session, draw: Callable[[Any], Any]) -> None:
        path = draw(st.sampled_from(sorted(SHAPES)))
        doing = draw(
            st.sampled_from(["write"] * 4 + ["erase", "resize", "delete", "make", "shift"])
        )
        try:
            array = zarr.open_array(session.store, path=path, mode="r+")
        except FileNotFoundError:
            make(session, path, SHAPES[path])
            array = zarr.open_array(session.store, path=path, mode="r+")
        if doing in ("write", "erase"):
            region = [draw(st.tuples(*[st.integers(0, n)] * 2).map(sorted)) for n in array.shape]
            keys = [
                "/".join([path, "c", *map(str, coords)])
                for coords in np.ndindex(tuple(hi - lo for lo, hi in region))
                for coords in [tuple(c + lo for c, (lo, _) in zip(coords, region, strict=True))]
            ]
            nbytes = draw(st.sampled_from([3, 40]))
            for key in keys:
                put(session, key, nbytes) if doing == "write" else session.store.delete_sync(key)
        elif doing == "resize" and array.shape:
            array.resize(tuple(draw(st.integers(0, n)) for n in SHAPES[path]))
        elif doing == "delete":
            workspace_of(session.store).delete_below(f"{path}/")
        elif doing == "make":
            make(session, path, SHAPES[path])
        elif doing == "shift" and array.shape:
            session.shift_array(path, [draw(st.integers(-2, 2)) for _ in array.shape])

    def step(self, draw: Callable[[Any], Any]) -> None:
        self.repository = self.warm if draw(st.booleans()) else zm.open(self.storage)
        doing = draw(
            st.sampled_from(["commit"] * 6 + ["compact"] * 3 + ["index", "revert", "pick", "amend"])
        )
        if doing == "compact":
            mode = draw(st.sampled_from(["minor", "minor", "major", "full"]))
            ratio = {"size-ratio": draw(st.sampled_from([0.0, 0.3, 1.0])), "fan-in": 2}
            sets = [{"default": {"max-manifest-size": draw(st.sampled_from([4, 1000]))}}]
            config = {"compaction": ratio, "chunk-manifests": {"sets": sets}}
            zm.open(self.storage, config).compact(self.branch, mode)
        elif doing == "index":
            build_index(self.repository, self.branch)
        elif doing in ("revert", "pick"):
            self.redo(draw, doing)
        else:
            session = self.session()
            for _ in range(draw(st.integers(1, 3))):
                self.change(session, draw)
            if session.status():
                try:
                    session.amend("amended") if doing == "amend" else session.commit("changes")
                except InvalidArgumentError:
                    session.commit("changes")  # a rewrite cannot be amended

    def redo(self, draw: Callable[[Any], Any], doing: str) -> None:
        """Undo a commit of the history, or do it again on another branch, and go on there."""
        done = [i for i in self.repository.ancestry(self.branch) if i.kind != "rewrite"][:-1]
        if not done:
            return
        one = draw(st.sampled_from(done)).snapshot_id
        try:
            if doing == "revert":
                self.repository.revert(one, self.branch)
                return
            name = f"b{len(self.repository.list_branches())}"
            self.repository.create_branch(name, draw(st.sampled_from(done)).snapshot_id)
            self.branch = name
            self.repository.cherry_pick(one, name)
        except (ConflictError, InvalidArgumentError):
            event("nothing to do again")


@settings(max_examples=examples(60))
@given(st.data())
def test_what_is_called_exact_is(data: st.DataObject) -> None:
    world, exact = World(), 0
    for _ in range(data.draw(st.integers(1, 12))):
        world.step(data.draw)
        exact += check(world.storage, world.head()).exact
    event(f"exact: {exact > 0}")
    zm.open(world.storage).compact(world.branch, "full")
    assert check(world.storage, world.head()).exact


def test_what_comes_back_after_a_run_was_merged_is_counted_as_new() -> None:
    storage = MemoryStorage()
    repository = zm.create(storage, {**CONFIG, "compaction": {"fan-in": 2}})
    session = repository.writable_session()
    make(session, "line", (12,))
    fill(session, "line", 0)
    session.commit("fill")
    repository.compact(mode="full")
    session = repository.writable_session()
    workspace_of(session.store).delete_below("line/")
    gone = session.commit("delete")
    make(session, "plane", (2, 2))
    session.commit("another")
    assert repository.compact(mode="minor").refs_merged == 0
    totals = check(storage, repository.revert(gone, "main"))
    assert totals["line"].total == totals["line"].growth == exactly(1, 8)


# --- what is known for nothing ---------------------------------------------------------------


@pytest.fixture
def storage() -> MemoryStorage:
    """A line of twelve of which the first eight are there, in a base; and a full plane."""
    storage = MemoryStorage()
    repository = zm.create(storage, CONFIG)
    session = repository.writable_session()
    make(session, "line", (12,))
    fill(session, "line", *range(8))
    make(session, "plane", (2, 2))
    for i, j in np.ndindex(2, 2):
        put(session, f"plane/c/{i}/{j}")
    session.commit("fill")
    repository.compact(mode="full")
    return storage


def cold(storage: MemoryStorage) -> Session:
    """As in a process that has read nothing yet."""
    return zm.open(storage).writable_session()


def totals_after(storage: MemoryStorage, session: Session) -> Usage:
    return check(storage, session.commit("change"))


def test_what_was_made_and_appended_is_known(storage: MemoryStorage) -> None:
    session = cold(storage)
    fill(session, "line", 8, 9)
    make(session, "other", (5,))
    fill(session, "other", 0, 3, nbytes=40)
    totals = totals_after(storage, session)
    assert totals["line"].total == exactly(10, 80)
    assert totals["/line"].growth == exactly(2, 16)
    assert totals["other"].total == totals["other"].growth == exactly(2, 80)
    assert totals["plane"].total == exactly(4, 32)
    assert totals["plane"].growth == exactly(0, 0)
    assert totals.total == exactly(16, 192)
    assert totals.growth == exactly(4, 96)
    with pytest.raises(NotFoundError, match=r"there is no array '/nowhere' in .*; there are: /"):
        totals["nowhere"]


def test_an_overwrite_is_a_bound_until_a_compaction(storage: MemoryStorage) -> None:
    session = cold(storage)
    fill(session, "line", 0, 5, nbytes=40)
    totals = totals_after(storage, session)
    assert totals["line"].total == at_most(10, 144)
    assert totals["line"].growth == at_most(2, 80)
    assert totals["plane"].total.exact
    assert not totals.exact
    session = cold(storage)
    fill(session, "line", 11)
    totals = totals_after(storage, session)
    assert totals["line"].growth == exactly(1, 8)
    assert totals["line"].total == at_most(11, 152)
    zm.open(storage).compact(mode="full")
    totals = check(storage, zm.open(storage).list_branches()["main"])
    assert totals["line"].total == exactly(9, 136)
    assert totals.growth == exactly(0, 0)


def test_an_overwrite_is_known_where_its_manifest_is_at_hand(storage: MemoryStorage) -> None:
    session = cold(storage)
    assert session.store.get_sync("line/c/3") is not None
    fill(session, "line", 0, 5, nbytes=40)
    session.store.delete_sync("line/c/7")
    assert totals_after(storage, session)["line"].total == exactly(7, 120)


def test_overwriting_a_full_array_changes_no_number_of_chunks(storage: MemoryStorage) -> None:
    session = cold(storage)
    put(session, "plane/c/1/0", 40)
    found = totals_after(storage, session)["plane"]
    assert found.total == Amount(4, 72, chunks_exact=True, nbytes_exact=False)
    assert found.growth == Amount(0, 40, chunks_exact=True, nbytes_exact=False)


def test_there_are_no_more_than_the_grid_has(storage: MemoryStorage) -> None:
    for _ in range(3):
        session = cold(storage)
        fill(session, "line", *range(12))
        totals = totals_after(storage, session)
    assert totals["line"].total == at_most(12, 352)


@pytest.mark.parametrize(("shape", "total"), [(10, exactly(8, 64)), (0, exactly(0, 0))])
def test_what_is_cut_off_wholly_or_not_at_all_is_known(
    storage: MemoryStorage, shape: int, total: Amount
) -> None:
    session = cold(storage)
    zarr.open_array(session.store, path="line").resize((shape,))
    assert totals_after(storage, session)["line"].total == total


def test_what_is_cut_off_in_part_is_a_bound(storage: MemoryStorage) -> None:
    session = cold(storage)
    document = session.store.get_sync("line/zarr.json")
    assert document is not None  # `resize` would look at each chunk that it cuts off
    cut = document.to_bytes().replace(b"12", b"5")
    session.store.set_sync("line/zarr.json", cpu.Buffer.from_bytes(cut))
    assert totals_after(storage, session)["line"].total == at_most(5, 64)
    session = cold(storage)
    zarr.open_array(session.store, path="line").resize((0,))
    assert totals_after(storage, session)["line"].total == exactly(0, 0)


def test_what_is_written_where_it_was_cut_off_is_new(storage: MemoryStorage) -> None:
    session = cold(storage)
    array = zarr.open_array(session.store, path="line")
    array.resize((5,))
    array.resize((12,))
    fill(session, "line", 1, 6, nbytes=40)
    assert totals_after(storage, session)["line"].total == exactly(6, 112)


def test_what_is_deleted_and_brought_back_is_known(storage: MemoryStorage) -> None:
    session = cold(storage)
    workspace_of(session.store).delete_below("line/")
    snapshot_id = session.commit("delete")
    totals = check(storage, snapshot_id)
    assert [array.path for array in totals.arrays] == ["/plane"]
    assert (totals.total, totals.growth) == (exactly(4, 32), exactly(-8, -64))
    back = check(storage, zm.open(storage).revert(snapshot_id))
    assert back["line"].total == back["line"].growth == exactly(8, 64)


def test_a_moved_array_has_what_it_had(storage: MemoryStorage) -> None:
    session = cold(storage)
    session.move("line", "moved")
    totals = totals_after(storage, session)
    assert totals["moved"].total == exactly(8, 64)
    assert totals["moved"].growth == exactly(0, 0)


def test_a_commit_on_top_of_another_counts_on_from_there(storage: MemoryStorage) -> None:
    first, second = cold(storage), cold(storage)
    fill(first, "line", 8)
    fill(second, "line", 9, 10)
    first.commit("first")
    totals = totals_after(storage, second)
    assert totals["line"].total == exactly(11, 88)
    assert totals["line"].growth == exactly(2, 16)


def test_what_is_merged_in_part_is_counted_once() -> None:
    storage = MemoryStorage()
    config = {
        "compaction": {"mode": "manual", "size-ratio": 0.3, "fan-in": 2},
        "chunk-manifests": {"sets": [{"default": {"arrays-per-manifest": 1}}]},
    }
    repository = zm.create(storage, config)
    session = repository.writable_session()
    make(session, "line", (12,))
    fill(session, "line", *range(8))
    make(session, "plane", (2, 2))
    for i, j in np.ndindex(2, 2):
        put(session, f"plane/c/{i}/{j}")
    session.commit("fill")
    repository.compact(mode="full")
    session = repository.writable_session()
    fill(session, "line", 8, 9, 10, 11)
    session.store.delete_sync("plane/c/0/0")
    session.commit("due for the line, not for the plane")
    assert repository.compact(mode="major").manifests_written == 1
    session = repository.writable_session()
    (left,) = contents_of(session.store).view.snapshot.deltas
    assert left.last == contents_of(session.store).view.base_sequence
    totals = check(storage, session.snapshot_id)
    assert (totals["line"].total, totals["plane"].total) == (exactly(12, 96), exactly(3, 24))
    make(session, "other", (5,))
    fill(session, "other", *range(5))
    session.commit("others")
    repository.compact(mode="minor")
    view = contents_of(repository.readonly_session().store).view
    assert [(entry.first, entry.last) for entry in view.snapshot.deltas] == [(2, 3)]
    totals = check(storage, view.snapshot_id)
    assert (totals["line"].total, totals["plane"].total) == (exactly(12, 96), exactly(3, 24))
    assert totals["other"].total == exactly(5, 40)


@pytest.mark.parametrize("chunks", [1, 3_000])
def test_what_a_policy_leaves_out_is_not_counted(storage: MemoryStorage, chunks: int) -> None:
    first, second = cold(storage), cold(storage)
    make(second, "other", (chunks,))
    second.commit("make another")
    first, second = cold(storage), cold(storage)
    fill(first, "line", 8, 9)
    fill(second, "line", 9, 10, nbytes=40)
    fill(first, "other", 0)
    fill(second, "other", *range(chunks), nbytes=40)
    first.commit("first")
    totals = check(storage, second.commit("second", rebase="theirs"))
    assert totals["line"].total == exactly(11, 120)
    assert totals["line"].growth == exactly(1, 40)
    assert totals["other"].total == exactly(chunks, 40 * chunks - 32)


# --- what it costs ---------------------------------------------------------------------------


def test_no_manifest_is_read_for_totals(storage: MemoryStorage) -> None:
    session = cold(storage)
    fill(session, "line", 0)
    session.commit("overwrite")
    counting = CountingStorage(storage)
    repository = zm.open(counting)
    totals = repository.du(estimate=True)
    assert totals["line"].total.chunks == 9
    assert not [r.key for r in counting.log if r.key.startswith(("manifests/", "chunks/"))]
    before = len(counting.log)
    assert repository.du(totals.snapshot_id, estimate=True) == totals
    assert not [r for r in counting.log[before:] if r.key.startswith("manifests/")]


def test_counting_reads_nothing(storage: MemoryStorage) -> None:
    counting = CountingStorage(storage)
    session = zm.open(counting).writable_session()
    fill(session, "line", 0, 5, 9)
    zarr.open_array(session.store, path="plane").resize((1, 2))
    before = len(counting.log)
    session.commit("overwrite")
    read = [r.key for r in counting.log[before:] if r.op.startswith("get")]
    assert not [key for key in read if key.startswith(("manifests/", "deltas/", "nodes/"))]


@pytest.mark.slow
def test_a_commit_counts_what_it_touches_only() -> None:
    """Beside a thousand arrays its snapshot is as small as beside one."""
    sizes = []
    for arrays in (1, 1000):
        storage = MemoryStorage()
        repository = zm.create(storage, CONFIG)
        session = repository.writable_session()
        for i in range(arrays):
            make(session, f"a{i:03}", (12,))
            fill(session, f"a{i:03}", 0)
        session.commit("arrays")
        repository.compact(mode="full")
        session = zm.open(storage).writable_session()
        fill(session, "a000", 1)
        snapshot_id = session.commit("one more")
        assert zm.open(storage).du(estimate=True).total.chunks == arrays + 1
        of, _, number = snapshot_id.rpartition("-")
        sizes.append(storage.head(f"snapshots/{of}/{number}").nbytes)
    assert sizes[1] - sizes[0] < 32


# --- others that come first ------------------------------------------------------------------


def test_what_there_is_is_found_out_once_for_a_commit(
    storage: MemoryStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = cold(storage)
    fill(session, "line", 3, 4)
    asked, true = [], totals_module.amounts_of

    def noted(view: Any, **given: Any) -> Any:
        asked.append(view)
        return true(view, **given)

    monkeypatch.setattr(totals_module, "amounts_of", noted)
    session.commit("two chunks")
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("theirs", "mine", "times"),
    [
        ([0, 1, 9], [5, 6], 1 + 1),  # near: in their box
        ([0, 1], [5, 6], 1),  # apart: what is counted before the turn is so on top of them, too
        ([5, 7], [5, 6], 1 + 1),  # the same bytes, which would be counted twice
    ],
)
def test_what_others_have_written_first_is_counted_once(
    monkeypatch: pytest.MonkeyPatch, theirs: list[int], mine: list[int], times: int
) -> None:
    storage = MemoryStorage()
    repository = zm.create(storage, CONFIG)
    with repository.transaction(message="array") as store:
        zarr.create_array(store, name="line", shape=(12,), chunks=(1,), dtype="u1")
    first, second = (repository.writable_session() for _ in range(2))
    fill(first, "line", *theirs)
    fill(second, "line", *mine)
    first.commit("first")
    counted, true = [], commit.effect_of

    def noted(*args: Any) -> Any:
        counted.append(args)
        return true(*args)

    monkeypatch.setattr(commit, "effect_of", noted)
    totals = check(storage, second.commit("second"))
    refs = len({*theirs, *mine})
    assert totals.total == exactly(refs, 8 * refs)
    assert len(counted) == times


def test_of_many_arrays_a_commit_asks_only_those_it_touches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what the base says of each is made out once, whoever commits on it."""
    storage = MemoryStorage()
    no_preload = {"preload": {"max-manifests": 0}}  # which looks at all arrays, beside the commit
    config = {"inline-chunk-bytes": 0, "chunk-manifests": no_preload}
    repository = zm.create(storage, config)
    session = repository.writable_session()
    for i in range(60):
        make(session, f"array{i}", (4,))
        fill(session, f"array{i}", 1)
    session.commit("make many")
    repository.compact(mode="full")
    asked: list[str] = []
    true = ArrayMeta.is_coordinate

    def is_coordinate(self: ArrayMeta, path: str) -> bool:
        asked.append(path)
        return true(self, path)

    bases: list[Any] = []
    amounts = totals_module.base_amounts

    def base_amounts(*args: Any) -> Any:
        bases.append(args)
        return amounts(*args)

    repository = zm.open(storage)
    session = repository.writable_session()
    monkeypatch.setattr(ArrayMeta, "is_coordinate", is_coordinate)
    monkeypatch.setattr(totals_module, "base_amounts", base_amounts)
    for i in range(3):
        session = repository.writable_session() if i == 2 else session
        fill(session, "array7", i + 1)
        session.commit("one chunk")
    assert set(asked) <= {"array7"}
    assert len(bases) == 1
    check_sums(contents_of(session.store).view.snapshot.sums, repository.du(estimate=True))


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (Amount(1, 1, chunks_exact=True, nbytes_exact=True), "1 chunk, 1 byte"),
        (Amount(2000, 1, chunks_exact=False, nbytes_exact=True), "at most 2,000 chunks, 1 byte"),
        (Amount(1, 20, chunks_exact=True, nbytes_exact=False), "1 chunk, at most 20 bytes"),
        (Amount(0, None, chunks_exact=True, nbytes_exact=True), "0 chunks"),
    ],
)
def test_an_amount_says_one_chunk_and_two_chunks(one: Amount, text: str) -> None:
    assert str(one) == text
