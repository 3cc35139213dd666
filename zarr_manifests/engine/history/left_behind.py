"""Snapshots that no branch or tag leads to any more, and that can be named again.

Resets, amends, deletions, expiries and restores leave snapshots behind, and a later collection
deletes them. Until then one can be named again, in either of two cases:

1. It was in history in a version of the root from which on there was no collection. What such a
   version reaches, the last collection does not delete, even if it still runs; by the same rule
   older refs are restored.
2. All that it leads to is from sessions that began at the fence or later, or is also reached by an
   ancestor that is in history. No collection so far deletes any of it.

Both are checked against the very root that is replaced. A collection that begins meanwhile replaces
it first, so that the swap fails and the new root decides.

What is *reachable* is everything that a snapshot, an index or a page refers to, directly or not.
All references are followed without interpretation: the whole read list, each commit's own delta,
digests, the base and its pages, all manifests, and every chunk object that a row refers to. Only a
page of history is needed no more once the newest snapshot that it covers has expired. Objects are
loaded many at once, each once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from functools import partial
from typing import Any

from msgspec import Struct

from zarr_manifests.engine.history.ancestry import (
    ages,
    ancestors,
    entries,
    has_expired,
    locate,
    snapshot_ref,
    starts,
)
from zarr_manifests.engine.root.roots import is_missing
from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.errors import (
    CorruptObjectError,
    MissingChunkError,
    ObjectNotFoundError,
    SnapshotExpiredError,
)
from zarr_manifests.format.chunk_table import ChunkTable, native_keys
from zarr_manifests.format.history_pages import HistoryPage, HistoryPageRef
from zarr_manifests.format.manifest import Manifest, ManifestRef, Part
from zarr_manifests.format.nodes import Base, Delta, Digest
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.root import LogEntry, Root
from zarr_manifests.format.snapshot import MarksPage, Snapshot
from zarr_manifests.format.zone_maps import IndexDirectory, ZonePages, Zones
from zarr_manifests.ids import session_of, session_start, snapshot_id_of
from zarr_manifests.progress import expect, tell
from zarr_manifests.runtime import Runtime
from zarr_manifests.storage.protocol import ReadableStorage

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
        held = value.directory()
        if self.parts != tuple(p for p in held if nodes is None or p.node_id in nodes):
            raise CorruptObjectError(f"{self.ref.key} has other chunk tables than it should")

    def is_within(self, snapshots: Container[str]) -> bool:
        """Whether it is needed if these snapshots are in history, given their keys."""
        return self.page is None or self.page.newest.key in snapshots


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
                yield from _manifests(entry.manifests)
            yield from (Link(entry.blob, Digest) for entry in value.digests)
            if value.marks_page is not None:
                yield Link(value.marks_page, MarksPage)
            yield from _pages(value.history.pages)
        case HistoryPage():
            yield from _pages(value.pages)
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
        case (Manifest() as held) | Delta(embedded=held) | Digest(tables=held):
            yield from (held.decode(part, data) for part, data in held.parts)


def follow(
    runtime: Runtime,
    starts: Iterable[Link],
    load: Callable[[Link], Any],
    seen: set[str],
    wanted: Callable[[Link], bool],
    stage: str = "",
) -> Iterator[tuple[Link, Any]]:
    """All wanted objects that the links lead to, each once, with the result of `load`.

    Keys in `seen` are skipped, and visited keys are added to it. If `load` returns None, references
    of that object are not followed. `progress` is told how many of the objects found so far were
    loaded.
    """
    due: list[Link] = []
    known: set[str] = set()
    done = 0

    def add(links: Iterable[Link]) -> None:
        fresh = [link for link in links if link.ref.key not in seen and wanted(link)]
        known.update(link.ref.key for link in fresh)
        due.extend(fresh)

    add(starts)
    expect(stage, len(known))
    tell(stage, 0)
    while due:
        links: list[Link] = []
        while due and len(links) < _AT_ONCE:
            link = due.pop()
            if link.ref.key not in seen:
                seen.add(link.ref.key)
                links.append(link)
        for link, value in zip(
            links, runtime.parallel([partial(load, link) for link in links]), strict=True
        ):
            yield link, value
            add(children(value, of_page=link.of_page))
        done += len(links)
        expect(stage, len(known))
        tell(stage, done)


# --- left behind -------------------------------------------------------------------------------

type _Place = tuple[BlobRef, Snapshot, str | None]
"""A snapshot, and the floor of its history."""


def find_kept(context: ReadContext, root: Root, snapshot_id: str) -> _Place:
    """Like `locate`; also finds what was left behind, if no collection so far deletes parts of it.

    So what it leads to stays, if a swap of this very root puts it into history, or all that the new
    history takes from it.

    Raises
    ------
    SnapshotExpiredError
        If it does not exist, or a collection deletes parts of it.
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
    """A snapshot that is not in history as of this root, and that no collection so far deletes.

    Raises
    ------
    SnapshotExpiredError
        If it does not exist, or a collection deletes parts of it.
    """
    ref = snapshot_ref(context, snapshot_id)
    floors = _floors(context, root)
    found = _in_a_version_since(context, root, snapshot_id)
    found = found or _uncollected(context, root, ref, floors)
    if found is None:
        raise SnapshotExpiredError(
            f"snapshot {snapshot_id} is in the history of no branch or tag of "
            f"{context.storage.url} any more, and the collection of garbage that began at version "
            f"{root.collected} deletes parts of it, so no branch or tag can be made of it. "
            f"While it can still be read, repo.readonly_session({snapshot_id!r}) opens it: "
            "write its data in a new commit. Otherwise a clone or a backup may have it"
        )
    at, snapshot, floor = found
    for older, _ in ages(context, at, floor):
        if older.key in floors:
            return at, snapshot, floors[older.key]
    # Every branch has a floor once anything has expired, and what has expired stays so.
    return at, snapshot, snapshot_id if floor is None and has_expired(root) else floor


