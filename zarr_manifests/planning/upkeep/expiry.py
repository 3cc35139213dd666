"""Which snapshots leave a branch's history: those neither new enough nor needed.

A branch's history ends at its floor: older snapshots are no longer part of it. Invariants: a head
is never removed; nor is a snapshot with a lease or any newer one, so that the lease's holder finds
the log from there to the head. A tag keeps only its own snapshot.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from zarr_manifests.config import Snapshots
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.root import PendingDeletion
from zarr_manifests.versions import milliseconds, moment_ms

_PENDING_MOST = 64


@dataclass(frozen=True, slots=True)
class Aged:
    """A snapshot in a history: its reference, its id, and when it was written."""

    ref: BlobRef
    snapshot_id: str
    written_ms: int


@dataclass(frozen=True, slots=True)
class Retention:
    """Which snapshots to keep: those that satisfy either condition.

    Parameters
    ----------
    keep_last : int or None
        Keep this many of the newest snapshots of each branch; None for no such condition.
    oldest_ms : int or None
        Keep what was written at this time or later; None for no such condition.

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
                "nothing says what to keep: pass keep_last, max_age or older_than (`clean`: keep), "
                "or save `snapshots` in the configuration"
            )
        whole = isinstance(self.keep_last, int) and not isinstance(self.keep_last, bool)
        if self.keep_last is not None and not (whole and self.keep_last >= 1):
            raise InvalidArgumentError(
                f"keep_last must be a whole number of at least 1, not {self.keep_last!r}"
            )

    def keeps(self, position: int, written_ms: int) -> bool:
        """Whether to keep a snapshot that has `position` newer ones on its branch."""
        newest = self.keep_last is not None and position < self.keep_last
        return newest or (self.oldest_ms is not None and written_ms >= self.oldest_ms)


def retention(
    options: Snapshots,
    now_ms: int,
    keep_last: int | None,
    max_age: timedelta | None,
    older_than: datetime | None,
) -> Retention:
    """Return what to keep: what the caller says, else what the configuration says.

    Raises
    ------
    InvalidArgumentError
        If neither says anything, or both `max_age` and `older_than` are given.
    """
    if max_age is not None and older_than is not None:
        raise InvalidArgumentError("give max_age or older_than, not both")
    if older_than is not None:
        return Retention(keep_last, moment_ms(older_than, "older_than"))
    if keep_last is None and max_age is None:
        keep_last, max_age = options.keep_last, options.max_age
    if max_age is None:
        return Retention(keep_last, None)
    return Retention(keep_last, now_ms - milliseconds(max_age, "max_age"))


def kept_count(line: Sequence[Aged], retention: Retention, needed: Container[str]) -> int:
    """The number of snapshots of a history, newest first, that stay in it; at least one."""
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
    """Add pieces of history to what is pending.

    Each piece is newest first; `parents` has the parent of its oldest snapshot.
    None if there would be too many pieces to list.
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
                found.remove(older)  # the new piece continues with the old one
                count += older.count
                break
        found.append(PendingDeletion(line[0].ref.bare(), count))
    return tuple(found) if len(found) <= _PENDING_MOST else None
