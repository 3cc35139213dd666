"""Which leaves and tables go into which manifest, and which tables are embedded in a delta.

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

Packing into bins is first-fit decreasing: sizes are taken biggest first, and each goes into the
first bin with room for it. It never needs more than 11/9 times the fewest possible bins, plus one.

Invariants: every table and leaf is placed exactly once; only in the last set can a manifest exceed
the set's size, and it then holds a single array or leaf; the result does not depend on the input's
order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np

from zarr_manifests.config.manifest_sets import ChunkManifests, ManifestSet
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.manifest import Part
from zarr_manifests.grid import Coords
from zarr_manifests.planning.layout.leaves import EMPTY, ArrayFacts, BaseIndex

EMBED_BYTES: Final = 32 * 1024
_EMBED_TABLE_BYTES: Final = 8 * 1024
_EMBED_AT_OPEN_BYTES: Final = 16 * 1024
_EMBED_OTHERS_BYTES: Final = 2 * 1024
_SHARED_MANIFEST_BYTES: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class EmbedPlan[T: (bytes, tuple[bytes, int])]:
    """The embedded tables, and the tables of each manifest."""

    embedded: tuple[T, ...]
    manifests: tuple[tuple[T, ...], ...]


def plan_embedding[T: (bytes, tuple[bytes, int])](
    encoded_bytes: Mapping[T, int],
    coordinates: Collection[T] = (),
    *,
    changes_nodes: bool = False,
) -> EmbedPlan[T]:
    """Place the tables of one commit.

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
    >>> from zarr_manifests.planning.layout.packing import plan_embedding
    >>> plan_embedding({b"a": 100, b"b": 1_000_000})
    EmbedPlan(embedded=(b'a',), manifests=((b'b',),))
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
    bins = pack([size for size, _ in rest], _SHARED_MANIFEST_BYTES)
    return EmbedPlan(tuple(embedded), tuple(tuple(rest[i][1] for i in each) for each in bins))


def pack(sizes: Sequence[int], capacity: int | None) -> list[list[int]]:
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
    >>> from zarr_manifests.planning.layout.packing import pack
    >>> pack([4, 8, 1, 4, 2, 1], capacity=10)
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
    >>> from zarr_manifests.planning.layout.packing import pack_into
    >>> pack_into([10, 10, 1, 3, 10], capacity=10, most_bins=2)
    [[0], [3, 2]]
    """
    bins = pack(sizes, capacity)
    if len(bins) <= most_bins:
        return bins
    ascending = np.argsort(np.asarray(sizes, np.int64), kind="stable").tolist()
    found: list[list[int]] = []
    few, many = 0, len(sizes)  # the `few` smallest fit, the `many` smallest do not
    if capacity is not None:
        sums = np.cumsum(np.asarray(sizes, np.int64)[ascending])
        many = min(many, int(np.searchsorted(sums, capacity * most_bins, side="right")) + 1)
    count = many - 1  # usually, sizes whose sum fits can also be packed
    while many - few > 1:
        chosen = sorted(ascending[:count])
        bins = pack([sizes[i] for i in chosen], capacity)
        if len(bins) <= most_bins:
            few, found = count, [[chosen[i] for i in members] for members in bins]
        else:
            many = count
        count = (few + many) // 2
    return found


def pair(sizes: Sequence[int], members: int) -> list[list[int]]:
    """Return the positions in groups of `members`; the last group may have fewer.

    Half of each group (the bigger half, if uneven) is taken from the biggest sizes that are left,
    the rest from the smallest.

    Examples
    --------
    >>> from zarr_manifests.planning.layout.packing import pair
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

_TOO_BIG: Final = "its {refs:,} chunk refs are more than the {most:,} of a manifest"
_LEAF_TOO_BIG: Final = "a leaf of {refs:,} chunk refs is more than the {most:,} of a manifest"
_FULL: Final = "the set has its {most:,} manifests already"


@dataclass(frozen=True, slots=True)
class PlannedManifest:
    """A manifest to write."""

    set_name: str
    leaves: tuple[Part, ...]

    @property
    def refs(self) -> int:
        """The number of refs it will hold."""
        return sum(leaf.count for leaf in self.leaves)


