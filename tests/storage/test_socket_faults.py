"""Faults of the network between this package and an object store, at the socket.

A proxy does to the requests for one kind of key what networks, gateways and stores do to them,
once, three times, or always. Whatever happens: what was acknowledged is read by a new client, an
error leaves what was there before, and the next operation works.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from zarr_manifests.errors import CommitOutcomeUnknownError, ManifestsError
from zarr_manifests.storage import from_url, object_clients

PATIENCE = object_clients.Patience(
    request_s=0.4, tries=4, tries_s=2.0, first_wait_s=0.005, longest_wait_s=0.05
)
PLACES = itertools.count()

FAULTS = (
    "reset before", "reset after", "end in body", "503", "409", "412", "412 after", "late",
    "duplicate", "replay",
)  # fmt: skip
REFUSALS = ("409", "412", "412 after")  # of conditional writes
TIMES = {"once": 1, "three times": 3, "always": 10**9}
KINDS = {
    "current": "commit", "swap": "commit", "root": "commit", "snapshots": "commit",
    "deltas": "commit", "chunks": "commit", "manifests": "compact", "nodes": "compact",
    "indexes": "measure", "listing": "collect", "delete": "collect",
}  # fmt: skip
# A store that says of an archive that it is there, and it is not, lies, which `verify` finds out.
CASES = [
    (kind, fault, times)
    for kind in KINDS
    for fault in FAULTS
    for times in TIMES
    if not (kind in ("current", "listing", "delete") and fault in REFUSALS)
    and (kind, fault) != ("root", "412")
]
SOME = [
    ("swap", "reset after", "once"),
    ("swap", "412 after", "three times"),
    ("root", "409", "once"),
    ("chunks", "end in body", "three times"),
    ("manifests", "duplicate", "once"),
    ("delete", "503", "always"),
]


@dataclass(frozen=True)
class Message:
    """A request or an answer, as it travels."""

    head: bytes
    body: bytes

    @property
    def first(self) -> list[str]:
        return self.head.split(b"\r\n", 1)[0].decode().split(" ")

    @property
    def whole(self) -> bytes:
        return self.head + self.body


def _kind(request: Message) -> str:
    """What the request is about: the first folder below the prefix, or what is done to many."""
    method, target, _ = request.first
    path, _, query = target.partition("?")
    if "list-type" in query:
        return "listing"
    if method == "POST":
        return "delete"
    folder = urllib.parse.unquote(path).split("/")[3]
    return "swap" if method == "PUT" and folder == "current" else folder


class FaultProxy:
    """Passes requests on to a server, and does to some of them what is to be tried."""

    def __init__(self, endpoint: str) -> None:
        self._upstream = urllib.parse.urlsplit(endpoint).port
        self._fault, self._on, self._left = "", "", 0
        self.struck: list[str] = []
        self._replays: list[bytes] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def strike(self, kind: str, fault: str, times: int) -> None:
        """Do that to as many requests for that kind of key from now on."""
        with self._lock:
            self._fault, self._on, self._left = fault, kind, times
            self.struck = []

    def calm(self) -> None:
        """Do nothing any more; what is to come again comes now."""
        self.strike("", "", 0)
        replays, self._replays = self._replays, []
        for sent in replays:
            self._ask(sent)

    def close(self) -> None:
        self._closed.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for one in self._open:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.add(connection)
        with contextlib.suppress(OSError), connection:
            while (request := _received(connection)) is not None:
                if not self._answer(connection, request):
                    return
        with self._lock:
            self._open.discard(connection)

    def _due(self, request: Message) -> str:
        with self._lock:
            if not self._left or _kind(request) != self._on:
                return ""
            if self._fault in REFUSALS and request.first[0] != "PUT":
                return ""
            self._left -= 1
            self.struck.append(f"{request.first[0]} {request.first[1]}")
            return self._fault

    def _answer(self, connection: socket.socket, request: Message) -> bool:
        """Deal with a request; whether the connection goes on."""
        fault = self._due(request)
        if fault == "reset before":
            return _reset(connection)
        if fault in ("503", "409", "412"):
            connection.sendall(_refusal(fault))
            return True
        if fault in ("late", "replay"):
            self._replays.append(request.whole)
        if fault == "late":
            self._closed.wait(PATIENCE.request_s * 3)
            return False
        answer = self._ask(request.whole)
        if fault == "duplicate":
            answer = self._ask(request.whole)
        if fault == "reset after":
            return _reset(connection)
        if fault == "412 after":
            connection.sendall(_refusal("412"))
            return True
        if fault == "end in body":
            body = answer.body[: len(answer.body) // 2]
            connection.sendall(answer.head + body if answer.body else answer.head[:-10])
            return False
        connection.sendall(answer.whole)
        return True

    def _ask(self, sent: bytes) -> Message:
        with socket.create_connection(("127.0.0.1", self._upstream)) as upstream:
            upstream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            upstream.sendall(sent)
            answer = _received(upstream, without_body=sent.startswith(b"HEAD "))
            assert answer is not None
            return answer


def _received(connection: socket.socket, *, without_body: bool = False) -> Message | None:
    """The next request or answer; None if there is none any more."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(65536)
        if not more:
            return None
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:] if b":" in line)
    nbytes = 0 if without_body else int(fields.get(b"content-length", b"0"))
    assert b"transfer-encoding" not in fields
    while len(body) < nbytes:
        more = connection.recv(nbytes - len(body))
        if not more:
            return None
        body += more
    return Message(head + b"\r\n\r\n", body)


