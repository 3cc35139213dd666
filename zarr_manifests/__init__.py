"""A transactional, versioned store for Zarr.

`Repository` is where everything starts; `write` puts an xarray dataset into one in a single call.
Names are imported when they are used: `import zarr_manifests` alone loads neither Zarr nor NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from zarr_manifests.runtime import on_demand

if TYPE_CHECKING:
    from zarr_manifests import bulk as bulk
    from zarr_manifests import errors as errors
    from zarr_manifests import storage as storage
    from zarr_manifests import virtual as virtual
    from zarr_manifests.bulk import tune_zarr
    from zarr_manifests.config import Config
    from zarr_manifests.moving import clone, export
    from zarr_manifests.planning.conflict import Txn
    from zarr_manifests.repositories import create, exists, open, recover  # noqa: A004
    from zarr_manifests.repository import Repository
    from zarr_manifests.rewriting import rewrite_chunks
    from zarr_manifests.session import Fork, Session
    from zarr_manifests.virtual.containers import VirtualContainer
    from zarr_manifests.xarray import to_session, write
    from zarr_manifests.xarray.ingest_files import ingest

__all__ = [
    "Config",
    "Fork",
    "Repository",
    "Session",
    "Txn",
    "VirtualContainer",
    "clone",
    "create",
    "exists",
    "export",
    "ingest",
    "open",
    "recover",
    "rewrite_chunks",
    "show_progress",
    "to_session",
    "tune_zarr",
    "write",
]

__version__ = "0.2.0"

_MODULES: Final = ("bulk", "errors", "storage", "virtual")
_HOMES: Final = {
    "Fork": "session",
    "Repository": "repository",
    "Config": "config",
    "Session": "session",
    "Txn": "planning.conflict",
    "VirtualContainer": "virtual.containers",
    "clone": "moving",
    "create": "repositories",
    "exists": "repositories",
    "export": "moving",
    "ingest": "xarray.ingest_files",
    "open": "repositories",
    "recover": "repositories",
    "rewrite_chunks": "rewriting",
    "show_progress": "progress",
    "to_session": "xarray",
    "tune_zarr": "bulk",
    "write": "xarray",
}
"""The modules of the names."""
_found = on_demand(__name__, *_MODULES, **_HOMES)


def __getattr__(name: str) -> Any:
    globals()[name] = found = _found(name)
    return found


def __dir__() -> list[str]:
    return sorted({"__version__", *__all__, *_MODULES})
