"""The folders of objects: made, flushed to the disk, and removed when they are empty.

A name is only on the disk if the names of all folders above it are. That costs an fsync per folder,
so a storage remembers the folders it has flushed. Invariants:

- *Only flushed folders are known.* A folder that exists may have been made a moment ago by another
  process that has not flushed its name yet.
- *Known folders stay known as long as nobody removes folders.* Another process may remove one, and
  a third may make it again. So whoever removes folders first makes the lock file one byte longer,
  and holds the lock until they are gone. A writer checks its length after its file has a name. If
  the folder was made again, the lock file had grown before. If not, the folder is the known one,
  and it stays, since it is no longer empty.
- *Nothing is lost by a removal.* The system removes no folder with anything in it, and a writer
  that finds its folder gone makes it again.
- Some folders are never removed: the root, those directly below it, hidden ones, and everything
  below a folder with a lock file of its own, which belongs to another storage.
"""
# Paths are plain strings here, since pathlib costs as much as the system calls:
# ruff: noqa: PTH112, PTH116, PTH119, PTH120

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from itertools import batched

from zarr_manifests.storage.disk import TEMP_PREFIX, Disk
from zarr_manifests.storage.locks import exclusive

__all__ = ["Folders"]

_A_TURN = 64  # folders removed while others wait
_STAYS = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT}  # the last: somebody else has removed it


class Folders:
    """The folders at and below a root, as known to one storage.

    Parameters
    ----------
    root : str
        The absolute path of the root folder.
    lock : str
        The path of its lock file, which is held while objects are deleted.
    disk : Disk
        Makes the system calls that change the disk.
    """

    def __init__(self, root: str, lock: str, disk: Disk) -> None:
        self._root, self._lock, self._disk = root, lock, disk
        # The length of the lock file, and folders whose own names are known to be on the disk.
        self._known: tuple[int, set[str]] = (0, {"/"})
        self._made: set[str] = set()  # folders made here whose names may not be on the disk

    def make(self, folder: str) -> None:
        """Make the folder and missing folders above it."""
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
        """Flush the names in these folders, and the folders' own names, each once.

        Each folder contains a file that the caller has just written or found.
        """
        settled, to_sync = self._settled(), dict.fromkeys(folders)
        unsettled: dict[str, None] = {}
        for folder in tuple(to_sync):
            # A folder at or below the root is known only once this storage has flushed it.
            while (folder not in settled and folder not in unsettled) and (
                len(folder) >= len(self._root) or folder in self._made
            ):
                unsettled[folder] = None
                folder = os.path.dirname(folder)
                to_sync[folder] = None
        for folder in sorted(to_sync, reverse=True):  # deepest first
            try:
                self._disk.fsync_dir(folder)
            except PermissionError:
                # The folder above the root may be unreadable; then the root was not made here.
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
            # A new set: what other threads add to the old one is no longer known.
            settled = {"/"}
            self._known = removals, settled
        return settled

    def leftovers(self, before_ms: int) -> tuple[list[str], list[str]]:
        """Return temporary files and empty folders that have not changed since then.

        Nothing is changed here. The result may be outdated a moment later.

        Parameters
        ----------
        before_ms : int
            Milliseconds since 1970 UTC.

        Returns
        -------
        tuple of (list of str, list of str)
            Paths of files, and of folders that have only such files and folders in them, deepest
            first.
        """
        files: list[str] = []
        visited: list[tuple[str, list[str]]] = []  # folders, and what is in them
        lock_name = os.path.basename(self._lock)
        due = [self._root]
        while due:
            folder = due.pop()
            try:
                with os.scandir(folder) as found:
                    entries = [*found]
            except OSError:  # it has just been removed, or may not be read
                continue
            if folder != self._root and any(entry.name == lock_name for entry in entries):
                continue
            visited.append((folder, [entry.path for entry in entries]))
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if not entry.name.startswith("."):
                        due.append(entry.path)
                elif entry.name.startswith(TEMP_PREFIX) and _is_old(entry.path, before_ms):
                    files.append(entry.path)
        empty: list[str] = []
        gone = set(files)
        for folder, within in reversed(visited):
            stays = self._root in (folder, os.path.dirname(folder))
            if not stays and gone.issuperset(within) and _is_old(folder, before_ms):
                gone.add(folder)
                empty.append(folder)
        return files, empty

    def remove(self, folders: Iterable[str]) -> None:
        """Remove the empty ones of these folders, in order."""
        for some in batched(folders, _A_TURN):
            # No object is deleted while we hold the lock. So nobody who has seen the file grow can
            # have found an object in a folder that is empty now.
            with exclusive(self._lock):
                os.truncate(self._lock, os.stat(self._lock).st_size + 1)  # takes no room
                for folder in some:
                    try:
                        self._disk.rmdir(folder)
                    except OSError as error:
                        if error.errno not in _STAYS:
                            raise


def _is_old(path: str, before_ms: int) -> bool:
    with contextlib.suppress(FileNotFoundError):  # its writer has just finished
        return os.stat(path).st_mtime_ns // 1_000_000 < before_ms
    return False
