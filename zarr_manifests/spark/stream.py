"""The streaming source: the cells that commits of a branch add, batch by batch.

An offset is a snapshot of the branch. A batch has the cells that were added between two offsets, as
the snapshot at its end has them (`cell_rows`). So over all batches each cell comes once, and
they are the rows of the table at the end.

Spark makes the reader in one process that lives as long as the query, and asks it for offsets and
partitions there. Tasks get partitions that need nothing else. Invariants:

- An offset names its repository, and a stream refuses those of another one.
- The offsets after the first one name where the stream began. Spark logs the end of the first
  batch but not its start, and asks again for the start if that batch is lost: a branch as the
  start would then be another snapshot.
- While the reader lives, it holds a lease on the snapshot that the next batch starts from, so that
  no history from there on expires. Spark kills the reader's process at the end of a query; the
  lease then ends at its timeout. Offsets carry the id of the stream, which owns the lease: a
  restarted stream takes the place of a lease that was left behind.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, Final

import numpy as np
import pyarrow as pa
from msgspec import Struct
from msgspec.structs import replace
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from zarr_manifests.errors import (
    HistoryExpiredError,
    InvalidArgumentError,
    SnapshotExpiredError,
    StorageError,
)
from zarr_manifests.reports import SnapshotInfo
from zarr_manifests.repository import Repository, changed_cells, context_of, resolved
from zarr_manifests.spark.job import Job, chunks_in
from zarr_manifests.spark.plan import plan_changes
from zarr_manifests.spark.worker import partition_batches
from zarr_manifests.versions import HEADS, MAIN

_LOG = logging.getLogger(__name__)
_LEASE: Final = timedelta(seconds=120)
_REWRITE: Final = "rewrite"

type Offset = dict[str, Any]
"""A place in the history, as Spark stores it.

