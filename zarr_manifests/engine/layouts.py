"""Where the refs of a snapshot lie and why, and where another configuration would put them.

What is, is read off the base's directory alone. What would be is found by doing it: the same
packing as a full compaction runs, with objects that are kept in memory and never written. So it
reads all manifests of the snapshot, and is exact, bytes included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zarr_manifests.config import RepositoryConfig
from zarr_manifests.engine.chunks import SessionKeys
from zarr_manifests.engine.compact import with_coordinate_copies
from zarr_manifests.engine.context import Context
from zarr_manifests.engine.objects import Objects
from zarr_manifests.engine.pending import Heap
from zarr_manifests.engine.repack import Facts, due_changes, pending_of, repack, set_names
from zarr_manifests.engine.view import SnapshotView
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.manifest import ManifestRef
from zarr_manifests.format.nodes import Base, NodeKind
from zarr_manifests.grid import Coords
from zarr_manifests.planning.leaves import BaseIndex
from zarr_manifests.planning.sets import Overflow, explain

__all__ = [
    "ArrayPlace",
    "LeafPlace",
    "ManifestLayout",
    "ManifestPlace",
    "layout_now",
    "layout_under",
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
    base_bytes : int
        Bytes of the base, which is read at opening, with what it carries for the coordinates.
    """

    snapshot_id: str
    manifests: tuple[ManifestPlace, ...]
    arrays: tuple[ArrayPlace, ...]
    base_bytes: int

    def for_coordinates(self) -> tuple[ManifestPlace, ...]:
        """The manifests that reading all coordinates needs."""
        return self._at({i for one in self.arrays if one.is_coordinate for i in one.manifests})

    def for_last_step(self) -> tuple[ManifestPlace, ...]:
        """The manifests that reading the last chunks along the first axis of all data needs."""
        found = set()
        for one in self.arrays:
            if one.leaves and not one.is_coordinate:
                end = max(leaf.hi[:1] for leaf in one.leaves)
                found |= {leaf.manifest for leaf in one.leaves if leaf.hi[:1] == end}
        return self._at(found)

    def _at(self, positions: set[int]) -> tuple[ManifestPlace, ...]:
        return tuple(self.manifests[i] for i in sorted(positions))


def layout_now(context: Context, view: SnapshotView) -> ManifestLayout:
    """Where the refs of a snapshot are."""
    base = view.snapshot.base
    nbytes = 0 if base is None else base.length
    return _layout(context.config, view, view.manifests, _pending_rows(view), nbytes)


def layout_under(context: Context, view: SnapshotView, config: RepositoryConfig) -> ManifestLayout:
    """Where a full compaction under that configuration would put them; nothing is written."""
    scratch = replace(context, objects=_Scratch(context.objects, context), config=config)
    base = BaseIndex(view.manifests, set_names(view.manifests))
    facts = _facts(view, base, _pending_rows(view))
    pending = pending_of(scratch, view, base, facts)
    outside = {node_id for node_id, mine in pending.items() if mine.outside}
    heap = Heap(view, base, outside, context.meter)
    changes, _ = due_changes(scratch, heap, base, facts, pending, 0.0, everything=True)
    keys = SessionKeys(0, context.runtime)
    done = repack(scratch, heap, base, facts, changes, keys, 0.0, everything=True)
    base_now = Base(
        tuple(view.nodes[path] for path in sorted(view.nodes)),
        with_coordinate_copies(view, done.manifests, done.uploads),
        view.snapshot.sequence,
    )
    made = _layout(config, view, done.manifests, {}, len(base_now.encode()))
    planned = tuple(replace(manifest, key=None) for manifest in made.manifests)
    return replace(made, manifests=planned)


class _Scratch(Objects):
    """Reads what there is, and keeps what is written to itself."""

    def __init__(self, real: Objects, context: Context) -> None:
        super().__init__(real.storage, context.runtime)
        self._made: dict[str, bytes] = {}

    def create(self, key: str, data: bytes) -> None:
        self._made[key] = data

    def _bytes(self, ref: BlobRef) -> bytes:
        made = self._made.get(ref.key)
        return super()._bytes(ref) if made is None else made


def _pending_rows(view: SnapshotView) -> dict[bytes, int]:
    rows: dict[bytes, int] = {}
    for entry in view.snapshot.deltas:
        for part in entry.parts():
            rows[part.node_id] = rows.get(part.node_id, 0) + part.count
    return rows


def _facts(view: SnapshotView, base: BaseIndex, pending: dict[bytes, int]) -> Facts:
    nodes = {node.node_id: node for node in view.nodes.values() if node.kind != NodeKind.GROUP}
    refs = {node_id: base.refs(node_id) + pending.get(node_id, 0) for node_id in nodes}
    return Facts(nodes, refs)


def _layout(
    config: RepositoryConfig,
    view: SnapshotView,
    manifests: Sequence[ManifestRef],
    pending: dict[bytes, int],
    base_bytes: int,
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
    return ManifestLayout(view.snapshot_id, tuple(shown), tuple(arrays), base_bytes)
