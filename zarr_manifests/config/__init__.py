"""The configuration of a repository: its options, and how manifests are planned."""

from zarr_manifests.config.cache import CacheOptions
from zarr_manifests.config.repository import RepositoryConfig

__all__ = ["CacheOptions", "RepositoryConfig"]
