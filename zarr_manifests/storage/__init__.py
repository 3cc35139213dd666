"""Bytes under keys: places by URL, and the contract of a storage.

A storage knows nothing of Zarr. Its calls take and return the values of
`zarr_manifests.storage.protocol`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zarr_manifests.runtime import on_demand
from zarr_manifests.storage.protocol import Storage
from zarr_manifests.storage.url import from_url

if TYPE_CHECKING:
    from zarr_manifests.storage.checking import check
else:
    __getattr__ = on_demand(__name__, check="checking")

__all__ = ["Storage", "check", "from_url"]
