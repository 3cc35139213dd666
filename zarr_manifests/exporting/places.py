"""Places that a plain Zarr store is written to: a folder, a bucket, or a store of Zarr.

They take any key that Zarr has, unlike the storages of repositories. Invariant: an object gets its
name when it is whole, also if the process is killed.
"""
# Paths are plain strings here, as what a scan of a folder gives:
# ruff: noqa: PTH103, PTH108, PTH110, PTH112, PTH113, PTH118, PTH120

from __future__ import annotations

import asyncio
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, BinaryIO, Protocol

from zarr.abc.store import Store
from zarr.core.buffer import cpu, default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore, ObjectStore

from zarr_manifests.error_cases import ObjectNotFoundError, UnsupportedStorageError
from zarr_manifests.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    ManifestsError,
    ReadOnlyError,
    StorageError,
)
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage import Storage
from zarr_manifests.storage.disk import PosixDisk
from zarr_manifests.storage.files import open_regular
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.local_errors import translated
from zarr_manifests.storage.metered import unmetered
from zarr_manifests.storage.object_store import ObjectStorage
from zarr_manifests.storage.object_versions import Version
from zarr_manifests.storage.own import own_storage
from zarr_manifests.storage.url import refuse_options, storage_of
from zarr_manifests.virtual.locations import parse_location

__all__ = [
    "Bucket",
    "Folder",
    "Place",
    "ZarrStore",
    "check_apart",
    "file_path",
    "new_file",
    "place_of",
]

_AT_ONCE = 16
_DISK = PosixDisk()


class Place(Protocol):
    """Bytes under the keys of a Zarr store."""

    @property
    def name(self) -> str:
        """What the place is called in reports and errors."""

    @property
    def deletes(self) -> bool:
        """Whether objects can be deleted."""

    def is_empty(self) -> bool:
        """Whether nothing is there."""

    def get(self, key: str) -> bytes | None:
        """The object, or None."""

    def put(self, items: Sequence[tuple[str, bytes]]) -> None:
        """Write objects, replacing those that are there."""

    def flush(self) -> None:
        """See that everything that was put survives a crash of the machine."""

    def sizes(self) -> Mapping[str, int]:
        """The size of each object, where it is cheap to find out."""

    def delete(self, key: str) -> None:
        """Delete an object."""

    def clear(self, kept: str) -> None:
        """Delete everything except one object."""


def place_of(dest: Any, storage_options: Mapping[str, object] | None) -> Place:
    """The place that a path, a URL, a storage or a store of Zarr means.

    Raises
    ------
    InvalidArgumentError
        If it is none of these, or a file.
    ReadOnlyError
        If it is a store that is read-only.
    UnsupportedStorageError
        If nothing can be written there.
    """
    if isinstance(dest, Store):
        refuse_options("a store", storage_options)
        if dest.read_only:
            raise ReadOnlyError("the store to export to is read-only")
        if isinstance(dest, LocalStore):
            return Folder(str(dest.root))
        own = own_storage(dest) if isinstance(dest, ObjectStore | FsspecStore) else None
        return Bucket(own) if isinstance(own, ObjectStorage) else ZarrStore(dest)
    if not isinstance(dest, str | os.PathLike | Storage) and not hasattr(dest, "list"):
        raise InvalidArgumentError(
            f"dest={dest!r:.80}: give a path, a URL, a storage or a store of Zarr"
        )
    storage = unmetered(storage_of(dest, storage_options))
    if isinstance(storage, LocalStorage):
        return Folder(storage.path)
    if isinstance(storage, ObjectStorage):
        if storage.place.read_only:
            raise UnsupportedStorageError(f"{storage.url} can only be read")
        return Bucket(storage)
    raise InvalidArgumentError(
        f"{storage.url} cannot hold every key of Zarr: give a path, a bucket, or a store of Zarr, "
        "such as zarr.storage.MemoryStore()"
    )


