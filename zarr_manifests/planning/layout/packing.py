"""Which chunk tables of a commit are embedded in its delta, and which go into manifests.

Small tables are embedded, up to a budget. The others get manifests: small ones share one, packed
first-fit decreasing. Opening a dataset reads the deltas that change nodes or have tables of
coordinates, and a small delta is copied into the snapshot. To stay small, such a delta embeds
other tables only if all its tables are small, or up to a lower budget. (The base is packed by
`planning.layout.sets`.)

Invariants: every table is placed exactly once; the result does not depend on the input's order.
Packing into bins is first-fit decreasing: sizes are taken biggest first, and each goes into the
first bin with room for it. It never needs more than 11/9 times the fewest possible bins, plus one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

EMBED_BYTES: Final = 32 * 1024
_EMBED_TABLE_BYTES: Final = 8 * 1024
_EMBED_AT_OPEN_BYTES: Final = 16 * 1024
_EMBED_OTHERS_BYTES: Final = 2 * 1024
_SHARED_MANIFEST_BYTES: Final = 1024 * 1024
LEAF_ROWS: Final = 1_000_000
"""Most rows of a leaf; an array with more is split by box."""


@dataclass(frozen=True, slots=True)
class EmbedPlan[T: (bytes, tuple[bytes, int])]:
    """The embedded tables, and the tables of each manifest."""

    embedded: tuple[T, ...]
    manifests: tuple[tuple[T, ...], ...]


def plan_embedding[T: (bytes, tuple[bytes, int])](
    encoded_bytes: Mapping[T, int],
    coordinates: Collection[T] = (),
    *,
    changes_nodes: bool = False,
) -> EmbedPlan[T]:
    """Place the tables of one commit.

    Parameters
    ----------
    encoded_bytes : mapping of T to int
        The encoded size of each table.
    coordinates : collection of T
        Tables of coordinates, which are embedded first.
    changes_nodes : bool
        Whether the commit changes nodes.

    Examples
    --------
    >>> from zarr_manifests.planning.layout.packing import plan_embedding
    >>> plan_embedding({b"a": 100, b"b": 1_000_000})
    EmbedPlan(embedded=(b'a',), manifests=((b'b',),))
    """
    sizes = encoded_bytes.values()
    fits = sum(sizes) <= _EMBED_AT_OPEN_BYTES and max(sizes, default=0) <= _EMBED_TABLE_BYTES
    others = EMBED_BYTES
    if (changes_nodes or coordinates) and not fits:
        others = _EMBED_OTHERS_BYTES
    first = frozenset(coordinates)
    embedded, rest, room = [], [], EMBED_BYTES
    for later, size, table in sorted((t not in first, n, t) for t, n in encoded_bytes.items()):
        if size <= min(room, others if later else room, _EMBED_TABLE_BYTES):
            embedded.append(table)
            room -= size
            others -= size * later
        else:
            rest.append((size, table))
    rest.sort(reverse=True)
    bins = pack([size for size, _ in rest], _SHARED_MANIFEST_BYTES)
    return EmbedPlan(tuple(embedded), tuple(tuple(rest[i][1] for i in each) for each in bins))


def pack(sizes: Sequence[int], capacity: int | None) -> list[list[int]]:
    """Return the positions of the sizes in each bin, packed first-fit decreasing.

    No bin's sum exceeds the capacity, except that of a size which does so alone. Equal sizes keep
    their order, so a caller that sorts first gets a result that does not depend on where the sizes
    came from.

    Parameters
    ----------
    sizes : sequence of int
        The sizes.
    capacity : int or None
        None: a single bin takes everything.

    Examples
    --------
    >>> from zarr_manifests.planning.layout.packing import pack
    >>> pack([4, 8, 1, 4, 2, 1], capacity=10)
    [[1, 4], [0, 3, 2, 5]]
    """
    if not sizes:
        return []
    if capacity is None:
        return [list(range(len(sizes)))]
    order = np.argsort(-np.asarray(sizes, np.int64), kind="stable").tolist()
    bins: list[list[int]] = []
    room = np.empty(len(sizes), np.int64)
    for position in order:
        size, count = sizes[position], len(bins)
        first = int(np.argmax(room[:count] >= size)) if count else 0
        if count == 0 or room[first] < size:
            first = count
            bins.append([])
            room[first] = capacity
        bins[first].append(position)
        room[first] -= size
    return bins


def pack_into(sizes: Sequence[int], capacity: int | None, most_bins: int) -> list[list[int]]:
    """Like `pack`, into at most `most_bins` bins; sizes without room are left out.

    The biggest sizes are left out first, and the last among equal ones, so that most sizes fit.

    Examples
    --------
    >>> from zarr_manifests.planning.layout.packing import pack_into
    >>> pack_into([10, 10, 1, 3, 10], capacity=10, most_bins=2)
    [[0], [3, 2]]
    """
    bins = pack(sizes, capacity)
    if len(bins) <= most_bins:
        return bins
    ascending = np.argsort(np.asarray(sizes, np.int64), kind="stable").tolist()
    found: list[list[int]] = []
    few, many = 0, len(sizes)  # the `few` smallest fit, the `many` smallest do not
    if capacity is not None:
        sums = np.cumsum(np.asarray(sizes, np.int64)[ascending])
        many = min(many, int(np.searchsorted(sums, capacity * most_bins, side="right")) + 1)
    count = many - 1  # usually, sizes whose sum fits can also be packed
    while many - few > 1:
        chosen = sorted(ascending[:count])
        bins = pack([sizes[i] for i in chosen], capacity)
        if len(bins) <= most_bins:
            few, found = count, [[chosen[i] for i in members] for members in bins]
        else:
            many = count
        count = (few + many) // 2
    return found


def pair(sizes: Sequence[int], members: int) -> list[list[int]]:
    """Return the positions in groups of `members`; the last group may have fewer.

    Half of each group (the bigger half, if uneven) is taken from the biggest sizes that are left,
    the rest from the smallest.

    Examples
    --------
    >>> from zarr_manifests.planning.layout.packing import pair
    >>> pair([10, 1, 5, 20, 2], members=2)
    [[3, 1], [0, 4], [2]]
    """
    order = np.argsort(-np.asarray(sizes, np.int64), kind="stable").tolist()
    groups = []
    low, high, biggest = 0, len(order), -(-members // 2)
    while low < high:
        top = order[low : min(low + biggest, high)]
        low += len(top)
        bottom = order[max(low, high - (members - biggest)) : high]
        high -= len(bottom)
        groups.append(top + bottom[::-1])
    return groups
