"""Expiry: moving the floors of branches, in one swap.

Snapshots that leave history are listed in the root as pending until a collection has deleted their
objects. Nothing is deleted here. Snapshots that stay are read. Of those that leave, the entries of
history tell, unless a lease may keep one.

Invariant: leased snapshots stay in history. A branch's floor never rises above a leased snapshot.
The first expiry also ends the history of tags; it is put off while a leased snapshot is only in the
history of a tag.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace

from zarr_manifests.engine.history.ancestry import FOLLOWING, ages, entries, has_expired
from zarr_manifests.engine.root.create import keep_reserve
from zarr_manifests.engine.root.roots import opened
from zarr_manifests.engine.snapshot.context import Context, ReadContext
from zarr_manifests.engine.upkeep.collect import updated
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.root import Branch, Root
from zarr_manifests.ids import snapshot_id_of
from zarr_manifests.planning.upkeep.garbage import Aged, Retention, kept_count, with_pending
from zarr_manifests.progress import tell
from zarr_manifests.reports import ExpiryReport

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Cut:
    """A branch's history, split into what it keeps and what leaves it."""

    kept: list[Aged]
    gone: list[Aged]
    last_parent: BlobRef | None


def expire(context: Context, retention: Retention, *, dry_run: bool) -> ExpiryReport:
    """Cut the history of every branch as the retention says."""
    report = ExpiryReport()

    def change(root: Root) -> Root:
        nonlocal report
        whole = context.roots.whole(root)
        leased = frozenset(lease.snapshot for lease in whole.leases)
        cuts = {
            name: _cut(context, branch, retention, leased)
            for name, branch in whole.branches.items()
        }
        if any(cut.gone for cut in cuts.values()) and (
            held := _held_by_tags(context, whole, cuts, leased)
        ):
            _LOG.warning("nothing expires yet: %s is leased, and in the history of tags only", held)
            counts = {name: len(cut.kept) + len(cut.gone) for name, cut in cuts.items()}
            report = ExpiryReport({}, counts, dry_run)
            return root
        report = ExpiryReport(
            {n: tuple(a.snapshot_id for a in cut.gone) for n, cut in cuts.items() if cut.gone},
            {name: len(cut.kept) for name, cut in cuts.items()},
            dry_run,
        )
        return _applied(whole, cuts) if report.expired else root

    opened(lambda: change(context.roots.read().root))
    if report.expired and not dry_run:
        updated(context, change, "expire snapshots")
        keep_reserve(context.storage)  # for the collection that follows
    return report


def _cut(
    context: ReadContext,
    branch: Branch,
    retention: Retention,
    leased: frozenset[str],
) -> _Cut:
    line, parent = [], None
    for ref, snapshot in ages(context, branch.head, branch.floor):
        line.append(Aged(ref, snapshot_id_of(ref.key), snapshot.written_ms))
        parent = snapshot.parent
        # Without leases, nothing older is kept. What leaves is only listed, and entries tell it.
        if len(line) > 1 and not (leased or retention.keeps(len(line) - 1, snapshot.written_ms)):
            gone, parent = _listed(context, ref, branch.floor, len(line) - 1)
            return _Cut(line[:-1], gone, parent)
    count = kept_count(line, retention, leased)
    return _Cut(line[:count], line[count:], parent)


def _listed(
    context: ReadContext, start: BlobRef, floor: str | None, before: int
) -> tuple[list[Aged], BlobRef | None]:
    """The snapshot and those before it, newest first, and the parent of the oldest.

    `progress` was told of the ones before, and is told of these.
    """
    line, parent = list[Aged](), None
    for found in entries(context, start, floor):
        for at in reversed(range(len(found))):
            line.append(Aged(found.pointer(at).ref, found.ids[at], found.written_ms[at]))
        tell(FOLLOWING, before + len(line))
        parent = found.parent
    return line, None if parent is None else parent.ref


def _held_by_tags(
    context: ReadContext, whole: Root, cuts: Mapping[str, _Cut], leased: Set[str]
) -> str | None:
    """A leased snapshot that is only in a tag's history, which would be lost; None if none is."""
    if has_expired(whole):
        return None  # tags have already lost their history
    of_branches = {aged.snapshot_id for cut in cuts.values() for aged in (*cut.kept, *cut.gone)}
    of_tags = {snapshot_id_of(ref.key) for ref in whole.tags.values()}
    due = leased - of_branches - of_tags
    seen: set[str] = set()
    for ref in whole.tags.values() if due else ():
        for older, _ in ages(context, ref):
            if snapshot_id_of(older.key) in due:
                return snapshot_id_of(older.key)
            if older.key in seen:
                break  # the older ones were checked for another tag
            seen.add(older.key)
    return None


def _applied(whole: Root, cuts: Mapping[str, _Cut]) -> Root:
    """The root with floors where the branches were cut; every branch then has one."""
    branches = {
        name: replace(branch, floor=cuts[name].kept[-1].snapshot_id)
        for name, branch in whole.branches.items()
    }
    pending = with_pending(
        whole.pending,
        [cut.gone for cut in cuts.values()],
        [cut.last_parent for cut in cuts.values()],
    )
    # The first expiry also cuts the history of tags, which is not listed as pending.
    listed = pending is not None and whole.branches["main"].floor is not None
    listed = listed or (pending is not None and not whole.tags)
    return replace(
        whole,
        branches=branches,
        pending=whole.pending if pending is None else pending,
        swept=whole.swept if listed else 0,
    )
