"""Object stores: what only they do, and what they must not do. The contract is in test_contract."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import io
import itertools
import logging
import os
import pickle
import subprocess
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

import zarr_manifests as zm
from zarr_manifests.error_cases import (
    ConfigError,
    ObjectNotFoundError,
    StorageFullError,
    UnsupportedStorageError,
)
from zarr_manifests.errors import InvalidArgumentError, StorageError
from zarr_manifests.format.root import archive_key
from zarr_manifests.repository import context_of
from zarr_manifests.runtime import ForkSafeLock
from zarr_manifests.session import commits_of
from zarr_manifests.storage import from_url, object_clients
from zarr_manifests.storage.object_gate import Gate
from zarr_manifests.storage.object_store import ObjectStorage
from zarr_manifests.storage.protocol import MAX_TAGGED_BYTES

SECRETS = {
    "AWS_ACCESS_KEY_ID": "PLANTEDkeyid",
    "AWS_SECRET_ACCESS_KEY": "PLANTEDsecret",
    "AWS_SESSION_TOKEN": "PLANTEDtoken",
}


def _storage(name: str = "bucket/prefix", **options: object) -> ObjectStorage:
    storage = from_url(f"s3://{name}", **options)
    assert isinstance(storage, ObjectStorage)
    return storage


def _run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# --- requests --------------------------------------------------------------------------------


def test_a_call_is_one_request(small_store: Any) -> None:
    storage = _storage()
    storage.create("a", b"0123456789")
    small_store.requests.clear()
    storage.get("a", 2, 3)
    storage.get("a", 20, 3)
    storage.get_tagged("a")
    storage.create("a", b"again")
    storage.get_ranges("a", [(0, 2), (5, 2), (8, 9)])
    assert small_store.requests == [
        "GET /bucket/prefix/a",
        "GET /bucket/prefix/a",
        "GET /bucket/prefix/a",
        "PUT /bucket/prefix/a",
        "GET /bucket/prefix/a",
    ]


def test_few_requests_open_and_commit(small_store: Any) -> None:
    import zarr

    storage = _storage()
    repo = zm.create(storage)
    with repo.transaction(message="a group") as store:
        zarr.create_group(store, path="g")

    small_store.await_request(f"PUT /bucket/prefix/{archive_key(2)}")
    small_store.requests.clear()
    repo = zm.open(storage)
    session = repo.writable_session()
    zarr.open_group(session.store, path="g").attrs["a"] = 1
    assert small_store.requests == ["GET /bucket/prefix/current"] * 2
    small_store.requests.clear()
    session.commit("an attribute")
    small_store.await_request(f"PUT /bucket/prefix/{archive_key(3)}")
    asked = sorted(f"{r.split()[0]} {r.split('/')[3]}" for r in small_store.requests)
    assert asked == ["PUT current", "PUT deltas", "PUT root", "PUT root", "PUT snapshots"]


def test_a_warm_commit_is_two_rounds(small_store: Any) -> None:
    import zarr

    repo = zm.create(_storage())
    with repo.transaction(message="a group") as store:
        zarr.create_group(store, path="g")
    numbers = itertools.count()

    def commit(**how: Any) -> list[str]:
        small_store.requests.clear()
        with repo.transaction(message="an attribute", **how) as store:
            zarr.open_group(store, path="g").attrs["a"] = next(numbers)
        until = small_store.requests.index("PUT /bucket/prefix/current")
        asked = [f"{r.split()[0]} {r.split('/')[3]}" for r in small_store.requests[: until + 1]]
        return [a for a in asked if a != "PUT root"]  # archives go up in the background

    first, *uploads, last = commit()
    assert (first, last) == ("GET current", "PUT current")
    *uploads, last = commit(fresh=False)
    assert last == "PUT current"
    assert set(uploads) == {"PUT deltas", "PUT snapshots"}


def test_a_range_is_asked_for_as_a_range(small_store: Any) -> None:
    asked: list[str | None] = []
    small_store.faults.append(lambda request: asked.append(request.headers.get("Range")))
    storage = _storage()
    storage.put("a", b"0123456789")
    assert storage.get("a", 2, 3) == b"234"
    assert asyncio.run(storage.get_async("a", 2, 3)) == b"234"
    assert asked[1:] == ["bytes=2-4", "bytes=2-4"]


def test_what_is_large_is_written_and_read_by_one_request_too(small_store: Any) -> None:
    storage, data = _storage(), bytes(9 * 1024 * 1024)
    assert storage.create("proven", b"")
    small_store.requests.clear()
    assert storage.create("a", memoryview(data))
    assert asyncio.run(storage.create_async("b", data))
    assert asyncio.run(storage.get_async("a", 0, len(data) + 1)) == data
    assert storage.get("b", 1, len(data)) == data[1:]
    assert small_store.requests == [
        "PUT /bucket/prefix/a", "PUT /bucket/prefix/b",
        "GET /bucket/prefix/a", "GET /bucket/prefix/b",
    ]  # fmt: skip


def test_ranges_far_apart_are_of_one_version(small_store: Any) -> None:
    storage = _storage()
    old, new = b"o" * 300_000, b"n" * 300_000
    storage.put("a", old)
    small_store.once("GET", "/a", lambda request: _then(small_store, request, new))
    assert storage.get_ranges("a", [(0, 2), (299_998, 2)]) == [b"nn", b"nn"]


def _then(store: Any, request: Any, data: bytes) -> Any:
    """Answer, and have the object be another before the next request."""
    answer = store.perform(request)
    store.objects[request.path.lstrip("/")] = data
    return answer


def test_what_one_has_written_oneself_is_not_asked_for_at_sync(small_store: Any) -> None:
    storage, other = _storage(), _storage()
    for i in range(20):
        storage.create(f"chunks/s/{i}", b"x", durable=False)
    small_store.requests.clear()
    storage.sync([f"chunks/s/{i}" for i in range(20)])
    assert small_store.requests == []
    other.sync([f"chunks/s/{i}" for i in range(20)])  # somebody else's: one listing tells
    assert small_store.requests == ["GET /bucket"]
    with pytest.raises(ObjectNotFoundError, match=r"chunks/s/20'"):
        other.sync([f"chunks/s/{i}" for i in range(21)])


def test_a_listing_begins_where_it_is_asked_to(small_store: Any) -> None:
    starts: list[str | None] = []
    small_store.faults.append(lambda request: starts.append(request.query.get("start-after")))
    for key in ("a/1", "b0/x", "b1", "b2"):
        small_store.objects[f"bucket/prefix/{key}"] = b"x"
    storage = _storage()
    assert [info.key for info in storage.list("b1")] == ["b1"]
    assert [info.key for info in storage.list("b", after="b1")] == ["b2"]
    assert [info.key for info in storage.list("", after="a//key")] == [
        "a/1", "b0/x", "b1", "b2",
    ]  # fmt: skip
    assert starts == ["prefix/b0zzzzzzzz", "prefix/b1", None]


def test_a_listing_out_of_order_is_refused(small_store: Any) -> None:
    contents = "".join(
        f"<Contents><Key>prefix/{key}</Key><Size>1</Size><ETag>x</ETag>"
        "<LastModified>2015-10-21T07:28:00.000Z</LastModified></Contents>"
        for key in ("b", "a")
    )
    small_store.once(
        "GET",
        "/bucket",
        lambda request: type(small_store.perform(request))(
            200, f"<ListBucketResult>{contents}</ListBucketResult>".encode()
        ),
    )
    with pytest.raises(UnsupportedStorageError, match="order of their names"):
        list(_storage().list())


def test_what_is_no_key_is_a_stray_and_is_not_listed(small_store: Any) -> None:
    storage = _storage()
    assert storage.stray() is None
    storage.create("a", b"x")
    small_store.objects["bucket/prefix/.hidden"] = b""
    small_store.objects["bucket/prefixed/other thing"] = b""
    assert storage.stray() is None
    small_store.objects["bucket/prefix/holiday photo.jpg"] = b""
    assert storage.stray() == "holiday photo.jpg"
    assert [info.key for info in storage.list()] == ["a"]


def test_many_are_deleted_at_once(small_store: Any) -> None:
    storage = _storage()
    for i in range(5):
        storage.put(f"k{i}", b"x")
    small_store.requests.clear()
    storage.delete_many(f"k{i}" for i in range(9))
    assert small_store.requests == ["POST /bucket"]
    assert list(storage.list()) == []


def test_no_more_than_256_are_deleted_at_once(small_store: Any) -> None:
    storage = _storage()
    small_store.objects |= {f"bucket/prefix/k{i}": b"x" for i in range(600)}
    storage.delete_many(f"k{i}" for i in range(600))
    assert small_store.requests == ["POST /bucket"] * 3
    assert small_store.objects == {}


def test_objects_are_deleted_singly_where_several_cannot_be(
    small_store: Any, impatient: None
) -> None:
    storage = _storage()
    small_store.objects |= {f"bucket/prefix/k{i}": b"x" for i in range(300)}
    small_store.refuse({"POST"}, 501, "NotImplemented")
    storage.delete_many([f"k{i}" for i in range(300)] + ["never/there"])
    assert small_store.objects == {}
    methods = [request.split()[0] for request in small_store.requests]
    assert methods == ["POST"] * 2 + ["DELETE"] * 301, "asked for once, and by the client again"


def test_what_was_not_deleted_with_the_others_is_deleted_again(small_store: Any) -> None:
    storage = _storage()
    small_store.objects |= {f"bucket/prefix/k{i}": b"x" for i in range(9)}

    def part(request: Any) -> Any:
        answer = small_store.perform(request)
        small_store.objects["bucket/prefix/k7"] = b"x"
        failed = b"<Error><Key>prefix/k7</Key><Code>Aborted</Code><Message></Message></Error>"
        return replace(answer, body=b"<DeleteResult>" + failed + b"</DeleteResult>")

    small_store.once("POST", "", part)
    storage.delete_many(f"k{i}" for i in range(9))
    assert small_store.objects == {}


def test_deleting_ends_with_the_first_refusals(small_store: Any, impatient: None) -> None:
    storage = _storage()
    small_store.refuse({"POST", "DELETE"}, 500, "InternalError")
    with pytest.raises(StorageError, match="cannot delete 'k0'"):
        storage.delete_many(f"k{i}" for i in range(100))
    assert len(small_store.requests) <= 2 + 2 * 16


@pytest.mark.parametrize("heeds", [True, False], ids=["offset heeded", "offset ignored"])
@pytest.mark.parametrize("page", [1, 7, 1000])
def test_a_listing_is_right_whatever_its_pages(small_store: Any, heeds: bool, page: int) -> None:
    storage = _storage()
    small_store.page = page
    if not heeds:
        small_store.heeds.discard("start-after")
    keys = [f"{ab}/{i:02}" for ab in ("a", "b", "c") for i in range(15)]
    small_store.objects |= {f"bucket/prefix/{key}": b"x" for key in keys}
    for prefix, after in itertools.product(["", "b", "b/", "b/1"], ["", "a/14", "b/05", "b/11"]):
        expected = [key for key in keys if key.startswith(prefix) and key > after]
        assert [info.key for info in storage.list(prefix, after)] == expected


# --- lost answers ----------------------------------------------------------------------------


def _perform_then(store: Any, answer: Any) -> Callable[[Any], Any]:
    def perform(request: Any) -> Any:
        kind = type(store.perform(request))
        return kind.refusal(503, "SlowDown") if answer == 503 else kind(None)

    return perform


@pytest.mark.parametrize("lost", [503, None], ids=["503", "connection closed"])
@pytest.mark.parametrize("part", ["/chunks/", "/deltas/", "/snapshots/", "/root/", "/current"])
def test_a_commit_whose_answer_is_lost_lands_once(
    small_store: Any, part: str, lost: int | None
) -> None:
    import zarr

    config = {"inline-chunk-bytes": 0, "pack-chunk-bytes": 0}
    repo = zm.create(_storage(), config)
    session = repo.writable_session()
    array = zarr.create_array(session.store, name="a", shape=4, chunks=2, dtype="i4")
    small_store.once("PUT", part, _perform_then(small_store, lost))
    array[:] = [1, 2, 3, 4]
    session.commit("with a lost answer")
    assert small_store.faults == []  # it was tried
    again = zm.open(_storage())
    assert [info.message for info in again.ancestry()] == [
        "with a lost answer",
        "create repository",
    ]
    assert zarr.open_array(again.readonly_session().store, path="a")[:].tolist() == [1, 2, 3, 4]
    assert again.verify().ok


@pytest.mark.parametrize("lost", [503, None], ids=["503", "connection closed"])
def test_a_repository_whose_answer_is_lost_is_made(small_store: Any, lost: int | None) -> None:
    small_store.once("PUT", "/current", _perform_then(small_store, lost))
    repo = zm.create(_storage())
    assert context_of(zm.open(_storage())).repository_id == context_of(repo).repository_id


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("in_loop", [False, True])
def test_a_creation_that_is_contended_is_tried_again(small_store: Any, in_loop: bool) -> None:
    def create(key: str) -> bool:
        made = storage.create_async(key, b"1") if in_loop else storage.create(key, b"1")
        return asyncio.run(made) if in_loop else made  # type: ignore[arg-type, return-value]

    def contended(request: Any) -> Any:
        kind = type(small_store.perform(type(request)("GET", "/", {}, {}, b"")))
        return kind.refusal(409, "ConditionalRequestConflict")

    storage = _storage()
    assert storage.create("proven", b"")
    small_store.once("PUT", "/a", contended)
    assert create("a")
    assert storage.get("a") == b"1"
    token = storage.cas("b", b"1", None)
    small_store.once("PUT", "/b", contended)
    assert storage.cas("b", b"2", token) is not None
    small_store.faults.append(
        lambda request: contended(request) if request.method == "PUT" else None
    )
    with pytest.raises(StorageError, match="somebody else writes the same object"):
        create("c")  # False would say that it is there
    assert storage.cas("b", b"3", storage.get_tagged("b").token) is None


# --- stores that take no notice of conditions ------------------------------------------------


@pytest.mark.parametrize("ignored", ["If-None-Match", "If-Match"])
def test_a_store_that_loses_commits_is_read_only(small_store: Any, ignored: str) -> None:
    made = zm.create(_storage("bucket/well"))
    small_store.heeds -= {ignored}
    storage = _storage("bucket/ill")
    with pytest.raises(UnsupportedStorageError, match=f"takes no notice of {ignored}"):
        zm.create(storage)
    assert not storage.capabilities.cas
    assert not storage.capabilities.create
    assert [name for name in small_store.objects if "/ill/" in name] == ["bucket/ill/.probe"]
    with pytest.raises(UnsupportedStorageError, match="takes no notice"):
        storage.cas("current", b"", None)
    with pytest.raises(UnsupportedStorageError, match="takes no notice"):
        asyncio.run(storage.create_async("a", b""))
    # What is there can be read, at that place as well.
    for name in [name for name in small_store.objects if "/well/" in name]:
        small_store.objects[name.replace("/well/", "/ill/")] = small_store.objects[name]
    repo = zm.open(storage)
    assert context_of(repo).repository_id == context_of(made).repository_id
    with pytest.raises(UnsupportedStorageError, match="read-only"):
        repo.writable_session()


def test_a_swap_on_a_store_that_loses_commits_is_refused_at_once(small_store: Any) -> None:
    repo = zm.create(_storage("bucket/there"))
    # A root that a lease has made needs no archive, so the swap is the first that is written.
    leased = repo.writable_session(lease=timedelta(hours=1))
    small_store.objects |= {
        name.replace("/there/", "/elsewhere/"): data for name, data in small_store.objects.items()
    }
    small_store.heeds.clear()
    elsewhere = zm.open(_storage("bucket/elsewhere"))
    before = dict(small_store.objects)
    with pytest.raises(UnsupportedStorageError, match="takes no notice"):
        elsewhere.create_tag("v1", elsewhere.readonly_session().snapshot_id)
    del before["bucket/elsewhere/.probe"]
    after = {n: d for n, d in small_store.objects.items() if n in before}
    assert after == before
    assert context_of(repo).repository_id == context_of(elsewhere).repository_id
    commits_of(leased).writer.release_lease()


def test_an_event_loop_is_not_let_past_the_trial(small_store: Any) -> None:
    small_store.heeds.clear()
    with pytest.raises(UnsupportedStorageError, match="takes no notice of If-None-Match"):
        asyncio.run(_storage().create_async("a", b""))
    assert list(small_store.objects) == ["bucket/prefix/.probe"]


def test_conditions_are_tried_once_in_a_process(small_store: Any) -> None:
    first = _storage()
    assert first.create("a", b"1")
    tried = ["PUT /bucket/prefix/.probe"]
    assert small_store.requests == [*tried * 3, "PUT /bucket/prefix/a"]
    small_store.requests.clear()
    assert not pickle.loads(pickle.dumps(first)).create("a", b"1")
    assert _storage().cas("b", b"1", None) is not None
    assert small_store.requests == ["PUT /bucket/prefix/a", "PUT /bucket/prefix/b"]


def test_another_process_tries_them_by_two_requests(small_store: Any) -> None:
    assert _storage().create("a", b"1")
    small_store.requests.clear()
    done = _run(
        "from zarr_manifests.storage import from_url\n"
        "assert not from_url('s3://bucket/prefix').create('a', b'')"
    )
    assert done.returncode == 0, done.stderr
    assert small_store.requests == [*["PUT /bucket/prefix/.probe"] * 2, "PUT /bucket/prefix/a"]


def test_reading_tries_nothing(small_store: Any) -> None:
    storage = _storage()
    storage.put("a", b"1")
    small_store.requests.clear()
    storage.get("a")
    list(storage.list())
    assert small_store.requests == ["GET /bucket/prefix/a", "GET /bucket"]


@pytest.mark.parametrize("endpoint", [None, "https://s3.eu-central-1.amazonaws.com"])
def test_what_a_provider_promises_is_not_tried(
    monkeypatch: pytest.MonkeyPatch, endpoint: str | None
) -> None:
    for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    options = {} if endpoint is None else {"endpoint": endpoint}
    assert not _storage(**options)._proof.due
    assert _storage(endpoint="https://minio.example.com")._proof.due
    assert _storage(endpoint="https://evil.example.com/.amazonaws.com")._proof.due


def test_an_endpoint_that_is_given_comes_before_the_environment(
    small_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = small_store.endpoint
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:2")
    assert _storage(endpoint=endpoint).create("a", b"1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    assert _storage().get("a") == b"1"


def test_the_endpoint_that_was_tried_is_the_one_that_is_written_to(
    small_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = _storage()
    assert storage.create("a", b"1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    storage._requests._clients.clear()
    assert storage.get("a") == b"1"


# --- errors ----------------------------------------------------------------------------------


def _answers(store: Any, status: int | None, code: str = "") -> None:
    """Have all requests answered so, with what was sent to the server in the answer."""

    def fault(request: Any) -> Any:
        kind = type(store.perform(request))
        sent = " ".join(f"{name}: {value}" for name, value in request.headers.items())
        return kind(None) if status is None else kind.refusal(status, code, f"{sent} PLANTEDbody")

    store.faults.append(fault)


CALLS: dict[str, Callable[[ObjectStorage], object]] = {
    "get": lambda storage: storage.get("a"),
    "get range": lambda storage: storage.get("a", 1, 2),
    "get ranges": lambda storage: storage.get_ranges("a", [(0, 1), (900_000, 1)]),
    "get tagged": lambda storage: storage.get_tagged("a"),
    "get async": lambda storage: asyncio.run(storage.get_async("a", 1, 2)),
    "head": lambda storage: storage.head("a"),
    "list": lambda storage: list(storage.list()),
    "stray": lambda storage: storage.stray(),
    "put": lambda storage: storage.put("a", b""),
    "create": lambda storage: storage.create("a", b""),
    "create async": lambda storage: asyncio.run(storage.create_async("a", b"")),
    "cas": lambda storage: storage.cas("a", b"", None),
    "delete": lambda storage: storage.delete_many(["a"]),
    "sync": lambda storage: storage.sync(["a"]),
}
WITHOUT_BODY = ("head", "sync")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("status", "code", "kind", "says"),
    [
        (403, "AccessDenied", StorageError, "403 AccessDenied.*do not allow"),
        (403, "InvalidAccessKeyId", StorageError, "AWS_ACCESS_KEY_ID"),
        (403, "SignatureDoesNotMatch", StorageError, "AWS_SECRET_ACCESS_KEY"),
        (404, "NoSuchBucket", StorageError, "NoSuchBucket.*make the bucket"),
        (400, "AuthorizationHeaderMalformed", StorageError, "another region.*region="),
        (301, "PermanentRedirect", StorageError, "another region.*region="),
        (400, "XMinioStorageFull", StorageFullError, "make room"),
        (418, "PLANTEDcode", StorageError, "418"),
    ],
)
def test_failures_say_what_to_do_and_no_secrets(
    small_store: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
    status: int,
    code: str,
    kind: type[StorageError],
    says: str,
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    caplog.set_level(logging.DEBUG)
    storage = _storage()
    if "create" in call or call == "cas":
        assert storage.create("proven", b"")  # so that it is the call itself that fails
    _answers(small_store, status, code)
    with pytest.raises(StorageError) as caught:
        CALLS[call](storage)
    if call not in WITHOUT_BODY:
        assert isinstance(caught.value, kind)
        assert not isinstance(caught.value, ObjectNotFoundError)
        assert caught.match(says)
    _check_no_secrets(caught.value, storage, caplog.text)


def _check_no_secrets(error: BaseException, storage: ObjectStorage, logged: str) -> None:
    everything = io.StringIO()
    traceback.print_exception(error, file=everything, chain=True)
    link: BaseException | None = error
    while link is not None:
        everything.write(f"{link!r} {link} {link.args}")
        link = link.__context__ or link.__cause__
    pickled = pickle.dumps([error, storage])
    everything.write(f"{storage!r} {storage.url} {logged} {pickled!r}")
    text = everything.getvalue()
    assert "PLANTED" not in text
    assert "AWS4-HMAC" not in text


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("call", CALLS)
def test_what_cannot_be_reached_fails_in_seconds_and_says_so(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    storage = _storage(endpoint="http://127.0.0.1:1", allow_http=True)
    with pytest.raises(StorageError, match="cannot be reached; check the endpoint") as caught:
        CALLS[call](storage)
    _check_no_secrets(caught.value, storage, "")


def test_retries_end() -> None:
    patience = object_clients.PATIENCE
    assert sum(patience.wait_s(attempt) for attempt in range(patience.tries)) < 10


def test_without_credentials_that_is_said(
    small_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SECRETS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"{small_store.endpoint}")
    small_store.faults.append(
        lambda request: type(small_store.perform(request)).refusal(403, "AccessDenied")
    )
    with pytest.raises(StorageError, match=r"no credentials were found.*AWS_ACCESS_KEY_ID"):
        _storage().get("a")
    small_store.faults.clear()
    small_store.objects["bucket/prefix/a"] = b"public"
    assert _storage(anonymous=True).get("a") == b"public"


def test_an_endpoint_without_encryption_must_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    monkeypatch.delenv("AWS_ALLOW_HTTP", raising=False)
    with pytest.raises(InvalidArgumentError, match="allow_http=True"):
        _storage(endpoint="http://127.0.0.1:1").get("a")


# --- options and URLs ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "option",
    ["access_key_id", "secret_access_key", "session_token", "aws_secret", "sas_key", "password"],
)
@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "https"])
def test_secrets_are_no_options(option: str, scheme: str) -> None:
    with pytest.raises(
        ConfigError, match=r"a secret cannot be a storage option.*AWS_ACCESS_KEY_ID"
    ) as e:
        from_url(f"{scheme}://bucket/x", **{option: "PLANTED"})
    assert "PLANTED" not in str(e.value)


@pytest.mark.parametrize(
    "url",
    [
        "s3://", "s3:///x", "s3://bucket//x", "s3://bucket/a//b", "s3://bucket/../x",
        "s3://bucket/x?X-Amz-Signature=PLANTED", "s3://bucket/x#PLANTED", "s3://bucket/a%20b",
        "az://container/x?sig=PLANTED", "https://host/x?sig=PLANTED", "https://", "http:///x",
    ],
)  # fmt: skip
def test_malformed_urls_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match="is of the form") as error:
        from_url(url)
    assert "PLANTED" not in str(error.value)


@pytest.mark.parametrize(
    "endpoint", ["host", "ftp://host", "https://a:PLANTED@host", "https://host/?sig=PLANTED", ""]
)
def test_malformed_endpoints_are_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="endpoint") as error:
        _storage(endpoint=endpoint)
    assert "PLANTED" not in str(error.value)


def test_options_have_types() -> None:
    with pytest.raises(ConfigError) as error:
        _storage(region=1, anonymous="yes", force=True)
    assert [problem.split(":")[0] for problem in error.value.problems] == [
        "region", "anonymous", "force",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("url", "options", "becomes"),
    [
        ("s3://bucket", {}, "s3://bucket"),
        ("S3://bucket/a/b/", {"region": "eu-central-1"}, "s3://bucket/a/b"),
        ("gs://bucket/a", {"anonymous": True}, "gs://bucket/a"),
        ("az://container/a", {"account": "winds"}, "az://container/a"),
        ("https://host:8443/a/b/", {}, "https://host:8443/a/b"),
    ],
)
def test_urls_and_pickles(url: str, options: dict[str, Any], becomes: str) -> None:
    pytest.importorskip("obstore")
    storage = from_url(url, **options)
    assert storage.url == becomes
    assert repr(storage) == f"ObjectStorage({becomes!r})"
    copy = pickle.loads(pickle.dumps(storage))
    assert isinstance(storage, ObjectStorage)
    assert copy._place == storage._place
    assert type(copy._requests.client()).__name__ == {
        "s3": "S3Store", "gs": "GCSStore", "az": "AzureStore", "ht": "HTTPStore",
    }[becomes[:2]]  # fmt: skip


def test_azure_needs_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(ConfigError, match="account"):
        from_url("az://container/a")


def test_tokens_of_each_store() -> None:
    pytest.importorskip("obstore")
    meta = {"e_tag": '"x"', "version": "7"}
    s3, gs = from_url("s3://b/a"), from_url("gs://b/a")
    az = from_url("az://c/a", account="winds")
    for storage, token, version in (
        (s3, '"x"', {"e_tag": '"x"'}),
        (az, '"x"', {"e_tag": '"x"'}),
        (gs, '7 "x"', {"version": "7", "e_tag": '"x"'}),
    ):
        assert isinstance(storage, ObjectStorage)
        assert storage._token(meta, b"") == token
        assert storage._version(token) == version
        assert storage._version("") is None  # would be no condition at all
        with pytest.raises(UnsupportedStorageError, match="etag"):
            storage._token({"e_tag": None, "version": None}, b"")


def test_without_the_package_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedStorageError, match=r"pip install 'zarr-manifests\[object\]'"):
        from_url("s3://bucket/x")


def test_guessing_asks_nothing_of_a_store(small_store: Any) -> None:
    pytest.importorskip("xarray")
    from zarr_manifests.xarray import ManifestsBackendEntrypoint

    assert not ManifestsBackendEntrypoint().guess_can_open("s3://bucket/prefix")
    assert not ManifestsBackendEntrypoint().guess_can_open("https://127.0.0.1:1/x.nc")
    assert small_store.requests == []


# --- over the web, to be read ----------------------------------------------------------------


def test_a_repository_is_read_from_a_web_server(small_store: Any) -> None:
    import zarr

    session = zm.create(_storage("bucket/web"), {"inline-chunk-bytes": 0}).writable_session()
    zarr.create_array(session.store, name="a", shape=4, chunks=2, dtype="i4")[:] = [1, 2, 3, 4]
    session.commit("four")
    web = from_url(f"{small_store.endpoint}/bucket/web")
    repo = zm.open(web)
    assert zarr.open_array(repo.readonly_session().store, path="a")[:].tolist() == [1, 2, 3, 4]
    assert [info.message for info in repo.ancestry()] == ["four", "create repository"]
    with pytest.raises(UnsupportedStorageError, match="read-only"):
        repo.writable_session()
    for call in ("put", "create", "cas", "delete"):
        with pytest.raises(UnsupportedStorageError, match="can only be read"):
            CALLS[call](web)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedStorageError, match="cannot be listed"):
        list(web.list())
    with pytest.raises(UnsupportedStorageError, match="can"):
        zm.create(web)


def test_threads_that_begin_together_share_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    storage = _storage()
    make, made, ready = object_clients.Endpoint.client, list[object](), threading.Barrier(4)
    passed: list[int] = []

    class Lock(ForkSafeLock):
        def __enter__(self) -> bool:
            passed.append(ready.wait(60))  # none of them has found a client
            return super().__enter__()

    def counted(*arguments: Any, **options: Any) -> Any:
        made.append(object())
        return make(*arguments, **options)

    monkeypatch.setattr(object_clients.Endpoint, "client", counted)
    monkeypatch.setattr(storage._requests, "_making", Lock())
    with ThreadPoolExecutor(4) as pool:
        found = {id(client) for client in pool.map(lambda _: storage._requests.client(), range(4))}
    assert (len(found), len(made), len(passed)) == (1, 1, 4)


# --- races, forks, exits ---------------------------------------------------------------------


@pytest.mark.slow
def test_one_of_many_wins_every_round(object_server: Any) -> None:
    storage = _storage(f"tests/rounds-{os.getpid()}")
    token = storage.cas("swapped", b"start", None)
    with ThreadPoolExecutor(8) as pool:
        for number in range(60):
            barrier = threading.Barrier(8)

            def race(who: int, number: int = number, barrier: Any = barrier, token: Any = token):
                barrier.wait()
                made = storage.create(f"made/{number}", b"%d" % who)
                barrier.wait()
                return made, storage.cas("swapped", b"%d %d" % (number, who), token)

            outcomes = list(pool.map(race, range(8)))
            assert sum(made for made, _ in outcomes) == 1
            winners = [swapped for _, swapped in outcomes if swapped is not None]
            assert len(winners) == 1
            token = winners[0]
            assert storage.get_tagged("swapped").token == token


COMMITTING = """
import sys, zarr, zarr_manifests as zm
repo = zm.open(sys.argv[1])
for i in range(5):
    with repo.transaction(message=f"{sys.argv[2]} {i}") as store:
        zarr.create_group(store, path=f"{sys.argv[2]}/{i}")
