"""Merging a version into a branch: planned, tried, and planned anew while others move the branch.

Invariant: a branch is moved to the source only if the source comes after its head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zarr_manifests.commits import SessionCommits
from zarr_manifests.engine.commit.merging import Merging, plan_merge
from zarr_manifests.engine.edit.pin import SessionWriter
from zarr_manifests.engine.history.follow import opened
from zarr_manifests.engine.history.refs import BranchMovedError, Refs
from zarr_manifests.engine.snapshot.context import Context
from zarr_manifests.errors import ConflictError
from zarr_manifests.planning.conflict.decide import Policy, check_policy
from zarr_manifests.reports import MergeReport

__all__ = ["merge"]


def merge(
    refs: Refs,
    source: str,
    into: str,
    *,
    policy: Policy,
    described: tuple[str | None, Mapping[str, Any] | None],
    fast_forward: bool,
    dry_run: bool,
) -> MergeReport:
    """Merge a version into a branch; `described` has the commit's message and metadata."""
    check_policy(policy)
    context, due = refs.context, refs.fixed(source)
    attempts = context.config.commits.attempts
    moves = fast_forward and described == (None, None)
    for attempt in range(attempts):
        commits, planned = _planned(context, into, due)
        move = moves and planned.follows
        report = MergeReport(
            planned.source, planned.base.snapshot_id, into, None, planned.commits, move
        )
        try:
            if dry_run:
                found = () if move or planned.done else planned.conflicts(context, policy)
                return replace(report, conflicts=found, dry_run=True)
            if planned.done:
                return replace(report, snapshot_id=planned.head)
            if move:
                refs.fast_forward(into, planned.source, expected=planned.head)
                return replace(report, snapshot_id=planned.source)
            return replace(report, snapshot_id=commits.merge(planned, *described, policy))
        except BranchMovedError:
            context.roots.backoff(attempt)
        except ConflictError as error:
            if not error.conflicts:
                raise
            raise ConflictError(
                f"{source!r} cannot be merged into branch {into!r}, because both have changes in "
                "one place; nothing was committed. Choose a policy, or change one side first",
                error.conflicts,
            ) from error
        finally:
            commits.writer.close("its merge has ended")
    raise ConflictError(
        f"merge into {into!r}: other writers came first {attempts} times; try again later"
    )


def _planned(context: Context, into: str, source: str) -> tuple[SessionCommits, Merging]:
    """A session on the base with the changes to merge, and the plan."""

    def attempt() -> tuple[SessionCommits, Merging]:
        root = context.roots.read().root
        planned = plan_merge(context, root, into, source)
        commits = SessionCommits(SessionWriter(context, planned.base, into, root.version))
        commits.writer.workspace.contents.changes = planned.changes
        return commits, planned

    return opened(attempt)