@dataclass(frozen=True, slots=True)
class Overflow:
    """A set that did not take an array, or some of its leaves, and the reason."""

    set_name: str
    why: str


@dataclass(frozen=True, slots=True)
class LeafManifest:
    """Where leaves of an array are: an existing manifest (`key`) or a planned one."""

    set_name: str | None
    manifest: int | None
    key: str | None
    leaves: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why an array's leaves are where they are.

    Parameters
    ----------
    node_id : bytes
        The array's id.
    path : str
        Its absolute path.
    rule : int or None
        Position of the rule that matched; None if none did.
    wanted : str
        The set that the rule assigns.
    overflows : tuple of Overflow
        The sets it overflowed from, in order.
    places : tuple of LeafManifest
        Where its leaves are, in order of the manifests.
    """

    node_id: bytes
    path: str
    rule: int | None
    wanted: str
    overflows: tuple[Overflow, ...]
    places: tuple[LeafManifest, ...]


@dataclass(frozen=True, slots=True)
class ManifestPlan:
    """The manifests to write, and those they replace.

    Parameters
    ----------
    manifests : tuple of PlannedManifest
        To write, set by set in the order of overflow.
    replaced : frozenset of str
        Keys of the base's manifests that are not in the new base.
    explanations : tuple of Explanation
        One for each array with a leaf here, by path.
    """

    manifests: tuple[PlannedManifest, ...]
    replaced: frozenset[str]
    explanations: tuple[Explanation, ...]


@dataclass(slots=True)
class _Item:
    """A unit of placement: an array, or one leaf of a split array."""

    facts: ArrayFacts
    leaves: tuple[Part, ...]
    total: int  # refs of the whole array, with leaves that stay elsewhere
    one_by_one: bool
    refs: int = field(init=False)

    def __post_init__(self) -> None:
        self.refs = sum(leaf.count for leaf in self.leaves)

    @property
    def size(self) -> int:
        """The size that has to fit into a manifest: the whole array's, or one leaf's."""
        return self.refs if self.one_by_one else self.total

    @property
    def order(self) -> tuple[Coords, str, bytes]:
        """Order among equal sizes: leaves that start at the same chunk are packed together."""
        return self.leaves[0].box.lo, self.facts.path, self.facts.node_id

    def split(self) -> list[_Item]:
        """The item's leaves one by one."""
        return [_Item(self.facts, (leaf,), self.total, True) for leaf in self.leaves]


def plan_manifests(
    config: ChunkManifests,
    facts: Mapping[bytes, ArrayFacts],
    leaves: Iterable[Part],
    base: BaseIndex = EMPTY,
    replaced: Collection[str] = (),
) -> ManifestPlan:
    """Place leaves into manifests.

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
    >>> from zarr_manifests.planning.layout.leaves import ArrayFacts
    >>> from zarr_manifests.planning.layout.packing import plan_manifests
    >>> lat = ArrayFacts(b"l" * 12, "/lat", (1,), 1)
    >>> air = ArrayFacts(b"a" * 12, "/air", (40_000,), 40_000)
    >>> facts = {of.node_id: of for of in (lat, air)}
    >>> leaves = [
    ...     Part(of.node_id, Box((0,), of.grid_shape), of.initialized_chunks) for of in (lat, air)
    ... ]
    >>> plan = plan_manifests(ChunkManifests(), facts, leaves)
    >>> [(m.set_name, m.refs) for m in plan.manifests]
    [('coordinates', 1), ('default', 40000)]
    """
    packing = _Packing(config, facts, base, frozenset(replaced))
    for item in _arrays(facts, leaves, base, packing.replaced):
        packing.add(item)
    for one in config.ordered_sets():
        packing.fill(one)
    return packing.plan()


