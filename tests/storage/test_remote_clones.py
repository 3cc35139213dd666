"""Clones from disks to buckets and back, within one bucket, and between accounts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from s3_server import ENVIRONMENT, ObjectServer
from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.storage import from_url

CONFIG = {"inline-chunk-bytes": 0, "pack-chunk-bytes": 64}


def make(place: Any) -> zm.Repository:
    repo = zm.create(place, CONFIG)
    with repo.transaction(message="make arrays") as store:
        zarr.create_array(store, name="small", data=np.arange(8), chunks=(1,))
        zarr.create_array(store, name="large", data=np.arange(90), chunks=(30,), compressors=None)
    with repo.transaction(message="one more") as store:
        zarr.open_array(store, path="large")[:30] = 7
    repo.create_tag("t")
    return repo


def assert_equal(source: zm.Repository, clone: zm.Repository) -> None:
    assert clone.verify().problems == ()
    assert clone.list_branches() == source.list_branches()
    for info in [*source.ancestry()][:-1]:
        for name in ("small", "large"):
            one, other = (
                zarr.open_array(r.readonly_session(info.snapshot_id).store, path=name)
                for r in (source, clone)
            )
            np.testing.assert_array_equal(other[:], one[:])


def test_from_a_disk_to_a_bucket_and_back(object_server: ObjectServer, tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    there = f"s3://{object_server.bucket}/clones/{tmp_path.name}"
    report = zm.clone(source, there)
    clone = zm.open(there)
    assert_equal(source, clone)
    back = zm.clone(clone, tmp_path / "back")
    assert back.objects == report.objects
    assert_equal(source, zm.open(tmp_path / "back"))
    with source.transaction(message="later") as store:
        zarr.open_array(store, path="large")[30:60] = 8
    assert zm.clone(source, there).snapshots == 1
    assert_equal(source, clone)


def other_account() -> dict[str, str]:
    return {
        "access_key_id": ENVIRONMENT["AWS_ACCESS_KEY_ID"],
        "secret_access_key": ENVIRONMENT["AWS_SECRET_ACCESS_KEY"],
    }


def test_within_a_bucket(object_server: ObjectServer, tmp_path: Path) -> None:
    at = f"s3://{object_server.bucket}/within/{tmp_path.name}"
    source = make(f"{at}/source")
    zm.clone(source, f"{at}/clone")
    assert_equal(source, zm.open(f"{at}/clone"))
    assert zm.clone(source, f"{at}/clone").objects == 0
    zm.clone(source, f"{at}/other", storage_options={"credentials": other_account})
    assert_equal(source, zm.open(f"{at}/other"))


def test_damage_is_not_copied_within_a_bucket(object_server: ObjectServer, tmp_path: Path) -> None:
    at = f"s3://{object_server.bucket}/damaged/{tmp_path.name}"
    source = make(f"{at}/source")
    key = next(source.storage.list("chunks/")).key
    data = bytearray(source.storage.get(key))
    data[0] ^= 1
    source.storage.put(key, bytes(data))
    with pytest.raises(CorruptObjectError, match=key):
        zm.clone(source, f"{at}/clone")
    copied = {info.key for info in from_url(f"{at}/clone").list()}
    assert not {key, "current"} & copied
