"""One call of `ingest`: what its tasks do, and what the driver does between them.

1. Tasks open the files, except those that were ingested before and have not changed. They return
   layouts and labels.
2. The driver compares the layouts, sorts the files by their labels and gives each its rows. It
   grows the arrays, and writes the axis variables and the records of the files to the session.
3. Tasks write the rows of their files. In other processes, each writes to a fork of the session. No
   chunk has rows of two tasks.
4. The driver merges the forks and commits.

Records, labels and data are in one commit. So two concurrent ingestions conflict, and the later one
begins again at 2, on top of the other one's commit. The records are lines of JSON in an array of
bytes, `_ingest/files` below the group. A commit appends its lines, so its cost does not depend on
how many there are. The last line of a file counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cache, partial
from typing import Any, Final

import numpy as np
import zarr

from zarr_manifests.errors import ConflictError, CorruptObjectError, InvalidArgumentError
from zarr_manifests.keys import join
from zarr_manifests.planning.file_rows import (
    FileFacts,
    FileLayout,
    FileRows,
    difference,
    place,
    write_groups,
)
from zarr_manifests.reports import FailedFile, IngestedFile, IngestProgress, IngestReport
from zarr_manifests.repositories import let_others_open, write_into
from zarr_manifests.repository import Repository
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.session import Fork, Session
from zarr_manifests.storage import Storage
from zarr_manifests.store import ManifestStore
from zarr_manifests.versions import HEADS
from zarr_manifests.xarray.ingest_rows import GroupRows, create_arrays
from zarr_manifests.xarray.source_files import FailedFilesError, SourceFiles

__all__ = ["Ingestion", "TaskRunner", "listed"]

_LISTED: Final = 5
_TASKS: Final = 2
"""Tasks of a step, for each that runs at once: more if they would be large."""
_TASK_BYTES: Final = (16 * 1024**2, 256 * 1024**2)
"""A task writes so many bytes of files, if there are as many, and about so many at most."""
_MOST_LOOKED: Final = 256
"""The most files that a task looks at."""
_MERGED: Final = 32
"""So many forks are merged at once."""
_VIRTUAL_FILES: Final = 512
"""The most files that a task refers to."""
_RECORDS: Final = "_ingest"
_RECORDS_CHUNK: Final = 256 * 1024


def listed(urls: Sequence[str]) -> str:
    """The first of the URLs, and a verb."""
    more = f" and {len(urls) - _LISTED} more" if len(urls) > _LISTED else ""
    return ", ".join(urls[:_LISTED]) + more + (" is" if len(urls) == 1 else " are")


@dataclass(frozen=True, slots=True)
class TaskRunner:
    """What runs tasks; by default this process, one after the other.

    Parameters
    ----------
    run : callable
        Yields the results of a call for each item of a sequence, in their order.
    parallelism : int
        How many run at once. Also where it is one: after each task, progress is told.
    elsewhere : bool
        Whether tasks run in other processes, each with a copy of the call.
    """

    run: Callable[[Callable[[Any], Any], Sequence[Any]], Iterator[Any]] = map
    parallelism: int = 16
    elsewhere: bool = False


# --- what tasks do ---------------------------------------------------------------------------


def _look(
    source: SourceFiles, files: Sequence[tuple[str, FileRecord | None]]
) -> list[FileFacts | FailedFile]:
    """Look at files; those that are as they were are left out."""
    found: list[FileFacts | FailedFile] = []
    layouts: dict[FileLayout, FileLayout] = {}
    for url, known in files:
        try:
            facts = source.facts(url, None if known is None else known.stamps)
        except FailedFilesError as error:
            found += error.files
        else:
            if facts is not None:  # one layout for all files that have it is pickled once
                layout = layouts.setdefault(facts.layout, facts.layout)
                found.append(replace(facts, layout=layout))
    return found


def _create[Target: (Session, Fork)](
    target: Target,
    group: str,
    source: SourceFiles,
    how: tuple[str, Mapping[str, Mapping[str, Any]]],
) -> Target | FailedFilesError:
    try:
        create_arrays(target, group, source, *how)
    except FailedFilesError as error:
        return error
    return target


def _write[Target: (Session, Fork)](
    target: Target, group: str, source: SourceFiles, rows: Sequence[FileRows]
) -> Target | FailedFilesError:
    try:
        GroupRows(target.store, group, source).write(rows)
    except FailedFilesError as error:
        return error
    return target


# --- what the driver does --------------------------------------------------------------------


@dataclass(kw_only=True)
class Ingestion:
    """One call of `ingest`."""

    runner: TaskRunner
    source: SourceFiles
    group: str
    branch: str
    encoding: Mapping[str, Mapping[str, Any]]
    reports: bool
    replaces: bool
    files_per_commit: int | None
    message: str | None
    heard: Callable[[IngestProgress], None]
    waiting: dict[str, FileFacts] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    failed: dict[str, FailedFile] = field(default_factory=dict)
    added: list[IngestedFile] = field(default_factory=list)
    replaced: list[IngestedFile] = field(default_factory=list)
    snapshot_ids: list[str] = field(default_factory=list)
    unchanged: int = 0
    began: float = field(default_factory=SYSTEM.monotonic_s)

    def run(
        self, repository: Repository | None, storage: Storage, urls: Sequence[str]
    ) -> IngestReport:
        """Ingest files; of a repository that is not there yet, into one at the storage."""
        known = {}
        if repository is not None:
            session = repository.readonly_session(HEADS + self.branch)
            known = _read_records(session.store, self.group)
        self._look_at(urls, known)
        self.changed = self.waiting.keys() & known.keys()
        self.unchanged = len(urls) - len(self.waiting) - len(self.failed)
        if self.changed and not self.replaces:
            raise InvalidArgumentError(
                f"{listed(sorted(self.changed))} not what was ingested: size, time, variables or "
                "options differ. Give on_changed='replace' to write the rows again"
            )
        if self.waiting and repository is not None:
            self._write_all(repository)
        elif self.waiting:
            write_into(storage, None, self._write_all, make=True)
        return IngestReport(
            tuple(self.snapshot_ids),
            tuple(self.added),
            tuple(self.replaced),
            tuple(self.failed.values()),
            self.unchanged,
            SYSTEM.monotonic_s() - self.began,
        )

    def _look_at(self, urls: Sequence[str], known: Mapping[str, FileRecord]) -> None:
        """Find what files hold that are new or have changed."""
        groups = self._parted([(url, known.get(url)) for url in urls], _MOST_LOOKED)
        done, nbytes, began = 0, 0, SYSTEM.monotonic_s()
        for group, found in zip(
            groups, self.runner.run(partial(_look, self.source), groups), strict=True
        ):
            for each in found:
                if isinstance(each, FailedFile):
                    self.failed[each.url] = each
                else:
                    self.waiting[each.url] = each
                    nbytes += each.nbytes
            done += len(group)
            seconds = SYSTEM.monotonic_s() - began
            self.heard(IngestProgress("looking", done, len(urls), nbytes, seconds))
        self._leave_out(())

    def _leave_out(self, files: Iterable[FailedFile]) -> None:
        """Go on without the files, if they are only to be reported."""
        self.failed |= {file.url: file for file in files}
        for url in self.failed:
            self.waiting.pop(url, None)
        if not self.failed or self.reports:
            return
        told = [*self.failed.values()]
        more = f"\n  and {len(told) - _LISTED:,} more" if len(told) > _LISTED else ""
        lines = "".join(f"\n  {file}" for file in told[:_LISTED])
        noun = "1 file" if len(told) == 1 else f"{len(told):,} files"
        besides = "more " if self.snapshot_ids else ""
        raise InvalidArgumentError(
            f"{noun} cannot be ingested; nothing {besides}was committed. Give on_error='report' to "
            f"leave such files out{lines}{more}"
        )

    def _write_all(self, repository: Repository) -> None:
        """Commit all files, as many at a time as asked for."""
        attempts, told = 0, partial(self._tell, SYSTEM.monotonic_s(), len(self.waiting))
        while self.waiting:
            session = repository.writable_session(self.branch)
            let_others_open(session)
            try:
                self._commit(session, told)
                attempts = 0
            except ConflictError:
                attempts += 1
                if attempts > repository.config.commits.attempts:
                    raise
            except FailedFilesError as error:
                self._leave_out(error.files)

    def _tell(self, began: float, total: int, files: int, nbytes: int) -> None:
        """Tell of files that are written and not yet committed."""
        committed = [*self.added, *self.replaced]
        files += len(committed)
        nbytes += sum(file.nbytes for file in committed)
        seconds = SYSTEM.monotonic_s() - began
        self.heard(IngestProgress("writing", files, total, nbytes, seconds))

    def _commit(self, session: Session, told: Callable[[int, int], None]) -> None:
        """Write as many of the files as a commit takes, and commit them.

        Raises
        ------
        FailedFilesError
            If files cannot be ingested; the session is of no use then.
        """
        known = _read_records(session.store, self.group)
        rows = GroupRows(session.store, self.group, self.source)
        placed = self._place(known, rows)
        batch = placed[: self.files_per_commit]
        if not batch:
            return
        if not rows.arrays:
            for _ in self._tasks(session, _create, [(batch[0].file.url, self.encoding)]):
                pass
            rows = GroupRows(session.store, self.group, self.source)
            rows.choose_units(placed)
        if self.source.containers is not None:
            _check_chunks(batch, rows)
        rows.grow(max(each.stop for each in batch))
        rows.write_axis(batch)
        _add_records(session.store, self.group, [self._record(each) for each in batch])
        self._write_rows(session, batch, rows, told)
        made = session.commit(self.message or f"ingest {len(batch):,} files")
        self.snapshot_ids.append(made)
        for each in batch:
            file = self.waiting.pop(each.file.url)
            ingested = IngestedFile(file.url, each.start, file.rows, file.nbytes, made)
            (self.replaced if file.url in self.changed else self.added).append(ingested)

    def _place(self, known: Mapping[str, FileRecord], rows: GroupRows) -> list[FileRows]:
        """Give each file its rows, if others have not ingested it in the meantime."""
        refused = []
        for url, file in [*self.waiting.items()]:
            if url not in known:
                continue
            if known[url].stamps == (file.nbytes, file.stamp, self.source.text):
                del self.waiting[url]
                self.unchanged += 1
            elif url not in self.changed:
                refused.append(FailedFile(url, "somebody else has ingested it as it was before"))
        files, dim = [*self.waiting.values()], self.source.dim
        if not refused and files:
            due, whose = files[0].layout, files[0].url
            if rows.arrays:
                due, whose = rows.layout, f"the group '/{self.group}'"
            differs = cache(lambda layout: difference(layout, due, dim))
            found = [(file.url, differs(file.layout)) for file in files]
            refused = [
                FailedFile(url, f"{has}, and {whose} has {wants}")
                for url, (has, wants) in ((url, each) for url, each in found if each is not None)
            ]
        if refused:
            raise FailedFilesError(*refused)
        before = {url: (known[url].start, known[url].rows) for url in self.changed & known.keys()}
        placed, unfit = place(files, before, rows.length, rows.labels, dim)
        if unfit:
            raise FailedFilesError(*(FailedFile(file.url, reason) for file, reason in unfit))
        return placed

    def _record(self, each: FileRows) -> FileRecord:
        file = each.file
        return FileRecord(
            file.url, file.nbytes, file.stamp, self.source.text, each.start, file.rows
        )

    def _write_rows(
        self,
        session: Session,
        batch: Sequence[FileRows],
        rows: GroupRows,
        told: Callable[[int, int], None],
    ) -> None:
        """Have tasks write the files, and merge what they wrote."""
        if self.source.containers is not None:
            groups: Sequence[Sequence[FileRows]] = self._parted(batch, _VIRTUAL_FILES)
        else:
            nbytes = sum(each.file.nbytes for each in batch)
            most = max(_TASKS * self.runner.parallelism, nbytes // _TASK_BYTES[1])
            groups = write_groups(batch, rows.unit, most, _TASK_BYTES[0])
        files: dict[str, int] = {}
        for group, _ in zip(groups, self._tasks(session, _write, groups), strict=True):
            files |= {each.file.url: each.file.nbytes for each in group}
            told(len(files), sum(files.values()))

    def _tasks(
        self, session: Session, call: Callable[..., Any], items: Sequence[Any]
    ) -> Iterator[None]:
        """Have tasks write to a session, each with an item; each yields once, as it ends.

        Raises
        ------
        FailedFilesError
            After all of them, if some could not read files.
        """
        elsewhere = self.runner.elsewhere
        forks: list[Fork] = []
        failed: list[FailedFile] = []
        run = partial(call, session.fork() if elsewhere else session, self.group, self.source)
        for written in self.runner.run(run, items):
            if isinstance(written, FailedFilesError):
                failed += written.files
            elif elsewhere:
                forks.append(written)
            if len(forks) >= _MERGED:
                session.merge(*forks)
                forks.clear()
            yield
        if failed:
            raise FailedFilesError(*failed)
        session.merge(*forks)

    def _parted[Item](self, items: Sequence[Item], most: int) -> list[Sequence[Item]]:
        """Items for tasks, of which none has more than so many."""
        size = min(max(-(-len(items) // (_TASKS * self.runner.parallelism)), 1), most)
        return [items[first : first + size] for first in range(0, len(items), size)]


def _check_chunks(batch: Sequence[FileRows], rows: GroupRows) -> None:
    """Refuse references to files whose rows do not begin where a chunk does."""
    found = []
    for each in batch:
        name = next((n for n, chunk in rows.chunks.items() if each.start % chunk), None)
        if name is not None:
            text = (
                f"its rows would begin at {each.start}, within a chunk of {name!r}, which has "
                f"{rows.chunks[name]} rows: a chunk cannot be in two files. Copy it instead"
            )
            found.append(FailedFile(each.file.url, text))
    if found:
        raise FailedFilesError(*found)


# --- records of files ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file that was ingested.

    Parameters
    ----------
    url : str
        Where it was.
    nbytes : int
        Its size.
    stamp : str
        Its time or etag.
    how : str
        A hash of the variables and options it was opened with.
    start, rows : int
        Where its rows are, if they were not moved since.
    """

    url: str
    nbytes: int
    stamp: str
    how: str
    start: int
    rows: int

    @property
    def stamps(self) -> tuple[int, str, str]:
        """What is the same as long as the file and how it is opened are."""
        return self.nbytes, self.stamp, self.how


