"""Merging what is pending into leaves of the base, and packing these anew.

Which leaves are due is estimated from the boxes and row counts that the read list names, without
fetching anything: an entry's refs are taken to lie evenly in their box. Refs outside all leaves
count for the leaves in the same cells of the array's layout; where there is no leaf they are due
at once.

What is due, and every other leaf of the same manifests, is folded with what is pending inside its
box, cut into leaves and planned into manifests, in steps, so that no more than about
`STEP_REFS` refs are in memory at a time. Between two steps the base is a whole one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from zarr_manifests.engine.chunks import SessionKeys
from zarr_manifests.engine.context import Context
from zarr_manifests.engine.objects import Upload
from zarr_manifests.engine.view import SnapshotView
from zarr_manifests.format.chunk_table import ChunkTable, RefKind
from zarr_manifests.format.manifest import Manifest, ManifestRef, Part
from zarr_manifests.format.nodes import Node
from zarr_manifests.grid import Box, Coords, IndexArray
from zarr_manifests.planning.closure import Change, Closure, Due, close
from zarr_manifests.planning.compaction import overlap_refs
from zarr_manifests.planning.leaves import ArrayFacts, BaseIndex
from zarr_manifests.planning.merge import Layer, fold, in_box, merge_layers, select, take
from zarr_manifests.planning.sets import plan_manifests
from zarr_manifests.planning.splitting import Cut, layout_of

__all__ = [
    "Facts",
    "Pending",
    "Repacked",
    "chunks_outside",
    "due_changes",
    "due_manifests",
    "pending_of",
    "repack",
    "set_names",
]

STEP_REFS = 4_000_000


class Facts(Mapping[bytes, ArrayFacts]):
    """What is known of the nodes of a snapshot, found out when it is asked for."""

    def __init__(self, nodes: Mapping[bytes, Node], refs: Mapping[bytes, int]) -> None:
        self._nodes, self._refs = nodes, refs
        self._known: dict[bytes, ArrayFacts] = {}

    def __getitem__(self, node_id: bytes) -> ArrayFacts:
        found = self._known.get(node_id)
        if found is None:
            node = self._nodes[node_id]
            meta, path = node.array, node.path if node.path.startswith("/") else f"/{node.path}"
            grid = () if meta is None else meta.grid.hi
            names = None if meta is None else meta.dimension_names
            found = ArrayFacts(node_id, path, grid, self._refs.get(node_id, 0), names)
            self._known[node_id] = found
        return found

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)


@dataclass(slots=True)
class Pending:
    """What live entries hold for one node, by estimate.

    Parameters
    ----------
    leaves : dict of (Coords, Coords) to float
        Pending refs by the corners of the leaf's box.
    new : float
        Pending refs in cells without a leaf.
    outside : bool
        Whether some may lie outside all leaves.
    refs : int
        Pending refs in all.
    """

    leaves: dict[tuple[Coords, Coords], float] = field(default_factory=dict)
    new: float = 0.0
    outside: bool = False
    refs: int = 0

    def of(self, leaf: Part) -> float:
        """Pending refs of a leaf."""
        return self.leaves.get((leaf.box.lo, leaf.box.hi), 0.0)

    def add(self, part: Part, weight: float) -> None:
        """Count refs for a leaf."""
        corners = part.box.lo, part.box.hi
        self.leaves[corners] = self.leaves.get(corners, 0.0) + weight


def pending_of(
    context: Context, view: SnapshotView, base: BaseIndex, facts: Facts
) -> dict[bytes, Pending]:
    """What is pending, by node."""
    found: dict[bytes, Pending] = {}
    for position, entry in enumerate(view.snapshot.deltas):
        for part in entry.parts():
            if part.node_id in facts:  # else the node is gone
                pending = found.setdefault(part.node_id, Pending())
                _count_part(context, base, facts, pending, part, entry.last)
        for node_id, cut in view.truncations(position).items():
            if node_id in facts:
                pending = found.setdefault(node_id, Pending())
                _count_cut(base, pending, node_id, cut, entry.last)
    return found


def _count_part(
    context: Context, base: BaseIndex, facts: Facts, pending: Pending, part: Part, last: int
) -> None:
    pending.refs += part.count
    lo, hi = np.asarray(part.box.lo, np.int64), np.asarray(part.box.hi, np.int64)
    covered = 0
    for leaf, number in base.overlapping(part.node_id, lo, hi):
        shared = part.box.shared_size(leaf.box)
        covered += shared
        if last > base.manifest(number).merged_to(leaf):
            pending.add(leaf, overlap_refs(part.count, part.box.size, shared))
    if covered >= part.box.size:
        return
    pending.outside = True
    rest = overlap_refs(part.count, part.box.size, part.box.size - covered)
    layout = layout_of(context.config.chunk_manifests, facts[part.node_id])
    near = base.overlapping(part.node_id, *layout.around(part.box.lo, part.box.hi))
    held = sum(leaf.count for leaf, _ in near)
    if not held:
        pending.new += rest
    for leaf, _ in near:
        pending.add(leaf, rest * leaf.count / held if held else rest)


def _count_cut(base: BaseIndex, pending: Pending, node_id: bytes, cut: Coords, last: int) -> None:
    for leaf, key in base.leaves(node_id):
        if last > base[key].merged_to(leaf):
            kept = leaf.box.shared_size(Box((0,) * len(cut), cut))
            if kept < leaf.box.size:
                pending.add(leaf, leaf.count * (1 - kept / leaf.box.size))


def due_manifests(base: BaseIndex, pending: Mapping[bytes, Pending], ratio: float) -> set[str]:
    """Keys of the manifests for which so much is pending that they are to be written again.

    What counts is the manifest, since all its leaves are written with one of them.
    """
    sums: dict[str, float] = {}
    for node_id, mine in pending.items():
        for leaf, key in base.leaves(node_id):
            sums[key] = sums.get(key, 0.0) + mine.of(leaf)
    return {
        key
        for key, refs in sums.items()
        if refs and refs >= ratio * sum(part.count for part in base[key].parts)
    }


def due_changes(
    context: Context,
    view: SnapshotView,
    base: BaseIndex,
    facts: Facts,
    pending: Mapping[bytes, Pending],
    ratio: float,
    *,
    everything: bool,
) -> tuple[dict[bytes, Change], set[bytes]]:
    """Coordinates, by node, of what is to be merged; and the nodes whose entries that takes.

    One in each leaf that is due, and of the chunks outside all leaves those that belong to these
    or to none.
    """
    config = context.config.chunk_manifests
    keys = {ref.blob.key for ref in base} if everything else due_manifests(base, pending, ratio)
    changes, read = {}, set()
    wanted = facts if everything else pending
    for node_id in wanted:
        mine = pending.get(node_id, Pending())
        due = {
            leaf.box
            for leaf, key in base.leaves(node_id)
            if key in keys and (everything or mine.of(leaf))
        }
        corners = [box.lo for box in due]
        ndim = len(facts[node_id].grid_shape)
        coords = [np.array(corners, np.int64).reshape(len(corners), ndim)]
        if mine.outside and (due or mine.new or everything):
            read.add(node_id)
            outside = chunks_outside(view, base, node_id)
            layout = layout_of(config, facts[node_id])
            for rows in layout.groups(outside):
                one = tuple(outside[rows[0]].tolist())
                near = base.overlapping(node_id, *layout.around(one, one))
                if not near or any(leaf.box in due for leaf, _ in near):
                    coords.append(outside[rows])
        together = np.concatenate(coords)
        if len(together):
            changes[node_id] = Change(together)
    return changes, read | changes.keys()


def chunks_outside(view: SnapshotView, base: BaseIndex, node_id: bytes) -> IndexArray:
    """Coordinates of the node's pending chunks that no leaf's box holds, in C order."""
    table = view.overlay(node_id).table
    if table is None:
        return np.empty((0, 0), np.int64)
    coords: IndexArray = table.coords()[table.kind != RefKind.UNSET]
    return coords[base.locate(node_id, coords) < 0]


@dataclass(slots=True)
class Repacked:
    """The base's directory as it has become, and what was done for that.

    Parameters
    ----------
    manifests : tuple of ManifestRef
        The directory.
    uploads : dict of str to bytes
        Manifests of it that were written here and are small, by key.
    refs : int
        Refs written.
    bytes_written, manifests_written, manifests_replaced : int
        What that cost.
    """

    manifests: tuple[ManifestRef, ...]
    uploads: dict[str, bytes] = field(default_factory=dict)
    refs: int = 0
    bytes_written: int = 0
    manifests_written: int = 0
    manifests_replaced: int = 0


_KEPT_BYTES = 256 * 1024


def set_names(manifests: Sequence[ManifestRef]) -> dict[str, str]:
    """The manifest set of each manifest, by key."""
    return {ref.blob.key: ref.packed_for for ref in manifests if ref.packed_for}


def repack(
    context: Context,
    view: SnapshotView,
    base: BaseIndex,
    facts: Facts,
    changes: Mapping[bytes, Change],
    keys: SessionKeys,
    ratio: float,
    *,
    everything: bool,
) -> Repacked:
    """Write the leaves that hold the changed chunks anew, with all that is pending in them."""
    config = context.config.chunk_manifests
    gone = {part.node_id for ref in base for part in ref.parts if part.node_id not in facts}
    deleted = gone if everything else _mostly_dead(base, gone, ratio)
    closure = close(config, facts, base, changes, deleted, reopen=True)
    result = Repacked(tuple(base))
    for step in _steps(closure, base, whole_arrays=everything):
        index = BaseIndex(result.manifests, set_names(result.manifests))
        tables: dict[tuple[bytes, Coords, Coords], ChunkTable] = {}
        parts: list[Part] = []
        for due in step.dues(index):
            if due.node_id not in facts:
                continue
            merged = _merged(context, view, index, due, changes.get(due.node_id))
            if merged is None:
                continue
            merged, cuts = _cut(view, index, due, merged)
            for cut in cuts:
                part = Part(due.node_id, cut.box, len(cut.rows))
                tables[part.node_id, part.box.lo, part.box.hi] = take(merged, cut.rows, cut.box)
                parts.append(part)
        plan = plan_manifests(config, facts, parts, index, step.manifests)
        written: list[ManifestRef] = []
        uploads: list[Upload] = []
        for planned in plan.manifests:
            packed = Manifest.of(
                [(p.node_id, tables[p.node_id, p.box.lo, p.box.hi]) for p in planned.leaves]
            )
            upload = Upload(keys.next("manifests"), packed.encode())
            uploads.append(upload)
            merged_to = (view.snapshot.sequence,) * len(planned.leaves)
            written.append(ManifestRef(upload.ref, packed.directory(), merged_to, planned.set_name))
            result.refs += planned.refs
        context.runtime.parallel([partial(context.objects.create, u.key, u.data) for u in uploads])
        result.uploads |= {u.key: u.data for u in uploads if len(u.data) <= _KEPT_BYTES}
        result.bytes_written += sum(len(u.data) for u in uploads)
        result.manifests_written += len(uploads)
        result.manifests_replaced += len(step.manifests)
        kept = [ref for ref in result.manifests if ref.blob.key not in set(step.manifests)]
        result.manifests = (*kept, *written)
    return result


def _mostly_dead(base: BaseIndex, gone: set[bytes], ratio: float) -> set[bytes]:
    """Deleted nodes that take up enough of a manifest for it to be written again."""
    found: set[bytes] = set()
    for ref in base:
        dead = [part for part in ref.parts if part.node_id in gone]
        if dead and sum(p.count for p in dead) >= ratio * sum(p.count for p in ref.parts):
            found |= {part.node_id for part in dead}
    return found


def _steps(closure: Closure, base: BaseIndex, *, whole_arrays: bool) -> Iterator[Closure]:
    """The closure in parts of at most about `STEP_REFS`.

    To lay an array out anew all its leaves have to be there at once.
    """
    rest = closure.with_whole_arrays(base) if whole_arrays else closure
    while rest:
        step, rest = rest.step(STEP_REFS)
        yield step


def _merged(
    context: Context, view: SnapshotView, base: BaseIndex, due: Due, change: Change | None
) -> ChunkTable | None:
    """The due leaves of a node with all that is pending in their boxes, and the new chunks."""
    context.objects.prefetch(
        [(base[key].blob, Manifest) for key in dict.fromkeys(key for _, key in due.leaves)]
    )
    tables = []
    for part, key in due.leaves:
        loaded = context.objects.load(base[key].blob, Manifest)
        table = next(t for t in loaded.tables(due.node_id) if t.box == part.box)
        overlay = view.overlay(due.node_id, base[key].merged_to(part))
        pending = overlay.table
        if pending is not None:
            pending = select(pending, in_box(pending, part.box))
        folded = fold([table], type(overlay)(overlay.truncated, pending))
        if folded is not None:
            tables.append(folded)
    if change is not None and len(due.rows):
        coords = change.coords[due.rows]
        new = coords[base.locate(due.node_id, coords) < 0]
        pending = view.overlay(due.node_id).table
        if len(new) and pending is not None:
            tables.append(select(pending, _among(pending, new)))
    if not tables:
        return None
    return merge_layers([Layer(None, tuple(tables))]).table


def _cut(
    view: SnapshotView, base: BaseIndex, due: Due, merged: ChunkTable
) -> tuple[ChunkTable, list[Cut]]:
    """Cut into leaves, with every pending chunk that comes to lie in the box of one.

    In there a reader takes the leaf's word for all that is older.
    """
    pending = view.overlay(due.node_id).table
    outside = chunks_outside(view, base, due.node_id)
    left = outside[~_are_in(outside, merged)]
    while True:
        cuts = due.cut(merged.coords(), base)
        if pending is None or not len(left):
            return merged, cuts
        within = np.zeros(len(left), np.bool_)
        for one in cuts:
            within |= ((left >= one.box.lo) & (left < one.box.hi)).all(axis=1)
        if not within.any():
            return merged, cuts
        more = select(pending, _among(pending, left[within]))
        table = merge_layers([Layer(None, (merged, more))]).table
        assert table is not None
        merged, left = table, left[~within]


def _are_in(coords: IndexArray, table: ChunkTable) -> npt.NDArray[np.bool_]:
    """Which of the coordinates (of as many axes) the table has."""
    if not len(coords):
        return np.zeros(0, np.bool_)
    box = Box.around((table.box, Box.around_coords(coords)))
    return np.isin(box.ravel(coords), box.ravel(table.coords()))


def _among(table: ChunkTable, coords: IndexArray) -> npt.NDArray[np.bool_]:
    """Which rows of the table are at one of these coordinates, all of which it has."""
    wanted = table.box.ravel(coords)
    return np.isin(table.linear_index(), wanted)
