"""`zarr-manifests du`: chunks and bytes of the arrays of one snapshot; no chunk is read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from zarr_manifests.cli.arguments import Json, Options, Url, Version, open_at
from zarr_manifests.cli.as_json import print_json
from zarr_manifests.cli.console import columns, console, progress
from zarr_manifests.plain import plain_text
from zarr_manifests.texts import bytes_text

if TYPE_CHECKING:
    from zarr_manifests.reports import Amount, Usage

__all__ = ["run"]


def run(
    url: Url,
    version: Version = "main",
    path: Annotated[str | None, typer.Option("--array", help="Only this array.")] = None,
    estimate: Annotated[
        bool,
        typer.Option("--estimate", help="By what the snapshot says itself: no manifest is read."),
    ] = False,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Show how many chunks and bytes each array has, and how many more than one commit before."""
    repo = open_at(url, option)
    with progress("reading manifests") as told:
        usage = repo.du(version, path=path, estimate=estimate, progress=told)
    print_json(usage) if as_json else _print(usage)


def _print(usage: Usage) -> None:
    kinds = ("inline", "native", "virtual")
    apart = all(array.inline is not None for array in usage.arrays)
    numbers = ("chunks", "of", *(kinds if apart else ()), "bytes", "more chunks", "more bytes")
    table = columns("", *numbers, right=numbers, whole=("",))
    for array in usage.arrays:
        parts = [_amount(getattr(array, kind))[1] for kind in kinds] if apart else []
        grid = "" if array.grid_shape is None else f"{math.prod(array.grid_shape):,}"
        chunks, nbytes = _amount(array.total)
        row = (chunks, grid, *parts, nbytes, *_amount(array.growth))
        table.add_row(plain_text(array.path), *row)
    chunks, nbytes = _amount(usage.total)
    sums = [sum(getattr(array, kind).nbytes for array in usage.arrays) for kind in kinds if apart]
    row = (chunks, "", *map(bytes_text, sums), nbytes, *_amount(usage.growth))
    table.add_row("all", *row, style="bold")
    out = console()
    out.print(usage.snapshot_id, style="yellow")
    out.print(table)
    if not usage.exact:
        out.print(Text("<= at most: what commits overwrite or remove they do not look up", "dim"))


def _amount(amount: Amount) -> tuple[str, str]:
    chunks = f"{amount.chunks:,}" if amount.chunks_exact else f"<= {amount.chunks:,}"
    if amount.nbytes is None:
        return chunks, "?"
    nbytes = f"-{bytes_text(-amount.nbytes)}" if amount.nbytes < 0 else bytes_text(amount.nbytes)
    return chunks, nbytes if amount.nbytes_exact else f"<= {nbytes}"
