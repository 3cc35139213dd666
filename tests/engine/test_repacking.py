"""Repacking: dead bytes go, no value changes, and nobody who writes meanwhile loses anything."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import zarr
from zarr.core.buffer import cpu

import zarr_manifests as zm
from zarr_manifests import Repository, Session
from zarr_manifests.engine.compact import repack_chunks as repacking
from zarr_manifests.error_cases import FencedError
from zarr_manifests.errors import (
    CorruptObjectError,
    InvalidArgumentError,
    ManifestsError,
    NotFoundError,
)
from zarr_manifests.format.chunk_table import NativeRef
from zarr_manifests.repository import build_index
from zarr_manifests.storage import Storage
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of, workspace_of
from zarr_manifests.testing import (
    CountingStorage,
    CrashDisk,
    FaultKind,
    FaultyStorage,
    SimulatedCrash,
    copy_of,
    in_order,
)

RUNTIME = in_order()
CHUNK = 100
CONFIG = {
    "inline-chunk-bytes": 8,
    "pack-bytes": 8 * CHUNK,
    "pack-chunk-bytes": 2 * CHUNK,
    "compaction": {"mode": "manual"},
}
ANY_AGE = timedelta(0)

type Contents = dict[str, bytes]


def chunk(number: int) -> bytes:
    return random.Random(number).randbytes(CHUNK)


def put(session: Session, key: str, value: bytes) -> None:
    session.store.set_sync(key, cpu.Buffer.from_bytes(value))


def contents(session: Session) -> Contents:
    found = {}
    for key in contents_of(session.store).keys_below(""):
        value = session.store.get_sync(key)
        assert value is not None
        found[key] = value.to_bytes()
    return found


def head(storage: Storage) -> Contents:
    return contents(zm.open(storage, runtime=RUNTIME).readonly_session())


def ref_of(repo: Repository, key: str) -> NativeRef:
    ref = contents_of(repo.readonly_session().store).find(key)
    assert isinstance(ref, NativeRef)
    return ref


def chunk_bytes(storage: Storage) -> int:
    return sum(info.nbytes for info in storage.list("chunks/"))


def filled(storage: Storage, *, compacted: bool = False) -> Repository:
    """Three packs of an array and one of entries, of which most chunks are dead."""
    repo = zm.create(storage, CONFIG, runtime=RUNTIME)
    session = repo.writable_session()
    for name in ("a", "b"):
        zarr.create_array(
            session.store, name=name, shape=(24 * CHUNK,), chunks=(CHUNK,), dtype="u1",
            compressors=None,
        )  # fmt: skip
    for i in range(24):
        put(session, f"a/c/{i}", chunk(i))
    for i in range(4):
        put(session, f"b/c/{i}", chunk(100 + i))
        put(session, f"note{i}", chunk(200 + i))
    session.commit("all")
    if compacted:
        repo.compact(mode="full")
    session = repo.writable_session()
    for i in range(24):
        if i % 8 > 1:  # two of each pack stay
            put(session, f"a/c/{i}", chunk(1000 + i))
    session.store.delete_sync("b/c/0")
    session.store.delete_sync("note0")
    put(session, "b/c/5", b"inline")
    put(session, "b/c/6", bytes(range(250)))  # an object of its own
    session.commit("most of a anew")
    return repo


def collected(repo: Repository) -> None:
    repo.expire_snapshots(keep_last=1)
    repo.garbage_collect(ANY_AGE)


@pytest.mark.parametrize("compacted", [False, True])
def test_dead_bytes_go_and_no_value_changes(*, compacted: bool) -> None:
    storage = MemoryStorage()
    repo = filled(storage, compacted=compacted)
    before = head(storage)
    alone = ref_of(repo, "b/c/6")
    collected(repo)
    assert chunk_bytes(storage) == 32 * CHUNK + 18 * CHUNK + 250  # all packs are needed
    report = repo.compact(mode="packs")
    # Three packs have two live chunks of eight; the fourth has six.
    assert (report.objects, report.packs, report.chunks) == (4 + 3 + 1, 3, 6)
    assert (report.packs_nbytes, report.chunks_nbytes) == (24 * CHUNK, 6 * CHUNK)
    assert (report.dead_nbytes, report.packs_written) == (18 * CHUNK, 1)
    assert report.chunks_overtaken == 0
    assert report.snapshot_id == repo.readonly_session().snapshot_id
    assert head(storage) == before
    assert ref_of(repo, "b/c/6") == alone
    collected(repo)
    assert chunk_bytes(storage) == 8 * CHUNK + 6 * CHUNK + 18 * CHUNK + 250
    assert head(storage) == before
    assert repo.verify().ok
    again = repo.compact(mode="packs")
    assert (again.packs, again.snapshot_id) == (0, None)
    everything = repo.compact(mode="packs", min_live=1.0)
    assert (everything.packs, everything.chunks) == (1, 6)  # the fourth
    collected(repo)
    live = sum(len(value) for key, value in before.items() if not key.endswith("json"))
    assert chunk_bytes(storage) == live - len(b"inline")
    assert head(storage) == before
    assert repo.verify().ok


def test_chunks_of_an_array_lie_one_after_another() -> None:
    storage = MemoryStorage()
    repo = filled(storage)
    repo.compact(mode="packs")
    moved = [ref_of(repo, f"a/c/{i}") for i in (0, 1, 8, 9, 16, 17)]
    assert {ref.key for ref in moved} == {moved[0].key}
    assert [ref.offset for ref in moved] == [i * CHUNK for i in range(6)]


def test_a_dry_run_says_the_same_and_writes_nothing() -> None:
    storage = MemoryStorage()
    repo = filled(storage)
    before = {info.key: storage.get(info.key) for info in storage.list()}
    told = repo.compact(mode="packs", dry_run=True)
    assert {info.key: storage.get(info.key) for info in storage.list()} == before
    done = repo.compact(mode="packs")
    assert told.dry_run
    assert told == replace(done, snapshot_id=None, packs_written=0, dry_run=True)


def test_nothing_else_is_changed() -> None:
    """History, totals and what readers of changes see."""
    repo = filled(MemoryStorage())
    old = repo.readonly_session().snapshot_id
    totals = repo.du(estimate=True)
    build_index(repo)
    stats = repo.du(path="a")
    report = repo.compact(mode="packs")
    kinds = [info.kind for info in repo.ancestry()]
    assert kinds[: len(kinds) - 3] == ["rewrite", "rewrite"]
    assert report.snapshot_id is not None
    assert list(repo.changes(old, report.snapshot_id)) == []
    assert repo.diff(old, report.snapshot_id).chunks == {}
    assert repo.du(estimate=True).total == totals.total
    assert totals.total.exact
    assert all(one.growth.chunks == one.growth.nbytes == 0 for one in repo.du(estimate=True).arrays)
    assert repo.du(path="a").chunks == stats.chunks
    assert repo.verify().ok


def test_what_is_not_merged_yet_is_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a crash between the two commits: the old packs stay, and that is all."""
    monkeypatch.setattr(repacking, "_merged", lambda *args: None)
    storage = MemoryStorage()
    repo = filled(storage, compacted=True)
    before, totals = head(storage), repo.du(estimate=True).total
    repo.compact(mode="packs")
    assert next(iter(repo.ancestry())).message == "repack chunks"
    assert head(storage) == before
    assert repo.du(estimate=True).total == totals
    assert repo.verify().ok
    collected(repo)
    assert chunk_bytes(storage) == (32 + 18 + 6) * CHUNK + 250
    repo.compact(mode="full")
    collected(repo)
    assert chunk_bytes(storage) == (8 + 18 + 6) * CHUNK + 250
    assert head(storage) == before


