"""Consolidated metadata: the document of a group that holds those of all below it.

It is made for readers elsewhere, as xarray writes it, and never stored in a repository.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from zarr_manifests.format.nodes import Node, NodeKind
from zarr_manifests.keys import V3_DOCUMENT, directory, join, split

__all__ = ["V2_CONSOLIDATED", "consolidated"]

V2_CONSOLIDATED: Final = ".zmetadata"


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
    wanted = found if only is None else found.keys() & {only}
    return {path: sorted(found[path]) for path in found if path in wanted}


def _in_group(node: Node) -> Any:
    """A document as consolidated metadata holds it."""
    fields = json.loads(node.documents[V3_DOCUMENT])
    return fields if node.array is not None else {**fields, "consolidated_metadata": _inline({})}


def _inline(metadata: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "inline", "must_understand": False, "metadata": metadata}
