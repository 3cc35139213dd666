"""Imports of icechunk repositories that are in a bucket, and refer to files there."""

from __future__ import annotations

from pathlib import Path

import icechunk
import obstore
import pytest
import zarr
from obstore.store import S3Store

import zarr_manifests as zm
from s3_server import ObjectServer
from zarr_manifests.errors import VirtualSourceChangedError


def test_icechunk_says_whether_files_in_a_bucket_are_what_it_noted(
    object_server: ObjectServer, tmp_path: Path
) -> None:
    client = S3Store(object_server.bucket)
    place = {"endpoint": object_server.endpoint, "allow_http": True, "region": "us-east-1"}
    config = icechunk.RepositoryConfig.default()
    config.inline_chunk_threshold_bytes = 0
    store = icechunk.s3_store(
        region="us-east-1",
        endpoint_url="http://127.0.0.1:9/what-it-says-is-not-asked",
        allow_http=True,
    )
    config.set_virtual_chunk_container(icechunk.VirtualChunkContainer("s3://tests/", store, "in"))
    storage = icechunk.s3_storage(
        bucket="tests",
        prefix="ice",
        region="us-east-1",
        endpoint_url=object_server.endpoint,
        allow_http=True,
        force_path_style=True,
        from_env=True,
    )
    made = icechunk.Repository.create(storage, config)
    made.save_config()
    session = made.writable_session("main")
    array = zarr.create_array(
        session.store, name="v", shape=6, chunks=2, dtype="u1", compressors=None
    )
    array[4:] = 7
    for number, name in enumerate(("same", "changed")):
        etag = obstore.put(client, f"data/{name}", b"abcd")["e_tag"]
        session.store.set_virtual_ref(
            f"v/c/{number}", f"vcc://in/data/{name}", offset=1, length=2, checksum=etag
        )
    session.commit("refer to files")
    obstore.put(client, "data/changed", b"efgh")
    places = {
        "data": zm.VirtualContainer("s3://tests/data", **place),
        "ice": zm.VirtualContainer("s3://tests/ice", **place),
    }
    repo = zm.create(tmp_path / "repo", virtual_containers=places)
    zm.virtual.import_icechunk(repo, "s3://tests/ice", storage_options=place)
    assert repo.verify().unguarded == 0
    array = zarr.open_array(repo.readonly_session().store, path="v", mode="r")
    assert array[:2].tolist() == [*b"bc"]
    assert array[4:].tolist() == [7, 7]
    with pytest.raises(VirtualSourceChangedError):
        array[2:4]
    obstore.put(client, "data/same", b"efgh")
    with pytest.raises(VirtualSourceChangedError):
        array[:2]
