"""Which chunk tables go into which manifest.

A commit's small tables are embedded in its delta, up to a budget; the others get manifests of
their own, small ones sharing one, first-fit decreasing by size. A delta that opening needs, since
it changes nodes or has tables of coordinates, embeds other tables only if all of them are little,
or a few: who opens a dataset of hundreds of arrays reads the delta, and a small one travels with
the snapshot. (How the base is packed is said in `planning.sets`.)

Invariant: every table is placed exactly once, and the result does not depend on the input's
order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["EMBED_BYTES", "LEAF_ROWS", "EmbedPlan", "plan_embedding"]

EMBED_BYTES: Final = 32 * 1024
_EMBED_TABLE_BYTES: Final = 8 * 1024
_EMBED_AT_OPEN_BYTES: Final = 16 * 1024
_EMBED_OTHERS_BYTES: Final = 2 * 1024
_SHARED_MANIFEST_BYTES: Final = 1024 * 1024
LEAF_ROWS: Final = 1_000_000
"""Rows of a leaf at most; an array with more is split by box."""


@dataclass(frozen=True, slots=True)
class EmbedPlan[T: (bytes, tuple[bytes, int])]:
    """The tables that are embedded, and those of each manifest."""

    embedded: tuple[T, ...]
    manifests: tuple[tuple[T, ...], ...]


def plan_embedding[T: (bytes, tuple[bytes, int])](
    encoded_bytes: Mapping[T, int],
    coordinates: Collection[T] = (),
    *,
    changes_nodes: bool = False,
) -> EmbedPlan[T]:
    """Place the tables of one commit.

    Parameters
    ----------
    encoded_bytes : mapping of T to int
        The encoded size of each table.
    coordinates : collection of T
        Those of coordinates, which come first.
    changes_nodes : bool
        Whether the commit changes nodes.

    Examples
    --------
    >>> from zarr_manifests.planning.layout.packing import plan_embedding
    >>> plan_embedding({b"a": 100, b"b": 1_000_000})
    EmbedPlan(embedded=(b'a',), manifests=((b'b',),))
    """
    sizes = encoded_bytes.values()
    fits = sum(sizes) <= _EMBED_AT_OPEN_BYTES and max(sizes, default=0) <= _EMBED_TABLE_BYTES
    others = EMBED_BYTES
    if (changes_nodes or coordinates) and not fits:
        others = _EMBED_OTHERS_BYTES
    first = frozenset(coordinates)
    embedded, rest, room = [], [], EMBED_BYTES
    for later, size, table in sorted((t not in first, n, t) for t, n in encoded_bytes.items()):
        if size <= min(room, others if later else room, _EMBED_TABLE_BYTES):
            embedded.append(table)
            room -= size
            others -= size * later
        else:
            rest.append((size, table))
    return EmbedPlan(tuple(embedded), _first_fit_decreasing(rest, _SHARED_MANIFEST_BYTES))


def _first_fit_decreasing[T: (bytes, tuple[bytes, int])](
    items: Sequence[tuple[int, T]], capacity: int
) -> tuple[tuple[T, ...], ...]:
    bins: list[list[T]] = []
    room: list[int] = []
    for size, item in sorted(items, reverse=True):
        for i, left in enumerate(room):
            if size <= left:
                bins[i].append(item)
                room[i] -= size
                break
        else:
            bins.append([item])
            room.append(capacity - size)
    return tuple(map(tuple, bins))
