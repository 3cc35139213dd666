"""A cache of metadata objects and chunks in a local folder, shared by all processes of one user.

A file is `<folder>/<repository id>/<2 hex digits>/<key, / as +>+<length>+<crc32c>`. It holds just
the object's bytes, so its name says what its content must be. A chunk's file is named by a digest
of all that its ref records, and ends with a checksum. Invariants:

- Never wrong: length and checksum are compared on every read, and a file that differs is deleted.
  Never an error: a file that cannot be read counts as missing, and a write that fails (no room, no
  permission, no folder) is skipped and counted.
- Safe among processes. A file gets its name by a rename once it is complete. A reader that has it
  open can go on reading when it is deleted. A killed process leaves at most a temporary file, which
  is deleted after an hour. Nothing is fsynced, so after a crash of the machine files may have wrong
  bytes, which the next read detects.
- Private: only the owner can read files and folders. A folder owned by somebody else is refused,
  since a checksum protects against damage, not against intent.
- Bounded: when a process has written a sixteenth of `directory_bytes` since it last looked, it
  deletes the least recently read files until nine tenths are left. A file counts in blocks of
  4 KiB. A read sets the modification time, since many file systems do not record access times.
"""
# Paths are plain strings here, since pathlib costs as much as the system calls:
# ruff: noqa: PTH100, PTH102, PTH103, PTH111, PTH116, PTH118, PTH120

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
from collections.abc import Callable, Iterator
from typing import Final

from zarr_manifests.config import CacheOptions
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.envelope import is_sound
from zarr_manifests.format.records import BlobRef
from zarr_manifests.ids import crc32c
from zarr_manifests.keys import check_inside
from zarr_manifests.metrics import Meter
from zarr_manifests.runtime import ForkSafeLock, Runtime
from zarr_manifests.storage.disk import PosixDisk, open_regular

_LOG = logging.getLogger(__name__)

_BLOCK_BYTES: Final = 4096
_LOOK_AFTER: Final = 16
_SUM_BYTES: Final = 4
_TEMP: Final = ".tmp-"
_TEMP_KEPT_MS: Final = 3_600_000


class DiskCache:
    """One repository's part of the folder; made by `open`. Thread-safe and fork-safe."""

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
        self._folder = os.path.join(folder, check_inside(repository_id))
        self._max_bytes = max_bytes
        self._runtime = runtime
        self._meter = meter
        self._disk = disk or PosixDisk()
        self._lock = ForkSafeLock()
        self._unseen_bytes = max_bytes  # at first, what others have written is unknown
        self._warned = False

    @staticmethod
    def check(options: CacheOptions) -> str | None:
        """Return the path of the folder, made if necessary; None if none is configured.

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
        """Open the repository's part of the folder; None if no folder is configured.

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
        """Whether there is a file for the object, which may be damaged."""
        return os.path.lexists(self._path(ref))

    def get(self, ref: BlobRef) -> bytes | None:
        """The object's verified bytes; None if they are not cached."""
        return self._get(
            self._path(ref), ref.length, lambda data: is_sound(data, ref.length, ref.crc32c)
        )

    def get_chunk(self, identity: bytes, length: int) -> bytes | None:
        """The verified bytes of the chunk with that identity; None if they are not cached."""

        def is_whole(data: bytes) -> bool:
            chunk, sum_ = data[:-_SUM_BYTES], data[-_SUM_BYTES:]
            return len(chunk) == length and _sum_of(identity, chunk) == sum_

        found = self._get(self._chunk_path(identity), length + _SUM_BYTES, is_whole)
        return None if found is None else found[:-_SUM_BYTES]

    def has_chunk(self, identity: bytes) -> bool:
        """Whether there is a file for the chunk with that identity, which may be damaged."""
        return os.path.lexists(self._chunk_path(identity))

    def _get(self, path: str, length: int, is_whole: Callable[[bytes], bool]) -> bytes | None:
        try:
            fd = open_regular(path)
            with os.fdopen(fd, "rb") as file:
                data = file.read(length + 1)
                now_ns = self._runtime.now_ms() * 1_000_000
                os.utime(fd, ns=(now_ns, now_ns))
        except OSError:  # missing, just deleted, or unreadable: the caller fetches the object
            self._meter.add("disk_cache_misses")
            return None
        if not is_whole(data):
            self._meter.add("disk_cache_damaged_files")
            self._meter.add("disk_cache_misses")
            with contextlib.suppress(OSError):
                self._disk.unlink(path)
            return None
        self._meter.add("disk_cache_hits")
        return data

    def put(self, ref: BlobRef, data: bytes) -> None:
        """Keep the object's bytes, which the caller has verified, if there is room."""
        self._put(self._path(ref), data)

    def put_chunk(self, identity: bytes, data: bytes) -> None:
        """Keep a chunk's bytes, which the caller has verified, if there is room."""
        self._put(self._chunk_path(identity), data + _sum_of(identity, data))

    def _put(self, path: str, data: bytes) -> None:
        nbytes = _on_disk(len(data))
        if nbytes > self._max_bytes // 4:
            return
        try:
            self._write(path, data)
        except OSError as error:
            self._failed(error)
            return
        with self._lock:
            self._unseen_bytes += nbytes
            due = self._unseen_bytes * _LOOK_AFTER >= self._max_bytes
            if due:
                self._unseen_bytes = 0
        if due:
            with contextlib.suppress(RuntimeError):  # at exit; another process will tidy up
                self._runtime.background(self._tidy)

    def _path(self, ref: BlobRef) -> str:
        crc = f"{ref.crc32c:08x}"
        name = f"{ref.key.replace('/', '+')}+{ref.length}+{crc}"
        return os.path.join(self._folder, crc[-2:], name)

    def _chunk_path(self, identity: bytes) -> str:
        name = hashlib.blake2b(identity, digest_size=20).hexdigest()
        return os.path.join(self._folder, name[:2], f"chunk+{name}")

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
            _LOG.warning("the cache directory %s cannot be written: %s", self._root, error)

    def _tidy(self) -> None:
        """Delete old temporary files, and the least recently read files if there are too many."""
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


def _sum_of(identity: bytes, data: bytes) -> bytes:
    """The checksum of a chunk's file, which is at its end."""
    return crc32c(identity + data).to_bytes(_SUM_BYTES, "little")


def _on_disk(nbytes: int) -> int:
    return -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES


def _files(root: str, depth: int = 2) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    """The files `depth` folders below `root`, without those that were deleted meanwhile."""
    with contextlib.suppress(FileNotFoundError), os.scandir(root) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if depth and entry.is_dir(follow_symlinks=False):
                    yield from _files(entry.path, depth - 1)
                elif not depth and entry.is_file(follow_symlinks=False):
                    yield entry, entry.stat(follow_symlinks=False)
