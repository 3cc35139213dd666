"""Object stores: what only they do, and what they must not do. The contract is in test_contract."""

from __future__ import annotations

import asyncio
import io
import itertools
import logging
import pickle
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import zarr_manifests as zm
from small_store import Answer
from zarr_manifests.errors import (
    AlreadyExistsError,
    ConfigError,
    InvalidArgumentError,
    ObjectNotFoundError,
    StorageError,
    StorageFullError,
    UnsupportedStorageError,
)
from zarr_manifests.repository import context_of
from zarr_manifests.storage import from_url
from zarr_manifests.storage.object_store import ObjectStorage

SECRETS = {
    "AWS_ACCESS_KEY_ID": "PLANTEDkeyid",
    "AWS_SECRET_ACCESS_KEY": "PLANTEDsecret",
    "AWS_SESSION_TOKEN": "PLANTEDtoken",
}


def _storage(name: str = "bucket/prefix", **options: object) -> ObjectStorage:
    storage = from_url(f"s3://{name}", **options)
    assert isinstance(storage, ObjectStorage)
    return storage


# --- requests --------------------------------------------------------------------------------


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


@pytest.mark.parametrize("heeds", [True, False], ids=["offset heeded", "offset ignored"])
def test_a_listing_is_right_whatever_its_pages(small_store: Any, heeds: bool) -> None:
    storage = _storage()
    small_store.page = 7
    if not heeds:
        small_store.heeds.discard("start-after")
    keys = [f"{ab}/{i:02}" for ab in ("a", "b", "c") for i in range(15)]
    small_store.objects |= {f"bucket/prefix/{key}": b"x" for key in keys}
    for prefix, after in itertools.product(["", "b/", "b/1"], ["", "a/14", "b/11"]):
        expected = [key for key in keys if key.startswith(prefix) and key > after]
        assert [info.key for info in storage.list(prefix, after)] == expected


# --- lost answers ----------------------------------------------------------------------------


def _perform_then(store: Any, answer: Any) -> Callable[[Any], Any]:
    def perform(request: Any) -> Any:
        kind = type(store.perform(request))
        return kind.refusal(503, "SlowDown") if answer == 503 else kind(None)

    return perform


@pytest.mark.parametrize(
    ("part", "lost"), [("/current", 503), ("/current", None), ("/chunks/", None), ("/deltas/", 503)]
)
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
    assert [info.message for info in again.ancestry()][:-1] == ["with a lost answer"]
    assert zarr.open_array(again.readonly_session().store, path="a")[:].tolist() == [1, 2, 3, 4]
    assert again.verify().ok


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
    assert not storage.capabilities.cas
    assert [name for name in small_store.objects if "/ill/" in name] == []
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


def _looks_only_whether_it_is_there(small_store: Any) -> None:
    """Have a swap of what is not there refused, once, and no etag compared."""
    small_store.heeds -= {"If-Match"}
    early = True

    def fault(request: Any) -> Any:
        nonlocal early
        if early and request.headers.get("If-Match"):
            early = False
            return Answer.refusal(412, "PreconditionFailed")
        return None

    small_store.faults.append(fault)


def test_a_swap_that_came_before_the_object_proves_nothing(small_store: Any) -> None:
    """And a root that was written beside the next one is swapped by nobody."""

    def after_the_root(request: Any) -> None:
        if request.headers.get("If-Match"):
            small_store.await_request("PUT /bucket/ill/current")

    _looks_only_whether_it_is_there(small_store)
    small_store.faults.append(after_the_root)
    storage = _storage("bucket/ill")
    with pytest.raises(UnsupportedStorageError, match="takes no notice of If-Match"):
        zm.create(storage)
    found = storage.get_tagged("current")
    for again in (storage, _storage("bucket/ill")):
        with pytest.raises(UnsupportedStorageError, match="read-only"):
            zm.open(again).writable_session()
        with pytest.raises(UnsupportedStorageError, match="takes no notice of If-Match"):
            again.cas("current", b"", found.token)
    assert storage.get_tagged("current") == found


def test_no_swap_is_sent_before_swaps_are_tried(small_store: Any) -> None:
    """A root alone may be created, which needs the other condition."""
    _looks_only_whether_it_is_there(small_store)
    storage = _storage("bucket/ill")
    token = storage.cas("current", b"1", None)
    assert token is not None
    with pytest.raises(UnsupportedStorageError, match="takes no notice of If-Match"):
        storage.cas("current", b"2", '"another"')
    assert storage.get("current") == b"1"


