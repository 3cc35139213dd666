"""Branches and tags: listed, made, moved and deleted; and the snapshot that a caller names.

Every change is one swap of the root, tried again when another writer came first. Invariants: a
branch or tag is made or moved only to a snapshot that, as of the root that is replaced, is in
history, or was left behind and is not collected (`ancestry`); a session begins at a root that
was read after the session was asked for. The one exception is the first session or listing of a
repository that was just opened: it may begin at the root that `open` has read, if this process has
seen no newer one.

Finding the snapshot that a version names: a branch, a tag, an id or a short id, in this order
----------------------------------------------------------------------------------------------

A full name, such as `refs/tags/v1`, is of one kind only. Another name that is both a branch and a
tag, and a short id that fits several snapshots, is an error that lists them all. A short id names
snapshots in history only; what was left behind (`ancestry`) is named by its whole id.

The *marks* of a snapshot are the last versions that each application has committed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import chain, islice
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from zarr_manifests.engine.ancestry import (
    ancestors,
    entries,
    find_kept,
    floor_below,
    runs,
    snapshot_ref,
    starts,
)
from zarr_manifests.engine.roots import RootAt, claim_branch, opened
from zarr_manifests.engine.view import Context, ReadContext, SnapshotView
from zarr_manifests.errors import (
    AlreadyExistsError,
    ConflictError,
    HistoryExpiredError,
    InvalidArgumentError,
    ManifestsError,
    NotFoundError,
    SnapshotExpiredError,
    UnsupportedStorageError,
)
from zarr_manifests.format.root import Branch, Root, check_ref_name, known_ref, without
from zarr_manifests.format.snapshot import HistoryEntry, MarksPage, Snapshot
from zarr_manifests.ids import is_snapshot_id, snapshot_id_of, snapshot_key
from zarr_manifests.planning.conflict import NO_MARK
from zarr_manifests.texts import count_text, near_names
from zarr_manifests.versions import HEAD, HEADS, MAIN, TAGS, VersionName, is_short_id, named_by

_MOST_WALKED: Final = 64
"""Snapshots searched for the one that committed a version; what is older is not named."""


def paged_marks(context: ReadContext, snapshot: Snapshot) -> MarksPage:
    """The page with the marks that the snapshot has no room for; empty if it has no page."""
    if snapshot.marks_page is None:
        return MarksPage({})
    return context.objects.load(snapshot.marks_page, MarksPage)


def marks_of(context: ReadContext, snapshot: Snapshot) -> dict[str, int]:
    """All marks of the snapshot."""
    return {**paged_marks(context, snapshot).marks, **snapshot.marks}


def mark_of(context: ReadContext, snapshot: Snapshot, app: str) -> int:
    """The application's mark in the snapshot, or `NO_MARK`."""
    own = snapshot.marks.get(app)
    return paged_marks(context, snapshot).marks.get(app, NO_MARK) if own is None else own


def snapshot_of(context: ReadContext, tip: Branch, app: str, version: int) -> str | None:
    """Id of the snapshot that committed the version; None if it is not at hand.

    It may have expired, been amended away, or lie far back.
    """
    found = None
    try:
        for ref, snapshot in islice(ancestors(context, tip.head, tip.floor), _MOST_WALKED):
            mark = mark_of(context, snapshot, app)
            if mark < version:
                return found
            found = snapshot_id_of(ref.key) if mark == version else None
    except ManifestsError:
        return None  # the id is a help, and what is asked is answered without it
    return None


# --- versions ----------------------------------------------------------------------------------

_LISTED: Final = 10


class Found(Struct, frozen=True):
    """A snapshot that was found, as the head of a branch.

    Parameters
    ----------
    at : Branch
        The snapshot: a branch's own head, or that of an unnamed branch.
    branch : str, optional
        The branch that was named.
    moves : bool
        Whether it is the head of that branch, so that a reader can follow it.
    """

    at: Branch
    branch: str | None = None
    moves: bool = False

    @property
    def snapshot_id(self) -> str:
        """The snapshot's id."""
        return snapshot_id_of(self.at.head.key)


