"""Whether coordinates on a branch's tip are those that a write was planned with.

A write from rows looks up positions in the coordinates of one snapshot. If another commit has
changed them, the rows belong to other cells. Reads made here do not count as reads of the session.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr

from zarr_manifests.conflicts import Conflict, ConflictKind
from zarr_manifests.engine.edit.overlay import SessionView
from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import ConflictError
from zarr_manifests.store import ManifestStore

__all__ = ["SameLabels"]


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
            if now.dtype != planned.dtype or not _equal(now[: len(planned)], planned):
                raise ConflictError(
                    f"another commit came first and changed the coordinate {path!r}, by which rows "
                    "were looked up; nothing was committed. Write again",
                    [Conflict(ConflictKind.READ, f"/{path}", "read", "the labels have changed")],
                )

    def _stored(self, view: SnapshotView, path: str) -> npt.NDArray[Any]:
        store = ManifestStore(SessionView(self._context, view), read_only=True)
        return np.asarray(zarr.open_array(store, path=path, mode="r")[...])


def _equal(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    return np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
