"""Walking through history in fewer round trips than there are snapshots.

A snapshot refers only to its parent, so a walk would wait for each snapshot in turn. But a snapshot
also says which its ancestors are. Once some snapshots were fetched one by one, the next ones are
fetched together.

Invariants:

- What a history says is only a hint. A fetched snapshot is used only if a child's pointer matches
  it, with length and checksum. A wrong or unreadable one costs a request and is no error.
- A round fetches at most twice as many as were used of the round before.
- Where calls are inline (memory, a local disk), nothing is fetched in advance.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Final

from zarr_manifests.engine.history.history_entries import ancestor_entries
from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.snapshot import Ancestor, Snapshot

_BEGINS: Final = 2
"""Number of snapshots to fetch one by one first: often only the newest are needed."""
_FIRST: Final = 4
_MOST: Final = 64


class SnapshotsAhead:
    """Prefetches the snapshots that a walk down to `floor` is likely to need next."""

    def __init__(self, context: ReadContext, floor: str | None) -> None:
        self._context = context
        self._floor = floor
        self._next: Iterator[BlobRef] = iter(())
        self._fetched: dict[str, bytes] = {}
        self._until_begin = _BEGINS
        self._count = _FIRST

    def take(self, ref: BlobRef) -> bytes | None:
        """The object at the key if it was fetched here; None if another cache has or gets it."""
        objects = self._context.objects
        if objects.storage.capabilities.inline or objects.is_near(ref, Snapshot, Ancestor):
            return None
        if ref.key not in self._fetched:
            if self._until_begin:
                self._until_begin -= 1
                return None
            self._fetch(ref)
        return self._fetched.pop(ref.key, None)

    def _fetch(self, ref: BlobRef) -> None:
        """Fetch the due snapshot, together with the next ones as far as they are known."""
        objects = self._context.objects
        if self._fetched:
            self._next, self._count = iter(()), _FIRST  # these were not ancestors
        due = [*islice(self._next, self._count)]
        if not due or due[0] != ref:
            snapshot = objects.load(ref, Snapshot)
            told = ancestor_entries(self._context, snapshot, self._floor)
            refs = (run.pointer(at).ref for run in told for at in reversed(range(len(run))))
            self._next = (each for each in refs if not objects.is_near(each, Snapshot, Ancestor))
            due = [*islice(self._next, self._count)]
        found = self._context.runtime.parallel(
            [partial(objects.guess, each.key, each.length) for each in due]
        )
        here = zip(due, found, strict=True)
        self._fetched = {each.key: data for each, data in here if data is not None}
        self._count = min(2 * self._count, _MOST)
