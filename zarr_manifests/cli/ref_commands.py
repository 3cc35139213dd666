"""`zarr-manifests branch` and `tag`: list, make, move and delete names of snapshots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from zarr_manifests.cli.arguments import Json, Options, Url, complete_versions, open_at
from zarr_manifests.cli.as_json import print_json
from zarr_manifests.cli.console import columns, console
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.plain import plain_text
from zarr_manifests.versions import is_short_id

__all__ = ["run_branch", "run_tag"]

_Name = Annotated[
    str | None,
    typer.Argument(
        help="The one to make or delete.", show_default=False, autocompletion=complete_versions
    ),
]
_At = Annotated[
    str | None,
    typer.Argument(
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
    version: _At = None,
    move: Annotated[
        bool, typer.Option("--move", help="Move a branch that is there to VERSION.")
    ] = False,
    expected: Annotated[
        str | None,
        typer.Option(
            "--expected",
            metavar="ID",
            help="With --move: drop commits, if this snapshot is the head.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="With --move: drop commits, whatever there are.")
    ] = False,
    delete: _Delete = False,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """List branches, or make, move or delete one; only --expected and --force drop commits."""
    if move and (name is None or version is None or delete):
        raise InvalidArgumentError("--move takes a NAME and a VERSION")
    if not move and (force or expected is not None):
        raise InvalidArgumentError("--expected and --force go with --move")
    repo = open_at(url, option)

    def move_there(name: str, version: str | None) -> None:
        assert version is not None
        from zarr_manifests.repository import resolved

        known = resolved(repo, expected) if expected and is_short_id(expected) else expected
        repo.reset_branch(name, version, force=force, expected=known)
        if not as_json:
            head = repo.list_branches()[name]
            console().print(plain_text(f"{name} is at {head}"), soft_wrap=True)

    put = move_there if move else repo.create_branch
    _run(name, version, delete, as_json, repo.list_branches, put, repo.delete_branch)


def run_tag(
    url: Url,
    name: _Name = None,
    version: _At = None,
    delete: _Delete = False,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """List tags, or make or delete one; a deleted name is never used again."""
    repo = open_at(url, option)
    _run(name, version, delete, as_json, repo.list_tags, repo.create_tag, repo.delete_tag)


def _run(
    name: str | None,
    version: str | None,
    delete: bool,
    as_json: bool,
    list_all: Callable[[], dict[str, str]],
    put: Callable[[str, str | None], None],
    remove: Callable[[str], None],
) -> None:
    if delete and (name is None or version is not None):
        raise InvalidArgumentError("--delete takes a NAME, and no VERSION")
    if name is not None and delete:
        remove(name)
        return
    if name is not None:
        put(name, version)
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
