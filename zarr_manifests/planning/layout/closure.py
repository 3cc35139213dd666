"""Which manifests have to be repacked when some leaves change, and in which steps.

A manifest with a changed leaf is rewritten with all its leaves. Other manifests of the same array
stay as they are, with four exceptions:

- An array that has to be in one manifest (`arrays-per-manifest`, or `splitting: none`) pulls in all
  its manifests, which pull in their arrays of that kind, and so on.
- A chunk that is in no leaf yet belongs to the leaves in its cell of the array's layout.
- A truncation changes every leaf that reaches beyond it.
- What goes into a set with a limited number of manifests is packed together, so that the manifests
  become few and full.

Manifests and changes connected in these ways form a group. Groups share no manifest, so each can be
written in a step of its own. A group whose parts only share a set can be split into pieces if it is
too large for one step. The limit of the set holds after each step: manifests that later steps
replace still count, and arrays for which only a later step makes room overflow.

Invariant: the work is proportional to what changes, never to the size of the base.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from zarr_manifests.config.manifest_sets import ChunkManifests, ManifestSet
from zarr_manifests.format.manifest import Part
from zarr_manifests.grid import Box, Coords, IndexArray, taken
from zarr_manifests.planning.layout.leaves import (
    ArrayFacts,
    BaseIndex,
    Cut,
    Layout,
    PlacedLeaf,
    cut,
    layout_around,
    part_order,
)

_NO_ROWS: Final = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class ArrayChange:
    """How the chunks of one array changed since the base.

    Parameters
    ----------
    coords : int64[n, ndim]
        The chunks that were set or unset, without duplicates. One chunk can stand for all in its
        leaf, or for all in its cell of the layout that are in no leaf.
    truncated : tuple of int or None
        Grid shape; every older chunk at or beyond it on any axis is gone.
    counts : int64[n] or None
        How many chunks each of them stands for; None if each stands for itself.
    around : Box or None
        The smallest box around all changed chunks; None if all of them are in `coords`.
    """

    coords: IndexArray
    truncated: Coords | None = None
    counts: IndexArray | None = None
    around: Box | None = None

    @property
    def box(self) -> Box | None:
        """The smallest box around all changed chunks; None if there are none."""
        if self.around is not None or not len(self.coords):
            return self.around
        return Box.around_coords(self.coords)

    def refs(self, rows: IndexArray) -> int:
        """How many chunks the chunks at these rows stand for."""
        return len(rows) if self.counts is None else int(self.counts[rows].sum())


@dataclass(frozen=True, slots=True)
class Group:
    """Manifests that are repacked together, and the changes that belong to them.

    Parameters
    ----------
    manifests : tuple of str
        Their keys.
    rows : mapping of bytes to int64[k]
        For each changed array, the rows of `ArrayChange.coords` that belong here, ascending.
    refs : int
        An upper bound of the refs in the group.
    pieces : tuple of Group
        The pieces it can be split into, smallest first. Empty if it cannot be split.
    """

    manifests: tuple[str, ...]
    rows: Mapping[bytes, IndexArray]
    refs: int
    pieces: tuple[Group, ...] = ()

    @classmethod
    def of(cls, pieces: Sequence[Group]) -> Group:
        """The pieces as one group."""
        if len(pieces) == 1:
            return pieces[0]
        rows: dict[bytes, list[IndexArray]] = {}
        for piece in pieces:
            for node_id, some in piece.rows.items():
                rows.setdefault(node_id, []).append(some)
        return cls(
            tuple(key for piece in pieces for key in piece.manifests),
            {node: np.sort(np.concatenate(some)) for node, some in rows.items()},
            sum(piece.refs for piece in pieces),
            tuple(sorted(pieces, key=_group_order)),
        )

    def split(self, budget_refs: int) -> tuple[Group, Group | None]:
        """Split into pieces with at most `budget_refs` refs in all (at least one), and the rest.

        The first piece is the emptiest one with a manifest, then come pieces without any: there may
        be room for them in that manifest.
        """
        pieces = self.pieces or (self,)
        first = next((piece for piece in pieces if piece.manifests), pieces[0])
        others = sorted((p for p in pieces if p is not first), key=lambda p: bool(p.manifests))
        chosen, refs = [first], first.refs
        for piece in others:
            if refs + piece.refs > budget_refs:
                break
            chosen.append(piece)
            refs += piece.refs
        left = others[len(chosen) - 1 :]
        return Group.of(chosen), Group.of(left) if left else None


@dataclass(frozen=True, slots=True)
class Due:
    """What is repacked of one node.

    Parameters
    ----------
    node_id : bytes
        The node.
    leaves : tuple of (Part, str)
        Its leaves in the replaced manifests, with these manifests' keys.
    rows : int64[k]
        The rows of its `ArrayChange.coords` that belong here, ascending.
    replaced : frozenset of str
        Keys of all manifests that this step replaces.
    layout : Layout or None
        How the array is split; None for a node that was deleted.
    """

    node_id: bytes
    leaves: tuple[tuple[Part, str], ...]
    rows: IndexArray
    replaced: frozenset[str]
    layout: Layout | None

    def replaces(self, leaf: PlacedLeaf) -> bool:
        """Whether the leaf's manifest is replaced."""
        return leaf.manifest.blob.key in self.replaced

    def of(self, leaves: Sequence[PlacedLeaf]) -> Due:
        """The same, with only these of the leaves."""
        return replace(self, leaves=tuple((leaf.part, leaf.manifest.blob.key) for leaf in leaves))

    def cut(self, coords: IndexArray, base: BaseIndex) -> list[Cut]:
        """Cut the node's chunks into new leaves.

        Parameters
        ----------
        coords : int64[n, ndim]
            The chunks of `leaves` with the changes at `rows` merged in, in C order.
        base : BaseIndex
            The base of the closure, or the base after one of its steps.
        """
        layout = self.layout
        if layout is None:
            return []
        staying: dict[tuple[Coords, Coords], Box] = {}
        for part, _ in self.leaves:
            bounds = layout.around(part.box.lo, part.box.hi)
            for near, number in base.overlapping(self.node_id, *bounds):
                if base.key(number) not in self.replaced:
                    staying[near.box.lo, near.box.hi] = near.box
        return cut(coords, layout, [part.box for part, _ in self.leaves], list(staying.values()))


