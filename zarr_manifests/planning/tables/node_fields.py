"""The metadata documents of a node as fields, and which of them differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from zarr_manifests.format.nodes import Node
from zarr_manifests.keys import V2_ATTRIBUTES

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
