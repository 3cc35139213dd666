"""The folders that objects lie in: made, brought to the disk, and removed when they are empty.

A name is on the disk only if the names of the folders above it are. That costs an fsync for each of
them, so a storage remembers which ones it has seen to. Invariants:

- *Only what is seen to is known*: a folder that is there may have been made by another process a
  moment ago, whose machine stops before it has brought the folder's name to the disk.
- *What is known holds for as long as nobody has removed a folder*, which another process may do,
  and a third one make it again. Whoever removes folders makes the lock file one byte longer first,
  and holds the lock until they are gone. A writer looks at its length once what it wrote has its
  name. If that is in a folder made again, the file had grown before; if not, it is in the folder
  that was known, which is not empty any more, and stays.
- *Nothing is lost by a removal*: the system removes no folder with anything in it, and a writer
  that finds its folder gone makes it again.
- Some folders are never removed: the one that holds all, those directly below it, hidden ones,
  and what lies below a folder with a lock file of its own, which is another storage's.
"""
# Paths are plain strings here, since pathlib costs as much as the system calls:
# ruff: noqa: PTH112, PTH116, PTH119, PTH120

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from itertools import batched

from zarr_manifests.storage.disk import TEMP_PREFIX, PosixDisk
from zarr_manifests.storage.locks import exclusive

__all__ = ["Folders"]

_A_TURN = 64  # folders removed while others wait
_STAYS = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT}  # or somebody else has removed it


class Folders:
    """The folders at and below a root, as one storage knows them.

    Parameters
    ----------
    root : str
        The absolute path of the folder that holds all.
    lock : str
        The path of its lock file, which is held wherever an object is deleted.
    disk : PosixDisk
        Makes the system calls that change the disk.
    """

    def __init__(self, root: str, lock: str, disk: PosixDisk) -> None:
        self._root, self._lock, self._disk = root, lock, disk
        # The length of the lock file, and folders whose own name is known to be on the disk.
        self._known: tuple[int, set[str]] = (0, {"/"})
        self._made: set[str] = set()  # folders made here whose name may not be

    def make(self, folder: str) -> None:
        """Make the folder, and those above it that are missing."""
        missing = []
        while not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        settled = self._settled()
        for folder in reversed(missing):
            settled.discard(folder)
            try:
                self._disk.mkdir(folder)
            except FileExistsError:
                if not os.path.isdir(folder):
                    raise
            self._made.add(folder)

    def sync(self, folders: Iterable[str]) -> None:
        """Bring the names in these folders to the disk, and the folders' own, each once.

        In each of them lies what the caller has just written or found.
        """
        settled, to_sync = self._settled(), dict.fromkeys(folders)
        unsettled: dict[str, None] = {}
        for folder in tuple(to_sync):
            # What lies at or below the root is settled only once this storage has seen to it.
            while (folder not in settled and folder not in unsettled) and (
                len(folder) >= len(self._root) or folder in self._made
            ):
                unsettled[folder] = None
                folder = os.path.dirname(folder)
                to_sync[folder] = None
        for folder in sorted(to_sync, reverse=True):  # what is deeper first
            try:
                self._disk.fsync_dir(folder)
            except PermissionError:
                # The folder above the root need not be readable; then the root was not made here.
                if len(folder) >= len(self._root) or self._root in self._made:
                    raise
        settled.update(unsettled)
        self._made.difference_update(unsettled)

    def _settled(self) -> set[str]:
        try:
            removals = os.stat(self._lock).st_size
        except FileNotFoundError:
            removals = 0
        seen, settled = self._known
        if seen != removals:
            # A new set: what another thread adds to the one of before is not known any more.
            settled = {"/"}
            self._known = removals, settled
        return settled

    def leftovers(self, before_ms: int) -> tuple[list[str], list[str]]:
        """Temporary files and empty folders that nobody has changed since then.

        Nothing is changed here, and what is found may be another a moment later.

        Parameters
        ----------
        before_ms : int
            Milliseconds since 1970 UTC.

        Returns
        -------
        tuple of (list of str, list of str)
            Paths of files, and of folders that hold at most such files and folders, deeper ones
            first.
        """
        files: list[str] = []
        visited: list[tuple[str, bool, list[str]]] = []  # whether it may go, what is in it
        lock_name = os.path.basename(self._lock)
        for folder, folders, names in os.walk(self._root):
            below = folder != self._root
            if below and lock_name in names:
                folders.clear()
                continue
            stays = not below or os.path.dirname(folder) == self._root
            within = [f"{folder}/{name}" for name in (*folders, *names)]
            visited.append((folder, not stays and _is_old(folder, before_ms), within))
            folders[:] = [name for name in folders if not name.startswith(".")]
            temporary = (f"{folder}/{name}" for name in names if name.startswith(TEMP_PREFIX))
            files += [path for path in temporary if _is_old(path, before_ms)]
        empty: list[str] = []
        gone = set(files)
        for folder, may_go, within in reversed(visited):
            if may_go and gone.issuperset(within):
                gone.add(folder)
                empty.append(folder)
        return files, empty

    def remove(self, folders: Iterable[str]) -> None:
        """Remove those of them that are empty, the first ones first."""
        for some in batched(folders, _A_TURN):
            # No object is deleted meanwhile, so nobody who has seen the file grow can have
            # found a folder with an object in it that is empty now.
            with exclusive(self._lock):
                os.truncate(self._lock, os.stat(self._lock).st_size + 1)  # takes no room
                for folder in some:
                    try:
                        self._disk.rmdir(folder)
                    except OSError as error:
                        if error.errno not in _STAYS:
                            raise


def _is_old(path: str, before_ms: int) -> bool:
    with contextlib.suppress(FileNotFoundError):  # who made it has done with it
        return os.stat(path).st_mtime_ns // 1_000_000 < before_ms
    return False
