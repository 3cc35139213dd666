"""What garbage collection may delete, decided from object names alone.

The name of an object contains its session's start: the root version at which the session began.
Once the fence is at F, a session that began before F and holds no lease cannot commit any more. So
of its objects only those are alive that the root reaches. Invariants: an object is never dead if
its session began at the fence or later, or holds a lease; a search never starts after an object
that an earlier search has skipped because of a lease.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.root import Lease, LogEntry, Root
from zarr_manifests.ids import lineage_of, session_of, session_start

ARCHIVES_KEPT = 100
"""At least this many of the newest root versions keep their archive."""
FULL_EVERY = 10
"""Every this many collections, one lists all objects."""
_LEAVING = (
    "amend",
    "delete branch",
    "delete tag",
    "expire snapshots",
    "recover",
    "reset branch",
    "restore",
)
"""How the operations begin that leave snapshots behind."""


def choose_fence(
    times: Iterable[tuple[int, int]], next_version: int, now_ms: int, grace_ms: int, fence: int
) -> int:
    """Return the new fence: sessions that began before the grace period are behind it.

    Parameters
    ----------
    times : iterable of (version, time)
        Versions of the root and the times they were written, newest first.
    next_version : int
        The version that the collection is about to write.
    now_ms, grace_ms : int
        The time now, and how long a session without a lease may run.
    fence : int
        The current fence; it never moves back.
    """
    if grace_ms <= 0:
        return next_version
    old_enough = (version for version, at_ms in times if at_ms <= now_ms - grace_ms)
    return max(fence, next(old_enough, 0))


def leased_lineages(leases: Iterable[Lease]) -> frozenset[str]:
    """The lineages of the sessions that hold leases; a lineage includes a session's copies."""
    return frozenset(lineage_of(lease.session) for lease in leases)


def is_dead(key: str, marked: Container[str], fence: int, leased: Container[str]) -> bool:
    """Whether a listed object may be deleted."""
    try:
        session = session_of(key)
    except InvalidArgumentError:
        return False  # not an object of this package
    return (
        session_start(session) < fence and lineage_of(session) not in leased and key not in marked
    )


def nothing_left_since(root: Root, version: int) -> bool:
    """Whether the log shows that no operation since that version can have orphaned snapshots."""
    since = [entry for entry in root.log if entry.version > version]
    whole = not since or len(since) < len(root.log) or since[0].version == version + 1
    return whole and not any(entry.operation.startswith(_LEAVING) for entry in since)


def search_start(swept: int, collections: int) -> int:
    """The session start from which on to list objects."""
    return 0 if (collections + 1) % FULL_EVERY == 0 else swept


def swept_after(fence: int, leases: Iterable[Lease]) -> int:
    """The start below which nothing unreachable is left after a search up to the fence."""
    return min([fence, *(session_start(lease.session) for lease in leases)])


def first_archive_kept(version: int, fence: int) -> int:
    """The oldest root version whose archive a collection at `version` keeps.

    Archives since the fence are kept too, since the next fence is chosen among them.
    """
    return max(0, min(version - ARCHIVES_KEPT + 1, fence))


def unended_since(version: int, newer: Iterable[Root], unreadable: Iterable[int]) -> int | None:
    """The start of a collection that may still delete objects of an older root; None if none may.

    A version that cannot be read counts as such a start.

    Parameters
    ----------
    version : int
        The older root's version.
    newer : iterable of Root
        The readable roots after it.
    unreadable : iterable of int
        The versions after it whose roots cannot be read.
    """
    entries: dict[int, LogEntry] = {}
    known = version
    for root in sorted(newer, key=lambda root: root.version):
        since = [entry for entry in root.log if entry.version > known]
        if since and len(since) == len(root.log) and since[0].version > known + 1:
            return known + 1  # the log no longer reaches back to it
        entries.update((entry.version, entry) for entry in since)
        known = max(known, root.version)
    begun = None
    for at, entry in sorted(entries.items()):
        if entry.operation == "collect garbage":
            if begun is not None:
                return begun  # superseded by the next, but its requests may still be in flight
            begun = at
        elif entry.operation == "end collection":
            begun = None
    return begun or min((at for at in unreadable if at > known), default=None)
