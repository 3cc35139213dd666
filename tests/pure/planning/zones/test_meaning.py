"""What stored values mean, against xarray and Zarr."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from hypothesis import example, given
from hypothesis import strategies as st
from xarray.backends.zarr import FillValueCoder
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

from zarr_manifests.planning.meaning import Meaning

NUMBERS = st.sampled_from([-1, 0, 1, 3, 255, 40000, -40000, 1.5, 1e20, -9999, 65535, 0.1])
V3: dict[str, Any] = {
    "zarr_format": 3,
    "node_type": "array",
    "shape": [4],
    "data_type": "int16",
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2]}},
    "chunk_key_encoding": {"name": "default"},
    "fill_value": 0,
    "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    "attributes": {},
}
V2: dict[str, Any] = {
    "zarr_format": 2,
    "shape": [4],
    "chunks": [2],
    "dtype": "<i2",
    "fill_value": None,
    "order": "C",
    "filters": None,
    "compressor": None,
}


def meaning_of(name: str, document: Mapping[str, Any], **fields: Any) -> Meaning:
    return Meaning.of({name: json.dumps({**document, **fields}).encode()})


def documents_of(store: MemoryStore, name: str) -> dict[str, bytes]:
    found = {}
    for key in ("zarr.json", ".zarray", ".zattrs"):
        data = asyncio.run(store.get(f"{name}/{key}", default_buffer_prototype()))
        if data is not None:
            found[key] = data.to_bytes()
    return found


def interesting(dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Values of the type: small ones, the ends, and what others may wrap around to."""
    if dtype.kind == "f":
        return np.array([-9999, -1, 0, 1, 3, 255, 65535, 1.5, 1e20, 0.1, np.nan], dtype)
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    some = {low, high, -1, 0, 1, 3, 255, 40000, -40000, -9999, 65535}
    return np.array(sorted(x for x in some if low <= x <= high), dtype)


def stored(
    values: np.ndarray[Any, Any], zarr_format: Any, fill: Any, attributes: Mapping[str, Any]
) -> MemoryStore:
    """An array `a` of these values; a fill value that xarray takes for missing is optional."""
    said, at_all = dict(attributes), fill if zarr_format == 2 else None
    if zarr_format == 2:
        said["_ARRAY_DIMENSIONS"] = ["x"]
    elif fill is not None:
        said["_FillValue"] = FillValueCoder.encode(fill, values.dtype)
    store = MemoryStore()
    array = zarr.create_group(store, zarr_format=zarr_format).create_array(
        "a",
        shape=values.shape,
        chunks=values.shape,
        dtype=values.dtype,
        fill_value=at_all,
        dimension_names=["x"] if zarr_format == 3 else None,
    )
    array[:] = values
    array.attrs.update(said)
    return store


@pytest.mark.filterwarnings("ignore")
@given(
    st.sampled_from(["i1", "u1", "i2", ">i2", "u2", "i4", "u4", "f4", "f8", "?"]).map(np.dtype),
    st.sampled_from([2, 3]),
    st.none() | NUMBERS,
    st.fixed_dictionaries(
        {},
        optional={
            "missing_value": NUMBERS | st.lists(NUMBERS, max_size=2),
            "_Unsigned": st.sampled_from(["true", "false", "True"]),
            "scale_factor": st.just(-0.5),
        },
    ),
)
@example(np.dtype(">i2"), 2, 1, {"_Unsigned": "true"})
@example(np.dtype("i2"), 2, -1, {"_Unsigned": "true"})
@example(np.dtype("i2"), 3, -1, {"_Unsigned": "true", "missing_value": 3})
@example(np.dtype("u2"), 3, 65535, {"_Unsigned": "false"})
def test_missing_values_are_those_that_xarray_takes_for_missing(
    dtype: np.dtype[Any], zarr_format: int, fill: Any, attributes: dict[str, Any]
) -> None:
    values = interesting(dtype)
    try:
        store = stored(values, zarr_format, fill, attributes)
        meaning = Meaning.of(documents_of(store, "a"))
        read = xr.open_zarr(store, consolidated=False)["a"].load()
    except (ValueError, TypeError, OverflowError, KeyError):
        return  # Zarr or xarray does not take such a document
    if not meaning.measurable:
        assert fill is not None or "missing_value" in attributes
        return
    raw = meaning.compared(values)
    absent = np.isin(raw, meaning.missing) | (raw != raw)
    assert absent.tolist() == read.isnull().values.tolist()
    assert meaning.decodable(raw).tobytes() == values.astype(meaning.stored).tobytes()
    if "scale_factor" not in attributes:  # compared as they are read
        kept = ~absent
        assert raw[kept].astype("f8").tolist() == read.values[kept].astype("f8").tolist()


