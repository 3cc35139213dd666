"""`zarr-manifests du`: chunks and bytes of every array of one snapshot, from manifests alone."""

from __future__ import annotations

from zarr_manifests.cli.console import (
    Branch,
    SnapshotId,
    Tag,
    Url,
    bytes_text,
    columns,
    console,
    plain_text,
    session_at,
)

__all__ = ["run"]


def run(url: Url, branch: Branch = None, tag: Tag = None, snapshot: SnapshotId = None) -> None:
    """Show how many chunks and bytes each array has: inline, native and virtual."""
    session = session_at(url, branch, tag, snapshot)
    arrays = session.du()
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
    out.print(session.snapshot_id, style="yellow")
    out.print(table)
