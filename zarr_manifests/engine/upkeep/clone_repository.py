"""Cloning: a repository at another place, with the same snapshots under the same ids.

Every object that the branches and tags reach is copied, then the root is written. Until then there
is no repository at the other place, and what was copied waits for another call. An object named
`cloning` tells an unfinished clone from a place where something else lies.

A later call brings new commits to a clone. It moves a branch only forward: to a snapshot whose
history has the branch's head. What has expired in the source expires in the clone, unless somebody
holds a lease there.

A clone has the id of its source, since every snapshot states that id. Both draw names of objects at
random, so they can go on independently. Invariants: the version of a clone is far ahead of that of
its source, and its fence is that version, so no session of the source can commit to the clone; a
branch or tag that is in the clone already is never lost, moved back or made shorter; once anything
has expired, every branch has a floor; an object of the clone is whole and was checked, since it is
written in one call after the check.

What is copied may expire in the source and be collected. The clone then begins again with the newer
root, and finds the chunks that it has copied already. In the other place, a collection would delete
what no ref names yet. So the swap is refused if one has begun since, and the clone does not begin
while one may still be running.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from zarr_manifests.engine.ancestry import Link, ancestors, follow, has_expired, tables
from zarr_manifests.engine.create import check_outside, keep_reserve
from zarr_manifests.engine.objects import Objects, create_or_find, create_own, is_there
from zarr_manifests.engine.refs import DEFAULT_BRANCH
from zarr_manifests.engine.roots import Roots, is_missing
from zarr_manifests.engine.upkeep.recover import operations
from zarr_manifests.engine.upkeep.verify import end_of, problem_of
from zarr_manifests.engine.view import Context, ReadContext
from zarr_manifests.errors import (
    AlreadyExistsError,
    ConflictError,
    CorruptObjectError,
    ObjectNotFoundError,
    UnsupportedStorageError,
)
from zarr_manifests.format.manifest import Manifest
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.root import CLONING_KEY, ROOT_KEY, Branch, LogEntry, Root
from zarr_manifests.format.snapshot import HistoryPage, Snapshot
from zarr_manifests.format.zone_maps import Zones
from zarr_manifests.ids import snapshot_id_of
from zarr_manifests.planning.garbage import ChunkRanges, Rows, parts
from zarr_manifests.progress import counted, expect, tell
from zarr_manifests.reports import CloneReport
from zarr_manifests.storage import Storage
from zarr_manifests.versions import TAGS

_AT_ONCE: Final = 64
_AT_ONCE_BYTES: Final = 128 * 1024**2
_MEND: Final = "restore it from a backup"
_TRIES: Final = 10
_SWAPS: Final = 100
_OPERATION: Final = "clone"
_AHEAD: Final = 1_000_000
"""More versions than a source makes before it is cloned again, and as many as a recovery skips."""


def clone(context: Context, storage: Storage) -> CloneReport:
    """Copy the branches and tags, and all that they lead to, to the other storage.

    Raises
    ------
    AlreadyExistsError
        If something else is at the other place.
    ConflictError
        If a branch or tag of the clone has gone another way, or others change the clone meanwhile.
    CorruptObjectError
        If an object is damaged or missing.
    """
    for _ in range(_TRIES):
        source = context.roots.whole(context.roots.read().root)
        try:
            return _Clone(context, source, storage, Roots(storage, context.runtime)).run()
        except CorruptObjectError as error:
            newer = context.roots.read().root
            if not is_missing(error) or newer.collected == source.collected:
                raise
    raise ConflictError(
        f"what is copied from {context.storage.url} was collected {_TRIES} times meanwhile; try "
        "again later"
    )


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


@dataclass
class _Clone:
    """One attempt, from one root of the source, with all of its refs.

    Attributes
    ----------
    there : ReadContext
        The clone.
    whole : Root
        The root of the clone with all of its refs; one without any before it has a root.
    is_new : bool
        Whether the clone has no root yet.
    expired : bool
        Whether anything has expired in the source or the clone, so that every branch has a floor.
    copied : list of int
        Sizes of the objects copied so far.
    """

    context: Context
    source: Root
    storage: Storage
    roots: Roots
    there: ReadContext = field(init=False)
    whole: Root = field(init=False)
    is_new: bool = False
    expired: bool = False
    copied: list[int] = field(default_factory=list)

    def run(self) -> CloneReport:
        """Copy what is not there, then write the root."""
        self._look()
        self.expired = has_expired(self.source) or has_expired(self.whole)
        history: dict[str, BlobRef] = {}
        tips = sorted(self.source.branches.items())
        branches = {name: self._branch(name, tip, history) for name, tip in tips}
        tags = self._tags(history)
        known = set[str]()
        for mine in self.whole.branches.values():
            known |= {ref.key for ref, _ in ancestors(self.there, mine.head, mine.floor)}
        self._copy(history, branches, known)
        self._write_root(branches, tags)
        self.storage.delete_many([CLONING_KEY])
        return CloneReport(len(history.keys() - known), len(self.copied), sum(self.copied))

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
        self.there = ReadContext.unshared(own, storage, runtime, self.source.config)
        if not is_there(storage, ROOT_KEY):
            _begin(storage, own)
            self.is_new, self.whole = True, self._first_root()
            return
        root = self.roots.read().root
        if root.repository_id != own:
            raise AlreadyExistsError(
                f"another repository, {root.repository_id}, is at {storage.url}; choose an "
                "empty place"
            )
        self.roots.share(Objects(storage, runtime), own)
        if _is_collecting(self.there, root):
            raise ConflictError(
                f"a garbage collection at {storage.url} has begun and not ended, and may delete "
                "what is copied. Wait for it, or run garbage_collect() there if it was interrupted"
            )
        self.whole = self.roots.whole(root)

    def _first_root(self) -> Root:
        """A root without refs; leases, claims and log are not those of the source."""
        source, runtime = self.source, self.context.runtime
        version, now_ms = source.version + _AHEAD, runtime.now_ms()
        operation, features = runtime.random_bytes(16), source.features
        facts = source.repository_id, version, operation, now_ms, source.config
        entry = LogEntry(version, now_ms, _OPERATION, "", "", operation, runtime.who())
        return Root(*facts, fence=version, features=features).with_log(entry)

    # --- which snapshots ---------------------------------------------------------------------

    def _branch(self, name: str, tip: Branch, history: dict[str, BlobRef]) -> Branch:
        """The branch as the clone will have it; the snapshots it needs are added to `history`."""
        line = [ref for ref, _ in ancestors(self.context, tip.head, tip.floor)]
        ids = [snapshot_id_of(ref.key) for ref in line]
        mine = self.whole.branches.get(name)
        floor = ids[-1] if self.expired else None
        if mine is None:
            branch = replace(tip, epoch=0, floor=floor)
        else:
            head = snapshot_id_of(mine.head.key)
            if head not in ids:
                raise ConflictError(
                    f"branch {name!r} of {self.storage.url} is at {head}, which is not in the "
                    "history of this branch here: it has expired, the branch was reset, or the "
                    "clone has commits of its own. Clone to a new place. If the clone has a "
                    "snapshot of this history, reset_branch can move its branch back to that one"
                )
            if mine.floor in ids:  # what has expired there stays so
                floor = mine.floor
                line = line[: ids.index(floor) + 1]
            index = tip.index or mine.index
            branch = replace(tip, epoch=mine.epoch, floor=floor, index=index)
        history |= {ref.key: ref for ref in line}
        return branch

    def _tags(self, history: dict[str, BlobRef]) -> dict[str, BlobRef]:
        """The tags that the clone does not have yet; their snapshots are added to `history`."""
        found: dict[str, BlobRef] = {}
        for name, ref in self.source.tags.items():
            mine = self.whole.tags.get(name)
            if mine is not None and mine.key != ref.key:
                raise ConflictError(
                    f"tag {name!r} of {self.storage.url} names another snapshot than the tag here; "
                    "delete one of them, or clone to an empty place"
                )
            if mine is None and TAGS + name not in self.whole.deleted:
                found[name] = ref
        for ref in found.values():
            floor = snapshot_id_of(ref.key) if self.expired else None
            for older, _ in ancestors(self.context, ref, floor):
                if older.key in history:
                    break
                history[older.key] = older
        return found

    def _floor(self, mine: Branch) -> str | None:
        """The floor of a branch of the clone if nothing more expires there."""
        if mine.floor is not None or not self.expired:
            return mine.floor
        *_, (oldest, _) = ancestors(self.there, mine.head, None)
        return snapshot_id_of(oldest.key)

    # --- copying -----------------------------------------------------------------------------

    def _copy(
        self, history: Mapping[str, BlobRef], branches: Mapping[str, Branch], known: set[str]
    ) -> None:
        """Copy the snapshots not known, the indexes of the branches, and all that they lead to.

        Metadata objects are copied on the way, since what they refer to is read from them.
        """
        ranges, runtime = ChunkRanges(), self.context.runtime
        seen = self._complete() | known
        every = branches.values()
        for _, value in follow(runtime, history, every, self._metadata, seen, "metadata"):
            for table in tables(value):
                ranges.add(table)
        listed = counted("looking at what is there", self.storage.list("chunks/"))
        here = {info.key: info.nbytes for info in listed}
        absent = [one for one in ranges.of_each() if here.get(one[0], -1) < end_of(one[1])]
        done = 0
        expect("chunks", len(absent))
        for batch in parts(absent, lambda one: end_of(one[1]), _AT_ONCE_BYTES, _AT_ONCE):
            runtime.parallel([partial(self._chunk, *each) for each in batch])
            done += len(batch)
            tell("chunks", done)

    def _complete(self) -> set[str]:
        """Keys of the metadata that the clone's heads lead to, so that all it names is there."""
        there, seen = self.there, set[str]()

        def load(link: Link) -> Any:
            ends = link.kind in (Manifest, Zones, HistoryPage)
            return None if ends else there.objects.load(link.ref, link.kind)

        branches = self.whole.branches.values()
        heads = {branch.head.key: branch.head for branch in branches}
        for _ in follow(there.runtime, heads, branches, load, seen, "looking at the clone"):
            pass
        return seen

    def _metadata(self, link: Link) -> Any:
        """Copy the object and return it, decoded."""
        ref = link.ref
        data = self._read(ref.key, ref.length + 1)
        value = link.kind.from_object(data, ref)
        link.check(value)
        if isinstance(value, Snapshot):
            value.check_repository(ref.key, self.source.repository_id)
        self._write(ref.key, data)
        return value

    def _chunk(self, key: str, rows: Rows) -> None:
        """Copy one chunk object if all chunks in it match their checksums."""
        data = self._read(key)
        problem = problem_of(key, rows, data)
        if problem is not None:
            raise CorruptObjectError(f"{problem}; {_MEND}")
        self._write(key, data)

    def _read(self, key: str, most: int | None = None) -> bytes:
        storage = self.context.storage
        try:
            return storage.get(key, 0, most)
        except ObjectNotFoundError as error:
            raise CorruptObjectError(
                f"{key} is referenced and not there ({storage.url}); {_MEND}"
            ) from error

    def _write(self, key: str, data: bytes) -> None:
        create_own(self.storage, key, data)
        self.copied.append(len(data))

    # --- the root ----------------------------------------------------------------------------

    def _write_root(self, branches: Mapping[str, Branch], tags: Mapping[str, BlobRef]) -> None:
        """Write the first root of the clone, or swap in the next."""
        source, roots, before = self.source, self.roots, self.whole
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
                deleted=tuple(dict.fromkeys((*whole.deleted, *source.deleted))),
                metadata={**whole.metadata, **source.metadata},
            )

        if not self.is_new:
            roots.update(change, _OPERATION, "", "", _SWAPS)
            return
        if roots.install(change(before).with_copies({}, DEFAULT_BRANCH), None) is None:
            raise ConflictError(
                f"another process has made the repository at {self.storage.url} meanwhile; clone "
                "again"
            )
        keep_reserve(self.storage)
