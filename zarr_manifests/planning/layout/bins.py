"""Packing sizes into few bins, and pairing big ones with small ones.

`pack` is first-fit decreasing: sizes are taken biggest first, and each goes into the first bin with
room for it. It never needs more than 11/9 times the fewest possible bins, plus one. `pack_into`
has a limited number of bins, and leaves out the biggest sizes until the rest fits. `pair` makes
groups of the same length and of similar sums, with members from both ends of the order by size.

All functions work on positions and keep the given order among equal sizes. So a caller that sorts
first gets a result that does not depend on where the sizes came from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zarr_manifests.errors import InvalidArgumentError


def pack(sizes: Sequence[int], capacity: int | None) -> list[list[int]]:
    """Return the positions of the sizes in each bin; no bin's sum exceeds the capacity.

    Parameters
    ----------
    sizes : sequence of int
        None of them exceeds the capacity.
    capacity : int or None
        None: a single bin takes everything.

    Raises
    ------
    InvalidArgumentError
        If a size fits no bin.

    Examples
    --------
    >>> from zarr_manifests.planning.layout.bins import pack
    >>> pack([4, 8, 1, 4, 2, 1], capacity=10)
    [[1, 4], [0, 3, 2, 5]]
    """
    if not sizes:
        return []
    if capacity is None:
        return [list(range(len(sizes)))]
    order = np.argsort(-np.asarray(sizes, np.int64), kind="stable").tolist()
    if sizes[order[0]] > capacity:
        raise InvalidArgumentError(f"{sizes[order[0]]} does not fit into a bin of {capacity}")
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
    >>> from zarr_manifests.planning.layout.bins import pack_into
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
    >>> from zarr_manifests.planning.layout.bins import pair
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
