"""Writers that tell the package how to deal with what others did first.

`Resolver`s commit with a policy, `Witness`es read before they write and want all of it to hold
still, and `Appender`s append where others do, to be put behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from simulated.actors import ACCOUNTS, CELLS, branch_for, dawdle, gone, payload, put, read_chunk
from simulated.attempts import LOG, STEP, Terms
from simulated.model import Change, Resize, SetAttribute, SetChunk, State
from simulated.process import Process
from zarr_manifests.errors import ConflictError, ManifestsError
from zarr_manifests.planning.conflict import Choice
from zarr_manifests.session import Session, commits_of
from zarr_manifests.store import workspace_of

_WHOSE: Final[tuple[Choice, ...]] = ("ours", "theirs")

type _Work = Callable[[Process, Session, State], tuple[list[Change], Terms]]


def _once(
    process: Process,
    work: _Work,
    isolation: Literal["snapshot", "serializable"] = "snapshot",
) -> None:
    """Open a session, work, and commit on the terms that the work has; try again now and then."""
    rng = process.rng
    branch = "main" if rng.random() < 0.6 else branch_for(process)  # rivals must meet
    disturbed = process.wire.disturbed
    session: Session | None = None
    try:
        session = process.repository().writable_session(branch, isolation=isolation)
        state = process.judge.state(session.snapshot_id)
        changes, terms = work(process, session, state)
    except ManifestsError as error:
        process.expect(error, disturbed, gone(branch), session)
        return
    dawdle(process)
    for _ in range(rng.randrange(1, 3)):
        if not session.status() or workspace_of(session.store).closed is not None:
            return
        if process.commit(session, branch, changes, terms=terms, allowed=(ConflictError,)):
            return


@dataclass(frozen=True, slots=True)
class Resolver:
    """Writes chunks and attributes that others write, and says whose stay."""

    name: str

    def act(self, process: Process) -> None:
        _once(process, self._write)

    def _write(
        self, process: Process, session: Session, state: State
    ) -> tuple[list[Change], Terms]:
        rng, changes = process.rng, list[Change]()
        for _ in range(rng.randrange(1, 4)):
            data = payload(process, "cell") if rng.random() < 0.8 else None
            change: Change = SetChunk(CELLS, rng.randrange(2), data)
            if rng.random() < 0.2:
                value = f"{process.name}-{rng.randrange(100)}"
                change = SetAttribute(CELLS, rng.choice("abc"), value)
            if state != (after := put(process, session.store, state, change)):
                changes.append(change)
            state = after
        return changes, Terms(rng.choice(_WHOSE), rng.choice(_WHOSE))


@dataclass(frozen=True, slots=True)
class Witness:
    """Writes one cell, and may only do so while nothing that it has read was changed."""

    name: str

    def act(self, process: Process) -> None:
        _once(process, self._look_and_write, "serializable")

    def _look_and_write(
        self, process: Process, session: Session, state: State
    ) -> tuple[list[Change], Terms]:
        rng = process.rng
        seen: set[tuple[str, int]] = set()
        for _ in range(rng.randrange(1, 4)):
            path = rng.choice((CELLS, CELLS, ACCOUNTS))
            number = rng.randrange(state.nodes[path].length or 1)
            read_chunk(session.store, state, path, number)
            seen.add((path, number))
        cell = rng.randrange(state.nodes[CELLS].length or 0)
        change = SetChunk(CELLS, cell, payload(process, "seen"))
        put(process, session.store, state, change)
        return [change], Terms(seen=frozenset(seen))


@dataclass(frozen=True, slots=True)
class Appender:
    """Appends to the log, behind what others append meanwhile."""

    name: str

    def act(self, process: Process) -> None:
        _once(process, self._append)

    def _append(
        self, process: Process, session: Session, state: State
    ) -> tuple[list[Change], Terms]:
        commits_of(session).relocate_appends(STEP)
        start = state.nodes[LOG[0]].length or 0
        many = process.rng.randrange(1, 3)
        changes: list[Change] = []
        for path in LOG:
            changes.append(Resize(path, start + many, grow=True))
            numbers = range(start, start + many)
            changes += [SetChunk(path, i, payload(process, "entry")) for i in numbers]
        for change in changes:
            state = put(process, session.store, state, change)
        return changes, Terms(relocates=True)
