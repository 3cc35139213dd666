"""Leases: claims in the root that keep a snapshot, and a writer's objects, from being collected.

A lease is valid while it is in the root. Its time only says when a collector may remove it, in the
swap that raises the fence. Invariants, each checked against the root that is replaced:

- A lease is taken or renewed only while its snapshot is in history.
- A session that began before the fence cannot take one: its objects may have been collected.
- A lease that is missing is not renewed; its holder has lost it for good.

The holder cannot watch the root all the time. It relies on the lease until the time of its last
renewal is up, by its own clocks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

from msgspec.structs import replace

from zarr_manifests.engine.ancestry import locate
from zarr_manifests.engine.heartbeat import HeldLease
from zarr_manifests.engine.view import Context
from zarr_manifests.errors import (
    CorruptObjectError,
    FencedError,
    InvalidArgumentError,
    LeaseError,
    ManifestsError,
    SnapshotExpiredError,
)
from zarr_manifests.format.root import Lease, Root, entries, with_entries, without
from zarr_manifests.ids import new_session_id, session_start

_ATTEMPTS = 100
_OWNER_CHARS = 200
_NONE: Mapping[HeldLease, Lease] = {}
_LOG = logging.getLogger(__name__)


@contextmanager
def hold(
    context: Context,
    snapshot_id: str,
    timeout: timedelta | float,
    owner: str,
    *,
    instead: bool = False,
) -> Iterator[HeldLease]:
    """A lease on a snapshot, given up at the end of the block unless it is kept.

    With `instead`, it takes the place of all leases of the same owner.

    Raises
    ------
    SnapshotExpiredError
        If the snapshot is not in history.
    LeaseError
        If no thread can be started to renew it; it was given up again.
    InvalidArgumentError
        If it shall take the place of others, and has no owner.
    """
    if instead and not owner:
        raise InvalidArgumentError("instead=True replaces the owner's other leases: pass an owner")
    held = take(context, snapshot_id, checked_timeout_ms(timeout), owner, instead=instead)
    try:
        yield held
    finally:
        if not held.kept:
            give_up(context, held)
        elif not held.is_inherited:  # a parent process goes on renewing its own
            try:
                _renew(context)  # for the last time
            finally:
                context.heart.drop(held)


def checked_timeout_ms(timeout: timedelta | float) -> int:
    """The timeout in milliseconds; a number counts seconds.

    Raises
    ------
    InvalidArgumentError
        If it is not between a hundredth of a second and a year.
    """
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise InvalidArgumentError(f"a lease's timeout is a timedelta or seconds, not {timeout!r}")
    if not 0.01 <= seconds <= 366 * 86_400:
        raise InvalidArgumentError(f"a lease lasts from 0.01 s to a year, not {seconds!r} s")
    return int(seconds * 1000)


def take(
    context: Context,
    snapshot_id: str,
    timeout_ms: int,
    owner: str,
    session: str | None = None,
    *,
    instead: bool = False,
) -> HeldLease:
    """Take a lease on a snapshot; with `session`, on that session's objects too.

    With `instead`, the leases of the same owner end in the same swap.

    Raises
    ------
    SnapshotExpiredError
        If the snapshot is not in history.
    FencedError
        If the session began before the fence.
    LeaseError
        If no thread can be started to renew it; it was given up again.
    """
    if not isinstance(owner, str):
        raise InvalidArgumentError(f"the owner of a lease is a text, not {owner!r}")
    runtime = context.runtime
    random = runtime.random_bytes(12)
    owner = owner[:_OWNER_CHARS].encode("utf-8", "replace").decode()
    lease_id, own = runtime.random_bytes(16), session or new_session_id(0, random)
    held = HeldLease(runtime, Lease(lease_id, own, snapshot_id, 0, owner), timeout_ms)

    def change(root: Root) -> Root:
        locate(context, root, snapshot_id)
        # A reader's session begins here: no fence is ever before the root it is taken in.
        due = replace(held.stored, session=session or new_session_id(root.version, random))
        _check_start(root, due.session)
        there = context.roots.leases(root) if instead else root.leases
        gone = [
            lease.name
            for lease in there
            if lease.lease_id == lease_id or (instead and lease.owner == owner)
        ]
        held.stored, held.until_s = _renewed(held, due)
        return with_entries(
            root, entries(root) | dict.fromkeys(gone) | {held.stored.name: held.stored}
        )

    context.roots.update_leases(change, "taking a lease", _ATTEMPTS)
    try:
        context.heart.add(held, runtime, partial(_beat, context))
    except RuntimeError as error:
        try:
            give_up(context, held)
        except ManifestsError:
            # Nobody renews it, so a collection removes it when its time is up.
            _LOG.warning("a lease that cannot be renewed was not given up", exc_info=True)
        raise LeaseError(
            f"no lease is held on snapshot {snapshot_id}: no thread can be started to renew it "
            f"({error}). Use fewer threads in this process, or allow it more"
        ) from error
    return held


def _renew(context: Context, moved: Mapping[HeldLease, Lease] = _NONE) -> None:
    """Renew all leases of this process in one swap; those that cannot be renewed are lost.

    With `moved`, only these, which become what it says. A lease whose history is damaged does not
    keep others from being renewed.
    """
    found: dict[HeldLease, tuple[Lease, float] | ManifestsError] = {}

    def change(root: Root) -> Root:
        found.clear()
        # By id: an earlier try, or another thread, may have moved it.
        there = {lease.lease_id: lease for lease in context.roots.leases(root)}
        changed: dict[str, Lease | None] = {}
        for held in due:
            now = there.get(held.stored.lease_id)
            try:
                if now is None:
                    raise _taken_away(held)
                lease = moved.get(held, now)
                if lease.session != now.session:
                    _check_start(root, lease.session)
                locate(context, root, lease.snapshot)
            except (SnapshotExpiredError, FencedError) as error:
                found[held] = error
            except CorruptObjectError:
                _LOG.warning("a lease on %s was not renewed", held.snapshot_id, exc_info=True)
            else:
                found[held] = renewed = _renewed(held, lease)
                changed |= {now.name: None, lease.name: renewed[0]}
        return with_entries(root, entries(root) | changed) if changed else root

    due = {held: held.stored for held in moved or context.heart.held()}
    if due:
        context.roots.update_leases(change, "renewing leases", _ATTEMPTS)
    for held, result in found.items():
        if moved or held.stored is due[held]:  # else it was moved meanwhile, and its move tells
            _note(context, held, result)


def _note(context: Context, held: HeldLease, result: tuple[Lease, float] | ManifestsError) -> None:
    """Note what has become of a lease in the root."""
    if isinstance(result, ManifestsError):
        held.error = result
        return
    lost, held.error = held.error is not None, None
    held.stored, held.until_s = result
    if lost:  # a renewal found it between a swap and its move, and may have stopped
        context.heart.add(held, context.runtime, partial(_beat, context))


def move(context: Context, held: HeldLease, session: str, snapshot_id: str) -> None:
    """Let a writer's lease go on with its next session and snapshot; a parent keeps its own."""
    if not held.is_inherited:
        _beat(context, {held: replace(held.stored, session=session, snapshot=snapshot_id)})


