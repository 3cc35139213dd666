"""Every value that a repository or a session returns: history, differences, sizes and reports.

All are immutable and hold no connection to the repository.
"""

from __future__ import annotations

from zarr_manifests.planning.tables.sums import Amount
from zarr_manifests.planning.upkeep.cell_changes import ArrayShape, CellChanges
from zarr_manifests.planning.upkeep.change_records import Change, Operation
from zarr_manifests.reports.array_reports import (
    ArrayStatistics,
    ArrayUsage,
    ChunkSelection,
    StatisticsReport,
    Usage,
)
from zarr_manifests.reports.ingest_reports import (
    FailedFile,
    IngestedFile,
    IngestReport,
)
from zarr_manifests.reports.manifest_reports import (
    ArrayPlace,
    LeafPlace,
    ManifestLayout,
    ManifestPlace,
    PreloadedManifest,
    PreloadReport,
    PreloadState,
    ReadCost,
    ReadCosts,
)
from zarr_manifests.reports.upkeep_reports import (
    CleanReport,
    CloneReport,
    CollectionReport,
    CompactionReport,
    ExpiryReport,
    ExportReport,
    IndexReport,
    Problem,
    RecoveryReport,
    RepackReport,
    RestoreReport,
    RewriteReport,
    VerifyReport,
)
from zarr_manifests.reports.version_reports import (
    Ancestry,
    Diff,
    LoggedOperation,
    MergeReport,
    SnapshotInfo,
    Status,
    ValueChanges,
    moved_tops,
)

__all__ = [
    "Amount",
    "Ancestry",
    "ArrayPlace",
    "ArrayShape",
    "ArrayStatistics",
    "ArrayUsage",
    "CellChanges",
    "Change",
    "ChunkSelection",
    "CleanReport",
    "CloneReport",
    "CollectionReport",
    "CompactionReport",
    "Diff",
    "ExpiryReport",
    "ExportReport",
    "FailedFile",
    "IndexReport",
    "IngestReport",
    "IngestedFile",
    "LeafPlace",
    "LoggedOperation",
    "ManifestLayout",
    "ManifestPlace",
    "MergeReport",
    "Operation",
    "PreloadReport",
    "PreloadState",
    "PreloadedManifest",
    "Problem",
    "ReadCost",
    "ReadCosts",
    "RecoveryReport",
    "RepackReport",
    "RestoreReport",
    "RewriteReport",
    "SnapshotInfo",
    "StatisticsReport",
    "Status",
    "Usage",
    "ValueChanges",
    "VerifyReport",
    "moved_tops",
]
