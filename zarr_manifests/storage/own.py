"""Stores of other packages, where a storage is expected.

They are recognized by their classes and attributes, so no package is imported for it.
"""

from __future__ import annotations

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.storage.fsspec_proven import is_proven
from zarr_manifests.storage.fsspec_store import from_fsspec
from zarr_manifests.storage.own_clients import is_obstore, open_client
from zarr_manifests.storage.protocol import Storage

__all__ = ["own_storage"]


def own_storage(location: object) -> Storage:
    """The storage in a store of obstore, zarr or fsspec.

    Of fsspec's, s3fs and adlfs are opened in the mode `"proven"`, and every other one in the mode
    `"read"`. A store of zarr that is read-only stays so.

    Raises
    ------
    InvalidArgumentError
        If it is none of these.

    Examples
    --------
    >>> import fsspec
    >>> from zarr_manifests.storage.own import own_storage
    >>> own_storage(fsspec.filesystem("memory").get_mapper("/winds"))
    FsspecStorage('memory:///winds', mode='read')
    """
    if is_obstore(location):
        return open_client(location)
    read_only = getattr(location, "read_only", False) is True
    client = getattr(location, "store", None)
    if is_obstore(client):  # zarr.storage.ObjectStore
        return open_client(client, read_only=read_only)
    files = getattr(location, "fs", None)
    path = getattr(location, "root", getattr(location, "path", None))
    if not hasattr(files, "cat_file") or not isinstance(path, str):
        raise InvalidArgumentError(
            f"a {type(location).__name__} is not a location: pass a path, a URL, a storage, or a "
            "store of obstore, zarr (ObjectStore, FsspecStore) or fsspec (a mapper)"
        )
    # zarr.storage.FsspecStore, or a mapper of fsspec.
    return from_fsspec(files, path, "proven" if is_proven(files) and not read_only else "read")
