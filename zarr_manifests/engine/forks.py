"""Sends copies of a workspace to other processes, and merges their changes back.

A `ForkState` is a value: what a copy needs to open the same snapshot, the changes it started from,
and the changes it has now. Unpickling it does no I/O; `revive` opens the snapshot. Invariants:
every copy takes object keys of its own before it writes; staged chunks are not pickled, so freezing
a workspace writes its packs; a frozen copy's chunks are durable, and it holds few refs, since long
tables are spilled; a copy's changes reach a commit only through `merge_forks` or
`merge_reports`; a copy of another repository, session or base is refused. A commit leaves out no
detected copy's changes unless its caller says so; reports are merged once, after the session's
token is gone, so that a retried commit has them; a session with new object keys has no copies.

The snapshot that a session reads, and the writer that moves it
---------------------------------------------------------------

Invariants: the root version a writer starts from is no newer than the snapshot it reads; each
commit, discard or refresh gives a writer new object keys; its lease moves with it, and is dropped
when the writer is garbage collected; a closed writer can be read, but not changed.

A fork is merged completely or not at all, and a copy's changes count once, however often it is
merged.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np
from msgspec.structs import replace

from zarr_manifests.engine.ancestry import Follower, open_head
from zarr_manifests.engine.change_set import (
    ChangeSet,
    ForkState,
    Rows,
    Spilled,
    lies_below,
    resident,
    rows_of,
)
from zarr_manifests.engine.heartbeat import HeldLease
from zarr_manifests.engine.leases import give_up, move, take
from zarr_manifests.engine.node_edits import check_reporting, close_token, open_token, read_reports
from zarr_manifests.engine.objects import ObjectReader, SessionKeys
from zarr_manifests.engine.overlay import SessionView, freeze_reader, revived, same_chunk
from zarr_manifests.engine.read_ahead import SnapshotPreload
from zarr_manifests.engine.roots import check_fence
from zarr_manifests.engine.view import Context, SnapshotView
from zarr_manifests.engine.workspace import Workspace
from zarr_manifests.errors import (
    Conflict,
    ConflictError,
    ConflictKind,
    FencedError,
    InvalidArgumentError,
    ManifestsError,
    ObjectNotFoundError,
    UnmergedForksError,
)
from zarr_manifests.format.chunk_table import UNSET, ChunkTable, NativeRef, RefKind, native_keys
from zarr_manifests.format.manifest import Node
from zarr_manifests.grid import Coords
from zarr_manifests.ids import lineage_of, session_of, snapshot_id_of
from zarr_manifests.planning.components import above
from zarr_manifests.planning.merge import (
    Layer,
    difference,
    in_box,
    inside,
    merge_layers,
    narrower,
    select,
)
from zarr_manifests.runtime import SYSTEM, Runtime

_ABSENT: Final = object()
_LISTED: Final = 20


def _may_share(ours: Rows, theirs: Rows) -> bool:
    """Whether both may have rows of the same chunks; fetches nothing."""
    if not ours.box.overlaps(theirs.box):
        return False
    if resident(ours) and not in_box(ours, theirs.box).any():
        return False
    return not resident(theirs) or bool(in_box(theirs, ours.box).any())


class Merge:
    """Merges the changes of forks into a session's.

    A fork's change applies where the session has not changed since the fork was made, where the
    same copy made the earlier change, or where both made the same change. Anything else is a
    conflict.

    Parameters
    ----------
    contents : SessionView
        The session's contents. Merged is a copy of its changes, `mine`.
    merged : mapping of str to ChangeSet
        What was merged earlier of each copy, by copy id. `merged` is a copy with what is new.
    """

    def __init__(self, contents: SessionView, merged: Mapping[str, ChangeSet]) -> None:
        self.mine, self.merged = contents.changes.copy(), dict(merged)
        self._view, self._same = contents.view, partial(same_chunk, contents)

    def apply(self, before: ChangeSet, after: ChangeSet, copy_id: str) -> list[Conflict]:
        """Apply what the copy `copy_id` changed between `before` and `after`; return the conflicts.

        If there are conflicts, nothing is applied.
        """
        before, known = self.merged.get(copy_id, before), after
        theirs = after.since(before)
        if copy_id in self.merged:
            known = before.copy()
        alive = {node.node_id for node in after.nodes.values() if node is not None}
        replaced = {
            old.node_id: path
            for path, new in theirs.nodes.items()
            if (old := self._node(before, path)) is not None
            and (new is None or new.node_id != old.node_id)
            and old.node_id not in alive  # or it was only moved
        }
        for node_id in replaced:
            theirs.tables.pop(node_id, None)
        differ = "changed in two copies of one session, differently"
        conflicts = [
            Conflict(ConflictKind.METADATA, f"/{path}", "metadata", differ)
            for path, node in theirs.nodes.items()
            if self.mine.nodes.get(path, _ABSENT) not in (before.nodes.get(path, _ABSENT), node)
        ]
        gone = "written in the session and deleted in a fork"
        homes = (self._view.by_id.get(node_id) for node_id in replaced)
        now = {n.node_id: n.path for n in homes if n and n.path not in self.mine.nodes}
        now |= {node.node_id: path for path, node in self.mine.nodes.items() if node is not None}
        conflicts += [
            Conflict(ConflictKind.DELETE, f"/{path}", "chunks", gone)
            for node_id, path in replaced.items()
            if self.mine.beyond(node_id, before) or now.get(node_id, path) != path
        ]
        both: dict[str, Node | None] = {}
        if theirs.nodes:  # what the session has made and deleted again is in neither
            lost = (path for path in before.nodes if path not in self._view.nodes)
            both = {**dict.fromkeys(lost), **self.mine.nodes, **theirs.nodes}
        conflicts += [
            Conflict(ConflictKind.DELETE, f"/{path}", "metadata", f"/{group} was deleted in a copy")
            for path, node in both.items()
            for group in (above(path) if node is not None else ())
            if both.get(group, node) is None
            if before.nodes.get(group, _ABSENT) is not None  # the fork knew
            if (path in theirs.nodes) != (group in theirs.nodes)
        ]
        conflicts += self._chunk_conflicts(before, theirs)
        conflicts += self._cut_conflicts(before, theirs)
        if not conflicts:
            _put(theirs, after, replaced, self.mine)
            if known is not after:
                _put(theirs, after, replaced, known)
            self.merged[copy_id] = known
        return conflicts

    def _node(self, changes: ChangeSet, path: str) -> Node | None:
        return changes.nodes[path] if path in changes.nodes else self._view.nodes.get(path)

    def _chunk_conflicts(self, before: ChangeSet, theirs: ChangeSet) -> list[Conflict]:
        paths = self._paths(theirs)
        conflicts: list[Conflict] = []
        for node_id in theirs.touched():
            kind, path = ConflictKind.CHUNK, paths.get(node_id)
            if path is None:
                reason = (
                    "written in a fork, to an array that was deleted, "
                    "or made in a copy that is not merged yet"
                )
                kind = ConflictKind.DELETE
                twice = [*map(tuple, theirs.rows(theirs.layers(node_id)[0]).coords().tolist())]
            else:
                reason = "written with different bytes by two writers of the same session"
                node = self._node(theirs, path) or self._node(self.mine, path)
                twice = self._written_twice(before, theirs, node_id, node)
            if twice:
                where = tuple(sorted(twice)[:_LISTED])
                conflicts.append(Conflict(kind, f"/{path or '?'}", "chunks", reason, where))
        return conflicts

    def _written_twice(
        self, before: ChangeSet, theirs: ChangeSet, node_id: bytes, node: Node | None
    ) -> list[Coords]:
        """Chunks that the session has changed since `before`, and the copy to other bytes."""
        known, now = before.layers(node_id), self.mine.layers(node_id)
        moved = [rows for rows in (*known, *now) if rows not in known or rows not in now]
        cut = self.mine.truncated.get(node_id)
        cut = None if cut == before.truncated.get(node_id) else cut
        twice: set[Coords] = set()
        for rows in theirs.layers(node_id):
            if cut is None and not any(_may_share(each, rows) for each in moved):
                continue  # nothing is fetched
            at = theirs.rows(rows).coords()
            changed = difference(self.mine.at(node_id, at), before.at(node_id, at))
            places = [] if changed is None else [changed.coords()]
            places += [] if cut is None else [at[~inside(at, cut)]]
            for coords in map(tuple, np.concatenate(places).tolist() if places else ()):
                ours, ref = self.mine.get(node_id, coords), theirs.get(node_id, coords)
                if ours is None or ref is None or not self._same(node, ours, ref):
                    twice.add(coords)
        return [*twice]

    def _paths(self, theirs: ChangeSet) -> dict[bytes, str]:
        """The paths of the nodes whose chunks the copy has changed, if they are still there."""
        changed = {**self.mine.nodes, **theirs.nodes}
        found = {node.node_id: path for path, node in changed.items() if node is not None}
        for node_id in {*theirs.tables, *theirs.truncated} - found.keys():
            node = self._view.by_id.get(node_id)
            if node is not None and node.path not in changed:
                found[node_id] = node.path
        return found

    def _cut_conflicts(self, before: ChangeSet, theirs: ChangeSet) -> list[Conflict]:
        """Conflicts where one side wrote chunks that the other side's resize removes."""
        conflicts: list[Conflict] = []
        paths = self._paths(theirs)
        # A fork of another fork may have written to what that one has made larger.
        for path in {*self.mine.nodes, *theirs.nodes, *paths.values()}:
            ours = self._node(self.mine, path)
            node = theirs.nodes.get(path, ours)
            if (
                node is None
                or node.array is None
                or ours == theirs.nodes.get(path, self._node(before, path))
            ):
                continue
            # What one side sets and the other unsets is gone with both.
            layers = [
                side.rows(rows)
                for side in (self.mine, theirs)
                for rows in side.layers(node.node_id)
                if not lies_below(rows.box, node.array.grid.hi)
            ]
            conflicts += _cut_off(path, layers, node.array.grid.hi)
        for node_id, shape in theirs.truncated.items():
            # The fork may have made it larger again, so its shape does not tell.
            layers = [self.mine.rows(rows) for rows in self.mine.beyond(node_id, before)]
            conflicts += _cut_off(paths.get(node_id, "?"), layers, shape)
        return [*dict.fromkeys(conflicts)]


