"""Small arrays of any kind that Zarr makes, as a test may draw them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numcodecs import Blosc, GZip, Shuffle, Zlib, Zstd
from zarr import codecs as v3
from zarr.codecs import numcodecs as numcodecs_v3

TYPES = ("bool", "i1", "u2", "i4", "u8", "f2", ">f4", "f8", ">i8", "c8", "S3", "<U2", "M8[s]")
_COMPRESSORS: dict[str, Callable[[], list[Any]]] = {
    "none": list,
    "zstd": lambda: [v3.ZstdCodec(level=1)],
    "blosc": lambda: [v3.BloscCodec()],
    "blosc lz4": lambda: [v3.BloscCodec(cname="lz4", shuffle="bitshuffle")],
    "blosc as it is": lambda: [v3.BloscCodec(clevel=0, shuffle="noshuffle")],
    "gzip": lambda: [v3.GzipCodec(level=1)],
    "zstd crc": lambda: [v3.ZstdCodec(level=1), v3.Crc32cCodec()],
    "crc zstd": lambda: [v3.Crc32cCodec(), v3.ZstdCodec(level=1)],
    "zlib": lambda: [numcodecs_v3.Zlib(level=1)],
    "shuffle zstd": lambda: [numcodecs_v3.Shuffle(), v3.ZstdCodec(level=1)],
}
_COMPRESSORS_V2: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "zstd": lambda: Zstd(level=1),
    "blosc": Blosc,
    "gzip": lambda: GZip(level=1),
    "zlib": lambda: Zlib(level=1),
}


@st.composite
def array_options(
    draw: st.DrawFn, types: Sequence[str] = TYPES, most_axes: int = 3
) -> dict[str, Any]:
    """What `zarr.create_array` takes for an array `a` of any kind, but where; `T` is text."""
    ndim = draw(st.integers(0, most_axes))
    name = draw(st.sampled_from(types))
    dtype = np.dtype(np.dtypes.StringDType() if name == "T" else name)
    chunks = tuple(draw(st.lists(st.integers(1, 4), min_size=ndim, max_size=ndim)))
    made: dict[str, Any] = {
        "name": "a",
        "shape": tuple(draw(st.lists(st.integers(1, 9), min_size=ndim, max_size=ndim))),
        "chunks": chunks,
        "dtype": dtype,
        "config": {"write_empty_chunks": draw(st.booleans())},
        "fill_value": 1 if dtype.kind in "if" and draw(st.booleans()) else None,
    }
    if draw(st.booleans()) and name != "T":
        return made | {
            "zarr_format": 2,
            "order": draw(st.sampled_from("CF")),
            "compressors": _COMPRESSORS_V2[draw(st.sampled_from(sorted(_COMPRESSORS_V2)))](),
            "filters": [Shuffle(dtype.itemsize)] if draw(st.booleans()) else None,
        }
    made["config"]["order"] = draw(st.sampled_from("CF"))
    if ndim and draw(st.booleans()):
        counts = draw(st.lists(st.integers(1, 3), min_size=ndim, max_size=ndim))
        made["shards"] = {
            "shape": tuple(n * m for n, m in zip(counts, chunks, strict=True)),
            "index_location": draw(st.sampled_from(["start", "end"])),
        }
    if dtype.itemsize > 1 and name != "T":
        made["serializer"] = v3.BytesCodec(endian=draw(st.sampled_from(["little", "big"])))
    orders = draw(st.lists(st.permutations(range(ndim)), max_size=2))
    made["filters"] = [v3.TransposeCodec(order=order) for order in orders]
    known = {*_COMPRESSORS} - ({"shuffle zstd"} if name == "T" else set())  # texts differ in length
    return made | {"compressors": _COMPRESSORS[draw(st.sampled_from(sorted(known)))]()}


def some_values(draw: st.DrawFn, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    """Values of a type, of which many are alike."""
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    numbers = rng.integers(0, draw(st.sampled_from([2, 99])), shape)
    return (numbers.astype(str) if dtype.kind in "SUT" else numbers.astype("i8")).astype(dtype)
