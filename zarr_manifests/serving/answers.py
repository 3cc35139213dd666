"""Answers over HTTP: values in pieces of bounded size, errors with the status that fits them."""

from __future__ import annotations

from functools import partial
from typing import Final

import anyio
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from zarr_manifests.error_cases import NotARepositoryError
from zarr_manifests.errors import (
    InvalidArgumentError,
    ManifestsError,
    NotFoundError,
    SnapshotExpiredError,
    StorageError,
)
from zarr_manifests.serving.http_ranges import RangeError, part_of
from zarr_manifests.serving.served import Served
from zarr_manifests.serving.values import PIECE_BYTES, Value

__all__ = ["answer", "caching", "failed", "lasting", "not_modified", "status_of"]

_SENT_BYTES: Final = 256 * 1024
_SENDING_S: Final = 120
"""A reader that takes no byte for so long is given up."""
_FOREVER: Final = "max-age=31536000, immutable"


def lasting(*, fixed: bool) -> dict[str, str]:
    """The header that says how long an answer holds: for ever, if it is of a fixed snapshot."""
    return {"Cache-Control": _FOREVER if fixed else "no-cache"}


def caching(etag: str | None, *, fixed: bool) -> dict[str, str]:
    """The headers of a value that a reader may keep; without an etag, it may change."""
    return lasting(fixed=False) if etag is None else {**lasting(fixed=fixed), "ETag": etag}


def not_modified(request: Request, etag: str | None) -> bool:
    """Whether the reader has the value with this etag already."""
    known = request.headers.get("if-none-match")
    if known is None or etag is None:
        return False
    tags = {tag.strip().removeprefix("W/") for tag in known.split(",")}
    return "*" in tags or etag in tags


def answer(request: Request, served: Served, value: Value, *, fixed: bool) -> Response:
    """The value, or the part of it that the request is for."""
    headers = {"Accept-Ranges": "bytes", **caching(value.etag, fixed=fixed)}
    if not_modified(request, value.etag):
        return Response(status_code=304, headers=headers)
    wanted = request.headers.get("range") if request.method == "GET" else None
    if "if-range" in request.headers and request.headers["if-range"] != value.etag:
        wanted = None  # the reader has a part of another value
    try:
        part = part_of(wanted, value.length)
    except RangeError:
        beyond = {"Content-Range": f"bytes */{value.length}", "Cache-Control": "no-cache"}
        return PlainTextResponse("the range is beyond the end", 416, beyond)
    if part is not None:
        headers["Content-Range"] = f"bytes {part[0]}-{part[1] - 1}/{value.length}"
    return _ValueResponse(served, value, part, headers)


class _ValueResponse(Response):
    """Sends a value, or a part of it, and holds at most a piece of it at a time."""

    def __init__(
        self, served: Served, value: Value, part: tuple[int, int] | None, headers: dict[str, str]
    ) -> None:
        self._served, self._value = served, value
        self._start, self._end = part or (0, value.length)
        headers = {**headers, "Content-Length": str(self._end - self._start)}
        super().__init__(None, 200 if part is None else 206, headers, value.media_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":
            await super().__call__(scope, receive, send)
            return
        run, value = self._served.run, self._value
        is_small = value.length <= PIECE_BYTES
        is_whole = (self._start, self._end) == (0, value.length)
        async with self._served.room.hold(min(value.length, PIECE_BYTES)):
            # What is read in one piece is checked by that. All errors come before the status.
            if is_small != is_whole:
                await run(value.check)
            starts = range(self._start, self._end, PIECE_BYTES)
            lengths = [min(PIECE_BYTES, self._end - at) for at in starts]
            data = await run(partial(value.read, starts[0], lengths[0])) if lengths else b""
            status = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **status})
            await _send_all(send, data)
            for at, length in zip(starts[1:], lengths[1:], strict=True):
                data = b""  # before the next piece is here
                data = await run(partial(value.read, at, length))
                await _send_all(send, data)
            await send({"type": "http.response.body", "body": b""})


async def _send_all(send: Send, data: bytes) -> None:
    """Send the bytes in parts, each when the reader has taken the one before."""
    for at in range(0, len(data), _SENT_BYTES):
        with anyio.fail_after(_SENDING_S):
            part = data[at : at + _SENT_BYTES]
            await send({"type": "http.response.body", "body": part, "more_body": True})


def status_of(error: ManifestsError) -> int:
    """The status of an error: "not found" only for what was never written."""
    match error:
        case SnapshotExpiredError():
            return 410
        case StorageError() | NotARepositoryError():
            return 503
        case NotFoundError():
            return 404
        case InvalidArgumentError():
            return 400
    return 500


async def failed(request: Request, error: Exception) -> Response:
    """The answer to a request that failed: the error as plain text."""
    assert isinstance(error, ManifestsError)
    return PlainTextResponse(f"{error}\n", status_of(error), {"Cache-Control": "no-store"})
