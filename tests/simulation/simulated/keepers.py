"""Who keeps a repository small, and who must not suffer from it.

`Expirer`, `Collector`, `Repacker`, `Restorer`, `Surveyor` and `Backgrounder` do the maintenance,
`Verifier` looks whether all is well. `LeaseReader` and
`LeaseWriter` hold leases and are slow, so that they would lose what they read and write if these
kept nothing.
`ExclusiveWriter` shuts others out of a branch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import zarr_manifests as zm
from simulated.actors import CELLS, branch_for, gone, read_chunk, scribble
from simulated.attempts import RefChange
from simulated.judge import Judge
from simulated.process import Process
from simulated.world import BrokenPromiseError
from zarr_manifests.engine.upkeep.compaction import compact_alone
from zarr_manifests.errors import (
    ConflictError,
    FencedError,
    InvalidArgumentError,
    LeaseError,
    ManifestsError,
    NotFoundError,
    SnapshotExpiredError,
)

_GRACES_S: Final = (0.0, 0.0, 1.0, 3600.0)
_MIN_LIVE: Final = (0.3, 0.7, 1.0)


@dataclass(frozen=True, slots=True)
class Expirer:
    """Lets old snapshots go."""

    name: str

    def act(self, process: Process) -> None:
        process.wait(process.rng.random() * 2)
        keep = process.rng.randrange(1, 6)
        max_age = timedelta(seconds=1) if process.rng.random() < 0.2 else None
        with process.expecting(lambda: (ConflictError,)):
            process.repository().expire_snapshots(keep_last=keep, max_age=max_age)


@dataclass(frozen=True, slots=True)
class Collector:
    """Collects garbage, with any grace."""

    name: str

    def act(self, process: Process) -> None:
        process.wait(process.rng.random() * 2)
        grace = timedelta(seconds=process.rng.choice(_GRACES_S))
        others = process.judge.counts.get("collect garbage", 0)

        def allowed() -> tuple[type[ManifestsError], ...]:
            beside = process.judge.counts.get("collect garbage", 0) > others + 1
            # Another collection may delete what this one is about to mark; it then gives up.
            return (ManifestsError,) if beside else (ConflictError,)

        with process.expecting(allowed):
            process.repository().garbage_collect(grace)


@dataclass(frozen=True, slots=True)
class Repacker:
    """Moves chunks out of packs that are partly dead."""

    name: str

    def act(self, process: Process) -> None:
        process.wait(process.rng.random())
        branch, judge = branch_for(process), process.judge
        with process.expecting(_unless_shut_out(judge, *gone(branch), ConflictError)):
            report = process.repository().compact(
                branch, mode="packs", min_live=process.rng.choice(_MIN_LIVE)
            )
            judge.count("chunks repacked", report.chunks)
            judge.count("chunks overtaken while repacked", report.chunks_overtaken)


def _unless_shut_out(
    judge: Judge, *allowed: type[ManifestsError]
) -> Callable[[], tuple[type[ManifestsError], ...]]:
    """These errors, and that of a fence if a collection or a compaction comes from here on."""

    def now() -> tuple[int, int]:
        return judge.root.fence if judge.root else 0, judge.counts.get("claim compaction", 0)

    before = now()
    return lambda: (*allowed, FencedError) if now() != before else allowed


@dataclass(frozen=True, slots=True)
class Backgrounder:
    """Compacts as the background threads of writers do, which claim nothing."""

    name: str

    def act(self, process: Process) -> None:
        process.wait(process.rng.random())
        branch, judge = branch_for(process), process.judge
        with process.expecting(_unless_shut_out(judge, *gone(branch))):
            compact_alone(process.repository()._context, branch)
            judge.count("compacted in the background")


@dataclass(frozen=True, slots=True)
class Surveyor:
    """Makes the zone maps of cells that have none."""

    name: str

    def act(self, process: Process) -> None:
        process.wait(process.rng.random() * 0.5)
        branch, judge = branch_for(process), process.judge
        with process.expecting(_unless_shut_out(judge, *gone(branch), ConflictError)):
            report = process.repository().compute_statistics([CELLS], branch=branch)
            judge.count("chunks measured", report.measured)


@dataclass(frozen=True, slots=True)
class Verifier:
    """Looks whether all is well, which it is, or whether there is anything to recover."""

    name: str

    def act(self, process: Process) -> None:
        process.wait(process.rng.random() * 0.5)
        disturbed = process.wire.disturbed
        try:
            if process.rng.random() < 0.2:
                self._look_for_damage(process, disturbed)
                return
            problems = process.repository().verify().problems
        except ManifestsError as error:
            process.expect(error, disturbed, ())
            return
        if process.wire.disturbed == disturbed:
            if problems:
                raise BrokenPromiseError(f"told as damage, which it is not: {problems}")
            process.judge.count("verified")

    def _look_for_damage(self, process: Process, disturbed: int) -> None:
        try:
            zm.recover(process.wire, dry_run=True, runtime=process.runtime)
        except InvalidArgumentError:
            process.judge.count("nothing to recover")
        else:
            # An accident that was made good meanwhile is no sound root either.
            if process.wire.disturbed == disturbed and not process.judge.recoveries:
                raise BrokenPromiseError("a sound root would be replaced")


@dataclass(frozen=True, slots=True)
class Restorer:
    """Goes back to the refs of an older version."""

    name: str

    def act(self, process: Process) -> None:
        process.wait(process.rng.random() * 3)
        root = process.judge.root
        if root is None or root.version < 4:
            return
        version = process.rng.randrange(max(3, root.collected - 2), root.version + 1)
        with process.expecting():
            repository = process.repository()
            process.change_ref(
                RefChange(f"restore {version}", "", None),
                lambda: zm.recover(repository, version),
                (SnapshotExpiredError, NotFoundError, InvalidArgumentError, ConflictError),
            )


@dataclass(frozen=True, slots=True)
class LeaseReader:
    """Reads an old snapshot slowly, under a lease."""

    name: str

    def act(self, process: Process) -> None:
        rng, judge = process.rng, process.judge
        snapshot_id = rng.choice(judge.places())
        state = judge.state(snapshot_id)
        disturbed = process.wire.disturbed
        names: set[str] = set()
        taken = False
        recoveries = judge.recoveries
        try:
            with process.repository().lease(snapshot_id, rng.choice((0.3, 2.0, 600.0))) as lease:
                taken = True  # though a collection may have removed it by now
                names = {one.name for one in judge.leases() if one.snapshot == snapshot_id}
                lease_id = lease.stored.lease_id
                session = process.repository().readonly_session(snapshot_id)
                for _ in range(rng.randrange(2, 8)):
                    process.wait(rng.random() * 0.5)
                    path = rng.choice([p for p, n in state.nodes.items() if n.length])
                    read_chunk(
                        session.store, state, path, rng.randrange(state.nodes[path].length or 1)
                    )
                    if rng.random() < 0.2:  # the process stands still, and renews nothing
                        process.world.sleep(rng.random() * 3)
                        process.wire.check_alive()
                    lease.check()
                    judge.relied_on(lease_id, recoveries)
                judge.count("leases held to the end")
        except (SnapshotExpiredError, FencedError) as error:
            still = {one.name for one in judge.leases() if one.snapshot == snapshot_id}
            if names and names == still and process.wire.disturbed == disturbed:
                raise BrokenPromiseError(f"{snapshot_id} is leased and expired") from error
        except LeaseError as error:
            # Not renewed in time; or there was no thread, which is a disturbance.
            process.expect(error, disturbed, (LeaseError,) if taken else ())
        except ManifestsError as error:
            process.expect(error, disturbed, (ConflictError,))


@dataclass(frozen=True, slots=True)
class LeaseWriter:
    """Writes slowly, under a lease, and commits after all."""

    name: str

    def act(self, process: Process) -> None:
        branch, rng = branch_for(process), process.rng
        disturbed = process.wire.disturbed
        try:
            session = process.repository().writable_session(branch, lease=rng.choice((0.3, 600.0)))
        except ManifestsError as error:
            fenced = (ConflictError, FencedError, SnapshotExpiredError)
            process.expect(error, disturbed, (*gone(branch), *fenced))
            return
        for _ in range(rng.randrange(1, 3)):
            try:
                state = process.judge.state(session.snapshot_id)
                changes = scribble(process, session.store, state, 0.2)
                process.wait(rng.random() * 3)
            except ManifestsError as error:
                process.expect(error, disturbed, (), session)
                break
            if not session.status() or not process.commit(
                session, branch, changes, allowed=(ConflictError,)
            ):
                break
            process.judge.count("commits under a lease")
        session.close()


@dataclass(frozen=True, slots=True)
class ExclusiveWriter:
    """Claims a branch for itself, and writes until somebody else claims it."""

    name: str

    def act(self, process: Process) -> None:
        branch = branch_for(process)
        disturbed = process.wire.disturbed
        try:
            session = process.repository().writable_session(branch, exclusive=True)
        except ManifestsError as error:
            process.expect(error, disturbed, (*gone(branch), ConflictError, SnapshotExpiredError))
            return
        for _ in range(process.rng.randrange(1, 4)):
            try:
                state = process.judge.state(session.snapshot_id)
                changes = scribble(process, session.store, state, 0.2)
            except ManifestsError as error:
                process.expect(error, disturbed, (), session)
                return
            process.wait(process.rng.random())
            if not session.status() or not process.commit(
                session, branch, changes, allowed=(ConflictError,)
            ):
                return
            process.judge.count("exclusive commits")
