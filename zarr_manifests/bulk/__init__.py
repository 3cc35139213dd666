"""Reads and writes of Zarr arrays in a session's store, many chunks at a time.

Zarr's pipelines go chunk by chunk: each asks the store for its key, which looks it up, reads it,
decodes it and copies it. Where the store is a `ManifestStore`, `BulkCodecPipeline` looks up all
keys in one step, reads neighbouring chunks together, verifies and decodes them in batches, and
copies each batch with a few assignments. Writes are merged, encoded and recorded in such batches.

Invariant: results and errors are those of Zarr's fused pipeline, which it extends. A request that
is not known here goes the fused way: another store, a codec or a type without a bulk decoder, an
output that is no plain array of the chunks' type, or irregular chunks. Only what decompresses to
more than a chunk has raises `CorruptObjectError` there, too, before it takes memory.

Zarr hands each call over to the thread of its loop, which hands chunks to a third one. Where the
storage does not wait and the request is one that is taken in bulk, nothing has to be awaited: the
coroutine ends at its first step. So `read_here` and `write_here` take it on the caller's thread.
Any other call goes Zarr's way.

Writes that read a chunk, or shard, change a part of it and write it take turns. Else, of two such
writes of one chunk in one session, the later one undoes the earlier one. A write takes the locks
of all its chunks in their order, so that no two wait for each other. Some chunks share a lock.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from contextvars import ContextVar, copy_context
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import zarr
from zarr.core.chunk_utils import ChunkTransform
from zarr.core.codec_pipeline import (
    BatchedCodecPipeline,
    FusedCodecPipeline,
    codecs_from_list_unchecked,
)
from zarr.registry import register_pipeline
from zarr.storage import StorePath

from zarr_manifests.bulk.batch import Batch, LazyPath, read, write_batch
from zarr_manifests.bulk.bounded import bounded, decoder_of
from zarr_manifests.decoding import BulkDecoder, InDoubtError, decoded_by, meaning_of_bounds
from zarr_manifests.display import attributes_of
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.keys import V2_ARRAY, V2_ATTRIBUTES, V3_DOCUMENT, join
from zarr_manifests.store import ManifestStore, contents_of, workspace_of

if TYPE_CHECKING:
    from zarr.abc.codec import Codec, GetResult
    from zarr.abc.store import ByteGetter, ByteSetter
    from zarr.core.array_spec import ArraySpec
    from zarr.core.buffer import NDBuffer
    from zarr.core.indexing import SelectorTuple

    from zarr_manifests.engine.overlay import SessionView
    from zarr_manifests.engine.workspace import Workspace
    from zarr_manifests.format.manifest import Node
    from zarr_manifests.keys import ArrayMeta

__all__ = ["use_bulk"]

_LOG: Final = logging.getLogger(__name__)
_MOST_FEW: Final = 4
_MOST_FEW_BYTES: Final = 64 * 1024
_MOST_PARSED: Final = 1024
_PARSED: Final[dict[bytes | None, Any]] = {}
_HERE: Final[ContextVar[bool]] = ContextVar("zarr_manifests_here", default=False)


class BulkCodecPipeline(FusedCodecPipeline):
    """Zarr's fused codec pipeline, faster for arrays in a `ManifestStore`.

    `zarr_manifests.tune_zarr` has Zarr use it for all arrays that are opened from then on. It may
    be set for the whole process, since arrays in other stores are read as by the fused pipeline.
    Zarr knows its name, for `codec_pipeline.path`, once `zarr_manifests.bulk` is imported.

    Examples
    --------
    >>> import zarr, zarr_manifests as zm
    >>> repo = zm.create("memory://bulk-example")
    >>> with zm.tune_zarr(), repo.transaction(message="fill") as store:
    ...     a = zarr.create_array(store, name="a", shape=(40,), chunks=(2,), dtype="i4")
    ...     a[:] = range(40)
    ...     int(a[:].sum())
    780
    >>> repo.metrics().bulk_batches
    2
    """

    _decoder: tuple[Any, BulkDecoder | None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The same before and after a read, since dask names arrays after their pickles.
        held = "_decoder", "_fused"
        return {name: value for name, value in vars(self).items() if name not in held}

    async def read(
        self,
        batch_info: Iterable[tuple[ByteGetter, ArraySpec, SelectorTuple, SelectorTuple, bool]],
        out: NDBuffer,
        drop_axes: tuple[int, ...] = (),
    ) -> tuple[GetResult, ...]:
        """Read chunks and copy what is selected of them to `out`."""
        items = list(batch_info)
        store = _store_of(items)
        if store is None:
            _go_there()
            return await super().read(items, out, drop_axes)
        with suppress(InDoubtError):
            batch = Batch.of(store, items, out, drop_axes)
            decoder, contents = self._decoder_for(batch), contents_of(store)
            few = len(items) <= _MOST_FEW and decoder.shards is None and contents.inline
            call = partial(read, contents, batch, decoder, few=few)
            # A thread would take longer than a few small chunks.
            here = is_here() or (few and batch.chunk_bytes <= _MOST_FEW_BYTES)
            results = call() if here else await asyncio.to_thread(call)
            _count(store, "bulk_batches")
            return results
        _go_there()
        _count(store, "bulk_fallbacks")
        return await self._fused.read(items, out, drop_axes)

    async def write(
        self,
        batch_info: Iterable[tuple[ByteSetter, ArraySpec, SelectorTuple, SelectorTuple, bool]],
        value: NDBuffer,
        drop_axes: tuple[int, ...] = (),
    ) -> None:
        """Write chunks: what is selected of them, from `value`."""
        items = list(batch_info)
        store = _store_of(items)
        if store is None:
            _go_there()
            return await super().write(items, value, drop_axes)
        keys = [where.path for where, *_, complete in items if not complete]  # type: ignore[attr-defined]
        write = partial(self._write, store, items, value, drop_axes)
        return await in_turn(locks_of(contents_of(store), keys), write)

    async def _write(
        self,
        store: ManifestStore,
        items: list[tuple[ByteSetter, ArraySpec, SelectorTuple, SelectorTuple, bool]],
        value: NDBuffer,
        drop_axes: tuple[int, ...],
    ) -> None:
        transform, workspace = self.sync_transform, _workspace_of(store)
        with suppress(InDoubtError):
            batch = Batch.of(store, items, value, drop_axes)
            decoder = self._decoder_for(batch)
            if decoder.shards is None and transform is not None and workspace is not None:
                few = len(items) <= _MOST_FEW and batch.chunk_bytes <= _MOST_FEW_BYTES
                call = partial(write_batch, workspace, batch, decoder, transform)
                if (few and workspace.contents.inline) or is_here():
                    call()
                else:
                    await asyncio.to_thread(call)
                _count(store, "bulk_batches")
                return
        _go_there()
        _count(store, "bulk_fallbacks")
        await self._fused.write(items, value, drop_axes)

    @cached_property
    def _fused(self) -> FusedCodecPipeline:
        """Zarr's pipeline, for a request that is not taken in bulk."""
        return _made(FusedCodecPipeline, bounded(self), self.batch_size)

    def _decoder_for(self, batch: Batch) -> BulkDecoder:
        """The decoder of the array's chunks, kept for the next request.

        Raises
        ------
        InDoubtError
            If Zarr has to decode them.
        """
        spec, known = batch.spec, self._decoder
        of = spec.shape, spec.dtype, spec.order
        if known is None or known[0] != of:
            known = of, decoder_of(self.codecs, self.array_bytes_codec, spec)
            object.__setattr__(self, "_decoder", known)
        decoder = known[1]
        # Of a few chunks of a shard, Zarr reads no others.
        if decoder is None or (decoder.shards is not None and not batch.wants_most):
            raise InDoubtError
        return decoder


