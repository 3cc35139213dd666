"""History: following parents from a snapshot, and deciding which snapshots are in history.

A snapshot is in history if a branch reaches it at or above the branch's floor, or a tag does. A tag
reaches its own snapshot and, as long as nothing has expired, all before it: the first expiry gives
every branch a floor, `main` among them.

Invariant: all objects of a snapshot in a root's history exist as long as that root is current,
since a collection replaces the root before it deletes anything. So a writer that refers to objects
of an older snapshot checks it against the very root that it replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from zarr_manifests.engine.history.parallel_walk import SnapshotsAhead
from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.errors import (
    CorruptObjectError,
    MissingChunkError,
    ObjectNotFoundError,
    SnapshotExpiredError,
)
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.envelope import MAX_SNAPSHOT_BYTES
from zarr_manifests.format.root import Root
from zarr_manifests.format.snapshot import Ancestor, Snapshot
from zarr_manifests.ids import snapshot_id_of, snapshot_key

__all__ = [
    "ages",
    "ancestors",
    "find_in_history",
    "floor_below",
    "has_expired",
    "is_missing",
    "locate",
    "snapshot_at",
    "snapshot_ref",
    "tag_floor",
]


def ancestors(
    context: ReadContext, start: BlobRef, floor: str | None = None
) -> Iterator[tuple[BlobRef, Snapshot]]:
    """The snapshot and those before it, newest first, down to the one with the id `floor`."""
    objects = context.objects
    return _walk(context, start, floor, lambda ref, data: objects.load(ref, Snapshot, data))


def ages(
    context: ReadContext, start: BlobRef, floor: str | None = None
) -> Iterator[tuple[BlobRef, Snapshot | Ancestor]]:
    """The same in less time, of what only the age is asked: what is read is not all decoded."""
    objects = context.objects

    def load(ref: BlobRef, fetched: bytes | None) -> Snapshot | Ancestor:
        return objects.recall(ref, Snapshot) or objects.load(ref, Ancestor, fetched)

    return _walk(context, start, floor, load)


def _walk[T: Snapshot | Ancestor](
    context: ReadContext,
    start: BlobRef,
    floor: str | None,
    load: Callable[[BlobRef, bytes | None], T],
) -> Iterator[tuple[BlobRef, T]]:
    last = None if floor is None else snapshot_key(floor)
    ahead = SnapshotsAhead(context.objects, context.runtime)
    ref: BlobRef | None = start
    seen: set[str] = set()
    while ref is not None:
        if ref.key in seen:
            raise CorruptObjectError(f"{ref.key} is its own ancestor; the history is damaged")
        seen.add(ref.key)
        snapshot = load(ref, ahead.take(ref))
        yield ref, snapshot
        ref = snapshot.parent if ref.key != last else None


def snapshot_ref(context: ReadContext, snapshot_id: str) -> BlobRef:
    """The snapshot with that id, whether it is in history or not.

    Raises
    ------
    SnapshotExpiredError
        If it is not there.
    """
    try:
        ref, snapshot = snapshot_at(context, snapshot_id)
    except ObjectNotFoundError as error:
        raise SnapshotExpiredError(
            f"snapshot {snapshot_id} is not in {context.storage.url}: it never was, or has "
            "expired; `repo.ancestry()` and `zarr-manifests log` list what there is"
        ) from error
    context.objects.remember(ref, snapshot)
    return ref


def snapshot_at(context: ReadContext, snapshot_id: str) -> tuple[BlobRef, Snapshot]:
    """What lies where the snapshot with that id belongs, if it is that snapshot.

    No pointer was followed to it, so what it says of itself is compared.

    Raises
    ------
    ObjectNotFoundError
        If nothing lies there.
    CorruptObjectError
        If it is another snapshot, or one of another repository.
    """
    key = snapshot_key(snapshot_id)
    data = context.storage.get(key, 0, MAX_SNAPSHOT_BYTES + 1)
    ref = BlobRef.to(key, data)
    snapshot = Snapshot.from_object(data, ref)
    snapshot.check_repository(key, context.repository_id)
    return ref, snapshot


def find_in_history(context: ReadContext, root: Root, snapshot_id: str) -> tuple[BlobRef, Snapshot]:
    """The snapshot with that id, which must be in history as of this root.

    Raises
    ------
    SnapshotExpiredError
        If neither a branch nor a tag leads to it.
    """
    ref, snapshot, _ = locate(context, root, snapshot_id)
    return ref, snapshot


def locate(
    context: ReadContext, root: Root, snapshot_id: str
) -> tuple[BlobRef, Snapshot, str | None]:
    """As `find_in_history`, with the floor of the history that it was found in."""
    key = snapshot_key(snapshot_id)
    seen: set[str] = set()
    for start, floor in _starts(context, root):
        for ref, snapshot in ancestors(context, start, floor):
            if ref.key == key:
                return ref, snapshot, floor
            if ref.key in seen:
                break
            if floor is None:  # all that is older was, or will be, looked at, too
                seen.add(ref.key)
    raise SnapshotExpiredError(
        f"snapshot {snapshot_id} is not in the history of any branch or tag of "
        f"{context.storage.url}; `repo.ancestry()` and `zarr-manifests log` list what is"
    )


def floor_below(context: ReadContext, root: Root, ref: BlobRef) -> str | None:
    """Id of the oldest snapshot that the history of the one at `ref` still has; None for all."""
    if not has_expired(root):
        return None
    own = snapshot_id_of(ref.key)
    try:
        return locate(context, root, own)[2]
    except SnapshotExpiredError:
        return own


def tag_floor(root: Root, ref: BlobRef) -> str | None:
    """The floor of a tag's own history, whatever branches have of it."""
    return snapshot_id_of(ref.key) if has_expired(root) else None


def is_missing(error: BaseException) -> bool:
    """Whether the error says that an object is referenced and not there."""
    return isinstance(error, MissingChunkError) or (
        isinstance(error, CorruptObjectError) and isinstance(error.__cause__, ObjectNotFoundError)
    )


def has_expired(root: Root) -> bool:
    """Whether there has been an expiry, so that tags have lost what is before them."""
    main = root.branches.get("main")  # never in a page
    return main is not None and main.floor is not None


def _starts(context: ReadContext, root: Root) -> Iterator[tuple[BlobRef, str | None]]:
    """What all branches and tags point to; those in the root itself come first."""
    yield from ((branch.head, branch.floor) for branch in root.branches.values())
    yield from ((ref, tag_floor(root, ref)) for ref in root.tags.values())
    if root.pages:
        whole = context.roots.whole(root)
        yield from ((branch.head, branch.floor) for branch in whole.branches.values())
        yield from ((ref, tag_floor(root, ref)) for ref in whole.tags.values())