@dataclass(frozen=True, slots=True)
class Closure:
    """Everything that is repacked: groups, smallest first, and the layouts of the arrays."""

    groups: tuple[Group, ...]
    layouts: Mapping[bytes, Layout] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.groups)

    @property
    def manifests(self) -> tuple[str, ...]:
        """Keys of the manifests that are repacked."""
        return tuple(key for group in self.groups for key in group.manifests)

    @property
    def refs(self) -> int:
        """An upper bound of the refs that are repacked."""
        return sum(group.refs for group in self.groups)

    def dues(self, base: BaseIndex) -> list[Due]:
        """What is repacked of each node, in order of node ids."""
        replaced = frozenset(self.manifests)
        leaves: dict[bytes, list[tuple[Part, str]]] = {}
        rows: dict[bytes, list[IndexArray]] = {}
        for group in self.groups:
            for key in group.manifests:
                for part in base[key].parts:
                    leaves.setdefault(part.node_id, []).append((part, key))
            for node_id, some in group.rows.items():
                rows.setdefault(node_id, []).append(some)
        return [
            Due(
                node_id,
                tuple(sorted(leaves.get(node_id, ()), key=lambda leaf: part_order(leaf[0]))),
                _sorted(rows[node_id]) if node_id in rows else _NO_ROWS,
                replaced,
                self.layouts.get(node_id),
            )
            for node_id in sorted({*leaves, *rows})
        ]

    def step(self, budget_refs: int) -> tuple[Closure, Closure]:
        """Split off groups with at most `budget_refs` refs in all; at least one piece.

        Returns them and the rest, which stays valid after they are written: they share no manifest.
        """
        refs = count = 0
        if self.groups[0].refs > budget_refs:
            first, left = self.groups[0].split(budget_refs)
            rest = self.groups[1:] if left is None else (left, *self.groups[1:])
            return Closure((first,), self.layouts), Closure(rest, self.layouts)
        for group in self.groups:
            refs += group.refs
            if count and refs > budget_refs:
                break
            count += 1
        return (
            Closure(self.groups[:count], self.layouts),
            Closure(self.groups[count:], self.layouts),
        )

    def with_whole_arrays(self, base: BaseIndex) -> Closure:
        """The same closure with all pieces of an array joined, so that it can be split anew."""
        pieces: list[Group] = []
        hanging, sharing = _Joined(), _Joined()
        owner: dict[bytes, int] = {}
        for group in self.groups:
            start = len(pieces)
            for piece in group.pieces or (group,):
                number = hanging.add()
                sharing.join(sharing.add(), start)
                pieces.append(piece)
                nodes = {part.node_id for key in piece.manifests for part in base[key].parts}
                for node_id in nodes | piece.rows.keys():
                    other = owner.setdefault(node_id, number)
                    hanging.join(number, other)
                    sharing.join(number, other)
        joined = {root: Group.of([pieces[i] for i in some]) for root, some in hanging.sets()}
        return replace(self, groups=_clusters(joined, sharing))


