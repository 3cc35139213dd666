"""A storage that keeps what is written to itself, over one that stays as it is.

What a repository does there it does as on the storage below, and nobody ever sees it. Invariant:
the root is the one of the moment it was made, whatever others do meanwhile; all other objects
never change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from zarr_manifests.errors import ObjectNotFoundError
from zarr_manifests.format.root import ROOT_KEY
from zarr_manifests.storage import Capabilities, MemoryStorage, ObjectInfo, Storage

__all__ = ["ScratchStorage"]


class ScratchStorage(MemoryStorage):
    """Reads what there is below; writes, which are new objects and the root, go to memory."""

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
