"""Storages in stores that the caller has opened: of obstore, zarr or fsspec.

Any filesystem of fsspec can be read. Only those of s3fs and adlfs can be written: `pipe_file` of
both can create, but not swap, and does not always tell a refused condition from another failure. So
objects are put by the call below it, and judged by the status of the answer. Before its first
conditional write to a place, each process lets writers race for one object. If more than one wins,
nothing is written. All else is as for any object store, since a filesystem answers as obstore does.

Invariants:

- No text of the filesystem is passed on, and no error is chained to its own: they may contain
  addresses and signatures.
- The filesystem's own cache of listings is never relied on.
- *A forked child has its own filesystem*, since the threads of the parent's do not exist there.
- A pickle contains the filesystem's options, so one with secrets among them is not pickled.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from zarr_manifests.errors import InvalidArgumentError, StorageError, UnsupportedStorageError
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.object_clients import Endpoint, FailedCallError, Failure, has_secrets
from zarr_manifests.storage.object_store import ObjectStorage, race
from zarr_manifests.storage.protocol import Capabilities, Storage, Token

_TIMES: Final = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")
# What says that there is such an object already. Azure says 409; S3 does of one that others write.
_EXISTS: Final = {"s3fs": (412,), "adlfs": (409, 412)}
_REFUSED: Final = {404: "absent", 409: "contended", 412: "changed"}
_ABSENT: Final = FileNotFoundError, IsADirectoryError, NotADirectoryError


def package_of(fs: Any) -> str:
    """`"s3fs"` or `"adlfs"` for a filesystem of these, else empty; others may have their URLs."""
    packages = (base.__module__.partition(".")[0] for base in type(fs).__mro__)
    return next((name for name in packages if name in _EXISTS), "")


class FsspecStorage(ObjectStorage):
    """Storage in a folder of an fsspec filesystem; opened by `own_storage`.

    Parameters
    ----------
    fs : fsspec.AbstractFileSystem
        The filesystem; an asynchronous one is made again as a synchronous one.
    path : str
        The folder, as the filesystem names it.
    read_only : bool
        Whether nothing may be written with s3fs and adlfs either.

    Raises
    ------
    InvalidArgumentError
        If the path has a user or a query.

    Examples
    --------
    >>> import fsspec
    >>> from zarr_manifests.storage.fsspec_store import FsspecStorage
    >>> FsspecStorage(fsspec.filesystem("memory"), "/winds").capabilities.cas
    False
    """

    _shown = "several writers at once all succeeded with"

    def __init__(self, fs: Any, path: str, *, read_only: bool = False) -> None:
        files = _Files(getattr(fs, "sync_fs", fs), path)
        rest = files.path.partition("://")[2]
        if "@" in rest.partition("/")[0] or "?" in rest:
            raise InvalidArgumentError(
                "a path with a user, a password or a query in it is refused, since paths end up in "
                "logs and pickles: give them to the filesystem"
            )
        self._files, only_read = files, read_only or not package_of(fs)
        url, told = str(fs.unstrip_protocol(files.path)), (("filesystem", str(fs._fs_token)),)
        super().__init__(Endpoint("fsspec", url, "", told, store=files, only_read=only_read))

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        fs = self._files.fs
        if has_secrets([fs.storage_args, fs.storage_options]):
            raise StorageError(
                "a storage of an fsspec filesystem with secrets in its options cannot be pickled: "
                "let the filesystem find its credentials in the environment"
            )
        return partial(type(self), read_only=self.place.only_read), (fs, self._files.path)

    @property
    def capabilities(self) -> Capabilities:
        shared = not self.url.startswith("memory:")
        return replace(super().capabilities, durable=shared, shared=shared)

    def _library(self) -> _Files:
        return self._files

    def _client(self, nbytes: int | None = None, *, singly: bool = False) -> None:
        return None

    async def get_async(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return await asyncio.to_thread(self.get, key, start, length)

    async def create_async(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        return await asyncio.to_thread(partial(self.create, key, data, durable=durable))

    def _version(self, token: Token) -> dict[str, str] | None:
        return {"e_tag": token} if token.startswith('"') else None  # not an etag, so of no version

    def _refuse_read_only(self) -> None:
        if self.place.read_only:
            raise UnsupportedStorageError(
                f"{self.url} was opened read-only: of fsspec's filesystems only s3fs and adlfs let "
                "exactly one of several writers win. To write, use one of them, or from_url(...) "
                "if it opens the same place"
            )

    def _find_ignored(self, *, swaps: bool) -> str:
        """The condition that a race of writers shows to be ignored; empty if there is none."""
        key = f".race-{SYSTEM.random_bytes(8).hex()}"  # not a valid key, so never listed
        try:
            return (race(partial(self._swap, key)) or ("",))[0]
        finally:
            self._delete_one(key)


# --- calls of the filesystem ---------------------------------------------------------------


type _Bytes = bytes


class _Answer(NamedTuple):
    """An object, as an answer of obstore has it."""

    data: _Bytes
    meta: dict[str, Any]

    def bytes(self) -> _Bytes:
        """Its bytes."""
        return self.data

    def stream(self, **_: int) -> Iterator[_Bytes]:
        """Its bytes, as one part."""
        yield self.data


class _Files:
    """Answers what is asked of obstore, by a filesystem of fsspec."""

    exceptions: Final = SimpleNamespace(BaseError=FailedCallError)

    def __init__(self, fs: Any, path: str) -> None:
        self.fs, self._process = fs, 0 if getattr(fs, "asynchronous", False) else os.getpid()
        self.path = str(fs._strip_protocol(path)).rstrip("/")

    def _ask[Found](
        self, key: str, call: Callable[[Any, str], Found], kinds: dict[int, str] | None = None
    ) -> Found:
        """What the call returns, of this process's filesystem and the path of the object."""
        try:
            if self._process != os.getpid():
                given = {k: v for k, v in self.fs.storage_options.items() if k != "asynchronous"}
                self.fs = type(self.fs)(*self.fs.storage_args, **given)
                self._process = os.getpid()
            self.fs.invalidate_cache()
            return call(self.fs, f"{self.path}/{key}")
        except Exception as error:  # noqa: BLE001 - filesystems raise errors of any kind
            status, failed = _status(error), error
        kind = (kinds or {404: "absent"}).get(status, "filesystem")
        why = f"the filesystem failed with a {type(failed).__name__}"
        if isinstance(failed, PermissionError):
            why = "the filesystem's credentials do not allow it"
        if isinstance(failed, _ABSENT) and 404 in (kinds or {404: ""}):
            kind = "absent"  # where an object is made, its bucket is
        raise FailedCallError(Failure(kind, status or None, "", why))

    def get(self, _: object, key: str, options: dict[str, Any] | None = None) -> _Answer:
        """An object and its etag, if it is to be written; or a range of an object."""
        within: Any = (options or {}).get("range", (None, None))
        start, end = (within["offset"], None) if isinstance(within, dict) else within
        none = {"e_tag": None, "last_modified": datetime.fromtimestamp(0, UTC), "size": None}
        if options is None and package_of(self.fs):
            found: _Answer = self._ask(key, partial(_run, _get))
            return found
        try:
            data = self._ask(
                key, lambda fs, at: bytes(fs.cat_file(at, start=start or None, end=end))
            )
        except FailedCallError:
            if (start or 0) < self.head(None, key)["size"]:
                raise
            data = b""  # many refuse a range that begins beyond the object
        return _Answer(data, none | ({} if options else {"size": len(data)}))

    def head(self, _: object, key: str) -> dict[str, Any]:
        """Size and time of an object."""
        found = self._ask(key, lambda fs, at: fs.info(at))
        if found.get("type") == "directory":
            raise FailedCallError(Failure("absent"))
        return _meta(key, found)

    def list(self, _: object, folder: str | None, **__: Any) -> Iterator[Sequence[dict[str, Any]]]:
        """All files in the folder, in order; their names are relative to the place."""
        skipped = len(self.path.lstrip("/")) + 1
        try:
            found = self._ask(folder or "", lambda fs, at: fs.find(at.rstrip("/"), detail=True))
        except FailedCallError as error:
            if error.failure.kind != "absent":
                raise
            found = {}
        names = ((name.lstrip("/")[skipped:], said) for name, said in sorted(found.items()))
        yield [_meta(name, said) for name, said in names if name]  # not the folder itself

    def put(self, _: object, key: str, data: bytes, *, mode: Any, **__: Any) -> dict[str, Any]:
        """Write an object; its new etag."""
        if mode == "overwrite":
            self._ask(key, lambda fs, at: fs.pipe_file(at, bytes(data)))
            return {}
        kinds = _REFUSED
        if mode == "create":
            kinds = {409: "contended"} | dict.fromkeys(_EXISTS[package_of(self.fs)], "exists")
        token = None if mode == "create" else mode["e_tag"]
        return {
            "e_tag": self._ask(key, lambda fs, at: _run(_put, fs, at, bytes(data), token), kinds)
        }

    def delete(self, _: object, keys: Sequence[str]) -> None:
        """Delete objects."""
        delete = partial(self._ask, call=lambda fs, at: fs.rm_file(at))
        SYSTEM.parallel([partial(delete, key) for key in keys])


