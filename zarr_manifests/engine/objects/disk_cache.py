"""Metadata objects kept in a folder of the local disk, for all processes of one user.

A file is `<folder>/<repository id>/<2 hex digits>/<key, / as +>+<length>+<crc32c>`, the object's
bytes and nothing else, so its name says what must be in it. Invariants:

- Nothing wrong is ever returned: length and checksum are compared on every read, and a file that
  differs is deleted. Nothing is ever an error: what cannot be read is not there, and what cannot
  be written (no room, no permission, no folder any more) is left out and counted.
- Many processes may do everything at once. A file gets its name by a rename once it is whole;
  whoever has it open may go on reading when it is deleted. A killed process leaves at most a
  temporary file, which is deleted an hour later; and since nothing is fsynced, a machine that
  goes down may leave files with wrong bytes, which are found out when read.
- Files and folders are readable by their owner alone. A folder of somebody else's is refused: a
  checksum finds damage, not intent.
- Bounded: when a process has written a sixteenth of `directory_bytes` since it last looked, it
  deletes what was read longest ago, until nine tenths are left. A file counts as whole blocks of
  4 KiB. A read sets the time of modification, since many disks do not keep that of reading.
"""
# Paths are plain strings here, since pathlib costs as much as the system calls:
# ruff: noqa: PTH100, PTH102, PTH103, PTH111, PTH116, PTH118, PTH120

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Iterator
from typing import Final

from zarr_manifests.config import CacheOptions
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.envelope import is_sound
from zarr_manifests.metrics import Meter
from zarr_manifests.runtime import ForkSafeLock, Runtime
from zarr_manifests.storage.disk import PosixDisk
from zarr_manifests.storage.files import open_regular

__all__ = ["DiskCache"]

_LOG = logging.getLogger(__name__)

_BLOCK_BYTES: Final = 4096
_LOOK_AFTER: Final = 16
_TEMP: Final = ".tmp-"
_TEMP_KEPT_MS: Final = 3_600_000


