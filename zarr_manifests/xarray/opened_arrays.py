"""Arrays as the engine opens them: read in bulk, and bundled for dask."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import xarray as xr
from xarray.backends import ZarrStore

from zarr_manifests.bulk import use_bulk

__all__ = ["OpenedStore", "bundle"]


class OpenedStore(ZarrStore):
    """Xarray's store of a group, whose variables say which chunks to compute together.

    Attributes
    ----------
    task_bytes : int
        The most that a dask chunk of `chunks={}` holds, if that is more than a stored chunk.
    tune : bool
        Whether arrays are read in bulk.
    """

    __slots__ = ("task_bytes", "tune")
    task_bytes: int
    tune: bool

    def open_store_variable(self, name: Any) -> xr.Variable:
        """The variable, not read yet."""
        array: Any = self.members[name]
        if self.tune:
            use_bulk(array)
        opened: Any = super().open_store_variable
        variable: xr.Variable = opened(name)
        stored = variable.encoding["preferred_chunks"]
        lengths = variable.encoding["shards"] or tuple(stored.values())
        # Other grids than regular ones have a tuple for an axis.
        if variable.dtype.itemsize and all(type(length) is int for length in lengths):
            chunks = bundle(variable.shape, lengths, variable.dtype.itemsize, self.task_bytes)
            if chunks != lengths:
                bundles = dict(zip(variable.dims, chunks, strict=True))
                variable.encoding["preferred_chunks"] = _Bundles(bundles, stored)
        return variable


def bundle(
    shape: Sequence[int], lengths: Sequence[int], itemsize: int, most_bytes: int
) -> tuple[int, ...]:
    """The lengths of a dask chunk that holds whole stored chunks, which lie beside each other.

    Neighbours along the last axis are stored beside each other; once such a row is complete, so are
    rows along the axis before.

    Parameters
    ----------
    shape, lengths : sequence of int
        Of the array, and of a stored chunk.
    itemsize : int
        Bytes of a cell.
    most_bytes : int
        The most that a dask chunk may hold, if it holds more than one stored chunk.

    Examples
    --------
    >>> from zarr_manifests.xarray.opened_arrays import bundle
    >>> bundle((365, 700, 1400), (1, 350, 350), 4, 32 * 2**20)
    (8, 700, 1400)
    """
    found = list(lengths)
    for axis in reversed(range(len(found))):
        number = -(-shape[axis] // found[axis])
        room = max(most_bytes // (math.prod(found) * itemsize), 1)
        tasks = -(-number // room)  # of about the same size
        found[axis] *= max(-(-number // max(tasks, 1)), 1)
        if tasks > 1:
            break
    return tuple(found)


class _Bundles(dict[Any, int]):
    """Lengths of dask chunks by dimension, and what is stored.

    Xarray looks up what to use where the caller of `open_dataset` does not say, with a default. It
    looks up what the caller's chunks should not cut, without a default: these are stored chunks.
    """

    def __init__(self, bundles: Mapping[Any, int], stored: Mapping[Any, int]) -> None:
        super().__init__(bundles)
        self._stored = dict(stored)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self), self._stored)

    def get(self, dim: Any, *default: Any) -> Any:
        """The length along a dimension."""
        return super().get(dim, *default) if default else self._stored.get(dim)
