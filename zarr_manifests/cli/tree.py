"""`zarr-manifests tree`: the groups and arrays of one snapshot.

Walking the hierarchy only reads the snapshot's node table. Counting chunks also reads manifests, so
it is optional.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from zarr_manifests.cli.arguments import Json, Options, Url, Version, open_at
from zarr_manifests.cli.as_json import print_json
from zarr_manifests.cli.console import columns, console
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.plain import plain_text
from zarr_manifests.texts import bytes_text, count_text
from zarr_manifests.versions import VersionName

if TYPE_CHECKING:
    from zarr_manifests.display import Row
    from zarr_manifests.engine.snapshot.view import SnapshotView
    from zarr_manifests.format.nodes import Node
    from zarr_manifests.reports import ArrayStatistics
    from zarr_manifests.repository import Repository

__all__ = ["run"]


def run(
    url: Url,
    version: Version = "main",
    chunks: Annotated[
        bool,
        typer.Option(
            "--chunks",
            help="Count the chunks that are there instead of showing units; reads manifests.",
        ),
    ] = False,
    stats: Annotated[
        bool,
        typer.Option("--stats", help="Say how many chunks have statistics; reads manifests."),
    ] = False,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Show groups and arrays: dimensions, type, chunk shape and units."""
    from zarr_manifests.display import hierarchy
    from zarr_manifests.engine.compact.compute_statistics import statistics_of
    from zarr_manifests.store import contents_of

    if chunks and stats:
        raise InvalidArgumentError("--chunks or --stats, not both")
    repo = open_at(url, option)
    contents = contents_of(repo.readonly_session(version).store)
    view = contents.view
    branch = _branch_of(repo, version) if stats else None
    last = ("there", "stored") if chunks else ("statistics",) if stats else ("units",)
    numbers = last if chunks else ()
    whole = ("", "type") if chunks else ("", "type", "dimensions")
    table = columns("", "dimensions", "type", "chunk", *last, right=numbers, whole=whole)
    for row in hierarchy(view.nodes):
        name, array = row.guide + plain_text(row.name), row.node.array
        measured = (
            statistics_of(contents.context, view, row.node, branch) if stats and array else None
        )
        if as_json:
            print_json(_record(view, row, measured, chunks=chunks))
            continue
        if array is None:
            table.add_row(name)
            continue
        cells = [name, plain_text(row.dimensions), plain_text(row.type), row.chunk]
        if chunks:
            count, nbytes = _stored(view, row.node)
            cells += [f"{count:,}/{array.grid.size:,}", bytes_text(nbytes)]
        elif measured is not None:
            cells.append(_described(measured))
        else:
            cells.append(plain_text(row.units))
        table.add_row(*cells)
    if as_json:
        return
    out = console()
    out.print(view.snapshot_id, style="yellow")
    if table.row_count:
        out.print(table)
    else:
        out.print("(empty)")


def _branch_of(repo: Repository, version: str) -> str | None:
    """The branch that the version is named by: its index has the statistics."""
    name = VersionName.parse(version).name
    return name if name in repo.list_branches() else None


def _record(
    view: SnapshotView, row: Row, measured: ArrayStatistics | None, *, chunks: bool
) -> dict[str, Any]:
    """A node for JSON: of a group the path, of an array what its documents say."""
    node, array = row.node, row.node.array
    found: dict[str, Any] = {"path": f"/{node.path}", "node_type": "group"}
    if array is None:
        return found
    found |= {
        "node_type": "array",
        "shape": array.shape,
        "chunk_shape": array.chunk_shape,
        "dimensions": array.dimension_names,
        "data_type": row.type,
        "units": row.units or None,
    }
    if chunks:
        count, nbytes = _stored(view, node)
        found |= {"initialized_chunks": count, "total_chunks": array.grid.size, "nbytes": nbytes}
    if measured is not None:
        found["statistics"] = measured
    return found


def _described(found: ArrayStatistics) -> str:
    if found.skipped:
        return f"none: {found.skipped}"
    if not found.known:
        return "none" if found.chunks else "no chunks"
    if found.complete:
        return f"all of {count_text(found.chunks, 'chunk')}"
    return f"{found.known:,} of {count_text(found.chunks, 'chunk')}"


def _stored(view: SnapshotView, node: Node) -> tuple[int, int]:
    table = view.chunks(node.node_id)
    return (0, 0) if table is None else (len(table), int(table.length.sum()))
