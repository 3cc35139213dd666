"""Whether a commit can be moved onto a tip that others have moved meanwhile.

The rule: it can where every commit in between changed chunks only, the commit itself changes
chunks only, and no chunk was changed by both. REWRITE commits change no data and never conflict.
Everything else is a conflict that names the array, the component and the chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from zarr_manifests.errors import Conflict
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.grid import Box

__all__ = ["Footprint", "find_conflicts"]

_LISTED_CHUNKS = 20


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a commit touched.

    Parameters
    ----------
    nodes : frozenset of str
        Paths of nodes created, changed, truncated or deleted.
    tables : mapping of bytes to tuple of ChunkTable
        Chunks set or unset, by node id.
    """

    nodes: frozenset[str]
    tables: Mapping[bytes, tuple[ChunkTable, ...]]


def find_conflicts(
    mine: Footprint, theirs: Iterable[Footprint], paths: Mapping[bytes, str]
) -> list[Conflict]:
    """Everything that keeps `mine` from being put on top of `theirs`; empty if nothing does."""
    conflicts: list[Conflict] = []
    for other in theirs:
        if not other.nodes and not other.tables:  # a rewrite
            continue
        if mine.nodes or other.nodes:
            conflicts += _metadata_conflicts(mine, other, paths)
            continue
        for node_id in mine.tables.keys() & other.tables.keys():
            shared = _shared(mine.tables[node_id], other.tables[node_id])
            if shared:
                conflicts.append(
                    Conflict(
                        f"/{paths.get(node_id, '?')}",
                        "chunks",
                        "also written by a commit that came first",
                        tuple(shared[:_LISTED_CHUNKS]),
                    )
                )
    return conflicts


def _metadata_conflicts(
    mine: Footprint, other: Footprint, paths: Mapping[bytes, str]
) -> list[Conflict]:
    both = mine.nodes & other.nodes
    if both:
        reason = "metadata was also changed by a commit that came first"
        return [Conflict(f"/{path}", "metadata", reason) for path in sorted(both)]
    if other.nodes:
        reason = "metadata was changed by a commit that came first"
        return [Conflict(f"/{path}", "metadata", reason) for path in sorted(other.nodes)]
    touched = ", ".join(sorted(f"/{paths.get(node, '?')}" for node in other.tables)) or "nothing"
    reason = f"this commit changes metadata, and one that came first wrote chunks of {touched}"
    return [Conflict(f"/{path}", "metadata", reason) for path in sorted(mine.nodes)]


def _shared(mine: Sequence[ChunkTable], theirs: Sequence[ChunkTable]) -> list[tuple[int, ...]]:
    box = Box.around(table.box for table in (*mine, *theirs))
    a = np.concatenate([box.ravel(table.coords()) for table in mine])
    b = np.concatenate([box.ravel(table.coords()) for table in theirs])
    return [tuple(c) for c in box.unravel(np.intersect1d(a, b)).tolist()]
