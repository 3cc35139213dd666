"""`zarr-manifests log`: the history of a branch, tag or snapshot, newest first."""

from __future__ import annotations

import sys
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from zarr_manifests.cli.console import (
    Branch,
    Options,
    SnapshotId,
    Tag,
    Url,
    console,
    open_at,
)
from zarr_manifests.plain import plain_text
from zarr_manifests.texts import time_text, totals_text, written_text

if TYPE_CHECKING:
    from zarr_manifests.reports import SnapshotInfo
    from zarr_manifests.repository import Repository

__all__ = ["run"]


def run(
    url: Url,
    branch: Branch = None,
    tag: Tag = None,
    snapshot: SnapshotId = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=0, help="At most so many snapshots; 0 for all.")
    ] = 20,
    option: Options = None,
) -> None:
    """Show the history, newest first: snapshot, time, kind, refs, message and size."""
    repo = open_at(url, option)
    most = limit + 1 if limit else None  # one more shows whether there are older ones
    history = repo.ancestry(branch=branch, tag=tag, snapshot_id=snapshot, limit=most)
    names = _ref_names(repo)
    out = console()
    for info in islice(history, min(limit, sys.maxsize) or None):
        out.print(_entry(info, names.get(info.snapshot_id, [])), soft_wrap=True)
    if limit and next(history, None) is not None:
        out.print(Text(f"... and older ones: -n {limit * 10} shows more, -n 0 all", "dim"))


def _ref_names(repo: Repository) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for branch, snapshot_id in repo.list_branches().items():
        names.setdefault(snapshot_id, []).append(branch)
    for tag, snapshot_id in repo.list_tags().items():
        names.setdefault(snapshot_id, []).append(f"tag {tag}")
    return names


def _entry(info: SnapshotInfo, refs: list[str]) -> Text:
    entry = Text()
    entry.append(info.snapshot_id, "yellow")
    entry.append(f"  {time_text(info.written_at)}  ")
    entry.append(info.kind, "cyan")
    if refs:
        entry.append(f"  ({', '.join(refs)})", "bold green")
    entry.append(f"\n    {plain_text(info.message)}")
    done, there = written_text(info.written), totals_text(info.totals)
    facts = "; ".join(part for part in (done, there and f"in all {there}") if part)
    return entry.append(f"  [{facts}]", "dim") if facts else entry
