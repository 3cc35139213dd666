"""Grouping byte ranges of one object into few requests.

Ranges are taken in order of their offsets. A range joins the request before it if the gap between
them is at most `gap_bytes` and the request stays at most `span_bytes` long. Where bytes in gaps are
to be few, only the smallest gaps are bridged. Invariants:

- Every range is a member of exactly one request, and lies within it.
- A request starts at its first member and ends at the furthest end of a member. Gaps between
  members are at most `gap_bytes`, and those of all requests together at most `spare` of the bytes
  of the ranges, if that is given, or 1 KiB if that is more.
- A request longer than `span_bytes` has one member, or all its members lie within the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from zarr_manifests.errors import InvalidArgumentError

_FREE_BYTES: Final = 1024
"""To fetch so much takes less time than to send a request, however little is wanted."""


@dataclass(frozen=True, slots=True)
class RangeRequest:
    """One request for a contiguous part of an object.

    Parameters
    ----------
    start, length : int
        The part, in bytes.
    members : tuple of int
        Positions of its ranges in the input, in order of their offsets.
    """

    start: int
    length: int
    members: tuple[int, ...]


def coalesce(
    offsets: Sequence[int] | npt.NDArray[np.int64],
    lengths: Sequence[int] | npt.NDArray[np.int64],
    *,
    gap_bytes: int,
    span_bytes: int,
    spare: float | None = None,
) -> list[RangeRequest]:
    """Return the requests for these ranges of one object, in order of their offsets.

    Parameters
    ----------
    offsets, lengths : sequence or array of int
        The ranges, in any order; they may overlap, be the same, or be empty.
    gap_bytes : int
        The largest gap between two ranges of a request.
    span_bytes : int
        The longest request of several ranges.
    spare : float, optional
        How many bytes may lie in gaps, as a share of the bytes of all ranges, or 1 KiB if that is
        more; by default any number. The smallest gaps are bridged.

    Raises
    ------
    InvalidArgumentError
        If a bound is negative, or the numbers of offsets and lengths differ.

    Examples
    --------
    >>> from zarr_manifests.planning.tables.byte_ranges import coalesce
    >>> for request in coalesce([900, 0, 100], [50, 90, 90], gap_bytes=10, span_bytes=1000):
    ...     print(request.start, request.length, request.members)
    0 190 (1, 2)
    900 50 (0,)
    """
    if gap_bytes < 0 or span_bytes < 0:
        raise InvalidArgumentError(
            f"gap_bytes and span_bytes must be 0 or more, not {gap_bytes} and {span_bytes}"
        )
    if len(offsets) != len(lengths):
        raise InvalidArgumentError(f"{len(offsets)} offsets and {len(lengths)} lengths")
    if not len(offsets):
        return []
    starts = np.asarray(offsets, np.int64)
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    # The furthest end of a member so far. A request that begins reaches further than all before it.
    reach = np.maximum.accumulate(starts + np.asarray(lengths, np.int64)[order])
    between = np.maximum(starts[1:] - reach[:-1], 0)
    apart = between > gap_bytes
    if spare is not None:
        wanted = int(reach[-1] - starts[0]) - int(between.sum())
        apart |= _too_many(between, apart, max(int(spare * wanted), _FREE_BYTES))
    gaps = [*(np.flatnonzero(apart) + 1).tolist(), len(order)]
    members = order.tolist()
    requests: list[RangeRequest] = []
    first = 0
    for stop in gaps:
        while first < stop:
            start = int(starts[first])
            # What lies within the first member joins it, however long that is.
            most = max(start + span_bytes, int(reach[first]))
            end = first + int(reach[first:stop].searchsorted(most, side="right"))
            length = int(reach[end - 1]) - start
            requests.append(RangeRequest(start, length, tuple(members[first:end])))
            first = end
    return requests


def _too_many(
    between: npt.NDArray[np.int64], apart: npt.NDArray[np.bool_], most: int
) -> npt.NDArray[np.bool_]:
    """Which gaps are not bridged: all but the smallest, which are `most` bytes together."""
    ascending = np.argsort(between, kind="stable")
    spent = np.cumsum(np.where(apart, 0, between)[ascending])
    found = np.zeros(len(between), np.bool_)
    found[ascending] = spent > most
    return found
