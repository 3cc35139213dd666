"""Serving a repository over HTTP: any snapshot as plain Zarr, and pages to look at it.

Invariants: nothing is written; a response about a snapshot's id never changes; a chunk that is
referenced and cannot be had whole is an error of the server, never "not found"; the memory that
requests take is bounded, however many there are and however large the chunks.
"""
# What is not installed is said before it is imported:
# ruff: noqa: E402

from __future__ import annotations

from zarr_manifests.runtime import need

need(__name__, "serve", "starlette", "uvicorn", "jinja2", "xarray")

import base64
import binascii
import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from zarr_manifests.errors import InvalidArgumentError, ManifestsError, plain_text
from zarr_manifests.repository import Repository
from zarr_manifests.serving.answers import Answers, failed
from zarr_manifests.serving.web_pages import Pages

__all__ = ["create_app"]

LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_LOOPBACK_ORIGIN: Final = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]+)?"
_HOST: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]]*))(?::[0-9]{1,5})?")
_MOST_CONNECTIONS: Final = 1000
_END_S: Final = 5
_HEADERS: Final = {
    b"content-security-policy": (
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        b"connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    b"referrer-policy": b"no-referrer",
    b"x-content-type-options": b"nosniff",
}


def create_app(
    repo: Repository,
    *,
    token: str | None = None,
    hosts: Sequence[str] | None = LOOPBACK,
    origins: Sequence[str] = (),
) -> Starlette:
    """An ASGI application that serves a repository, for `serve` or any other ASGI server.

    Parameters
    ----------
    repo : Repository
        The repository; nothing is written to it.
    token : str, optional
        What every request must give, as a bearer token or as a password with any user name.
    hosts : sequence of str, optional
        Names that requests may give as the host, without a port; any if None. By default, those of
        this machine: otherwise, a page elsewhere could give this server a name of its own and read.
    origins : sequence of str
        Origins of pages elsewhere that may read, such as `https://viewer.example`, or `*` for all.
        Pages of this machine may always.

    Raises
    ------
    InvalidArgumentError
        If the token is empty.

    Examples
    --------
    >>> import zarr_manifests as zm
    >>> from zarr_manifests.serving import create_app
    >>> app = create_app(zm.create("memory://serving-example"), token="secret")
    >>> [route.path for route in app.routes if route.name in ("zarr", "slice")]
    ['/zarr/{version}/{key:path}', '/slice/{version}/{path:path}']
    """
    if token is not None and not token.strip():
        raise InvalidArgumentError("the token is empty; leave it out to serve without one")
    answers = Answers(repo)
    routes = [
        Route("/zarr/{version}", answers.value, name="zarr-root"),
        Route("/zarr/{version}/{key:path}", answers.value, name="zarr"),
        Route("/slice/{version}/{path:path}", answers.slice, name="slice"),
        Mount("/static", StaticFiles(directory=Path(__file__).parent / "static"), name="static"),
        *Pages(answers).routes(),
    ]
    middleware = [
        Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_origin_regex=_LOOPBACK_ORIGIN,
            allow_methods=["GET", "HEAD"],
            allow_headers=["Authorization", "If-None-Match", "If-Range", "Range"],
            expose_headers=["Accept-Ranges", "Content-Length", "Content-Range", "ETag"],
        ),
        Middleware(_Guard, token=token, hosts=hosts),
    ]
    app = Starlette(
        routes=routes, middleware=middleware, exception_handlers={ManifestsError: failed}
    )
    # A path that is not known is 404, and never an address made of what was asked for.
    app.router.redirect_slashes = False
    return app


class _Guard:
    """Lets a request in if its host and token are right, and adds headers to every answer.

    Cancels a request whose client is gone: one that waits at once, a slice at its next chunk.
    """

    def __init__(self, app: ASGIApp, token: str | None, hosts: Sequence[str] | None) -> None:
        self._app = app
        self._token = None if token is None else _digest(token.encode())
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                there = {name.lower() for name, _ in message["headers"]}
                more = [pair for pair in _HEADERS.items() if pair[0] not in there]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass  # the body, which no request needs
            group.cancel_scope.cancel()

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(watch)
                await (self._refusal(HTTPConnection(scope)) or self._app)(scope, receive, sent)
                group.cancel_scope.cancel()
        except ExceptionGroup as wrapped:
            raise wrapped.exceptions[0] from None

    def _refusal(self, request: HTTPConnection) -> Response | None:
        found = _HOST.fullmatch(request.headers.get("host", ""))
        host = (found[1] or found[2]).lower() if found else ""
        if self._hosts is not None and host not in self._hosts:
            return PlainTextResponse("this server does not answer to that host name\n", 421)
        if self._token is not None and not hmac.compare_digest(self._token, _given(request)):
            asked = {"WWW-Authenticate": 'Basic realm="zarr-manifests", charset="UTF-8"'}
            return PlainTextResponse("give the token, as password or bearer token\n", 401, asked)
        return None


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()  # of one length, so that a comparison tells nothing


def _given(request: HTTPConnection) -> bytes:
    """The digest of the token that the request gives."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    data = given.strip(" \t").encode("latin-1")  # a token in UTF-8 may end with other white space
    if scheme.lower() == "basic":
        try:
            data = base64.b64decode(data, validate=True).partition(b":")[2]
        except binascii.Error:
            data = b""
    elif scheme.lower() != "bearer":
        data = b""
    return _digest(data)


def serve(
    repo: Repository,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    token: str | None = None,
    origins: Sequence[str] = (),
    started: Callable[[str], None] | None = None,
) -> None:
    """Serve a repository over HTTP, read-only, until the process is interrupted.

    Parameters
    ----------
    repo : Repository
        The repository.
    host : str
        Address to listen on. Another than one of this machine needs a token.
    port : int
        The port; 0 for any that is free.
    token, origins
        As for `create_app`.
    started : callable, optional
        Called with the server's URL when it listens.

    Raises
    ------
    InvalidArgumentError
        If the host can be reached from elsewhere and there is no token, or the address cannot be
        listened on.

    Examples
    --------
    Listen for a moment, and stop as Ctrl-C does:

    >>> import zarr_manifests as zm
    >>> from zarr_manifests.serving import serve
    >>> repo = zm.create("memory://serve-example")
    >>> def stop(url):
    ...     print(url[:17])
    ...     raise KeyboardInterrupt
    >>> serve(repo, port=0, started=stop)
    http://127.0.0.1:
    """
    local = host == "localhost"
    with suppress(ValueError):
        local = local or ipaddress.ip_address(host).is_loopback
    if not local and token is None:
        raise InvalidArgumentError(
            f"host {plain_text(host)} can be reached from elsewhere: give a token, which readers "
            "must know; or serve on 127.0.0.1, behind a server that decides who may read"
        )
    app = create_app(repo, token=token, hosts=(*LOOPBACK, host) if local else None, origins=origins)
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_graceful_shutdown=_END_S,
    )
    with suppress(KeyboardInterrupt), _listening(host, port) as listener:
        if started is not None:
            name = f"[{host}]" if ":" in host else host
            started(f"http://{name}:{listener.getsockname()[1]}")
        uvicorn.Server(config).run(sockets=[listener])


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens at the address."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return socket.create_server(found[0][4][:2], family=found[0][0])
    except (OSError, OverflowError, UnicodeError) as error:
        raise InvalidArgumentError(
            f"cannot listen on {plain_text(host)} port {port}: {error}"
        ) from error
