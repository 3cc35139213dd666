"""The configuration of a repository: its options, and how manifests are planned."""

from zarr_manifests.config.cache_options import Cache, CacheOptions
from zarr_manifests.config.manifest_sets import (
    ChunkManifests,
    Interval,
    ManifestSet,
    Preload,
    Rule,
    Split,
)
from zarr_manifests.config.repository_config import (
    Commits,
    Compaction,
    Config,
    config_schema,
)
from zarr_manifests.config.saved_containers import SavedContainer
from zarr_manifests.config.snapshots import Snapshots

__all__ = [
    "Cache",
    "CacheOptions",
    "ChunkManifests",
    "Commits",
    "Compaction",
    "Config",
    "Interval",
    "ManifestSet",
    "Preload",
    "Rule",
    "SavedContainer",
    "Snapshots",
    "Split",
    "config_schema",
]
