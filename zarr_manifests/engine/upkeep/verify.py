"""Verification: everything reachable exists and matches its pointers.

Every metadata object is read from the storage and decoded, never taken from a cache or a copy;
copies are compared with it. Every chunk object is read, and the checksum of every range of it that
is referenced is compared. Beyond single objects it checks: snapshots agree with their deltas,
bundles and logs; leaves of a base do not overlap; counters are right; pages have the expected
names; archives have the expected versions, and no archive of an operation is missing.

Problems are collected, not raised. Virtual chunks are stored elsewhere and not checked: their files
are counted, and the chunks in files of no known version.

Others may write and collect concurrently. The root is read first, so everything it needs existed
then. Objects that a collection has deleted since are not needed by any later root. So if there are
problems and the root has changed, everything is checked again for the newer root, except chunks
that were sound. Problems found both times were not caused by a collection.

Comparing a snapshot's counters with its chunk tables
-----------------------------------------------------

The base and the read list count chunks and bytes of each node, and the snapshot stores their sums.
A number marked exact must be exact; any other must be an upper bound. Nodes that a commit did not
touch are checked at the snapshot before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from itertools import batched, chain, pairwise
from typing import Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from zarr_manifests.engine.ancestry import (
    Link,
    archived_versions,
    children,
    follow,
    live_snapshots,
    tables,
)
from zarr_manifests.engine.base_pages import BasePages, index_of
from zarr_manifests.engine.differences import delta_of
from zarr_manifests.engine.totals import amounts_of
from zarr_manifests.engine.view import ReadContext, SnapshotView
from zarr_manifests.errors import CorruptObjectError, ManifestsError, ObjectNotFoundError
from zarr_manifests.format.chunk_table import ChunkTable, RefKind
from zarr_manifests.format.manifest import (
    Base,
    Bundle,
    Delta,
    Manifest,
    ManifestRef,
    NodeKind,
    Part,
)
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.root import ALL, ROOT_KEY, Page, Root, archive_key, checked, pulled
from zarr_manifests.format.snapshot import (
    HistoryEntry,
    HistoryPage,
    Snapshot,
    SnapshotPointer,
    unpacked_entries,
)
from zarr_manifests.ids import crc32c
from zarr_manifests.keys import absolute
from zarr_manifests.planning.garbage import ChunkRanges, Rows, first_archive_kept, parts
from zarr_manifests.planning.packing import orphans
from zarr_manifests.planning.tables import Amount, alive_amounts, part_order, sums_of
from zarr_manifests.progress import counted, expect, tell
from zarr_manifests.reports import Problem, VerifyReport
from zarr_manifests.runtime import Run
from zarr_manifests.storage.protocol import ReadableStorage


def end_of(rows: Rows) -> int:
    """Where the last of the ranges ends."""
    return int((rows[:, 0] + rows[:, 1]).max())


def problem_of(key: str, rows: Rows, whole: bytes) -> str | None:
    """What is first wrong with these ranges of an object, if anything."""
    for offset, length, crc in rows.tolist():
        data = memoryview(whole)[offset : offset + length]
        if len(data) != length:
            return f"chunk object {key} ends before {offset + length}"
        if crc32c(data) != crc:
            return f"chunk object {key} at {offset} does not match its checksum"
    return None


# --- counters -----------------------------------------------------------------------------------


def wrong_counters(view: SnapshotView, parent: Snapshot | None = None) -> list[str]:
    """Describe what is wrong with the counters of a snapshot; empty if nothing is.

    Parameters
    ----------
    view : SnapshotView
        The snapshot.
    parent : Snapshot, optional
        The snapshot before it, if its counters are checked too.

    Raises
    ------
    ManifestsError
        If a table cannot be read.
    """
    amounts, nodes = amounts_of(view), list(view.nodes.values())
    told = alive_amounts(amounts, nodes)
    touched = _touched(view.snapshot, parent)
    wrong = []
    for node in nodes:
        if node.kind is NodeKind.GROUP or (touched is not None and node.node_id not in touched):
            continue
        table = view.chunks(node.node_id)
        chunks = nbytes = 0
        if table is not None:
            chunks = int((table.kind != RefKind.UNSET).sum())
            nbytes = int(table.length.sum())
        path = absolute(node.path)
        wrong += [f"{path} has {what}" for what in _against(told[node.path], chunks, nbytes)]
    due = sums_of(amounts, nodes)
    return wrong + list(_wrong_sums(view.snapshot, due))


def _touched(snapshot: Snapshot, parent: Snapshot | None) -> set[bytes] | None:
    """The nodes whose chunks differ from the snapshot before; None if any node's may."""
    own = snapshot.deltas[-1] if snapshot.deltas else None
    if (
        parent is None
        or own is None
        or own.log.key != snapshot.log.key
        or _read(snapshot)[:-1] != _read(parent)
    ):
        return None
    return {count.node_id for count in own.counts} | {part.node_id for part in own.parts()}


