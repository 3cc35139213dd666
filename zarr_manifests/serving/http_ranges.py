"""The `Range` of a request, as RFC 9110 has it."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["RangeError", "part_of"]

_RANGE: Final = re.compile(r"bytes[ \t]*=[ \t]*([0-9]*)-([0-9]*)[ \t]*", re.ASCII | re.IGNORECASE)
_MOST_DIGITS: Final = 18


class RangeError(ValueError):
    """The range begins beyond the end."""


def part_of(header: str | None, total: int) -> tuple[int, int] | None:
    """Start and end of the requested part of `total` bytes; None for all of them.

    All are sent if there is no range, it is malformed or of another unit, or there are several.

    Raises
    ------
    RangeError
        If no byte is in the range.

    Examples
    --------
    >>> from zarr_manifests.serving.http_ranges import part_of
    >>> part_of("bytes=2-5", 10), part_of("bytes=8-", 10), part_of("bytes=-3", 10)
    ((2, 6), (8, 10), (7, 10))
    >>> part_of("bytes=0-1, 4-5", 10) is None
    True
    """
    found = None if header is None else _RANGE.fullmatch(header)
    if found is None or found.groups() == ("", ""):
        return None
    first, last = found.groups()
    if not first:
        length = min(_number(last), total)
        if not length:
            raise RangeError
        return total - length, total
    start, end = _number(first), total if not last else _number(last) + 1
    if end <= start:
        if last:
            return None  # such a range is malformed
        raise RangeError
    if start >= total:
        raise RangeError
    return start, min(end, total)


def _number(digits: str) -> int:
    digits = digits.lstrip("0")
    return int(digits or "0") if len(digits) <= _MOST_DIGITS else 10**_MOST_DIGITS