def test_a_proof_that_was_withdrawn_halfway_begins_again(small_store: Any) -> None:
    """Else a swap would be tried where no object is."""
    small_store.objects["bucket/full/other.txt"] = b""
    storage = _storage("bucket/full")
    with pytest.raises(AlreadyExistsError):
        zm.create(storage)
    assert not any(".probe" in name for name in small_store.objects)
    _looks_only_whether_it_is_there(small_store)
    with pytest.raises(UnsupportedStorageError, match="takes no notice of If-Match"):
        storage.create("a", b"")


def test_a_repository_is_made_in_two_rounds(small_store: Any) -> None:
    """The requests of each wait for one another: a third round would wait for ever."""
    rounds = [threading.Barrier(6, timeout=5), threading.Barrier(2, timeout=30)]
    began: list[str] = []

    def wait(request: Any) -> None:
        if "/root/" not in request.path:  # the archive, which nobody waits for
            began.append(request.path)
            rounds[len(began) > 6].wait()

    small_store.faults.append(wait)
    zm.create(_storage("bucket/well"))
    assert len(began) == 8


# --- errors ----------------------------------------------------------------------------------


def _answers(store: Any, status: int, code: str) -> None:
    """Have all requests answered so, with what was sent to the server in the answer."""

    def fault(request: Any) -> Any:
        kind = type(store.perform(request))
        sent = " ".join(f"{name}: {value}" for name, value in request.headers.items())
        return kind.refusal(status, code, f"{sent} PLANTEDbody")

    store.faults.append(fault)


CALLS: dict[str, Callable[[ObjectStorage], object]] = {
    "get": lambda storage: storage.get("a"),
    "get async": lambda storage: asyncio.run(storage.get_async("a", 1, 2)),
    "list": lambda storage: list(storage.list()),
    "put": lambda storage: storage.put("a", b""),
    "create async": lambda storage: asyncio.run(storage.create_async("a", b"")),
    "cas": lambda storage: storage.cas("a", b"", None),
    "delete": lambda storage: storage.delete_many(["a"]),
}


@pytest.mark.parametrize(
    ("call", "status", "code", "kind", "says"),
    [
        ("get", 403, "SignatureDoesNotMatch", StorageError, "AWS_SECRET_ACCESS_KEY"),
        ("list", 404, "NoSuchBucket", StorageError, "bucket"),
        ("get", 301, "PermanentRedirect", StorageError, "region="),
        ("create async", 400, "XMinioStorageFull", StorageFullError, "room"),
        ("cas", 403, "AccessDenied", StorageError, "allow"),
        ("delete", 418, "PLANTEDcode", StorageError, "418"),
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
    assert storage.create("proven", b"")  # so that it is the call itself that fails
    _answers(small_store, status, code)
    with pytest.raises(kind, match=says) as caught:
        CALLS[call](storage)
    assert not isinstance(caught.value, ObjectNotFoundError)
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
@pytest.mark.parametrize("call", [CALLS["get"], CALLS["create async"]], ids=["get", "create"])
def test_what_cannot_be_reached_says_so(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    storage = _storage(endpoint="http://127.0.0.1:1", allow_http=True)
    with pytest.raises(StorageError, match="endpoint") as caught:
        call(storage)
    _check_no_secrets(caught.value, storage, "")


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
    monkeypatch.delenv("AWS_ALLOW_HTTP", raising=False)
    with pytest.raises(InvalidArgumentError, match="allow_http=True"):
        _storage(endpoint="http://127.0.0.1:1").get("a")


# --- forks ----------------------------------------------------------------------------------------

FORKED = """
import os, signal, sys
from zarr_manifests.errors import StorageError
from zarr_manifests.storage import from_url
storage = from_url("s3://bucket/prefix")
storage.put("a", b"1")
child = os.fork()
if not child:
    signal.alarm(30)
    for place in (storage, from_url("s3://bucket/other")):
        try:
            place.get("a")
        except StorageError as error:
            print(error, flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert storage.get("a") == b"1"
"""


def test_a_forked_child_is_told_to_be_started_otherwise(small_store: Any) -> None:
    command = [sys.executable, "-c", FORKED]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.count("method 'spawn' or 'forkserver'") == 2, done.stdout


# --- options and URLs ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "s3:///x", "s3://bucket/../x", "s3://bucket/x?X-Amz-Signature=PLANTED",
        "s3://bucket/x#PLANTED", "https://host/x?sig=PLANTED", "http:///x",
    ],
)  # fmt: skip
def test_malformed_urls_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        from_url(url)
    assert "PLANTED" not in str(error.value)


@pytest.mark.parametrize("endpoint", ["host", "https://a:PLANTED@host", "https://h/?sig=PLANTED"])
def test_malformed_endpoints_are_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="endpoint") as error:
        _storage(endpoint=endpoint)
    assert "PLANTED" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "options", "becomes", "client"),
    [
        ("S3://bucket/a/b/", {"region": "eu-central-1"}, "s3://bucket/a/b", "S3Store"),
        ("gs://bucket/a", {"anonymous": True}, "gs://bucket/a", "GCSStore"),
        ("az://container/a", {"account": "winds"}, "az://container/a", "AzureStore"),
        ("https://host:8443/a/b/", {}, "https://host:8443/a/b", "HTTPStore"),
    ],
)
def test_urls_and_pickles(url: str, options: dict[str, Any], becomes: str, client: str) -> None:
    storage = from_url(url, **options)
    assert storage.url == becomes
    assert repr(storage) == f"ObjectStorage({becomes!r})"
    copy = pickle.loads(pickle.dumps(storage))
    assert isinstance(storage, ObjectStorage)
    assert copy.place == storage.place
    assert type(copy._client()).__name__ == client