def _read(snapshot: Snapshot) -> list[str]:
    """Keys of the base and of the deltas that the snapshot reads."""
    base = snapshot.base.key if snapshot.base is not None else ""
    return [base, *(entry.log.key for entry in snapshot.deltas)]


def _against(told: Amount, chunks: int, nbytes: int) -> Iterator[str]:
    for what, said, there, exact in (
        ("chunks", told.chunks, chunks, told.chunks_exact),
        ("bytes of chunks", told.nbytes, nbytes, told.nbytes_exact),
    ):
        if said != there if exact else said < there:
            yield f"{there} {what}, and counters say {said}{'' if exact else ' at most'}"


def _wrong_sums(snapshot: Snapshot, due: dict[str, int]) -> Iterator[str]:
    """Sums that differ from the counters; old snapshots have no sums.

    A commit adds to the sums before, and bounds among these stay bounds.
    """
    for name, number in snapshot.sums.items():
        exact = due.get(name.removesuffix("-at-most"))
        bound = name.endswith("-at-most") and exact is not None and number >= exact
        if due.get(name) != number and not bound:
            due_number = due.get(name, "not known")
            yield f"the sum of {name} is {due_number}, and the snapshot says {number}"


# --- a whole repository -------------------------------------------------------------------------


_AT_ONCE = 32
_TASK_BYTES = 256 * 1024**2
"""Bytes of chunks that one task checks."""
_MOST_LOOKS = 10


class _Findings(Struct):
    problems: dict[str, Problem] = {}
    objects: int = 0
    ranges: ChunkRanges = field(default_factory=ChunkRanges)
    sound: dict[str, Rows] = {}
    """Ranges of objects that were read, where all match their checksums."""
    unguarded: set[tuple[str, int, int]] = set()
    """Location, offset and length of virtual chunks in files of no known version."""
    files: set[int] = set()  # hashes of where virtual chunks lie: there may be a file for each
    run: Run = map
    """Runs the tasks that read chunks."""

    def add(self, key: str, error: BaseException | str) -> None:
        self.problems.setdefault(key, Problem(key, str(error)))

    @contextmanager
    def noting(self, key: str, causes: Iterable[str] = ()) -> Iterator[None]:
        """Record the error that ends the block, unless a problem with one of `causes` caused it."""
        try:
            yield
        except (ManifestsError, ValueError) as error:
            if self.problems.keys().isdisjoint(causes):
                missing = isinstance(error, ObjectNotFoundError)
                self.add(key, f"{key} is referenced and not there" if missing else error)


def verify(context: ReadContext, run: Run = map) -> VerifyReport:
    """Read everything that can be reached, and report what is wrong; `run` reads chunks."""
    sound: dict[str, Rows] = {}
    before: Set[str] = set()
    for _ in range(_MOST_LOOKS):
        found = _Findings(sound=sound, run=run)
        root = _root(context, found)
        counts = _look(context, root, found)
        if found.problems.keys() <= before or root is None or not _has_changed(context, root):
            break
        before = found.problems.keys()
    problems = tuple(found.problems.values())
    return VerifyReport(problems, found.objects, *counts, len(found.unguarded), len(found.files))


def _has_changed(context: ReadContext, root: Root) -> bool:
    """Whether the root was replaced since."""
    newer = _root(context, _Findings())
    return newer is None or newer.write_id != root.write_id


def _root(context: ReadContext, found: _Findings) -> Root | None:
    """The current root; None, with a problem recorded, if it cannot be read."""
    with found.noting(ROOT_KEY):
        root = Root.from_object(context.storage.get_tagged(ROOT_KEY).data)
        found.objects += 1
        if root.repository_id != context.repository_id:
            found.add(ROOT_KEY, "the root is of another repository")
        return root
    return None