def file_path(dest: Any, storage_options: Mapping[str, object] | None, *, overwrite: bool) -> str:
    """The path of a local file to write.

    Raises
    ------
    InvalidArgumentError
        If it is not the path of a file.
    AlreadyExistsError
        If there is one that is not to be replaced.
    """
    url = parse_location(dest) if isinstance(dest, str) and "://" in dest else None
    if not isinstance(dest, str | os.PathLike) or (url is not None and url[0] != "file"):
        raise InvalidArgumentError(f"dest={dest!r:.80}: give the path of a local file")
    refuse_options("a local file", storage_options)
    path = os.path.abspath(os.fsdecode(dest) if url is None else url[1])  # noqa: PTH100
    if "\0" in path or os.path.isdir(path):
        raise InvalidArgumentError(f"{path!r} is a folder, or no path; give the path of a file")
    if os.path.exists(path) and not os.path.isfile(path):
        raise InvalidArgumentError(f"{path} is a device or a pipe; give the path of a file")
    if os.path.lexists(path) and not overwrite:
        raise AlreadyExistsError(f"{path} exists; overwrite=True replaces it")
    return path


def check_apart(storage: object, place: Place | str) -> None:
    """Refuse a place or the path of a file in the repository, and a place that holds it.

    Raises
    ------
    InvalidArgumentError
        If it is one.
    """
    bare: Any = unmetered(storage)  # type: ignore[arg-type]
    name = place if isinstance(place, str) else place.name
    if isinstance(place, Folder | str) and isinstance(bare, LocalStorage):
        here, there = os.path.realpath(bare.path), os.path.realpath(name)
    elif isinstance(place, Bucket) and isinstance(bare, ObjectStorage):
        here, there = bare.url, name
    else:
        return
    if _holds(here, there) or _holds(there, here):
        raise InvalidArgumentError(
            f"{name} is in the repository, or holds it: export to another place"
        )


def _holds(outer: str, inner: str) -> bool:
    return f"{inner.rstrip('/')}/".startswith(f"{outer.rstrip('/')}/")


@contextmanager
def new_file(path: str, *, overwrite: bool) -> Iterator[BinaryIO]:
    """A file that gets its name at the end of the block, if nothing failed.

    Raises
    ------
    AlreadyExistsError
        If there is a file of that name, and it is not to be replaced.
    StorageError
        If it cannot be written.
    """
    folder = os.path.dirname(path)
    with translated(path):
        os.makedirs(folder, exist_ok=True)
        temp = _DISK.open_temp(folder)
    file = os.fdopen(os.dup(temp.fd), "wb")
    try:
        yield file
        try:
            with translated(path):
                file.flush()
                _DISK.fsync_file(temp.fd)
            (_DISK.rename if overwrite else _DISK.link)(temp, path)
        except FileExistsError as error:
            raise AlreadyExistsError(f"{path} exists; overwrite=True replaces it") from error
        with translated(path):
            _DISK.fsync_dir(folder)
    finally:
        with suppress(OSError):  # of a file that is given up: `flush` has said it before
            file.close()
        os.close(temp.fd)
        if temp.path is not None:
            _DISK.unlink(temp.path)


