"""Exports: a session's snapshot in formats that other software reads, as copies or references."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zarr_manifests.ondemand import on_demand

if TYPE_CHECKING:
    from zarr_manifests.exporting.export_request import ExportRequest
    from zarr_manifests.exporting.exports import export
else:
    __getattr__ = on_demand(__name__, ExportRequest="export_request", export="exports")

__all__ = ["ExportRequest", "export"]
