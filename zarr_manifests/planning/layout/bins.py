"""Packing sizes into few bins, and pairing big ones with small ones.

`pack` is first-fit decreasing: of all sizes, biggest first, each goes into the first bin that has
room for it. It never takes more than 11/9 times the fewest possible bins, plus one. `pair` gives
groups of equal length that take their members from both ends of the order by size, so that the
groups come out alike.

`pack_into` is for a limited number of bins: it leaves out the biggest sizes, as many as it takes.

All work on positions and keep the order given among equal sizes: who calls them sorts first, and
the result is then independent of where the sizes came from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zarr_manifests.errors import InvalidArgumentError

__all__ = ["pack", "pack_into", "pair"]


def pack(sizes: Sequence[int], capacity: int | None) -> list[list[int]]:
    """Positions of the sizes in each bin; no bin's sum is over the capacity.

    Parameters
    ----------
    sizes : sequence of int
        None of them over the capacity.
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
    """As `pack`, into at most so many bins; sizes for which there is no room are left out.

    The biggest are, and the last of equal ones: so most sizes find a place.

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
    few, many = 0, len(sizes)  # so many of the smallest fit, and so many do not
    if capacity is not None:
        sums = np.cumsum(np.asarray(sizes, np.int64)[ascending])
        many = min(many, int(np.searchsorted(sums, capacity * most_bins, side="right")) + 1)
    count = many - 1  # mostly all fit for which there is room in sum
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
    """Positions in groups of `members`, the last maybe fewer.

    Each takes one half (the bigger, if uneven) from the biggest of the sizes that are left, the
    other from the smallest.

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
