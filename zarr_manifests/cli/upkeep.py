"""`zarr-manifests verify`, `compact`, `clean`, `recover` and `check`."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any, Literal

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
    verb,
)
from zarr_manifests.cli.console import console, progress, show
from zarr_manifests.errors import InvalidArgumentError, ManifestsError

__all__ = ["run_check", "run_clean", "run_compact", "run_recover", "run_verify"]


@verb
def run_verify(url: Url, *, as_json: Json = False, option: Options = None) -> None:
    """Read everything that can be reached; exit code 1 if anything is wrong."""
    from zarr_manifests.keys import V3_DOCUMENT

    repo = open_at(url, option)
    with progress("verifying"):
        report = repo.verify()
    show(report, as_json)
    try:
        repo.storage.head(V3_DOCUMENT)
    except ManifestsError:
        stray = False
    else:
        stray = not as_json
    if stray:
        said = "is not part of the repository: zarr.open leaves one; delete it"
        console().print(f"{V3_DOCUMENT} {said}")
    if not report.ok:
        raise typer.Exit(1)


@verb
def run_compact(
    url: Url,
    *,
    branch: Branch = "main",
    mode: Literal["minor", "major", "full"] | None = None,
    packs: bool = False,
    min_live: float | None = None,
    statistics: bool = False,
    array: list[str] | None = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Merge the deltas of a branch, as a commit that changes no data.

    Parameters
    ----------
    mode :
        minor: deltas become runs; major (the default): also, what has piled up for manifests is
        merged into them; full: everything is packed anew.
    packs :
        Instead, move chunks out of packs that are mostly dead.
    min_live :
        With --packs: the part of a pack that has to be live, 0.5 by default.
    statistics :
        Instead, measure chunks that have no statistics, so that queries can leave out those that
        differ.
    array :
        With --statistics: of this array; may be given several times.
    """
    if packs + statistics + (mode is not None) > 1:
        raise InvalidArgumentError("give one of --mode, --packs and --statistics")
    if (min_live is not None and not packs) or (array and not statistics):
        raise InvalidArgumentError("--min-live goes with --packs, and --array with --statistics")
    if statistics and dry_run:
        raise InvalidArgumentError("--statistics takes no --dry-run")
    repo = open_at(url, option)
    report: Any
    with progress("measuring" if statistics else "compacting"):
        if statistics:
            report = repo.compute_statistics(array or None, branch=branch)
        else:
            how: Any = {} if min_live is None else {"min_live": min_live}
            how["mode"] = "packs" if packs else mode or "major"
            report = repo.compact(branch, dry_run=dry_run, **how)
    show(report, as_json)


@verb
def run_clean(
    url: Url,
    *,
    keep: str | None = None,
    no_collect: bool = False,
    grace: str = "24h",
    dry_run: DryRun = False,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Delete what nothing refers to, and say what is still held, by what; --keep expires first.

    It is safe beside writers and readers.

    Parameters
    ----------
    keep :
        Expire old versions first: keep so many of each branch, as 10; or what is younger, as 30d;
        or what the configuration says, by the word config.
    no_collect :
        Only expire, and delete nothing.
    grace :
        How long writers without a lease can go on, as 24h.
    """
    if no_collect and keep is None:
        raise InvalidArgumentError("--no-collect goes with --keep")
    wait, count, age = _duration(grace), None, None
    if keep is not None and keep.isdecimal() and len(keep) < 19:
        count = int(keep)
    elif keep not in (None, "config"):
        age = _duration(keep)
    repo = open_at(url, option)
    report: Any
    with progress("cleaning"):
        if keep is None:
            report = repo.garbage_collect(wait, dry_run=dry_run)
        elif no_collect:
            report = repo.expire_snapshots(count, age, dry_run=dry_run)
        else:
            kept = age if count is None else count
            report = repo.clean(kept, wait, dry_run=dry_run)
    show(report, as_json)


Version = Annotated[
    int | None,
    typer.Option(
        "--to",
        metavar="NUMBER",
        help="Set branches and tags back to this version of the root, as `log --ops` lists them; "
        "the root may be sound.",
        show_default=False,
    ),
]


@verb
def run_recover(
    url: Url,
    *,
    to: Version = None,
    dry_run: DryRun = False,
    collections_ended: bool = False,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Make a new root of the newest archive if it is lost; or set branches and tags back.

    Parameters
    ----------
    collections_ended :
        Say that no collection is running.
    """
    if to is not None and collections_ended:
        raise InvalidArgumentError("give --to or --collections-ended, not both")
    if to is not None:
        show(zm.recover(open_at(url, option), to, dry_run=dry_run), as_json)
        return
    how: Any = {"dry_run": dry_run, "collections_ended": collections_ended}
    options = storage_options(url, option)
    with progress("looking for an archive"):
        report = zm.recover(url, storage_options=options, **how)
    show(report, as_json)


@verb
def run_check(url: Url, *, as_json: Json = False, option: Options = None) -> None:
    """Try out what a place can be used for: it writes some objects there and deletes them."""
    from zarr_manifests.storage import check

    report = check(url, storage_options=storage_options(url, option))
    show(report, as_json)
    if report.usable_for == "nothing":
        raise typer.Exit(1)


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
