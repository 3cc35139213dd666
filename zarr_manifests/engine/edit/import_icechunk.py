"""Bringing a workspace from one icechunk snapshot to the next: nodes, documents and chunk refs.

Objects of the icechunk repository and files elsewhere are referred to, inline chunks are copied.
Only manifests that differ between the two snapshots are read, and only chunks that differ are set.

Invariant: a chunk counts only within the extents of its manifest and the grid of its array; one
that is not there any more is unset.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import field, replace
from functools import partial
from operator import le
from typing import Final

import numpy as np
import numpy.typing as npt

from zarr_manifests.engine.edit.workspace import Workspace
from zarr_manifests.errors import (
    CorruptObjectError,
    MissingChunkError,
    UnsupportedFormatError,
)
from zarr_manifests.format.chunk_table import ChunkTable, RefKind
from zarr_manifests.format.columns import Column
from zarr_manifests.format.nodes import Node
from zarr_manifests.format.virtual_sources import VirtualSources
from zarr_manifests.grid import Box, IndexArray
from zarr_manifests.keys import V3_DOCUMENT, ArrayMeta, join, parse_document
from zarr_manifests.planning.tables.merge import unset_at
from zarr_manifests.records import dataclass
from zarr_manifests.storage.object_versions import Version
from zarr_manifests.virtual.containers import Containers
from zarr_manifests.virtual.icechunk_files import (
    ChunkRows,
    ForeignManifest,
    ForeignNode,
    IcechunkFiles,
    chunk_names,
)
from zarr_manifests.virtual.parquet_columns import table_at, table_of
from zarr_manifests.virtual.virtual_files import VirtualReader

__all__ = ["IcechunkImport"]

_NO_NODE: Final = ForeignNode(b"", "", b"", False, frozenset())
_UNKNOWN: Final = Version()
_AT_ONCE: Final = 64
"""Arrays whose manifests are fetched at once."""
_MOST_ROWS: Final = 1 << 22
"""Chunks of manifests that are kept for the next snapshot."""


@dataclass(slots=True)
class IcechunkImport:
    """Takes snapshots of an icechunk repository into workspaces.

    Parameters
    ----------
    files : IcechunkFiles
        The icechunk repository.
    trusted : Containers
        Places whose files may be inspected: those without an etag or a time get the present ones.
    """

    files: IcechunkFiles
    trusted: Containers
    _objects: dict[str, tuple[int, int]] | None = None
    _versions: dict[int, Version] = field(default_factory=dict)
    _recent: dict[tuple[str, bytes], ChunkRows] = field(default_factory=dict)

    def apply(
        self,
        workspace: Workspace,
        before: Mapping[bytes, ForeignNode],
        after: Mapping[bytes, ForeignNode],
    ) -> None:
        """Bring a workspace that holds the nodes `before` to the nodes `after`.

        Raises
        ------
        CorruptObjectError
            If something is missing or damaged.
        UnsupportedFormatError
            If the metadata of a node is not understood.
        """
        kept = {
            node_id: node
            for node_id, node in before.items()
            if node_id in after and _stays(node, after[node_id])
        }
        _move(workspace, before, kept, after)
        for node in sorted(after.values(), key=lambda node: (node.path.count("/"), node.path)):
            self._write_document(workspace, kept.get(node.node_id, _NO_NODE), node)
        due = [
            (node, kept.get(node_id, _NO_NODE))
            for node_id, node in after.items()
            if node.manifests != kept.get(node_id, _NO_NODE).manifests
            or (node.is_array and _grid(node) != _grid(kept.get(node_id, node)))
        ]
        for start in range(0, len(due), _AT_ONCE):
            some = due[start : start + _AT_ONCE]
            names = {each.name for pair in some for node in pair for each in node.manifests}
            held = {name for name, _ in self._recent}
            self.files.fetch(sorted(names - held), workspace.context.runtime.parallel)
            for node, old in some:
                self._write_chunks(workspace, old, node)

    def _write_document(self, workspace: Workspace, old: ForeignNode, node: ForeignNode) -> None:
        if node.document != old.document:
            workspace.set(join(node.path, V3_DOCUMENT), node.document)
        found = workspace.contents.node(node.path)
        if found is None or (found.array is not None) != node.is_array:
            raise UnsupportedFormatError(
                f"the Zarr metadata of /{node.path} is not understood, so that its chunks cannot "
                "be told from other keys"
            )

    # --- chunks ------------------------------------------------------------------------------

    def _write_chunks(self, workspace: Workspace, old: ForeignNode, node: ForeignNode) -> None:
        """Set the chunks of an array that differ."""
        ours = workspace.contents.array_at(node.path)
        assert ours.array is not None
        grid, was = ours.array.grid, _grid(old) or ours.array.grid
        # Growing an array may bring back chunks beyond its old grid.
        same = {each for each in old.manifests & node.manifests if all(map(le, each.hi, was.hi))}
        new_rows = self._rows(node, node.manifests - same, grid, grid)
        old_rows = self._rows(node, old.manifests - same, grid, was)
        at, previous = grid.ravel(new_rows.coords), grid.ravel(old_rows.coords)
        twice = np.flatnonzero(at[1:] == at[:-1])
        if len(twice):
            where = tuple(new_rows.coords[twice[0]].tolist())
            raise CorruptObjectError(
                f"/{node.path} has the chunk {where} in two icechunk manifests"
            )
        changed = ~_same_rows(at, new_rows.columns, previous, old_rows.columns)
        gone = ~np.isin(previous, at)
        if gone.any() and grid.ndim:
            workspace.put_table(node.path, grid, unset_at(old_rows.coords[gone]))
        elif gone.any():
            workspace.delete(join(node.path, ours.array.chunk_keys.encode(())))
        self._set(workspace, ours, new_rows.take(changed))
        names = {each.name for each in node.manifests}
        for key in [key for key in self._recent if key[1] == node.node_id and key[0] not in names]:
            del self._recent[key]
        if sum(map(len, self._recent.values())) > _MOST_ROWS:
            self._recent.clear()

    def _rows(
        self,
        node: ForeignNode,
        manifests: Collection[ForeignManifest],
        grid: Box,
        other: Box,
    ) -> ChunkRows:
        """The chunks in these manifests that lie in both grids, in C order."""
        parts = []
        hi = tuple(map(min, grid.hi, other.hi))
        for each in sorted(manifests):
            if len(each.lo) != len(hi):
                raise CorruptObjectError(f"manifests/{each.name}: expected {len(hi)} axes")
            key = each.name, node.node_id
            if key not in self._recent:
                self._recent[key] = self.files.chunks(*key, len(hi))
            bound = tuple(map(min, each.hi, hi))
            parts.append(self._recent[key].within(each.lo, bound))
        found = ChunkRows.together(parts, len(hi))
        if len(parts) < 2:
            return found
        return found.take(np.argsort(grid.ravel(found.coords), kind="stable"))

    def _set(self, workspace: Workspace, node: Node, rows: ChunkRows) -> None:
        assert node.array is not None
        kind = rows.columns[:, 0]
        native = rows.take(kind == RefKind.NATIVE)
        virtual = rows.take(kind == RefKind.VIRTUAL)
        for some, table in ((native, self._native), (virtual, self._virtual)):
            found = table(workspace, node.array.grid, some) if len(some) else None
            if found is not None:
                workspace.put_table(node.path, node.array.grid, found)
        inline = rows.take(kind == RefKind.INLINE)
        for coords, number in zip(
            inline.coords.tolist(), inline.columns[:, 1].tolist(), strict=True
        ):
            key = join(node.path, node.array.chunk_keys.encode(tuple(coords)))
            workspace.set(key, self.files.inlined[number])

    def _native(self, workspace: Workspace, grid: Box, rows: ChunkRows) -> ChunkTable | None:
        """Refs to objects of the icechunk repository, with their sizes and times."""
        storage = self.files.storage
        if self._objects is None:
            listed = storage.list("chunks/")
            self._objects = {info.key[7:]: (info.nbytes, info.modified_ms) for info in listed}
        names = chunk_names(rows.ids())
        container, path = workspace.context.containers.locate(f"{storage.url}/chunks/{names[0]}")
        folder = path.removesuffix(names[0])
        try:
            known = np.array([self._objects[name] for name in names], np.int64)
        except KeyError as error:
            raise MissingChunkError(
                f"{storage.url}/chunks/{error.args[0]}, which a snapshot needs, is not there: "
                "restore it, or import other branches"
            ) from error
        n = len(names)
        files = VirtualSources(
            (container,),
            np.zeros(n, np.int64),
            tuple([folder + name for name in names]),
            np.ascontiguousarray(known[:, 1]),
            np.ascontiguousarray(known[:, 0]),
        )
        offset, length = rows.columns[:, 3], rows.columns[:, 4]
        return table_at(grid, files, rows.coords, np.arange(n), offset, length)

    def _virtual(self, workspace: Workspace, grid: Box, rows: ChunkRows) -> ChunkTable | None:
        """Refs to files elsewhere, with what is known of them."""
        used, source = _in_order(rows.columns[:, 1])
        files = [self.files.files[number] for number in used.tolist()]
        self._inspect(workspace, used)
        modified, sizes = np.full(len(used), -1), np.full(len(used), -1)
        for at, number in enumerate(used.tolist() if self._versions else ()):
            version = self._versions.get(number, _UNKNOWN)
            modified[at] = -1 if version.modified_ms is None else version.modified_ms
            sizes[at] = -1 if version.nbytes is None else version.nbytes
        since = [1000 * s + 999 if (s := each.unchanged_since_s) else -1 for each in files]
        return table_of(
            grid,
            workspace.context.containers,
            rows.coords,
            [each.location for each in files],
            source,
            rows.columns[:, 3],
            rows.columns[:, 4],
            etags=[each.etag or None for each in files],
            modified=modified,
            sizes=sizes,
            unchanged_since=since,
        )

    def _inspect(self, workspace: Workspace, numbers: Column) -> None:
        """Note size and time of trusted files of which nothing is known."""
        reader = VirtualReader(self.trusted)

        def look(number: int, location: str) -> None:
            self._versions[number] = reader.version(location)

        calls: list[Callable[[], None]] = []
        for number in numbers.tolist() if self.trusted.places else ():
            each = self.files.files[number]
            known = each.etag or each.unchanged_since_s or number in self._versions
            if not known and self.trusted.locate(each.location)[0]:
                calls.append(partial(look, number, each.location))
        workspace.context.runtime.parallel(calls)


def _same_rows(
    at: Column, columns: IndexArray, previous: Column, old: IndexArray
) -> npt.NDArray[np.bool_]:
    """Which rows at linear indexes `at` are the same in the old rows at `previous`."""
    if not len(previous):
        return np.zeros(len(at), np.bool_)
    place = np.minimum(np.searchsorted(previous, at), len(previous) - 1)
    return np.asarray((previous[place] == at) & (old[place] == columns).all(axis=1))


def _in_order(numbers: Column) -> tuple[Column, Column]:
    """The distinct numbers in the order of their first row, and the position of each row's."""
    used, first, source = np.unique(numbers, return_index=True, return_inverse=True)
    order = np.argsort(first)
    return used[order], np.argsort(order)[source]


