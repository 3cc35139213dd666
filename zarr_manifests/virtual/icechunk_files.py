"""Reading icechunk repositories, of formats 1 and 2: refs, snapshots and manifests.

An icechunk repository has its history in one file (format 2) or in the snapshots (format 1). Each
snapshot has all nodes with their Zarr metadata, and names the manifests of each array. A manifest
has the chunks of some arrays: bytes, objects of the repository, or ranges of files elsewhere.

Invariants:

- The files are not trusted: positions and sizes are checked, and what is unpacked counts against
  `max_bytes`. An error names the object.
- Chunks are read as columns. There is Python work only for each file elsewhere and each inline
  chunk.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import zstandard

from zarr_manifests.error_cases import NotARepositoryError, ObjectNotFoundError
from zarr_manifests.errors import CorruptObjectError, InvalidArgumentError, UnsupportedFormatError
from zarr_manifests.format.chunk_table import RefKind
from zarr_manifests.format.columns import Column
from zarr_manifests.format.envelope import unpack
from zarr_manifests.grid import IndexArray
from zarr_manifests.keys import is_inside
from zarr_manifests.records import dataclass
from zarr_manifests.storage import Storage
from zarr_manifests.virtual.flatbuffers import Flat, FlatColumns, FlatTable, flex_value

__all__ = [
    "ChunkRows",
    "ForeignFile",
    "ForeignManifest",
    "ForeignNode",
    "ForeignSnapshot",
    "IcechunkFiles",
    "chunk_names",
]

_MAGIC: Final = "ICE🧊CHUNK".encode()
_HEADER_BYTES: Final = 39
_FORMATS: Final = (1, 2)
_ALPHABET: Final = np.frombuffer(b"0123456789ABCDEFGHJKMNPQRSTVWXYZ", np.uint8)
_SNAPSHOT, _MANIFEST, _REPO = 1, 2, 6
_ID_BYTES, _NODE_BYTES = 12, 8
_MOST_LOCATION: Final = 1 << 16
_REF, _TAG = "refs/branch.", "refs/tag."


def chunk_names(ids: np.ndarray[Any, np.dtype[np.uint8]]) -> list[str]:
    """The names of objects with these ids (uint8[n, 12]), in Crockford's base 32.

    Examples
    --------
    >>> import numpy as np
    >>> from zarr_manifests.virtual.icechunk_files import chunk_names
    >>> chunk_names(np.arange(12, dtype=np.uint8)[None])
    ['000G40R40M30E209185G']
    """
    digits = -(-8 * ids.shape[1] // 5)
    bits = np.zeros((len(ids), 5 * digits), np.uint8)
    bits[:, : 8 * ids.shape[1]] = np.unpackbits(ids, axis=1)
    values = bits.reshape(len(ids), digits, 5) @ np.array([16, 8, 4, 2, 1], np.uint8)
    names: list[str] = _ALPHABET[values].view(f"S{digits}")[:, 0].astype(str).tolist()
    return names


class ForeignManifest(NamedTuple):
    """A manifest of an array, and the chunks that count in it.

    Attributes
    ----------
    name : str
        Name of the manifest.
    lo, hi : tuple of int
        Chunk coordinates: from (inclusive) and to (exclusive) on each axis.
    """

    name: str
    lo: tuple[int, ...]
    hi: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ForeignNode:
    """A group or array of an icechunk snapshot.

    Parameters
    ----------
    node_id : bytes
        Its id, which stays when it is moved.
    path : str
        Its path, without a slash at its ends.
    document : bytes
        Its `zarr.json`.
    is_array : bool
        Whether it is an array.
    manifests : frozenset of ForeignManifest
        Where its chunks are.
    """

    node_id: bytes
    path: str
    document: bytes
    is_array: bool
    manifests: frozenset[ForeignManifest]


@dataclass(frozen=True, slots=True)
class ForeignSnapshot:
    """What an icechunk snapshot says about itself.

    Parameters
    ----------
    name : str
        Its id.
    parent : str or None
        Id of the parent.
    flushed_us : int
        When it was written, in microseconds since 1970 UTC.
    message : str
        Its commit message.
    metadata : mapping
        Its metadata.
    """

    name: str
    parent: str | None
    flushed_us: int
    message: str
    metadata: Mapping[str, Any]


class ForeignFile(NamedTuple):
    """A file elsewhere: its URL, and the etag or the time (in seconds) since which it is the same.

    An empty etag or a time of 0 is unknown.
    """

    location: str
    etag: str
    unchanged_since_s: int


@dataclass(frozen=True, slots=True, eq=False)
class ChunkRows:
    """Chunks of an array, as columns.

    Parameters
    ----------
    coords : int64[n, ndim]
        Chunk coordinates.
    columns : int64[n, 5]
        Of each chunk: its kind (`RefKind`; native for an object of the icechunk repository), two
        numbers that say which, offset and length. The two numbers are the id of an object, in
        bytes 0 to 7 and 8 to 11; else the first is a position in `IcechunkFiles.files` or
        `IcechunkFiles.inlined`.
    """

    coords: IndexArray
    columns: IndexArray

    def __len__(self) -> int:
        return len(self.columns)

    def take(self, rows: Any) -> ChunkRows:
        """Some of the rows."""
        return ChunkRows(self.coords[rows], self.columns[rows])

    def within(self, lo: tuple[int, ...], hi: tuple[int, ...]) -> ChunkRows:
        """The chunks from `lo` (inclusive) to `hi` (exclusive)."""
        inside = ((self.coords >= lo) & (self.coords < hi)).all(axis=1)
        return self if inside.all() else self.take(inside)

    def ids(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The ids of the objects, if all are native (uint8[n, 12])."""
        found = np.empty((len(self), _ID_BYTES), np.uint8)
        found[:, :8] = self.columns[:, 1:2].astype("<i8").view(np.uint8)
        found[:, 8:] = self.columns[:, 2:3].astype("<u4").view(np.uint8)
        return found

    @staticmethod
    def together(parts: Iterable[ChunkRows], ndim: int) -> ChunkRows:
        """The rows of all parts."""
        found = list(parts)
        coords = [np.zeros((0, ndim), np.int64), *(part.coords for part in found)]
        columns = [np.zeros((0, 5), np.int64), *(part.columns for part in found)]
        return ChunkRows(np.concatenate(coords), np.concatenate(columns))


