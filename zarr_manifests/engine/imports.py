"""References made the contents of a workspace: documents written, chunks referred to or copied.

Documents come first, so that the workspace itself says which key is a chunk of which array, and
the refs of each array are then set as one table.

Invariant: nothing that is there already is changed, and nothing is left out.
"""

from __future__ import annotations

import numpy as np

from zarr_manifests.engine.workspace import Workspace
from zarr_manifests.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    UnsupportedFormatError,
)
from zarr_manifests.format.chunk_table import ChunkTable, VirtualRef
from zarr_manifests.format.nodes import Node
from zarr_manifests.grid import Coords
from zarr_manifests.keys import V3_DOCUMENT, join, split
from zarr_manifests.virtual.columns import table_of
from zarr_manifests.virtual.containers import Containers
from zarr_manifests.virtual.files import VirtualReader
from zarr_manifests.virtual.references import References

__all__ = ["import_references"]

_GROUP = b'{"zarr_format":3,"node_type":"group","attributes":{}}'


def import_references(
    workspace: Workspace, path: str, references: References, trusted: Containers, *, copy: bool
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

    Raises
    ------
    AlreadyExistsError
        If there is something at the path.
    InvalidArgumentError
        If an entry cannot be had under its key.
    UnsupportedFormatError
        If an array's metadata is not understood.
    """
    path = path.strip("/")
    _make_room(workspace, path)
    _write_values(workspace, path, references)
    arrays: dict[bytes, tuple[Node, list[int], list[Coords]]] = {}
    others = []
    for row, key in enumerate(references.keys):
        chunk = workspace.chunk_at(join(path, key))
        if chunk is None:
            others.append(row)
        else:
            _, rows, coords = arrays.setdefault(chunk[0].node_id, (chunk[0], [], []))
            rows.append(row)
            coords.append(chunk[1])
    reader = VirtualReader(trusted)
    for node, rows, coords in arrays.values():
        table = _table(workspace, node, references, rows, coords)
        if not copy:
            assert node.array is not None
            workspace.put_table(node.path, node.array.grid, table)
        else:
            others += rows
    for row in others:  # copied one by one, so that what lies in memory is one of them
        ref = _ref(trusted, references, row)
        workspace.set(join(path, references.keys[row]), reader.read(ref, 0, ref.length))


def _make_room(workspace: Workspace, path: str) -> None:
    below = path + "/" if path else ""
    for other, node in workspace.nodes().items():
        name = other.removeprefix("/")
        if name == path or name.startswith(below):
            raise AlreadyExistsError(
                f"there is something at /{name}; import to a path where nothing is"
            )
        if node.array is not None and path.startswith(other + "/" if other else ""):
            raise InvalidArgumentError(f"/{other} is an array, and holds no other nodes")
    while path:
        path, _ = split(path)
        if workspace.node(path) is None:
            workspace.set(join(path, V3_DOCUMENT), _GROUP)


def _write_values(workspace: Workspace, path: str, references: References) -> None:
    # Parents before what is in them, documents before chunks.
    order = sorted(references.values, key=lambda key: (key.count("/"), key))
    documents = [k for k in order if split(k)[1] in (V3_DOCUMENT, ".zarray", ".zgroup", ".zattrs")]
    taken = set(documents)
    for key in (*documents, *(k for k in order if k not in taken)):
        workspace.set(join(path, key), references.values[key])
    for key in documents:
        place = join(path, split(key)[0]) if "/" in key else path
        if split(key)[1] in (V3_DOCUMENT, ".zarray") and workspace.node(place) is None:
            raise UnsupportedFormatError(
                f"the Zarr metadata {key!r} is not understood, so that its chunks cannot be told "
                "from other keys"
            )


def _table(
    workspace: Workspace,
    node: Node,
    references: References,
    rows: list[int],
    coords: list[Coords],
) -> ChunkTable:
    assert node.array is not None
    index = np.array(coords, np.int64).reshape(len(rows), node.array.grid.ndim)
    order = np.argsort(node.array.grid.ravel(index), kind="stable")
    which = np.array(rows, np.int64)[order]
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
