"""Going back: the operations log, restoring refs, and a new root made from an archive.

A *restore* is an ordinary swap that sets branches and tags to those of an older version and changes
nothing else. Inside the swap it is refused for versions older than the last collection, whose
snapshots may have been deleted.

A *recovery* is for a repository whose root is lost, damaged, or refers to damaged objects. The
newest archive from which everything can be reached becomes the root, with a version higher than any
before. Its fence is that version, it has no leases, and its epochs are raised. So no earlier writer
can go on, and no version occurs twice.

The newest version is known only if the root can be read. The newest archive may be older: the
version after it may have been acknowledged without leaving an archive, and versions that only
change leases are never archived. So if the root cannot be read, the new version keeps a large
distance from the newest archive.

A garbage collection may be running. It deletes nothing that its own root or a later one reaches. So
an archive from before a collection is not used unless the caller says that none is running.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from zarr_manifests.engine.ancestry import archived_versions, logged
from zarr_manifests.engine.roots import RootAt, Roots, restored_epoch
from zarr_manifests.engine.upkeep.collect import mark
from zarr_manifests.engine.view import Context, ReadContext
from zarr_manifests.errors import (
    CommitOutcomeUnknownError,
    ConflictError,
    CorruptObjectError,
    InvalidArgumentError,
    NotARepositoryError,
    NotFoundError,
    ObjectNotFoundError,
    SnapshotExpiredError,
    StorageError,
    UnsupportedFormatError,
    UnsupportedStorageError,
)
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.root import COLLECTOR, COMPACTOR, ROOT_KEY, LogEntry, Root
from zarr_manifests.ids import snapshot_id_of
from zarr_manifests.progress import counted
from zarr_manifests.reports import LoggedOperation, RecoveryReport
from zarr_manifests.runtime import Runtime
from zarr_manifests.storage import Storage
from zarr_manifests.storage.protocol import Token
from zarr_manifests.versions import TAGS

_ATTEMPTS = 100
_KINDS = (COMPACTOR, COLLECTOR)
# More swaps for leases than can follow each other without an operation between them, which leaves
# an archive: three hours at a hundred a second. The twelve digits of a session's start still leave
# room for a million recoveries.
_UNSEEN_VERSIONS: Final = 1_000_000
_LOOKS: Final = 3


def operations(context: ReadContext) -> Iterator[LoggedOperation]:
    """All operations that the root and its archives know, newest first."""
    return map(LoggedOperation.from_entry, logged(context, context.roots.read().root))


def restore_refs(context: Context, version: int, *, dry_run: bool = False) -> RecoveryReport:
    """Set branches and tags to what they were in that version.

    Raises
    ------
    SnapshotExpiredError
        If the version is older than the last collection.
    NotFoundError
        If there is no archive of it.
    """
    if type(version) is not int or version < 1:
        raise InvalidArgumentError(f"there is no version {version!r} of the root")
    _check_restorable(context.roots.read().root, version)
    try:
        old = context.roots.whole(context.roots.archived(version))
    except ObjectNotFoundError as error:
        raise NotFoundError(
            f"there is no archive of version {version}; `repo.ops_log()` lists the versions"
        ) from error

    report = RecoveryReport(version, version, dry_run=dry_run)

    def change(root: Root) -> Root:
        nonlocal report
        _check_restorable(root, version)
        whole = context.roots.whole(root)
        new = replace(
            whole,
            branches={
                name: replace(
                    branch, epoch=restored_epoch(branch, whole.branches.get(name), root.version + 1)
                )
                for name, branch in old.branches.items()
            },
            tags={n: ref for n, ref in old.tags.items() if TAGS + n not in whole.deleted},
        )
        moved = _moved(_heads(whole), _heads(new)), _moved(whole.tags, new.tags)
        report = RecoveryReport(version, root.version + 1, *moved, dry_run=dry_run)
        return new

    if dry_run:
        change(context.roots.read().root)
    else:
        context.roots.update(change, f"restore {version}", "", "", _ATTEMPTS)
    return report


def _heads(root: Root) -> dict[str, BlobRef]:
    return {name: branch.head for name, branch in root.branches.items()}


def _moved(
    before: Mapping[str, BlobRef], after: Mapping[str, BlobRef]
) -> dict[str, tuple[str | None, str | None]]:
    """Snapshot ids before and after, for the names whose snapshot changes."""

    def at(refs: Mapping[str, BlobRef], name: str) -> str | None:
        return snapshot_id_of(refs[name].key) if name in refs else None

    both = {name: (at(before, name), at(after, name)) for name in sorted({*before, *after})}
    return {name: (was, now) for name, (was, now) in both.items() if was != now}


def _check_restorable(root: Root, version: int) -> None:
    if version < root.collected:
        raise SnapshotExpiredError(
            f"version {version} is older than the last collection of garbage (version "
            f"{root.collected}), which may have deleted what it leads to"
        )
    if version >= root.version:
        raise InvalidArgumentError(
            f"version {version} is not older than the current version, {root.version}"
        )


# --- recovery ----------------------------------------------------------------------------------


def recover(
    storage: Storage, runtime: Runtime, *, dry_run: bool = False, collections_ended: bool = False
) -> RecoveryReport:
    """Make a new root from the newest archive from which everything can be reached.

    Raises
    ------
    InvalidArgumentError
        If the root and everything it reaches is sound, so that there is nothing to recover.
    NotARepositoryError
        If there is no archive.
    CorruptObjectError
        If no archive reaches everything it needs.
    ConflictError
        If somebody else changes the root in the meantime, or a running collection may delete what
        the archive needs.
    CommitOutcomeUnknownError
        If the new root is in place and its archive could not be written.
    StorageError
        If the storage fails. Nothing was changed, unless the answer to the swap was lost.
    """
    if not (storage.capabilities.cas or dry_run):
        raise UnsupportedStorageError(f"{storage.url} cannot compare-and-swap")
    token, current = _damaged(storage, runtime)
    versions = archived_versions(storage)[::-1]
    skipped: dict[int, str] = {}
    newer = [] if current is None else [current]
    if not versions:
        raise NotARepositoryError(f"{storage.url} has no archive of a root to recover from")
    for version in counted("trying archives", versions):
        found, problem = _archived(storage, runtime, version)
        if found is not None and not problem:
            if current is not None and current.repository_id != found.repository_id:
                current = None  # another repository's root says nothing about this one's versions
            next_version = _after_all(versions[0], current)
            if not collections_ended:
                mine = [root for root in newer if root.repository_id == found.repository_id]
                _check_collections(storage, version, mine, skipped)
            roots = Roots(storage, runtime)
            new = _renewed(roots.whole(found), next_version, runtime)
            if not dry_run:
                at = roots.install(new, token)
                if at is None:
                    raise ConflictError(
                        f"somebody else has changed the root of {storage.url} meanwhile; open the "
                        "repository and look at it first"
                    )
                _archive(roots, at)
            heads = _moved({}, _heads(new))
            lost = range(version + 1, next_version)
            return RecoveryReport(version, new.version, heads, {}, lost, skipped, dry_run)
        skipped[version] = problem
        newer += [] if found is None else [found]
    raise CorruptObjectError(
        f"none of the {len(versions)} archives in {storage.url} leads to a whole repository; the "
        f"newest ({versions[0]}): {skipped[versions[0]]}"
    )


def _archive(roots: Roots, at: RootAt) -> None:
    """Archive the new root at once; otherwise another recovery could make its version again."""
    try:
        roots.archive(at)
    except StorageError as error:
        raise CommitOutcomeUnknownError(
            f"the root was recovered as version {at.root.version}, but its archive could not be "
            f"written: {error}. Open the repository and go on: the next operation writes it"
        ) from error


def _damaged(storage: Storage, runtime: Runtime) -> tuple[Token | None, Root | None]:
    """The token and the root found in the root's place; raises if the root is sound.

    A collection may have deleted objects that are missing: then another root has its place, and is
    looked at instead, a few times.
    """
    for _ in range(_LOOKS):
        token, current = _current(storage)
        if current is not None and not _problem(storage, runtime, current):
            raise InvalidArgumentError(
                f"{storage.url} has a sound root of version {current.version}: there is nothing to "
                "recover. `zm.recover(repo, version)` goes back to older refs"
            )
        if _current(storage)[0] == token:
            break
    return token, current


def _check_collections(
    storage: Storage, version: int, newer: Sequence[Root], skipped: Mapping[int, str]
) -> None:
    """Refuse an archive if a collection may have begun after it, which may still be running."""
    known = max((root.version for root in newer), default=version)
    unread = [at for at in skipped if at > known]
    begun = max([*unread, *(root.collected for root in newer)], default=0)
    if begun <= version:
        return
    raise ConflictError(
        f"the newest complete archive in {storage.url} is that of version {version}. A garbage "
        f"collection began, or may have begun, at version {begun}, and may still delete objects "
        "that this archive needs. Make sure that no collection is running, then recover with "
        "`collections_ended=True` (`--collections-ended`)"
    )


def _current(storage: Storage) -> tuple[Token | None, Root | None]:
    """The token of what is in the root's place, and the root if it is readable."""
    try:
        tagged = storage.get_tagged(ROOT_KEY)
    except ObjectNotFoundError:
        return None, None
    try:
        return tagged.token, Root.from_object(tagged.data)
    except CorruptObjectError:
        return tagged.token, None


