"""`zarr-manifests revert`, `cherry-pick`, `merge` and `mv`: commits that copy no chunk."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

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
    open_at,
)
from zarr_manifests.cli.as_json import print_json
from zarr_manifests.cli.console import console

__all__ = ["run_cherry_pick", "run_merge", "run_mv", "run_revert"]


class _Policy(StrEnum):
    FAIL = "fail"
    OURS = "ours"
    THEIRS = "theirs"


def run_revert(
    url: Url,
    version: Version,
    branch: Branch = "main",
    message: Message = None,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Undo one commit of a branch in a new commit; the commits after it stay."""
    _show(open_at(url, option).revert(version, branch, message), as_json)


def run_cherry_pick(
    url: Url,
    version: Version,
    branch: Branch = "main",
    message: Message = None,
    drop_txn: Annotated[
        bool, typer.Option("--drop-txn", help="Leave out the numbers of applications' steps.")
    ] = False,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Repeat a commit of another branch on this one."""
    repo = open_at(url, option)
    txn: Any = "drop" if drop_txn else "take"
    _show(repo.cherry_pick(version, branch, message, txn=txn), as_json)


def run_merge(
    url: Url,
    source: Version,
    into: Annotated[
        str,
        typer.Option("--into", help="The branch that gets them.", autocompletion=complete_branches),
    ] = "main",
    policy: Annotated[
        _Policy,
        typer.Option(
            "--policy",
            help="Who wins where both sides have changed a place: nobody, the branch (ours), or "
            "VERSION (theirs).",
        ),
    ] = _Policy.FAIL,
    message: Message = None,
    no_ff: Annotated[
        bool, typer.Option("--no-ff", help="Make a commit also where the branch could be moved.")
    ] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Bring the commits of another branch into this one, as one commit.

    With --dry-run, the exit code is 1 if there are conflicts.
    """
    report = open_at(url, option).merge(
        source,
        into,
        policy=policy.value,
        message=message,
        fast_forward=not no_ff,
        dry_run=dry_run,
    )
    if as_json:
        print_json(report)
    else:
        console().print(str(report), soft_wrap=True)
    if report.conflicts:
        raise typer.Exit(1)


def run_mv(
    url: Url,
    old: Annotated[str, typer.Argument(help="The group or array.", show_default=False)],
    new: Annotated[str, typer.Argument(help="Its new path.", show_default=False)],
    branch: Branch = "main",
    message: Message = None,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Move or rename a group or array with all below it, in one commit."""
    session = open_at(url, option).writable_session(branch)
    session.move(old, new)
    _show(session.commit(message or f"move {old} to {new}"), as_json)


def _show(made: str, as_json: bool) -> None:
    if as_json:
        print_json({"snapshot_id": made})
    else:
        console().print(made, style="yellow")