def close(
    config: ChunkManifests,
    facts: Mapping[bytes, ArrayFacts],
    base: BaseIndex,
    changes: Mapping[bytes, ArrayChange],
    deleted: Collection[bytes] = (),
    *,
    reopen: bool = False,
) -> Closure:
    """Return what has to be repacked.

    Parameters
    ----------
    config : ChunkManifests
        How manifests are planned.
    facts : mapping of bytes to ArrayFacts
        By node id; looked up only for arrays that change and arrays in the same manifests. Leaves
        of an array that is not in it are dropped.
    base : BaseIndex
        The base.
    changes : mapping of bytes to ArrayChange
        By node id, for arrays that are in `facts`.
    deleted : collection of bytes
        Nodes of the base that are gone.
    reopen : bool
        Whether a set at its limit takes new arrays if its emptiest manifest has room: that manifest
        is then repacked with them. Otherwise new arrays overflow.
    """
    gathering = _Gathering(config, facts, base, changes)
    for node_id in sorted(changes):
        gathering.change(node_id, changes[node_id])
    for node_id in sorted(deleted):
        for key in base.manifests_of(node_id):
            gathering.manifest(base.number(key))
    gathering.share_sets(reopen)
    gathering.bring_together()
    return Closure(gathering.groups(), gathering.layouts())


def _sorted(rows: list[IndexArray]) -> IndexArray:
    """The rows of all these ascending arrays, sorted."""
    return rows[0] if len(rows) == 1 else np.sort(np.concatenate(rows))


def _group_order(group: Group) -> tuple[int, tuple[str, ...], list[tuple[bytes, list[int]]]]:
    rows = [(node, group.rows[node][:1].tolist()) for node in sorted(group.rows)]
    return group.refs, group.manifests, rows


class _Joined:
    """Numbers from 0 on, joined to sets (a union-find)."""

    def __init__(self) -> None:
        self._parents: list[int] = []

    def add(self) -> int:
        self._parents.append(len(self._parents))
        return len(self._parents) - 1

    def join(self, one: int, other: int) -> None:
        self._parents[self.root(one)] = self.root(other)

    def root(self, number: int) -> int:
        while self._parents[number] != number:
            self._parents[number] = self._parents[self._parents[number]]
            number = self._parents[number]
        return number

    def sets(self) -> Iterable[tuple[int, list[int]]]:
        """The root and the members of each set of numbers."""
        found: dict[int, list[int]] = {}
        for number in range(len(self._parents)):
            found.setdefault(self.root(number), []).append(number)
        return found.items()


