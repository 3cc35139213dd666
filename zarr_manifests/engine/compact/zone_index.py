"""Pages of zone maps: made for new leaves, and kept in the index of a branch.

A compaction has the table of each new leaf at hand, so entries whose addresses are in it go to the
leaf's pages, whether they come from commits or from pages of older leaves. Invariants: an array
without entries costs no request; entries of one leaf are in memory at a time; what cannot be read
counts as absent; the swap that installs pages reads the branch's index again at every attempt.

A compaction calls `with_zones` in the swap that installs its leaves. A commit writes no leaves.
Each branch of the root refers to a directory, or to none. The directory refers to pages of zone
maps. These are reachable, and nothing else under `indexes/` is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np

from zarr_manifests.engine.objects.chunks import SessionKeys
from zarr_manifests.engine.objects.metadata import Upload
from zarr_manifests.engine.root.epochs import fenced
from zarr_manifests.engine.snapshot.context import Context, ReadContext
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.engine.snapshot.zones import UNUSABLE, index_directory, usable
from zarr_manifests.errors import NotFoundError
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.manifest import ManifestRef, Part
from zarr_manifests.format.nodes import Node
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.root import Branch, Root
from zarr_manifests.format.zone_maps import (
    Bounds,
    IndexDirectory,
    ZonePage,
    ZonePages,
    Zones,
    ZoneTable,
)
from zarr_manifests.grid import Box, corners
from zarr_manifests.planning.conflict.admission import Writer, admission
from zarr_manifests.planning.tables.merge import take, within
from zarr_manifests.planning.upkeep.garbage import parts
from zarr_manifests.planning.zones.meaning import Meaning, in_pages, like, merged, taken, valid

_OBJECT_BYTES: Final = 1 << 20
_ATTEMPTS: Final = 100

type LeafPages = tuple[bytes, BlobRef | None, Box, Sequence[tuple[ZoneTable, bool]]]
"""Node id, manifest and box of a leaf, and its pages; without a manifest, of chunks in no leaf."""


@dataclass(slots=True)
class NewPages:
    """New pages of one array, and the bounds of each.

    They replace the pages in the list `before`, which they were made from: those in the boxes
    `covered`, and, if `replaces_loose`, all without leaf.
    """

    meaning: bytes
    before: BlobRef | None = None
    pages: list[ZonePage] = field(default_factory=list)
    bounds: list[Bounds] = field(default_factory=list)
    covered: list[Box] = field(default_factory=list)
    replaces_loose: bool = False

    def add(self, other: NewPages) -> None:
        """Add the pages of another part of the array, made from the same list."""
        self.pages += other.pages
        self.bounds += other.bounds
        self.covered += other.covered


def load_zones(context: ReadContext, ref: BlobRef) -> Zones:
    """The zone maps at the pointer; none if they cannot be read."""
    return usable(context, ref, Zones) or Zones(())


@dataclass(frozen=True, slots=True)
class LeafZones:
    """The entries that a compaction of a snapshot finds, by node; still packed.

    Parameters
    ----------
    context : ReadContext
        The repository.
    recent : tuple of Zones
        Those of live deltas and runs.
    pages : mapping of bytes to BlobRef
        Those in pages.
    """

    context: ReadContext
    recent: tuple[Zones, ...] = ()
    pages: Mapping[bytes, BlobRef] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        context: ReadContext,
        view: SnapshotView,
        pages: Mapping[bytes, BlobRef],
        leaves: Collection[Part] | None = None,
    ) -> LeafZones:
        """Those of a head, given its pages; with `leaves`, those that may describe their chunks."""
        by_node: dict[bytes, list[Box]] = {}
        for leaf in leaves or ():
            by_node.setdefault(leaf.node_id, []).append(leaf.box)
        refs = [
            entry.zones
            for entry in view.snapshot.deltas
            if entry.zones is not None
            and (
                leaves is None
                or any(
                    part.box.overlaps(box)
                    for part in entry.parts()
                    for box in by_node.get(part.node_id, ())
                )
            )
        ]
        recent = context.runtime.parallel([partial(load_zones, context, ref) for ref in refs])
        return cls(context, tuple(recent), pages)

    def of_leaf(self, node: Node, table: ChunkTable) -> list[tuple[ZoneTable, bool]]:
        """The pages of a leaf, given its table, and whether each is complete."""
        digest = Meaning.of(node.documents).digest
        found: list[ZoneTable] = []
        for zones in self._near(node.node_id, table.box):
            kept = None if zones.meaning != digest else taken(zones, valid(zones, table))
            if kept is not None and like(kept, (found or [kept])[0]):
                found.append(kept)
        return leaf_pages(found, table) if found else []

    def _near(self, node_id: bytes, box: Box) -> Iterator[ZoneTable]:
        """Tables with entries of the node that may be in the box, one at a time."""
        paged = usable(self.context, self.pages.get(node_id), ZonePages)
        for page in () if paged is None else paged.near(box):
            try:
                yield load_zones(self.context, page.blob).at(page.position)
            except UNUSABLE:
                continue
        for zones in self.recent:
            try:
                yield from zones.near(node_id, box)
            except UNUSABLE:
                continue


def leaf_pages(entries: Sequence[ZoneTable], table: ChunkTable) -> list[tuple[ZoneTable, bool]]:
    """The pages of entries that all describe chunks of the table, and whether each is complete."""
    whole = merged(entries)
    addresses = take(whole.addresses, np.arange(len(whole)), table.box)
    return [
        (page, len(within(table, page.box)) == len(page))
        for page in in_pages(replace(whole, addresses=addresses))
    ]


def write_pages(
    context: Context,
    keys: SessionKeys,
    leaves: Iterable[LeafPages],
    before: Mapping[bytes, BlobRef],
) -> dict[bytes, NewPages]:
    """Write the pages of some leaves, made from the lists `before`; return them by node."""
    made: dict[bytes, NewPages] = {}
    due: list[tuple[bytes, bytes, ZoneTable, NewPages, tuple[str, int] | None, bool]] = []
    for node_id, blob, box, pages in leaves:
        leaf = None if blob is None else (blob.key, blob.crc32c)
        for zones, complete in pages:
            new = made.setdefault(node_id, NewPages(zones.meaning, before.get(node_id)))
            new.covered += [] if blob is None else [box]
            due.append((node_id, zones.pack(), zones, new, leaf, complete))
    for group in parts(due, lambda one: len(one[1]), _OBJECT_BYTES):
        packed = tuple((node_id, len(zones), data) for node_id, data, zones, *_ in group)
        upload = Upload(keys.next("indexes"), Zones(packed).encode())
        context.objects.create(upload.key, upload.data)
        for position, (_, _, zones, new, leaf, complete) in enumerate(group):
            page = ZonePage(zones.box, leaf, len(zones), complete, upload.ref, position)
            new.pages.append(page)
            new.bounds.append(zones.bounds.around())
    return made


def pages_after(
    context: ReadContext,
    keys: SessionKeys,
    known: Mapping[bytes, BlobRef],
    new: Mapping[bytes, NewPages],
    changed: Collection[bytes],
    manifests: Iterable[ManifestRef],
    nodes: Mapping[bytes, Node],
) -> tuple[dict[bytes, BlobRef], list[Upload]]:
    """The pointers of an index with new pages, and the lists of pages to upload.

    Of the nodes in `changed`, and those without leaves, it keeps the older pages that no new page
    replaces, if they are of leaves that are still live, or of none. Arrays that are not among
    `nodes` lose their pages.
    """
    found, uploads = dict(known), list[Upload]()
    live = {
        (part.node_id, ref.blob.key, ref.blob.crc32c) for ref in manifests for part in ref.parts
    }
    stay = {node_id for node_id, _, _ in live}.difference(changed)
    for node_id in sorted({*new, *(known.keys() - stay)}):
        pointer, more, node = found.pop(node_id, None), new.get(node_id), nodes.get(node_id)
        old = usable(context, pointer, ZonePages)
        if node is None or (more is None and old is None):
            continue
        meanings = [one.meaning for one in (more, old) if one is not None]
        digest = Meaning.of(node.documents).digest
        meaning = digest if digest in meanings else meanings[0]
        rows: list[tuple[ZonePage, Bounds]] = []
        if more is not None and more.meaning == meaning:
            rows += zip(more.pages, more.bounds, strict=True)
        if old is not None and old.meaning == meaning:
            seen = _pages_at(old)
            if more is not None and more.before != pointer:
                seen &= _pages_at(usable(context, more.before, ZonePages))
            replaced = _replaced(old.pages, more)
            for row, page in enumerate(old.pages):
                dead = page.leaf is not None and (node_id, *page.leaf) not in live
                known_before = (page.blob.key, page.position) in seen
                if not dead and not (known_before and replaced[row]):
                    rows.append((page, old.bounds.take(slice(row, row + 1))))
        rows = _without_doubles(rows)
        if rows:
            pages, bounds = zip(*rows, strict=True)
            listed = ZonePages(meaning, pages, Bounds.joined(bounds))
            uploads.append(Upload(keys.next("indexes"), listed.encode()))
            found[node_id] = uploads[-1].ref
    return found, uploads


def _pages_at(listed: ZonePages | None) -> set[tuple[str, int]]:
    """Where the entries of the pages lie."""
    return set() if listed is None else {(page.blob.key, page.position) for page in listed.pages}


def _replaced(pages: Sequence[ZonePage], new: NewPages | None) -> list[bool]:
    """Whether new pages, which were made from these, have all that is still true of each."""
    if new is None:
        return [False] * len(pages)
    lo, hi = corners(new.covered, pages[0].box.ndim)
    return [
        (page.leaf is None and new.replaces_loose)
        or bool(((lo <= page.box.lo) & (page.box.hi <= hi)).all(axis=1).any())
        for page in pages
    ]


def _without_doubles(rows: Sequence[tuple[ZonePage, Bounds]]) -> list[tuple[ZonePage, Bounds]]:
    """The pages without those that others of the same leaf include: two may have measured it."""
    complete: dict[tuple[str, int], list[ZonePage]] = {}
    kept: list[tuple[ZonePage, Bounds]] = []
    for page, bounds in sorted(rows, key=lambda row: not row[0].complete):
        others = [] if page.leaf is None else complete.setdefault(page.leaf, [])
        if any(page.box.shared_size(other.box) == page.box.size for other in others):
            continue
        if page.complete:
            others.append(page)
        kept.append((page, bounds))
    return kept


# --- the index of a branch ----------------------------------------------------------------------


def with_zones(
    context: ReadContext,
    branch: Branch,
    keys: SessionKeys,
    changed: Collection[bytes],
    manifests: Iterable[ManifestRef],
    nodes: Mapping[bytes, Node],
    zones: Mapping[bytes, NewPages],
) -> tuple[Branch, list[Upload]]:
    """Add pages of zone maps, by node, to the branch's index.

    Returns the branch, and the objects to upload, of which the directory is the last. `changed` are
    the nodes with new leaves, `manifests` those of the branch's base, and `nodes` those of its
    head.
    """
    known = index_directory(context, branch.index).zones
    paged, uploads = pages_after(context, keys, known, zones, changed, manifests, nodes)
    uploads.append(Upload(keys.next("indexes"), IndexDirectory(paged).encode()))
    return replace(branch, index=uploads[-1].ref.bare()), uploads


def add_to_index(
    context: Context,
    branch: str,
    view: SnapshotView,
    keys: SessionKeys,
    operation: str,
    zones: Mapping[bytes, NewPages],
) -> None:
    """Swap in the branch with these pages of zone maps, by node, in its index.

    `view` is the head that they were made on.

    Raises
    ------
    FencedError
        If a collection has shut this out.
    NotFoundError
        If the branch was deleted.
    """

    def change(root: Root) -> Root:
        if admission(root, Writer(keys.start)) is not None:
            raise fenced(root, keys.start, f"{operation!r}", "Nothing was changed; do it again")
        tip = root.branches.get(branch)
        if tip is None:
            raise NotFoundError(f"{operation}: branch {branch!r} was deleted; nothing was added")
        now = view if tip.head.key == view.ref.key else context.open_branch(tip)
        moved, uploads = with_zones(context, tip, keys, (), now.manifests, now.by_id, zones)
        creates = [partial(context.objects.create, one.key, one.data) for one in uploads]
        context.runtime.parallel(creates)
        return replace(root, branches={**root.branches, branch: moved})

    context.roots.update(change, operation, branch, "", _ATTEMPTS)
