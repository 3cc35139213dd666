"""What is exported: the documents and chunks of a snapshot, by the keys of a plain Zarr store.

Invariants:

- The source is one snapshot, whatever becomes of the session and its branch.
- Every chunk is verified when it is read. A chunk that is missing, damaged or changed is an error.
- Groups get consolidated metadata, as xarray writes it; other documents stay byte for byte.
  Consolidated metadata are made for readers elsewhere, and never stored in a repository.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any, Final

from zarr_manifests.engine.bulk_chunks import stream_table
from zarr_manifests.engine.overlay import OPAQUE, SessionView
from zarr_manifests.errors import InvalidArgumentError, NotFoundError
from zarr_manifests.format.chunk_table import ChunkTable, RefKind
from zarr_manifests.format.manifest import Node, NodeKind
from zarr_manifests.grid import Coords
from zarr_manifests.keys import (
    DOCUMENTS,
    V2_ARRAY,
    V2_GROUP,
    V3_DOCUMENT,
    ChunkKeys,
    absolute,
    check_inside,
    directory,
    join,
    split,
)
from zarr_manifests.metrics import unmetered
from zarr_manifests.progress import tell

V2_CONSOLIDATED: Final = ".zmetadata"

_GAP_BYTES: Final = 64 * 1024
_WINDOW_BYTES: Final = 32 * 1024**2
_BATCH_BYTES: Final = 16 * 1024**2
_BATCH_CHUNKS: Final = 1024
_LAST: Final = (V3_DOCUMENT, V2_GROUP, V2_ARRAY)
"""The documents that make a node: without them there is none."""

type Batch = list[tuple[str, bytes]]
"""Keys, each with its bytes."""


class SnapshotSource:
    """A snapshot, or what is at and below a path in it.

    Parameters
    ----------
    contents : SessionView
        What a session reads.
    path : str
        The group or array that becomes the root.
    chunk_keys : ChunkKeys, optional
        How all chunks are named; by default as each array says.

    Attributes
    ----------
    count, nbytes, referenced : int
        Chunks that were written so far, their bytes, and how many of them were referred to.

    Raises
    ------
    InvalidArgumentError
        If the session has uncommitted changes.
    NotFoundError
        If there is nothing at the path.
    """

    def __init__(
        self, contents: SessionView, path: str, chunk_keys: ChunkKeys | None = None
    ) -> None:
        given: object = path
        if not isinstance(given, str):
            raise InvalidArgumentError(f"path={path!r}: give the path of a group or an array")
        if contents.changes:
            raise InvalidArgumentError(
                "the session has uncommitted changes, which are in no snapshot; commit or discard "
                "them first"
            )
        self.contents = SessionView(contents.context, contents.view)
        self.storage: Any = unmetered(contents.context.storage)  # type: ignore[arg-type]
        self.snapshot_id = contents.view.snapshot_id
        self.path = path.strip("/")
        self._chunk_keys = chunk_keys
        self.count = self.nbytes = self.referenced = 0
        found = self.contents.within(self.path)
        if self.path not in found and (self.path or not found):
            raise NotFoundError(
                f"there is no group or array {absolute(self.path)!r} in snapshot {self.snapshot_id}"
            )
        self.nodes = {path: found[path] for path in sorted(found)}

    def documents(self) -> Batch:
        """Documents by key. Those of members come before those of their group; the root is last."""
        found = {
            self.relative(join(node.path, name)): document
            for node in self.nodes.values()
            for name, document in node.documents.items()
        }
        # Documents that the one beside them hides are entries of their own.
        found |= dict(chain.from_iterable(self._batches(hidden=True)))
        found |= {self.relative(key): document for key, document in consolidated(self.nodes)}
        return sorted(found.items(), key=_members_first)

    def tables(self, *, hidden: bool = False) -> Iterator[tuple[Node, ChunkTable]]:
        """Arrays and opaque entries that have chunks, with their refs; or the hidden entries."""
        for node in self.nodes.values():
            if node.kind is NodeKind.GROUP or _is_hidden(node) is not hidden:
                continue
            table = self.contents.guarded(partial(self.contents.chunks, node))
            if table is not None and len(table):
                yield node, table

    def refer(self, table: ChunkTable) -> None:
        """Count the chunks of the table, which were referred to, but for inline ones."""
        self.referenced += int((table.kind != RefKind.INLINE).sum())
        self._wrote(len(table), int(table.length.sum()))

    def _wrote(self, chunks: int, nbytes: int) -> None:
        self.count += chunks
        self.nbytes += nbytes
        tell("chunks", self.count)

    def chunks(self) -> Iterator[Batch]:
        """The chunks, as they are stored, in batches that fit in memory."""
        for batch in self._batches():
            yield batch
            self._wrote(len(batch), sum(len(data) for _, data in batch))

    def _batches(self, *, hidden: bool = False) -> Iterator[Batch]:
        batch: Batch = []
        size = 0
        for node, table in self.tables(hidden=hidden):
            for coords, data in stream_table(
                self.contents, table, gap_bytes=_GAP_BYTES, window_bytes=_WINDOW_BYTES
            ):
                batch.append((self.key(node, coords), data))
                size += len(data)
                if size >= _BATCH_BYTES or len(batch) >= _BATCH_CHUNKS:
                    yield batch
                    batch, size = [], 0
        if batch:
            yield batch

    def key(self, node: Node, coords: Coords) -> str:
        """The key of a chunk below the root of the export."""
        if node.array is None:
            return self.relative(node.path.removeprefix(OPAQUE))
        chunk_keys = self._chunk_keys or node.array.chunk_keys
        return self.relative(join(node.path, chunk_keys.encode(coords)))

    def relative(self, key: str) -> str:
        """The key below the root of the export: every name that an export writes."""
        return check_inside(key[len(directory(self.path)) :])


def _is_hidden(node: Node) -> bool:
    return node.kind is NodeKind.OPAQUE and split(node.path)[1] in (*DOCUMENTS, V2_CONSOLIDATED)


def _members_first(entry: tuple[str, bytes]) -> tuple[int, bool, str]:
    key = entry[0]
    return -key.count("/"), split(key)[1] in _LAST, key


def consolidated(nodes: Mapping[str, Node], only: str | None = None) -> Iterator[tuple[str, bytes]]:
    """The documents of groups that hold consolidated metadata, each with its key.

    Groups of format 2 with attributes below them that are no JSON have none.

    Parameters
    ----------
    nodes : mapping of str to Node
        The nodes by path, in the order of their paths.
    only : str, optional
        The path of one group; all groups if it is left out.
    """
    v3 = {path: node for path, node in nodes.items() if V3_DOCUMENT in node.documents}
    v2 = {path: node for path, node in nodes.items() if node.documents and path not in v3}
    for path, members in _members(v3, only).items():
        start = len(directory(path))
        whole = {
            **json.loads(v3[path].documents[V3_DOCUMENT]),
            "consolidated_metadata": _inline({m[start:]: _in_group(v3[m]) for m in members}),
        }
        yield join(path, V3_DOCUMENT), json.dumps(whole).encode()
    for path, members in _members(v2, only).items():
        try:
            documents = {
                join(member, name)[len(directory(path)) :]: json.loads(document)
                for member in (path, *members)
                for name, document in v2[member].documents.items()
            }
        except (ValueError, RecursionError):  # attributes may be anything; readers look at each
            continue
        found = {"zarr_consolidated_format": 1, "metadata": dict(sorted(documents.items()))}
        yield join(path, V2_CONSOLIDATED), json.dumps(found).encode()


def _members(nodes: Mapping[str, Node], only: str | None) -> dict[str, list[str]]:
    """By path of each group, the paths below it that one finds from group to group."""
    found: dict[str, list[str]] = {p: [] for p, n in nodes.items() if n.kind is NodeKind.GROUP}
    for path in nodes:
        above = path
        while above:
            above = split(above)[0]
            if above not in found:
                break
            found[above].append(path)
    return {path: sorted(below) for path, below in found.items() if only in (None, path)}


def _in_group(node: Node) -> Any:
    """A document as consolidated metadata holds it."""
    fields = json.loads(node.documents[V3_DOCUMENT])
    return fields if node.array is not None else {**fields, "consolidated_metadata": _inline({})}


def _inline(metadata: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "inline", "must_understand": False, "metadata": metadata}
