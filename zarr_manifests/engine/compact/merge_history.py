"""Pages of history of similar size, merged into one by a compaction."""

from __future__ import annotations

from dataclasses import dataclass

from zarr_manifests.engine.commit.extend_history import HISTORY
from zarr_manifests.engine.history.ancestry import pages_above
from zarr_manifests.engine.objects.chunks import SessionKeys
from zarr_manifests.engine.objects.metadata import Upload
from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.history_pages import History, HistoryEntries, HistoryPage, HistoryPageRef
from zarr_manifests.planning.upkeep.compaction_triggers import pages_to_merge


@dataclass(frozen=True, slots=True)
class MergedPages:
    """The pages that one page replaces; none if nothing is merged."""

    old: tuple[HistoryPageRef, ...] = ()
    new: tuple[HistoryPageRef, ...] = ()
    uploads: tuple[Upload, ...] = ()

    @classmethod
    def of(
        cls, context: ReadContext, history: History, floor: str | None, keys: SessionKeys
    ) -> MergedPages:
        """Merge the newest pages of entries, as far as they are in history."""
        leaves = [page for page in history.pages if page.level == 0]
        due = leaves[len(leaves) - pages_to_merge([page.count for page in leaves]) :]
        here = {page.blob.key for page in pages_above(context, history, floor)} if due else set()
        due = [page for page in due if page.blob.key in here]
        if len(due) < 2:
            return cls()
        try:
            found = context.objects.load_all([(page.blob, HistoryPage) for page in due])
            for page in due:
                page.check(found[page.blob.key])
            merged = HistoryPage(HistoryEntries.join([found[p.blob.key].entries for p in due]))
        except CorruptObjectError:
            return cls()  # `verify` tells; readers go on without the page
        upload = Upload(keys.next(HISTORY), merged.encode())
        context.objects.remember(upload.ref, merged)
        return cls(tuple(due), (merged.at(upload.ref),), (upload,))

    def within(self, history: History) -> tuple[HistoryPageRef, ...]:
        """The pages of a later snapshot, with the new one if they still begin with the old ones."""
        pages, count = history.pages, len(self.old)
        for at in range(len(pages) - count + 1 if count else 0):
            if pages[at : at + count] == self.old:
                return (*pages[:at], *self.new, *pages[at + count :])
        return pages
