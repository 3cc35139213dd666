"""Who does what in a simulated world. An actor is a value; `act` is one thing it does.

Each call of `act` may be cut off anywhere by a crash. What it commits it declares through
`Process.commit`; what it reads it compares with the judge's model of that very snapshot.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from zarr.core.buffer import cpu

from simulated.attempts import LOG, STEP, Attempt, RefChange
from simulated.judge import ACCOUNTS as ACCOUNTS
from simulated.model import (
    Change,
    CreateNode,
    DeleteNode,
    Node,
    Resize,
    SetAttribute,
    SetChunk,
    State,
    apply_all,
    document_of,
)
from simulated.process import Process
from simulated.world import BrokenPromiseError
from zarr_manifests.engine.chunk_statistics import record_zones
from zarr_manifests.errors import (
    AlreadyExistsError,
    CommitOutcomeUnknownError,
    ConflictError,
    FencedError,
    ManifestsError,
    NotFoundError,
    SnapshotExpiredError,
)
from zarr_manifests.grid import Box
from zarr_manifests.planning.meaning import Meaning
from zarr_manifests.planning.measure import measure
from zarr_manifests.session import Session
from zarr_manifests.store import ManifestStore, contents_of, workspace_of

CELLS: Final = "cells"
_BRANCHES: Final = ("main", "main", "main", "b1", "b2")
_SIDE: Final = ("b1", "b2")


class Actor(Protocol):
    """Who does something again and again."""

    @property
    def name(self) -> str: ...

    def act(self, process: Process) -> None:
        """Do it once."""
        ...


# --- what all of them do -----------------------------------------------------------------------


def put(process: Process, store: ManifestStore, state: State, change: Change) -> State:
    """Make a change in a store; the state with it."""
    after = change.apply(state)
    match change:
        case SetChunk(path, number, None):
            store.delete_sync(f"{path}/c/{number}")
        case SetChunk(path, number, bytes() as data):
            store.set_sync(f"{path}/c/{number}", cpu.Buffer.from_bytes(data))
            if process.world.zones and path == CELLS and process.rng.random() < 0.6:
                _record_zone(store, path, number, data)
        case DeleteNode(path):
            workspace_of(store).delete_below(f"{path}/")
        case _:
            _put_document(process, store, change.path, after.nodes[change.path])
    return after


def _record_zone(store: ManifestStore, path: str, number: int, data: bytes) -> None:
    """What writers that hold values record of a chunk."""
    meaning = Meaning.of(contents_of(store).array_at(path).documents)
    bounds = measure(np.frombuffer(data, "<i8"), (1,), meaning.missing)
    box = Box((number,), (number + 1,))
    record_zones(workspace_of(store), path, box, meaning.digest, bounds)


def check_choice(process: Process, session: Session, state: State, number: int) -> None:
    """A where that the cell matches must choose its chunk."""
    data = state.chunks.get((CELLS, number))
    if not process.world.zones or data is None:
        return
    value = int.from_bytes(data, "little", signed=True)
    found = session.chunks_where(CELLS, {CELLS: ("=", value)})
    if not any(lo <= number < hi for ((lo,), (hi,)) in found.boxes.tolist()):
        raise BrokenPromiseError(f"{session.snapshot_id}: cell {number} is left out: {found}")
    process.judge.count("chunks left out by statistics", found.left_out["statistics"])


def check_choices(process: Process, session: Session, state: State) -> None:
    """Choose the chunk of each cell."""
    for path, number in sorted(state.chunks):
        if path == CELLS:
            check_choice(process, session, state, number)


def _put_document(process: Process, store: ManifestStore, path: str, node: Node) -> None:
    # Half of the worlds have coordinates, which are kept nearer at hand.
    own = process.world.seed % 2 == 0 and not process.world.zones
    dimension = path.rpartition("/")[2] if own else "other"
    document = document_of(node, STEP if path in LOG else dimension)
    store.set_sync(f"{path}/zarr.json" if path else "zarr.json", cpu.Buffer.from_bytes(document))


def read_chunk(store: ManifestStore, state: State, path: str, number: int) -> bytes | None:
    """Read a chunk, which must be what the state says."""
    found = store.get_sync(f"{path}/c/{number}")
    data = None if found is None else found.to_bytes()
    due = state.chunks.get((path, number))
    if data != due:
        raise BrokenPromiseError(f"{path}[{number}] was read as {data!r} and is {due!r}")
    return data


def check_session(session: Session, state: State) -> None:
    """Compare all keys and all chunks of a session with the state."""
    store = session.store
    due = {f"{path}/zarr.json" if path else "zarr.json" for path in state.nodes}
    due |= {f"{path}/c/{i}" for path, i in state.chunks}
    contents = contents_of(store)
    keys = contents.guarded(lambda: set(contents.keys_below("")))
    if keys != due:
        raise BrokenPromiseError(f"{session.snapshot_id}: keys differ by {sorted(keys ^ due)}")
    for path, i in sorted(state.chunks):
        read_chunk(store, state, path, i)


def payload(process: Process, what: str) -> bytes:
    """Bytes that nobody else writes; of any of the sizes that are kept differently."""
    data = f"{process.name}/{what}/{process.rng.randrange(1 << 32):x}".encode()
    if process.world.zones:
        return hashlib.blake2b(data, digest_size=8).digest()
    return data.ljust(process.rng.choice((8, 24, 60)), b".")


def dawdle(process: Process) -> None:
    """Now and then let much time go by."""
    if process.rng.random() < 0.1:
        process.wait(process.rng.choice((1.0, 3.0)))


def setup(process: Process, accounts: int, cells: int) -> None:
    """Make the arrays, and give each account 100."""
    session = process.repository().writable_session("main")
    store, state = session.store, State()
    changes: list[Change] = [
        CreateNode("", None),
        CreateNode(ACCOUNTS, accounts),
        CreateNode(CELLS, cells),
        SetAttribute(ACCOUNTS, "funded", "yes"),
    ]
    changes += [CreateNode("log", None), *(CreateNode(path, 2) for path in LOG)]
    changes += [SetChunk(ACCOUNTS, i, b"100") for i in range(accounts)]
    changes += [SetChunk(CELLS, i, payload(process, "first")) for i in range(0, cells, 2)]
    for change in changes:
        state = put(process, store, state, change)
    if not process.commit(session, "main", changes):
        raise BrokenPromiseError("the world could not begin")


def branch_for(process: Process) -> str:
    """Any branch; it may be there or not."""
    return process.rng.choice(_BRANCHES)


# --- actors ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Transferrer:
    """Moves money from one account to another."""

    name: str

    def act(self, process: Process) -> None:
        branch, rng = branch_for(process), process.rng
        disturbed = process.wire.disturbed
        session: Session | None = None
        try:
            session = process.repository().writable_session(branch)
            state = process.judge.state(session.snapshot_id)
            changes = self._move(process, session, state)
        except ManifestsError as error:
            process.expect(error, disturbed, gone(branch), session)
            return
        dawdle(process)
        for _ in range(rng.randrange(1, 4)):
            # A session that met a conflict keeps its changes, and may be tried again.
            before = process.wire.disturbed
            if process.commit(session, branch, changes, allowed=(ConflictError,)):
                if rng.random() < 0.6:
                    return
                # What went wrong after the swap has closed the session.
                closed = workspace_of(session.store).closed is not None
                disturbed = before if closed else process.wire.disturbed
                try:
                    state = process.judge.state(session.snapshot_id)
                    if closed:  # it goes on showing its changes on top of its snapshot
                        state = apply_all(state, changes)
                    changes = self._move(process, session, state)
                except ManifestsError as error:
                    process.expect(error, disturbed, (), session)
                    return
            elif workspace_of(session.store).closed is not None:
                return

    def _move(self, process: Process, session: Session, state: State) -> list[Change]:
        rng, store = process.rng, session.store
        one, other = rng.sample(range(state.nodes[ACCOUNTS].length or 0), 2)
        amount = rng.randrange(1, 30)
        changes: list[Change] = []
        for account, sign in ((one, -1), (other, 1)):
            held = int(read_chunk(store, state, ACCOUNTS, account) or b"")
            data = b"%d" % (held + sign * amount)
            changes.append(SetChunk(ACCOUNTS, account, data, told=True))
        for change in changes:
            put(process, store, state, change)
        return changes


@dataclass(frozen=True, slots=True)
class Scribbler:
    """Writes, deletes, grows, shrinks, names, makes and unmakes; now and then amends."""

    name: str
    metadata: float = 0.2

    def act(self, process: Process) -> None:
        branch, rng = branch_for(process), process.rng
        disturbed = process.wire.disturbed
        session: Session | None = None
        try:
            session = process.repository().writable_session(branch)
            state = process.judge.state(session.snapshot_id)
            changes = scribble(process, session.store, state, self.metadata)
        except ManifestsError as error:
            process.expect(error, disturbed, gone(branch), session)
            return
        dawdle(process)
        if not session.status():
            return
        base = process.judge.known[session.snapshot_id]
        amend = rng.random() < 0.1 and not base.rewrite and base.parent is not None
        amend = amend and base.message in process.judge.attempts
        for _ in range(rng.randrange(1, 3)):
            done = process.commit(session, branch, changes, amend=amend, allowed=(ConflictError,))
            if done or workspace_of(session.store).closed is not None:
                return


def scribble(
    process: Process, store: ManifestStore, state: State, metadata: float, most: int = 4
) -> list[Change]:
    """Make a few changes of any kind; what they are."""
    rng, changes = process.rng, list[Change]()
    for _ in range(rng.randrange(1, most + 1)):
        due = _any_change(process, state, metadata)
        for change in due:
            if state != (after := put(process, store, state, change)):
                changes.append(change)
            state = after
    return changes


def _any_change(process: Process, state: State, metadata: float) -> list[Change]:
    rng = process.rng
    length = state.nodes[CELLS].length or 0
    if rng.random() >= metadata:
        cell = rng.randrange(length)
        if rng.random() < 0.2:
            return [SetChunk(CELLS, cell, None)]
        return [SetChunk(CELLS, cell, payload(process, "cell"))]
    what = rng.randrange(5)
    path = rng.choice(("n1", "n2"))
    if what == 0:
        return [SetAttribute(CELLS, rng.choice("abc"), f"{process.name}-{rng.randrange(100)}")]
    if what == 1:
        return [Resize(CELLS, length + rng.randrange(1, 4), grow=True)]
    if what == 2 and length > 4:
        return [Resize(CELLS, length - rng.randrange(1, 3), grow=False)]
    if path in state.nodes:
        return [DeleteNode(path)]
    return [
        CreateNode(path, None),
        CreateNode(f"{path}/x", 3),
        SetChunk(f"{path}/x", rng.randrange(3), payload(process, "x")),
    ]


@dataclass(frozen=True, slots=True)
class Compactor:
    """Compacts branches."""

    name: str

    def act(self, process: Process) -> None:
        branch = branch_for(process)
        mode = process.rng.choice(("minor", "major", "full"))
        before = process.judge.counts.get("claim compaction", 0)

        def allowed() -> tuple[type[ManifestsError], ...]:
            taken_over = process.judge.counts.get("claim compaction", 0) > before + 1
            return (*gone(branch), FencedError) if taken_over else gone(branch)

        with process.expecting(allowed):
            process.repository().compact(branch, mode)


@dataclass(frozen=True, slots=True)
class Reader:
    """Opens a branch, a tag or an old snapshot, and reads it for a while."""

    name: str

    def act(self, process: Process) -> None:
        disturbed = process.wire.disturbed
        allowed: tuple[type[ManifestsError], ...] = (NotFoundError, SnapshotExpiredError)
        session: Session | None = None
        try:
            session = self._open(process)
            allowed = ()
            dawdle(process)
            state = process.judge.state(session.snapshot_id)
            if process.rng.random() < 0.3:
                check_session(session, state)
                return
            for _ in range(process.rng.randrange(1, 8)):
                path = process.rng.choice([p for p, n in state.nodes.items() if n.length])
                number = process.rng.randrange(state.nodes[path].length or 1)
                read_chunk(session.store, state, path, number)
                if path == CELLS:
                    check_choice(process, session, state, number)
        except ManifestsError as error:
            process.expect(error, disturbed, allowed, session)

    def _open(self, process: Process) -> Session:
        rng, judge = process.rng, process.judge
        kind = rng.randrange(4)
        tags = sorted(judge.root.tags) if judge.root is not None else []
        if kind == 0 and tags:
            return process.repository().readonly_session(rng.choice(tags))
        if kind == 1:
            snapshot_id = rng.choice(judge.places())
            return process.repository().readonly_session(snapshot_id)
        return process.read(branch_for(process))


@dataclass(frozen=True, slots=True)
class Brancher:
    """Makes, moves and deletes branches and tags."""

    name: str

    def act(self, process: Process) -> None:
        rng = process.rng
        snapshot_id = rng.choice(process.judge.places())
        branch, tag = rng.choice(_SIDE), f"t{rng.randrange(6)}"
        disturbed = process.wire.disturbed
        try:
            repository = process.repository()
        except ManifestsError as error:
            process.expect(error, disturbed, ())
            return
        what = rng.randrange(8)
        gone = (NotFoundError, SnapshotExpiredError, ConflictError)
        there = (AlreadyExistsError, SnapshotExpiredError, ConflictError)
        if what < 3:
            process.change_ref(
                RefChange("create branch", branch, snapshot_id),
                lambda: repository.create_branch(branch, snapshot_id),
                there,
            )
        elif what == 3:
            process.change_ref(
                RefChange("delete branch", branch, None),
                lambda: repository.delete_branch(branch),
                gone,
            )
        elif what < 6:
            moved = branch if rng.random() < 0.7 else "main"
            process.change_ref(
                RefChange("reset branch", moved, snapshot_id),
                lambda: repository.reset_branch(moved, snapshot_id, force=True),
                gone,
            )
        elif what == 6:
            process.change_ref(
                RefChange("create tag", tag, snapshot_id),
                lambda: repository.create_tag(tag, snapshot_id),
                there,
            )
        else:
            process.change_ref(
                RefChange("delete tag", tag, None), lambda: repository.delete_tag(tag), gone
            )


@dataclass(frozen=True, slots=True)
class Finder:
    """Names snapshots again that no branch or tag leads to any more."""

    name: str

    def act(self, process: Process) -> None:
        rng, judge = process.rng, process.judge
        process.wait(rng.random() * 2)
        left = sorted(judge.known.keys() - judge.in_history().keys())
        if not left:
            return
        # What was left last is most likely to be there still.
        snapshot_id = left[-1 - min(rng.randrange(len(left)), rng.randrange(len(left)))]
        disturbed = process.wire.disturbed
        try:
            repository = process.repository()
        except ManifestsError as error:
            process.expect(error, disturbed, ())
            return
        branch, tag = rng.choice(_SIDE), f"t{rng.randrange(6)}"
        ways: tuple[tuple[str, str, Callable[[], None]], ...] = (
            ("create tag", tag, lambda: repository.create_tag(tag, snapshot_id)),
            ("create branch", branch, lambda: repository.create_branch(branch, snapshot_id)),
            (
                "reset branch",
                branch,
                lambda: repository.reset_branch(branch, snapshot_id, force=True),
            ),
        )
        operation, name, call = rng.choice(ways)

        def named() -> None:
            try:
                call()
            except SnapshotExpiredError:
                judge.count("refused a name")
                raise
            judge.count("named again")

        process.change_ref(
            RefChange(operation, name, snapshot_id),
            named,
            (AlreadyExistsError, NotFoundError, SnapshotExpiredError, ConflictError),
        )


@dataclass(frozen=True, slots=True)
class Merger:
    """Merges a snapshot of any branch into a branch."""

    name: str

    def act(self, process: Process) -> None:
        rng, judge = process.rng, process.judge
        heads = judge.heads[-1]
        into, other = (rng.choice(sorted(heads)) for _ in range(2))
        source = heads[other] if rng.random() < 0.8 else rng.choice(judge.places())
        if into == other:
            return
        root = judge.root
        fence = 0 if root is None else root.fence
        moves = rng.random() < 0.3
        message = f"{process.name}.merge.{rng.randrange(1 << 40):x}"
        if moves:
            message = f"merge {source} into {into}"
            if message in judge.attempts:
                return
        attempt = judge.begin(Attempt(message, into, source, (), merges=source))
        moved = judge.begin_ref(RefChange("fast-forward branch", into, source))
        disturbed = process.wire.disturbed
        try:
            given = None if moves else message
            report = process.repository().merge(source, into, message=given)
        except CommitOutcomeUnknownError:
            judge.unknown(attempt)
            judge.unknown(moved)
            process.expect_disturbed(disturbed, "merge")
            return
        except ManifestsError as error:
            judge.failed(attempt)
            judge.failed(moved)
            judge.count(f"merges refused: {type(error).__name__}")
            passed = judge.root is not None and judge.root.fence > fence
            fenced = (FencedError,) if passed or into in judge.claims else ()
            expected = (*gone(into), *fenced, ConflictError, SnapshotExpiredError)
            process.expect(error, disturbed, expected)
            return
        if report.fast_forward:
            judge.ref_done(moved)
            judge.failed(attempt)
            judge.count("branches moved by merges")
            return
        judge.failed(moved)
        if not report.merges:
            judge.failed(attempt)
            return
        judge.acknowledged(attempt, report.snapshot_id or "")


@dataclass(frozen=True, slots=True)
class Configurer:
    """Saves other options."""

    name: str

    def act(self, process: Process) -> None:
        count = process.rng.randrange(4, 60)
        with process.expecting(lambda: (ConflictError,)):
            process.repository().save_config({"compaction": {"max-delta-count": count}})


def gone(branch: str) -> tuple[type[ManifestsError], ...]:
    """What may come of a branch that others delete."""
    return () if branch == "main" else (NotFoundError,)
