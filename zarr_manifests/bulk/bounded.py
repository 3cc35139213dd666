"""What decodes an array's chunks: the bulk decoder of its codecs, or Zarr's own, bounded.

Zarr's are kept from decompressing a chunk to more than its array says that it has: a few bytes may
claim, or become, gigabytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any, Final, cast

import numpy as np
from numcodecs import Blosc, GZip, Zlib, Zstd
from numcodecs.compat import ensure_contiguous_ndarray
from zarr.abc.codec import BytesBytesCodec, Codec
from zarr.codecs import ShardingCodec
from zarr.codecs._v2 import V2Codec
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer
from zarr.core.dtype.common import HasItemSize

from zarr_manifests.decoding import BulkDecoder, decompressed

_SPARE_BYTES: Final = 256
_PART_BYTES: Final = 64  # of one in a shard: its place in the index, and a header
_FILTERED_BYTES: Final = 16  # filters of format 2 change the type, at most to the largest one


def bounded(codecs: Iterable[Codec]) -> tuple[Codec, ...]:
    """The codecs of an array, of which compressors, in shards too, raise for what is too large.

    Examples
    --------
    >>> from zarr.codecs import BytesCodec, ZstdCodec
    >>> from zarr_manifests.bulk.bounded import bounded
    >>> [type(codec).__name__ for codec in bounded([BytesCodec(), ZstdCodec()])]
    ['BytesCodec', 'BoundedZstdCodec']
    """
    found: list[Codec] = []
    part = None
    for codec in codecs:
        made = codec
        if type(codec) is ShardingCodec:
            part = math.prod(codec.chunk_shape)
            made = replace(codec, codecs=bounded(codec.codecs))
        elif type(codec) is V2Codec:
            made = _BoundedV2(codec.filters, codec.compressor)
        elif isinstance(codec, BytesBytesCodec) and is_of(codec, "zarr"):
            # Not made anew, since some do not have their options as attributes; they are frozen.
            made, kind = copy(codec), cast("Any", type(codec))
            object.__setattr__(made, "__class__", _kind(kind, str(codec.to_dict()["name"])))
            vars(made)["part"] = part
        found.append(made)
    return tuple(found)


class _Bounded:
    known_as: str
    part: int | None = None  # cells of the parts of a shard, if whole shards are compressed

    def _decode_sync(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Any:
        most, found = _most(chunk_spec, part=self.part), None
        if most is not None:
            found = decompressed(self.known_as, chunk_bytes.as_numpy_array(), most)
        if found is None:
            rest: Any = super()
            return rest._decode_sync(chunk_bytes, chunk_spec)
        return chunk_spec.prototype.buffer.from_bytes(found)


class _BoundedV2(V2Codec):
    def _decode_sync(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Any:
        most = _most(chunk_spec, least=_FILTERED_BYTES if self.filters else 0)
        if most is None:
            return super()._decode_sync(chunk_bytes, chunk_spec)
        filters: Any = [_Within(codec, most) for codec in self.filters or ()]
        compressor: Any = None if self.compressor is None else _Within(self.compressor, most)
        return V2Codec(filters, compressor)._decode_sync(chunk_bytes, chunk_spec)


class _Within:
    """A codec of format 2, for decoding."""

    def __init__(self, codec: Any, most: int) -> None:
        self.codec_id, self._codec, self._most = codec.codec_id, codec, most

    def decode(self, data: Any) -> Any:
        found = None
        if type(self._codec) in (Blosc, GZip, Zlib, Zstd):
            flat = ensure_contiguous_ndarray(data).view(np.uint8)
            found = decompressed(self.codec_id, flat, self._most)
        return self._codec.decode(data) if found is None else found


def _most(spec: ArraySpec, *, part: int | None = None, least: int = 0) -> int | None:
    """Bytes that codecs may make of a chunk; None if that is of any length, as text is."""
    if not isinstance(spec.dtype, HasItemSize):
        return None
    cells = math.prod(spec.shape)
    parts = 0 if part is None else cells // part
    # Compressors add to what they cannot compress, and shards have an index of their parts.
    spare = _SPARE_BYTES + parts * _PART_BYTES
    return cells * max(spec.dtype.item_size, least) * 5 // 4 + spare


@cache
def _kind(of: type[Codec], name: str) -> type[Codec]:
    known_as = name.removeprefix("numcodecs.")
    return type(f"Bounded{of.__name__}", (_Bounded, of), {"known_as": known_as})


def decoder_of(codecs: Sequence[Codec], serializer: Any, spec: ArraySpec) -> BulkDecoder | None:
    """The decoder of chunks or shards; None if they have to be decoded by Zarr."""
    dtype = spec.dtype.to_native_dtype()
    if isinstance(serializer, V2Codec):
        v2 = [*(serializer.filters or ()), serializer.compressor]
        if not all(codec is None or is_of(codec, "numcodecs") for codec in v2):
            return None
        *filters, compressor = [None if codec is None else codec.get_config() for codec in v2]
        document: dict[str, Any] = {
            "zarr_format": 2,
            "chunks": spec.shape,
            "order": spec.order,
            "filters": filters,
            "compressor": compressor,
        }
        return BulkDecoder.of(document, dtype)
    used = list(codecs)
    if isinstance(serializer, ShardingCodec):
        used += [*serializer.codecs, *serializer.index_codecs]
    if not all(is_of(codec, "zarr") for codec in used):
        return None
    grid = {"name": "regular", "configuration": {"chunk_shape": spec.shape}}
    named = [codec.to_dict() for codec in codecs]
    return BulkDecoder.of({"zarr_format": 3, "chunk_grid": grid, "codecs": named}, dtype)


def is_of(codec: object, package: str) -> bool:
    """Whether the codec is the package's own: another of the same name may work in another way.

    Examples
    --------
    >>> from numcodecs import Zstd
    >>> from zarr_manifests.bulk.bounded import is_of
    >>> is_of(Zstd(), "numcodecs")
    True
    """
    return type(codec).__module__.partition(".")[0] == package
