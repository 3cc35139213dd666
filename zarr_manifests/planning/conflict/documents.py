"""Differences between two versions of a node, and three-way merges and patches of nodes.

A document has three parts. The *shape* of an array. Its *attributes*, which are compared and merged
key by key. And its *structure*, which is everything else a reader needs to decode a chunk: codecs,
type, fill value, chunk grid, dimension names. By CF conventions some attributes of an array belong
to the structure (`STRUCTURAL`), and so do attributes that are no JSON object.

A merge keeps a document that only one side has changed byte for byte. A document that both have
changed is written anew from the common ancestor, in an order that does not depend on which side
came first.

A *patch* applies a commit, or its reverse, to another snapshot. The commit led from `before` to
`after`, and `here` is the snapshot to change. What is here as it was before becomes as it is after;
what is already as it is after stays; anything else is a conflict. A revert is the same with before
and after swapped. Only states are compared, so something that was changed and changed back is no
conflict.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from zarr_manifests.errors import Conflict, ConflictKind
from zarr_manifests.format.nodes import Node, NodeKind
from zarr_manifests.grid import Coords
from zarr_manifests.keys import V2_ARRAY, V2_ATTRIBUTES, V3_DOCUMENT, absolute

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

type TakeMine = Callable[[str], bool]
"""Whether the first side's value of an attribute wins if both sides have changed it."""

type _Name = tuple[str, ...]
"""Of a field, or of an attribute."""

_GONE: Final = object()


@dataclass(frozen=True, slots=True)
class DocumentChange:
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
    attributes: Mapping[str, str | None] = field(default_factory=dict)
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
    base: Node, mine: Node, theirs: Node, take_mine: TakeMine | None = None
) -> dict[str, bytes]:
    """Merge the documents of a node that both sides have changed since `base`.

    Parameters
    ----------
    base, mine, theirs : Node
        The node in three versions. If one side has changed the structure, the other has changed
        nothing. If both have changed the shape, it is along one axis only or to the same shape.
    take_mine : callable, optional
        Whether my value of an attribute wins that both have changed; by default theirs does.
    """
    merged: dict[str, bytes] = {}
    names = dict.fromkeys((*base.documents, *theirs.documents, *mine.documents))
    for name in names:
        was, ours, other = (n.documents.get(name) for n in (base, mine, theirs))
        if ours == other or other == was:
            found = ours
        elif ours == was:
            found = other
        else:
            found = _merged(name, was, (ours, other), (mine, theirs), take_mine)
        if found is not None:
            merged[name] = found
    return merged


def _merged(
    name: str,
    was: bytes | None,
    sides: tuple[bytes | None, bytes | None],
    nodes: tuple[Node, Node],
    take_mine: TakeMine | None,
) -> bytes | None:
    """Merge one document that both sides have changed."""
    base, mine, theirs = (_object(document) for document in (was, *sides))
    if name == V2_ATTRIBUTES:
        attributes = _merged_attributes(base, mine, theirs, take_mine)
        gone = None in sides and not attributes
        return None if gone else _encoded(attributes)
    fields = dict(base)
    shapes = [node.array.shape for node in nodes if node.array is not None]
    if shapes and "shape" in fields:
        before = tuple(fields["shape"])
        # Both shrink to the same shape, or only one of them shrinks.
        changed = [shape for shape in shapes if shape != before] or [before]
        fields["shape"] = [max(axis) for axis in zip(*changed, strict=True)]
    if name == V3_DOCUMENT:
        held = [side.get("attributes", {}) for side in (base, mine, theirs)]
        if all(isinstance(attributes, dict) for attributes in held):  # else it is structure
            attributes = _merged_attributes(held[0], held[1], held[2], take_mine)
            if attributes or any("attributes" in side for side in (base, mine, theirs)):
                fields["attributes"] = attributes
    return _encoded(fields)


def _merged_attributes(
    base: Mapping[str, Any],
    mine: Mapping[str, Any],
    theirs: Mapping[str, Any],
    take_mine: TakeMine | None,
) -> dict[str, Any]:
    ours, other = _changed(base, mine), _changed(base, theirs)
    merged = {}
    for key in (*base, *sorted((mine.keys() | theirs.keys()) - base.keys())):
        both = key in ours and key in other and ours[key] != other[key]
        if (both and take_mine is not None and take_mine(key)) or (key in ours and not both):
            side = mine
        else:
            side = theirs
        if key in side:
            merged[key] = side[key]
    return merged


def _changed[K](before: Mapping[K, Any], after: Mapping[K, Any]) -> dict[K, Any]:
    """Changed keys with their values as JSON, in which true differs from 1 and NaN equals NaN."""
    found: dict[K, Any] = {}
    for key in (*before, *(key for key in after if key not in before)):
        was, now = before.get(key, _GONE), after.get(key, _GONE)
        if now is _GONE:
            found[key] = None
        elif was is _GONE or _canonical(was) != _canonical(now):
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


