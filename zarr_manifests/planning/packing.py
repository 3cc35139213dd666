"""Which manifests are repacked, what goes into which manifest, and what is embedded in a delta.

Small tables of a commit are *embedded*, up to a budget. The others get manifests: small ones share
one. Opening a dataset reads the deltas that change nodes or have tables of coordinates, and a small
delta is copied into the snapshot. To stay small, such a delta embeds other tables only if all its
tables are small, or up to a lower budget.

The leaves of a base are packed in *sets*, which are filled in topological order of their overflow.
Arrays assigned to a set are packed into manifests within its limits, and what does not fit
overflows to the next set:

1. An array is assigned to the set of the first matching rule, else to `default`.
2. An array with more refs than a manifest of the set may hold overflows as a whole. If `splitting`
   names it, or in the last set, its leaves are placed one by one instead. With `splitting: none` it
   gets a manifest of its own in the last set.
3. The rest is packed first-fit decreasing. In sets with `arrays-per-manifest`, the biggest arrays
   are paired with the smallest.
4. A set has at most `cardinality` manifests, including those that stay. When sizes are packed, the
   biggest overflow, so that small arrays keep their place.

When some leaves change, their manifests are *repacked*: rewritten with all their leaves. Other
manifests of the same array stay as they are, with three exceptions:

- An array that has to be in one manifest (`arrays-per-manifest`, or `splitting: none`) pulls in all
  its manifests, which pull in their arrays of that kind, and so on.
- New chunks that are in no leaf yet pull in the leaves in their cells of the array's layout.
- A set at its limit takes new arrays if its emptiest manifest has room: that is then repacked, too.

Packing into bins is first-fit decreasing: sizes are taken biggest first, and each goes into the
first bin with room for it. It never needs more than 11/9 times the fewest possible bins, plus one.

Invariants: every table and leaf is placed exactly once; only in the last set can a manifest exceed
the set's size, and it then holds a single array or leaf; the result does not depend on the input's
order; what is repacked is proportional to what changes, never to the size of the base.

Which nodes and leaves of a base go into which page
---------------------------------------------------

A small base has no pages. The nodes of a larger one are cut into pages in their order: at the
boundaries of the pages before, so that what has not changed stays, and then into halves while a
page is too large. The leaves of a large array are cut into pages of their own, by their corners.
Invariants: all leaves that a manifest has of one array are in one page; leaves of deleted nodes are
listed with another node of their manifest, so that a compaction knows what it holds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise, starmap
from typing import Any, Final

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from zarr_manifests.config.manifest_sets import ChunkManifests, ManifestSet
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.manifest import (
    Base,
    LeafPage,
    ManifestRef,
    Node,
    NodePage,
    Part,
    PathOrder,
    grouped,
    path_order,
)
from zarr_manifests.grid import Coords
from zarr_manifests.planning.leaves import ArrayFacts, Layout, layout_around
from zarr_manifests.planning.tables import EMPTY, BaseIndex, part_order

EMBED_BYTES: Final = 32 * 1024
_EMBED_TABLE_BYTES: Final = 8 * 1024
_EMBED_AT_OPEN_BYTES: Final = 16 * 1024
_EMBED_OTHERS_BYTES: Final = 2 * 1024
_SHARED_MANIFEST_BYTES: Final = 1024 * 1024


def plan_embedding[T: (bytes, tuple[bytes, int])](
    encoded_bytes: Mapping[T, int], coordinates: Collection[T] = (), *, changes_nodes: bool = False
) -> tuple[tuple[T, ...], list[tuple[T, ...]]]:
    """Place the tables of one commit: the embedded ones, and those of each manifest.

    Parameters
    ----------
    encoded_bytes : mapping of T to int
        The encoded size of each table.
    coordinates : collection of T
        Tables of coordinates, which are embedded first.
    changes_nodes : bool
        Whether the commit changes nodes.

    Examples
    --------
    >>> from zarr_manifests.planning.packing import plan_embedding
    >>> plan_embedding({b"a": 100, b"b": 1_000_000})
    ((b'a',), [(b'b',)])
    """
    sizes = encoded_bytes.values()
    fits = sum(sizes) <= _EMBED_AT_OPEN_BYTES and max(sizes, default=0) <= _EMBED_TABLE_BYTES
    others = EMBED_BYTES
    if (changes_nodes or coordinates) and not fits:
        others = _EMBED_OTHERS_BYTES
    first = frozenset(coordinates)
    embedded, rest, room = [], [], EMBED_BYTES
    for later, size, table in sorted((t not in first, n, t) for t, n in encoded_bytes.items()):
        if size <= min(room, others if later else room, _EMBED_TABLE_BYTES):
            embedded.append(table)
            room -= size
            others -= size * later
        else:
            rest.append((size, table))
    rest.sort(reverse=True)
    bins = first_fit([size for size, _ in rest], _SHARED_MANIFEST_BYTES)
    return tuple(embedded), [tuple(rest[i][1] for i in each) for each in bins]


def first_fit(sizes: Sequence[int], capacity: int | None) -> list[list[int]]:
    """Return the positions of the sizes in each bin, packed first-fit decreasing.

    No bin's sum exceeds the capacity, except that of a size which does so alone. Equal sizes keep
    their order, so a caller that sorts first gets a result that does not depend on where the sizes
    came from.

    Parameters
    ----------
    sizes : sequence of int
        The sizes.
    capacity : int or None
        None: a single bin takes everything.

    Examples
    --------
    >>> from zarr_manifests.planning.packing import first_fit
    >>> first_fit([4, 8, 1, 4, 2, 1], capacity=10)
    [[1, 4], [0, 3, 2, 5]]
    """
    if not sizes:
        return []
    if capacity is None:
        return [list(range(len(sizes)))]
    order = np.argsort(-np.asarray(sizes, np.int64), kind="stable").tolist()
    bins: list[list[int]] = []
    room = np.empty(len(sizes), np.int64)
    for position in order:
        size, count = sizes[position], len(bins)
        first = int(np.argmax(room[:count] >= size)) if count else 0
        if count == 0 or room[first] < size:
            first = count
            bins.append([])
            room[first] = capacity
        bins[first].append(position)
        room[first] -= size
    return bins


def pack_into(sizes: Sequence[int], capacity: int | None, most_bins: int) -> list[list[int]]:
    """Like `pack`, into at most `most_bins` bins; sizes without room are left out.

    The biggest sizes are left out first, and the last among equal ones, so that most sizes fit.

    Examples
    --------
    >>> from zarr_manifests.planning.packing import pack_into
    >>> pack_into([10, 10, 1, 3, 10], capacity=10, most_bins=2)
    [[0], [3, 2]]
    """
    ascending = np.argsort(np.asarray(sizes, np.int64), kind="stable").tolist()

    def packed(count: int) -> list[list[int]]:
        chosen = sorted(ascending[:count])
        bins = first_fit([sizes[i] for i in chosen], capacity)
        return [[chosen[i] for i in members] for members in bins]

    found = packed(len(sizes))
    if len(found) > most_bins:
        counts = range(len(sizes))
        found = packed(bisect_right(counts, most_bins, key=lambda n: len(packed(n))) - 1)
    return found


def pair(sizes: Sequence[int], members: int) -> list[list[int]]:
    """Return the positions in groups of `members`; the last group may have fewer.

    Half of each group (the bigger half, if uneven) is taken from the biggest sizes that are left,
    the rest from the smallest.

    Examples
    --------
    >>> from zarr_manifests.planning.packing import pair
    >>> pair([10, 1, 5, 20, 2], members=2)
    [[3, 1], [0, 4], [2]]
    """
    order = np.argsort(-np.asarray(sizes, np.int64), kind="stable").tolist()
    groups = []
    low, high, biggest = 0, len(order), -(-members // 2)
    while low < high:
        top = order[low : min(low + biggest, high)]
        low += len(top)
        bottom = order[max(low, high - (members - biggest)) : high]
        high -= len(bottom)
        groups.append(top + bottom[::-1])
    return groups


# --- sets --------------------------------------------------------------------------------------


class PlannedManifest(Struct, frozen=True):
    """A manifest to write."""

    set_name: str
    leaves: tuple[Part, ...]

    @property
    def refs(self) -> int:
        """The number of refs it will hold."""
        return sum(leaf.count for leaf in self.leaves)


class Overflow(Struct, frozen=True):
    """A set that did not take an array, or some of its leaves, and the reason."""

    set_name: str
    why: str


class _Item(Struct):
    """A unit of placement, an array or one leaf of a split array; `size` has to fit a manifest.

    The size of an array counts its leaves that stay elsewhere, too.
    """

    facts: ArrayFacts
    leaves: tuple[Part, ...]
    size: int
    refs: int = 0

    def __post_init__(self) -> None:
        self.refs = sum(leaf.count for leaf in self.leaves)

    @property
    def order(self) -> tuple[Coords, str, bytes]:
        """Order among equal sizes: leaves that start at the same chunk are packed together."""
        return self.leaves[0].box.lo, self.facts.path, self.facts.node_id

    def split(self, most: int | None = 0) -> list[_Item]:
        """The item's leaves one by one, unless its size is at most `most`."""
        if most is None or self.size <= most:
            return [self]
        return [_Item(self.facts, (leaf,), leaf.count) for leaf in self.leaves]


