"""`ManifestStore`: a session's contents as an ordinary Zarr store.

It is a full Zarr store (every key can be set, read, listed, deleted), asynchronous on every
storage and, where the storage is local or in memory, synchronous too: no event loop, no thread
hop, callable from any thread and inside a running loop. Consolidated metadata is not offered: it
would go stale and make every two writers conflict, and the hierarchy is read from one object
anyway.

Pickling a writable store gives the store of a fork: equal to the original, with names of its own
for what it writes, whose changes reach a commit only through `Session.merge`.
"""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import zarr
from numpy.typing import ArrayLike
from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.core.buffer.cpu import Buffer as CPUBuffer
from zarr.storage._utils import _normalize_byte_range_index

from zarr_manifests.engine.change_set import ForkState
from zarr_manifests.engine.forks import freeze, revive
from zarr_manifests.engine.overlay import Entry, SessionView, Unread, freeze_reader, revive_reader
from zarr_manifests.engine.workspace import INTERRUPTED, Workspace
from zarr_manifests.errors import ManifestsError, PickledStoreWarning, ReadOnlyError, plain_text
from zarr_manifests.format.chunk_table import NativeRef
from zarr_manifests.ids import snapshot_id_of
from zarr_manifests.keys import directory
from zarr_manifests.runtime import SYSTEM, ForkSafeLock, Runtime
from zarr_manifests.virtual.virtual_refs import VirtualRefs

_PICKLED: Final = (
    "a writable store was pickled, as dask does to write from other processes: what such a copy "
    "writes is in no commit unless it is merged. Write datasets with zarr_manifests.write, give "
    "tasks session.fork() and merge what comes back, compute in threads, or open the session with "
    "copies='report'. For reading, pickle the store of a read-only session"
)
_READ_ONLY: Final = "the session is read-only; open one with repo.writable_session(branch)"
_REVIVING = ForkSafeLock()
_BYTE = np.dtype(np.uint8)


