"""A small object store of this process, whose answers a test can choose."""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime, parsedate_to_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from s3_server import ENVIRONMENT
from zarr_manifests.storage import object_store


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # a connection beyond it waits for seconds to be tried again
    daemon_threads = True


class SmallStore:
    """A server of this process that speaks as Amazon S3 does, as far as it is used, and misbehaves.

    `heeds` are the conditions it takes notice of. A page of a listing has `page` names. `faults`
    are tried in order at each request; one that returns an answer has dealt with it.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.modified = datetime(2015, 10, 21, 7, 28, tzinfo=UTC)
        self.heeds = {"If-None-Match", "If-Match", "start-after"}
        self.page = 1000
        self.faults: list[Callable[[Request], Answer | None]] = []
        self.requests: list[str] = []
        self._lock = threading.Lock()
        self._asked = threading.Condition()
        self._server = _Server(("127.0.0.1", 0), _handler_of(self))
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), daemon=True
        )
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def once(self, method: str, part: str, answer: Callable[[Request], Answer | None]) -> None:
        """Have the next request of that method, with that in its path, answered so."""

        def fault(request: Request) -> Answer | None:
            if request.method != method or part not in request.path:
                return None
            self.faults.remove(fault)
            return answer(request)

        self.faults.append(fault)

    def refuse(self, methods: set[str], status: int, code: str) -> None:
        """Have all requests of these methods answered so."""
        refusal = Answer.refusal(status, code)
        self.faults.append(lambda request: refusal if request.method in methods else None)

    def await_request(self, said: str) -> None:
        with self._asked:
            assert self._asked.wait_for(lambda: said in self.requests, timeout=60), said

    def answer(self, request: Request) -> Answer:
        with self._asked:
            self.requests.append(f"{request.method} {request.path}")
            self._asked.notify_all()
        for fault in list(self.faults):
            found = fault(request)
            if found is not None:
                return found
        return self.perform(request)

    def perform(self, request: Request) -> Answer:
        """What a store does that works."""
        with self._lock:
            if request.method in ("GET", "HEAD") and "list-type" in request.query:
                return self._list(request.query)
            if request.method == "POST":
                keys = re.findall(r"<Key>([^<]*)</Key>", request.body.decode())
                for key in keys:
                    self.objects.pop(f"{request.path.strip('/')}/{key}", None)
                said = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
                return Answer(200, f"<DeleteResult>{said}</DeleteResult>".encode())
            name = request.path.lstrip("/")
            if request.method == "DELETE":
                self.objects.pop(name, None)
                return Answer(204)
            return self._put(name, request) if request.method == "PUT" else self._get(name, request)

    def _put(self, name: str, request: Request) -> Answer:
        there = self.objects.get(name)
        absent, same = (
            request.headers.get(c) if c in self.heeds else None
            for c in ("If-None-Match", "If-Match")
        )
        if (absent and there is not None) or (same and (there is None or same != _etag(there))):
            return Answer.refusal(412, "PreconditionFailed")
        self.objects[name] = request.body
        return Answer(200, b"", {"ETag": _etag(request.body)})

    def _get(self, name: str, request: Request) -> Answer:
        data = self.objects.get(name)
        if data is None:
            return Answer.refusal(404, "NoSuchKey")
        modified = format_datetime(self.modified, usegmt=True)
        headers = {"ETag": _etag(data), "Last-Modified": modified}
        since = request.headers.get("If-Unmodified-Since")
        if since and parsedate_to_datetime(since) < self.modified:
            return Answer.refusal(412, "PreconditionFailed")
        if request.headers.get("If-Match") not in (None, _etag(data)):
            return Answer.refusal(412, "PreconditionFailed")
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
        if span is None:
            return Answer(200, data, headers)
        start, end = int(span[1]), min(int(span[2] or len(data)), len(data) - 1)
        if start >= len(data):
            return Answer.refusal(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
        return Answer(206, data[start : end + 1], headers)

    def _list(self, query: dict[str, str]) -> Answer:
        prefix = query.get("prefix", "")
        start = query.get("start-after", "") if "start-after" in self.heeds else ""
        after = query.get("continuation-token") or start
        keys = sorted(name.partition("/")[2] for name in self.objects)
        keys = [key for key in keys if key.startswith(prefix) and key > after]
        found = "".join(
            f"<Contents><Key>{key}</Key><Size>1</Size><ETag>x</ETag>"
            "<LastModified>2015-10-21T07:28:00.000Z</LastModified></Contents>"
            for key in keys[: self.page]
        )
        if len(keys) > self.page:
            found += f"<NextContinuationToken>{keys[self.page - 1]}</NextContinuationToken>"
        return Answer(200, f"<ListBucketResult>{found}</ListBucketResult>".encode())


@dataclass(frozen=True)
class Request:
    """What was asked."""

    method: str
    path: str
    query: dict[str, str]
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Answer:
    """What is answered; without a status the connection is closed."""

    status: int | None
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def refusal(cls, status: int, code: str, more: str = "") -> Answer:
        return cls(status, f"<Error><Code>{code}</Code><Message>{more}</Message></Error>".encode())


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


def _handler_of(store: SmallStore) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else an answer in two parts takes 40 ms
        wbufsize = -1

        def log_message(self, *_: object) -> None:
            pass

        def handle_expect_100(self) -> bool:
            asked_for = super().handle_expect_100()
            self.wfile.flush()
            return asked_for

        def _answer(self) -> None:
            url = urllib.parse.urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
            path = urllib.parse.unquote(url.path)
            headers: Any = self.headers
            answer = store.answer(Request(self.command, path, query, headers, body))
            if answer.status is None:
                self.close_connection = True
                return
            with contextlib.suppress(ConnectionError):
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                self.wfile.write(b"" if self.command == "HEAD" else answer.body)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815

    return Handler


@contextlib.contextmanager
def _pointed_to() -> Iterator[SmallStore]:
    pytest.importorskip("obstore")
    store = SmallStore()
    object_store._IGNORED.clear()  # an earlier store at this port may have ignored conditions
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL": store.endpoint}).items():
            patch.setenv(name, value)
        yield store
    store.close()


@pytest.fixture
def small_store() -> Iterator[SmallStore]:
    """A store of this process whose answers a test can choose; the environment points to it."""
    with _pointed_to() as store:
        yield store


@pytest.fixture(scope="module")
def module_store() -> Iterator[SmallStore]:
    """The same, for all tests of a module."""
    with _pointed_to() as store:
        yield store
