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
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

from msgspec.structs import replace

from zarr_manifests.engine.ancestry import locate
from zarr_manifests.engine.heartbeat import Held, Term
from zarr_manifests.engine.view import Context, ReadContext
from zarr_manifests.errors import (
    CorruptObjectError,
    FencedError,
    InvalidArgumentError,
    LeaseError,
    ManifestsError,
    SnapshotExpiredError,
)
from zarr_manifests.format.root import LEASES, Lease, Root, entries, with_entries, without
from zarr_manifests.ids import new_session_id, session_start
from zarr_manifests.runtime import Runtime

_ATTEMPTS = 100
_OWNER_CHARS = 200
_LOG = logging.getLogger(__name__)


class HeldLease:
    """A lease on a snapshot, as `Repository.lease` returns it."""

    def __init__(self, held: Held, runtime: Runtime) -> None:
        self._held, self._runtime = held, runtime
        self.kept = False

    def __repr__(self) -> str:
        state = "lost" if self.lost else "held"
        return f"<HeldLease on {self.snapshot_id}, {state}>"

    @property
    def snapshot_id(self) -> str:
        """Id of the leased snapshot."""
        return self._held.snapshot

    @property
    def lost(self) -> bool:
        """Whether the lease no longer protects the snapshot, so that `check` raises."""
        try:
            self.check()
        except ManifestsError:
            return True
        return False

    def check(self) -> None:
        """Raise if the lease was lost, or was not renewed within its timeout.

        It compares clocks and sends no request. As long as it raises nothing, no object that the
        snapshot needs was deleted, provided that the clocks of this machine and of the collector
        agree. A lease that was renewed late may still be held: `check` then raises nothing again.

        Raises
        ------
        FencedError
            If a collection removed it.
        SnapshotExpiredError
            If the snapshot is no longer in history.
        LeaseError
            If it was not renewed within its timeout.
        """
        self._held.check(self._runtime)

    def keep(self, kept: bool = True) -> None:
        """Leave the lease behind at the end of the block, or do not.

        It is then renewed once more, and not given up: it lasts for its timeout from there on.

        Examples
        --------
        >>> import zarr_manifests as zm
        >>> repo = zm.create("memory://kept-lease-example")
        >>> with repo.lease(repo.list_branches()["main"], timeout=3600) as lease:
        ...     lease.keep()  # for an hour from the end of the block
        """
        self.kept = kept


class SessionLease:
    """The lease of a writable session, which moves on with it.

    Takes a lease as `take` does, with the session's id.
    """

    def __init__(
        self, context: Context, snapshot_id: str, timeout_ms: int, owner: str, session: str
    ) -> None:
        self._context = context
        self._held = take(context, snapshot_id, timeout_ms, owner, session)
        self.released = False

    def move(self, session: str, snapshot_id: str) -> None:
        """Move the lease to a new id and snapshot; a parent process keeps its own."""
        if self.released or self._held.is_inherited:
            return
        try:
            _move(self._context, self._held, session, snapshot_id)
        except ManifestsError:
            # If the session is fenced by then, its next commit is refused.
            _LOG.warning("the lease of a session could not go on with it", exc_info=True)

    def release(self) -> None:
        """Give up the lease; a child of `os.fork` only forgets it."""
        if not self.released:
            self.released = True
            give_up(self._context, self._held)

    def end_with(self, holder: object) -> None:
        """Stop renewing the lease when its holder is garbage collected."""
        # Not a method of this object: it leads to the runtime, which may lead to the holder.
        weakref.finalize(holder, self._context.heart.drop, self._held)


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
    lease = HeldLease(held, context.runtime)
    try:
        yield lease
    finally:
        if not lease.kept:
            give_up(context, held)
        elif not held.is_inherited:  # a parent process goes on renewing its own
            try:
                renew_all(context)  # for the last time
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
) -> Held:
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
    held = Held(runtime.random_bytes(16), session or "", snapshot_id, timeout_ms, owner)

    def change(root: Root) -> Root:
        if session is None:  # a reader's: no fence is ever before the root it is taken in
            held.session = new_session_id(root.version, random)
        locate(context, root, held.snapshot)
        _check_start(root, held.session)
        if instead:
            others = (lease for lease in context.roots.leases(root) if lease.owner == owner)
            root = without(root, *(lease.name for lease in others))
        kept = tuple(lease for lease in root.leases if lease.lease_id != held.lease_id)
        held.term = _term(context, held)
        return replace(root, leases=(*kept, _lease(held, held.term)))

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
            f"no lease is held on snapshot {held.snapshot}: no thread can be started to renew it "
            f"({error}). Use fewer threads in this process, or allow it more"
        ) from error
    return held