class ManifestStore(Store):
    """The Zarr store of a session; made by `Session.store`, not by hand.

    Reading a chunk that is referenced and cannot be had whole and undamaged raises
    `MissingChunkError` or `CorruptObjectError`; only an absent chunk reads as None.

    Examples
    --------
    >>> import zarr, zarr_manifests as zm
    >>> repo = zm.create("memory://store-example")
    >>> session = repo.writable_session("main")
    >>> a = zarr.create_array(session.store, name="a", shape=(4,), chunks=(2,), dtype="i4")
    >>> a[:2] = 7
    >>> zarr.open_group(session.store, mode="r")["a"][:]
    array([7, 7, 0, 0], dtype=int32)
    """

    def __init__(
        self,
        contents: SessionView | Workspace | ForkState,
        *,
        read_only: bool,
        runtime: Runtime = SYSTEM,
    ) -> None:
        super().__init__(read_only=read_only)
        self._contents = contents
        self._runtime = runtime

    @property
    def _reads(self) -> SessionView:
        """The contents to read."""
        of = self._contents
        if isinstance(of, ForkState):
            of = self._opened()
        return of.contents if isinstance(of, Workspace) else of

    @property
    def _writes(self) -> Workspace:
        """The workspace of a writable session."""
        of = self._opened()
        if isinstance(of, SessionView):
            raise ReadOnlyError(_READ_ONLY)
        return of

    def _opened(self) -> SessionView | Workspace:
        """What to read or write; an unpickled store opens it at first use.

        Opening it earlier could fail while a task is unpickled, where workers report no error.
        """
        if isinstance(self._contents, ForkState):
            with _REVIVING:
                if isinstance(self._contents, ForkState):
                    opened = revive_reader if self._contents.lineage is None else revive
                    self._contents = opened(self._contents, self._runtime)
        return self._contents

    # --- properties --------------------------------------------------------------------------

    @property
    def supports_writes(self) -> bool:
        """Whether the store's session is writable."""
        *_, lineage, _ = self._identity()
        return lineage is not None

    @property
    def supports_deletes(self) -> bool:
        """Same as `supports_writes`."""
        return self.supports_writes

    @property
    def supports_listing(self) -> bool:
        """Always true."""
        return True

    @property
    def supports_consolidated_metadata(self) -> bool:
        """Always false; the module's docstring says why."""
        return False

    @property
    def _supports_sync_io(self) -> bool:
        """Zarr asks this before it uses `get_sync`, `set_sync` and `delete_sync`."""
        return self._reads.inline

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ManifestStore) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity()[:2])

    def __dask_tokenize__(self) -> object:
        # Without this, dask would pickle the store to name a graph.
        return (*self._identity(), id(self._contents) if self.supports_writes else 0)

    def _identity(self) -> tuple[Any, ...]:
        of = self._contents
        if isinstance(of, ForkState):
            return of.repository_id, of.storage.url, of.head.key, of.lineage, self.read_only
        of = of.contents if isinstance(of, Workspace) else of
        lineage = None if of.keys is None else of.keys.lineage
        url, head = of.context.storage.url, of.view.ref.key
        return of.context.repository_id, url, head, lineage, self.read_only

    def __repr__(self) -> str:
        _, url, head, *_ = self._identity()
        mode = "read-only" if self.read_only else "writable"
        return f"<ManifestStore {plain_text(url)} at {snapshot_id_of(head)}, {mode}>"

    def __reduce__(self) -> tuple[Any, ...]:
        of = self._contents
        if isinstance(of, Workspace) and not self.read_only and of.is_first_pickle:
            warnings.warn(_PICKLED, PickledStoreWarning, stacklevel=2)
        return _restore, (freeze_store(self, explicit=False), self.read_only)

    def __deepcopy__(self, memo: object) -> ManifestStore:
        return _restore(freeze_store(self, explicit=False), self.read_only)

    def __copy__(self) -> ManifestStore:
        return self.__deepcopy__(None)

    def with_read_only(self, read_only: bool = False) -> ManifestStore:
        """The same contents as a read-only or a writable store.

        Raises
        ------
        ReadOnlyError
            If a writable store of a read-only session is requested.
        """
        if not read_only and not self.supports_writes:
            raise ReadOnlyError(_READ_ONLY)
        return ManifestStore(self._opened(), read_only=read_only)

    def _to_write(self) -> Workspace:
        """The workspace, if it takes writes."""
        if self.read_only:
            # Zarr's own wording first: callers match on it.
            raise ReadOnlyError(
                "store was opened in read-only mode and does not support writing; write through "
                "a session of repo.writable_session(branch)"
            )
        workspace = self._writes
        workspace.check_open()
        return workspace

    # --- reading -----------------------------------------------------------------------------

    def get_sync(
        self,
        key: str,
        *,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """The value at the key, or the part of it; None if there is none."""
        contents = self._reads

        def read() -> Buffer | None:
            entry = contents.find(key)
            if entry is None:
                return None
            return _buffer(contents.reader.read(entry, *_span(entry, byte_range)), prototype)

        return contents.guarded(read)

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """The value at the key, or the part of it; None if there is none."""
        contents = self._reads
        view = contents.view
        try:
            # Run here if it does not wait, as for documents. A thread per call would double the
            # time, and neighbouring chunks request their bytes in one turn of the loop.
            if contents.inline:
                contents.look()
                entry = contents.find(key)
            else:
                found = contents.find_at_hand(key)
                if isinstance(found, Unread):
                    found = await asyncio.to_thread(contents.find_unread, key, found)
                entry = found
            if entry is None:
                return None
            if byte_range is None and not (contents.inline and isinstance(entry, NativeRef)):
                contents.fetch_ahead(key)
            data = await contents.reader.read_async(entry, *_span(entry, byte_range))
        except ManifestsError as error:
            if not await asyncio.to_thread(contents.moved_on, view, error):
                raise
            again = partial(self.get_sync, key, prototype=prototype, byte_range=byte_range)
            return await asyncio.to_thread(again)
        return _buffer(data, prototype)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """The values, or parts of them, in the requested order."""
        return list(
            await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges))
        )

    async def exists(self, key: str) -> bool:
        """Whether there is a value at the key."""
        return await self._run(self._reads.find, key) is not None

    async def getsize(self, key: str) -> int:
        """Size in bytes of the value at the key, without reading it."""
        entry: Entry | None = await self._run(self._reads.find, key)
        if entry is None:
            raise FileNotFoundError(plain_text(key))
        return entry.length

    # --- writing -----------------------------------------------------------------------------

    def set_sync(self, key: str, value: Buffer) -> None:
        """Write the value at the key."""
        workspace = self._to_write()
        try:
            workspace.set(key, _value(value, workspace.most_packed))
        except KeyboardInterrupt:
            workspace.closed = INTERRUPTED
            raise

    async def set(self, key: str, value: Buffer) -> None:
        """Write the value at the key."""
        workspace = self._to_write()
        if workspace.contents.inline:
            workspace.set(key, _value(value, workspace.most_packed))
        else:
            await workspace.set_async(key, bytes(_value(value, workspace.most_packed)))

    def delete_sync(self, key: str) -> None:
        """Remove the value at the key, if there is one."""
        workspace = self._to_write()
        try:
            workspace.contents.guarded(lambda: workspace.delete(key))
        except KeyboardInterrupt:
            workspace.closed = INTERRUPTED
            raise

    async def delete(self, key: str) -> None:
        """Remove the value at the key, if there is one."""
        await self._run(self._to_write().delete, key)

    async def delete_dir(self, prefix: str) -> None:
        """Remove all values below the directory."""
        await self._run(self._to_write().delete_below, directory(prefix.strip("/")))

    # --- references to bytes elsewhere -------------------------------------------------------

    def set_virtual_refs(
        self,
        array_path: str,
        index: ArrayLike,
        locations: Sequence[str],
        source: ArrayLike,
        offset: ArrayLike,
        length: ArrayLike,
        *,
        etags: Sequence[str | None] | None = None,
        modified: ArrayLike | None = None,
        sizes: ArrayLike | None = None,
        checksums: ArrayLike | None = None,
        unchanged_since: ArrayLike | None = None,
    ) -> None:
        """Make chunks of an array byte ranges of files elsewhere, all or none.

        The files are not read or checked. A later read fails if a file does not match.

        Parameters
        ----------
        array_path : str
            Path of the array.
        index : int[n, ndim]
            Chunk coordinates, in any order, none twice.
        locations : sequence of str
            Files, as URLs (`file://`, `s3://`, `gs://`, `az://`, `https://`, `http://`, `memory://`)
            or `virtual://<container>/<path>`. One that lies below a container of the repository is
            stored relative to it.
        source : int[n]
            Position of each chunk's file in `locations`.
        offset, length : int[n]
            Where each chunk is in its file, in bytes; at least one byte.
        etags : sequence of (str or None), optional
            ETags of the files.
        modified : int[len(locations)] or datetime64, optional
            The files' times of modification, in milliseconds since 1970 UTC; -1 or not-a-time
            where not known.
        sizes : int[len(locations)], optional
            Bytes of the files; -1 where not known.
        checksums : int[n], optional
            crc32c of each chunk; -1 where not known.
        unchanged_since : int[len(locations)] or datetime64, optional
            Times after which the files must not have been modified, in milliseconds since 1970 UTC;
            -1 or not-a-time where not known. For files whose exact time is not known, such as those
            that were examined after that time.

        Raises
        ------
        NotFoundError
            If there is no such array.
        InvalidArgumentError
            If the columns do not fit together or to the array's grid, or a location is malformed
            or has a user or a password in it.
        UnsupportedStorageError
            If the scheme of a location is not supported.
        ReadOnlyError
            If the store does not take writes.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> from zarr_manifests.storage.memory import MemoryStorage
        >>> MemoryStorage("virtual-files").put("a.bin", bytes(range(8)))
        >>> repo = zm.create(
        ...     "memory://virtual-example", virtual_containers={"raw": "memory://virtual-files"}
        ... )
        >>> store = repo.writable_session("main").store
        >>> a = zarr.create_array(
        ...     store, name="a", shape=(8,), chunks=(4,), dtype="u1", compressors=None
        ... )
        >>> store.set_virtual_refs(
        ...     "a", [[0], [1]], ["virtual://raw/a.bin"], [0, 0], [0, 4], [4, 4]
        ... )
        >>> a[:]
        array([0, 1, 2, 3, 4, 5, 6, 7], dtype=uint8)
        """
        workspace = self._to_write()
        node = workspace.contents.array_at(array_path)
        grid = node.array_meta.grid
        known: Any = etags, modified, sizes, checksums, unchanged_since
        given: Any = index, locations, source, offset, length
        table = VirtualRefs(*given, *known).to_table(grid, workspace.context.containers)
        if table is not None:
            workspace.put_table(node.path, grid, table)

    def get_virtual_refs(self, array_path: str) -> VirtualRefs:
        """The virtual chunks of an array, as the columns `set_virtual_refs` takes.

        Raises
        ------
        NotFoundError
            If there is no such array.
        """
        contents = self._reads
        node = contents.array_at(array_path)
        containers, ndim = contents.context.containers, node.array_meta.grid.ndim
        return VirtualRefs.from_table(contents.chunks(node), ndim, containers)

    # --- listing -----------------------------------------------------------------------------

    async def list(self) -> AsyncIterator[str]:
        """All keys."""
        async for key in self.list_prefix(""):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """All keys that start with the prefix."""
        for key in await self._run(lambda: [*self._reads.keys_below(prefix)]):
            yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """The names right below the directory."""
        for name in sorted(await self._run(self._reads.children, directory(prefix.strip("/")))):
            yield name

    async def _run(self, call: Any, *args: Any) -> Any:
        """Run a call that may need metadata: here if that is cheap, else off the event loop."""
        if self._supports_sync_io:
            return self._reads.guarded(lambda: call(*args))
        return await asyncio.to_thread(self._reads.guarded, lambda: call(*args))


