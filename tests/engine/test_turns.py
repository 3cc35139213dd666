"""Writers of one machine take turns: nothing is made in vain, and nobody waits for ever."""

from __future__ import annotations

import multiprocessing
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from inside import context_of
from zarr_manifests import Repository
from zarr_manifests.errors import ConflictError
from zarr_manifests.runtime import SYSTEM, Runtime
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of
from zarr_manifests.testing import CountingStorage

WORKERS, COMMITS = 4, 12


def made(place: Any, **config: Any) -> Repository:
    repository = zm.create(place, {"compaction": {"max-delta-count": 1000}, **config})
    session = repository.writable_session()
    zarr.create_array(session.store, name="a", shape=(64, 8), chunks=(1, 8), dtype="u1")
    session.commit("array")
    return repository


def put(repository: Repository, row: int, value: int = 1) -> None:
    with repository.transaction(message=f"row {row}") as store:
        zarr.open_array(store, path="a")[row] = value


def commit_many(path: str, worker: int, start: Any) -> None:
    repository = zm.open(path)
    start.wait()
    for i in range(COMMITS):
        put(repository, worker * COMMITS + i)


def count(repository: Repository, prefix: str) -> int:
    return sum(1 for _ in context_of(repository).storage.list(prefix))


@pytest.mark.slow
def test_racing_processes_upload_nothing_in_vain(tmp_path: Path) -> None:
    repository = made(tmp_path / "r")
    snapshots = count(repository, "snapshots/")
    spawn = multiprocessing.get_context("spawn")
    start = spawn.Barrier(WORKERS)
    workers = [
        spawn.Process(target=commit_many, args=(str(tmp_path / "r"), worker, start))
        for worker in range(WORKERS)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0
    total = WORKERS * COMMITS
    assert len([*repository.ancestry()]) == total + 2
    assert count(repository, "snapshots/") == snapshots + total
    assert count(repository, "deltas/") == snapshots + total
    rows = zarr.open_array(repository.readonly_session().store, path="a")[:, 0]
    assert rows[:total].all()
    assert not rows[total:].any()


class _Watched:
    """A runtime whose sleeps are counted, and move its clock; `asleep` is called in the first."""

    def __init__(self) -> None:
        self.slept_s: list[float] = []
        self.asleep: list[Any] = []

    def runtime(self) -> Runtime:
        return replace(
            SYSTEM, sleep=self._sleep, monotonic_s=lambda: sum(self.slept_s), jitter=lambda s: s
        )

    def _sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        while self.asleep:
            self.asleep.pop()()


def test_a_writer_waits_and_lands_on_what_it_waited_for(tmp_path: Path) -> None:
    made(tmp_path / "r")
    watched = _Watched()
    late = zm.open(tmp_path / "r", runtime=watched.runtime())
    session = late.writable_session()
    zarr.open_array(session.store, path="a")[0] = 1
    turn = LocalStorage(tmp_path / "r").turn("swap")
    assert turn.take()
    before = count(late, "snapshots/")
    watched.asleep = [turn.end, lambda: put(zm.open(tmp_path / "other"), 1)]
    other = made(tmp_path / "other")
    session.commit("late")
    assert watched.slept_s
    assert count(late, "snapshots/") == before + 1
    assert contents_of(other.readonly_session().store).view.snapshot.message == "row 1"


@pytest.mark.slow
def test_a_writer_that_was_stopped_does_not_stop_the_others(tmp_path: Path) -> None:
    made(tmp_path / "r")
    watched = _Watched()
    repository = zm.open(tmp_path / "r", runtime=watched.runtime())
    turn = LocalStorage(tmp_path / "r").turn("swap")
    assert turn.take()
    put(repository, 3)  # without a turn in the end
    assert 9 < sum(watched.slept_s) < 11
    assert zarr.open_array(repository.readonly_session().store, path="a")[3, 0] == 1
    turn.end()


def test_of_those_who_wait_one_is_next_and_asks_often(tmp_path: Path) -> None:
    made(tmp_path / "r")
    storage = LocalStorage(tmp_path / "r")
    holder, first, second = (storage.turn("swap") for _ in range(3))
    assert holder.take()
    assert not holder.is_next
    assert not first.take()
    assert not second.take()
    assert (first.is_next, second.is_next) == (True, False)
    holder.end()
    assert first.take()
    assert not first.is_next
    assert not second.take()
    assert second.is_next
    first.end()
    second.end()
    third = storage.turn("swap")
    assert third.take()
    third.end()


def test_who_waits_behind_another_asks_seldom(tmp_path: Path) -> None:
    made(tmp_path / "r")
    storage = LocalStorage(tmp_path / "r")
    holder, first = storage.turn("swap"), storage.turn("swap")
    assert holder.take()
    assert not first.take()
    watched = _Watched()
    watched.asleep = [holder.end]  # `first` never asks again, and goes when it is given up
    repository = zm.open(tmp_path / "r", runtime=watched.runtime())
    session = repository.writable_session()
    zarr.open_array(session.store, path="a")[0] = 1
    session.commit("behind")
    assert len(watched.slept_s) == 1
    assert watched.slept_s[0] >= 0.004
    first.end()


def test_who_cannot_stand_in_line_waits_all_the_same(tmp_path: Path) -> None:
    made(tmp_path / "r")
    (tmp_path / "r" / ".lock-swap-next").mkdir()  # so that there can be no such file
    holder = LocalStorage(tmp_path / "r").turn("swap")
    assert holder.take()
    watched = _Watched()
    watched.asleep = [holder.end]
    put(zm.open(tmp_path / "r", runtime=watched.runtime()), 3)
    assert len(watched.slept_s) == 1
    assert watched.slept_s[0] >= 0.004


def test_who_waits_reads_what_came_first_once_it_is_its_turn(tmp_path: Path) -> None:
    made(tmp_path / "r")
    watched, counting = _Watched(), CountingStorage(LocalStorage(tmp_path / "r"))
    repository = zm.open(counting, runtime=watched.runtime())
    session = repository.writable_session()
    began = context_of(repository).roots.latest.root.version
    zarr.open_array(session.store, path="a")[0] = 1
    for row in (5, 6):
        put(zm.open(tmp_path / "r"), row)
    holder = LocalStorage(tmp_path / "r").turn("swap")
    assert holder.take()
    newest = {}

    def end() -> None:
        newest["version"] = context_of(repository).roots.latest.root.version
        holder.end()

    watched.asleep = [end]
    session.commit("on top of both")
    assert newest["version"] == began
    assert context_of(repository).roots.latest.root.version == began + 3
    assert zarr.open_array(repository.readonly_session().store, path="a")[[0, 5, 6], 0].all()


def test_who_is_next_asks_often(tmp_path: Path) -> None:
    made(tmp_path / "r")
    holder = LocalStorage(tmp_path / "r").turn("swap")
    assert holder.take()
    watched = _Watched()
    watched.asleep = [holder.end]
    put(zm.open(tmp_path / "r", runtime=watched.runtime()), 3)
    assert len(watched.slept_s) == 1
    assert watched.slept_s[0] < 0.001


def test_what_others_have_archived_is_not_written_again(tmp_path: Path) -> None:
    made(tmp_path / "r")
    counting = CountingStorage(LocalStorage(tmp_path / "r"))
    mine = zm.open(counting)
    put(zm.open(tmp_path / "r"), 1)
    counting.reset()
    put(mine, 2)
    keys = {op: [c.key for c in counting.log if c.op == op] for op in ("create", "sync")}
    assert not [key for key in keys["create"] if key.startswith("root/")]
    archived = [key for key in keys["sync"] if key.startswith("root/")]
    assert len(archived) == 1, "it is brought to the disk: who made it may have been stopped"

    put(zm.open(tmp_path / "r"), 3)
    lost = max((tmp_path / "r" / "root").iterdir())
    before = lost.read_bytes()
    lost.unlink()  # as if the writer had been stopped right after its swap
    put(mine, 4)
    assert lost.read_bytes() == before


@pytest.mark.parametrize("killed", [False, True])
def test_a_turn_ends_with_its_process(tmp_path: Path, killed: bool) -> None:
    made(tmp_path / "r")
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:  # the child
        held = LocalStorage(tmp_path / "r").turn("swap").take()
        os.write(write, b"1" if held else b"0")
        if not killed:
            os._exit(0)
        threading.Event().wait()
    assert os.read(read, 1) == b"1"
    if killed:
        os.kill(pid, 9)
    os.waitpid(pid, 0)
    turn = LocalStorage(tmp_path / "r").turn("swap")
    assert turn.take()
    turn.end()


def test_a_forked_child_has_no_part_in_its_parents_turn(tmp_path: Path) -> None:
    made(tmp_path / "r")
    turn = LocalStorage(tmp_path / "r").turn("swap")
    assert turn.take()
    begin, end = os.pipe()
    pid = os.fork()
    if pid == 0:  # the child
        os.close(end)
        os.read(begin, 1)  # it lives on until its parent is done
        turn.end()  # not its own: whatever has that number now stays open
        os._exit(0 if os.write(1, b"") == 0 else 1)
    turn.end()
    again = LocalStorage(tmp_path / "r").turn("swap")
    assert again.take()
    again.end()
    os.close(end)
    assert os.waitpid(pid, 0)[1] == 0


def test_only_one_compacts_at_a_time(tmp_path: Path) -> None:
    repository = made(tmp_path / "r", compaction={"max-delta-count": 3})
    turn = LocalStorage(tmp_path / "r").turn("compaction")
    assert turn.take()
    for row in range(6):
        put(repository, row)
    assert len(contents_of(repository.readonly_session().store).view.snapshot.deltas) == 7
    turn.end()
    put(repository, 6)
    assert len(contents_of(repository.readonly_session().store).view.snapshot.deltas) < 4
    assert zarr.open_array(repository.readonly_session().store, path="a")[:7, 0].all()


def test_a_compaction_swaps_in_its_turn_after_all_else_is_written(tmp_path: Path) -> None:
    made(tmp_path / "r")
    watched = _Watched()
    counting = CountingStorage(LocalStorage(tmp_path / "r"))
    repository = zm.open(counting, runtime=watched.runtime())
    for row in range(4):
        put(repository, row)
    other = zm.open(tmp_path / "r")
    session = other.writable_session()
    zarr.open_array(session.store, path="a")[9] = 1
    turn = LocalStorage(tmp_path / "r").turn("swap")
    assert turn.take()

    def commit() -> None:
        """What the one does who has the turn."""
        ops = [call.op for call in counting.log]
        assert "create" in ops
        assert ops.count("cas") == 1, "it has claimed compactions, and no more"
        turn.end()
        session.commit("in its turn")

    counting.reset()
    watched.asleep = [commit]
    report = repository.compact("main", "full")
    assert watched.slept_s
    assert report.snapshot_id == repository.list_branches()["main"]
    assert [call.op for call in counting.log].count("cas") == 2, "nothing is tried in vain"
    rows = zarr.open_array(repository.readonly_session().store, path="a")[:, 0]
    assert rows[[0, 1, 2, 3, 9]].all()


def test_a_compaction_that_was_stopped_does_not_stop_all_others(tmp_path: Path) -> None:
    repository = made(tmp_path / "r", compaction={"max-delta-count": 3})
    turn = LocalStorage(tmp_path / "r").turn("compaction")
    assert turn.take()
    for row in range(40):
        put(repository, row)
    assert len(contents_of(repository.readonly_session().store).view.snapshot.deltas) <= 13
    turn.end()


# --- what is read of others ------------------------------------------------------------------


def contended(*, others: int, near: bool = False, compacted: bool = False) -> tuple[Any, Any]:
    """A session that so many commits have overtaken; the storage it counts by."""
    storage = MemoryStorage()
    made(storage)
    counting = CountingStorage(storage)
    mine = zm.open(counting)
    session = mine.writable_session()
    zarr.open_array(session.store, path="a")[20] = 1
    other = zm.open(storage)
    for row in range(others):
        put(other, 20 if near and row == 0 else row, 2)
        if compacted and row == others // 2:
            other.compact("main", "full")
    counting.reset()
    return session, counting


def read(counting: Any, prefix: str) -> int:
    return sum(call.key.startswith(prefix) for call in counting.log if call.op == "get")


def test_commits_elsewhere_cost_one_read_however_many() -> None:
    for others in (1, 12):
        session, counting = contended(others=others)
        session.commit("late")
        assert read(counting, "snapshots/") <= 1
        assert read(counting, "deltas/") == 0


def test_logs_of_commits_near_by_are_read() -> None:
    session, counting = contended(others=3, near=True)
    with pytest.raises(ConflictError) as caught:
        session.commit("late")
    assert [conflict.path for conflict in caught.value.conflicts] == ["/a"]
    assert read(counting, "snapshots/") <= 1


def test_a_compaction_between_is_looked_behind() -> None:
    session, counting = contended(others=8, compacted=True)
    session.commit("late")
    assert read(counting, "deltas/") == 0
    assert 2 <= read(counting, "snapshots/") <= 6  # down to what was compacted, not to the first
    head = contents_of(session.store).view
    assert (zarr.open_array(session.store, path="a")[:8, 0] == 2).all()
    assert np.asarray(zarr.open_array(session.store, path="a")[20]).all()
    assert head.snapshot.message == "late"


def test_a_serializable_session_reads_the_logs() -> None:
    storage = MemoryStorage()
    repository = made(storage)
    session = repository.writable_session(isolation="serializable")
    array = zarr.open_array(session.store, path="a")
    assert not array[5].any()
    array[20] = 1
    put(repository, 5)
    with pytest.raises(ConflictError):
        session.commit("late")