def _cut_off(path: str, layers: Sequence[ChunkTable], shape: Coords) -> list[Conflict]:
    """A conflict if these have chunks outside the shape."""
    table = merge_layers([Layer(None, tuple(layers))]).table
    if table is None:
        return []
    coords = table.coords()
    cut = coords[~inside(coords, shape) & (table.kind != RefKind.UNSET)]
    if not len(cut):
        return []
    reason = "written by one writer and cut off by another of the same session"
    where = tuple(map(tuple, cut[:_LISTED].tolist()))
    return [Conflict(ConflictKind.SHAPE, f"/{path}", "chunks", reason, where)]


def _put(theirs: ChangeSet, after: ChangeSet, replaced: Iterable[bytes], mine: ChangeSet) -> None:
    """Put a copy's changes on top of mine."""
    # This comes first: rows written to a manifest name objects that must be durable.
    if theirs.unsynced:
        known = {*mine.unsynced}
        mine.unsynced += [key for key in theirs.unsynced if key not in known]
    for node_id in replaced:
        mine.forget(node_id)
    for path, node in theirs.nodes.items():
        if node is None and path not in after.nodes:
            mine.leave_node(path)
        else:
            mine.set_node(path, node)
    for node_id, tables in theirs.tables.items():
        for table in tables:
            mine.put_table(node_id, table)
    for node_id, shape in theirs.truncated.items():
        mine.truncated[node_id] = narrower(mine.truncated.get(node_id), shape) or shape
    mine.reads.add(theirs.reads)
    mine.take_zones(theirs.packed_zones())


