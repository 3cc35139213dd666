"""`zarr-manifests branch` and `tag`: list, make and delete names of snapshots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from zarr_manifests.cli.arguments import Json, Options, Url, complete_versions, open_at
from zarr_manifests.cli.as_json import print_json
from zarr_manifests.cli.console import columns, console
from zarr_manifests.errors import InvalidArgumentError

__all__ = ["run_branch", "run_tag"]

_Name = Annotated[
    str | None,
    typer.Argument(
        help="The one to make or delete.", show_default=False, autocompletion=complete_versions
    ),
]
_At = Annotated[
    str | None,
    typer.Option(
        "--at",
        "-a",
        metavar="VERSION",
        help="Make it at this version: a branch, tag, id or short id, main~3, ...",
        show_default="main",
        autocompletion=complete_versions,
    ),
]
_Delete = Annotated[bool, typer.Option("--delete", "-d", help="Delete it.")]


def run_branch(
    url: Url,
    name: _Name = None,
    at: _At = None,
    delete: _Delete = False,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """List branches, or create or delete one; `reset` moves one."""
    repo = open_at(url, option)
    calls = repo.list_branches, repo.create_branch, repo.delete_branch
    _run(name, at, delete, as_json, *calls)


def run_tag(
    url: Url,
    name: _Name = None,
    at: _At = None,
    delete: _Delete = False,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """List tags, or create or delete one; a deleted name is never used again."""
    repo = open_at(url, option)
    _run(name, at, delete, as_json, repo.list_tags, repo.create_tag, repo.delete_tag)


def _run(
    name: str | None,
    at: str | None,
    delete: bool,
    as_json: bool,
    list_all: Callable[[], dict[str, str]],
    create: Callable[[str, str | None], None],
    remove: Callable[[str], None],
) -> None:
    if (name is None and (delete or at is not None)) or (delete and at is not None):
        raise InvalidArgumentError("give a NAME with --at to make it there, or with --delete")
    if name is not None and delete:
        remove(name)
        return
    if name is not None:
        create(name, at)
    if as_json:
        known = list_all().items()
        print_json(*({"name": n, "snapshot_id": head} for n, head in known if name in (None, n)))
    elif name is None:
        table = columns("", "", whole=("",))
        table.show_header = False
        for known_name, snapshot_id in list_all().items():
            table.add_row(known_name, snapshot_id)
        if table.row_count:
            console().print(table)
