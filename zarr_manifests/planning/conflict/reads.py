"""Which chunks and documents of its snapshot a writer has read.

Few chunk reads are recorded exactly. Beyond a limit they become one bounding box per node, which
may then include chunks that were not read, but never misses one. The size of the record is bounded
by the number of nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.runtime import ForkSafeLock

_MOST_CHUNKS: Final = 4096
_ENCLOSING: Final = ForkSafeLock()


@dataclass(slots=True)
class Reads:
    """The reads of a snapshot; threads may record reads concurrently.

    Attributes
    ----------
    chunks : dict of bytes to set of coords
        By node id: chunks read since they were last merged into the box.
    boxes : dict of bytes to Box
        By node id: a box around all chunks read before.
    documents : set of str
        Paths whose documents were requested, whether they exist or not.
    """

    chunks: dict[bytes, set[Coords]] = field(default_factory=dict)
    boxes: dict[bytes, Box] = field(default_factory=dict)
    documents: set[str] = field(default_factory=set)

    def note(self, node_id: bytes, coords: Coords) -> None:
        """Record that a chunk was read."""
        while True:
            seen = self.chunks.get(node_id)
            if seen is None:
                seen = self.chunks.setdefault(node_id, set())
            seen.add(coords)
            if self.chunks.get(node_id) is seen:  # else `_enclose` may have missed this chunk
                break
        if len(seen) > _MOST_CHUNKS and coords:
            self._enclose(node_id)

    def _enclose(self, node_id: bytes) -> None:
        with _ENCLOSING:
            seen = self.chunks.pop(node_id, None)
            if seen:
                boxes = [Box.around_coords(np.array(list(seen.copy()), np.int64))]
                if node_id in self.boxes:
                    boxes.append(self.boxes[node_id])
                self.boxes[node_id] = Box.around(boxes)

    def copy(self) -> Reads:
        """A copy that shares nothing mutable."""
        chunks = {node: set(seen) for node, seen in dict(self.chunks).items()}
        return Reads(chunks, dict(self.boxes), set(self.documents))

    def add(self, other: Reads) -> None:
        """Record everything that the other has recorded."""
        for node_id, box in other.boxes.items():
            mine = self.boxes.get(node_id)
            self.boxes[node_id] = box if mine is None else Box.around((mine, box))
        for node_id, seen in other.chunks.items():
            for coords in seen:
                self.note(node_id, coords)
        self.documents |= other.documents

    def nodes(self) -> set[bytes]:
        """Ids of the nodes with chunks that were read."""
        return {*self.chunks, *self.boxes}

    def at(self, node_id: bytes, coords: IndexArray) -> npt.NDArray[np.bool_]:
        """Which of these chunks of the node (int64[n, ndim]) were read."""
        found = np.zeros(len(coords), np.bool_)
        seen, box = self.chunks.get(node_id), self.boxes.get(node_id)
        if box is not None and box.ndim == coords.shape[1]:
            found |= ((coords >= box.lo) & (coords < box.hi)).all(axis=1)
        if seen:
            found |= np.array([tuple(row) in seen for row in coords.tolist()], np.bool_)
        return found

    def beyond(self, node_id: bytes, shape: Coords) -> bool:
        """Whether a chunk at or beyond `shape` on any axis was read."""
        box = self.boxes.get(node_id)
        if box is not None and any(b > n for b, n in zip(box.hi, shape, strict=True)):
            return True
        return any(
            c >= n
            for coords in self.chunks.get(node_id, ())
            for c, n in zip(coords, shape, strict=True)
        )
