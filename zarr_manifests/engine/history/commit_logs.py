"""The logs of commits: which deltas are between two snapshots, and what they touched.

A log that cannot be read, or belongs to another commit than its snapshot says, is an error:
conflicts are never guessed.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

import numpy as np

from zarr_manifests.engine.history.ancestry import ancestors, snapshot_ref
from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.delta import CommitKind, Delta
from zarr_manifests.format.manifest import Manifest
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.snapshot import DeltaEntry, Snapshot
from zarr_manifests.grid import Box, IndexArray
from zarr_manifests.ids import snapshot_key


def deltas_between(
    context: ReadContext, older: SnapshotView, newer: BlobRef, floor: str | None = None
) -> list[Delta] | None:
    """Deltas of the commits after `older` up to `newer`, newest first; None if not an ancestor.

    Snapshots older than `floor` do not count as ancestors. Commits that changed nothing may be left
    out.
    """
    listed = listed_since(context, older, newer, floor)
    if listed is None:
        found: list[Delta] = []
        for ref, snapshot in ancestors(context, newer, floor):
            if ref.key == older.ref.key:
                return found
            found.append(delta_of(context, snapshot))
        return None
    context.objects.prefetch([(entry.log, Delta) for entry in listed])
    deltas = []
    for entry in reversed(listed):
        delta = context.objects.load(entry.log, Delta)
        entry.check(delta)
        deltas.append(delta)
    return deltas


def listed_since(
    context: ReadContext, older: SnapshotView, newer: BlobRef, floor: str | None = None
) -> tuple[DeltaEntry, ...] | None:
    """The entries that `newer`'s read list has after the ancestor `older`; None if unclear.

    It is valid if it has the log of the commit that made `older`, which is unique to that snapshot,
    and after it each commit's own log. Then no snapshot in between has to be read, and logs can be
    read in one round, or not at all. If there was a compaction in between, the snapshot that it was
    made of is used, and those after it have entries of their own.
    """
    floor_key = None if floor is None else snapshot_key(floor)
    since: tuple[DeltaEntry, ...] = ()
    ref: BlobRef | None = newer
    seen: set[str] = set()
    while ref is not None and ref.key not in seen:
        seen.add(ref.key)
        snapshot = context.objects.load(ref, Snapshot)
        logs = [entry.log.key for entry in snapshot.deltas]
        listed = snapshot.log.key in logs[-1:]
        if not listed and snapshot.kind is not CommitKind.REWRITE:
            return None
        if ref.key == older.ref.key or older.snapshot.log.key in logs:
            at = len(logs) if ref.key == older.ref.key else logs.index(older.snapshot.log.key) + 1
            since = (*snapshot.deltas[at:], *since)
            whole = all(entry.first == entry.last for entry in since)
            return since if whole and _is_above(context, older, floor) else None
        since = (*snapshot.deltas[-1:], *since) if listed else since
        ref = snapshot.parent if ref.key != floor_key else None
    return None


def _is_above(context: ReadContext, older: SnapshotView, floor: str | None) -> bool:
    """Whether an ancestor is the floor or newer."""
    if floor is None or floor == older.snapshot_id:
        return True

    def sequence() -> int:
        return context.objects.load(snapshot_ref(context, floor), Snapshot).sequence

    lowest: int = context.objects.cache.obtain(("sequence", floor), sequence)
    return lowest < older.snapshot.sequence


def delta_of(context: ReadContext, snapshot: Snapshot) -> Delta:
    """The delta of the snapshot's commit."""
    log = snapshot.log
    if snapshot.deltas and snapshot.deltas[-1].log.key == log.key:
        log = snapshot.deltas[-1].log  # with the copy that the read list may carry
    delta = context.objects.load(log, Delta)
    if delta.commit_id != snapshot.commit_id:
        raise CorruptObjectError(f"{log.key} is the log of another commit than its snapshot's")
    return delta


def tables_of(
    context: ReadContext, delta: Delta, wanted: Container[bytes] | None = None
) -> dict[bytes, tuple[ChunkTable, ...]]:
    """The chunks a commit set or unset, by node, for all nodes or those wanted."""
    tables: dict[bytes, tuple[ChunkTable, ...]] = {}
    due = [
        ref
        for ref in delta.manifests
        if wanted is None or any(part.node_id in wanted for part in ref.parts)
    ]
    context.objects.prefetch([(ref.blob, Manifest) for ref in due])
    manifests = [(delta.embedded, delta.embedded.directory())]
    manifests += [(context.objects.load(ref.blob, Manifest), ref.parts) for ref in due]
    for manifest, named in manifests:
        if manifest.directory() != named:
            raise CorruptObjectError("a manifest of a delta has other chunk tables than it says")
        for part, data in manifest.parts:
            if wanted is None or part.node_id in wanted:
                found = manifest.decode(part, data)
                tables[part.node_id] = (*tables.get(part.node_id, ()), found)
    return tables


def touched_chunks(
    context: ReadContext, deltas: Iterable[Delta], wanted: Container[bytes] | None = None
) -> dict[bytes, list[IndexArray]]:
    """The coordinates that these commits set or unset, by node, for all nodes or those wanted."""
    found: dict[bytes, list[IndexArray]] = {}
    for delta in deltas:
        for node_id, tables in tables_of(context, delta, wanted).items():
            found.setdefault(node_id, []).extend(table.coords() for table in tables)
    return found


def distinct(coords: Sequence[IndexArray]) -> IndexArray:
    """All of these coordinates (at least one array) without duplicates, in C order."""
    together = np.concatenate(coords)
    if not len(together):
        return together
    box = Box.around_coords(together)
    return box.unravel(np.unique(box.ravel(together)))