"""


@pytest.mark.slow
def test_from_the_first_commit_to_the_last_collection(object_server: Any) -> None:
    xr = pytest.importorskip("xarray")
    url = f"s3://tests/whole-{os.getpid()}"
    repo = zm.create(url, {"inline-chunk-bytes": 0})
    ds = xr.Dataset({"t": (("time", "x"), [[1.0, 2.0], [3.0, 4.0]])}, {"time": [0, 1]})
    zm.write(ds, url, message="two times", mode="w")
    zm.write(ds + 1, url, message="again", mode="w")
    processes = [
        subprocess.Popen([sys.executable, "-c", COMMITTING, url, who], stderr=subprocess.PIPE)
        for who in ("one", "two")
    ]
    for process in processes:
        _, stderr = process.communicate(timeout=120)
        assert process.returncode == 0, stderr
    assert {info.message for info in repo.ancestry()} == {
        "create repository", "two times", "again",
        *(f"{who} {i}" for who in ("one", "two") for i in range(5)),
    }  # fmt: skip
    with xr.open_dataset(url, engine="zarr_manifests") as there:
        xr.testing.assert_equal(there, ds + 1)
    assert repo.verify().ok
    objects = len(list(from_url(url).list()))
    repo.expire_snapshots(keep_last=1)
    report = repo.garbage_collect(grace=timedelta(0))
    assert report is not None
    assert len(list(from_url(url).list())) < objects
    assert zm.open(url).verify().ok
    with xr.open_dataset(url, engine="zarr_manifests") as there:
        xr.testing.assert_equal(there, ds + 1)


FORKING = """
import os, sys, threading, zarr, zarr_manifests as zm
repo = zm.open(sys.argv[1])
stop = threading.Event()
def read():
    while not stop.is_set():
        repo.storage.get("current")
