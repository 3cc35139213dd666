"""A scratch storage: writes go to memory, over a storage that is not changed.

A repository works on it as on the storage below, without being seen. Invariant: the root is that of
the moment when the scratch storage was made, whatever others do later; other objects never change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from zarr_manifests.errors import ObjectNotFoundError
from zarr_manifests.format.root import ROOT_KEY
from zarr_manifests.storage import Storage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.storage.protocol import Capabilities, ObjectInfo


class ScratchStorage(MemoryStorage):
    """Reads from the storage below; writes (new objects and the root) go to memory."""

    def __init__(self, below: Storage) -> None:
        super().__init__()
        self._below = below
        self.put(ROOT_KEY, below.get(ROOT_KEY))

    @property
    def url(self) -> str:
        return self._below.url

    @property
    def capabilities(self) -> Capabilities:
        return replace(self._below.capabilities, create=True, cas=True)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        try:
            return super().get(key, start, length)
        except ObjectNotFoundError:
            return self._below.get(key, start, length)

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        try:
            return super().get_ranges(key, ranges)
        except ObjectNotFoundError:
            return self._below.get_ranges(key, ranges)

    def head(self, key: str) -> ObjectInfo:
        try:
            return super().head(key)
        except ObjectNotFoundError:
            return self._below.head(key)

    def list(self, prefix: str = "", after: str = "") -> Iterator[ObjectInfo]:
        found = {info.key: info for info in self._below.list(prefix, after)}
        found |= {info.key: info for info in super().list(prefix, after)}
        yield from (found[key] for key in sorted(found))

    async def get_async(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return self.get(key, start, length)
