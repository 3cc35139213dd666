"""Objects in a filesystem of fsspec.

What a repository may do there depends on the mode:

- `"read"`: nothing is written.
- `"proven"`: the store decides who creates and who swaps. Only for filesystems of which that is
  known, and a race is held before the first conditional write of a process.
- `"single-writer"`: this process decides, as long as it owns a lock object (see `fsspec_writer`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import batched
from typing import Any, Final, Literal

from zarr_manifests.error_cases import UnsupportedStorageError
from zarr_manifests.errors import InvalidArgumentError, StorageError
from zarr_manifests.plain import plain_text
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage.fsspec_files import FsspecFiles
from zarr_manifests.storage.fsspec_proven import Conditions, is_proven
from zarr_manifests.storage.fsspec_writer import SingleWriter, digest, writer_of
from zarr_manifests.storage.protocol import (
    Capabilities,
    ObjectInfo,
    Tagged,
    Token,
    check_key,
    check_prefix,
    check_range,
    is_key,
)

__all__ = ["FsspecMode", "FsspecStorage", "from_fsspec"]

type FsspecMode = Literal["read", "proven", "single-writer"]

_AT_ONCE: Final = 16
_REMEMBERED: Final = 200_000
_VERSION_TRIES: Final = 5


def from_fsspec(fs: Any, path: str | None = None, mode: FsspecMode = "read") -> FsspecStorage:
    """Return the storage in a folder of an fsspec filesystem.

    Where `from_url` opens the same place, it is faster and holds more promises.

    Parameters
    ----------
    fs : fsspec.AbstractFileSystem or fsspec.FSMap
        A filesystem, or a mapper (`fs.get_mapper(path)`).
    path : str, optional
        The folder, as the filesystem names it. A mapper has its own.
    mode : {"read", "proven", "single-writer"}
        `"read"` writes nothing. `"proven"` is for s3fs and adlfs, whose conditional writes are
        tested by a race before the first one. `"single-writer"` works on any filesystem that can be
        written, for one process at a time, which keeps a lock object: two processes that both write
        can lose commits.

    Raises
    ------
    InvalidArgumentError
        If `fs` is neither, the path is missing or has a user or a query, or the mode is unknown.
    UnsupportedStorageError
        For the mode `"proven"` with another filesystem than those.

    Examples
    --------
    >>> import fsspec
    >>> from zarr_manifests.storage import from_fsspec
    >>> fs = fsspec.filesystem("memory")
    >>> from_fsspec(fs, "/winds", mode="single-writer")
    FsspecStorage('memory:///winds', mode='single-writer')
    """
    root = getattr(fs, "root", None)
    if root is not None and hasattr(fs, "fs"):
        fs, path = fs.fs, root if path is None else path
    if not isinstance(path, str):
        raise InvalidArgumentError("from_fsspec needs the path of a folder, a str")
    return FsspecStorage(FsspecFiles(fs, path), mode)


class FsspecStorage:
    """Storage in a folder of an fsspec filesystem; opened by `from_fsspec`.

    Parameters
    ----------
    files : FsspecFiles
        The folder.
    mode : {"read", "proven", "single-writer"}
        Who decides about conditions.

    Examples
    --------
    >>> import fsspec
    >>> from zarr_manifests.storage import from_fsspec
    >>> from_fsspec(fsspec.filesystem("memory"), "/winds").capabilities.cas
    False
    """

    def __init__(self, files: FsspecFiles, mode: FsspecMode) -> None:
        self._files, self._mode = files, mode
        self._writers: tuple[int, Conditions | SingleWriter] | None = None
        self._written: dict[str, None] = {}  # not passed to `sync` yet: known to exist
        if mode not in ("read", "proven", "single-writer"):
            raise InvalidArgumentError(
                f"mode {plain_text(str(mode)[:80])!r} is not one of 'read', 'proven' and "
                "'single-writer'"
            )
        if mode == "proven" and not is_proven(files.fs):
            raise UnsupportedStorageError(
                f"mode 'proven' is for s3fs and adlfs only: {type(files.fs).__name__} is not known "
                "to let exactly one of several writers win. Use from_url(...) if it opens the same "
                "place, mode='single-writer' for one process at a time, or mode='read'"
            )

    def __repr__(self) -> str:
        return f"FsspecStorage({self.url!r}, mode={self._mode!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._files, self._mode)

    @property
    def url(self) -> str:
        return self._files.url

    @property
    def mode(self) -> FsspecMode:
        """Who decides about conditions."""
        return self._mode

    @property
    def capabilities(self) -> Capabilities:
        writes = self._mode != "read" and not (self._writers and self._writers[1].failed)
        shared = self._files.protocol != "memory"
        return Capabilities(create=writes, cas=writes, durable=shared, shared=shared)

    def release(self) -> None:
        """In the mode `"single-writer"`, let another process write at once."""
        if self._mode == "single-writer":
            writer_of(self._files).release()

    # --- reading -----------------------------------------------------------------------------

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        check_range(start, length)
        return self._files.read(check_key(key), start, length)

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        for start, length in ranges:
            check_range(start, length)
        check_key(key)
        if len(ranges) == 1:
            return [self.get(key, *ranges[0])]
        for _ in range(_VERSION_TRIES):
            before = self._files.version(key)
            read = SYSTEM.parallel([partial(self._files.read, key, *pair) for pair in ranges])
            if self._files.version(key) == before:
                return read
        raise StorageError(
            f"{key!r} in {self.url} was replaced again and again while it was read; try again"
        )

    def get_tagged(self, key: str) -> Tagged:
        check_key(key)
        if self._mode == "proven":
            return self._writing().read(key)
        data = self._files.read(key, 0, None)
        return Tagged(data, digest(data))

    def head(self, key: str) -> ObjectInfo:
        return self._files.info(check_key(key))

    def list(self, prefix: str = "", after: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        return self._list(prefix, after)

    def _list(self, prefix: str, after: str) -> Iterator[ObjectInfo]:
        found = self._files.find(prefix.rpartition("/")[0])
        yield from sorted(
            (i for i in found if i.key.startswith(prefix) and i.key > after and is_key(i.key)),
            key=lambda info: info.key,
        )

    def stray(self) -> str | None:
        """The first name that is not a valid key."""
        names = sorted(info.key for info in self._files.find(""))
        return next((n for n in names if not n.startswith(".") and not is_key(n)), None)

    async def get_async(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return await asyncio.to_thread(self.get, key, start, length)

    # --- writing -----------------------------------------------------------------------------

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        check_key(key)
        self._writing().write(key, data)

    def create(self, key: str, data: bytes | memoryview, *, durable: bool = True) -> bool:
        check_key(key)
        created = self._writing().create(key, bytes(data))
        if not durable and len(self._written) < _REMEMBERED:
            self._written[key] = None
        return created

    def cas(
        self,
        key: str,
        data: bytes,
        token: Token | None,
        *,
        then_create: tuple[str, bytes] | None = None,
    ) -> Token | None:
        check_key(key)
        if then_create is not None:
            check_key(then_create[0])
        writer = self._writing()
        new = writer.swap(key, data, token)
        if new is not None and then_create is not None:
            with contextlib.suppress(RuntimeError):  # no more threads: the program is ending
                SYSTEM.background(partial(_create_after, writer, *then_create))
        return new

    def delete_many(self, keys: Iterable[str]) -> None:
        writer = self._writing()
        for some in batched(map(check_key, keys), _AT_ONCE):
            for key in some:
                self._written.pop(key, None)
            SYSTEM.parallel([partial(writer.delete, key) for key in some])

    def sync(self, keys: Iterable[str]) -> None:
        asked = {check_key(key) for key in keys}
        mine = asked & self._written.keys()
        for key in mine:
            self._written.pop(key, None)
        for some in batched(sorted(asked - mine), _AT_ONCE):
            SYSTEM.parallel([partial(self.head, key) for key in some])

    async def create_async(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        return await asyncio.to_thread(partial(self.create, key, data, durable=durable))

    def _writing(self) -> Conditions | SingleWriter:
        if self._mode == "read":
            raise UnsupportedStorageError(
                f"{self.url} was opened read-only: to write, use from_url(...) if it opens the "
                "same place, or from_fsspec(..., mode=...)"
            )
        writers = self._writers
        if writers is None or writers[0] != os.getpid():  # a forked child is another owner
            proven = self._mode == "proven"
            writer = Conditions(self._files) if proven else writer_of(self._files)
            self._writers = writers = os.getpid(), writer
        return writers[1]


def _create_after(writer: Conditions | SingleWriter, key: str, data: bytes) -> None:
    # The swap before it has succeeded, and is not affected by a failure here.
    with contextlib.suppress(StorageError):
        writer.create(key, data)