threads = [threading.Thread(target=read) for _ in range(3)]
for thread in threads: thread.start()
failed = 0
for i in range(3):  # each at another moment of the parent's calls
    child = os.fork()
    if child == 0:
        with repo.transaction(message=f"child {i}") as store:
            zarr.create_group(store, path=f"child/{i}")
        if i == 0:  # a child of the child
            grandchild = os.fork()
            if grandchild == 0:
                with repo.transaction(message="grandchild") as store:
                    zarr.create_group(store, path="grandchild")
                os._exit(0)
            if os.waitpid(grandchild, 0)[1]: os._exit(1)
        os._exit(0)
    failed += os.waitpid(child, 0)[1] != 0
stop.set()
for thread in threads: thread.join()
print(failed, sorted(info.message for info in repo.ancestry()))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_forked_children_commit_while_the_parent_reads(object_server: Any) -> None:
    url = f"s3://tests/forks-{os.getpid()}"
    zm.create(url)
    done = _run(FORKING, url)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "0 ['child 0', 'child 1', 'child 2', 'create repository', 'grandchild']\n"
    )


AFTER_THE_END = """
import atexit
from zarr_manifests.storage import from_url
storage = from_url("s3://bucket/prefix")
atexit.register(lambda: print(storage.cas("a", b"1", None, then_create=("b", b"2")) is not None))
"""


