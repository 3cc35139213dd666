"""Cloning: a repository at another place, with the same snapshots under the same ids.

Every object that the chosen branches and tags reach is copied, then the root is written. Until then
there is no repository at the other place, and what was copied waits for another call. An object
named `cloning` tells an unfinished clone from a place where something else lies.

A later call brings new commits to a clone. It moves a branch only forward: to a snapshot whose
history has the branch's head. What has expired in the source expires in the clone, unless somebody
holds a lease there: pages of history that name it may be gone in the source.

A clone has the id of its source, since every snapshot states that id. Both draw names of objects at
random, so they can go on independently. Invariants: the version of a clone is far ahead of that of
its source, and its fence is that version, so no session of the source can commit to the clone; a
branch or tag that is in the clone already is never lost, moved back or made shorter; once anything
has expired, every branch has a floor.

Leases keep what is copied from expiring. What a branch loses by a reset may still be collected; the
clone then begins again with the newer root, and finds what it has copied already. In the other
place, a collection would delete what no ref names yet. So the swap is refused if one has begun
since, and the clone does not begin while one may still be running.

Copying objects of a repository to another storage, each checked before it is written
-------------------------------------------------------------------------------------

Metadata objects are copied on the way: what they refer to is read from them. Chunk objects follow.
Invariants: an object under a key of the other storage is whole and was checked, since it is written
in one call after the check, or copied by the store; what is there already is not written again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec.structs import replace

from zarr_manifests.engine.ancestry import Link, ages, follow, has_expired, tables
from zarr_manifests.engine.create import check_outside, keep_reserve
from zarr_manifests.engine.heartbeat import Held
from zarr_manifests.engine.leases import give_up, take
from zarr_manifests.engine.metadata import Objects, create_or_find, create_own, is_there
from zarr_manifests.engine.refs import DEFAULT_BRANCH
from zarr_manifests.engine.roots import Roots, is_missing
from zarr_manifests.engine.upkeep.collect import KINDS
from zarr_manifests.engine.upkeep.recover import operations
from zarr_manifests.engine.upkeep.verify import ChunkRanges, Rows, end_of, problem_of
from zarr_manifests.engine.view import Context, ReadContext
from zarr_manifests.errors import (
    AlreadyExistsError,
    ConflictError,
    CorruptObjectError,
    InvalidArgumentError,
    MissingChunkError,
    ObjectNotFoundError,
    SnapshotExpiredError,
    StorageError,
    UnsupportedStorageError,
)
from zarr_manifests.format.chunk_table import RefKind
from zarr_manifests.format.manifest import Manifest
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.root import CLONING_KEY, ROOT_KEY, Branch, LogEntry, Root, known_ref
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.format.zone_maps import IndexDirectory, Zones
from zarr_manifests.ids import snapshot_id_of, snapshot_key
from zarr_manifests.planning.garbage import parts
from zarr_manifests.progress import counted, expect, tell
from zarr_manifests.reports import CloneReport
from zarr_manifests.storage import Storage
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.metered import unmetered
from zarr_manifests.storage.object_store import copier_within
from zarr_manifests.storage.protocol import ObjectInfo

_LOG = logging.getLogger(__name__)
_AT_ONCE: Final = 64
_AT_ONCE_BYTES: Final = 128 * 1024**2
_MEND: Final = "restore it from a backup"


@dataclass(slots=True)
class ObjectCopier:
    """Copies objects, and counts what it does.

    Parameters
    ----------
    source : ReadContext
        The repository to copy from.
    storage : Storage
        The storage to copy to.
    within : callable, optional
        Has the store copy a chunk object, given key and size, if both storages are in one.

    Attributes
    ----------
    copied : list of int
        Sizes of the objects copied so far.
    moved : list of str
        Keys of those that the store has copied itself.
    found : list of str
        Keys of the objects that were there already.
    chunks, virtual : int
        Different ranges of chunk objects, and refs to files elsewhere.
    """

    source: ReadContext
    storage: Storage
    within: Callable[[str, int], None] | None = None
    copied: list[int] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    chunks: int = 0
    virtual: int = 0
    _here: dict[str, int] = field(default_factory=dict)
    _ranges: ChunkRanges = field(default_factory=ChunkRanges)

    def copy(self, starts: Iterable[Link], seen: set[str], wanted: Callable[[Link], bool]) -> None:
        """Copy all wanted objects that the links lead to, except those in `seen`.

        Raises
        ------
        CorruptObjectError
            If an object is missing or damaged; it names the object.
        MissingChunkError
            If a chunk object is missing.
        StorageError
            If a storage fails.
        """
        kinds = [kind for kind in KINDS if kind not in ("chunks", "reports")]
        self._here |= {info.key: info.nbytes for info in self._listed(*kinds)}
        runtime, stage = self.source.runtime, "metadata"
        found = follow(runtime, starts, self._metadata, seen, wanted, stage)
        for _, value in found:
            for table in tables(value):
                self._ranges.add(table)
                self.virtual += int(np.count_nonzero(table.kind == RefKind.VIRTUAL))
        self._copy_chunks()

    def _listed(self, *kinds: str) -> Iterator[ObjectInfo]:
        """What is there of these kinds."""
        found = chain.from_iterable(self.storage.list(f"{kind}/") for kind in kinds)
        return counted("looking at what is there", found)

    # --- metadata ----------------------------------------------------------------------------

    def _metadata(self, link: Link) -> Any:
        """Copy the object and return it, decoded."""
        ref = link.ref
        data = self._read(ref)
        value = link.kind.from_object(data, ref)
        link.check(value)
        if isinstance(value, Snapshot):
            value.check_repository(ref.key, self.source.repository_id)
        self._write(ref, data)
        return value

    def _read(self, ref: BlobRef) -> bytes:
        storage = self.source.storage
        try:
            return storage.get(ref.key, 0, ref.length + 1)
        except ObjectNotFoundError as error:
            raise CorruptObjectError(
                f"{ref.key} is referenced and not there ({storage.url}); restore it from a backup"
            ) from error

    def _write(self, ref: BlobRef, data: bytes) -> None:
        if self._here.get(ref.key) == len(data):
            self.found.append(ref.key)
            return
        create_own(self.storage, ref.key, data)
        self.copied.append(len(data))

    # --- chunks ------------------------------------------------------------------------------

    def _copy_chunks(self) -> None:
        """Copy the chunk objects that are not there, many at once."""
        due = self._ranges.objects
        here = {i.key: i.nbytes for i in self._listed("chunks") if i.key in due}
        self.found += here
        done = 0
        expect("chunks", len(due) - len(here))
        absent = self._absent(here)
        for batch in parts(absent, lambda one: end_of(one[1]), _AT_ONCE_BYTES, _AT_ONCE):
            self.source.runtime.parallel([partial(self._chunk, *each) for each in batch])
            done += len(batch)
            tell("chunks", done)

    def _absent(self, here: Mapping[str, int]) -> Iterator[tuple[str, Rows]]:
        """Key and ranges of each chunk object that is not there yet."""
        for key, rows in self._ranges.of_each():
            self.chunks += len(rows)
            if key not in here:
                yield key, rows
            elif here[key] < end_of(rows):
                raise CorruptObjectError(
                    f"chunk object {key} in {self.storage.url} ends before {end_of(rows)}; delete "
                    "it there, and clone again"
                )

    def _chunk(self, key: str, rows: Rows) -> None:
        """Copy one chunk object if all chunks in it match their checksums."""
        storage = self.source.storage
        try:
            data = storage.get(key)
        except ObjectNotFoundError as error:
            missing = MissingChunkError(
                f"chunk object {key} is referenced and not there ({storage.url}); {_MEND}"
            )
            missing.key = key
            raise missing from error
        problem = problem_of(key, rows, data)
        if problem is not None:
            raise CorruptObjectError(f"{problem}; {_MEND}")
        if not self._copied_within(key, len(data)):
            create_own(self.storage, key, data)
        self.copied.append(len(data))

    def _copied_within(self, key: str, nbytes: int) -> bool:
        """Whether both are in one store, and it has copied the object."""
        if self.within is None:
            return False
        try:
            self.within(key, nbytes)
        except StorageError as error:  # not allowed there, or too large for it
            _LOG.warning("the store did not copy an object, which is sent instead: %s", error)
            return False
        self.moved.append(key)
        return True


# --- clones -------------------------------------------------------------------------------------


_TRIES: Final = 10
_SWAPS: Final = 100
_LEASE_MS: Final = 120_000
_MOST_LEASES: Final = 16
_OPERATION: Final = "clone"
_AHEAD: Final = 1_000_000
"""More versions than a source makes before it is cloned again, and as many as a recovery skips."""


def clone(
    context: Context, storage: Storage, history: str | None, branches: Iterable[str] | None
) -> CloneReport:
    """Copy the branches, by default all, and their tags to the other storage.

    Raises
    ------
    NotFoundError
        If there is no such branch.
    AlreadyExistsError
        If something else is at the other place.
    ConflictError
        If a branch or tag of the clone has gone another way, or others change the clone meanwhile.
    CorruptObjectError
        If an object is damaged or missing.
    """
    if history not in (None, "all", "head"):
        raise InvalidArgumentError(f"history={history!r}: give 'all' or 'head', or nothing")
    _check_apart(context.storage, storage)
    names = _names(branches)
    for _ in range(_TRIES):
        whole = context.roots.whole(context.roots.read().root)
        try:
            return _Clone(context, whole, storage, history, names).run()
        except (SnapshotExpiredError, _OvertakenError):
            continue  # before it was leased; or another clone has made the root
        except (CorruptObjectError, MissingChunkError) as error:
            newer = context.roots.read().root
            if not is_missing(error) or newer.collected == whole.collected:
                raise
    raise ConflictError(
        f"what is copied from {context.storage.url} has expired or was collected {_TRIES} times "
        "meanwhile; try again later"
    )


class _OvertakenError(Exception):
    """Another process has made the clone's root."""