_LOG = logging.getLogger(__name__)
_MOST_SENT: Final = 8192
"""A copy sends at most about so many refs of an array, and spills the others: about 80 KiB."""
_DIFFER: Final = (
    "two writers of the same session changed the same place differently; nothing was merged"
)


def freeze(workspace: Workspace, *, explicit: bool) -> ForkState:
    """The workspace as a copy that can be pickled.

    For a session's workspace this is a new copy. For a copy's workspace it is that copy with its
    changes so far, ready to merge.
    """
    with workspace.lock:
        if workspace.origin is not None:
            workspace.flush()  # staged chunks are not pickled
            return _frozen_copy(workspace, workspace.origin)
        state = fork_state(workspace)
        if explicit:
            return state
        if workspace.token is None:
            workspace.pickled = True
        elif workspace.frozen is None:  # it may have no changes
            workspace.frozen = state.after
        return replace(state, explicit=False, token=workspace.token)


def fork_state(workspace: Workspace) -> ForkState:
    """A new copy of the workspace, which is a session's or a copy's itself."""
    contents, keys, origin = workspace.contents, workspace.keys, workspace.origin
    with workspace.lock:
        workspace.flush()
        after = contents.changes.copy()
        # A child of os.fork cannot tell the parent's changes from its own. Merging all of them
        # changes nothing where the parent has the same.
        before, copy_id = ChangeSet() if origin is None else origin.before, keys.session_id
        if workspace.pid == os.getpid():
            after.zones = {}  # whatever merges the copy has them
            before, copy_id = after, ""
    return replace(
        freeze_reader(contents),
        start=keys.start,
        lineage=keys.lineage,
        copy_id=copy_id,
        before=before,
        after=after,
        explicit=True,
        depth=0 if origin is None else origin.depth + 1,
    )