def left_ids(context: ReadContext, root: Root, known: Set[str]) -> set[str]:
    """Ids of snapshots that have left history, given those in history; some may be collected.

    They are what the log of operations tells, what has expired and is not collected, and what comes
    before either of them.
    """
    found: set[str] = set()
    heads = [snapshot_id_of(piece.newest.key) for piece in context.roots.whole(root).pending]
    for entry in logged(context, root):
        operation, _, left = entry.operation.partition(" from ")
        found |= {entry.snapshot, left}
        if left and not operation.startswith(
            "amend "
        ):  # the one before an amended commit is still there
            heads.append(left)
    walked: set[str] = set()
    for head in dict.fromkeys(heads):
        with suppress(SnapshotExpiredError, CorruptObjectError, MissingChunkError):
            for part in entries(context, snapshot_ref(context, head), None, sys.maxsize):
                if not walked.isdisjoint(part.ids):
                    break
                walked.update(part.ids)
                if not known.isdisjoint(part.ids):
                    break
    return {name for name in found | walked if name} - known


def _floors(context: ReadContext, root: Root) -> dict[str, str | None]:
    """All snapshots in history, by key, with the floor of a history they are in."""
    floors: dict[str, str | None] = {}
    for start, floor in starts(context, root):
        for older, _ in ages(context, start, floor):
            floors.setdefault(older.key, floor)
    return floors


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
    try:
        older = context.roots.whole(context.roots.archived(version))
        return locate(context, older, snapshot_id)
    except (ObjectNotFoundError, SnapshotExpiredError):
        return None  # no such archive; or it was not in history
    except (CorruptObjectError, MissingChunkError) as error:
        if is_missing(error):  # a collection has begun since, and the swap will fail
            return None
        raise


# --- of sessions since the fence ----------------------------------------------------------------


def _uncollected(
    context: ReadContext, root: Root, ref: BlobRef, floors: Mapping[str, str | None]
) -> _Place | None:
    """The snapshot, if no collection up to this root deletes anything that only it leads to."""
    line: dict[str, Link] = {}
    shared: BlobRef | None = None
    try:
        for older, _ in ancestors(context, ref):
            if older.key in floors:
                shared = older
                break
            line[older.key] = Link(older, Snapshot)
        if root.fence and not _is_safe(context, root.fence, line, shared, floors):
            return None
    except (CorruptObjectError, MissingChunkError) as error:
        if is_missing(error):
            return None
        raise
    return ref, context.objects.load(ref, Snapshot), None


def _is_safe(
    context: ReadContext,
    fence: int,
    line: Mapping[str, Link],
    shared: BlobRef | None,
    history: Mapping[str, object],
) -> bool:
    """Whether all that these snapshots lead to is young, or reached by the shared ancestor."""

    def load(link: Link) -> Any:
        return context.objects.load(link.ref, link.kind)

    def named_only(link: Link) -> Any:
        return None if link.kind in (Manifest, Zones) else load(link)

    def wanted(link: Link) -> bool:
        return link.is_within(line) or link.is_within(history)

    def old(keys: set[str]) -> set[str]:
        return {key for key in keys if session_start(session_of(key)) < fence}

    top = [] if shared is None else [Link(shared, Snapshot)]
    kept: set[str] = set()
    for _ in follow(context.runtime, top, named_only, kept, wanted):
        pass
    seen, chunks = {*kept}, set[str]()
    for _, value in follow(context.runtime, line.values(), load, seen, wanted):
        for table in tables(value):
            chunks |= old(native_keys(table))
    if old(seen - kept):
        return False
    if chunks:  # such as those of an array whose base was written anew
        for _, value in follow(context.runtime, top, load, set(), wanted):
            for table in tables(value):
                chunks -= native_keys(table)
    return not chunks


# --- the log of operations -----------------------------------------------------------------------


def archived_versions(storage: ReadableStorage) -> list[int]:
    """The versions of the root that are archived, oldest first."""
    found = (info.key.partition("/")[2] for info in storage.list("root/"))
    return [int(text) for text in found if len(text) == 20 and text.isdecimal()]


def logged(context: ReadContext, root: Root) -> Iterator[LogEntry]:
    """All operations that this root and its archives know, newest first."""
    versions, oldest = archived_versions(context.storage), root.version + 1
    while True:
        for entry in reversed(root.log):
            if entry.version < oldest:
                yield entry
        oldest = min(oldest, root.log[0].version if root.log else 0)
        # This archive's log reaches further back, so no single archive is needed.
        while versions and versions[-1] > oldest:
            versions.pop()
        if not versions:
            return
        try:
            root = context.roots.archived(versions.pop())
        except ObjectNotFoundError:
            return  # a collection is removing the oldest archives
