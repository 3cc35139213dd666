"""xarray: the engine that opens a repository, `write`, `to_session`, and `ds.zm`."""

from zarr_manifests.xarray.backend import DatasetAccessor as DatasetAccessor
from zarr_manifests.xarray.backend import ManifestsBackendEntrypoint as ManifestsBackendEntrypoint
from zarr_manifests.xarray.writers import to_session as to_session
from zarr_manifests.xarray.writers import write as write
