"""Objects in a folder of an fsspec filesystem.

Any filesystem can be read. Only those of s3fs and adlfs can be written: `pipe_file` of both can
create, but not swap, and does not always tell a refused condition from another failure. So objects
are put by the call below it, and judged by the status of the answer. Before its first conditional
write to a bucket, each process lets writers race for one object. If more than one wins, nothing is
written.

Invariants:

- No text of the filesystem is passed on, and no error is chained to its own: they may contain
  addresses and signatures.
- The filesystem's own cache of listings is never relied on.
- *A forked child has its own filesystem*, since the threads of the parent's do not exist there.
- A pickle contains the filesystem's options, so one with secrets among them is not pickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from itertools import batched
from typing import Any, Final

from zarr_manifests.errors import (
    InvalidArgumentError,
    ObjectNotFoundError,
    StorageError,
    UnsupportedStorageError,
)
from zarr_manifests.runtime import SYSTEM, ForkSafeLock
from zarr_manifests.storage.object_clients import has_secrets
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

_TIMES: Final = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")
_AT_ONCE: Final = 16
_TRIES: Final = 5
# What says that there is such an object already. Azure says 409; S3 does of one that others write.
_EXISTS: Final = {"s3fs": (412,), "adlfs": (409, 412)}

# By server and bucket: the condition that a race has shown to be ignored; empty if there is none.
_IGNORED: Final[dict[str, str]] = {}
_RACE: Final = ForkSafeLock()


def package_of(fs: Any) -> str:
    """`"s3fs"` or `"adlfs"` for a filesystem of these, else empty; others may have their URLs."""
    packages = (base.__module__.partition(".")[0] for base in type(fs).__mro__)
    return next((name for name in packages if name in _EXISTS), "")


class FsspecStorage:
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

    def __init__(self, fs: Any, path: str, *, read_only: bool = False) -> None:
        fs = getattr(fs, "sync_fs", fs)
        self._fs, self._process = fs, 0 if getattr(fs, "asynchronous", False) else os.getpid()
        self._writes, self._place = bool(package_of(fs)) and not read_only, ""
        self._path = str(fs._strip_protocol(path)).rstrip("/")
        self.url = str(fs.unstrip_protocol(self._path))
        rest = self._path.partition("://")[2]
        if "@" in rest.partition("/")[0] or "?" in rest:
            raise InvalidArgumentError(
                "a path with a user, a password or a query in it is refused, since paths end up in "
                "logs and pickles: give them to the filesystem"
            )

    def __repr__(self) -> str:
        return f"FsspecStorage({self.url!r})"

    def __reduce__(self) -> tuple[object, ...]:
        if has_secrets([self._fs.storage_args, self._fs.storage_options]):
            raise StorageError(
                "a storage of an fsspec filesystem with secrets in its options cannot be pickled: "
                "let the filesystem find its credentials in the environment"
            )
        return partial(type(self), read_only=not self._writes), (self._fs, self._path)

    @property
    def capabilities(self) -> Capabilities:
        writes = self._writes and not _IGNORED.get(self._place)
        shared = not self.url.startswith("memory:")
        return Capabilities(cas=writes, durable=shared, shared=shared)

    # --- reading -----------------------------------------------------------------------------

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        check_range(start, length)
        if length == 0:
            self.head(key)
            return b""
        span = {"start": start or None, "end": None if length is None else start + length}
        try:
            found = self._ask("read", check_key(key), lambda fs, at: fs.cat_file(at, **span))
        except StorageError:
            if (not start and length is None) or start < self.head(key).nbytes:
                raise
            return b""  # many refuse a range that begins beyond the object
        return bytes(found)

    def get_tagged(self, key: str) -> Tagged:
        if self._writes:
            found: Tagged = self._ask("read", check_key(key), partial(_run, _get))
            return found
        data = self.get(key)
        return Tagged(data, hashlib.blake2b(data, digest_size=20).hexdigest())

    def head(self, key: str) -> ObjectInfo:
        found = self._ask("read", check_key(key), lambda fs, at: fs.info(at))
        if found.get("type") == "directory":
            raise ObjectNotFoundError(f"there is no object {key!r} in {self.url}")
        return _info(key, found)

    def list(self, prefix: str = "", after: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        found = self._find(prefix.rpartition("/")[0])
        return (i for i in found if i.key.startswith(prefix) and i.key > after and is_key(i.key))

    def stray(self) -> str | None:
        """The first name that is not a valid key."""
        names = (info.key for info in self._find(""))
        return next((n for n in names if not n.startswith(".") and not is_key(n)), None)

    async def get_async(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return await asyncio.to_thread(self.get, key, start, length)

    # --- writing -----------------------------------------------------------------------------

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        self._ask("write", check_key(key), lambda fs, at: fs.pipe_file(at, data))

    def create(self, key: str, data: bytes | memoryview, *, durable: bool = True) -> bool:
        return self.cas(key, bytes(data), None) is not None

    async def create_async(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        return await asyncio.to_thread(partial(self.create, key, data, durable=durable))

    def cas(
        self,
        key: str,
        data: bytes,
        token: Token | None,
        *,
        then_create: tuple[str, bytes] | None = None,
    ) -> Token | None:
        check_key(key)
        self._prove()
        if token is not None and not token.startswith('"'):
            return None  # not an etag, so that of no version
        new = self._put(key, data, token)
        if new is not None and then_create is not None:
            with contextlib.suppress(RuntimeError):  # no more threads: the program is ending
                SYSTEM.background(partial(self._put, *then_create, None))  # type: ignore[arg-type]
        return new

    def delete_many(self, keys: Iterable[str]) -> None:
        for some in batched(map(check_key, keys), _AT_ONCE):
            SYSTEM.parallel([partial(self._delete, key) for key in some])

    def sync(self, keys: Iterable[str]) -> None:
        for some in batched(keys, _AT_ONCE):
            SYSTEM.parallel([partial(self.head, key) for key in some])

    # --- conditions --------------------------------------------------------------------------

    def _put(self, key: str, data: bytes, token: Token | None) -> Token | None:
        """The etag of what was written; None if the store refused the condition."""

        def put(fs: Any, path: str) -> Token | None:
            refused = _EXISTS[package_of(fs)] if token is None else (404, 409, 412)
            for _ in range(_TRIES):
                try:
                    return str(_run(_put, fs, path, data, token))
                except Exception as error:
                    if (status := _status(error)) in refused:
                        return None
                    if status != 409:
                        raise
            return ""

        new: Token | None = self._ask("write", key, put)
        if new == "":
            raise StorageError(f"cannot write {key!r} in {self.url}: others keep writing it")
        return new

    def _prove(self) -> None:
        """Raise an error if the store is known to ignore conditions; find out on first use."""
        self._place = self._ask("write", "", _server)
        with _RACE:  # a second caller waits for the first
            if self._place not in _IGNORED:
                _IGNORED[self._place] = self._race()
        if _IGNORED[self._place]:
            raise UnsupportedStorageError(
                f"{self.url} can only be read: several writers at once all succeeded with "
                f"{_IGNORED[self._place]}, so commits could be lost silently"
            )

    def _race(self) -> str:
        """The condition that a race of writers shows to be ignored; empty if there is none."""
        key = f".race-{SYSTEM.random_bytes(8).hex()}"  # not a valid key, so never listed
        token: Token | None = None
        try:
            for condition in ("If-None-Match", "If-Match"):
                # Different bytes, since etags may be digests.
                data = [f"{condition} {i}".encode() for i in range(_AT_ONCE)]
                made = SYSTEM.parallel([partial(self._put, key, one, token) for one in data])
                won = [new for new in made if new is not None]
                if len(won) != 1:
                    return condition
                token = won[0]
        finally:
            self._delete(key)
        return ""

    # --- calls of the filesystem ---------------------------------------------------------------

    def _ask(self, doing: str, key: str, call: Callable[[Any, str], Any]) -> Any:
        """Return what the call returns, of this process's filesystem and the path of the object."""
        if not self._writes and doing in ("write", "delete"):
            raise UnsupportedStorageError(
                f"{self.url} was opened read-only: of fsspec's filesystems only s3fs and adlfs let "
                "exactly one of several writers win. To write, use one of them, or from_url(...) "
                "if it opens the same place"
            )
        try:
            if self._process != os.getpid():
                given = {k: v for k, v in self._fs.storage_options.items() if k != "asynchronous"}
                self._fs = type(self._fs)(*self._fs.storage_args, **given)
                self._process = os.getpid()
            self._fs.invalidate_cache()
            return call(self._fs, f"{self._path}/{key}")
        except Exception as error:  # noqa: BLE001 - filesystems raise errors of any kind
            failed = error
        where = f"{key!r} in {self.url}"
        absent = isinstance(failed, FileNotFoundError | IsADirectoryError | NotADirectoryError)
        if absent or _status(failed) == 404:
            raise ObjectNotFoundError(f"there is no object {where}")
        why = f"the filesystem failed with a {type(failed).__name__}"
        if isinstance(failed, PermissionError):
            why = "the filesystem's credentials do not allow it"
        raise StorageError(f"cannot {doing} {where}: {why}")

    def _find(self, folder: str) -> Sequence[ObjectInfo]:
        """All files in the folder, in order; their names are relative to the place."""
        skipped = len(self._path.lstrip("/")) + 1
        found: dict[str, Any] = {}
        with contextlib.suppress(ObjectNotFoundError):
            found = self._ask("list", folder, lambda fs, at: fs.find(at.rstrip("/"), detail=True))
        return [_info(name.lstrip("/")[skipped:], said) for name, said in sorted(found.items())]

    def _delete(self, key: str) -> None:
        with contextlib.suppress(ObjectNotFoundError):
            self._ask("delete", key, lambda fs, at: fs.rm_file(at))


