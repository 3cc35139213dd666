"""When entries of history move from the snapshot to a page, and pages to a larger page.

Each commit writes the entries in its snapshot again, so they are few. A commit fetches nothing for
a new page: what goes there is in the parent already. Compactions read pages and merge those of
similar size, so that few are left to read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Final

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
    >>> from zarr_manifests.planning.upkeep.history_rolls import are_a_page
    >>> are_a_page([200] * 23), are_a_page([200] * 24), are_a_page([1000] * 13)
    (False, True, True)
    """
    return len(sizes) >= PAGE or sum(sizes) > _MOST_BYTES


def pages_to_roll(levels: Sequence[int]) -> int:
    """How many of the newest pages go to a page of pages, given the level of each, oldest first.

    Examples
    --------
    >>> from zarr_manifests.planning.upkeep.history_rolls import pages_to_roll
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
    >>> from zarr_manifests.planning.upkeep.history_rolls import pages_to_merge
    >>> pages_to_merge([500, 90, 24, 24]), pages_to_merge([500, 24]), pages_to_merge([24])
    (3, 0, 0)
    """
    merged = total = 0
    for count in reversed(counts):
        if (merged and count > 2 * total) or total + count > _MOST_MERGED:
            break
        merged, total = merged + 1, total + count
    return merged if merged > 1 else 0