def _read_records(store: ManifestStore, group: str) -> dict[str, FileRecord]:
    """What was ingested into a group, by URL."""
    array = _records(store, group)
    if array is None:
        return {}
    lines = np.asarray(array[:]).tobytes().decode().splitlines()
    try:
        return {record.url: record for record in (FileRecord(*json.loads(line)) for line in lines)}
    except (TypeError, ValueError) as error:
        raise CorruptObjectError(
            f"the records of ingested files in /{join(group, _RECORDS)} cannot be read ({error})"
        ) from error


def _add_records(store: ManifestStore, group: str, records: Iterable[FileRecord]) -> None:
    """Append records; they are committed with the rest of the session."""
    text = "".join(f"{json.dumps(astuple(record))}\n" for record in records)
    data = np.frombuffer(text.encode(), np.uint8)
    array = _records(store, group)
    if array is None:
        form: Any = zarr.open_group(store, path=group).metadata.zarr_format
        # Without a name for the axis, xarray could not open the groups as a tree.
        named: Any = {"dimension_names": ["byte"]} if form == 3 else {}
        made = zarr.create_group(store, path=join(group, _RECORDS), zarr_format=form)
        how: Any = {"shape": (0,), "chunks": (_RECORDS_CHUNK,), "dtype": "u1"}
        array = made.create_array("files", **how, **named)
    start = array.shape[0]
    array.resize((start + len(data),))
    array[start:] = data


def _records(store: ManifestStore, group: str) -> zarr.Array[Any] | None:
    try:
        path = join(group, join(_RECORDS, "files"))
        return zarr.open_array(store, path=path, mode="r" if store.read_only else "r+")
    except FileNotFoundError:
        return None
