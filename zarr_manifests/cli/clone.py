"""`zarr-manifests clone`: a repository at another place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

import zarr_manifests as zm
from zarr_manifests.cli.arguments import (
    Json,
    Options,
    ToOptions,
    Url,
    as_given,
    complete_branches,
    open_at,
    storage_options,
)
from zarr_manifests.cli.as_json import print_json
from zarr_manifests.cli.console import columns, console, progress
from zarr_manifests.texts import bytes_text, count_text

if TYPE_CHECKING:
    from zarr_manifests.reports import CloneReport

__all__ = ["run"]

_Dest = Annotated[
    str,
    typer.Argument(help="Where to: an empty place, or a clone made before.", show_default=False),
]
_History = Annotated[
    str | None,
    typer.Option(
        "--history",
        help="all, or only the head of each branch that is new there.",
        show_default="all",
    ),
]
_Branches = Annotated[
    list[str] | None,
    typer.Option(
        "--branch",
        "-b",
        help="Only these branches, main among them.",
        show_default="all",
        autocompletion=complete_branches,
    ),
]


def run(
    url: Url,
    dest: _Dest,
    history: _History = None,
    branch: _Branches = None,
    as_json: Json = False,
    option: Options = None,
    to_option: ToOptions = None,
) -> None:
    """Copy a repository to another place, or bring its clone there up to date."""
    options = storage_options(dest, to_option, "--to-option")
    repo, depth = open_at(url, option), as_given(history)
    with progress("cloning") as told:
        report = zm.clone(repo, dest, depth, branch, storage_options=options, progress=told)
    if as_json:
        print_json(report)
    else:
        _show(report)


def _show(report: CloneReport) -> None:
    table = columns("branch", "at", whole=("branch", "at"))
    for name, snapshot in report.branches.items():
        table.add_row(name, snapshot)
    out = console()
    out.print(table)
    copied = f"{count_text(report.objects, 'object')} copied ({bytes_text(report.nbytes)})"
    facts = [f"{count_text(report.snapshots, 'new snapshot')}", copied]
    if report.within_store:
        facts.append(f"{report.within_store:,} of them by the store itself")
    if report.skipped:
        facts.append(f"{report.skipped:,} there already")
    if report.virtual:
        facts.append(f"{count_text(report.virtual, 'chunk')} in files elsewhere, not copied")
    out.print("; ".join(facts))
