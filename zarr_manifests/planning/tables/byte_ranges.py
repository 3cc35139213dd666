"""Which requests fetch many byte ranges of one object: neighbours together.

Ranges are taken in the order in which they lie. One goes along with those before it if no more than
`gap_bytes` lie between that nobody has asked for, and if the request then is no longer than
`span_bytes`. Invariants:

- Every range lies within the request that it is a member of, and in no other.
- A request begins where its first member does and ends where its furthest does, and between
  members never has more than `gap_bytes` at a stretch that nobody has asked for.
- A request longer than `span_bytes` has one member, or members that all lie within its first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zarr_manifests.errors import InvalidArgumentError

__all__ = ["RangeRequest", "coalesce"]


@dataclass(frozen=True, slots=True)
class RangeRequest:
    """One request, for one stretch of an object.

    Parameters
    ----------
    start, length : int
        The stretch, in bytes.
    members : tuple of int
        The ranges in it, by their positions in what was given; in the order in which they lie.
    """

    start: int
    length: int
    members: tuple[int, ...]


def coalesce(
    offsets: Sequence[int], lengths: Sequence[int], *, gap_bytes: int, span_bytes: int
) -> list[RangeRequest]:
    """The requests for these ranges of one object, in the order in which they lie.

    Parameters
    ----------
    offsets, lengths : sequence of int
        The ranges, in any order; they may overlap, be the same, or be empty.
    gap_bytes : int
        How many bytes nobody has asked for may lie between two ranges of a request.
    span_bytes : int
        How long a request of several ranges may be.

    Raises
    ------
    InvalidArgumentError
        If a bound is negative, or there are not as many lengths as offsets.

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
            f"ranges are brought together up to a gap and a span of 0 bytes or more, and not of "
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
