"""One call of `ingest`: what its tasks do, and what the driver does between them.

1. Tasks open the files, except those that were ingested before and have not changed. They return
   layouts and labels.
2. The driver compares the layouts, sorts the files by their labels and gives each its rows. It
   grows the arrays, and writes the axis variables and the records of the files to the session.
3. Tasks write the rows of their files to forks of the session. No chunk has rows of two tasks.
4. The driver merges the forks and commits.

Records, labels and data are in one commit. So two concurrent ingestions conflict, and the later one
begins again at 2, on top of the other one's commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Protocol

from zarr_manifests.errors import ConflictError, InvalidArgumentError
from zarr_manifests.planning.file_rows import (
    FileFacts,
    FileLayout,
    FilePart,
    PlacedFile,
    difference,
    in_order,
    rows_of_labels,
    write_groups,
)
from zarr_manifests.reports import (
    FailedFile,
    IngestedFile,
    IngestProgress,
    IngestReport,
)
from zarr_manifests.repositories import let_others_open, write_into
from zarr_manifests.repository import Repository
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.session import Fork, Session
from zarr_manifests.storage.url import storage_of
from zarr_manifests.versions import HEADS
from zarr_manifests.xarray.ingest_records import FileRecord, add_records, read_records
from zarr_manifests.xarray.ingest_rows import (
    Template,
    There,
    choose_units,
    create_arrays,
    create_arrays_of,
    failed,
    grow,
    template_of,
    there_is,
    write_axis,
    write_parts,
)
from zarr_manifests.xarray.source_files import FailedFileError, SourceFiles, stamp_of

__all__ = ["InProcess", "Ingestion", "TaskRunner", "listed"]

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


def listed(urls: Sequence[str]) -> str:
    """The first of the URLs, and a verb."""
    more = f" and {len(urls) - _LISTED} more" if len(urls) > _LISTED else ""
    return ", ".join(urls[:_LISTED]) + more + (" is" if len(urls) == 1 else " are")


type _Made = Callable[[], Callable[[Any], Any]]


class TaskRunner(Protocol):
    """Runs tasks, in this process or elsewhere."""

    @property
    def parallelism(self) -> int:
        """How many run at once."""

    @property
    def elsewhere(self) -> bool:
        """Whether tasks run in other processes."""

    def run(self, make: _Made, items: Sequence[Any]) -> Iterator[Any]:
        """The results of a call for each item, in their order; `make` makes the call.

        No two tasks of one process may have the same call.
        """


class InProcess:
    """Runs tasks in this process, one after the other."""

    parallelism = 16  # though one runs at once: after each of them it is told how far it is
    elsewhere = False

    def run(self, make: _Made, items: Sequence[Any]) -> Iterator[Any]:
        """The results, each when it is asked for."""
        return (make()(item) for item in items)


# --- what tasks do ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Looked:
    """What a task says of a file: that it is as it was, what it holds, or why it cannot be read."""

    url: str
    facts: FileFacts | None = None
    template: Template | None = None
    reason: str = ""


def _look(
    source: SourceFiles, files: tuple[Sequence[tuple[str, FileRecord | None]], bool]
) -> list[_Looked]:
    """Look at files; of the first that can be opened, return the template, too, if asked for."""
    found: list[_Looked] = []
    layouts: dict[FileLayout, FileLayout] = {}
    these, wants_template = files
    for url, known in these:
        try:
            stamp = stamp_of(url)
            if known is not None and (*stamp, source.text) == known.stamps:
                found.append(_Looked(url))
                continue
            with source.opened(url) as opened:
                facts = source.facts(url, opened, stamp)
                template = template_of(url, opened, source.dim) if wants_template else None
        except ImportError:
            raise
        except Exception as error:  # noqa: BLE001 - it is told, with the file
            found.append(_Looked(url, reason=failed(url, error).reason))
        else:  # one layout for all files that have it is pickled once
            layout = layouts.setdefault(facts.layout, facts.layout)
            found.append(_Looked(url, replace(facts, layout=layout), template))
            wants_template = False
    return found


def _create(
    fork: Fork,
    group: str,
    source: SourceFiles,
    encoding: Mapping[str, Mapping[str, Any]],
    url: str,
) -> Fork:
    create_arrays_of(fork.store, group, source, url, encoding)
    return fork


def _write(
    fork: Fork, group: str, source: SourceFiles, parts: Sequence[FilePart]
) -> Fork | FailedFile:
    try:
        write_parts(fork.store, group, source, parts)
    except FailedFileError as error:
        return FailedFile(error.url, error.reason)
    return fork


# --- what the driver does --------------------------------------------------------------------


class _FailedFilesError(Exception):
    """Files that turned out to be unreadable while they were written."""

    def __init__(self, files: Sequence[FailedFile]) -> None:
        super().__init__(files)
        self.files = files


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
    template: Template | None = None
    failed: dict[str, FailedFile] = field(default_factory=dict)
    added: list[IngestedFile] = field(default_factory=list)
    replaced: list[IngestedFile] = field(default_factory=list)
    snapshot_ids: list[str] = field(default_factory=list)
    began: float = field(default_factory=SYSTEM.monotonic_s)

    def run(self, repository: Repository | None, url: Any, urls: Sequence[str]) -> IngestReport:
        known = {} if repository is None else self._records(repository)
        new, changed = self._look_at(urls, known)
        unchanged = len(urls) - len(new) - len(changed) - len(self.failed)
        if changed and not self.replaces:
            raise InvalidArgumentError(
                f"{listed([file.url for file in changed])} not what was ingested: size, time, "
                "variables or options differ. Give on_changed='replace' to write the rows again"
            )
        if new or changed:
            write = partial(self._write_all, new=new, changed=changed)
            if repository is not None:
                unchanged += write(repository)
            else:
                self._agreeing(new, None)  # before anything is written
                unchanged += write_into(storage_of(url), None, write, make=True)
        return IngestReport(
            tuple(self.snapshot_ids),
            tuple(self.added),
            tuple(self.replaced),
            tuple(self.failed.values()),
            unchanged,
            SYSTEM.monotonic_s() - self.began,
        )

    def _records(self, repository: Repository) -> dict[str, FileRecord]:
        return read_records(repository.readonly_session(HEADS + self.branch).store, self.group)

    def _look_at(
        self, urls: Sequence[str], known: Mapping[str, FileRecord]
    ) -> tuple[list[FileFacts], list[FileFacts]]:
        """New and changed files."""
        files = [(url, known.get(url)) for url in urls]
        most = _TASKS * self.runner.parallelism
        groups = _parted(files, min(max(-(-len(files) // most), 1), _MOST_LOOKED))
        wants = not known and self.source.containers is None  # else the arrays may be there
        items = [(group, wants and not number) for number, group in enumerate(groups)]
        new: list[FileFacts] = []
        changed: list[FileFacts] = []
        layouts: dict[FileLayout, FileLayout] = {}
        done, began = 0, SYSTEM.monotonic_s()
        for found in self.runner.run(lambda: partial(_look, self.source), items):
            for each in found:
                if each.reason:
                    self.failed[each.url] = FailedFile(each.url, each.reason)
                elif each.facts is not None:
                    self.template = self.template or each.template
                    layout = layouts.setdefault(each.facts.layout, each.facts.layout)
                    facts = replace(each.facts, layout=layout)
                    (changed if each.url in known else new).append(facts)
            done += len(found)
            nbytes = sum(file.nbytes for file in (*new, *changed))
            seconds = SYSTEM.monotonic_s() - began
            self.heard(IngestProgress("looking", done, len(urls), nbytes, seconds))
        self._fail_if_due()
        return new, changed

    def _leave_out(self, file: FileFacts, reason: str) -> None:
        self.failed[file.url] = FailedFile(file.url, reason)

    def _fail_if_due(self) -> None:
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

    def _agreeing(self, files: Sequence[FileFacts], there: There | None) -> list[FileFacts]:
        """The files that agree with what is there, or with the first of them."""
        if not files:
            return []
        due, whose = files[0].layout, files[0].url
        if there is not None:
            due, whose = there.layout, f"the group '/{self.group}'"
        told: dict[int, tuple[str, str] | None] = {}
        agreeing = []
        for file in files:
            key = id(file.layout)
            if key not in told:
                told[key] = difference(file.layout, due, self.source.dim)
            found = told[key]
            if found is None:
                agreeing.append(file)
            else:
                self._leave_out(file, f"{found[0]}, and {whose} has {found[1]}")
        self._fail_if_due()
        return agreeing

    # --- writing -------------------------------------------------------------------------------

    def _write_all(
        self, repository: Repository, new: Sequence[FileFacts], changed: Sequence[FileFacts]
    ) -> int:
        """Commit all files, as many at a time as asked for; how many were there by then."""
        waiting, others = {file.url: file for file in (*changed, *new)}, 0
        again = {file.url for file in changed}
        began, total, attempts = SYSTEM.monotonic_s(), len(waiting), 0
        while waiting:
            session = repository.writable_session(self.branch)
            let_others_open(session)
            known = read_records(session.store, self.group)
            others += self._drop_known(waiting, again, known)
            there = there_is(session.store, self.group, self.source)
            placed = self._place(
                [*waiting.values()], {u: known[u] for u in again & known.keys()}, there
            )
            for url in self.failed:
                waiting.pop(url, None)
            batch = placed[: self.files_per_commit]
            if not batch:
                break
            try:
                made = self._commit(session, placed, there, partial(self._heard_of, began, total))
            except ConflictError:
                attempts += 1
                if attempts > repository.config.commits.attempts:
                    raise
                continue
            except _FailedFilesError as error:
                self.failed |= {each.url: each for each in error.files}
                self._fail_if_due()
                for url in self.failed:
                    waiting.pop(url, None)
                continue
            attempts = 0
            self.snapshot_ids.append(made)
            for each in batch:
                file = waiting.pop(each.file.url)
                told = IngestedFile(file.url, each.start, file.rows, file.nbytes, made)
                (self.replaced if file.url in again else self.added).append(told)
        return others

    def _heard_of(self, began: float, total: int, files: int, nbytes: int) -> None:
        """Tell of files that are written and not yet committed."""
        committed = [*self.added, *self.replaced]
        files += len(committed)
        nbytes += sum(file.nbytes for file in committed)
        seconds = SYSTEM.monotonic_s() - began
        self.heard(IngestProgress("writing", files, total, nbytes, seconds))

    def _drop_known(
        self, waiting: dict[str, FileFacts], again: set[str], known: Mapping[str, FileRecord]
    ) -> int:
        """Drop files that somebody else has ingested in the meantime; how many these are."""
        there = [url for url, file in waiting.items() if self._is_there(known.get(url), file)]
        for url in there:
            del waiting[url]
        for url in [url for url in waiting if url in known and url not in again]:
            self._leave_out(waiting.pop(url), "somebody else has ingested it as it was before")
        self._fail_if_due()
        return len(there)

    def _is_there(self, known: FileRecord | None, file: FileFacts) -> bool:
        if known is None:
            return False
        return known.stamps == (file.nbytes, file.stamp, self.source.text)

    def _place(
        self,
        files: Sequence[FileFacts],
        again: Mapping[str, FileRecord],
        there: There | None,
    ) -> list[PlacedFile]:
        """Give each file that agrees its rows; those that are there already keep theirs."""
        agreeing = self._agreeing(files, there)
        dim, labels = self.source.dim, None if there is None else there.labels
        placed = []
        for file in [file for file in agreeing if file.url in again]:
            known, wanted = again[file.url], file.labels(dim)
            if labels is not None and wanted is not None:
                start = rows_of_labels(labels, wanted)
            else:
                start = known.start if known.rows == file.rows else None
            if start is None:
                self._leave_out(
                    file, f"it has changed, and has other rows along {dim!r} than before"
                )
            else:
                placed.append(PlacedFile(file, start))
        new, unfit = in_order([file for file in agreeing if file.url not in again], dim, labels)
        for file, reason in unfit:
            self._leave_out(file, reason)
        self._fail_if_due()
        start = 0 if there is None else there.length
        for file in new:
            placed.append(PlacedFile(file, start))
            start += file.rows
        return placed

    def _commit(
        self,
        session: Session,
        placed: Sequence[PlacedFile],
        there: There | None,
        step: Callable[[int, int], None],
    ) -> str:
        """Write as many of the files as a commit takes, and commit them."""
        batch = placed[: self.files_per_commit]
        group, source = self.group, self.source
        if there is None:
            self._create(session, batch)
            choose_units(session.store, group, source.dim, placed)
            there = there_is(session.store, group, source)
            assert there is not None
        self._check_chunks(batch, there)
        length = max(there.length, *(each.stop for each in batch))
        if length > there.length:
            grow(session.store, group, source.dim, length)
        try:
            write_axis(session.store, group, source.dim, batch)
        except FailedFileError as error:
            raise _FailedFilesError([FailedFile(error.url, error.reason)]) from error
        records = [
            FileRecord(f.url, f.nbytes, f.stamp, source.text, each.start, f.rows)
            for each in batch
            for f in [each.file]
        ]
        add_records(session.store, group, records, there.zarr_format)
        self._write_parts(session, batch, there, step)
        return session.commit(self.message or f"ingest {len(batch):,} files")

    def _create(self, session: Session, batch: Sequence[PlacedFile]) -> None:
        """Make the arrays: here, if a task has told how, else by a task that opens a file."""
        if self.template is not None and self.template.url == batch[0].file.url:
            create_arrays(session.store, self.group, self.template, self.encoding)
            return
        how = self.group, self.source, self.encoding
        create = self.runner.run(
            lambda: partial(_create, session.fork(), *how), [batch[0].file.url]
        )
        for fork in create:
            session.merge(fork)

    def _check_chunks(self, batch: Sequence[PlacedFile], there: There) -> None:
        """Refuse references to files whose rows do not begin where a chunk does."""
        if self.source.containers is None:
            return
        found = []
        for each in batch:
            name = next((n for n, chunk in there.chunks.items() if each.start % chunk), None)
            if name is not None:
                text = (
                    f"its rows would begin at {each.start}, within a chunk of {name!r}, which has "
                    f"{there.chunks[name]} rows: a chunk cannot be in two files. Copy it instead"
                )
                found.append(FailedFile(each.file.url, text))
        if found:
            raise _FailedFilesError(found)

    def _write_parts(
        self,
        session: Session,
        batch: Sequence[PlacedFile],
        there: There,
        step: Callable[[int, int], None],
    ) -> None:
        """Have tasks write the files, and merge what they wrote."""
        most = _TASKS * self.runner.parallelism
        if self.source.containers is not None:
            each_task = min(max(-(-len(batch) // most), 1), _VIRTUAL_FILES)
            parts = [each.part(each.start, each.stop) for each in batch]
            groups: Sequence[Sequence[FilePart]] = _parted(parts, each_task)
        else:
            nbytes = sum(each.file.nbytes for each in batch)
            most = max(most, nbytes // _TASK_BYTES[1])
            groups = write_groups(batch, [*there.chunks.values()], most, _TASK_BYTES[0])
        forks: list[Fork] = []
        unreadable: list[FailedFile] = []
        files: set[str] = set()
        nbytes = 0
        how = self.group, self.source
        write = self.runner.run(lambda: partial(_write, session.fork(), *how), groups)
        for group, written in zip(groups, write, strict=True):
            if isinstance(written, FailedFile):
                unreadable.append(written)
                continue
            forks.append(written)
            if len(forks) >= _MERGED:
                session.merge(*forks)
                forks.clear()
            for part in group:
                if part.url not in files:
                    files.add(part.url)
                    nbytes += part.nbytes
            step(len(files), nbytes)
        if unreadable:
            raise _FailedFilesError(unreadable)
        session.merge(*forks)


def _parted[Item](items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    return [items[first : first + size] for first in range(0, len(items), size)]