def test_tags_and_branches_keep_the_old_packs() -> None:
    storage = MemoryStorage()
    repo = filled(storage)
    repo.create_tag("before")
    tagged = contents(repo.readonly_session("before"))
    size = chunk_bytes(storage)
    repo.compact(mode="packs")
    collected(repo)
    assert chunk_bytes(storage) == size + 6 * CHUNK
    assert contents(repo.readonly_session("before")) == tagged == head(storage)
    repo.delete_tag("before")
    collected(repo)
    assert chunk_bytes(storage) == size - 18 * CHUNK


def test_what_it_refuses() -> None:
    repo = zm.create(MemoryStorage())
    for wrong in (0, -1, 1.1, float("nan"), "0.5", None):
        with pytest.raises(InvalidArgumentError, match="min_live"):
            repo.compact(mode="packs", min_live=wrong)  # type: ignore[arg-type]
    with pytest.raises(NotFoundError, match="no branch 'other'"):
        repo.compact("other", mode="packs")
    assert repo.compact(mode="packs").objects == 0


def test_memory_is_bounded() -> None:
    """Never are more than eight packs' bytes read that have not been written."""
    storage = CountingStorage(MemoryStorage())
    repo = zm.create(storage, CONFIG | {"pack-chunk-bytes": CHUNK}, runtime=RUNTIME)
    session, count = repo.writable_session(), 40 * 8
    zarr.create_array(session.store, name="a", shape=(count * CHUNK,), chunks=(CHUNK,), dtype="u1",
                      compressors=None)  # fmt: skip
    for i in range(count):
        put(session, f"a/c/{i}", chunk(i))
    session.commit("all")
    session = repo.writable_session()
    for i in range(count):
        if i % 8 > 2:
            session.store.delete_sync(f"a/c/{i}")
    session.commit("few left")
    before = head(storage)
    storage.reset()
    stages: list[tuple[str, int]] = []
    report = repo.compact(mode="packs", progress=lambda stage, done: stages.append((stage, done)))
    assert report.chunks == 3 * 40
    assert {stage for stage, _ in stages} == {
        "looking at refs", "reading packs", "writing packs", "committing", "merging refs",
    }  # fmt: skip
    held = most = 0
    for record in storage.log:
        if record.op == "get_ranges" and record.key.startswith("chunks/"):
            held += record.nbytes
        if record.op == "create" and record.key.startswith("chunks/"):
            held -= record.nbytes
        most = max(most, held)
    assert held == 0
    assert 7 * 8 * CHUNK <= most <= 8 * 8 * CHUNK
    assert head(storage) == before


