"""Counts, bytes, times, sums and values as messages, the command line and pages show them."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from difflib import get_close_matches
from heapq import nlargest, nsmallest
from typing import Any, Final

_CANDIDATES: Final = 100
_COMPARED: Final = 25_000
"""Characters of a name times those of all names that it is compared with: at most some 3 ms."""


def near_names(name: str, known: Iterable[str], most: int = 1, cutoff: float = 0.6) -> list[str]:
    """The known names that are spelled nearly like this one, the nearest first.

    However many are known, a few are compared: its neighbours by order. So a suggestion may be
    missed among many, or for a very long name.

    Examples
    --------
    >>> near_names("mian", ["main", "summer"])
    ['main']
    """
    names = list(known)
    half = min(_CANDIDATES, _COMPARED // (len(name) + 1) ** 2) // 2
    if len(names) > 2 * half:
        names = [
            *nlargest(half, (each for each in names if each < name)),
            *nsmallest(half, (each for each in names if each >= name)),
        ]
    return get_close_matches(name, names, most, cutoff)


def shown(value: object) -> str:
    """A value as a message shows it: never longer than a line."""
    try:
        return reprlib.repr(value)[:80]
    except ValueError:  # Python prints no number with thousands of digits
        return "a number that is too large"


def spelled(key: object) -> str:
    """A key as it stands in a place: never longer than a name."""
    return key[:64] if isinstance(key, str) else shown(key)[:64]


def hyphened(key: object) -> str:
    """The name of an option that a key with hyphens or underscores means."""
    return spelled(key).replace("_", "-")


def known_as(name: object, known: Iterable[str]) -> str:
    """Advice for an unknown name: the known name that is close to it, or all known names.

    Examples
    --------
    >>> known_as("mod", ["mode", "attempts"]), known_as("colour", ["mode", "attempts"])
    ('did you mean mode?', 'known are attempts, mode')
    """
    names = list(known)
    close = near_names(spelled(name), names)
    if close:
        return f"did you mean {close[0]}?"
    return f"known are {', '.join(sorted(names)[:40])}" if names else "there are none"


def listed(items: Iterable[object], most: int = 5, between: str = ", ") -> str:
    """The first of the items, and how many others there are; `none` if there are none.

    Examples
    --------
    >>> listed("abcd", most=2), listed(())
    ('a, b and 2 more', 'none')
    """
    told = list(map(str, items))
    more = f" and {len(told) - most:,} more" if len(told) > most else ""
    return (between.join(told[:most]) or "none") + more


def count_text(count: int, noun: str) -> str:
    """`1 chunk`, `2,000 chunks`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def bytes_text(nbytes: int) -> str:
    """Bytes with three digits and a decimal unit: `999 B`, `20.9 kB`, `1.40 MB`."""
    if nbytes < 1000:
        return f"{nbytes} B"
    size, units = nbytes / 1000, ["kB", "MB", "GB", "TB", "PB"]
    while size >= 999.5 and len(units) > 1:
        size /= 1000
        units.pop(0)
    decimals = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{size:.{decimals}f} {units[0]}"


def time_text(moment: datetime) -> str:
    """Date and time to the second, in UTC."""
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def written_text(written: Mapping[str, int]) -> str:
    """What a commit did, from `SnapshotInfo.written`; empty if it changed no chunks."""
    parts = []
    if written.get("refs-set"):
        count, nbytes = written["refs-set"], written.get("chunk-bytes", 0)
        parts.append(f"{count_text(count, 'chunk')}, {bytes_text(nbytes)}")
    if written.get("refs-unset"):
        parts.append(f"{count_text(written['refs-unset'], 'chunk')} removed")
    return "; ".join(parts)


def parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """The fields and properties of a struct, by name."""
    names = [*value.__struct_fields__]
    names += [name for name, found in vars(type(value)).items() if isinstance(found, property)]
    return ((name, getattr(value, name)) for name in names)
