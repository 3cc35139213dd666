"""Writing the base of a compaction: whole if it is small, else the pages that have changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from zarr_manifests.engine.objects.chunks import SessionKeys
from zarr_manifests.engine.objects.metadata import ObjectReader, Upload
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.format.manifest import ManifestRef
from zarr_manifests.format.nodes import Base, LeafPage, Node, NodeKind, NodePage
from zarr_manifests.format.records import with_copies
from zarr_manifests.planning.layout import pages

_BASE_COPY_BYTES: Final = 256 * 1024
_PAGE_COPY_BYTES: Final = 8 * 1024


def encoded_base(
    objects: ObjectReader,
    view: SnapshotView,
    whole: Base,
    keys: SessionKeys,
    known: Mapping[str, bytes],
) -> tuple[Upload, list[Upload]]:
    """Return the base that replaces the view's, and its new pages; pages that stay are linked.

    Parameters
    ----------
    objects : ObjectReader
        Remembers what is written.
    view : SnapshotView
        The snapshot that is compacted.
    whole : Base
        The new base, without pages.
    keys : SessionKeys
        Names the new objects.
    known : mapping of str to bytes
        New small manifests, by key.
    """
    old = () if view.pages is None else view.pages.linked_pages()
    old_leaves = () if view.pages is None else view.pages.linked_leaf_pages()
    copies = partial(_with_copies, known=known, budget_bytes=_PAGE_COPY_BYTES)
    inline, nodes, leaves = pages.plan_pages(whole, old, old_leaves, pages.LIMITS, copies)
    uploads: list[Upload] = []

    def written(page: Base, data: bytes) -> Upload:
        uploads.append(Upload(keys.next("nodes"), data))
        objects.remember(uploads[-1].ref, page)
        return uploads[-1]

    paths = {node.path for node in whole.nodes}
    node_pages = []
    for one in nodes:
        blob = one.kept.blob if one.kept else written(one.page, one.data).ref
        orphans = pages.orphans(one.page, paths)
        node_pages.append(NodePage.to(blob, one.page, orphans=orphans))
    leaf_pages = [
        other.kept or LeafPage.to(written(other.page, other.data).ref, other.page)
        for other in leaves
    ]
    inline = replace(
        inline,
        manifests=_with_copies(inline.nodes, inline.manifests, known, _BASE_COPY_BYTES),
        pages=tuple(node_pages),
        leaf_pages=tuple(leaf_pages),
    )
    base = Upload(keys.next("nodes"), inline.encode())
    objects.remember(base.ref, inline)
    return base, uploads


def _with_copies(
    nodes: Sequence[Node],
    manifests: Sequence[ManifestRef],
    known: Mapping[str, bytes],
    budget_bytes: int,
) -> tuple[ManifestRef, ...]:
    """The directory with copies of small manifests of coordinates, up to a total size."""
    coordinates = {
        node.node_id
        for node in nodes
        if node.kind is NodeKind.ARRAY and node.array and node.array.is_coordinate(node.path)
    }
    wanted = [
        i
        for i in sorted(range(len(manifests)), key=lambda i: manifests[i].blob.length)
        if any(part.node_id in coordinates for part in manifests[i].parts)
    ]
    copies = with_copies([manifests[i].blob for i in wanted], known, budget_bytes)
    out = [replace(manifest, blob=manifest.blob.bare()) for manifest in manifests]
    for i, blob in zip(wanted, copies, strict=True):
        out[i] = replace(out[i], blob=blob)
    return tuple(out)
