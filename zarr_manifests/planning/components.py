"""What commits have changed, split into the components that conflict rules compare.

A `NodeChange` is a node's part of a commit: the node before and after, and the chunks written. Its
*components* follow from that. Several commits in a row are combined into one change per node: it
has all components that any of them had, and the last values. Opaque entries are nodes of one chunk
and need no case of their own.

Invariant: a node that the commits both make and delete leaves no trace.

What a writer has *read* is recorded too. Few chunk reads are recorded exactly. Beyond a limit they
become one bounding box per node, which may then include chunks that were not read, but never misses
one. The size of the record is bounded by the number of nodes.

Differences between two versions of a node, and three-way merges of nodes
---------------------------------------------------------------------------

A document has three parts. The *shape* of an array. Its *attributes*, which are compared and merged
key by key. And its *structure*, which is everything else a reader needs to decode a chunk: codecs,
type, fill value, chunk grid, dimension names. By CF conventions some attributes of an array belong
to the structure (`STRUCTURAL`), and so do attributes that are no JSON object.

A merge keeps a document that only one side has changed byte for byte. A document that both have
changed is written anew from the common ancestor, in an order that does not depend on which side
came first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import reduce
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field
from msgspec.structs import replace

from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.manifest import Delta, Node, NodeKind, grouped
from zarr_manifests.format.snapshot import DeltaEntry
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.keys import V2_ARRAY, V2_ATTRIBUTES, V3_DOCUMENT
from zarr_manifests.planning.merge import Layer, merge_layers, narrower
from zarr_manifests.runtime import ForkSafeLock

STRUCTURAL: Final = frozenset(
    {
        "scale_factor",
        "add_offset",
        "_FillValue",
        "missing_value",
        "units",
        "calendar",
        "_Unsigned",
        "_Encoding",
        "dtype",
        "_ARRAY_DIMENSIONS",
    }
)
"""Attributes of an array by which xarray decodes its values, so that they count as structure.

