"""Which chunk tables of a commit are embedded in its delta, and which go into manifests.

Small tables are embedded, up to a budget. The others get manifests: small ones share one, packed
first-fit decreasing. Opening a dataset reads the deltas that change nodes or have tables of
coordinates, and a small delta is copied into the snapshot. To stay small, such a delta embeds
other tables only if all its tables are small, or up to a lower budget. (The base is packed by
`planning.layout.sets`.)

Invariants: every table is placed exactly once; the result does not depend on the input's order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

EMBED_BYTES: Final = 32 * 1024
_EMBED_TABLE_BYTES: Final = 8 * 1024
_EMBED_AT_OPEN_BYTES: Final = 16 * 1024
_EMBED_OTHERS_BYTES: Final = 2 * 1024
_SHARED_MANIFEST_BYTES: Final = 1024 * 1024
LEAF_ROWS: Final = 1_000_000
"""Most rows of a leaf; an array with more is split by box."""


@dataclass(frozen=True, slots=True)
class EmbedPlan[T: (bytes, tuple[bytes, int])]:
    """The embedded tables, and the tables of each manifest."""

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
        Tables of coordinates, which are embedded first.
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