def test_a_swap_when_there_are_no_threads_any_more_is_none_the_less_one(small_store: Any) -> None:
    done = _run(AFTER_THE_END)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
    assert small_store.objects["bucket/prefix/a"] == b"1"


ENDING = """
import atexit, asyncio, sys, threading
atexit.register(lambda: print(len(object_clients._HERE.calls)))  # the last that is called
import zarr_manifests as zm
from zarr_manifests.storage import from_url, object_clients
storage = from_url("s3://bucket/prefix")
def run():
    asyncio.run(storage.get_async("late", 0, 3)) if sys.argv[1] == "async" else storage.get("late")
if sys.argv[1] == "archive":
    zm.create("s3://bucket/new")
else:
    threading.Thread(target=run, daemon=True).start()
input()
print("ends", flush=True)
"""


@pytest.mark.parametrize("kind", ["async", "sync", "archive"])
def test_a_program_ends_amid_a_call(small_store: Any, kind: str) -> None:
    asked, at_its_end = threading.Event(), threading.Event()
    archive = f"bucket/new/{archive_key(1)}"

    def late(request: Any) -> None:
        if request.path in (f"/{archive}", "/bucket/prefix/late"):
            asked.set()
            assert at_its_end.wait(60)

    small_store.objects["bucket/prefix/late"] = b"abc"
    small_store.faults.append(late)
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", ENDING, kind]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, **pipes) as program:
        assert program.stdin
        assert program.stdout
        try:
            assert asked.wait(60)
            program.stdin.write("\n")
            program.stdin.flush()
            assert program.stdout.readline() == "ends\n"
            at_its_end.set()
            said = program.communicate(timeout=120)
        finally:
            program.kill()
    assert (program.returncode, *said) == (0, "0\n", "")  # no calls are under way
    assert kind != "archive" or archive in small_store.objects