def _look(context: ReadContext, root: Root | None, found: _Findings) -> tuple[int, int, int]:
    """Check everything the root needs, and the archives; count chunk objects and chunks."""
    fresh = _fresh(context)
    archived = _check_archives(fresh, root, found)
    if root is None:
        return 0, 0, 0
    _check_log(root, archived, found)
    if max(archived, default=0) > root.version:
        _check_newest(fresh, archived, found)
    _check_counters(fresh, found, _check_closure(fresh, root, found))
    kept = [old for version, old in archived.items() if version >= _first_kept(root)]
    for old in counted("reading pages of archives", kept):
        _check_pages(fresh, old, found)
    return _check_chunks(fresh, found)


def _fresh(context: ReadContext) -> ReadContext:
    """The same repository with empty caches."""
    where = context.repository_id, context.storage, context.runtime
    return ReadContext.unshared(*where, context.config)


# --- metadata ----------------------------------------------------------------------------------


def _check_closure(
    context: ReadContext, root: Root, found: _Findings
) -> list[tuple[BlobRef, Snapshot]]:
    """Check everything reachable; return the snapshots among it."""
    whole = _check_pages(context, root, found)
    if whole is None:
        return []
    starts = {ref.key: ref for ref in _snapshots(context, whole, found)}
    load = partial(_load, context, found)
    histories: list[tuple[BlobRef, Snapshot | HistoryPage]] = []
    paged = _PagedBases()
    every = whole.branches.values()
    for link, value in follow(context.runtime, starts, every, load, set(), "reading metadata"):
        found.objects += 1
        if isinstance(value, Snapshot | HistoryPage):
            histories.append((link.ref, value))
        paged.note(link, value)
        with found.noting(link.ref.key):
            if isinstance(value, Base):
                _check_leaves(value.manifests)
            for table in tables(value):
                found.ranges.add(table)
                _add_unguarded(found, table)
    paged.check(context, found)
    snapshots = [(ref, value) for ref, value in histories if isinstance(value, Snapshot)]
    for ref, snapshot in counted("checking snapshots", snapshots):
        _check_snapshot(context, found, ref, snapshot)
    _check_history(found, histories)
    for name, branch in whole.branches.items():
        head = next((s for ref, s in snapshots if ref.key == branch.head.key), None)
        if head is not None and (branch.base and branch.base.bare()) != (
            head.base and head.base.bare()
        ):
            found.add(branch.head.key, f"branch {name!r} names another base than its head")
    return snapshots


def _check_history(
    found: _Findings, histories: Sequence[tuple[BlobRef, Snapshot | HistoryPage]]
) -> None:
    """Check what snapshots and pages say about ancestors, as far as these are still there."""
    own: dict[SnapshotPointer, HistoryEntry] = {}
    for ref, value in histories:
        if isinstance(value, Snapshot):
            (entry,) = unpacked_entries([value.entry(ref).pack()])
            own[entry.pointer] = entry
    for ref, value in histories:
        told: Sequence[HistoryEntry] = ()
        with found.noting(ref.key):
            told = unpacked_entries(value.history.recent)
        newest = value.parent if isinstance(value, Snapshot) else None
        if told and newest is not None and told[-1].pointer != SnapshotPointer.of(newest):
            found.add(ref.key, f"{ref.key} is wrong about its newest ancestor")
        for entry in told:
            if own.get(entry.pointer, entry) != entry:
                found.add(ref.key, f"{ref.key} is wrong about {entry.snapshot_id}")
                break


def _check_counters(
    context: ReadContext, found: _Findings, snapshots: Sequence[tuple[BlobRef, Snapshot]]
) -> None:
    by_key = {ref.key: snapshot for ref, snapshot in snapshots}
    for ref, snapshot in counted("counting chunks", snapshots):
        parent = by_key.get(snapshot.parent.key) if snapshot.parent is not None else None
        with found.noting(ref.key, found.problems):
            wrong = wrong_counters(context.open_view(ref), parent)
            if wrong:
                found.add(ref.key, "; ".join(wrong))


def _snapshots(context: ReadContext, whole: Root, found: _Findings) -> Iterator[BlobRef]:
    """The snapshots of branches, tags and leases; a broken history is recorded and ends there."""
    parts = [replace(whole, branches={n: b}, tags={}, leases=()) for n, b in whole.branches.items()]
    main = {"main": whole.branches["main"]} if "main" in whole.branches else {}
    parts.append(replace(whole, branches=main))
    for part in parts:
        last = ""
        try:
            for ref, *_ in live_snapshots(context, part):
                last = ref.key
                yield ref
        except ManifestsError as error:
            found.add(f"history after {last}" if last else "history", error)


