"""Bringing a workspace from one icechunk snapshot to the next: nodes, documents and chunk refs.

Objects of the icechunk repository and files elsewhere are referred to, inline chunks are copied.
Only arrays whose manifests differ between the two snapshots are read, and only chunks that differ
are set.

Invariant: a chunk counts only within the grid of its array; one that is not there any more is
unset.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from zarr_manifests.engine.edit.workspace import Workspace
from zarr_manifests.errors import UnsupportedFormatError
from zarr_manifests.grid import Box, IndexArray
from zarr_manifests.keys import V3_DOCUMENT, ArrayMeta, join, parse_document
from zarr_manifests.planning.tables.merge import unset_at
from zarr_manifests.virtual.icechunk_files import ForeignNode, IcechunkFiles
from zarr_manifests.virtual.virtual_refs import table_of


def apply_snapshot(
    workspace: Workspace,
    files: IcechunkFiles,
    before: Mapping[str, ForeignNode],
    after: Mapping[str, ForeignNode],
) -> None:
    """Bring a workspace that holds the nodes `before` to the nodes `after`.

    Raises
    ------
    CorruptObjectError
        If something is missing or damaged.
    UnsupportedFormatError
        If the metadata of a node is not understood.
    """
    kept, moves = {}, {}
    with workspace.lock:
        for node_id, node in before.items():
            if node_id not in after or not _stays(node, after[node_id]):
                workspace.edits.drop(node.path)
                continue
            kept[node_id] = node
            if node.path != after[node_id].path:
                moves[node.path] = after[node_id].path
        workspace.edits.move(moves)
    due = []
    for node in sorted(after.values(), key=lambda node: (node.path.count("/"), node.path)):
        old = kept.get(node.node_id)
        if old is None or node.document != old.document:
            workspace.set(join(node.path, V3_DOCUMENT), node.document)
        ours = workspace.contents.node(node.path)
        if ours is None or (ours.array is None) != (node.manifests is None):
            raise UnsupportedFormatError(
                f"the Zarr metadata of /{node.path} is not understood, so that its chunks cannot "
                "be told from other keys"
            )
        was = None if old is None else (old.manifests, _grid(old))
        if ours.array is not None and was != (node.manifests, ours.array.grid):
            # Before any new ones, since files that had changed before may be right from now on.
            due.append((node, None if old is None else _rows(files, old, ours.array.grid)))
    files.keep_manifests(node for node, _ in due)
    for node, rows in due:
        _write_chunks(workspace, files, node, rows)


def _write_chunks(
    workspace: Workspace, files: IcechunkFiles, node: ForeignNode, old_rows: IndexArray | None
) -> None:
    """Set the chunks of an array that differ, and unset those that are gone."""
    ours = workspace.contents.array_at(node.path)
    assert ours.array is not None
    grid = ours.array.grid
    rows = _rows(files, node, grid)
    old_rows = rows[:0] if old_rows is None else old_rows
    _, stay, was = np.intersect1d(
        grid.ravel(rows[:, :-3]), grid.ravel(old_rows[:, :-3]), return_indices=True
    )
    gone = np.delete(old_rows, was, axis=0)[:, :-3]
    if len(gone) and grid.ndim:
        workspace.put_table(node.path, grid, unset_at(gone))
    elif len(gone):
        workspace.delete(join(node.path, ours.array.chunk_keys.encode(())))
    rows = np.delete(rows, stay[(rows[stay] == old_rows[was]).all(axis=1)], axis=0)
    inline, inlined, known = rows[:, -3] < 0, [*files.inlined], [*files.files]
    for *at, number, _, _ in rows[inline].tolist():
        key = join(node.path, ours.array.chunk_keys.encode(tuple(at)))
        workspace.set(key, inlined[~number])
    if not inline.all():
        rows = rows[~inline]
        used, source = np.unique(rows[:, -3], return_inverse=True)
        columns = zip(*[known[number] for number in used.tolist()], strict=True)
        locations, etags, modified, sizes, since = columns
        table = table_of(
            grid,
            workspace.context.containers,
            rows[:, :-3],
            locations,
            source,
            rows[:, -2],
            rows[:, -1],
            etags=etags,
            modified=modified,
            sizes=sizes,
            unchanged_since=since,
        )
        assert table is not None
        workspace.put_table(node.path, grid, table)


def _rows(files: IcechunkFiles, node: ForeignNode, grid: Box) -> IndexArray:
    """Chunks of an array that lie in its own grid, and in this one.

    Growing an array may bring back chunks beyond its old grid.
    """
    own = _grid(node)
    assert own is not None
    rows = files.chunks(node, grid.ndim)
    hi = np.array([own.hi, grid.hi], np.int64).min(axis=0)
    inside = (rows[:, :-3] < hi).all(axis=1)
    return rows if inside.all() else rows[inside]


def _stays(old: ForeignNode, new: ForeignNode) -> bool:
    """Whether a node keeps its chunks: both are groups, or arrays with the same chunking."""
    was, now = parse_document(old.document), parse_document(new.document)
    return was.same_chunking(now) if isinstance(was, ArrayMeta) else type(was) is type(now)


def _grid(node: ForeignNode) -> Box | None:
    """The grid of chunks of an array whose metadata is understood."""
    meta = parse_document(node.document)
    return meta.grid if isinstance(meta, ArrayMeta) else None
