"""Streams that commit numbered batches, and sessions that go from process to process.

`Driver`s commit the batches of one stream, also such as have been committed, and two of them at the
same time. A `Detacher` leaves sessions in a `Depot`; `Resumer`s take them up, now and then two the
same one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from simulated.actors import CELLS, branch_for, dawdle, gone, payload, put
from simulated.model import Change, SetChunk, State
from simulated.process import Process
from zarr_manifests import Txn
from zarr_manifests.engine.objects.chunks import SessionKeys
from zarr_manifests.error_cases import FencedError
from zarr_manifests.errors import ConflictError, ManifestsError, SnapshotExpiredError
from zarr_manifests.format.detached import Detached
from zarr_manifests.session import Session
from zarr_manifests.store import workspace_of

__all__ = ["Depot", "Detacher", "Driver", "Parcel", "Resumer"]

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


@dataclass(frozen=True, slots=True)
class Parcel:
    """A detached session, and what it has changed."""

    name: str
    branch: str
    data: bytes
    base: str
    changes: tuple[Change, ...]
    keys: SessionKeys
    txn: Txn | None


@dataclass(slots=True)
class Depot:
    """Detached sessions that wait to be resumed."""

    parcels: list[Parcel] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Detacher:
    """Begins sessions that others commit."""

    name: str
    depot: Depot

    def act(self, process: Process) -> None:
        rng, branch = process.rng, branch_for(process)
        disturbed = process.wire.disturbed
        session: Session | None = None
        try:
            lease = rng.choice((None, None, 30.0))
            session = process.repository().writable_session(branch, lease=lease)
            state = process.judge.state(session.snapshot_id)
            changes = _write(process, session, state)
            base, keys = session.snapshot_id, workspace_of(session.store).keys
            data = session.detach(lease=rng.choice((None, 5.0, 3600.0)))
        except ManifestsError as error:
            # A lease is not taken or renewed for what has expired, or is behind the fence.
            no_lease = (ConflictError, FencedError, SnapshotExpiredError)
            process.expect(error, disturbed, (*gone(branch), *no_lease), session)
            return
        txn = _batch(process, branch) if rng.random() < 0.4 else None
        name = f"{process.name}/{rng.randrange(1 << 32):x}"
        self.depot.parcels.append(Parcel(name, branch, data, base, tuple(changes), keys, txn))
        process.judge.count("sessions detached")


@dataclass(frozen=True, slots=True)
class Resumer:
    """Commits sessions that others have begun."""

    name: str
    depot: Depot

    def act(self, process: Process) -> None:
        parcels, rng = self.depot.parcels, process.rng
        if not parcels:
            return
        parcel = rng.choice(parcels)
        if rng.random() < 0.5:
            parcels.remove(parcel)  # else somebody else may take it up, too
        judge, disturbed = process.judge, process.wire.disturbed
        try:
            session = process.repository().resume(parcel.data)
            if rng.random() < 0.2:
                parcels.append(self._again(parcel, session.detach()))
                return
        except ManifestsError as error:
            ended = judge.is_behind(parcel.keys) or judge.was_tried(parcel.name)
            lease = Detached.from_bytes(parcel.data).lease
            held = {one.lease_id for one in judge.leases()}
            ended = ended or (lease is not None and lease.lease_id not in held)
            if isinstance(error, FencedError) and ended:
                return
            if isinstance(error, SnapshotExpiredError) and parcel.base not in judge.in_history():
                return
            process.expect(error, disturbed, ())
            return
        judge.count("sessions resumed")
        dawdle(process)
        if not parcel.changes and parcel.txn is None:
            return
        allowed: tuple[type[ManifestsError], ...] = (ConflictError,)
        if judge.was_tried(parcel.name):
            allowed = (ConflictError, FencedError)
        for _ in range(rng.randrange(1, 3)):
            done = process.commit(
                session,
                parcel.branch,
                parcel.changes,
                allowed=allowed,
                txn=parcel.txn,
                parcel=parcel.name,
            )
            if done or workspace_of(session.store).closed is not None:
                return

    @staticmethod
    def _again(parcel: Parcel, data: bytes) -> Parcel:
        return Parcel(
            parcel.name,
            parcel.branch,
            data,
            parcel.base,
            parcel.changes,
            parcel.keys,
            parcel.txn,
        )
