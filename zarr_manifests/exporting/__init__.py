"""Exports: a session's snapshot in formats that other software reads, as copies or references."""

from __future__ import annotations

from zarr_manifests.exporting.export_request import ExportRequest
from zarr_manifests.exporting.exports import export

__all__ = ["ExportRequest", "export"]
