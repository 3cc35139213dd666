"""Streams that commit numbered batches.

`Driver`s commit the batches of one stream, also such as have been committed, and two of them at the
same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from simulated.actors import CELLS, branch_for, dawdle, gone, payload, put
from simulated.model import Change, SetChunk, State
from simulated.process import Process
from zarr_manifests import Txn
from zarr_manifests.errors import ConflictError, ManifestsError
from zarr_manifests.session import Session
from zarr_manifests.store import workspace_of

_APP: Final = "stream"


def _batch(process: Process, branch: str) -> Txn:
    """The next batch of a branch, or one that should not come now."""
    rng = process.rng
    last = process.judge.marks_of(branch).get(_APP, -1)
    version = max(0, rng.choice((last + 1, last + 1, last + 1, last, last - 1, last + 3)))
    after = version - 1 if rng.random() < 0.5 else None
    return Txn(_APP, version, after)


def _write(process: Process, session: Session, state: State) -> list[Change]:
    """Write a few cells, or none."""
    rng, changes = process.rng, list[Change]()
    for _ in range(rng.randrange(3)):
        cell = rng.randrange(state.nodes[CELLS].length or 1)
        change = SetChunk(CELLS, cell, payload(process, "batch"))
        state = put(process, session.store, state, change)
        changes.append(change)
    return changes


@dataclass(frozen=True, slots=True)
class Driver:
    """Commits batches of the stream."""

    name: str

    def act(self, process: Process) -> None:
        branch = "main" if process.rng.random() < 0.7 else branch_for(process)
        disturbed = process.wire.disturbed
        session: Session | None = None
        try:
            session = process.repository().writable_session(branch)
            state = process.judge.state(session.snapshot_id)
            changes = _write(process, session, state)
        except ManifestsError as error:
            process.expect(error, disturbed, gone(branch), session)
            return
        txn = _batch(process, branch)
        dawdle(process)
        for _ in range(process.rng.randrange(1, 3)):
            done = process.commit(session, branch, changes, allowed=(ConflictError,), txn=txn)
            if done or workspace_of(session.store).closed is not None:
                return
