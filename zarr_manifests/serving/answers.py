"""Snapshots as plain Zarr over HTTP: values in pieces of bounded size, and errors with a status.

And what all requests share: the repository, open snapshots, threads, pieces of values, headers.

A 2-d slice of an array as float32, of bounded size however large the array is
------------------------------------------------------------------------------

Invariant: at most 512 by 512 values are sent, and at most 1,024 chunks are read for them, one at a
time. A slice with more cells is strided; the answer says by how much.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import lru_cache, partial
from itertools import groupby, product
from typing import Any, Final

import anyio
import anyio.to_thread
import google_crc32c
import numpy as np
import numpy.typing as npt
import xarray as xr
from anyio import from_thread
from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send
from xarray.conventions import decode_cf_variable

from zarr_manifests.bulk import document_of, open_here
from zarr_manifests.decoding import BulkDecoder, decoded_by, readable
from zarr_manifests.engine.overlay import SessionView
from zarr_manifests.errors import (
    CorruptObjectError,
    InvalidArgumentError,
    ManifestsError,
    NotARepositoryError,
    NotFoundError,
    SnapshotExpiredError,
    StorageError,
    plain_text,
)
from zarr_manifests.exporting import V2_CONSOLIDATED, consolidated
from zarr_manifests.format.chunk_table import ChunkRef, InlineRef, NativeRef
from zarr_manifests.format.manifest import Node, NodeKind
from zarr_manifests.ids import is_snapshot_id
from zarr_manifests.keys import (
    DOCUMENTS,
    V2_ARRAY,
    V2_GROUP,
    V3_DOCUMENT,
    absolute,
    directory,
    split,
)
from zarr_manifests.repository import Repository, containers_of, resolved
from zarr_manifests.runtime import ForkSafeLock, quiet
from zarr_manifests.selecting import chosen_axes
from zarr_manifests.store import ManifestStore, contents_of

PIECE_BYTES: Final = 8 * 1024**2
"""A larger value is read in pieces of this size."""
_SENT_BYTES: Final = 256 * 1024
_SENDING_S: Final = 120
"""A reader that takes no byte for so long is given up."""
_MOST_CONSOLIDATED: Final = 64 * 1024**2
_DOCUMENTS: Final = 4
_SLICES: Final = 4
"""Slices made at a time."""
_CHECKED: Final = 4096
_JSON: Final = frozenset([*DOCUMENTS, V2_CONSOLIDATED])
_FOREVER: Final = "max-age=31536000, immutable"
_RANGE: Final = re.compile(
    r"bytes[ \t]*=[ \t]*([0-9]{0,18})-([0-9]{0,18})[ \t]*", re.ASCII | re.IGNORECASE
)

_THREADS: Final = 32
_PIECES: Final = 32
"""Pieces of values that requests hold at a time: 256 MiB; who wants another waits."""
_FEW_BYTES: Final = 64 * 1024
"""A value of so few bytes does not count."""
_OPEN_SNAPSHOTS: Final = 16
_TIME: Final = re.compile(r"(@\{[^{}]*\})")


def version_of(text: str) -> str:
    """The version that a part of a URL names, where a `:` stands for a `/`.

    Examples
    --------
    >>> from zarr_manifests.serving.answers import version_of
    >>> version_of("fix:winds~1"), version_of("main@{2026-11-01T12:00}")
    ('fix/winds~1', 'main@{2026-11-01T12:00}')
    """
    name, *time = _TIME.split(text, 1)
    return name.replace(":", "/") + "".join(time[:1]) + "".join(time[1:]).replace(":", "/")


def etag_of(data: bytes) -> str:
    """The etag of bytes, or of what says which bytes are meant."""
    return f'"{hashlib.blake2b(data, digest_size=16).hexdigest()}"'


def lasting(*, fixed: bool) -> dict[str, str]:
    """The header that says how long an answer holds: for ever, if it is of a fixed snapshot."""
    return {"Cache-Control": _FOREVER if fixed else "no-cache"}


def caching(request: Request, etag: str | None, *, fixed: bool) -> dict[str, str]:
    """The headers of a value that a reader may keep; without an etag, it may change.

    Raises
    ------
    HTTPException
        If the reader has the value with this etag already; its status is 304.
    """
    if etag is None:
        return lasting(fixed=False)
    headers = {**lasting(fixed=fixed), "ETag": etag}
    known = request.headers.get("if-none-match", "").split(",")
    if not {"*", etag}.isdisjoint(tag.strip().removeprefix("W/") for tag in known):
        raise HTTPException(304, headers=headers)
    return headers


def part_of(header: str | None, total: int) -> tuple[int, int] | None:
    """Start and end of the requested part of `total` bytes, as RFC 9110 has it; None for all.

    All are sent if there is no range, it is malformed or of another unit, or there are several.

    Raises
    ------
    HTTPException
        If no byte is in the range; its status is 416.

    Examples
    --------
    >>> from zarr_manifests.serving.answers import part_of
    >>> part_of("bytes=2-5", 10), part_of("bytes=8-", 10), part_of("bytes=-3", 10)
    ((2, 6), (8, 10), (7, 10))
    >>> part_of("bytes=0-1, 4-5", 10) is None
    True
    """
    found = _RANGE.fullmatch(header or "")
    first, last = found.groups() if found else ("", "")
    if not (first or last) or (first and last and int(last) < int(first)):
        return None
    start = int(first) if first else max(total - int(last), 0)
    end = int(last) + 1 if first and last else total
    if start >= total:
        beyond = {"Content-Range": f"bytes */{total}", "Cache-Control": "no-cache"}
        raise HTTPException(416, "the range is beyond the end", beyond)
    return start, min(end, total)


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
    return PlainTextResponse(f"{text_of(error)}\n", status_of(error), {"Cache-Control": "no-store"})


def text_of(error: ManifestsError) -> str:
    """What a client is told of an error: of a version, not where the server looked for it."""
    gone = "there is no such version, or it has expired: the first page of the server lists them"
    return gone if isinstance(error, SnapshotExpiredError) else str(error)


class _Value(Struct, frozen=True):
    """The value at a key of a snapshot, and its etag, if what is stored says which bytes it is."""

    key: str
    contents: SessionView
    ref: ChunkRef
    etag: str | None

    def read(self, start: int, length: int) -> bytes:
        return self.contents.guarded(lambda: self.contents.reader.read(self.ref, start, length))


def _etag(ref: ChunkRef) -> str | None:
    if isinstance(ref, InlineRef):
        return etag_of(ref.data)
    if isinstance(ref, NativeRef):
        return etag_of(repr((ref.key, ref.offset, ref.length, ref.crc32c)).encode())
    source = ref.source
    if not source.is_dated:  # a checksum is of the whole: parts of the file may change unnoticed
        return None
    file = source.location, source.etag, source.modified_ms, source.nbytes
    return etag_of(repr((*file, ref.offset, ref.length, ref.crc32c)).encode())


class Answers:
    """Answers with documents and chunks of snapshots, and, a few at a time, slices of arrays.

    Documents of groups hold the metadata of all below them, so that readers need no listing.
    Thread-safe.

    Parameters
    ----------
    repo : Repository
        The repository that is served.
    """

    def __init__(self, repo: Repository) -> None:
        self.repo = repo
        self._pieces = anyio.CapacityLimiter(_PIECES)
        self._threads = anyio.CapacityLimiter(_THREADS)
        self._session = lru_cache(_OPEN_SNAPSHOTS)(repo.readonly_session)
        self._making = ForkSafeLock()
        self._slices = anyio.CapacityLimiter(_SLICES)
        self._document = lru_cache(_DOCUMENTS)(_consolidated)
        self._sound: set[str] = set()

    def opened(self, version: str) -> SessionView:
        """The snapshot of a version.

        Raises
        ------
        SnapshotExpiredError
            If there is none, or none any more.
        InvalidArgumentError
            If it is no name of a version, or ambiguous.
        """
        try:
            found = version if is_snapshot_id(version) else resolved(self.repo, version)
            return contents_of(self._session(found).store)
        except NotFoundError as error:  # a branch that was deleted reads as nothing, not as empty
            raise SnapshotExpiredError(str(error)) from error

    async def run[R](self, call: Callable[[], R]) -> R:
        """The result of a call that blocks, in one of a bounded number of threads."""
        return await anyio.to_thread.run_sync(call, limiter=self._threads)

    async def value(self, request: Request) -> Any:
        """The value at a key."""
        version, key = (
            version_of(request.path_params["version"]),
            request.path_params.get("key", ""),
        )
        contents, found = await self.run(partial(self._find, version, key))
        fixed = is_snapshot_id(version)
        if found is None:
            snapshot_id = contents.view.snapshot_id
            text = f"there is nothing at {plain_text(key)!r} in snapshot {snapshot_id}"
            raise HTTPException(404, text, lasting(fixed=fixed))
        return self._answer(request, found, fixed=fixed)

    def _find(self, version: str, key: str) -> tuple[SessionView, _Value | None]:
        contents = self.opened(version)
        ref: ChunkRef | None = None
        if _is_of_group(contents, key):
            with self._making:  # once for all who ask for it now
                ref = self._document(contents, key)
        if ref is None and key:
            ref = contents.guarded(lambda: contents.find(key))
        return contents, None if ref is None else _Value(key, contents, ref, _etag(ref))

    def _answer(self, request: Request, value: _Value, *, fixed: bool) -> Any:
        """The value, or the part of it that the request is for."""
        headers = {"Accept-Ranges": "bytes", **caching(request, value.etag, fixed=fixed)}
        wanted = request.headers.get("range") if request.method == "GET" else None
        if "if-range" in request.headers and request.headers["if-range"] != value.etag:
            wanted = None  # the reader has a part of another value
        part = part_of(wanted, value.ref.length)
        start, end = part or (0, value.ref.length)
        headers["Content-Length"] = str(end - start)
        if part is not None:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{value.ref.length}"
        media = "application/json" if split(value.key)[1] in _JSON else "application/octet-stream"
        head = Response(None, 200 if part is None else 206, headers, media)
        return head if request.method == "HEAD" else partial(self._send, value, start, end, head)

    async def _send(
        self,
        value: _Value,
        start: int,
        end: int,
        head: Response,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Send a part of a value, and hold at most a piece of it at a time."""
        is_small, is_whole = value.ref.length <= PIECE_BYTES, (start, end) == (0, value.ref.length)
        async with self._pieces if value.ref.length > _FEW_BYTES else nullcontext():
            # What is read in one piece is checked by that. All errors come before the status.
            if is_small != is_whole:
                await self.run(partial(self._check, value))
            for at in range(start, end, PIECE_BYTES) or [end]:
                data = b""  # before the next piece is here
                if at < end:
                    data = await self.run(partial(value.read, at, min(PIECE_BYTES, end - at)))
                if at == start:
                    status = {"status": head.status_code, "headers": head.raw_headers}
                    await send({"type": "http.response.start", **status})
                for sent in range(0, len(data), _SENT_BYTES):
                    part = data[sent : sent + _SENT_BYTES]
                    with anyio.fail_after(_SENDING_S):
                        await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    def _check(self, value: _Value) -> None:
        """Read a large value piece by piece, and compare its checksum; once, if it cannot change.

        Raises
        ------
        CorruptObjectError
            If it does not match.
        """
        if isinstance(value.ref, InlineRef) or value.etag in self._sound:
            return
        found = 0
        for start in range(0, value.ref.length, PIECE_BYTES):
            length = min(PIECE_BYTES, value.ref.length - start)
            found = google_crc32c.extend(found, value.read(start, length))
        if value.ref.crc32c is not None and found != value.ref.crc32c:
            raise CorruptObjectError(f"what is stored for {value.key} does not match its checksum")
        if value.etag is not None:
            if len(self._sound) >= _CHECKED:
                self._sound.clear()
            self._sound.add(value.etag)

    async def slice(self, request: Request) -> Response:
        """A slice: a header as JSON, then float32."""
        version, path = version_of(request.path_params["version"]), request.path_params["path"]
        index = request.query_params.get("index")
        contents = await self.run(partial(self.opened, version))
        etag: str | None = etag_of(repr((contents.view.snapshot_id, path, index)).encode())
        if containers_of(self.repo):
            etag = None  # files elsewhere may change, and not all references say which are meant
        headers = caching(request, etag, fixed=is_snapshot_id(version))
        read = partial(contents.guarded, partial(read_slice, contents, path, index))
        async with self._slices:
            data = await self.run(read)
        return Response(data, headers=headers, media_type="application/octet-stream")


