"""`vds.zm` of datasets and trees: writes a virtual dataset without naming a function.

`zarr_manifests` registers it where xarray was imported before, and otherwise once a name of the
package is used. Importing this module does in any case.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import xarray as xr

from zarr_manifests.xarray.virtual_datasets import write_virtual

__all__ = ["VirtualAccessor"]


class VirtualAccessor:
    """What `vds.zm` of a virtual dataset or tree is.

    Parameters
    ----------
    vds : Dataset or DataTree
        The dataset.

    Examples
    --------
    >>> import xarray as xr, zarr_manifests as zm
    >>> repo = zm.create("memory://accessor-example")
    >>> snapshot_id = xr.Dataset({"a": ("x", [1, 2])}).zm.write(repo, message="two values")
    >>> next(repo.ancestry()).message
    'two values'
    """

    def __init__(self, vds: xr.Dataset | xr.DataTree) -> None:
        self._vds = vds

    @property
    def write(self) -> Callable[..., str | None]:
        """`zarr_manifests.virtual.write` with this dataset: pass the location and options."""
        return partial(write_virtual, self._vds)


if not hasattr(xr.Dataset, "zm"):  # which is so if this module is loaded again
    for _register in (xr.register_dataset_accessor, xr.register_datatree_accessor):
        _register("zm")(VirtualAccessor)  # type: ignore[no-untyped-call]