`repository` and `stream` are ids; `snapshot` is the id of the snapshot, None before the first one.
`begun` is that at which the stream began, and `first` says that this is where it begins.
"""
_OFFSET: Final = frozenset(("repository", "stream", "snapshot", "begun", "first"))


class StreamOptions(Struct, frozen=True, kw_only=True):
    """How a stream goes through the history.

    Parameters
    ----------
    starting_snapshot : str, optional
        Any name of a version, after which the stream begins. By default the first
        batch is the whole table.
    max_commits_per_trigger : int, optional
        The most commits in a batch.
    streaming_overwrite_mode : "fail" or "added-only", default "fail"
        What to do about commits that overwrite or remove cells: raise an error, or deliver the
        cells that they add.
    keep_for : timedelta, optional
        How long the snapshot of the last offset is kept at least after the stream has stopped.
    """

    starting_snapshot: str | None = None
    max_commits_per_trigger: int | None = None
    streaming_overwrite_mode: str = "fail"
    keep_for: timedelta | None = None


class ChangeStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream of the cells that commits of a branch add.

    Parameters
    ----------
    repository : Repository
        The repository.
    job : Job
        The read of the head of the branch, which says what to read; its columns may not change.
    stream : StreamOptions
        How to go through the history.

    Raises
    ------
    InvalidArgumentError
        If the options name a version that is no branch.
    """

    def __init__(self, repository: Repository, job: Job, stream: StreamOptions) -> None:
        branch = job.options.version or MAIN
        if branch not in repository.list_branches():
            raise InvalidArgumentError(
                f"a stream follows a branch, and {branch!r} is none. Give branch, and "
                "starting-snapshot for where to begin"
            )
        self._repository, self._branch, self._stream = repository, branch, stream
        self._names, self._schema = [column.name for column in job.variables], job.schema
        own: Any = {"variables": self._names, "where": job.where}
        self._options, self._facts = replace(job.options, version=None, **own), job.facts
        self._until: str | None = None
        # A `HeldLease`, and what ends it.
        self._held: Any = None
        self._ends = ExitStack()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_held": None, "_ends": ExitStack()}

    # --- offsets -----------------------------------------------------------------------------

    def initialOffset(self) -> Offset:  # noqa: N802
        """Where the stream begins."""
        name = self._stream.starting_snapshot
        start = None if name is None else resolved(self._repository, name)
        repository, stream = context_of(self._repository).repository_id, os.urandom(8).hex()
        begins = {"snapshot": start, "begun": start, "first": True}
        return {"repository": repository, "stream": stream} | begins

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """End the stream at what is the head of the branch now."""
        self._until = self._head()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """The end of the next batch; `start` itself if there is nothing new."""
        self._check(start)
        if start["snapshot"] is None:
            end = _moved(start, self._until or self._head())
            self._lease(end)
            return end
        self._lease(start)
        due = self._since(start["snapshot"])[: self._stream.max_commits_per_trigger]
        return _moved(start, due[-1].snapshot_id) if due else start

    def _check(self, offset: Offset) -> None:
        """Raise if an offset is that of another source, or of another repository."""
        if offset.keys() != _OFFSET:
            raise InvalidArgumentError(
                f"the checkpoint has an offset of another source: {str(offset)[:200]}; start the "
                "stream with another checkpoint"
            )
        if offset["repository"] != context_of(self._repository).repository_id:
            raise InvalidArgumentError(
                f"the checkpoint belongs to a stream of repository {offset['repository']}, not "
                f"of the one at {self._repository.storage.url}; start the stream with another "
                "checkpoint"
            )

    def _head(self) -> str:
        return self._repository.readonly_session(HEADS + self._branch).snapshot_id

    def _since(self, snapshot_id: str) -> list[SnapshotInfo]:
        """The commits of the branch after a snapshot that change data, oldest first.

        Where some have expired, and a tag keeps the snapshot, the oldest one that is left counts as
        the commit of all that happened until then: its parent is that snapshot.

        Raises
        ------
        HistoryExpiredError
            If the snapshot has expired.
        InvalidArgumentError
            If the branch was reset to a snapshot that does not come after it.
        """
        found: list[SnapshotInfo] = []
        for info in self._repository.ancestry(HEADS + self._branch):
            if info.snapshot_id == self._until:
                found.clear()
            if info.snapshot_id == snapshot_id:
                break
            if info.kind != _REWRITE:
                found.append(info)
        else:
            self._check_kept(snapshot_id, info)
            if info.kind != _REWRITE:
                found.pop()
            found.append(replace(info, parent_id=snapshot_id))
        return found[::-1]

    def _check_kept(self, snapshot_id: str, oldest: SnapshotInfo) -> None:
        """Raise if an offset is not in the history of the branch, and no tag keeps it."""
        advice = (
            "Start the stream with another checkpoint; starting-snapshot says from where it goes on"
        )
        try:
            lost = next(self._repository.ancestry(snapshot_id, limit=1))
        except SnapshotExpiredError:
            lost = None
        cut = oldest.parent_id is not None
        if lost is not None and not (cut and lost.written_at < oldest.written_at):
            raise InvalidArgumentError(
                f"snapshot {snapshot_id}, the offset of the stream, is not in the history of "
                f"branch {self._branch!r} any more: the branch was reset, and lacks commits that "
                f"the stream has delivered. {advice}"
            )
        if snapshot_id not in self._repository.list_tags().values():
            raise HistoryExpiredError(
                f"snapshot {snapshot_id}, the offset of the stream, has expired: the history of "
                f"branch {self._branch!r} begins at {oldest.snapshot_id} now. {advice}. Next time, "
                "keep the offset of a stopped stream with keep-for or a tag"
            )

    # --- batches -----------------------------------------------------------------------------

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """The parts of the batch between two offsets, each with all that its task needs."""
        self._check(start)
        self._check(end)
        begin, last = end["begun"] if start["first"] else start["snapshot"], end["snapshot"]
        if last is None or begin == last:
            return []
        self._lease(end if begin is None else _moved(end, begin))
        if begin is not None and self._stream.streaming_overwrite_mode == "fail":
            for info in self._between(begin, last):
                self._check_only_adds(info)
        if not self._paths(last):
            return []  # none of the variables is there yet
        job = plan_changes(self._repository, self._options, self._facts, begin, last)
        if not same_columns(job.schema, self._schema):
            raise InvalidArgumentError(
                f"the stream has the columns {self._schema.simpleString()}, and at snapshot {last} "
                f"they are {job.schema.simpleString()}; start the stream with another checkpoint"
            )
        return [InputPartition(task) for task in _tasks(job)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one partition."""
        job = partition.value
        return iter(()) if job is None else partition_batches(job, 0)

    def _paths(self, *snapshots: str) -> list[str]:
        """Paths of the variables that one of these snapshots has."""
        known = {
            array.path
            for snapshot_id in snapshots
            for array in self._repository.du(snapshot_id, estimate=True).arrays
        }
        group = self._options.group.strip("/")
        paths = (f"/{group}/{name}" if group else f"/{name}" for name in self._names)
        return [path for path in paths if path in known]

    def _check_only_adds(self, info: SnapshotInfo) -> None:
        """Raise if a commit overwrites or removes cells."""
        assert info.parent_id is not None  # a commit after another one
        paths = self._paths(info.parent_id, info.snapshot_id)
        if not paths:
            return
        cells = changed_cells(self._repository, paths, info.parent_id, info.snapshot_id)
        if not cells.only_added:
            what = " and ".join(
                f"{word} {chunks_in(boxes):,} cells"
                for word, boxes in (("overwrote", cells.overwritten), ("removed", cells.removed))
                if len(boxes)
            )
            raise InvalidArgumentError(
                f"commit {info.snapshot_id} ({info.message!r}) {what} of {', '.join(paths)}, "
                "and a stream delivers only added cells. The option "
                "streaming-overwrite-mode=added-only delivers the cells that such commits add"
            )

    def _between(self, start: str, end: str) -> list[SnapshotInfo]:
        """The commits after a snapshot up to another one, oldest first."""
        found = self._since(start)
        ids = [info.snapshot_id for info in found]
        return found[: ids.index(end) + 1] if end in ids else self._since(end)

    # --- the lease ---------------------------------------------------------------------------

    def commit(self, end: Offset) -> None:
        """Go on with the lease: Spark asks for nothing before this offset any more."""
        self._check(end)
        self._lease(end)

    def stop(self) -> None:
        """Give the lease up, or leave it behind."""
        self._held = None
        self._ends.close()

    def _lease(self, at: Offset) -> None:
        """Hold the lease on this offset's snapshot, and no other."""
        snapshot_id, held = at["snapshot"], self._held
        same = held is not None and held.snapshot_id == snapshot_id and not held.lost
        if snapshot_id is None or same:
            return
        keep_for, stack = self._stream.keep_for, ExitStack()
        # It is renewed at a third of its timeout, so two thirds of that are left at least.
        timeout = _LEASE if keep_for is None else max(keep_for * 1.5, _LEASE)
        owner = f"Spark stream {at['stream']}"
        try:
            lease = stack.enter_context(
                self._repository.lease(snapshot_id, timeout, owner=owner, instead=True)
            )
        except SnapshotExpiredError:
            self._since(snapshot_id)  # raises, and says what is still there
            raise
        except StorageError:
            # It cannot be written. Should history expire, the next batch says so.
            _LOG.warning("the stream of %s holds no lease", self._repository, exc_info=True)
            return
        if held is not None:
            held.keep(False)
        self.stop()
        lease.keep(keep_for is not None)
        self._held, self._ends = lease, stack


def _moved(offset: Offset, snapshot_id: str) -> Offset:
    """Another offset of the same stream."""
    return {**offset, "snapshot": snapshot_id, "first": False}


def same_columns(one: StructType, other: StructType) -> bool:
    """Whether two schemas have the same names and types, whatever their metadata."""
    return [(f.name, f.dataType) for f in one] == [(f.name, f.dataType) for f in other]


def _tasks(job: Job) -> Iterator[Job]:
    """The job's tasks as jobs of their own, each with only its boxes."""
    for number in range(job.tasks):
        first, stop = job.starts[number : number + 2]
        starts = np.array([0, stop - first], np.int64)
        yield replace(job, parts=job.parts[first:stop], starts=starts)
