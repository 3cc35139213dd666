"""What a repository tells of its versions, and the names it gives them: branches and tags.

Every change is one swap of the root, tried anew when another came first. Invariant: a branch or
tag is made or moved only to a snapshot that is in history as of the root that is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, Literal

import numpy as np

from zarr_manifests.engine.history.ancestry import (
    ancestors,
    floor_below,
    is_missing,
    locate,
    snapshot_ref,
)
from zarr_manifests.engine.history.changes_between import changes_between
from zarr_manifests.engine.history.commit_logs import deltas_between, footprint_of
from zarr_manifests.engine.history.follow import opened
from zarr_manifests.engine.snapshot.context import Context
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import (
    AlreadyExistsError,
    ConflictError,
    CorruptObjectError,
    HistoryExpiredError,
    InvalidArgumentError,
    NotFoundError,
    SnapshotExpiredError,
)
from zarr_manifests.format.delta import Delta
from zarr_manifests.format.root import Branch, Root, check_ref_name
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.grid import Coords, IndexArray
from zarr_manifests.ids import is_snapshot_id, snapshot_id_of, snapshot_key
from zarr_manifests.planning.tables.merge import narrower
from zarr_manifests.planning.tables.moves import moved_paths
from zarr_manifests.reports import Change, Diff, SnapshotInfo, Totals

__all__ = ["DEFAULT_BRANCH", "Versions", "known_ref"]

DEFAULT_BRANCH: Final = "main"
REF_ATTEMPTS: Final = 100


class Versions:
    """History, branches and tags of one repository; what `Repository` is besides."""

    def __init__(self, context: Context) -> None:
        self._context = context

    # --- history -----------------------------------------------------------------------------

    def ancestry(
        self,
        branch: str | None = None,
        *,
        tag: str | None = None,
        snapshot_id: str | None = None,
    ) -> Iterator[SnapshotInfo]:
        """The history of a branch, tag or snapshot, newest first; of `main` if none is given."""
        start = self._point(branch, tag, snapshot_id)
        walk = ancestors(self._context, start.head, start.floor)
        return (SnapshotInfo.of(ref, snapshot) for ref, snapshot in walk)

    def totals(
        self,
        branch: str | None = None,
        *,
        tag: str | None = None,
        snapshot_id: str | None = None,
    ) -> Totals:
        """How many chunks and bytes there are, and how many more than before; of `main` by default.

        The snapshot says it: it is opened, and no manifest is read. A commit looks nothing up to
        count, so where it may have overwritten or removed something, what it says is a bound and
        marked so; a compaction that merges all there is of an array makes it exact.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.Repository.create("memory://totals-example")
        >>> with repo.transaction(message="fill a quarter") as store:
        ...     array = zarr.create_array(
        ...         store, name="air", shape=(8,), chunks=(2,), dtype="i2", compressors=None)
        ...     array[:2] = 7
        >>> totals = repo.totals()
        >>> totals["air"].total
        Amount(refs=1, nbytes=4, refs_exact=True, nbytes_exact=True)
        >>> totals.delta.refs
        1
        """
        view = opened(lambda: self._context.open_branch(self._point(branch, tag, snapshot_id)))
        return Totals.of(view)

    def diff(self, start: str, end: str) -> Diff:
        """What changed after snapshot `start` up to snapshot `end`.

        Raises
        ------
        InvalidArgumentError
            If `start` is not an ancestor of `end`.
        SnapshotExpiredError
            If one of them is not there.
        """
        context = self._context
        before, after = (context.open_view(snapshot_ref(context, x)) for x in (start, end))
        try:
            deltas = deltas_between(context, before, after.ref)
        except CorruptObjectError as error:
            if is_missing(error):
                raise HistoryExpiredError(
                    f"snapshots between {start} and {end} have expired"
                ) from error
            raise
        if deltas is None:
            raise InvalidArgumentError(
                f"{start} is not an ancestor of {end}; give the older snapshot first"
            )
        return _difference(context, before, after, deltas)

    def changes(
        self,
        start: str | None = None,
        end: str | None = None,
        mode: Literal["log", "net"] = "log",
        *,
        progress: Callable[[int], None] | None = None,
    ) -> Iterator[Change]:
        """What the commits after `start` up to `end` have changed, oldest first.

        It costs what the commits have changed, whatever the size of what is there: each commit's
        own record is read, and no manifest of what was there before. Compactions are not seen.

        Parameters
        ----------
        start, end : str, optional
            The id of a snapshot, a branch or a tag. Without `start`, all since the repository was
            made; without `end`, up to the head of `main`.
        mode : {"log", "net"}
            `log` tells what each commit did. `net` tells what all of them did together, each chunk
            once: what was made and removed in between does not occur. It holds the coordinates of
            all that has changed in memory, and looks chunks that were removed up at `start`.
        progress : callable, optional
            Called with the number of commits found so far, while the history is followed.

        Yields
        ------
        Change
            Records in an order in which they can be replayed. What they say is in `Operation`.

        Raises
        ------
        HistoryExpiredError
            If some of the range has expired; nothing was yielded then.
        InvalidArgumentError
            If `start` is not an ancestor of `end`, or there is no such mode.
        NotFoundError
            If there is no such branch or tag.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.Repository.create("memory://changes-example")
        >>> with repo.transaction(message="make air") as store:
        ...     array = zarr.create_array(store, name="air", shape=(4,), chunks=(1,), dtype="i2")
        >>> made = repo.list_branches()["main"]
        >>> with repo.transaction(message="fill the middle") as store:
        ...     zarr.open_array(store, path="air")[1:3] = 7
        >>> for change in repo.changes(made):
        ...     print(change.path, change.operation, change.coordinates.tolist())
        /air overwrite [[1], [2]]
        """
        root = self._context.roots.read().root
        since = start
        if start is not None and not is_snapshot_id(start):
            since = snapshot_id_of(self._named(root, start).head.key)
        try:
            last = self._named(root, DEFAULT_BRANCH if end is None else end)
        except SnapshotExpiredError as error:
            raise HistoryExpiredError(str(error)) from error
        return changes_between(
            self._context, since, last.head, mode, floor=last.floor, progress=progress
        )

    def _named(self, root: Root, name: str) -> Branch:
        """The snapshot of that id, else the branch, else the tag of that name."""
        if is_snapshot_id(name):
            return Branch(snapshot_ref(self._context, name), None)
        roots = self._context.roots
        branch = roots.with_branch(root, name).branches.get(name)
        if branch is not None:
            return branch
        tag = roots.with_tag(root, name).tags.get(name)
        if tag is None:
            raise NotFoundError(
                f"{name[:80]!r} is neither a branch nor a tag nor the id of a snapshot; "
                "`repo.list_branches()`, `repo.list_tags()` and `repo.ancestry()` list them"
            )
        return Branch(tag, None)

    def _point(self, branch: str | None, tag: str | None, snapshot_id: str | None) -> Branch:
        """The branch, tag or snapshot, which of them is given, as a branch; else `main`."""
        if sum(x is not None for x in (branch, tag, snapshot_id)) > 1:
            raise InvalidArgumentError("give one of branch, tag and snapshot_id")
        roots = self._context.roots
        root = roots.read().root
        if snapshot_id is not None:
            ref = snapshot_ref(self._context, snapshot_id)
            return Branch(ref, None, floor=floor_below(self._context, root, ref))
        if tag is not None:
            ref = known_ref(roots.with_tag(root, tag).tags, tag, "tag")
            return Branch(ref, None, floor=floor_below(self._context, root, ref))
        name = DEFAULT_BRANCH if branch is None else branch
        return known_ref(roots.with_branch(root, name).branches, name, "branch")

    # --- branches and tags -------------------------------------------------------------------

    def list_branches(self) -> dict[str, str]:
        """Snapshot id of every branch's head, by name."""
        branches = self._whole().branches
        return {name: snapshot_id_of(b.head.key) for name, b in sorted(branches.items())}

    def list_tags(self) -> dict[str, str]:
        """Snapshot id of every tag, by name."""
        tags = self._whole().tags
        return {name: snapshot_id_of(ref.key) for name, ref in sorted(tags.items())}

    def create_branch(self, name: str, snapshot_id: str | None = None) -> None:
        """Make a branch at a snapshot of the history; at `main`'s head if none is given.

        Raises
        ------
        AlreadyExistsError
            If there is a branch of that name.
        SnapshotExpiredError
            If the snapshot is not in the history of any branch or tag.
        """
        check_ref_name(name)

        def change(root: Root) -> Root:
            if name in root.branches:
                raise AlreadyExistsError(
                    f"branch {name!r} exists; reset_branch moves it, or choose another name"
                )
            return replace(root, branches={**root.branches, name: self._at(root, snapshot_id)})

        self._update(change, "create branch", name, snapshot_id)

    def reset_branch(
        self, name: str, snapshot_id: str, *, force: bool = False, expected: str | None = None
    ) -> None:
        """Move a branch to a snapshot of the history; what it leaves behind stays readable.

        Parameters
        ----------
        name : str
            The branch.
        snapshot_id : str
            Where it is to be.
        force : bool
            Drop commits of the branch: those that the snapshot does not come after.
        expected : str, optional
            Id of the snapshot that the branch is at now; commits of the branch up to there may be
            dropped, and nothing happens if it is elsewhere by now.

        Raises
        ------
        NotFoundError
            If there is no such branch.
        SnapshotExpiredError
            If the snapshot is not in the history of any branch or tag.
        InvalidArgumentError
            If commits of the branch would be dropped, and neither `force` nor `expected` is given.
        ConflictError
            If the branch is not where it is expected to be.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.Repository.create("memory://reset-example")
        >>> before = repo.list_branches()["main"]
        >>> with repo.transaction(message="a mistake") as store:
        ...     _ = zarr.create_group(store, path="air")
        >>> repo.reset_branch("main", before, expected=repo.list_branches()["main"])
        """
        if expected is not None:
            snapshot_key(expected)  # an id at all

        def change(root: Root) -> Root:
            old = known_ref(root.branches, name, "branch")
            moved = replace(self._at(root, snapshot_id), epoch=old.epoch, index=old.index)
            at = snapshot_id_of(old.head.key)
            if expected is not None and at != expected:
                raise ConflictError(
                    f"branch {name!r} is at {at} and no more at {expected}; look at what came "
                    "meanwhile, then reset it from there"
                )
            if not force and expected is None and not self._comes_after(moved, old):
                raise InvalidArgumentError(
                    f"branch {name!r} is at {at}, which {snapshot_id} does not come after: its "
                    f"commits since would be dropped. If so it shall be, say expected={at!r}, or "
                    "force=True whatever else has been committed meanwhile"
                )
            # What is left behind can be of any age, so the next collection looks at everything.
            return replace(root, branches={**root.branches, name: moved}, swept=0)

        self._update(change, "reset branch", name, snapshot_id)

    def _comes_after(self, new: Branch, old: Branch) -> bool:
        """Whether the head of `old` is in the history of that of `new`."""
        lowest = self._context.objects.load(old.head, Snapshot).sequence
        for ref, snapshot in ancestors(self._context, new.head, new.floor):
            if ref.key == old.head.key:
                return True
            if snapshot.sequence < lowest:  # no snapshot has a higher one than those after it
                break
        return False

    def delete_branch(self, name: str) -> None:
        """Delete a branch; `main` cannot be.

        Raises
        ------
        NotFoundError
            If there is no such branch.
        """
        if name == DEFAULT_BRANCH:
            raise InvalidArgumentError("branch 'main' cannot be deleted; reset_branch moves it")

        def change(root: Root) -> Root:
            known_ref(root.branches, name, "branch")
            left = {other: branch for other, branch in root.branches.items() if other != name}
            return replace(root, branches=left, swept=0)

        self._update(change, "delete branch", name, None)

    def create_tag(self, name: str, snapshot_id: str | None = None) -> None:
        """Name a snapshot of the history for good; `main`'s head if none is given.

        Raises
        ------
        AlreadyExistsError
            If there is, or ever was, a tag of that name.
        SnapshotExpiredError
            If the snapshot is not in the history of any branch or tag.
        """
        check_ref_name(name)

        def change(root: Root) -> Root:
            if name in root.tags:
                raise AlreadyExistsError(f"tag {name!r} exists; tags do not move")
            if name in root.deleted_tags:
                raise AlreadyExistsError(
                    f"a tag {name!r} was deleted; its name is never used again, so that it cannot "
                    "come to mean something else"
                )
            head = self._at(root, snapshot_id).head.bare()
            return replace(root, tags={**root.tags, name: head})

        self._update(change, "create tag", name, snapshot_id)

    def delete_tag(self, name: str) -> None:
        """Delete a tag; its name is never used again.

        Raises
        ------
        NotFoundError
            If there is no such tag.
        """

        def change(root: Root) -> Root:
            known_ref(root.tags, name, "tag")
            left = {other: ref for other, ref in root.tags.items() if other != name}
            deleted = (*root.deleted_tags, name)
            return replace(root, tags=left, deleted_tags=deleted, swept=0)

        self._update(change, "delete tag", name, None)

    def _update(
        self,
        change: Callable[[Root], Root],
        operation: str,
        name: str,
        snapshot_id: str | None,
    ) -> None:
        self._context.roots.update(change, operation, name, snapshot_id or "", REF_ATTEMPTS)

    def _whole(self) -> Root:
        """The root as it is now, with all its refs."""
        return self._context.roots.whole(self._context.roots.read().root)

    def _at(self, root: Root, snapshot_id: str | None) -> Branch:
        """A branch at that snapshot, which must be in history as of this root."""
        main = root.branches[DEFAULT_BRANCH]
        if snapshot_id is None:
            return replace(main, epoch=0)
        ref, snapshot, floor = locate(self._context, root, snapshot_id)
        # What an index says is true of any branch; what it does not know is not used.
        return Branch(
            ref.bare(), snapshot.base, floor=floor, ahead=snapshot.ahead, index=main.index
        )


