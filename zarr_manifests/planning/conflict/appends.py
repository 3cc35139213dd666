"""Appends: what to do with each row, and where one goes that starts where another came first.

Labels are the values of the index coordinate along the appended dimension. A write is decided here
from the existing and the given labels alone, so that it can be decided again whenever the existing
ones have changed.

In a *relocation* both sides have grown arrays along a dimension from the same length. The later
append is put behind the other: positions shift, values do not. If the array's chunks line up
(`steps`), chunks only get new coordinates. Otherwise the boundary runs through a chunk (`steps` is
None): values of an array with one axis can be rewritten behind the others', with more axes it is a
conflict. Invariant: all arrays with the dimension, in one group or in nested groups, shift by the
same length, or nothing is relocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from zarr_manifests.errors import AlreadyExistsError, Conflict, ConflictKind, InvalidArgumentError
from zarr_manifests.format.nodes import Node
from zarr_manifests.grid import IndexArray
from zarr_manifests.planning.conflict.components import Changes, Component, NodeChange

type OnExisting = Literal["error", "skip", "replace"]
"""What to do with labels that exist already."""

_LISTED: Final = 5


class Run(Struct, frozen=True):
    """Adjacent rows that replace existing ones.

    Parameters
    ----------
    rows : tuple of int
        Rows of the dataset.
    start : int
        Position of the first of them.
    """

    rows: tuple[int, ...]
    start: int


class AppendPlan(Struct, frozen=True):
    """What to do with each row of a dataset; rows in neither field are left out.

    Parameters
    ----------
    start : int
        The number of existing labels, which is where the first row is appended.
    appended : tuple of int
        Rows to append, in this order.
    replaced : tuple of Run
        Rows that are written over the ones with the same labels.
    """

    start: int
    appended: tuple[int, ...]
    replaced: tuple[Run, ...] = ()


def plan_append(
    dim: str,
    there: npt.NDArray[Any],
    given: npt.NDArray[Any],
    on_existing: OnExisting,
    *,
    keep_order: bool = False,
) -> AppendPlan:
    """Return what to do with the rows that have the labels `given`.

    Parameters
    ----------
    dim : str
        Name of the dimension, for messages.
    there, given : ndarray
        Labels of the existing rows, and of the given ones, of one comparable type.
    on_existing : {"error", "skip", "replace"}
        What to do with rows whose labels exist already.
    keep_order : bool
        Whether rows may be appended that leave the labels unsorted.

    Raises
    ------
    AlreadyExistsError
        If labels exist already, and `on_existing` is "error".
    InvalidArgumentError
        If a label is given twice, a label to replace exists twice, the labels would become
        unsorted, or they cannot be compared.
    """
    old, new = _codes(dim, there, given)
    _check_single(dim, given, new)
    known = np.isin(new, old)
    if known.any() and on_existing == "error":
        raise AlreadyExistsError(
            f"{_listed(given[known])} of {dim!r} {_are(known)} there already; nothing was written. "
            "Pass on_existing='skip' to append only new labels, or on_existing='replace' to "
            "overwrite existing ones"
        )
    appended = np.flatnonzero(~known)
    if not keep_order:
        _check_sorted(dim, np.concatenate((there, given[appended])), old, new[appended])
    replaced = _runs(dim, given, old, new, known) if on_existing == "replace" else ()
    return AppendPlan(len(there), tuple(appended.tolist()), replaced)


def _codes(
    dim: str, there: npt.NDArray[Any], given: npt.NDArray[Any]
) -> tuple[IndexArray, IndexArray]:
    """Number the labels in their order; missing ones are equal, and last."""
    both = np.concatenate((there, given))
    try:
        codes = np.unique(both, return_inverse=True)[1].astype(np.int64)
    except TypeError as error:
        raise InvalidArgumentError(
            f"the labels of {dim!r} cannot be compared ({error}), so it is not known which exist "
            "already"
        ) from None
    return codes[: len(there)], codes[len(there) :]


def _check_single(dim: str, given: npt.NDArray[Any], new: IndexArray) -> None:
    _, first, counts = np.unique(new, return_index=True, return_counts=True)
    again = first[counts > 1]
    if again.size:
        raise InvalidArgumentError(
            f"{_listed(given[np.sort(again)])} of {dim!r} {_are(again)} in the dataset more than "
            f"once; nothing was written. Drop duplicates, such as by ds.drop_duplicates({dim!r})"
        )


def _check_sorted(
    dim: str, labels: npt.NDArray[Any], old: IndexArray, appended: IndexArray
) -> None:
    """Refuse an append that would leave the labels unsorted.

    Labels ascend or descend as the existing ones do, else as the appended ones do. If neither has
    a direction, they have to ascend.
    """
    if not appended.size:
        return
    directions = [int(np.sign(c[-1] - c[0])) for c in (old, appended) if c.size]
    direction = next((d for d in directions if d), 1)
    steps = np.diff(np.concatenate((old, appended))) * direction
    wrong = np.flatnonzero(steps < 0)
    if not wrong.size:
        return
    at = int(wrong[0]) + 1
    pair = f"{label_text(labels[at])} after {label_text(labels[at - 1])}"
    if at < len(old):
        what = f"{dim!r} is not sorted already ({pair})"
    elif at > len(old):
        what = f"the dataset is not sorted along {dim!r} ({pair}): sort it by ds.sortby({dim!r})"
    else:
        what = f"{dim!r} would not be sorted any more: {pair}"
    raise InvalidArgumentError(
        f"{what}. Nothing was written; pass sort='keep' to append in the given order all the same"
    )


def _runs(
    dim: str,
    given: npt.NDArray[Any],
    old: IndexArray,
    new: IndexArray,
    known: npt.NDArray[np.bool_],
) -> tuple[Run, ...]:
    """The places of rows whose labels exist already, in order of the existing rows."""
    rows = np.flatnonzero(known)
    if not rows.size:
        return ()
    order = np.argsort(old, kind="stable")
    ranked = old[order]
    first = np.searchsorted(ranked, new[rows], "left")
    several = np.searchsorted(ranked, new[rows], "right") - first > 1
    if several.any():
        raise InvalidArgumentError(
            f"{_listed(given[rows[several]])} of {dim!r} {_are(several)} there more than once, so "
            "it is not clear which to replace; nothing was written. Write with region="
        )
    at = order[first]
    rows, at = rows[np.argsort(at)], np.sort(at)
    cuts = np.flatnonzero(np.diff(at) != 1) + 1
    return tuple(
        Run(tuple(part.tolist()), int(start[0]))
        for part, start in zip(np.split(rows, cuts), np.split(at, cuts), strict=True)
    )


def _listed(labels: npt.NDArray[Any]) -> str:
    more = f" and {len(labels) - _LISTED} more" if len(labels) > _LISTED else ""
    return ", ".join(map(label_text, labels[:_LISTED])) + more


def label_text(label: Any) -> str:
    """A label as errors show it."""
    is_time = isinstance(label, np.datetime64)
    return str(np.datetime_as_string(label, unit="auto")) if is_time else str(label)


def _are(which: npt.NDArray[Any]) -> str:
    n = int(np.count_nonzero(which)) if which.dtype == bool else which.size
    return "is" if n == 1 else "are"


# --- relocation --------------------------------------------------------------------------------

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
    assert ours.before.array is not None
    chunk = max(ours.before.array.chunk_shape[axis], 1)
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


def _lies_in(path: str, group: str) -> bool:
    return not group or path == group or path.startswith(group + "/")


def _is_near(group: str, groups: Iterable[str]) -> bool:
    return any(_lies_in(group, other) or _lies_in(other, group) for other in groups)
