"""What an object store that sends to another host brings about: an error, and nothing there."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from missing import missing
from zarr_manifests.error_cases import ConfigError
from zarr_manifests.errors import StorageError
from zarr_manifests.storage import from_url
from zarr_manifests.storage.object_redirects import confined

CALLS: dict[str, Callable[[Any], Any]] = {
    "get": lambda storage: storage.get("a"),
    "get range": lambda storage: storage.get("a", 1, 2),
    "get ranges": lambda storage: storage.get_ranges("a", [(0, 1), (900_000, 1)]),
    "get async": lambda storage: asyncio.run(storage.get_async("a", 0, 3)),
    "get tagged": lambda storage: storage.get_tagged("a"),
    "head": lambda storage: storage.head("a"),
    "list": lambda storage: list(storage.list()),
    "delete": lambda storage: storage.delete_many(f"{'k' * 90}/{n}" for n in range(1000)),
    "put": lambda storage: storage.put("a", b"x"),
    "create": lambda storage: storage.create("a", b"x"),
    "create async": lambda storage: asyncio.run(storage.create_async("a", b"x")),
}
NOT_FOLLOWED = ("put", "create", "create async")  # by the client itself, which says not whither


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


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_another_host_is_not_asked_and_is_named(
    small_store: Any, other: Any, call: str, status: int
) -> None:
    storage = from_url("s3://bucket/prefix")
    if "create" in call:
        assert storage.create("proven", b"")
    _send(small_store, f"http://{_host(other)}", status)
    with pytest.raises(StorageError) as caught:
        CALLS[call](storage)
    assert other.requests == []
    assert "PLANTED" not in str(caught.value)
    if call in NOT_FOLLOWED and status != 303:
        assert caught.match("the store sends to another address")
    else:
        assert caught.match(f"the store sends to another host, {_host(other)},")


@pytest.mark.parametrize(
    ("url", "options"),
    [("gs://bucket/prefix", {}), ("az://bucket/prefix", {"account": "winds"})],
)
def test_of_the_other_providers_neither(
    small_store: Any, other: Any, url: str, options: dict[str, Any]
) -> None:
    _send(small_store, f"http://{_host(other)}")
    storage = from_url(
        url, endpoint=small_store.endpoint, allow_http=True, anonymous=True, **options
    )
    with pytest.raises(StorageError, match=f"another host, {_host(other)},"):
        storage.get("a")
    assert other.requests == []


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
    sent = {name.lower() for name in headers[0]}
    assert not {n for n in sent if n.startswith("x-amz") or n in ("authorization", "cookie")}


@pytest.mark.parametrize("url", ["s3://bucket/prefix", "gs://bucket/prefix", "az://bucket/prefix"])
def test_with_credentials_nothing_is_followed(url: str) -> None:
    with pytest.raises(ConfigError, match="allow_redirects: unknown storage option"):
        from_url(url, allow_redirects=True)


def test_the_same_host_may_send_to_another_place_of_its_own(small_store: Any, other: Any) -> None:
    small_store.objects["web/a"] = b"here"

    def send(request: Any) -> Any:
        if not request.path.startswith("/old/"):
            return None
        answer = small_store.perform(request)
        return type(answer)(308, b"", {"Location": "/web/a"})

    small_store.faults.append(send)
    assert from_url(f"{small_store.endpoint}/old").get("a") == b"here"


def test_where_credentials_come_from_is_asked(
    small_store: Any, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://{_host(other)}")
    with pytest.raises(StorageError):
        from_url("s3://bucket/prefix").get("a")
    assert "PUT /latest/api/token" in other.requests


def test_which_hosts_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", "https://sts.example.com:8443/x")

    def hosts(kind: str, url: str | None, *, credentials: bool = False) -> set[str]:
        return set(confined(kind, url, credentials=credentials)["proxy_excludes"].split(","))

    assert hosts("s3", "https://MinIO.example.com:9000/x") == {"minio.example.com"}
    assert hosts("s3", "http://[::1]:9000") == {"::1"}
    assert hosts("s3", None) == {"amazonaws.com"}
    assert hosts("http", "https://host.example.com/a/b") == {"host.example.com"}
    asked = hosts("s3", "https://minio.example.com", credentials=True)
    assert asked >= {"minio.example.com", "169.254.0.0/16", "amazonaws.com", "sts.example.com"}
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example.com:3128")
    assert confined("s3", None, credentials=False) == {}


# --- with encryption -------------------------------------------------------------------------


@pytest.fixture
def encrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server with a certificate that is trusted here; its `location` is where it sends to."""
    if shutil.which("openssl") is None:
        missing("the program openssl is not installed")
    (tmp_path / "extensions").write_text("subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\n")
    new = ["openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    for command in (
        [*new, "-x509", "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=ca"],
        [*new, "-keyout", "key.pem", "-out", "request", "-subj", "/CN=server"],
        ["openssl", "x509", "-req", "-in", "request", "-CA", "ca.pem", "-CAkey", "ca.key",
         "-CAcreateserial", "-days", "2", "-extfile", "extensions", "-out", "cert.pem"],
    ):  # fmt: skip
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(307)
            self.send_header("Location", f"{server.location}{self.path}")  # type: ignore[attr-defined]
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_nothing_is_sent_without_encryption_where_it_was_asked_for(
    encrypted: Any, other: Any
) -> None:
    storage = from_url("s3://bucket/prefix", endpoint=f"https://127.0.0.1:{encrypted.server_port}")
    for host in (f"127.0.0.1:{other.endpoint.rpartition(':')[2]}", _host(other)):
        encrypted.location = f"http://{host}"
        with pytest.raises(StorageError, match=f"another host, {host},"):
            storage.get("a")
    assert other.requests == []
    encrypted.location = "https://elsewhere.invalid"
    with pytest.raises(StorageError, match=r"another host, elsewhere\.invalid:443,"):
        storage.get("a")