def known_ref[T](refs: Mapping[str, T], name: str, what: str) -> T:
    """The branch or tag of that name.

    Raises
    ------
    NotFoundError
        If there is none; it says which there are.
    """
    if name not in refs:
        listed = ", ".join(sorted(refs)[:10]) or "none"
        raise NotFoundError(f"there is no {what} {name!r}; there are: {listed}")
    return refs[name]


def _difference(
    context: Context, before: SnapshotView, after: SnapshotView, deltas: Sequence[Delta]
) -> Diff:
    """What these deltas, all after `before` up to `after`, have changed."""
    old, new = before.nodes, after.nodes
    same = {p: p for p in old.keys() & new.keys() if old[p].node_id == new[p].node_id}
    moved = moved_paths(old, new)
    same |= moved
    return Diff(
        _absolute(new.keys() - set(same.values())),
        _absolute(to for p, to in same.items() if old[p].documents != new[to].documents),
        _absolute(old.keys() - same.keys()),
        _changed_chunks(context, after, deltas),
        dict(zip(map(_slashed, moved), map(_slashed, moved.values()), strict=True)),
        _truncated(before, after, deltas),
    )


def _truncated(
    before: SnapshotView, after: SnapshotView, deltas: Sequence[Delta]
) -> dict[str, Coords]:
    """By path, to what shape of its grid an array was cut that was there before."""
    cuts: dict[bytes, Coords | None] = {}
    for delta in deltas:
        for node_id, shape in delta.truncated.items():
            cuts[node_id] = narrower(cuts.get(node_id), shape)
    there = ((before.by_id.get(i), after.by_id.get(i), shape) for i, shape in cuts.items())
    return {
        _slashed(new.path): shape
        for old, new, shape in there
        if old is not None and new is not None and shape is not None
    }


def _changed_chunks(
    context: Context, after: SnapshotView, deltas: Sequence[Delta]
) -> dict[str, IndexArray]:
    paths = {node.node_id: path for path, node in after.nodes.items()}
    found: dict[str, list[IndexArray]] = {}
    for delta in deltas:
        for node_id, tables in footprint_of(context, after, delta).tables.items():
            if node_id in paths:
                coords = [table.coords() for table in tables]
                found.setdefault(paths[node_id], []).extend(coords)
    return {
        _slashed(path): np.unique(np.concatenate(coords), axis=0)
        for path, coords in sorted(found.items())
    }


def _absolute(paths: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(map(_slashed, paths)))


def _slashed(path: str) -> str:
    return path if path.startswith("/") else f"/{path}"
