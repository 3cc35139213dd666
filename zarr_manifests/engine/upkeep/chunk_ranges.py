"""The different ranges of chunk objects that chunk tables refer to, and whether bytes match them.

They are kept as columns, since there may be as many as chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from zarr_manifests.format.chunk_table import ChunkTable, RefKind, chunk_key
from zarr_manifests.ids import crc32c

_FOLD_ROWS: Final = 1 << 20

type Rows = npt.NDArray[np.int64]
"""Ranges of one object: offset, length and checksum of each."""


@dataclass(slots=True)
class ChunkRanges:
    """The different ranges that tables refer to, by object.

    Attributes
    ----------
    objects : dict of str to int
        A number for the key of each object.
    """

    objects: dict[str, int] = field(default_factory=dict)
    _rows: list[Rows] = field(default_factory=list)
    _unfolded: int = 0
    _folded: int = 0

    def add(self, table: ChunkTable) -> None:
        """Note what the native rows of the table refer to."""
        native = np.flatnonzero(table.kind == RefKind.NATIVE)
        if not native.size:
            return
        pairs = np.stack([table.source[native], table.number[native]], axis=1)
        unique, inverse = np.unique(pairs, axis=0, return_inverse=True)
        keys = [chunk_key(table.sources[source], number) for source, number in unique.tolist()]
        known = self.objects
        numbers = np.array([known.setdefault(key, len(known)) for key in keys], np.int64)
        columns = (table.offset[native], table.length[native], table.crc32c[native])
        at = numbers[inverse.reshape(-1)]
        self._rows.append(np.stack([at, *(c.astype(np.int64) for c in columns)], axis=1))
        self._unfolded += native.size
        if self._unfolded > max(_FOLD_ROWS, self._folded):
            self._fold()

    def _fold(self) -> None:
        """Keep each range once; other snapshots refer to most of them, too."""
        if self._unfolded:
            self._rows = [np.unique(np.concatenate(self._rows), axis=0)]
            self._folded, self._unfolded = len(self._rows[0]), 0

    def of_each(self) -> Iterator[tuple[str, Rows]]:
        """Key and ranges of each object."""
        self._fold()
        if not self._rows:
            return
        (rows,) = self._rows
        bounds = np.flatnonzero(np.diff(rows[:, 0], prepend=-1, append=-1))
        keys = [*self.objects]
        for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            yield keys[rows[first, 0]], rows[first:last, 1:]


def end_of(rows: Rows) -> int:
    """Where the last of the ranges ends."""
    return int((rows[:, 0] + rows[:, 1]).max())


def problem_of(key: str, rows: Rows, whole: bytes) -> str | None:
    """What is first wrong with these ranges of an object, if anything."""
    for offset, length, crc in rows.tolist():
        data = memoryview(whole)[offset : offset + length]
        if len(data) != length:
            return f"chunk object {key} ends before {offset + length}"
        if crc32c(data) != crc:
            return f"chunk object {key} at {offset} does not match its checksum"
    return None
