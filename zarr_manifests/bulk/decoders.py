"""The bulk decoder of an array's codecs, where each of them is Zarr's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zarr.abc.codec import Codec
from zarr.codecs import ShardingCodec
from zarr.codecs._v2 import V2Codec
from zarr.core.array_spec import ArraySpec

from zarr_manifests.decoding import BulkDecoder

__all__ = ["decoder_of", "is_of"]


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
