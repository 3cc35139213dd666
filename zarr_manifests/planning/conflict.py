"""Whether a commit can be rebased onto a tip that others have moved, and what it is then.

"Mine" is the commit, "theirs" are the commits that came first. Both are split into components (see
`components`). `CELLS` has a rule for each pair of components that can collide at a node; others are
for paths of the hierarchy. A rule yields the conflicts it finds; a pair without a rule never
conflicts. The commit can be rebased if no rule finds a conflict. A *policy* may resolve
some conflicts: whose chunks win, whose value of an attribute, and whether a node that I delete
stays deleted although it was written to. REWRITE commits have no components, so they conflict with
nothing.

The result (`Rebased`) has the nodes to change on the tip, with documents that both sides changed
merged, and the chunks of mine to drop in favour of theirs. Invariants: if each of two commits can
be rebased onto the other, the result is the same whichever comes first; no node ends up in a
deleted group or below an array.

Steps of exactly-once commits
-----------------------------

The *mark* of an application is the last version that it has committed. A branch without its mark is
below version 0. Invariant: a mark only rises, except where it is forgotten or the branch goes back
to an older snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import eq
from typing import Any, Final, Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from zarr_manifests.errors import Conflict, ConflictKind, InvalidArgumentError
from zarr_manifests.format.chunk_table import RefKind
from zarr_manifests.format.manifest import Node, NodeKind, grouped
from zarr_manifests.format.snapshot import check_marks
from zarr_manifests.grid import IndexArray
from zarr_manifests.keys import DOCUMENTS, absolute, join
from zarr_manifests.planning.components import (
    Changes,
    Component,
    DocumentChange,
    NodeChange,
    Reads,
    above,
    key_of,
    merge_documents,
    same_group,
)
from zarr_manifests.planning.merge import agree, inside, pick, select, shared_rows

type Choice = Literal["fail", "ours", "theirs"]
"""Who wins: nobody, this commit ("ours"), or the commits that came first ("theirs")."""

type Policy = Choice | Callable[[Conflict], Choice]
"""Who wins a conflict that may be resolved; a function is called for each conflict."""

_CHOICES: Final = ("fail", "ours", "theirs")
LISTED_CHUNKS: Final = 20
"""How many chunks a conflict lists, unless all are asked for."""


class Rebased(Struct, frozen=True):
    """A commit, rebased onto the tip.

    Parameters
    ----------
    conflicts : tuple of Conflict
        The conflicts; if there are any, the other fields are meaningless.
    nodes : mapping of str to (Node or None)
        Nodes to make or change on the tip, by path; None deletes one.
    dropped : mapping of bytes to int64[n, ndim]
        By node id: chunks of this commit that are dropped in favour of the others'.
    """

    conflicts: tuple[Conflict, ...]
    nodes: Mapping[str, Node | None] = {}
    dropped: Mapping[bytes, IndexArray] = {}


class _Found(Struct, frozen=True):
    """A conflict, and what a policy may decide about it."""

    conflict: Conflict
    node_id: bytes = b""
    rows: IndexArray | None = None
    attribute: str | None = None
    deletion: bool = False

    @property
    def open_to_policy(self) -> bool:
        return self.rows is not None or self.attribute is not None or self.deletion


class _Pair(Struct, frozen=True):
    """The changes of both sides to one node, and what this side has read."""

    node_id: bytes
    mine: NodeChange
    theirs: NodeChange
    reads: Reads
    listed: int

    def found(
        self, kind: ConflictKind, component: str, reason: str, rows: IndexArray | None = None
    ) -> Conflict:
        listed = () if rows is None else tuple(map(tuple, rows[: self.listed].tolist()))
        return Conflict(kind, absolute(self.mine.path), str(component), reason, listed)


type _Rule = Callable[[_Pair], Iterator[_Found]]

_C, _G, _S = Component.CHUNKS, Component.GROWTH, Component.SHRINK
_A, _X, _N, _D = Component.ATTRIBUTES, Component.STRUCTURE, Component.CREATE, Component.DELETE


def check_policy(policy: object) -> None:
    """Refuse a value that is not a policy.

    Raises
    ------
    InvalidArgumentError
        If it is neither the name of one nor callable.
    """
    if not callable(policy) and policy not in _CHOICES:
        raise InvalidArgumentError(
            f"{policy!r} is not a policy; give 'fail', 'ours', 'theirs' or a function of a Conflict"
        )


def rebase(
    mine: Changes,
    theirs: Changes,
    tip: Mapping[str, Node],
    *,
    policy: Policy = "fail",
    reads: Reads | None = None,
    serializable: bool = False,
    listed: int = LISTED_CHUNKS,
) -> Rebased:
    """Rebase a commit onto the tip.

    Parameters
    ----------
    mine, theirs : Changes
        The changes of the commit, and of those that came first, both since the same snapshot.
    tip : mapping of str to Node
        All nodes at the tip.
    policy : {"fail", "ours", "theirs"} or callable
        How conflicts that may be resolved are resolved.
    reads : Reads, optional
        What the commit's writer has read. Others must not have written a chunk that it both read
        and wrote, not even with the same bytes.
    serializable : bool
        Whether others must not have changed anything that was read.
    listed : int
        How many chunks a conflict lists at most.
    """
    check_policy(policy)
    reads = reads or Reads()
    conflicts: list[Conflict] = []
    ours: dict[bytes, set[str]] = {}
    kept: set[bytes] = set()
    dropped: dict[bytes, IndexArray] = {}
    found = [*_at_nodes(mine, theirs, reads, listed)]
    for rule in (_both_create, _beside, _same_keys):
        found += rule(mine, theirs)
    if serializable:
        found += _read_conflicts(mine, theirs, reads, listed)
    for each in found:
        choice = _choice(policy, each.conflict) if each.open_to_policy else "fail"
        back = each.deletion and choice == "theirs"
        if choice == "fail" or (back and not _may_stay(mine, each.node_id)):
            conflicts.append(each.conflict)
        elif back:
            kept.add(each.node_id)
        elif each.rows is not None and choice == "theirs":
            dropped[each.node_id] = each.rows
        elif each.attribute is not None and choice == "ours":
            ours.setdefault(each.node_id, set()).add(each.attribute)
    if conflicts:
        return Rebased(tuple(dict.fromkeys(conflicts)))
    return Rebased((), _nodes(mine, tip, ours, kept), dropped)


def _may_stay(mine: Changes, node_id: bytes) -> bool:
    """Whether a node I delete can be kept: neither it nor a parent is moved or replaced."""
    path = mine.nodes[node_id].path
    moved = {change.left for _, change in mine if change.moved}
    return moved.union(mine.taken).isdisjoint((path, *above(path)))


def _choice(policy: Policy, conflict: Conflict) -> Choice:
    choice = policy(conflict) if callable(policy) else policy
    if choice not in _CHOICES:
        raise InvalidArgumentError(
            f"the policy answered {choice!r} to a conflict at {conflict.path}; it must answer "
            "'fail', 'ours' or 'theirs'"
        )
    return choice


# --- the outcome -----------------------------------------------------------------------------


def _nodes(
    mine: Changes, tip: Mapping[str, Node], ours: Mapping[bytes, set[str]], kept: set[bytes]
) -> dict[str, Node | None]:
    """The changes to make to the tip's nodes."""
    places = {node.node_id: node for node in tip.values()}
    saved = {c.path for node_id, c in mine if node_id in kept}
    saved |= {path for kept_path in saved for path in above(kept_path)}
    changes: dict[str, Node | None] = {}
    for node_id, change in mine:
        there = places.get(node_id)
        if change.left is not None and change.left not in saved:
            if there is None or there.path != change.left:
                continue  # the others have done the same
            changes[change.left] = None
    for node_id, change in mine:
        after, there = change.after, places.get(node_id)
        if after is None:
            continue
        if change.before is None:
            # A node that I delete there myself does not count as made already.
            same = None if after.path in changes else tip.get(after.path)
            if same is None or not same_group(same, after):
                changes[after.path] = after
        elif there is not None:
            merged = merge_documents(change.before, after, there, ours.get(node_id, ()))
            node = replace(after if change.moved else there, documents=merged)
            if node != there:
                changes[node.path] = node
    return changes


