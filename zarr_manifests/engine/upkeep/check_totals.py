"""Comparing a snapshot's counters with its chunk tables.

The base and the read list count chunks and bytes of each node, and the snapshot stores their sums.
A number marked exact must be exact; any other must be an upper bound. Nodes that a commit did not
touch are checked at the snapshot before.
"""

from __future__ import annotations

from collections.abc import Iterator

from zarr_manifests.engine.snapshot.totals import amounts_of
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.format.chunk_table import RefKind
from zarr_manifests.format.nodes import NodeKind
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.keys import absolute
from zarr_manifests.planning.tables.sums import Amount, alive_amounts, sums_of


def wrong_counters(view: SnapshotView, parent: Snapshot | None = None) -> list[str]:
    """Describe what is wrong with the counters of a snapshot; empty if nothing is.

    Parameters
    ----------
    view : SnapshotView
        The snapshot.
    parent : Snapshot, optional
        The snapshot before it, if its counters are checked too.

    Raises
    ------
    ManifestsError
        If a table cannot be read.
    """
    amounts, nodes = amounts_of(view), list(view.nodes.values())
    told = alive_amounts(amounts, nodes)
    touched = _touched(view.snapshot, parent)
    wrong = []
    for node in nodes:
        if node.kind is NodeKind.GROUP or (touched is not None and node.node_id not in touched):
            continue
        table = view.chunks(node.node_id)
        chunks = nbytes = 0
        if table is not None:
            chunks = int((table.kind != RefKind.UNSET).sum())
            nbytes = int(table.length.sum())
        path = absolute(node.path)
        wrong += [f"{path} has {what}" for what in _against(told[node.path], chunks, nbytes)]
    due = sums_of(amounts, nodes)
    return wrong + list(_wrong_sums(view.snapshot, due, paged=view.pages is not None))


def _touched(snapshot: Snapshot, parent: Snapshot | None) -> set[bytes] | None:
    """The nodes whose chunks differ from the snapshot before; None if any node's may."""
    own = snapshot.deltas[-1] if snapshot.deltas else None
    if (
        parent is None
        or own is None
        or own.log.key != snapshot.log.key
        or _read(snapshot)[:-1] != _read(parent)
    ):
        return None
    return {count.node_id for count in own.counts} | {part.node_id for part in own.parts()}


def _read(snapshot: Snapshot) -> list[str]:
    """Keys of the base and of the deltas that the snapshot reads."""
    base = snapshot.base.key if snapshot.base is not None else ""
    return [base, *(entry.log.key for entry in snapshot.deltas)]


def _against(told: Amount, chunks: int, nbytes: int) -> Iterator[str]:
    for what, said, there, exact in (
        ("chunks", told.chunks, chunks, told.chunks_exact),
        ("bytes of chunks", told.nbytes, nbytes, told.nbytes_exact),
    ):
        if said != there if exact else said < there:
            yield f"{there} {what}, and counters say {said}{'' if exact else ' at most'}"


def _wrong_sums(snapshot: Snapshot, due: dict[str, int], *, paged: bool) -> Iterator[str]:
    """Sums that differ from the counters; old snapshots have no sums.

    With a base in pages a commit adds to the sums before, and bounds among these stay bounds.
    """
    for name, number in snapshot.sums.items():
        exact = due.get(name.removesuffix("-at-most"))
        bound = paged and name.endswith("-at-most") and exact is not None and number >= exact
        if due.get(name) != number and not bound:
            due_number = due.get(name, "not known")
            yield f"the sum of {name} is {due_number}, and the snapshot says {number}"
