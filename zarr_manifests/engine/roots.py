"""The root in the storage: read, archive, swap.

The swap is the only linearization point of the repository. The protocol:

1. Before a version is replaced, its canonical form is archived (put-if-absent). So if version v+2
   exists, the archive of v+1 does too.
2. The swap is one compare-and-swap with a fresh random write id.
3. A root that would be too large moves refs and leases to pages (`format.root`). They are written
   before the swap; `with_branch`, `with_ref`, `with_leases` and `whole` read them.
4. If a swap fails, or its answer is lost, the root is read again. The swap was a success if the
   root has our write id, its log has our operation's id, or the archive of our version has our
   write id. If the root is unchanged, the same bytes are sent again. Otherwise somebody else came
   first. If none of this can be determined, it raises `CommitOutcomeUnknownError` and does not
   retry.

Claims of branches, compactions and collections, and the errors for those who come too late
-------------------------------------------------------------------------------------------

A claim is a swap of the root. Its epoch is the version that the swap makes. Versions only rise, so
no epoch occurs twice, even if a branch is deleted and made again. A *writer's* epoch is stored with
its branch; those of the *compactor* and the *collector* with the repository.

Invariants, checked against exactly the root that is replaced, so that a decision stays true:

- A session with a claim goes on only while the claim's epoch is the current one.
- A session without a claim goes on only if it began at the newest claim or later.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from msgspec import Struct
from msgspec.structs import replace

from zarr_manifests.engine.objects import ObjectReader, Objects, SessionKeys, Upload
from zarr_manifests.errors import (
    CommitOutcomeUnknownError,
    Conflict,
    ConflictError,
    ConflictKind,
    CorruptObjectError,
    FencedError,
    ManifestsError,
    MissingChunkError,
    NotARepositoryError,
    ObjectNotFoundError,
    StorageError,
    StorageFullError,
    UnsupportedStorageError,
)
from zarr_manifests.format.records import MAGIC, MAX_ROOT_BYTES, BlobRef, Header
from zarr_manifests.format.root import (
    ALL,
    COLLECTOR,
    COMPACTOR,
    LEASES,
    LOG_TAIL,
    ROOT_BYTES,
    ROOT_KEY,
    WRITE_ID_BYTES,
    Branch,
    Lease,
    LogEntry,
    Page,
    PageRef,
    Root,
    absorb,
    archive_key,
    checked,
    entries,
    known_ref,
    leaving,
    pages_with,
    plan_spill,
    pulled,
    with_entries,
    without,
)
from zarr_manifests.ids import lineage_of, snapshot_id_of
from zarr_manifests.metrics import unmetered
from zarr_manifests.runtime import Runtime
from zarr_manifests.storage import Storage
from zarr_manifests.storage.disk import open_regular
from zarr_manifests.storage.protocol import ReadableStorage, TakesTurns, Token, Turn
from zarr_manifests.versions import HEADS, TAGS


def around(storage: ReadableStorage) -> Path | None:
    """The folder of a repository that contains the place; only local disks are checked."""
    url = urlsplit(storage.url)
    for outer in Path(unquote(url.path)).parents if url.scheme == "file" else ():
        with suppress(OSError):  # unknown counts as no
            there = open_regular(str(outer / ROOT_KEY), follow_links=True)
            with os.fdopen(there, "rb") as file:
                if file.read(len(MAGIC)) == MAGIC:
                    return outer
    return None


# --- roots --------------------------------------------------------------------------------------


_RESENDS: Final = 5
_BACKOFF_S: Final = 0.02
_MAX_BACKOFF_S: Final = 1.0
_TURN_S: Final = 10.0
_TURN_POLL_S: Final = 0.001


class RootAt(Struct, frozen=True):
    """A version of the root, and the storage's token to swap it."""

    root: Root
    token: Token


def is_missing(error: BaseException) -> bool:
    """Whether the error means that a referenced object does not exist."""
    return isinstance(error, MissingChunkError) or (
        isinstance(error, CorruptObjectError) and isinstance(error.__cause__, ObjectNotFoundError)
    )


