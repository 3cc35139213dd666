"""Using the room that a storage has set aside, where there is no other left."""

from __future__ import annotations

from collections.abc import Callable

from zarr_manifests.errors import StorageFullError
from zarr_manifests.storage import Storage
from zarr_manifests.storage.metered import unmetered
from zarr_manifests.storage.protocol import KeepsReserve

__all__ = ["keep_reserve", "with_reserve"]


def with_reserve[T](storage: Storage, call: Callable[[], T]) -> T:
    """What the call gives; on a full disk it is made again with the room that was set aside."""
    try:
        return call()
    except StorageFullError:
        inner = unmetered(storage)
        if not isinstance(inner, KeepsReserve) or not inner.reserve.give_up():
            raise
    return call()


def keep_reserve(storage: Storage) -> None:
    """Set room aside, as far as there is some."""
    inner = unmetered(storage)
    if isinstance(inner, KeepsReserve):
        inner.reserve.keep()
