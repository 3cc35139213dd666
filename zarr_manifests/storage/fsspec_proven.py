"""Conditional writes through s3fs and adlfs.

`pipe_file` of both can create, but not swap, and does not always tell a refused condition from
another failure. So both are put by the call below it, and judged by the status of the answer.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple

from zarr_manifests.error_cases import UnsupportedStorageError
from zarr_manifests.errors import StorageError
from zarr_manifests.runtime import SYSTEM, ForkSafeLock
from zarr_manifests.storage.fsspec_files import FsspecFiles
from zarr_manifests.storage.protocol import Tagged, Token

__all__ = ["Conditions", "is_proven"]

_RACERS: Final = 16
_CONTENDED: Final = 409
_TRIES: Final = 5


class _Client(NamedTuple):
    """How a filesystem reads an object with its etag, and puts it if a condition holds.

    `put(fs, path, data, token)` swaps, or creates if the token is None. `refused` are statuses that
    say that the condition of a creation does not hold.
    """

    place: Callable[[Any, str], str]
    get: Callable[[Any, str], Coroutine[Any, Any, Tagged]]
    put: Callable[[Any, str, bytes, Token | None], Coroutine[Any, Any, Token]]
    refused: frozenset[int]


def is_proven(fs: Any) -> bool:
    """Whether it is a filesystem of s3fs or adlfs, and not another one for the same URLs."""
    return _client_of(fs) is not None


class Conditions:
    """Creates and swaps objects where a race has one winner.

    The race is held in each process before its first conditional write to a place.

    Parameters
    ----------
    files : FsspecFiles
        The folder, in a filesystem of s3fs or adlfs.
    """

    _proven: ClassVar[dict[str, str]] = {}
    _lock: ClassVar = ForkSafeLock()

    def __init__(self, files: FsspecFiles) -> None:
        client = _client_of(files.fs)
        assert client is not None
        self._files, self._client = files, client
        self._tried = False
        self.failed = ""  # the condition that the store ignores, if one is known

    def create(self, key: str, data: bytes) -> bool:
        self._prove()
        return self._create(key, data) is not None

    def swap(self, key: str, data: bytes, token: Token | None) -> Token | None:
        self._prove()
        if token is None:
            return self._create(key, data)
        found = self._put(key, data, token) if token.startswith('"') else None
        return found if isinstance(found, str) else None

    def read(self, key: str) -> Tagged:
        """The object and its etag, from one response."""
        found: Tagged = self._call("read", key, self._client.get)
        return found

    def write(self, key: str, data: bytes) -> None:
        self._files.write(key, data)

    def delete(self, key: str) -> None:
        self._files.delete(key)

    @property
    def _place(self) -> str:
        return self._client.place(self._files.fs, self._files.url.split("/")[2])

    def _create(self, key: str, data: bytes) -> Token | None:
        for _ in range(_TRIES):
            found = self._put(key, data, None)
            if found in self._client.refused or isinstance(found, str):
                return found if isinstance(found, str) else None
        raise StorageError(f"cannot write {key!r} in {self._files.url}: others keep writing it")

    def _put(self, key: str, data: bytes, token: Token | None) -> Token | int:
        """The etag of what was written; the status, if the store refused the condition."""
        refused = {_CONTENDED, 412} if token is None else {404, _CONTENDED, 412}

        async def put(fs: Any, path: str) -> Token | int:
            try:
                return await self._client.put(fs, path, data, token)
            except Exception as error:
                status = _status(error)
                if status in refused:
                    return status
                raise

        found: Token | int = self._call("write", key, put)
        return found

    def _call(self, doing: str, key: str, call: Any) -> Any:
        run = importlib.import_module("fsspec.asyn").sync
        fs, path = self._files.fs, self._files.at(key)
        return self._files.ask(doing, key, lambda: run(fs.loop, call, fs, path))

    # --- whether the store respects conditions ---------------------------------------------------

    def _prove(self) -> None:
        if not self._tried:
            with self._lock:  # a second caller waits for the first
                if self._place not in self._proven:
                    self._proven[self._place] = self._race()
                self.failed, self._tried = self._proven[self._place], True
        if self.failed:
            raise UnsupportedStorageError(
                f"{self._files.url} can only be read: several writers at once all succeeded with "
                f"{self.failed}, so commits could be lost silently"
            )

    def _race(self) -> str:
        """The condition that a race of writers shows to be ignored; empty if there is none."""
        key = f".race-{SYSTEM.random_bytes(8).hex()}"  # not a valid key, so never listed
        try:
            made = SYSTEM.parallel(
                [partial(self._put, key, b"%d" % i, None) for i in range(_RACERS)]
            )
            won = [token for token in made if isinstance(token, str)]
            if len(won) != 1:
                return "If-None-Match"
            swapped = SYSTEM.parallel(
                [partial(self._put, key, b"again %d" % i, won[0]) for i in range(_RACERS)]
            )
            return "" if sum(isinstance(token, str) for token in swapped) == 1 else "If-Match"
        finally:
            self._files.delete(key)


def _status(error: BaseException) -> int:
    """The status of the answer, which the client's error or its cause tells; 0 without one."""
    cause: BaseException | None = error
    for _ in range(4):
        if isinstance(status := getattr(cause, "status_code", None), int):
            return status
        said = getattr(cause, "response", None)
        if isinstance(said, dict):
            found = said.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return int(found or 0)
        cause = cause.__cause__ if cause is not None else None
    return 412 if isinstance(error, FileExistsError) else 0


