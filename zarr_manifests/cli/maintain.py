"""`zarr-manifests clean`, `verify` and `recover`."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

import zarr_manifests as zm
from zarr_manifests.cli.arguments import (
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
from zarr_manifests.texts import bytes_text, count_text

if TYPE_CHECKING:
    from zarr_manifests.reports import CleanReport, CollectionReport, ExpiryReport, VerifyReport
    from zarr_manifests.repository import Repository
    from zarr_manifests.storage import Storage

__all__ = ["run_clean", "run_recover", "run_verify"]


def run_clean(
    url: Url,
    keep: Annotated[
        str | None,
        typer.Option(
            "--keep",
            help="Expire old versions first: keep so many of each branch, as 10; or what is "
            "younger, as 30d; or what the configuration says, by the word config.",
            show_default=False,
        ),
    ] = None,
    no_collect: Annotated[
        bool, typer.Option("--no-collect", help="Only expire, and delete nothing.")
    ] = False,
    grace: Annotated[
        str, typer.Option("--grace", help="How long writers without a lease can go on, as 24h.")
    ] = "24h",
    dry_run: DryRun = False,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Delete what nothing refers to, and say what is still held, by what; --keep expires first.

    It is safe beside writers and readers.
    """
    if no_collect and keep is None:
        raise InvalidArgumentError("--no-collect goes with --keep")
    wait, count, age = _duration(grace), None, None
    if keep is not None and keep.isdecimal() and len(keep) < 19:
        count = int(keep)
    elif keep not in (None, "config"):
        age = _duration(keep)
    kept = age if count is None else count
    repo = open_at(url, option)
    report: CleanReport | CollectionReport | ExpiryReport
    with progress("cleaning") as told:
        if keep is None:
            report = repo.garbage_collect(wait, dry_run=dry_run, progress=told)
        elif no_collect:
            report = repo.expire_snapshots(count, age, dry_run=dry_run, progress=told)
        else:
            report = repo.clean(kept, wait, dry_run=dry_run, progress=told)
    print_json(report) if as_json else _show_cleaning(report)


def _show_cleaning(report: CleanReport | CollectionReport | ExpiryReport) -> None:
    from zarr_manifests.reports import CollectionReport, ExpiryReport

    if isinstance(report, CollectionReport):
        _show_collection(report)
    elif isinstance(report, ExpiryReport):
        _show_expiry(report)
    else:
        console().print(str(report), soft_wrap=True)


def _show_expiry(report: ExpiryReport) -> None:
    verb = "would expire" if report.dry_run else "expired"
    table = columns("branch", verb, "kept", right=(verb, "kept"), whole=("branch",))
    for name, kept in sorted(report.kept.items()):
        table.add_row(name, f"{len(report.expired.get(name, ())):,}", f"{kept:,}")
    console().print(table)


def _show_collection(report: CollectionReport) -> None:
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


def run_recover(
    url: Url,
    to: Annotated[
        int | None,
        typer.Option(
            "--to",
            metavar="NUMBER",
            help="Set branches and tags back to this version of the root, as `log --ops` lists "
            "them; the root may be sound.",
            show_default=False,
        ),
    ] = None,
    dry_run: DryRun = False,
    collections_ended: Annotated[
        bool,
        typer.Option("--collections-ended", help="Say that no collection is running."),
    ] = False,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Make a new root of the newest archive if it is lost; or set branches and tags back."""
    if to is not None:
        if collections_ended:
            raise InvalidArgumentError("give --to or --collections-ended, not both")
        _set_back(open_at(url, option), to, dry_run, as_json)
        return
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


def _set_back(repo: Repository, version: int, dry_run: bool, as_json: bool) -> None:
    """Set branches and tags back to what they were in an older version of the root."""
    report = zm.recover(repo, version, dry_run=dry_run)
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
        f"branches and tags {said} those of version {version} again"
        + ("" if dry_run else "; `log --ops` lists this, too")
    )


def _duration(text: str) -> timedelta:
    from zarr_manifests.config.repository_config import duration_of

    try:
        found = timedelta(0) if text.strip() == "0" else duration_of(text)
    except OverflowError as error:
        raise InvalidArgumentError(f"{text[:40]!r} is too long") from error
    if found is None:
        raise InvalidArgumentError(
            f"{text[:40]!r} is not a duration; write it as 30d, 24h, 10m or 0s"
        )
    return found