def _meta(key: str, said: dict[str, Any]) -> dict[str, Any]:
    """What obstore says of an object."""
    time = next((said[name] for name in _TIMES if said.get(name)), 0)
    if isinstance(time, str):
        time = datetime.fromisoformat(time)
    at = time if isinstance(time, datetime) else datetime.fromtimestamp(int(time), UTC)
    return {"path": key, "size": int(said.get("size") or 0), "last_modified": at}


def _status(error: BaseException) -> int:
    """The status of the answer, which the client's error or its cause tells; 0 without one."""
    for one in (error, error.__cause__):
        said = getattr(one, "response", None)
        if isinstance(said, dict):
            return int(said.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)
        if isinstance(status := getattr(one, "status_code", None), int):
            return status
    return 412 if isinstance(error, FileExistsError) else 0


# --- the filesystems that can be written -------------------------------------------------------


def _run(call: Callable[..., Any], fs: Any, *args: Any) -> Any:
    return importlib.import_module("fsspec.asyn").sync(fs.loop, call, fs, *args)


async def _get(fs: Any, path: str) -> _Answer:
    bucket, name, _ = fs.split_path(path)
    if package_of(fs) == "s3fs":
        said = await fs._call_s3("get_object", Bucket=bucket, Key=name)
        async with said["Body"] as body:
            data = await body.read()
        return _Answer(data, {"e_tag": said["ETag"], "size": len(data)})
    async with fs.service_client.get_blob_client(bucket, name) as blob:
        stream = await blob.download_blob()
        data = await stream.readall()
    return _Answer(data, {"e_tag": str(stream.properties.etag), "size": len(data)})


