"""Creating a repository: its first snapshot, then its root.

The repository exists once the root is written. Objects of a create that was killed before that are
recognized by their names, and do not keep the next create from succeeding.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from zarr_manifests.config import RepositoryConfig
from zarr_manifests.engine.objects.metadata import Objects, Upload
from zarr_manifests.engine.root.deferred_create import Unmade
from zarr_manifests.engine.root.disk_reserve import keep_reserve
from zarr_manifests.engine.root.hints import around, instead
from zarr_manifests.engine.root.roots import RootAt, Roots
from zarr_manifests.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    ObjectNotFoundError,
    UnsupportedStorageError,
)
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.delta import COMMIT_ID_BYTES, CommitKind, Delta
from zarr_manifests.format.root import ROOT_KEY, WRITE_ID_BYTES, Branch, LogEntry, Root
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.ids import new_session_id, object_key, session_of, session_start, snapshot_id_of
from zarr_manifests.runtime import Runtime
from zarr_manifests.storage import Storage

__all__ = ["create_repository"]


def create_repository(
    storage: Storage, runtime: Runtime, objects: Objects, config: RepositoryConfig, branch: str
) -> RootAt:
    """Create a repository with one empty snapshot on `branch`.

    Raises
    ------
    AlreadyExistsError
        If there is a repository, or anything else, at the place.
    UnsupportedStorageError
        If the storage cannot put-if-absent and compare-and-swap.
    """
    if not (storage.capabilities.cas and storage.capabilities.create):
        raise UnsupportedStorageError(
            f"{storage.url} cannot put-if-absent and compare-and-swap, so a repository there "
            "could lose commits; choose a local disk or a storage that can"
        )
    _check_empty(storage)
    repository_id = runtime.random_bytes(16).hex()
    head = _first_snapshot(objects, runtime, repository_id)
    now_ms = runtime.now_ms()
    root = Root(
        repository_id,
        1,
        runtime.random_bytes(WRITE_ID_BYTES),
        now_ms,
        config,
        {branch: Branch(head, None)},
        log=(
            LogEntry(1, now_ms, "create", branch, snapshot_id_of(head.key)).signed(runtime.who()),
        ),
    )
    at = Roots(storage, runtime).create(root)
    if at is None:
        raise AlreadyExistsError(
            f"a repository was made at {storage.url} at the same moment; open it instead"
        )
    if not isinstance(storage, Unmade):  # which keeps the reserve once the repository exists
        keep_reserve(storage)
    return at


def _check_empty(storage: Storage) -> None:
    """Refuse a place that holds anything but leftovers of writers that never made a repository.

    A repository that has had a commit has archives of its root, from which it can be recovered.
    """
    outer = around(storage)
    if outer is not None:
        raise AlreadyExistsError(
            f"{storage.url} lies inside the repository {outer}, whose groups are not folders: "
            "write to that with group=, or choose a place outside"
        )
    stray = storage.stray()
    if stray is not None:
        raise AlreadyExistsError(
            f"{storage.url} is not empty (it holds {stray!r}); choose an empty place"
        )
    for info in storage.list():
        if not _is_abandoned(info.key):
            _refuse_repository(storage)
            hint = instead(storage) or (
                "choose an empty place. If there was a repository here, its object 'current' is "
                "lost: the newest archive under 'root/' holds its last known state"
            )
            raise AlreadyExistsError(
                f"{storage.url} is not empty (it holds {info.key!r}) and has no repository; {hint}"
            )


def _is_abandoned(key: str) -> bool:
    """Whether it may be left over from a writer killed before its first commit."""
    try:
        return session_start(session_of(key)) <= 1
    except InvalidArgumentError:
        return False


def _refuse_repository(storage: Storage) -> None:
    """Raise if there is a root; leftovers can come before it in a listing."""
    try:
        storage.head(ROOT_KEY)
    except ObjectNotFoundError:
        return
    raise AlreadyExistsError(
        f"there is a repository at {storage.url}; open it, or use open_or_create"
    )


def _first_snapshot(objects: Objects, runtime: Runtime, repository_id: str) -> BlobRef:
    session = new_session_id(0, runtime.random_bytes(12))
    commit_id = runtime.random_bytes(COMMIT_ID_BYTES)
    log = Upload(object_key("deltas", session, 0), Delta(commit_id).encode())
    key = object_key("snapshots", session, 1)
    snapshot = Snapshot(
        snapshot_id_of(key),
        repository_id,
        None,
        commit_id,
        CommitKind.METADATA,
        "create repository",
        {},
        runtime.now_ms(),
        None,
        (),
        log.ref,
    )
    head = Upload(key, snapshot.encode())
    runtime.parallel([partial(objects.create, u.key, u.data) for u in (log, head)])
    return replace(head.ref, copy=head.data)
