"""History: following parents from a snapshot, and deciding which snapshots are in history.

A snapshot is in history if a branch reaches it at or above the branch's floor, or a tag does. A tag
reaches its own snapshot and, as long as nothing has expired, all before it: the first expiry gives
every branch a floor, `main` among them.

What reads history to list it takes the entries that snapshots have of their ancestors. What decides
by it (refs, leases, conflicts, what an expiry keeps, collection) walks the snapshots themselves.

Invariants:

- All objects of a snapshot in a root's history exist as long as that root is current, since a
  collection replaces the root before it deletes anything. So a writer that refers to objects of an
  older snapshot checks it against the very root that it replaces.
- Entries of a page are used only if each is the child of the one before, and the newest is the
  snapshot that is due. A page that is missing, damaged or of another history ends the listing with
  a warning. Its reader then goes on at the snapshot that was due, which has entries of its own.
  `verify` reports the page.
- What is fetched in advance is used only if a child's pointer is the one it was fetched by. A wrong
  or unreadable one costs a request and is no error.

A session *follows* a branch, or finds that its snapshot has expired: objects missing because of
that raise `SnapshotExpiredError`, and a session's own objects that a collection has deleted raise
`FencedError`; neither counts as damage. Damage in a snapshot that is in history or leased is raised
as damage.

Snapshots that no branch or tag leads to any more, and that can be named again
------------------------------------------------------------------------------

Resets, amends, deletions, expiries and restores leave snapshots behind, and a later collection
deletes them. Until then one can be named again, if it was in history in a version of the root from
which on there was no collection. What such a version reaches, the last collection does not delete,
even if it still runs; by the same rule older refs are restored. This is checked against the very
root that is replaced. A collection that begins meanwhile replaces it first, so that the swap fails
and the new root decides.

What is *reachable* is everything that a snapshot, an index or a page refers to, directly or not.
All references are followed without interpretation: the whole read list, each commit's own delta,
bundles, the base and its pages, pages of history, all manifests, and every chunk object that a row
refers to. Objects are loaded many at once, each once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from typing import Any, Final

from msgspec import Struct

from zarr_manifests.engine.objects import SessionKeys
from zarr_manifests.engine.roots import is_fenced, is_missing, opened, unless_missing
from zarr_manifests.engine.view import ReadContext, SnapshotView
from zarr_manifests.errors import (
    CorruptObjectError,
    FencedError,
    ManifestsError,
    MissingChunkError,
    NotFoundError,
    ObjectNotFoundError,
    SnapshotExpiredError,
)
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.manifest import Base, Bundle, Delta, Manifest, ManifestRef, Part
from zarr_manifests.format.records import MAX_SNAPSHOT_BYTES, BlobRef
from zarr_manifests.format.root import Branch, Lease, LogEntry, Root
from zarr_manifests.format.snapshot import (
    History,
    HistoryEntry,
    HistoryPage,
    HistoryPageRef,
    MarksPage,
    Snapshot,
    SnapshotPointer,
    unpacked_entries,
)
from zarr_manifests.format.zone_maps import IndexDirectory, ZonePages, Zones
from zarr_manifests.ids import session_start, snapshot_id_of, snapshot_key
from zarr_manifests.progress import counted, expect, tell
from zarr_manifests.runtime import Runtime
from zarr_manifests.storage.protocol import ReadableStorage

_LOG = logging.getLogger(__name__)
FOLLOWING: Final = "following the history"
_LOADED_AT_ONCE: Final = 64
_BEGINS: Final = 2
"""Number of snapshots to fetch one by one first: often only the newest are needed."""
_FIRST: Final = 4
_MOST: Final = 64


def ancestors(
    context: ReadContext, start: BlobRef, floor: str | None = None
) -> Iterator[tuple[BlobRef, Snapshot]]:
    """The snapshot and those before it, newest first, down to the one with the id `floor`."""
    return counted(FOLLOWING, _walk(context, start, floor))


def entries(
    context: ReadContext, start: BlobRef, floor: str | None = None, wanted: int = 1
) -> Iterator[HistoryEntry]:
    """What `ancestors` says about each snapshot, from the entries that others have of it."""
    return chain.from_iterable(runs(context, start, floor, wanted))


def runs(
    context: ReadContext, start: BlobRef, floor: str | None = None, wanted: int = 1
) -> Iterator[Sequence[HistoryEntry]]:
    """Like `entries`, those together that come from one object, newest first.

    `wanted` is how many the caller is likely to take.
    """
    ref: BlobRef | None = start
    seen: set[str] = set()
    while ref is not None:
        snapshot = context.objects.load(ref, Snapshot)
        older = ancestor_runs(context, snapshot, floor, wanted - len(seen) - 1)
        for run in chain([[snapshot.entry(ref)]], older):
            count = len(seen) + len(run)
            seen.update(entry.snapshot_id for entry in run)
            if len(seen) != count:
                raise _circular(run[0].pointer.ref)
            yield run
            last = run[-1]
            ref = last.parent.ref if last.parent and last.snapshot_id != floor else None


def _circular(ref: BlobRef) -> CorruptObjectError:
    return CorruptObjectError(f"{ref.key} is its own ancestor; the history is damaged")


def _walk(
    context: ReadContext, start: BlobRef, floor: str | None
) -> Iterator[tuple[BlobRef, Snapshot]]:
    """Walk to the beginning, or the floor.

    Far away, several are fetched in a round, twice as many as in the round before. What a snapshot
    says about its ancestors tells which.
    """
    objects = context.objects
    last = None if floor is None else snapshot_key(floor)
    ref: BlobRef | None = start
    seen: set[str] = set()
    told: Iterator[BlobRef] = iter(())
    fetched: dict[BlobRef, Snapshot] = {}
    alone, count = _BEGINS, _FIRST
    while ref is not None:
        if ref.key in seen:
            raise _circular(ref)
        seen.add(ref.key)
        found = fetched.pop(ref.bare(), None)
        if not (found or objects.storage.capabilities.inline or objects.has(ref, Snapshot)):
            alone -= 1
            if alone < 0:
                due = [*islice(told, count)]
                if due[:1] != [ref]:  # not known yet, or these were not ancestors
                    found = objects.load(ref, Snapshot)
                    runs = ancestor_runs(context, found, floor)
                    refs = (entry.pointer.ref for run in runs for entry in run)
                    told = (each for each in refs if not objects.has(each, Snapshot))
                    count = _FIRST
                    due = [*islice(told, count)]
                with suppress(ManifestsError):  # each is loaded again when it is due
                    loaded = objects.load_all([(each, Snapshot) for each in due])
                    fetched = {each: loaded[each.key] for each in due}
                count = min(2 * count, _MOST)
        snapshot = found or fetched.pop(ref.bare(), None) or objects.load(ref, Snapshot)
        yield ref, snapshot
        ref = snapshot.parent if ref.key != last else None


def locate(
    context: ReadContext, root: Root, snapshot_id: str
) -> tuple[BlobRef, Snapshot, str | None]:
    """The snapshot with that id, and the floor of the history it is in as of this root.

    Raises
    ------
    SnapshotExpiredError
        If neither a branch nor a tag leads to it.
    """
    key = snapshot_key(snapshot_id)
    for ref, snapshot, floor, _ in histories(context, root):
        if ref.key == key:
            return ref, snapshot, floor
    raise SnapshotExpiredError(
        f"snapshot {snapshot_id} is not in the history of any branch or tag of "
        f"{context.storage.url}; `repo.ancestry()` and `zarr-manifests log` list what is"
    )


def tag_floor(root: Root, ref: BlobRef) -> str | None:
    """The floor of a tag's own history, regardless of branches."""
    return snapshot_id_of(ref.key) if has_expired(root) else None