def found_by_name(context: Context, root: Root, name: str) -> Found:
    """The snapshot with that name, as of this root.

    Raises
    ------
    InvalidArgumentError
        If the name is ambiguous.
    NotFoundError
        If nothing has that name; the message lists what is near.
    SnapshotExpiredError
        If there is no snapshot of that id.
    """
    if is_snapshot_id(name):  # no branch or tag is called so, unless it was made long ago
        return Found(Branch(snapshot_ref(context, name), None))
    if name.startswith(TAGS):
        return Found(Branch(context.roots.tag(root, name.removeprefix(TAGS)), None))
    if name == MAIN or name.startswith(HEADS):
        name = name.removeprefix(HEADS)
        return Found(context.roots.branch(root, name), name, moves=True)
    root = context.roots.with_ref(root, name)
    branch, tag = root.branches.get(name), root.tags.get(name)
    if branch is not None and tag is not None:
        raise InvalidArgumentError(
            f"{name!r} is ambiguous: it is branch {name!r} at {snapshot_id_of(branch.head.key)}, "
            f"and tag {name!r} at {snapshot_id_of(tag.key)}; give '{HEADS}{name}', "
            f"'{TAGS}{name}' or the id"
        )
    if branch is not None:
        return Found(branch, name, moves=True)
    if tag is not None:
        return Found(Branch(tag, None))
    if is_short_id(name):
        return _by_short_id(context, root, name)
    raise _unknown(context, root, name)


def before(context: Context, root: Root, found: Found, shown: str, version: VersionName) -> Found:
    """The snapshot of the branch at the version's time, or so many before; `shown` is for errors.

    Raises
    ------
    InvalidArgumentError
        If there is a time, and what was found is not the head of a branch.
    NotFoundError
        If the history does not go back so far.
    """
    if version.at_ms is not None:
        if not found.moves:
            raise InvalidArgumentError(f"{shown!r}: only a branch has a time; a tag or id is fixed")
        found = _until(context, found, shown, version.at_ms)
    back = version.back
    if not back:
        return found
    head, floor = found.at.head, found.at.floor
    if found.branch is None:
        floor = floor_below(context, root, head)
    seen, entry = 0, None
    for seen, entry in enumerate(entries(context, head, floor, back + 1)):
        if seen == back:
            return Found(Branch(entry.pointer.ref, None, floor=floor), found.branch)
    before_it = count_text(seen, "snapshot")
    raise NotFoundError(f"{shown!r}: the history has only {before_it} before it{_cut_off(entry)}")


def _until(context: Context, found: Found, shown: str, until_ms: int) -> Found:
    entry = None
    for entry in entries(context, found.at.head, found.at.floor):
        if entry.written_ms <= until_ms:
            return Found(Branch(entry.pointer.ref, None, floor=found.at.floor), found.branch)
    then = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=until_ms)
    raise NotFoundError(
        f"{shown!r}: the branch has no snapshot from {then.isoformat()} or "
        f"before{_cut_off(entry)}; `repo.ancestry()` and `zarr-manifests log` list those it has"
    )


def _cut_off(last: HistoryEntry | None) -> str:
    """What to add if history ends there, but not at the first snapshot."""
    ends_early = last is not None and last.parent is not None
    return ", because older ones have expired" if ends_early else ""


def _by_short_id(context: Context, root: Root, text: str) -> Found:
    found = sorted(name for name in _known_ids(context, root) if named_by(text, name))
    if len(found) > 1:
        listed = ", ".join(found[:_LISTED]) + (", ..." if len(found) > _LISTED else "")
        raise InvalidArgumentError(
            f"{text!r} is ambiguous: the ids of {len(found)} snapshots begin so, {listed}; give "
            "more digits"
        )
    if not found:
        raise _unknown(context, root, text)
    return Found(Branch(snapshot_ref(context, found[0]), None))


def _known_ids(context: Context, root: Root) -> Iterator[str]:
    """The ids of all snapshots in history, each once."""
    told: set[str] = set()
    whole: set[str] = set()
    for start, floor, _ in starts(context, root):
        for entry in entries(context, start, floor, sys.maxsize):
            name = entry.snapshot_id
            if name in whole:
                break  # an earlier walk has gone on from here to the end
            if name not in told:
                yield name
            told.add(name)
            if floor is None:
                whole.add(name)


def _unknown(context: Context, root: Root, name: str) -> NotFoundError:
    root = context.roots.whole(root)
    kinds = dict.fromkeys(root.tags, "tag") | dict.fromkeys(root.branches, "branch")
    near = near_names(name, kinds, 3, cutoff=0.5)
    shown = [f"{kinds[n]} {n!r}" for n in near or sorted(kinds)[:_LISTED]]
    what = ("near it" if near else "there") + (" is" if len(shown) == 1 else " are")
    return NotFoundError(
        f"there is no branch {name[:80]!r} in {context.storage.url}, nor a tag or snapshot of that "
        f"name; {what} {', '.join(shown)}. `repo.list_branches()`, "
        "`repo.list_tags()` and `repo.ancestry()` list them"
    )


