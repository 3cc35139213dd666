"""`zarr-manifests branch`, `tag`, `merge`, `revert`, `cherry-pick` and `mv`: no chunk is copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import typer

from zarr_manifests.cli.arguments import (
    Branch,
    DryRun,
    Json,
    Message,
    Options,
    Url,
    Version,
    complete_branches,
    complete_versions,
    open_at,
    verb,
)
from zarr_manifests.cli.console import show
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.rendering import fact_table
from zarr_manifests.versions import is_short_id

__all__ = [
    "made",
    "run_branch",
    "run_cherry_pick",
    "run_merge",
    "run_mv",
    "run_revert",
    "run_tag",
]

Name = Annotated[
    str | None,
    typer.Argument(
        help="The one to make or delete.", show_default=False, autocompletion=complete_versions
    ),
]
Where = Annotated[
    str | None,
    typer.Argument(
        metavar="VERSION",
        help="Make it at this version: a branch, tag, id or short id, main~3, ...",
        show_default="main",
        autocompletion=complete_versions,
    ),
]
Delete = Annotated[bool, typer.Option("--delete", "-d", help="Delete it.")]
Into = Annotated[
    str,
    typer.Option("--into", help="The branch that gets them.", autocompletion=complete_branches),
]


@verb
def run_branch(
    url: Url,
    name: Name = None,
    version: Where = None,
    *,
    move: bool = False,
    expected: str | None = None,
    force: bool = False,
    delete: Delete = False,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """List branches, or make, move or delete one; only --expected and --force drop commits.

    Parameters
    ----------
    move :
        Move a branch that is there to VERSION.
    expected : ID
        With --move: drop commits, if this snapshot is the head.
    force :
        With --move: drop commits, whatever there are.
    """
    if move and (name is None or version is None or delete):
        raise InvalidArgumentError("--move takes a NAME and a VERSION")
    if not move and (force or expected is not None):
        raise InvalidArgumentError("--expected and --force go with --move")
    repo = open_at(url, option)

    def move_there(name: str, version: str) -> None:
        from zarr_manifests.repository import resolved

        known = resolved(repo, expected) if expected and is_short_id(expected) else expected
        repo.reset_branch(name, version, force=force, expected=known)
        if not as_json:
            show(f"{name} is at {repo.list_branches()[name]}", as_json)

    put: Callable[[str, Any], None] = move_there if move else repo.create_branch
    _run(name, version, delete, as_json, repo.list_branches, put, repo.delete_branch)


@verb
def run_tag(
    url: Url,
    name: Name = None,
    version: Where = None,
    *,
    delete: Delete = False,
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
    known = {one: head for one, head in list_all().items() if name in (None, one)}
    if as_json:
        for one, head in known.items():
            show({"name": one, "snapshot_id": head}, as_json)
    elif name is None and known:
        show(fact_table(known.items()), as_json)


@verb
def run_revert(
    url: Url,
    version: Version,
    *,
    branch: Branch = "main",
    message: Message = None,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Undo one commit of a branch in a new commit; the commits after it stay."""
    made(open_at(url, option).revert(version, branch, message), as_json)


@verb
def run_cherry_pick(
    url: Url,
    version: Version,
    *,
    branch: Branch = "main",
    message: Message = None,
    drop_txn: bool = False,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Repeat a commit of another branch on this one.

    Parameters
    ----------
    drop_txn :
        Leave out the numbers of applications' steps.
    """
    repo = open_at(url, option)
    picked = repo.cherry_pick(version, branch, message, txn="drop" if drop_txn else "take")
    made(picked, as_json)


@verb
def run_merge(
    url: Url,
    source: Version,
    *,
    into: Into = "main",
    policy: Literal["fail", "ours", "theirs"] = "fail",
    message: Message = None,
    no_ff: bool = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Bring the commits of another branch into this one, as one commit.

    With --dry-run, the exit code is 1 if there are conflicts.

    Parameters
    ----------
    policy :
        Who wins where both sides have changed a place: nobody, the branch (ours), or VERSION
        (theirs).
    no_ff :
        Make a commit also where the branch could be moved.
    """
    how: Any = {"policy": policy, "message": message, "dry_run": dry_run}
    report = open_at(url, option).merge(source, into, fast_forward=not no_ff, **how)
    show(report, as_json)
    if report.conflicts:
        raise typer.Exit(1)


@verb
def run_mv(
    url: Url,
    old: str,
    new: str,
    *,
    branch: Branch = "main",
    message: Message = None,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Move or rename a group or array with all below it, in one commit.

    Parameters
    ----------
    old :
        The group or array.
    new :
        Its new path.
    """
    session = open_at(url, option).writable_session(branch)
    session.move(old, new)
    made(session.commit(message or f"move {old} to {new}"), as_json)


def made(snapshot_id: str, as_json: bool) -> None:
    """Say which snapshot a verb has made."""
    show({"snapshot_id": snapshot_id} if as_json else snapshot_id, as_json)