def test_many_chunks_are_moved_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repacking, "ROUND_CHUNKS", 3)
    storage = MemoryStorage()
    repo = filled(storage)
    before = head(storage)
    report = repo.compact(mode="packs")
    assert (report.chunks, report.packs_written) == (6, 3)
    assert [info.message for info in repo.ancestry()][1:4] == ["repack chunks"] * 3
    assert head(storage) == before
    assert repo.verify().ok


# --- beside others ---------------------------------------------------------------------------


def at_stage(stage: str, act: Callable[[], object]) -> Callable[[str, int], None]:
    """A progress callback that acts when that stage is reached first."""
    due = [act]

    def progress(now: str, done: int) -> None:
        if now == stage and due:
            due.pop()()

    return progress


def overwrite(repo: Repository) -> None:
    session = repo.writable_session()
    put(session, "a/c/0", chunk(5000))
    session.store.delete_sync("a/c/8")
    put(session, "a/c/17", b"inline")
    session.commit("meanwhile")


def shrink(repo: Repository) -> None:
    session = repo.writable_session()
    zarr.open_array(session.store, path="a").resize((9 * CHUNK,))
    session.commit("meanwhile")


def shrink_and_grow(repo: Repository) -> None:
    shrink(repo)
    session = repo.writable_session()
    zarr.open_array(session.store, path="a").resize((24 * CHUNK,))
    session.commit("meanwhile")