@pytest.mark.parametrize("there", ["holiday photo.jpg", "current"])
def test_a_place_that_is_not_empty_is_left_as_it_was(small_store: Any, there: str) -> None:
    small_store.objects[f"bucket/prefix/{there}"] = b"mine"
    with pytest.raises(AlreadyExistsError):
        zm.create(_storage())
    assert small_store.objects == {f"bucket/prefix/{there}": b"mine"}


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
    for call in ("put", "create async", "cas", "delete"):
        with pytest.raises(UnsupportedStorageError, match="can only be read"):
            CALLS[call](web)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedStorageError, match="cannot be listed"):
        list(web.list())
    with pytest.raises(UnsupportedStorageError, match="can"):
        zm.create(web)


# --- options of requests ------------------------------------------------------------------------


def test_headers_and_payer_and_storage_class_are_sent(small_store: Any) -> None:
    seen: list[Any] = []
    small_store.faults.append(seen.append)
    storage = _storage(headers={"x-team": "me"}, requester_pays=True, storage_class="STANDARD_IA")
    storage.put("a", b"1")
    assert asyncio.run(storage.create_async("b", b"1"))
    assert storage.get("a") == b"1"
    for request in seen:
        signed = request.headers["Authorization"].partition("SignedHeaders=")[2].split(",")[0]
        for name, value in {"x-team": "me", "x-amz-request-payer": "requester"}.items():
            assert request.headers[name] == value
            assert name in signed.split(";")  # else Amazon refuses the request
        expected = "STANDARD_IA" if request.method == "PUT" else None
        assert request.headers.get("x-amz-storage-class") == expected


def test_requests_are_repeated_as_often_as_given(small_store: Any) -> None:
    small_store.faults.append(lambda r: type(small_store.perform(r)).refusal(503, "SlowDown"))
    for retries in (0, 2):
        small_store.requests.clear()
        with pytest.raises(StorageError, match="fewer requests"):
            _storage(retries=retries).get("a")
        assert len(small_store.requests) == 1 + retries
    patience = _storage(timeout_s=2, connect_timeout_s=3, retries=20).place.patience
    assert (patience.request_s, patience.connect_s, patience.tries) == (2, 3, 20)


def test_no_more_requests_at_a_time_than_asked_for(small_store: Any) -> None:
    under_way = most = 0
    three_came, lock = threading.Event(), threading.Lock()

    def held(_: Any) -> None:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
            if under_way == 3:
                three_came.set()
        assert three_came.wait(60)
        with lock:
            under_way -= 1

    small_store.objects["bucket/prefix/a"] = b"1"
    small_store.faults.append(held)
    storage = _storage(concurrency=3)

    async def read_all() -> list[bytes]:
        return await asyncio.gather(*(storage.get_async("a", 0, 1) for _ in range(20)))

    assert asyncio.run(read_all()) == [b"1"] * 20
    with ThreadPoolExecutor(10) as threads:
        assert list(threads.map(storage.get, ["a"] * 20)) == [b"1"] * 20
    assert most == 3


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
