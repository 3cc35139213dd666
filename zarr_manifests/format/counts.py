"""How many chunks there are of each node, and how many a delta makes it more or fewer.

A base counts the chunks that each node has; a delta or run in a read list says by how much it
changes that. So the number of an array's chunks is known without a look at any manifest.
Invariant: where they are not known there are none at all, never a part of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.envelope import Fields
from zarr_manifests.ids import NODE_ID_BYTES

__all__ = ["Count", "pack_counts", "parse_counts"]

_MOST: Final = 2**62


@dataclass(frozen=True, slots=True)
class Count:
    """Chunks of one node, or how many more there are (fewer: below 0), and their bytes."""

    node_id: bytes
    chunks: int
    nbytes: int


def pack_counts(counts: Sequence[Count] | None) -> list[Any] | None:
    """As a list for msgpack."""
    if counts is None:
        return None
    return [[count.node_id, count.chunks, count.nbytes] for count in counts]


def parse_counts(fields: Fields, *, least: int = -_MOST) -> tuple[Count, ...] | None:
    """From the field `counts`; no number is below `least`."""
    if not fields.has("counts"):
        return None
    counts: dict[bytes, Count] = {}
    for value in fields.items("counts"):
        match value:
            case [bytes(node), int(chunks), int(nbytes)] if (
                len(node) == NODE_ID_BYTES
                and least <= min(chunks, nbytes)
                and max(chunks, nbytes) <= _MOST
                and node not in counts
            ):
                counts[node] = Count(node, chunks, nbytes)
            case _:
                raise CorruptObjectError(f"{fields.where}.counts: node, chunks and bytes are due")
    return tuple(counts.values())