def _arrays(
    facts: Mapping[bytes, ArrayFacts],
    leaves: Iterable[Part],
    base: BaseIndex,
    replaced: frozenset[str],
) -> list[_Item]:
    """One item for each array, in canonical order."""
    found: dict[bytes, list[Part]] = {}
    for leaf in leaves:
        found.setdefault(leaf.node_id, []).append(leaf)
    gone: dict[bytes, int] = {}
    for key in replaced:
        for part in base[key].parts:
            gone[part.node_id] = gone.get(part.node_id, 0) + part.count
    items = []
    for node_id, parts in found.items():
        ordered = tuple(sorted(parts, key=_corner)) if len(parts) > 1 else tuple(parts)
        if any(a.box == b.box for a, b in pairwise(ordered)):
            raise InvalidArgumentError(f"{facts[node_id].path}: a leaf comes twice")
        stay = base.refs(node_id) - gone.get(node_id, 0)
        item = _Item(facts[node_id], ordered, 0, False)
        item.total = item.refs + stay
        items.append(item)
    return sorted(items, key=lambda item: (item.facts.path, item.facts.node_id))


def _corner(leaf: Part) -> tuple[Coords, Coords]:
    return leaf.box.lo, leaf.box.hi


class _Packing:
    """The sets, while they are filled one after another."""

    def __init__(
        self,
        config: ChunkManifests,
        facts: Mapping[bytes, ArrayFacts],
        base: BaseIndex,
        replaced: frozenset[str],
    ) -> None:
        self._config, self._facts, self._base = config, facts, base
        self.replaced = replaced
        self._assigned: dict[str, list[_Item]] = {one.name: [] for one in config.sets}
        self._manifests: list[PlannedManifest] = []
        self._chosen: dict[bytes, tuple[int | None, str]] = {}
        self._overflows: dict[bytes, dict[Overflow, None]] = {}
        self._places: dict[bytes, list[LeafManifest]] = {}

    def add(self, item: _Item) -> None:
        """Assign an array to the set of its rule."""
        rule, wanted = _wanted(self._config, item.facts)
        self._chosen[item.facts.node_id] = rule, wanted.name
        if self._config.splitting is not None and self._config.split_for(item.facts.path):
            self._assigned[wanted.name] += item.split()
        else:
            self._assigned[wanted.name].append(item)

    def fill(self, one: ManifestSet) -> None:
        """Plan the manifests of a set; pass on what does not fit."""
        items = self._assigned.pop(one.name)
        if one.overflow_to is None and self._config.splitting is not None:
            items = [leaf for item in items for leaf in _fitting(item, one.max_manifest_size)]
        room = self._room(one, len(items))
        if one.arrays_per_manifest is not None:
            groups = self._paired(items, one.arrays_per_manifest)[:room]
        else:
            groups = self._packed(one, items, room)
        for group in groups:
            self._write(one, group)
        placed = {id(item) for group in groups for item in group}
        for item in items:
            if id(item) not in placed and one.overflow_to is not None:
                self._overflow(one, item, one.overflow_to)

    def _room(self, one: ManifestSet, items: int) -> int:
        """How many manifests can be added to the set."""
        if one.cardinality is None:
            return items
        gone = sum(self._base[key].packed_for == one.name for key in self.replaced)
        return max(0, one.cardinality - self._base.in_set(one.name) + gone)

    def _paired(self, items: Sequence[_Item], members: int) -> list[list[_Item]]:
        """Groups of that many arrays, all leaves of an array in one."""
        whole: dict[bytes, list[_Item]] = {}
        for item in items:
            whole.setdefault(item.facts.node_id, []).append(item)
        arrays = sorted(whole.values(), key=lambda of: (of[0].facts.path, of[0].facts.node_id))
        groups = pair([sum(item.refs for item in of) for of in arrays], members)
        return [[item for i in group for item in arrays[i]] for group in groups]

    def _packed(self, one: ManifestSet, items: Sequence[_Item], room: int) -> list[list[_Item]]:
        """Bins within the set's size; in the last set, also what exceeds every size."""
        most = one.max_manifest_size
        fitting = [item for item in items if most is None or item.size <= most]
        fitting.sort(key=lambda item: (-item.refs, item.order))
        bins = pack_into([item.refs for item in fitting], most, room)
        alone = [item for item in items if most is not None and item.size > most]
        return [[item] for item in alone if one.overflow_to is None] + [
            [fitting[i] for i in members] for members in bins
        ]

    def _overflow(self, one: ManifestSet, item: _Item, target: str) -> None:
        self._assigned[target].append(item)
        most = one.max_manifest_size
        if most is None or item.size <= most:
            why = _FULL.format(most=one.cardinality)
        else:
            why = (_LEAF_TOO_BIG if item.one_by_one else _TOO_BIG).format(refs=item.size, most=most)
        self._overflows.setdefault(item.facts.node_id, {})[Overflow(one.name, why)] = None

    def _write(self, one: ManifestSet, group: Sequence[_Item]) -> None:
        number = len(self._manifests)
        by_array: dict[bytes, list[Part]] = {}
        for item in sorted(group, key=lambda item: (item.facts.path, item.facts.node_id)):
            by_array.setdefault(item.facts.node_id, []).extend(item.leaves)
        leaves: list[Part] = []
        for node_id, parts in by_array.items():
            parts.sort(key=_corner)
            leaves += parts
            place = LeafManifest(one.name, number, None, tuple(parts))
            self._places.setdefault(node_id, []).append(place)
        self._manifests.append(PlannedManifest(one.name, tuple(leaves)))

    def plan(self) -> ManifestPlan:
        """The finished plan."""
        explanations = (
            Explanation(
                node_id,
                self._facts[node_id].path,
                *self._chosen[node_id],
                tuple(self._overflows.get(node_id, ())),
                tuple(places),
            )
            for node_id, places in self._places.items()
        )
        by_path = sorted(explanations, key=lambda e: (e.path, e.node_id))
        return ManifestPlan(tuple(self._manifests), self.replaced, tuple(by_path))