def _frozen_copy(workspace: Workspace, origin: ForkState) -> ForkState:
    """The copy with its changes so far, small enough for a session that merges many of them.

    The copy makes its chunks durable, so that the session need not know their keys.
    """
    try:
        workspace.make_durable(set(origin.before.unsynced))
    except ObjectNotFoundError as error:
        start, fence = workspace.keys.start, workspace.context.roots.read().root.fence
        if start >= fence:
            raise
        raise FencedError(
            f"the session of this copy began at version {start}, before the repository's fence "
            f"{fence}: what it wrote has been collected. Open another session and write it again"
        ) from error
    after = workspace.contents.changes.copy()
    after.lighten(origin.before, min(_MOST_SENT, workspace.context.config.spill_refs))
    return replace(origin, after=after, copy_id=workspace.keys.session_id)


def revive(state: ForkState, runtime: Runtime = SYSTEM) -> Workspace:
    """A workspace that continues from the copied state."""
    assert state.lineage is not None
    keys = SessionKeys(state.start, runtime, state.lineage)
    return Workspace(*revived(state, runtime), keys, state)


def merge_forks(workspace: Workspace, forks: Sequence[ForkState]) -> None:
    """Merge the changes of the forks into the workspace, all or none.

    Forks are merged before forks of them, which may have changed what they made.

    Raises
    ------
    InvalidArgumentError
        If a fork belongs to another repository, session or base, or has chunk refs that the
        session must not commit.
    ConflictError
        If forks wrote different bytes to the same chunk, or changed the same metadata.
    """
    forks = sorted(forks, key=lambda fork: fork.depth)
    for fork in forks:
        repository_id = workspace.context.repository_id
        here = (repository_id, workspace.contents.view.ref.key, workspace.keys.lineage)
        if (fork.repository_id, fork.head.key, fork.lineage) != here:
            if fork.repository_id != repository_id:
                what = f"another repository ({fork.repository_id})"
            elif fork.head.key != workspace.contents.view.ref.key:
                what = f"another base ({snapshot_id_of(fork.head.key)})"
            else:
                what = "another session"
            raise InvalidArgumentError(
                f"a fork of {what} cannot be merged here; merge it into the session it was made "
                "from, before that session commits"
            )
    for fork in forks:
        _check_refs(workspace, fork)
    _merge(workspace, [(fork.before, fork.after, fork.copy_id) for fork in forks if fork.copy_id])


def _check_refs(workspace: Workspace, fork: ForkState) -> None:
    """Raise if a fork has changed refs to what the workspace's session must not commit.

    A session's lease and start protect the objects of its own lineage, and history those that its
    snapshot reaches. A ref to anything else may lose its object before the commit lands. A manifest
    that the session or its copies have spilled is read only if it may have refs to other objects.

    Raises
    ------
    InvalidArgumentError
        If an object was written neither by this session nor by its copies, and the snapshot does
        not reach it; or a chunk lies outside its array.
    """
    changes, objects = fork.after, workspace.context.objects
    view, lineage = workspace.contents.view, workspace.keys.lineage_prefix.removeprefix("chunks/")
    made = {node.node_id: node for node in changes.nodes.values() if node is not None}
    for node_id in changes.touched():
        node = made.get(node_id) or view.by_id.get(node_id)
        if node is None:
            raise InvalidArgumentError("changes have chunks of an array that does not exist")
        before = fork.before.layers(node_id)
        for rows in changes.layers(node_id):
            if not any(rows is other for other in before):
                _check_grid(objects, node, rows)
                _check_objects(objects, view, node_id, rows, lineage)


