"""Chunk refs of a writer that are kept in manifests instead of in memory.

Beyond the memory budget, chunk refs are written to manifests of one table each, under the writer's
own keys. Only their locations, boxes and counts stay in memory (`Spilled`). A commit refers to
these manifests as they are. Rows are merged and rewritten only where later changes overlap a
spilled table, or two spilled tables share chunks. That is done slab by slab, so that only a slab is
in memory.

Invariants: spilled rows and the chunks they refer to are durable; the same rows are written once,
however often they are saved; a manifest never changes, and is garbage until a commit refers to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeGuard

import numpy as np
from msgspec import Struct

from zarr_manifests.engine.objects.metadata import ObjectReader, Objects, SessionKeys, Upload
from zarr_manifests.format.chunk_table import ChunkTable, RefKind, native_keys
from zarr_manifests.format.manifest import Manifest, ManifestRef
from zarr_manifests.grid import Box
from zarr_manifests.ids import lineage_of, session_of
from zarr_manifests.planning.layout.leaves import TABLE_ROWS
from zarr_manifests.planning.tables.merge import Layer, in_box, merge_layers, select, split

_INLINE_BYTES: Final = 64
"""Bytes of inline chunks that take about as much memory as a ref."""


class Spilled(Struct, frozen=True):
    """A table of chunk refs that is stored in a manifest.

    Parameters
    ----------
    manifest : ManifestRef
        The manifest, with one part.
    unset : int
        The number of rows that unset a chunk.
    nbytes, written_bytes : int
        Bytes of all chunks set, and of those stored in the repository.
    is_own : bool, default False
        Whether all chunk objects are known to be of the lineage that wrote the manifest.
    """

    manifest: ManifestRef
    unset: int
    nbytes: int
    written_bytes: int
    is_own: bool = False

    def __post_init__(self) -> None:
        (part,) = self.manifest.parts
        assert 0 <= self.unset <= part.count
        assert 0 <= self.written_bytes <= self.nbytes

    @classmethod
    def of(cls, manifest: ManifestRef, table: ChunkTable) -> Spilled:
        """Describe a table stored in the manifest."""
        lineage = lineage_of(session_of(manifest.blob.key))
        is_own = all(lineage_of(source) == lineage for source in table.sources)
        return cls(manifest, *_counts(table), is_own)

    @property
    def node_id(self) -> bytes:
        """The node whose chunks they are."""
        return self.manifest.parts[0].node_id

    @property
    def key(self) -> str:
        """The manifest's key."""
        return self.manifest.blob.key

    @property
    def box(self) -> Box:
        """The box of the rows."""
        return self.manifest.parts[0].box

    def __len__(self) -> int:
        return self.manifest.parts[0].count


type Rows = ChunkTable | Spilled
"""Chunks set and unset, in memory or spilled."""


def _counts(table: ChunkTable) -> tuple[int, int, int]:
    unset, virtual = table.kind == RefKind.UNSET, table.kind == RefKind.VIRTUAL
    nbytes = int(table.length[~unset].sum())
    return int(unset.sum()), nbytes, nbytes - int(table.length[virtual].sum())


def resident(rows: Rows) -> TypeGuard[ChunkTable]:
    """Whether the rows are in memory."""
    return isinstance(rows, ChunkTable)


def held(rows: Rows) -> int:
    """The memory that the rows take, in refs."""
    return len(rows) + len(rows.inline) // _INLINE_BYTES if isinstance(rows, ChunkTable) else 0


def rows_of(objects: ObjectReader, rows: Rows) -> ChunkTable:
    """The rows, fetched if they are not in memory.

    Raises
    ------
    CorruptObjectError
        If the manifest does not have what was written.
    """
    if isinstance(rows, ChunkTable):
        return rows
    return objects.table(rows.manifest, rows.manifest.parts[0], {})


