"""Snapshots that no branch or tag leads to any more, and that can be named again.

Resets, amends, deletions, expiries and restores leave snapshots behind, and a later collection
deletes them. Until then one can be named again, in either of two cases:

1. It was in history in a version of the root from which on there was no collection. What such a
   version reaches, the last collection does not delete, even if it still runs; by the same rule
   older refs are restored.
2. All that it leads to is from sessions that began at the fence or later, or is also reached by an
   ancestor that is in history. No collection so far deletes any of it.

Both are checked against the very root that is replaced. A collection that begins meanwhile replaces
it first, so that the swap fails and the new root decides.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from typing import Any

from zarr_manifests.engine.history.ancestry import (
    ages,
    ancestors,
    entries,
    has_expired,
    locate,
    snapshot_ref,
    starts,
)
from zarr_manifests.engine.history.reachability import Link, follow, tables
from zarr_manifests.engine.root.roots import is_missing
from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.errors import (
    CorruptObjectError,
    MissingChunkError,
    ObjectNotFoundError,
    SnapshotExpiredError,
)
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.chunk_table import native_keys
from zarr_manifests.format.index import Bitmaps
from zarr_manifests.format.manifest import Manifest
from zarr_manifests.format.root import LogEntry, Root
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.format.zone_maps import Zones
from zarr_manifests.ids import session_of, session_start, snapshot_id_of

type _Place = tuple[BlobRef, Snapshot, str | None]
"""A snapshot, and the floor of its history."""


def find_kept(context: ReadContext, root: Root, snapshot_id: str) -> _Place:
    """Like `locate`; also finds what was left behind, if no collection so far deletes parts of it.

    So what it leads to stays, if a swap of this very root puts it into history, or all that the new
    history takes from it.

    Raises
    ------
    SnapshotExpiredError
        If it does not exist, or a collection deletes parts of it.
    """
    try:
        return locate(context, root, snapshot_id)
    except SnapshotExpiredError:
        return find_left(context, root, snapshot_id)


def floor_below(context: ReadContext, root: Root, ref: BlobRef) -> str | None:
    """Id of the oldest snapshot still in the history of the one at `ref`; None if all are.

    Of one that was left behind, it is the history that a branch at it would have.
    """
    if not has_expired(root):
        return None
    own = snapshot_id_of(ref.key)
    try:
        return find_kept(context, root, own)[2]
    except SnapshotExpiredError:
        return own


def find_left(context: ReadContext, root: Root, snapshot_id: str) -> _Place:
    """A snapshot that is not in history as of this root, and that no collection so far deletes.

    Raises
    ------
    SnapshotExpiredError
        If it does not exist, or a collection deletes parts of it.
    """
    ref = snapshot_ref(context, snapshot_id)
    floors = _floors(context, root)
    found = _in_a_version_since(context, root, snapshot_id)
    found = found or _uncollected(context, root, ref, floors)
    if found is None:
        raise SnapshotExpiredError(
            f"snapshot {snapshot_id} is in the history of no branch or tag of "
            f"{context.storage.url} any more, and the collection of garbage that began at version "
            f"{root.collected} deletes parts of it, so it can get no name. While it can still be "
            f"read, repo.readonly_session({snapshot_id!r}) opens it: write its data in "
            "a new commit. Otherwise a clone or a backup may have it"
        )
    at, snapshot, floor = found
    for older, _ in ages(context, at, floor):
        if older.key in floors:
            return at, snapshot, floors[older.key]
    # Every branch has a floor once anything has expired, and what has expired stays so.
    return at, snapshot, snapshot_id if floor is None and has_expired(root) else floor


def left_ids(context: ReadContext, root: Root, known: Set[str]) -> set[str]:
    """Ids of snapshots that have left history, given those in history; some may be collected.

    They are what the log of operations tells, what has expired and is not collected, and what comes
    before either of them.
    """
    found: set[str] = set()
    heads = [snapshot_id_of(piece.newest.key) for piece in context.roots.whole(root).pending]
    for entry in logged(context, root):
        operation, _, left = entry.operation.partition(" from ")
        found |= {entry.snapshot, left}
        if left and not operation.startswith(
            "amend "
        ):  # the one before an amended commit is still there
            heads.append(left)
    walked: set[str] = set()
    for head in dict.fromkeys(heads):
        with suppress(SnapshotExpiredError, CorruptObjectError, MissingChunkError):
            for part in entries(context, snapshot_ref(context, head), None, sys.maxsize):
                if not walked.isdisjoint(part.ids):
                    break
                walked.update(part.ids)
                if not known.isdisjoint(part.ids):
                    break
    return {name for name in found | walked if name} - known


def _floors(context: ReadContext, root: Root) -> dict[str, str | None]:
    """All snapshots in history, by key, with the floor of a history they are in."""
    floors: dict[str, str | None] = {}
    for start, floor in starts(context, root):
        for older, _ in ages(context, start, floor):
            floors.setdefault(older.key, floor)
    return floors


# --- in history since the last collection -------------------------------------------------------


def _in_a_version_since(context: ReadContext, root: Root, snapshot_id: str) -> _Place | None:
    """Where it was in a version of the root that is not older than the last collection."""
    begun = session_start(snapshot_id)
    first = root.collected or root.fence  # a clone begins at its fence
    for entry in logged(context, root):
        if entry.version < max(first, begun):
            break
        if entry.operation.endswith(f" from {snapshot_id}"):
            before = [v for v in archived_versions(context) if first <= v < entry.version]
            return _in_version(context, before[-1], snapshot_id) if before else None
        if entry.snapshot == snapshot_id and entry.version < root.version:
            return _in_version(context, entry.version, snapshot_id)
    return _in_version(context, first, snapshot_id) if begun < first < root.version else None


def _in_version(context: ReadContext, version: int, snapshot_id: str) -> _Place | None:
    try:
        older = context.roots.whole(context.roots.archived(version))
        return locate(context, older, snapshot_id)
    except (ObjectNotFoundError, SnapshotExpiredError):
        return None  # no such archive; or it was not in history
    except (CorruptObjectError, MissingChunkError) as error:
        if is_missing(error):  # a collection has begun since, and the swap will fail
            return None
        raise


# --- of sessions since the fence ----------------------------------------------------------------


def _uncollected(
    context: ReadContext, root: Root, ref: BlobRef, floors: Mapping[str, str | None]
) -> _Place | None:
    """The snapshot, if no collection up to this root deletes anything that only it leads to."""
    line: dict[str, Link] = {}
    shared: BlobRef | None = None
    try:
        for older, _ in ancestors(context, ref):
            if older.key in floors:
                shared = older
                break
            line[older.key] = Link(older, Snapshot)
        if root.fence and not _is_safe(context, root.fence, line, shared, floors):
            return None
    except (CorruptObjectError, MissingChunkError) as error:
        if is_missing(error):
            return None
        raise
    return ref, context.objects.load(ref, Snapshot), None


def _is_safe(
    context: ReadContext,
    fence: int,
    line: Mapping[str, Link],
    shared: BlobRef | None,
    history: Mapping[str, object],
) -> bool:
    """Whether all that these snapshots lead to is young, or reached by the shared ancestor."""

    def load(link: Link) -> Any:
        return context.objects.load(link.ref, link.kind)

    def named_only(link: Link) -> Any:
        return None if link.kind in (Manifest, Zones, Bitmaps) else load(link)

    def wanted(link: Link) -> bool:
        return link.is_within(line) or link.is_within(history)

    def old(keys: set[str]) -> set[str]:
        return {key for key in keys if session_start(session_of(key)) < fence}

    top = [] if shared is None else [Link(shared, Snapshot)]
    kept: set[str] = set()
    for _ in follow(context.runtime, top, named_only, kept, wanted):
        pass
    seen, chunks = {*kept}, set[str]()
    for _, value in follow(context.runtime, line.values(), load, seen, wanted):
        for table in tables(value):
            chunks |= old(native_keys(table))
    if old(seen - kept):
        return False
    if chunks:  # such as those of an array whose base was written anew
        for _, value in follow(context.runtime, top, load, set(), wanted):
            for table in tables(value):
                chunks -= native_keys(table)
    return not chunks


# --- the log of operations -----------------------------------------------------------------------


def archived_versions(context: ReadContext) -> list[int]:
    """The versions of the root that are archived, oldest first."""
    found = (info.key.partition("/")[2] for info in context.storage.list("root/"))
    return [int(text) for text in found if len(text) == 20 and text.isdecimal()]


def logged(context: ReadContext, root: Root) -> Iterator[LogEntry]:
    """All operations that this root and its archives know, newest first."""
    versions, oldest = archived_versions(context), root.version + 1
    while True:
        for entry in reversed(root.log):
            if entry.version < oldest:
                yield entry
        oldest = min(oldest, root.log[0].version if root.log else 0)
        # This archive's log reaches further back, so no single archive is needed.
        while versions and versions[-1] > oldest:
            versions.pop()
        if not versions:
            return
        try:
            root = context.roots.archived(versions.pop())
        except ObjectNotFoundError:
            return  # a collection is removing the oldest archives
