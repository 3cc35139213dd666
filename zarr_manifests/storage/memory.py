"""Objects in memory, in a dict of this process.

Invariants:

- All stores with the same name share one dict, as long as the process lives.
- Every change is made under one lock of the module. It is held only for dictionary operations and
  during a fork, so that a forked child finds it free and its copy of the objects consistent.
- Tokens come from one counter, so an object that is deleted and made again gets a new one.
- A pickle contains the name and the process it was made in, and works only there: another process
  has other objects, or none, under that name. Elsewhere every operation fails. Unpickling itself
  does not fail, since a worker that cannot unpickle a task cannot report the error.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator

from msgspec import Struct

from zarr_manifests.errors import InvalidArgumentError, ObjectNotFoundError, StorageError
from zarr_manifests.runtime import SYSTEM, fork_awaited_lock
from zarr_manifests.storage.protocol import (
    Capabilities,
    ObjectInfo,
    Tagged,
    Token,
    Version,
    check_key,
    check_prefix,
    check_range,
    is_key,
)


class _Object(Struct, frozen=True):
    data: bytes
    token: Token
    modified_ms: int


_LOCK = fork_awaited_lock()
_NAMED: dict[str, dict[str, _Object]] = {}
_VERSIONS = itertools.count(1)
_CAPABILITIES = Capabilities(inline=True, durable=False, shared=False)


class MemoryStorage:
    """Storage in the memory of this process.

    A forked child works on its own copy; its parent does not see its writes.

    Parameters
    ----------
    name : str, optional
        Stores of the same name share their objects. A store without a name shares nothing and
        cannot be pickled.

    Raises
    ------
    InvalidArgumentError
        If the name is not one that `check_key` accepts.

    Examples
    --------
    >>> from zarr_manifests.storage.memory import MemoryStorage
    >>> MemoryStorage("doc-memory").create("greeting", b"hello")
    True
    >>> MemoryStorage("doc-memory").get("greeting", 1, 3)
    b'ell'
    """

    def __init__(self, name: str | None = None) -> None:
        if not (name is None or is_key(name)):
            raise InvalidArgumentError(
                "the name of a memory storage is refused: names are [A-Za-z0-9._-] segments that "
                "do not start with a dot, as in memory://my-data"
            )
        self._name = name
        with _LOCK:
            self._here: dict[str, _Object] | None
            self._here = {} if name is None else _NAMED.setdefault(name, {})

    @property
    def _objects(self) -> dict[str, _Object]:
        if self._here is None:
            raise StorageError(
                f"{self.url} exists only in the process that made it and cannot be used in "
                "another one: use a local path or a shared storage for work across processes"
            )
        return self._here

    def __repr__(self) -> str:
        return f"MemoryStorage({'' if self._name is None else repr(self._name)})"

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        if self._name is None:
            raise StorageError(
                "a memory storage without a name cannot be pickled: give it one "
                "(memory://my-data) for use within this process, or use a local path"
            )
        return _open_in_process, (self._name, os.getpid())

    @property
    def url(self) -> str:
        return f"memory://{self._name or ''}"

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        check_range(start, length)
        data = self._find(key).data
        return data[start:] if length is None else data[start : start + length]

    def get_tagged(self, key: str) -> Tagged:
        found = self._find(key)
        return Tagged(found.data, found.token)

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        check_key(key)
        with _LOCK:
            self._write(key, data)

    def create(self, key: str, data: bytes | memoryview, *, durable: bool = True) -> bool:
        check_key(key)
        with _LOCK:
            if key in self._objects:
                return False
            self._write(key, data)
            return True

    def cas(
        self,
        key: str,
        data: bytes,
        token: Token | None,
        *,
        then_create: tuple[str, bytes] | None = None,
    ) -> Token | None:
        check_key(key)
        with _LOCK:
            found = self._objects.get(key)
            if (None if found is None else found.token) != token:
                return None
            new = self._write(key, data)
            if then_create is not None:
                self.create(*then_create)
            return new

    def head(self, key: str) -> ObjectInfo:
        return _info(key, self._find(key))

    def list(self, prefix: str = "", after: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        with _LOCK:
            keys = tuple(self._objects)
        due = sorted(key for key in keys if key.startswith(prefix) and key > after)
        found = ((key, self._objects.get(key)) for key in due)
        return (_info(key, one) for key, one in found if one is not None)  # else deleted since

    def files(self) -> Iterator[ObjectInfo]:
        """All objects."""
        return self.list()

    def get_version(self, name: str, start: int, length: int) -> tuple[bytes, Version]:
        """Bytes of an object, and its version."""
        check_range(start, length)
        found = self._find(name)
        version = Version(found.token, found.modified_ms, len(found.data))
        return found.data[start : start + length], version

    def stray(self) -> str | None:
        return None

    def delete_many(self, keys: Iterable[str]) -> None:
        for key in keys:
            check_key(key)
            with _LOCK:
                self._objects.pop(key, None)

    def sync(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._find(key)

    async def get_async(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return self.get(key, start, length)

    async def create_async(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        return self.create(key, data, durable=durable)

    def _find(self, key: str) -> _Object:
        found = self._objects.get(check_key(key))
        if found is None:
            raise ObjectNotFoundError(f"there is no object {key!r} in {self.url}")
        return found

    def _write(self, key: str, data: bytes | memoryview) -> Token:
        token = str(next(_VERSIONS))
        self._objects[key] = _Object(bytes(data), token, SYSTEM.now_ms())
        return token


def _info(key: str, found: _Object) -> ObjectInfo:
    return ObjectInfo(key, len(found.data), found.modified_ms)


def _open_in_process(name: str, process: int) -> MemoryStorage:
    storage = MemoryStorage.__new__(MemoryStorage)
    storage._name = name
    storage._here = _NAMED.get(name) if process == os.getpid() else None
    return storage
