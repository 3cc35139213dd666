"""The judge: sees every swap of the root and every deletion, and checks what was promised.

It reads the shelf past all wires, with the package's own decoders, and keeps a model of its own
of what each snapshot must hold:

- Who swaps has said so before (`Attempt`, `RefChange`); a swap changes what it says it does and
  nothing else. A version is one more than the last.
- A commit is a child of the head it replaces, and holds its parent's content with its own changes
  made to it; it overwrites nothing that others wrote since the snapshot it was made on. A rewrite
  holds what its parent holds.
- A step of a stream lands at most once, and after the one that it says; marks go from snapshot to
  snapshot.
- A commit lands at most once. What is acknowledged has landed, what has failed has not and never
  does.
- Everything a snapshot in history reaches is there, from the swap that makes it visible on.
- What all accounts hold together is the same in every snapshot.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from simulated.attempts import Attempt, RefChange
from simulated.model import (
    Change,
    Node,
    SetChunk,
    State,
    apply_all,
    differences,
    effects,
    merged_state,
    without_detours,
)
from simulated.storage import Shelf
from simulated.world import BrokenPromiseError, World
from zarr_manifests.config import CacheOptions
from zarr_manifests.engine.objects import Objects, SessionKeys
from zarr_manifests.engine.view import SnapshotView
from zarr_manifests.errors import (
    ConflictError,
    FencedError,
    ManifestsError,
    TransactionAlreadyCommitted,
    TransactionGapError,
)
from zarr_manifests.format.chunk_table import InlineRef, NativeRef, native_keys
from zarr_manifests.format.manifest import Base, Delta, Manifest, NodeKind
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.root import COMPACTOR, ROOT_KEY, Branch, Lease, Root
from zarr_manifests.format.snapshot import HistoryPage, HistoryPageRef, Snapshot
from zarr_manifests.format.zone_maps import IndexDirectory, ZonePages
from zarr_manifests.ids import crc32c, session_of, session_start, snapshot_id_of, snapshot_key
from zarr_manifests.runtime import Runtime
from zarr_manifests.session import Session
from zarr_manifests.store import workspace_of

ACCOUNTS: Final = "bank"
_REF_OPERATIONS: Final = frozenset(
    {
        "create branch",
        "reset branch",
        "fast-forward branch",
        "delete branch",
        "create tag",
        "delete tag",
    }
)
_MOST_SNAPSHOTS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Known:
    """A snapshot: what it must hold, and the keys of all it reaches.

    `pages` has the pages of its history, each with the key of the newest snapshot that it covers,
    and `marks` the last version of each stream. `total` is what all accounts hold together, and
    `merged` the snapshot that this one has merged.
    """

    snapshot_id: str
    parent: str | None
    message: str
    rewrite: bool
    state: State
    reach: frozenset[str]
    pages: frozenset[str]
    marks: Mapping[str, int]
    total: int
    merged: str | None


@dataclass(slots=True, eq=False)
class Judge:
    """Checks one world.

    Attributes
    ----------
    known : dict of str to Known
        Every snapshot that ever was visible, by id.
    root : Root or None
        The root as it is.
    heads : list of dict
        For each swap so far, the head of each branch.
    versions : dict of int to dict
        The same by version.
    claims : dict of str to int
        The version of each branch's newest claim, even if the branch is gone since.
    unfinished : int
        The version of a recovery that has not returned; 0 if there is none.
    """

    world: World
    shelf: Shelf
    runtime: Runtime
    total: int
    known: dict[str, Known] = field(default_factory=dict)
    attempts: dict[str, Attempt] = field(default_factory=dict)
    refs: list[RefChange] = field(default_factory=list)
    root: Root | None = None
    counts: dict[str, int] = field(default_factory=dict)
    heads: list[dict[str, str]] = field(default_factory=list)
    versions: dict[int, dict[str, str]] = field(default_factory=dict)
    claims: dict[str, int] = field(default_factory=dict)
    recoveries: int = 0
    unfinished: int = 0
    objects: Objects = field(init=False)

    def __post_init__(self) -> None:
        self.objects = Objects(self.shelf, self.runtime, CacheOptions())
        self.shelf.swapped = self._swapped
        self.shelf.deleted = self._deleted

    # --- what actors say ---------------------------------------------------------------------

    def begin(self, attempt: Attempt) -> Attempt:
        """A commit is about to be tried."""
        self.attempts[attempt.message] = attempt
        return attempt

    def begin_ref(self, change: RefChange) -> RefChange:
        """An operation on a ref is about to be tried."""
        self.refs.append(change)
        return change

    def acknowledged(self, attempt: Attempt, snapshot_id: str) -> None:
        """The commit has returned."""
        self._demand(attempt.landed is not None, f"{attempt.message} is acknowledged and lost")
        landed = self.known[attempt.landed or ""]
        here = self.known.get(snapshot_id)
        # A compaction that goes with a commit may be on top of it already.
        while here is not None and here.rewrite and here.snapshot_id != landed.snapshot_id:
            here = self.known.get(here.parent or "")
        self._demand(here is landed, f"{attempt.message}: {snapshot_id} is not what has landed")
        attempt.outcome = "acknowledged"
        self.count("acknowledged")

    def failed(self, attempt: Attempt | RefChange) -> None:
        """It has failed for certain: it has had and will have no effect."""
        if isinstance(attempt, RefChange) and attempt.landed is not None:
            self._exchange(attempt, landed=False)
        if attempt.undone:
            return
        self._demand(attempt.landed is None, f"{attempt} is said to have failed, and has landed")
        attempt.outcome = "failed"
        self.count("failed")

    def marks_of(self, branch: str) -> Mapping[str, int]:
        """The last version of each stream on a branch as it is."""
        head = self.heads[-1].get(branch)
        return {} if head is None else self.known[head].marks

    def verdict(self, attempt: Attempt, error: ManifestsError, since: int) -> bool:
        """Whether the error is about the attempt's step, and right.

        `since` is how many roots there were when it began. Who commits a step that was committed
        all the time is told so, whatever else is in the way.
        """
        txn = attempt.txn
        assert txn is not None
        assert txn.version is not None
        heads = [heads.get(attempt.branch) for heads in self.heads[since - 1 :]]
        marks = [self.known[head].marks.get(txn.app, -1) for head in heads if head is not None]
        if isinstance(error, TransactionAlreadyCommitted):
            there = any(mark >= txn.version for mark in marks)
            self._demand(there, f"{attempt.message}: {txn} is not committed, and said to be")
            found = self.known.get(error.snapshot_id or "")
            right = found is None or found.marks.get(txn.app) == txn.version
            self._demand(right, f"{attempt.message}: {error.snapshot_id} has not {txn}")
            self.count("batches that were committed")
            return True
        if isinstance(error, TransactionGapError):
            gap = any(mark < txn.version and mark != txn.after for mark in marks)
            self._demand(gap, f"{attempt.message}: there is no gap before {txn}")
            self.count("batches after a gap")
            return True
        if isinstance(error, ConflictError | FencedError) and len(marks) == len(heads):
            done = all(mark >= txn.version for mark in marks)
            self._demand(not done, f"{attempt.message}: a replay of {txn} is told {error!r}")
        return False

    def unknown(self, attempt: Attempt | RefChange) -> None:
        """Its maker was told that nobody knows."""
        attempt.outcome = "unknown"
        self.count("unknown")

    def ref_done(self, change: RefChange) -> None:
        """The operation has returned."""
        if change.landed is None:
            self._exchange(change, landed=True)
        self._demand(change.landed is not None, f"{change} is acknowledged and lost")
        change.outcome = "acknowledged"

    def recovery_done(self, version: int) -> None:
        """A recovery that made this version has returned."""
        if version == self.unfinished:
            self.unfinished = 0

    def _exchange(self, change: RefChange, *, landed: bool) -> None:
        """Of two tries of the same, of which one's maker is dead, nobody can tell which landed."""
        for other in self.refs:
            same = (other.operation, other.name, other.snapshot) == (
                change.operation,
                change.name,
                change.snapshot,
            )
            undecided = other is not change and other.outcome in ("open", "unknown")
            if same and undecided and (other.landed is not None) == landed:
                change.landed, other.landed = other.landed, change.landed
                return

    def count(self, what: str, times: int = 1) -> None:
        """Count something that happened, for the statistics of a run."""
        if times:
            self.counts[what] = self.counts.get(what, 0) + times

    def state(self, snapshot_id: str) -> State:
        """What the snapshot must hold."""
        self._demand(snapshot_id in self.known, f"snapshot {snapshot_id} was never visible")
        return self.known[snapshot_id].state

    def history(self, branch: Branch) -> Iterator[Known]:
        """The branch's snapshots, newest first."""
        snapshot_id: str | None = snapshot_id_of(branch.head.key)
        for _ in range(_MOST_SNAPSHOTS):
            if snapshot_id is None:
                return
            found = self.known[snapshot_id]
            yield found
            snapshot_id = None if snapshot_id == branch.floor else found.parent

    def in_history(self) -> dict[str, Known]:
        """All snapshots that branches and tags lead to."""
        root = self._root()
        starts = [*root.branches.values()]
        # Once anything has expired, a tag keeps its own snapshot only.
        expired = root.branches["main"].floor is not None
        starts += [
            Branch(ref, None, floor=snapshot_id_of(ref.key) if expired else None)
            for ref in root.tags.values()
        ]
        return {k.snapshot_id: k for start in starts for k in self.history(start)}

    def leases(self) -> tuple[Lease, ...]:
        """All leases that are held."""
        return self._root().leases

    def kept(self) -> dict[str, Known]:
        """All snapshots that must be readable: those in history, and the leased."""
        leased = {lease.snapshot for lease in self.leases()}
        return self.in_history() | {name: self.known[name] for name in leased}

    def is_fenced(self, session: Session) -> bool:
        """Whether the session must not commit any more."""
        keys = workspace_of(session.store).keys
        if keys is None:
            return False
        tip = self._root().branches.get(session.branch or "")
        if tip is not None and _is_shut_out(tip, keys.start, keys.epoch):
            return True
        claim = self.claims.get(session.branch or "", 0)
        return (claim not in (0, keys.epoch) and keys.start < claim) or self.is_behind(keys)

    def is_behind(self, keys: SessionKeys) -> bool:
        """Whether the fence has passed a session, so that its objects may go."""
        root = self._root()
        return keys.start < root.fence and not root.holds_lease(keys.session_id)

    def places(self) -> list[str]:
        """Ids of all snapshots in history but the very first, which is empty."""
        return sorted(k.snapshot_id for k in self.in_history().values() if k.parent is not None)

    # --- swaps -------------------------------------------------------------------------------

    def _root(self) -> Root:
        if self.root is None:
            raise BrokenPromiseError("there is no root")
        return self.root

    def _demand(self, kept: bool, otherwise: str) -> None:
        if not kept:
            raise BrokenPromiseError(
                f"{otherwise} (after version {self.root and self.root.version})"
            )

    def _swapped(self, key: str, old_data: bytes | None, data: bytes) -> None:
        self._demand(key == ROOT_KEY, f"{key} was overwritten")
        old, new = self.root, Root.from_object(data)
        self.heads.append({name: snapshot_id_of(b.head.key) for name, b in new.branches.items()})
        self.claims |= {name: b.epoch for name, b in new.branches.items() if b.epoch}
        if old is not None and old_data is None:
            self._recovered(old, new)
            return
        self.versions[new.version] = self.heads[-1]
        if old is None:
            self.root = new
            for branch in new.branches.values():
                self._learn(branch, State(), {}, self.total)
            return
        entry = new.log[-1] if new.log and new.log[-1].version == new.version else None
        text = entry.operation if entry is not None else "leases"
        operation, _, left = text.partition(" from ")
        self.count(operation)
        self.world.note(f"swap to version {new.version}: {operation} {entry and entry.ref}")
        self._demand(new.version == old.version + 1, "a version was skipped or made twice")
        for name in ("fence", "collected"):
            self._demand(getattr(new, name) >= getattr(old, name), f"{name} went back")
        self._demand(operation == "save config" or new.config == old.config, "config was lost")
        changed = self._changed_refs(old, new)
        if left and entry is not None:
            due = {_places(old).get(name) for name in (entry.ref, f"tag:{entry.ref}")}
            self._demand(left in due, f"{text}: it was at {due}")
        if operation.startswith(("commit", "amend")):
            self._commit(old, new, entry.ref if entry else "", changed)
        elif (
            operation != "claim branch" and operation.endswith((" branch", " tag"))
        ) or operation.startswith("restore "):
            self._ref_change(new, operation, entry.ref if entry else "", changed)
        else:
            self._demand(not changed, f"{operation} has changed the refs {changed}")
        self._check_leases(old, new)
        before = self.in_history() if operation == "expire snapshots" else {}
        self.root = new
        if before:
            leased = before.keys() & {lease.snapshot for lease in new.leases}
            gone = sorted(leased - self.in_history().keys())
            self._demand(not gone, f"leased snapshots have expired: {gone}")
        if changed:
            self._check_there()

    def _check_leases(self, old: Root, new: Root) -> None:
        """A lease is taken and renewed only for what has neither expired nor been fenced."""
        before = {lease.name: lease for lease in old.leases}
        history = self.in_history()
        lost = before.keys() - {lease.name for lease in new.leases}
        if lost:
            self.count("leases gone")
        for lease in new.leases:
            if lease.name not in before:
                fenced = int(lease.session.partition("-")[0]) < new.fence
                self._demand(not fenced, f"a lease for {lease.session}, which is behind the fence")
            if lease.snapshot not in history:
                self._demand(lease in old.leases, f"a lease on {lease.snapshot}, which has expired")

    def _check_there(self) -> None:
        """All that snapshots in history need is there."""
        for known in self.in_history().values():
            self._check_whole(known)

    def _check_whole(self, known: Known) -> None:
        """All that the snapshot needs is there."""
        due = (snapshot_key(known.snapshot_id), *known.reach)
        missing = [key for key in due if key not in self.shelf.objects]
        self._demand(not missing, f"{known.message!r} lacks {sorted(missing)}")

    @staticmethod
    def _changed_refs(old: Root, new: Root) -> dict[str, tuple[str | None, str | None]]:
        """Old and new snapshot of each branch, or tag as `tag:name`, that is not as it was."""
        before, after = _places(old), _places(new)
        names = before.keys() | after.keys()
        return {
            name: (before.get(name), after.get(name))
            for name in sorted(names)
            if before.get(name) != after.get(name)
        }

    def _commit(
        self, old: Root, new: Root, name: str, changed: dict[str, tuple[str | None, str | None]]
    ) -> None:
        self._demand(list(changed) == [name], f"a commit to {name} has moved {list(changed)}")
        was, head = old.branches[name], new.branches[name]
        self._demand(was.floor == head.floor and was.epoch <= head.epoch, f"{name} went back")
        tip = self.known[snapshot_id_of(was.head.key)]
        snapshot = self.objects.load(head.head, Snapshot)
        session = session_of(head.head.key)
        fenced = session_start(session) < old.fence and not old.holds_lease(session)
        self._demand(not fenced, f"{snapshot.message!r} was made behind the fence")
        if snapshot.kind == "rewrite":
            self._demand(snapshot.parent_id == tip.snapshot_id, "a rewrite of another snapshot")
            late = session_start(session) < old.epochs.get(COMPACTOR, 0)
            self._demand(not late, f"{snapshot.message!r}: another compactor has taken over")
            self._learn(head, tip.state, tip.marks, tip.total)
            return
        attempt = self.attempts.get(snapshot.message)
        if attempt is None:
            raise BrokenPromiseError(f"nobody has tried to commit {snapshot.message!r}")
        self._demand(attempt.branch == name, f"{attempt.message} has landed on {name}")
        self._demand(attempt.landed is None, f"{attempt.message} has landed twice")
        self._demand(
            attempt.outcome in ("open", "unknown"), f"{attempt.message} has failed, and lands"
        )
        start = session_start(session) if attempt.merges else attempt.start
        shut_out = _is_shut_out(was, start, attempt.epoch)
        self._demand(not shut_out, f"{attempt.message}: another writer has claimed {name}")
        due = tip.parent if attempt.amends else tip.snapshot_id
        self._demand(snapshot.parent_id == due, f"{attempt.message} is no child of the head")
        marks = self._marks(attempt, tip)
        if attempt.merges is not None:
            self._merge(attempt, head, snapshot, tip)
            return
        changes = without_detours(attempt.changes, self.known[attempt.base].state)
        if attempt.amends:
            self._demand(attempt.base == tip.snapshot_id, f"{attempt.message} amends another head")
            changes = (*self.attempts[tip.message].changes, *changes)
            attempt.changes = changes
        else:
            changes = self._as_placed(attempt, changes, tip)
            self._check_overwritten(attempt, changes, tip)
            self._check_seen(attempt, tip)
            attempt.changes = changes
        parent = self.known[due or ""]
        total = tip.total if attempt.amends else parent.total
        self._learn(head, apply_all(parent.state, changes), marks, total)
        attempt.landed = snapshot_id_of(head.head.key)
        self.count("landed")

    def _merge(self, attempt: Attempt, head: Branch, snapshot: Snapshot, tip: Known) -> None:
        """A merge has landed: it must have the changes of both sides since what both have."""
        source = attempt.merges or ""
        self._check_whole(self.known[source])  # which may have been left behind
        base = self._common(source, tip.snapshot_id)
        due = (source, base)
        self._demand(snapshot.merged == due, f"{attempt.message}: {snapshot.merged}, not {due}")
        states = (self.known[one].state for one in (base, source, tip.snapshot_id))
        state = merged_state(*states)
        if state is None:
            raise BrokenPromiseError(f"{attempt.message} merges what contradicts each other")
        attempt.changes = differences(tip.state, state)
        # Whoever merges two transfers of one amount from one account has it taken once.
        held = [int(data) for (path, _), data in state.chunks.items() if path == ACCOUNTS]
        self._learn(head, state, tip.marks, sum(held))
        attempt.landed = snapshot_id_of(head.head.key)
        self.count("merges landed")

    def contains(self, snapshot_id: str) -> set[str]:
        """The snapshots whose changes this one has, itself included."""
        found: set[str] = set()
        due: list[str | None] = [snapshot_id]
        while due:
            name = due.pop()
            if name is not None and name not in found:
                found.add(name)
                due += [self.known[name].parent, self.known[name].merged]
        return found

    def _common(self, one: str, other: str) -> str:
        """The one snapshot that both contain, and that no other one of these contains."""
        both = self.contains(one) & self.contains(other)
        older = set[str]().union(*(self.contains(name) - {name} for name in both))
        newest = both - older
        self._demand(len(newest) == 1, f"{one} and {other} have {newest} in common")
        return newest.pop()

    def _marks(self, attempt: Attempt, tip: Known) -> Mapping[str, int]:
        """The marks of what lands on the tip, or replaces it; its step must be due."""
        txn = attempt.txn
        if txn is None:
            return tip.marks
        assert txn.version is not None
        mark = tip.marks.get(txn.app, -1)
        due = mark < txn.version and txn.after in (None, mark)
        self._demand(due, f"{attempt.message}: {txn} lands on the mark {mark}")
        self.count("batches committed")
        return {**tip.marks, txn.app: txn.version}

    def _between(self, attempt: Attempt, tip: Known) -> Iterator[tuple[Known, Attempt]]:
        """What has landed since the attempt's base, newest first, but for compactions."""
        here: Known | None = tip
        while here is not None and here.snapshot_id != attempt.base:
            others = None if here.rewrite else self.attempts.get(here.message)
            if others is not None:
                yield here, others
            here = self.known.get(here.parent or "")
        self._demand(here is not None, f"{attempt.message} was made on what is in no history")

    def _effects(self, here: Known, others: Attempt) -> dict[tuple[object, ...], object]:
        return effects(others.changes, self.known[here.parent or ""].state, here.state)

    def _as_placed(
        self, attempt: Attempt, changes: tuple[Change, ...], tip: Known
    ) -> tuple[Change, ...]:
        """The changes as the attempt's terms have them on top of the tip."""
        between = [*self._between(attempt, tip)]
        taken = [self._effects(*landed) for landed in between]
        # A chunk that somebody wrote or deleted is theirs, even if it was so already when that
        # landed: the log has it all the same.
        touched = [c.place for _, o in between for c in o.changes if isinstance(c, SetChunk)]
        places = set[tuple[object, ...]](touched).union(*taken)
        placed = attempt.terms.place(changes, places, self.known[attempt.base].state, tip.state)
        if attempt.terms.relocates and placed != changes:
            self.count("appends put behind others")
        return placed

    def _check_overwritten(self, attempt: Attempt, changes: tuple[Change, ...], tip: Known) -> None:
        """Nothing that others have left since is overwritten, but where its terms say so.

        What counts is what all of them together have changed: what one of them made and another
        unmade again is no one's to lose.
        """
        base = self.known[attempt.base].state
        mine = effects(changes, base, apply_all(base, changes))
        told = {c.place for c in changes if isinstance(c, SetChunk) and c.told}
        between = [*self._between(attempt, tip)]
        done = [change for _, others in reversed(between) for change in others.changes]
        theirs = effects(done, base, tip.state)
        for place in sorted(mine.keys() & theirs.keys(), key=str):
            if mine[place] == theirs[place] and place not in told:
                continue
            if attempt.terms.choice(place) == "ours":
                self.count("overwritten on purpose")
                continue
            writers = [o.message for here, o in between if place in self._effects(here, o)]
            raise BrokenPromiseError(
                f"{attempt.message} overwrites {place}, which was written by {writers}"
            )

    def _check_seen(self, attempt: Attempt, tip: Known) -> None:
        """Nothing that had to hold still was changed by others."""
        for here, others in self._between(attempt, tip):
            before = self.known[here.parent or ""].state.chunks
            for place in sorted(attempt.terms.seen):
                same = before.get(place) == here.state.chunks.get(place)
                self._demand(same, f"{attempt.message} saw {place}, which {others.message} changed")

    def _ref_change(
        self,
        new: Root,
        operation: str,
        name: str,
        changed: dict[str, tuple[str | None, str | None]],
    ) -> None:
        # What was lost with the root may be done again by who does not know yet.
        for change in self.refs:
            if (
                (change.landed is None or change.undone)
                and change.outcome in ("open", "unknown")
                and (change.operation, change.name) == (operation, name)
            ):
                if operation.startswith("restore "):
                    due = self.versions[int(operation.partition(" ")[2])]
                    self._demand(self.heads[-1] == due, f"{operation} has made {self.heads[-1]}")
                    change.landed, change.undone = new.version, False
                    return
                shown = f"tag:{name}" if operation.endswith("tag") else name
                to = _places(new).get(shown)
                if set(changed) <= {shown} and to == change.snapshot:
                    # That all of it is there, and stays, is checked after every swap and deletion.
                    known = to is None or to in self.known
                    self._demand(known, f"{operation} {name}: {to} never was")
                    change.landed, change.undone = new.version, False
                    self.count("refs changed")
                    return
        raise BrokenPromiseError(f"nobody has asked for this: {operation} {name}, {changed}")

    # --- contents ----------------------------------------------------------------------------

    def _learn(self, branch: Branch, state: State, marks: Mapping[str, int], total: int) -> None:
        """A snapshot has become visible; it must hold that state, and these marks."""
        view = SnapshotView.open(self.objects, branch.head)
        snapshot = view.snapshot
        found, reach = self._contents(view)
        self._reach(snapshot, reach)
        missing = [key for key in sorted(reach) if key not in self.shelf.objects]
        self._demand(not missing, f"{view.snapshot_id} reaches what is not there: {missing}")
        if found != state:
            wrong = sorted(set(found.lines()) ^ set(state.lines()))
            raise BrokenPromiseError(f"{snapshot.message!r} holds other than it should: {wrong}")
        if dict(snapshot.marks) != dict(marks):
            raise BrokenPromiseError(f"{snapshot.message!r} has the marks {snapshot.marks}")
        if ACCOUNTS in found.nodes and found.nodes[ACCOUNTS].attributes:
            held = [int(data) for (path, _), data in found.chunks.items() if path == ACCOUNTS]
            self._demand(sum(held) == total, f"{snapshot.message!r}: accounts hold {held}")
        rewrite = snapshot.kind == "rewrite"
        self.known[view.snapshot_id] = Known(
            view.snapshot_id,
            snapshot.parent_id,
            snapshot.message,
            rewrite,
            state,
            frozenset(reach),
            frozenset(self._history_pages(snapshot.history.pages)),
            dict(marks),
            total,
            snapshot.merged[0] if snapshot.merged else None,
        )

    def _contents(self, view: SnapshotView) -> tuple[State, set[str]]:
        nodes, chunks, reach = {}, {}, set()
        for path, node in view.nodes.items():
            self._demand(node.kind is not NodeKind.OPAQUE, f"a stray key {path}")
            nodes[path] = _node_of(node.documents["zarr.json"])
            table = view.chunks(node.node_id) if node.kind is NodeKind.ARRAY else None
            for coords, ref in table.refs() if table is not None else ():
                if isinstance(ref, NativeRef):
                    reach.add(ref.key)
                chunks[path, coords[0]] = self._bytes(ref)
        return State(nodes, chunks), reach

    def _bytes(self, ref: Any) -> bytes:
        if isinstance(ref, InlineRef):
            return ref.data
        stored = self.shelf.objects.get(ref.key)
        if stored is None:
            raise BrokenPromiseError(f"a chunk lies in {ref.key}, which is not there")
        data = stored[0][ref.offset : ref.offset + ref.length]
        self._demand(crc32c(data) == ref.crc32c, f"a chunk in {ref.key} is damaged")
        return data

    def _reach(self, snapshot: Any, reach: set[str]) -> None:
        """Add the keys of all metadata that the snapshot needs."""
        reach.add(snapshot.log.key)
        log = self.objects.load(snapshot.log, Delta)
        reach.update(ref.blob.key for ref in log.manifests)
        for entry in snapshot.deltas:
            reach.add(entry.log.key)
            reach.update(ref.blob.key for ref in entry.manifests)
            reach.update(ref.key for ref in (entry.zones, entry.bundle) if ref is not None)
        if snapshot.base is not None:
            reach.add(snapshot.base.key)
            base = self.objects.load(snapshot.base, Base)
            reach.update(ref.blob.key for ref in base.manifests)

    def _history_pages(self, refs: Iterable[HistoryPageRef]) -> Iterator[str]:
        for ref in refs:
            there = ref.blob.key in self.shelf.objects
            self._demand(there, f"a snapshot names {ref.blob.key}, which is not there")
            yield ref.blob.key
            page = self.objects.load(ref.blob, HistoryPage)
            yield from self._history_pages(page.history.pages)

    def _needed_pages(self) -> set[str]:
        """Pages of history that a snapshot names which must be readable."""
        return {page for one in self.kept().values() for page in one.pages}

    def _deleted(self, keys: Sequence[str]) -> None:
        gone = set(keys)
        self.world.note(f"deleted {len(gone)} objects")
        self.counts["deleted"] = self.counts.get("deleted", 0) + len(gone)
        for known in self.kept().values():
            lost = known.reach & gone or {snapshot_key(known.snapshot_id)} & gone
            self._demand(not lost, f"{known.message!r} needs what was deleted: {sorted(lost)}")
        lost = self._needed_pages() & gone
        self._demand(not lost, f"pages of history were deleted: {sorted(lost)}")
        lost = self._indexes() & gone
        self._demand(not lost, f"a branch names indexes that were deleted: {sorted(lost)}")

    def _recovered(self, old: Root, new: Root) -> None:
        """The root was lost, and is made again from the archive of a version.

        If nothing else was lost, all but the last operation is in it: who swaps archives what is
        replaced.
        """
        versions = [entry.version for entry in old.log]
        oldest = versions[-2] if set(self.shelf.lost) == {ROOT_KEY} and versions[1:] else 1
        due = [heads for version, heads in self.versions.items() if version >= oldest]
        self._demand(self.heads[-1] in due, f"{self.heads[-1]} was recovered, which never was")
        # A recovery that was cut off may not have archived its root.
        again = new.version == old.version == self.unfinished
        self._demand(new.version > old.version or again, "a version was made twice")
        self.unfinished = new.version
        self._demand(new.fence == new.version and not new.leases, "who was there can go on")
        self.versions[new.version] = self.heads[-1]
        self.root = new
        self.shelf.do_without()
        self.recoveries += 1
        self.world.note(f"recovered as version {new.version}")
        self._check_there()
        history = self.in_history()
        for attempt in self.attempts.values():
            attempt.undone |= attempt.landed is not None and attempt.landed not in history
        for change in self.refs:
            change.undone |= change.landed is not None
        self.count("recovered")

    def relied_on(self, lease_id: bytes, recoveries: int) -> None:
        """The holder of a lease was told, at this moment, that it can rely on it.

        That can be held against nobody where clocks differ, or the root was made anew meanwhile.
        """
        there = any(lease.lease_id == lease_id for lease in self.leases())
        if self.world.clocks_agree and recoveries == self.recoveries:
            self._demand(there, "a lease is relied on that is not there")
            self.count("leases relied on")

    # --- at the end --------------------------------------------------------------------------

    def finish(self, check_all: Callable[[Known], None] | None = None) -> None:
        """Check everything once more, now that nobody is at work."""
        root = self._root()
        for name, branch in root.branches.items():
            messages = [k.message for k in self.history(branch) if not k.rewrite]
            self._demand(len(messages) == len(set(messages)), f"{name} has a commit twice")
        self._check_there()
        for known in self.in_history().values():
            if check_all is not None:
                check_all(known)

    def _shadowed(self, needed: Iterable[str]) -> set[str]:
        """Chunk objects that needed tables name, though newer ones may lie over them."""
        found: set[str] = set()
        for key in needed:
            data = self.shelf.objects[key][0]
            held: Manifest | None = None
            if key.startswith("deltas/"):
                held = Delta.from_object(data, BlobRef.to(key, data)).embedded
            elif key.startswith("manifests/"):
                held = Manifest.from_object(data, BlobRef.to(key, data))
            if held is not None:
                for part, table in held.parts:
                    found |= native_keys(held.decode(part, table))
        return found

    def _indexes(self) -> set[str]:
        """The indexes that branches name, and what those name."""
        found: set[str] = set()
        for name, branch in self._root().branches.items():
            if branch.index is not None:
                there = branch.index.key in self.shelf.objects
                self._demand(there, f"{name} names an index that is not there")
                directory = self.objects.load(branch.index, IndexDirectory)
                found.add(branch.index.key)
                for ref in directory.zones.values():
                    pages = self.objects.load(ref, ZonePages)
                    found |= {ref.key, *(blob.key for blob in pages.blobs)}
        return found

    def garbage(self) -> list[str]:
        """Keys of what no snapshot in history or under a lease needs."""
        root = self._root()
        needed = {ROOT_KEY}
        for known in self.kept().values():
            needed |= {snapshot_key(known.snapshot_id), *known.reach}
        needed |= self._shadowed(needed)
        needed |= {page.blob.key for page in root.pages}
        needed |= self._indexes() | self._needed_pages()
        leased = {lease.session.partition("-")[0] for lease in root.leases}
        return [
            key
            for key in sorted(self.shelf.objects)
            if key not in needed
            and not key.startswith("root/")
            and key.split("/")[1].partition("-")[0] not in leased
        ]


def _places(root: Root) -> dict[str, str]:
    """The snapshot of each branch, and of each tag as `tag:name`."""
    found = {name: snapshot_id_of(b.head.key) for name, b in root.branches.items()}
    return found | {f"tag:{name}": snapshot_id_of(ref.key) for name, ref in root.tags.items()}


def _is_shut_out(tip: Branch, start: int, epoch: int | None) -> bool:
    """Whether a session that began then, or has that claim, must not commit to the branch."""
    return tip.epoch != epoch and (epoch is not None or start < tip.epoch)


@lru_cache(maxsize=256)
def _node_of(document: bytes) -> Node:
    parsed = json.loads(document)
    attributes = tuple(sorted(parsed.get("attributes", {}).items()))
    return Node(parsed["shape"][0] if parsed["node_type"] == "array" else None, attributes)