# --- branches and tags --------------------------------------------------------------------------


DEFAULT_BRANCH: Final = "main"
REF_ATTEMPTS: Final = 100
_FRESH_S: Final = 0.1


class BranchMovedError(ConflictError):
    """The branch has moved since a merge was planned; the merge is planned again."""


class Refs:
    """Lists and changes the branches and tags of a repository, and finds named snapshots.

    Parameters
    ----------
    context : Context
        The repository.
    opened_at : RootAt, optional
        The root that the repository was opened with, just now.
    """

    def __init__(self, context: Context, opened_at: RootAt | None = None) -> None:
        self.context = context
        now_s = context.runtime.monotonic_s()
        self._opened_at = None if opened_at is None else (now_s, opened_at)

    # --- finding snapshots -------------------------------------------------------------------

    def view(self, version: str | None, *, first: bool = False) -> SnapshotView:
        """The version, opened; with `first`, the root that `open` has read may be used.

        Raises
        ------
        NotFoundError
            If there is no such branch or tag, or no snapshot as old as that.
        SnapshotExpiredError
            If there is no snapshot of that id.
        """
        return self.open(version, first=first)[1]

    def open(
        self, version: str | None, *, first: bool = False, follow: bool = False
    ) -> tuple[Found, SnapshotView]:
        """Like `view`, with how the snapshot was found; to `follow` it, it must be a head.

        Raises
        ------
        InvalidArgumentError
            If it is to be followed, and is not the head of a branch.
        """

        def attempt() -> tuple[Found, SnapshotView]:
            found = self.resolve(version, first=first)
            if follow and not found.moves:
                raise InvalidArgumentError("follow goes with a branch only; nothing else moves")
            return found, self.context.open_branch(found.at)

        return opened(attempt)

    def resolve(self, version: str | None, *, first: bool = False) -> Found:
        """The snapshot that the caller names; by default the head of `main`.

        Raises
        ------
        InvalidArgumentError
            If the name is ambiguous.
        NotFoundError
            If nothing has that name.
        SnapshotExpiredError
            If there is no snapshot of that id.
        """
        if version is not None and is_snapshot_id(VersionName.checked(version)):
            return Found(Branch(snapshot_ref(self.context, version), None))
        return self._in(self._first_root() if first else self._root(), version)

    def begin(self, branch: str, *, claim: bool = False) -> tuple[int, SnapshotView]:
        """The head of a branch to write on, and the version of the root that names it.

        With `claim`, this writer claims the branch.

        Raises
        ------
        NotFoundError
            If there is no such branch.
        UnsupportedStorageError
            If the storage cannot compare-and-swap.
        """
        roots, storage = self.context.roots, self.context.storage
        if not storage.capabilities.cas:
            raise UnsupportedStorageError(
                f"{storage.url} cannot compare-and-swap; the repository is read-only there"
            )

        def head_in(at: RootAt) -> tuple[int, SnapshotView]:
            return at.root.version, self.context.open_branch(roots.branch(at.root, branch))

        return opened(lambda: head_in(claim_branch(roots, branch) if claim else roots.read()))

    def marks(self, branch: str) -> dict[str, int]:
        """All marks of the branch's head, by application.

        Raises
        ------
        NotFoundError
            If there is no such branch.
        """

        def at_head() -> dict[str, int]:
            head = self.resolve(HEADS + branch).at.head
            return marks_of(self.context, self.context.objects.load(head, Snapshot))

        return dict(sorted(opened(at_head).items()))

    def named(self, *names: str) -> list[Branch]:
        """The snapshot that each version names, as the head of a branch; see `resolve`."""
        versions = [VersionName.checked(name) for name in names]
        root = None if all(map(is_snapshot_id, versions)) else self._root()
        return [(self.resolve(v) if root is None else self._in(root, v)).at for v in versions]

    def range(self, start: str | None, end: str | None) -> tuple[str | None, Branch]:
        """The id of the snapshot named `start`, and the one named `end`, or else `main`'s head.

        Raises
        ------
        HistoryExpiredError
            If there is no snapshot of the id `end`.
        NotFoundError
            If a name is no snapshot, branch or tag.
        """
        if start is not None:
            VersionName.checked(start)
        names = [] if start is None or is_snapshot_id(start) else [start]
        try:
            last, *found = self.named(DEFAULT_BRANCH if end is None else end, *names)
        except SnapshotExpiredError as error:
            raise HistoryExpiredError(str(error)) from error
        return (snapshot_id_of(found[0].head.key) if found else start), last

    def history(self, version: str | None, limit: int | None) -> Iterator[HistoryEntry]:
        """The snapshot and its ancestors that are still in history, newest first.

        At most `limit` of them; all if it is None.
        """
        most = _check_limit(limit)
        context, root = self.context, self._first_root()
        found_at = self._in(root, version)
        start, floor = found_at.at, found_at.at.floor
        if found_at.branch is None:
            floor = floor_below(context, root, start.head)
        found = runs(context, start.head, floor, most)
        return islice(chain.from_iterable(_complete(context, run) for run in found), most)

    def fixed(self, version: str) -> str:
        """The id of the snapshot that a version names now; a whole id is not looked up."""
        version = VersionName.checked(version)
        if is_snapshot_id(version):
            return version
        return opened(lambda: self.resolve(version).snapshot_id)

    def _in(self, root: Root, version: str | None) -> Found:
        """The snapshot that the caller names, as of this root."""
        shown = DEFAULT_BRANCH if version is None else version
        parsed = VersionName.parse(shown)
        found = found_by_name(self.context, root, parsed.name)
        return before(self.context, root, found, shown, parsed)

    def _root(self) -> Root:
        return self.context.roots.read().root

    def _first_root(self) -> Root:
        """The current root; right after `open`, the one that `open` has read."""
        opened_at, self._opened_at = self._opened_at, None
        if opened_at is not None:
            read_s, at = opened_at
            recent = 0 <= self.context.runtime.monotonic_s() - read_s <= _FRESH_S
            if recent and self.context.roots.undisturbed(at):
                return at.root
        return self._root()

    # --- branches ----------------------------------------------------------------------------

    def branches(self) -> dict[str, str]:
        """Snapshot id of every branch's head, by name."""
        branches = self.context.roots.whole(self._root()).branches
        return {name: snapshot_id_of(b.head.key) for name, b in sorted(branches.items())}

    def create_branch(self, name: str, version: str | None) -> None:
        """Create a branch at a snapshot of the history, by default at the head of `main`."""
        _check_new_name(name)

        def change(root: Root) -> Root:
            if name in root.branches:
                raise AlreadyExistsError(
                    f"branch {name!r} exists; reset_branch moves it, or choose another name"
                )
            if name in root.tags:
                raise AlreadyExistsError(
                    f"tag {name!r} exists, and its name would become ambiguous; choose another name"
                )
            return replace(root, branches={**root.branches, name: self._at(root, due)})

        due = None if version is None else self.fixed(version)
        self.context.roots.update(change, "create branch", name, due or "", REF_ATTEMPTS)

    def reset_branch(self, name: str, version: str, *, force: bool, expected: str | None) -> None:
        """Move a branch to a snapshot of the history; dropping commits must be allowed."""
        if expected is not None:
            snapshot_key(expected)  # raises unless it is an id
        snapshot_id = self.fixed(version)

        def change(root: Root) -> Root:
            old = known_ref(root.branches, name, "branch")
            moved = replace(self._at(root, snapshot_id), epoch=old.epoch, index=old.index)
            at = snapshot_id_of(old.head.key)
            if expected is not None and at != expected:
                raise ConflictError(
                    f"branch {name!r} is at {at}, not at {expected} any more; look at the commits "
                    "since, then reset it from there"
                )
            if not force and expected is None and not self._comes_after(moved, old):
                raise InvalidArgumentError(
                    f"branch {name!r} is at {at}, and {snapshot_id} is not a descendant of it: the "
                    f"reset would drop commits. To drop them, pass expected={at!r}, or force=True "
                    "to drop all that others commit meanwhile, too"
                )
            return replace(root, branches={**root.branches, name: moved})

        what = "reset branch", name, snapshot_id, REF_ATTEMPTS
        self.context.roots.update(change, *what, leaves=True)

    def fast_forward(self, name: str, snapshot_id: str, *, expected: str) -> None:
        """Move a branch to a snapshot that comes after its head, which must be the expected one."""

        def change(root: Root) -> Root:
            old = known_ref(root.branches, name, "branch")
            if snapshot_id_of(old.head.key) != expected:
                raise BranchMovedError(f"branch {name!r} has moved")
            moved = replace(self._at(root, snapshot_id), epoch=old.epoch, index=old.index)
            return replace(root, branches={**root.branches, name: moved})

        self.context.roots.update(change, "fast-forward branch", name, snapshot_id, REF_ATTEMPTS)

    def _comes_after(self, new: Branch, old: Branch) -> bool:
        """Whether the head of `old` is in the history of the head of `new`."""
        lowest = self.context.objects.load(old.head, Snapshot).sequence
        for ref, snapshot in ancestors(self.context, new.head, new.floor):
            if ref.key == old.head.key:
                return True
            if snapshot.sequence < lowest:  # sequences only grow along the history
                break
        return False

    def delete_branch(self, name: str) -> None:
        """Delete a branch; `main` cannot be."""
        if name == DEFAULT_BRANCH:
            raise InvalidArgumentError("branch 'main' cannot be deleted; reset_branch moves it")

        def change(root: Root) -> Root:
            known_ref(root.branches, name, "branch")
            return without(root, HEADS + name)

        what = "delete branch", name, "", REF_ATTEMPTS
        self.context.roots.update(change, *what, leaves=True)

    # --- tags --------------------------------------------------------------------------------

    def tags(self) -> dict[str, str]:
        """Snapshot id of every tag, by name."""
        tags = self.context.roots.whole(self._root()).tags
        return {name: snapshot_id_of(ref.key) for name, ref in sorted(tags.items())}

    def create_tag(self, name: str, version: str | None) -> None:
        """Create a tag at a snapshot of the history, by default at the head of `main`."""
        _check_new_name(name)

        def change(root: Root) -> Root:
            if name in root.tags:
                raise AlreadyExistsError(
                    f"tag {name!r} exists; tags do not move: choose another name"
                )
            if name in root.branches:
                raise AlreadyExistsError(
                    f"branch {name!r} exists, and its name would become ambiguous; choose another"
                )
            if TAGS + name in root.deleted:
                raise AlreadyExistsError(
                    f"a tag {name!r} was deleted; its name is never used again, so that it cannot "
                    "come to mean something else"
                )
            head = self._at(root, due).head.bare()
            return replace(root, tags={**root.tags, name: head})

        due = None if version is None else self.fixed(version)
        self.context.roots.update(change, "create tag", name, due or "", REF_ATTEMPTS)

    def delete_tag(self, name: str) -> None:
        """Delete a tag; its name is never used again."""

        def change(root: Root) -> Root:
            known_ref(root.tags, name, "tag")
            return without(root, TAGS + name)

        what = "delete tag", name, "", REF_ATTEMPTS
        self.context.roots.update(change, *what, leaves=True)

    # --- changing the root -------------------------------------------------------------------

    def _at(self, root: Root, snapshot_id: str | None) -> Branch:
        """A new branch at that snapshot, which must be there as of this root, and stay there."""
        main = root.branches[DEFAULT_BRANCH]
        if snapshot_id is None:
            return replace(main, epoch=0)
        ref, snapshot, floor = find_kept(self.context, root, snapshot_id)
        # An index holds for any branch; leaves it does not know are not used.
        return Branch(
            ref.bare(), snapshot.base, floor=floor, ahead=snapshot.ahead, index=main.index
        )


def _complete(context: Context, run: Sequence[HistoryEntry]) -> list[HistoryEntry]:
    """The entries with messages that only the snapshots have, which are read in one round."""
    partly = {entry.pointer: entry.pointer.ref for entry in run if entry.message is None}
    loaded = context.objects.load_all([(ref, Snapshot) for ref in partly.values()])
    whole = {at: loaded[ref.key].entry(ref) for at, ref in partly.items()}
    return [whole.get(entry.pointer, entry) for entry in run]


def _check_limit(limit: object) -> int:
    if limit is None:
        return sys.maxsize
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
        raise InvalidArgumentError(f"limit must be a whole number of at least 0, not {limit!r}")
    return min(limit, sys.maxsize)


def _check_new_name(name: object) -> None:
    why = "it stands for the head of main" if check_ref_name(name) == HEAD else ""
    why = "it is the id of a snapshot" if is_snapshot_id(str(name)) else why
    why = "full names of branches and tags begin so" if str(name).startswith("refs/") else why
    if why:
        raise InvalidArgumentError(f"no branch or tag can be called {name!r}: {why}")