class Folder:
    """A local folder, which is made when something is put there."""

    deletes = True

    def __init__(self, path: str) -> None:
        self.name = os.path.abspath(path)  # noqa: PTH100 - a str is due
        if os.path.lexists(self.name) and not os.path.isdir(self.name):
            raise InvalidArgumentError(f"{self.name} is a file; give a folder")
        self._folders: set[str] = set()

    def is_empty(self) -> bool:
        return not os.path.isdir(self.name) or not os.listdir(self.name)  # noqa: PTH208

    def get(self, key: str) -> bytes | None:
        try:
            path = os.path.join(self.name, key)
            with os.fdopen(open_regular(path, follow_links=True), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"{self.name}/{key} cannot be read: {error}") from error

    def put(self, items: Sequence[tuple[str, bytes]]) -> None:
        SYSTEM.parallel([partial(self._put_each, items[i::_AT_ONCE]) for i in range(_AT_ONCE)])

    def _put_each(self, items: Iterable[tuple[str, bytes]]) -> None:
        for key, data in items:
            self._put_one(f"{self.name}/{key}", data)

    def _put_one(self, path: str, data: bytes) -> None:
        folder = os.path.dirname(path)
        with translated(path):
            if folder not in self._folders:
                os.makedirs(folder, exist_ok=True)
                self._folders.add(folder)
            temp = _DISK.open_temp(folder)
            try:
                _DISK.write(temp, data)
                _DISK.fsync_file(temp.fd)
                _DISK.rename(temp, path)
            finally:
                os.close(temp.fd)
                if temp.path is not None:
                    _DISK.unlink(temp.path)

    def flush(self) -> None:
        above = {self.name, os.path.dirname(self.name)}
        for folder in self._folders:
            while len(folder) > len(self.name):
                above.add(folder)
                folder = os.path.dirname(folder)
        with translated(self.name):
            SYSTEM.parallel([partial(_DISK.fsync_dir, folder) for folder in sorted(above)])

    def sizes(self) -> Mapping[str, int]:
        found: dict[str, int] = {}
        for folder, folders, names in os.walk(self.name):
            for name in (*folders, *names):
                path = os.path.join(folder, name)
                there = os.lstat(path)
                if stat.S_ISLNK(there.st_mode):
                    raise InvalidArgumentError(
                        f"{path} is a link, which an export does not follow: remove it, or export "
                        "to another folder"
                    )
                if name in names:
                    found[path[len(self.name) + 1 :]] = there.st_size
        return found

    def delete(self, key: str) -> None:
        with translated(self.name):
            os.unlink(os.path.join(self.name, key))

    def clear(self, kept: str) -> None:
        self._folders.clear()
        with translated(self.name), os.scandir(self.name) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                elif entry.name != kept:
                    os.unlink(entry.path)


class Bucket:
    """A prefix in a bucket."""

    deletes = True

    def __init__(self, storage: ObjectStorage) -> None:
        self.name = storage.url
        self._storage = storage

    def is_empty(self) -> bool:
        return next(self._storage.files(), None) is None

    def get(self, key: str) -> bytes | None:
        try:
            found = self._storage.get_version(key, 0, 1 << 20, Version())
        except ObjectNotFoundError:
            return None
        return None if found is None else found[0]

    def put(self, items: Sequence[tuple[str, bytes]]) -> None:
        put = self._storage.put_file
        SYSTEM.parallel([partial(put, key, data) for key, data in items])

    def flush(self) -> None:
        """A bucket keeps what it has confirmed."""

    def sizes(self) -> Mapping[str, int]:
        return {info.key: info.nbytes for info in self._storage.files()}

    def delete(self, key: str) -> None:
        self._storage.delete_files([key])

    def clear(self, kept: str) -> None:
        self._storage.delete_files(i.key for i in self._storage.files() if i.key != kept)


class ZarrStore:
    """A store of Zarr, in memory, in a ZIP file or anywhere."""

    def __init__(self, store: Store) -> None:
        self.name = str(store).partition("\n")[0]
        self._store = store
        self.deletes = store.supports_deletes

    def is_empty(self) -> bool:
        return bool(self._asked(lambda: self._store.is_empty("")))

    def get(self, key: str) -> bytes | None:
        found = self._asked(lambda: self._store.get(key, default_buffer_prototype()))
        return None if found is None else bytes(found.to_bytes())

    def put(self, items: Sequence[tuple[str, bytes]]) -> None:
        async def put() -> None:
            limit = asyncio.Semaphore(_AT_ONCE)

            async def one(key: str, data: bytes) -> None:
                async with limit:
                    await self._store.set(key, cpu.Buffer.from_bytes(data))

            await asyncio.gather(*(one(key, data) for key, data in items))

        self._asked(put)

    def flush(self) -> None:
        """A store has no such call."""

    def sizes(self) -> Mapping[str, int]:
        return {}  # nothing says that what is there is whole

    def delete(self, key: str) -> None:
        self._asked(lambda: self._store.delete(key))

    def clear(self, kept: str) -> None:
        async def clear() -> None:
            for key in [key async for key in self._store.list() if key != kept]:
                await self._store.delete(key)

        self._asked(clear)

    def _asked(self, call: Callable[[], Any]) -> Any:
        """What the store answers; whatever it raises becomes an error of this package."""
        try:
            return sync(call())
        except ManifestsError:
            raise
        except Exception as error:
            raise StorageError(f"{self.name} failed: {str(error).partition(chr(10))[0]}") from error
