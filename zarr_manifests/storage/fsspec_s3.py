"""Conditional writes through s3fs.

`pipe_file` of s3fs can create, but not swap, and does not always tell a refused condition from
another failure. So both are put by the call below it, and judged by the status of the answer.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any, ClassVar, Final

from zarr_manifests.errors import StorageError, UnsupportedStorageError
from zarr_manifests.runtime import SYSTEM, ForkSafeLock
from zarr_manifests.storage.fsspec_files import FsspecFiles
from zarr_manifests.storage.protocol import Tagged, Token

__all__ = ["S3Conditions", "is_s3"]

_RACERS: Final = 16
_CONTENDED: Final = 409
_REFUSED: Final = {404, _CONTENDED, 412}
_TRIES: Final = 5


def is_s3(fs: Any) -> bool:
    """Whether it is s3fs's own filesystem, and not another one for the same URLs."""
    return any(base.__module__.partition(".")[0] == "s3fs" for base in type(fs).__mro__)


class S3Conditions:
    """Creates and swaps objects on S3, where a race has one winner.

    The race is held in each process before its first conditional write to a place.

    Parameters
    ----------
    files : FsspecFiles
        The folder.
    """

    _proven: ClassVar[dict[str, str]] = {}
    _lock: ClassVar = ForkSafeLock()

    def __init__(self, files: FsspecFiles) -> None:
        self._files = files
        self._tried = False
        self.failed = ""  # the condition that the store ignores, if one is known

    def create(self, key: str, data: bytes) -> bool:
        self._prove()
        return self._create(key, data) is not None

    def swap(self, key: str, data: bytes, token: Token | None) -> Token | None:
        self._prove()
        if token is None:
            return self._create(key, data)
        found = self._put(key, data, IfMatch=token) if token.startswith('"') else None
        return found if isinstance(found, str) else None

    def read(self, key: str) -> Tagged:
        """The object and its etag, from one response."""
        bucket, name, _ = self._files.fs.split_path(self._files.at(key))

        async def get() -> Tagged:
            said = await self._files.fs._call_s3("get_object", Bucket=bucket, Key=name)
            try:
                return Tagged(await said["Body"].read(), said["ETag"])
            finally:
                said["Body"].close()

        found: Tagged = self._call("read", key, get)
        return found

    def write(self, key: str, data: bytes) -> None:
        self._files.write(key, data)

    def delete(self, key: str) -> None:
        self._files.delete(key)

    @property
    def _place(self) -> str:
        return f"{self._files.fs.s3.meta.endpoint_url} {self._files.url.split('/')[2]}"

    def _create(self, key: str, data: bytes) -> Token | None:
        for _ in range(_TRIES):
            found = self._put(key, data, IfNoneMatch="*")
            if found != _CONTENDED:
                return found if isinstance(found, str) else None
        raise StorageError(f"cannot write {key!r} in {self._files.url}: others keep writing it")

    def _put(self, key: str, data: bytes, **condition: str) -> Token | int:
        """The etag of what was written; the status, if the store refused the condition."""
        bucket, name, _ = self._files.fs.split_path(self._files.at(key))
        refused = _REFUSED if "IfMatch" in condition else _REFUSED - {404}

        async def put() -> Token | int:
            try:
                said = await self._files.fs._call_s3(
                    "put_object", Bucket=bucket, Key=name, Body=data, **condition
                )
            except Exception as error:
                status = _status(error)
                if status in refused:
                    return status
                raise
            return str(said["ETag"])

        found: Token | int = self._call("write", key, put)
        return found

    def _call(self, doing: str, key: str, call: Any) -> Any:
        run = importlib.import_module("fsspec.asyn").sync
        return self._files.ask(doing, key, lambda: run(self._files.fs.loop, call))

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
                [partial(self._put, key, b"%d" % i, IfNoneMatch="*") for i in range(_RACERS)]
            )
            won = [token for token in made if isinstance(token, str)]
            if len(won) != 1:
                return "If-None-Match"
            swapped = SYSTEM.parallel(
                [partial(self._put, key, b"again %d" % i, IfMatch=won[0]) for i in range(_RACERS)]
            )
            return "" if sum(isinstance(token, str) for token in swapped) == 1 else "If-Match"
        finally:
            self._files.delete(key)


def _status(error: BaseException) -> int:
    """The status of the answer, which the client's error or its cause tells; 0 without one."""
    cause: BaseException | None = error
    for _ in range(4):
        said = getattr(cause, "response", None)
        if isinstance(said, dict):
            found = said.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return int(found or 0)
        cause = cause.__cause__ if cause is not None else None
    return 412 if isinstance(error, FileExistsError) else 0