def _after_all(archived: int, current: Root | None) -> int:
    """A version that no root has had, given the newest archived one and the readable root."""
    if current is not None and current.version >= archived:
        return current.version + 1  # a newer root would be in its place
    return archived + _UNSEEN_VERSIONS


def _archived(storage: Storage, runtime: Runtime, version: int) -> tuple[Root | None, str]:
    """The archived root if it can be read, and why it cannot be used."""
    try:
        root = Roots(storage, runtime).archived(version)
    except (CorruptObjectError, UnsupportedFormatError, ObjectNotFoundError) as error:
        return None, str(error)
    return root, _problem(storage, runtime, root)


def _problem(storage: Storage, runtime: Runtime, root: Root) -> str:
    """What the root reaches and is damaged or not there; empty if there is nothing of the kind.

    Chunk objects are only looked for. An error of the storage is raised, since it says nothing
    about an object.
    """
    context = ReadContext.unshared(root.repository_id, storage, runtime, root.config)
    try:
        marked = mark(context, root.bare()).marked
    except (CorruptObjectError, UnsupportedFormatError) as error:
        return str(error)
    there = {info.key for info in counted("looking for chunks", storage.list("chunks/"))}
    gone = [key for key in marked if key.startswith("chunks/") and key not in there]
    return f"chunk object {min(gone)} is not there" if gone else ""


def _renewed(archived: Root, version: int, runtime: Runtime) -> Root:
    """The new root, of that version, from an archived one with all its refs."""
    now_ms, operation = runtime.now_ms(), runtime.random_bytes(16)
    entry = LogEntry(version, now_ms, "recover", "", "", operation, runtime.who())
    return replace(
        archived,
        version=version,
        branches={
            name: replace(branch, epoch=version if branch.epoch else 0)
            for name, branch in archived.branches.items()
        },
        leases=(),
        fence=version,
        collected=version,
        epochs={**archived.epochs, **dict.fromkeys(_KINDS, version)},
    ).with_log(entry)