def has_expired(root: Root) -> bool:
    """Whether anything has expired, so that a tag keeps only its own snapshot."""
    main = root.branches.get("main")  # never in a page
    return main is not None and main.floor is not None


def starts(context: ReadContext, root: Root) -> Iterator[tuple[BlobRef, str | None, str]]:
    """The snapshots of all branches and tags, with floors; refs in the root itself come first.

    With each comes what holds it: nothing for a branch, else the tag.
    """
    yield from ((branch.head, branch.floor, "") for branch in root.branches.values())
    for name, ref in root.tags.items():
        yield ref, tag_floor(root, ref), f"tag {name!r}"
    if root.pages:
        yield from starts(context, context.roots.whole(root))


def histories(
    context: ReadContext, root: Root
) -> Iterator[tuple[BlobRef, Snapshot, str | None, str]]:
    """All snapshots in history; some more than once.

    With each comes the floor of a history that it is in, and what holds it, as in `starts`.
    """
    seen: dict[str, str | None] = {}
    for start, floor, holder in starts(context, root):
        for ref, snapshot in ancestors(context, start, floor):
            if ref.key in seen and seen[ref.key] in (None, floor):
                break  # an earlier walk has gone on from here as far
            seen[ref.key] = floor
            yield ref, snapshot, floor, holder


