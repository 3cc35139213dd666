"""Importing references into a workspace: documents are written, chunks referred to or copied.

Documents come first, so that the workspace itself knows which key is a chunk of which array. The
refs of each array are then set as one table. Keys are parsed one array at a time.

Invariant: nothing that exists already is changed but the shape of arrays that are appended to, and
nothing is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from zarr_manifests.engine.edit.workspace import Workspace
from zarr_manifests.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    UnsupportedFormatError,
)
from zarr_manifests.format.chunk_table import ChunkTable, VirtualRef
from zarr_manifests.format.nodes import Node
from zarr_manifests.grid import IndexArray
from zarr_manifests.keys import V2_ARRAY, V2_ATTRIBUTES, V2_GROUP, V3_DOCUMENT, join, split
from zarr_manifests.progress import Progress, expect, ignore
from zarr_manifests.records import dataclass
from zarr_manifests.virtual.appended_references import appended
from zarr_manifests.virtual.containers import Containers
from zarr_manifests.virtual.parquet_columns import table_of
from zarr_manifests.virtual.references import References
from zarr_manifests.virtual.virtual_files import VirtualReader

__all__ = ["import_references"]

_SLICE_KEYS: Final = 1 << 17
"""Keys looked at at once."""
_GROUPS: Final = {
    V3_DOCUMENT: b'{"zarr_format":3,"node_type":"group","attributes":{}}',
    V2_GROUP: b'{"zarr_format":2}',
}
_DOCUMENTS: Final = frozenset({V3_DOCUMENT, V2_ARRAY, V2_GROUP, V2_ATTRIBUTES})
_LOG = logging.getLogger(__name__)


def import_references(
    workspace: Workspace,
    path: str,
    references: References,
    trusted: Containers,
    *,
    copy: bool,
    max_bytes: int,
    only_chunks: bool = False,
    progress: Progress = ignore,
    append_dim: str | None = None,
) -> None:
    """Put what `references` say below `path`.

    Parameters
    ----------
    workspace : Workspace
        Where to.
    path : str
        Of the group or array that the root of the references becomes.
    references : References
        What.
    trusted : Containers
        Where bytes may be copied from.
    copy : bool
        Whether chunks are copied, and not referred to.
    max_bytes : int
        That a chunk which is copied may have.
    only_chunks : bool
        Whether to refuse keys that are neither documents nor chunks of an array. Otherwise they
        are kept as they are, as other files in a Zarr store.
    progress : callable
        Called with `"chunks"` and the number of chunks taken in so far.
    append_dim : str, optional
        The dimension along which they continue what is there, if anything is.

    Raises
    ------
    AlreadyExistsError
        If there is something at the path.
    InvalidArgumentError
        If an entry cannot be had under its key, or is too large.
    UnsupportedFormatError
        If an array's metadata is not understood.
    """
    path = path.strip("/")
    if append_dim is not None and any(workspace.contents.within(path)):
        references = appended(
            references,
            partial(_documents_at, workspace, path),
            partial(_stored_at, workspace, path),
            append_dim,
        )
    else:
        v3 = not references.values or any(split(k)[1] == V3_DOCUMENT for k in references.values)
        _make_room(workspace, path, V3_DOCUMENT if v3 else V2_GROUP)
    _write_values(workspace, path, references)
    source = _Source(VirtualReader(trusted), trusted, references, max_bytes)
    rows_of, others = _by_array(workspace, path, references)
    if only_chunks:
        _refuse_others(workspace, path, references, others)
    done = 0
    expect(progress, "chunks", sum(len(rows) for parts in rows_of.values() for rows, _ in parts))
    for place, parts in rows_of.items():
        node = workspace.contents.array_at(place)
        assert node.array is not None
        rows = np.concatenate([rows for rows, _ in parts])
        coords = np.concatenate([coords for _, coords in parts])
        if not len(rows):
            continue
        if not copy:
            table = _table(workspace, node, references, rows, coords)
            workspace.put_table(node.path, node.array.grid, table)
            done += len(rows)
            progress("chunks", done)
            continue
        for row, at in zip(rows.tolist(), coords.tolist(), strict=True):
            key = join(node.path, node.array.chunk_keys.encode(tuple(at)))
            workspace.set(key, source.read(row))
            done += 1
            progress("chunks", done)
    for row in others:
        workspace.set(join(path, references.keys[row]), source.read(row))


def _documents_at(workspace: Workspace, path: str, inner: str) -> Mapping[str, bytes]:
    node = workspace.contents.node(join(path, inner) if inner else path)
    return {} if node is None else node.documents


def _stored_at(workspace: Workspace, path: str, key: str) -> bytes | None:
    entry = workspace.contents.find(join(path, key))
    return None if entry is None else workspace.contents.reader.read(entry, 0, entry.length)


@dataclass(frozen=True, slots=True)
class _Source:
    """Where bytes are copied from."""

    reader: VirtualReader
    trusted: Containers
    references: References
    max_bytes: int

    def read(self, row: int) -> bytes:
        """What a row of the references refers to."""
        length = int(self.references.length[row])
        if length > self.max_bytes:
            which = self.references.locations[int(self.references.source[row])]
            raise InvalidArgumentError(
                f"{which} has {length} bytes, and an import copies files of up to "
                f"{self.max_bytes}: pass a larger max_bytes="
            )
        if self.references.fetch is not None:
            return self.references.fetch(self.references.keys[row])
        return self.reader.read(_ref(self.trusted, self.references, row), 0, length)


def _refuse_others(
    workspace: Workspace, path: str, references: References, others: Sequence[int]
) -> None:
    """Refuse what no array would read: fill value would take its place without a word."""
    keys = [references.keys[row] for row in others]
    for key in references.values:
        folder, name = split(key)
        if name in _DOCUMENTS or _array_above(workspace, join(path, folder)) is None:
            continue
        if workspace.contents.chunk_at(join(path, key)) is None:
            keys.append(key)
    if keys:
        first = ", ".join(repr(key[:80]) for key in keys[:3])
        raise InvalidArgumentError(
            f"{len(keys)} of the references are no chunk of an array, the first being {first}: "
            "fill value would be read in their place. Correct the keys, or the shape and chunks "
            "in the array's metadata"
        )


type _Parts = dict[str, list[tuple[IndexArray, IndexArray]]]
"""By path of an array: rows, and the chunk coordinates of each."""


def _by_array(workspace: Workspace, path: str, references: References) -> tuple[_Parts, list[int]]:
    """The rows of each array, and those of no array."""
    parts: _Parts = {}
    odd: list[int] = []
    for node, rows in _below_arrays(workspace, path, references.keys, odd):
        for start in range(0, len(rows), _SLICE_KEYS):
            some = np.array(rows[start : start + _SLICE_KEYS], np.int64)
            coords, known = _decoded(node, path, references.keys, some)
            parts.setdefault(node.path, []).append((some[known], coords[known]))
            odd += some[~known].tolist()
    others = []
    for row in odd:  # such as chunks of an array that has another one in its key space
        chunk = workspace.contents.chunk_at(join(path, references.keys[row]))
        if chunk is None:
            others.append(row)
        else:
            one = np.array(chunk[1], np.int64).reshape(1, -1)
            parts.setdefault(chunk[0].path, []).append((np.array([row], np.int64), one))
    for numbered in references.numbered:
        node = workspace.contents.array_at(join(path, numbered.path) if numbered.path else path)
        assert node.array is not None
        rows_ = np.arange(numbered.first, numbered.first + len(numbered.chunk))
        parts.setdefault(node.path, []).append((rows_, node.array.grid.unravel(numbered.chunk)))
    return parts, others


def _below_arrays(
    workspace: Workspace, path: str, keys: Sequence[str], odd: list[int]
) -> Iterator[tuple[Node, list[int]]]:
    """The nearest array above each key, with the rows of all its keys; rows without are `odd`."""
    folders: dict[str, list[int]] = {}
    for row, key in enumerate(keys):
        folders.setdefault(key[: max(key.rfind("/"), 0)], []).append(row)
    found: dict[str, tuple[Node, list[int]]] = {}
    for folder, rows in folders.items():
        node = _array_above(workspace, join(path, folder) if folder else path)
        if node is None:
            odd += rows
        else:
            found.setdefault(node.path, (node, []))[1].extend(rows)
    yield from found.values()


def _array_above(workspace: Workspace, place: str) -> Node | None:
    """The array at the place, or the nearest above it."""
    while True:
        node = workspace.contents.node(place)
        if node is not None and node.array is not None:
            return node
        if not place:
            return None
        place, _ = split(place)


def _decoded(
    node: Node, path: str, keys: Sequence[str], rows: IndexArray
) -> tuple[IndexArray, NDArray[np.bool_]]:
    """Coordinates of the rows' keys, and which of them are surely chunks of the node."""
    assert node.array is not None
    shape = node.array.grid.shape
    # Imports go to where no array is, so that the node is at `path` or below it.
    inner = node.path[len(path) :].lstrip("/") if path else node.path
    skip = len(inner) + 1 if inner else 0
    rests = [keys[row][skip:] for row in rows.tolist()]
    coords, known = node.array.chunk_keys.decode_many(rests, len(shape))
    return coords, known & (coords < np.asarray(shape, np.int64)).all(axis=1)


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
    # Parents before what is in them, documents before chunks.
    order = sorted(references.values, key=lambda key: (key.count("/"), key))
    documents = [key for key in order if split(key)[1] in _DOCUMENTS]
    taken = set(documents)
    for key in (*documents, *(k for k in order if k not in taken)):
        workspace.set(join(path, key), references.values[key])
    for key in documents:
        place = join(path, split(key)[0]) if "/" in key else path
        if split(key)[1] in (V3_DOCUMENT, V2_ARRAY) and workspace.contents.node(place) is None:
            raise UnsupportedFormatError(
                f"the Zarr metadata {key!r} is not understood, so that its chunks cannot be told "
                "from other keys"
            )


