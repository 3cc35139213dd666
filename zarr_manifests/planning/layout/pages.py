"""What is cut into pages: the nodes and leaves of a base, and the refs and leases of the root.

A small base has no pages. The nodes of a larger one are cut into pages in their order: at the
boundaries of the pages before, so that what has not changed stays, and then into halves while a
page is too large. The leaves of a large array are cut into pages of their own, by their corners.
Invariants: all leaves that a manifest has of one array are in one page; leaves of deleted nodes are
listed with another node of their manifest, so that a compaction knows what it holds.

Each section of the root (the branches, the tags with deleted ones, or the leases) has pages in
order of names, each with its own range of names. When the root is too large, the section that takes
the most room moves names to one page: the page into whose range most of its names fall. Only that
page is rewritten, and split if it has become too large. Pages grow with the section, so that there
are never many more than `PAGES_MOST`. Invariants: `main` and the branch that was written last stay
in the root; an entry in the root takes precedence over one in a page.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.format.manifest import ManifestRef, Part
from zarr_manifests.format.nodes import Base, LeafPage, Node, NodePage, PathOrder, path_order
from zarr_manifests.format.records import pack
from zarr_manifests.format.root import Branch, Page, PageRef, Root
from zarr_manifests.ids import lineage_of


class PageLimits(Struct, frozen=True):
    """When a base gets pages, and how large they become.

    Parameters
    ----------
    inline : int
        Most nodes, and most leaves, of a base without pages. An array with more leaves is large.
    nodes, leaves, nbytes : int
        Most nodes, leaves and encoded bytes of a page; one node may exceed them.
    """

    inline: int = 256
    nodes: int = 256
    leaves: int = 512
    nbytes: int = 12 * 1024


LIMITS: Final = PageLimits()
_FIRST: Final = b""
"""Stands for the first node, whatever it is."""


class Planned[Link: (NodePage, LeafPage)](Struct, frozen=True):
    """A page of the new base: the pointer to it if it exists already, else its contents."""

    page: Base
    data: bytes = b""
    kept: Link | None = None


type Copies = Callable[[Sequence[Node], Sequence[ManifestRef]], Sequence[ManifestRef]]
"""Adds copies to the manifests of a page with these nodes."""


def plan_pages(
    whole: Base,
    old: Sequence[tuple[NodePage, Base]] = (),
    old_leaves: Sequence[tuple[LeafPage, Base]] = (),
    limits: PageLimits = LIMITS,
    copies: Copies | None = None,
) -> tuple[Base, list[Planned[NodePage]], list[Planned[LeafPage]]]:
    """Return what of a base stays inline, its pages of nodes, and its pages of leaves.

    Parameters
    ----------
    whole : Base
        The base without pages.
    old, old_leaves : sequence of (page pointer, page)
        The pages of the base before.
    limits : PageLimits
        When there are pages, and how large they become.
    copies : callable, optional
        Adds copies to the manifests of a page with the given nodes.
    """
    table = _Leaves(whole, limits)
    leaves: list[Planned[LeafPage]] = []
    for node_id in table.large:
        mine = [(link, page) for link, page in old_leaves if link.node_id == node_id]
        mine.sort(key=lambda one: min(map(_corner, one[1].manifests)))
        starts = [min(map(_corner, page.manifests)) for _, page in mine]
        refs = sorted(table.listed([node_id]), key=_corner)
        leaves += _plan(
            refs, mine, starts, _corner, table.leaf_page, limits.leaves, limits, join=False
        )
    few = len(whole.nodes) <= limits.inline and table.count <= limits.inline
    if few or not whole.nodes:
        inline = replace(table.page(table.nodes), nodes=whole.nodes) if leaves else whole
        return inline, [], leaves

    def page_of(nodes: Sequence[Node]) -> Base:
        page = table.page(nodes)
        if copies is None:
            return page
        return replace(page, manifests=tuple(copies(page.nodes, page.manifests)))

    begins = [path_order(link.first) for link, _ in old]
    pages = _plan(table.nodes, old, begins, _node_order, page_of, limits.nodes, limits, join=True)
    return Base((), (), whole.sequence), pages, leaves


class _Leaves:
    """The leaves and counts of a base, by node."""

    def __init__(self, whole: Base, limits: PageLimits) -> None:
        self.refs, self.sequence = whole.manifests, whole.sequence
        self.counts = {count.node_id: count for count in whole.counts}
        self.nodes = sorted(whole.nodes, key=_node_order)
        order = {node.node_id: at for at, node in enumerate(self.nodes)}
        found: dict[bytes, int] = {}
        for ref in self.refs:
            for part in ref.parts:
                found[part.node_id] = found.get(part.node_id, 0) + 1
        self.large = [n.node_id for n in self.nodes if found.get(n.node_id, 0) > limits.inline]
        large = set(self.large)
        # Number of the manifest, and position in it, of the leaves that are listed with a node.
        self.places: dict[bytes, list[tuple[int, int]]] = {}
        for number, ref in enumerate(self.refs):
            alive = [p.node_id for p in ref.parts if p.node_id in order and p.node_id not in large]
            home = min(alive, key=order.__getitem__, default=_FIRST)
            for at, part in enumerate(ref.parts):
                listed = part.node_id if part.node_id in order else home
                self.places.setdefault(listed, []).append((number, at))
        self.count = sum(len(of) for node_id, of in self.places.items() if node_id not in large)

    def listed(self, nodes: Iterable[bytes]) -> tuple[ManifestRef, ...]:
        """The manifests with the leaves that are listed with these nodes."""
        at: dict[int, list[int]] = {}
        for node_id in nodes:
            for number, place in self.places.get(node_id, ()):
                at.setdefault(number, []).append(place)
        refs = (_restricted(self.refs[number], sorted(places)) for number, places in at.items())
        return tuple(sorted(refs, key=lambda ref: ref.blob.key))

    def page(self, nodes: Sequence[Node]) -> Base:
        """A page with these nodes, and the leaves of those that are not large."""
        large = set(self.large)
        ids = [node.node_id for node in nodes]
        refs = self.listed(node_id for node_id in ids if node_id not in large)
        if nodes[0] is self.nodes[0]:
            refs = (*refs, *self.listed([_FIRST]))
        counts = tuple(self.counts[node_id] for node_id in ids if node_id in self.counts)
        return Base(tuple(nodes), refs, self.sequence, counts)

    def leaf_page(self, refs: Sequence[ManifestRef]) -> Base:
        """A page with these leaves."""
        return Base((), tuple(refs), self.sequence)


def _node_order(node: Node) -> PathOrder:
    return path_order(node.path)


def _restricted(ref: ManifestRef, places: Sequence[int]) -> ManifestRef:
    """The manifest with its parts at these positions only."""
    some: dict[str, Any] = {
        name: tuple(column[n] for n in places) if (column := getattr(ref, name)) else ()
        for name in ("parts", "merged", "places", "nbytes")
    }
    return replace(ref, **some)


def combined_refs(refs: Iterable[ManifestRef]) -> tuple[ManifestRef, ...]:
    """The manifests, each once, with all leaves that are listed of it."""
    found: dict[str, list[ManifestRef]] = {}
    for ref in refs:
        found.setdefault(ref.blob.key, []).append(ref)
    return tuple(some[0] if len(some) == 1 else _combined(some) for some in found.values())


def _combined(refs: Sequence[ManifestRef]) -> ManifestRef:
    merged = tuple(to for ref in refs for _, to in ref.leaves())
    blob = next((ref.blob for ref in refs if ref.blob.copy is not None), refs[0].blob)
    parts, places, nbytes = (
        tuple(chain.from_iterable(getattr(ref, name) for ref in refs))
        for name in ("parts", "places", "nbytes")
    )
    kept = merged if any(merged) else ()
    return ManifestRef(blob, parts, kept, refs[0].packed_for, places, nbytes)


def _plan[Item: (Node, ManifestRef), Link: (NodePage, LeafPage)](
    items: Iterable[Item],
    old: Sequence[tuple[Link, Base]],
    starts: Sequence[Any],
    order: Callable[[Item], Any],
    page_of: Callable[[Sequence[Item]], Base],
    most: int,
    limits: PageLimits,
    *,
    join: bool,
) -> list[Planned[Link]]:
    """The pages of the items, in order; those of before, which have `starts`, stay unless changed.

    With `join`, neighbours that are small become one page if one of them is written anyway.
    """
    groups: list[list[Item]] = [[] for _ in range(max(1, len(old)))]
    for item in items:
        groups[max(0, bisect_right(starts, order(item)) - 1)].append(item)
    done: list[tuple[list[Item], Planned[Link] | None]] = []
    for at, group in enumerate(groups):
        if not group:
            continue
        page = page_of(group)
        kept = Planned(page, b"", old[at][0]) if old and _alike(page, old[at][1]) else None
        both: list[Item] = []
        if join and done and not (done[-1][1] and kept):
            both = done[-1][0] + group
        if 0 < len(both) <= most // 2 and page_of(both).leaf_count <= limits.leaves // 2:
            done[-1] = both, None
        else:
            done.append((group, kept))
    pages: list[Planned[Link]] = []
    for held, stays in done:
        new = [] if stays else _cut(held, page_of, most, limits)
        pages += [stays] if stays else [Planned(*page) for page in new]
    return pages


def _cut[T](
    items: Sequence[T], page_of: Callable[[Sequence[T]], Base], most: int, limits: PageLimits
) -> list[tuple[Base, bytes]]:
    """The items as one page, or halved until each page is within the limits; and its bytes."""
    if len(items) <= most:
        page = page_of(items)
        if len(items) == 1 or page.leaf_count <= limits.leaves:
            data = page.encode()
            if len(items) == 1 or len(data) <= limits.nbytes:
                return [(page, data)]
    half = len(items) // 2
    return [
        *_cut(items[:half], page_of, most, limits),
        *_cut(items[half:], page_of, most, limits),
    ]


def _alike(page: Base, other: Base) -> bool:
    """Whether the pages differ at most in when they were written."""
    fits = all(to <= other.sequence for ref in page.manifests for to in ref.merged)
    return fits and replace(page, sequence=other.sequence) == other


def _corner(ref: ManifestRef) -> tuple[tuple[int, ...], str]:
    def corner(part: Part) -> tuple[int, ...]:
        return part.box.lo

    return min(map(corner, ref.parts)), ref.blob.key


def orphans(page: Base, paths: frozenset[str] | set[str]) -> bool:
    """Whether a node of the page has a parent path without a node; `paths` are those of all."""
    return any(
        node.path.rpartition("/")[0] not in paths
        for node in page.nodes
        if node.path and not node.path.startswith("/")
    )


# --- pages of the root -------------------------------------------------------------------------

type Section = Literal["branches", "tags", "leases"]

SECTIONS: Final[tuple[Section, ...]] = ("branches", "tags", "leases")
ROOT_BYTES: Final = 8 * 1024
"""Size of the root, without copies, above which refs move to pages."""
PAGES_MOST: Final = 32
_ENTRIES_LEAST: Final = 256
_BULK_BYTES: Final = 64 * 1024


class PageSpill(Struct, frozen=True):
    """The names that move from the root to one page of a section."""

    section: Section
    page: int | None
    names: tuple[str, ...]


def _entries(root: Root, section: Section) -> dict[str, Any]:
    """What the root itself says of each name; None if it is deleted."""
    match section:
        case "branches":
            return {**dict.fromkeys(root.deleted_branches), **root.branches}
        case "tags":
            return {**dict.fromkeys(root.deleted_tags), **root.tags}
        case "leases":
            own = {lease.name: lease for lease in root.leases}
            return {**dict.fromkeys(root.deleted_leases), **own}


def _with_entries(root: Root, section: Section, entries: Mapping[str, Any]) -> Root:
    """The root that itself says this of the names of a section."""
    own = {name: value for name, value in entries.items() if value is not None}
    gone = tuple(name for name, value in entries.items() if value is None)
    match section:
        case "branches":
            return replace(root, branches=own, deleted_branches=gone)
        case "tags":
            return replace(root, tags=own, deleted_tags=gone)
        case "leases":
            return replace(root, leases=tuple(own.values()), deleted_leases=gone)


def page_at(root: Root, section: Section, name: str) -> int | None:
    """Position of the page that may have the name; None if the root itself has it."""
    own = name in _entries(root, section)
    return None if own else _place(root.pages.get(section, ()), name)


def lease_pages(root: Root, session: str) -> slice:
    """The pages that can have leases of the session or of its copies."""
    pages = root.pages.get("leases", ())
    # Their names start with the copies' common prefix, followed by hexadecimal digits or a slash.
    lineage = lineage_of(session)
    first, last = _place(pages, lineage), _place(pages, f"{lineage}g")
    return slice(0, 0) if first is None or last is None else slice(first, last + 1)


def checked(root: Root, section: Section, at: int, page: Page) -> Page:
    """Return the page if its names match what the root says about it.

    Raises
    ------
    CorruptObjectError
        If it has other names: they would be found in two places or in none.
    """
    refs = root.pages[section]
    names = page.section(section)
    stop = refs[at + 1].first if at + 1 < len(refs) else None
    sound = len(names) == len(page) == refs[at].count and all(
        refs[at].first <= name and (stop is None or name < stop) for name in names
    )
    if not sound:
        raise CorruptObjectError(f"{refs[at].blob.key} is not the expected page of {section}")
    return page


def _place(pages: Sequence[PageRef], name: str) -> int | None:
    if not pages:
        return None
    return max(0, bisect_right([page.first for page in pages], name) - 1)


def plan_spills(root: Root) -> list[PageSpill]:
    """Return what moves out of a root that is too large; empty if nothing can.

    It is one page's names, or all names of the section if it is very large.
    """
    written = root.log[-1].ref if root.log else ""
    entries = {section: _entries(root, section) for section in SECTIONS}
    for stays in ("main", written):
        if stays not in root.deleted_branches:
            entries["branches"].pop(stays, None)
    weights = {section: _weight(section, each) for section, each in entries.items()}
    section = max(SECTIONS, key=lambda section: weights[section])
    groups: dict[int | None, list[str]] = {}
    for name in entries[section]:
        groups.setdefault(_place(root.pages.get(section, ()), name), []).append(name)
    spills = [PageSpill(section, page, tuple(group)) for page, group in groups.items()]
    spills.sort(key=lambda spill: (-len(spill.names), spill.page or 0))
    return spills if weights[section] > _BULK_BYTES else spills[:1]


def _weight(section: Section, entries: Mapping[str, Any]) -> int:
    """About the bytes that these entries take in the root."""
    held: list[Any] = [value for value in entries.values() if value is not None]
    if section == "tags":
        held = [[name, ref] for name, ref in entries.items() if ref is not None]
    return len(pack(held)) + sum(map(len, entries))


def absorb(root: Root, spill: PageSpill, old: Page | None) -> list[tuple[str, int, Page]]:
    """Return the pages that replace `old`: first name, number of entries, page."""
    section, own = spill.section, _entries(root, spill.section)
    held = {} if old is None else dict(old.section(section))
    for name in spill.names:
        held.pop(name, None)
        value = own[name]
        if value is not None or section == "tags":  # the names of deleted tags stay
            held[name] = value.bare() if isinstance(value, Branch) else value
    total = max(len(held), sum(page.count for page in root.pages.get(section, ())))
    most = max(_ENTRIES_LEAST, 2 * total // PAGES_MOST)
    names, found = sorted(held), []
    parts = -(-len(names) // most)
    for i in range(parts):
        part = names[len(names) * i // parts : len(names) * (i + 1) // parts]
        entries: Any = {section: {name: held[name] for name in part}}
        found.append((part[0], len(part), Page(**entries)))
    return found


def without(root: Root, spill: PageSpill) -> Root:
    """The root without the names that have moved to a page."""
    gone, own = set(spill.names), _entries(root, spill.section)
    left = {name: value for name, value in own.items() if name not in gone}
    return _with_entries(root, spill.section, left)


def merge_at(pages: Sequence[PageRef]) -> int | None:
    """The position of the smallest two neighbouring pages, if there are too many pages."""
    if len(pages) <= PAGES_MOST:
        return None
    return min(range(len(pages) - 1), key=lambda i: pages[i].count + pages[i + 1].count)


def pulled(root: Root, pages: Iterable[Page], only: str | None = None) -> Root:
    """The root with the entries of these pages, or of the name `only`; its own take precedence."""
    pages = [*pages]
    for section in SECTIONS:
        own = _entries(root, section)
        for page in pages:
            for name, value in page.section(section).items():
                if only in (None, name):
                    own.setdefault(name, value)
        root = _with_entries(root, section, own)
    return root
