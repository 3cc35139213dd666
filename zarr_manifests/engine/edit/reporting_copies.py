"""Copies of a session's store that report what they change through the storage.

A copy cannot be asked whether it is done, so no commit knows all of them. What it promises is this:
every call in a copy that returned before the commit began is in it; one that comes after raises;
of one that raised, nobody knows. It rests on the order of two sequences:

- A copy writes the chunk, then its report, then looks whether the session's *open token* is there
  still; if not, it raises.
- The session deletes the token, makes sure that it is gone, and only then lists the reports.

So a report that a listing has missed was written when the token was gone, and its writer sees that.

Token and reports lie under `reports/<session>/<n>`: the token, an empty object, under the
session's own id, a report under its copy's. A report is a manifest of one chunk. Nothing points to
either, and they are collected as the other objects of their session. No token is made again.
"""

from __future__ import annotations

from functools import partial
from itertools import batched
from typing import Final, NoReturn, Protocol

from zarr_manifests.engine.edit.packs import native_ref
from zarr_manifests.engine.objects.chunks import SessionKeys
from zarr_manifests.engine.objects.metadata import create_own
from zarr_manifests.errors import (
    CorruptObjectError,
    ObjectNotFoundError,
    ReadOnlyError,
    SessionClosedError,
    StorageError,
    UnsupportedStorageError,
)
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.chunk_table import (
    UNSET,
    ChunkRef,
    ChunkTable,
    InlineRef,
    NativeRef,
    StoredRef,
    Unset,
)
from zarr_manifests.format.manifest import Manifest
from zarr_manifests.format.nodes import Node
from zarr_manifests.grid import Coords
from zarr_manifests.ids import crc32c, object_key, session_of
from zarr_manifests.runtime import Runtime
from zarr_manifests.storage import Storage

__all__ = [
    "Copy",
    "Reported",
    "check_reporting",
    "close_token",
    "open_token",
    "read_reports",
    "refuse_in_copy",
    "set_reported",
    "unset_reported",
]

_KIND: Final = "reports"
_MOST_BYTES: Final = 1 << 16
_AT_ONCE: Final = 256

type Reported = dict[tuple[bytes, Coords], dict[str, StoredRef]]
"""By node id and coordinate: what each copy has changed the chunk to, by its session id."""


# --- what the session does ---------------------------------------------------------------------


def check_reporting(storage: Storage, keys: SessionKeys) -> None:
    """Refuse a storage that does not list what was written, or does not delete.

    Better now than when all the work is done.

    Raises
    ------
    UnsupportedStorageError
        If it is one.
    """
    key = open_token(storage, keys)
    try:
        listed = [info.key for info in storage.list(key)]
        close_token(storage, key)
    except StorageError as error:
        raise _unsuitable(storage) from error
    if listed != [key]:
        raise _unsuitable(storage)


def _unsuitable(storage: Storage) -> UnsupportedStorageError:
    return UnsupportedStorageError(
        f"{storage.url} cannot list and delete objects as copies='report' needs it; check the "
        "permissions, or use copies='merge' with zarr_manifests.write or session.fork()"
    )


def open_token(storage: Storage, keys: SessionKeys) -> str:
    """Let copies of the session report from now on; the key of its token."""
    key = keys.next(_KIND)
    create_own(storage, key, b"")
    return key


def close_token(storage: Storage, token: str) -> None:
    """Let no copy's call return any more.

    Raises
    ------
    StorageError
        If that is not certain.
    """
    storage.delete_many([token])
    if _is_there(storage, token):
        raise StorageError(
            f"{storage.url} has not deleted {token}, so that copies of the session may go on "
            "writing; nothing was committed. Check the permissions, and commit again"
        )


def _is_there(storage: Storage, token: str) -> bool:
    try:
        storage.head(token)
    except ObjectNotFoundError:
        return False
    return True


def read_reports(storage: Storage, keys: SessionKeys, runtime: Runtime) -> Reported:
    """All reports of the session's copies; of each copy's about one chunk, the last.

    To be called when the token is gone.
    """
    found: Reported = {}
    for batch in batched(_listed(storage, keys), _AT_ONCE):
        reads = [partial(_read, storage, object_key(_KIND, *report)) for report in batch]
        for (copy_id, _), (chunk, ref) in zip(batch, runtime.parallel(reads), strict=True):
            found.setdefault(chunk, {})[copy_id] = ref
    return found


def _listed(storage: Storage, keys: SessionKeys) -> list[tuple[str, int]]:
    """Copy and number of each report; those of a copy in the order that it has written them."""
    prefix = f"{_KIND}/{keys.lineage_prefix.partition('/')[2]}"
    listed = [
        (copy_id, int(info.key.rpartition("/")[2]))
        for info in storage.list(prefix)
        if (copy_id := session_of(info.key)) != keys.session_id
    ]
    return sorted(listed)


