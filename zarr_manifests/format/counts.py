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
from enum import IntFlag
from typing import Any, Final

from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.envelope import Fields
from zarr_manifests.ids import NODE_ID_BYTES

__all__ = ["Count", "Counted", "pack_counts", "parse_counts"]

_MOST: Final = 2**62


class Counted(IntFlag):
    """How a count is meant."""

    EXACT = 0
    CHUNKS_AT_MOST = 1
    BYTES_AT_MOST = 2
    WHOLE = 4
    """It counts what there is, and not what is added: nothing older of the node counts."""


_COUNTED: Final = {flags: Counted(flags) for flags in range(8)}


@dataclass(frozen=True, slots=True)
class Count:
    """Chunks of one node, or how many more there are (fewer: below 0), and their bytes."""

    node_id: bytes
    chunks: int
    nbytes: int
    counted: Counted = Counted.EXACT


def pack_counts(counts: Sequence[Count] | None) -> list[Any] | None:
    """As a list for msgpack."""
    if counts is None:
        return None
    return [
        [c.node_id, c.chunks, c.nbytes, *([int(c.counted)] if c.counted else [])] for c in counts
    ]


def parse_counts(fields: Fields, *, least: int = -_MOST) -> tuple[Count, ...] | None:
    """From the field `counts`; no number is below `least`."""
    if not fields.has("counts"):
        return None
    counts: dict[bytes, Count] = {}
    for value in fields.items("counts"):
        match value:
            case [bytes(node), int(chunks), int(nbytes), *flags] if (
                len(node) == NODE_ID_BYTES
                and least <= min(chunks, nbytes)
                and max(chunks, nbytes) <= _MOST
                and node not in counts
                and (not flags or (len(flags) == 1 and type(flags[0]) is int and flags[0] > 0))
                and (counted := _COUNTED.get(flags[0] if flags else 0)) is not None
            ):
                counts[node] = Count(node, chunks, nbytes, counted)
            case _:
                due = "node, chunks, bytes and perhaps how they are meant"
                raise CorruptObjectError(f"{fields.where}.counts: {due} are due")
    return tuple(counts.values())
