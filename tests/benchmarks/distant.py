"""Repositories that are read from far away: over HTTP from this machine, each answer delayed.

A server in a process of its own gives the files below a folder, whole or by range, lists them a
thousand at a time, as object stores do, and keeps the connections open. Both contestants read by
it: theirs with its own HTTP client, ours with the small one here, since what is compared is how
many requests wait for each other.
"""

from __future__ import annotations

import asyncio
import http.client
import http.server
import json
import multiprocessing
import threading
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from storages import WrappedStorage
from zarr_manifests.errors import ObjectNotFoundError
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.protocol import Capabilities, ObjectInfo, Tagged

_PAGE = 1000  # keys in an answer, as on S3


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    root: ClassVar[Path]
    delay_s: ClassVar[float]

    def do_GET(self) -> None:
        time.sleep(self.delay_s)
        self._answer(body=True)

    def do_HEAD(self) -> None:
        time.sleep(self.delay_s)
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        place, _, asked = self.path.partition("?")
        path = self.root / place.lstrip("/")
        if asked:
            data = self._listing(urllib.parse.parse_qs(asked))
        elif path.is_file():
            data = path.read_bytes()
        else:
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        total, wanted = len(data), self.headers.get("Range", "")
        if wanted.startswith("bytes="):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start = int(first) if first else max(total - int(last), 0)
            stop = min(int(last) + 1, total) if first and last else total
            data = data[start:stop]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{total}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if body:
            self.wfile.write(data)

    def _listing(self, asked: dict[str, list[str]]) -> bytes:
        (prefix,), after = asked["prefix"], asked.get("after", [""])[0]
        infos = LocalStorage(self.root).list(prefix, after)
        page = [(info.key, info.nbytes, info.modified_ms) for info in islice(infos, _PAGE)]
        return json.dumps(page).encode()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def _serve(pipe: Any, root: Path, delay_s: float) -> None:
    handler = type("Handler", (_Handler,), {"root": root, "delay_s": delay_s})
    with _Server(("127.0.0.1", 0), handler) as server:
        pipe.send(server.server_port)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            pipe.recv()
        except EOFError:
            return  # who asked for it has ended


@contextmanager
def served(root: Path, delay_ms: int) -> Iterator[int]:
    """The port of a server for that folder."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, root, delay_ms / 1000), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        ours.close()
        process.join(10)


class HttpStorage(WrappedStorage):
    """Reads a repository by HTTP; a connection for each thread, kept open."""

    def __init__(self, port: int, root: Path) -> None:
        super().__init__(LocalStorage(root))
        self._port = port
        self._local = threading.local()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(inline=False, durable=True, shared=True)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        if length == 0:
            return b""
        end = "" if length is None else start + length - 1
        ranged = {"Range": f"bytes={start}-{end}"} if start or length is not None else {}
        return self._asked(f"/{key}", ranged)

    def list(self, prefix: str = "", after: str = "") -> Iterator[ObjectInfo]:
        while True:
            query = urllib.parse.urlencode({"prefix": prefix, "after": after})
            page = json.loads(self._asked(f"/?{query}", {}))
            for info in page:
                yield ObjectInfo(*info)
            if len(page) < _PAGE:
                return
            after = page[-1][0]

    def _asked(self, path: str, headers: dict[str, str]) -> bytes:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = http.client.HTTPConnection("127.0.0.1", self._port)
            self._local.connection = connection
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        data = response.read()
        if response.status == 404:
            raise ObjectNotFoundError(f"there is no {path}")
        return data

    def get_tagged(self, key: str) -> Tagged:
        return Tagged(self.get(key), "1")

    async def get_async(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return await asyncio.to_thread(self.get, key, start, length)