# --- rules of what both sides did to a node --------------------------------------------------


def _never(mine: Component, theirs: Component, *, policy: bool = False) -> _Rule:
    done: Final = {
        Component.CHUNKS: "its chunks were written",
        Component.GROWTH: "it was made larger",
        Component.SHRINK: "it was made smaller, or its chunks were moved",
        Component.ATTRIBUTES: "its attributes were changed",
        Component.STRUCTURE: "its structure was changed",
        Component.DELETE: "it was deleted or moved",
    }

    kind = ConflictKind.SHAPE
    if Component.DELETE in (mine, theirs):
        kind = ConflictKind.DELETE
    elif Component.STRUCTURE in (mine, theirs):
        kind = ConflictKind.STRUCTURE

    def rule(pair: _Pair) -> Iterator[_Found]:
        rows = None
        change = pair.mine if mine is Component.CHUNKS else pair.theirs
        if Component.CHUNKS in (mine, theirs) and change.chunks is not None:
            rows = change.chunks.coords()
        conflict = pair.found(kind, mine, f"{done[theirs]} by a commit that came first", rows)
        yield _Found(conflict, pair.node_id, deletion=policy)

    return rule


def _same_chunks(pair: _Pair) -> Iterator[_Found]:
    """Both wrote a chunk: a conflict if the bytes differ, or mine depend on a read of it."""
    a, b = pair.mine.chunks, pair.theirs.chunks
    if a is None or b is None:
        return
    shared = select(a, shared_rows(a, b))
    coords = shared.coords()
    if not len(coords):
        return
    other = pick(b, coords)
    a, b = (select(table, table.kind != RefKind.UNSET) for table in (shared, other))
    arrays = [node.array for node in (pair.mine.before, pair.mine.after) if node is not None]
    # The bytes of this commit may not be stored yet, so they are not compared.
    by_place = any(array is not None and array.checks_itself for array in arrays)
    same = agree(a, b, coords, eq if by_place else None)
    differ = coords[~same | pair.reads.at(pair.node_id, coords)]
    if len(differ):
        appended = _appended(pair, differ)
        kind = ConflictKind.CHUNK if appended is None else ConflictKind.APPEND
        reason = appended or "also written by a commit that came first"
        conflict = pair.found(kind, Component.CHUNKS, reason, differ)
        # Other arrays with this axis may be decided otherwise: labels would have others' values.
        closed = appended is not None or _beyond(pair, differ)
        yield _Found(conflict, pair.node_id, None if closed else np.asarray(differ))