def _load(context: ReadContext, found: _Findings, link: Link) -> Any:
    """The object as stored; None, with a problem recorded, if it is not what it should be."""
    ref = link.ref
    with found.noting(ref.key):
        data = context.storage.get(ref.key, 0, ref.length + 1)
        if ref.copy is not None and ref.copy != data:
            found.add(ref.key, f"{ref.key} and a copy of it differ")
        value = link.kind.from_object(data, ref)
        link.check(value)
        return value
    return None


def _check_leaves(manifests: Sequence[ManifestRef]) -> None:
    index = index_of(manifests)
    for part in chain.from_iterable(manifest.parts for manifest in manifests):
        if len(index.placed_in(part.node_id, part.box)) > 1:
            raise CorruptObjectError(f"leaves of a node overlap at {part.box}")


class _PagedBases(Struct):
    """Bases with pages, and the tables of the manifests that pages list, by key."""

    bases: list[tuple[BlobRef, Base]] = []
    tables: dict[str, tuple[Part, ...]] = {}

    def note(self, link: Link, value: Any) -> None:
        """Note the value if it is one of them."""
        if isinstance(value, Base) and (value.pages or value.leaf_pages):
            self.bases.append((link.ref, value))
        elif isinstance(value, Manifest) and link.of_page:
            self.tables[link.ref.key] = value.directory()

    def check(self, context: ReadContext, found: _Findings) -> None:
        """Check the pages of each base, and that together they list each manifest in full."""
        for ref, base in self.bases:
            pages = BasePages(context.objects, base, ref)
            with found.noting(ref.key, [link.ref.key for link in children(base)]):
                self._check(ref, base, pages)

    def _check(self, ref: BlobRef, base: Base, pages: BasePages) -> None:
        nodes = [node for page in pages.pages() for node in page.nodes]
        if len({node.node_id for node in nodes}) != len(nodes):
            raise CorruptObjectError(f"{ref.key}: two nodes have the same id")
        paths = {node.path for node in nodes}
        for link, page in pages.linked_pages():
            if link.orphans != orphans(page, paths):
                raise CorruptObjectError(f"{ref.key}: wrong about orphans in {link.blob.key}")
        refs = [manifest for page in pages.pages() for manifest in page.manifests]
        if any(pages.large(part.node_id) for manifest in refs for part in manifest.parts):
            raise CorruptObjectError(f"{ref.key}: leaves of a large array in two kinds of pages")
        manifests = pages.manifests()
        _check_leaves(manifests)
        for manifest in manifests:
            held = self.tables.get(manifest.blob.key, manifest.parts)
            if sorted(map(part_order, held)) != sorted(map(part_order, manifest.parts)):
                raise CorruptObjectError(f"{ref.key} does not list all of {manifest.blob.key}")


def _check_snapshot(
    context: ReadContext, found: _Findings, ref: BlobRef, snapshot: Snapshot
) -> None:
    """Check its log, and what it says about its deltas and bundles."""
    with found.noting(ref.key, [snapshot.log.key]):
        snapshot.check_repository(ref.key, context.repository_id)
        delta_of(context, snapshot)
        for entry in snapshot.deltas:
            if entry.log.key in found.problems:
                continue
            delta = context.objects.load(entry.log.bare(), Delta)
            entry.check(delta)
            bundle = entry.bundle
            if bundle is not None and bundle.key not in found.problems:
                held = context.objects.load(bundle, Bundle)
                if entry.opened({bundle.key: held}) != delta:
                    raise CorruptObjectError(f"{bundle.key} has another {entry.log.key}")


def _check_pages(context: ReadContext, root: Root, found: _Findings) -> Root | None:
    """The root with the entries of all its pages; None if a page is wrong."""
    before = len(found.problems)
    read: list[Page] = []
    for at, ref in enumerate(root.pages):
        page = _load(context, found, Link(ref.blob, Page))
        found.objects += 1
        with found.noting(ref.blob.key):
            read += [] if page is None else [checked(root, at, page)]
    return None if len(found.problems) > before else replace(pulled(root, read, ALL), pages=())