def remake(repo: Repository) -> None:
    session = repo.writable_session()
    workspace_of(session.store).delete_below("a/")
    session.commit("meanwhile")


def rewrite_all(repo: Repository) -> None:
    overwrite(repo)
    repo.compact(mode="full")


def rewrite_all_and_collect(repo: Repository) -> None:
    """What is read anew is not there any more; but then nothing refers to it, either."""
    session = repo.writable_session()
    for i in range(24):
        put(session, f"a/c/{i}", chunk(6000 + i))
    session.commit("meanwhile")
    repo.compact(mode="full")
    collected(repo)


@pytest.mark.parametrize("stage", ["looking at refs", "writing packs", "committing"])
@pytest.mark.parametrize(
    ("act", "overtaken"),
    [(overwrite, 3), (shrink, 3), (shrink_and_grow, 3), (remake, 6), (rewrite_all, 3)],
)
def test_what_others_write_meanwhile_wins(
    stage: str, act: Callable[[Repository], None], overtaken: int
) -> None:
    storage, plain = MemoryStorage(), MemoryStorage()
    act(filled(plain))
    filled(storage)
    other = zm.open(storage, runtime=RUNTIME)
    repo = zm.open(storage, runtime=RUNTIME)
    report = repo.compact(mode="packs", progress=at_stage(stage, lambda: act(other)))
    assert head(storage) == head(plain)
    if stage != "looking at refs":
        assert report.chunks_overtaken == overtaken
    assert report.chunks == 6 - overtaken
    assert repo.verify().ok
    collected(repo)
    assert head(storage) == head(plain)
    assert repo.compact(mode="packs").packs == 0


def test_a_pack_that_was_collected_meanwhile_is_not_missed() -> None:
    storage, plain = MemoryStorage(), MemoryStorage()
    rewrite_all_and_collect(filled(plain))
    filled(storage)
    other = zm.open(storage, runtime=RUNTIME)
    repo = zm.open(storage, runtime=RUNTIME)
    act = at_stage("reading packs", lambda: rewrite_all_and_collect(other))
    report = repo.compact(mode="packs", progress=act)
    assert (report.chunks, report.snapshot_id) == (0, None)
    assert head(storage) == head(plain)


@pytest.mark.parametrize("rewritten", [False, True])
def test_a_writer_that_began_before_commits_after(*, rewritten: bool) -> None:
    """It is in conflict with nothing, though it writes chunks that have moved."""
    storage = MemoryStorage()
    repo = filled(storage)
    session = repo.writable_session()
    put(session, "a/c/1", chunk(7000))
    put(session, "a/c/9", chunk(7001))
    zarr.open_array(session.store, path="a").attrs["units"] = "m"
    before = head(storage)
    assert repo.compact(mode="packs").chunks == 6
    if rewritten:
        repo.compact(mode="full")
    session.commit("began before")
    found = head(storage)
    changed = {key for key in found if found[key] != before.get(key)}
    assert changed == {"a/c/1", "a/c/9", "a/zarr.json"}
    assert found["a/c/1"] == chunk(7000)
    assert repo.verify().ok


def test_behind_the_fence_nothing_lands() -> None:
    storage = MemoryStorage()
    repo = filled(storage)
    other, before = zm.open(storage, runtime=RUNTIME), head(storage)
    at = repo.readonly_session().snapshot_id
    with pytest.raises(FencedError, match="before the repository's fence"):
        repo.compact(
            mode="packs", progress=at_stage("committing", lambda: other.garbage_collect(ANY_AGE))
        )
    assert zm.open(storage).readonly_session().snapshot_id == at
    assert head(storage) == before
    assert repo.compact(mode="packs").chunks == 6
    assert head(storage) == before


