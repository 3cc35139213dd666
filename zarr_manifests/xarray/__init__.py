"""xarray: the engine that opens a repository, `write` for datasets, `vds.zm` for virtual ones."""

from zarr_manifests.xarray.accessor import VirtualAccessor
from zarr_manifests.xarray.backend import ManifestsBackendEntrypoint
from zarr_manifests.xarray.writers import write

__all__ = ["ManifestsBackendEntrypoint", "VirtualAccessor", "write"]