# --- archives ----------------------------------------------------------------------------------


def _first_kept(root: Root) -> int:
    """The oldest version whose archive and pages no collection so far removes."""
    return first_archive_kept(root.collected, root.fence) if root.collected else 0


def _check_archives(context: ReadContext, root: Root | None, found: _Findings) -> dict[int, Root]:
    """The archived roots by version."""
    versions = archived_versions(context.storage)

    def load(version: int) -> Root | None:
        with found.noting(archive_key(version)):
            try:
                return context.roots.archived(version)
            except ObjectNotFoundError:
                if root is None or version >= _first_kept(root):
                    raise
        return None

    calls = (partial(load, version) for version in versions)
    loaded = chain.from_iterable(map(context.runtime.parallel, batched(calls, _AT_ONCE)))
    roots = counted("reading archives", loaded, len(versions))
    found.objects += len(versions)
    return {v: one for v, one in zip(versions, roots, strict=True) if one is not None}


def _check_log(root: Root, archived: dict[int, Root], found: _Findings) -> None:
    """Check that every operation has left an archive that no collection removed."""
    # Before the first collection, older ones may have been removed by hand.
    first = _first_kept(root) if root.collected else min(archived, default=root.version)
    made = {entry.version for one in (*archived.values(), root) for entry in one.log}
    for version in sorted(made - archived.keys()):
        key = archive_key(version)
        if first <= version < root.version:
            found.add(key, f"{key} is missing: version {version} made an operation")
    versions = sorted(v for v in archived if v <= root.version)
    for older, newer in pairwise(versions):
        if archived[older].fence > archived[newer].fence:
            found.add(archive_key(newer), "its fence is lower than that of the version before")


def _check_newest(context: ReadContext, archived: dict[int, Root], found: _Findings) -> None:
    """Check that the root is as new as its archives; it is read again, after they were listed."""
    newest, root = max(archived), _root(context, _Findings())
    if root is not None and newest > root.version:
        found.add(
            archive_key(newest),
            f"the root is of version {root.version}, and {archive_key(newest)} is newer: if an "
            "older root was put in its place, move `current` away and run `recover`",
        )


# --- chunks ------------------------------------------------------------------------------------


def _add_unguarded(found: _Findings, table: ChunkTable) -> None:
    files = table.virtual
    found.files.update(hash(file.location) for file in files)
    loose = np.array([not file.is_dated for file in files], np.bool_)
    if loose.any():
        rows = np.flatnonzero(table.kind == RefKind.VIRTUAL)
        rows = rows[loose[table.source[rows]]]
        places = (table.source[rows], table.offset[rows], table.length[rows])
        for source, offset, length in np.stack(places, axis=1).tolist():
            found.unguarded.add((files[source].location, offset, length))


def _check_chunks(context: ReadContext, found: _Findings) -> tuple[int, int, int]:
    ranges = dict(found.ranges.of_each())
    due = [
        (key, rows)
        for key, rows in sorted(ranges.items())
        if not np.array_equal(rows, found.sound.get(key, rows[:0]))
    ]
    tasks = [*parts(due, _size, _TASK_BYTES, _AT_ONCE)]
    check = partial(_check_objects, context.storage, context.runtime.parallel)
    done = 0
    expect("reading chunks", len(due))
    for task, problems in zip(tasks, found.run(check, tasks), strict=True):
        for (key, rows), problem in zip(task, problems, strict=True):
            if problem is None:
                found.sound[key] = rows
            else:
                found.add(key, problem)
        done += len(task)
        tell("reading chunks", done)
    return len(ranges), sum(map(len, ranges.values())), sum(map(_size, ranges.items()))


def _size(one: _Object) -> int:
    return int(one[1][:, 1].sum())


type _Object = tuple[str, Rows]
"""Key of a chunk object, and ranges of it."""


def _check_objects(
    storage: ReadableStorage,
    parallel: Callable[[Sequence[Callable[[], Any]]], list[Any]],
    objects: Sequence[_Object],
) -> list[str | None]:
    """For each object what is wrong with it."""
    return parallel([partial(_check_object, storage, *one) for one in objects])


def _check_object(storage: ReadableStorage, key: str, rows: Rows) -> str | None:
    try:
        return problem_of(key, rows, storage.get(key))
    except ObjectNotFoundError:
        return f"chunk object {key} is referenced and not there"
    except ManifestsError as error:
        return str(error)