def test_two_at_once_move_each_chunk_once() -> None:
    storage = MemoryStorage()
    repo = filled(storage)
    other, before = zm.open(storage, runtime=RUNTIME), head(storage)
    report = repo.compact(
        mode="packs", progress=at_stage("committing", lambda: other.compact(mode="packs"))
    )
    assert (report.chunks, report.chunks_overtaken, report.snapshot_id) == (0, 6, None)
    assert head(storage) == before
    assert repo.verify().ok


# --- damage ----------------------------------------------------------------------------------


def flip(storage: Storage, ref: NativeRef) -> None:
    data = bytearray(storage.get(ref.key))
    data[ref.offset + 7] ^= 1
    storage.put(ref.key, bytes(data))


def test_a_damaged_chunk_is_named_and_stays() -> None:
    storage = MemoryStorage()
    repo = filled(storage)
    before = head(storage)
    bad = ref_of(repo, "a/c/9")
    flip(storage, bad)
    with pytest.raises(CorruptObjectError, match=r"a chunk of /a .* does not match") as caught:
        repo.compact(mode="packs")
    assert f"({bad.key}, offset {bad.offset})" in str(caught.value)
    assert ref_of(repo, "a/c/9") == bad
    assert len({ref_of(repo, f"a/c/{i}").key for i in (0, 1, 8, 16, 17)}) == 1  # moved
    collected(repo)
    flip(storage, bad)  # it was all there
    assert head(storage) == before
    assert repo.compact(mode="packs").chunks == 1
    assert head(storage) == before


def test_dead_bytes_may_be_damaged() -> None:
    storage = MemoryStorage()
    repo = filled(storage)
    before = head(storage)
    ref = ref_of(repo, "a/c/9")
    flip(storage, ref._replace(offset=ref.offset + CHUNK))
    assert repo.compact(mode="packs").chunks == 6
    assert head(storage) == before


def test_a_pack_that_is_short() -> None:
    storage = MemoryStorage()
    repo = filled(storage)
    session = repo.writable_session()
    session.store.delete_sync("a/c/22")
    session.commit("half of a pack")
    last = ref_of(repo, "a/c/23")
    storage.put(last.key, storage.get(last.key)[:-1])
    with pytest.raises(CorruptObjectError, match=r"chunk of /a .* does not match"):
        repo.compact(mode="packs", min_live=1.0)
    assert ref_of(repo, "a/c/23") == last
    storage.delete_many([last.key])
    repo.compact(
        mode="packs", min_live=1.0
    )  # of what is not there it is not known how large it is: `verify` tells


# --- crashes ---------------------------------------------------------------------------------

KINDS: tuple[FaultKind, ...] = ("crash_before", "crash_after", "lose_answer")


def repack_in(storage: Storage) -> object:
    return zm.open(storage, runtime=RUNTIME).compact(mode="packs")


def check(storage: Storage, snapshots: dict[str, Contents], where: object) -> bool:
    """All reads as it did, and a repacking succeeds; whether one had landed before."""
    repo = zm.open(storage, runtime=RUNTIME)
    for snapshot_id, expected in snapshots.items():
        assert contents(repo.readonly_session(snapshot_id)) == expected, where
    expected = next(reversed(snapshots.values()))
    assert head(storage) == expected, where
    landed = repo.compact(mode="packs").chunks == 0
    repo.compact(mode="packs")
    assert head(storage) == expected, where
    collected(repo)
    assert head(storage) == expected, where
    return landed


def snapshots_of(repo: Repository) -> dict[str, Contents]:
    ids = [info.snapshot_id for info in repo.ancestry()]
    return {one: contents(repo.readonly_session(one)) for one in reversed(ids)}


