"""Writing through a filesystem without conditions, by one process at a time.

The process that writes keeps a lock object: its name, an epoch that grows with each owner, and the
time of its last sign of life. It reads the lock again before it writes, at the latest after
`_CHECK_S` seconds. Within the process, conditions are checked under locks of threads.

This is no protection against two owners: a process that is suspended in the middle of a write for
longer than `_STALE_S` seconds, a clock that is wrong by as much, and two processes that take a free
lock at the same moment can lose a commit.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import threading
from typing import Any, Final

from zarr_manifests.error_cases import ObjectNotFoundError
from zarr_manifests.errors import StorageError
from zarr_manifests.records import dataclass
from zarr_manifests.runtime import SYSTEM, ForkSafeLock
from zarr_manifests.storage.fsspec_files import FsspecFiles
from zarr_manifests.storage.protocol import Tagged, Token

__all__ = ["LOCK_KEY", "SingleWriter", "digest", "writer_of"]

LOCK_KEY: Final = ".writer"  # not a valid key, so it is no object and never listed
_CHECK_S: Final = 10.0
_SETTLE_S: Final = 0.5
_STALE_S: Final = 300.0
_STRIPES: Final = 64


@dataclass(frozen=True)
class _Lock:
    owner: str
    epoch: int
    seen_ms: int


class SingleWriter:
    """Writes as long as this process owns the lock object.

    Parameters
    ----------
    files : FsspecFiles
        The folder.
    """

    def __init__(self, files: FsspecFiles) -> None:
        self._files = files
        self._owner = f"{SYSTEM.who()} {SYSTEM.random_bytes(6).hex()}"
        self._epoch = 0  # that of this owner; 0 before it has written
        self._lost = False
        self._checked_s = 0.0
        self._lock = threading.Lock()
        self._stripes = [threading.Lock() for _ in range(_STRIPES)]

    failed = ""

    def create(self, key: str, data: bytes) -> bool:
        with self._stripe(key):
            self._own()
            if self._read_if_there(key) is not None:
                return False
            self._files.write(key, data)
            return True

    def swap(self, key: str, data: bytes, token: Token | None) -> Token | None:
        with self._stripe(key):
            self._own()
            there = self._read_if_there(key)
            if (None if there is None else digest(there)) != token:
                return None
            self._files.write(key, data)
            return digest(data)

    def read(self, key: str) -> Tagged:
        data = self._files.read(key, 0, None)
        return Tagged(data, digest(data))

    def write(self, key: str, data: bytes) -> None:
        with self._stripe(key):
            self._own()
            self._files.write(key, data)

    def delete(self, key: str) -> None:
        with self._stripe(key):
            self._own()
            self._files.delete(key)

    def release(self) -> None:
        """Let another process write at once, if this one owns the lock."""
        with self._lock:
            if self._epoch and not self._lost and self._is_owner(self._there()):
                self._files.write(LOCK_KEY, _said(_Lock(self._owner, self._epoch, 0)))
            self._epoch, self._lost = 0, False

    def _stripe(self, key: str) -> threading.Lock:
        return self._stripes[hash(key) % _STRIPES]

    def _read_if_there(self, key: str) -> bytes | None:
        try:
            return self._files.read(key, 0, None)
        except ObjectNotFoundError:
            return None

    def _own(self) -> None:
        """Return if this process may write now."""
        with self._lock:
            now_s = SYSTEM.monotonic_s()
            if self._epoch and not self._lost and now_s < self._checked_s + _CHECK_S:
                return
            there = self._there()
            if self._epoch and not self._is_owner(there):
                self._lost = True
            if self._lost:
                raise StorageError(
                    f"{self._files.url} is now written by {there.owner if there else 'nobody'}, "
                    "who has taken over from this process after five minutes without a write: open "
                    "the repository again, and have one process write at a time"
                )
            if not self._epoch:
                self._take(there)
            else:
                self._say()
            self._checked_s = now_s

    def _take(self, there: _Lock | None) -> None:
        age_s = (SYSTEM.now_ms() - there.seen_ms) / 1000 if there is not None else _STALE_S
        if there is not None and age_s < _STALE_S:
            raise StorageError(
                f"{self._files.url} is written by {there.owner}, whose last sign of life is "
                f"{max(0, round(age_s))} s old: without conditional writes one process writes at a "
                f"time. Have it call `release`, or wait until it has been silent for "
                f"{_STALE_S:.0f} s"
            )
        self._epoch = (there.epoch if there is not None else 0) + 1
        self._say()
        SYSTEM.sleep(_SETTLE_S)  # the last of several that take the lock at once owns it
        taken = self._there()
        if not self._is_owner(taken):
            self._epoch = 0
            raise StorageError(
                f"{self._files.url} was taken by another process at the same moment: have one "
                "process write at a time"
            )

    def _say(self) -> None:
        said = _said(_Lock(self._owner, self._epoch, SYSTEM.now_ms()))
        self._files.write(LOCK_KEY, said)

    def _is_owner(self, there: _Lock | None) -> bool:
        return there is not None and (there.owner, there.epoch) == (self._owner, self._epoch)

    def _there(self) -> _Lock | None:
        data = self._read_if_there(LOCK_KEY)
        if data is None:
            return None
        try:
            said = json.loads(data)
            return _Lock(str(said["owner"]), int(said["epoch"]), int(said["seen_ms"]))
        except (ValueError, KeyError, TypeError):
            raise StorageError(
                f"the lock {LOCK_KEY} in {self._files.url} is damaged: delete it if no process "
                "writes there"
            ) from None


_WRITERS: dict[tuple[int, Any, str], SingleWriter] = {}
_WRITERS_LOCK = ForkSafeLock()


def writer_of(files: FsspecFiles) -> SingleWriter:
    """The writer of this process at that place, whoever asks for it."""
    at = os.getpid(), files.fs, files.path
    with _WRITERS_LOCK:
        if at not in _WRITERS:
            _WRITERS[at] = SingleWriter(files)
        return _WRITERS[at]


def _release() -> None:
    for (process, _, _), writer in list(_WRITERS.items()):
        if process == os.getpid():
            with contextlib.suppress(StorageError):  # others wait until the lock is stale
                writer.release()


atexit.register(_release)


def _said(lock: _Lock) -> bytes:
    return json.dumps({"owner": lock.owner, "epoch": lock.epoch, "seen_ms": lock.seen_ms}).encode()


def digest(data: bytes) -> Token:
    """The token of a version where the filesystem has none."""
    return hashlib.blake2b(data, digest_size=20).hexdigest()