def plan_manifests(
    config: ChunkManifests,
    facts: Mapping[bytes, ArrayFacts],
    leaves: Iterable[Part],
    base: BaseIndex = EMPTY,
    replaced: Collection[str] = (),
) -> tuple[PlannedManifest, ...]:
    """Place leaves into manifests, set by set in the order of overflow.

    Parameters
    ----------
    config : ChunkManifests
        How manifests are planned.
    facts : mapping of bytes to ArrayFacts
        By node id, of every array with a leaf here.
    leaves : iterable of Part
        The leaves to pack.
    base : BaseIndex
        The base before this plan.
    replaced : collection of str
        Keys of its manifests that are not kept. Those of their leaves that still exist are among
        `leaves`.

    Raises
    ------
    InvalidArgumentError
        If a leaf is listed twice.

    Examples
    --------
    >>> from zarr_manifests.config.manifest_sets import ChunkManifests
    >>> from zarr_manifests.format.manifest import Part
    >>> from zarr_manifests.grid import Box
    >>> from zarr_manifests.planning.leaves import ArrayFacts
    >>> from zarr_manifests.planning.packing import plan_manifests
    >>> lat = ArrayFacts(b"l" * 12, "/lat", (1,), 1)
    >>> air = ArrayFacts(b"a" * 12, "/air", (40_000,), 40_000)
    >>> facts = {of.node_id: of for of in (lat, air)}
    >>> leaves = [
    ...     Part(of.node_id, Box((0,), of.grid_shape), of.initialized_chunks) for of in (lat, air)
    ... ]
    >>> plan = plan_manifests(ChunkManifests(), facts, leaves)
    >>> [(m.set_name, m.refs) for m in plan]
    [('coordinates', 1), ('default', 40000)]
    """
    assigned: dict[str, list[_Item]] = {one.name: [] for one in config.sets}
    for item in _arrays(facts, leaves, base, replaced):
        _, wanted = _wanted(config, item.facts)
        alone = config.splitting is not None and config.split_for(item.facts.path) is not None
        assigned[wanted.name] += item.split() if alone else [item]
    planned: list[PlannedManifest] = []
    for one in config.ordered_sets():
        items = assigned[one.name]
        if one.overflow_to is None and config.splitting is not None:
            items = [leaf for item in items for leaf in item.split(one.max_manifest_size)]
        room = len(items)
        if one.cardinality is not None:
            stay = sum(ref.blob.key not in replaced for ref in base.in_set(one.name))
            room = max(0, one.cardinality - stay)
        if one.arrays_per_manifest is not None:
            groups = _paired(items, one.arrays_per_manifest)[:room]
        else:
            groups = _packed(one, items, room)
        planned += [_manifest(one, group) for group in groups]
        if one.overflow_to is not None:
            placed = {id(item) for group in groups for item in group}
            assigned[one.overflow_to] += [item for item in items if id(item) not in placed]
    return tuple(planned)