def _beyond(pair: _Pair, coords: IndexArray) -> bool:
    """Whether one of the chunks reaches beyond the array of one side, and not of the other."""
    nodes = (change.after for change in (pair.mine, pair.theirs))
    mine, theirs = (node.array if node is not None else None for node in nodes)
    if mine is None or theirs is None or mine.shape == theirs.shape:
        return False
    ends = (coords + 1) * np.asarray(mine.chunk_shape)
    return bool((ends > np.minimum(mine.shape, theirs.shape)).any())


def _appended(pair: _Pair, differ: IndexArray) -> str | None:
    """The reason if both commits append at the same place, else None."""
    axes = pair.mine.documents.grown & pair.theirs.documents.grown
    before = pair.mine.before.array if pair.mine.before is not None else None
    if not axes or before is None:
        return None
    axis = min(axes)
    whole = before.shape[axis] // before.chunk_shape[axis] if before.chunk_shape[axis] else 0
    if not (differ[:, axis] >= whole).any():
        return None
    name = before.dimension_names[axis] if before.dimension_names else None
    along = f"along {name!r}" if name else f"along axis {axis}"
    return (
        f"both commits append {along} behind the first {before.shape[axis]}, and the other came "
        "first; open a new session and append there, which puts it after the other's"
    )


def _cut_off(pair: _Pair, *, mine: bool) -> Iterator[_Found]:
    """A chunk of mine, or else of theirs, is outside the array as the other side left it."""
    writer, shrinker = (pair.mine, pair.theirs) if mine else (pair.theirs, pair.mine)
    if writer.chunks is None:
        return
    coords = writer.chunks.coords()
    lost = np.zeros(len(coords), np.bool_)
    if shrinker.cut is not None:
        lost |= ~inside(coords, shrinker.cut)
    if shrinker.after is not None and shrinker.after.array is not None:
        lost |= ~inside(coords, shrinker.after.array.grid.hi)
    if lost.any():
        component = Component.CHUNKS if mine else Component.SHRINK
        what = "cut off" if mine else "a chunk that this would cut off was written"
        reason = f"{what} by a commit that came first"
        yield _Found(pair.found(ConflictKind.SHAPE, component, reason, coords[lost]))


