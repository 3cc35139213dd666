"""What has to be on the branch's tip for a write to land there, and what is there already.

An append is planned from the index coordinate in a session (`planning.conflict.append_labels`).
`Append.plan` reads it, and `Append.tip_check` plans again on the tip that a commit is about to land
on. If the plan differs, the commit is a conflict, and `write` starts over there. `SameLabels` is
for writes from rows, which look up positions in the coordinates of one snapshot. Reads made to
compare do not count as reads of the session.

Invariant: labels are compared as they would be read back. Given labels are encoded like the
existing array and decoded together with its labels, so that a label that was rounded when it was
stored is found again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import xarray as xr

from zarr_manifests.engine.edit.change_set import ChangeSet, same_bytes
from zarr_manifests.engine.edit.overlay import SessionView
from zarr_manifests.engine.edit.workspace import TipCheck, Workspace
from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import (
    AlreadyExistsError,
    Conflict,
    ConflictError,
    ConflictKind,
    InvalidArgumentError,
)
from zarr_manifests.format.chunk_table import StoredRef, Unset
from zarr_manifests.format.nodes import Node
from zarr_manifests.grid import Coords
from zarr_manifests.keys import join, split
from zarr_manifests.planning.conflict.append_labels import (
    AppendPlan,
    OnExisting,
    plan_append,
)
from zarr_manifests.xarray.stored_group import StoredGroup

__all__ = ["Append", "SameLabels", "changes_nothing", "drop_unchanged"]

_CHANGED: Final = "the labels that are there have changed"


@dataclass(frozen=True)
class Append:
    """An append along a dimension that has an index coordinate.

    Parameters
    ----------
    dim : str
        The dimension.
    group : str
        Path of the group.
    labels : Variable
        The coordinate as given.
    on_existing : {"error", "skip", "replace"}
        What to do with labels that exist already.
    sort : {"keep"} or None
        Whether rows may be appended that leave the labels unsorted.
    """

    dim: str
    group: str
    labels: xr.Variable
    on_existing: OnExisting
    sort: Literal["keep"] | None

    @classmethod
    def of(
        cls,
        ds: xr.Dataset,
        dim: Hashable,
        group: str,
        on_existing: OnExisting,
        sort: Literal["keep"] | None,
    ) -> Append | None:
        """Return the append of a dataset; None if it has no index coordinate to compare.

        Raises
        ------
        InvalidArgumentError
            If there is no index coordinate and `on_existing` needs one.
        """
        labels = ds.variables.get(dim)
        if labels is not None and labels.dims == (dim,):
            given = labels.copy(deep=False).load()  # without loading the caller's dataset
            return cls(str(dim), group, given, on_existing, sort)
        if on_existing != "error":
            raise InvalidArgumentError(
                f"on_existing={on_existing!r} compares the labels of {dim!r} with the existing "
                f"ones, and the dataset for group '/{group}' has no coordinate of that name; add "
                f"one, such as by ds.assign_coords({dim}=...), or leave out on_existing"
            )
        return None

    def plan(self, group: StoredGroup) -> AppendPlan:
        """Plan what to do with each row on this group.

        Raises
        ------
        AlreadyExistsError, InvalidArgumentError
            Like `plan_append`.
        """
        labels, keep = group.labels(self.dim, self.labels), self.sort == "keep"
        return plan_append(self.dim, *labels, self.on_existing, keep_order=keep)

    def tip_check(self, contents: SessionView, planned: AppendPlan, *, relocate: bool) -> TipCheck:
        """What refuses a tip on which a plan would differ that was made on these contents.

        If the session itself has changed the labels before, every change of others is refused.
        With `relocate`, rows may be put behind those that others append in the meantime.
        """
        path, changes = join(self.group, self.dim), contents.changes
        stored = contents.view.nodes.get(path)
        touched = stored is not None and stored.node_id in changes.touched()
        if touched or path in changes.nodes:
            before = self._labels(contents.context, contents.view)
            return partial(self._check_same, contents.context, before)
        return partial(self._check_plan, contents.context, planned, relocate)

    def _check_same(self, context: ReadContext, before: npt.NDArray[Any], on: SnapshotView) -> None:
        if not np.array_equal(self._labels(context, on), before):
            raise self._conflict(ConflictKind.READ, "read", _CHANGED)

    def _check_plan(
        self, context: ReadContext, planned: AppendPlan, relocate: bool, on: SnapshotView
    ) -> None:
        try:
            now = self.plan(StoredGroup(SessionView(context, on), self.group))
        except (AlreadyExistsError, InvalidArgumentError) as error:
            reason = f"with the labels that are there now, {error}"
            raise self._conflict(ConflictKind.READ, "read", reason) from None
        if (now.appended, now.replaced) != (planned.appended, planned.replaced):
            raise self._conflict(ConflictKind.READ, "read", _CHANGED)
        if now.start != planned.start and planned.appended and not relocate:
            reason = f"both commits append along {self.dim!r}"
            raise self._conflict(ConflictKind.APPEND, "growth", reason)

    def _labels(self, context: ReadContext, view: SnapshotView) -> npt.NDArray[Any]:
        return StoredGroup(SessionView(context, view), self.group).labels(self.dim, self.labels)[0]

    def _conflict(self, kind: ConflictKind, component: str, reason: str) -> ConflictError:
        return ConflictError(
            f"other commits came first and changed arrays along {self.dim!r}; nothing was "
            "committed. Write again, on top of the newest snapshot",
            [Conflict(kind, f"/{join(self.group, self.dim)}", component, reason)],
        )

    def goes_on(self, before: AppendPlan, now: AppendPlan) -> bool:
        """Whether to write again with a new plan after a conflict.

        Skipped and replaced rows keep their places whatever came first; other rows are appended
        behind what others have appended.
        """
        return self.on_existing != "error" or before.start != now.start

    def parts(
        self, ds: xr.Dataset, planned: AppendPlan
    ) -> Iterator[tuple[xr.Dataset, Mapping[str, slice] | None, Mapping[Hashable, Sequence[int]]]]:
        """Yield the parts to write, their regions, and by dimension which rows they are.

        A region of None is the end of the array.
        """
        fixed = [name for name, v in ds.variables.items() if self.dim not in v.dims]
        values = ds.drop_vars([*fixed, self.dim])
        for run in planned.replaced if values.variables else ():
            place = {self.dim: slice(run.start, run.start + len(run.rows))}
            yield self._rows(values, run.rows), place, {self.dim: run.rows}
        if planned.appended or planned.replaced or not ds.sizes[self.dim]:
            yield self._rows(ds, planned.appended), None, {self.dim: planned.appended}

    def _rows(self, ds: xr.Dataset, rows: Sequence[int]) -> xr.Dataset:
        first = rows[0] if rows else 0
        in_a_row = [*rows] == [*range(first, first + len(rows))]
        if in_a_row and len(rows) == ds.sizes[self.dim] and self.on_existing == "error":
            return ds
        part = ds.isel({self.dim: slice(first, first + len(rows)) if in_a_row else [*rows]})
        for variable in part.variables.values():
            if not rows and variable.chunks is not None and self.dim in variable.dims:
                variable.data = np.empty(variable.shape, variable.dtype)  # else a block is computed
        return part


class SameLabels:
    """The stored coordinates of a snapshot, to compare with those of a tip.

    Parameters
    ----------
    context : ReadContext
        What reads the repository.
    view : SnapshotView
        The snapshot.
    paths : sequence of str
        Paths of the coordinates; those that are not there are left out.
    """

    def __init__(self, context: ReadContext, view: SnapshotView, paths: Sequence[str]) -> None:
        self._context = context
        self._planned = {path: self._stored(view, path) for path in paths if path in view.nodes}

    def check(self, on: SnapshotView) -> None:
        """Refuse a tip on which a coordinate has other labels; it may have more.

        Raises
        ------
        ConflictError
            If one has.
        """
        for path, planned in self._planned.items():
            now = self._stored(on, path) if path in on.nodes else planned[:0]
            alike, floats = now.dtype == planned.dtype, now.dtype.kind in "fc"
            if not alike or not np.array_equal(now[: len(planned)], planned, equal_nan=floats):
                raise ConflictError(
                    f"another commit came first and changed the coordinate {path!r}, by which rows "
                    "were looked up; nothing was committed. Write again",
                    [Conflict(ConflictKind.READ, f"/{path}", "read", "the labels have changed")],
                )

    def _stored(self, view: SnapshotView, path: str) -> npt.NDArray[Any]:
        group, name = split(path)
        return StoredGroup(SessionView(self._context, view), group).values(name)


# --- what the snapshot has already ----------------------------------------------------------------


def changes_nothing(workspace: Workspace) -> bool:
    """Whether the snapshot has everything that was written already, byte for byte."""
    changes = workspace.contents.changes
    if changes.nodes or changes.truncated:
        return False
    # A differing checksum shows most changes, before any chunk is read.
    return all(
        all(_is_same(workspace, *each, reads=reads) for each in _written(changes))
        for reads in (False, True)
    )


def _written(changes: ChangeSet) -> Iterator[tuple[bytes, Coords, StoredRef]]:
    yield from changes.refs()
    for node_id, tables in changes.tables.items():
        for rows in tables:
            yield from ((node_id, coords, ref) for coords, ref in changes.rows(rows).refs())


def drop_unchanged(workspace: Workspace, nodes: Iterable[Node]) -> None:
    """Drop written chunks of these nodes that the snapshot has already, unless set in bulk."""
    own, changes = {node.node_id for node in nodes}, workspace.contents.changes
    same = [
        (node_id, coords)
        for node_id, coords, new in changes.refs()
        if node_id in own and _is_same(workspace, node_id, coords, new, reads=True)
    ]
    with workspace.lock:
        for node_id, coords in same:
            del changes.chunks[node_id][coords]


def _is_same(
    workspace: Workspace, node_id: bytes, coords: Coords, new: StoredRef, *, reads: bool
) -> bool:
    """Whether the snapshot has the chunk; without a read, whether its checksum is the same."""
    old, reader = workspace.contents.view.lookup(node_id, coords), workspace.contents.reader
    if old is None or isinstance(new, Unset) or not same_bytes(old, new):
        return False
    return (
        not reads
        or old == new
        or reader.read(old, 0, old.length) == reader.read(new, 0, new.length)
    )
