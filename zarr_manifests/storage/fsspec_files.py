"""Calls of an fsspec filesystem, with errors of this package.

Invariants:

- No text of the filesystem is passed on, and no error is chained to its own: they may contain
  addresses and signatures.
- The filesystem's own cache of listings is never relied on.
- *A forked child has its own filesystem*, since the threads of the parent's do not exist there.
- A pickle contains the filesystem's options, so one with secrets among them is not pickled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final

from zarr_manifests.error_cases import ObjectNotFoundError
from zarr_manifests.errors import InvalidArgumentError, ManifestsError, StorageError
from zarr_manifests.storage.protocol import ObjectInfo
from zarr_manifests.storage.secrets import has_secrets

__all__ = ["FsspecFiles"]

_TAGS: Final = ("ETag", "etag", "generation", "ino")
_TIMES: Final = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")


class FsspecFiles:
    """A folder of an fsspec filesystem.

    Parameters
    ----------
    fs : fsspec.AbstractFileSystem
        The filesystem; an asynchronous one is made again as a synchronous one.
    path : str
        The folder, as the filesystem names it.

    Raises
    ------
    InvalidArgumentError
        If `fs` is no filesystem of fsspec, or the path contains a user, a password or a query.
    """

    def __init__(self, fs: Any, path: str) -> None:
        if not (hasattr(fs, "cat_file") and hasattr(fs, "storage_options")):
            raise InvalidArgumentError(
                f"from_fsspec takes a filesystem or a mapper of fsspec, not a {type(fs).__name__}"
            )
        fs = getattr(fs, "sync_fs", fs)
        self._kind, self._given = type(fs), (fs.storage_args, dict(fs.storage_options))
        self._given[1].pop("asynchronous", None)
        self._process = 0 if getattr(fs, "asynchronous", False) else os.getpid()
        self._fs = fs
        self.path = str(fs._strip_protocol(path)).rstrip("/")
        host = self.path.partition("://")[2].partition("/")[0]
        if "@" in host or ("://" in self.path and "?" in self.path):
            raise InvalidArgumentError(
                "a path with a user, a password or a query in it is refused, since paths end up in "
                "logs and pickles: give them to the filesystem"
            )

    def __reduce__(self) -> tuple[object, ...]:
        if has_secrets(self._given):
            raise StorageError(
                "a storage of an fsspec filesystem with secrets in its options cannot be pickled: "
                "let the filesystem find its credentials in the environment"
            )
        return _reopen, (self._kind, *self._given, self.path)

    @property
    def fs(self) -> Any:
        """The filesystem of this process."""
        if self._process != os.getpid():
            args, options = self._given
            self._fs, self._process = self._kind(*args, **options), os.getpid()
        return self._fs

    @property
    def protocol(self) -> str:
        """The filesystem's protocol, such as `"s3"`; the first, if it has several."""
        said = self._kind.protocol
        return said if isinstance(said, str) else str(said[0])

    @property
    def url(self) -> str:
        """Protocol and path."""
        return self.path if "://" in self.path else f"{self.protocol}://{self.path}"

    def at(self, key: str) -> str:
        """The path of an object."""
        return f"{self.path}/{key}"

    def ask(self, doing: str, key: str, call: Callable[[], Any]) -> Any:
        """Return what the call returns.

        Raises
        ------
        ObjectNotFoundError
            If it ends with a FileNotFoundError.
        StorageError
            If it ends with another error.
        """
        try:
            return call()
        except ManifestsError:
            raise
        except Exception as error:  # noqa: BLE001 - filesystems raise errors of any kind
            failed = error
        where = f"{key!r} in {self.url}" if key else self.url
        if isinstance(failed, FileNotFoundError | IsADirectoryError | NotADirectoryError):
            raise ObjectNotFoundError(f"there is no object {where}")
        if isinstance(failed, PermissionError):
            why = "the filesystem's credentials do not allow it"
        else:
            why = f"the filesystem failed with a {type(failed).__name__}"
        raise StorageError(f"cannot {doing} {where}: {why}")

    def read(self, key: str, start: int, length: int | None) -> bytes:
        """Return at most so many bytes of the object, from `start` on."""
        path = self.at(key)
        if start == 0 and length is None:
            return bytes(self.ask("read", key, lambda: self.fs.cat_file(path)))
        if length == 0:
            self.info(key)
            return b""
        end = None if length is None else start + length
        try:
            return bytes(
                self.ask("read", key, lambda: self.fs.cat_file(path, start=start, end=end))
            )
        except ObjectNotFoundError:
            raise
        except StorageError:
            if start < self.info(key).nbytes:
                raise
            return b""  # many refuse a range that begins beyond the object

    def info(self, key: str) -> ObjectInfo:
        """Size and time of the object."""
        return _info(key, self._said_of(key))

    def version(self, key: str) -> tuple[object, ...]:
        """What differs between versions of the object, as far as the filesystem tells."""
        said = self._said_of(key)
        return tuple(said.get(name) for name in (*_TAGS, "size", *_TIMES))

    def _said_of(self, key: str) -> Mapping[str, Any]:
        def ask() -> Any:
            self.fs.invalidate_cache()
            return self.fs.info(self.at(key))

        found: Mapping[str, Any] = self.ask("read", key, ask)
        if found.get("type") == "directory":
            raise ObjectNotFoundError(f"there is no object {key!r} in {self.url}")
        return found

    def write(self, key: str, data: bytes) -> None:
        """Write the object, replacing an existing one."""
        path = self.at(key)

        def put() -> None:
            try:
                self.fs.pipe_file(path, data)
            except FileNotFoundError:  # a filesystem with real folders
                self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
                self.fs.pipe_file(path, data)

        self.ask("write", key, put)

    def delete(self, key: str) -> None:
        """Delete the object, if there is one."""
        try:
            self.ask("delete", key, lambda: self.fs.rm_file(self.at(key)))
        except ObjectNotFoundError:
            return

    def find(self, folder: str) -> list[ObjectInfo]:
        """Names, relative to the place, sizes and times of all files in the folder, unordered."""
        path = self.at(folder).rstrip("/")

        def ask() -> Any:
            self.fs.invalidate_cache()
            return self.fs.find(path, detail=True)

        try:
            found: Mapping[str, Any] = self.ask("list", folder, ask)
        except ObjectNotFoundError:
            return []
        skipped = len(self.path.lstrip("/")) + 1
        return [_info(name.lstrip("/")[skipped:], said) for name, said in found.items()]


def _reopen(kind: Any, args: tuple[Any, ...], options: dict[str, Any], path: str) -> FsspecFiles:
    return FsspecFiles(kind(*args, **options), path)


def _info(key: str, said: Mapping[str, Any]) -> ObjectInfo:
    time = next((said[name] for name in _TIMES if said.get(name)), None)
    seconds: float = 0
    if isinstance(time, datetime):
        seconds = time.timestamp()
    elif isinstance(time, int | float):
        seconds = time
    elif isinstance(time, str):
        seconds = datetime.fromisoformat(time).timestamp()
    return ObjectInfo(key, int(said.get("size") or 0), int(seconds) * 1000)
