"""Room on a disk that is set aside for what makes room.

An expiry and a collection write a root before anything can be deleted. On a disk that is full they
could not. So a repository keeps a file of nothing, which they delete first.
"""

from __future__ import annotations

from typing import Final

from zarr_manifests.storage.disk import PosixDisk

__all__ = ["RESERVE_BYTES", "Reserve"]

RESERVE_BYTES: Final = 256 * 1024
"""Enough for the roots, archives and pages of an expiry and a collection."""


class Reserve:
    """A file that takes room.

    Parameters
    ----------
    path : str
        Where it is.
    disk : PosixDisk
        Makes the system calls that change the disk.
    """

    def __init__(self, path: str, disk: PosixDisk) -> None:
        self._path, self._disk = path, disk

    def keep(self) -> int:
        """Set room aside; how much, which is less where less is left."""
        nbytes = RESERVE_BYTES
        while nbytes >= RESERVE_BYTES // 8:
            try:
                self._disk.reserve(self._path, nbytes)
            except OSError:  # nobody relies on it
                nbytes //= 2
            else:
                return nbytes
        return 0

    def give_up(self) -> bool:
        """Let others have the room; whether there was any."""
        try:
            self._disk.unlink(self._path)
        except OSError:
            return False
        return True
