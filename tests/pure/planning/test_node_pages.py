"""Which pages a base is split into."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from effort import examples
from zarr_manifests.format.manifest import (
    Base,
    Count,
    LeafPage,
    ManifestRef,
    Node,
    NodeKind,
    NodePage,
    Part,
)
from zarr_manifests.format.records import BlobRef
from zarr_manifests.grid import Box
from zarr_manifests.planning.packing import PageLimits, orphans, plan_pages
from zarr_manifests.planning.tables import combined_refs

SESSION = "000000000001-000000000000000000000000"
GROUP = {"zarr.json": b'{"zarr_format": 3, "node_type": "group"}'}
SMALL = PageLimits(inline=3, nodes=4, leaves=6, nbytes=4096)

type Pages = tuple[list[tuple[NodePage, Base]], list[tuple[LeafPage, Base]]]


def node(path: str, mark: int = 0) -> Node:
    node_id = f"{zlib.crc32(path.encode()):011d}".encode() + bytes([mark])
    if path.startswith("/"):
        return Node(path, node_id, NodeKind.OPAQUE, {})
    return Node(path, node_id, NodeKind.GROUP, GROUP)


def manifest(number: int, leaves: Sequence[tuple[bytes, int]]) -> ManifestRef:
    """A manifest with a leaf of each of these nodes, at this place."""
    parts = tuple(Part(node_id, Box((at,), (at + 1,)), 1) for node_id, at in leaves)
    blob = BlobRef(f"manifests/{SESSION}/{number}", 30, number)
    return ManifestRef(blob, parts, (1,) * len(parts))


def planned(whole: Base, old: Pages = ([], [])) -> tuple[Base, Pages, int]:
    """What stays inline, the pages with pointers to them, and how many of them are new."""
    inline, nodes, leaves = plan_pages(whole, *old, SMALL)
    paths = {one.path for one in whole.nodes}
    new = 0
    pages: Pages = ([], [])
    for one in nodes:
        new += one.kept is None
        blob = BlobRef.to(f"nodes/{SESSION}/{new + 100 * whole.sequence}", one.data or b" " * 20)
        link = one.kept or NodePage.to(blob, one.page, orphans=orphans(one.page, paths))
        whole.check_page(link, one.page)
        pages[0].append((link, one.page))
    for other in leaves:
        new += other.kept is None
        blob = BlobRef.to(f"nodes/{SESSION}/{new + 100 * whole.sequence}", other.data or b" " * 20)
        leaf_link = other.kept or LeafPage.to(blob, other.page)
        whole.check_page(leaf_link, other.page)
        pages[1].append((leaf_link, other.page))
    links = tuple(link for link, _ in pages[0]), tuple(link for link, _ in pages[1])
    return replace(inline, pages=links[0], leaf_pages=links[1]), pages, new


def joined(base: Base, pages: Pages) -> tuple[object, ...]:
    """All that is in the base and its pages, in an order of its own."""
    every = [base, *(page for _, page in pages[0]), *(page for _, page in pages[1])]
    refs = combined_refs(ref for page in every for ref in page.manifests)
    return (
        sorted((n for page in every for n in page.nodes), key=lambda one: one.path),
        {ref.blob.key: sorted(map(str, ref.leaves())) for ref in refs},
        sorted(c.node_id for page in every for c in page.counts),
    )


names = st.sampled_from(["a", "a-b", "a0", "b", "c", "zz"])
paths = st.lists(names, max_size=3).map("/".join) | st.lists(names, min_size=1).map(
    lambda some: "/" + "/".join(some)
)


@st.composite
def bases(draw: st.DrawFn, sequence: int = 2) -> Base:
    nodes = [node(path) for path in sorted(draw(st.sets(paths, max_size=20)))]
    ids = [one.node_id for one in nodes] + [b"dead" * 3]
    place = st.tuples(st.sampled_from(ids), st.integers(0, 30))
    refs = []
    for number in range(draw(st.integers(0, 6))):
        leaves = draw(st.lists(place, min_size=1, max_size=6, unique=True))
        refs.append(manifest(number, leaves))
    counts = tuple(Count(one.node_id, 1, 2) for one in nodes[::2])
    return Base(tuple(nodes), tuple(refs), sequence, draw(st.sampled_from([counts, ()])))


@given(bases(), bases(sequence=3))
@settings(max_examples=examples(60), deadline=None)
def test_pages_hold_everything_and_what_has_not_changed_stays(whole: Base, later: Base) -> None:
    base, pages, _ = planned(whole)
    assert joined(base, pages) == joined(whole, ([], []))
    for link, page in pages[0]:
        assert link.nodes <= SMALL.nodes or link.nodes == 1
        held = {n.node_id for n in page.nodes}
        alive = {n.node_id for n in whole.nodes}
        assert {p.node_id for ref in page.manifests for p in ref.parts} & alive <= held
    again, kept, new = planned(replace(whole, sequence=3), pages)
    assert joined(again, kept) == joined(whole, ([], []))
    changed, pages_later, _ = planned(later, pages)
    assert joined(changed, pages_later) == joined(later, ([], []))
    # Neighbours are joined at most once, so that nothing is written for ever.
    for _ in range(5):
        again, kept, new = planned(replace(whole, sequence=3), kept)
        if not new:
            break
    assert not new
    assert again.pages == tuple(link for link, _ in kept[0])
