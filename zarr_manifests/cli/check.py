"""`zarr-manifests check`: what a place can be used for, and why not for more."""

from __future__ import annotations

import typer
from rich.text import Text

from zarr_manifests.cli.arguments import Json, Options, Url, storage_options
from zarr_manifests.cli.as_json import print_json
from zarr_manifests.cli.console import columns, console
from zarr_manifests.plain import plain_text

__all__ = ["run"]


def run(url: Url, as_json: Json = False, option: Options = None) -> None:
    """Try out what a place can be used for: it writes some objects there and deletes them."""
    from zarr_manifests.storage import check

    report = check(url, storage_options=storage_options(url, option))
    if as_json:
        print_json(report)
    else:
        table = columns("", "", whole=("",))
        table.add_row("usable for", report.usable_for)
        for name, value, unit in (
            ("latency", report.latency_ms, "ms"),
            ("reading", report.read_mb_per_s, "MB/s"),
            ("writing", report.write_mb_per_s, "MB/s"),
        ):
            table.add_row(name, "?" if value is None else f"{value:,.1f} {unit}")
        out = console()
        out.print(plain_text(report.url), style="yellow")
        out.print(table)
        for problem in report.problems:
            out.print(Text(plain_text(problem)))
    if report.usable_for == "nothing":
        raise typer.Exit(1)