# --- snapshots of which only the id is known -----------------------------------------------------


def snapshot_ref(context: ReadContext, snapshot_id: str) -> BlobRef:
    """The snapshot with that id, whether it is in history or not.

    Raises
    ------
    SnapshotExpiredError
        If it does not exist.
    """
    try:
        ref, snapshot = snapshot_at(context, snapshot_id)
    except ObjectNotFoundError as error:
        raise SnapshotExpiredError(
            f"snapshot {snapshot_id} is not in {context.storage.url}: it never was, or has "
            "expired; `repo.ancestry()` and `zarr-manifests log` list the snapshots"
        ) from error
    context.objects.remember(ref, snapshot)
    return ref


def snapshot_at(context: ReadContext, snapshot_id: str) -> tuple[BlobRef, Snapshot]:
    """The snapshot with that id, read at its key.

    No pointer vouches for it, so its own repository and snapshot ids are checked.

    Raises
    ------
    ObjectNotFoundError
        If there is no object at the key.
    CorruptObjectError
        If the object is another snapshot, or belongs to another repository.
    """
    key = snapshot_key(snapshot_id)
    data = context.storage.get(key, 0, MAX_SNAPSHOT_BYTES + 1)
    ref = BlobRef.to(key, data)
    snapshot = Snapshot.from_object(data, ref)
    snapshot.check_repository(key, context.repository_id)
    return ref, snapshot


# --- what is alive -----------------------------------------------------------------------------


def live_snapshots(context: ReadContext, whole: Root) -> Iterator[tuple[BlobRef, Snapshot, str]]:
    """All snapshots that branches, tags and leases reach; some more than once.

    With each comes what holds it: nothing for a branch, else the tag or the lease.
    """
    reached: set[str] = set()
    for ref, snapshot, _, holder in histories(context, whole):
        reached.add(ref.key)
        yield ref, snapshot, holder
    for lease in whole.leases:
        if snapshot_key(lease.snapshot) not in reached:
            yield *_leased(context, lease), lease_name(lease)


def _leased(context: ReadContext, lease: Lease) -> tuple[BlobRef, Snapshot]:
    """The snapshot of a lease that no branch or tag reaches any more."""
    try:
        return snapshot_at(context, lease.snapshot)
    except ObjectNotFoundError as error:
        key = snapshot_key(lease.snapshot)
        raise CorruptObjectError(f"{key} is leased and not there") from error


def lease_name(lease: Lease) -> str:
    """What reports call a lease: by its owner, or else by its session."""
    return f"lease of {lease.owner or lease.session}"


# --- what a snapshot says about its ancestors ----------------------------------------------------


def ancestor_runs(
    context: ReadContext, snapshot: Snapshot, floor: str | None = None, wanted: int = 1
) -> Iterator[Sequence[HistoryEntry]]:
    """Entries of the ancestors down to the snapshot with the id `floor`, newest first.

    They may end early. `wanted` is how many the caller is likely to take: their pages are fetched
    together, before any others.
    """
    if snapshot.parent is None or snapshot.snapshot_id == floor:
        return
    due: SnapshotPointer | None = SnapshotPointer.of(snapshot.parent)
    try:
        for run in _runs(context, snapshot.history, wanted):
            if run[0].pointer != due:
                raise CorruptObjectError(f"history: {run[0].pointer} in the place of {due}")
            ids = [entry.snapshot_id for entry in run]
            if floor in ids:
                yield run[: ids.index(floor) + 1]
                return
            yield run
            due = run[-1].parent
            if due is None:
                return
    except CorruptObjectError as error:
        _LOG.warning("%s says wrong things: %s", snapshot.snapshot_id, error)