def _arrays(
    facts: Mapping[bytes, ArrayFacts],
    leaves: Iterable[Part],
    base: BaseIndex,
    replaced: Collection[str],
) -> list[_Item]:
    """One item for each array, in canonical order."""
    found = grouped((leaf.node_id, leaf) for leaf in leaves)
    gone = Counter[bytes]()
    for key in replaced:
        for part in base[key].parts:
            gone[part.node_id] += part.count
    items = []
    for node_id, parts in found.items():
        ordered = tuple(sorted(parts, key=part_order))
        if any(a.box == b.box for a, b in pairwise(ordered)):
            raise InvalidArgumentError(f"{facts[node_id].path}: a leaf comes twice")
        total = sum(leaf.count for leaf in parts) + base.refs(node_id) - gone[node_id]
        items.append(_Item(facts[node_id], ordered, total))
    return sorted(items, key=lambda item: (item.facts.path, item.facts.node_id))


def _paired(items: Sequence[_Item], members: int) -> list[list[_Item]]:
    """Groups of that many arrays, all leaves of an array in one."""
    whole = grouped((item.facts.node_id, item) for item in items)
    arrays = sorted(whole.values(), key=lambda of: (of[0].facts.path, of[0].facts.node_id))
    groups = pair([sum(item.refs for item in of) for of in arrays], members)
    return [[item for i in group for item in arrays[i]] for group in groups]