`dtype` turns integers into booleans and time spans, `_Encoding` bytes into text, and
`_ARRAY_DIMENSIONS` names the axes in Zarr v2. `valid_min` and the like are not used for decoding.
"""

type _Name = tuple[str, ...]
"""Of a field, or of an attribute."""

_GONE: Final = object()


class DocumentChange(Struct, frozen=True):
    """What changed in a node's documents.

    Parameters
    ----------
    grown : frozenset of int
        Axes that became longer.
    shrunk : bool
        Whether an axis became shorter.
    attributes : mapping of str to (str or None)
        Changed attributes, each with its new value as JSON; None for a removed one.
    structure : bool
        Whether anything else changed.
    """

    grown: frozenset[int] = frozenset()
    shrunk: bool = False
    attributes: Mapping[str, str | None] = {}
    structure: bool = False

    def then(self, later: DocumentChange) -> DocumentChange:
        """Combine the change with a later one."""
        return DocumentChange(
            self.grown | later.grown,
            self.shrunk or later.shrunk,
            {**self.attributes, **later.attributes},
            self.structure or later.structure,
        )


def compare_documents(before: Node, after: Node) -> DocumentChange:
    """Return how the documents of `after` differ from those of `before`."""
    if before.documents == after.documents:
        return DocumentChange()
    was, now = (node.array.shape if node.array else () for node in (before, after))
    if len(was) != len(now):
        return DocumentChange(structure=True)
    changed = _changed(_flat(before), _flat(after))
    if before.array is not None:
        changed.pop(("shape",), None)
    attributes = {key[1]: value for key, value in changed.items() if len(key) > 1}
    meaning = {key for key in attributes if before.array is not None and key in STRUCTURAL}
    return DocumentChange(
        frozenset(axis for axis, (a, b) in enumerate(zip(was, now, strict=True)) if b > a),
        any(b < a for a, b in zip(was, now, strict=True)),
        {key: value for key, value in attributes.items() if key not in meaning},
        len(changed) > len(attributes) or bool(meaning),
    )


def merge_documents(
    base: Node, mine: Node, theirs: Node, winning: Container[str] = ()
) -> dict[str, bytes]:
    """Merge the documents of a node that both sides have changed since `base`.

    Parameters
    ----------
    base, mine, theirs : Node
        The node in three versions. If one side has changed the structure, the other has changed
        nothing. If both have changed the shape, it is along one axis only or to the same shape.
    winning : container of str
        The attributes of which my value wins if both have changed it; else theirs does.
    """

    def attribute(name: str, _: Any, ours: Any, other: Any) -> Any:
        return ours if name in winning else other

    def part(name: str, *sides: Any) -> Any:
        if name == "shape":
            return [max(axis) for axis in zip(*sides[1:], strict=True)]
        was, ours, other = ({} if side is _GONE else side for side in sides)
        are_objects = all(isinstance(side, dict) for side in (was, ours, other))
        return _three_way(was, ours, other, attribute) if are_objects else other  # structure

    def document(name: str, *sides: Any) -> Any:
        was, ours, other = (_object(None if side is _GONE else side) for side in sides)
        merged = _three_way(was, ours, other, attribute if name == V2_ATTRIBUTES else part)
        return _encoded(merged) if merged or _GONE not in sides[1:] else _GONE

    return _three_way(base.documents, mine.documents, theirs.documents, document)


def _three_way(
    base: Mapping[str, Any],
    mine: Mapping[str, Any],
    theirs: Mapping[str, Any],
    both: Callable[[str, Any, Any, Any], Any],
) -> dict[str, Any]:
    """What both sides have made of a map; `both` says what becomes of a key that they disagree on.

    It is given the values of the base, of mine and of theirs, or `_GONE`.
    """
    ours, other = _changed(base, mine), _changed(base, theirs)
    merged = {}
    for key in (*base, *sorted((mine.keys() | theirs.keys()) - base.keys())):
        found = (mine if key in ours else theirs).get(key, _GONE)
        if key in ours and key in other and ours[key] != other[key]:
            found = both(key, *(side.get(key, _GONE) for side in (base, mine, theirs)))
        if found is not _GONE:
            merged[key] = found
    return merged


def _changed[K](before: Mapping[K, Any], after: Mapping[K, Any]) -> dict[K, Any]:
    """Changed keys with their values as JSON, in which true differs from 1 and NaN equals NaN."""
    found: dict[K, Any] = {}
    for key in (*before, *(key for key in after if key not in before)):
        was, now = before.get(key, _GONE), after.get(key, _GONE)
        if _canonical(was) != _canonical(now):
            found[key] = _canonical(now)
    return found


def _flat(node: Node) -> dict[_Name, Any]:
    """The fields of a node's documents; attributes one by one, if they are an object."""
    fields: dict[str, Any] = {}
    for name, data in node.documents.items():
        found = _object(data)
        if name == V2_ATTRIBUTES:  # which may be anything
            text = data.decode(errors="backslashreplace")
            found = {"attributes": found if isinstance(found, dict) else text}
        fields |= found
    flat: dict[_Name, Any] = {(name,): value for name, value in fields.items()}
    if isinstance(attributes := fields.get("attributes"), dict):
        del flat["attributes",]
        flat |= {("attributes", name): value for name, value in attributes.items()}
    return flat


def _object(document: bytes | None) -> Any:
    """The parsed document; None if it is no JSON, which v2 attributes may be."""
    if document is None:
        return {}
    try:
        return json.loads(document)
    except (ValueError, RecursionError):
        return None


def _canonical(value: Any) -> Any:
    """A value that is equal if the value means the same; None if there is none."""
    if value is _GONE or isinstance(value, bytes):
        return None if value is _GONE else value
    return json.dumps(value, sort_keys=True)


def _encoded(value: Any) -> bytes:
    return json.dumps(value, indent=2).encode()  # as Zarr itself writes documents


def with_shape(node: Node, shape: Coords) -> Node:
    """Return the array with another shape; the same object if the shape is the same."""
    if node.array is None or node.array.shape == shape:
        return node
    documents = dict(node.documents)
    name = V3_DOCUMENT if V3_DOCUMENT in documents else V2_ARRAY
    documents[name] = _encoded({**_object(documents[name]), "shape": list(shape)})
    return replace(node, documents=documents)


# --- fields that differ ------------------------------------------------------------------------

type Fields = Mapping[str, tuple[Any, Any]]
"""By name, what a field was and what it is; None where it is not. Attributes are `attributes.x`."""


