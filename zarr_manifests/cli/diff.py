"""`zarr-manifests diff`: what changed from one snapshot to a later one."""

from __future__ import annotations

from typing import Annotated

import typer

from zarr_manifests.cli.console import Url, console, count_text, plain_text, snapshot_at
from zarr_manifests.history import moved_tops
from zarr_manifests.repository import Repository

__all__ = ["run"]

_Ref = Annotated[
    str, typer.Argument(help="The id of a snapshot, a branch or a tag.", show_default=False)
]


def run(url: Url, start: _Ref, end: _Ref) -> None:
    """Show what changed after START up to END: nodes made, changed, gone, moved; and chunks."""
    repo = Repository.open(url)
    found = repo.diff(snapshot_at(repo, start), snapshot_at(repo, end))
    lines = [f"+ {path}" for path in found.created]
    lines += [f"~ {path}" for path in found.updated]
    lines += [f"- {path}" for path in found.deleted]
    lines += [f"> {old} to {new}" for old, new in moved_tops(found.moved).items()]
    for path, coords in found.chunks.items():
        lines.append(f"  {path}: {count_text(len(coords), 'chunk')}")
    out = console()
    for line in lines or ["no changes"]:
        out.print(plain_text(line), soft_wrap=True)
