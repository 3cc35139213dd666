"""Which nodes differ between two states, and which fields of their metadata documents."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from zarr_manifests.format.nodes import Node
from zarr_manifests.keys import V2_ATTRIBUTES, absolute

type Fields = Mapping[str, tuple[Any, Any]]
"""By name, what a field was and what it is; None where it is not. Attributes are `attributes.x`."""


def fields_of_documents(node: Node) -> dict[str, Any]:
    """The fields of a group's or an array's documents; the attributes are one of them."""
    found: dict[str, Any] = {}
    for name, data in node.documents.items():
        try:
            fields = json.loads(data)
        except (ValueError, RecursionError):  # those of format 2 may be anything
            fields = data.decode(errors="replace")
        found |= {"attributes": fields} if name == V2_ATTRIBUTES else fields
    return found


def field_changes(old: Node, new: Node) -> Fields:
    """The fields that differ between two states of a node.

    Examples
    --------
    >>> from zarr_manifests.planning.tables.node_fields import field_changes
    >>> from zarr_manifests.format.nodes import Node, NodeKind
    >>> group = lambda attributes: Node(
    ...     "", bytes(12), NodeKind.GROUP, {".zgroup": b'{"zarr_format": 2}', ".zattrs": attributes}
    ... )
    >>> field_changes(group(b'{"units": "K"}'), group(b'{"units": "degC", "x": 1}'))
    {'attributes.units': ('K', 'degC'), 'attributes.x': (None, 1)}
    """
    was, now = (_flat(fields_of_documents(node)) for node in (old, new))
    names = [*was, *(name for name in now if name not in was)]
    return {n: (was.get(n), now.get(n)) for n in names if was.get(n) != now.get(n)}


def _flat(fields: Mapping[str, Any]) -> dict[str, Any]:
    attributes = fields.get("attributes")
    if not isinstance(attributes, dict):
        return dict(fields)
    rest = {name: value for name, value in fields.items() if name != "attributes"}
    return rest | {f"attributes.{name}": value for name, value in attributes.items()}


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
