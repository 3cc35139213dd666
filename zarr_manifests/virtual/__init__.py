"""References to bytes outside the repository: which places may be read, and how.

`write` writes VirtualiZarr's virtual datasets. Modules that reading does not need are imported when
they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zarr_manifests.ondemand import on_demand

if TYPE_CHECKING:
    from zarr_manifests.virtual import kerchunk as kerchunk
    from zarr_manifests.virtual import references as references
    from zarr_manifests.xarray.virtual_datasets import write_virtual as write

__all__ = ["write"]

_module = on_demand(__name__, "kerchunk", "references")


def __getattr__(name: str) -> Any:
    if name == "write":  # a room far above; xarray is imported only by those who use it
        from zarr_manifests.xarray.virtual_datasets import write_virtual

        return write_virtual
    return _module(name)