def _check_grid(objects: ObjectReader, node: Node, rows: Rows) -> None:
    if node.array is None or lies_below(rows.box, node.array.grid.hi):
        return
    table = rows_of(objects, rows)
    if rows.box.ndim != node.array.grid.ndim:
        raise InvalidArgumentError(f"/{node.path}: changes have chunks with {rows.box.ndim} axes")
    outside = ~inside(table.coords(), node.array.grid.hi) & (table.kind != RefKind.UNSET)
    if outside.any():
        first = tuple(table.coords()[outside][0].tolist())
        raise InvalidArgumentError(f"/{node.path}: chunk {first} lies outside the array")


def _check_objects(
    objects: ObjectReader, view: SnapshotView, node_id: bytes, rows: Rows, lineage: str
) -> None:
    if isinstance(rows, Spilled) and lineage_of(session_of(rows.key)) != lineage:
        foreign = {rows.key}
    elif isinstance(rows, Spilled) and rows.is_own:
        return
    else:
        foreign = _foreign(rows_of(objects, rows), lineage)
    for reached in _reached(view, node_id) if foreign else ():
        foreign -= reached
        if not foreign:
            break
    if foreign:
        raise InvalidArgumentError(
            f"changes refer to {min(foreign)}, which neither this session nor its copies have "
            "written, and which its snapshot does not reach; it may be deleted at any time"
        )


def _foreign(table: ChunkTable, lineage: str) -> set[str]:
    other = np.array([lineage_of(source) != lineage for source in table.sources], np.bool_)
    if not other.any():
        return set()
    rows = (table.kind == RefKind.NATIVE) & other[table.source * (table.kind == RefKind.NATIVE)]
    return native_keys(select(table, rows)) if rows.any() else set()


def _reached(view: SnapshotView, node_id: bytes) -> Iterator[set[str]]:
    """Keys of the chunk objects that the snapshot reaches, those of the node first."""
    for each in (node_id, *(other for other in view.by_id if other != node_id)):
        table = view.chunks(each) if each in view.by_id else None
        if table is not None:
            yield native_keys(table)


def merge_reports(workspace: Workspace) -> None:
    """Merge what the session's copies reported, all or none; the open token must be gone.

    Raises
    ------
    ConflictError
        If two copies, or a copy and the session, wrote different bytes to the same chunk.
    CorruptObjectError
        If a report cannot be read.
    """
    with workspace.lock:
        reported = read_reports(workspace.storage, workspace.keys, workspace.runtime)
        contents = workspace.contents
        nodes = {node.node_id: node for node in contents.nodes().values()}
        before = (workspace.frozen or ChangeSet()).copy()
        afters: dict[str, ChangeSet] = {}
        for (node_id, coords), refs in reported.items():
            unset = {*refs.values()} == {UNSET}
            if unset and node_id in nodes and contents.ref(nodes[node_id], coords) is None:
                continue  # it is absent anyway
            for copy_id, ref in refs.items():
                if copy_id not in afters:
                    afters[copy_id] = before.copy()
                after = afters[copy_id]
                if isinstance(ref, NativeRef):
                    after.unsynced.append(ref.key)
                elif before.chunks.get(node_id, {}).get(coords) == ref:
                    # The session had unset the chunk too, and has written it since. With the old
                    # unset in `before`, the copy would seem to have changed nothing.
                    del before.chunks[node_id][coords]
                after.chunks.setdefault(node_id, {})[coords] = ref
                # Reports do not say whether the copy had read the chunk before.
                after.reads.note(node_id, coords)
        _merge(workspace, [(before, after, copy_id) for copy_id, after in afters.items()])


def _merge(workspace: Workspace, changed: Sequence[tuple[ChangeSet, ChangeSet, str]]) -> None:
    """Merge each copy's changes, given as (before, after, copy id); all or none."""
    with workspace.lock:
        workspace.flush()  # a table of refs has no room for staged chunks, except inline
        contents = workspace.contents
        trial = Merge(contents, workspace.merged)
        for began, has, copy_id in changed:
            # The session reads what the copies spilled.
            spill = contents.changes.spill
            began, has = (replace(each, spill=spill) for each in (began, has))
            conflicts = trial.apply(began, has, copy_id)
            if conflicts:
                raise ConflictError(_DIFFER, conflicts)
        before = contents.changes
        contents.rebase(contents.view, trial.mine)
        conflicts = workspace.edits.adopt_merged()
        if conflicts:
            contents.rebase(contents.view, before)
            raise ConflictError(_DIFFER, conflicts)
        workspace.merged = trial.merged


