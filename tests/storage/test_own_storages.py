"""Stores that the caller has opened: obstore's, zarr's and fsspec's."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zarr

import zarr_manifests as zm
from small_store import Answer
from zarr_manifests.errors import (
    InvalidArgumentError,
    ManifestsError,
    ObjectNotFoundError,
    StorageError,
    UnsupportedStorageError,
)
from zarr_manifests.repository import context_of
from zarr_manifests.storage import object_store
from zarr_manifests.storage.fsspec_store import FsspecStorage, own_storage
from zarr_manifests.storage.local import LocalStorage

stores = pytest.importorskip("obstore.store")
fsspec = pytest.importorskip("fsspec")

_numbers = itertools.count()


def _client(endpoint: str, prefix: str = "prefix", **options: Any) -> Any:
    http = {"allow_http": True}
    return stores.S3Store(
        "bucket", prefix=prefix, endpoint=endpoint, client_options=http, **options
    )


def _folder() -> tuple[Any, str]:
    return fsspec.filesystem("memory"), f"/own-{next(_numbers)}"


# --- where a storage is taken --------------------------------------------------------------------


def test_a_store_is_taken_where_a_storage_is(small_store: Any) -> None:
    client = _client(small_store.endpoint)
    repo = zm.create(client)
    with repo.transaction(message="a group") as store:
        zarr.create_group(store, path="a")
    for location in (client, own_storage(client), zarr.storage.ObjectStore(client)):
        there = zm.open(location)
        assert context_of(there).repository_id == context_of(repo).repository_id
        with there.transaction(message="another") as store:
            zarr.open_group(store, path="a").attrs["n"] = 1
    with pytest.raises(InvalidArgumentError, match="storage_options"):
        zm.open(client, storage_options={"region": "x"})
    with pytest.raises(InvalidArgumentError, match="a Group is not a location"):
        zm.open(zarr.create_group({}))


def test_a_read_only_store_of_zarr_stays_read_only(small_store: Any) -> None:
    client = _client(small_store.endpoint)
    zm.create(client)
    before = small_store.objects["bucket/prefix/current"]
    there = zm.open(zarr.storage.ObjectStore(client, read_only=True))
    copy = pickle.loads(pickle.dumps(there.storage))
    assert not copy.capabilities.cas
    calls: list[Callable[[], object]] = [
        lambda: there.create_tag("t"),
        lambda: copy.put("a", b""),
        lambda: copy.create("a", b""),
        lambda: copy.cas("a", b"", None),
        lambda: copy.delete_many(["current"]),
    ]
    for call in calls:
        with pytest.raises(ManifestsError):
            call()
    assert small_store.objects["bucket/prefix/current"] == before
    assert "bucket/prefix/a" not in small_store.objects


# --- secrets ---------------------------------------------------------------------------------


def _texts(storage: Any) -> str:
    said = [repr(storage), storage.url, str(vars(storage))]
    for call in (lambda: storage.get("a"), lambda: pickle.dumps(storage)):
        with pytest.raises(StorageError) as caught:
            call()
        said += [str(caught.value), repr(caught.value.__cause__), repr(caught.value.__context__)]
    return " ".join(said)


def test_secrets_of_a_client_are_not_pickled() -> None:
    secrets = {"access_key_id": "PLANTEDid", "secret_access_key": "PLANTEDsecret"}
    storage = own_storage(_client("http://127.0.0.1:1", **secrets))
    assert "PLANTED" not in f"{storage!r} {storage.url} {vars(storage)}"
    with pytest.raises(StorageError) as caught:
        pickle.dumps(storage)
    assert "PLANTED" not in str(caught.value)


class _Leaking(fsspec.AbstractFileSystem):
    protocol = "leaking"

    def cat_file(self, path: str, **_: Any) -> bytes:
        raise OSError(f"https://host/{path}?signature=PLANTED")


def test_secrets_of_a_filesystem_are_told_to_nobody() -> None:
    for options in ({"key": "PLANTED"}, {"client_kwargs": {"aws_session_token": "PLANTED"}}):
        storage = FsspecStorage(_Leaking(**options), "bucket/x")
        assert "PLANTED" not in _texts(storage)
    for path in ("https://PLANTED@host/x", "https://host/x?token=PLANTED"):
        with pytest.raises(InvalidArgumentError) as caught:
            FsspecStorage(_Leaking(), path)
        assert "PLANTED" not in str(caught.value)


# --- what fsspec may do ----------------------------------------------------------------------


@pytest.mark.parametrize("ignored", ["If-None-Match", "If-Match", ""])
def test_a_race_is_held_before_the_first_conditional_write(small_store: Any, ignored: str) -> None:
    s3fs = pytest.importorskip("s3fs")
    object_store._IGNORED.clear()
    small_store.heeds.discard(ignored)
    fs = s3fs.S3FileSystem(endpoint_url=small_store.endpoint)
    storage = FsspecStorage(fs, "bucket/prefix")
    assert storage.capabilities.cas
    if ignored:
        for call in (lambda: zm.create(storage), lambda: storage.create("a", b"")):
            with pytest.raises(UnsupportedStorageError, match=f"all succeeded with {ignored}"):
                call()
        assert not storage.capabilities.cas
    else:
        assert storage.create("a", b"1")
        assert FsspecStorage(fs, "bucket/prefix").create("b", b"1")
        token = storage.get_tagged("a").token
        assert storage.cas("a", b"2", token)
        assert storage.cas("a", b"3", token) is None
        assert not storage.create("a", b"4")
        assert storage.get("a") == b"2"
    raced = [r for r in small_store.requests if r.startswith("PUT") and "/.race-" in r]
    assert len(raced) == (16 if ignored == "If-None-Match" else 32), "once, then it is known"
    assert not any("/.race-" in name for name in small_store.objects)


def test_an_object_without_bytes_is_read_whole_or_in_part(small_store: Any) -> None:
    s3fs = pytest.importorskip("s3fs")
    fs = s3fs.S3FileSystem(endpoint_url=small_store.endpoint)
    small_store.objects["bucket/prefix/empty"] = b""
    storage = FsspecStorage(fs, "bucket/prefix")
    assert storage.get("empty") == storage.get("empty", 0, 10) == storage.get("empty", 5, 1) == b""
    with pytest.raises(ObjectNotFoundError):
        storage.get("absent", 0, 10)


def test_a_bucket_that_is_not_there_is_told_as_a_failure(
    small_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3fs = pytest.importorskip("s3fs")
    object_store._IGNORED.clear()
    refused = Answer.refusal(404, "NoSuchBucket")
    monkeypatch.setattr(small_store, "_put", lambda *args: refused)
    storage = FsspecStorage(s3fs.S3FileSystem(endpoint_url=small_store.endpoint), "bucket/prefix")
    for call in (lambda: zm.create(storage), lambda: storage.create("a", b"")):
        with pytest.raises(StorageError, match="failed with a FileNotFoundError") as caught:
            call()
        assert not isinstance(caught.value, ObjectNotFoundError)


def test_any_filesystem_is_read_and_few_are_written(tmp_path: Path) -> None:
    repo = zm.create(tmp_path / "repository", {"inline-chunk-bytes": 0})
    with repo.transaction(message="an array") as store:
        zarr.create_array(store, name="a", shape=4, chunks=2, dtype="i4")[:] = [1, 2, 3, 4]
    fs, path = _folder()
    fs.put(f"{tmp_path}/repository", path, recursive=True)
    mapper = fs.get_mapper(path)
    storage = pickle.loads(pickle.dumps(own_storage(mapper)))
    for location in (mapper, storage):
        there = zm.open(location).readonly_session().store
        assert zarr.open_array(there, path="a", mode="r")[:].tolist() == [1, 2, 3, 4]
    assert storage.get("current", 2, 3) == storage.get_tagged("current").data[2:5]
    assert storage.get("current", 10**6, 3) == b""
    assert [info.key for info in storage.list()] == [i.key for i in repo.storage.list()]
    assert storage.stray() is None
    before = fs.find(path, detail=True)
    calls: list[Callable[[], object]] = [
        lambda: zm.open(storage).create_tag("t"),
        lambda: storage.put("a", b""),
        lambda: storage.create("a", b""),
        lambda: storage.cas("current", b"", storage.get_tagged("current").token),
        lambda: storage.delete_many(["current"]),
    ]
    for call in calls:
        with pytest.raises(ManifestsError, match="read-only"):
            call()
    assert fs.find(path, detail=True) == before


def test_other_stores_of_obstore(tmp_path: Path) -> None:
    local = own_storage(stores.LocalStore(tmp_path))
    assert isinstance(local, LocalStorage)
    assert local.path == str(tmp_path)
    web = own_storage(stores.HTTPStore("https://example.org/x"))
    assert web.url == "https://example.org/x"
    assert not web.capabilities.cas
    for wrong in (stores.MemoryStore(), stores.LocalStore()):
        with pytest.raises(InvalidArgumentError, match="cannot hold a repository"):
            own_storage(wrong)