def _is_of_group(contents: SessionView, key: str) -> bool:
    """Whether the key is that of a document that holds the metadata of all below a group."""
    path, name = split(key)
    if name not in (V3_DOCUMENT, V2_CONSOLIDATED) or key.startswith("/"):
        return False
    node = contents.guarded(lambda: contents.node(path))
    needed = V3_DOCUMENT if name == V3_DOCUMENT else V2_GROUP
    return node is not None and node.kind is NodeKind.GROUP and needed in node.documents


def _consolidated(contents: SessionView, key: str) -> InlineRef | None:
    """The document of a group; None if it is too large, or has members that are no JSON."""
    path = split(key)[0]
    nodes = dict(sorted(contents.guarded(lambda: contents.within(path)).items()))
    size = sum(len(document) for one in nodes.values() for document in one.documents.values())
    if size > _MOST_CONSOLIDATED:
        return None  # readers ask for each member
    data = dict(consolidated(nodes, path)).get(key)
    return None if data is None else InlineRef(data)


# --- slices -------------------------------------------------------------------------------------


MOST_VALUES: Final = 512
MOST_CHUNKS: Final = 1024
MOST_CHUNK_BYTES: Final = 128 * 1024**2
_PLACE_BYTES: Final = 64
"""What the index of a shard takes in memory for each of its chunks."""


