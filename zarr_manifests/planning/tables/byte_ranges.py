"""Grouping byte ranges of one object into few requests.

Ranges are taken in order of their offsets. A range joins the request before it if the gap between
them is at most `gap_bytes` and the request stays at most `span_bytes` long. Invariants:

- Every range is a member of exactly one request, and lies within it.
- A request starts at its first member and ends at the furthest end of a member. Gaps between
  members are at most `gap_bytes`.
- A request longer than `span_bytes` has one member, or all its members lie within the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zarr_manifests.errors import InvalidArgumentError

__all__ = ["RangeRequest", "coalesce"]


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
    offsets: Sequence[int], lengths: Sequence[int], *, gap_bytes: int, span_bytes: int
) -> list[RangeRequest]:
    """Return the requests for these ranges of one object, in order of their offsets.

    Parameters
    ----------
    offsets, lengths : sequence of int
        The ranges, in any order; they may overlap, be the same, or be empty.
    gap_bytes : int
        The largest gap between two ranges of a request.
    span_bytes : int
        The longest request of several ranges.

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
            f"ranges are coalesced up to a gap and a span of 0 bytes or more, not of "
            f"{gap_bytes} and {span_bytes}"
        )
    if len(offsets) != len(lengths):
        raise InvalidArgumentError(f"{len(offsets)} offsets and {len(lengths)} lengths")
    if not len(offsets):
        return []
    order = sorted(range(len(offsets)), key=offsets.__getitem__)
    requests: list[RangeRequest] = []
    start = end = offsets[order[0]]
    members: list[int] = []
    for member in order:
        offset = offsets[member]
        reach = max(end, offset + lengths[member])
        beyond = offset - end > gap_bytes or (reach > end and reach - start > span_bytes)
        if beyond and members:
            requests.append(RangeRequest(start, end - start, tuple(members)))
            start, members, reach = offset, [], offset + lengths[member]
        members.append(member)
        end = reach
    requests.append(RangeRequest(start, end - start, tuple(members)))
    return requests
