"""`zarr-manifests show`: one commit, what it says and what it has changed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from zarr_manifests.cli.arguments import Json, Options, Url, Version, open_at
from zarr_manifests.cli.as_json import plain, print_json
from zarr_manifests.cli.console import columns, console
from zarr_manifests.cli.diff import change_lines, change_record
from zarr_manifests.cli.log import entry, snapshot_record
from zarr_manifests.error_cases import HistoryExpiredError
from zarr_manifests.plain import plain_text
from zarr_manifests.versions import refs_by_snapshot, short_ids

if TYPE_CHECKING:
    from zarr_manifests.reports import Change, SnapshotInfo
    from zarr_manifests.repository import Repository

__all__ = ["run"]


def run(
    url: Url,
    version: Version = "main",
    coordinates: Annotated[
        bool, typer.Option("--coordinates", help="The coordinates of the chunks, too.")
    ] = False,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Show one commit: its message and metadata, and the nodes and chunks it has changed."""
    repo = open_at(url, option)
    info = next(repo.ancestry(version, limit=1))
    refs = refs_by_snapshot(repo.list_branches(), repo.list_tags()).get(info.id, ())
    changes = _changes(repo, info)
    if as_json:
        found = None if changes is None else [change_record(one, coordinates) for one in changes]
        print_json({**snapshot_record(info, refs), "changes": found})
        return
    out = console()
    out.print(entry(info, refs, short_ids([info.id])[info.id]), soft_wrap=True)
    facts = columns("", "", whole=("",))
    facts.show_header = False
    facts.columns[0].style = "dim"
    facts.add_row("parent", info.parent_id or "none: it is the first")
    for name, value in info.metadata.items():
        facts.add_row(plain_text(name), plain_text(json.dumps(plain(value), ensure_ascii=False)))
    out.print(facts)
    if changes is None:
        out.print(Text("what it has changed is not known: the commit before has expired", "dim"))
        return
    for line in change_lines(changes, coordinates):
        out.print(plain_text(line), soft_wrap=True)
    if not changes:
        out.print("no changes")


def _changes(repo: Repository, info: SnapshotInfo) -> list[Change] | None:
    """What the commit has changed; None if the one before has expired."""
    if info.parent_id is None:
        return []
    try:
        return [*repo.changes(info.parent_id, info.snapshot_id)]
    except HistoryExpiredError:
        return None
