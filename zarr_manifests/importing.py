"""Importing references into a workspace: documents are written, chunks referred to or copied.

Documents come first, so that the workspace itself knows which key is a chunk of which array. The
refs of each array are then set as one table.

Invariant: nothing that exists already is changed, and nothing is left out.

Bringing a workspace from one icechunk snapshot to the next: nodes, documents and chunk refs
--------------------------------------------------------------------------------------------

Objects of the icechunk repository and files elsewhere are referred to, inline chunks are copied.
Only arrays whose manifests differ between the two snapshots are read, and only chunks that differ
are set.

Invariant: a chunk counts only within the grid of its array; one that is not there any more is
unset.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from zarr_manifests.engine.workspace import Workspace
from zarr_manifests.errors import AlreadyExistsError, InvalidArgumentError, UnsupportedFormatError
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.keys import (
    DOCUMENTS,
    V2_ARRAY,
    V2_GROUP,
    V3_DOCUMENT,
    ArrayMeta,
    join,
    parse_document,
    split,
)
from zarr_manifests.planning.merge import unset_at
from zarr_manifests.progress import counted, expect, tell
from zarr_manifests.store import ManifestStore, workspace_of
from zarr_manifests.virtual.icechunk_files import ForeignNode, IcechunkFiles
from zarr_manifests.virtual.references import References

_GROUPS: Final = {
    V3_DOCUMENT: b'{"zarr_format":3,"node_type":"group","attributes":{}}',
    V2_GROUP: b'{"zarr_format":2}',
}
_LOG = logging.getLogger(__name__)


def import_references(
    store: ManifestStore, path: str, references: References, *, copy: bool = False
) -> None:
    """Put what `references` say below `path`.

    Parameters
    ----------
    store : ManifestStore
        Of the session to import to.
    path : str
        Of the group or array that the root of the references becomes.
    references : References
        What. If they can be fetched, keys that are neither documents nor chunks of an array are
        copied, as other files in a Zarr store; else they are refused.
    copy : bool
        Whether chunks are fetched, and not referred to.

    Raises
    ------
    AlreadyExistsError
        If there is something at the path.
    InvalidArgumentError
        If an entry cannot be had under its key, or is too large.
    UnsupportedFormatError
        If an array's metadata is not understood.
    """
    workspace, path = workspace_of(store), path.strip("/")
    v3 = not references.values or any(split(k)[1] == V3_DOCUMENT for k in references.values)
    _make_room(workspace, path, V3_DOCUMENT if v3 else V2_GROUP)
    _write_values(workspace, path, references)
    keys = references.keys
    if copy:
        _fetch(workspace, path, references, counted("chunks", range(len(keys))))
        return
    found = [workspace.contents.chunk_at(join(path, key)) for key in keys]
    others = [row for row, chunk in enumerate(found) if chunk is None]
    if references.fetch is None:
        _refuse_others(workspace, path, references, others)
    expect("chunks", len(keys) - len(others))
    by_array: dict[str, dict[int, Coords]] = {}  # of each row, the chunk
    for row, chunk in enumerate(found):
        if chunk is not None:
            by_array.setdefault(chunk[0].path, {})[row] = chunk[1]
    done = 0
    for place, chunks in by_array.items():
        rows, coords = [*chunks], [*chunks.values()]
        # Only the files of this array: all arrays together may have very many.
        used, source = np.unique(references.source[rows], return_inverse=True)
        locations = [references.locations[i] for i in used.tolist()]
        ranges = references.offset[rows], references.length[rows]
        noted: Any = {"modified": references.modified[used], "sizes": references.sizes[used]}
        store.set_virtual_refs(place, coords, locations, source, *ranges, **noted)
        done += len(rows)
        tell("chunks", done)
    _fetch(workspace, path, references, others)


def _fetch(workspace: Workspace, path: str, references: References, rows: Iterable[int]) -> None:
    """Copy the entries of these rows."""
    for row in rows:
        assert references.fetch is not None  # else there are none to copy
        name, data = references.keys[row], references.fetch(references.keys[row])
        if not data and workspace.contents.chunk_at(join(path, name)) is not None:
            raise InvalidArgumentError(f"the chunk {name[:200]!r} is empty, and a chunk has bytes")
        workspace.set(join(path, name), data)


def _refuse_others(
    workspace: Workspace, path: str, references: References, others: Sequence[int]
) -> None:
    """Refuse what no array would read: fill value would take its place without a word."""
    values = [key for key in references.values if split(key)[1] not in DOCUMENTS]
    keys = [references.keys[row] for row in others]
    keys += [key for key in values if workspace.contents.chunk_at(join(path, key)) is None]
    if keys:
        first = ", ".join(repr(key[:80]) for key in keys[:3])
        raise InvalidArgumentError(
            f"{len(keys)} of the references are no chunk of an array, the first being {first}: "
            "fill value would be read in their place. Correct the keys, or the shape and chunks "
            "in the array's metadata"
        )


def _make_room(workspace: Workspace, path: str, document: str) -> None:
    """See that nothing is at the path, and make the groups above it, with that document each."""
    for other in workspace.contents.within(path):
        raise AlreadyExistsError(
            f"/{other.removeprefix('/')} exists already; import to a path that does not exist"
        )
    for node in workspace.contents.above(path):
        if node.array is not None:
            raise InvalidArgumentError(f"/{node.path} is an array, and holds no other nodes")
    above, others = path, []
    while above:
        above, _ = split(above)
        group = workspace.contents.node(above)
        if group is None:
            workspace.set(join(above, document), _GROUPS[document])
        elif (V3_DOCUMENT in group.documents) != (document == V3_DOCUMENT):
            others.append(f"/{above}")
    if others:
        _LOG.warning(
            "what was imported to /%s is of another Zarr format than %s: it can be opened by its "
            "path, and is not seen from there",
            path,
            " and ".join(others[::-1]),
        )


def _write_values(workspace: Workspace, path: str, references: References) -> None:
    # Documents before chunks, parents before what is in them.
    order = sorted(references.values, key=lambda k: (split(k)[1] not in DOCUMENTS, k.count("/"), k))
    for key in order:
        workspace.set(join(path, key), references.values[key])
    for key in order:
        place, name = split(join(path, key))
        if name in (V3_DOCUMENT, V2_ARRAY) and workspace.contents.node(place) is None:
            raise UnsupportedFormatError(
                f"the Zarr metadata {key!r} is not understood, so that its chunks cannot be told "
                "from other keys"
            )


# --- from icechunk ------------------------------------------------------------------------------


def apply_snapshot(
    store: ManifestStore,
    files: IcechunkFiles,
    before: Mapping[str, ForeignNode],
    after: Mapping[str, ForeignNode],
) -> None:
    """Bring a session that holds the nodes `before` to the nodes `after`.

    Raises
    ------
    CorruptObjectError
        If something is missing or damaged.
    UnsupportedFormatError
        If the metadata of a node is not understood.
    """
    workspace, kept, moves = workspace_of(store), {}, {}
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
        _write_chunks(store, files, node, rows)


def _write_chunks(
    store: ManifestStore, files: IcechunkFiles, node: ForeignNode, old_rows: IndexArray | None
) -> None:
    """Set the chunks of an array that differ, and unset those that are gone."""
    workspace = workspace_of(store)
    meta = workspace.contents.array_at(node.path).array_meta
    rows = _rows(files, node, meta.grid)
    old_rows = rows[:0] if old_rows is None else old_rows
    numbers, old_numbers = (meta.grid.ravel(each[:, :-3]) for each in (rows, old_rows))
    _, stay, was = np.intersect1d(numbers, old_numbers, return_indices=True)
    gone = np.delete(old_rows, was, axis=0)[:, :-3]
    if len(gone):
        workspace.put_table(node.path, meta.grid, unset_at(gone))
    rows = np.delete(rows, stay[(rows[stay] == old_rows[was]).all(axis=1)], axis=0)
    inline, inlined, known = rows[:, -3] < 0, [*files.inlined], [*files.files]
    for *at, number, _, _ in rows[inline].tolist():
        key = join(node.path, meta.chunk_keys.encode(tuple(at)))
        workspace.set(key, inlined[~number])
    rows = rows[~inline]
    used, source = np.unique(rows[:, -3], return_inverse=True)
    noted = [known[number] for number in used.tolist()]
    store.set_virtual_refs(
        node.path,
        rows[:, :-3],
        [file.location for file in noted],
        source,
        rows[:, -2],
        rows[:, -1],
        etags=[file.etag for file in noted],
        modified=[file.modified_ms for file in noted],
        sizes=[file.nbytes for file in noted],
        unchanged_since=[file.unchanged_since_ms for file in noted],
    )


def _rows(files: IcechunkFiles, node: ForeignNode, grid: Box) -> IndexArray:
    """Chunks of an array that lie in its own grid, and in this one.

    Growing an array may bring back chunks beyond its old grid.
    """
    own = _grid(node)
    assert own is not None
    rows = files.chunks(node, grid.ndim)
    hi = np.array([own.hi, grid.hi], np.int64).min(axis=0)
    return rows[(rows[:, :-3] < hi).all(axis=1)]


def _stays(old: ForeignNode, new: ForeignNode) -> bool:
    """Whether a node keeps its chunks: both are groups, or arrays with the same chunking."""
    was, now = parse_document(old.document), parse_document(new.document)
    return was.same_chunking(now) if isinstance(was, ArrayMeta) else type(was) is type(now)


def _grid(node: ForeignNode) -> Box | None:
    """The grid of chunks of an array whose metadata is understood."""
    meta = parse_document(node.document)
    return meta.grid if isinstance(meta, ArrayMeta) else None