def _check_apart(one: Storage, other: Storage) -> None:
    """Refuse a place that is the repository, lies in it, or around it."""
    if one.url.startswith("memory:"):  # whose names are no folders, and may be empty
        overlap = one.url == other.url != "memory://"
    else:
        here, there = _real(one), _real(other)
        overlap = here.startswith(there) or there.startswith(here)
    if overlap:
        raise InvalidArgumentError(
            f"{other.url} and the repository {one.url} overlap; choose a place beside it"
        )


def _real(storage: Storage) -> str:
    """The place, without symbolic links in a local path."""
    bare: object = unmetered(storage)
    place = str(Path(bare.path).resolve()) if isinstance(bare, LocalStorage) else storage.url
    return place.rstrip("/") + "/"


def _names(branches: Iterable[str] | None) -> frozenset[str] | None:
    if branches is None:
        return None
    found = None if isinstance(branches, str) or not isinstance(branches, Iterable) else [*branches]
    if found is None or not all(isinstance(name, str) for name in found):
        raise InvalidArgumentError(f"branches={branches!r:.80}: a list of names is due")
    if DEFAULT_BRANCH not in found:
        raise InvalidArgumentError(
            f"branches: {DEFAULT_BRANCH!r} has to be among them, since every repository has it"
        )
    return frozenset(found)