def field_changes(old: Node, new: Node) -> Fields:
    """The fields that differ between two states of a node.

    Examples
    --------
    >>> from zarr_manifests.planning.components import field_changes
    >>> from zarr_manifests.format.manifest import Delta, Node, NodeKind, grouped
    >>> group = lambda attributes: Node(
    ...     "", bytes(12), NodeKind.GROUP, {".zgroup": b'{"zarr_format": 2}', ".zattrs": attributes}
    ... )
    >>> field_changes(group(b'{"units": "K"}'), group(b'{"units": "degC", "x": 1}'))
    {'attributes.units': ('K', 'degC'), 'attributes.x': (None, 1)}
    """
    was, now = _flat(old), _flat(new)
    return {".".join(key): (was.get(key), now.get(key)) for key in _changed(was, now)}


def same_group(a: Node, b: Node) -> bool:
    """Whether both are groups with the same documents, which count as one."""
    return a.kind is b.kind is NodeKind.GROUP and a.documents == b.documents


def key_of(path: str) -> str:
    """Return the Zarr key at a node's path; an opaque entry's path has a slash before its key."""
    return path.removeprefix("/")


def above(path: str) -> Iterator[str]:
    """The parent paths of a path, nearest first; the root's (empty) comes last."""
    path = key_of(path)
    while path:
        path = path.rpartition("/")[0]
        yield path


# --- components ---------------------------------------------------------------------------------


class Component(StrEnum):
    """A kind of change; conflict rules compare pairs of them."""

    CHUNKS = "chunks"
    GROWTH = "growth"
    SHRINK = "shrink"
    ATTRIBUTES = "attributes"
    STRUCTURE = "structure"
    CREATE = "create"
    DELETE = "delete"


class NodeChange(Struct, frozen=True):
    """The changes of one node.

    Parameters
    ----------
    before, after : Node or None
        The node before and after.
    documents : DocumentChange
        What changed in its documents.
    cut : tuple of int or None
        Grid shape; older chunks at or beyond it are gone, even if the array has grown again.
    chunks : ChunkTable or None
        Chunks set or unset.
    """

    before: Node | None
    after: Node | None
    documents: DocumentChange = field(default_factory=DocumentChange)
    cut: Coords | None = None
    chunks: ChunkTable | None = None

    @property
    def moved(self) -> bool:
        """Whether it existed before and has another path now."""
        return (
            self.before is not None
            and self.after is not None
            and self.before.path != self.after.path
        )

    @property
    def left(self) -> str | None:
        """The path that it has left, by deletion or by a move."""
        gone = self.before is not None and (self.after is None or self.moved)
        return self.before.path if gone and self.before is not None else None

    @property
    def taken(self) -> str | None:
        """The path that it has taken, by creation or by a move."""
        new = self.after is not None and (self.before is None or self.moved)
        return self.after.path if new and self.after is not None else None

    @property
    def path(self) -> str:
        """The node's path before; if it is new, its path now."""
        node = self.before or self.after
        return node.path if node is not None else "?"

    @property
    def components(self) -> tuple[Component, ...]:
        """The components of the change."""
        if self.before is None:
            return (Component.CREATE,)
        if self.after is None:
            return (Component.DELETE,)
        done = {
            Component.DELETE: self.moved,
            Component.STRUCTURE: self.documents.structure,
            Component.SHRINK: self.documents.shrunk or self.cut is not None,
            Component.GROWTH: bool(self.documents.grown),
            Component.ATTRIBUTES: bool(self.documents.attributes),
            Component.CHUNKS: self.chunks is not None,
        }
        return tuple(component for component, is_so in done.items() if is_so)

    @staticmethod
    def joined(each: Sequence[NodeChange]) -> NodeChange:
        """Changes of one node, one after another, as one."""
        if len(each) == 1:
            return each[0]
        tables = tuple(change.chunks for change in each if change.chunks is not None)
        return NodeChange(
            each[0].before,
            each[-1].after,
            reduce(DocumentChange.then, (change.documents for change in each)),
            reduce(narrower, (change.cut for change in each)),
            merge_layers([Layer(None, tables)]).table,
        )