class Copies:
    """Tracks the copies of one session, and merges their changes into its workspace.

    Parameters
    ----------
    workspace : Workspace
        The session's workspace.
    reporting : bool
        Whether copies report their changes through the storage.

    Attributes
    ----------
    gathered : bool
        Whether the copies' reports are merged into the workspace.
    """

    def __init__(self, workspace: Workspace, *, reporting: bool) -> None:
        self._workspace, self._reporting = workspace, reporting
        self._merged = self._shut = self.gathered = False
        if reporting:
            check_reporting(workspace.storage, workspace.keys)
            workspace.token = open_token(workspace.storage, workspace.keys)

    def merge(self, states: Sequence[ForkState]) -> None:
        """Merge the changes of these copies into the workspace, all or none."""
        merge_forks(self._workspace, states)
        self._merged = True

    def check_merged(self) -> None:
        """Raise if a copy that does not report was written to, and none was merged.

        Only a copy made by pickling or `os.fork` writes an empty object; one made with `fork` may
        stay unmerged.

        Raises
        ------
        UnmergedForksError
            If there is such a copy: the commit would leave out its changes.
        """
        workspace = self._workspace
        if workspace.token is not None or not workspace.copied or self._merged:
            return
        written = workspace.storage.list(workspace.keys.lineage_prefix)
        writers = {session_of(info.key) for info in written if info.nbytes == 0}
        writers.discard(workspace.keys.session_id)
        if writers:
            raise UnmergedForksError(
                f"the store was pickled, or the process forked, and {len(writers)} copies of it "
                "were written to, which this commit would leave out. Write through "
                "zarr_manifests.write, or give each worker session.fork() and merge what comes "
                "back. If the copies' work is not wanted, call commit(..., discard_unmerged=True)"
            )

    def bring_in(self, *, discard: bool = False) -> None:
        """Stop all reporting copies and merge their reports; refuse other unmerged copies.

        With `discard`, nothing is merged and nothing is refused.
        """
        workspace = self._workspace
        if workspace.token is None:
            if not discard:
                self.check_merged()
        elif not self.gathered:
            roots = workspace.context.roots
            if not discard:  # if fenced, reports may be gone
                check_fence(roots, roots.read().root, workspace.keys)
            if not self._shut:
                close_token(workspace.storage, workspace.token)
                self._shut = True
            if not discard:
                merge_reports(workspace)
                self.gathered = True

    def begin_anew(self, *, renamed: bool) -> None:
        """Forget what was merged; a session with new object keys opens a new token."""
        self._merged = False
        if self._reporting and renamed:
            workspace, token = self._workspace, None
            try:
                token = open_token(workspace.storage, workspace.keys)
            except ManifestsError:
                _LOG.warning("copies of the session cannot report until its commit", exc_info=True)
            workspace.token = token
            self._shut = self.gathered = False


# --- pin ------------------------------------------------------------------------------------------


class Pin:
    """The snapshot that a session reads, and its manifests that are fetched in the background.

    Parameters
    ----------
    contents : SessionView
        The snapshot, with a writer's changes over it.
    branch : str, optional
        The branch that the session reads.
    follow_s : float, optional
        Move to that branch's head automatically, at this interval in seconds.

    Attributes
    ----------
    preload : SnapshotPreload
        The manifests fetched in the background.
    """

    def __init__(
        self, contents: SessionView, branch: str | None, follow_s: float | None = None
    ) -> None:
        self.contents, self.branch = contents, branch
        context = contents.context
        if follow_s is not None and branch is not None:
            contents.follower = Follower(context, branch, follow_s)
        self.preload = SnapshotPreload(context, contents.view)
        # Tied to the contents, since the store may outlive the session.
        self.preload.cancel_with(contents)
        self.preload.start()

    def head(self) -> SnapshotView:
        """The head of the branch that the session reads, opened.

        Raises
        ------
        InvalidArgumentError
            If the session reads no branch.
        NotFoundError
            If the branch was deleted.
        """
        if self.branch is None:
            raise InvalidArgumentError(
                "the session reads a tag or a fixed snapshot; only a session "
                "of a branch can be refreshed"
            )
        return open_head(self.contents.context, self.branch, self.contents.view)

    def refresh(self) -> bool:
        """Move a session without changes to the head of its branch; whether it was newer."""
        with self.contents.lock:
            view = self.head()
            if view is self.contents.view:
                return False
            self.contents.start_at(view)
            return True


