"""Exporting a snapshot in one of the formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from zarr_manifests.config.kinds import known_as, shown
from zarr_manifests.engine.edit.overlay import SessionView
from zarr_manifests.engine.snapshot.totals import totals_of
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.exporting.export_request import ExportRequest
from zarr_manifests.exporting.icechunk_repository import export_icechunk
from zarr_manifests.exporting.kerchunk_file import export_kerchunk
from zarr_manifests.exporting.plain_zarr import export_zarr
from zarr_manifests.exporting.snapshot_source import SnapshotSource
from zarr_manifests.exporting.zip_file import export_zip
from zarr_manifests.keys import absolute
from zarr_manifests.progress import expect
from zarr_manifests.reports import ExportReport

__all__ = ["export"]

_FORMATS: Final[Mapping[str, Callable[[SnapshotSource, Any, ExportRequest], ExportReport]]] = {
    "zarr": export_zarr,
    "zip": export_zip,
    "kerchunk": export_kerchunk,
    "icechunk": export_icechunk,
}


def export(contents: SessionView, dest: Any, request: ExportRequest) -> ExportReport:
    """Export the snapshot that a session reads; what was written.

    Raises
    ------
    InvalidArgumentError
        If the format is unknown, or the session has uncommitted changes.
    NotFoundError
        If there is nothing at the path.
    """
    name: object = request.format
    if not isinstance(name, str) or name not in _FORMATS:
        hint = known_as(name, _FORMATS)
        raise InvalidArgumentError(f"format={shown(name)} is unknown: {hint}")
    source = SnapshotSource.of(contents, request.path)
    if request.progress is not None:
        within = {absolute(node.path) for node in source.nodes}
        arrays = totals_of(contents.view).arrays
        total = sum(array.chunks for array in arrays if array.path in within)
        expect(request.progress, "chunks", total)
    return _FORMATS[name](source, dest, request)