def _canonical(value: Any) -> str:
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
    >>> from zarr_manifests.planning.conflict.documents import field_changes
    >>> from zarr_manifests.format.nodes import Node, NodeKind
    >>> group = lambda attributes: Node(
    ...     "", bytes(12), NodeKind.GROUP, {".zgroup": b'{"zarr_format": 2}', ".zattrs": attributes}
    ... )
    >>> field_changes(group(b'{"units": "K"}'), group(b'{"units": "degC", "x": 1}'))
    {'attributes.units': ('K', 'degC'), 'attributes.x': (None, 1)}
    """
    was, now = _flat(old), _flat(new)
    return {".".join(key): (was.get(key), now.get(key)) for key in _changed(was, now)}


@dataclass(frozen=True, slots=True)
class ChangedNodes:
    """The nodes that differ between two states, by absolute path.

    Parameters
    ----------
    created, updated, deleted : tuple of str
        A node that was deleted and made again at its path is created and deleted.
    moved : mapping of str to str
        New path by old; these are neither created nor deleted.
    """

    created: tuple[str, ...]
    updated: tuple[str, ...]
    deleted: tuple[str, ...]
    moved: Mapping[str, str]
    fields: Mapping[str, Fields]
    """Of the updated ones: which fields of their metadata differ."""


def changed_nodes(before: Mapping[str, Node], after: Mapping[str, Node]) -> ChangedNodes:
    """What was done to nodes; those with the same id are the same."""
    was, now = ({node.node_id: node for node in nodes.values()} for nodes in (before, after))
    both = [(was[i], now[i]) for i in was.keys() & now.keys() if was[i] != now[i]]
    both.sort(key=lambda pair: pair[1].path)
    updated = {
        absolute(new.path): field_changes(old, new)
        for old, new in both
        if old.documents != new.documents
    }
    return ChangedNodes(
        _absolute(now[i].path for i in now.keys() - was.keys()),
        tuple(sorted(updated)),
        _absolute(was[i].path for i in was.keys() - now.keys()),
        {absolute(old.path): absolute(new.path) for old, new in both if old.path != new.path},
        updated,
    )


def _absolute(paths: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(map(absolute, paths)))


# --- patches -----------------------------------------------------------------------------------

type Nodes = Mapping[str, Node]


def same_group(a: Node, b: Node) -> bool:
    """Whether both are groups with the same documents, which count as one."""
    return a.kind is b.kind is NodeKind.GROUP and a.documents == b.documents


def decide_nodes(
    paths: Iterable[str], before: Nodes, after: Nodes, here: Nodes
) -> tuple[dict[str, Node | None], list[Conflict]]:
    """Return the changes to the nodes at these paths (None deletes one), and the conflicts."""
    concerned = set(paths)
    places = {node.node_id: path for path, node in here.items()}
    changes: dict[str, Node | None] = {}
    found: list[tuple[str, str]] = []
    for path in sorted(concerned):
        was, to, now = before.get(path), after.get(path), here.get(path)
        at = [places.get(node.node_id, path) for node in (was, to) if node is not None]
        elsewhere = [place for place in at if place not in concerned]
        if elsewhere:
            found.append((path, f"it is at {absolute(elsewhere[0])} here"))
        elif _same(now, to):
            continue
        elif _same(now, was):
            changes[path] = to
        else:
            found.append((path, _reason(was, now)))
    merged = {**here, **changes}
    result = {path: node for path, node in merged.items() if node is not None}
    return changes, [
        Conflict(ConflictKind.METADATA, absolute(path), "metadata", reason)
        for path, reason in (*found, *_misplaced(changes, result))
    ]


def _reason(was: Node | None, now: Node | None) -> str:
    """What stands in the way of a change to a node that was something else."""
    if now is None:
        return "it is not here"
    if was is None:
        return "it is here already"
    if was.node_id != now.node_id or now.kind is NodeKind.OPAQUE:
        return "it has been made anew here"
    if was.array is not None and now.array is not None and was.array.shape != now.array.shape:
        return f"its shape is {now.array.shape} here, and the commit has it as {was.array.shape}"
    differ = sorted({name.partition(".")[0] for name in field_changes(was, now)})
    return f"its {', '.join(differ) or 'documents'} differ here from those of the commit"


def _same(a: Node | None, b: Node | None) -> bool:
    """Whether both are the same node; groups with the same documents count as the same."""
    if a is None or b is None or a.node_id == b.node_id:
        return a == b
    return same_group(a, b)


def _misplaced(changes: Mapping[str, Node | None], result: Nodes) -> Iterator[tuple[str, str]]:
    """Paths of nodes that these changes would leave in no group, or below an array, with why."""
    gone = [path for path, node in changes.items() if node is None]
    for path, node in result.items():
        if node.kind is NodeKind.OPAQUE:
            continue
        parent = path.rpartition("/")[0]
        if path and path not in changes and parent in gone and parent not in result:
            yield path, "it would be in a group that no longer exists"
        if path in changes and parent and parent not in result:
            yield path, "its group is not here"
        for top in above(path):
            array = result.get(top)
            new = path in changes or top in changes
            if new and array is not None and array.kind is NodeKind.ARRAY:
                yield path, f"it would lie below the array {absolute(top)}"


def key_of(path: str) -> str:
    """Return the Zarr key at a node's path; an opaque entry's path has a slash before its key."""
    return path.removeprefix("/")


def above(path: str) -> Iterator[str]:
    """The parent paths of a path, nearest first; the root's (empty) comes last."""
    path = key_of(path)
    while path:
        path = path.rpartition("/")[0]
        yield path