@contextmanager
def unless_missing() -> Iterator[None]:
    """A block that ends early where a referenced object does not exist."""
    try:
        yield
    except (CorruptObjectError, MissingChunkError) as error:
        if not is_missing(error):
            raise


def opened[R](attempt: Callable[[], R]) -> R:
    """The result of the attempt, which reads the root and opens objects that it leads to.

    A missing object may have been collected after the root was read. So it counts as damage only if
    it is still missing when everything is read again.
    """
    missed: set[str] = set()
    while True:
        try:
            return attempt()
        except (CorruptObjectError, MissingChunkError) as error:
            if not is_missing(error) or str(error) in missed:
                raise
            missed.add(str(error))


class _Swaps:
    """A number that changes with every swap this process tries, in any repository."""

    numbers = itertools.count(1)  # an addition would not be atomic between threads
    done = 0


class RootReader:
    """Reads the root of one repository."""

    _storage: ReadableStorage
    _pages: ObjectReader

    def __init__(self, storage: ReadableStorage, runtime: Runtime) -> None:
        self._storage = storage
        self._runtime = runtime
        self._repository_id: str | None = None
        self._latest: RootAt | None = None
        self._read_at = -1
        self._pages = ObjectReader(storage, runtime)

    def share(self, objects: ObjectReader, repository_id: str) -> None:
        """Read pages of that repository through these objects, and keep them there."""
        self._pages = objects
        self._repository_id = repository_id

    @property
    def latest(self) -> RootAt:
        """The newest root this process has seen; it is read if there is none."""
        return self._latest or self.read()

    def read(self) -> RootAt:
        """Read the current root.

        Raises
        ------
        NotARepositoryError
            If there is none.
        CorruptObjectError
            If it is damaged.
        """
        self._runtime.checkpoint("root.read")
        began = _Swaps.done
        try:
            tagged = self._storage.get_tagged(ROOT_KEY)
        except ObjectNotFoundError as error:
            outer = around(self._storage)
            hint = f"{error}; check the path, call zm.create, or, if the root is lost, zm.recover"
            if outer is not None:
                hint = (
                    f"it lies inside the repository {outer}, whose groups are not folders: open "
                    "that, and name the group by group="
                )
            raise NotARepositoryError(f"no repository at {self._storage.url}: {hint}") from error
        if self._latest is not None and tagged.token == self._latest.token:
            self._read_at = began  # a read that fails leaves it
            return self._latest
        try:
            root = Root.from_object(tagged.data)
        except CorruptObjectError as error:
            raise CorruptObjectError(
                f"the root of {self._storage.url} is damaged ({error}). Without a backup of it, "
                "`zm.recover` and `zarr-manifests recover` make a new one from an archive"
            ) from error
        self._check_repository(root, ROOT_KEY)
        self._read_at = began
        return self._seen(RootAt(root, tagged.token))

    def archived(self, version: int) -> Root:
        """Return the archive of that version.

        No checksum from a pointer vouches for it, so its version and repository are compared.

        Raises
        ------
        ObjectNotFoundError
            If there is none.
        CorruptObjectError
            If it is damaged, or belongs to another version or repository.
        """
        key = archive_key(version)
        root = Root.from_object(self._storage.get(key, 0, MAX_ROOT_BYTES + 1), key)
        if root.version != version:
            raise CorruptObjectError(
                f"{key}: the archive of version {root.version} lies in its place; put back the "
                "object that belongs there, from a backup"
            )
        self._check_repository(root, key)
        return root

    def _check_repository(self, root: Root, key: str) -> None:
        if self._repository_id not in (None, root.repository_id):
            raise CorruptObjectError(
                f"{key} in {self._storage.url} is the root of repository {root.repository_id}, and "
                f"{self._repository_id} was opened; put back the object that belongs there, or "
                "open the repository anew if it was replaced on purpose"
            )

    def _seen(self, at: RootAt) -> RootAt:
        # With threads, an older root may be kept; whoever uses it finds out at the swap.
        if self._latest is None or self._latest.root.version <= at.root.version:
            self._latest = at
        return at

    def undisturbed(self, at: RootAt) -> bool:
        """Whether `at` is the last root read, and this process has swapped none since."""
        latest = self._latest
        return latest is not None and latest.token == at.token and self._read_at == _Swaps.done

    # --- pages -------------------------------------------------------------------------------

    def with_branch(self, root: Root, name: str) -> Root:
        """The root with that branch, loaded from a page if necessary."""
        return self._with(root, (HEADS + name,) * 2)

    def with_ref(self, root: Root, name: str) -> Root:
        """The root with the branch and the tag of that name, loaded from pages if necessary."""
        return self._with(root, (HEADS + name,) * 2, (TAGS + name,) * 2)

    def branch(self, root: Root, name: str) -> Branch:
        """The branch, from the root or a page; raises `NotFoundError` if there is none."""
        return known_ref(self.with_branch(root, name).branches, name, "branch")

    def tag(self, root: Root, name: str) -> BlobRef:
        """The snapshot that the tag points to; raises `NotFoundError` if there is no such tag."""
        return known_ref(self._with(root, (TAGS + name,) * 2).tags, name, "tag")

    def with_leases(self, root: Root, session: str) -> Root:
        """The root with the leases of the session, loaded from pages if necessary."""
        # Their names begin with the copies' common prefix; hexadecimal digits or a slash follow.
        lineage = LEASES + lineage_of(session)
        return self._with(root, (lineage, f"{lineage}g"))

    def leases(self, root: Root) -> tuple[Lease, ...]:
        """All leases, from the root and from pages."""
        return self._with(root, (LEASES, f"{LEASES}~")).leases

    def whole(self, root: Root) -> Root:
        """The root with all refs and leases of all pages, and without pages."""
        return without(replace(self._with(root, ALL), pages=()))

    def _with(self, root: Root, *spans: tuple[str, str]) -> Root:
        due = pages_with(root, *spans)
        return pulled(root, self._load(root, due), *spans) if due else root

    def _load(self, root: Root, due: Iterable[int]) -> list[Page]:
        def load(at: int) -> Page:
            return checked(root, at, self._pages.load(root.pages[at].blob, Page))

        return self._runtime.parallel([partial(load, at) for at in due])


