"""Creating a repository: its first snapshot, then its root.

The repository exists once the root is written. Objects of a create that was killed before that are
recognized by their names, and do not keep the next create from succeeding.

On an object store it takes two rounds of requests. In the first the place is listed, the store is
tested for conditions, and the snapshot is written: under a random name, so that no condition is
needed. A store that ignores conditions, and a place that is not empty, keep no snapshot. The root
is written in the second, by a condition that is known to be respected. If the probe is new, whether
swaps respect theirs is known only after that round. If they do not, the root stays, since others
may have read it; no process swaps it, since each tests that before its first swap.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from msgspec.structs import replace

from zarr_manifests.config import Config
from zarr_manifests.engine.objects import Objects, Upload, is_there
from zarr_manifests.engine.roots import RootAt, Roots, around
from zarr_manifests.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    StorageError,
    StorageFullError,
    UnsupportedStorageError,
)
from zarr_manifests.format.manifest import Delta
from zarr_manifests.format.root import ROOT_KEY, WRITE_ID_BYTES, Branch, LogEntry, Root
from zarr_manifests.format.snapshot import CommitKind, Snapshot
from zarr_manifests.ids import (
    COMMIT_ID_BYTES,
    new_session_id,
    object_key,
    session_of,
    session_start,
    snapshot_id_of,
)
from zarr_manifests.metrics import unmetered
from zarr_manifests.runtime import Runtime
from zarr_manifests.storage import Storage
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.protocol import ProvesConditions, is_key


def create_repository(
    storage: Storage, runtime: Runtime, objects: Objects, config: Config, branch: str
) -> RootAt:
    """Create a repository with one empty snapshot on `branch`.

    Raises
    ------
    AlreadyExistsError
        If there is a repository, or anything else, at the place.
    UnsupportedStorageError
        If the storage cannot put-if-absent and compare-and-swap.
    """
    if not storage.capabilities.cas:
        raise UnsupportedStorageError(
            f"{storage.url} cannot put-if-absent and compare-and-swap, so a repository there "
            "could lose commits; choose a local disk or a storage that can"
        )
    check_outside(storage)
    repository_id = runtime.random_bytes(16).hex()
    log, snapshot = _first_snapshot(runtime, repository_id)
    head = replace(snapshot.ref, copy=snapshot.data)
    now_ms = runtime.now_ms()
    root = Root(
        repository_id,
        1,
        runtime.random_bytes(WRITE_ID_BYTES),
        now_ms,
        config,
        {branch: Branch(head, None)},
        log=(LogEntry(1, now_ms, "create", branch, snapshot_id_of(head.key), by=runtime.who()),),
    )
    uploads, proof = (log, snapshot), unmetered(storage)
    if isinstance(proof, ProvesConditions):
        _put_beside(proof, storage, runtime, uploads)
        beside: list[Callable[[], None]] = [proof.prove]
    else:
        _refuse_stray(storage, storage.stray())
        _check_no_objects(storage, (info.key for info in storage.list()))
        runtime.parallel([partial(objects.create, u.key, u.data) for u in uploads])
        beside = []
    making: Callable[[], RootAt | None] = partial(Roots(storage, runtime).create, root)
    at, *_ = runtime.parallel([making, *beside])
    if at is None:
        raise AlreadyExistsError(
            f"a repository was made at {storage.url} at the same moment; open it instead"
        )
    keep_reserve(storage)
    return at


def _put_beside(
    proof: ProvesConditions, storage: Storage, runtime: Runtime, uploads: Sequence[Upload]
) -> None:
    """Refuse a place that is not empty, or ignores conditions; beside that, write the objects.

    Of a place that is refused, what was written is deleted.
    """
    check, prove = partial(_check_no_names, storage, proof), partial(proof.prove, swaps=False)
    calls: list[Callable[[], None]] = [check, prove]
    calls += [partial(storage.put, upload.key, upload.data) for upload in uploads]
    try:
        runtime.parallel(calls)
    except BaseException:
        keys = [upload.key for upload in uploads]
        for withdraw in (proof.withdraw_proof, partial(storage.delete_many, keys)):
            with contextlib.suppress(StorageError):  # the first error says more
                withdraw()
        raise


def check_outside(storage: Storage) -> None:
    """Refuse a place inside a repository.

    Raises
    ------
    AlreadyExistsError
        If it lies in one.
    """
    outer = around(storage)
    if outer is not None:
        raise AlreadyExistsError(
            f"{storage.url} lies inside the repository {outer}, whose groups are not folders: "
            "write to that repository with group=, or choose a place outside"
        )


def _check_no_names(storage: Storage, proof: ProvesConditions) -> None:
    """Refuse what is there, by one listing."""
    for name in proof.names():
        if not is_key(name):
            _refuse_stray(storage, name)
        _check_no_objects(storage, [name])


def _refuse_stray(storage: Storage, stray: str | None) -> None:
    if stray is not None:
        raise AlreadyExistsError(
            f"{storage.url} is not empty (it holds {stray!r}); choose an empty place"
        )


def _check_no_objects(storage: Storage, keys: Iterable[str]) -> None:
    """Refuse objects other than leftovers of writers that never made a repository.

    A repository that has had a commit has archives of its root, from which it can be recovered.
    """
    for key in keys:
        if not _is_abandoned(key):
            if is_there(storage, ROOT_KEY):  # leftovers can come before it in a listing
                raise AlreadyExistsError(
                    f"there is a repository at {storage.url}; open it, as with create=True"
                )
            raise AlreadyExistsError(
                f"{storage.url} is not empty (it holds {key!r}) and has no repository; choose an "
                "empty place, or call zm.clone again if a clone was interrupted. If there was a "
                "repository here, its object 'current' is lost: zm.recover makes it anew from the "
                "newest archive under 'root/'"
            )


def _is_abandoned(key: str) -> bool:
    """Whether it may be left over from a writer killed before its first commit."""
    try:
        return session_start(session_of(key)) <= 1
    except InvalidArgumentError:
        return False


def _first_snapshot(runtime: Runtime, repository_id: str) -> tuple[Upload, Upload]:
    """The empty log and the empty snapshot."""
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
    return log, Upload(key, snapshot.encode())


# --- reserved disk space --------------------------------------------------------------------------


def with_reserve[T](storage: Storage, call: Callable[[], T]) -> T:
    """Return what the call returns; on a full disk, release the reserve and call again."""
    try:
        return call()
    except StorageFullError:
        inner = unmetered(storage)
        if not isinstance(inner, LocalStorage) or not inner.give_up_reserve():
            raise
    return call()


def keep_reserve(storage: Storage) -> None:
    """Reserve disk space, if the storage can and there is enough."""
    inner = unmetered(storage)
    if isinstance(inner, LocalStorage):
        inner.keep_reserve()
