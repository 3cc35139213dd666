"""What a new snapshot says about its ancestors: what its parent says, and an entry of that one."""

from __future__ import annotations

from zarr_manifests.engine.objects.chunks import SessionKeys
from zarr_manifests.engine.objects.metadata import Upload
from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.format.history_pages import History, HistoryEntries, HistoryPage, HistoryPageRef
from zarr_manifests.planning.upkeep.compaction_triggers import are_a_page, pages_to_roll

HISTORY = "history"


def history_after(
    context: ReadContext,
    parent: SnapshotView,
    pages: tuple[HistoryPageRef, ...],
    keys: SessionKeys,
) -> tuple[History, list[Upload]]:
    """The history of a snapshot that comes after `parent`, and new pages to upload.

    It is computed from the very parent that an attempt builds on, so that all it covers are
    ancestors of the new snapshot. `pages` are the parent's, or merged from those.
    """
    uploads: list[Upload] = []
    recent = (*parent.snapshot.history.recent, parent.snapshot.entry(parent.ref).pack())

    def written(page: HistoryPage) -> None:
        nonlocal pages
        uploads.append(Upload.of(keys, HISTORY, page.encode()))
        pages = (*pages, page.at(uploads[-1].ref))
        context.objects.remember(uploads[-1].ref, page)  # for a compaction that merges it

    if are_a_page([len(entry) for entry in recent]):
        written(HistoryPage(HistoryEntries.unpack(recent)))
        recent = ()
        while count := pages_to_roll([page.level for page in pages]):
            page, pages = HistoryPage(pages=pages[-count:]), pages[:-count]
            written(page)
    return History(pages, recent), uploads
