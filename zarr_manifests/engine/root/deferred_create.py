"""A repository that comes into existence with its first commit.

Its first root, that root's archive and the empty snapshot stay in memory. The swap of the first
commit writes them to the storage, the root by put-if-absent. So a failure before that leaves no
repository, and a failure before the first chunk leaves nothing at all.

Invariants:

- *One repository*: of any number of writers that do this concurrently, one swap succeeds. The
  others get an error saying that a repository was made at the same moment.
- *Nothing of others is deleted*: only objects under this writer's random session ids are withdrawn,
  and only while none of its swaps can have taken effect.
- Leftovers of a killed writer do not keep the next one from making a repository.
"""

from __future__ import annotations

import contextlib
from threading import Lock

from zarr_manifests.engine.root.disk_reserve import keep_reserve
from zarr_manifests.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    ObjectNotFoundError,
    StorageError,
)
from zarr_manifests.format.root import ROOT_KEY, Root, archive_key
from zarr_manifests.ids import lineage_of, session_of
from zarr_manifests.metrics import Meter
from zarr_manifests.storage import Storage
from zarr_manifests.storage.metered import MeteredStorage, unmetered
from zarr_manifests.storage.protocol import Tagged, Token

_TOKEN = "unmade"
_ARCHIVE = archive_key(1)


class Unmade(MeteredStorage):
    """A storage for a repository that does not exist before its first commit.

    Parameters
    ----------
    storage : Storage
        The storage for the repository.
    """

    __slots__ = ("_held", "_lineages", "_lock", "_root", "_state")

    def __init__(self, storage: Storage) -> None:
        super().__init__(unmetered(storage), Meter())
        self._root: bytes | None = None
        self._held: dict[str, bytes] = {}  # to write before a chunk, or with the root
        self._lineages: set[str] = set()
        self._state = "unmade"  # then "tried", then "made" or "lost"
        self._lock = Lock()

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        held = self._held.get(key)
        if held is not None:
            return held[start:] if length is None else held[start : start + length]
        return super().get(key, start, length)

    def get_tagged(self, key: str) -> Tagged:
        if key != ROOT_KEY or self._root is None or self._state == "made":
            return super().get_tagged(key)
        try:
            found = super().get_tagged(key)
        except ObjectNotFoundError:
            return Tagged(self._root, _TOKEN)
        self._is_ours(found)
        return found

    def create(self, key: str, data: bytes | memoryview, *, durable: bool = True) -> bool:
        if self._root is None or key == _ARCHIVE:
            self._held.setdefault(key, bytes(data))
            return True
        self.begin(key)
        return super().create(key, data, durable=durable)

    async def create_async(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        self.begin(key)
        return await super().create_async(key, data, durable=durable)

    def cas(
        self,
        key: str,
        data: bytes,
        token: Token | None,
        *,
        then_create: tuple[str, bytes] | None = None,
    ) -> Token | None:
        if key != ROOT_KEY or self._state == "made":
            return super().cas(key, data, token, then_create=then_create)
        if self._root is None:
            self._root = data
            if then_create is not None:
                self._held[then_create[0]] = then_create[1]
            return _TOKEN
        self.begin()
        self._state = "tried"
        new = super().cas(key, data, None, then_create=then_create)
        if new is None:
            self._is_ours(super().get_tagged(key))
            return None
        self._made()
        return new

    def begin(self, key: str = "") -> None:
        """Write what has to exist before the object, or before other processes write.

        Parameters
        ----------
        key : str, optional
            Key of an object that this writer, or a copy of it, is about to write.
        """
        with self._lock:
            for written in (key, *self._held):
                with contextlib.suppress(InvalidArgumentError):  # not an object of a session
                    self._lineages.add(lineage_of(session_of(written)))
            for early in [early for early in self._held if early != _ARCHIVE]:
                self.storage.create(early, self._held[early])
                del self._held[early]

    def make(self) -> None:
        """Make the repository without a commit, unless it exists already, with its reserve.

        Raises
        ------
        AlreadyExistsError
            If somebody else has made one.
        """
        if self._state != "made" and self._root is not None:
            self.cas(ROOT_KEY, self._root, _TOKEN, then_create=(_ARCHIVE, self._held[_ARCHIVE]))
        keep_reserve(self.storage)

    def withdraw(self) -> bool:
        """Delete what was written for the repository, unless it exists or may still come to exist.

        Returns
        -------
        bool
            Whether somebody else has made a repository at the same place.
        """
        if self._lineages and not self._may_be_there():
            own = [f"/{lineage}" for lineage in self._lineages]
            keys = [info.key for info in self.storage.list()]
            self.storage.delete_many(key for key in keys if any(name in key for name in own))
        return self._state == "lost"

    def _may_be_there(self) -> bool:
        if self._state != "tried":
            return self._state == "made"
        if not self.storage.capabilities.inline:
            return True  # a request that was sent may still take effect
        try:
            self.storage.head(ROOT_KEY)
        except ObjectNotFoundError:
            return False
        return True

    def _is_ours(self, found: Tagged) -> None:
        """Accept a root of our own, from a swap whose answer was lost; raise if it is not ours."""
        assert self._root is not None
        if Root.from_object(found.data).repository_id == Root.from_object(self._root).repository_id:
            self._made()
            return
        self._state = "lost"
        raise AlreadyExistsError(
            f"a repository was made at {self.url} at the same moment; open it instead"
        )

    def _made(self) -> None:
        self._state = "made"
        with contextlib.suppress(StorageError):  # the next swap archives it otherwise
            self.storage.create(_ARCHIVE, self._held[_ARCHIVE])
