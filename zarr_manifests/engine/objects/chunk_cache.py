"""Bytes of chunks, kept in memory within a number of bytes, for as long as they are used.

Invariants:

- A chunk is known by the range of its object and its checksum, so what is kept is never another
  chunk's, nor what a key held before it was written again.
- Only whole chunks are kept that match their checksums. Virtual chunks are not, since what says
  that their file is still the same is a request; nor are those that lie with the metadata.
- What is kept takes at most `chunk_bytes`; a chunk that is larger is not kept.
- Thread-safe and fork-safe as `DecodedCache`, and shared by all sessions of a repository object.
  It does not travel: a copy in another process begins empty.
"""

from __future__ import annotations

from zarr_manifests.config import CacheOptions
from zarr_manifests.engine.objects.decoded_cache import ENTRY_BYTES, DecodedCache
from zarr_manifests.engine.objects.decoded_sizes import decoded_bytes
from zarr_manifests.format.chunk_table import NativeRef
from zarr_manifests.metrics import Meter
from zarr_manifests.runtime import Runtime

__all__ = ["ChunkCache"]


class ChunkCache:
    """Chunks' bytes by where they are."""

    def __init__(self, options: CacheOptions, runtime: Runtime, meter: Meter) -> None:
        bounds = CacheOptions(max_size=options.chunk_bytes, expire_ms=options.expire_ms)
        self._kept = DecodedCache(bounds, runtime, meter)
        self._meter = meter

    @property
    def nbytes(self) -> int:
        """Bytes that the chunks take."""
        return self._kept.nbytes

    def find(self, ref: NativeRef) -> bytes | None:
        """The chunk's bytes, None if they are not here."""
        data: bytes | None = self._kept.find(ref)
        self._meter.add("chunk_cache_misses" if data is None else "chunk_cache_hits")
        return data

    def keep(self, ref: NativeRef, data: bytes) -> None:
        """Keep the bytes of a whole chunk that are known to match its checksum."""
        if ENTRY_BYTES + decoded_bytes(data) <= self._kept.max_size:
            self._kept.keep(ref, data)
