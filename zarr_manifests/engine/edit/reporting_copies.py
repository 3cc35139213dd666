"""Copies of a session's store that report what they change through the storage.

A commit cannot know all copies, or ask whether they are done. It guarantees this: a call in a copy
that returned before the commit began is in the commit; a later call raises; a call that raised may
or may not be in it. The guarantee rests on the order of two sequences:

- A copy writes the chunk, then its report, then checks that the session's *open token* still
  exists. If it does not, the copy raises.
- The session deletes the token, checks that it is gone, and only then lists the reports.

So if the listing misses a report, the token was gone when that report was written, and its writer
raises.

Token and reports lie under `reports/<session>/<n>`: the token, an empty object, under the
session's own id, a report under its copy's. A report is a manifest of one chunk. Nothing points to
tokens or reports; garbage collection deletes them like other unreferenced objects of the session. A
token's key is never used again.
"""

from __future__ import annotations

from functools import partial
from itertools import batched
from typing import Final, NoReturn, Protocol

from zarr_manifests.engine.edit.node_edits import NodeEdits
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
from zarr_manifests.format.chunk_table import (
    UNSET,
    ChunkTable,
    InlineRef,
    NativeRef,
    StoredRef,
    Unset,
)
from zarr_manifests.format.manifest import Manifest
from zarr_manifests.format.records import BlobRef
from zarr_manifests.grid import Coords
from zarr_manifests.ids import object_key, session_of
from zarr_manifests.runtime import Runtime
from zarr_manifests.storage import Storage

_KIND: Final = "reports"
_MOST_BYTES: Final = 1 << 16
_AT_ONCE: Final = 256

type Reported = dict[tuple[bytes, Coords], dict[str, StoredRef]]
"""By node id and coordinate: the new ref of the chunk by each copy's session id."""


# --- what the session does ---------------------------------------------------------------------


def check_reporting(storage: Storage, keys: SessionKeys) -> None:
    """Refuse a storage that cannot list or delete objects.

    Otherwise the commit would fail after all the work is done.

    Raises
    ------
    UnsupportedStorageError
        If the storage cannot do both.
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
    """Create the session's token, so that copies can report; return its key."""
    key = keys.next(_KIND)
    create_own(storage, key, b"")
    return key


def close_token(storage: Storage, token: str) -> None:
    """Delete the token, so that every later write in a copy raises.

    Raises
    ------
    StorageError
        If the token may still exist.
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
    """The last report of each copy about each chunk.

    Call it only after the token is gone.
    """
    found: Reported = {}
    for batch in batched(_listed(storage, keys), _AT_ONCE):
        reads = [partial(_read, storage, object_key(_KIND, *report)) for report in batch]
        for (copy_id, _), (chunk, ref) in zip(batch, runtime.parallel(reads), strict=True):
            found.setdefault(chunk, {})[copy_id] = ref
    return found


def _listed(storage: Storage, keys: SessionKeys) -> list[tuple[str, int]]:
    """Copy id and number of each report, in the order in which each copy wrote them."""
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
        raise CorruptObjectError(f"{key} is not a report of one chunk")
    ((coords, ref),) = rows
    if not isinstance(ref, Unset) and not (
        isinstance(ref, NativeRef) and ref.source == session_of(key)
    ):
        raise CorruptObjectError(f"{key} reports a chunk that its copy has not written")
    return (node_ids.pop(), coords), ref


# --- what a copy does --------------------------------------------------------------------------


class Copy(Protocol):
    """The part of a copy's workspace that reporting needs."""

    storage: Storage
    edits: NodeEdits
    token: str | None


def change_reported(
    copy: Copy, key: str, path: str | None, data: bytes | memoryview | None
) -> None:
    """Write a chunk in a copy as its own object, or unset it if `data` is None, and report that.

    A chunk that is absent is unset too, since another copy may have set it. `path` is the path of
    the node if the key has the name of a metadata document, else None.

    Raises
    ------
    ReadOnlyError
        If the key is not a chunk of an existing array.
    SessionClosedError
        If the session has begun to commit, or has ended. The change may or may not be committed.
    """
    edits, contents, storage = copy.edits, copy.edits.contents, copy.storage
    if data is None:
        if contents.chunk_at(key) is None and contents.find(key) is None:
            return
    elif path is not None:
        known = contents.find(key)
        if isinstance(known, InlineRef) and known.data == data:
            return  # libraries rewrite unchanged documents
    is_document = path is not None and contents.node(path) is not None
    chunk = None if is_document else contents.chunk_at(key)
    node, coords = chunk or refuse_in_copy(f"{key!r} cannot be changed")
    ref: NativeRef | Unset = UNSET
    if data is not None:
        ref = native_ref(edits.new_chunk_key(), data)
        create_own(storage, ref.key, data, durable=False)
    with contents.lock:
        if isinstance(ref, Unset):
            edits.unset(node, coords)
        else:
            edits.hold(node, {coords: ref})
    keys, token = contents.keys, copy.token
    assert keys is not None
    assert token is not None
    report = Manifest.of([(node.node_id, ChunkTable.of({coords: ref}))]).encode()[0]
    create_own(storage, keys.next(_KIND), report, durable=False)
    # Only after the report: if the session's listing missed it, the token is gone by now.
    if not _is_there(storage, token):
        raise SessionClosedError(
            "the session that this store was copied from has begun to commit, or has ended; "
            "whether what was just written is in its commit is not certain. Commit when all the "
            "work is done, and write what came too late in another session"
        )


def refuse_in_copy(what: str) -> NoReturn:
    """Raise the error for what a reporting copy may not do."""
    raise ReadOnlyError(
        f"{what} in a copy of a session's store: with copies='report', copies write and unset "
        "chunks of existing arrays only. Do it in the session, before its "
        "store is pickled, or use session.fork() and merge"
    )