def test_a_root_of_gigabytes_is_not_read_to_its_end() -> None:
    sent = [0]

    class Large(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(3 << 30))
            self.send_header("ETag", '"large"')
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                for _ in range(3 << 10):
                    sent[0] += self.wfile.write(bytes(1 << 20))

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Large) as server:
        server.daemon_threads = False  # the server waits for its handlers when it is closed
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            tagged = from_url(f"http://127.0.0.1:{server.server_port}").get_tagged("current")
        finally:
            server.shutdown()
            thread.join()
    assert MAX_TAGGED_BYTES < len(tagged.data) <= 2 * MAX_TAGGED_BYTES
    assert sent[0] < 8 * MAX_TAGGED_BYTES, "what is on its way when the client goes"


# --- options of requests ------------------------------------------------------------------------


def test_headers_and_payer_and_storage_class_are_sent(small_store: Any) -> None:
    seen: list[Any] = []
    small_store.faults.append(seen.append)
    headers = {"x-team": "winds", "x-amz-server-side-encryption": "aws:kms"}
    storage = _storage(headers=headers, requester_pays=True, storage_class="STANDARD_IA")
    storage.put("a", b"1")
    assert asyncio.run(storage.create_async("b", b"1"))
    assert storage.get("a") == b"1"
    for request in seen:
        signed = request.headers["Authorization"].partition("SignedHeaders=")[2].split(",")[0]
        for name, value in (headers | {"x-amz-request-payer": "requester"}).items():
            assert request.headers[name] == value
            assert name in signed.split(";")  # else Amazon refuses the request
        expected = "STANDARD_IA" if request.method == "PUT" else None
        assert request.headers.get("x-amz-storage-class") == expected


