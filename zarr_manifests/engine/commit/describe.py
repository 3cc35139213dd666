"""What a commit says about itself: message, metadata, kind, and counts.

This is for readers of the history and does not affect how a commit lands. It is validated before
anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import ge, le
from typing import Any

import numpy as np

from zarr_manifests.engine.edit.change_set import ChangeSet
from zarr_manifests.engine.objects.spill import Rows, Spilled, rows_of
from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import CorruptObjectError, InvalidArgumentError
from zarr_manifests.format.chunk_table import RefKind
from zarr_manifests.format.delta import CommitKind
from zarr_manifests.format.envelope import pack, unpack
from zarr_manifests.format.nodes import Node


def checked_message(message: object) -> str:
    """Return the message if it is valid."""
    if not isinstance(message, str) or not message.strip():
        raise InvalidArgumentError("a commit needs a message: say in a line what it does")
    try:
        message.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"the message is not valid Unicode text: {error}") from error
    return message


def checked_metadata(metadata: Mapping[str, Any], of: str = "commit") -> dict[str, Any]:
    """Return the metadata as readers will get it, if it is valid; `of` is for errors."""
    if not isinstance(metadata, Mapping):
        raise InvalidArgumentError(
            f"{of} metadata is a map of names to values, not a {type(metadata).__name__}"
        )
    try:
        # Nested as deep as it will be stored: not all that packs can be unpacked.
        ((checked,),) = unpack(pack([[dict(metadata)]], default=_plain))
    except (TypeError, ValueError, OverflowError, CorruptObjectError) as error:
        raise InvalidArgumentError(
            f"{of} metadata must be made of strings, numbers, lists and maps: {error}"
        ) from error
    if not all(isinstance(name, str) for name in checked):
        raise InvalidArgumentError(f"the names in {of} metadata must be strings")
    return dict(checked)


def _plain(value: object) -> object:
    """Convert numpy numbers to Python's, and points in time to ISO 8601 text."""
    match value:
        case np.bool():
            return bool(value)
        case np.timedelta64():
            pass  # numpy counts it as an integer, and the number is meaningless without its unit
        case np.integer():
            return int(value)
        case np.floating():
            return float(value)
        case np.datetime64():
            return str(value)
    raise TypeError(f"{value!r:.80} is of another type")


def totals_of(tables: Mapping[bytes, Sequence[Rows]], chunk_objects: int) -> dict[str, int]:
    """The counts of its own commit that a snapshot stores, given its chunk tables."""
    each = [rows for parts in tables.values() for rows in parts]
    unset = sum(map(_unset, each))
    return {
        "refs-set": sum(map(len, each)) - unset,
        "refs-unset": unset,
        "chunk-bytes": sum(map(_written_bytes, each)),
        "chunk-objects": chunk_objects,
    }


def _unset(rows: Rows) -> int:
    if isinstance(rows, Spilled):
        return rows.unset
    return int((rows.kind == RefKind.UNSET).sum())


def _written_bytes(rows: Rows) -> int:
    if isinstance(rows, Spilled):
        return rows.written_bytes
    return int(rows.length[rows.kind != RefKind.VIRTUAL].sum())


def kind_of(
    context: ReadContext,
    view: SnapshotView,
    changes: ChangeSet,
    tables: Mapping[bytes, Sequence[Rows]],
) -> CommitKind:
    """The commit's label: deletions first, then whether written chunks are beyond the old grid."""
    each = [(node, rows) for node, parts in tables.items() for rows in parts]
    unset = any(_unset(rows) for _, rows in each)
    # Moving an array's chunks truncates it completely and adds new rows.
    cut = any(any(shape) or node not in tables for node, shape in changes.truncated.items())
    alive = {node.node_id for node in changes.nodes.values() if node is not None}  # or moved
    gone = {view.nodes[path].node_id for path, node in changes.nodes.items() if node is None}
    if unset or cut or gone - alive:
        return CommitKind.DELETE
    if not tables:
        return CommitKind.METADATA
    return (
        CommitKind.APPEND
        if all(_beyond(context, view.by_id.get(node), rows) for node, rows in each)
        else CommitKind.OVERWRITE
    )


def _beyond(context: ReadContext, before: Node | None, rows: Rows) -> bool:
    """Whether all rows could come from an append.

    They could if they are outside the array's previous grid or in its partial edge, or belong to a
    coordinate, which an append rewrites.
    """
    if before is None or before.array is None:
        return before is None
    meta = before.array
    if meta.is_coordinate(before.path):
        return True
    whole = tuple(n // c if c else 0 for n, c in zip(meta.shape, meta.chunk_shape, strict=True))
    if any(map(ge, rows.box.lo, whole)):
        return True
    if all(map(le, rows.box.hi, whole)):
        return False
    coords = rows_of(context.objects, rows).coords()
    return bool((coords >= whole).any(axis=1).all())