class Roots(RootReader):
    """Reads and swaps the root of one repository."""

    _storage: Storage
    _pages: Objects

    def __init__(self, storage: Storage, runtime: Runtime) -> None:
        super().__init__(storage, runtime)
        self._pages = Objects(storage, runtime)
        self._archived = 0  # the newest version known to be archived

    def share(self, objects: ObjectReader, repository_id: str) -> None:
        """Load and write pages of that repository through these objects and their cache."""
        assert isinstance(objects, Objects)
        super().share(objects, repository_id)

    def archive(self, at: RootAt) -> None:
        """Make sure that the version is archived, as it must be before it is replaced."""
        for call in self.archiving(at):
            call()

    def archiving(self, at: RootAt) -> list[Callable[[], None]]:
        """The calls that are still needed to archive the version, to run before the swap.

        Versions that only changed leases are not archived.
        """
        log, version = at.root.log, at.root.version
        if version <= self._archived or (log and log[-1].version != version):
            return []
        self._runtime.checkpoint("root.archive")
        return [partial(self._archive, at.root)]

    def _archive(self, root: Root) -> None:
        key, due = archive_key(root.version), True
        # Where writers take turns, each archives its version in its turn, and asking is cheap.
        if self._storage.capabilities.turns:
            with suppress(ObjectNotFoundError):
                self._storage.sync([key])  # its writer may have been stopped before syncing it
                due = False
        if due:
            self._storage.create(key, root.bare().encode())
        self._archived = max(self._archived, root.version)

    def _paged(self, root: Root, keys: SessionKeys) -> Root:
        """Move refs and leases to pages until the root is small enough."""
        while root.refs_bytes > ROOT_BYTES:
            due, moved = plan_spill(root)
            if not moved and len(due) == 1:
                return root
            old = [at for at in due if at < len(root.pages)]
            pages = absorb(root, moved, self._load(root, old))
            uploads = [Upload(keys.next("pages"), page.encode()) for page in pages]
            self._runtime.parallel(
                [partial(self._pages.create, each.key, each.data) for each in uploads]
            )
            new = []
            for page, each in zip(pages, uploads, strict=True):
                self._pages.remember(each.ref, page)
                names = entries(page)
                new.append(PageRef(min(names), each.ref, len(names)))
            listed = *root.pages[: due.start], *new, *root.pages[due.stop :]
            left = {name: value for name, value in entries(root).items() if name not in moved}
            root = with_entries(replace(root, pages=listed), left)
        return root

    @contextmanager
    def turn(self, meanwhile: Callable[[], None] = lambda: None) -> Iterator[bool]:
        """Make other writers on this machine wait for the block; yields whether they do.

        Without a turn, all but one of the writers that try at the same time would prepare their
        commit in vain. `meanwhile` is called if there is a wait, which is bounded, since the holder
        may have been stopped or be slow.
        """
        turn = self._turn("swap")
        if turn is None:
            yield False
            return
        try:
            held = turn.take()
            until_s = self._runtime.monotonic_s() + _TURN_S
            if not held:
                meanwhile()
                held = turn.take()
            while not held and self._runtime.monotonic_s() < until_s:
                self._runtime.sleep(_TURN_POLL_S + self._runtime.jitter(_TURN_POLL_S))
                held = turn.take()
            yield held
        finally:
            turn.end()

    @contextmanager
    def only_here(self, what: str) -> Iterator[bool]:
        """Yields whether no other process on this machine does this until the block ends.

        True where the storage cannot tell.
        """
        turn = self._turn(what)
        try:
            yield turn is None or turn.take()
        finally:
            if turn is not None:
                turn.end()

    def _turn(self, name: str) -> Turn | None:
        storage = unmetered(self._storage)
        if storage.capabilities.turns and isinstance(storage, TakesTurns):
            return storage.turn(name)
        return None

    def backoff(self, attempt: int) -> None:
        """Wait for a jittered time before the next attempt."""
        self._pages.meter.add("retries")
        limit_s = min(_MAX_BACKOFF_S, _BACKOFF_S * 2 ** min(attempt, 10))
        self._runtime.sleep(self._runtime.jitter(limit_s))

    def install(self, root: Root, token: Token | None) -> RootAt | None:
        """Replace a lost root, or the damaged one with that token.

        None if somebody else has written one in the meantime.
        """
        new = replace(
            self._paged(root, SessionKeys(root.version, self._runtime)),
            write_id=self._runtime.random_bytes(WRITE_ID_BYTES),
            written_ms=self._runtime.now_ms(),
        )
        return self.create(new, token)

    def create(self, root: Root, token: Token | None = None) -> RootAt | None:
        """Write the first root of a repository, and its archive; None if there is one already."""
        data, bare = root.encode(), root.bare().encode()
        failure: StorageError | None = None
        try:
            archive = archive_key(root.version), bare
            new_token = self._storage.cas(ROOT_KEY, data, token, then_create=archive)
        except StorageError as error:
            failure, new_token = error, None
        if new_token is not None:
            return self._seen(RootAt(root, new_token))
        try:  # the answer may have been lost
            found = self.read()
            self._storage.sync([ROOT_KEY])
        except ManifestsError as error:
            if failure is None:
                raise
            raise failure from error
        return found if found.root.write_id == root.write_id else None

    def swap(
        self, at: RootAt, new: Root, operation: bytes, *, archived: bool = True
    ) -> RootAt | None:
        """Replace the root `at` by `new`, and set the version, write id and time of `new`.

        Parameters
        ----------
        at : RootAt
            The root to replace; it must be archived already.
        new : Root
            The next root.
        operation : bytes
            The random id that `new`'s last log entry carries.
        archived : bool
            Whether to archive `new`, as all versions that an operation made are.

        Returns
        -------
        RootAt or None
            The root with the change; None if somebody else's swap came first.

        Raises
        ------
        CommitOutcomeUnknownError
            If it cannot be determined whether the swap took effect.
        StorageError
            If the storage refused it and the root is unchanged.
        """
        new = replace(
            new,
            version=at.root.version + 1,
            write_id=self._runtime.random_bytes(WRITE_ID_BYTES),
            written_ms=self._runtime.now_ms(),
        )
        bare = new.bare().encode()
        if Header.of(bare).nbytes > ROOT_BYTES:  # with the configuration, which has its own bound
            new = self._paged(new, SessionKeys(at.root.version, self._runtime))
            bare = new.bare().encode()
        data, then_create = new.encode(), (archive_key(new.version), bare) if archived else None
        failure: StorageError | None = None
        for attempt in range(_RESENDS):
            self._runtime.checkpoint("root.swap")
            try:
                token = self._storage.cas(ROOT_KEY, data, at.token, then_create=then_create)
            except StorageError as error:
                failure, token = error, None
            finally:
                _Swaps.done = next(_Swaps.numbers)
            if token is not None:
                return self._seen(RootAt(new, token))
            found = self._find_out(new, operation, failure)
            if found.token != at.token:
                return self._outcome(found, new, operation, archived=archived)
            if isinstance(failure, StorageFullError | UnsupportedStorageError):
                break
            self.backoff(attempt)
        # If the first try was refused, no other request of ours is in flight.
        refused = attempt == 0 and isinstance(failure, StorageFullError | UnsupportedStorageError)
        if failure is not None and (refused or self._storage.capabilities.inline):
            # A failed call on a local disk has ended, so it cannot take effect later.
            raise failure
        raise self._unknown(operation, "it was sent several times and never answered") from failure

    def _find_out(self, new: Root, operation: bytes, failure: StorageError | None) -> RootAt:
        for attempt in range(_RESENDS):
            try:
                return self.read()
            except ManifestsError as error:  # damaged counts as unreadable
                unreadable = error
                self.backoff(attempt)
        reason = f"version {new.version} was sent and the root cannot be read: {unreadable}"
        raise self._unknown(operation, reason) from failure or unreadable

    def _outcome(
        self, found: RootAt, new: Root, operation: bytes, *, archived: bool
    ) -> RootAt | None:
        """The found root if it has our swap, None if not; it is not the one we replaced."""
        ours = found.root.write_id == new.write_id or any(
            entry.commit_id == operation for entry in found.root.log
        )
        oldest = found.root.log[0].version if found.root.log else found.root.version
        rolled = archived and found.root.version > new.version and oldest > new.version
        if not ours and rolled:
            # The log no longer reaches back to the version we tried to make.
            try:
                ours = self._is_logged(new.version, operation)
            except ManifestsError as error:
                reason = f"version {new.version} was overtaken and its archive is unreadable"
                raise self._unknown(operation, reason) from error
        if not ours:
            return None
        try:
            # Without the lost answer, it is not known to be durable yet.
            self._storage.sync([ROOT_KEY])
        except StorageError as error:
            raise self._unknown(operation, "it is visible but may not be durable") from error
        return found

    def _is_logged(self, version: int, operation: bytes) -> bool:
        """Whether the operation made that version, as the first archive since that can tell says.

        A swap of leases is not archived.
        """
        for later in range(version, version + LOG_TAIL):
            with suppress(ObjectNotFoundError):
                log = self.archived(later).log
                if log and log[0].version <= version:
                    return any(entry.commit_id == operation for entry in log)
        raise ObjectNotFoundError(f"no archive tells of version {version}")

    def _unknown(self, operation: bytes, reason: str) -> CommitOutcomeUnknownError:
        return CommitOutcomeUnknownError(
            f"whether the swap of {self._storage.url} took effect is not known: {reason}. Open "
            f"the repository again and look for {operation.hex()} in its history before retrying",
            operation.hex(),
        )

    def swap_in(
        self,
        make: Callable[[RootAt], tuple[Root, bytes] | None],
        what: str,
        attempts: int,
        at: RootAt | None = None,
        *,
        otherwise: str = "try again later",
        archived: bool = True,
    ) -> RootAt:
        """Swap in the root that `make` makes of the newest one; repeat if others come first.

        Parameters
        ----------
        make : callable
            The next root, with everything it refers to written, and the random id of the
            operation; None if nothing is to be changed. It is called anew on every attempt, and
            once more if an object is missing: that may have been collected after the root was read.
        what : str
            The operation, for the error if others come first too often.
        attempts : int
            How often the swap is tried.
        at : RootAt, optional
            The root to begin with, if it need not be read.
        otherwise : str
            What to do after that error.
        archived : bool
            As for `swap`.

        Returns
        -------
        RootAt
            The new root, or the one of which `make` has made nothing.
        """
        known = [] if at is None else [at]

        def made() -> tuple[RootAt, tuple[Root, bytes] | None]:
            at = known.pop() if known else self.read()
            return at, make(at)

        for attempt in range(attempts):
            at, new = opened(made)
            if new is None:
                return at
            self.archive(at)
            swapped = self.swap(at, *new, archived=archived)
            if swapped is not None:
                return swapped
            self.backoff(attempt)
        raise ConflictError(f"{what}: other writers came first {attempts} times; {otherwise}")

    def update(
        self,
        change: Callable[[Root], Root],
        operation: str,
        ref: str,
        snapshot: str,
        attempts: int,
        *,
        leaves: bool = False,
    ) -> RootAt:
        """Apply `change` to the newest root and swap it in; repeat if others come first.

        `ref` is the branch or tag concerned, or empty; if it `leaves` a snapshot, the log says
        which. `change` is called anew on every attempt,
        and its errors are raised.
        """
        operation_id = self._runtime.random_bytes(16)

        def make(at: RootAt) -> tuple[Root, bytes]:
            version, now_ms = at.root.version + 1, self._runtime.now_ms()
            root = self.with_ref(at.root, ref) if ref else at.root
            changed = change(root)
            what = leaving(operation, _place_of(root, operation, ref)) if leaves else operation
            by = operation_id, self._runtime.who()
            entry = LogEntry(version, now_ms, what, ref, snapshot, *by)
            return changed.with_log(entry).with_copies({}, "main"), operation_id

        what = f"{operation} of {ref!r}" if ref else operation
        return self.swap_in(make, what, attempts)

    def update_leases(self, change: Callable[[Root], Root], what: str, attempts: int) -> RootAt:
        """Like `update`, but neither logged nor archived, for changes of leases.

        `change` may be applied again although an earlier attempt has taken effect.
        """
        unlogged = self._runtime.random_bytes(16)

        def make(at: RootAt) -> tuple[Root, bytes] | None:
            new = change(at.root)
            if new is at.root:
                return None
            return new.with_copies({}, "main"), unlogged

        return self.swap_in(make, what, attempts, archived=False)


