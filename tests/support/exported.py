"""A repository with arrays of every kind, and what a store of Zarr holds, to compare."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py  # type: ignore[import-untyped]
import numpy as np
import xarray as xr
import zarr
import zarr.storage
from zarr.core.buffer import cpu, default_buffer_prototype

import zarr_manifests as zm
from zarr_manifests.store import ManifestStore

CONSOLIDATED = ".zmetadata"
ODD = "wind & \u00fcber 100% #1"
"""The name of a group, which has to be escaped wherever there are URLs."""


def odd_repository(folder: Path, location: Any = None) -> zm.Repository:
    """Groups, arrays with large, inline, absent and virtual chunks, shards, scalars, odd names."""
    day = xr.Dataset({"u": (("time", "x"), np.arange(48.0).reshape(8, 6))}, {"time": np.arange(8)})
    source = folder / "raw files"
    source.mkdir()
    day.to_netcdf(source / "day 1.nc", engine="h5netcdf", encoding={"u": {"chunksizes": (4, 6)}})
    repo = zm.create(
        folder / "repository" if location is None else location,
        {"inline-chunk-bytes": 64},
        virtual_containers={"raw": source},
    )
    with repo.transaction(message="native chunks") as store:
        root = zarr.create_group(store, attributes={"title": "all kinds", "missing": float("nan")})
        rng = np.random.default_rng(7)
        large = root.create_array(
            "large", shape=(60, 40), chunks=(20, 20), dtype="f8", dimension_names=["lat", "lon"]
        )
        large[:40] = rng.random((40, 40))
        small = root.create_array(
            "small", shape=(9,), chunks=(2,), dtype="i2", fill_value=-7, dimension_names=["n"]
        )
        small[2:5] = [1, 2, 3]
        root.create_array("scalar", shape=(), dtype="f4")[...] = 2.5
        root.create_array(
            "unwritten", shape=(4, 4), chunks=(2, 2), dtype="i4", dimension_names=["a", "b"]
        )
        root.create_array("empty", shape=(0,), chunks=(1,), dtype="i4", dimension_names=["none"])
        group = root.create_group(ODD, attributes={"note": "\u96ea"})
        shards = group.create_array(
            "shards", shape=(64,), shards=(32,), chunks=(8,), dtype="i8", dimension_names=["cell"]
        )
        shards[8:40] = np.arange(32)
        dots = group.create_array(
            "dots",
            data=np.arange(6.0).reshape(2, 3),
            chunks=(1, 2),
            chunk_key_encoding={"name": "default", "separator": "."},
            dimension_names=["row", "column"],
        )
        assert dots.attrs.asdict() == {}
        group.create_group("inner/deep").attrs["level"] = 3
    with repo.transaction(message="format 2") as store:
        plain = zarr.storage.MemoryStore()
        old = zarr.create_group(plain, zarr_format=2, attributes={"of": "before"})
        old.create_array("t", data=np.arange(24, dtype="i4").reshape(4, 6), chunks=(2, 6))
        for key, data in bytes_in(plain).items():  # zarr would make documents in the root, too
            put(store, f"old/{key}", data)
        put(store, "old/.zmetadata", b"is out of date, and is not used")
        put(store, "notes/readme.txt", b"opaque")
    place = source / "day 1.nc"
    with h5py.File(place) as file:
        found = [file["u"].id.get_chunk_info(at) for at in range(2)]
    session = repo.writable_session()
    zarr.create_array(
        session.store,
        name=f"{ODD}/u",
        shape=(8, 6),
        chunks=(4, 6),
        dtype="f8",
        compressors=None,
        dimension_names=["time", "x"],
        attributes={"units": "m s-1"},
    )
    session.store.set_virtual_refs(
        f"{ODD}/u",
        [(0, 0), (1, 0)],
        [place.as_uri()],
        [0, 0],
        [chunk.byte_offset for chunk in found],
        [chunk.size for chunk in found],
        sizes=[place.stat().st_size],
    )
    session.commit("virtual chunks")
    return repo


def put(store: ManifestStore, key: str, data: bytes) -> None:
    """Write an object of a store."""
    asyncio.run(store.set(key, cpu.Buffer.from_bytes(data)))


def bytes_in(store: Any, prefix: str = "") -> dict[str, bytes]:
    """Everything in a store below a prefix, by the rest of the key."""

    async def read() -> dict[str, bytes]:
        found = {}
        async for key in store.list_prefix(prefix):
            data = await store.get(key, default_buffer_prototype())
            assert data is not None, key
            found[key[len(prefix) :]] = bytes(data.to_bytes())
        return found

    return asyncio.run(read())


def same_bytes(found: Mapping[str, bytes], due: Mapping[str, bytes]) -> None:
    """See that what was exported is what is stored, but for consolidated metadata."""
    ours, due = ({k: v for k, v in x.items() if not k.endswith(CONSOLIDATED)} for x in (found, due))
    assert set(ours) == set(due)
    for key, data in due.items():
        here = found[key]
        if key.endswith("zarr.json") and here != data:
            fields = json.loads(here)
            assert fields.pop("consolidated_metadata")["kind"] == "inline"
            assert repr(fields) == repr(json.loads(data)), key
        else:
            assert here == data, key


def values_in(store: Any, path: str = "", zarr_format: Any = 3) -> dict[str, Any]:
    """Attributes and values of all nodes below a group, by path."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Object at .* is not recognized")
        group = zarr.open_group(store, path=path, mode="r", zarr_format=zarr_format)
        found: dict[str, Any] = {"": repr(dict(group.attrs))}
        for name, node in group.members(max_depth=None):
            values = np.asarray(node[...]).tobytes() if isinstance(node, zarr.Array) else b""
            found[name] = (repr(sorted(node.attrs.items())), values)
    return found
