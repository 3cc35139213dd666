"""Counts, bytes, times and sums as the command line and the pages show them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

__all__ = ["bytes_text", "count_text", "time_text", "totals_text", "written_text"]


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


def totals_text(totals: Mapping[str, int]) -> str:
    """What there is in a snapshot, from `SnapshotInfo.totals`; empty if there are no chunks."""
    parts = []
    for name, text in (("chunks", lambda n: count_text(n, "chunk")), ("chunk-bytes", bytes_text)):
        if totals.get(name):
            parts.append(text(totals[name]))
        elif totals.get(f"{name}-at-most"):
            parts.append(f"at most {text(totals[f'{name}-at-most'])}")
    return ", ".join(parts)
