"""Where the refs of a snapshot lie and why: read off the base's directory, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zarr_manifests.config import RepositoryConfig
from zarr_manifests.engine.compact.merge_leaves import set_names
from zarr_manifests.engine.snapshot.context import Context
from zarr_manifests.engine.snapshot.totals import ref_counts
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.format.manifest import ManifestRef
from zarr_manifests.format.nodes import NodeKind
from zarr_manifests.grid import Coords
from zarr_manifests.planning.layout.leaves import BaseIndex, NodeFacts
from zarr_manifests.planning.layout.sets import Overflow, explain

__all__ = [
    "ArrayPlace",
    "LeafPlace",
    "ManifestLayout",
    "ManifestPlace",
    "ReadCost",
    "ReadCosts",
    "layout_now",
]


@dataclass(frozen=True, slots=True)
class ManifestPlace:
    """A manifest of the base.

    Parameters
    ----------
    key : str or None
        Its key in the storage; None if it is only planned.
    set_name : str
        The manifest set it was packed for.
    refs : int
        Chunk refs in it.
    nbytes : int
        Its bytes.
    arrays : int
        How many arrays have refs in it.
    """

    key: str | None
    set_name: str
    refs: int
    nbytes: int
    arrays: int


@dataclass(frozen=True, slots=True)
class LeafPlace:
    """A leaf: the box [lo, hi) of an array's chunks, its refs, and its manifest's position."""

    lo: Coords
    hi: Coords
    refs: int
    manifest: int


@dataclass(frozen=True, slots=True)
class ArrayPlace:
    """Where the refs of an array are, and why there.

    Parameters
    ----------
    path : str
        Its absolute path.
    rule : int or None
        Position of the rule that matched; None if none did.
    wanted : str
        The manifest set that says.
    overflows : tuple of Overflow
        The sets that did not take it, each with `set_name` and `why`.
    leaves : tuple of LeafPlace
        Where its refs are.
    pending_refs : int
        Refs that commits since have set or unset, and that are in no leaf yet.
    is_coordinate : bool
        Whether it is a 1-d array named as its own dimension.
    """

    path: str
    rule: int | None
    wanted: str
    overflows: tuple[Overflow, ...]
    leaves: tuple[LeafPlace, ...]
    pending_refs: int
    is_coordinate: bool

    @property
    def refs(self) -> int:
        """Refs in all its leaves."""
        return sum(leaf.refs for leaf in self.leaves)

    @property
    def manifests(self) -> tuple[int, ...]:
        """Positions of the manifests with leaves of it, each once."""
        return tuple(sorted({leaf.manifest for leaf in self.leaves}))


@dataclass(frozen=True, slots=True)
class ReadCost:
    """Requests to the storage, and the bytes they bring."""

    requests: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ReadCosts:
    """What a process that has read nothing yet fetches of the metadata; chunks are not counted.

    Parameters
    ----------
    opening : ReadCost
        To open the repository and the snapshot: its groups, arrays and attributes are there then.
    coordinates : ReadCost
        What is fetched after that to find all chunks of all coordinates.
    last_step : ReadCost
        What is fetched after that to find the last chunks along the first axis of all other
        arrays, which is where one more step is appended.
    """

    opening: ReadCost
    coordinates: ReadCost
    last_step: ReadCost


@dataclass(frozen=True, slots=True)
class ManifestLayout:
    """Which manifests there are, and in which of them the refs of each array are.

    Parameters
    ----------
    snapshot_id : str
        The snapshot.
    manifests : tuple of ManifestPlace
        The base's.
    arrays : tuple of ArrayPlace
        By path; opaque keys that are stored as chunks are among them.
    costs : ReadCosts or None
        What is fetched to read it; of what is planned only, see `Repository.read_costs`.
    """

    snapshot_id: str
    manifests: tuple[ManifestPlace, ...]
    arrays: tuple[ArrayPlace, ...]
    costs: ReadCosts | None = None


def layout_now(context: Context, view: SnapshotView) -> ManifestLayout:
    """Where the refs of a snapshot are."""
    return _layout(context.config, view, view.manifests, _pending_rows(view))


def _pending_rows(view: SnapshotView) -> dict[bytes, int]:
    rows: dict[bytes, int] = {}
    for entry in view.snapshot.deltas:
        for part in entry.parts():
            rows[part.node_id] = rows.get(part.node_id, 0) + part.count
    return rows


def _facts(view: SnapshotView, base: BaseIndex, pending: dict[bytes, int]) -> NodeFacts:
    nodes = {node.node_id: node for node in view.nodes.values() if node.kind != NodeKind.GROUP}
    return NodeFacts(nodes, ref_counts(view, base, pending)[0])


def _layout(
    config: RepositoryConfig,
    view: SnapshotView,
    manifests: Sequence[ManifestRef],
    pending: dict[bytes, int],
) -> ManifestLayout:
    index = BaseIndex(manifests, set_names(manifests))
    facts = _facts(view, index, pending)
    shown = [
        ManifestPlace(
            ref.blob.key,
            ref.packed_for,
            sum(part.count for part in ref.parts),
            ref.blob.length,
            len({part.node_id for part in ref.parts}),
        )
        for ref in manifests
    ]
    arrays = []
    for one in explain(config.chunk_manifests, facts.values(), index):
        leaves = tuple(
            LeafPlace(part.box.lo, part.box.hi, part.count, index.number(key))
            for part, key in index.leaves(one.node_id)
        )
        rows = pending.get(one.node_id, 0)
        is_coordinate = facts[one.node_id].is_coordinate
        arrays.append(
            ArrayPlace(one.path, one.rule, one.wanted, one.overflows, leaves, rows, is_coordinate)
        )
    return ManifestLayout(view.snapshot_id, tuple(shown), tuple(arrays))
