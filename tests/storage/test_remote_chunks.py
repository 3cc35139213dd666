"""Virtual chunks in object stores and on web servers, against servers that change and misbehave."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from zarr_manifests.errors import (
    ConfigError,
    CorruptObjectError,
    InvalidArgumentError,
    MissingChunkError,
    StorageError,
    UnsupportedStorageError,
    VirtualContainerError,
    VirtualSourceChangedError,
)
from zarr_manifests.format.chunk_table import VirtualRef, VirtualSource
from zarr_manifests.repository import containers_of
from zarr_manifests.storage import from_url
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of
from zarr_manifests.virtual.containers import Containers, VirtualContainer
from zarr_manifests.virtual.virtual_refs import VirtualReader

DATA = np.arange(64, dtype="u1")


@pytest.fixture(autouse=True)
def quickly(impatient: None) -> None:
    """Requests are repeated once, at once."""


def container(store: Any, kind: str = "s3", path: str = "bucket/raw") -> VirtualContainer:
    """The same files of the small store, as each kind of place."""
    if kind == "http":
        return VirtualContainer(f"{store.endpoint}/{path}", allow_local=True)
    options: dict[str, Any] = {"account": "winds"} if kind == "az" else {}
    return VirtualContainer(
        f"{kind}://{path}", endpoint=store.endpoint, allow_http=True, anonymous=True, **options
    )


def repository(store: Any, kind: str = "s3", **containers: Any) -> zm.Repository:
    """A repository in memory; the file `raw/a.bin` has 64 bytes."""
    store.objects["bucket/raw/a.bin"] = DATA.tobytes()
    places = containers or {"raw": container(store, kind)}
    return zm.create(MemoryStorage(), virtual_containers=places)


def refer(
    repo: zm.Repository, location: str = "virtual://raw/a.bin", chunk: int = 1, **known: Any
) -> Any:
    """An array of 64 bytes whose chunks are those of the file; as a fresh reader sees it."""
    n = 64 // chunk
    with repo.transaction(message="refer") as store:
        zarr.create_array(
            store, name="a", shape=(64,), chunks=(chunk,), dtype="u1", compressors=None,
            overwrite=True, dimension_names=["x"],
        )  # fmt: skip
        at = np.arange(n)
        store.set_virtual_refs(
            "a", at[:, None], [location], at * 0, at * chunk, at * 0 + chunk, **known
        )
    return zarr.open_array(repo.readonly_session().store, path="a")


def facts(store: Any) -> dict[str, Any]:
    """What is known of the file: what a HEAD of it answers."""
    request = type("Request", (), {"method": "GET", "path": "/bucket/raw/a.bin", "query": {}})()
    request.headers = {}
    etag = store.perform(request).headers["ETag"]
    return {
        "etags": [etag],
        "modified": [int(store.modified.timestamp()) * 1000 + 250],
        "sizes": [64],
    }


# --- reading ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "known"),
    [("s3", "etags"), ("s3", "modified"), ("gs", "sizes"), ("az", "etags"), ("http", "modified")],
)
def test_a_changed_file_is_an_error(small_store: Any, kind: str, known: str) -> None:
    a = refer(repository(small_store, kind), **{known: facts(small_store)[known]})
    small_store.objects["bucket/raw/a.bin"] = bytes(65)
    small_store.modified += timedelta(seconds=2)
    with pytest.raises(VirtualSourceChangedError, match=r"a\.bin has another etag"):
        a[7]
    if known == "modified":  # an older file is another one, too
        small_store.modified -= timedelta(days=1)
        with pytest.raises(VirtualSourceChangedError, match="another etag"):
            a[7]


@pytest.mark.parametrize("kind", ["s3", "http"])
def test_gone_and_short_files_never_read_as_fill_value(small_store: Any, kind: str) -> None:
    repo = repository(small_store, kind)
    a, whole = refer(repo, chunk=4), small_store.objects["bucket/raw/a.bin"]
    small_store.objects["bucket/raw/a.bin"] = whole[:62]
    with pytest.raises(CorruptObjectError, match="4 bytes from 60"):
        a[60:]
    assert a[56] == 56
    small_store.objects["bucket/raw/a.bin"] = whole[:8]
    with pytest.raises(CorruptObjectError):
        a[:]
    sized = refer(repo, chunk=4, sizes=[64])
    with pytest.raises(VirtualSourceChangedError, match="another etag"):
        sized[60:]
    del small_store.objects["bucket/raw/a.bin"]
    with pytest.raises(MissingChunkError, match="It is not read as fill value"):
        a[0]


def test_checksums_and_other_refusals_are_errors(small_store: Any) -> None:
    repo = repository(small_store)
    with pytest.raises(CorruptObjectError, match="its checksum"):
        refer(repo, checksums=[7] * 64)[3]
    a = refer(repo)
    answer = small_store.perform
    for status in (403, 500):
        small_store.faults[:] = [
            lambda r, status=status: replace(answer(replace(r, path="/x")), status=status, body=b"")
        ]
        with pytest.raises(StorageError):
            a[3]
    small_store.faults[:] = [lambda r: replace(answer(r), status=200, body=DATA.tobytes())]
    with pytest.raises(UnsupportedStorageError, match="no byte ranges"):
        a[3]


def test_against_a_server_of_amazons_kind(object_server: Any) -> None:
    place = f"s3://{object_server.bucket}/remote-chunks"
    files = from_url(place)
    files.put("deep/a.bin", DATA.tobytes())
    info, token = files.head("deep/a.bin"), files.get_tagged("deep/a.bin").token
    repo = zm.create(f"{place}-repo", virtual_containers={"raw": place})
    known = {"etags": [token], "modified": [info.modified_ms], "sizes": [64]}
    for some in ({}, known, *({name: value} for name, value in known.items())):
        a = refer(repo, "virtual://raw/deep/a.bin", **some)
        np.testing.assert_array_equal(a[:], DATA)
        assert pickle.loads(pickle.dumps(a.store)).get_virtual_refs("a").sizes is not None
    files.put("deep/a.bin", bytes(64))
    by_etag = refer(repo, "virtual://raw/deep/a.bin", etags=[token])
    with pytest.raises(VirtualSourceChangedError):
        by_etag[3]
    early = refer(repo, "virtual://raw/deep/a.bin", modified=[info.modified_ms - 5000])
    with pytest.raises(VirtualSourceChangedError):
        early[3]
    files.delete_many(["deep/a.bin"])
    with pytest.raises(MissingChunkError):
        by_etag[3]


# --- which places may be read ----------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["localhost", "[::1]:80", "169.254.169.254", "[fe80::1]", "[::ffff:127.0.0.1]"]
)
def test_local_web_servers_are_refused(host: str) -> None:
    reader = VirtualReader(Containers.of({"local": f"http://{host}/data"}))
    with pytest.raises(VirtualContainerError, match="allow_local=True"):
        reader.version(f"http://{host}/data/a")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1", "2130706433"])
def test_a_name_that_leads_to_this_machine_is_refused(small_store: Any, host: str) -> None:
    place = small_store.endpoint.replace("127.0.0.1", host)
    repo = repository(small_store, raw=VirtualContainer(f"{place}/bucket/raw"))
    a = refer(repo)
    small_store.requests.clear()
    contents = contents_of(a.store)
    ref = contents.find("a/c/3")
    assert ref is not None
    for read in (lambda: a[3], lambda: contents.reader.read(ref, 0, 1)):
        with pytest.raises(VirtualContainerError, match="leads to a web server on this machine"):
            read()
    assert small_store.requests == []


# --- containers that are saved ---------------------------------------------------------------

SAVED = {"name": "raw", "url": "s3://bucket/raw", "region": "us-east-1", "anonymous": True}


def test_a_saved_container_is_read_by_those_who_authorize_it(small_store: Any) -> None:
    small_store.objects["bucket/raw/a.bin"] = DATA.tobytes()
    config = {"virtual-containers": [SAVED]}
    storage = MemoryStorage("saved-container")
    repo = zm.create(storage, config, authorize=["raw"])
    np.testing.assert_array_equal(refer(repo)[:], DATA)
    assert containers_of(repo) == {
        "raw": VirtualContainer("s3://bucket/raw", region="us-east-1", anonymous=True)
    }

    def values(opened: zm.Repository) -> list[int]:
        found: list[int] = zarr.open_array(opened.readonly_session().store, path="a")[:4].tolist()
        return found

    small_store.requests.clear()
    closed = zm.open(storage)
    assert containers_of(closed) == {}
    assert closed.config.virtual_containers[0].url == "s3://bucket/raw"
    with pytest.raises(VirtualContainerError, match=r"s3://bucket/raw: .*authorize=\['raw'\]"):
        values(closed)
    assert small_store.requests == []
    assert values(zm.open(storage, authorize=["raw"])) == [0, 1, 2, 3]
    assert values(zm.open(storage, authorize=True)) == [0, 1, 2, 3]
    assert containers_of(zm.open(storage, authorize=False)) == {}
    assert values(pickle.loads(pickle.dumps(repo))) == [0, 1, 2, 3]
    given = zm.open(storage, authorize=["raw"], virtual_containers={"raw": "s3://other"})
    assert containers_of(given)["raw"].url == "s3://other"
    with pytest.raises(InvalidArgumentError, match=r"'war'.* raw"):
        zm.open(storage, authorize=["war"])


# --- many chunks at once ---------------------------------------------------------------------


def test_a_hostile_ref_does_not_leave_its_container(small_store: Any) -> None:
    """Refs as another program could have written them, with what `set_virtual_refs` refuses."""
    small_store.objects["bucket/secret"] = DATA.tobytes()
    repo = repository(small_store)
    contents = contents_of(repo.readonly_session().store)
    reader = VirtualReader(contents.context.containers)
    small_store.requests.clear()
    for path in ("s3://bucket/raw/../secret", "s3://bucket/raw/%2e%2e/secret", "s3://u:p@bucket/a"):
        source = VirtualSource("", path)
        with pytest.raises(VirtualContainerError):
            reader.read(VirtualRef(source, 0, 4), 0, 4)
    assert small_store.requests == []


PLANTED = "PLANTED-SECRET"


def _no_credentials() -> None:
    raise AssertionError


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: VirtualContainer("s3://b", colour=1), ConfigError),
        (lambda: VirtualContainer("s3://b", secret_access_key=PLANTED), ConfigError),
        (lambda: VirtualContainer("s3://b", allow_local=True), ConfigError),
        (lambda: VirtualContainer("file:///b", region="x"), ConfigError),
        (lambda: VirtualContainer("/b", credentials=_no_credentials), ConfigError),
        (lambda: VirtualContainer("ftp://b/x"), UnsupportedStorageError),
        (lambda: VirtualContainer(f"https:me:{PLANTED}@b"), InvalidArgumentError),
        (lambda: Containers.of({"a": 5}), InvalidArgumentError),
        (lambda: Containers.of({"a": {"url": "s3://b"}}), InvalidArgumentError),
        (lambda: VirtualContainer("s3://b", secret_key=PLANTED), ConfigError),
    ],
)
def test_options_that_a_place_does_not_take_are_refused(
    make: Callable[[], object], error: type[Exception]
) -> None:
    with pytest.raises(error) as caught:
        make()
    assert PLANTED not in str(caught.value)
