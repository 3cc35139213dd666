"""Appends whose place has moved: where one goes that starts where another came first.

In a *relocation* both sides have grown arrays along a dimension from the same length. The later
append is put behind the other: positions shift, values do not. If the array's chunks line up
(`steps`), chunks only get new coordinates. Otherwise the boundary runs through a chunk (`steps` is
None): values of an array with one axis can be rewritten behind the others', with more axes it is a
conflict. Invariant: all arrays with the dimension, in one group or in nested groups, shift by the
same length, or nothing is relocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from zarr_manifests.errors import Conflict, ConflictKind
from zarr_manifests.format.manifest import Node
from zarr_manifests.keys import lies_below
from zarr_manifests.planning.components import Changes, Component, NodeChange

_APPENDS = frozenset({Component.GROWTH, Component.CHUNKS, Component.ATTRIBUTES})


class Relocation(Struct, frozen=True):
    """How one array's append is relocated.

    Parameters
    ----------
    path : str
        The array's.
    node_id : bytes
        Its id.
    axis : int
        The axis that has grown.
    start, stop : int
        Where this side's append starts and ends, as it saw the array.
    to : int
        Where the append starts now: at the end of the others' append.
    chunk : int
        Length of a chunk along the axis.
    """

    path: str
    node_id: bytes
    axis: int
    start: int
    stop: int
    to: int
    chunk: int

    @property
    def steps(self) -> int | None:
        """The shift in whole chunks; None if the boundary runs through a chunk."""
        whole = self.start % self.chunk == 0 and (self.to - self.start) % self.chunk == 0
        return (self.to - self.start) // self.chunk if whole else None

    @property
    def first(self) -> int:
        """The first chunk along the axis with values of the append."""
        return self.start // self.chunk

    @property
    def length(self) -> int:
        """Length of the axis with both appends."""
        return self.to + self.stop - self.start


def plan_relocation(
    dim: str, base: Mapping[str, Node], mine: Changes, theirs: Changes
) -> tuple[list[Relocation], list[Conflict]]:
    """Return where this side's appends go, array by array, and the conflicts.

    Parameters
    ----------
    dim : str
        Name of the dimension.
    base : mapping of str to Node
        The nodes that both sides started from, by path.
    mine, theirs : Changes
        The changes of both sides.

    Returns
    -------
    tuple
        Relocations and conflicts; both empty if no array was made longer by both sides.
    """
    axes = {n.node_id: axis for n in base.values() if (axis := _axis(n, dim)) is not None}
    both = {
        node_id
        for node_id in mine.nodes.keys() & theirs.nodes.keys() & axes.keys()
        if _grown(mine.nodes[node_id], axes[node_id])
        and _grown(theirs.nodes[node_id], axes[node_id])
    }
    groups = {_group(mine.nodes[node_id].path) for node_id in both}
    conflicts = []
    for side in (mine, theirs):
        for node_id, change in side:
            if not _is_near(_group(change.path), groups):
                continue
            axis = axes.get(node_id)
            if node_id not in both and axis is not None and _grown(change, axis):
                reason = f"only one of two commits appends to it along {dim!r}"
                conflicts.append(Conflict(ConflictKind.APPEND, f"/{change.path}", "growth", reason))
            elif change.before is None and change.after and _axis(change.after, dim) is not None:
                reason = f"it was made beside two appends along {dim!r}"
                conflicts.append(Conflict(ConflictKind.APPEND, f"/{change.path}", "create", reason))
    found = []
    for node_id in sorted(both, key=lambda each: mine.nodes[each].path):
        ours, other, axis = mine.nodes[node_id], theirs.nodes[node_id], axes[node_id]
        if not (_appends(ours, axis) and _appends(other, axis)):
            reason = f"besides an append along {dim!r}, it was changed in another way"
            conflicts.append(Conflict(ConflictKind.APPEND, f"/{ours.path}", "growth", reason))
            continue
        moved = _relocation(ours, other, node_id, axis)
        found.append(moved)
        if moved.steps is None and len(_shape(ours.before)) > 1:
            conflicts.append(_uneven(moved, dim))
    reason = f"arrays that share {dim!r} were made longer by different lengths"
    conflicts += [
        Conflict(ConflictKind.APPEND, f"/{r.path}", "growth", reason) for r in _uneven_spans(found)
    ]
    conflicts.sort(key=lambda conflict: conflict.path)
    return ([], conflicts) if conflicts else (found, [])


def _uneven_spans(found: Sequence[Relocation]) -> list[Relocation]:
    """The relocations that shift differently from one in the same group, or above or below it."""
    spans: dict[str, set[tuple[int, int, int]]] = {}
    for one in found:
        spans.setdefault(_group(one.path), set()).add((one.start, one.stop, one.to))
    near = {group: [other for other in spans if _is_near(group, [other])] for group in spans}
    odd = {group for group in spans if len(set().union(*(spans[o] for o in near[group]))) > 1}
    return [one for one in found if _group(one.path) in odd]


def _uneven(moved: Relocation, dim: str) -> Conflict:
    reason = (
        f"the append would go to {moved.to} along {dim!r}, within a chunk of {moved.chunk}; only "
        "whole chunks are relocated in arrays of more than one axis. Append in multiples of the "
        "chunk, or open a new session and append there"
    )
    return Conflict(ConflictKind.APPEND, f"/{moved.path}", "growth", reason)


def _relocation(ours: NodeChange, other: NodeChange, node_id: bytes, axis: int) -> Relocation:
    before, mine, theirs = (_shape(node)[axis] for node in (ours.before, ours.after, other.after))
    assert ours.before is not None
    chunk = max(ours.before.array_meta.chunk_shape[axis], 1)
    return Relocation(ours.path, node_id, axis, before, mine, theirs, chunk)


def _axis(node: Node, dim: str) -> int | None:
    names = node.array.dimension_names if node.array is not None else None
    return names.index(dim) if names is not None and names.count(dim) == 1 else None


def _shape(node: Node | None) -> tuple[int, ...]:
    return node.array.shape if node is not None and node.array is not None else ()


def _grown(change: NodeChange, axis: int) -> bool:
    return axis in change.documents.grown


def _appends(change: NodeChange, axis: int) -> bool:
    """Whether it only grew along that axis, apart from chunks and attributes."""
    return change.documents.grown == {axis} and _APPENDS.issuperset(change.components)


def _group(path: str) -> str:
    return path.rpartition("/")[0]


def _is_near(group: str, groups: Iterable[str]) -> bool:
    return any(lies_below(group, other) or lies_below(other, group) for other in groups)