class Changes(Struct, frozen=True):
    """The changes of one or more commits, by node id.

    Parameters
    ----------
    nodes : mapping of bytes to NodeChange
        One change for each changed node.
    """

    nodes: Mapping[bytes, NodeChange]

    @classmethod
    def of(
        cls,
        before: Mapping[str, Node],
        by_id: Mapping[bytes, Node],
        changed: Mapping[str, Node | None],
        truncated: Mapping[bytes, Coords] = {},  # never changed
        tables: Mapping[bytes, Sequence[ChunkTable]] = {},
    ) -> Changes:
        """Return the changes of a commit on the nodes `before`.

        Parameters
        ----------
        before, by_id : mapping of str or bytes to Node
            All nodes by path, and by node id.
        changed : mapping of str to (Node or None)
            Nodes made or changed, by path; None where one was deleted.
        truncated : mapping of bytes to tuple of int
            Grid shapes of truncations, by node id.
        tables : mapping of bytes to sequence of ChunkTable
            Chunks set and unset, by node id.
        """
        was = {before[path].node_id: before[path] for path in changed if path in before}
        now = {node.node_id: node for node in changed.values() if node is not None}
        found = {}
        written = (node_id for node_id, parts in tables.items() if any(map(len, parts)))
        for node_id in dict.fromkeys((*was, *now, *truncated, *written)):
            old = was.get(node_id) or by_id.get(node_id)
            untouched = old is not None and old.path not in changed
            new = old if untouched and node_id not in now else now.get(node_id)
            if old is None and new is None:
                continue
            both = old is not None and new is not None
            parts = tuple(tables.get(node_id, ()))
            found[node_id] = NodeChange(
                old,
                new,
                compare_documents(old, new) if old and new else DocumentChange(),
                truncated.get(node_id) if both else None,
                parts[0] if len(parts) == 1 else merge_layers([Layer(None, parts)]).table,
            )
        return cls(found)

    @staticmethod
    def joined(commits: Iterable[Changes]) -> Changes:
        """The changes of commits, one after another, as those of one."""
        each = grouped(pair for changes in commits for pair in changes)
        found = {node_id: NodeChange.joined(those) for node_id, those in each.items()}
        return Changes({i: c for i, c in found.items() if c.before or c.after})

    def __iter__(self) -> Iterator[tuple[bytes, NodeChange]]:
        return iter(self.nodes.items())

    @property
    def left(self) -> dict[str, bytes]:
        """Paths that nodes have left, by deletion or move, with the nodes' ids."""
        return {c.left: node_id for node_id, c in self if c.left is not None}

    @property
    def taken(self) -> dict[str, bytes]:
        """Paths that nodes have taken, by creation or move, with the nodes' ids."""
        return {c.taken: node_id for node_id, c in self if c.taken is not None}


def replayed(
    nodes: Iterable[Node], commits: Iterable[tuple[Delta, Mapping[bytes, Sequence[ChunkTable]]]]
) -> Iterator[Changes]:
    """The changes of each of the commits, oldest first, given the nodes before them.

    A commit is given as its delta, with the chunk tables that matter, by node id.
    """
    by_path = {node.path: node for node in nodes}
    by_id = {node.node_id: node for node in by_path.values()}
    for delta, tables in commits:
        changed = {**dict.fromkeys(delta.deleted), **{node.path: node for node in delta.nodes}}
        changes = Changes.of(by_path, by_id, changed, delta.truncated, tables)
        yield changes
        for node in (change.before for _, change in changes):
            if node is not None:
                del by_path[node.path], by_id[node.node_id]
        for node in (change.after for _, change in changes):
            if node is not None:
                by_path[node.path] = by_id[node.node_id] = node


def apart(mine: Mapping[bytes, Sequence[Box]], theirs: Iterable[DeltaEntry]) -> bool:
    """Whether my chunks cannot conflict with the commits listed in these entries.

    Commits whose boxes are disjoint share no chunk. Those whose boxes overlap may still share none;
    their logs then decide.

    Parameters
    ----------
    mine : mapping of bytes to sequence of Box
        Boxes around all chunks that I have set or unset, by node id. I have changed nothing else.
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


# --- what was read -----------------------------------------------------------------------------

_MOST_CHUNKS: Final = 4096
_ENCLOSING: Final = ForkSafeLock()


class Reads(Struct):
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

    chunks: dict[bytes, set[Coords]] = {}
    boxes: dict[bytes, Box] = {}
    documents: set[str] = set()

    def note(self, node_id: bytes, coords: Coords) -> None:
        """Record that a chunk was read."""
        seen = self.chunks.setdefault(node_id, set())
        seen.add(coords)
        if len(seen) > _MOST_CHUNKS and coords:
            with _ENCLOSING:
                enclosed = seen.copy()  # other threads may add more, which then stay
                around = Box.around_coords(np.array([coords, *enclosed], np.int64))
                self.boxes[node_id] = Box.around((around, self.boxes.get(node_id, around)))
                seen.difference_update(enclosed)

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
            found |= box.holds(coords)
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