def _info(key: str, said: dict[str, Any]) -> ObjectInfo:
    time = next((said[name] for name in _TIMES if said.get(name)), 0)
    if isinstance(time, str):
        time = datetime.fromisoformat(time)
    seconds = time.timestamp() if isinstance(time, datetime) else time
    return ObjectInfo(key, int(said.get("size") or 0), int(seconds) * 1000)


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


def _server(fs: Any, path: str) -> str:
    """The address of the server, and the bucket."""
    server = fs.s3.meta.endpoint_url if package_of(fs) == "s3fs" else fs.service_client.url
    return f"{server} {fs.split_path(path)[0]}"


def _run(call: Callable[..., Any], fs: Any, *args: Any) -> Any:
    return importlib.import_module("fsspec.asyn").sync(fs.loop, call, fs, *args)


async def _get(fs: Any, path: str) -> Tagged:
    bucket, name, _ = fs.split_path(path)
    if package_of(fs) == "s3fs":
        said = await fs._call_s3("get_object", Bucket=bucket, Key=name)
        async with said["Body"] as body:
            return Tagged(await body.read(), said["ETag"])
    async with fs.service_client.get_blob_client(bucket, name) as blob:
        stream = await blob.download_blob()
        return Tagged(await stream.readall(), str(stream.properties.etag))


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
