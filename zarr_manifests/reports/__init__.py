"""Every value that a repository or a session returns: history, differences, sizes and reports.

All are immutable and hold no connection to the repository.
"""

from __future__ import annotations

from zarr_manifests.planning.tables.sums import Amount as Amount
from zarr_manifests.planning.upkeep.changes import ArrayShape as ArrayShape
from zarr_manifests.planning.upkeep.changes import CellChanges as CellChanges
from zarr_manifests.planning.upkeep.changes import Change as Change
from zarr_manifests.planning.upkeep.changes import Operation as Operation
from zarr_manifests.report import Problem as Problem
from zarr_manifests.reports.array_reports import ArrayPlace as ArrayPlace
from zarr_manifests.reports.array_reports import ChunkSelection as ChunkSelection
from zarr_manifests.reports.array_reports import IngestedFile as IngestedFile
from zarr_manifests.reports.array_reports import IngestReport as IngestReport
from zarr_manifests.reports.array_reports import LeafPlace as LeafPlace
from zarr_manifests.reports.array_reports import ManifestLayout as ManifestLayout
from zarr_manifests.reports.array_reports import ManifestPlace as ManifestPlace
from zarr_manifests.reports.array_reports import StatisticsReport as StatisticsReport
from zarr_manifests.reports.array_reports import Usage as Usage
from zarr_manifests.reports.upkeep_reports import CloneReport as CloneReport
from zarr_manifests.reports.upkeep_reports import CollectionReport as CollectionReport
from zarr_manifests.reports.upkeep_reports import CompactionReport as CompactionReport
from zarr_manifests.reports.upkeep_reports import ExpiryReport as ExpiryReport
from zarr_manifests.reports.upkeep_reports import ExportReport as ExportReport
from zarr_manifests.reports.upkeep_reports import RecoveryReport as RecoveryReport
from zarr_manifests.reports.upkeep_reports import RewriteReport as RewriteReport
from zarr_manifests.reports.upkeep_reports import VerifyReport as VerifyReport
from zarr_manifests.reports.version_reports import Ancestry as Ancestry
from zarr_manifests.reports.version_reports import Diff as Diff
from zarr_manifests.reports.version_reports import LoggedOperation as LoggedOperation
from zarr_manifests.reports.version_reports import MergeReport as MergeReport
from zarr_manifests.reports.version_reports import SnapshotInfo as SnapshotInfo
from zarr_manifests.reports.version_reports import Status as Status
from zarr_manifests.reports.version_reports import ValueChanges as ValueChanges
from zarr_manifests.reports.version_reports import moved_tops as moved_tops
