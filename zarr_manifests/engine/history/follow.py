"""Sessions whose snapshot has expired, and readers that follow a branch.

Invariant: objects missing because their snapshot has expired raise `SnapshotExpiredError`, and a
session's own objects that a collection has deleted raise `FencedError`; neither counts as damage.
Damage in a snapshot that is in history or leased is raised as damage.
"""

from __future__ import annotations

from zarr_manifests.engine.history.ancestry import locate
from zarr_manifests.engine.objects.chunks import SessionKeys
from zarr_manifests.engine.root.epochs import is_fenced
from zarr_manifests.engine.root.roots import is_missing, opened
from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import (
    FencedError,
    ManifestsError,
    MissingChunkError,
    NotFoundError,
    SnapshotExpiredError,
)


def open_head(context: ReadContext, branch: str, now: SnapshotView) -> SnapshotView:
    """The head of the branch, opened; `now` itself if that is still the head.

    Raises
    ------
    NotFoundError
        If the branch was deleted.
    """

    def newest() -> SnapshotView:
        root = context.roots.read().root
        tip = context.roots.with_branch(root, branch).branches.get(branch)
        if tip is None:
            raise NotFoundError(f"branch {branch!r}, which the session reads, was deleted")
        return now if tip.head.key == now.ref.key else context.open_branch(tip)

    return opened(newest)


def expired(
    context: ReadContext, snapshot_id: str, error: ManifestsError
) -> SnapshotExpiredError | None:
    """The error to raise instead if the snapshot has left history; else None."""
    if not is_missing(error):
        return None
    try:
        root = context.roots.read().root
    except ManifestsError:
        return None  # what was found first says more
    if any(lease.snapshot == snapshot_id for lease in context.roots.leases(root)):
        return None
    try:
        locate(context, root, snapshot_id)
    except SnapshotExpiredError:
        what, *_ = str(error).split(";")  # and not what to do about damage
        return SnapshotExpiredError(
            f"snapshot {snapshot_id} has expired while it was read, and objects of it are gone: "
            f"{what}. Open a new session, `session.rebase()`, open it with follow=True, or take "
            "a lease beforehand (`repo.lease`)"
        )
    return None


def collected(context: ReadContext, keys: SessionKeys, error: ManifestsError) -> FencedError | None:
    """The error to raise instead if a collection deleted what the session wrote; else None.

    The fence no longer protects the objects of an older session without a lease.
    """
    key = error.key if isinstance(error, MissingChunkError) else None
    if key is None or not key.startswith(keys.lineage_prefix):
        return None
    try:
        root = context.roots.read().root
        if not is_fenced(context.roots, root, keys):
            return None
    except ManifestsError:
        return None  # what was found first says more
    return FencedError(
        f"the session began at version {keys.start}, before the repository's fence {root.fence}, "
        f"and a collection has taken {key}, which it wrote and did not commit in time. Open a new "
        "session and write the changes again; a session that holds a lease keeps what it writes "
        "(`writable_session(lease=...)`)"
    )


class Follower:
    """Tells a reader when to check whether its branch has moved."""

    def __init__(self, context: ReadContext, branch: str, interval_s: float) -> None:
        self._context = context
        self._branch = branch
        self._interval_s = interval_s
        self._looked_s = context.runtime.monotonic_s()

    def due(self) -> bool:
        """Whether the interval is over; if so, a new one begins."""
        over = self.over
        if over:
            self._looked_s = self._context.runtime.monotonic_s()
        return over

    @property
    def over(self) -> bool:
        """Whether the interval is over."""
        return self._context.runtime.monotonic_s() - self._looked_s >= self._interval_s

    def head(self, now: SnapshotView) -> SnapshotView:
        """The head of the branch."""
        return open_head(self._context, self._branch, now)
