"""Creating a repository: its first snapshot, then its root; at once, or with its first commit.

The repository exists once the root is written. Objects of a create that was killed before that are
recognized by their names, and do not keep the next create from succeeding.

On an object store it takes two rounds of requests. In the first the place is listed, the proof of
its conditions begins, and the snapshot is written: under a random name, so that no condition is
needed. The root is written while the proof ends, if it is known by then that it replaces no other.
If the store turns out to ignore swaps, the root is deleted. Nobody has swapped it: whoever wants to
finds out first. A store that ignores conditions keeps neither, and a place that is not empty keeps
no snapshot.

With the first commit (`Unmade`), the first root, that root's archive and the empty snapshot stay in
memory until that commit's swap writes them, the root by put-if-absent. So a failure before that
leaves no repository, and a failure before the first chunk leaves nothing at all. Invariants:

- *One repository*: of any number of writers that do this concurrently, one swap succeeds. The
  others get an error saying that a repository was made at the same moment.
- *Nothing of others is deleted*: only objects under this writer's random session ids are withdrawn,
  and only while none of its swaps can have taken effect.
- Leftovers of a killed writer do not keep the next one from making a repository.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import Lock

from msgspec.structs import replace

from zarr_manifests.config import Config
from zarr_manifests.engine.metadata import Objects, Upload, is_there
from zarr_manifests.engine.roots import RootAt, Roots, around, instead
from zarr_manifests.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    ObjectNotFoundError,
    StorageError,
    StorageFullError,
    UnsupportedStorageError,
)
from zarr_manifests.format.manifest import Delta
from zarr_manifests.format.root import ROOT_KEY, WRITE_ID_BYTES, Branch, LogEntry, Root, archive_key
from zarr_manifests.format.snapshot import CommitKind, Snapshot
from zarr_manifests.ids import (
    COMMIT_ID_BYTES,
    lineage_of,
    new_session_id,
    object_key,
    session_of,
    session_start,
    snapshot_id_of,
)
from zarr_manifests.metrics import Meter
from zarr_manifests.runtime import Runtime, one_by_one
from zarr_manifests.storage import Storage
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.metered import MeteredStorage, unmetered
from zarr_manifests.storage.protocol import ProvesConditions, Tagged, Token, is_key

_TOKEN = "unmade"
_ARCHIVE = archive_key(1)


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
    uploads, proof = (log, snapshot), _proof(storage)
    if proof is None:
        _refuse_stray(storage, storage.stray())
        _check_no_objects(storage, (info.key for info in storage.list()))
        runtime.parallel([partial(objects.create, u.key, u.data) for u in uploads])
        at = Roots(storage, runtime).create(root)
    else:
        known = _put_beside(proof, storage, runtime, uploads)
        at = _create_beside(proof, storage, runtime, root, uploads, at_once=known)
    if at is None:
        raise AlreadyExistsError(
            f"a repository was made at {storage.url} at the same moment; open it instead"
        )
    if not isinstance(storage, Unmade):  # which keeps the reserve once the repository exists
        keep_reserve(storage)
    return at


def _proof(storage: Storage) -> ProvesConditions | None:
    """The storage if it proves its conditions, and the repository is to be made at once."""
    bare = unmetered(storage)
    return bare if isinstance(bare, ProvesConditions) and not isinstance(storage, Unmade) else None


def _put_beside(
    proof: ProvesConditions, storage: Storage, runtime: Runtime, uploads: Sequence[Upload]
) -> bool:
    """Refuse a place that is not empty; beside that, write objects and begin the proof.

    Return whether the store is known to create no object twice.
    """
    calls: list[Callable[[], bool | None]] = [partial(_check_no_names, storage, proof)]
    calls += [proof.begin_proof, *[partial(storage.put, u.key, u.data) for u in uploads]]
    try:
        return bool(runtime.parallel(calls)[1])
    except BaseException:
        keys = [upload.key for upload in uploads]
        for withdraw in (proof.withdraw_proof, partial(storage.delete_many, keys)):
            with contextlib.suppress(StorageError):  # the first error says more
                withdraw()
        raise


def _create_beside(
    proof: ProvesConditions,
    storage: Storage,
    runtime: Runtime,
    root: Root,
    uploads: Sequence[Upload],
    *,
    at_once: bool,
) -> RootAt | None:
    """Write the root beside the end of the proof, or after it; None if there is one already.

    If the store ignores conditions, the root and the objects are deleted.
    """
    roots, made = Roots(storage, runtime), list[RootAt]()

    def create() -> None:
        made.extend(filter(None, [roots.create(root, archived=False)]))

    try:
        (runtime.parallel if at_once else one_by_one)([proof.end_proof, create])
    except UnsupportedStorageError:
        with contextlib.suppress(StorageError):  # the first error says more
            storage.delete_many([*[ROOT_KEY for _ in made], *[upload.key for upload in uploads]])
        raise
    except StorageError:  # decides nothing: the first commit begins the proof again
        if not made:
            raise
    for at in made:  # the first commit archives it otherwise
        with contextlib.suppress(RuntimeError):  # no more threads: the program is ending
            runtime.background(partial(roots.archive, at))
    return made[0] if made else None


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
            hint = instead(storage) or (
                "choose an empty place. If there was a repository here, its object 'current' is "
                "lost: the newest archive under 'root/' holds its last known state"
            )
            raise AlreadyExistsError(
                f"{storage.url} is not empty (it holds {key!r}) and has no repository; {hint}"
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


# --- with the first commit ------------------------------------------------------------------------


class Unmade(MeteredStorage):
    """A storage for a repository that does not exist before its first commit.

    Parameters
    ----------
    storage : Storage
        The storage for the repository.
    """

    __slots__ = ("_held", "_lineages", "_lock", "_root", "_state")

    def __init__(self, storage: Storage) -> None:
        super().__init__(unmetered(storage), Meter())
        self._root: bytes | None = None
        self._held: dict[str, bytes] = {}  # to write before a chunk, or with the root
        self._lineages: set[str] = set()
        self._state = "unmade"  # then "tried", then "made" or "lost"
        self._lock = Lock()

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        held = self._held.get(key)
        if held is not None:
            return held[start:] if length is None else held[start : start + length]
        return super().get(key, start, length)

    def get_tagged(self, key: str) -> Tagged:
        if key != ROOT_KEY or self._root is None or self._state == "made":
            return super().get_tagged(key)
        try:
            found = super().get_tagged(key)
        except ObjectNotFoundError:
            return Tagged(self._root, _TOKEN)
        self._is_ours(found)
        return found

    def create(self, key: str, data: bytes | memoryview, *, durable: bool = True) -> bool:
        if self._root is None or key == _ARCHIVE:
            self._held.setdefault(key, bytes(data))
            return True
        self.begin(key)
        return super().create(key, data, durable=durable)

    async def create_async(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        self.begin(key)
        return await super().create_async(key, data, durable=durable)

    def cas(
        self,
        key: str,
        data: bytes,
        token: Token | None,
        *,
        then_create: tuple[str, bytes] | None = None,
    ) -> Token | None:
        if key != ROOT_KEY or self._state == "made":
            return super().cas(key, data, token, then_create=then_create)
        if self._root is None:
            self._root = data
            if then_create is not None:
                self._held[then_create[0]] = then_create[1]
            return _TOKEN
        self.begin()
        self._state = "tried"
        new = super().cas(key, data, None, then_create=then_create)
        if new is None:
            self._is_ours(super().get_tagged(key))
            return None
        self._made()
        return new

    def begin(self, key: str = "") -> None:
        """Write what has to exist before the object, or before other processes write.

        Parameters
        ----------
        key : str, optional
            Key of an object that this writer, or a copy of it, is about to write.
        """
        with self._lock:
            for written in (key, *self._held):
                with contextlib.suppress(InvalidArgumentError):  # not an object of a session
                    self._lineages.add(lineage_of(session_of(written)))
            for early in [early for early in self._held if early != _ARCHIVE]:
                self.storage.create(early, self._held[early])
                del self._held[early]

    def make(self) -> None:
        """Make the repository without a commit, unless it exists already, with its reserve.

        Raises
        ------
        AlreadyExistsError
            If somebody else has made one.
        """
        if self._state != "made" and self._root is not None:
            self.cas(ROOT_KEY, self._root, _TOKEN, then_create=(_ARCHIVE, self._held[_ARCHIVE]))
        keep_reserve(self.storage)

    def withdraw(self) -> bool:
        """Delete what was written for the repository, unless it exists or may still come to exist.

        Returns
        -------
        bool
            Whether somebody else has made a repository at the same place.
        """
        if self._lineages and not self._may_be_there():
            own = [f"/{lineage}" for lineage in self._lineages]
            keys = [info.key for info in self.storage.list()]
            self.storage.delete_many(key for key in keys if any(name in key for name in own))
        return self._state == "lost"

    def _may_be_there(self) -> bool:
        if self._state != "tried":
            return self._state == "made"
        if not self.storage.capabilities.inline:
            return True  # a request that was sent may still take effect
        return is_there(self.storage, ROOT_KEY)

    def _is_ours(self, found: Tagged) -> None:
        """Accept a root of our own, from a swap whose answer was lost; raise if it is not ours."""
        assert self._root is not None
        if Root.from_object(found.data).repository_id == Root.from_object(self._root).repository_id:
            self._made()
            return
        self._state = "lost"
        raise AlreadyExistsError(
            f"a repository was made at {self.url} at the same moment; open it instead"
        )

    def _made(self) -> None:
        self._state = "made"
        with contextlib.suppress(StorageError):  # the next swap archives it otherwise
            self.storage.create(_ARCHIVE, self._held[_ARCHIVE])


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
