"""Chunk counts of nodes: totals in a base, changes in deltas and runs.

A base counts the chunks of each node. A delta or run in a read list counts by how much it changes
them, or the new total if it replaces everything. Their sum is the number of an array's chunks,
without reading a manifest. A commit does not look up what it overwrites, so a count may be an upper
bound; its flags say so. Invariant: counts of all nodes are known, or of none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.envelope import Fields
from zarr_manifests.format.records import Stored
from zarr_manifests.ids import NODE_ID_BYTES

_MOST: Final = 2**62
_FLAGS: Final = range(8)


class Counted:
    """Flags of a count; plain integers, since every commit tests many and enums are slow."""

    EXACT: Final = 0
    CHUNKS_AT_MOST: Final = 1
    BYTES_AT_MOST: Final = 2
    WHOLE: Final = 4
    """The count is a total, not a change: older counts of the node no longer apply."""


@dataclass(frozen=True, slots=True)
class Count:
    """Chunks and bytes of one node: a total, or a change, which may be negative.

    `counted` is a sum of the flags in `Counted`.
    """

    node_id: bytes
    chunks: int
    nbytes: int
    counted: int = Counted.EXACT


def check_counts(counts: Sequence[Count] | None, *, least: int = -_MOST) -> None:
    """Raise for invalid counts, including those below `least`.

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
            raise CorruptObjectError("counts: an invalid id, number or flag")
    if len(seen) != len(counts or ()):
        raise CorruptObjectError("counts: a node occurs twice")


def _pack(counts: Sequence[Count] | None) -> list[Any] | None:
    if counts is None:
        return None
    return [[c.node_id, c.chunks, c.nbytes, *([c.counted] if c.counted else [])] for c in counts]


def _parse(fields: Fields, name: str) -> tuple[Count, ...] | None:
    if not fields.has(name):
        return None
    counts: list[Count] = []
    for value in fields.items(name):
        match value:
            case [bytes(node), int(chunks), int(nbytes), *flags] if len(flags) <= 1 and all(
                type(flag) is int and flag > 0 for flag in flags
            ):
                counts.append(Count(node, chunks, nbytes, sum(flags)))
            case _:
                raise CorruptObjectError(
                    f"{fields.where}.{name}: expected node, chunks, bytes and optional flags"
                )
    return tuple(counts)


COUNTS: Final = Stored(_parse, _pack)
"""Counts, or nil if they are unknown."""