def _runs(context: ReadContext, history: History, wanted: int) -> Iterator[Sequence[HistoryEntry]]:
    """The entries that the snapshot carries, then those of each page; newest first.

    A round fetches what is wanted, or many more entries than there were before.
    """
    due = [*reversed(history.pages)]
    loaded: dict[str, HistoryPage | None] = {}
    recent, seen = history.recent, 0
    while True:
        if recent:
            seen += len(recent)
            yield unpacked_entries(recent)[::-1]
        if not due:
            return
        if due[0].blob.key not in loaded:
            count = max(wanted - seen, 8 * seen, 1)
            refs = [r for r in _reaching(due[:_LOADED_AT_ONCE], count) if r.blob.key not in loaded]
            found = context.runtime.parallel([partial(_load, context, ref) for ref in refs])
            loaded |= {ref.blob.key: page for ref, page in zip(refs, found, strict=True)}
        page = loaded.pop(due.pop(0).blob.key)
        if page is None:
            return
        due[:0], recent = reversed(page.history.pages), page.history.recent


def _reaching(refs: Iterable[HistoryPageRef], count: int) -> Iterator[HistoryPageRef]:
    """As many of the pages as hold that many entries."""
    for ref in refs:
        if count <= 0:
            return
        yield ref
        count -= ref.count


def _load(context: ReadContext, ref: HistoryPageRef) -> HistoryPage | None:
    try:
        page = context.objects.load(ref.blob, HistoryPage)
        ref.check(page)
    except CorruptObjectError as error:
        _LOG.warning("history is read from the snapshots instead: %s", error)
        return None
    return page


# --- following ---------------------------------------------------------------------------------


def open_head(context: ReadContext, branch: str, now: SnapshotView) -> SnapshotView:
    """The head of the branch, opened; `now` itself if that is still the head.

    Raises
    ------
    NotFoundError
        If the branch was deleted.
    """

    def newest() -> SnapshotView:
        root = context.roots.read().root
        tip = context.roots.with_branch(root, branch).branches.get(branch)
        if tip is None:
            raise NotFoundError(f"branch {branch!r}, which the session reads, was deleted")
        return now if tip.head.key == now.ref.key else context.open_branch(tip)

    return opened(newest)


def expired(
    context: ReadContext, snapshot_id: str, error: ManifestsError
) -> SnapshotExpiredError | None:
    """The error to raise instead if the snapshot has left history; else None."""
    if not is_missing(error):
        return None
    try:
        root = context.roots.read().root
    except ManifestsError:
        return None  # what was found first says more
    if any(lease.snapshot == snapshot_id for lease in context.roots.leases(root)):
        return None
    try:
        locate(context, root, snapshot_id)
    except SnapshotExpiredError:
        what, *_ = str(error).split(";")  # and not what to do about damage
        return SnapshotExpiredError(
            f"snapshot {snapshot_id} has expired while it was read, and objects of it are gone: "
            f"{what}. Open a new session, `session.rebase()`, open it with follow=True, or take "
            "a lease beforehand (`repo.lease`)"
        )
    return None


def collected(context: ReadContext, keys: SessionKeys, error: ManifestsError) -> FencedError | None:
    """The error to raise instead if a collection deleted what the session wrote; else None.

    The fence no longer protects the objects of an older session without a lease.
    """
    key = error.key if isinstance(error, MissingChunkError) else None
    if key is None or not key.startswith(keys.lineage_prefix):
        return None
    try:
        root = context.roots.read().root
        if not is_fenced(context.roots, root, keys):
            return None
    except ManifestsError:
        return None  # what was found first says more
    return FencedError(
        f"the session began at version {keys.start}, before the repository's fence {root.fence}, "
        f"and a collection has taken {key}, which it wrote and did not commit in time. Open a new "
        "session and write the changes again; a session that holds a lease keeps what it writes "
        "(`writable_session(lease=...)`)"
    )


class Follower:
    """Tells a reader when to check whether its branch has moved."""

    def __init__(self, context: ReadContext, branch: str, interval_s: float) -> None:
        self._context = context
        self._branch = branch
        self._interval_s = interval_s
        self._looked_s = context.runtime.monotonic_s()

    def due(self) -> bool:
        """Whether the interval is over; if so, a new one begins."""
        over = self.over
        if over:
            self._looked_s = self._context.runtime.monotonic_s()
        return over

    @property
    def over(self) -> bool:
        """Whether the interval is over."""
        return self._context.runtime.monotonic_s() - self._looked_s >= self._interval_s

    def head(self, now: SnapshotView) -> SnapshotView:
        """The head of the branch."""
        return open_head(self._context, self._branch, now)


# --- left behind ----------------------------------------------------------------------------------

_AT_ONCE = 64