def _place_of(root: Root, operation: str, ref: str) -> str:
    """Id of the snapshot that the tag or branch is at."""
    blob = root.tags[ref] if operation.endswith("tag") else root.branches[ref].head
    return snapshot_id_of(blob.key)


_ATTEMPTS: Final = 100


def claim_branch(roots: Roots, branch: str) -> RootAt:
    """Claim the branch for one writer; return the new root, with the branch.

    Raises
    ------
    NotFoundError
        If there is no such branch.
    """

    def change(root: Root) -> Root:
        tip = known_ref(root.branches, branch, "branch")
        moved = replace(tip, epoch=root.version + 1)
        return replace(root, branches={**root.branches, branch: moved})

    at = roots.update(change, "claim branch", branch, "", _ATTEMPTS)
    return replace(at, root=roots.with_branch(at.root, branch))


def admitted(
    roots: RootReader,
    root: Root,
    branch: str,
    keys: SessionKeys,
    amends: tuple[str, str] | None = None,
) -> Branch:
    """Return the branch if the root admits the session's commit to it, else raise.

    `amends` has key and id of the head that the commit replaces, if it amends one.

    Raises
    ------
    ConflictError
        If the branch was deleted, or its head cannot be amended any more.
    FencedError
        If the session began before the fence and holds no lease, or another writer has since
        claimed the branch.
    """
    tip = root.branches.get(branch)
    if tip is None:
        raise ConflictError(
            f"branch {branch!r} was deleted since the session began; nothing was committed. "
            "Create it again at the session's snapshot, then commit"
        )
    if is_shut_out(tip, keys):
        claimed = f"at version {tip.epoch} another writer has claimed branch {branch!r} for itself"
        again = f"branch {branch!r} was deleted and made again since the session claimed it"
        what = claimed if tip.epoch else again
        raise FencedError(f"{what}; nothing was committed. Open a new session and write again")
    check_fence(roots, root, keys)
    if amends is not None and tip.head.key != amends[0]:
        raise ConflictError(
            f"snapshot {amends[1]} is not the head of {branch!r} any more, and only a "
            "head can be amended; nothing was committed. Commit the changes as a new snapshot",
            [Conflict(ConflictKind.HISTORY, "/", "history", "the branch has moved")],
        )
    if amends is not None and tip.floor == amends[1]:
        raise ConflictError(
            f"the snapshot before {amends[1]} has expired, so that one cannot be amended; "
            f"nothing was committed. Commit the changes to {branch!r} as a new snapshot",
            [Conflict(ConflictKind.HISTORY, "/", "history", "the snapshot before has expired")],
        )
    return tip