def _both_grow(pair: _Pair) -> Iterator[_Found]:
    """Both made it larger: a conflict unless along the same single axis, or to the same shape."""
    a, b = pair.mine.documents.grown, pair.theirs.documents.grown
    if (a == b and len(a) == 1) or _shape(pair.mine) == _shape(pair.theirs):
        return
    reason = "it was made larger along other axes by a commit that came first"
    yield _Found(pair.found(ConflictKind.SHAPE, Component.GROWTH, reason))


def _both_shrink(pair: _Pair) -> Iterator[_Found]:
    """Both made it smaller: a conflict unless to the same shape with the same truncation."""
    if _shape(pair.mine) != _shape(pair.theirs) or pair.mine.cut != pair.theirs.cut:
        reason = "it was made smaller otherwise by a commit that came first"
        yield _Found(pair.found(ConflictKind.SHAPE, Component.SHRINK, reason))


def _shape(change: NodeChange) -> object:
    return change.after.array.shape if change.after and change.after.array else None


def _same_attributes(pair: _Pair) -> Iterator[_Found]:
    """Both changed an attribute: a conflict if the values differ."""
    a, b = pair.mine.documents.attributes, pair.theirs.documents.attributes
    for key in sorted(a.keys() & b.keys()):
        if a[key] != b[key]:
            reason = f"attribute {key!r} was given another value by a commit that came first"
            conflict = pair.found(ConflictKind.ATTRIBUTE, Component.ATTRIBUTES, reason)
            yield _Found(conflict, pair.node_id, attribute=key)


# --- rules of paths --------------------------------------------------------------------------


def _both_create(mine: Changes, theirs: Changes) -> Iterator[_Found]:
    """Both made a node at a path: a conflict unless it is the same group, or the same moved node.

    It is also a conflict if one side makes a node below an array of the other, or both move a node
    to different paths.
    """
    taken, other = mine.taken, theirs.taken
    elsewhere = {node_id: path for path, node_id in other.items()}
    for path, node_id in taken.items():
        twin = theirs.nodes[other[path]] if path in other else None
        if twin is not None and not _same_creation(mine.nodes[node_id], twin):
            reason = "also made by a commit that came first"
            yield _in_the_way(ConflictKind.CREATE, path, reason)
        elif elsewhere.get(node_id, path) != path:
            reason = f"made at {absolute(elsewhere[node_id])} by a commit that came first"
            yield _in_the_way(ConflictKind.CREATE, path, reason)
    yield from _below_arrays(mine, theirs)


def _same_creation(a: NodeChange, b: NodeChange) -> bool:
    if a.after is None or b.after is None:
        return False
    if a.moved and b.moved:
        return a.after.node_id == b.after.node_id
    made = a.before is None and b.before is None
    return made and same_group(a.after, b.after)


def _below_arrays(mine: Changes, theirs: Changes) -> Iterator[_Found]:
    reason = "a node would lie below an array that a commit has changed"
    for one, other in ((mine, theirs), (theirs, mine)):
        now = [change.after for _, change in other]
        arrays = [node.path for node in now if node is not None and node.array is not None]
        for path, top in _at_or_below(one.taken, arrays):
            after = one.nodes[one.taken[path]].after
            if path != top and after is not None and after.kind is not NodeKind.OPAQUE:
                yield _in_the_way(ConflictKind.CREATE, path if one is mine else top, reason)


def _beside(mine: Changes, theirs: Changes) -> Iterator[_Found]:
    """They deleted, moved or made something at, above or below what I make, delete or move."""
    alike = _alike(mine, theirs)
    for component, ours, others, done in (
        (_N, mine.taken, theirs.left, "was deleted or moved"),
        (_D, mine.left, theirs.taken, "was made"),
        (_D, mine.left, theirs.left, "else was deleted or moved"),
    ):
        reason = f"at, above or below it something {done} by a commit that came first"
        for path in _related(ours, others, alike):
            yield _in_the_way(ConflictKind.DELETE, path, reason, component)


def _alike(mine: Changes, theirs: Changes) -> set[bytes]:
    """Ids of nodes that both sides deleted or moved to the same place."""
    return {
        node_id
        for node_id in mine.nodes.keys() & theirs.nodes.keys()
        if mine.nodes[node_id].left is not None
        and mine.nodes[node_id].left == theirs.nodes[node_id].left
        and mine.nodes[node_id].taken == theirs.nodes[node_id].taken
    }


