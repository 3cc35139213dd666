"""Exports to a bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import icechunk
import numpy as np
import obstore
import pytest
import zarr
import zarr.storage
from obstore.store import S3Store

import zarr_manifests as zm
from exported import bytes_in, odd_repository, same_bytes, values_in
from s3_server import ObjectServer
from zarr_manifests.errors import AlreadyExistsError, StorageError
from zarr_manifests.storage.object_store import ObjectStorage


def test_a_bucket_has_every_byte(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = odd_repository(tmp_path).readonly_session()
    obstore.put(bucket, "outer.txt", b"of somebody else")
    store = zarr.storage.ObjectStore(S3Store("tests", prefix="out/plain.zarr"))
    dest = "s3://tests/out/plain.zarr"
    put, left = ObjectStorage.put_file, [6]

    def failing(self: ObjectStorage, name: str, data: bytes) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise StorageError("lost")
        put(self, name, data)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStorage, "put_file", failing)
        with pytest.raises(StorageError, match="lost"):
            zm.export(session, dest)
    assert len(bytes_in(store)) == 6  # with the mark
    with pytest.raises(AlreadyExistsError, match="broken off"):
        zm.export(session, dest)
    zm.export(session, dest, overwrite=True)
    due = bytes_in(session.store)
    same_bytes(bytes_in(store), due)
    assert values_in(store) == values_in(session.store)
    with pytest.raises(AlreadyExistsError):
        zm.export(session, dest)
    zm.export(session, dest, path="large", overwrite=True)
    same_bytes(bytes_in(store), bytes_in(session.store, "large/"))
    assert bytes(obstore.get(bucket, "outer.txt").bytes()) == b"of somebody else"


def test_icechunk_refers_to_objects_in_a_bucket(
    object_server: ObjectServer, bucket: Any, tmp_path: Path
) -> None:
    options = {"endpoint": object_server.endpoint, "allow_http": True, "region": "us-east-1"}
    repo = zm.create("s3://tests/repo", storage_options=options)
    values = np.random.default_rng(1).random((40, 40))
    with repo.transaction(message="native chunks") as store:
        zarr.create_array(store, name="a", data=values, chunks=(20, 20))
    report = zm.export(repo.readonly_session(), tmp_path / "ice", "icechunk", copy=False)
    assert (report.referenced, list(repo.list_tags())) == (4, [report.tag])
    storage = icechunk.local_filesystem_storage(str(tmp_path / "ice"))
    config = icechunk.Repository.fetch_config(storage)
    assert config is not None
    assert list(config.virtual_chunk_containers or {}) == ["s3://tests/"]
    access: Any = icechunk.containers_credentials(
        {"s3://tests/": icechunk.s3_credentials(from_env=True)}
    )
    found = icechunk.Repository.open(storage, authorize_virtual_chunk_access=access)
    group = zarr.open_group(found.readonly_session("main").store, mode="r")
    np.testing.assert_array_equal(group["a"], values)
