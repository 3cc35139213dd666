"""`zarr-manifests clean`, `expire`, `gc`, `repack`, `verify`, `ops`, `restore` and `recover`."""

from __future__ import annotations

import sys
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

import zarr_manifests as zm
from zarr_manifests.cli.arguments import (
    Branch,
    DryRun,
    Json,
    Options,
    Url,
    open_at,
    storage_options,
)
from zarr_manifests.cli.as_json import print_json
from zarr_manifests.cli.console import columns, console, progress
from zarr_manifests.errors import InvalidArgumentError, ManifestsError
from zarr_manifests.plain import plain_text
from zarr_manifests.progress import counted
from zarr_manifests.texts import bytes_text, count_text, time_text

if TYPE_CHECKING:
    from zarr_manifests.reports import (
        CollectionReport,
        LoggedOperation,
        RepackReport,
        VerifyReport,
    )
    from zarr_manifests.storage import Storage

__all__ = [
    "run_clean",
    "run_expire",
    "run_gc",
    "run_ops",
    "run_recover",
    "run_repack",
    "run_restore",
    "run_statistics",
    "run_verify",
]

_SHOWN = 50

_CollectionsEnded = Annotated[
    bool, typer.Option("--collections-ended", help="Say that no collection of garbage is running.")
]
_KeepLast = Annotated[
    int | None,
    typer.Option("--keep-last", help="Keep so many of each branch.", show_default=False),
]
_MaxAge = Annotated[
    str | None,
    typer.Option("--max-age", help="Keep what is younger, as 30d or 12h.", show_default=False),
]
_Grace = Annotated[
    str, typer.Option("--grace", help="How long writers without a lease can go on, as 24h.")
]
_Version = Annotated[
    int,
    typer.Argument(metavar="NUMBER", help="A version that `ops` lists.", show_default=False),
]
_Limit = Annotated[
    int, typer.Option("--limit", "-n", min=0, help="At most so many operations; 0 for all.")
]