def is_shut_out(tip: Branch, keys: SessionKeys) -> bool:
    """Whether another writer has claimed the branch since the session did, or else began."""
    return tip.epoch != keys.epoch and (keys.epoch is not None or keys.start < tip.epoch)


def check_fence(roots: RootReader, root: Root, keys: SessionKeys) -> None:
    """Refuse a session behind the fence, unless it holds a lease.

    Raises
    ------
    FencedError
        If the session is behind the fence.
    """
    if is_fenced(roots, root, keys):
        raise fenced(root, keys.start)


def is_fenced(roots: RootReader, root: Root, keys: SessionKeys) -> bool:
    """Whether the session began before the fence and holds no lease."""
    if keys.start >= root.fence or root.holds_lease(keys.session_id):
        return False
    # Leases may be in pages; only now are they worth a request.
    return not roots.with_leases(root, keys.session_id).holds_lease(keys.session_id)


def check_compactor(root: Root, start: int) -> None:
    """Refuse a compaction that began at version `start` if another compactor has taken over.

    Raises
    ------
    FencedError
        If it has.
    """
    if start < root.epochs.get(COMPACTOR, 0):
        raise overtaken(root, COMPACTOR, start)


def fenced(
    root: Root,
    start: int,
    what: str = "the session",
    again: str = "Open a new session and write the changes again",
) -> FencedError:
    """The error for what began at version `start`, before the fence."""
    return FencedError(
        f"{what} began at version {start}, before the repository's fence {root.fence}: its "
        f"objects may have been collected. {again}"
    )


