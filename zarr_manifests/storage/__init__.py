"""Bytes under keys: the storage contract and its backends.

A backend knows nothing of Zarr. `from_url` opens one by its URL; `zarr_manifests.testing` has
wrappers that count, delay and break the calls of any of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zarr_manifests.ondemand import on_demand
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.storage.protocol import (
    Capabilities,
    ObjectInfo,
    Storage,
    Tagged,
    Token,
    check_key,
    check_prefix,
    check_range,
)
from zarr_manifests.storage.url import from_url

if TYPE_CHECKING:
    from zarr_manifests.storage.checking import StorageReport, check
    from zarr_manifests.storage.fsspec_store import FsspecStorage, from_fsspec
    from zarr_manifests.storage.object_store import ObjectStorage
    from zarr_manifests.storage.own_clients import from_obstore
else:
    __getattr__ = on_demand(
        __name__,
        StorageReport="checking",
        check="checking",
        FsspecStorage="fsspec_store",
        from_fsspec="fsspec_store",
        ObjectStorage="object_store",
        from_obstore="own_clients",
    )

__all__ = [
    "Capabilities",
    "FsspecStorage",
    "LocalStorage",
    "MemoryStorage",
    "ObjectInfo",
    "ObjectStorage",
    "Storage",
    "StorageReport",
    "Tagged",
    "Token",
    "check",
    "check_key",
    "check_prefix",
    "check_range",
    "from_fsspec",
    "from_obstore",
    "from_url",
]