def _packed(one: ManifestSet, items: Sequence[_Item], room: int) -> list[list[_Item]]:
    """Bins within the set's size; in the last set, also what exceeds every size."""
    most = one.max_manifest_size
    fitting = [item for item in items if most is None or item.size <= most]
    fitting.sort(key=lambda item: (-item.refs, item.order))
    bins = pack_into([item.refs for item in fitting], most, room)
    alone = [item for item in items if most is not None and item.size > most]
    return [[item] for item in alone if one.overflow_to is None] + [
        [fitting[i] for i in members] for members in bins
    ]


def _manifest(one: ManifestSet, group: Sequence[_Item]) -> PlannedManifest:
    """A manifest with the leaves of a group, array by array."""
    leaves = [(item.facts.path, leaf) for item in group for leaf in item.leaves]
    leaves.sort(key=lambda of: (of[0], part_order(of[1])))
    return PlannedManifest(one.name, tuple(leaf for _, leaf in leaves))


def _wanted(config: ChunkManifests, facts: ArrayFacts) -> tuple[int | None, ManifestSet]:
    wanted, rule = config.set_for(facts.path, facts.metadata_chunks, facts.initialized_chunks)
    if rule is None:
        return None, wanted
    return next(i for i, other in enumerate(config.rules) if other is rule), wanted


def explain(
    config: ChunkManifests, array: ArrayFacts, base: BaseIndex
) -> tuple[int | None, str, tuple[Overflow, ...]]:
    """Explain in which sets an array of a base is, as far as that can be told.

    There are three reasons why an array is in another set than its rule's: it is too big for the
    sets before, they were full when it was packed, or the configuration has changed since. Its refs
    show the first; the other two are told apart by whether the set is full now.

    Returns
    -------
    tuple
        The position of the rule that matched (None if none did), the set that it assigns, and the
        sets that the array overflowed from, in order.
    """
    rule, wanted = _wanted(config, array)
    by_name = {one.name: one for one in config.sets}
    left = {leaf.manifest.packed_for for leaf in base.placed(array.node_id)}
    one: ManifestSet | None = wanted
    passed = []
    while one is not None and left - {one.name}:
        left.discard(one.name)
        refs, most = base.refs(array.node_id), one.max_manifest_size
        why = "it was packed under another configuration"
        if most is not None and refs > most and config.split_for(array.path) is None:
            why = f"its {refs:,} chunk refs are more than the {most:,} of a manifest"
        elif one.cardinality is not None and len(base.in_set(one.name)) >= one.cardinality:
            why = f"the set has its {one.cardinality:,} manifests already"
        passed.append(Overflow(one.name, why))
        one = None if one.overflow_to is None else by_name[one.overflow_to]
    return rule, wanted.name, tuple(passed)


# --- what is repacked -----------------------------------------------------------------------------


def close(
    config: ChunkManifests,
    facts: Mapping[bytes, ArrayFacts],
    base: BaseIndex,
    due: Iterable[str],
    more: Iterable[bytes],
    layouts: dict[bytes, Layout],
) -> frozenset[str]:
    """Return the keys of all manifests that have to be repacked.

    Parameters
    ----------
    config : ChunkManifests
        How manifests are planned.
    facts : mapping of bytes to ArrayFacts
        By node id; looked up only for arrays that change and arrays in the same manifests. Leaves
        of an array that is not in it are dropped.
    base : BaseIndex
        The base.
    due : iterable of str
        Keys of the manifests with leaves that change, or of arrays that are gone.
    more : iterable of bytes
        Ids of the arrays with new chunks in no leaf.
    layouts : dict of bytes to Layout
        The layouts of arrays with new chunks; those of others in these manifests are added.
    """
    found, todo = set(due), {*more}
    new: dict[str, int] = {}  # refs of the smallest new array that each set is to take
    for node_id in todo:
        if not base.refs(node_id):
            refs, name = facts[node_id].initialized_chunks, _wanted(config, facts[node_id])[1].name
            new[name] = min(refs, new.get(name, refs))
    for one in config.sets:
        if one.name in new and found.isdisjoint(ref.blob.key for ref in base.in_set(one.name)):
            found |= _reopened(one, base.in_set(one.name), new[one.name])
    todo |= {part.node_id for key in found for part in base[key].parts}
    seen = set[bytes]()
    while todo:
        node_id = todo.pop()
        seen.add(node_id)
        if node_id not in facts:
            continue
        if node_id not in layouts:
            layouts[node_id] = layout_around(config, facts[node_id], base)
        if layouts[node_id].together:
            pulled = {leaf.key for leaf in base.placed(node_id)} - found
            found |= pulled
            todo |= {part.node_id for key in pulled for part in base[key].parts} - seen
    return frozenset(found)


