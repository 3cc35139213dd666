"""History: from a snapshot to its parent, and so on, and which snapshots it has.

A snapshot is in history if a branch leads to it, no further down than the branch's floor, or a
tag does. Invariant: what is in history as of a root has all its objects for as long as that root
stands, since a collection replaces the root before it deletes anything. So who refers to objects
of an older snapshot checks it against the very root that is to be replaced.
"""

from __future__ import annotations

from collections.abc import Iterator

from zarr_manifests.engine.context import Context
from zarr_manifests.errors import CorruptObjectError, ObjectNotFoundError, SnapshotExpiredError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.root import Root
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.ids import snapshot_key

__all__ = ["ancestors", "find_in_history", "snapshot_ref"]


def ancestors(
    context: Context, start: BlobRef, floor: str | None = None
) -> Iterator[tuple[BlobRef, Snapshot]]:
    """The snapshot and those before it, newest first, down to the one with the id `floor`."""
    last = None if floor is None else snapshot_key(floor)
    ref: BlobRef | None = start
    seen: set[str] = set()
    while ref is not None:
        if ref.key in seen:
            raise CorruptObjectError(f"{ref.key} is its own ancestor; the history is damaged")
        seen.add(ref.key)
        snapshot = context.objects.load(ref, Snapshot)
        yield ref, snapshot
        ref = snapshot.parent if ref.key != last else None


def snapshot_ref(context: Context, snapshot_id: str) -> BlobRef:
    """The snapshot with that id, whether it is in history or not.

    Raises
    ------
    SnapshotExpiredError
        If it is not there.
    """
    key = snapshot_key(snapshot_id)
    try:
        data = context.storage.get(key)
    except ObjectNotFoundError as error:
        raise SnapshotExpiredError(
            f"snapshot {snapshot_id} is not in {context.storage.url}: it never was, or has "
            "expired; `repo.ancestry()` and `zarr-manifests log` list what there is"
        ) from error
    ref = BlobRef.to(key, data)
    context.objects.remember(ref, Snapshot.from_object(data, ref))
    return ref


def find_in_history(context: Context, root: Root, snapshot_id: str) -> tuple[BlobRef, Snapshot]:
    """The snapshot with that id, which must be in history as of this root.

    Raises
    ------
    SnapshotExpiredError
        If neither a branch nor a tag leads to it.
    """
    key = snapshot_key(snapshot_id)
    seen: set[str] = set()
    for start, floor in _starts(context, root):
        for ref, snapshot in ancestors(context, start, floor):
            if ref.key == key:
                return ref, snapshot
            if ref.key in seen:
                break
            if floor is None:  # all that is older was, or will be, looked at, too
                seen.add(ref.key)
    raise SnapshotExpiredError(
        f"snapshot {snapshot_id} is not in the history of any branch or tag of "
        f"{context.storage.url}; `repo.ancestry()` and `zarr-manifests log` list what is"
    )


def _starts(context: Context, root: Root) -> Iterator[tuple[BlobRef, str | None]]:
    """What all branches and tags point to; those in the root itself come first."""
    yield from ((branch.head, branch.floor) for branch in root.branches.values())
    yield from ((ref, None) for ref in root.tags.values())
    if root.pages:
        whole = context.roots.whole(root)
        yield from ((branch.head, branch.floor) for branch in whole.branches.values())
        yield from ((ref, None) for ref in whole.tags.values())
