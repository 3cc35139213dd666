"""A local disk that loses everything that was not fsynced when it crashes.

The model is as strict as POSIX allows:

- The bytes of a file are on the disk once the file is fsynced. Before that, a crash leaves the file
  empty or truncated.
- A change of a name (by `link`, `rename`, `mkdir`, `unlink` or `rmdir`) is on the disk once its
  folder is fsynced, whether or not the file was. Before that, a crash undoes it: a new name is
  gone, a replaced or removed file is back, and a new folder is gone with everything in it. A
  removed folder comes back as it was on the disk: changes in it that were not flushed before its
  removal are undone too, whatever is in a new folder of that name.
- With a random generator, each of these is lost or kept by chance. Of several changes to one name,
  the earlier ones are kept first.

Only changes that this process makes through the disk are tracked.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from storages.faulty import SimulatedCrash
from zarr_manifests.errors import StorageError
from zarr_manifests.storage.disk import PosixDisk, Temp
from zarr_manifests.storage.local import LocalStorage

type _File = tuple[int, int]  # device and inode


@dataclass(frozen=True, slots=True)
class _Change:
    """A change to a name that is not on the disk yet, and what was there before."""

    path: str
    before: bytes | None
    before_synced: bool = True
    inside: tuple[_Change, ...] | None = None
    """For a removed folder: its changes that were not on the disk."""


class CrashDisk(PosixDisk):
    """A disk for `LocalStorage` that records the calls that change it, and can crash.

    After a crash, make a new storage: the old one remembers folders that are gone. Neither the disk
    nor its storages can be pickled.

    Parameters
    ----------
    root : str or os.PathLike
        The folder of the storage.

    Examples
    --------
    >>> import tempfile
    >>> from storages import CrashDisk
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     disk = CrashDisk(folder)
    ...     storage = disk.storage()
    ...     _ = storage.create("kept", b"1"), storage.create("lost", b"2", durable=False)
    ...     disk.calls[:4]
    ...     disk.crash()
    ...     [info.key for info in disk.storage().list()]
    ['open_temp', 'write', 'fsync_file', 'link kept']
    ['kept']
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = str(Path(root).absolute())
        """The folder that paths in `calls` are relative to."""
        self.calls: list[str] = []
        """The calls since the start or the last crash, with paths relative to the root."""
        self.crash_at: int | None = None
        """The number of the call, counted from 1 in `calls`, that is never made: it and all later
        ones raise `SimulatedCrash`, until `crash` is called."""
        self._disk = PosixDisk()
        self._lock = threading.RLock()
        self._unsynced: set[_File] = set()
        self._changes: list[_Change] = []

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        raise StorageError("a disk that can crash keeps its state in this process: not picklable")

    def storage(self) -> LocalStorage:
        """A new storage of the folder on this disk, as a process opens it after a restart."""
        return LocalStorage(self.root, disk=self)

    def crash(self, rng: random.Random | None = None) -> None:
        """Lose what is not on the disk; the disk can then be used again, with a new storage.

        Parameters
        ----------
        rng : random.Random, optional
            Decides what is lost; without it, everything is.
        """
        with self._lock:
            # Files first: a restored file may get the inode of a file that is removed.
            for path in sorted(Path(self.root).rglob("*")):
                if path.is_file() and _file(path.stat()) in self._unsynced:
                    path.write_bytes(_torn(path.read_bytes(), rng))
            _lose(self._changes, rng)
            self._unsynced, self._changes, self.calls, self.crash_at = set(), [], [], None

    def open_temp(self, directory: str) -> Temp:
        with self._lock:
            self._note("open_temp")
            temp = self._disk.open_temp(directory)
            self._changes.append(_Change(str(temp.path), None))
            self._unsynced.discard(_file(os.fstat(temp.fd)))  # the inode may have been used before
            return temp

    def write(self, temp: Temp, data: bytes | memoryview) -> None:
        with self._lock:
            self._note("write")
            self._unsynced.add(_file(os.fstat(temp.fd)))
            self._disk.write(temp, data)

    def fsync_file(self, fd: int) -> None:
        with self._lock:
            self._note("fsync_file")
            self._unsynced.discard(_file(os.fstat(fd)))

    def fsync_dir(self, directory: str) -> None:
        with self._lock:
            self._note("fsync_dir", directory)
            folder = Path(directory)
            self._changes = [c for c in self._changes if Path(c.path).parent != folder]

    def mkdir(self, directory: str) -> None:
        self._change("mkdir", directory, lambda: self._disk.mkdir(directory))

    def rmdir(self, directory: str) -> None:
        with self._lock:
            self._note("rmdir", directory)
            self._disk.rmdir(directory)
            folder = Path(directory)
            inside = tuple(c for c in self._changes if Path(c.path).parent == folder)
            self._changes = [c for c in self._changes if Path(c.path).parent != folder]
            self._changes.append(_Change(directory, None, inside=inside))

    def link(self, temp: Temp, path: str) -> None:
        self._change("link", path, lambda: self._disk.link(temp, path))

    def rename(self, temp: Temp, path: str) -> None:
        self._change("rename", path, lambda: self._disk.rename(temp, path))

    def unlink(self, path: str) -> None:
        self._change("unlink", path, lambda: self._disk.unlink(path))

    def _note(self, op: str, path: str | None = None) -> None:
        if self.crash_at is not None and len(self.calls) + 1 >= self.crash_at:
            raise SimulatedCrash(f"before {op} {path or ''}")
        self.calls.append(op if path is None else f"{op} {os.path.relpath(path, self.root)}")

    def _change(self, op: str, path: str, make: Callable[[], None]) -> None:
        with self._lock:
            self._note(op, path)
            before, synced = None, True
            if Path(path).is_file():
                before = Path(path).read_bytes()
                synced = _file(Path(path).stat()) not in self._unsynced
            make()
            self._changes.append(_Change(path, before, synced))


def _file(status: os.stat_result) -> _File:
    return status.st_dev, status.st_ino


def _lose(changes: Sequence[_Change], rng: random.Random | None) -> None:
    """Undo the changes that are lost; without a random generator all of them."""
    by_path: dict[str, list[int]] = {}
    for i, change in enumerate(changes):
        by_path.setdefault(change.path, []).append(i)
    kept: set[int] = set()
    for numbers in by_path.values():
        kept.update(numbers[: rng.randint(0, len(numbers)) if rng else 0])
    for i in reversed(range(len(changes))):
        if i not in kept:
            _undo(changes[i], rng)


def _undo(change: _Change, rng: random.Random | None) -> None:
    path = Path(change.path)
    if not path.parent.is_dir():
        return  # lost with its folder
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if change.inside is not None:
        path.mkdir()
        _lose(change.inside, rng)
    if change.before is not None:
        path.write_bytes(change.before if change.before_synced else _torn(change.before, rng))


def _torn(content: bytes, rng: random.Random | None) -> bytes:
    return content[: rng.randint(0, len(content))] if rng else b""
