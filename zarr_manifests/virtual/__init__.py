"""References to bytes outside the repository: which places may be read, and how.

`write` writes VirtualiZarr's virtual datasets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zarr_manifests.xarray.virtual_datasets import write_virtual as write

__all__ = ["write"]


def __getattr__(name: str) -> Any:
    if name == "write":  # a room far above; xarray is imported only by those who use it
        from zarr_manifests.xarray.virtual_datasets import write_virtual

        return write_virtual
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
