"""`zarr-manifests branch` and `tag`: list, make and delete names of snapshots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from zarr_manifests.cli.console import (
    Options,
    Url,
    columns,
    console,
    open_at,
)
from zarr_manifests.errors import InvalidArgumentError

__all__ = ["run_branch", "run_tag"]

_Name = Annotated[str | None, typer.Argument(help="The one to make or delete.", show_default=False)]
_At = Annotated[
    str | None,
    typer.Option(
        "--at", help="Make it at this snapshot, branch or tag.", show_default="main's head"
    ),
]
_Delete = Annotated[bool, typer.Option("--delete", "-d", help="Delete it.")]
_Reset = Annotated[bool, typer.Option("--reset", help="Move it, which is there, to --at.")]
_Force = Annotated[
    bool, typer.Option("--force", help="With --reset: drop commits of the branch, whatever it has.")
]
_Expected = Annotated[
    str | None,
    typer.Option(
        "--expected",
        help="With --reset: drop commits of the branch, if this snapshot is its head.",
        show_default=False,
    ),
]


def run_branch(
    url: Url,
    name: _Name = None,
    at: _At = None,
    delete: _Delete = False,
    reset: _Reset = False,
    force: _Force = False,
    expected: _Expected = None,
    option: Options = None,
) -> None:
    """List branches, or create, move or delete one."""
    repo = open_at(url, option)
    if not reset:
        if force or expected is not None:
            raise InvalidArgumentError("--force and --expected go with --reset")
        _run(name, at, delete, repo.list_branches, repo.create_branch, repo.delete_branch)
        return
    if name is None or at is None or delete:
        raise InvalidArgumentError("give a NAME and --at with --reset, and no --delete")
    repo.reset_branch(name, at, force=force, expected=expected)


def run_tag(
    url: Url, name: _Name = None, at: _At = None, delete: _Delete = False, option: Options = None
) -> None:
    """List tags, or create or delete one; a deleted name is never used again."""
    repo = open_at(url, option)
    _run(name, at, delete, repo.list_tags, repo.create_tag, repo.delete_tag)


def _run(
    name: str | None,
    at: str | None,
    delete: bool,
    list_all: Callable[[], dict[str, str]],
    create: Callable[[str, str | None], None],
    remove: Callable[[str], None],
) -> None:
    if (name is None and (delete or at is not None)) or (delete and at is not None):
        raise InvalidArgumentError("give a NAME with --at to make it there, or with --delete")
    if name is not None and delete:
        remove(name)
    elif name is not None:
        create(name, at)
    else:
        table = columns("", "", whole=("",))
        table.show_header = False
        for known, snapshot_id in list_all().items():
            table.add_row(known, snapshot_id)
        if table.row_count:
            console().print(table)
