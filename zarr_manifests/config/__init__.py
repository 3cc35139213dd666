"""The configuration of a repository: its options, and how manifests are planned."""

from zarr_manifests.config.manifests import (
    ChunkManifests,
    Interval,
    ManifestSet,
    Preload,
    Rule,
    Split,
)
from zarr_manifests.config.repository import RepositoryConfig

__all__ = [
    "ChunkManifests",
    "Interval",
    "ManifestSet",
    "Preload",
    "RepositoryConfig",
    "Rule",
    "Split",
]
