"""The common past of two snapshots: where their lines part, and since when to merge them.

Each snapshot has one parent, so the parents make a tree. A merge also names the snapshot that it
has brought in (`merged`), whose changes its line has from then on. Invariant: a base is known only
if all that lies above it could be read; else the history has expired.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from zarr_manifests.engine.history.ancestry import ancestors, snapshot_ref
from zarr_manifests.engine.history.left_behind import floor_below
from zarr_manifests.engine.root.roots import is_missing
from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.errors import (
    Conflict,
    ConflictError,
    ConflictKind,
    CorruptObjectError,
    HistoryExpiredError,
    MissingChunkError,
    SnapshotExpiredError,
)
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.root import Root
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.ids import snapshot_id_of, snapshot_key

type Line = list[tuple[BlobRef, Snapshot]]
"""Snapshots, newest first, each of which is the parent of the one before."""


@dataclass(frozen=True, slots=True)
class Parted:
    """Two lines of history, newest first, down to the newest snapshot that both have."""

    left: Line
    right: Line
    at: BlobRef


def parted(context: ReadContext, root: Root, left: BlobRef, right: BlobRef) -> Parted:
    """Where the lines of two snapshots part, by their parents.

    Raises
    ------
    HistoryExpiredError
        If that has expired.
    """
    walks = [ancestors(context, ref, floor_below(context, root, ref)) for ref in (left, right)]
    lines: tuple[Line, Line] = ([], [])
    seen: tuple[dict[str, int], dict[str, int]] = ({}, {})
    now = [_next(walk) for walk in walks]
    while any(now):
        # Sequences only grow along a line: whoever is higher cannot be below the other.
        a, b = now
        side = 0 if b is None or (a is not None and a[1].sequence >= b[1].sequence) else 1
        here = now[side]
        assert here is not None
        if here[0].key in seen[1 - side]:
            lines[1 - side][seen[1 - side][here[0].key] :] = []
            return Parted(*lines, here[0])
        seen[side][here[0].key] = len(lines[side])
        lines[side].append(here)
        now[side] = _next(walks[side])
    raise HistoryExpiredError(
        f"what {snapshot_id_of(left.key)} and {snapshot_id_of(right.key)} have in common has "
        "expired, so what each has changed since is not known"
    )


def _next(walk: Iterator[tuple[BlobRef, Snapshot]]) -> tuple[BlobRef, Snapshot] | None:
    try:
        return next(walk, None)
    except (CorruptObjectError, MissingChunkError) as error:
        if is_missing(error):
            return None
        raise


def _add_past(
    context: ReadContext, root: Root, below: BlobRef, line: Line, before: dict[str, list[str]]
) -> None:
    """Add what the snapshots of a line come from, and those of the lines that it has merged.

    By key, it is the keys of the parent and of the merged snapshot; `below` is where lines part.
    """
    for ref, snapshot in line:
        parent = [] if snapshot.parent is None else [snapshot.parent.key]
        merged = [] if snapshot.merged is None else [snapshot_key(snapshot.merged[0])]
        before[ref.key] = parent + merged
    for _, snapshot in line:
        source = None if snapshot.merged is None else snapshot.merged[0]
        if source is None or snapshot_key(source) in before:
            continue
        try:
            ref = snapshot_ref(context, source)
            _add_past(context, root, below, parted(context, root, ref, below).left, before)
        except SnapshotExpiredError as error:
            raise HistoryExpiredError(
                f"snapshot {source}, which {snapshot.snapshot_id} has merged, has expired, so "
                "which changes both lines have is not known. Repeat the commits with cherry_pick; "
                "a tag keeps what was merged"
            ) from error


@dataclass(frozen=True, slots=True)
class MergeBase:
    """The newest snapshot whose changes two lines have, and how far each has come since.

    Parameters
    ----------
    at : BlobRef
        That snapshot.
    lines : Parted
        The two lines down to where they part.
    before : mapping of str to list of str
        Of each snapshot above that, by key: the keys of its parent and of what it has merged.
    """

    at: BlobRef
    lines: Parted
    before: Mapping[str, list[str]]

    def has(self, ref: BlobRef) -> set[str]:
        """Keys of all snapshots from there on whose changes the snapshot has, itself included."""
        found, due = {ref.key}, [ref.key]
        while due:
            for older in self.before.get(due.pop(), ()):
                if older not in found:
                    found.add(older)
                    due.append(older)
        return found

    def joined(self, line: Line) -> BlobRef | None:
        """The oldest snapshot of the line that has the base without coming after it.

        None if the base itself is on the line.
        """
        if self.at.key == self.lines.at.key or any(ref.key == self.at.key for ref, _ in line):
            return None
        return next(ref for ref, _ in reversed(line) if self.at.key in self.has(ref))


def merge_base(context: ReadContext, root: Root, ours: BlobRef, theirs: BlobRef) -> MergeBase:
    """The newest snapshot whose changes both have, by parents and by what was merged.

    Raises
    ------
    ConflictError
        If there are several, of which none has the changes of another.
    HistoryExpiredError
        If it has expired.
    """
    lines = parted(context, root, ours, theirs)
    before: dict[str, list[str]] = {}
    for line in (lines.left, lines.right):
        _add_past(context, root, lines.at, line, before)
    known = MergeBase(lines.at, lines, before)
    common = (known.has(ours) & known.has(theirs) & before.keys()) | {lines.at.key}
    newest = common.difference(*(before.get(key, ()) for key in common))
    if len(newest) > 1:
        listed = ", ".join(sorted(snapshot_id_of(key) for key in newest))
        raise ConflictError(
            f"{listed} are in both lines, and none has the changes of the others: the lines were "
            "merged crosswise. Repeat the commits of one line on the other with cherry_pick, or "
            "take one of the two merges back with reset_branch",
            [Conflict(ConflictKind.HISTORY, "/", "history", "the lines were merged crosswise")],
        )
    (key,) = newest
    if key == lines.at.key:
        return known
    return MergeBase(snapshot_ref(context, snapshot_id_of(key)), lines, before)
