"""The sessions of a repository: they begin at its branches, tags and snapshots.

Invariant: a session begins at a root that was read after the session was asked for; or, once, at
the one that the repository was opened with, if that was read just before and this process has seen
no newer one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal

from zarr_manifests.engine.history.ancestry import ages, snapshot_ref
from zarr_manifests.engine.history.follow import opened
from zarr_manifests.engine.history.leases import checked_timeout_ms
from zarr_manifests.engine.root.epochs import claim_branch
from zarr_manifests.engine.root.roots import RootAt
from zarr_manifests.engine.snapshot.context import Context
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import InvalidArgumentError, NotFoundError, UnsupportedStorageError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.root import Branch, Root
from zarr_manifests.maintenance import Maintenance
from zarr_manifests.session import Session
from zarr_manifests.store import ManifestStore
from zarr_manifests.versions import DEFAULT_BRANCH, known_ref

__all__ = ["Sessions"]

_FRESH_S: Final = 0.1


class Sessions(Maintenance):
    """Makes sessions of one repository; what `Repository` is besides."""

    def __init__(self, context: Context, opened: RootAt) -> None:
        super().__init__(context)
        self._opened: tuple[float, RootAt] | None = (context.runtime.monotonic_s(), opened)

    def readonly_session(
        self,
        branch: str | None = None,
        *,
        tag: str | None = None,
        snapshot_id: str | None = None,
        as_of: datetime | None = None,
        follow: bool = False,
        follow_interval: timedelta = timedelta(seconds=60),
    ) -> Session:
        """A session that reads one snapshot.

        Parameters
        ----------
        branch : str, optional
            Read its head; `main` if nothing else is given.
        tag : str, optional
            Read what it points to.
        snapshot_id : str, optional
            Read that snapshot.
        as_of : datetime, optional
            Read the newest snapshot of the branch written at or before that time. Without a time
            zone it is taken as UTC.
        follow : bool, default False
            Go on to the branch's newest snapshot by itself: at that interval, or when the one that
            is read has expired. What is read one after the other may then be of two snapshots.
        follow_interval : timedelta
            How often to look.

        Raises
        ------
        NotFoundError
            If there is no such branch or tag, or nothing as old as `as_of`.
        SnapshotExpiredError
            If the snapshot is not, or no longer, there.
        InvalidArgumentError
            If more than one of branch, tag and snapshot is given, or `as_of` with one of the
            latter two; or one of them cannot be meant.
        """
        if as_of is not None and not isinstance(as_of, datetime):
            raise InvalidArgumentError(f"as_of must be a datetime, not {as_of!r}")
        if follow and (as_of is not None or tag is not None or snapshot_id is not None):
            raise InvalidArgumentError("follow goes with a branch only; nothing else moves")
        given = [x for x in (branch, tag, snapshot_id) if x is not None]
        if len(given) > 1 or (as_of is not None and (tag or snapshot_id)):
            raise InvalidArgumentError(
                "give one of branch, tag and snapshot_id; as_of goes with a branch only"
            )
        if snapshot_id is not None:
            view = self._context.open_view(snapshot_ref(self._context, snapshot_id))
            return Session(self._context, view, None, None)
        if tag is not None:
            view = opened(lambda: self._open_tag(tag))
            return Session(self._context, view, None, None)
        name = DEFAULT_BRANCH if branch is None else branch
        view = opened(lambda: self._open_branch(name, as_of))
        follow_s = follow_interval.total_seconds() if follow else None
        return Session(self._context, view, None, None, read_from=name, follow_s=follow_s)

    def writable_session(
        self,
        branch: str = DEFAULT_BRANCH,
        *,
        isolation: Literal["snapshot", "serializable"] = "snapshot",
        lease: timedelta | float | None = None,
        exclusive: bool = False,
        copies: Literal["merge", "report"] = "merge",
    ) -> Session:
        """A session whose changes can be committed to the branch.

        Parameters
        ----------
        branch : str
            The branch.
        isolation : {"snapshot", "serializable"}
            Whether a commit conflicts only with what others wrote to the same places, or also with
            what they changed of anything that was read.
        lease : timedelta or seconds, optional
            Take a lease of that timeout, renewed by itself, so that the session can commit
            however long it takes, collections of garbage notwithstanding. Given up when the
            session is closed, by `Session.release_lease`, or some time after the session is
            forgotten.
        exclusive : bool, default False
            Claim the branch: sessions that were opened before cannot commit to it any more
            (`FencedError`), as if their process had been stopped. Sessions that are opened later
            can, by the usual rules, until one of them claims the branch in turn.
        copies : {"merge", "report"}
            What becomes of what pickled copies of the session's store write, and children of
            `os.fork`. With `"merge"` it is in no commit unless they are merged. With `"report"`
            they report each chunk through the storage, and the commit brings all in: xarray's and
            dask's own writers just work on a cluster. Every call that returned before `commit`
            began is in it, and one that comes later raises. Copies write and unset chunks only.
            That takes two requests more a chunk, one more in the commit, and an object for each.

        Raises
        ------
        InvalidArgumentError
            If there is no such isolation, or no such way with copies; or for copies that report
            with `"serializable"`, as what they read is not known.
        NotFoundError
            If there is no such branch.
        UnsupportedStorageError
            If the storage cannot compare-and-swap; or cannot list and delete, which copies that
            report need.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.Repository.create("memory://exclusive-example")
        >>> before = repo.writable_session()
        >>> _ = zarr.create_group(before.store, path="air")
        >>> session = repo.writable_session(exclusive=True)
        >>> before.commit("make a group")
        Traceback (most recent call last):
        zarr_manifests.errors.FencedError: ... another writer has claimed branch 'main' ...
        """
        if isolation not in ("snapshot", "serializable"):
            raise InvalidArgumentError(
                f"{isolation!r} is no isolation; give 'snapshot' or 'serializable'"
            )
        if copies not in ("merge", "report"):
            raise InvalidArgumentError(f"copies={copies!r}: give 'merge' or 'report'")
        if copies == "report" and isolation == "serializable":
            raise InvalidArgumentError(
                "a serializable session must know what was read, which copies do not report; use "
                "copies='merge' with session.fork()"
            )
        storage = self._context.storage
        if not storage.capabilities.cas:
            raise UnsupportedStorageError(
                f"{storage.url} cannot compare-and-swap; the repository is read-only there"
            )
        lease_ms = None if lease is None else checked_timeout_ms(lease)
        roots = self._context.roots

        def at_head() -> tuple[int, SnapshotView]:
            at = claim_branch(roots, branch) if exclusive else roots.read()
            head = known_ref(roots.with_branch(at.root, branch).branches, branch, "branch")
            return at.root.version, self._context.open_branch(head)

        start, view = opened(at_head)
        return Session(
            self._context,
            view,
            branch,
            start,
            lease_ms=lease_ms,
            epoch=start if exclusive else None,
            serializable=isolation == "serializable",
            reporting=copies == "report",
        )

    @contextmanager
    def transaction(
        self,
        branch: str = DEFAULT_BRANCH,
        *,
        message: str,
        metadata: Mapping[str, Any] | None = None,
    ) -> Iterator[ManifestStore]:
        """A store whose changes are committed at the end of the block, or not at all.

        If the block raises, nothing is committed; if it changes nothing, no commit is made. After
        the block what was opened from the store can be read, and refuses to be changed.
        """
        session = self.writable_session(branch)
        try:
            yield session.store
            if session.has_uncommitted_changes:
                session.commit(message, metadata)
            else:
                session.check_forks()
        finally:
            session._close("its transaction has ended")

    def _open_tag(self, tag: str) -> SnapshotView:
        tags = self._context.roots.with_tag(self._fresh_root(), tag).tags
        return self._context.open_view(known_ref(tags, tag, "tag"))

    def _open_branch(self, name: str, as_of: datetime | None) -> SnapshotView:
        branches = self._context.roots.with_branch(self._fresh_root(), name).branches
        head = known_ref(branches, name, "branch")
        if as_of is None:
            return self._context.open_branch(head)
        return self._context.open_view(self._as_of(head, as_of))

    def _fresh_root(self) -> Root:
        """The root as it is now.

        Right after `open` that is the one `open` has read: the first session needs no second
        request, unless this process has swapped or read a newer root since.
        """
        opened, self._opened = self._opened, None
        if opened is not None:
            read_s, at = opened
            recent = 0 <= self._context.runtime.monotonic_s() - read_s <= _FRESH_S
            if recent and self._context.roots.undisturbed(at):
                return at.root
        return self._context.roots.read().root

    def _as_of(self, head: Branch, as_of: datetime) -> BlobRef:
        try:
            moment = as_of if as_of.utcoffset() is not None else as_of.replace(tzinfo=UTC)
            until_ms = moment.timestamp() * 1000
        except (ValueError, OverflowError) as error:  # pandas' not-a-time is a datetime, too
            raise InvalidArgumentError(f"as_of must be a time, not {as_of!r}") from error
        for ref, snapshot in ages(self._context, head.head, head.floor):
            if snapshot.written_ms <= until_ms:
                return ref
        raise NotFoundError(f"the branch has no snapshot as old as {moment.isoformat()}")
