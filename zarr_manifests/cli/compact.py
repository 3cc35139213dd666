"""`zarr-manifests compact`: compact a branch's deltas, and report what was done."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from zarr_manifests.cli.arguments import Branch, DryRun, Json, Options, Url, open_at
from zarr_manifests.cli.as_json import print_json
from zarr_manifests.cli.console import columns, console, progress
from zarr_manifests.texts import bytes_text

if TYPE_CHECKING:
    from zarr_manifests.reports import CompactionReport

__all__ = ["run"]


class _Mode(StrEnum):
    MINOR = "minor"
    MAJOR = "major"
    FULL = "full"


def run(
    url: Url,
    branch: Branch = "main",
    mode: Annotated[
        _Mode,
        typer.Option(
            "--mode",
            "-m",
            help="minor: deltas become runs; major: also, what has piled up for manifests is "
            "merged into them; full: everything is packed anew.",
        ),
    ] = _Mode.MAJOR,
    dry_run: DryRun = False,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Merge the deltas of a branch, as a commit that changes no data."""
    repo = open_at(url, option)
    with progress("compacting") as told:
        report = repo.compact(branch, mode.value, dry_run=dry_run, progress=told)
    if as_json:
        print_json(report)
        return
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