class DiskCache:
    """What one repository has in the folder; made by `open`. Thread-safe and fork-safe."""

    def __init__(
        self,
        folder: str,
        max_bytes: int,
        repository_id: str,
        runtime: Runtime,
        meter: Meter,
        disk: PosixDisk | None = None,
    ) -> None:
        self._root = folder
        self._folder = os.path.join(folder, repository_id)
        self._max_bytes = max_bytes
        self._runtime = runtime
        self._meter = meter
        self._disk = disk or PosixDisk(anonymous=False)
        self._lock = ForkSafeLock()
        self._unseen_bytes = max_bytes  # what others have written is not known at first
        self._warned = False

    @staticmethod
    def check(options: CacheOptions) -> str | None:
        """The path of the folder, which is made if it is not there; None if none is wanted.

        Raises
        ------
        InvalidArgumentError
            If the folder cannot be made, or others can write to it.
        """
        if options.directory is None:
            return None
        root = os.path.abspath(os.path.expanduser(options.directory))
        with _usable(root):
            os.makedirs(root, 0o700, exist_ok=True)
            found = os.stat(root)
        sticky = found.st_mode & stat.S_ISVTX
        if found.st_uid not in (0, os.getuid()) or (found.st_mode & stat.S_IWOTH and not sticky):
            raise _refusal(root)
        return root

    @classmethod
    def open(
        cls,
        options: CacheOptions,
        repository_id: str,
        runtime: Runtime,
        meter: Meter,
        disk: PosixDisk | None = None,
    ) -> DiskCache | None:
        """The part of the folder that belongs to the repository; None if no folder is given.

        Raises
        ------
        InvalidArgumentError
            If the folder cannot be made, or others can write to it.
        """
        root = cls.check(options)
        if root is None:
            return None
        self = cls(root, options.directory_bytes, repository_id, runtime, meter, disk)
        with _usable(root):
            _make_private(self._folder)
            own = os.lstat(self._folder)
        if own.st_uid != os.getuid() or not stat.S_ISDIR(own.st_mode) or own.st_mode & 0o077:
            raise _refusal(self._folder)
        return self

    def has(self, ref: BlobRef) -> bool:
        """Whether there is a file for the object; it may turn out to be damaged."""
        return os.path.lexists(self._path(ref))

    def get(self, ref: BlobRef) -> bytes | None:
        """The object's bytes, sound; None if they are not here."""
        path = self._path(ref)
        try:
            fd = open_regular(path)
            with os.fdopen(fd, "rb") as file:
                data = file.read(ref.length + 1)
                now_ns = self._runtime.now_ms() * 1_000_000
                os.utime(fd, ns=(now_ns, now_ns))
        except OSError:  # not here, or deleted meanwhile, or not readable: it is fetched
            self._meter.add("disk_cache_misses")
            return None
        if not is_sound(data, ref.length, ref.crc32c):
            self._meter.add("disk_cache_damaged_files")
            self._meter.add("disk_cache_misses")
            with contextlib.suppress(OSError):
                self._disk.unlink(path)
            return None
        self._meter.add("disk_cache_hits")
        return data

    def put(self, ref: BlobRef, data: bytes) -> None:
        """Keep the object's bytes, which are sound, if there is room."""
        nbytes = _on_disk(len(data))
        if nbytes > self._max_bytes // 4:
            return
        try:
            self._write(self._path(ref), data)
        except OSError as error:
            self._failed(error)
            return
        with self._lock:
            self._unseen_bytes += nbytes
            due = self._unseen_bytes * _LOOK_AFTER >= self._max_bytes
            if due:
                self._unseen_bytes = 0
        if due:
            with contextlib.suppress(RuntimeError):  # the interpreter exits; another will see to it
                self._runtime.background(self._tidy)

    def _path(self, ref: BlobRef) -> str:
        crc = f"{ref.crc32c:08x}"
        name = f"{ref.key.replace('/', '+')}+{ref.length}+{crc}"
        return os.path.join(self._folder, crc[-2:], name)

    def _write(self, path: str, data: bytes) -> None:
        folder = os.path.dirname(path)
        try:
            temp = self._disk.open_temp(folder)
        except FileNotFoundError:
            _make_private(self._folder)
            _make_private(folder)
            temp = self._disk.open_temp(folder)
        try:
            os.fchmod(temp.fd, 0o600)
            self._disk.write(temp, data)
            now_ns = self._runtime.now_ms() * 1_000_000
            os.utime(temp.fd, ns=(now_ns, now_ns))
            self._disk.rename(temp, path)
        finally:
            os.close(temp.fd)
            if temp.path is not None:
                with contextlib.suppress(OSError):
                    self._disk.unlink(temp.path)

    def _failed(self, error: OSError) -> None:
        self._meter.add("disk_cache_failures")
        if not self._warned:
            self._warned = True
            _LOG.warning("the cache directory %s takes nothing: %s", self._root, error)

    def _tidy(self) -> None:
        """Delete left-over temporary files, and what was read longest ago if there is too much."""
        files = []
        try:
            for entry, found in _files(self._root):
                age_ms = self._runtime.now_ms() - found.st_mtime_ns // 1_000_000
                if not entry.name.startswith(_TEMP):
                    files.append((found.st_mtime_ns, entry.path, _on_disk(found.st_size)))
                elif age_ms > _TEMP_KEPT_MS:
                    with contextlib.suppress(FileNotFoundError):
                        self._disk.unlink(entry.path)
            total = sum(nbytes for _, _, nbytes in files)
            if total <= self._max_bytes:
                return
            for _, path, nbytes in sorted(files):
                if total <= self._max_bytes * 9 // 10:
                    return
                total -= nbytes
                with contextlib.suppress(FileNotFoundError):  # another process was faster
                    self._disk.unlink(path)
        except OSError as error:
            self._failed(error)


@contextlib.contextmanager
def _usable(root: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            f"the cache directory {root} cannot be used ({error}); choose another"
        ) from error


def _refusal(folder: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the cache directory {folder} is refused: others could write to it, and what they write "
        "would be read as metadata; choose one that belongs to this user alone"
    )


def _make_private(folder: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)


def _on_disk(nbytes: int) -> int:
    return -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES


def _files(root: str, depth: int = 2) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    """The files `depth` folders below `root`; what is deleted meanwhile is left out."""
    with contextlib.suppress(FileNotFoundError), os.scandir(root) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if depth and entry.is_dir(follow_symlinks=False):
                    yield from _files(entry.path, depth - 1)
                elif not depth and entry.is_file(follow_symlinks=False):
                    yield entry, entry.stat(follow_symlinks=False)
