"""Reads and writes of Zarr arrays in a session's store, many chunks at a time."""

from zarr_manifests.bulk.pipeline import BulkCodecPipeline as BulkCodecPipeline  # for Zarr's config
from zarr_manifests.bulk.pipeline import use_bulk

__all__ = ["use_bulk"]
