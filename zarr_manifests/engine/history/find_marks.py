"""Marks of a snapshot: the last version that each application has committed."""

from __future__ import annotations

from itertools import islice
from typing import Final

from zarr_manifests.engine.history.ancestry import ancestors
from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.errors import ManifestsError
from zarr_manifests.format.root import Branch
from zarr_manifests.format.snapshot import MarksPage, Snapshot
from zarr_manifests.ids import snapshot_id_of
from zarr_manifests.planning.conflict.admission import NO_MARK

_MOST_WALKED: Final = 64
"""Snapshots searched for the one that committed a version; what is older is not named."""


def paged_marks(context: ReadContext, snapshot: Snapshot) -> MarksPage:
    """The page with the marks that the snapshot has no room for; empty if it has no page."""
    if snapshot.marks_page is None:
        return MarksPage({})
    page: MarksPage = context.objects.load(snapshot.marks_page, MarksPage)
    return page


def marks_of(context: ReadContext, snapshot: Snapshot) -> dict[str, int]:
    """All marks of the snapshot."""
    return {**paged_marks(context, snapshot).marks, **snapshot.marks}


def mark_of(context: ReadContext, snapshot: Snapshot, app: str) -> int:
    """The application's mark in the snapshot, or `NO_MARK`."""
    own = snapshot.marks.get(app)
    return paged_marks(context, snapshot).marks.get(app, NO_MARK) if own is None else own


def snapshot_of(context: ReadContext, tip: Branch, app: str, version: int) -> str | None:
    """Id of the snapshot that committed the version; None if it is not at hand.

    It may have expired, been amended away, or lie far back.
    """
    found = None
    try:
        for ref, snapshot in islice(ancestors(context, tip.head, tip.floor), _MOST_WALKED):
            mark = mark_of(context, snapshot, app)
            if mark < version:
                return found
            found = snapshot_id_of(ref.key) if mark == version else None
    except ManifestsError:
        return None  # the id is a help, and what is asked is answered without it
    return None
