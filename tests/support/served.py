"""A server of a repository on this machine, and a client that changes nothing of what it sends."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import uvicorn

import zarr_manifests as zm
from zarr_manifests.serving import create_app


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


@contextlib.contextmanager
def running(app: Any, **options: Any) -> Iterator[str]:
    """The URL of a server that runs the application during the block."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(
            app, http="h11", ws="none", lifespan="off", log_config=None, **options
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


@contextlib.contextmanager
def serving(repo: zm.Repository, **options: Any) -> Iterator[str]:
    """The URL of a server of the repository during the block."""
    with running(create_app(repo, **options)) as url:
        yield url


def get(url: str, path: str, method: str = "GET", **headers: str) -> Answer:
    """The answer to a request with exactly that path; `_` in the name of a header is a hyphen."""
    host = url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=60)
    try:
        connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        found = connection.getresponse()
        return Answer(found.status, {k.lower(): v for k, v in found.getheaders()}, found.read())
    finally:
        connection.close()
