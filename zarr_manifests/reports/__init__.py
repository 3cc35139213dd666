"""Every value that a repository or a session returns: history, differences, sizes and reports.

All are immutable and hold no connection to the repository.
"""

from __future__ import annotations

from zarr_manifests.planning.changes import ArrayShape, CellChanges, Change, Operation
from zarr_manifests.planning.live_deltas import Amount
from zarr_manifests.report import Problem
from zarr_manifests.reports.array_reports import (
    ArrayPlace,
    ChunkSelection,
    IngestedFile,
    IngestReport,
    ManifestLayout,
    ManifestPlace,
    StatisticsReport,
    Usage,
)
from zarr_manifests.reports.upkeep_reports import (
    CloneReport,
    CollectionReport,
    CompactionReport,
    ExportReport,
    RecoveryReport,
    RewriteReport,
    VerifyReport,
)
from zarr_manifests.reports.version_reports import (
    Ancestry,
    Diff,
    LoggedOperation,
    MergeReport,
    SnapshotInfo,
)

__all__ = [
    "Amount",
    "Ancestry",
    "ArrayPlace",
    "ArrayShape",
    "CellChanges",
    "Change",
    "ChunkSelection",
    "CloneReport",
    "CollectionReport",
    "CompactionReport",
    "Diff",
    "ExportReport",
    "IngestReport",
    "IngestedFile",
    "LoggedOperation",
    "ManifestLayout",
    "ManifestPlace",
    "MergeReport",
    "Operation",
    "Problem",
    "RecoveryReport",
    "RewriteReport",
    "SnapshotInfo",
    "StatisticsReport",
    "Usage",
    "VerifyReport",
]
