"""When deltas are compacted, and which entries are merged.

A snapshot's read list has two kinds of entries: deltas (of one commit) and runs (several deltas,
merged). Two kinds of compaction limit how often each row is rewritten:

- A *minor* compaction merges the deltas that are in no run yet into one run, and then runs of
  similar size, `fan_in` at a time. Sizes fall into classes, each a power of `fan_in`, and a class
  has fewer than `fan_in` runs. So a row is copied once per class.
- A *major* compaction merges entries into leaves of the base, but only into leaves whose pending
  refs have reached `size_ratio` of the refs they hold. So rewriting a leaf costs at most
  1 / `size_ratio` times the cost of what was added to it.

A third trigger is for whoever opens the branch: live deltas with many changed nodes are merged into
the base, which is read page by page.

Invariants: only neighbours are merged, so the newest row of a chunk stays the newest; an entry is
dropped only when the base has everything in it, and all older entries are dropped too.

Entries of history move from the snapshot to a page, and pages to a larger page. Each commit writes
the entries in its snapshot again, so they are few. A commit fetches nothing for a new page: what
goes there is in the parent already. Compactions read pages and merge those of similar size, so that
few are left to read.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import takewhile
from typing import Final

MOST_RUNS: Final = 20
"""Most runs in a read list; beyond that the newest are merged whatever their sizes."""
_SMALLEST_CLASS_ROWS: Final = 1_024
_NODE_CHANGES_MOST: Final = 1_000
_NODE_BYTES_MOST: Final = 128 * 1024
_TABLES_FEW: Final = 1_000
_TABLES_MOST: Final = 20_000
_PATIENCE: Final = 10
"""With more than few tables, which cost a writer most, so many times the changes are due."""


class CompactionMode(StrEnum):
    """How much a compaction rewrites."""

    MINOR = "minor"
    MAJOR = "major"
    FULL = "full"


def is_due(
    unrolled: int,
    sequence: int,
    *,
    min_delta_count: int,
    max_delta_count: int,
    interval_commits: int,
) -> bool:
    """Whether a compaction is due after the commit with this sequence number.

    Parameters
    ----------
    unrolled : int
        The number of deltas that are in no run.
    sequence : int
        The commit's number in the branch's history.
    min_delta_count, max_delta_count : int
        Below the minimum, none is due; from the maximum on, one always is.
    interval_commits : int
        In between, one is due when the sequence is a multiple of this.

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


def opening_is_slow(changes: int, nbytes: int, tables: int) -> bool:
    """Whether so many nodes have changed since the base that a compaction is due.

    Parameters
    ----------
    changes : int
        The number of nodes that live deltas newer than the base set or delete.
    nbytes : int
        The size of these deltas, which every reader fetches to open the snapshot.
    tables : int
        The number of their chunk tables. Merging one takes a writer longer than a hundred changes
        take a reader: more than a few wait for ten times the changes, and very many for a
        compaction that is due for other reasons.

    Examples
    --------
    >>> from zarr_manifests.planning.upkeep.compaction_triggers import opening_is_slow
    >>> opening_is_slow(3, 4_000, 3), opening_is_slow(5_000, 60_000, 0)
    (False, True)
    >>> opening_is_slow(2_000, 60_000, 2_000), opening_is_slow(12_000, 360_000, 12_000)
    (False, True)
    """
    scale = 1 if tables <= _TABLES_FEW else _PATIENCE
    many = changes > scale * _NODE_CHANGES_MOST
    large = changes > 0 and nbytes > scale * _NODE_BYTES_MOST
    return (many or large) and tables <= _TABLES_MOST


def merge_groups(rows: Sequence[int], runs: int, fan_in: int) -> list[tuple[int, int]]:
    """Return which entries a minor compaction merges, as half-open ranges of positions.

    Parameters
    ----------
    rows : sequence of int
        The number of chunk refs that each entry of the read list sets or unsets, oldest first.
    runs : int
        How many of the oldest entries are runs.
    fan_in : int
        How many runs of similar size are merged into one.

    Examples
    --------
    >>> from zarr_manifests.planning.upkeep.compaction_triggers import merge_groups
    >>> merge_groups([5_000] * 3 + [100] * 50, 3, 4)
    [(0, 53)]
    >>> merge_groups([5_000] * 2 + [100] * 50, 2, 4)
    [(2, 52)]
    """
    stack = [(at, at + 1, rows[at]) for at in range(runs)]  # start, stop, rows
    if runs < len(rows):
        stack.append((runs, len(rows), sum(rows[runs:])))
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
        # Smaller runs before it would never again be the newest of their class.
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
    """The refs of an entry in part of its box, if they are spread evenly."""
    return count * shared_size / box_size if box_size else 0.0


# --- pages of history --------------------------------------------------------------------------

PAGE: Final = 24
"""So many entries go to a page."""
FAN_OUT: Final = 32
"""So many pages of one level go to a page of the next level."""
_MOST_BYTES: Final = 12 * 1024
_MOST_MERGED: Final = 1024


def are_a_page(sizes: Sequence[int]) -> bool:
    """Whether entries of these sizes in bytes go to a page.

    Examples
    --------
    >>> from zarr_manifests.planning.upkeep.compaction_triggers import are_a_page
    >>> are_a_page([200] * 23), are_a_page([200] * 24), are_a_page([1000] * 13)
    (False, True, True)
    """
    return len(sizes) >= PAGE or sum(sizes) > _MOST_BYTES


def pages_to_roll(levels: Sequence[int]) -> int:
    """How many of the newest pages go to a page of pages, given the level of each, oldest first.

    Examples
    --------
    >>> from zarr_manifests.planning.upkeep.compaction_triggers import pages_to_roll
    >>> pages_to_roll([1, 1] + [0] * 31), pages_to_roll([1, 1] + [0] * 32)
    (0, 32)
    """
    last = sum(1 for _ in takewhile(lambda level: level == levels[-1], reversed(levels)))
    return last if last >= FAN_OUT else 0


def pages_to_merge(counts: Sequence[int]) -> int:
    """How many of the newest pages a compaction merges, given the entries of each, oldest first.

    A page is merged if it is at most twice as large as all newer ones together. So sizes at least
    double from page to page, and an entry is copied only logarithmically often.

    Examples
    --------
    >>> from zarr_manifests.planning.upkeep.compaction_triggers import pages_to_merge
    >>> pages_to_merge([500, 90, 24, 24]), pages_to_merge([500, 24]), pages_to_merge([24])
    (3, 0, 0)
    """
    merged = total = 0
    for count in reversed(counts):
        if (merged and count > 2 * total) or total + count > _MOST_MERGED:
            break
        merged, total = merged + 1, total + count
    return merged if merged > 1 else 0