def claim_compaction(roots: Roots) -> RootAt:
    """Claim the compactor's epoch, so that running compactions end without effect."""
    return roots.update(
        lambda root: replace(root, epochs=claimed(root, COMPACTOR)),
        *("claim compaction", "", "", _ATTEMPTS),
    )


def claimed(root: Root, name: str) -> Mapping[str, int]:
    """The epochs, with `name` claimed by the root's next version."""
    return {**root.epochs, name: root.version + 1}


def check_collector(root: Root, epoch: int) -> None:
    """Refuse to go on with a collection whose epoch is no longer the current one.

    Raises
    ------
    FencedError
        If somebody has claimed the collector's epoch since, or has restored an older root.
    """
    newest = root.epochs.get(COLLECTOR, 0)
    if newest < epoch:
        raise FencedError(
            f"the root of version {root.version} knows nothing of the collection that began at "
            f"version {epoch}: an older root was put back, or a new one was made. Nothing more was "
            "deleted"
        )
    if epoch < newest:
        raise overtaken(root, COLLECTOR, epoch)


def overtaken(root: Root, name: str, own: int) -> FencedError:
    """The error for a claim, or a start, at version `own` that a newer claim has superseded."""
    return FencedError(
        f"at version {root.epochs[name]} another {name} has taken over from this one, of version "
        f"{own}; what it has done until then stands"
    )


def restored_epoch(old: Branch, now: Branch | None, version: int) -> int:
    """The epoch of a branch that becomes `old` again in that version of the root.

    A claim that was superseded since must not become current again.
    """
    if not old.epoch:
        return 0 if now is None else now.epoch
    return now.epoch if now is not None and now.epoch >= old.epoch else version