def use_bulk(array: zarr.Array[Any]) -> None:
    """Have this array read and written in bulk, unless it has a pipeline that is not Zarr's own.

    Examples
    --------
    >>> import zarr, zarr_manifests as zm
    >>> from zarr_manifests.bulk import use_bulk
    >>> store = zm.create("memory://use-bulk-example").writable_session().store
    >>> a = zarr.create_array(store, name="a", shape=(4,), chunks=(2,), dtype="i4")
    >>> use_bulk(a)
    >>> type(a.async_array.codec_pipeline).__name__
    'BulkCodecPipeline'
    """
    held = array.async_array
    old = held.codec_pipeline
    if type(old) is BatchedCodecPipeline or type(old) is FusedCodecPipeline:
        # Not by Zarr's configuration, which all threads share. No more depends on the pipeline.
        object.__setattr__(
            held, "codec_pipeline", _made(BulkCodecPipeline, tuple(old), old.batch_size)
        )
    elif type(old) is not BulkCodecPipeline:
        return
    where = held.store_path
    if type(where) is StorePath and type(where.store) is ManifestStore:
        object.__setattr__(held, "store_path", LazyPath(where.store, where.path))


def _made[P: FusedCodecPipeline](kind: type[P], codecs: tuple[Codec, ...], batch_size: int) -> P:
    filters, serializer, compressors = codecs_from_list_unchecked(codecs)
    try:
        transform: ChunkTransform | None = ChunkTransform(codecs=codecs)
    except TypeError:  # as in Zarr: a codec can only be awaited
        transform = None
    return kind(
        codecs=codecs,
        array_array_codecs=filters,
        array_bytes_codec=serializer,
        bytes_bytes_codecs=compressors,
        sync_transform=transform,
        batch_size=batch_size,
    )


