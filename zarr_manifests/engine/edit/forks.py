"""Copies of a workspace that travel to other processes, and their changes' way back.

A `ForkState` is a value: what a copy needs to open the same snapshot, the changes it started
from, and the changes it has now. Unpickling it does no I/O; `revive` opens the snapshot.
Invariants: every copy draws object names of its own before it writes; a chunk in memory does not
travel, so freezing a workspace writes its packs; what a copy changed reaches
a commit only through `merge_forks`; a copy of another repository, session or base is refused.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from zarr_manifests.engine.edit.change_set import ChangeSet, ForkState, same_bytes
from zarr_manifests.engine.edit.merge_forks import Merge, Owners
from zarr_manifests.engine.edit.reporting_copies import Reported, read_reports
from zarr_manifests.engine.edit.workspace import Workspace
from zarr_manifests.engine.objects.chunks import SessionKeys
from zarr_manifests.engine.root.roots import Roots
from zarr_manifests.engine.snapshot.context import Context, ReadContext
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import (
    Conflict,
    ConflictError,
    ConflictKind,
    InvalidArgumentError,
    UnmergedForksError,
)
from zarr_manifests.format.chunk_table import NativeRef
from zarr_manifests.format.nodes import Node
from zarr_manifests.grid import Coords
from zarr_manifests.ids import session_of, snapshot_id_of
from zarr_manifests.runtime import SYSTEM, ForkSafeLock, Runtime
from zarr_manifests.storage.metered import metered

__all__ = ["freeze", "merge_forks", "merge_reports", "refuse_unmerged", "revive"]


_VIEWS: OrderedDict[tuple[str, str], SnapshotView] = OrderedDict()
_VIEWS_KEPT: Final = 8
_VIEWS_LOCK = ForkSafeLock()
_DIFFER: Final = (
    "two writers of the same session changed the same place differently; nothing was merged"
)


def freeze(workspace: Workspace, *, explicit: bool) -> ForkState:
    """The workspace as a copy that can travel.

    A session's workspace becomes the origin of a new copy; a copy's own workspace becomes that
    copy with what it has changed by now, ready to be merged.
    """
    context, origin = workspace.context, workspace.origin
    with workspace.lock:
        workspace.flush()  # memory does not travel
        after = workspace.changes.copy()
        token = None if explicit or origin is not None else workspace.token
        if token is not None and workspace.frozen is None:  # which may be without any change
            workspace.frozen = after
    keys = workspace.keys
    copy_id = keys.session_id if keys is not None else ""
    if origin is not None:
        return replace(
            origin, after=after, copy_id=copy_id if after != origin.after else origin.copy_id
        )
    if token is None and keys is not None and not explicit:
        workspace.pickled = True
    # In a child that os.fork made, what the parent had changed is not known apart; merging all
    # of it changes nothing where the parent has the same.
    before = after if workspace.pid == os.getpid() else ChangeSet()
    return ForkState(
        context.repository_id,
        context.storage,
        context.config,
        workspace.view.ref,
        workspace.view.snapshot.base,
        keys.start if keys is not None else 0,
        keys.lineage if keys is not None else None,
        copy_id,
        before,
        after,
        explicit,
        context.containers,
        context.cache,
        token,
    )


def revive(state: ForkState, runtime: Runtime = SYSTEM) -> Workspace:
    """A workspace that goes on from the copied state."""
    storage = metered(state.storage)
    context = Context.of(
        state.repository_id,
        storage,
        runtime,
        Roots(storage, runtime),
        state.config,
        state.containers,
        state.cache,
        elsewhere=True,
    )
    keys = None
    if state.lineage is not None:
        keys = SessionKeys(state.start, runtime, state.lineage)
    return Workspace(context, _view(context, state), keys, state)


def _view(context: ReadContext, state: ForkState) -> SnapshotView:
    """The snapshot, opened once a process for all the copies that tasks bring along."""
    place = (state.storage.url, state.head.key)
    with _VIEWS_LOCK:
        view = _VIEWS.get(place)
        if view is not None:
            _VIEWS.move_to_end(place)
            return view
    view = context.open_view(state.head, state.base)
    with _VIEWS_LOCK:
        _VIEWS[place] = view
        if len(_VIEWS) > _VIEWS_KEPT:
            _VIEWS.popitem(last=False)
    return view


def merge_forks(
    workspace: Workspace,
    owners: Owners,
    forks: Sequence[ForkState],
) -> None:
    """Bring the forks' changes into the workspace's, all or none.

    `owners` says which copy what was merged before came from; it is brought up to date.

    Raises
    ------
    InvalidArgumentError
        If a fork belongs to another repository, session or base.
    ConflictError
        If forks wrote different bytes to the same chunk, or changed the same metadata.
    """
    assert workspace.keys is not None
    for fork in forks:
        repository_id = workspace.context.repository_id
        here = (repository_id, workspace.view.ref.key, workspace.keys.lineage)
        if (fork.repository_id, fork.head.key, fork.lineage) != here:
            if fork.repository_id != repository_id:
                what = f"another repository ({fork.repository_id})"
            elif fork.head.key != workspace.view.ref.key:
                what = f"another base ({snapshot_id_of(fork.head.key)})"
            else:
                what = "another session"
            raise InvalidArgumentError(
                f"a fork of {what} cannot be merged here; merge it into the session it was made "
                "from, before that session commits"
            )
    _merge(workspace, owners, [(fork.before, fork.after, fork.copy_id) for fork in forks])


def merge_reports(workspace: Workspace, owners: Owners) -> None:
    """Bring in what the session's copies have reported, all or none; its open token is gone.

    Raises
    ------
    ConflictError
        If two of them, or one and the session, wrote different bytes to the same chunk.
    CorruptObjectError
        If a report cannot be read.
    """
    assert workspace.keys is not None
    with workspace.lock:
        reported = read_reports(workspace.storage, workspace.keys, workspace.runtime)
        nodes = {node.node_id: node for node in workspace.nodes().values()}
        _check_one_writer_each(reported, nodes)
        before = (workspace.frozen or ChangeSet()).copy()
        after = before.copy()
        for (node_id, coords), refs in reported.items():
            ref = refs[min(refs)]  # they all say the same
            if isinstance(ref, NativeRef):
                after.unsynced.append(ref.key)
            elif node_id in nodes and workspace.ref(nodes[node_id], coords) is None:
                continue  # it is absent anyway
            elif before.chunks.get(node_id, {}).get(coords) == ref:
                # The session had unset it, too, and has written it since. As it was, it would seem
                # that no copy has changed it.
                del before.chunks[node_id][coords]
            after.chunks.setdefault(node_id, {})[coords] = ref
            # Whether the copy had read it before is not told.
            after.reads.note(node_id, coords)
        _merge(workspace, owners, [(before, after, workspace.keys.lineage_prefix)])


def _check_one_writer_each(reported: Reported, nodes: Mapping[bytes, Node]) -> None:
    """Refuse chunks that two copies have changed differently."""
    differ: dict[bytes, list[Coords]] = {}
    for (node_id, coords), refs in reported.items():
        first, *others = refs.values()
        if not all(same_bytes(first, ref) for ref in others):
            differ.setdefault(node_id, []).append(coords)
    if differ:
        reason = "written with different bytes by two copies of the session's store"
        paths = {
            node_id: f"/{nodes[node_id].path}" if node_id in nodes else "/?" for node_id in differ
        }
        raise ConflictError(
            _DIFFER,
            [
                Conflict(
                    ConflictKind.CHUNK, paths[node_id], "chunks", reason, tuple(sorted(chunks)[:20])
                )
                for node_id, chunks in differ.items()
            ],
        )


def _merge(
    workspace: Workspace, owners: Owners, changed: Sequence[tuple[ChangeSet, ChangeSet, str]]
) -> None:
    """Bring in what each copy, named last, changed from the one to the other; all or none."""
    with workspace.lock:
        trial = Merge(workspace.changes.copy(), workspace.view.nodes, owners)
        for began, has, copy_id in changed:
            # What they have spilled is read by the session, which knows how.
            spill = workspace.changes.spill
            began, has = (replace(each, spill=spill) for each in (began, has))
            conflicts = trial.apply(began, has, copy_id)
            if conflicts:
                raise ConflictError(_DIFFER, conflicts)
        before, workspace.changes = workspace.changes, trial.mine
        conflicts = workspace.adopt_merged()
        if conflicts:
            workspace.changes = before
            workspace.packs.relocate(before)
            raise ConflictError(_DIFFER, conflicts)
        owners.take(trial.owners)


def refuse_unmerged(workspace: Workspace) -> None:
    """Raise if copies of the session's store, made by pickling or `os.fork`, were written to.

    Only such a copy leaves an empty object; what was asked for by `fork` may be left out.

    Raises
    ------
    UnmergedForksError
        If such copies have left objects in the storage: committing would leave out their changes.
    """
    assert workspace.keys is not None
    prefix = workspace.keys.lineage_prefix
    written = workspace.storage.list(prefix)
    writers = {session_of(info.key) for info in written if info.nbytes == 0}
    writers.discard(workspace.keys.session_id)
    if writers:
        raise UnmergedForksError(
            f"the store was pickled, or the process forked, and {len(writers)} copies of it were "
            "written to, which this commit would leave out. Write through zarr_manifests.write, or "
            "give each worker session.fork() and merge what comes back. If the copies' work is not "
            "wanted, call commit(..., discard_unmerged=True)"
        )
