"""Disk space reserved for operations that free space.

An expiry and a collection write a root before anything can be deleted, which fails on a full disk.
So a repository keeps an empty file of some size, which they delete first.
"""

from __future__ import annotations

from typing import Final

from zarr_manifests.storage.disk import Disk

__all__ = ["RESERVE_BYTES", "Reserve"]

RESERVE_BYTES: Final = 256 * 1024
"""Enough for the roots, archives and pages of an expiry and a collection."""


class Reserve:
    """A file that reserves disk space.

    Parameters
    ----------
    path : str
        The path of the file.
    disk : Disk
        Makes the system calls that change the disk.
    """

    def __init__(self, path: str, disk: Disk) -> None:
        self._path, self._disk = path, disk

    def keep(self) -> int:
        """Reserve space; return how much, which is less if less is left."""
        nbytes = RESERVE_BYTES
        while nbytes >= RESERVE_BYTES // 8:
            try:
                self._disk.reserve(self._path, nbytes)
            except OSError:  # the reserve is optional
                nbytes //= 2
            else:
                return nbytes
        return 0

    def give_up(self) -> bool:
        """Release the space; return whether there was any."""
        try:
            self._disk.unlink(self._path)
        except OSError:
            return False
        return True
