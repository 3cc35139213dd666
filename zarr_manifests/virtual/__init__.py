"""References to bytes outside the repository: which places may be read, and how.

`write` writes VirtualiZarr's virtual datasets, and the imports take in what others have written.
Modules that reading does not need are imported when
they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zarr_manifests.runtime import on_demand

if TYPE_CHECKING:
    from zarr_manifests.moving import import_icechunk, import_kerchunk, import_zarr
    from zarr_manifests.virtual import kerchunk as kerchunk
    from zarr_manifests.virtual import references as references
    from zarr_manifests.xarray.writers import write_virtual as write

__all__ = ["import_icechunk", "import_kerchunk", "import_zarr", "write"]

_module = on_demand(__name__, "kerchunk", "references")


def __getattr__(name: str) -> Any:
    if name == "write":  # a room far above; xarray is imported only by those who use it
        from zarr_manifests.xarray.writers import write_virtual

        return write_virtual
    if name in __all__:
        from zarr_manifests import moving

        return getattr(moving, name)
    return _module(name)