def _reopened(one: ManifestSet, there: Sequence[ManifestRef], refs: int) -> set[str]:
    """The emptiest manifest of a set at its limit, if it has room for so many refs."""
    if one.cardinality is None or len(there) < one.cardinality:
        return set()
    emptiest = min(there, key=lambda ref: sum(part.count for part in ref.parts))
    held = sum(part.count for part in emptiest.parts)
    arrays = len({part.node_id for part in emptiest.parts})
    full = (one.max_manifest_size is not None and held + refs > one.max_manifest_size) or (
        one.arrays_per_manifest is not None and arrays >= one.arrays_per_manifest
    )
    return set() if full else {emptiest.blob.key}


# --- pages ----------------------------------------------------------------------------------------


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
        refs = sorted(table.listed([node_id]), key=_lowest)
        leaves += _plan(refs, mine, _lowest, table.leaf_page, limits.leaves, limits)
    few = len(whole.nodes) <= limits.inline and table.count <= limits.inline
    if few or not whole.nodes:
        inline = replace(table.page(table.nodes), nodes=whole.nodes) if leaves else whole
        return inline, [], leaves

    def page_of(nodes: Sequence[Node]) -> Base:
        page = table.page(nodes)
        if copies is None:
            return page
        return replace(page, manifests=tuple(copies(page.nodes, page.manifests)))

    pages = _plan(table.nodes, old, _node_order, page_of, limits.nodes, limits)
    return Base((), (), whole.sequence), pages, leaves


class _Leaves:
    """The leaves and counts of a base, by node."""

    def __init__(self, whole: Base, limits: PageLimits) -> None:
        self.refs, self.sequence = whole.manifests, whole.sequence
        self.counts = {count.node_id: count for count in whole.counts}
        self.nodes = sorted(whole.nodes, key=_node_order)
        order = {node.node_id: at for at, node in enumerate(self.nodes)}
        found = Counter(part.node_id for ref in self.refs for part in ref.parts)
        ids = (node.node_id for node in self.nodes)
        self.large = large = dict.fromkeys(i for i in ids if found[i] > limits.inline)
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
        at = grouped(place for node_id in nodes for place in self.places.get(node_id, ()))
        refs = (_restricted(self.refs[number], sorted(places)) for number, places in at.items())
        return tuple(sorted(refs, key=lambda ref: ref.blob.key))

    def page(self, nodes: Sequence[Node]) -> Base:
        """A page with these nodes, and the leaves of those that are not large."""
        ids = [node.node_id for node in nodes]
        refs = self.listed(node_id for node_id in ids if node_id not in self.large)
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


def _plan[Item: (Node, ManifestRef), Link: (NodePage, LeafPage)](
    items: Iterable[Item],
    old: Sequence[tuple[Link, Base]],
    order: Callable[[Item], Any],
    page_of: Callable[[Sequence[Item]], Base],
    most: int,
    limits: PageLimits,
) -> list[Planned[Link]]:
    """The pages of the items, in order; those of before stay unless changed.

    Neighbours that are small become one page if one of them is written anyway.
    """

    def start(page: Base) -> Any:
        return min(map(order, page.nodes or page.manifests))  # type: ignore[arg-type]

    old = sorted(old, key=lambda one: start(one[1]))
    starts = [start(page) for _, page in old]
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
        if done and not (done[-1][1] and kept):
            both = done[-1][0] + group
        if 0 < len(both) <= most // 2 and page_of(both).leaf_count <= limits.leaves // 2:
            done[-1] = both, None
        else:
            done.append((group, kept))
    pages: list[Planned[Link]] = []
    for held, stays in done:
        pages += [stays] if stays else starmap(Planned, _cut(held, page_of, most, limits))
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
    return _cut(items[:half], page_of, most, limits) + _cut(items[half:], page_of, most, limits)


def _alike(page: Base, other: Base) -> bool:
    """Whether the pages differ at most in when they were written."""
    fits = all(to <= other.sequence for ref in page.manifests for to in ref.merged)
    return fits and replace(page, sequence=other.sequence) == other


def _lowest(ref: ManifestRef) -> tuple[tuple[int, ...], str]:
    return min(part.box.lo for part in ref.parts), ref.blob.key


def orphans(page: Base, paths: frozenset[str] | set[str]) -> bool:
    """Whether a node of the page has a parent path without a node; `paths` are those of all."""
    return any(
        node.path.rpartition("/")[0] not in paths
        for node in page.nodes
        if node.path and not node.path.startswith("/")
    )