def _begin(storage: Storage, repository_id: str) -> None:
    """Note at an empty place which repository is cloned to it."""
    check_outside(storage)
    cloned: bytes | None
    try:
        cloned = storage.get(CLONING_KEY, 0, 64)
    except ObjectNotFoundError:
        stray = storage.stray() or next((info.key for info in storage.list()), None)
        if stray is not None:
            raise AlreadyExistsError(
                f"{storage.url} is not empty (it holds {stray!r}), and has no clone of this "
                "repository; choose an empty place"
            ) from None
        cloned = create_or_find(storage, CLONING_KEY, repository_id.encode())
    if cloned not in (None, repository_id.encode()):
        raise AlreadyExistsError(
            f"an unfinished clone of another repository is at {storage.url}; choose an empty place"
        )


def _is_collecting(context: ReadContext, root: Root) -> bool:
    """Whether a collection has begun that is not known to have ended."""
    if not root.collected:
        return False
    for one in operations(context):
        if one.operation in ("collect garbage", "end collection"):
            return one.operation == "collect garbage"
    return True


@contextmanager
def _leased(context: Context, snapshots: Iterable[str]) -> Iterator[None]:
    """Keep these snapshots, and all after them, from expiring, where leases can be taken.

    Where the root cannot be written, what expires meanwhile makes the clone begin again.
    """
    held: list[Held] = []
    try:
        try:
            if context.storage.capabilities.cas:
                held += [take(context, one, _LEASE_MS, _OPERATION) for one in snapshots]
        except StorageError as error:
            _LOG.warning("%s is cloned without a lease: %s", context.storage.url, error)
        yield
    finally:
        for lease in held:
            with suppress(StorageError):  # it then ends by itself
                give_up(context, lease)


