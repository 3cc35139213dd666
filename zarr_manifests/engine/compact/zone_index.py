"""Pages of zone maps: made for new leaves, and kept in the index of a branch.

A compaction has the table of each new leaf at hand, so entries whose addresses are in it go to the
leaf's page, whether they come from commits or from pages of older leaves. Invariants: an array
without entries costs no request; entries of one leaf are in memory at a time; what cannot be read
counts as absent; the swap that installs pages reads the branch's index again at every attempt.

A compaction calls `with_zones` in the swap that installs its leaves. A commit writes no leaves.
Each branch of the root refers to a directory, or to none. The directory refers to pages of zone
maps. These are reachable, and nothing else under `indexes/` is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from zarr_manifests.engine.objects.chunks import SessionKeys
from zarr_manifests.engine.objects.metadata import Upload
from zarr_manifests.engine.root.epochs import fenced
from zarr_manifests.engine.snapshot.context import Context, ReadContext
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.engine.snapshot.zones import index_directory, usable
from zarr_manifests.errors import NotFoundError
from zarr_manifests.format.manifest import ManifestRef
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
from zarr_manifests.grid import corners
from zarr_manifests.planning.conflict.admission import Writer, admission
from zarr_manifests.planning.upkeep.garbage import parts
from zarr_manifests.planning.zones.meaning import Meaning

_OBJECT_BYTES: Final = 1 << 20
_ATTEMPTS: Final = 100

type LeafZones = tuple[bytes, BlobRef | None, ZoneTable, bool]
"""Node id, the leaf's manifest, its entries, and whether each of its chunks has one.

Without a manifest, the entries are of chunks in no leaf.
"""


def write_pages(
    context: Context, keys: SessionKeys, leaves: Iterable[LeafZones]
) -> dict[bytes, ZonePages]:
    """Write a page for the entries of each leaf; return the pages by node."""
    made: dict[bytes, ZonePages] = {}
    due = [(zones.pack(), *leaf) for leaf in leaves for zones in [leaf[2]]]
    for group in parts(due, lambda one: len(one[0]), _OBJECT_BYTES):
        packed = tuple((node_id, len(zones), data) for data, node_id, _, zones, _ in group)
        upload = Upload(keys.next("indexes"), Zones(packed).encode())
        context.objects.create(upload.key, upload.data)
        for position, (_, node_id, blob, zones, complete) in enumerate(group):
            leaf = None if blob is None else (blob.key, blob.crc32c)
            page = ZonePage(zones.box, leaf, len(zones), complete, upload.ref, position)
            add_pages(made, node_id, ZonePages(zones.meaning, (page,), zones.bounds.around()))
    return made


def add_pages(pages: dict[bytes, ZonePages], node_id: bytes, more: ZonePages) -> None:
    """Add pages of a node, which have one meaning."""
    old = pages.get(node_id)
    pages[node_id] = more if old is None else _joined([old, more])


def _joined(parts: Sequence[ZonePages]) -> ZonePages:
    pages = tuple(page for part in parts for page in part.pages)
    return ZonePages(parts[0].meaning, pages, Bounds.joined([part.bounds for part in parts]))


def _still(
    node_id: bytes, old: ZonePages, more: ZonePages | None, live: Collection[tuple[bytes, str, int]]
) -> ZonePages | None:
    """The older pages of a node that new ones do not replace; None if there are none.

    The page of a leaf replaces the one before, and those of chunks in no leaf that lie in its box.
    If there are new ones of chunks in no leaf, they replace all such.
    """
    new = () if more is None else more.pages
    leaves = {(page.leaf, page.box) for page in new if page.leaf is not None}
    lo, hi = corners([box for _, box in leaves], old.pages[0].box.ndim)
    keep = []
    for page in old.pages:
        if page.leaf is not None:
            keep.append((node_id, *page.leaf) in live and (page.leaf, page.box) not in leaves)
        else:
            inside = ((lo <= page.box.lo) & (page.box.hi <= hi)).all(axis=1).any()
            keep.append(not inside and all(one.leaf is not None for one in new))
    pages = tuple(page for page, stays in zip(old.pages, keep, strict=True) if stays)
    return ZonePages(old.meaning, pages, old.bounds.take(np.array(keep))) if pages else None


# --- the index of a branch ----------------------------------------------------------------------


def with_zones(
    context: ReadContext,
    branch: Branch,
    keys: SessionKeys,
    changed: Collection[bytes],
    manifests: Iterable[ManifestRef],
    nodes: Mapping[bytes, Node],
    zones: Mapping[bytes, ZonePages],
) -> tuple[Branch, list[Upload]]:
    """Add pages of zone maps, by node, to the branch's index.

    Of the nodes in `changed`, which have new leaves, and those without leaves, it keeps the older
    pages that no new page replaces, if they are of leaves that are still live, or of none. Arrays
    that are not among `nodes`, those of its head, lose their pages. `manifests` are those of its
    base. Returns the branch, and the objects to upload, of which the directory is the last.
    """
    paged, uploads = dict(index_directory(context, branch.index).zones), list[Upload]()
    live = {
        (part.node_id, ref.blob.key, ref.blob.crc32c) for ref in manifests for part in ref.parts
    }
    stay = {node_id for node_id, _, _ in live}.difference(changed)
    for node_id in sorted({*zones, *(paged.keys() - stay)}):
        more, node = zones.get(node_id), nodes.get(node_id)
        old = usable(context, paged.pop(node_id, None), ZonePages)
        still = None if old is None else _still(node_id, old, more, live)
        both = [one for one in (more, still) if one is not None]
        if node is None or not both:
            continue
        digest = Meaning.of(node.documents).digest
        meaning = digest if any(one.meaning == digest for one in both) else both[0].meaning
        listed = _joined([one for one in both if one.meaning == meaning])
        uploads.append(Upload(keys.next("indexes"), listed.encode()))
        paged[node_id] = uploads[-1].ref
    uploads.append(Upload(keys.next("indexes"), IndexDirectory(paged).encode()))
    return replace(branch, index=uploads[-1].ref.bare()), uploads


def add_to_index(
    context: Context,
    branch: str,
    view: SnapshotView,
    keys: SessionKeys,
    operation: str,
    zones: Mapping[bytes, ZonePages],
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
