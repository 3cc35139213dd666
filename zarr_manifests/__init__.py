"""A transactional, versioned store for Zarr.

`Repository` is where everything starts; `write` puts an xarray dataset into one in a single call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zarr_manifests import errors
from zarr_manifests.config import RepositoryConfig
from zarr_manifests.engine.edit.chunk_statistics import ChunkStatistics
from zarr_manifests.engine.history.leases import HeldLease
from zarr_manifests.planning.conflict.transactions import Txn
from zarr_manifests.planning.tables.resolved_chunks import ChunkKind, ResolvedChunks
from zarr_manifests.reports import (
    Amount,
    ArrayShape,
    ArrayStatistics,
    ArrayStats,
    ArrayTotals,
    ArrayUsage,
    CellChanges,
    Change,
    ChunkSelection,
    CollectionReport,
    CompactionReport,
    Diff,
    ExpiryReport,
    IndexReport,
    LoggedOperation,
    ManifestLayout,
    Operation,
    PreloadReport,
    Problem,
    ReadCosts,
    RecoveryReport,
    RepackReport,
    RestoreReport,
    RewriteReport,
    SnapshotInfo,
    StatisticsReport,
    Status,
    Totals,
    Usage,
    VerifyReport,
)
from zarr_manifests.repository import Repository
from zarr_manifests.session import Fork, Session
from zarr_manifests.store import ManifestStore
from zarr_manifests.tuning import tune_zarr
from zarr_manifests.virtual.containers import VirtualContainer

if TYPE_CHECKING:
    from zarr_manifests.rewriting import rewrite_chunks
    from zarr_manifests.xarray import write

__all__ = [
    "Amount",
    "ArrayShape",
    "ArrayStatistics",
    "ArrayStats",
    "ArrayTotals",
    "ArrayUsage",
    "CellChanges",
    "Change",
    "ChunkKind",
    "ChunkSelection",
    "ChunkStatistics",
    "CollectionReport",
    "CompactionReport",
    "Diff",
    "ExpiryReport",
    "Fork",
    "HeldLease",
    "IndexReport",
    "LoggedOperation",
    "ManifestLayout",
    "ManifestStore",
    "Operation",
    "PreloadReport",
    "Problem",
    "ReadCosts",
    "RecoveryReport",
    "RepackReport",
    "Repository",
    "RepositoryConfig",
    "ResolvedChunks",
    "RestoreReport",
    "RewriteReport",
    "Session",
    "SnapshotInfo",
    "StatisticsReport",
    "Status",
    "Totals",
    "Txn",
    "Usage",
    "VerifyReport",
    "VirtualContainer",
    "errors",
    "rewrite_chunks",
    "tune_zarr",
    "write",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "write":  # xarray is imported only by those who use it
        from zarr_manifests.xarray import write

        return write
    if name == "rewrite_chunks":
        from zarr_manifests.rewriting import rewrite_chunks

        return rewrite_chunks
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
