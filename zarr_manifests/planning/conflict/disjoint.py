"""Whether commits are apart by what a read list says of them, so that no log need be read.

Invariant: this errs on one side only. What is apart by boxes is apart chunk by chunk; what is not
may still be, and is then found out from the logs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from zarr_manifests.format.snapshot import DeltaEntry
from zarr_manifests.grid import Box

__all__ = ["apart"]


def apart(mine: Mapping[bytes, Sequence[Box]], theirs: Iterable[DeltaEntry]) -> bool:
    """Whether nothing of mine can be in the way of commits that are listed so.

    Parameters
    ----------
    mine : mapping of bytes to sequence of Box
        What holds all chunks that I have set or unset, by node id; I have changed nothing else.
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