async def _put(fs: Any, path: str, data: bytes, token: Token | None) -> Token:
    bucket, name, _ = fs.split_path(path)
    if package_of(fs) == "s3fs":
        condition = {"IfNoneMatch": "*"} if token is None else {"IfMatch": token}
        said = await fs._call_s3("put_object", Bucket=bucket, Key=name, Body=data, **condition)
        return str(said["ETag"])
    match = importlib.import_module("azure.core").MatchConditions
    condition = {"match_condition": match.IfMissing}
    if token is not None:
        condition = {"match_condition": match.IfNotModified, "etag": token}
    async with fs.service_client.get_blob_client(bucket, name) as blob:
        said = await blob.upload_blob(data, overwrite=True, **condition)
    return str(said["etag"])


# --- stores that the caller has opened ---------------------------------------------------------

_KINDS: Final = {"S3Store": "s3", "GCSStore": "gs", "AzureStore": "az", "HTTPStore": "http"}
_ENDPOINTS: Final = ("endpoint", "endpoint_url_s3", "base_url", "use_emulator")


def own_storage(location: object) -> Storage:
    """The storage in a store of obstore, zarr or fsspec.

    They are recognized by their classes and attributes, so no package is imported for it. The
    credentials, timeouts, retries and proxies of a store of obstore are used as they are, and its
    conditions are tested before the first conditional write of a process, whatever its endpoint is.
    Of fsspec's, only s3fs and adlfs are written. A store of zarr that is read-only stays so.

    Raises
    ------
    InvalidArgumentError
        If it is none of these.

    Examples
    --------
    >>> import fsspec
    >>> from zarr_manifests.storage.fsspec_store import own_storage
    >>> own_storage(fsspec.filesystem("memory").get_mapper("/winds"))
    FsspecStorage('memory:///winds')
    """
    read_only = getattr(location, "read_only", False) is True
    for client in (location, getattr(location, "store", None)):  # zarr.storage.ObjectStore
        if any(base.__module__.partition(".")[0] == "obstore" for base in type(client).__mro__):
            return _of_client(client, read_only=read_only and client is not location)
    files = getattr(location, "fs", None)
    path = getattr(location, "root", getattr(location, "path", None))
    if not hasattr(files, "cat_file") or not isinstance(path, str):
        raise InvalidArgumentError(
            f"a {type(location).__name__} is not a location: pass a path, a URL, a storage, or a "
            "store of obstore, zarr (ObjectStore, FsspecStore) or fsspec (a mapper). A session is "
            "read by xr.open_zarr(session.store), and written by to_session"
        )
    # zarr.storage.FsspecStore, or a mapper of fsspec.
    return FsspecStorage(files, path, read_only=read_only)


def _of_client(store: Any, *, read_only: bool) -> Storage:
    names = [base.__name__ for base in type(store).__mro__]
    if "LocalStore" in names and store.prefix is not None and not read_only:
        return LocalStorage(store.prefix)
    kind = next((_KINDS[name] for name in names if name in _KINDS), None)
    if kind is None:
        raise InvalidArgumentError(
            f"a {type(store).__name__} cannot hold a repository: of obstore.store, pass one of "
            f"{', '.join(_KINDS)}; for other places a path, file:// or memory://name"
        )
    if kind == "http":
        return ObjectStorage(Endpoint(kind, store.url, "", store=store))
    config = {name.lower().removeprefix("aws_"): value for name, value in store.config.items()}
    bucket = config.get("bucket") or config.get("container_name") or ""
    options = tuple((name, str(config[name])) for name in _ENDPOINTS if name in config)
    prefix = (store.prefix or "").strip("/")
    return ObjectStorage(Endpoint(kind, bucket, prefix, options, None, store, read_only))
