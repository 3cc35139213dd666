"""Exports to a bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import obstore
import pytest
import zarr.storage
from obstore.store import S3Store

import zarr_manifests as zm
from exported import bytes_in, odd_repository, same_bytes, values_in
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
    assert len(bytes_in(store)) == 6
    with pytest.raises(AlreadyExistsError, match="broken off"):
        zm.export(session, dest)
    for name in bytes_in(store):
        obstore.delete(bucket, f"out/plain.zarr/{name}")
    zm.export(session, dest)
    due = bytes_in(session.store)
    same_bytes(bytes_in(store), due)
    assert values_in(store) == values_in(session.store)
    assert bytes(obstore.get(bucket, "outer.txt").bytes()) == b"of somebody else"