class Link(Struct, frozen=True):
    """A pointer to an object of that kind.

    `parts` lists a manifest's tables, and `page` describes a page of history, according to the
    pointer. `of_page` says that the pointer is to a page of a base, or in one: other pages may list
    other tables of the same manifest.
    """

    ref: BlobRef
    kind: type[Any]
    parts: tuple[Part, ...] | None = None
    of_page: bool = False
    page: HistoryPageRef | None = None

    def check(self, value: Any) -> None:
        """Raise if a manifest or a page of history holds something else than its pointer says."""
        if self.page is not None:
            self.page.check(value)
        if self.parts is None or not isinstance(value, Manifest):
            return
        nodes = {part.node_id for part in self.parts} if self.of_page else None
        # A moved array's tables keep their place in a manifest, and not in what lists them.
        held = {part for part in value.directory() if nodes is None or part.node_id in nodes}
        if {*self.parts} != held:
            raise CorruptObjectError(f"{self.ref.key} has other chunk tables than it should")


def _manifests(refs: Iterable[ManifestRef], *, of_page: bool = False) -> Iterator[Link]:
    return (Link(ref.blob, Manifest, ref.parts, of_page) for ref in refs)


def _pages(refs: Iterable[HistoryPageRef]) -> Iterator[Link]:
    return (Link(ref.blob, HistoryPage, page=ref) for ref in refs)


def children(value: Any, *, of_page: bool = False) -> Iterator[Link]:
    """The metadata objects that an object names, except a snapshot's parent.

    `of_page` says that the object is a page of a base.
    """
    match value:
        case Snapshot():
            yield Link(value.log, Delta)
            if value.base is not None:
                yield Link(value.base, Base)
            for entry in value.deltas:
                yield Link(entry.log, Delta)
                if entry.zones is not None:
                    yield Link(entry.zones, Zones)
                if entry.bundle is not None:
                    yield Link(entry.bundle, Bundle)
                yield from _manifests(entry.manifests)
            if value.marks_page is not None:
                yield Link(value.marks_page, MarksPage)
            yield from _pages(value.history.pages)
        case HistoryPage():
            yield from _pages(value.history.pages)
        case Base():
            paged = of_page or bool(value.leaf_pages)
            yield from _manifests(value.manifests, of_page=paged)
            yield from (Link(page.blob, Base, of_page=True) for page in value.pages)
            yield from (Link(page.blob, Base, of_page=True) for page in value.leaf_pages)
        case Delta():
            yield from _manifests(value.manifests)
        case IndexDirectory():
            yield from (Link(blob, ZonePages) for blob in value.zones.values())
        case ZonePages():
            yield from (Link(blob, Zones) for blob in value.blobs)


def tables(value: Any) -> Iterator[ChunkTable]:
    """The chunk tables stored in the object itself."""
    match value:
        case (Manifest() as held) | Delta(embedded=held):
            yield from (held.decode(part, data) for part, data in held.parts)


def follow(
    runtime: Runtime,
    snapshots: Mapping[str, BlobRef],
    branches: Iterable[Branch],
    load: Callable[[Link], Any],
    seen: set[str],
    stage: str = "",
) -> Iterator[tuple[Link, Any]]:
    """All that these snapshots and the indexes of branches need, each once, and what `load` gives.

    Keys in `seen` are skipped, and visited keys are added to it. If `load` returns None, references
    of that object are not followed. `progress` is told how many of the objects found so far were
    loaded.
    """
    due: list[Link] = []
    found = done = 0

    def add(links: Iterable[Link]) -> int:
        before = len(due)
        for link in links:
            if link.ref.key not in seen:
                seen.add(link.ref.key)
                due.append(link)
        return len(due) - before

    found += add(Link(ref, Snapshot) for ref in snapshots.values())
    found += add(Link(b.index, IndexDirectory) for b in branches if b.index is not None)
    expect(stage, found)
    tell(stage, 0)
    while due:
        links = [due.pop() for _ in range(min(len(due), _AT_ONCE))]
        values = runtime.parallel([partial(load, link) for link in links])
        for link, value in zip(links, values, strict=True):
            yield link, value
            found += add(children(value, of_page=link.of_page))
        done += len(links)
        expect(stage, found)
        tell(stage, done)


# --- left behind -------------------------------------------------------------------------------

type _Place = tuple[BlobRef, Snapshot, str | None]
"""A snapshot, and the floor of its history."""


