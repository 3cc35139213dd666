"""Using reserved disk space when the disk is full."""

from __future__ import annotations

from collections.abc import Callable

from zarr_manifests.errors import StorageFullError
from zarr_manifests.storage import Storage
from zarr_manifests.storage.metered import unmetered
from zarr_manifests.storage.protocol import KeepsReserve


def with_reserve[T](storage: Storage, call: Callable[[], T]) -> T:
    """Return what the call returns; on a full disk, release the reserve and call again."""
    try:
        return call()
    except StorageFullError:
        inner = unmetered(storage)
        if not isinstance(inner, KeepsReserve) or not inner.give_up_reserve():
            raise
    return call()


def keep_reserve(storage: Storage) -> None:
    """Reserve disk space, if the storage can and there is enough."""
    inner = unmetered(storage)
    if isinstance(inner, KeepsReserve):
        inner.keep_reserve()