@dataclass(slots=True)
class IcechunkFiles:
    """The files of an icechunk repository.

    Parameters
    ----------
    storage : Storage
        Where they are.
    max_bytes : int
        That one of them may have, unpacked.

    Attributes
    ----------
    branches, tags : dict of str to str
        Ids of snapshots by name.
    files : list of ForeignFile
        The files elsewhere that manifests read so far refer to.
    inlined : list of bytes
        The inline chunks of manifests read so far.
    """

    storage: Storage
    max_bytes: int
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    files: list[ForeignFile] = field(default_factory=list)
    inlined: list[bytes] = field(default_factory=list)
    _numbers: dict[object, int] = field(default_factory=dict)
    _snapshots: dict[str, ForeignSnapshot] = field(default_factory=dict)
    _prefixes: dict[str, str] = field(default_factory=dict)
    _fetched: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def open(cls, storage: Storage, *, max_bytes: int) -> IcechunkFiles:
        """Read the branches and tags of the repository there.

        Raises
        ------
        NotARepositoryError
            If there is no icechunk repository.
        CorruptObjectError
            If a file is damaged.
        UnsupportedFormatError
            If its format is not known.
        """
        files = cls(storage, max_bytes)
        try:
            repo = files._flat("repo", _REPO)
        except ObjectNotFoundError:
            files._read_refs()
        else:
            files._read_repo(repo)
        if not files.branches:
            raise NotARepositoryError(f"there is no icechunk repository at {storage.url}")
        return files

    def lineage(self, name: str) -> list[ForeignSnapshot]:
        """A snapshot and its ancestors, oldest first.

        Raises
        ------
        CorruptObjectError
            If one is missing, damaged, or its own ancestor.
        """
        found: dict[str, ForeignSnapshot] = {}
        due: str | None = name
        while due is not None:
            if due in found:
                raise CorruptObjectError(f"the icechunk snapshot {due} is its own ancestor")
            found[due] = self._snapshot(due)
            due = found[due].parent
        return list(found.values())[::-1]

    def nodes(self, name: str) -> dict[bytes, ForeignNode]:
        """The nodes of a snapshot, by id."""
        root = self._flat(f"snapshots/{name}", _SNAPSHOT)
        nodes = [_node(table) for table in root.tables(2)]
        by_id = {node.node_id: node for node in nodes}
        if len(by_id) != len(nodes) or len({node.path for node in nodes}) != len(nodes):
            raise CorruptObjectError(f"the icechunk snapshot {name} has a node twice")
        return by_id

    def fetch(self, manifests: Sequence[str], parallel: Callable[[Sequence[Any]], object]) -> None:
        """Fetch manifests that are read next, at once."""

        def get(key: str) -> None:
            with suppress(ObjectNotFoundError, InvalidArgumentError):  # raised when it is read
                self._fetched[key] = self.storage.get(key)

        self._fetched.clear()
        parallel([partial(get, f"manifests/{name}") for name in manifests])

    def chunks(self, manifest: str, node_id: bytes, ndim: int) -> ChunkRows:
        """The chunks of a node in a manifest.

        Raises
        ------
        CorruptObjectError
            If the manifest is missing or damaged.
        """
        where = f"manifests/{manifest}"
        root = self._flat(where, _MANIFEST)
        arrays = [each for each in root.tables(1) if each.fixed(0, _NODE_BYTES) == node_id]
        return ChunkRows.together((self._rows(root, each, ndim) for each in arrays), ndim)

    # --- refs and snapshots ------------------------------------------------------------------

    def _read_repo(self, repo: FlatTable) -> None:
        """Format 2: one file has the history, the refs and the configuration."""
        listed = repo.tables(4)
        names = [_name(each.fixed(0, _ID_BYTES)) for each in listed]
        for name, each in zip(names, listed, strict=True):
            parent = each.number(1, "i", 0)
            if not -1 <= parent < len(names):
                raise repo.flat.refused()
            self._snapshots[name] = ForeignSnapshot(
                name,
                names[parent] if parent >= 0 else None,
                each.number(2, "Q"),
                each.text(3),
                _metadata(each.tables(4), f"the icechunk snapshot {name}", flex=True),
            )
        for refs, field_number in ((self.tags, 1), (self.branches, 2)):
            for ref in repo.tables(field_number):
                at = ref.number(1)
                if at >= len(names):
                    raise repo.flat.refused()
                refs[ref.text(0)] = names[at]
        config = flex_value(data, repo.flat.where) if (data := repo.blob(9)) else None
        known = config.get("virtual_chunk_containers") if isinstance(config, dict) else None
        for each in (known or {}).values() if isinstance(known, dict) else ():
            match each:
                case {"name": str(name), "url_prefix": str(prefix)}:
                    self._prefixes[name] = prefix

    def _read_refs(self) -> None:
        """Format 1: a small file for each branch and tag."""
        keys = [info.key for info in self.storage.list("refs/")]
        gone = {key.removesuffix(".deleted") for key in keys if key.endswith(".deleted")}
        for key in keys:
            folder, _, name = key.rpartition("/")
            if name != "ref.json" or key in gone:
                continue
            try:
                snapshot = json.loads(self.storage.get(key))["snapshot"]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise CorruptObjectError(f"{self._at(key)} is damaged: {error}") from error
            if not isinstance(snapshot, str):
                raise CorruptObjectError(f"{self._at(key)} is damaged: it names no snapshot")
            if folder.startswith(_REF):
                self.branches[folder.removeprefix(_REF)] = snapshot
            elif folder.startswith(_TAG):
                self.tags[folder.removeprefix(_TAG)] = snapshot

    def _snapshot(self, name: str) -> ForeignSnapshot:
        found = self._snapshots.get(name)
        if found is None:
            root = self._flat(f"snapshots/{name}", _SNAPSHOT)
            parent = root.fixed(1, _ID_BYTES)
            found = self._snapshots[name] = ForeignSnapshot(
                name,
                _name(parent) if parent else None,
                root.number(3, "Q"),
                root.text(4),
                _metadata(root.tables(5), f"the icechunk snapshot {name}", flex=False),
            )
        return found

    # --- files -------------------------------------------------------------------------------

    def _at(self, key: str) -> str:
        return f"{self.storage.url}/{key}"

    def _flat(self, key: str, kind: int) -> FlatTable:
        """The content of a file, which is of that kind."""
        try:
            data = self._fetched.pop(key, None) or self.storage.get(key)
        except ObjectNotFoundError as error:
            if kind == _REPO:
                raise
            raise CorruptObjectError(f"{self._at(key)} is missing: restore it") from error
        except InvalidArgumentError as error:
            raise CorruptObjectError(f"{self._at(key)[:200]!r} is named, and no key") from error
        if data[:12] != _MAGIC or len(data) < _HEADER_BYTES or data[37] != kind:
            raise CorruptObjectError(f"{self._at(key)} is not the icechunk file that is due")
        if data[36] not in _FORMATS or data[38] not in (0, 1):
            raise UnsupportedFormatError(
                f"{self._at(key)} is of icechunk's format {data[36]}; 1 and 2 are known"
            )
        body = data[_HEADER_BYTES:]
        if data[38]:
            body = self._unpacked(body, key)
        return Flat(body, self._at(key)).root()

    def _unpacked(self, body: bytes, key: str) -> bytes:
        try:
            nbytes = zstandard.frame_content_size(body)
            if nbytes > self.max_bytes:
                raise InvalidArgumentError(
                    f"{self._at(key)} has {nbytes} bytes, and an import unpacks up to "
                    f"{self.max_bytes}: pass a larger max_bytes= if you trust it"
                )
            return zstandard.ZstdDecompressor().decompress(body, max_output_size=self.max_bytes)
        except zstandard.ZstdError as error:
            raise CorruptObjectError(f"{self._at(key)} is damaged: {error}") from error

    # --- chunks ------------------------------------------------------------------------------

    def _rows(self, root: FlatTable, array: FlatTable, ndim: int) -> ChunkRows:
        flat = root.flat
        refs = FlatColumns(flat, array.positions(1))
        coords = refs.vectors(0, ndim)
        columns = np.zeros((len(coords), 5), np.int64)
        inline, native, packed = refs.has(1), refs.has(4), refs.has(8)
        virtual = refs.has(5) | packed
        if (inline.astype(int) + native + virtual != 1).any():
            raise CorruptObjectError(f"{flat.where} is damaged: a chunk is of no single kind")
        columns[:, 3], columns[:, 4] = refs.numbers(2, "<u8"), refs.numbers(3, "<u8")
        columns[:, 0] = np.select(
            [inline, native], [RefKind.INLINE, RefKind.NATIVE], RefKind.VIRTUAL
        )
        ids = refs.fixed(4, _ID_BYTES)[native]
        columns[native, 1] = np.ascontiguousarray(ids[:, :8]).view("<i8")[:, 0]
        columns[native, 2] = np.ascontiguousarray(ids[:, 8:]).view("<u4")[:, 0]
        if inline.any():
            starts, ends = (span[inline] for span in refs.spans(1))
            where = [*zip(starts.tolist(), ends.tolist(), strict=True)]
            distinct = set(where)
            if sum(b - a for a, b in distinct) > len(flat.data):  # copies would fill the memory
                raise CorruptObjectError(f"{flat.where} is damaged: inline chunks overlap")
            taken = {(a, b): self._number(flat.cut(a, b - a), self.inlined) for a, b in distinct}
            columns[inline, 1] = [taken[each] for each in where]
            columns[inline, 3], columns[inline, 4] = 0, ends - starts
        if virtual.any():
            columns[virtual, 1] = self._file_numbers(root, refs)[virtual]
        return ChunkRows(coords, columns)

    def _file_numbers(self, root: FlatTable, refs: FlatColumns) -> Column:
        """The number of each chunk's file."""
        plain, packed, tags = refs.spans(5), refs.spans(8), refs.spans(6)
        if any((ends - starts > _MOST_LOCATION).any() for starts, ends in (plain, packed, tags)):
            raise CorruptObjectError(f"{root.flat.where} is damaged: a location is too long")
        times = refs.numbers(7, "<u4").tolist()
        spans = zip(
            *(span.tolist() for pair in (plain, packed, tags) for span in pair), strict=True
        )
        dictionary = root.blob(2)
        zstd = zstandard.ZstdDecompressor(
            dict_data=zstandard.ZstdCompressionDict(dictionary) if dictionary else None
        )
        known: dict[tuple[bytes, bytes, int], int] = {}
        data, found, nbytes = root.flat.data, [], 0
        for (a, b, c, d, e, f), time_s in zip(spans, times, strict=True):
            key = data[a:b] + b"\0" + data[c:d], data[e:f], time_s
            number = known.get(key)
            if number is None:
                number = known[key] = self._file(data[a:b], data[c:d], key, zstd, root.flat)
                nbytes += len(self.files[number].location) + len(key[1])
                if nbytes > self.max_bytes:
                    raise InvalidArgumentError(
                        f"the locations in {root.flat.where} have more than {self.max_bytes} "
                        "bytes: pass a larger max_bytes= if you trust it"
                    )
            found.append(number)
        return np.array(found, np.int64)

    def _file(
        self,
        plain: bytes,
        packed: bytes,
        key: tuple[bytes, bytes, int],
        zstd: zstandard.ZstdDecompressor,
        flat: Flat,
    ) -> int:
        try:
            if packed:
                if zstandard.frame_content_size(packed) > _MOST_LOCATION:
                    raise CorruptObjectError(f"{flat.where} is damaged: a location is too long")
                plain = zstd.decompress(packed, max_output_size=_MOST_LOCATION)
            location, etag = plain.decode(), key[1].decode()
        except (zstandard.ZstdError, UnicodeDecodeError) as error:
            raise CorruptObjectError(f"{flat.where} is damaged, at a location: {error}") from error
        if location.startswith("vcc://"):
            name, _, rest = location.removeprefix("vcc://").partition("/")
            if name not in self._prefixes:
                raise CorruptObjectError(
                    f"{flat.where} refers to the virtual chunk container {name[:80]!r}, which the "
                    "icechunk repository does not have"
                )
            location = f"{self._prefixes[name].rstrip('/')}/{rest}"
        return self._number(ForeignFile(location, etag, key[2]), self.files)

    def _number[T](self, value: T, values: list[T]) -> int:
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(values)
            values.append(value)
        return number