def _move(context: Context, held: Held, session: str, snapshot_id: str) -> None:
    """Let a writer's lease go on with the session and the snapshot that follow its commit.

    Raises
    ------
    FencedError
        If it was removed.
    """
    old, new = _name(held), replace(held, session=session, snapshot=snapshot_id)
    term = held.term

    def change(root: Root) -> Root:
        nonlocal term
        there = {lease.name for lease in context.roots.leases(root)}
        if _name(new) not in there:  # unless an earlier try has moved it
            if old not in there:
                raise _taken_away(held)
            _check_start(root, session)
        locate(context, root, snapshot_id)
        term = _term(context, new)
        return _with(without(root, old), [_lease(new, term)])

    context.roots.update_leases(change, "moving a lease", _ATTEMPTS)
    held.session, held.snapshot, held.term = session, snapshot_id, term


def renew_all(context: Context) -> None:
    """Renew all leases of this process in one swap; those that cannot be renewed are lost.

    A lease whose history is damaged does not keep others from being renewed.
    """
    lost: dict[bytes, ManifestsError] = {}
    terms: dict[bytes, Term] = {}

    def change(root: Root) -> Root:
        lost.clear()
        terms.clear()
        there = {lease.name for lease in context.roots.leases(root)}
        renewed = []
        for held in due:
            try:
                if _name(held) not in there:
                    raise _taken_away(held)
                locate(context, root, held.snapshot)
            except (SnapshotExpiredError, FencedError) as error:
                lost[held.lease_id] = error
            except CorruptObjectError:
                _LOG.warning("a lease on %s was not renewed", held.snapshot, exc_info=True)
            else:
                terms[held.lease_id] = _term(context, held)
                renewed.append(_lease(held, terms[held.lease_id]))
        return _with(root, renewed) if renewed else root

    due = context.heart.held()
    if due:
        context.roots.update_leases(change, "renewing leases", _ATTEMPTS)
        for held in due:
            held.lost = lost.get(held.lease_id)
            held.term = terms.get(held.lease_id, held.term)


def give_up(context: Context, held: Held) -> None:
    """Remove the lease from the root, if it is still there; a parent process's lease stays."""
    if held.is_inherited:
        return
    context.heart.drop(held)

    def change(root: Root) -> Root:
        there = {lease.name for lease in context.roots.leases(root)}
        return without(root, _name(held)) if _name(held) in there else root

    context.roots.update_leases(change, "giving up a lease", _ATTEMPTS)


def _beat(context: Context) -> None:
    try:
        renew_all(context)
    except ManifestsError:
        # Retried after a third of the timeout. Until then `Held.check` compares the time.
        _LOG.warning("renewing the leases of %s failed", context.storage.url, exc_info=True)


def _check_start(root: Root, session: str) -> None:
    if session_start(session) < root.fence:
        raise FencedError(
            f"the session began at version {session_start(session)}, before the repository's "
            f"fence {root.fence}: its objects may have been collected, and no lease can bring "
            "them back. Open a new session"
        )


def _taken_away(held: Held) -> FencedError:
    return FencedError(
        f"the lease on snapshot {held.snapshot} was not renewed in time, and a collection took "
        "it away; open a new session with a longer timeout"
    )


def _term(context: ReadContext, held: Held) -> Term:
    """The lease's end, counted from before the swap, which may take long."""
    runtime, timeout_ms = context.runtime, held.timeout_ms
    return Term(runtime.monotonic_s() + timeout_ms / 1000, runtime.now_ms() + timeout_ms)


def _lease(held: Held, term: Term) -> Lease:
    return Lease(held.lease_id, held.session, held.snapshot, term.until_ms, held.owner)


def _name(held: Held) -> str:
    return f"{LEASES}{held.session}/{held.lease_id.hex()}"


def _with(root: Root, leases: Iterable[Lease]) -> Root:
    """The root with these leases in itself, which override those in a page."""
    return with_entries(root, entries(root) | {lease.name: lease for lease in leases})
