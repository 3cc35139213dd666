"""Immutable metadata objects: fetched once, decoded once, written once.

Loads go through a cache of decoded values (`decoded_cache`) and are single-flight. Before the
storage, a cache on the local disk (`disk_cache`) is tried if there is one. Values made from
objects, such as the chunk tables of a manifest, are in the same cache. Writes use `create_own`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol, cast

from zarr_manifests.config import CacheOptions
from zarr_manifests.engine.objects.chunks import SessionKeys
from zarr_manifests.engine.objects.decoded_cache import OBJECT, DecodedCache
from zarr_manifests.engine.objects.disk_cache import DiskCache
from zarr_manifests.errors import CorruptObjectError, ObjectNotFoundError, StorageError
from zarr_manifests.format.blocks import directory_end, is_in_blocks
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.manifest import Manifest, ManifestBlocks, Part
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.stretches import TableData
from zarr_manifests.grid import Box
from zarr_manifests.planning.tables.resolved_chunks import coalesce
from zarr_manifests.runtime import Runtime, one_by_one
from zarr_manifests.storage import Storage
from zarr_manifests.storage.metered import meter_of
from zarr_manifests.storage.protocol import ReadableStorage

_DISK_ABREAST: Final = 8
_BYTES_A_THREAD: Final = 32 * 1024
_CREATIONS: Final = 5
_WHOLE_BYTES: Final = 256 * 1024
_HEAD_BYTES: Final = 16 * 1024
_BYTES_A_HEAD_BYTE: Final = 2048
"""Bytes of a manifest for each byte more that its directory is expected to have."""


def create_own(
    storage: Storage, key: str, data: bytes | memoryview, *, durable: bool = True
) -> None:
    """Write an object under a key that only this writer uses.

    If the key exists, the answer to an earlier call must have been lost. The existing bytes are
    compared to make sure.

    Raises
    ------
    StorageError
        If it could not be written, or other bytes are stored there.
    """
    if create_or_find(storage, key, data, durable=durable) is not None:
        raise StorageError(
            f"{key} exists with other bytes in {storage.url}; two writers share a "
            "session id, which only a broken source of randomness explains"
        )


def create_or_find(
    storage: Storage, key: str, data: bytes | memoryview, *, durable: bool = True
) -> bytes | None:
    """Write an object if its key is free; the first bytes of what is there instead, if anything.

    Raises
    ------
    StorageError
        If it could not be written.
    """
    for _ in range(_CREATIONS):
        if storage.create(key, data, durable=durable):
            return None
        try:
            found = storage.get(key, 0, len(data) + 1)
        except ObjectNotFoundError:  # contradicts the answer before
            continue
        return None if found == data else found
    raise StorageError(
        f"{key} cannot be written to {storage.url}: the storage says that it exists, and that it "
        "does not; try again later"
    )


class NotAtHandError(Exception):
    """The object would have to be fetched."""


_TALLY: ContextVar[list[int] | None] = ContextVar("zarr_manifests_tally", default=None)


@contextmanager
def tallied_reads() -> Iterator[list[int]]:
    """The numbers of bytes of objects fetched in the block, including by its parallel calls."""
    tally: list[int] = []
    token = _TALLY.set(tally)
    try:
        yield tally
    finally:
        _TALLY.reset(token)


class _Decodable(Protocol):
    @classmethod
    def from_object(cls, data: bytes, ref: BlobRef) -> Any: ...


def _name(ref: BlobRef, kind: type[Any]) -> tuple[Any, ...]:
    """The cache name of a decoded object: the whole pointer, and the type it is decoded as."""
    return OBJECT, ref.key, ref.length, ref.crc32c, kind


@dataclass(slots=True, eq=False)
class PartialManifest:
    """A manifest of which only the directory was read.

    Parameters
    ----------
    blocks : ManifestBlocks or None
        The directory; None if the manifest is not in blocks, so that it can only be read whole.
    """

    blocks: ManifestBlocks | None

    @classmethod
    def from_object(cls, head: bytes, ref: BlobRef) -> PartialManifest:
        """From the first bytes of the manifest."""
        return cls(ManifestBlocks.of(head, ref) if is_in_blocks(head) else None)


class ObjectReader:
    """Reads the immutable metadata objects of one repository.

    Attributes
    ----------
    cache : DecodedCache
        Decoded values, in memory.
    meter : Meter
        Counts what is done here, and the calls of a metered storage.
    """

    storage: ReadableStorage

    def __init__(
        self,
        storage: ReadableStorage,
        runtime: Runtime,
        options: CacheOptions | None = None,
        disk: DiskCache | None = None,
    ) -> None:
        self.storage = storage
        self.meter = meter_of(storage)
        self._runtime = runtime
        self.cache = DecodedCache(options or CacheOptions(), runtime, self.meter)
        self._disk = disk

    def load[T: _Decodable](self, ref: BlobRef, kind: type[T], fetched: bytes | None = None) -> T:
        """Return the decoded object that `ref` points to; `fetched` has its bytes, if available.

        Raises
        ------
        CorruptObjectError
            If it is missing, or does not match the pointer.
        """
        name = _name(ref, kind)
        found = self.cache.find(name)
        if found is not None:
            self.meter.add("cache_hits")
            return cast(T, found)
        self.meter.add("cache_misses")
        return cast(T, self._obtain(name, partial(self._decoded, ref, kind, fetched)))

    def _obtain[T](self, name: tuple[Any, ...], make: Callable[[], T]) -> T:
        return self.cache.obtain(name, make)

    def load_all(
        self, wanted: Sequence[tuple[BlobRef, type[_Decodable]]], runtime: Runtime | None = None
    ) -> dict[str, Any]:
        """Return the decoded objects by key; missing ones are fetched in one parallel round."""
        by_key = {ref.key: (ref, kind) for ref, kind in wanted}
        here = [key for key, (ref, kind) in by_key.items() if self.has(ref, kind)]
        loaded = {key: self.load(*by_key.pop(key)) for key in here}
        most = len(by_key)
        if self.storage.capabilities.turns:
            # More parallel reads do not make a disk faster, and threads cost more than small reads.
            due = sum(ref.length for ref, _ in by_key.values())
            most = min(_DISK_ABREAST, 1 + due // _BYTES_A_THREAD)
        groups = [[*by_key.items()][i::most] for i in range(min(most, len(by_key)))]
        calls = [partial(self._load_each, group) for group in groups]
        for found in (runtime or self._runtime).parallel(calls):
            loaded |= found
        return loaded

    def _load_each(
        self, wanted: Sequence[tuple[str, tuple[BlobRef, type[_Decodable]]]]
    ) -> dict[str, Any]:
        return {key: self.load(*each) for key, each in wanted}

    def prefetch(self, wanted: Sequence[tuple[BlobRef, type[_Decodable]]]) -> None:
        """Fetch objects that are neither cached nor copied into their pointers, in parallel."""
        self.load_all([(ref, kind) for ref, kind in wanted if not self.has(ref, kind)])

    def recall[T](self, ref: BlobRef, kind: type[T]) -> T | None:
        """The cached value of that type for the pointer, or None; fetches and counts nothing."""
        return cast("T | None", self.cache.find(_name(ref, kind)))

    def remember(self, ref: BlobRef, value: Any) -> None:
        """Keep a decoded object while there is room."""
        self.cache.keep(_name(ref, type(value)), value)

    def tables(
        self, ref: BlobRef, node_id: bytes, manifest: Manifest | None = None
    ) -> Mapping[Box, ChunkTable]:
        """A manifest's decoded chunk tables of one node, by box; `manifest`, if already loaded."""
        name = _tables_name(ref, node_id)
        found: Mapping[Box, ChunkTable] | None = self.cache.find(name)
        if found is None:

            def decode() -> Mapping[Box, ChunkTable]:
                whole = manifest or self.load(ref, Manifest)
                return {table.box: table for table in whole.tables(node_id)}

            found = self._obtain(name, decode)
        return found

    def table(
        self,
        ref: BlobRef,
        node_id: bytes,
        number: int,
        find: Callable[[], tuple[Part, TableData]],
    ) -> ChunkTable:
        """One chunk table of a node in the object; `find` returns it encoded."""
        name = _table_name(ref, node_id, number)
        return self._obtain(name, lambda: Manifest.decode(*find()))

    def known_table(self, ref: BlobRef, node_id: bytes, number: int) -> ChunkTable | None:
        """The same if it is cached, else None."""
        return cast("ChunkTable | None", self.cache.find(_table_name(ref, node_id, number)))

    def in_parts(self, ref: BlobRef) -> bool:
        """Whether to read a manifest in parts: it is large, and no part of it costs nothing.

        With a cache on disk, a manifest is fetched whole and kept there.
        """
        small = ref.copy is not None or ref.length <= _WHOLE_BYTES or self._disk is not None
        return not small and not self.has(ref, Manifest)

    def stretches_at_hand(self, ref: BlobRef, wanted: Sequence[int]) -> list[ChunkTable | None]:
        """Those stretches of a manifest in blocks that are in memory; None for each other one."""
        return [self.cache.find(_stretch_name(ref, stretch)) for stretch in wanted]

    def stretches(
        self, due: Sequence[tuple[BlobRef, int, Sequence[int]]]
    ) -> list[list[ChunkTable]]:
        """Some stretches of the tables with these numbers in manifests whose directory was read.

        Those that are not in memory are fetched in one round.
        """
        found = [self.stretches_at_hand(ref, wanted) for ref, _, wanted in due]
        calls = [
            partial(self._fetch_stretches, ref, number, missing)
            for (ref, number, wanted), tables in zip(due, found, strict=True)
            for missing in self._requests(
                ref, [at for at, table in zip(wanted, tables, strict=True) if table is None]
            )
        ]
        fetched: dict[tuple[Any, ...], ChunkTable] = {}
        for some in self._runtime.parallel(calls):
            fetched |= some
        return [
            [
                fetched[_stretch_name(ref, at)] if table is None else table
                for at, table in zip(wanted, tables, strict=True)
            ]
            for (ref, _, wanted), tables in zip(due, found, strict=True)
        ]

    def _requests(self, ref: BlobRef, stretches: Sequence[int]) -> list[list[int]]:
        """The stretches, in groups that one request reads."""
        blocks = self.blocks_of(ref).blocks
        ranges = [blocks.range(self.blocks_of(ref).block_of.item(at)) for at in stretches]
        starts, lengths = [start for start, _ in ranges], [length for _, length in ranges]
        most = self.storage.capabilities
        groups = coalesce(starts, lengths, gap_bytes=most.gap_bytes, span_bytes=most.span_bytes)
        return [[stretches[i] for i in sorted(group.members)] for group in groups]

    def _fetch_stretches(
        self, ref: BlobRef, number: int, stretches: Sequence[int]
    ) -> dict[tuple[Any, ...], ChunkTable]:
        manifest = self.blocks_of(ref)
        ranges = [manifest.blocks.range(manifest.block_of.item(at)) for at in stretches]
        start = ranges[0][0]

        def fetch() -> dict[tuple[Any, ...], ChunkTable]:
            data = self._range(ref, start, ranges[-1][0] + ranges[-1][1] - start)
            tables = {}
            for at, (first, length) in zip(stretches, ranges, strict=True):
                part = data[first - start : first - start + length]
                tables[_stretch_name(ref, at)] = manifest.table(number, at, part)
            return tables

        if len(stretches) > 1:
            fetched = fetch()
            for name, table in fetched.items():
                self.cache.keep(name, table)
            return fetched
        name = _stretch_name(ref, stretches[0])  # readers of one stretch wait for one another
        return {name: self._obtain(name, lambda: fetch()[name])}

    def blocks_of(self, ref: BlobRef) -> ManifestBlocks:
        """The directory of a manifest in blocks."""
        blocks = self.load(ref, PartialManifest).blocks
        assert blocks is not None
        return blocks

    def has(self, ref: BlobRef, kind: type[_Decodable]) -> bool:
        """Whether `load` needs no request now."""
        return ref.copy is not None or _name(ref, kind) in self.cache

    def is_near(self, ref: BlobRef, *kinds: type[_Decodable]) -> bool:
        """Whether `load` probably needs no request: it is cached in memory or on disk."""
        here = any(self.has(ref, kind) for kind in kinds)
        return here or (self._disk is not None and self._disk.has(ref))

    def guess(self, key: str, most: int) -> bytes | None:
        """The bytes at a key if there are at most `most`, else None; also None if it fails.

        They are unverified: only someone with a pointer to the object can trust them.
        """
        self._runtime.checkpoint("objects.get")
        try:
            data = self.storage.get(key, 0, most + 1)
        except StorageError:  # a reader that really needs the object gets the error itself
            return None
        return data if len(data) <= most else None

    def has_tables(self, ref: BlobRef, node_id: bytes) -> bool:
        """Whether `tables` needs no manifest now."""
        return self.cache.find(_tables_name(ref, node_id)) is not None

    def _head(self, ref: BlobRef) -> bytes:
        """The first bytes of a manifest, with its directory if it is in blocks."""
        head = self._range(ref, 0, min(ref.length, _HEAD_BYTES + ref.length // _BYTES_A_HEAD_BYTE))
        if is_in_blocks(head) and len(head) < (end := min(directory_end(head), ref.length)):
            head += self._range(ref, len(head), end - len(head))
        return head

    def _decoded(self, ref: BlobRef, kind: type[_Decodable], fetched: bytes | None = None) -> Any:
        if kind is PartialManifest:
            return kind.from_object(self._head(ref), ref)
        if ref.copy is None and self._disk is not None:
            data = self._disk.get(ref)
            if data is not None:
                return kind.from_object(data, ref)
        data = self._bytes(ref) if fetched is None else fetched
        value = kind.from_object(data, ref)
        if ref.copy is None and self._disk is not None:
            self._disk.put(ref, data)  # decoded, so it is valid
        return value

    def _bytes(self, ref: BlobRef) -> bytes:
        return self._range(ref, 0, ref.length + 1) if ref.copy is None else ref.copy

    def _range(self, ref: BlobRef, start: int, length: int) -> bytes:
        self._runtime.checkpoint("objects.get")
        try:
            data = self.storage.get(ref.key, start, length)
        except ObjectNotFoundError as error:
            raise CorruptObjectError(
                f"{ref.key} is referenced and not there ({self.storage.url}); restore it from a "
                "backup, or open another snapshot"
            ) from error
        tally = _TALLY.get()
        if tally is not None:
            tally.append(len(data))
        return data


class Objects(ObjectReader):
    """Reads the metadata objects of one repository, and writes this writer's own."""

    storage: Storage

    def __init__(
        self,
        storage: Storage,
        runtime: Runtime,
        options: CacheOptions | None = None,
        disk: DiskCache | None = None,
    ) -> None:
        super().__init__(storage, runtime, options, disk)

    def create(self, key: str, data: bytes) -> None:
        """Durably write an object under one of this writer's own keys.

        Raises
        ------
        StorageError
            If it could not be written, or other bytes are stored there.
        """
        self._runtime.checkpoint("objects.create")
        create_own(self.storage, key, data)
        if self._disk is not None:
            self._disk.put(BlobRef.to(key, data), data)


class AtHand(ObjectReader):
    """A view of the objects that loads only what is cached or copied into a pointer."""

    def __init__(self, objects: ObjectReader) -> None:
        self.storage, self.meter, self.cache = objects.storage, objects.meter, objects.cache
        self._runtime, self._disk = replace(objects._runtime, parallel=one_by_one), None

    def load[T: _Decodable](self, ref: BlobRef, kind: type[T], fetched: bytes | None = None) -> T:
        """Return the decoded object that `ref` points to; `fetched` has its bytes, if available.

        Raises
        ------
        NotAtHandError
            If it would have to be fetched. (It joins no flight, which others may wait for.)
        """
        found = self.recall(ref, kind)
        if found is not None:
            return found
        data = ref.copy if fetched is None else fetched
        if data is None:
            raise NotAtHandError(ref.key)
        return cast(T, kind.from_object(data, ref))

    def _obtain[T](self, name: tuple[Any, ...], make: Callable[[], T]) -> T:
        found: T | None = self.cache.find(name)
        if found is None:
            found = make()
            self.cache.keep(name, found)
        return found

    def _range(self, ref: BlobRef, start: int, length: int) -> bytes:
        raise NotAtHandError(ref.key)


def _table_name(ref: BlobRef, node_id: bytes, number: int) -> tuple[Any, ...]:
    return "table", ref.key, ref.length, ref.crc32c, node_id, number


def _stretch_name(ref: BlobRef, stretch: int) -> tuple[Any, ...]:
    return "stretch", ref.key, ref.length, ref.crc32c, stretch


def _tables_name(ref: BlobRef, node_id: bytes) -> tuple[Any, ...]:
    return "tables", ref.key, ref.length, ref.crc32c, node_id


@dataclass(frozen=True, slots=True)
class Upload:
    """An encoded object and its key."""

    key: str
    data: bytes

    @classmethod
    def of(cls, keys: SessionKeys, kind: str, data: bytes) -> Upload:
        """The bytes under the key where the session has written them already, or a new key."""
        return cls(keys.key_for(kind, data), data)

    @property
    def ref(self) -> BlobRef:
        """The pointer to it."""
        return BlobRef.to(self.key, self.data)
