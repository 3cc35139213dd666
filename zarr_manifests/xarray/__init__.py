"""xarray: the engine that opens a repository, `write`, `to_session`, and `vds.zm`."""

from zarr_manifests.xarray.backend import ManifestsBackendEntrypoint
from zarr_manifests.xarray.virtual_datasets import VirtualAccessor
from zarr_manifests.xarray.writers import to_session, write

__all__ = ["ManifestsBackendEntrypoint", "VirtualAccessor", "to_session", "write"]
