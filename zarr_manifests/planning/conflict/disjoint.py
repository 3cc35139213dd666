"""Whether commits are disjoint, decided from the read list without reading their logs.

Invariant: commits whose boxes are disjoint share no chunk. Commits whose boxes overlap may still
share none; their logs then decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from zarr_manifests.format.snapshot import DeltaEntry
from zarr_manifests.grid import Box


def apart(mine: Mapping[bytes, Sequence[Box]], theirs: Iterable[DeltaEntry]) -> bool:
    """Whether my chunks cannot conflict with the commits listed in these entries.

    Parameters
    ----------
    mine : mapping of bytes to sequence of Box
        Boxes around all chunks that I have set or unset, by node id. I have changed nothing else.
    theirs : iterable of DeltaEntry
        The commits that came first.
    """
    for entry in theirs:
        if entry.changes_nodes:
            return False
        for part in entry.parts():
            if any(box.overlaps(part.box) for box in mine.get(part.node_id, ())):
                return False
    return True
