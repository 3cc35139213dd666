"""Keeping a repository small and sound: leases, expiry, collection, verification, going back.

Invariant: nothing here changes what a snapshot in history says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from zarr_manifests.engine.compact.repack_chunks import RepackReport, repack_chunks
from zarr_manifests.engine.history.leases import checked_timeout_ms, give_up, take
from zarr_manifests.engine.root.heartbeat import Held
from zarr_manifests.engine.upkeep.collect import CollectionReport, collect
from zarr_manifests.engine.upkeep.expire import ExpiryReport, expire
from zarr_manifests.engine.upkeep.recover import LoggedOperation, RestoreReport, operations, restore
from zarr_manifests.engine.upkeep.verify import VerifyReport, verify
from zarr_manifests.errors import InvalidArgumentError, ManifestsError, NotFoundError
from zarr_manifests.indexes import Indexes
from zarr_manifests.planning.upkeep.expiry import Retention
from zarr_manifests.runtime import Runtime
from zarr_manifests.versions import DEFAULT_BRANCH

__all__ = ["HeldLease", "Maintenance"]

type Progress = Callable[[str, int], None]


class HeldLease:
    """A lease that is held, as `Repository.lease` gives it."""

    def __init__(self, held: Held, runtime: Runtime) -> None:
        self._held, self._runtime = held, runtime

    def __repr__(self) -> str:
        state = "lost" if self.lost else "held"
        return f"<HeldLease on {self.snapshot_id}, {state}>"

    @property
    def snapshot_id(self) -> str:
        """The snapshot it is on."""
        return self._held.snapshot

    @property
    def lost(self) -> bool:
        """Whether it is not to be relied on, so that `check` raises."""
        try:
            self.check()
        except ManifestsError:
            return True
        return False

    def check(self) -> None:
        """Raise if the lease was lost, or was not renewed within its timeout.

        It asks this process's clocks, not the storage. A lease that was not renewed in time may
        still be there; renewing is tried again, and once it succeeds `check` raises nothing again.
        While the clocks of this machine and of whoever collects garbage agree, nothing the snapshot
        needs was deleted as long as `check` raises nothing.

        Raises
        ------
        FencedError
            If a collection took it away.
        SnapshotExpiredError
            If the snapshot is in history no more.
        LeaseError
            If it was not renewed within its timeout.
        """
        self._held.check(self._runtime)


class Maintenance(Indexes):
    """Maintenance of one repository; what `Repository` is besides."""

    @contextmanager
    def lease(
        self,
        snapshot_id: str,
        timeout: timedelta | float = timedelta(seconds=120),
        *,
        owner: str = "",
    ) -> Iterator[HeldLease]:
        """Keep a snapshot readable, whatever expires or is collected meanwhile.

        The lease is renewed at a third of its timeout, for all of this process at once. Take one
        a job, not one a task.

        Parameters
        ----------
        snapshot_id : str
            A snapshot of the history.
        timeout : timedelta or seconds
            When others may take the lease away if this process cannot renew it any more.
        owner : str, optional
            A text about who holds it, of which 200 characters are kept.

        Raises
        ------
        SnapshotExpiredError
            If the snapshot is not in the history of any branch or tag.
        LeaseError
            If there is no thread that could renew it; it was given up again.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.Repository.create("memory://lease-example")
        >>> reader = repo.readonly_session("main")
        >>> with repo.lease(reader.snapshot_id) as lease:
        ...     _ = repo.garbage_collect()
        ...     lease.check()
        """
        timeout_ms = checked_timeout_ms(timeout)
        held = take(self._context, snapshot_id, timeout_ms, owner)
        try:
            yield HeldLease(held, self._context.runtime)
        finally:
            give_up(self._context, held)

    def expire_snapshots(
        self,
        keep_last: int | None = None,
        max_age: timedelta | None = None,
        *,
        dry_run: bool = False,
    ) -> ExpiryReport:
        """Let old snapshots leave the history of every branch; nothing is deleted yet.

        A snapshot stays if one of the two says so. The head of a branch stays always, a tag's
        snapshot stays readable by the tag, and a leased snapshot stays with all after it. Once
        anything has expired, a tag alone keeps no snapshots but its own.

        If neither is given, both are those of the configuration (`snapshots.keep-last` and
        `snapshots.max-age`).

        Parameters
        ----------
        keep_last : int, optional
            Keep that many of the newest snapshots of each branch.
        max_age : timedelta, optional
            Keep what is not older than this.
        dry_run : bool
            Only say what would expire.

        Raises
        ------
        InvalidArgumentError
            If neither is given, here or in the configuration.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.Repository.create("memory://expire-example")
        >>> for name in ("air", "sea", "ice"):
        ...     with repo.transaction(message=f"make {name}") as store:
        ...         _ = zarr.create_group(store, path=name)
        >>> report = repo.expire_snapshots(keep_last=2)
        >>> len(report.expired["main"]), report.kept["main"]
        (2, 2)
        >>> [info.message for info in repo.ancestry()]
        ['make ice', 'make sea']
        """
        if keep_last is None and max_age is None:
            options = self._context.config.snapshots
            keep_last, max_age = options.keep_last, options.max_age
        oldest_ms = None
        if max_age is not None:
            oldest_ms = self._context.runtime.now_ms() - _milliseconds(max_age, "max_age")
        return expire(self._context, Retention(keep_last, oldest_ms), dry_run=dry_run)

    def garbage_collect(
        self,
        grace: timedelta = timedelta(hours=24),
        *,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> CollectionReport:
        """Delete the objects that nothing leads to.

        Safe beside writers and readers with any grace: a writer that began longer ago cannot
        commit afterwards (`FencedError`), unless it holds a lease.

        Parameters
        ----------
        grace : timedelta
            For how long a session without a lease can go on.
        dry_run : bool
            Only say what would be deleted.
        progress : callable, optional
            Called with what is being done, and with how many objects.

        Raises
        ------
        CorruptObjectError
            If something that is reached cannot be read; nothing was deleted.

        Examples
        --------
        >>> import zarr_manifests as zm
        >>> repo = zm.Repository.create("memory://collect-example")
        >>> repo.garbage_collect(dry_run=True).deleted
        0
        """
        grace_ms = _milliseconds(grace, "grace")
        return collect(self._context, grace_ms, dry_run=dry_run, progress=progress or _ignore)

    def repack(
        self,
        branch: str = DEFAULT_BRANCH,
        min_live: float = 0.5,
        *,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> RepackReport:
        """Move chunks out of packs that are mostly dead, as commits that change no data.

        Small chunks share objects, and one that is overwritten or deleted leaves dead bytes in
        its pack. Packs of which less than `min_live` is referred to by the branch's head are given
        up: what is live in them is written into new packs, and its refs are merged into the base.
        The old packs become garbage, which goes when the snapshots that name them have expired
        and garbage is collected. Other branches, tags and leases go on naming the old packs, and
        keep them for as long.

        Runs beside writers, and is in nobody's way: a chunk that is changed meanwhile is left
        alone. Chunks that are inline, virtual, or objects of their own stay where they are. In
        memory are the refs of one array, or of the 250,000 chunks that one commit moves, and the
        chunks of eight packs.

        Parameters
        ----------
        branch : str
            The branch.
        min_live : float
            The part of a pack that has to be live, above 0 and at most 1. What is in a pack is
            counted by the head's refs, its size is that of the object.
        dry_run : bool
            Only say what would be moved.
        progress : callable, optional
            Called with what is being done, and with how many objects.

        Raises
        ------
        NotFoundError
            If there is no such branch.
        InvalidArgumentError
            If `min_live` is out of its range.
        CorruptObjectError
            If chunks that are to be moved are damaged or missing; it names them. They stay where
            they are, and all others have been moved.
        FencedError
            If a collection or another compaction has shut this one out; what it had committed by
            then stands.
        ConflictError
            If the branch was deleted meanwhile, or others came first too often.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.Repository.create("memory://repack-example", {"inline-chunk-bytes": 0})
        >>> with repo.transaction(message="four chunks, in one pack") as store:
        ...     a = zarr.create_array(store, name="a", shape=(4,), chunks=(1,), dtype="i4")
        ...     a[:] = [1, 2, 3, 4]
        >>> with repo.transaction(message="three of them anew") as store:
        ...     zarr.open_array(store, path="a")[:3] = [5, 6, 7]
        >>> report = repo.repack(min_live=0.5)
        >>> report.objects, report.packs, report.chunks
        (2, 1, 1)
        """
        part = _part(min_live, "min_live")
        roots = self._context.roots
        if branch not in roots.with_branch(roots.read().root, branch).branches:
            listed = ", ".join(self.list_branches())
            raise NotFoundError(f"there is no branch {branch!r}; there are: {listed}")
        heard = progress or _ignore
        return repack_chunks(self._context, branch, part, dry_run=dry_run, progress=heard)

    def verify(self, *, progress: Progress | None = None) -> VerifyReport:
        """Read everything that can be reached, and say what is wrong with it.

        Parameters
        ----------
        progress : callable, optional
            Called with what is being done, and with how many objects.

        Examples
        --------
        >>> import zarr_manifests as zm
        >>> repo = zm.Repository.create("memory://verify-example")
        >>> repo.verify().ok
        True
        """
        return verify(self._context, progress or _ignore)

    def restore(self, version: int, *, dry_run: bool = False) -> RestoreReport:
        """Let branches and tags be what they were in an older version of the root.

        Only these: configuration, leases and what has been collected stay as they are, and a tag
        that was deleted since stays so. `ops_log` lists the versions.

        Parameters
        ----------
        version : int
            The version.
        dry_run : bool
            Only say which branches and tags would move.

        Raises
        ------
        SnapshotExpiredError
            If the version is older than the last collection of garbage.
        NotFoundError
            If there is no archive of that version.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.Repository.create("memory://restore-example")
        >>> with repo.transaction(message="by mistake") as store:
        ...     _ = zarr.create_group(store, path="gruop")
        >>> report = repo.restore(1)
        >>> list(report.branches), [info.message for info in repo.ancestry()]
        (['main'], ['create repository'])
        """
        return restore(self._context, version, dry_run=dry_run)

    def ops_log(self) -> Iterator[LoggedOperation]:
        """Who did what to which branch or tag, and when; newest first.

        It goes back as far as archives of the root are kept.

        Examples
        --------
        >>> import zarr_manifests as zm
        >>> repo = zm.Repository.create("memory://ops-example")
        >>> repo.create_tag("empty")
        >>> [(one.version, one.operation, one.ref) for one in repo.ops_log()]
        [(2, 'create tag', 'empty'), (1, 'create', 'main')]
        """
        return operations(self._context)


def _milliseconds(duration: object, name: str) -> int:
    if isinstance(duration, timedelta) and duration >= timedelta(0):
        return duration // timedelta(milliseconds=1)
    raise InvalidArgumentError(f"{name} is a timedelta of 0 or more, not {duration!r}")


def _part(value: object, name: str) -> float:
    if isinstance(value, int | float) and 0 < value <= 1:
        return value
    raise InvalidArgumentError(f"{name} is a number above 0 and at most 1, not {value!r}")


def _ignore(stage: str, done: int) -> None:
    return None
