"""Virtual chunks in object stores and on web servers, against servers that change and misbehave."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from email.message import Message
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr

import zarr_manifests as zm
from zarr_manifests.error_cases import (
    ConfigError,
    UnsupportedStorageError,
    VirtualSourceChangedError,
)
from zarr_manifests.errors import (
    CorruptObjectError,
    InvalidArgumentError,
    MissingChunkError,
    StorageError,
    VirtualContainerError,
)
from zarr_manifests.format.chunk_table import VirtualRef
from zarr_manifests.ids import crc32c
from zarr_manifests.repository import containers_of
from zarr_manifests.storage import from_url
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of
from zarr_manifests.virtual import containers as containers_module
from zarr_manifests.virtual.containers import Containers, VirtualContainer, container_of
from zarr_manifests.virtual.virtual_files import VirtualReader

DATA = np.arange(64, dtype="u1")
KINDS = ("s3", "gs", "az", "http")
PLANTED = "PLANTED-SECRET"


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


def deaf(store: Any) -> None:
    """The server ignores conditions of reads from now on."""

    def perform(request: Any) -> Any:
        heard = Message()
        for name, value in request.headers.items():
            if not name.lower().startswith("if-"):
                heard[name] = value
        return store.perform(replace(request, headers=heard))

    store.faults.append(perform)


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("known", ["etags", "modified", "sizes", None])
def test_chunks_are_read_with_the_condition_in_the_same_request(
    small_store: Any, kind: str, known: str | None
) -> None:
    asked: list[Any] = []
    small_store.faults.append(lambda request: asked.append(request.headers))
    repo = repository(small_store, kind)
    a = refer(repo, **({known: facts(small_store)[known]} if known else {}))
    small_store.requests.clear()
    np.testing.assert_array_equal(a[7:9], [7, 8])
    assert small_store.requests == ["GET /bucket/raw/a.bin"]
    conditions = {name.lower(): value for name, value in asked[-1].items()}
    assert conditions["range"] == "bytes=7-8"
    sent = {"etags": "if-match", "modified": "if-unmodified-since"}.get(known or "")
    assert [name for name in conditions if name.startswith("if-")] == ([sent] if sent else [])
    np.testing.assert_array_equal(a[:], DATA)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hears", [True, False])
@pytest.mark.parametrize("known", ["etags", "modified", "sizes"])
def test_a_changed_file_is_an_error_even_if_the_server_ignores_the_condition(
    small_store: Any, kind: str, hears: bool, known: str
) -> None:
    a = refer(repository(small_store, kind), **{known: facts(small_store)[known]})
    small_store.objects["bucket/raw/a.bin"] = bytes(65)
    small_store.modified += timedelta(seconds=2)
    if not hears:
        deaf(small_store)
    with pytest.raises(VirtualSourceChangedError, match=r"a\.bin has changed"):
        a[7]
    if known == "modified":  # an older file is another one, too, and passes the condition
        small_store.modified -= timedelta(days=1)
        with pytest.raises(VirtualSourceChangedError, match="time of modification"):
            a[7]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hears", [True, False])
def test_a_file_must_not_have_changed_since_a_time(
    small_store: Any, kind: str, hears: bool
) -> None:
    asked: list[Any] = []
    small_store.faults.append(lambda request: asked.append(request.headers))
    if not hears:
        deaf(small_store)
    repo = repository(small_store, kind)
    since = facts(small_store)["modified"][0] + 60_000
    a = refer(repo, unchanged_since=[since])
    assert a[3] == 3
    assert asked[-1]["If-Unmodified-Since"] == "Wed, 21 Oct 2015 07:29:01 GMT"
    refs = a.store.get_virtual_refs("a")
    assert (refs.unchanged_since.tolist(), refs.etags) == ([since], (None,))
    small_store.modified -= timedelta(days=1)  # an older file passes: that is what is asked
    assert a[3] == 3
    small_store.modified += timedelta(days=1, seconds=62)
    with pytest.raises(VirtualSourceChangedError):
        a[3]


def test_times_since_and_refs_without_a_version(small_store: Any) -> None:
    repo = repository(small_store)
    known = facts(small_store)
    date = np.array([known["modified"][0]], "datetime64[ms]")
    assert refer(repo, unchanged_since=date)[3] == 3
    assert repo.verify().unguarded == 0
    for wrong in ({"etags": ["<=5"]}, {"etags": known["etags"], "unchanged_since": [5]}):
        with pytest.raises(InvalidArgumentError, match="unchanged_since"):
            refer(repo, **wrong)
    for some, guarded in (
        ({"unchanged_since": [5]}, True),
        ({"etags": known["etags"]}, True),
        ({"modified": known["modified"]}, True),
        ({"sizes": [64], "checksums": [1] * 64}, False),
        ({}, False),
    ):
        fresh = repository(small_store)
        refs = refer(fresh, **some).store.get_virtual_refs("a")
        assert refs.guarded.tolist() == [guarded]
        assert fresh.verify().unguarded == (0 if guarded else 64)
        assert fresh.verify().ok


def test_etags_are_compared_as_their_writers_meant_them(small_store: Any) -> None:
    repo = repository(small_store)
    etag = facts(small_store)["etags"][0]
    for same in (etag, etag.strip('"'), f"W/{etag}"):
        assert refer(repo, etags=[same])[3] == 3
    with pytest.raises(VirtualSourceChangedError, match="its etag is"):
        refer(repo, etags=['W/"other"'])[3]


def test_a_server_that_does_not_say_what_is_known_is_refused(small_store: Any) -> None:
    repo = repository(small_store, "http")

    def silent(request: Any) -> Any:
        answer = small_store.perform(request)
        kept = {"Content-Range": answer.headers["Content-Range"]}
        return replace(answer, headers=kept)

    small_store.faults.append(silent)
    for known in ("etags", "modified"):
        a = refer(repo, **{known: facts(small_store)[known]})
        with pytest.raises(VirtualSourceChangedError, match="is not known, and was"):
            a[3]
    assert refer(repo)[3] == 3


@pytest.mark.parametrize("kind", KINDS)
def test_gone_and_short_files_never_read_as_fill_value(small_store: Any, kind: str) -> None:
    repo = repository(small_store, kind)
    a, whole = refer(repo, chunk=4), small_store.objects["bucket/raw/a.bin"]
    small_store.objects["bucket/raw/a.bin"] = whole[:62]
    with pytest.raises(CorruptObjectError, match="within a chunk of 4 bytes from 60"):
        a[60:]
    assert a[56] == 56
    small_store.objects["bucket/raw/a.bin"] = whole[:8]
    with pytest.raises(CorruptObjectError, match="within a chunk of 4 bytes from 60"):
        a[60:]
    with pytest.raises(CorruptObjectError, match="within a chunk of 4 bytes"):
        a[:]
    sized = refer(repo, chunk=4, sizes=[64])
    with pytest.raises(VirtualSourceChangedError, match="had 64 bytes"):
        sized[60:]
    del small_store.objects["bucket/raw/a.bin"]
    with pytest.raises(MissingChunkError, match="It is not read as fill value"):
        a[0]
    small_store.faults.append(lambda request: None if "a.bin" not in request.path else gone(store))
    store = small_store
    with pytest.raises(MissingChunkError, match=r"a\.bin"):
        a[0]


def gone(store: Any) -> Any:
    answer = store.perform(type("R", (), {"method": "GET", "path": "/x", "query": {}})())
    return replace(answer, status=410, body=b"")


def test_checksums_and_other_refusals_are_errors(small_store: Any) -> None:
    repo = repository(small_store)
    with pytest.raises(CorruptObjectError, match="does not match its checksum"):
        refer(repo, checksums=[7] * 64)[3]
    a = refer(repo)
    answer = small_store.perform
    for status in (403, 500):
        small_store.faults[:] = [
            lambda r, status=status: replace(answer(replace(r, path="/x")), status=status, body=b"")
        ]
        with pytest.raises(StorageError):
            a[3]
    for kind in KINDS:
        small_store.faults.clear()
        a = refer(repository(small_store, kind))
        small_store.faults[:] = [lambda r: replace(answer(r), status=200, body=DATA.tobytes())]
        with pytest.raises(UnsupportedStorageError, match="no byte ranges"):
            a[3]


def test_names_that_a_url_would_change_are_read(small_store: Any) -> None:
    for name in ("a b", "a%20b", "ü", "x=1+2", "a?b#c", "%2e%2e"):
        small_store.objects[f"bucket/raw/{name}/f.bin"] = DATA.tobytes()
        for kind in KINDS:
            repo = repository(small_store, kind)
            assert refer(repo, f"virtual://raw/{name}/f.bin")[3] == 3
            whole = repo.readonly_session().store.get_virtual_refs("a").locations[0]
            there = zm.create(
                MemoryStorage(), virtual_containers={"all": container(small_store, kind, "bucket")}
            )
            assert refer(there, whole)[3] == 3


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


def test_a_cold_read_takes_as_many_requests_as_of_a_native_chunk(small_store: Any) -> None:
    place = "s3://bucket/repo"
    places = {"raw": container(small_store)}
    small_store.objects["bucket/raw/a.bin"] = DATA.tobytes()
    repo = zm.create(place, {"inline-chunk-bytes": 0}, virtual_containers=places)
    with repo.transaction(message="both") as store:
        for name in ("native", "virtual"):
            zarr.create_array(store, name=name, data=DATA, chunks=(64,), compressors=None)
        store.set_virtual_refs(
            "virtual", [[0]], ["virtual://raw/a.bin"], [0], [0], [64], **facts(small_store)
        )
    counts = []
    for name in ("native", "virtual"):
        small_store.requests.clear()
        opened = zm.open(place, virtual_containers=places)
        a = zarr.open_array(opened.readonly_session().store, path=name)
        np.testing.assert_array_equal(a[:], DATA)
        # The commit's archive may be written only now.
        counts.append(len([one for one in small_store.requests if one.startswith("GET ")]))
    assert "GET /bucket/raw/a.bin" in small_store.requests
    assert counts[1] == counts[0]


# --- which places may be read ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("s3://bucket/raw/../secret", "'..'"),
        ("s3://bucket/raw/%2e%2e/secret", "'..'"),
        ("s3://bucket/raw/%2E./secret", "'..'"),
        ("s3://bucket/raw/.%2f..%2fsecret", "'..'"),
        ("s3://bucket/raw/./a", "'..'"),
        ("s3://bucket//raw/a", "empty"),
        ("s3://bucket/raw/a\\b", "backslash"),
        ("s3://bucket/raw/a%0ab", "control"),
        ("s3://bucket/raw/a%zz", "escapes nothing"),
        ("s3://bucket/raw/a%00", "zero"),
        ("s3://bucket/a?versionId=1", "query"),
        ("s3:///a", "bucket"),
        ("s3://", "bucket"),
        ("s3://buc%6bet/a", "bucket"),
        ("s3://me:PLANTED-SECRET@bucket/a", "password"),
        ("https://data.org/a?sig=PLANTED-SECRET", "query"),
        ("https://data.org/a#b", "query"),
        ("https:///a", "host"),
        ("https://data.org:0/a", "host"),
        ("https://data.org:99999/a", "host"),
        ("https://da ta.org/a", "host"),
        ("https://data.org/..", "'..'"),
    ],
)
def test_malformed_urls_are_refused_and_not_repeated(url: str, match: str) -> None:
    for made in (lambda: VirtualContainer(url), lambda: Containers().locate(url)):
        with pytest.raises(InvalidArgumentError, match=match) as caught:
            made()
        assert PLANTED not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "plain"),
    [
        ("s3a://bucket/a", "s3://bucket/a"),
        ("S3://bucket/a/", "s3://bucket/a"),
        ("gcs://bucket/a", "gs://bucket/a"),
        ("https://DATA.org:443/A%7e/b", "https://data.org/A~/b"),
        ("http://data.org:080/a", "http://data.org/a"),
        ("https://[2001:DB8::1]:8443/a%20b", "https://[2001:db8::1]:8443/a%20b"),
        ("s3://bucket/y=2020/a+b", "s3://bucket/y=2020/a+b"),
    ],
)
def test_the_same_place_has_one_url(url: str, plain: str) -> None:
    assert VirtualContainer(url).url == plain
    assert VirtualContainer(plain).url == plain
    assert Containers().locate(f"{plain}/f") == ("", f"{plain}/f")


def test_the_longest_prefix_of_whole_segments_holds_a_location(small_store: Any) -> None:
    small_store.objects["bucket/rawer/a.bin"] = DATA.tobytes()
    places = {
        "all": container(small_store, path="bucket"),
        "deep": container(small_store, path="bucket/raw/deep"),
        "raw": container(small_store, path="bucket/raw"),
    }
    found = Containers.of(places)
    assert found.locate("s3://bucket/raw/a.bin") == ("raw", "a.bin")
    assert found.locate("s3://bucket/raw/deep/a.bin") == ("deep", "a.bin")
    assert found.locate("s3://bucket/raw/deeper/a.bin") == ("raw", "deeper/a.bin")
    assert found.locate("s3://bucket/rawer/a.bin") == ("all", "rawer/a.bin")
    assert found.locate("s3://bucket2/raw/a.bin") == ("", "s3://bucket2/raw/a.bin")
    assert found.locate("gs://bucket/raw/a.bin") == ("", "gs://bucket/raw/a.bin")
    outside = refer(repository(small_store, raw=places["raw"]), "s3://bucket/rawer/a.bin")
    small_store.requests.clear()
    with pytest.raises(VirtualContainerError, match=r"'s3://bucket/rawer'} if you trust it"):
        outside[3]
    assert small_store.requests == []


def test_a_hostile_ref_does_not_leave_its_container(small_store: Any) -> None:
    """Refs as another program could have written them, with what `set_virtual_refs` refuses."""
    small_store.objects["bucket/secret"] = DATA.tobytes()
    repo = repository(small_store)
    contents = contents_of(repo.readonly_session().store)
    reader = VirtualReader(contents.context.containers)
    small_store.requests.clear()
    for path in ("s3://bucket/raw/../secret", "s3://bucket/raw/%2e%2e/secret", "s3://u:p@bucket/a"):
        source = replace(Containers().source_at("s3://bucket/x"), path=path)
        with pytest.raises(VirtualContainerError):
            reader.read(VirtualRef(source, 0, 4), 0, 4)
    assert small_store.requests == []


@pytest.mark.parametrize("kind", KINDS)
def test_redirects_to_another_host_are_refused(small_store: Any, kind: str) -> None:
    other = type(small_store)()
    other.objects["bucket/raw/a.bin"] = bytes(64)
    try:
        a = refer(repository(small_store, kind))
        to = other.endpoint.replace("127.0.0.1", "localhost")
        answer = small_store.perform
        small_store.faults.append(
            lambda r: replace(answer(r), status=302, body=b"", headers={"Location": to + r.path})
        )
        with pytest.raises(StorageError, match="sends to another"):
            a[3]
        assert other.requests == []
    finally:
        other.close()


LOCAL = (
    "127.0.0.1",
    "localhost",
    "a.localhost",
    "[::1]",
    "169.254.169.254",
    "0.0.0.0",
    "127.0.0.1:80",
    "[fe80::1]",
    "[::ffff:127.0.0.1]",
    "[fd00:ec2::254]",
    "127.0.0.1.",
    "localhost.",
)


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("host", LOCAL)
def test_local_web_servers_are_refused_unless_the_container_says_so(scheme: str, host: str) -> None:
    with pytest.raises(InvalidArgumentError, match="allow_local=True"):
        VirtualContainer(f"{scheme}://{host}/data")
    assert VirtualContainer(f"{scheme}://{host}/data", allow_local=True).allow_local
    assert VirtualContainer(f"{scheme}://data.org/data").url == f"{scheme}://data.org/data"


@pytest.mark.parametrize("host", ["127.1", "0x7f000001", "2130706433"])
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


def test_a_host_that_no_name_server_takes_is_an_error_of_the_storage() -> None:
    place = VirtualContainer(f"http://{'a' * 70}.org/raw", retries=0)
    repo = zm.create(MemoryStorage(), virtual_containers={"raw": place})
    with pytest.raises(StorageError):
        refer(repo)[3]


# --- containers as values --------------------------------------------------------------------


def _no_credentials() -> None:
    raise AssertionError


def test_containers_are_values(small_store: Any) -> None:
    one = container(small_store)
    assert one == pickle.loads(pickle.dumps(one)) == container_of(one)
    assert hash(one) == hash(pickle.loads(pickle.dumps(one)))
    assert one != container(small_store, "gs")
    assert one != VirtualContainer("s3://bucket/raw")
    assert container_of({"url": "s3://b/x", "anonymous": True, "allow-http": True}) == (
        VirtualContainer("s3://b/x", anonymous=True, allow_http=True)
    )
    repo = repository(small_store, raw=one)
    assert containers_of(repo) == {"raw": one}
    again = zm.open(repo.storage, virtual_containers=containers_of(repo))
    assert pickle.loads(pickle.dumps(containers_of(again))) == {"raw": one}
    assert repr(VirtualContainer("/data/a b")) == "VirtualContainer('file:///data/a%20b')"


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
        (lambda: container_of(5), InvalidArgumentError),
        (lambda: container_of({"region": "x"}), InvalidArgumentError),
        (lambda: container_of({"url": "s3://b", "secret-key": PLANTED}), ConfigError),
    ],
)
def test_options_that_a_place_does_not_take_are_refused(
    make: Callable[[], object], error: type[Exception]
) -> None:
    with pytest.raises(error) as caught:
        make()
    assert PLANTED not in str(caught.value)


async def test_neighbours_share_a_request_of_their_version(small_store: Any) -> None:
    repo = repository(small_store)
    refer(repo, **facts(small_store))
    store = repo.readonly_session().store
    contents = contents_of(store)
    refs = [contents.find(f"a/c/{i}") for i in (3, 4, 9)]
    small_store.requests.clear()
    found = await asyncio.gather(*(contents.reader.read_async(r, 0, 1) for r in refs if r))
    assert found == [b"\3", b"\4", b"\x09"]
    assert len(small_store.requests) == 1


def test_nothing_is_opened_before_a_chunk_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object) -> bool:
        pytest.fail("a name was looked up")

    monkeypatch.setattr(containers_module, "leads_to_local", asked)
    repo = zm.create(
        MemoryStorage(), virtual_containers={"raw": "https://data.org/x", "s": "s3://b/x"}
    )
    refer(repo)
    assert refer(repo).store.get_virtual_refs("a").locations == ("https://data.org/x/a.bin",)


# --- containers that are saved ---------------------------------------------------------------

SAVED = {"name": "raw", "url": "s3://bucket/raw", "region": "us-east-1", "anonymous": True}


def test_a_changed_environment_leads_elsewhere(
    small_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = VirtualContainer("s3://bucket/raw", allow_http=True, anonymous=True)
    repo = repository(small_store, raw=place)
    assert refer(repo)[3] == 3
    opened = containers_module.storage_of(place)
    monkeypatch.setenv("NOT_OF_A_STORE", "1")
    assert containers_module.storage_of(place) is opened
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    small_store.requests.clear()
    with pytest.raises(StorageError):
        zarr.open_array(repo.readonly_session().store, path="a")[3]
    assert small_store.requests == []
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    assert containers_module.storage_of(place) is opened


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
    asked = {"engine": "zarr_manifests", "authorize": True}
    np.testing.assert_array_equal(xr.open_dataset("memory://saved-container", **asked).a, DATA)
    given = zm.open(storage, authorize=["raw"], virtual_containers={"raw": "s3://other"})
    assert containers_of(given)["raw"].url == "s3://other"
    with pytest.raises(InvalidArgumentError, match=r"no container 'war' is saved.*saved are raw"):
        zm.open(storage, authorize=["war"])
    with pytest.raises(InvalidArgumentError, match="a list of names"):
        zm.open(storage, authorize="raw")
    with pytest.raises(InvalidArgumentError, match="open already"):
        xr.open_dataset(repo, engine="zarr_manifests", authorize=["raw"])


@pytest.mark.parametrize("saved", [False, True])
def test_a_chunk_below_a_saved_container_names_it_whatever_else_is_saved(
    tmp_path: Path, saved: bool
) -> None:
    (tmp_path / "a").write_bytes(b"1234")
    places = [{"name": "evil", "url": "http://169.254.169.254/latest"}]
    places += [{"name": "raw", "url": tmp_path.as_uri()}] * saved
    storage = MemoryStorage()
    repo = zm.create(storage, {"virtual-containers": places})
    with repo.transaction(message="refer") as store:
        zarr.create_array(store, name="a", shape=(4,), chunks=(4,), dtype="u1", compressors=None)
        at = {"index": [[0]], "source": [0], "offset": [0], "length": [4]}
        store.set_virtual_refs("a", locations=[(tmp_path / "a").as_uri()], **at)
    match = r"authorize=\['raw'\]" if saved else "below no container"
    with pytest.raises(VirtualContainerError, match=match):
        zarr.open_array(zm.open(storage).readonly_session().store, path="a")[:]


def test_a_repository_does_not_lead_its_readers_to_this_machine() -> None:
    config = {"virtual-containers": [{"name": "raw", "url": "http://169.254.169.254/latest"}]}
    repo = zm.create(MemoryStorage(), config)
    with pytest.raises(InvalidArgumentError, match="allow_local"):
        zm.open(repo.storage, authorize=["raw"])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"url": "s3://key:PLANTED-SECRET@bucket"}, "url: expected a URL"),
        ({"url": "https://data.org/a?sig=PLANTED-SECRET"}, "url: expected a URL"),
        ({"url": "s3://k:hunter2@b"}, "url: expected a URL"),
        ({"url": "bucket"}, "url: expected a URL"),
        ({"name": "a/b"}, "name: expected a name"),
        ({"anonymous": "yes"}, "anonymous: expected true or false"),
        ({"region": "eu west"}, "region: expected the name"),
        ({"secret-access-key": "PLANTED-SECRET"}, "unknown option"),
    ],
)
def test_what_is_saved_has_no_secrets(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        zm.Config.from_dict({"virtual-containers": [SAVED | change]})
    assert PLANTED not in str(caught.value)
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError, match="there twice"):
        zm.Config.from_dict({"virtual-containers": [SAVED, SAVED]})


def test_a_saved_configuration_comes_back(small_store: Any) -> None:
    storage = MemoryStorage()
    repo = zm.create(storage)
    assert "virtual-containers" not in repo.config.to_dict()
    repo.save_config({"virtual-containers": [SAVED]})
    config = zm.open(storage).config
    assert config.to_dict()["virtual-containers"] == [SAVED]
    assert zm.Config.from_yaml(config.to_yaml()) == config


# --- many chunks at once ---------------------------------------------------------------------


def test_neighbours_share_requests_wherever_chunks_are_read_at_once(small_store: Any) -> None:
    repo = repository(small_store)
    refer(repo, **facts(small_store))
    session = repo.readonly_session()
    small_store.requests.clear()
    found = {at: bytes(data) for at, data in session.read_chunks("a")}
    assert found == {(i,): bytes([i]) for i in range(64)}
    assert small_store.requests == ["GET /bucket/raw/a.bin"]
    refs = session.chunk_refs("a")
    assert set(refs.locations) == {"virtual://raw/a.bin"}
    small_store.requests.clear()
    np.testing.assert_array_equal(zarr.open_array(session.store, path="a")[:], DATA)
    assert len(small_store.requests) <= 7  # at Zarr's own concurrency of 10
    small_store.objects["bucket/raw/a.bin"] = bytes(64)
    with pytest.raises(VirtualSourceChangedError):
        [*session.read_chunks("a")]


def test_requests_to_several_files_run_side_by_side(small_store: Any) -> None:
    """Also from a repository in memory, whose own chunks are read one after another."""
    together = threading.Barrier(4, timeout=20)
    repo = repository(small_store)
    names = [f"{i}.bin" for i in range(4)]
    for name in names:
        small_store.objects[f"bucket/raw/{name}"] = DATA.tobytes()
    with repo.transaction(message="refer") as store:
        zarr.create_array(store, name="b", shape=(256,), chunks=(64,), dtype="u1", compressors=None)
        at, locations = np.arange(4), [f"virtual://raw/{name}" for name in names]
        store.set_virtual_refs("b", at[:, None], locations, at, at * 0, at * 0 + 64)

    def meet(_: Any) -> None:
        together.wait()

    small_store.faults.append(meet)
    chunks = [*repo.readonly_session().read_chunks("b")]
    assert [bytes(data) for _, data in chunks] == [DATA.tobytes()] * 4


def test_the_chunk_cache_keeps_remote_chunks_of_a_known_version(small_store: Any) -> None:
    small_store.objects["bucket/raw/a.bin"] = DATA.tobytes()
    known = facts(small_store)
    checksums = {"checksums": [crc32c(bytes([i])) for i in range(64)]}
    for some, kept in (
        ({"etags": known["etags"]}, True),
        ({"modified": known["modified"]}, True),
        (checksums, True),
        ({"sizes": [64]}, False),
        ({}, False),
    ):
        repo = zm.create(
            MemoryStorage(),
            virtual_containers={"raw": container(small_store)},
            cache={"chunk-bytes": 1 << 20},
        )
        refer(repo, **some)
        session = repo.readonly_session()
        a = zarr.open_array(session.store, path="a")
        for read in (lambda a=a: a[5:7].tolist(), lambda s=session: len([*s.read_chunks("a")])):
            first = read()
            small_store.requests.clear()
            assert read() == first
            if read() == [5, 6]:
                assert (small_store.requests == []) == kept
        if kept:
            other = zm.open(repo.storage, cache={"chunk-bytes": 1 << 20})
            with pytest.raises(VirtualContainerError):
                zarr.open_array(other.readonly_session().store, path="a")[5]


def test_a_folder_keeps_remote_chunks_for_later_processes(small_store: Any, tmp_path: Path) -> None:
    cache = {"directory": tmp_path / "cache", "chunks": True, "directory-bytes": 1 << 20}
    places = {"raw": container(small_store)}
    small_store.objects["bucket/raw/a.bin"] = DATA.tobytes()
    storage = MemoryStorage()
    refer(zm.create(storage, virtual_containers=places), chunk=64, **facts(small_store))

    def opened(**options: Any) -> Any:
        repo = zm.open(storage, cache=cache, **options)
        return zarr.open_array(repo.readonly_session().store, path="a")

    assert opened(virtual_containers=places)[3] == 3
    np.testing.assert_array_equal(opened(virtual_containers=places)[:], DATA)
    small_store.requests.clear()
    np.testing.assert_array_equal(opened(virtual_containers=places)[:], DATA)
    assert small_store.requests == []
    closed = contents_of(opened().store)
    ref = closed.find("a/c/0")
    assert ref is not None
    for read in (lambda: opened()[3], lambda: closed.reader.read(ref, 0, 64)):
        with pytest.raises(VirtualContainerError):
            read()
    (file,) = (tmp_path / "cache").rglob("chunk+*")
    file.write_bytes(bytes(64) + file.read_bytes()[64:])  # damaged: dropped, and fetched again
    np.testing.assert_array_equal(opened(virtual_containers=places)[:], DATA)
    assert small_store.requests == ["GET /bucket/raw/a.bin"]
