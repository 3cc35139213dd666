"""Which snapshots leave a branch's history: what is neither new enough nor needed.

The history of a branch is cut at one place, its floor: what is older is gone from it. Invariants:
a head is never cut off; nothing is cut off at or above a snapshot that a lease is on, so that its
holder finds the log from there to the head. A tag keeps its own snapshot and no others.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from zarr_manifests.config import Snapshots
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.root import PendingDeletion
from zarr_manifests.times import milliseconds, moment_ms

__all__ = ["Aged", "Retention", "kept_count", "retention", "with_pending"]

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
                "say what is to be kept: keep_last, max_age or older_than; here, or as `snapshots` "
                "in the configuration"
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


def retention(
    options: Snapshots,
    now_ms: int,
    keep_last: int | None,
    max_age: timedelta | None,
    older_than: datetime | None,
) -> Retention:
    """What to keep as a caller says, or, if the caller says nothing, as the configuration does.

    Raises
    ------
    InvalidArgumentError
        If nothing is said anywhere, or both `max_age` and `older_than` are.
    """
    if max_age is not None and older_than is not None:
        raise InvalidArgumentError("give max_age or older_than, not both: each says how old")
    if older_than is not None:
        return Retention(keep_last, moment_ms(older_than, "older_than"))
    if keep_last is None and max_age is None:
        keep_last, max_age = options.keep_last, options.max_age
    if max_age is None:
        return Retention(keep_last, None)
    return Retention(keep_last, now_ms - milliseconds(max_age, "max_age"))


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