def _read(storage: Storage, key: str) -> tuple[tuple[bytes, Coords], StoredRef]:
    try:
        data = storage.get(key, 0, _MOST_BYTES + 1)
    except ObjectNotFoundError as error:
        raise CorruptObjectError(
            f"{key}, a report of a copy, is gone; what the copy wrote cannot be committed"
        ) from error
    if len(data) > _MOST_BYTES:
        raise CorruptObjectError(f"{key} is longer than a report can be")
    manifest = Manifest.from_object(data, BlobRef.to(key, data))
    node_ids = {part.node_id for part in manifest.directory()}
    rows = [
        row for node_id in node_ids for table in manifest.tables(node_id) for row in table.refs()
    ]
    if len(node_ids) != 1 or len(rows) != 1:
        raise CorruptObjectError(f"{key} is no report of one chunk")
    ((coords, ref),) = rows
    if not isinstance(ref, Unset) and not (
        isinstance(ref, NativeRef) and ref.source == session_of(key)
    ):
        raise CorruptObjectError(f"{key} reports a chunk that its copy has not written")
    return (node_ids.pop(), coords), ref


# --- what a copy does --------------------------------------------------------------------------


class Copy(Protocol):
    """What a copy's workspace has, as far as it is needed to report."""

    storage: Storage
    keys: SessionKeys | None
    token: str | None

    def find(self, key: str) -> ChunkRef | None:
        """What is at the key; None if nothing is."""

    def node(self, path: str) -> Node | None:
        """The node at that path."""

    def chunk_at(self, key: str) -> tuple[Node, Coords] | None:
        """The array and coordinate of which the key is a chunk, whether it is there or not."""

    def keep(self, node: Node, coords: Coords, ref: ChunkRef | None) -> None:
        """Have a chunk of an array that was written, or was unset."""


def set_reported(copy: Copy, key: str, path: str | None, data: bytes | memoryview) -> None:
    """Write a chunk in a copy, as an object of its own, and report it.

    `path` is that of the node whose document may lie at the key, if one may.

    Raises
    ------
    ReadOnlyError
        If the key is no chunk of an array that is there.
    SessionClosedError
        If the session has begun to commit, or has ended: the change may be in the commit or not.
    """
    if path is not None:
        known = copy.find(key)
        if isinstance(known, InlineRef) and known.data == data:
            return  # libraries write documents anew that have not changed
    node, coords = _chunk_at(copy, key, path)
    assert copy.keys is not None
    ref = native_ref(copy.keys.next("chunks"), 0, len(data), crc32c(data))
    create_own(copy.storage, ref.key, data, durable=False)
    copy.keep(node, coords, ref)
    _report(copy, node, coords, ref)


def unset_reported(copy: Copy, key: str, path: str | None) -> None:
    """Unset a chunk in a copy, and report it, also if it is absent here: elsewhere it may not be.

    Raises
    ------
    ReadOnlyError, SessionClosedError
        As `set_reported`.
    """
    if copy.chunk_at(key) is None and copy.find(key) is None:
        return
    node, coords = _chunk_at(copy, key, path)
    copy.keep(node, coords, None)
    _report(copy, node, coords, UNSET)


def _chunk_at(copy: Copy, key: str, path: str | None) -> tuple[Node, Coords]:
    is_document = path is not None and copy.node(path) is not None
    chunk = None if is_document else copy.chunk_at(key)
    return chunk or refuse_in_copy(f"{key!r} cannot be changed")


def _report(copy: Copy, node: Node, coords: Coords, ref: StoredRef) -> None:
    keys, token, storage = copy.keys, copy.token, copy.storage
    assert keys is not None
    assert token is not None
    report = Manifest.of([(node.node_id, ChunkTable.of({coords: ref}))]).encode()
    create_own(storage, keys.next(_KIND), report, durable=False)
    # After the report: what the session's listing has missed finds the token gone.
    if not _is_there(storage, token):
        raise SessionClosedError(
            "the session that this store was copied from has begun to commit, or has ended; "
            "whether what was just written is in its commit is not certain. Commit when all the "
            "work is done, and write what came too late in another session"
        )


def refuse_in_copy(what: str) -> NoReturn:
    """Say that a copy that reports may not do that."""
    raise ReadOnlyError(
        f"{what} in a copy of a session's store: with copies='report', copies write and unset "
        "chunks of arrays that are there, and nothing else. Do it in the session, before its "
        "store is pickled, or use session.fork() and merge"
    )