def _name(identity: bytes) -> str:
    return chunk_names(np.frombuffer(identity, np.uint8)[None])[0]


def _node(table: FlatTable) -> ForeignNode:
    where = table.flat.where
    node_id, path = table.fixed(0, _NODE_BYTES), table.text(1)
    if len(node_id) != _NODE_BYTES or not path.startswith("/"):
        raise CorruptObjectError(f"{where} is damaged: a node has no id or no path")
    inner = path[1:]
    if inner and not is_inside(inner):
        raise CorruptObjectError(f"{where} is damaged: a node has the path {path[:80]!r}")
    array = table.table(4) if table.number(3, "B") == 1 else None
    manifests = [] if array is None else [_manifest(each) for each in array.tables(2)]
    return ForeignNode(node_id, inner, table.blob(2), array is not None, frozenset(manifests))


def _manifest(table: FlatTable) -> ForeignManifest:
    extents = np.frombuffer(table.blob(1, 8), "<u4").reshape(-1, 2).T.tolist()
    identity = table.fixed(0, _ID_BYTES)
    if len(identity) != _ID_BYTES:
        raise CorruptObjectError(f"{table.flat.where} is damaged: a manifest has no id")
    return ForeignManifest(_name(identity), tuple(extents[0]), tuple(extents[1]))


def _metadata(items: Iterable[FlatTable], where: str, *, flex: bool) -> dict[str, Any]:
    found = {}
    for item in items:
        value = item.blob(1)
        found[item.text(0)] = flex_value(value, where) if flex else unpack(value)
    return found