def _stays(old: ForeignNode, new: ForeignNode) -> bool:
    """Whether a node keeps its chunks: both are groups, or arrays with the same chunking."""
    was, now = parse_document(old.document), parse_document(new.document)
    return was.same_chunking(now) if isinstance(was, ArrayMeta) else type(was) is type(now)


def _grid(node: ForeignNode) -> Box | None:
    """The grid of chunks of an array whose metadata is understood."""
    meta = parse_document(node.document)
    return meta.grid if isinstance(meta, ArrayMeta) else None


def _move(
    workspace: Workspace,
    before: Mapping[bytes, ForeignNode],
    kept: Mapping[bytes, ForeignNode],
    after: Mapping[bytes, ForeignNode],
) -> None:
    """Delete nodes that are gone, and give those that have moved their new paths."""
    with workspace.lock:
        for node_id, node in before.items():
            if node_id not in kept:
                workspace.edits.drop(node.path)
        moved = [
            (workspace.contents.node(node.path), after[node_id].path)
            for node_id, node in kept.items()
            if after[node_id].path != node.path
        ]
        for ours, _ in moved:
            assert ours is not None
            workspace.edits.put_node(ours.path, None)
        for ours, path in moved:
            assert ours is not None
            workspace.edits.put_node(path, replace(ours, path=path))
