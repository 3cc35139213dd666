"""What an object store that sends to another host brings about: an error, and nothing there."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from zarr_manifests.errors import ConfigError, StorageError
from zarr_manifests.storage import from_url


@pytest.fixture
def other(small_store: Any, impatient: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Another store, at a host of another name, to which the first one sends."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", "PLANTED")
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        if name.lower() != "no_proxy":
            monkeypatch.delenv(name)
    store = type(small_store)()
    store.objects |= {"bucket/prefix/a": b"else", "web/a": b"else"}
    yield store
    store.close()


def _host(store: Any) -> str:
    return str(store.endpoint).replace("http://127.0.0.1", "localhost")


def _send(store: Any, to: str, status: int = 307) -> None:
    def send(request: Any) -> Any:
        answer = store.perform(type(request)("GET", "/x", {}, {}, b""))
        return type(answer)(status, b"", {"Location": f"{to}{request.path}"})

    store.faults.append(send)


@pytest.mark.parametrize(
    ("call", "status"),
    [
        (lambda storage: storage.get("a"), 307),
        (lambda storage: asyncio.run(storage.get_async("a", 0, 3)), 302),
        (lambda storage: storage.head("a"), 303),
        (lambda storage: list(storage.list()), 301),
        (lambda storage: storage.delete_many(["a"]), 308),
        (lambda storage: storage.create("a", b"x"), 307),
    ],
    ids=["get", "get async", "head", "list", "delete", "create"],
)
def test_another_host_is_not_asked_and_is_named(
    small_store: Any, other: Any, call: Callable[[Any], object], status: int
) -> None:
    storage = from_url("s3://bucket/prefix")
    assert storage.create("proven", b"")
    _send(small_store, f"http://{_host(other)}", status)
    with pytest.raises(StorageError, match="the store sends to another") as caught:
        call(storage)
    assert other.requests == []
    assert "PLANTED" not in str(caught.value)


def bearer() -> dict[str, Any]:
    return {"token": "PLANTED", "expires_at": None}


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://bucket/prefix", {}),
        ("gs://bucket/prefix", {"credentials": bearer}),
        ("az://bucket/prefix", {"account": "winds", "credentials": bearer}),
    ],
)
def test_another_port_of_the_host_gets_no_signature_and_no_bearer_token(
    small_store: Any, other: Any, url: str, options: dict[str, Any]
) -> None:
    """The client follows it: it knows hosts, not ports."""
    _send(small_store, other.endpoint)
    headers: list[Any] = []
    other.faults.append(lambda request: headers.append(request.headers))
    storage = from_url(url, endpoint=small_store.endpoint, allow_http=True, **options)
    with suppress(StorageError):
        storage.get("a")
    sent = {name.lower(): value for name, value in headers[0].items()}
    assert not {"authorization", "cookie"} & sent.keys()
    assert {n for n, value in sent.items() if "PLANTED" in value} <= {"x-amz-security-token"}


def test_a_web_server_may_be_followed_if_that_is_said(small_store: Any, other: Any) -> None:
    _send(small_store, f"http://{_host(other)}")
    headers: list[Any] = []
    other.faults.append(lambda request: headers.append(request.headers))
    web = f"{small_store.endpoint}/web"
    with pytest.raises(StorageError, match=f"another host, {_host(other)},.*allow_redirects=True"):
        from_url(web).get("a")
    assert other.requests == []
    assert from_url(web, allow_redirects=True).get("a") == b"else"
    assert other.requests == ["GET /web/a"]
    with pytest.raises(ConfigError, match="allow_redirects"):  # not where there are credentials
        from_url("s3://bucket/prefix", allow_redirects=True)
    sent = {name.lower() for name in headers[0]}
    assert not {n for n in sent if n.startswith("x-amz") or n in ("authorization", "cookie")}


def test_nothing_is_sent_without_encryption_where_it_was_asked_for() -> None:
    for endpoint, allows in (("https://host", "false"), ("http://host", "true")):
        storage = from_url("s3://bucket/prefix", endpoint=endpoint, allow_http=True)
        client: Any = storage._client()  # type: ignore[attr-defined]
        assert client.client_options["allow_http"] == allows
