"""`zarr-manifests tree`: the groups and arrays of one snapshot.

Walking the hierarchy reads the snapshot's node table and nothing of the arrays' manifests;
counting chunks does, so it is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from zarr_manifests.cli.console import (
    Branch,
    SnapshotId,
    Tag,
    Url,
    bytes_text,
    columns,
    console,
    plain_text,
)
from zarr_manifests.engine.view import SnapshotView
from zarr_manifests.format.nodes import Node, NodeKind
from zarr_manifests.keys import V2_ARRAY, V2_ATTRIBUTES, V3_DOCUMENT, ArrayMeta
from zarr_manifests.repository import Repository

__all__ = ["run"]


def run(
    url: Url,
    branch: Branch = None,
    tag: Tag = None,
    snapshot: SnapshotId = None,
    chunks: Annotated[
        bool,
        typer.Option(
            "--chunks",
            "-c",
            help="Count the chunks that are there instead of showing units; reads manifests.",
        ),
    ] = False,
) -> None:
    """Show groups and arrays: dimensions, type, chunk shape and units."""
    session = Repository.open(url).readonly_session(branch, tag=tag, snapshot_id=snapshot)
    view = session.store.workspace.view
    last = ("there", "stored") if chunks else ("units",)
    numbers = last if chunks else ()
    whole = ("", "type") if chunks else ("", "type", "dimensions")
    table = columns("", "dimensions", "type", "chunk", *last, right=numbers, whole=whole)
    for guide, node in _walk(view.nodes):
        if node.array is None:
            table.add_row(guide)
            continue
        fields = _document(node)
        row = [guide, _dimensions(node.array), _type(fields), _shape(node.array.chunk_shape)]
        row += _stored(view, node, node.array) if chunks else [_units(fields)]
        table.add_row(*row)
    out = console()
    out.print(view.snapshot_id, style="yellow")
    if table.row_count:
        out.print(table)
    else:
        out.print("(empty)")


def _walk(nodes: Mapping[str, Node]) -> Iterator[tuple[str, Node]]:
    """Groups and arrays in depth-first order, each behind the lines of a tree."""
    shown = {path: node for path, node in nodes.items() if node.kind is not NodeKind.OPAQUE}
    children: dict[str, list[str]] = {}
    for path in shown:
        if path:
            children.setdefault(_parent(path, shown), []).append(path)
    if "" in shown:
        yield "/", shown[""]
    yield from _below("", "", children, shown)


def _parent(path: str, shown: Mapping[str, Node]) -> str:
    """The nearest path above that has a node: groups need not have one."""
    above = path.rpartition("/")[0]
    while above and above not in shown:
        above = above.rpartition("/")[0]
    return above


def _below(
    path: str, indent: str, children: Mapping[str, list[str]], shown: Mapping[str, Node]
) -> Iterator[tuple[str, Node]]:
    paths = sorted(children.get(path, ()))
    for below in paths:
        last = below == paths[-1]
        name = below[len(path) + 1 :] if path else below
        yield f"{indent}{'└── ' if last else '├── '}{plain_text(name)}", shown[below]
        yield from _below(below, indent + ("    " if last else "│   "), children, shown)


def _document(node: Node) -> Mapping[str, Any]:
    """Data type and attributes as a v3 document has them."""
    if V3_DOCUMENT in node.documents:
        fields: Mapping[str, Any] = json.loads(node.documents[V3_DOCUMENT])
        return fields
    array = json.loads(node.documents.get(V2_ARRAY, b"{}"))
    try:
        attributes = json.loads(node.documents.get(V2_ATTRIBUTES, b"{}"))
    except ValueError:  # they may be anything
        attributes = None
    kind = array.get("dtype", "")
    return {
        "data_type": kind if isinstance(kind, str) else "structured",
        "attributes": attributes,
    }


def _dimensions(array: ArrayMeta) -> str:
    names = array.dimension_names or (None,) * len(array.shape)
    sizes = [str(n) if d is None else f"{d}: {n}" for d, n in zip(names, array.shape, strict=True)]
    return plain_text(f"({', '.join(sizes)})")


def _type(fields: Mapping[str, Any]) -> str:
    kind = fields.get("data_type", "")
    return plain_text(kind.get("name", "") if isinstance(kind, dict) else kind)


def _units(fields: Mapping[str, Any]) -> str:
    attributes = fields.get("attributes")
    return plain_text(attributes.get("units", "") if isinstance(attributes, dict) else "")


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _stored(view: SnapshotView, node: Node, array: ArrayMeta) -> list[str]:
    table = view.chunks(node.node_id)
    count, nbytes = (0, 0) if table is None else (len(table), int(table.length.sum()))
    return [f"{count:,}/{array.grid.size:,}", bytes_text(nbytes)]