def finish_writes() -> None:
    """Wait for what Zarr's event loop still does: it goes on after an interrupt of the caller."""
    loop, thread = zarr.core.sync.loop[0], zarr.core.sync.iothread[0]
    if loop is None or not loop.is_running() or threading.current_thread() is thread:
        return
    if tasks := asyncio.all_tasks(loop):
        asyncio.run_coroutine_threadsafe(asyncio.wait(tasks), loop).result()


def contents_of(store: ManifestStore) -> SessionView:
    """The store's contents, to read."""
    return store._reads


def workspace_of(store: ManifestStore) -> Workspace:
    """The workspace of a store whose session is writable.

    Raises
    ------
    ReadOnlyError
        If it is read-only.
    """
    return store._writes


def freeze_store(store: ManifestStore, *, explicit: bool = True) -> ForkState:
    """The store's contents as a value that can be pickled and merged."""
    contents = store._contents
    if isinstance(contents, SessionView):
        return freeze_reader(contents)
    return contents if isinstance(contents, ForkState) else freeze(contents, explicit=explicit)


def _restore(state: ForkState, read_only: bool) -> ManifestStore:
    return ManifestStore(state, read_only=read_only)


def _buffer(data: bytes | memoryview, prototype: BufferPrototype | None) -> Buffer:
    kind = (prototype or default_buffer_prototype()).buffer
    if kind is CPUBuffer:  # same as `from_bytes`, but faster
        return CPUBuffer(np.frombuffer(data, _BYTE))
    return kind.from_bytes(data)


def _value(value: Buffer, most: int) -> bytes | memoryview:
    """The buffer's bytes, without a copy of more than `most`: the store writes these at once."""
    if type(value) is CPUBuffer:  # an ABC is slow to ask
        if len(value) > most:
            return memoryview(value.as_numpy_array()).cast("B")
    elif not isinstance(value, Buffer):
        raise TypeError(
            f"ManifestStore.set(): `value` must be a Buffer instance. Got an instance of "
            f"{type(value)} instead."
        )
    return value.to_bytes()


def _span(entry: Entry, part: ByteRequest | None) -> tuple[int, int]:
    """Start and length of the requested range within the value."""
    if part is None:
        return 0, entry.length
    start, stop = _normalize_byte_range_index(range(entry.length), part)  # type: ignore[arg-type]
    start, stop, _ = slice(start, stop).indices(entry.length)
    return start, max(stop - start, 0)