def test_retries_and_timeouts_are_as_given(small_store: Any) -> None:
    small_store.objects["bucket/prefix/a"] = b"1"
    small_store.faults.append(lambda r: type(small_store.perform(r)).refusal(503, "SlowDown"))
    with pytest.raises(StorageError, match="fewer requests"):
        _storage(retries=0).get("a")
    assert len(small_store.requests) == 1
    with pytest.raises(StorageError, match="fewer requests"):
        _storage(retries=2).get("a")
    assert len(small_store.requests) == 1 + 3

    given_up = threading.Event()

    def late(_: Any) -> None:
        given_up.wait(30)  # it does answer in the 60 seconds that are the default

    small_store.faults[:] = [late]
    with pytest.raises(StorageError, match="did not answer in time"):
        _storage(retries=0, timeout_s=0.1).get("a")
    given_up.set()
    patience = _storage(timeout_s=2, connect_timeout_s=3, retries=20).place.patience
    assert (patience.request_s, patience.large_request_s, patience.connect_s) == (2, 30, 3)
    assert (patience.tries, patience.tries_s) == (20, 40)


@pytest.mark.parametrize("in_loop", [False, True])
def test_no_more_requests_at_a_time_than_asked_for(
    small_store: Any, monkeypatch: pytest.MonkeyPatch, in_loop: bool
) -> None:
    came: list[str] = []
    all_came, go_on = threading.Event(), threading.Event()
    line_up = Gate._line_up

    def come(where: str) -> None:
        came.append(where)
        if len(came) >= 10:
            all_came.set()

    def noted(gate: Gate) -> Any:
        turn = line_up(gate)
        if not turn.done():
            come("waits")
        return turn

    def held(_: Any) -> None:
        come("asks")
        assert go_on.wait(60)

    small_store.objects["bucket/prefix/a"] = b"1"
    small_store.faults.append(held)
    monkeypatch.setattr(Gate, "_line_up", noted)
    storage = _storage(concurrency=3)

    async def lost() -> None:
        tasks = [asyncio.create_task(storage.get_async("a", 0, 1)) for _ in range(10)]
        await asyncio.to_thread(all_came.wait, 60)
        for task in tasks[5:] + tasks[:5]:  # that wait, that run, and that are let in meanwhile
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def found() -> list[bytes]:
        async with asyncio.timeout(60):
            return await asyncio.gather(*(storage.get_async("a", 0, 1) for _ in range(20)))

    if in_loop:
        asyncio.run(lost())
        go_on.set()
        assert asyncio.run(found()) == [b"1"] * 20
    else:
        with ThreadPoolExecutor(10) as threads:
            answers = threads.map(storage.get, ["a"] * 10)
            all_came.wait(60)
            go_on.set()
            assert list(answers) == [b"1"] * 10
    assert Counter(came[:10]) == {"asks": 3, "waits": 7}
    assert storage._requests._gate()._free == 3
