"""Zarr stores in a bucket, taken in by reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
import zarr
import zarr.storage
from fsspec.implementations.reference import LazyReferenceMapper
from obstore.store import S3Store

import zarr_manifests as zm
from zarr_manifests.errors import (
    InvalidArgumentError,
    MissingChunkError,
    NotFoundError,
    VirtualSourceChangedError,
)
from zarr_manifests.storage.memory import MemoryStorage

DATA = np.arange(24, dtype="i4").reshape(4, 6)


@pytest.mark.parametrize(("zarr_format", "copy"), [(2, False), (3, True)])
def test_a_zarr_store_in_a_bucket(bucket: Any, zarr_format: Any, copy: bool) -> None:
    store = zarr.storage.ObjectStore(S3Store("tests", prefix="in/plain.zarr"))
    root = zarr.create_group(store, zarr_format=zarr_format, attributes={"title": "plain"})
    root.create_array("a/t", data=DATA, chunks=(2, 6))
    root.create_array("u", data=DATA[0], chunks=(3,))
    repo = zm.create(MemoryStorage(), virtual_containers={"bucket": "s3://tests"})
    zm.virtual.import_zarr(repo, "s3://tests/in/plain.zarr", copy=copy)
    zm.virtual.import_zarr(repo, store, "again", copy=copy)
    for path in ("", "again"):
        group = zarr.open_group(
            repo.readonly_session().store, path=path, mode="r", zarr_format=zarr_format
        )
        assert group.attrs["title"] == "plain"
        np.testing.assert_array_equal(group["a/t"][:], DATA)
        np.testing.assert_array_equal(group["u"][:], DATA[0])
    refs = repo.readonly_session().store.get_virtual_refs("a/t")
    assert len(refs) == (0 if copy else 2)
    if copy:
        return
    assert refs.guarded.all()
    (first, second) = (url.removeprefix("s3://tests/") for url in refs.locations)
    obstore.delete(bucket, first)
    obstore.put(bucket, second, b"longer than it was, by far" * 9)
    array = zarr.open_array(repo.readonly_session().store, path="a/t", mode="r")
    with pytest.raises(MissingChunkError):
        array[:2]
    with pytest.raises(VirtualSourceChangedError):
        array[2:]


def plain(store: Any, zarr_format: Any) -> None:
    root = zarr.create_group(store, zarr_format=zarr_format, attributes={"title": "plain"})
    root.create_array("a/t", data=DATA, chunks=(2, 6))
    root.create_array("u", data=DATA[0], chunks=(3,))


def test_stores_that_are_at_no_place_are_copied(tmp_path: Path) -> None:
    repo = zm.create(MemoryStorage())
    memory, zipped = zarr.storage.MemoryStore(), tmp_path / "plain.zip"
    with zarr.storage.ZipStore(zipped, mode="w") as store:
        plain(store, 3)
    plain(memory, 2)
    with pytest.raises(InvalidArgumentError, match="pass copy=True"):
        zm.virtual.import_zarr(repo, memory)
    with pytest.raises(NotFoundError, match="no Zarr metadata"):
        zm.virtual.import_zarr(repo, zarr.storage.MemoryStore(), copy=True)
    zm.virtual.import_zarr(repo, memory, "memory", copy=True)
    with zarr.storage.ZipStore(zipped, mode="r") as store:
        zm.virtual.import_zarr(repo, store, "zip", copy=True)
    plain(zarr.storage.LocalStore(tmp_path / "folder"), 3)
    zm.virtual.import_zarr(repo, zarr.storage.LocalStore(tmp_path / "folder"), "folder")
    session = repo.readonly_session()
    np.testing.assert_array_equal(zarr.open_array(session.store, path="memory/u")[:], DATA[0])
    np.testing.assert_array_equal(zarr.open_array(session.store, path="zip/a/t")[:], DATA)
    assert len(session.store.get_virtual_refs("folder/u")) == 2


def repository(bucket: Any, **options: Any) -> zm.Repository:
    places: dict[str, Any] = {"bucket": "s3://tests"}
    return zm.create(MemoryStorage(), virtual_containers=places)


def test_a_folder_of_parquet_references_in_a_bucket(bucket: Any, tmp_path: Path) -> None:
    obstore.put(bucket, "data.bin", DATA.tobytes())
    document = {"zarr_format": 2, "shape": [4, 6], "chunks": [2, 6], "dtype": "<i4"}
    document |= {"compressor": None, "filters": None, "fill_value": 0, "order": "C"}
    folder = tmp_path / "refs"
    made = LazyReferenceMapper.create(str(folder), record_size=1, engine="pyarrow")
    made[".zgroup"], made["t/.zarray"] = b'{"zarr_format": 2}', json.dumps(document).encode()
    for i in range(2):
        made[f"t/{i}.0"] = ["s3://tests/data.bin", 48 * i, 48]
    made.flush()
    for path in folder.rglob("*"):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            obstore.put(bucket, f"refs.parquet/{name}", path.read_bytes())
    repo = repository(bucket)
    zm.virtual.import_kerchunk(repo, "s3://tests/refs.parquet")
    found = zarr.open_array(repo.readonly_session().store, path="t", mode="r", zarr_format=2)
    np.testing.assert_array_equal(found[:], DATA)
    with pytest.raises(InvalidArgumentError, match="more than 300 bytes"):
        zm.virtual.import_kerchunk(repo, "s3://tests/refs.parquet", "again", max_bytes=300)
    with pytest.raises(NotFoundError, match=r"no file s3://tests/absent\.parquet"):
        zm.virtual.import_kerchunk(repo, "s3://tests/absent.parquet", "again")
