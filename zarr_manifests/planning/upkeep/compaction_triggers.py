"""When deltas are compacted, and into what.

Entries of a snapshot's read list are deltas (of one commit) and runs (of several, merged). Two
things are done to them, and each row is written again only so often:

- A *minor* compaction merges the deltas that are in no run yet into one, and then runs of similar
  size, `fan_in` at a time: sizes are sorted into classes, a power of `fan_in` each, and a class has
  fewer runs than that. So a row is copied once a class.
- A *major* compaction merges entries into the leaves of the base, but only those leaves whose
  pending refs have reached `size_ratio` of what they hold. So the cost of writing a leaf again is
  at most 1 / `size_ratio` times that of what has come to it.

Invariants: only neighbours are merged, so that the newest word on a chunk stays the newest; an
entry is dropped only when all it says is in the base, and all older ones are dropped too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

__all__ = ["MOST_RUNS", "CompactionMode", "Size", "is_due", "merge_groups", "overlap_refs"]

MOST_RUNS: Final = 20
"""Runs in a read list at most; beyond that the newest are merged whatever their sizes."""
_SMALLEST_CLASS_ROWS: Final = 1_024


class CompactionMode(StrEnum):
    """How much a compaction does."""

    MINOR = "minor"
    MAJOR = "major"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Size:
    """How large an entry is.

    Parameters
    ----------
    rows : int
        Chunk refs it sets or unsets.
    is_run : bool
        Whether it is a run.
    """

    rows: int
    is_run: bool


def is_due(
    unrolled: int,
    sequence: int,
    *,
    min_delta_count: int,
    max_delta_count: int,
    interval_commits: int,
) -> bool:
    """Whether the commit with that sequence number is to be followed by a compaction.

    Parameters
    ----------
    unrolled : int
        Deltas that are in no run.
    sequence : int
        The commit's number in the branch's history.
    min_delta_count, max_delta_count : int
        Below the first none is due; from the second on one always is.
    interval_commits : int
        Between the two one is due at multiples of this.

    Examples
    --------
    >>> from zarr_manifests.planning.upkeep.compaction_triggers import is_due
    >>> limits = dict(min_delta_count=10, max_delta_count=50, interval_commits=100)
    >>> is_due(49, 149, **limits), is_due(50, 150, **limits), is_due(12, 200, **limits)
    (False, True, True)
    """
    if unrolled >= max_delta_count:
        return True
    return unrolled >= min_delta_count and sequence % interval_commits == 0


def merge_groups(sizes: Sequence[Size], fan_in: int) -> list[tuple[int, int]]:
    """Which entries a minor compaction merges, as half-open ranges of positions.

    Parameters
    ----------
    sizes : sequence of Size
        Of the read list, oldest first; runs come before deltas.
    fan_in : int
        How many runs of similar size become one.

    Examples
    --------
    >>> from zarr_manifests.planning.upkeep.compaction_triggers import Size, merge_groups
    >>> runs = [Size(5_000, True)] * 3
    >>> merge_groups([*runs, *[Size(100, False)] * 50], 4)
    [(0, 53)]
    >>> merge_groups([*runs[:2], *[Size(100, False)] * 50], 4)
    [(2, 52)]
    """
    stack: list[tuple[int, int, int]] = []  # start, stop, rows
    position = 0
    while position < len(sizes) and sizes[position].is_run:
        stack.append((position, position + 1, sizes[position].rows))
        position += 1
    if position < len(sizes):
        rows = sum(size.rows for size in sizes[position:])
        stack.append((position, len(sizes), rows))
        _settle(stack, fan_in)
    excess = len(stack) - MOST_RUNS
    if excess > 0:
        _merge(stack, len(stack) - excess - 1)
    return [(start, stop) for start, stop, _ in stack if stop - start > 1]


def _settle(stack: list[tuple[int, int, int]], fan_in: int) -> None:
    """Merge the newest run with its neighbours until each class has fewer than `fan_in`."""
    while True:
        newest = _class(stack[-1][2], fan_in)
        start = len(stack) - 1
        # Smaller ones before it would never again be the newest of their class.
        while start and _class(stack[start - 1][2], fan_in) < newest:
            start -= 1
        same = start
        while same and _class(stack[same - 1][2], fan_in) == newest:
            same -= 1
        if start - same + 1 >= fan_in:
            start = same
        if start == len(stack) - 1:
            return
        _merge(stack, start)


def _merge(stack: list[tuple[int, int, int]], start: int) -> None:
    merged = stack[start][0], stack[-1][1], sum(rows for _, _, rows in stack[start:])
    stack[start:] = [merged]


def _class(rows: int, fan_in: int) -> int:
    found, bound = 0, _SMALLEST_CLASS_ROWS
    while rows >= bound:
        found, bound = found + 1, bound * fan_in
    return found


def overlap_refs(count: int, box_size: int, shared_size: int) -> float:
    """How many of an entry's refs in a box lie in a part of it, if they lie evenly."""
    return count * shared_size / box_size if box_size else 0.0
