"""`zarr-manifests tree`: the groups and arrays of one snapshot.

Walking the hierarchy only reads the snapshot's node table. Counting chunks also reads manifests, so
it is optional.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from zarr_manifests.cli.console import (
    Branch,
    Options,
    SnapshotId,
    Tag,
    Url,
    columns,
    console,
    session_at,
)
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.plain import plain_text
from zarr_manifests.texts import bytes_text, count_text

if TYPE_CHECKING:
    from zarr_manifests.engine.snapshot.view import SnapshotView
    from zarr_manifests.format.nodes import Node
    from zarr_manifests.keys import ArrayMeta
    from zarr_manifests.reports import ArrayStatistics

__all__ = ["run"]


def run(
    url: Url,
    branch: Branch = None,
    tag: Tag = None,
    snapshot: SnapshotId = None,
    chunks: Annotated[
        bool,
        typer.Option(
            "--chunks",
            "-c",
            help="Count the chunks that are there instead of showing units; reads manifests.",
        ),
    ] = False,
    stats: Annotated[
        bool,
        typer.Option("--stats", help="Say how many chunks have statistics; reads manifests."),
    ] = False,
    option: Options = None,
) -> None:
    """Show groups and arrays: dimensions, type, chunk shape and units."""
    from zarr_manifests.display import hierarchy
    from zarr_manifests.engine.compact.compute_statistics import statistics_of
    from zarr_manifests.store import contents_of

    if chunks and stats:
        raise InvalidArgumentError("--chunks or --stats, not both")
    session = session_at(url, option, branch, tag, snapshot)
    contents = contents_of(session.store)
    view = contents.view
    last = ("there", "stored") if chunks else ("statistics",) if stats else ("units",)
    numbers = last if chunks else ()
    whole = ("", "type") if chunks else ("", "type", "dimensions")
    table = columns("", "dimensions", "type", "chunk", *last, right=numbers, whole=whole)
    for row in hierarchy(view.nodes):
        name, array = row.guide + plain_text(row.name), row.node.array
        if array is None:
            table.add_row(name)
            continue
        cells = [name, plain_text(row.dimensions), plain_text(row.type), row.chunk]
        if chunks:
            cells += _stored(view, row.node, array)
        elif stats:
            cells.append(_described(statistics_of(contents.context, view, row.node, branch)))
        else:
            cells.append(plain_text(row.units))
        table.add_row(*cells)
    out = console()
    out.print(view.snapshot_id, style="yellow")
    if table.row_count:
        out.print(table)
    else:
        out.print("(empty)")


def _described(found: ArrayStatistics) -> str:
    if found.skipped:
        return f"none: {found.skipped}"
    if not found.known:
        return "none" if found.chunks else "no chunks"
    if found.complete:
        return f"all of {count_text(found.chunks, 'chunk')}"
    return f"{found.known:,} of {count_text(found.chunks, 'chunk')}"


def _stored(view: SnapshotView, node: Node, array: ArrayMeta) -> list[str]:
    table = view.chunks(node.node_id)
    count, nbytes = (0, 0) if table is None else (len(table), int(table.length.sum()))
    return [f"{count:,}/{array.grid.size:,}", bytes_text(nbytes)]
