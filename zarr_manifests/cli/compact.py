"""`zarr-manifests compact`: deltas, packs or statistics of a branch, and what was done."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from zarr_manifests.cli.arguments import Branch, DryRun, Json, Options, Url, open_at, several
from zarr_manifests.cli.as_json import print_json
from zarr_manifests.cli.console import columns, console, progress
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.plain import plain_text
from zarr_manifests.texts import bytes_text, count_text

if TYPE_CHECKING:
    from zarr_manifests.reports import CompactionReport, RepackReport, StatisticsReport

__all__ = ["run"]


class _Mode(StrEnum):
    MINOR = "minor"
    MAJOR = "major"
    FULL = "full"


def run(
    url: Url,
    branch: Branch = "main",
    mode: Annotated[
        _Mode | None,
        typer.Option(
            "--mode",
            help="minor: deltas become runs; major: also, what has piled up for manifests is "
            "merged into them; full: everything is packed anew.",
            show_default="major",
        ),
    ] = None,
    packs: Annotated[
        bool,
        typer.Option("--packs", help="Instead, move chunks out of packs that are mostly dead."),
    ] = False,
    min_live: Annotated[
        float | None,
        typer.Option(
            "--min-live",
            help="With --packs: the part of a pack that has to be live.",
            show_default="0.5",
        ),
    ] = None,
    statistics: Annotated[
        bool,
        typer.Option(
            "--statistics",
            help="Instead, measure chunks that have no statistics, so that queries can leave out "
            "those that differ.",
        ),
    ] = False,
    array: Annotated[
        list[str] | None, several("--array", text="With --statistics: of this array")
    ] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Merge the deltas of a branch, as a commit that changes no data."""
    if packs + statistics + (mode is not None) > 1:
        raise InvalidArgumentError("give one of --mode, --packs and --statistics")
    if (min_live is not None and not packs) or (array and not statistics):
        raise InvalidArgumentError("--min-live goes with --packs, and --array with --statistics")
    if statistics and dry_run:
        raise InvalidArgumentError("--statistics takes no --dry-run")
    repo = open_at(url, option)
    if packs:
        live = 0.5 if min_live is None else min_live
        with progress("repacking") as told:
            repacked = repo.compact(
                branch, mode="packs", min_live=live, dry_run=dry_run, progress=told
            )
        print_json(repacked) if as_json else _show_repacking(repacked)
    elif statistics:
        with progress("measuring") as told:
            measured = repo.compute_statistics(array, branch=branch, progress=told)
        print_json(measured) if as_json else _show_statistics(measured)
    else:
        with progress("compacting") as told:
            kind = (mode or _Mode.MAJOR).value
            report = repo.compact(branch, kind, dry_run=dry_run, progress=told)
        print_json(report) if as_json else _show(report, dry_run=dry_run)


def _show(report: CompactionReport, *, dry_run: bool) -> None:
    out = console()
    out.print(_table(report, dry_run=dry_run))
    if dry_run:
        out.print("nothing was written (--dry-run)")
    elif report.snapshot_id is None:
        out.print("there was nothing to do, or somebody else was faster")
    else:
        out.print(report.snapshot_id, style="yellow")


def _table(report: CompactionReport, *, dry_run: bool) -> Table:
    table = columns("", "before", "after", right=("before", "after"), whole=("",))
    after = ("?", "?") if dry_run else (f"{report.deltas_after:,}", f"{report.manifests_after:,}")
    table.add_row("deltas and runs", f"{report.deltas_before:,}", after[0])
    table.add_row("manifests", f"{report.manifests_before:,}", after[1])
    table.add_row(
        "  to be written" if dry_run else "  written", "", f"{report.manifests_written:,}"
    )
    table.add_row("chunk refs in these", "", f"{report.refs_merged:,}")
    if not dry_run:
        table.add_row("read in all", "", bytes_text(report.bytes_read))
        table.add_row("written in all", "", bytes_text(report.bytes_written))
    return table


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


def _show_statistics(report: StatisticsReport) -> None:
    table = columns("array", "chunks", "measured", "", right=("chunks", "measured"))
    for one in report.arrays:
        left = one.chunks - one.known - one.measured
        said = one.skipped or (f"{count_text(left, 'chunk')} not decoded" if left else "")
        table.add_row(plain_text(one.path), f"{one.chunks:,}", f"{one.measured:,}", said)
    console().print(table)