def run_expire(
    url: Url,
    keep_last: _KeepLast = None,
    max_age: _MaxAge = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Remove old snapshots from the history; `gc` deletes what only they needed."""
    age = None if max_age is None else _duration(max_age)
    repo = open_at(url, option)
    with progress("following the history") as told:
        report = repo.expire_snapshots(keep_last, age, dry_run=dry_run, progress=told)
    if as_json:
        print_json(report)
        return
    verb = "would expire" if dry_run else "expired"
    table = columns("branch", verb, "kept", right=(verb, "kept"), whole=("branch",))
    for name, kept in sorted(report.kept.items()):
        table.add_row(name, f"{len(report.expired.get(name, ())):,}", f"{kept:,}")
    console().print(table)


def run_clean(
    url: Url,
    keep: Annotated[
        str | None,
        typer.Option(
            help="Keep so many versions of each branch, as 10, or what is younger, as 30d.",
            show_default=False,
        ),
    ] = None,
    grace: _Grace = "24h",
    dry_run: DryRun = False,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Free the space of old versions, and say what is still held, by what: expire, compact, gc."""
    counted_ones = keep is not None and keep.isdecimal()
    kept = None if keep is None else int(keep) if counted_ones else _duration(keep)
    repo, wait = open_at(url, option), _duration(grace)
    with progress("cleaning") as told:
        report = repo.clean(kept, wait, dry_run=dry_run, progress=told)
    if as_json:
        print_json(report)
    else:
        console().print(str(report), soft_wrap=True)


def run_gc(
    url: Url,
    grace: _Grace = "24h",
    dry_run: DryRun = False,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Delete objects that nothing refers to; safe beside writers and readers."""
    repo, wait = open_at(url, option), _duration(grace)
    with progress("collecting") as told:
        report = repo.garbage_collect(wait, dry_run=dry_run, progress=told)
    print_json(report) if as_json else _show(report)


def run_repack(
    url: Url,
    branch: Branch = "main",
    min_live: Annotated[
        float, typer.Option("--min-live", help="The part of a pack that has to be live.")
    ] = 0.5,
    dry_run: DryRun = False,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Move chunks out of packs that are mostly dead, as a commit that changes no data."""
    repo = open_at(url, option)
    with progress("repacking") as told:
        report = repo.repack(branch, min_live, dry_run=dry_run, progress=told)
    print_json(report) if as_json else _show_repacking(report)


def run_statistics(
    url: Url,
    paths: Annotated[
        list[str] | None, typer.Argument(help="The arrays; by default all.", show_default=False)
    ] = None,
    branch: Branch = "main",
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Measure chunks that have no statistics, so that queries can leave out those that differ."""
    repo = open_at(url, option)
    with progress("measuring") as told:
        report = repo.compute_statistics(paths, branch=branch, progress=told)
    if as_json:
        print_json(report)
        return
    table = columns("array", "chunks", "measured", "", right=("chunks", "measured"))
    for one in report.arrays:
        left = one.chunks - one.known - one.measured
        said = one.skipped or (f"{count_text(left, 'chunk')} not decoded" if left else "")
        table.add_row(plain_text(one.path), f"{one.chunks:,}", f"{one.measured:,}", said)
    console().print(table)


def run_verify(url: Url, as_json: Json = False, option: Options = None) -> None:
    """Read everything that can be reached; exit code 1 if anything is wrong."""
    repo = open_at(url, option)
    with progress("verifying") as told:
        report = repo.verify(progress=told)
    if as_json:
        print_json(report)
    else:
        _show_verifying(repo.storage, report)
    if not report.ok:
        raise typer.Exit(1)


def _show_verifying(storage: Storage, report: VerifyReport) -> None:
    from zarr_manifests.keys import V3_DOCUMENT

    out = console()
    for problem in report.problems:
        out.print(plain_text(problem), soft_wrap=True)
    parts = [
        count_text(report.objects, "metadata object"),
        f"{count_text(report.chunks, 'chunk')} in {count_text(report.chunk_objects, 'object')}",
        bytes_text(report.nbytes),
    ]
    if report.unguarded:
        said = count_text(report.unguarded, "virtual chunk")
        out.print(f"{said} without an etag or a time: a change of the file is not noticed")
    if _is_there(storage, V3_DOCUMENT):
        out.print(f"{V3_DOCUMENT} is not part of the repository: zarr.open leaves one; delete it")
    found = "sound" if report.ok else count_text(len(report.problems), "problem")
    out.print(f"{found}: {', '.join(parts)}")


def _is_there(storage: Storage, key: str) -> bool:
    try:
        storage.head(key)
    except ManifestsError:
        return False
    return True


def run_ops(
    url: Url, limit: _Limit = _SHOWN, as_json: Json = False, option: Options = None
) -> None:
    """Show who did what to which branch or tag, newest first."""
    taken = islice(open_at(url, option).ops_log(), min(limit, sys.maxsize) or None)
    with progress("reading the log") as told:
        operations = [*counted(told, "reading the log", taken)]
    if as_json:
        print_json(*operations)
        return
    table = columns("version", "when", "who", "what", "ref", "snapshot", right=("version",))
    for one in operations:
        who, what, ref = map(plain_text, (one.by, _told(one), one.ref))
        table.add_row(str(one.version), time_text(one.at), who, what, ref, one.snapshot_id)
    console().print(table)


def run_restore(
    url: Url,
    root_version: _Version,
    dry_run: DryRun = False,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Set branches and tags back to what they were in an older version of the root."""
    report = open_at(url, option).restore_refs(root_version, dry_run=dry_run)
    if as_json:
        print_json(report)
        return
    table = columns("what", "name", "was", "would be" if dry_run else "is now")
    for what, moved in (("branch", report.branches), ("tag", report.tags)):
        for name, (was, now) in moved.items():
            table.add_row(what, plain_text(name), was or "not there", now or "not there")
    out = console()
    if table.row_count:
        out.print(table)
    said = "would be" if dry_run else "are"
    out.print(
        f"branches and tags {said} those of version {root_version} again"
        + ("" if dry_run else "; `ops` lists this, too")
    )


def run_recover(
    url: Url,
    dry_run: DryRun = False,
    collections_ended: _CollectionsEnded = False,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Make a new root from the newest complete archive if the root is lost or damaged."""
    options = storage_options(url, option)
    with progress("looking for an archive") as told:
        report = zm.recover(
            url,
            dry_run=dry_run,
            collections_ended=collections_ended,
            progress=told,
            storage_options=options,
        )
    if as_json:
        print_json(report)
        return
    out = console()
    for version, why in report.skipped.items():
        out.print(plain_text(f"version {version} was not taken: {why}"), soft_wrap=True)
    table = columns("branch", "snapshot")
    for name, snapshot_id in report.branches.items():
        table.add_row(plain_text(name), snapshot_id)
    out.print(table)
    took = "would take version" if dry_run else "took version"
    now = "would be version" if dry_run else "is now version"
    out.print(
        f"{took} {report.recovered}; the root {now} {report.version}. What versions from "
        f"{report.recovered + 1} on did, if there were any, is not in it",
        soft_wrap=True,
    )


def _show(report: CollectionReport) -> None:
    from zarr_manifests.reports.upkeep_reports import held_lines

    verb = "would delete" if report.dry_run else "deleted"
    table = columns(verb, "objects", "bytes", right=("objects", "bytes"))
    for kind in sorted(report.objects):
        table.add_row(kind, f"{report.objects[kind]:,}", bytes_text(report.nbytes[kind]))
    table.add_row("all", f"{report.deleted:,}", bytes_text(report.deleted_nbytes), style="bold")
    out = console()
    out.print(table)
    facts = [
        f"{count_text(report.kept, 'object')} kept",
        f"fence at version {report.fence}",
    ]
    if report.leases_removed:
        facts.append(f"{count_text(report.leases_removed, 'lease')} over")
    if report.temporary_files:
        facts.append(f"{count_text(report.temporary_files, 'temporary file')} removed")
    out.print("; ".join(facts))
    for line in held_lines(report):
        out.print(plain_text(line), soft_wrap=True)


def _show_repacking(report: RepackReport) -> None:
    table = columns("", "number", "bytes", right=("number", "bytes"), whole=("",))
    table.add_row("objects with chunks", f"{report.objects:,}", bytes_text(report.nbytes))
    table.add_row("mostly dead packs", f"{report.packs:,}", bytes_text(report.packs_nbytes))
    verb = "to be moved" if report.dry_run else "moved"
    table.add_row(f"chunks {verb}", f"{report.chunks:,}", bytes_text(report.chunks_nbytes))
    table.add_row("dead bytes of these packs", "", bytes_text(report.dead_nbytes))
    if not report.dry_run:
        table.add_row("packs written", f"{report.packs_written:,}", "")
    out = console()
    out.print(table)
    if report.chunks_overtaken:
        others = count_text(report.chunks_overtaken, "chunk")
        out.print(f"{others} changed by others meanwhile, and left alone")
    if report.dry_run:
        out.print("nothing was written (--dry-run)")
    elif report.snapshot_id is None:
        out.print("there was nothing to move")
    else:
        out.print(report.snapshot_id, style="yellow")


def _duration(text: str) -> timedelta:
    from zarr_manifests.config.snapshots import duration_of

    try:
        found = timedelta(0) if text.strip() == "0" else duration_of(text)
    except OverflowError as error:
        raise InvalidArgumentError(f"{text[:40]!r} is too long") from error
    if found is None:
        raise InvalidArgumentError(
            f"{text[:40]!r} is not a duration; write it as 30d, 24h, 10m or 0s"
        )
    return found


def _told(one: LoggedOperation) -> str:
    return f"{one.operation} from {one.before}" if one.before else one.operation