def _fitting(item: _Item, most: int | None) -> list[_Item]:
    """The item, or its leaves if it is too big."""
    return [item] if most is None or item.size <= most else item.split()


def _wanted(config: ChunkManifests, facts: ArrayFacts) -> tuple[int | None, ManifestSet]:
    wanted, rule = config.set_for(facts.path, facts.metadata_chunks, facts.initialized_chunks)
    if rule is None:
        return None, wanted
    return next(i for i, other in enumerate(config.rules) if other is rule), wanted


def explain(
    config: ChunkManifests, facts: Iterable[ArrayFacts], base: BaseIndex
) -> tuple[Explanation, ...]:
    """Explain, by path, in which sets the arrays of a base are, as far as that can be told.

    There are three reasons why an array is in another set than its rule's: it is too big for the
    sets before, they were full when it was packed, or the configuration has changed since. Its refs
    show the first; the other two are told apart by whether the set is full now.
    """
    explanations = []
    for array in sorted(facts, key=lambda a: (a.path, a.node_id)):
        rule, wanted = _wanted(config, array)
        found: dict[str, list[Part]] = {}
        for part, key in base.leaves(array.node_id):
            found.setdefault(key, []).append(part)
        places = tuple(
            LeafManifest(base[key].packed_for or None, None, key, tuple(sorted(parts, key=_corner)))
            for key, parts in found.items()
        )
        sets = {place.set_name for place in places}
        why = tuple(_passed(config, array, wanted, sets, base)) if places else ()
        explanations.append(Explanation(array.node_id, array.path, rule, wanted.name, why, places))
    return tuple(explanations)


def _passed(
    config: ChunkManifests,
    array: ArrayFacts,
    first: ManifestSet,
    found: Collection[str | None],
    base: BaseIndex,
) -> Iterable[Overflow]:
    """The sets between the one an array is assigned to and those it is in, with reasons."""
    by_name = {one.name: one for one in config.sets}
    one, left = first, set(found)
    while left - {one.name}:
        left.discard(one.name)
        refs, most = base.refs(array.node_id), one.max_manifest_size
        if most is not None and refs > most and config.split_for(array.path) is None:
            yield Overflow(one.name, _TOO_BIG.format(refs=refs, most=most))
        elif one.cardinality is not None and base.in_set(one.name) >= one.cardinality:
            yield Overflow(one.name, _FULL.format(most=one.cardinality))
        else:
            yield Overflow(one.name, "it was packed under another configuration")
        if one.overflow_to is None:
            return
        one = by_name[one.overflow_to]