def _store_of(items: list[tuple[Any, ...]]) -> ManifestStore | None:
    """The store of a request; None if it is not one of ours."""
    where = items[0][0] if items else None
    if isinstance(where, StorePath) and type(where.store) is ManifestStore:
        return where.store
    return None


def _go_there() -> None:
    """Leave to Zarr's event loop what Zarr has to do."""
    if is_here():
        raise NotHereError


def _workspace_of(store: ManifestStore) -> Workspace | None:
    """Where to write many chunks; None if Zarr has to write, or to be refused, chunk by chunk."""
    if store.read_only or not store.supports_writes:
        return None
    workspace = workspace_of(store)
    return None if workspace.closed is not None or workspace.reports else workspace


def _count(store: ManifestStore, name: str) -> None:
    meter = contents_of(store).context.meter
    if name == "bulk_fallbacks" and not meter.read().bulk_fallbacks:
        _LOG.info("chunks are read and written one by one, as %s does", FusedCodecPipeline.__name__)
    meter.add(name)


register_pipeline(BulkCodecPipeline)
_BULK: Final = f"{BulkCodecPipeline.__module__}.{BulkCodecPipeline.__qualname__}"


def tune_zarr(*, concurrency: int = 64, threads: int | None = None) -> AbstractContextManager[Any]:
    """Set Zarr options that suit this store, for the whole process.

    The options take effect immediately. Used as a context manager, it restores them at the end.

    - `codec_pipeline.path`: `BulkCodecPipeline`, which takes all chunks of a request in one step.
      In other stores it works like Zarr's fused pipeline, which reads, decodes and copies each
      chunk on one thread, without an event loop.
    - `async.concurrency`: how many chunks of an array are requested at once from remote storage.
      Zarr's default of 10 leaves connections idle most of the time.
    - `codec_pipeline.max_workers`, if `threads` is given: how many threads decode the chunks of an
      array. Zarr's default is one for each processor, which helps if chunks take long to decode.
      For many chunks of a few kilobytes, one thread is two to three times as fast.

    Parameters
    ----------
    concurrency : int, default 64
        Chunks at once. Each chunk in flight takes memory for its bytes.
    threads : int, optional
        Threads of the pipeline; unchanged if not given.

    Returns
    -------
    context manager
        Restores the options on exit. Ignore it to keep them.

    Raises
    ------
    InvalidArgumentError
        If `concurrency` or `threads` is not an integer of at least 1.

    Examples
    --------
    >>> import zarr, zarr_manifests as zm
    >>> with zm.tune_zarr(concurrency=32):
    ...     zarr.config.get("async.concurrency")
    32
    >>> zarr.config.get("async.concurrency")
    10
    """
    for name, value in (("concurrency", concurrency), ("threads", threads)):
        if value is not None and (type(value) is not int or value < 1):
            raise InvalidArgumentError(f"{name} must be an integer of at least 1, not {value!r}")
    options: dict[str, Any] = {"codec_pipeline.path": _BULK, "async.concurrency": concurrency}
    if threads is not None:
        options["codec_pipeline.max_workers"] = threads
    changed: AbstractContextManager[Any] = zarr.config.set(options)
    return changed


