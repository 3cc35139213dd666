"""Bytes of the chunks that are likely to be read next, fetched before anybody asks for them.

Zarr asks for ten chunks at a time, by default, and for the next ones once it has some of them. From
far away, that is ten small requests in flight at most. So where chunks are read in order (see
`read_ahead`), the next ones are fetched in spans of several megabytes, all at once.

Invariants:

- A caller waits only for a request that has begun: it sends one that no thread has taken yet, as
  the threads may all be waiting for it. Whatever goes wrong with a request, a caller reads its
  chunk by itself, and gets the error of that.
- Bytes are given to one caller, who verifies them. Two windows are held, each of at most
  `MOST_BYTES`.
- A forked child starts without.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Final

from zarr_manifests.engine.objects.coalescing import SPARE
from zarr_manifests.errors import ManifestsError
from zarr_manifests.format.chunk_table import NativeRef, VirtualRef
from zarr_manifests.format.virtual_sources import VirtualSource
from zarr_manifests.planning.tables.resolved_chunks import coalesce
from zarr_manifests.runtime import Runtime
from zarr_manifests.storage.protocol import Capabilities

MOST_BYTES: Final = 32 * 1024 * 1024


class BytesAhead:
    """Fetches chunks of one reader ahead.

    Parameters
    ----------
    read : callable
        `read(ref, start, length)` gives bytes of the object or file that a chunk is in.
    read_async : callable
        The same for an event loop.
    runtime : Runtime
        Runs requests in the background.
    capabilities : Capabilities
        Which ranges share a request.
    """

    def __init__(
        self,
        read: Callable[[NativeRef | VirtualRef, int, int], bytes],
        read_async: Callable[[NativeRef | VirtualRef, int, int], Awaitable[bytes]],
        runtime: Runtime,
        capabilities: Capabilities,
    ) -> None:
        self._read, self._read_async, self._runtime = read, read_async, runtime
        self._gap_bytes, self._span_bytes = capabilities.gap_bytes, capabilities.span_bytes
        self._pid = os.getpid()
        self._newest: dict[NativeRef | VirtualRef, _Span] = {}
        self._older: dict[NativeRef | VirtualRef, _Span] = {}

    def fetch(self, refs: Iterable[NativeRef | VirtualRef]) -> None:
        """Begin to fetch these chunks, up to `MOST_BYTES` of them."""
        if self._pid != os.getpid():
            self._pid, self._newest = os.getpid(), {}
        by_object: dict[tuple[str, int] | VirtualSource, list[NativeRef | VirtualRef]] = {}
        nbytes = 0
        for ref in refs:
            nbytes += ref.length
            if nbytes > MOST_BYTES:
                break
            where = ref.source if isinstance(ref, VirtualRef) else (ref.source, ref.number)
            by_object.setdefault(where, []).append(ref)
        window: dict[NativeRef | VirtualRef, _Span] = {}
        for chunks in by_object.values():
            for request in coalesce(
                [ref.offset for ref in chunks],
                [ref.length for ref in chunks],
                gap_bytes=self._gap_bytes,
                span_bytes=self._span_bytes,
                spare=SPARE,
            ):
                first = chunks[request.members[0]]
                what = first, request.start, request.length
                span = _Span(
                    partial(self._read, *what), partial(self._read_async, *what), request.start
                )
                window.update(dict.fromkeys((chunks[i] for i in request.members), span))
                with suppress(RuntimeError):  # no more threads: the program is ending
                    self._runtime.background(span.run)
        self._older, self._newest = self._newest, window

    async def take(self, ref: NativeRef | VirtualRef) -> memoryview | None:
        """The chunk, not verified yet; None if it is to be read by itself."""
        if self._pid != os.getpid():
            return None
        span = self._newest.pop(ref, None) or self._older.pop(ref, None)
        return None if span is None else await span.take(ref)


class _Span:
    """One request, and what it has given."""

    def __init__(
        self, read: Callable[[], bytes], read_async: Callable[[], Awaitable[bytes]], start: int
    ) -> None:
        self._read, self._read_async, self._start = read, read_async, start
        self._found: Future[bytes] = Future()
        self._found.set_running_or_notify_cancel()  # a caller that is cancelled cancels no others
        self._sender: dict[str, object] = {}

    def _is_sent_by(self, who: object) -> bool:
        return self._sender.setdefault("", who) is who

    def run(self) -> None:
        """Send the request, unless a caller has."""
        if not self._is_sent_by(self):
            return
        data = b""
        try:
            with suppress(ManifestsError):  # who asks for a chunk reads it, and gets the error
                data = self._read()
        finally:
            self._found.set_result(data)

    async def take(self, ref: NativeRef | VirtualRef) -> memoryview | None:
        """The chunk, as a view of all bytes of the request; None if that has failed."""
        found = self._found
        if not found.done() and self._is_sent_by(ref):
            data = b""
            try:
                with suppress(ManifestsError):
                    data = await self._read_async()
            finally:
                found.set_result(data)
        import asyncio

        data = found.result() if found.done() else await asyncio.wrap_future(found)
        at = ref.offset - self._start
        return memoryview(data)[at : at + ref.length] if len(data) >= at + ref.length else None
