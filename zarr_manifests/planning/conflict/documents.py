"""Differences between two versions of a node's metadata documents, and three-way merges of them.

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from zarr_manifests.format.nodes import Node, NodeKind
from zarr_manifests.grid import Coords
from zarr_manifests.keys import V2_ARRAY, V2_ATTRIBUTES, V3_DOCUMENT

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


@dataclass(frozen=True, slots=True)
class _Parts:
    """A node's documents, split into parts."""

    shape: Coords
    attributes: Mapping[str, Any]
    structure: str


def compare_documents(before: Node, after: Node) -> DocumentChange:
    """Return how the documents of `after` differ from those of `before`."""
    if before.documents == after.documents:
        return DocumentChange()
    was, now = _parts(before), _parts(after)
    if len(was.shape) != len(now.shape):
        return DocumentChange(structure=True)
    axes = list(enumerate(zip(was.shape, now.shape, strict=True)))
    attributes = _changed(was.attributes, now.attributes)
    meaning = {key for key in attributes if before.array is not None and key in STRUCTURAL}
    return DocumentChange(
        frozenset(axis for axis, (a, b) in axes if b > a),
        any(b < a for _, (a, b) in axes),
        {key: value for key, value in attributes.items() if key not in meaning},
        was.structure != now.structure or bool(meaning),
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


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str | None]:
    """Changed keys with their values as JSON, in which true differs from 1 and NaN equals NaN."""
    found: dict[str, str | None] = {}
    for key in (*before, *(after.keys() - before.keys())):
        was, now = before.get(key, _GONE), after.get(key, _GONE)
        if now is _GONE:
            found[key] = None
        elif was is _GONE or _canonical(was) != _canonical(now):
            found[key] = _canonical(now)
    return found


def _parts(node: Node) -> _Parts:
    rest: dict[str, Any] = {}
    attributes: Mapping[str, Any] = {}
    for name, document in node.documents.items():
        found: Any = _object(document)
        if name == V2_ATTRIBUTES:
            if isinstance(found, dict):
                attributes = found
            else:
                rest[name] = document.hex()
            continue
        held = found.get("attributes", {}) if name == V3_DOCUMENT else None
        keys = {"shape"} if node.kind is NodeKind.ARRAY else set()
        if isinstance(held, dict):
            attributes = held
            keys.add("attributes")
        rest[name] = {key: value for key, value in found.items() if key not in keys}
    return _Parts(node.array.shape if node.array else (), attributes, _canonical(rest))


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