# --- on the caller's thread --------------------------------------------------------------------


def open_here(store: ManifestStore, path: str) -> zarr.Array[Any]:
    """An array that is read in bulk, opened without Zarr's event loop; its session notes it.

    Raises
    ------
    NotFoundError
        If there is none.
    """
    contents = contents_of(store)
    node = contents.array_at(path)
    document, place = node.documents.get(V3_DOCUMENT), StorePath(store, node.path)
    for name in [V2_ARRAY, V2_ATTRIBUTES] if document is None else [V3_DOCUMENT]:
        contents.find(join(node.path, name))
    if (known := _PARSED.get(document)) is not None:
        found = zarr.Array(zarr.AsyncArray(metadata=known, store_path=place))
    else:
        found = zarr.Array.from_dict(place, document_of(node, V2_ARRAY))
        keep_parsed(document, found.metadata)
    use_bulk(found)
    return found


def keep_parsed(document: bytes | None, metadata: Any) -> None:
    """Keep a parsed document for the next time that this process opens such an array."""
    if document is None or getattr(metadata, "_stored_document", None) is not None:
        return  # of format 2, or one that Zarr has yet to repair
    if len(_PARSED) >= _MOST_PARSED:
        _PARSED.clear()
    _PARSED[document] = metadata


def document_of(node: Node, of_v2: str) -> dict[str, Any]:
    """The document of a node, with its attributes."""
    stored = node.documents
    found: dict[str, Any] = json.loads(stored.get(V3_DOCUMENT) or stored[of_v2])
    if V3_DOCUMENT not in stored:
        found["attributes"] = json.loads(stored.get(V2_ATTRIBUTES, b"{}"))
    return found


class NotHereError(Exception):
    """The request has to be awaited; nothing of it was done."""


def is_here() -> bool:
    """Whether the request is to be answered on this thread, or refused by `NotHereError`."""
    return _HERE.get()


def read_here(array: zarr.Array[Any]) -> npt.NDArray[Any]:
    """All values of an array that `use_bulk` was called with.

    Examples
    --------
    >>> import numpy as np, zarr, zarr_manifests as zm
    >>> from zarr_manifests.bulk import read_here, use_bulk
    >>> store = zm.create("memory://read-here-example").writable_session().store
    >>> a = zarr.create_array(store, name="a", data=np.array([1, 2, 3]))
    >>> use_bulk(a)
    >>> read_here(a)
    array([1, 2, 3])
    """
    held = array.async_array
    return np.asarray(_run(array, lambda: held.getitem(...), lambda: array[...]))


def write_here(array: zarr.Array[Any], place: Any, values: Any) -> None:
    """Do what `array[place] = values` does, for an array that `use_bulk` was called with.

    Examples
    --------
    >>> import numpy as np, zarr, zarr_manifests as zm
    >>> from zarr_manifests.bulk import use_bulk, write_here
    >>> store = zm.create("memory://write-here-example").writable_session().store
    >>> a = zarr.create_array(store, name="a", data=np.array([1, 2, 3]))
    >>> use_bulk(a)
    >>> write_here(a, (slice(1, None),), np.array([5, 6]))
    >>> a[:]
    array([1, 5, 6])
    """
    held = array.async_array
    _run(array, lambda: held.setitem(place, values), lambda: array.__setitem__(place, values))


def _run[T](
    array: zarr.Array[Any], here: Callable[[], Coroutine[Any, Any, T]], there: Callable[[], T]
) -> T:
    if not _may_be_here(array):
        return there()
    try:
        copy_context().run(_to_its_end, here)
    except StopIteration as ended:
        result: T = ended.value
        return result
    except NotHereError:
        pass
    return there()


