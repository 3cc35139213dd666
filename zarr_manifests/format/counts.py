"""How many chunks there are of each node, and how many a delta makes it more or fewer.

A base counts the chunks that each node has; a delta or run in a read list says by how much it
changes that, or, where it leaves nothing of what was there, how many there are then. So the number
of an array's chunks is known without a look at any manifest. A commit does not look up what it
overwrites, so a number may be no more than a bound; it says so.
Invariant: where they are not known there are none at all, never a part of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.envelope import Fields
from zarr_manifests.ids import NODE_ID_BYTES

__all__ = ["Count", "Counted", "check_counts", "pack_counts", "parse_counts"]

_MOST: Final = 2**62
_FLAGS: Final = range(8)


class Counted:
    """How a count is meant; numbers and no enumeration, since every commit tests many of them."""

    EXACT: Final = 0
    CHUNKS_AT_MOST: Final = 1
    BYTES_AT_MOST: Final = 2
    WHOLE: Final = 4
    """It counts what there is, and not what is added: nothing older of the node counts."""


@dataclass(frozen=True, slots=True)
class Count:
    """Chunks of one node, or how many more there are (fewer: below 0), and their bytes.

    `counted` is a sum of what `Counted` names.
    """

    node_id: bytes
    chunks: int
    nbytes: int
    counted: int = Counted.EXACT


def check_counts(counts: Sequence[Count] | None, *, least: int = -_MOST) -> None:
    """Refuse counts that cannot be, those below `least` among them.

    Raises
    ------
    CorruptObjectError
        If a node occurs twice, or a number is out of range.
    """
    seen = set()
    for count in counts or ():
        seen.add(count.node_id)
        within = least <= count.chunks <= _MOST and least <= count.nbytes <= _MOST
        if not within or count.counted not in _FLAGS or len(count.node_id) != NODE_ID_BYTES:
            raise CorruptObjectError("counts: an id or a number that cannot be")
    if len(seen) != len(counts or ()):
        raise CorruptObjectError("counts: a node occurs twice")


def pack_counts(counts: Sequence[Count] | None) -> list[Any] | None:
    """As a list for msgpack."""
    if counts is None:
        return None
    return [[c.node_id, c.chunks, c.nbytes, *([c.counted] if c.counted else [])] for c in counts]


def parse_counts(fields: Fields) -> tuple[Count, ...] | None:
    """From the field `counts`."""
    if not fields.has("counts"):
        return None
    counts: list[Count] = []
    for value in fields.items("counts"):
        match value:
            case [bytes(node), int(chunks), int(nbytes), *flags] if len(flags) <= 1 and all(
                type(flag) is int and flag > 0 for flag in flags
            ):
                counts.append(Count(node, chunks, nbytes, sum(flags)))
            case _:
                due = "node, chunks, bytes and perhaps how they are meant"
                raise CorruptObjectError(f"{fields.where}.counts: {due} are due")
    return tuple(counts)
