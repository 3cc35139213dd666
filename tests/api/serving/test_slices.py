"""Slices: the values are those of the array, of bounded size however large it is."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from zarr.core.buffer.cpu import Buffer as CPUBuffer

import zarr_manifests as zm
from served import get, serving
from zarr_manifests.serving import answers
from zarr_manifests.storage.memory import MemoryStorage


def fetched(url: str, path: str) -> tuple[Any, np.ndarray]:
    answer = get(url, path)
    assert answer.status == 200, answer.text
    (length,) = struct.unpack("<I", answer.body[:4])
    assert length % 4 == 0
    header = json.loads(answer.body[4 : 4 + length])
    values = np.frombuffer(answer.body[4 + length :], "<f4").reshape(header["shape"])
    return header, values


@pytest.fixture(scope="module")
def ds() -> xr.Dataset:
    values = np.random.default_rng(5).normal(280, 10, (3, 40, 600)).round(2)
    values[0, :5, :7] = np.nan
    return xr.Dataset(
        {"t": (("time", "lat", "lon"), values, {"units": "K", "long_name": "temperature"})},
        {
            "time": np.array(["2026-01-01", "2026-01-02", "2026-01-03T12:00"], "datetime64[ns]"),
            "lat": ("lat", np.linspace(-60, 60, 40), {"units": "degrees_north"}),
            "lon": ("lon", np.arange(600.0)),
        },
    )


@pytest.fixture(scope="module")
def url(ds: xr.Dataset) -> Iterator[str]:
    repo = zm.create(MemoryStorage())
    packed = {"dtype": "i2", "scale_factor": 0.01, "add_offset": 280.0, "_FillValue": -32768}
    repeated = {"chunks": (1, 10, 128)}
    zm.write(ds, repo, message="packed", encoding={"t": packed | repeated})
    zm.write(ds, repo, message="floats", group="plain", encoding={"t": repeated})
    with repo.transaction(message="others") as store:
        root = zarr.open_group(store)
        root.create_array("number", shape=(), dtype="f4")[...] = 3
        root.create_array("words", shape=(2,), dtype="U3")
        root.create_array("wide", shape=(2_000_000,), chunks=(100,), dtype="u1", fill_value=9)
        root.create_array("huge", shape=(20_000, 20_000), chunks=(20_000, 20_000), dtype="f8")
    with serving(repo) as found:
        yield found


@pytest.mark.parametrize("group", ["", "plain/"])
def test_values_and_coordinates_are_those_that_xarray_reads(
    url: str, ds: xr.Dataset, group: str
) -> None:
    header, values = fetched(url, f"/slice/main/{group}t?index=0,:,100:500")
    np.testing.assert_allclose(values, ds.t[0, :, 100:500], rtol=1e-6)
    assert header["minimum"] == pytest.approx(float(ds.t[0, :, 100:500].min()), rel=1e-6)
    assert (header["units"], header["long_name"]) == ("K", "temperature")
    assert [axis["name"] for axis in header["axes"]] == ["lat", "lon"]
    assert header["axes"][0]["values"] == pytest.approx(ds.lat.values)
    assert header["axes"][0]["units"] == "degrees_north"
    assert header["axes"][1]["values"] == list(range(100, 500))
    header, values = fetched(url, f"/slice/main/{group}t?index=:,3,-1")
    np.testing.assert_allclose(values, ds.t[:, 3, -1], rtol=1e-6)
    assert header["axes"][0]["values"] == [
        "2026-01-01T00:00:00",
        "2026-01-02T00:00:00",
        "2026-01-03T12:00:00",
    ]
    assert header["at"] == [None, 3, 599]


@pytest.mark.parametrize(
    ("dtype", "stored", "attributes", "expected"),
    [
        ("i1", [1, -2, -1], {"_Unsigned": "true", "_FillValue": -1}, [1, 254, None]),
        ("f4", [1, -999, -9], {"missing_value": [-999.0, -9]}, [1, None, None]),
        ("i2", [1, 2, 3], {"scale_factor": [0.5], "add_offset": [1]}, [1.5, 2, 2.5]),
        ("u8", [1, 2, 2**64 - 1], {"_FillValue": 2**64 - 1}, [1, 2, None]),
    ],
)
def test_values_are_those_that_their_attributes_say(
    dtype: str, stored: list[Any], attributes: dict[str, Any], expected: list[Any]
) -> None:
    repo = zm.create(MemoryStorage())
    with repo.transaction(message="values") as store:
        zarr.create_array(store, name="a", data=np.array(stored, dtype), attributes=attributes)
    with serving(repo) as url:
        _, values = fetched(url, "/slice/main/a")
    assert [None if np.isnan(one) else one for one in values.tolist()] == expected


def test_times_are_those_of_their_calendar() -> None:
    repo = zm.create(MemoryStorage())
    attributes = {"units": "days since 2001-02-28", "calendar": "360_day"}
    with repo.transaction(message="values") as store:
        root = zarr.create_group(store)
        for name, more in (("a", {}), ("time", attributes)):
            root.create_array(name, data=np.arange(3), dimension_names=("time",), attributes=more)
    with serving(repo) as url:
        header, _ = fetched(url, "/slice/main/a")
    days = ["2001-02-28", "2001-02-29", "2001-02-30"]
    assert header["axes"][0]["values"] == [f"{day}T00:00:00" for day in days]


@pytest.mark.parametrize(
    "attributes",
    [{"scale_factor": "x"}, {"add_offset": [1, 2]}],
)
def test_what_xarray_cannot_decode_is_refused(attributes: dict[str, Any]) -> None:
    repo = zm.create(MemoryStorage())
    with repo.transaction(message="values") as store:
        zarr.create_array(store, name="a", data=np.arange(3), attributes=attributes)
    with serving(repo) as url:
        answer = get(url, "/slice/main/a")
    assert answer.status == 400
    assert answer.text.startswith("/a cannot be decoded: ")


def test_at_most_so_many_values_and_chunks_are_read(
    url: str, monkeypatch: pytest.MonkeyPatch, ds: xr.Dataset
) -> None:
    monkeypatch.setattr(answers, "MOST_CHUNKS", 4)
    header, values = fetched(url, "/slice/main/t?index=1,:,:")
    steps = [axis["step"] for axis in header["axes"]]
    np.testing.assert_allclose(values, ds.t[1, :: steps[0], :: steps[1]], rtol=1e-6)
    read = [
        len({i // c for i in range(0, n, s)})
        for n, c, s in zip((40, 600), (10, 128), steps, strict=True)
    ]
    assert np.prod(read) <= 4


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("t?index=0,0,0,0", 400),
        ("t?index=9,:,:", 400),
        ("t?index=0,::-1,:", 400),
        ("words", 400),
        ("huge?index=0,:", 400),
        ("nothing", 404),
    ],
)
def test_what_is_no_slice_is_refused(url: str, query: str, status: int) -> None:
    assert get(url, f"/slice/main/{query}").status == status
    assert get(url, f"/slice/gone/{query}").status == 410


@pytest.mark.parametrize(
    ("compressor", "filters"),
    [
        ({"id": "bz2", "level": 1}, None),
        (None, [{"id": "astype", "encode_dtype": "|i1", "decode_dtype": "|S1000000"}]),
    ],
)
def test_a_codec_that_may_make_anything_of_a_few_bytes_is_not_decoded(
    compressor: Any, filters: Any
) -> None:
    name = compressor["id"] if compressor else "filter"
    repo = zm.create(f"memory://served-codecs-{name}")
    document = {
        "zarr_format": 2, "shape": [1000], "chunks": [1000], "dtype": "|i1", "fill_value": 0,
        "order": "C", "compressor": compressor, "filters": filters,
    }  # fmt: skip
    with repo.transaction(message="small, and large") as store:
        for key, data in ((".zgroup", b'{"zarr_format": 2}'), ("a/0", bytes(1000))):
            store.set_sync(key, CPUBuffer.from_bytes(data))
        store.set_sync("a/.zarray", CPUBuffer.from_bytes(json.dumps(document).encode()))
    with serving(repo) as url:
        answer = get(url, "/slice/main/a?index=0:3")
    assert answer.status == 400
    assert "memory" in answer.text


def test_an_index_that_is_larger_than_its_chunks_is_not_read() -> None:
    """Of a shard of parts of one cell, a few bytes may be an index of gigabytes."""
    repo = zm.create("memory://served-shards")
    cells = 2**27
    with repo.transaction(message="a shard") as store:
        zarr.create_array(store, name="a", shape=(cells,), shards=(cells,), chunks=(1,), dtype="i1")
    with serving(repo) as url:
        answer = get(url, "/slice/main/a?index=0:1")
    assert answer.status == 400
    assert "index" in answer.text


def test_a_fill_value_of_format_2_is_missing_as_in_xarray() -> None:
    repo = zm.create("memory://served-slices-fill")
    packed = {"dtype": "i2", "scale_factor": 0.5, "_FillValue": -32768}
    with repo.transaction() as store:
        ds = xr.Dataset({"t": ("x", [1.5, np.nan, 3.0])})
        ds.to_zarr(store, zarr_format=2, consolidated=False, encoding={"t": packed})
    with serving(repo) as url:
        header, values = fetched(url, "/slice/main/t")
    np.testing.assert_array_equal(values, [1.5, np.nan, 3.0])
    assert header["missing"] == 1