# --- the filesystems that are known ------------------------------------------------------------


async def _get_s3(fs: Any, path: str) -> Tagged:
    bucket, name, _ = fs.split_path(path)
    said = await fs._call_s3("get_object", Bucket=bucket, Key=name)
    try:
        return Tagged(await said["Body"].read(), said["ETag"])
    finally:
        said["Body"].close()


async def _put_s3(fs: Any, path: str, data: bytes, token: Token | None) -> Token:
    bucket, name, _ = fs.split_path(path)
    condition = {"IfNoneMatch": "*"} if token is None else {"IfMatch": token}
    said = await fs._call_s3("put_object", Bucket=bucket, Key=name, Body=data, **condition)
    return str(said["ETag"])


async def _get_azure(fs: Any, path: str) -> Tagged:
    container, name, _ = fs.split_path(path)
    async with fs.service_client.get_blob_client(container=container, blob=name) as blob:
        try:
            stream = await blob.download_blob()
            return Tagged(await stream.readall(), str(stream.properties.etag))
        except Exception as error:
            if _status(error) == 404:
                raise FileNotFoundError from None
            raise


async def _put_azure(fs: Any, path: str, data: bytes, token: Token | None) -> Token:
    container, name, _ = fs.split_path(path)
    conditions = importlib.import_module("azure.core").MatchConditions
    condition: dict[str, Any] = {"match_condition": conditions.IfMissing}
    if token is not None:
        condition = {"match_condition": conditions.IfNotModified, "etag": token}
    async with fs.service_client.get_blob_client(container=container, blob=name) as blob:
        said = await blob.upload_blob(data, overwrite=True, **condition)
    return str(said["etag"])


_CLIENTS: Final = {
    "s3fs": _Client(
        lambda fs, bucket: f"{fs.s3.meta.endpoint_url} {bucket}",
        _get_s3,
        _put_s3,
        frozenset({412}),
    ),
    # Of an object that exists, Azure says 409, and so does S3 of one that others write.
    "adlfs": _Client(
        lambda fs, container: f"{fs.service_client.url} {container}",
        _get_azure,
        _put_azure,
        frozenset({_CONTENDED, 412}),
    ),
}


def _client_of(fs: Any) -> _Client | None:
    packages = (base.__module__.partition(".")[0] for base in type(fs).__mro__)
    return next((_CLIENTS[name] for name in packages if name in _CLIENTS), None)
