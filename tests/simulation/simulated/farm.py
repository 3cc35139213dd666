"""Forks: a session whose work is shared out to other processes, some of which fail.

A `Foreman` forks its session, sends the copies out, and merges what comes back: twice where a task
was done twice, and not at all where it never comes back. `Worker`s take tasks and do them again
after a failure. Values are the foreman's, so that whoever does a task writes the same.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from simulated.actors import CELLS, branch_for, gone, payload, put, read_chunk, scribble
from simulated.model import Change, SetChunk, State
from simulated.process import Process
from simulated.storage import received_by
from simulated.world import BrokenPromiseError
from zarr_manifests.engine.change_set import ForkState
from zarr_manifests.engine.forks import revive
from zarr_manifests.engine.objects import SessionKeys
from zarr_manifests.errors import (
    ConflictError,
    FencedError,
    InvalidArgumentError,
    ManifestsError,
    SnapshotExpiredError,
)
from zarr_manifests.session import Fork, Session
from zarr_manifests.store import ManifestStore, freeze_store

_ROUNDS: Final = 12


@dataclass(frozen=True, slots=True)
class Task:
    """A copy of a session, and what to write to it."""

    name: str
    copy: bytes
    base: str
    state: State
    changes: tuple[SetChunk, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """A copy that comes back."""

    task: Task
    copy: bytes


class Farm:
    """What is to be done, and what has been."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.results: list[Result] = []


def _received(process: Process, copy: bytes) -> ForkState:
    with received_by(process.wire):
        state: ForkState = pickle.loads(copy)
    return state


def _sent(store: ManifestStore) -> bytes:
    return pickle.dumps(freeze_store(store))


def _fork(process: Process, result: Result) -> Fork:
    return Fork(_received(process, result.copy), process.runtime)


@dataclass(frozen=True, slots=True)
class Worker:
    """Does tasks."""

    name: str
    farm: Farm

    def act(self, process: Process) -> None:
        if not self.farm.tasks:
            return
        task = self.farm.tasks.pop(process.rng.randrange(len(self.farm.tasks)))
        disturbed = process.wire.disturbed
        keys: SessionKeys | None = None
        try:
            # Opened here: a store that opens itself does so under a lock that all processes of
            # this one share.
            workspace = revive(_received(process, task.copy), process.runtime)
            keys = workspace.keys
            store = ManifestStore(workspace, read_only=False)
            state = task.state
            for change in task.changes:
                if process.rng.random() < 0.3:
                    read_chunk(store, state, CELLS, change.number)
                state = put(process, store, state, change)
            self.farm.results.append(Result(task, _sent(store)))
        except ManifestsError as error:
            if isinstance(error, SnapshotExpiredError) and task.base not in process.judge.kept():
                return
            if isinstance(error, FencedError) and keys and process.judge.is_behind(keys):
                return
            process.expect(error, disturbed, ())
            self.farm.tasks.append(task)


@dataclass(frozen=True, slots=True)
class Foreman:
    """Shares work out, and commits what comes back."""

    name: str
    farm: Farm

    def act(self, process: Process) -> None:
        branch, rng = branch_for(process), process.rng
        disturbed = process.wire.disturbed
        session: Session | None = None
        try:
            session = process.repository().writable_session(branch)
            state = process.judge.state(session.snapshot_id)
            changes = scribble(process, session.store, state, 0.2) if rng.random() < 0.5 else []
            for change in changes:
                state = change.apply(state)
            tasks = self._share_out(process, session, state)
            results = self._wait(process, tasks)
            changes += self._merge(process, session, results)
        except ManifestsError as error:
            process.expect(error, disturbed, gone(branch), session)
            return
        if session.status():
            process.commit(session, branch, changes, allowed=(ConflictError,))

    def _share_out(self, process: Process, session: Session, state: State) -> list[Task]:
        rng = process.rng
        cells = list(range(state.nodes[CELLS].length or 0))
        rng.shuffle(cells)
        tasks = []
        for number in range(rng.randrange(2, 4)):
            mine = cells[2 * number : 2 * number + 2]
            if number and rng.random() < 0.15:
                mine = [cells[0], *mine]  # two tasks write the same chunk, each its own way
            data = [payload(process, f"task-{number}") for _ in mine]
            changes = tuple(SetChunk(CELLS, i, d) for i, d in zip(mine, data, strict=True))
            name = f"{process.name}/{rng.randrange(1 << 32):x}"
            copy = _sent(session.fork().store)
            tasks.append(Task(name, copy, session.snapshot_id, state, changes))
        again = [task for task in tasks if rng.random() < 0.3]  # as cautious schedulers do
        self.farm.tasks += [*tasks, *again]
        return tasks

    def _wait(self, process: Process, tasks: Sequence[Task]) -> list[Result]:
        names = {task.name for task in tasks}
        for _ in range(_ROUNDS):
            process.world.sleep(0.05)
            process.wire.check_alive()
            back = [result for result in self.farm.results if result.task.name in names]
            if names <= {result.task.name for result in back} and process.rng.random() < 0.7:
                break
        process.rng.shuffle(back)
        return back

    def _merge(self, process: Process, session: Session, results: Sequence[Result]) -> list[Change]:
        """Merge what came back; what it has changed."""
        changes: dict[object, Change] = {}
        merged = [*results, *results[:1]]  # one of them twice
        for result in merged:
            clash = any(changes.get(c.place, c) != c for c in result.task.changes)
            try:
                session.merge(_fork(process, result))
            except ConflictError:
                if not clash:
                    raise
                process.judge.count("forks that clash")
                continue
            if clash:
                raise BrokenPromiseError(f"{result.task.name} was merged over another's chunk")
            changes |= {change.place: change for change in result.task.changes}
            process.judge.count("forks merged")
        self._refuse_strangers(process, session, results)
        return list(changes.values())

    def _refuse_strangers(
        self, process: Process, session: Session, results: Sequence[Result]
    ) -> None:
        mine = {result.task.name for result in results}
        strangers = [r for r in self.farm.results if r.task.name not in mine]
        strangers = [r for r in strangers if not r.task.name.startswith(f"{process.name}/")]
        if not strangers or process.rng.random() < 0.7:
            return
        try:
            session.merge(_fork(process, process.rng.choice(strangers)))
        except InvalidArgumentError:
            process.judge.count("forks refused")
        else:
            raise BrokenPromiseError("a fork of another session was merged")