def sharded(*codecs: str) -> list[Any]:
    inner = {"codecs": [*codecs], "index_codecs": ["bytes", "crc32c"]}
    return [{"name": "sharding_indexed", "configuration": inner}]


@pytest.mark.parametrize(
    ("codecs", "lossless"),
    [
        ([{"name": "bytes"}, {"name": "blosc", "configuration": {"cname": "lz4"}}], True),
        ([{"name": "numcodecs.shuffle", "configuration": {"elementsize": 4}}, "bytes"], True),
        ([{"name": "numcodecs.delta", "configuration": {"dtype": "<f4"}}, "bytes"], False),
        (["bytes", {"name": "zfpy"}], False),
        (sharded("bytes"), True),
        (sharded("numcodecs.quantize", "bytes"), False),
    ],
)
def test_only_known_codecs_are_lossless(codecs: Any, lossless: bool) -> None:
    assert meaning_of("zarr.json", V3, codecs=codecs).lossless is lossless


@pytest.mark.parametrize(
    ("filters", "compressor", "lossless"),
    [
        ([{"id": "shuffle", "elementsize": 4}], {"id": "zlib"}, True),
        ([{"id": "astype", "encode_dtype": "f4", "decode_dtype": "f8"}], None, False),
        (None, {"id": "zfpy"}, False),
    ],
)
def test_only_known_codecs_of_zarr_v2_are_lossless(
    filters: Any, compressor: Any, lossless: bool
) -> None:
    found = meaning_of(".zarray", V2, filters=filters, compressor=compressor)
    assert found.lossless is lossless


def v3(**fields: Any) -> Meaning:
    return Meaning.of({"zarr.json": json.dumps({**V3, **fields}).encode()})


def v2(attributes: Mapping[str, Any] | None = None, **fields: Any) -> Meaning:
    documents = {".zarray": json.dumps({**V2, **fields}).encode()}
    if attributes is not None:
        documents[".zattrs"] = json.dumps(attributes).encode()
    return Meaning.of(documents)


def test_the_digest_changes_with_all_that_changes_meaning_and_with_nothing_else() -> None:
    same = v3().digest
    assert len(same) == 16
    assert v3(shape=[9]).digest == same
    assert v3(dimension_names=["x"]).digest == same
    assert v3(attributes={"units": "K", "scale_factor": 2}).digest == same
    others = [
        v3(data_type="uint16"),
        v3(fill_value=1),
        v3(codecs=[*V3["codecs"], {"name": "zstd"}]),
        v3(chunk_grid={"name": "regular", "configuration": {"chunk_shape": [4]}}),
        v3(attributes={"_FillValue": 3}),
        v3(attributes={"missing_value": 3}),
        v3(attributes={"_Unsigned": "true"}),
        v3(attributes={"dtype": "bool"}),
        v3(attributes={"_Encoding": "utf-8"}),
        v2(),
        v2({"missing_value": 3}),
        v2(fill_value=3),
        v2(filters=[{"id": "delta", "dtype": "<i2"}]),
    ]
    digests = [same, *(meaning.digest for meaning in others)]
    assert len(set(digests)) == len(digests)