def _to_its_end(start: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Take the first step of a coroutine, which is its only one; called in a copy of the context.

    The thread's own context stays as it is, so that an interrupt leaves nothing in it.
    """
    _HERE.set(True)
    with closing(start()) as coroutine:
        coroutine.send(None)


def _may_be_here(array: zarr.Array[Any]) -> bool:
    store = array.store
    if type(store) is not ManifestStore or not contents_of(store).inline:
        return False
    # Another pipeline than ours, which `use_bulk` leaves alone, may wait for Zarr's event loop.
    if type(array.async_array.store_path) is not LazyPath:
        return False
    # Of a document that Zarr had to repair, it stores the repair first, which it awaits.
    return getattr(array.metadata, "_stored_document", None) is None


class StoredArrays:
    """The arrays right below a group, opened and read here when they are asked for.

    Parameters
    ----------
    contents : SessionView
        The snapshot or the session.
    path : str
        Path of the group.

    Attributes
    ----------
    nodes : dict of str to Node
        The arrays by name; only those of the group's format, as in Zarr, or all if there is no
        document of the group.
    """

    def __init__(self, contents: SessionView, path: str) -> None:
        self._store = ManifestStore(contents, read_only=True)
        self._arrays: dict[str, zarr.Array[Any]] = {}
        self._values: dict[str, npt.NDArray[Any]] = {}
        self.nodes, self._group = contents.arrays_in(path), contents.node(path)

    def meta(self, name: str) -> ArrayMeta:
        """Shape, stored chunks (shards, if it has any) and names of the dimensions of an array."""
        return self.nodes[name].array_meta

    def sizes(self, name: str) -> dict[str, int]:
        """The lengths of an array by dimension; nothing if these have no names."""
        meta = self.meta(name)
        dims: Any = meta.dimension_names or ()
        return dict(zip(dims, meta.shape, strict=False))

    def array(self, name: str) -> zarr.Array[Any]:
        """An array, opened without Zarr's event loop, and read in bulk."""
        if name not in self._arrays:
            self._arrays[name] = open_here(self._store, self.nodes[name].path)
        return self._arrays[name]

    def values(self, name: str) -> npt.NDArray[Any]:
        """All stored values of an array."""
        if name not in self._values:
            self._values[name] = read_here(self.array(name))
        return self._values[name]

    @cached_property
    def own_attributes(self) -> dict[str, Any]:
        """The attributes of the group itself; none if it is not there."""
        return {} if self._group is None else attributes_of(self._group)

    @cached_property
    def attributes(self) -> dict[str, Mapping[str, Any]]:
        """The attributes of each array."""
        return {name: attributes_of(node) for name, node in self.nodes.items()}

    def meaning(self, name: str) -> dict[str, Any]:
        """The attributes of an array, with those that bounds take over."""
        return {**meaning_of_bounds(name, self.attributes.values()), **self.attributes[name]}

    def decoded_by(self, name: str) -> dict[str, Any]:
        """The attributes of an array as xarray sees them when it decodes the values."""
        return self.meaning(name) | decoded_by(self.array(name))


_LOCKS: Final = [threading.Lock() for _ in range(256)]
_PAUSE_S: Final = 0.001


def _renew() -> None:
    _LOCKS[:] = [threading.Lock() for _ in _LOCKS]


os.register_at_fork(after_in_child=_renew)


def locks_of(owner: object, keys: Iterable[str]) -> list[threading.Lock]:
    """The locks of a session's chunks, in the order in which to take them."""
    return [_LOCKS[at] for at in sorted({hash((id(owner), key)) % len(_LOCKS) for key in keys})]


async def in_turn(locks: Sequence[threading.Lock], write: Callable[[], Awaitable[None]]) -> None:
    """Write while holding the locks; an event loop goes on until they are free."""
    if not locks:
        await write()
    elif is_here():
        with locks[0]:
            await in_turn(locks[1:], write)
    else:
        while not locks[0].acquire(blocking=False):  # noqa: ASYNC110 - threads may hold it, too
            await asyncio.sleep(_PAUSE_S)
        try:
            await in_turn(locks[1:], write)
        finally:
            locks[0].release()
