"""History: following parents from a snapshot, and deciding which snapshots are in history.

A snapshot is in history if a branch reaches it at or above the branch's floor, or a tag does. A tag
reaches its own snapshot and, as long as nothing has expired, all before it: the first expiry gives
every branch a floor, `main` among them.

What reads history to list it takes the entries that snapshots have of their ancestors. What decides
by it (refs, leases, conflicts, what an expiry keeps, collection) walks the snapshots themselves.

Invariant: all objects of a snapshot in a root's history exist as long as that root is current,
since a collection replaces the root before it deletes anything. So a writer that refers to objects
of an older snapshot checks it against the very root that it replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Final

from zarr_manifests.engine.history.by_id import snapshot_at
from zarr_manifests.engine.history.history_entries import ancestor_entries
from zarr_manifests.engine.history.parallel_walk import SnapshotsAhead
from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.errors import (
    CorruptObjectError,
    ManifestsError,
    MissingChunkError,
    ObjectNotFoundError,
    SnapshotExpiredError,
)
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.entry_columns import HistoryEntries
from zarr_manifests.format.root import Root
from zarr_manifests.format.snapshot import Ancestor, Snapshot
from zarr_manifests.ids import snapshot_id_of, snapshot_key
from zarr_manifests.progress import counted, is_shown

FOLLOWING: Final = "following the history"


def ancestors(
    context: ReadContext, start: BlobRef, floor: str | None = None
) -> Iterator[tuple[BlobRef, Snapshot]]:
    """The snapshot and those before it, newest first, down to the one with the id `floor`."""
    objects = context.objects

    def load(ref: BlobRef, fetched: bytes | None) -> Snapshot:
        return objects.load(ref, Snapshot, fetched)

    return _walk(context, start, floor, load)


def ages(
    context: ReadContext, start: BlobRef, floor: str | None = None
) -> Iterator[tuple[BlobRef, Snapshot | Ancestor]]:
    """Like `ancestors`, but faster: it decodes only what gives a snapshot's age and parent."""
    objects = context.objects

    def load(ref: BlobRef, fetched: bytes | None) -> Snapshot | Ancestor:
        return objects.recall(ref, Snapshot) or objects.load(ref, Ancestor, fetched)

    return _walk(context, start, floor, load)


def entries(
    context: ReadContext, start: BlobRef, floor: str | None = None, wanted: int = 1
) -> Iterator[HistoryEntries]:
    """What `ancestors` says about each snapshot, from the entries that others have of it.

    The newest come first; those that come together are oldest first. `wanted` is how many the
    caller is likely to take.
    """
    ref: BlobRef | None = start
    seen: set[str] = set()
    while ref is not None:
        snapshot = context.objects.load(ref, Snapshot)
        older = ancestor_entries(context, snapshot, floor, wanted - len(seen) - 1)
        for found in chain([HistoryEntries.of([snapshot.entry(ref)])], older):
            count = len(seen) + len(found)
            seen.update(found.ids)
            if len(seen) != count:
                raise _circular(found.pointer(0).ref)
            yield found
            ref = found.parent.ref if found.parent and found.ids[0] != floor else None


def _circular(ref: BlobRef) -> CorruptObjectError:
    return CorruptObjectError(f"{ref.key} is its own ancestor; the history is damaged")


def _walk[T: Snapshot | Ancestor](
    context: ReadContext,
    start: BlobRef,
    floor: str | None,
    load: Callable[[BlobRef, bytes | None], T],
) -> Iterator[tuple[BlobRef, T]]:
    walk = _steps(context, start, floor, load)
    return counted(FOLLOWING, walk, walk_length(context, start, floor))


def _steps[T: Snapshot | Ancestor](
    context: ReadContext,
    start: BlobRef,
    floor: str | None,
    load: Callable[[BlobRef, bytes | None], T],
) -> Iterator[tuple[BlobRef, T]]:
    last = None if floor is None else snapshot_key(floor)
    ahead = SnapshotsAhead(context, floor)
    ref: BlobRef | None = start
    seen: set[str] = set()
    while ref is not None:
        if ref.key in seen:
            raise _circular(ref)
        seen.add(ref.key)
        snapshot = load(ref, ahead.take(ref))
        yield ref, snapshot
        ref = snapshot.parent if ref.key != last else None


def walk_length(context: ReadContext, start: BlobRef, floor: str | None) -> int | None:
    """How many snapshots a walk finds; None if it cannot be told, or nobody wants to know.

    It reads the two ends, since a snapshot knows how many ancestors it has.
    """
    if not is_shown():
        return None
    if floor == snapshot_id_of(start.key):
        return 1
    try:
        count = context.objects.load(start, Snapshot).history.count
        below = 0 if floor is None else snapshot_at(context, floor)[1].history.count
    except ManifestsError:
        return None  # the walk meets it, too, and its caller knows what to do
    return 1 + count - below


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
    """Like `find_in_history`, with the floor of the history it was found in."""
    key = snapshot_key(snapshot_id)
    seen: set[str] = set()
    for start, floor in starts(context, root):
        for ref, snapshot in ancestors(context, start, floor):
            if ref.key == key:
                return ref, snapshot, floor
            if ref.key in seen:
                break
            if floor is None:  # this walk also visits everything older
                seen.add(ref.key)
    raise SnapshotExpiredError(
        f"snapshot {snapshot_id} is not in the history of any branch or tag of "
        f"{context.storage.url}; `repo.ancestry()` and `zarr-manifests log` list what is"
    )


def tag_floor(root: Root, ref: BlobRef) -> str | None:
    """The floor of a tag's own history, regardless of branches."""
    return snapshot_id_of(ref.key) if has_expired(root) else None


def is_missing(error: BaseException) -> bool:
    """Whether the error means that a referenced object does not exist."""
    return isinstance(error, MissingChunkError) or (
        isinstance(error, CorruptObjectError) and isinstance(error.__cause__, ObjectNotFoundError)
    )


def has_expired(root: Root) -> bool:
    """Whether anything has expired, so that a tag keeps only its own snapshot."""
    main = root.branches.get("main")  # never in a page
    return main is not None and main.floor is not None


def starts(context: ReadContext, root: Root) -> Iterator[tuple[BlobRef, str | None]]:
    """The snapshots of all branches and tags, with floors; refs in the root itself come first."""
    yield from ((branch.head, branch.floor) for branch in root.branches.values())
    yield from ((ref, tag_floor(root, ref)) for ref in root.tags.values())
    if root.pages:
        whole = context.roots.whole(root)
        yield from ((branch.head, branch.floor) for branch in whole.branches.values())
        yield from ((ref, tag_floor(root, ref)) for ref in whole.tags.values())
