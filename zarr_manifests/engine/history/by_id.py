"""Snapshots of which only the id is known."""

from __future__ import annotations

from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.errors import ObjectNotFoundError, SnapshotExpiredError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.envelope import MAX_SNAPSHOT_BYTES
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.ids import snapshot_key


def snapshot_ref(context: ReadContext, snapshot_id: str) -> BlobRef:
    """The snapshot with that id, whether it is in history or not.

    Raises
    ------
    SnapshotExpiredError
        If it does not exist.
    """
    try:
        ref, snapshot = snapshot_at(context, snapshot_id)
    except ObjectNotFoundError as error:
        raise SnapshotExpiredError(
            f"snapshot {snapshot_id} is not in {context.storage.url}: it never was, or has "
            "expired; `repo.ancestry()` and `zarr-manifests log` list the snapshots"
        ) from error
    context.objects.remember(ref, snapshot)
    return ref


def snapshot_at(context: ReadContext, snapshot_id: str) -> tuple[BlobRef, Snapshot]:
    """The snapshot with that id, read at its key.

    No pointer vouches for it, so its own repository and snapshot ids are checked.

    Raises
    ------
    ObjectNotFoundError
        If there is no object at the key.
    CorruptObjectError
        If the object is another snapshot, or belongs to another repository.
    """
    key = snapshot_key(snapshot_id)
    data = context.storage.get(key, 0, MAX_SNAPSHOT_BYTES + 1)
    ref = BlobRef.to(key, data)
    snapshot = Snapshot.from_object(data, ref)
    snapshot.check_repository(key, context.repository_id)
    return ref, snapshot