def find_kept(context: ReadContext, root: Root, snapshot_id: str) -> _Place:
    """Like `locate`; also finds what was left behind since the last collection began.

    So what it leads to stays, if a swap of this very root puts it into history, or all that the new
    history takes from it.

    Raises
    ------
    SnapshotExpiredError
        If it does not exist, or a collection may have deleted parts of it.
    """
    try:
        return locate(context, root, snapshot_id)
    except SnapshotExpiredError:
        return find_left(context, root, snapshot_id)


def floor_below(context: ReadContext, root: Root, ref: BlobRef) -> str | None:
    """Id of the oldest snapshot still in the history of the one at `ref`; None if all are.

    Of one that was left behind, it is the history that a branch at it would have.
    """
    if not has_expired(root):
        return None
    own = snapshot_id_of(ref.key)
    try:
        return find_kept(context, root, own)[2]
    except SnapshotExpiredError:
        return own


def find_left(context: ReadContext, root: Root, snapshot_id: str) -> _Place:
    """A snapshot that is not in history as of this root, and was since the last collection began.

    Raises
    ------
    SnapshotExpiredError
        If it does not exist, or a collection may have deleted parts of it.
    """
    snapshot_ref(context, snapshot_id)  # raises if it does not exist
    # All snapshots in history, with the floor of a history they are in.
    floors: dict[str, str | None] = {}
    for older, _, floor, _ in histories(context, root):
        floors.setdefault(older.key, floor)
    found = _in_a_version_since(context, root, snapshot_id)
    if found is None:
        raise SnapshotExpiredError(
            f"snapshot {snapshot_id} is in the history of no branch or tag of "
            f"{context.storage.url} any more, and was in none since the collection of garbage that "
            f"began at version {root.collected}, so no branch or tag can be made of it. "
            f"While it can still be read, repo.readonly_session({snapshot_id!r}) opens it: "
            "write its data in a new commit. Otherwise a clone or a backup may have it"
        )
    at, snapshot, floor = found
    for older, _ in ancestors(context, at, floor):
        if older.key in floors:
            return at, snapshot, floors[older.key]
    # Every branch has a floor once anything has expired, and what has expired stays so.
    return at, snapshot, snapshot_id if floor is None and has_expired(root) else floor


# --- in history since the last collection -------------------------------------------------------


def _in_a_version_since(context: ReadContext, root: Root, snapshot_id: str) -> _Place | None:
    """Where it was in a version of the root that is not older than the last collection."""
    begun = session_start(snapshot_id)
    first = root.collected or root.fence  # a clone begins at its fence
    for entry in logged(context, root):
        if entry.version < max(first, begun):
            break
        if entry.operation.endswith(f" from {snapshot_id}"):
            before = [v for v in archived_versions(context.storage) if first <= v < entry.version]
            return _in_version(context, before[-1], snapshot_id) if before else None
        if entry.snapshot == snapshot_id and entry.version < root.version:
            return _in_version(context, entry.version, snapshot_id)
    return _in_version(context, first, snapshot_id) if begun < first < root.version else None


def _in_version(context: ReadContext, version: int, snapshot_id: str) -> _Place | None:
    # No such archive; or it was not in history; or a collection has begun since, and the swap will
    # fail.
    with suppress(ObjectNotFoundError, SnapshotExpiredError), unless_missing():
        older = context.roots.whole(context.roots.archived(version))
        return locate(context, older, snapshot_id)
    return None


# --- the log of operations -----------------------------------------------------------------------


def archived_versions(storage: ReadableStorage) -> list[int]:
    """The versions of the root that are archived, oldest first."""
    found = (info.key.partition("/")[2] for info in storage.list("root/"))
    return [int(text) for text in found if len(text) == 20 and text.isdecimal()]


def logged(context: ReadContext, root: Root) -> Iterator[LogEntry]:
    """All operations that this root and its archives know, newest first."""
    versions, oldest = archived_versions(context.storage), root.version + 1
    while True:
        yield from (entry for entry in reversed(root.log) if entry.version < oldest)
        oldest = min(oldest, root.log[0].version if root.log else 0)
        # This archive's log reaches further back, so no single archive is needed.
        versions = [version for version in versions if version <= oldest]
        if not versions:
            return
        try:
            root = context.roots.archived(versions.pop())
        except ObjectNotFoundError:
            return  # a collection is removing the oldest archives