def _related(
    mine: Mapping[str, bytes], theirs: Mapping[str, bytes], alike: set[bytes]
) -> list[str]:
    """My paths at, above or below one of theirs, unless both sides did the same there."""
    below = _at_or_below(theirs, mine)
    pairs = [*_at_or_below(mine, theirs), *((path, other) for other, path in below)]
    return sorted({a for a, b in pairs if not alike.issuperset((mine[a], theirs[b]))})


def _at_or_below(paths: Iterable[str], others: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each of the paths with each of the others that it is at or below."""
    by_key = grouped((key_of(other), other) for other in others)
    for path in paths:
        for key in (key_of(path), *above(path)):
            yield from ((path, other) for other in by_key.get(key, ()))


def _same_keys(mine: Changes, theirs: Changes) -> Iterator[_Found]:
    """One side's opaque entry is at a key that may belong to a node of the other."""
    reason = "one commit has an entry of its own at a key that belongs to a node of the other"
    for one, other in ((mine, theirs), (theirs, mine)):
        both = [(node, c) for _, c in other for node in (c.before, c.after) if node is not None]
        nodes = {node.path: change for node, change in both}
        ends = [change.before or change.after for _, change in one]
        opaque = [node.path for node in ends if node and node.kind is NodeKind.OPAQUE]
        for path, top in _at_or_below(opaque, nodes):
            if key_of(path) != key_of(top) and _may_have(nodes[top], top, key_of(path)):
                yield _in_the_way(ConflictKind.CREATE, path if one is mine else top, reason)


def _may_have(change: NodeChange, path: str, key: str) -> bool:
    """Whether a change of a node may have made the key belong to it."""
    was, now = change.before, change.after
    moved = was is None or now is None or was.path != now.path
    documents = moved or change.documents.structure
    if documents and key in {join(path, name) for name in DOCUMENTS}:
        return True
    is_array = any(node is not None and node.array is not None for node in (was, now))
    return is_array and (documents or bool(change.documents.grown) or change.documents.shrunk)


def _in_the_way(
    kind: ConflictKind, path: str, reason: str, component: Component = Component.CREATE
) -> _Found:
    return _Found(Conflict(kind, absolute(path), str(component), reason))


# --- the matrix ------------------------------------------------------------------------------

_NEVER: Final = {
    _C: (_X, _D),
    _G: (_S, _X, _D),
    _S: (_G, _X, _D),
    _A: (_X, _D),
    _X: (_C, _G, _S, _A, _X, _D),
    _D: (_G, _S, _X),
}
"""By my component: theirs that it never goes together with, whatever the policy."""

CELLS: dict[tuple[Component, Component], _Rule] = {
    **{(mine, other): _never(mine, other) for mine, others in _NEVER.items() for other in others},
    (_C, _C): _same_chunks,
    (_C, _S): partial(_cut_off, mine=True),
    (_G, _G): _both_grow,
    (_S, _C): partial(_cut_off, mine=False),
    (_S, _S): _both_shrink,
    (_A, _A): _same_attributes,
    (_D, _C): _never(_D, _C, policy=True),
    (_D, _A): _never(_D, _A, policy=True),
}
"""Rules by my component and theirs, for one node."""


def _at_nodes(mine: Changes, theirs: Changes, reads: Reads, listed: int) -> Iterator[_Found]:
    for node_id in sorted(mine.nodes.keys() & theirs.nodes.keys()):
        pair = _Pair(node_id, mine.nodes[node_id], theirs.nodes[node_id], reads, listed)
        for one in pair.mine.components:
            for other in pair.theirs.components:
                rule = CELLS.get((one, other))
                if rule is not None:
                    yield from rule(pair)


# --- what was read ---------------------------------------------------------------------------


def _read_conflicts(mine: Changes, theirs: Changes, reads: Reads, listed: int) -> Iterator[_Found]:
    """Conflicts of what was read here and changed by others."""
    for node_id in sorted(reads.nodes() & theirs.nodes.keys()):
        change = theirs.nodes[node_id]
        pair = _Pair(node_id, mine.nodes.get(node_id, change), change, reads, listed)
        if change.chunks is not None:
            coords = change.chunks.coords()
            coords = coords[reads.at(node_id, coords)]
            if len(coords):
                reason = "read here, and written by a commit that came first"
                yield _Found(pair.found(ConflictKind.READ, "read", reason, coords))
        if change.cut is not None and reads.beyond(node_id, change.cut):
            reason = "chunks that were read were cut off by a commit that came first"
            yield _Found(pair.found(ConflictKind.READ, "read", reason))
    for _, change in theirs:
        paths = {node.path for node in (change.before, change.after) if node is not None}
        if change.documents == DocumentChange() and change.taken is change.left is None:
            continue  # only its chunks have changed
        for path in sorted(paths & reads.documents):
            reason = "its metadata was read here, and changed by a commit that came first"
            yield _Found(Conflict(ConflictKind.READ, absolute(path), "read", reason))


# --- marks -------------------------------------------------------------------------------------

NO_MARK: Final = -1
"""In place of a version: the application has no mark."""


class Txn(Struct, frozen=True):
    """A numbered step of an application, which reaches a branch at most once.

    Parameters
    ----------
    app : str
        Name of the application, with 1 to 255 bytes of UTF-8.
    version : int or None
        Number of the step, from 0 on. Versions may be left out, but only rise. None forgets the
        application: after it, the application can commit any version to the branch. Older
        snapshots still have the mark, and a branch that is set back to one has it again.
    after : int, optional
        The application's last version must be exactly this one; -1 says that there must be none.
        By default it may be any lower one. To forget the application, it must be given.

    Raises
    ------
    InvalidArgumentError
        If the name or a number is invalid, or `after` is not below `version`.

    Examples
    --------
    >>> import zarr, zarr_manifests as zm
    >>> repo = zm.create("memory://txn-example")
    >>> for batch in range(2):
    ...     with repo.transaction(message="a batch", txn=zm.Txn("app", batch, batch - 1)) as store:
    ...         _ = zarr.create_group(store, path=f"batch{batch}")
    >>> repo.txn_versions()
    {'app': 1}
    >>> _ = repo.writable_session().commit("start again", txn=zm.Txn("app", None, after=1))
    >>> repo.txn_versions()
    {}
    """

    app: str
    version: int | None
    after: int | None = None

    def __post_init__(self) -> None:
        if self.version is None:
            check_app(self.app, self.after)
            return
        check_app(self.app, self.version)
        if self.after is not None and not (
            type(self.after) is int and NO_MARK <= self.after < self.version
        ):
            raise InvalidArgumentError(
                f"txn: after must be a version below {self.version}, or -1 for none, "
                f"not {self.after!r:.40}"
            )


def txn_of(given: Any) -> Txn | None:
    """The step as callers give it: as a `Txn`, a pair of name and version, or None.

    Raises
    ------
    InvalidArgumentError
        If it is none of these, or invalid.
    """
    match given:
        case None | Txn():
            return given
        case (app, version):
            return Txn(app, version)
    raise InvalidArgumentError(
        f"txn is a pair of an application's name and a version, or a Txn, not {given!r:.80}"
    )


def check_app(app: object, version: object) -> None:
    """Raise unless this is the name of an application and a version of it."""
    if not isinstance(app, str):
        raise InvalidArgumentError(f"txn: the name of an application is a text, not {app!r:.80}")
    check_marks("txn", {app: version}, 1)  # type: ignore[dict-item]  # checked there


class MarkStep(Struct, frozen=True):
    """A mark that was at `before` and is to be at `version`; `NO_MARK` says that there is none."""

    app: str
    before: int
    version: int


def steps_between(before: Mapping[str, int], after: Mapping[str, int]) -> tuple[MarkStep, ...]:
    """The marks that were set or forgotten, given all marks before and after."""
    return tuple(
        MarkStep(app, before.get(app, NO_MARK), after.get(app, NO_MARK))
        for app in sorted(before.keys() | after.keys())
        if before.get(app, NO_MARK) != after.get(app, NO_MARK)
    )


def moved_marks(marks: Mapping[str, int], steps: tuple[MarkStep, ...]) -> dict[str, int]:
    """The marks after these steps."""
    moved = dict(marks)
    for step in steps:
        moved.pop(step.app, None)
        if step.version != NO_MARK:
            moved[step.app] = step.version
    return moved


def shown(mark: int) -> str:
    """The mark in words."""
    return "none" if mark == NO_MARK else str(mark)
