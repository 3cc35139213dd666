"""Copies of objects within one bucket, made by the object store itself.

A copy has the bytes of the original, and none of them travels. Invariant: only used between two
storages of one bucket that are reached in the same way, with the same credentials.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from zarr_manifests.errors import StorageError
from zarr_manifests.storage.metered import unmetered
from zarr_manifests.storage.object_clients import library
from zarr_manifests.storage.object_proof import Proof
from zarr_manifests.storage.object_requests import Requests
from zarr_manifests.storage.object_store import ObjectStorage
from zarr_manifests.storage.protocol import Storage

__all__ = ["copier_within"]


def copier_within(source: Storage, storage: Storage) -> Callable[[str, int], None] | None:
    """A function that has the store copy the object with that key and size.

    None if the two storages are not in one bucket. The function raises a `StorageError` if the
    object could not be copied, or has another size.
    """
    one, other = unmetered(source), unmetered(storage)
    if not (isinstance(one, ObjectStorage) and isinstance(other, ObjectStorage)):
        return None
    bucket = replace(one.place, prefix="")
    unknown = one.place.kind == "http" or one.place.own or other.place.own
    if unknown or bucket != replace(other.place, prefix=""):
        return None
    requests = Requests(bucket, Proof(bucket))

    def copy(key: str, nbytes: int) -> None:
        names = [f"{at.prefix}/{key}".lstrip("/") for at in (one.place, other.place)]
        call = partial(library().obstore.copy, requests.client(nbytes), *names)
        requests.ask("copy", key, call)
        found = other.head(key).nbytes
        if found != nbytes:
            raise StorageError(f"{key} has {nbytes} bytes, and the store copied {found}")

    return copy
