"""xarray: the engine that opens a repository, and `write`, which puts a dataset into one."""

from zarr_manifests.xarray.backend import ManifestsBackendEntrypoint
from zarr_manifests.xarray.writers import write

__all__ = ["ManifestsBackendEntrypoint", "write"]