class Spill:
    """Writes and reads rows that a writer does not keep in memory.

    It is not pickled: a pickled change set loses it, and a copy has its own.

    Parameters
    ----------
    objects : Objects
        The repository's objects.
    keys : SessionKeys
        Keys for manifests.
    budget : int
        The number of refs that may be in memory.
    """

    def __init__(self, objects: Objects, keys: SessionKeys, budget: int) -> None:
        self.objects = objects
        self.budget = budget
        self._keys = keys

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return type(None), ()

    def save(self, node_id: bytes, table: ChunkTable, unsynced: Iterable[str]) -> list[Spilled]:
        """Write the rows to manifests of one leaf each, after their chunks are durable.

        Parameters
        ----------
        node_id : bytes
            The node whose chunks they are.
        table : ChunkTable
            The rows.
        unsynced : iterable of str
            Keys of chunk objects that are not durable yet.
        """
        due = set(unsynced)
        due = due & native_keys(table) if due else due
        if due:
            self.objects.storage.sync(sorted(due))
        return [self._write(node_id, part) for part in split(table, TABLE_ROWS)]

    def _write(self, node_id: bytes, table: ChunkTable) -> Spilled:
        manifest = Manifest.of([(node_id, table)])
        data, places = manifest.encode()
        upload = Upload.of(self._keys, "manifests", data)
        if not self._keys.has_written(upload.key):
            self.objects.create(upload.key, upload.data)
            self._keys.note_written(upload.key, upload.data)
            self.objects.remember(upload.ref, manifest)
        return Spilled.of(ManifestRef(upload.ref, manifest.directory(), places=places), table)

    # --- overlapping rows ----------------------------------------------------------------------

    def apart(self, layers: Sequence[Rows]) -> tuple[list[list[Rows]], list[ChunkTable]]:
        """Split layers of one node (oldest first) into groups without common chunks, and the rest.

        Each group has at least one spilled layer and, in their order, the layers that share chunks
        with it. The rest is in memory.
        """
        rest = [layer if isinstance(layer, ChunkTable) else None for layer in layers]
        found: list[list[Rows]] = []
        spilled = [i for i, layer in enumerate(layers) if not resident(layer)]
        for members in together([layers[i].box for i in spilled]):
            group = [spilled[i] for i in members]
            boxes = [layers[i].box for i in group]
            overlapping: list[Rows] = []
            for i, layer in enumerate(layers):
                table = rest[i]
                if i in group:
                    overlapping.append(layer)
                elif table is not None and any(box.overlaps(table.box) for box in boxes):
                    inner = np.zeros(len(table), np.bool_)
                    for box in boxes:
                        inner |= in_box(table, box)
                    if inner.any():
                        overlapping.append(select(table, inner))
                        rest[i] = None if inner.all() else select(table, ~inner)
            found.append(overlapping)
        return found, [table for table in rest if table is not None]

    def merged(self, layers: Sequence[Rows]) -> Iterator[ChunkTable]:
        """Yield the merged rows of these layers of one node (oldest first), slab by slab."""
        around = Box.around(layer.box for layer in layers)
        most = max(self.budget // 2, 1)
        for slab in _slabs(around, -(-sum(map(len, layers)) // most)):
            near = [layer for layer in layers if layer.box.overlaps(slab)]
            inner = tuple(self._inside(layer, slab) for layer in near)  # one after another
            table = merge_layers([Layer(None, inner)]).table
            if table is not None:
                yield table

    def _inside(self, layer: Rows, slab: Box) -> ChunkTable:
        table = rows_of(self.objects, layer)
        return select(table, in_box(table, slab))


def together(boxes: Sequence[Box]) -> list[list[int]]:
    """Positions of the boxes, grouped so that boxes of different groups do not overlap."""
    lo = np.array([box.lo for box in boxes], np.int64)
    hi = np.array([box.hi for box in boxes], np.int64)
    group = np.arange(len(boxes))
    for n in range(1, len(boxes)):
        near = ((lo[:n] < hi[n]) & (lo[n] < hi[:n])).all(axis=1)
        if near.any():
            group[: n + 1][np.isin(group[: n + 1], [*group[:n][near], n])] = n
    found: dict[int, list[int]] = {}
    for i, number in enumerate(group.tolist()):
        found.setdefault(number, []).append(i)
    return [*found.values()]


def _slabs(box: Box, count: int) -> Iterator[Box]:
    """Cut the box into `count` slabs across its longest axis, or one per chunk if it is shorter."""
    if not box.ndim:
        yield box
        return
    axis, lo, hi = int(np.argmax(box.shape)), box.lo, box.hi
    count = min(count, box.shape[axis])
    for i in range(count):
        first, last = (lo[axis] + (hi[axis] - lo[axis]) * j // count for j in (i, i + 1))
        yield Box((*lo[:axis], first, *lo[axis + 1 :]), (*hi[:axis], last, *hi[axis + 1 :]))
