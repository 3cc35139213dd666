"""Reads and writes of Zarr arrays in a session's store, many chunks at a time."""

from zarr_manifests.bulk.pipeline import BulkCodecPipeline, use_bulk

__all__ = ["BulkCodecPipeline", "use_bulk"]