@pytest.mark.slow
def test_a_crash_at_every_call_to_the_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repacking, "ROUND_CHUNKS", 4)
    base = MemoryStorage()
    snapshots = snapshots_of(filled(base))
    probe = FaultyStorage(copy_of(base))
    repack_in(probe)
    assert len(probe.calls) > 20
    landed = set()
    for number, call in enumerate(probe.calls, 1):
        for kind in KINDS:
            storage = copy_of(base)
            faulty = FaultyStorage(storage)
            faulty.fail_at(number, kind)
            try:
                outcome: object = repack_in(faulty)
            except (ManifestsError, SimulatedCrash) as error:
                outcome = error
            where = f"{kind} at {number} {call}"
            assert (kind != "lose_answer") == isinstance(outcome, SimulatedCrash), where
            landed.add(check(storage, snapshots, where))
    assert landed == {False, True}


@pytest.mark.sweep
def test_a_crash_at_every_call_to_the_disk(tmp_path: Path) -> None:
    first = tmp_path / "template"
    snapshots = snapshots_of(filled(LocalStorage(first)))
    whole = tmp_path / "whole"
    shutil.copytree(first, whole)
    probe = CrashDisk(whole)
    repack_in(probe.storage())
    calls = probe.calls
    assert len(calls) > 20
    landed = set()
    for number in range(1, len(calls) + 1):
        if number > 1 and calls[number - 2] in ("open_temp", "write"):
            continue  # what has no name yet is nothing, whatever is in it
        folder = tmp_path / str(number)
        shutil.copytree(first, folder)
        disk = CrashDisk(folder)
        disk.crash_at = number
        storage = disk.storage()
        with contextlib.suppress(SimulatedCrash):
            repack_in(storage)
        # All that was not synced is lost, or some of it.
        disk.crash(random.Random(number) if number % 2 else None)
        storage = disk.storage()
        landed.add(check(storage, snapshots, number))
        shutil.rmtree(folder)
    assert landed == {False, True}


@pytest.mark.parametrize("seed", range(12))
def test_any_writes_and_repackings(seed: int) -> None:
    rng, storage = random.Random(seed), MemoryStorage()
    repo = zm.create(storage, CONFIG, runtime=RUNTIME)
    session = repo.writable_session()
    zarr.create_array(session.store, name="a", shape=(40,), chunks=(1,), dtype="u1")
    expected = contents(session)
    session.commit("array")
    for step in range(25):
        match rng.choice(["write", "write", "repack", "compact", "collect", "tag"]):
            case "write":
                session = repo.writable_session()
                for i in rng.sample(range(40), rng.randrange(1, 20)):
                    key = rng.choice([f"a/c/{i}", f"entry{i}"])
                    if rng.random() < 0.3:
                        session.store.delete_sync(key)
                        expected.pop(key, None)
                    else:
                        expected[key] = rng.randbytes(rng.choice([3, 50, 100, 300]))
                        put(session, key, expected[key])
                if session.status():
                    session.commit(f"step {step}")
            case "repack":
                repo.compact(mode="packs", min_live=rng.choice([0.3, 0.7, 1.0]))
            case "compact":
                repo.compact(mode=rng.choice(["minor", "major", "full"]))
            case "collect":
                collected(repo)
            case "tag":
                repo.create_tag(f"tag{step}")
        assert head(storage) == expected, step
    repo.compact(mode="packs", min_live=1.0)
    for tag in repo.list_tags():
        repo.delete_tag(tag)
    repo.compact(mode="full")
    collected(repo)
    assert head(storage) == expected
    live = sum(len(v) for k, v in expected.items() if "json" not in k and len(v) > 8)
    assert chunk_bytes(storage) == live
    assert repo.verify().ok


def test_values_as_arrays_see_them() -> None:
    repo = filled(MemoryStorage())
    before = zarr.open_array(repo.readonly_session().store, path="a", mode="r")[:]
    repo.compact(mode="packs", min_live=1)
    after = zarr.open_array(repo.readonly_session().store, path="a", mode="r")[:]
    assert np.array_equal(before, after)
