"""`zarr-manifests du`: chunks and bytes of the arrays of one snapshot; no chunk is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from zarr_manifests.cli.arguments import Json, Options, Url, Version, open_at
from zarr_manifests.cli.as_json import print_json
from zarr_manifests.cli.console import columns, console, progress
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.plain import plain_text
from zarr_manifests.texts import bytes_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zarr_manifests.reports import Amount, ArrayStats, ArrayUsage, Totals

__all__ = ["run"]


def run(
    url: Url,
    version: Version = "main",
    totals: Annotated[
        bool,
        typer.Option("--totals", help="By what the snapshot says itself: no manifest is read."),
    ] = False,
    path: Annotated[
        str | None, typer.Option("--array", help="How far this array is filled.")
    ] = None,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Show how many chunks and bytes each array has: inline, native and virtual."""
    if totals and path is not None:
        raise InvalidArgumentError("--totals or --array, not both")
    repo = open_at(url, option)
    if path is not None:
        stats = repo.du(version, path=path)
        print_json(stats) if as_json else _print_stats(stats)
        return
    session = repo.readonly_session(version)
    if totals:
        found = session.totals()
        print_json(found) if as_json else _print_totals(found)
        return
    with progress("reading manifests") as told:
        arrays = session.du(progress=told)
    if as_json:
        print_json({"snapshot_id": session.snapshot_id, "arrays": arrays})
    else:
        _print_usage(session.snapshot_id, arrays)


def _print_usage(snapshot_id: str, arrays: Sequence[ArrayUsage]) -> None:
    numbers = ("chunks", "inline", "native", "virtual", "bytes")
    table = columns("", *numbers, right=numbers, whole=("",))
    for array in arrays:
        parts = (array.inline_bytes, array.native_bytes, array.virtual_bytes, array.nbytes)
        table.add_row(plain_text(array.path), f"{array.chunks:,}", *map(bytes_text, parts))
    sums = (
        sum(array.inline_bytes for array in arrays),
        sum(array.native_bytes for array in arrays),
        sum(array.virtual_bytes for array in arrays),
        sum(array.nbytes for array in arrays),
    )
    chunks = sum(array.chunks for array in arrays)
    table.add_row("all", f"{chunks:,}", *map(bytes_text, sums), style="bold")
    out = console()
    out.print(snapshot_id, style="yellow")
    out.print(table)


def _print_stats(stats: ArrayStats) -> None:
    table = columns("", "chunks", "of", "bytes", right=("chunks", "of", "bytes"), whole=("",))
    nbytes = "?" if stats.stored_bytes is None else bytes_text(stats.stored_bytes)
    chunks, total = f"{stats.initialized_chunks:,}", f"{stats.total_chunks:,}"
    table.add_row(plain_text(stats.path), chunks, total, nbytes)
    console().print(table)


def _print_totals(totals: Totals) -> None:
    numbers = ("chunks", "bytes", "more chunks", "more bytes")
    table = columns("", *numbers, right=numbers, whole=("",))
    for array in totals.arrays:
        table.add_row(plain_text(array.path), *_amounts(array.total), *_amounts(array.delta))
    table.add_row("all", *_amounts(totals.total), *_amounts(totals.delta), style="bold")
    out = console()
    out.print(totals.snapshot_id, style="yellow")
    out.print(table)
    if not totals.exact:
        out.print(Text("<= at most: what commits overwrite or remove they do not look up", "dim"))


def _amounts(amount: Amount) -> tuple[str, str]:
    chunks = f"{amount.refs:,}" if amount.refs_exact else f"<= {amount.refs:,}"
    if amount.nbytes is None:
        return chunks, "?"
    nbytes = f"-{bytes_text(-amount.nbytes)}" if amount.nbytes < 0 else bytes_text(amount.nbytes)
    return chunks, nbytes if amount.nbytes_exact else f"<= {nbytes}"
