"""A hierarchy as lines of a tree, and as HTML for notebooks.

What a terminal shows and what a notebook shows comes from the same rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from msgspec import Struct

from zarr_manifests.format.manifest import Node, NodeKind, grouped
from zarr_manifests.keys import V2_ARRAY, V2_ATTRIBUTES, V3_DOCUMENT

_SHOWN_ROWS: Final = 500


class Row(Struct, frozen=True):
    """A group or array as one line.

    Parameters
    ----------
    guide, name : str
        The lines of the tree before it, and its name.
    node : Node
        The node itself.
    dimensions, type, chunk, units : str
        What there is to say of an array; empty for a group.
    """

    guide: str
    name: str
    node: Node
    dimensions: str = ""
    type: str = ""
    chunk: str = ""
    units: str = ""


def hierarchy(nodes: Mapping[str, Node]) -> Iterator[Row]:
    """Groups and arrays in depth-first order, each behind the lines of a tree.

    Examples
    --------
    >>> import zarr, zarr_manifests as zm
    >>> from zarr_manifests.display import hierarchy
    >>> from zarr_manifests.store import contents_of
    >>> session = zm.create("memory://display-example").writable_session()
    >>> _ = zarr.create_array(session.store, name="air/t", shape=(4,), chunks=(2,), dtype="f4")
    >>> for row in hierarchy(contents_of(session.store).nodes()):
    ...     print(row.guide + row.name)
    /
    └── air
        └── t
    """
    shown = {path: node for path, node in nodes.items() if node.kind is not NodeKind.OPAQUE}
    children = grouped((_parent(path, shown), path) for path in shown if path)
    if "" in shown:
        yield _row("", "/", shown[""])
    yield from _below("", "", children, shown)


def _parent(path: str, shown: Mapping[str, Node]) -> str:
    """The nearest path above that has a node: groups need not have one."""
    above = path.rpartition("/")[0]
    while above and above not in shown:
        above = above.rpartition("/")[0]
    return above


def _below(
    path: str, indent: str, children: Mapping[str, list[str]], shown: Mapping[str, Node]
) -> Iterator[Row]:
    paths = sorted(children.get(path, ()))
    for below in paths:
        last = below == paths[-1]
        name = below[len(path) + 1 :] if path else below
        yield _row(indent + ("└── " if last else "├── "), name, shown[below])
        yield from _below(below, indent + ("    " if last else "│   "), children, shown)


def _row(guide: str, name: str, node: Node) -> Row:
    array = node.array
    if array is None:
        return Row(guide, name, node)
    fields = fields_of(node)
    names = array.dimension_names or (None,) * len(array.shape)
    sizes = [str(n) if d is None else f"{d}: {n}" for d, n in zip(names, array.shape, strict=True)]
    kind, attributes = fields.get("data_type", ""), fields.get("attributes")
    return Row(
        guide,
        name,
        node,
        f"({', '.join(sizes)})",
        str(kind.get("name", "") if isinstance(kind, dict) else kind),
        " x ".join(map(str, array.chunk_shape)) or "scalar",
        str(attributes.get("units", "") if isinstance(attributes, dict) else ""),
    )


def fields_of(node: Node) -> Mapping[str, Any]:
    """An array's `data_type` and `attributes`, as a v3 document has them."""
    if V3_DOCUMENT in node.documents:
        fields: Mapping[str, Any] = json.loads(node.documents[V3_DOCUMENT])
        return fields
    array = json.loads(node.documents.get(V2_ARRAY, b"{}"))
    try:
        attributes = json.loads(node.documents.get(V2_ATTRIBUTES, b"{}"))
    except (ValueError, RecursionError):  # they may be anything
        attributes = None
    kind = array.get("dtype", "")
    return {"data_type": kind if isinstance(kind, str) else "structured", "attributes": attributes}


def attributes_of(node: Node) -> dict[str, Any]:
    """The attributes of a group or an array; none if they are no map."""
    found = fields_of(node).get("attributes")
    return found if isinstance(found, dict) else {}


def html_page(
    title: str, facts: Sequence[tuple[str, str]], nodes: Mapping[str, Node] | None = None
) -> str:
    """What a notebook shows of a repository, session or store: facts, then the hierarchy.

    Parameters
    ----------
    title : str
        What it is.
    facts : sequence of (str, str)
        Name and value.
    nodes : mapping of str to Node, optional
        The nodes by path.
    """
    from zarr_manifests.rendering import columns, fact_table, html, more

    if nodes is None:
        return html(title, fact_table(facts))
    rows = hierarchy(nodes)
    tree = columns("", "dimensions", "type", "chunk", "units", whole=("",))
    for row in islice(rows, _SHOWN_ROWS):
        tree.add_row(f"{row.guide}{row.name}", row.dimensions, row.type, row.chunk, row.units)
    shown = tree if tree.row_count else "(empty)"
    return html(title, fact_table(facts), shown, *more(sum(1 for _ in rows)))
