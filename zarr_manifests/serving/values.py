"""The value at a key of a snapshot: its length, its etag, and how to read it in pieces."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import google_crc32c

from zarr_manifests.engine.edit.overlay import SessionView
from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.exporting.snapshot_source import V2_CONSOLIDATED, consolidated
from zarr_manifests.format.chunk_table import ChunkRef, InlineRef, NativeRef, VirtualRef
from zarr_manifests.format.nodes import NodeKind
from zarr_manifests.keys import DOCUMENTS, V2_GROUP, V3_DOCUMENT, split
from zarr_manifests.runtime import ForkSafeLock
from zarr_manifests.serving.served import Kept, OpenSnapshot

__all__ = ["PIECE_BYTES", "ServedValues", "Value", "etag_of"]

PIECE_BYTES: Final = 8 * 1024**2
"""A larger value is read in pieces of this size."""
_KEPT_BYTES: Final = 64 * 1024**2
_MOST_CONSOLIDATED: Final = 64 * 1024**2
_CHECKED: Final = 4096
_JSON: Final = frozenset([*DOCUMENTS, V2_CONSOLIDATED])


def etag_of(data: bytes) -> str:
    """The etag of bytes, or of what says which bytes are meant."""
    return f'"{hashlib.blake2b(data, digest_size=16).hexdigest()}"'


@dataclass(frozen=True, slots=True)
class Value:
    """The value at a key.

    Parameters
    ----------
    length : int
        Its bytes.
    etag : str or None
        None if what is stored does not say which bytes they are.
    media_type : str
        What it is, for browsers.
    read : callable
        `read(start, length)` gives a part of it.
    check : callable
        Reads all of a large value, and raises an error unless it is whole and sound.
    """

    length: int
    etag: str | None
    media_type: str
    read: Callable[[int, int], bytes]
    check: Callable[[], None]


class ServedValues:
    """Finds values by key; documents of groups hold the metadata of all below them. Thread-safe."""

    def __init__(self) -> None:
        self._documents: Kept[tuple[str, str], Value] = Kept(_KEPT_BYTES)
        self._making = ForkSafeLock()
        self._sound: Kept[str, bool] = Kept(_CHECKED)

    def find(self, opened: OpenSnapshot, key: str) -> Value | None:
        """The value at the key; None if there is none.

        Raises
        ------
        InvalidArgumentError
            If the key has a `.` or `..` segment.
        SnapshotExpiredError
            If the snapshot has expired, and objects of it are gone.
        """
        contents = opened.contents
        document = self._group_document(opened, key)
        if document is not None:
            return document
        ref = contents.guarded(lambda: contents.find(key))
        if ref is None:
            return None
        media = "application/json" if split(key)[1] in _JSON else "application/octet-stream"
        if isinstance(ref, InlineRef):
            return _plain(ref.data, media)
        etag, checksum = _etag(ref), ref.crc32c
        read = partial(_read, contents, ref)
        check = partial(self._check, key, read, ref.length, checksum, etag)
        return Value(ref.length, etag, media, read, check)

    def _group_document(self, opened: OpenSnapshot, key: str) -> Value | None:
        """The consolidated document of a group, if the key is that of one."""
        path, name = split(key)
        if name not in (V3_DOCUMENT, V2_CONSOLIDATED) or key.startswith("/"):
            return None
        contents = opened.contents
        node = contents.guarded(lambda: contents.node(path))
        needed = V3_DOCUMENT if name == V3_DOCUMENT else V2_GROUP
        if node is None or node.kind is not NodeKind.GROUP or needed not in node.documents:
            return None
        name_of = opened.snapshot_id, key
        with self._making:  # once for all who ask for it now
            document = self._documents.get(name_of)
            if document is None:
                nodes = dict(sorted(contents.guarded(lambda: contents.within(path)).items()))
                size = sum(len(d) for one in nodes.values() for d in one.documents.values())
                if size > _MOST_CONSOLIDATED:
                    return None  # readers find the members by the links of folders
                data = dict(consolidated(nodes, path)).get(key)
                if data is None:
                    return None
                document = _plain(data, "application/json")
                self._documents.put(name_of, document, document.length)
        return document

    def _check(
        self,
        key: str,
        read: Callable[[int, int], bytes],
        length: int,
        checksum: int | None,
        etag: str | None,
    ) -> None:
        """Read a large value piece by piece, and compare its checksum; once, if it cannot change.

        Raises
        ------
        CorruptObjectError
            If it does not match.
        """
        if etag is not None and self._sound.get(etag):
            return
        found = 0
        for start in range(0, length, PIECE_BYTES):
            found = google_crc32c.extend(found, read(start, min(PIECE_BYTES, length - start)))
        if checksum is not None and found != checksum:
            raise CorruptObjectError(f"what is stored for {key} does not match its checksum")
        if etag is not None:
            self._sound.put(etag, True)


def _plain(data: bytes, media_type: str) -> Value:
    """A value whose bytes are at hand."""

    def read(start: int, length: int) -> bytes:
        return data[start : start + length]

    return Value(len(data), etag_of(data), media_type, read, lambda: None)


def _etag(ref: NativeRef | VirtualRef) -> str | None:
    """The etag of a value that is not at hand."""
    if isinstance(ref, NativeRef):
        return etag_of(repr((ref.key, ref.offset, ref.length, ref.crc32c)).encode())
    source = ref.source
    if not source.is_dated:  # a checksum is of the whole: parts of the file may change unnoticed
        return None
    file = source.location, source.etag, source.modified_ms, source.nbytes
    return etag_of(repr((*file, ref.offset, ref.length, ref.crc32c)).encode())


def _read(contents: SessionView, ref: ChunkRef, start: int, length: int) -> bytes:
    return contents.guarded(lambda: contents.reader.read(ref, start, length))