def give_up(context: Context, held: HeldLease) -> None:
    """Remove the lease from the root, if it is still there; a parent process's lease stays."""
    if held.is_inherited:
        return
    context.heart.drop(held)

    def change(root: Root) -> Root:
        gone = [e.name for e in context.roots.leases(root) if e.lease_id == held.stored.lease_id]
        return without(root, *gone) if gone else root

    context.roots.update_leases(change, "giving up a lease", _ATTEMPTS)


def _beat(context: Context, moved: Mapping[HeldLease, Lease] = _NONE) -> None:
    try:
        _renew(context, moved)
    except (ManifestsError, RuntimeError):
        # Retried after a third of the timeout. Until then `check` compares the time.
        _LOG.warning("renewing the leases of %s failed", context.storage.url, exc_info=True)


def _check_start(root: Root, session: str) -> None:
    if session_start(session) < root.fence:
        raise FencedError(
            f"the session began at version {session_start(session)}, before the repository's "
            f"fence {root.fence}: its objects may have been collected, and no lease can bring "
            "them back. Open a new session"
        )


def _taken_away(held: HeldLease) -> FencedError:
    return FencedError(
        f"the lease on snapshot {held.snapshot_id} was not renewed in time, and a collection took "
        "it away; open a new session with a longer timeout"
    )


def _renewed(held: HeldLease, lease: Lease) -> tuple[Lease, float]:
    """The lease with a new end, counted from before the swap, which may take long."""
    runtime, timeout_ms = held.runtime, held.timeout_ms
    until_s = runtime.monotonic_s() + timeout_ms / 1000
    return replace(lease, expires_ms=runtime.now_ms() + timeout_ms), until_s