def _clusters(pieces: Mapping[int, Group], sharing: _Joined) -> tuple[Group, ...]:
    """The pieces as groups of those that share sets, smallest first."""
    found: dict[int, list[Group]] = {}
    for number, piece in pieces.items():
        found.setdefault(sharing.root(number), []).append(replace(piece, pieces=()))
    return tuple(sorted(map(Group.of, found.values()), key=_group_order))


class _Gathering:
    """Manifests and changed cells, while they are joined into groups."""

    def __init__(
        self,
        config: ChunkManifests,
        facts: Mapping[bytes, ArrayFacts],
        base: BaseIndex,
        changes: Mapping[bytes, ArrayChange],
    ) -> None:
        self._changes = changes
        self._config, self._facts, self._base = config, facts, base
        self._hanging = _Joined()
        self._sharing = _Joined()  # `_hanging` must stay together, `_sharing` shares a set
        self._numbers: dict[int, int] = {}  # manifest -> member
        self._rows: dict[int, list[tuple[bytes, IndexArray]]] = {}  # by member
        self._layouts: dict[bytes, Layout] = {}
        self._anchors: dict[bytes, int] = {}  # arrays that lie together -> a member

    def change(self, node_id: bytes, change: ArrayChange) -> None:
        """Add the manifests of the changed chunks."""
        base = self._base
        if change.truncated is not None:
            for number in base.beyond(node_id, change.truncated).tolist():
                self.manifest(number)
        if not len(change.coords):
            return
        at = base.locate(node_id, change.coords)
        order = np.argsort(at, kind="stable")
        numbers, starts = np.unique(at[order], return_index=True)
        for number, rows in zip(numbers.tolist(), np.split(order, starts[1:]), strict=True):
            if number >= 0:
                self._add(self.manifest(number), node_id, rows)
            else:
                self._new_chunks(node_id, change.coords, rows)

    def _new_chunks(self, node_id: bytes, coords: IndexArray, rows: IndexArray) -> None:
        layout = self._layout(node_id)
        for group in layout.groups(taken(coords, rows)):
            one = tuple(coords[rows[group[0]]].tolist())
            near = self._base.overlapping(node_id, *layout.around(one, one))
            numbers = sorted({number for _, number in near})
            members = [self.manifest(number) for number in numbers] or [self._member()]
            for other in members[1:]:
                self._join(members[0], other)
            self._add(members[0], node_id, rows[group])

    def manifest(self, number: int) -> int:
        """The member of a manifest, added if it is new."""
        member = self._numbers.get(number)
        if member is None:
            member = self._numbers[number] = self._member()
        return member

    def share_sets(self, reopen: bool) -> None:
        """Join the members of each set with a limited number of manifests."""
        limited = [one for one in self._config.sets if one.cardinality is not None]
        due: dict[str, list[int]] = {one.name: [] for one in limited}
        new: dict[str, dict[bytes, int]] = {one.name: {} for one in limited}
        for number, member in self._numbers.items():
            name = self._base.manifest(number).packed_for
            if name in due:
                due[name].append(member)
        for member, added in self._rows.items() if limited else ():
            for node_id, _ in added:
                if not self._base.refs(node_id):
                    of = self._facts[node_id]
                    sizes = of.metadata_chunks, of.initialized_chunks
                    name = self._config.set_for(of.path, *sizes)[0].name
                    if name in due:
                        due[name].append(member)
                        new[name][node_id] = of.initialized_chunks
        for one in limited:
            if reopen and new[one.name]:
                due[one.name] += self._reopened(one, min(new[one.name].values()))
            # A single manifest without a size limit takes everything, so no part can go first.
            divisible = one.max_manifest_size is not None or one.arrays_per_manifest is not None
            join = self._sharing.join if divisible else self._join
            for member in due[one.name][1:]:
                join(due[one.name][0], member)

    def _reopened(self, one: ManifestSet, refs: int) -> list[int]:
        """The emptiest manifest of a set at its limit, if it has room for so many refs."""
        numbers = self._base.numbers_in_set(one.name)
        if len(numbers) < (one.cardinality or 0) or any(n in self._numbers for n in numbers):
            return []
        held, emptiest = min(
            (sum(part.count for part in self._base.manifest(n).parts), n) for n in numbers
        )
        arrays = len({part.node_id for part in self._base.manifest(emptiest).parts})
        full = (one.max_manifest_size is not None and held + refs > one.max_manifest_size) or (
            one.arrays_per_manifest is not None and arrays >= one.arrays_per_manifest
        )
        return [] if full else [self.manifest(emptiest)]

    def bring_together(self) -> None:
        """Add all manifests of arrays that have to be in one manifest."""
        due = list(self._numbers)
        for member, rows in list(self._rows.items()):
            for node_id, _ in rows:
                due += self._gather(node_id, member)
        while due:
            number = due.pop()
            for node_id in {part.node_id for part in self._base.manifest(number).parts}:
                due += self._gather(node_id, self._numbers[number])

    def _gather(self, node_id: bytes, member: int) -> list[int]:
        """Join all manifests of an array that has to be in one; return the new manifests."""
        if node_id in self._anchors:
            self._join(self._anchors[node_id], member)
            return []
        if node_id not in self._facts or not self._layout(node_id).together:
            return []
        self._anchors[node_id] = member
        found = []
        for key in self._base.manifests_of(node_id):
            number = self._base.number(key)
            if number not in self._numbers:
                found.append(number)
            self._join(self.manifest(number), member)
        return found

    def groups(self) -> tuple[Group, ...]:
        """The groups: what must stay together, or shares a set."""
        manifests: dict[int, list[int]] = {}
        for number, member in self._numbers.items():
            manifests.setdefault(self._hanging.root(member), []).append(number)
        rows: dict[int, dict[bytes, list[IndexArray]]] = {}
        for member, added in self._rows.items():
            of = rows.setdefault(self._hanging.root(member), {})
            for node_id, some in added:
                of.setdefault(node_id, []).append(some)
        pieces = {}
        for root in {*manifests, *rows}:
            numbers = sorted(manifests.get(root, ()))
            own = {node: _sorted(some) for node, some in rows.get(root, {}).items()}
            refs = sum(part.count for n in numbers for part in self._base.manifest(n).parts)
            refs += sum(self._changes[node].refs(some) for node, some in own.items())
            pieces[root] = Group(tuple(self._base.key(n) for n in numbers), own, refs)
        return _clusters(pieces, self._sharing)

    def _layout(self, node_id: bytes) -> Layout:
        layout = self._layouts.get(node_id)
        if layout is None:
            change = self._changes.get(node_id)
            box = change.box if change else None
            layout = layout_around(self._config, self._facts[node_id], self._base, box)
            self._layouts[node_id] = layout
        return layout

    def layouts(self) -> dict[bytes, Layout]:
        """The layout of each array with a repacked leaf or chunk."""
        for number in self._numbers:
            for part in self._base.manifest(number).parts:
                if part.node_id in self._facts:
                    self._layout(part.node_id)
        for added in self._rows.values():
            for node_id, _ in added:
                self._layout(node_id)
        return self._layouts

    def _add(self, member: int, node_id: bytes, rows: IndexArray) -> None:
        self._rows.setdefault(member, []).append((node_id, rows))

    def _member(self) -> int:
        self._sharing.add()
        return self._hanging.add()

    def _join(self, one: int, other: int) -> None:
        self._hanging.join(one, other)
        self._sharing.join(one, other)
