"""A bounded in-memory cache of chunk bytes.

Invariants:

- A chunk is identified by the range of its object and its checksum, a virtual chunk by all that its
  ref records. So the cache never returns another chunk, nor another version of one.
- Only whole chunks that match their checksums are kept. A virtual chunk is kept if it is remote and
  its ref records an etag, a time or a checksum. While it is kept, a change of its file is not
  noticed. Inline chunks are not kept, since they are in the metadata.
- The cache takes at most `chunk_bytes`; a larger chunk is not kept.
- It is thread-safe and fork-safe like `DecodedCache`, and shared by all sessions of a repository
  object. It is not pickled: a copy in another process starts empty.
"""

from __future__ import annotations

from typing import Any

from zarr_manifests.config import CacheOptions
from zarr_manifests.engine.objects.decoded_cache import ENTRY_BYTES, DecodedCache
from zarr_manifests.engine.objects.decoded_sizes import decoded_bytes
from zarr_manifests.engine.objects.disk_cache import DiskCache
from zarr_manifests.format.chunk_table import NativeRef, VirtualRef
from zarr_manifests.metrics import Meter
from zarr_manifests.runtime import Runtime


class ChunkCache:
    """Chunk bytes by their `NativeRef` or `VirtualRef`."""

    def __init__(
        self, options: CacheOptions, runtime: Runtime, meter: Meter, disk: DiskCache | None = None
    ) -> None:
        self._disk = disk if options.chunks else None
        bounds = CacheOptions(max_size=options.chunk_bytes, expire_ms=options.expire_ms)
        self._kept = DecodedCache(bounds, runtime, meter)
        self._meter = meter

    @property
    def nbytes(self) -> int:
        """Bytes that the kept chunks take."""
        return self._kept.nbytes

    def find(self, ref: NativeRef | VirtualRef) -> bytes | None:
        """The chunk's bytes; None if they are not cached."""
        data: bytes | None = self._kept.find(_name(ref))
        self._meter.add("chunk_cache_misses" if data is None else "chunk_cache_hits")
        if data is None and self._disk is not None:
            data = self._disk.get_chunk(_identity(ref), ref.length)
            if data is not None:
                self._keep(ref, data)
        return data

    def holds(self, ref: NativeRef | VirtualRef) -> bool:
        """Whether the chunk is there, as far as can be told without reading it."""
        if _name(ref) in self._kept:
            return True
        return self._disk is not None and self._disk.has_chunk(_identity(ref))

    def keep(self, ref: NativeRef | VirtualRef, data: bytes) -> None:
        """Keep a whole chunk; the caller has compared its checksum."""
        self._keep(ref, data)
        if self._disk is not None:
            self._disk.put_chunk(_identity(ref), data)

    def _keep(self, ref: NativeRef | VirtualRef, data: bytes) -> None:
        if ENTRY_BYTES + decoded_bytes(data) <= self._kept.max_size:
            self._kept.keep(_name(ref), data)


def _identity(ref: NativeRef | VirtualRef) -> bytes:
    """What identifies the chunk's bytes: all that its ref records."""
    if isinstance(ref, NativeRef):
        return repr((ref.key, ref.offset, ref.length, ref.crc32c)).encode()
    source = ref.source
    version = source.etag, source.modified_ms, source.nbytes
    place = source.container, source.path, ref.offset, ref.length, ref.crc32c
    return repr((*place, *version)).encode()


def _name(ref: NativeRef | VirtualRef) -> tuple[Any, ...]:
    return ref if isinstance(ref, NativeRef) else ("elsewhere", _identity(ref))
