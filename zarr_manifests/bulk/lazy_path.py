"""Paths of an array's chunks that are joined and normalized only where somebody reads them."""

from __future__ import annotations

from zarr.abc.store import Store
from zarr.storage import StorePath
from zarr.storage._utils import normalize_path

__all__ = ["LazyPath"]


class LazyPath(StorePath):
    """An array's `StorePath`, below which Zarr makes one path for each chunk of a request.

    Normalizing them takes as long as reading 4 KB.

    Examples
    --------
    >>> from zarr.storage import MemoryStore
    >>> from zarr_manifests.bulk.here import LazyPath
    >>> path = LazyPath(MemoryStore(), "a") / "c/0"
    >>> path.path, path.joined
    ('a/c/0', 'a/c/0')
    """

    __slots__ = ("joined",)

    def __init__(self, store: Store, path: str = "") -> None:
        self.store = store
        self.joined = path

    @property
    def path(self) -> str:  # type: ignore[override]  # an attribute there
        """The normalized path."""
        return normalize_path(self.joined)

    def __truediv__(self, other: str) -> LazyPath:
        return LazyPath(self.store, f"{self.joined}/{other}" if self.joined else other)