class SessionWriter:
    """What a writable session changes: its workspace, copies and lease. Thread-safe.

    Parameters
    ----------
    context : Context
        The repository.
    view : SnapshotView
        The snapshot.
    branch : str
        The branch to commit to.
    start : int
        The root version that the session begins at.
    lease_ms : int, optional
        Hold a lease with this timeout.
    epoch : int, optional
        The epoch under which the session claimed its branch.
    reporting : bool
        Whether copies of the session's store report what they change.

    Attributes
    ----------
    workspace : Workspace
        What the session reads and changes.
    copies : Copies
        The copies of its store.
    lease : HeldLease or None
        Its lease, if it holds one.
    pin : Pin
        The snapshot that it reads.
    """

    def __init__(
        self,
        context: Context,
        view: SnapshotView,
        branch: str,
        start: int,
        *,
        lease_ms: int | None = None,
        epoch: int | None = None,
        reporting: bool = False,
    ) -> None:
        self.context, self.branch, self._epoch = context, branch, epoch
        keys = self._keys_from(start)
        self.workspace = Workspace(context, view, keys)
        self.copies = Copies(self.workspace, reporting=reporting)
        self.lease: HeldLease | None = None
        if lease_ms is not None:
            owner = f"writer of {branch}"
            self.lease = take(context, view.snapshot_id, lease_ms, owner, keys.session_id)
            # Not a method of this object, which would then never be garbage collected.
            weakref.finalize(self, context.heart.drop, self.lease)
        self.pin = Pin(self.workspace.contents, branch)

    def move_to(self, view: SnapshotView, start: int | None = None) -> None:
        """Move to this snapshot and drop all changes.

        Its lease moves along. With `start`, a version of the root, the session gets new object
        keys, and copies made before cannot be merged any more.
        """
        renamed = start is not None
        goes_on = renamed or view is not self.workspace.contents.view
        keys = self.workspace.keys if start is None else self._keys_from(start)
        if renamed:
            self.copies.bring_in(discard=True)
        self.pin.preload.cancel()
        self.workspace.start_at(view, keys)
        self.copies.begin_anew(renamed=renamed)
        if goes_on:
            self.move_lease()

    def move_lease(self) -> None:
        """Let the lease, if there is one, keep the snapshot that the session reads now."""
        if self.lease is not None:
            session, view = self.workspace.keys.session_id, self.workspace.contents.view
            move(self.context, self.lease, session, view.snapshot_id)

    def refresh(self) -> None:
        """Move a session without changes to the head of its branch.

        Raises
        ------
        NotFoundError
            If the branch was deleted.
        """
        # Read first: the session's start must not be newer than the snapshot it reads.
        start = self.context.roots.read().root.version
        view = self.pin.head()
        if view is not self.workspace.contents.view:
            self.move_to(view, start)

    def discard_changes(self) -> None:
        """Drop all uncommitted changes."""
        workspace = self.workspace
        workspace.check_open()
        with workspace.lock:
            # New object keys, so that a commit does not refuse what older copies left unmerged.
            start = workspace.keys.start
            if self.lease is not None:  # it moves only if not fenced
                start = self.context.roots.read().root.version
            self.move_to(workspace.contents.view, start)

    def drop(self, why: str) -> None:
        """Drop all uncommitted changes, and close."""
        with self.workspace.lock:
            self.move_to(self.workspace.contents.view)
            self.close(why)

    def close(self, why: str) -> None:
        """Refuse further changes, stop background fetches and give up the lease."""
        self.pin.preload.cancel()
        workspace = self.workspace
        if workspace.closed is None:
            workspace.closed = f"{why}; open another one to make changes"
        if workspace.token is not None and workspace.pid == os.getpid():
            try:
                self.copies.bring_in(discard=True)
            except ManifestsError:
                _LOG.warning("copies of a session were not told that it ended", exc_info=True)
        try:
            held, self.lease = self.lease, None
            if held is not None:
                give_up(self.context, held)
        except ManifestsError:
            # Nobody renews it any more, so a collection removes it when its time is up.
            _LOG.warning("the lease of a session was not given up", exc_info=True)

    def _keys_from(self, start: int) -> SessionKeys:
        return SessionKeys(start, self.context.runtime, epoch=self._epoch)