def axes_of(index: str | None, shape: Sequence[int]) -> list[int | range]:
    """The positions that an index such as `0,100:200,:` selects, with steps that leave at most 512.

    Without an index, these are the last two axes at the first position of the others.

    Raises
    ------
    InvalidArgumentError
        If the index does not fit, or leaves more than two axes.

    Examples
    --------
    >>> from zarr_manifests.serving.answers import axes_of
    >>> axes_of("-1,:,2:8:3", (10, 600, 20))
    [9, range(0, 600, 2), range(2, 8, 3)]
    """
    if index is None:
        index = ",".join([*["0"] * (len(shape) - 2), "..."])
    axes = [
        axis if isinstance(axis, int) else axis[:: max(-(-len(axis) // MOST_VALUES), 1)]
        for axis in chosen_axes(index, shape)
    ]
    if sum(isinstance(axis, range) for axis in axes) > 2:
        raise InvalidArgumentError("a slice has at most two axes: give numbers for the others")
    return axes


def read_slice(contents: SessionView, path: str, index: str | None) -> bytes:
    """A slice of the array at the path, as xarray decodes it by its CF attributes.

    It is read in a thread of anyio, and ends between two chunks when its caller is cancelled.

    Returns
    -------
    bytes
        Four bytes with the header's length, the header as JSON (snapshot, path, shape, axes with
        coordinates, units, bounds of the values), then the values as float32, NaN where they are
        missing; little endian.

    Raises
    ------
    NotFoundError
        If there is no such array.
    InvalidArgumentError
        If the index does not fit it, it holds no numbers, its chunks are too large, or its
        attributes mean nothing to xarray.
    MissingChunkError, CorruptObjectError
        If a chunk is missing or damaged.
    """
    node = contents.array_at(path)
    array = _opened(contents, node)
    if array.dtype.kind not in "biufmM":
        raise InvalidArgumentError(
            f"{absolute(node.path)} holds {array.dtype}, which are no numbers"
        )
    wanted = axes_of(index, array.shape)
    axes = [range(axis, axis + 1) if isinstance(axis, int) else axis for axis in wanted]
    axes = _sparse(axes, array.chunks)
    found = _decoded(node, array, _read(node, array, axes), decode_times=False)
    values = found.values
    if values.dtype.kind in "mM":
        values = np.where(np.isnat(values), np.nan, values.astype("i8"))
    with np.errstate(over="ignore"):
        values = values.astype("<f4")
    names = (node.array and node.array.dimension_names) or (None,) * len(axes)
    told = [
        {
            "axis": at,
            "name": name,
            "size": size,
            "start": axis.start,
            "step": axis.step,
            "count": len(axis),
            **_coordinate(contents, node, name, axis, size),
        }
        for at, (name, size, axis) in enumerate(zip(names, array.shape, axes, strict=True))
    ]
    shown = [one for one, axis in zip(told, wanted, strict=True) if isinstance(axis, range)]
    finite = values[np.isfinite(values)]
    header = {
        "snapshot": contents.view.snapshot_id,
        "path": absolute(node.path),
        "shape": [one["count"] for one in shown],
        "at": [axis if isinstance(axis, int) else None for axis in wanted],
        "axes": shown,
        "fixed": [one for one in told if one not in shown],
        "minimum": float(finite.min()) if finite.size else None,
        "maximum": float(finite.max()) if finite.size else None,
        "missing": values.size - finite.size,
        **_texts(found, "units", "long_name"),
    }
    data = json.dumps(header, allow_nan=False).encode()
    data += b" " * (-len(data) % 4)
    return struct.pack("<I", len(data)) + data + values.tobytes()


def _opened(contents: SessionView, node: Node) -> Any:
    """An array of chunks that are not too large, and not decompressed to more than it has."""
    with readable(node.path):
        array = open_here(ManifestStore(contents, read_only=True), node.path)
        decoder = BulkDecoder.of(document_of(node, V2_ARRAY), array.dtype)
    if decoder is None:
        raise InvalidArgumentError(
            f"{absolute(node.path)} is not shown: a few bytes may become any number by codecs that "
            "are not known here, and the memory of a server is bounded. Read it with Zarr"
        )
    index = 0 if decoder.shards is None else _PLACE_BYTES * math.prod(decoder.shards.counts)
    size = math.prod(array.chunks) * array.dtype.itemsize + index
    if size > MOST_CHUNK_BYTES:
        what = "a chunk and the index of its shard have" if index else "a chunk has"
        raise InvalidArgumentError(
            f"{what} up to {size:,} bytes in {absolute(node.path)}, and slices are made of at "
            f"most {MOST_CHUNK_BYTES:,} at a time"
        )
    return array


def _sparse(axes: list[range], chunks: Sequence[int]) -> list[range]:
    """The axes with so large steps that not too many chunks are read."""
    while True:
        counts = [len({at // size for at in axis}) for axis, size in zip(axes, chunks, strict=True)]
        if math.prod(counts) <= MOST_CHUNKS:
            return axes
        widest = counts.index(max(counts))
        axes = [axis[::2] if at == widest else axis for at, axis in enumerate(axes)]


def _read(node: Node, array: Any, axes: Sequence[range]) -> npt.NDArray[Any]:
    """The stored values, read chunk by chunk."""
    out = np.empty([len(axis) for axis in axes], array.dtype)
    with readable(node.path):
        for part in product(*map(_parts, axes, array.chunks)):
            from_thread.check_cancelled()  # the client is gone
            out[tuple(to for to, _ in part)] = array[tuple(where for _, where in part)]
    return out


def _parts(axis: range, chunk: int) -> Iterator[tuple[slice, slice]]:
    """For each chunk that holds cells: where they go, and where they are."""
    for _, group in groupby(range(len(axis)), lambda at: axis[at] // chunk):
        at = [*group]
        yield slice(at[0], at[-1] + 1), slice(axis[at[0]], axis[at[-1]] + 1, axis.step)


def _decoded(node: Node, array: Any, stored: npt.NDArray[Any], **how: Any) -> xr.Variable:
    """Stored values as xarray decodes them, with the attributes that remain."""
    with readable(node.path), quiet():
        dims = [f"axis {at}" for at in range(stored.ndim)]
        raw = xr.Variable(dims, stored, decoded_by(array))
        return decode_cf_variable(node.path, raw, decode_timedelta=False, **how).load()


def _texts(variable: xr.Variable, *names: str) -> dict[str, str | None]:
    found = {name: variable.attrs.get(name) for name in names}
    return {name: text[:200] if isinstance(text, str) else None for name, text in found.items()}


def _beside(contents: SessionView, node: Node, name: str | None) -> Node | None:
    """The array of that name in the group of the node, or in one above."""
    path = node.path
    while name and path:
        path = split(path)[0]
        if (found := contents.node(directory(path) + name)) is not None:
            return found
    return None


def _coordinate(
    contents: SessionView, of: Node, name: str | None, axis: range, size: int
) -> dict[str, Any]:
    """The values of the coordinate along an axis of a node, if it has one that can be read."""
    node = _beside(contents, of, name)
    if node is not None and node.array is not None and node.array.shape == (size,):
        with suppress(InvalidArgumentError):
            array = _opened(contents, node)
            if array.dtype.kind in "iufM":
                stored = _read(node, array, [axis])
                found = _decoded(node, array, stored)
                values = found.values.astype("M8[s]") if found.dtype.kind == "M" else found.values
                told = _texts(found, "units", "long_name", "positive")
                return {"values": [_plain(value) for value in values.tolist()], **told}
    return {"values": None, "units": None}


def _plain(value: Any) -> str | float | None:
    """A number or a time for JSON; None if it is missing."""
    if hasattr(value, "isoformat"):
        return str(value.isoformat())
    return value if isinstance(value, int | float) and math.isfinite(value) else None
