"""Appends that compare labels: which rows to skip, to write over, and to append.

An append is planned from the index coordinate in a session (`planning.conflict.append_labels`).
`plan` reads it, and `tip_check` plans again on the tip that a commit is about to land on. If the
plan differs, the commit is a conflict, and `write` starts over there.

Invariant: labels are compared as they would be read back. Given labels are encoded like the
existing array and decoded together with its labels, so that a label that was rounded when it was
stored is found again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import xarray as xr

from zarr_manifests.conflicts import Conflict, ConflictKind
from zarr_manifests.engine.edit.overlay import SessionView
from zarr_manifests.engine.edit.workspace import TipCheck
from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import AlreadyExistsError, ConflictError, InvalidArgumentError
from zarr_manifests.keys import join
from zarr_manifests.planning.conflict.append_labels import (
    AppendPlan,
    OnExisting,
    plan_append,
)
from zarr_manifests.xarray.stored_group import StoredGroup

__all__ = ["Append"]

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
        there, given = group.labels(self.dim, self.labels)
        keep = self.sort == "keep"
        return plan_append(self.dim, there, given, self.on_existing, keep_order=keep)

    def tip_check(self, contents: SessionView, planned: AppendPlan, *, relocate: bool) -> TipCheck:
        """What refuses a tip on which a plan would differ that was made on these contents.

        If the session itself has changed the labels before, every change of others is refused.
        With `relocate`, rows may be put behind those that others append in the meantime.
        """
        path, changes = join(self.group, self.dim), contents.changes
        stored = contents.view.nodes.get(path)
        touched = stored is not None and stored.node_id in changes.touched()
        if touched or path in changes.nodes:
            before, _ = self._stored(contents.context, contents.view).labels(self.dim, self.labels)
            return partial(self._check_same, contents.context, before)
        return partial(self._check_plan, contents.context, planned, relocate)

    def _check_same(self, context: ReadContext, before: npt.NDArray[Any], on: SnapshotView) -> None:
        now, _ = self._stored(context, on).labels(self.dim, self.labels)
        if not np.array_equal(now, before):
            raise self._conflict(ConflictKind.READ, "read", _CHANGED)

    def _check_plan(
        self, context: ReadContext, planned: AppendPlan, relocate: bool, on: SnapshotView
    ) -> None:
        try:
            now = self.plan(self._stored(context, on))
        except (AlreadyExistsError, InvalidArgumentError) as error:
            reason = f"with the labels that are there now, {error}"
            raise self._conflict(ConflictKind.READ, "read", reason) from None
        moved = now.start != planned.start and bool(planned.appended)
        if (now.appended, now.replaced) != (planned.appended, planned.replaced):
            raise self._conflict(ConflictKind.READ, "read", _CHANGED)
        if moved and not relocate:
            reason = f"both commits append along {self.dim!r}"
            raise self._conflict(ConflictKind.APPEND, "growth", reason)

    def _stored(self, context: ReadContext, view: SnapshotView) -> StoredGroup:
        return StoredGroup(SessionView(context, view), self.group)

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
    ) -> Iterator[tuple[xr.Dataset, slice | None, Sequence[int]]]:
        """Yield the parts to write, where they go, and which rows they are.

        None is the end of the array.
        """
        fixed = [name for name, v in ds.variables.items() if self.dim not in v.dims]
        for run in planned.replaced:
            values = ds.drop_vars([*fixed, self.dim])
            if values.variables:
                stop = run.start + len(run.rows)
                yield self._rows(values, run.rows), slice(run.start, stop), run.rows
        if planned.appended or planned.replaced or not ds.sizes[self.dim]:
            yield self._rows(ds, planned.appended), None, planned.appended

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
