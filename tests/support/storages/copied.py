"""Copies of a storage at one moment, to try something more than once."""

from __future__ import annotations

from zarr_manifests.storage import Storage
from zarr_manifests.storage.memory import MemoryStorage


def copy_of(storage: Storage) -> MemoryStorage:
    """Return a copy of all objects of a storage, in memory, independent of the original.

    Examples
    --------
    >>> from zarr_manifests.storage.memory import MemoryStorage
    >>> from storages import copy_of
    >>> made = MemoryStorage()
    >>> copy = copy_of(made)
    >>> copy.create("a", b"1"), list(made.list())
    (True, [])
    """
    copy = MemoryStorage()
    for info in storage.list():
        copy.put(info.key, storage.get(info.key))
    return copy
