"""Which snapshots leave a branch's history: what is neither new enough nor needed.

The history of a branch is cut at one place, its floor: what is older is gone from it. Invariants:
a head is never cut off; nothing is cut off at or above a snapshot that a lease is on, so that its
holder finds the log from there to the head. A tag keeps its own snapshot and no others.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.root import PendingDeletion

__all__ = ["Aged", "Retention", "kept_count", "with_pending"]

_PENDING_MOST = 64


@dataclass(frozen=True, slots=True)
class Aged:
    """A snapshot of a history: where it is, its id, and when it was written."""

    ref: BlobRef
    snapshot_id: str
    written_ms: int


@dataclass(frozen=True, slots=True)
class Retention:
    """What is kept: a snapshot is, if one of the two says so.

    Parameters
    ----------
    keep_last : int or None
        That many of the newest snapshots of each branch; None: this says nothing.
    oldest_ms : int or None
        What was written at this time or later; None: this says nothing.

    Raises
    ------
    InvalidArgumentError
        If neither is given, or `keep_last` is less than 1.
    """

    keep_last: int | None
    oldest_ms: int | None

    def __post_init__(self) -> None:
        if self.keep_last is None and self.oldest_ms is None:
            raise InvalidArgumentError(
                "say what is to be kept: keep_last, max_age, or both; here, or as `snapshots` in "
                "the configuration"
            )
        whole = isinstance(self.keep_last, int) and not isinstance(self.keep_last, bool)
        if self.keep_last is not None and not (whole and self.keep_last >= 1):
            raise InvalidArgumentError(
                f"keep_last must be a whole number of at least 1, not {self.keep_last!r}"
            )

    def keeps(self, position: int, written_ms: int) -> bool:
        """Whether to keep a snapshot that so many of its branch come after."""
        newest = self.keep_last is not None and position < self.keep_last
        return newest or (self.oldest_ms is not None and written_ms >= self.oldest_ms)


def kept_count(line: Sequence[Aged], retention: Retention, needed: Container[str]) -> int:
    """How many snapshots of a history, newest first, stay in it; at least one."""
    count = 1
    while count < len(line) and retention.keeps(count, line[count].written_ms):
        count += 1
    leased = [i for i, aged in enumerate(line) if aged.snapshot_id in needed]
    return max(count, 1 + max(leased, default=0))


def with_pending(
    pending: Sequence[PendingDeletion],
    lines: Sequence[Sequence[Aged]],
    parents: Sequence[BlobRef | None],
) -> tuple[PendingDeletion, ...] | None:
    """What is pending with these pieces of history, newest first, and the parent of each's last.

    None if it is too much to be listed.
    """
    found = list(pending)
    seen = {piece.newest.key for piece in found}
    for line, parent in zip(lines, parents, strict=True):
        if not line or line[0].ref.key in seen:
            continue
        seen.add(line[0].ref.key)
        count = len(line)
        for older in found:
            if parent is not None and older.newest.key == parent.key:
                found.remove(older)  # the new piece goes on where the old one begins
                count += older.count
                break
        found.append(PendingDeletion(line[0].ref.bare(), count))
    return tuple(found) if len(found) <= _PENDING_MOST else None
