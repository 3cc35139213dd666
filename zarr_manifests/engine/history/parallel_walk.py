"""Walking through history in fewer round trips than there are snapshots.

A snapshot refers only to its parent, so a walk would wait for each snapshot in turn. But snapshot
keys start with the root version at which their session began, so the keys listed just below a
snapshot are mostly those of its ancestors. Once some snapshots were fetched one by one, the next
ones are fetched together with the one that is due.

Invariants:

- A listing is only a guess. A fetched snapshot is used only if a child's pointer matches it, with
  length and checksum. A wrong or unreadable guess costs a request and is no error.
- A round guesses at most twice as many as were used of the round before, and nothing for a while if
  none was used.
- Where calls are inline (memory, a local disk), nothing is listed or fetched in advance.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Final

from zarr_manifests.engine.objects.metadata import ObjectReader
from zarr_manifests.errors import StorageError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.snapshot import Ancestor, Snapshot
from zarr_manifests.ids import session_of, session_start
from zarr_manifests.runtime import Runtime
from zarr_manifests.storage.protocol import ReadableStorage

__all__ = ["SnapshotsAhead", "older_than"]

_BEGINS: Final = 2
"""Number of snapshots to fetch one by one first: often only the newest are needed."""
_FIRST: Final = 4
_MOST: Final = 64
_RESTS: Final = 16
"""Number of snapshots to fetch one by one after guesses were useless."""
_GUESS_BYTES: Final = 1 << 20
_VERSIONS: Final = 256


class SnapshotsAhead:
    """Prefetches the snapshots that a walk is likely to need next."""

    def __init__(self, objects: ObjectReader, runtime: Runtime) -> None:
        self._objects = objects
        self._runtime = runtime
        self._guesses: Iterator[str] | None = None
        self._fetched: dict[str, bytes] = {}
        self._until_begin = _BEGINS
        self._needed = 0

    def take(self, ref: BlobRef) -> bytes | None:
        """The object at the key if it was fetched here; None if another cache has or gets it."""
        objects = self._objects
        if objects.storage.capabilities.inline:
            return None
        if objects.is_near(ref, Snapshot, Ancestor):
            return None
        if ref.key in self._fetched:
            self._needed += 1
            return self._fetched.pop(ref.key)
        if self._until_begin:
            self._until_begin -= 1
            return None
        return self._round(ref)

    def _round(self, ref: BlobRef) -> bytes | None:
        """Fetch the due object together with guesses of the next ones."""
        due = ref.key
        guesses = self._next(due)
        self._needed = 0
        if not guesses:
            return None
        most = {due: ref.length} | dict.fromkeys(guesses, _GUESS_BYTES)
        keys, guess = [*most], self._objects.guess
        found = self._runtime.parallel([partial(guess, key, n) for key, n in most.items()])
        # Unused objects may still be used, but no more than one round of them is kept.
        here = {key: data for key, data in zip(keys, found, strict=True) if data is not None}
        data = here.pop(due, None)
        self._fetched = here
        return data

    def _next(self, due: str) -> list[str]:
        if self._guesses is None:
            return self._begin_below(due)
        if not self._needed:
            self._guesses, self._until_begin = None, _RESTS
            return []
        guesses = list(islice(self._guesses, min(2 * self._needed, _MOST)))
        if guesses and due < guesses[-1]:  # the walk has moved to a much older branch
            return self._begin_below(due)
        return [key for key in guesses if key != due]

    def _begin_below(self, key: str) -> list[str]:
        self._guesses = older_than(self._objects.storage, key)
        return list(islice(self._guesses, _FIRST))


def older_than(storage: ReadableStorage, key: str) -> Iterator[str]:
    """Keys of snapshots that sort before this one, in descending order."""
    stop, version, span = key, session_start(session_of(key)), _VERSIONS
    while True:
        first = max(version - span, 0)
        place = f"snapshots/{first:012d}"
        try:
            yield from reversed(_listed(storage, place, stop))
        except StorageError:  # the walk works without
            return
        if first == 0:
            return
        stop, version, span = place, first, 2 * span  # leases take versions, too


def _listed(storage: ReadableStorage, after: str, before: str) -> list[str]:
    found = []
    for info in storage.list("snapshots/", after):
        if info.key >= before:
            break
        if info.nbytes <= _GUESS_BYTES:
            found.append(info.key)
    return found
