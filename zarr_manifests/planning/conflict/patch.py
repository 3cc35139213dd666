"""Applying a commit, or its reverse, to another snapshot: a three-way decision per node.

A commit led from `before` to `after`, and `here` is the snapshot to change. What is here as it was
before becomes as it is after; what is already as it is after stays; anything else is a conflict. A
revert is the same with before and after swapped. Only states are compared, so something that was
changed and changed back is no conflict.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from zarr_manifests.errors import Conflict, ConflictKind
from zarr_manifests.format.nodes import Node, NodeKind
from zarr_manifests.keys import V2_ATTRIBUTES, absolute
from zarr_manifests.planning.tables.moves import field_changes

type Nodes = Mapping[str, Node]


def decide_nodes(
    paths: Iterable[str], before: Nodes, after: Nodes, here: Nodes
) -> tuple[dict[str, Node | None], list[Conflict]]:
    """Return the changes to the nodes at these paths (None deletes one), and the conflicts."""
    concerned = set(paths)
    places = {node.node_id: path for path, node in here.items()}
    changes: dict[str, Node | None] = {}
    conflicts = []
    for path in sorted(concerned):
        was, to, now = before.get(path), after.get(path), here.get(path)
        found = [places.get(node.node_id, path) for node in (was, to) if node is not None]
        elsewhere = [place for place in found if place not in concerned]
        if elsewhere:
            reason = f"it is at {absolute(elsewhere[0])} here"
            conflicts.append(Conflict(ConflictKind.METADATA, absolute(path), "metadata", reason))
        elif _same(now, to):
            continue
        elif _same(now, was):
            changes[path] = to
        else:
            reason = _reason(was, now)
            conflicts.append(Conflict(ConflictKind.METADATA, absolute(path), "metadata", reason))
    merged = {**here, **changes}
    result = {path: node for path, node in merged.items() if node is not None}
    return changes, conflicts + _misplaced(changes, result)


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


def same_structure(a: Node, b: Node) -> bool:
    """Whether chunk bytes decode the same in both: their documents differ at most in shape.

    Attributes are ignored, since they do not affect how chunks are encoded.
    """
    return a.kind == b.kind and _structure(a) == _structure(b)


def _structure(node: Node) -> dict[str, dict[str, Any]]:
    documents = {name: json.loads(data) for name, data in node.documents.items()}
    return {
        name: {k: v for k, v in fields.items() if k not in ("shape", "attributes")}
        for name, fields in documents.items()
        if name != V2_ATTRIBUTES
    }


def _same(a: Node | None, b: Node | None) -> bool:
    """Whether both are the same node; groups with the same documents count as the same."""
    if a is None or b is None or a.node_id == b.node_id:
        return a == b
    return a.kind is b.kind is NodeKind.GROUP and a.documents == b.documents


def _misplaced(changes: Mapping[str, Node | None], result: Nodes) -> list[Conflict]:
    """Conflicts of nodes that these changes would leave in no group, or below an array."""
    conflicts = []
    gone = [path for path, node in changes.items() if node is None]
    for path, node in result.items():
        if node.kind is NodeKind.OPAQUE:
            continue
        above = path.rpartition("/")[0]
        if path and path not in changes and above in gone and above not in result:
            reason = "it would be in a group that no longer exists"
            conflicts.append(Conflict(ConflictKind.METADATA, absolute(path), "metadata", reason))
        if path in changes and above and above not in result:
            reason = "its group is not here"
            conflicts.append(Conflict(ConflictKind.METADATA, absolute(path), "metadata", reason))
        parts = path.split("/")
        for end in range(len(parts) if path else 0):
            top = "/".join(parts[:end])
            array = result.get(top)
            new = path in changes or top in changes
            if new and array is not None and array.kind is NodeKind.ARRAY:
                reason = f"it would lie below the array {absolute(top)}"
                conflicts.append(
                    Conflict(ConflictKind.METADATA, absolute(path), "metadata", reason)
                )
    return conflicts
