"""Finding the snapshot that a version names: a branch, a tag, an id or a short id, in this order.

A full name, such as `refs/tags/v1`, is of one kind only. Another name that is both a branch and a
tag, and a short id that fits several snapshots, is an error that lists them all. A short id is
first one of a snapshot in history; only if it is none of them, of one that was left behind
(`left_behind`).

The *marks* of a snapshot are the last versions that each application has committed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Final

from zarr_manifests.engine.history.ancestry import ancestors, entries, snapshot_ref, starts
from zarr_manifests.engine.snapshot.context import Context, ReadContext
from zarr_manifests.errors import InvalidArgumentError, ManifestsError, NotFoundError
from zarr_manifests.format.history_pages import HistoryEntries
from zarr_manifests.format.root import Branch, Root
from zarr_manifests.format.snapshot import MarksPage, Snapshot
from zarr_manifests.ids import is_snapshot_id, snapshot_id_of
from zarr_manifests.planning.conflict.admission import NO_MARK
from zarr_manifests.texts import count_text, near_names
from zarr_manifests.versions import HEADS, MAIN, TAGS, VersionName, is_short_id, named_by

_MOST_WALKED: Final = 64
"""Snapshots searched for the one that committed a version; what is older is not named."""


def paged_marks(context: ReadContext, snapshot: Snapshot) -> MarksPage:
    """The page with the marks that the snapshot has no room for; empty if it has no page."""
    if snapshot.marks_page is None:
        return MarksPage({})
    page: MarksPage = context.objects.load(snapshot.marks_page, MarksPage)
    return page


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


@dataclass(frozen=True, slots=True)
class Found:
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
        from zarr_manifests.engine.history.left_behind import floor_below  # rarely needed

        floor = floor_below(context, root, head)
    seen, part = 0, None
    for part in entries(context, head, floor, back + 1):
        if back < seen + len(part):
            at = Branch(part.pointer(len(part) - 1 - (back - seen)).ref, None, floor=floor)
            return Found(at, found.branch)
        seen += len(part)
    before_it = count_text(seen - 1, "snapshot")
    raise NotFoundError(f"{shown!r}: the history has only {before_it} before it{_cut_off(part)}")


def _until(context: Context, found: Found, shown: str, until_ms: int) -> Found:
    part = None
    for part in entries(context, found.at.head, found.at.floor):
        for at in reversed(range(len(part))):
            if part.written_ms[at] <= until_ms:
                there = Branch(part.pointer(at).ref, None, floor=found.at.floor)
                return Found(there, found.branch)
    then = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=until_ms)
    raise NotFoundError(
        f"{shown!r}: the branch has no snapshot from {then.isoformat()} or before{_cut_off(part)}; "
        "`repo.ancestry()` and `zarr-manifests log` list those it has"
    )


def _cut_off(last: HistoryEntries | None) -> str:
    """What to add if history ends there, but not at the first snapshot."""
    ends_early = last is not None and last.parent is not None
    return ", because older ones have expired" if ends_early else ""


def _by_short_id(context: Context, root: Root, text: str) -> Found:
    known = {*_known_ids(context, root)}
    found = sorted(name for name in known if named_by(text, name))
    if not found:
        from zarr_manifests.engine.history.left_behind import left_ids  # rarely needed

        found = sorted(name for name in left_ids(context, root, known) if named_by(text, name))
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
    for start, floor in starts(context, root):
        for part in entries(context, start, floor, sys.maxsize):
            yield from (name for name in part.ids if name not in told)
            told.update(part.ids)
            if whole.issuperset(part.ids):
                break  # an earlier walk has gone on from here to the end
            if floor is None:
                whole.update(part.ids)


def _unknown(context: Context, root: Root, name: str) -> NotFoundError:
    root = context.roots.around(root, name)  # not all names, of which there may be thousands
    kinds = dict.fromkeys(root.tags, "tag") | dict.fromkeys(root.branches, "branch")
    near = near_names(name, kinds, 3, cutoff=0.5)
    if is_short_id(name):
        recent = entries(context, root.branches["main"].head, root.branches["main"].floor)
        ids = [i for part in islice(recent, 1) for i in part.ids]
        near += near_names(name, [i.split("-")[1][: len(name)] for i in ids], 2)
    shown = [f"{kinds[n]} {n!r}" if n in kinds else f"the snapshot {n}" for n in near]
    if not shown:
        shown = [f"{kinds[n]} {n!r}" for n in sorted(kinds)[:_LISTED]]
    what = ("near it" if near else "there") + (" is" if len(shown) == 1 else " are")
    return NotFoundError(
        f"there is no branch {name[:80]!r} in {context.storage.url}, nor a tag or snapshot of that "
        f"name; {what} {', '.join(shown)}. `repo.list_branches()`, "
        "`repo.list_tags()` and `repo.ancestry()` list them"
    )