def _reset(connection: socket.socket) -> bool:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    return False


def _refusal(status: str) -> bytes:
    code = {"503": "SlowDown", "409": "ConditionalRequestConflict", "412": "PreconditionFailed"}
    body = f"<Error><Code>{code[status]}</Code></Error>"
    return f"HTTP/1.1 {status} Refused\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


# --- a repository behind it --------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """A store, the proxy before it, and what lies in a repository that each case has a copy of."""

    store: Any
    proxy: FaultProxy
    template: dict[str, bytes]

    def fresh(self) -> str:
        """The URL of a new copy of the repository."""
        name = f"bucket/case{next(PLACES)}"
        for key, data in self.template.items():
            self.store.objects[f"{name}/{key}"] = data
        return f"s3://{name}"

    def through(self, url: str) -> Any:
        return from_url(url, endpoint=self.proxy.endpoint)

    def past(self, url: str) -> Any:
        return from_url(url, endpoint=self.store.endpoint)


OLD, NEW, NEXT = np.arange(1, 13), np.arange(101, 113), np.arange(201, 213)


def _set(repo: zm.Repository, values: Any) -> None:
    session = repo.writable_session()
    array = zarr.open_array(session.store, path="a")
    array[:] = values
    session.commit("set")


def _values(repo: zm.Repository) -> list[int]:
    return zarr.open_array(repo.readonly_session().store, path="a", mode="r")[:].tolist()


def _make_template(store: Any) -> dict[str, bytes]:
    """The objects of a repository with something to collect."""
    repo = zm.create(
        from_url("s3://bucket/template"),
        {"inline-chunk-bytes": 0, "pack-chunk-bytes": 0, "compaction": {"mode": "manual"}},
    )
    session = repo.writable_session()
    zarr.create_array(session.store, name="a", shape=12, chunks=4, dtype="i4")
    session.commit("an array")
    _set(repo, -OLD)
    _set(repo, OLD)
    repo.expire_snapshots(keep_last=1)
    start = "bucket/template/"
    return {n.removeprefix(start): d for n, d in store.objects.items() if n.startswith(start)}


@pytest.fixture(scope="module")
def site(module_store: Any) -> Iterator[Site]:
    """The store and the proxy; the client's waits are short."""
    template = _make_template(module_store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zarr_manifests.storage.object_clients.PATIENCE", PATIENCE)
        proxy = FaultProxy(module_store.endpoint)
        yield Site(module_store, proxy, template)
        proxy.close()


OPERATIONS: dict[str, Callable[[zm.Repository], object]] = {
    "commit": lambda repo: _set(repo, NEW),
    "compact": zm.Repository.compact,
    "measure": zm.Repository.compute_statistics,
    "collect": lambda repo: repo.garbage_collect(grace=timedelta(0)),
}


def _outcome(operate: Callable[[], Any]) -> ManifestsError | None:
    """The error it ended with; only those of this package are let through."""
    try:
        operate()
    except ManifestsError as error:
        return error
    return None


def _check(site: Site, kind: str, fault: str, times: str) -> None:
    url, operation = site.fresh(), KINDS[kind]
    repo = zm.open(site.through(url))
    repo.readonly_session()
    site.proxy.strike(kind, fault, TIMES[times])
    error = _outcome(lambda: OPERATIONS[operation](repo))
    struck = site.proxy.struck
    site.proxy.strike(kind, fault, TIMES[times])
    read: list[list[int]] = []
    unread = _outcome(lambda: read.append(_values(zm.open(site.through(url)))))
    site.proxy.calm()

    assert struck, "the fault came to nothing"
    if times != "always":
        assert (error, unread) == (None, None)
    after = zm.open(site.past(url))
    values = _values(after)
    if operation == "commit" and isinstance(error, CommitOutcomeUnknownError):
        assert values in (OLD.tolist(), NEW.tolist())
        assert unread is not None or read[0] in (OLD.tolist(), values)  # it may land after that
    else:
        landed = operation == "commit" and error is None
        assert values == (NEW if landed else OLD).tolist()
        assert unread is not None or read == [values]
    _set(after, NEXT)
    after.garbage_collect(grace=timedelta(0))
    assert _values(zm.open(site.past(url))) == NEXT.tolist()
    report = after.verify()
    assert report.ok, report


@pytest.mark.parametrize(("kind", "fault", "times"), SOME)
def test_a_fault_of_the_network_loses_nothing(
    site: Site, kind: str, fault: str, times: str
) -> None:
    _check(site, kind, fault, times)


@pytest.mark.faults
@pytest.mark.parametrize(("kind", "fault", "times"), [c for c in CASES if c not in SOME])
def test_no_fault_of_the_network_loses_anything(
    site: Site, kind: str, fault: str, times: str
) -> None:
    _check(site, kind, fault, times)


def test_a_listing_that_breaks_off_goes_on_where_it_was(site: Site) -> None:
    url = site.fresh()
    keys = [f"listed/{number:04d}" for number in range(2500)]
    for key in keys:
        site.store.objects[f"{url.removeprefix('s3://')}/{key}"] = b""
    listed = site.through(url).list("listed/")
    found = [next(listed).key]
    site.proxy.strike("listing", "end in body", 2)
    found += [info.key for info in listed]
    first, second = site.proxy.struck
    assert "listed/0999" not in first
    assert "start-after" in second
    assert "listed%2F0999" in second
    assert found == keys
