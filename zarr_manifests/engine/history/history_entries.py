"""What a snapshot says about its ancestors: its own entries, then those of its pages.

Invariants:

- Entries of a page are used only if each is the child of the one before, and the newest is the
  snapshot that is due. A page that is missing, damaged or of another history ends the listing with
  a warning. Its reader then goes on at the snapshot that was due, which has entries of its own.
  `verify` reports the page.
- A page is not opened if all its snapshots are older than the floor: a collection may have deleted
  it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Final

from zarr_manifests.engine.history.by_id import snapshot_at
from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.errors import CorruptObjectError, ObjectNotFoundError
from zarr_manifests.format.entry_columns import HistoryEntries, SnapshotPointer
from zarr_manifests.format.history_pages import History, HistoryPage, HistoryPageRef
from zarr_manifests.format.snapshot import Snapshot

_LOG = logging.getLogger(__name__)
_LOADED_AT_ONCE: Final = 64


def ancestor_entries(
    context: ReadContext, snapshot: Snapshot, floor: str | None = None, wanted: int = 1
) -> Iterator[HistoryEntries]:
    """Entries of the ancestors down to the snapshot with the id `floor`.

    The newest come first; those that come together are oldest first. They may end early. `wanted`
    is how many the caller is likely to take: their pages are fetched together, before any others.
    """
    if snapshot.parent is None or snapshot.snapshot_id == floor:
        return
    due: SnapshotPointer | None = SnapshotPointer.of(snapshot.parent)
    try:
        for found in _entries(context, snapshot.history, floor, wanted):
            if found.pointer(-1) != due:
                raise CorruptObjectError(f"history: {found.pointer(-1)} in the place of {due}")
            if floor in found.ids:
                yield found.since(found.ids.index(floor))
                return
            yield found
            due = found.parent
            if due is None:
                return
    except CorruptObjectError as error:
        _LOG.warning("%s says wrong things: %s", snapshot.snapshot_id, error)


def _entries(
    context: ReadContext, history: History, floor: str | None, wanted: int
) -> Iterator[HistoryEntries]:
    """The entries that the snapshot carries, then those of each page."""
    if history.recent:
        yield HistoryEntries.unpack(history.recent)
    wanted = max(wanted - len(history.recent), 1)
    left = _above(context, history, floor) - len(history.recent)
    due = [*reversed(history.pages)]
    loaded: dict[str, HistoryPage | None] = {}
    while due and left > 0:
        if due[0].blob.key not in loaded:
            count = min(left, wanted) if wanted > 0 else left
            refs = [r for r in _reaching(due[:_LOADED_AT_ONCE], count) if r.blob.key not in loaded]
            found = context.runtime.parallel([partial(_load, context, ref) for ref in refs])
            loaded |= {ref.blob.key: page for ref, page in zip(refs, found, strict=True)}
        page = loaded.pop(due.pop(0).blob.key)
        if page is None:
            return
        due[:0] = reversed(page.pages)
        if page.entries is not None:
            yield page.entries
            left -= len(page.entries)
            wanted -= len(page.entries)


def pages_above(context: ReadContext, history: History, floor: str | None) -> list[HistoryPageRef]:
    """The pages that cover snapshots down to the floor, newest first; the others may be gone."""
    count = _above(context, history, floor) - len(history.recent)
    return [*_reaching(reversed(history.pages), count)]


def _reaching(refs: Iterable[HistoryPageRef], count: int) -> Iterator[HistoryPageRef]:
    """As many of the pages as hold that many entries."""
    for ref in refs:
        if count <= 0:
            return
        yield ref
        count -= ref.count


def _above(context: ReadContext, history: History, floor: str | None) -> int:
    """How many of the ancestors are in history: all but those that the floor itself covers.

    0 if the floor cannot be read, which a walk finds out when it gets there.
    """
    if floor is None or not history.pages:
        return history.count
    try:
        return history.count - snapshot_at(context, floor)[1].history.count
    except (CorruptObjectError, ObjectNotFoundError):
        return 0


def _load(context: ReadContext, ref: HistoryPageRef) -> HistoryPage | None:
    try:
        page = context.objects.load(ref.blob, HistoryPage)
        ref.check(page)
    except CorruptObjectError as error:
        _LOG.warning("history is read from the snapshots instead: %s", error)
        return None
    return page