def _table(
    workspace: Workspace,
    node: Node,
    references: References,
    rows: IndexArray,
    index: IndexArray,
) -> ChunkTable:
    assert node.array is not None
    order = np.argsort(node.array.grid.ravel(index), kind="stable")
    which = rows[order]
    # Files in the order of the chunks, so that their numbers rise along the table.
    used, first, source = np.unique(
        references.source[which], return_index=True, return_inverse=True
    )
    by_chunk = np.argsort(first)
    used, source = used[by_chunk], np.argsort(by_chunk)[source]
    table = table_of(
        node.array.grid,
        workspace.context.containers,
        index[order],
        [references.locations[i] for i in used.tolist()],
        source,
        references.offset[which],
        references.length[which],
        modified=references.modified[used],
        sizes=references.sizes[used],
    )
    assert table is not None  # there is at least one row
    return table


def _ref(trusted: Containers, references: References, row: int) -> VirtualRef:
    source = int(references.source[row])
    modified_ms, nbytes = int(references.modified[source]), int(references.sizes[source])
    file = trusted.source_at(
        references.locations[source],
        modified_ms if modified_ms >= 0 else None,
        nbytes if nbytes >= 0 else None,
    )
    return VirtualRef(file, int(references.offset[row]), int(references.length[row]))
