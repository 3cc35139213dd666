"""The configuration of a repository: its options, and how manifests are planned."""

from zarr_manifests.config.manifest_sets import ChunkManifests as ChunkManifests
from zarr_manifests.config.manifest_sets import ManifestSet as ManifestSet
from zarr_manifests.config.manifest_sets import Preload as Preload
from zarr_manifests.config.manifest_sets import Rule as Rule
from zarr_manifests.config.manifest_sets import Split as Split
from zarr_manifests.config.repository_config import Cache as Cache
from zarr_manifests.config.repository_config import CacheOptions as CacheOptions
from zarr_manifests.config.repository_config import Commits as Commits
from zarr_manifests.config.repository_config import Compaction as Compaction
from zarr_manifests.config.repository_config import Config as Config
from zarr_manifests.config.repository_config import SavedContainer as SavedContainer
from zarr_manifests.config.repository_config import Snapshots as Snapshots
from zarr_manifests.config.repository_config import config_schema as config_schema