@dataclass
class _Clone:
    """One attempt, from one root of the source."""

    context: Context
    source: Root
    storage: Storage
    history: str | None
    names: frozenset[str] | None
    roots: Roots = field(init=False)
    there: ReadContext | None = None
    whole: Root | None = None
    """The root of the clone with all refs; both are None before there is one."""
    expired: bool = field(init=False)
    tips: dict[str, Branch] = field(init=False)

    @property
    def all_of_it(self) -> bool:
        """Whether branches that are new to the clone get all of their history."""
        return self.history != "head"

    def run(self) -> CloneReport:
        """Copy what is not there, then write the root."""
        names = sorted(self.source.branches if self.names is None else self.names)
        tips = {name: known_ref(self.source.branches, name, "branch") for name in names}
        self.tips = tips
        self._look()
        there = self.whole
        self.expired = not self.all_of_it or has_expired(self.source)
        self.expired = self.expired or (there is not None and has_expired(there))
        due: dict[str, BlobRef] = {}
        branches = {name: self._branch(name, tip, due) for name, tip in tips.items()}
        tags = self._tags(tips, due)
        within = copier_within(self.context.storage, self.storage)
        copier = ObjectCopier(self.context, self.storage, within)
        if there is None or tags or self._changes(branches):
            oldest = dict.fromkeys(self._oldest(tip) for tip in tips.values())
            with _leased(self.context, [*oldest][:_MOST_LEASES]):
                self._copy(copier, due, branches)
                version = self._write_root(branches, tags)
        else:
            version = there.version
        self.storage.delete_many([CLONING_KEY])
        return CloneReport(
            version,
            {name: snapshot_id_of(branch.head.key) for name, branch in branches.items()},
            {name: snapshot_id_of(ref.key) for name, ref in sorted(tags.items())},
            len(due),
            len(copier.copied),
            sum(copier.copied),
            len(copier.moved),
            len(copier.found),
            copier.chunks,
            copier.virtual,
        )

    # --- what is there -----------------------------------------------------------------------

    def _look(self) -> None:
        """Look at the place, which is empty or has a clone of this repository, finished or not.

        Raises
        ------
        AlreadyExistsError
            If it is neither.
        """
        storage, runtime, own = self.storage, self.context.runtime, self.source.repository_id
        if not storage.capabilities.cas:
            raise UnsupportedStorageError(
                f"{storage.url} cannot put-if-absent and compare-and-swap, so no repository can be "
                "made there; choose a local disk or a storage that can"
            )
        self.roots = Roots(storage, runtime)
        if not is_there(storage, ROOT_KEY):
            _begin(storage, own)
            return
        objects, at = Objects(storage, runtime), self.roots.read()
        if at.root.repository_id != own:
            raise AlreadyExistsError(
                f"another repository, {at.root.repository_id}, is at {storage.url}; choose an "
                "empty place"
            )
        self.roots.share(objects, own)
        there = ReadContext.unshared(own, storage, runtime, at.root.config)
        if _is_collecting(there, at.root):
            raise ConflictError(
                f"a garbage collection at {storage.url} has begun and not ended, and may delete "
                "what is copied. Wait for it, or run garbage_collect() there if it was interrupted"
            )
        self.there, self.whole = there, self.roots.whole(at.root)

    @property
    def branches(self) -> Mapping[str, Branch]:
        """The branches of the clone."""
        return {} if self.whole is None else self.whole.branches

    # --- which snapshots ---------------------------------------------------------------------

    def _branch(self, name: str, tip: Branch, due: dict[str, BlobRef]) -> Branch:
        """The branch as the clone will have it; the snapshots it needs are added to `due`."""
        mine = self.branches.get(name)
        if mine is None:
            floor = tip.floor if self.all_of_it else snapshot_id_of(tip.head.key)
            line = [ref for ref, _ in ages(self.context, tip.head, floor)]
            due |= {ref.key: ref for ref in line if ref.key not in self._there}
            if self.expired:
                floor = snapshot_id_of(line[-1].key)
            return replace(tip, epoch=0, floor=floor)
        parent: BlobRef | None = tip.head
        for ref, snapshot in ages(self.context, tip.head, tip.floor):
            if ref.key == mine.head.key:
                break
            due[ref.key] = ref
            parent = snapshot.parent
        if parent is None or parent.key != mine.head.key:
            now, cut = snapshot_id_of(mine.head.key), " any more" if tip.floor else ""
            raise ConflictError(
                f"branch {name!r} of {self.storage.url} is at {now}, which is not in the history "
                f"of this branch here{cut}. Clone to an empty place, or move the clone's branch by "
                f"reset_branch({name!r}, ...), which drops its own commits"
            )
        if self.history == "all":
            self._check_depth(name, tip, mine)
        index, floor = tip.index or mine.index, self._floor(mine)
        if tip.floor is not None and self._has(tip.floor, mine, due):
            floor = tip.floor
        return replace(tip, epoch=mine.epoch, floor=floor, index=index)

    def _check_depth(self, name: str, tip: Branch, mine: Branch) -> None:
        """Refuse to say that a branch has all its history in the clone if it begins later there."""
        line = [ref.key for ref, _ in ages(self.context, tip.head, tip.floor)]
        there = None if mine.floor is None else snapshot_key(mine.floor)
        if there in line[:-1]:
            raise ConflictError(
                f"branch {name!r} of {self.storage.url} begins at {mine.floor}, and here there are "
                f"{len(line) - 1 - line.index(there)} older snapshots, which a clone does not get "
                "later: clone to an empty place. To bring only what is new, do not say "
                "history='all'"
            )

    def _has(self, snapshot_id: str, mine: Branch, due: Mapping[str, BlobRef]) -> bool:
        """Whether the snapshot will be in the history of the clone's branch."""
        key = snapshot_key(snapshot_id)
        line = () if self.there is None else ages(self.there, mine.head, mine.floor)
        return key in due or any(ref.key == key for ref, _ in line)

    def _floor(self, mine: Branch) -> str | None:
        """The floor of a branch of the clone if nothing more expires there.

        No branch is without one if anything has expired in the source or the clone.
        """
        if mine.floor is not None or self.there is None or not self.expired:
            return mine.floor
        *_, (oldest, _) = ages(self.there, mine.head, None)
        return snapshot_id_of(oldest.key)

    @cached_property
    def _there(self) -> set[str]:
        """Keys of the snapshots in the history of the clone's branches."""
        return set() if self.there is None else _line(self.there, self.branches)

    @cached_property
    def _here(self) -> set[str]:
        """Keys of the snapshots in the history of these branches here."""
        return _line(self.context, self.tips)

    def _tags(self, tips: Mapping[str, Branch], due: dict[str, BlobRef]) -> dict[str, BlobRef]:
        """The tags that the clone does not have yet; the snapshots they need are added to `due`."""
        gone = () if self.whole is None else self.whole.deleted_tags
        there = {} if self.whole is None else self.whole.tags
        found: dict[str, BlobRef] = {}
        on_branches = None if self.names is None else _line(self.context, tips)
        for name, ref in self.source.tags.items():
            if name in gone or (on_branches is not None and ref.key not in on_branches):
                continue
            mine = there.get(name)
            if mine is not None and mine.key != ref.key:
                raise ConflictError(
                    f"tag {name!r} of {self.storage.url} names another snapshot than the tag here; "
                    "delete one of them, or clone to an empty place"
                )
            if mine is None:
                found[name] = ref
        for ref in found.values():
            floor = snapshot_id_of(ref.key) if self.expired else None
            for older, _ in ages(self.context, ref, floor):
                if older.key in due or older.key in self._there:
                    break
                due[older.key] = older
        return found

    def _oldest(self, tip: Branch) -> str:
        """Id of the oldest snapshot of the branch that is copied."""
        if not self.all_of_it:
            return snapshot_id_of(tip.head.key)
        if tip.floor is not None:
            return tip.floor
        *_, (ref, _) = ages(self.context, tip.head, None)
        return snapshot_id_of(ref.key)

    # --- copying -----------------------------------------------------------------------------

    def _changes(self, branches: Mapping[str, Branch]) -> bool:
        """Whether a branch or the metadata of the clone differs from what it will be."""

        def told(branch: Branch | None) -> Any:
            return None if branch is None else (branch.head.bare(), branch.index, branch.floor)

        there, mine = self.branches, self.whole
        moved = any(told(there.get(name)) != told(branch) for name, branch in branches.items())
        known = {} if mine is None else mine.metadata
        return moved or {**known, **self.source.metadata} != known

    def _copy(
        self, copier: ObjectCopier, due: Mapping[str, BlobRef], branches: Mapping[str, Branch]
    ) -> None:
        """Copy these snapshots, the indexes of the branches, and all that they lead to."""
        indexes = {b.index.key: b.index for b in branches.values() if b.index is not None}
        starts = [Link(ref, Snapshot) for ref in due.values()]
        starts += [Link(ref, IndexDirectory) for ref in indexes.values()]
        copier.copy(starts, self._complete(), partial(self._wanted, due))

    def _wanted(self, due: Mapping[str, BlobRef], link: Link) -> bool:
        """Whether the clone needs the object: not a page about snapshots it does not have."""
        if self.whole is None or link.is_within(due):
            return link.is_within(due)
        return link.is_within(self._here)

    def _complete(self) -> set[str]:
        """Keys of the metadata that the clone's heads lead to, so that all it names is there."""
        there, seen = self.there, set[str]()
        if there is None:
            return seen

        def load(link: Link) -> Any:
            ends = link.kind in (Manifest, Zones)
            return None if ends else there.objects.load(link.ref, link.kind)

        branches = self.branches.values()
        starts = [Link(branch.head, Snapshot) for branch in branches]
        starts += [Link(b.index, IndexDirectory) for b in branches if b.index is not None]
        stage = "looking at the clone"
        for _ in follow(there.runtime, starts, load, seen, lambda link: link.page is None, stage):
            pass
        return seen

    # --- the root ----------------------------------------------------------------------------

    def _write_root(self, branches: Mapping[str, Branch], tags: Mapping[str, BlobRef]) -> int:
        """Write the first root of the clone, or swap in the next; its version."""
        source, roots, before = self.source, self.roots, self.whole
        if before is None:
            runtime, version = self.context.runtime, source.version + _AHEAD
            operation, now_ms = runtime.random_bytes(16), runtime.now_ms()
            entry = LogEntry(version, now_ms, _OPERATION, "", "", operation, runtime.who())
            # Leases, claims and counters of the source are not those of its clone.
            root = Root(
                source.repository_id,
                version,
                operation,
                now_ms,
                source.config,
                branches,
                tags,
                source.deleted_tags,
                (entry,),
                fence=version,
                metadata=source.metadata,
            )
            at = roots.install(root.with_copies({}, DEFAULT_BRANCH), None)
            if at is None:
                raise _OvertakenError
            keep_reserve(self.storage)
            return at.root.version
        known = {name: branch.head.key for name, branch in before.branches.items()}

        def change(root: Root) -> Root:
            whole = roots.whole(root)
            if whole.collected != before.collected:
                raise ConflictError(
                    f"a garbage collection has begun at {self.storage.url}, and may have deleted "
                    "what was copied; clone again when it has ended"
                )
            for name in branches:
                now = whole.branches.get(name)
                if (now and now.head.key) != known.get(name):
                    raise ConflictError(
                        f"branch {name!r} of {self.storage.url} was changed while it was cloned; "
                        "clone again"
                    )
            kept = {n: replace(b, floor=self._floor(b)) for n, b in whole.branches.items()}
            new = dict(branches)
            if whole.leases:  # what they keep must not expire; the next clone may let it
                new |= {n: replace(b, floor=kept[n].floor) for n, b in new.items() if n in kept}
            return replace(
                whole,
                branches={**kept, **new},
                tags={**whole.tags, **tags},
                deleted_tags=tuple(dict.fromkeys((*whole.deleted_tags, *source.deleted_tags))),
                pages={s: refs for s, refs in whole.pages.items() if s not in ("branches", "tags")},
                deleted_branches=(),
                swept=0,
                metadata={**whole.metadata, **source.metadata},
            )

        return roots.update(change, _OPERATION, "", "", _SWAPS).root.version


def _line(context: ReadContext, branches: Mapping[str, Branch]) -> set[str]:
    """Keys of all snapshots in the history of the branches."""
    lines = (ages(context, branch.head, branch.floor) for branch in branches.values())
    return {ref.key for line in lines for ref, _ in line}
