"""The application: its routes, who may read, and the headers that all answers have."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import anyio
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from zarr_manifests.errors import InvalidArgumentError, ManifestsError
from zarr_manifests.plain import plain_text
from zarr_manifests.repository import Repository, containers_of
from zarr_manifests.serving import web_pages
from zarr_manifests.serving.answers import answer, caching, failed, lasting, not_modified
from zarr_manifests.serving.folder_links import folder, folder_page
from zarr_manifests.serving.served import OpenSnapshot, Served
from zarr_manifests.serving.slices import read_slice
from zarr_manifests.serving.values import ServedValues, Value, etag_of

__all__ = ["LOOPBACK", "create_app"]

LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_LOOPBACK_ORIGIN: Final = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]+)?"
_HOST: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]]*))(?::[0-9]{1,5})?")
_SLICES: Final = 4
_HEADERS: Final = {
    b"content-security-policy": (
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        b"connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    b"referrer-policy": b"no-referrer",
    b"x-content-type-options": b"nosniff",
}
_FOLDER_POLICY: Final = "default-src 'none'; base-uri 'self'; frame-ancestors 'none'"
_STATIC: Final = Path(__file__).parent / "static"


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
    served = Served(repo)
    zarr, slices = _Zarr(served), _Slices(served)
    routes = [
        Route("/zarr/{version}", zarr.get, name="zarr-root"),
        Route("/zarr/{version}/{key:path}", zarr.get, name="zarr"),
        Route("/slice/{version}/{path:path}", slices.get, name="slice"),
        Mount("/static", StaticFiles(directory=_STATIC), name="static"),
        *web_pages.routes(served),
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
        Middleware(_WhileThere),
    ]
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={ManifestsError: failed, Exception: _unexpected},
    )
    # A path that is not known is 404, and never an address made of what was asked for.
    app.router.redirect_slashes = False
    return app


async def _unexpected(request: Request, error: Exception) -> Response:
    """The answer where the program itself is wrong; the server logs the error."""
    headers = {name.decode(): value.decode() for name, value in _HEADERS.items()}
    return PlainTextResponse("internal error\n", 500, {**headers, "Cache-Control": "no-store"})


class _Guard:
    """Lets a request in if its host and token are right, and adds headers to every answer."""

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

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(HTTPConnection(scope))
        await (refusal or self._app)(scope, receive, sent)

    def _refusal(self, request: HTTPConnection) -> Response | None:
        found = _HOST.fullmatch(request.headers.get("host", ""))
        host = (found[1] or found[2]).lower() if found else ""
        if self._hosts is not None and host not in self._hosts:
            return PlainTextResponse("this server does not answer to that host name\n", 421)
        if self._token is not None and not hmac.compare_digest(self._token, _given(request)):
            asked = {"WWW-Authenticate": 'Basic realm="zarr-manifests", charset="UTF-8"'}
            return PlainTextResponse("give the token, as password or bearer token\n", 401, asked)
        return None


class _WhileThere:
    """Cancels a request whose client is gone: one that waits at once, a slice at its next chunk."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with anyio.create_task_group() as group:

                async def watch() -> None:
                    while (await receive())["type"] != "http.disconnect":
                        pass  # the body, which no request needs
                    group.cancel_scope.cancel()

                group.start_soon(watch)
                await self._app(scope, receive, send)
                group.cancel_scope.cancel()
        except ExceptionGroup as wrapped:
            raise wrapped.exceptions[0] from None


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


class _Zarr:
    """Snapshots as plain Zarr: documents, chunks, and folders as pages of links."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._values = ServedValues()

    async def get(self, request: Request) -> Response:
        """The value at a key, or the links of a folder."""
        version, key = request.path_params["version"], request.path_params.get("key", "")
        opened, found = await self._served.run(partial(self._find, version, key))
        if isinstance(found, Value):
            return answer(request, self._served, found, fixed=opened.fixed)
        if found is None:
            text = f"there is nothing at {plain_text(key)!r} in snapshot {opened.snapshot_id}\n"
            return PlainTextResponse(text, 404, lasting(fixed=opened.fixed))
        page = folder_page(request.scope["raw_path"].decode("latin-1").rstrip("/") + "/", found)
        etag = etag_of(page.encode())
        headers = {**caching(etag, fixed=opened.fixed), "Content-Security-Policy": _FOLDER_POLICY}
        if not_modified(request, etag):
            return Response(status_code=304, headers=headers)
        return HTMLResponse(page, headers=headers)

    def _find(self, version: str, key: str) -> tuple[OpenSnapshot, Value | list[str] | None]:
        opened = self._served.opened(version)
        value = self._values.find(opened, key) if key else None
        if value is not None:
            return opened, value
        path = key.removesuffix("/")
        # A chunk that was never written is not a folder, whatever lies below its key.
        is_chunk = path == key and path and opened.contents.chunk_at(path) is not None
        return opened, None if is_chunk else folder(opened, path)


class _Slices:
    """Slices of arrays."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._few = anyio.CapacityLimiter(_SLICES)

    async def get(self, request: Request) -> Response:
        """A slice: a header as JSON, then float32."""
        version, path = request.path_params["version"], request.path_params["path"]
        index = request.query_params.get("index")
        opened = await self._served.run(partial(self._served.opened, version))
        etag: str | None = etag_of(repr((opened.snapshot_id, path, index)).encode())
        if containers_of(self._served.repo):
            etag = None  # files elsewhere may change, and not all references say which are meant
        headers = caching(etag, fixed=opened.fixed)
        if not_modified(request, etag):
            return Response(status_code=304, headers=headers)

        def read() -> bytes:
            return opened.contents.guarded(lambda: read_slice(opened, path, index).encoded())

        async with self._few:
            data = await self._served.run(read)
        return Response(data, headers=headers, media_type="application/octet-stream")
