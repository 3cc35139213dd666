"""What a collection may delete, decided from names alone.

A session's objects carry its start, the root version it began at. Once the fence stands at F, a
session that began before it and holds no lease cannot commit any more, so of its objects only
those are alive that the root reaches. Invariants: nothing of a session that began at the fence or
later, or that holds a lease, is ever dead; the search for the dead never begins beyond an object
that a search has passed over because of a lease.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.root import Lease, LogEntry, Root
from zarr_manifests.ids import lineage_of, session_of, session_start

__all__ = [
    "ARCHIVES_KEPT",
    "FULL_EVERY",
    "choose_fence",
    "first_archive_kept",
    "is_dead",
    "leased_lineages",
    "nothing_left_since",
    "search_start",
    "swept_after",
    "unended_since",
]

ARCHIVES_KEPT = 100
"""How many of the newest versions of the root keep their archive, at least."""
FULL_EVERY = 10
"""Every so many collections look at all there is."""
_LEAVING = frozenset(
    {"delete branch", "reset branch", "delete tag", "restore", "expire snapshots", "recover"}
)


def choose_fence(
    times: Iterable[tuple[int, int]], next_version: int, now_ms: int, grace_ms: int, fence: int
) -> int:
    """The new fence: sessions that began longer ago than the grace are behind it.

    Parameters
    ----------
    times : iterable of (version, time)
        Versions of the root and when they were written, newest first.
    next_version : int
        The version that is about to be made.
    now_ms, grace_ms : int
        Now, and how long sessions are let go on.
    fence : int
        Where it stands; it never goes back.
    """
    if grace_ms <= 0:
        return next_version
    old_enough = (version for version, at_ms in times if at_ms <= now_ms - grace_ms)
    return max(fence, next(old_enough, 0))


def leased_lineages(leases: Iterable[Lease]) -> frozenset[str]:
    """The sessions that hold leases, with all their copies."""
    return frozenset(lineage_of(lease.session) for lease in leases)


def is_dead(key: str, marked: Container[str], fence: int, leased: Container[str]) -> bool:
    """Whether the object that was listed can be deleted."""
    try:
        session = session_of(key)
    except InvalidArgumentError:
        return False  # nothing of this package's
    return (
        session_start(session) < fence and lineage_of(session) not in leased and key not in marked
    )


def nothing_left_since(root: Root, version: int) -> bool:
    """Whether the log says that no operation since that version has left snapshots behind."""
    since = [entry for entry in root.log if entry.version > version]
    whole = not since or len(since) < len(root.log) or since[0].version == version + 1
    return whole and not any(entry.operation in _LEAVING for entry in since)


def search_start(swept: int, collections: int) -> int:
    """From which start of sessions on to list objects."""
    return 0 if (collections + 1) % FULL_EVERY == 0 else swept


def swept_after(fence: int, leases: Iterable[Lease]) -> int:
    """Below which start nothing unreachable is left, after a search up to the fence."""
    return min([fence, *(session_start(lease.session) for lease in leases)])


def first_archive_kept(version: int, fence: int) -> int:
    """The oldest version of the root whose archive is kept, as of a collection with that version.

    Archives since the fence stay too: the next fence is chosen among them.
    """
    return max(0, min(version - ARCHIVES_KEPT + 1, fence))


def unended_since(version: int, newer: Iterable[Root], unreadable: Iterable[int]) -> int | None:
    """The version at which a collection began that may still delete what an older root reaches.

    Also a version of which it is not known what it did. None if all collections since have ended.

    Parameters
    ----------
    version : int
        The older root's.
    newer : iterable of Root
        What can be read of the roots after it.
    unreadable : iterable of int
        Versions after it whose roots cannot be read.
    """
    entries: dict[int, LogEntry] = {}
    known = version
    for root in sorted(newer, key=lambda root: root.version):
        since = [entry for entry in root.log if entry.version > known]
        if since and len(since) == len(root.log) and since[0].version > known + 1:
            return known + 1  # the log has rolled past it
        entries.update((entry.version, entry) for entry in since)
        known = max(known, root.version)
    begun = None
    for at, entry in sorted(entries.items()):
        if entry.operation == "collect garbage":
            if begun is not None:
                return begun  # the next one has ended it, but for what it had sent
            begun = at
        elif entry.operation == "end collection":
            begun = None
    return begun or min((at for at in unreadable if at > known), default=None)
