"""The verbs that change or maintain a repository.

`branch`, `tag`, `merge`, `revert`, `cherry-pick` and `mv` copy no chunk.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

import zarr_manifests as zm
from zarr_manifests.cli.verbs import Pairs, Repo, Told, open_at, storage_options, verb
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.rendering import fact_table
from zarr_manifests.versions import is_short_id


@verb
def run_branch(
    repo: Repo,
    name: str | None = None,
    version: str | None = None,
    *,
    move: bool = False,
    expected: str | None = None,
    force: bool = False,
    delete: bool = False,
) -> object:
    """List branches; or create, move or delete one. Only --expected and --force drop commits.

    Parameters
    ----------
    name :
        The name to create, move or delete.
    version : VERSION
        The version for a new one: a branch, tag, id or short id, main~3, ...; main by default.
    move :
        Move the existing branch to VERSION.
    expected : ID
        With --move: drop commits if the head is still this snapshot.
    force :
        With --move: drop commits in any case.
    delete : -d
        Delete it.
    """
    if not move and (force or expected is not None):
        raise InvalidArgumentError("--expected and --force go with --move")
    if not move:
        return _put_or_list(repo, "branch", name, version, delete)
    if name is None or version is None or delete:
        raise InvalidArgumentError("--move takes a NAME and a VERSION")
    if expected and is_short_id(expected):
        expected = next(repo.ancestry(expected, limit=1)).id
    repo.reset_branch(name, version, force=force, expected=expected)
    head = repo.list_branches()[name]
    return Told({"name": name, "snapshot_id": head}, [f"{name} is at {head}"])


@verb
def run_tag(
    repo: Repo, name: str | None = None, version: str | None = None, *, delete: bool = False
) -> object:
    """List tags; or create or delete one. The name of a deleted tag cannot be used again.

    Parameters
    ----------
    name :
        The name to create or delete.
    version : VERSION
        The version for a new one: a branch, tag, id or short id, main~3, ...; main by default.
    delete : -d
        Delete it.
    """
    return _put_or_list(repo, "tag", name, version, delete)


def _put_or_list(
    repo: Repo, kind: Literal["branch", "tag"], name: str | None, version: str | None, delete: bool
) -> Told:
    if delete and (name is None or version is not None):
        raise InvalidArgumentError("--delete takes a NAME, and no VERSION")
    of_branches = kind == "branch"
    if name is not None and delete:
        (repo.delete_branch if of_branches else repo.delete_tag)(name)
    elif name is not None:
        (repo.create_branch if of_branches else repo.create_tag)(name, version)
    known = repo.list_branches() if of_branches else repo.list_tags()
    found = [
        {"name": one, "snapshot_id": head} for one, head in known.items() if name in (None, one)
    ]
    return Told(found, [fact_table(known.items())] if name is None and known else [])


@verb
def run_revert(
    repo: Repo, version: str, *, branch: str = "main", message: str | None = None
) -> object:
    """Undo one commit of a branch in a new commit; the commits after it stay."""
    return repo.revert(version, branch, message)


@verb
def run_cherry_pick(
    repo: Repo,
    version: str,
    *,
    branch: str = "main",
    message: str | None = None,
    drop_txn: bool = False,
) -> object:
    """Repeat a commit of another branch on this one.

    Parameters
    ----------
    drop_txn :
        Leave out the numbers of applications' steps.
    """
    return repo.cherry_pick(version, branch, message, txn="drop" if drop_txn else "take")


@verb
def run_merge(
    repo: Repo,
    version: str,
    *,
    into: str = "main",
    policy: Literal["fail", "ours", "theirs"] = "fail",
    message: str | None = None,
    no_ff: bool = False,
    dry_run: bool = False,
) -> object:
    """Bring the commits of another branch into this one, as one commit.

    With --dry-run, the exit code is 1 if there are conflicts.

    Parameters
    ----------
    into :
        The branch that gets them.
    policy :
        Who wins where both sides have changed a place: nobody, the branch (ours), or VERSION
        (theirs).
    no_ff :
        Make a commit also where the branch could be moved.
    """
    how: Any = {"policy": policy, "message": message, "dry_run": dry_run}
    report = repo.merge(version, into, fast_forward=not no_ff, **how)
    return Told(report, wrong=bool(report.conflicts))


@verb
def run_mv(
    repo: Repo, old: str, new: str, *, branch: str = "main", message: str | None = None
) -> object:
    """Move or rename a group or array with all below it, in one commit.

    Parameters
    ----------
    old :
        The group or array.
    new :
        Its new path.
    """
    session = repo.writable_session(branch)
    session.move(old, new)
    return session.commit(message or f"move {old} to {new}")


# --- upkeep ----------------------------------------------------------------------------------


@verb
def run_verify(repo: Repo) -> object:
    """Read and check every reachable object; exit code 1 if one is missing or damaged.

    Files of virtual chunks are counted, and not looked at.
    """
    report = repo.verify()
    return Told(report, wrong=not report.ok)


@verb
def run_compact(
    repo: Repo,
    *,
    branch: str = "main",
    mode: Literal["minor", "major", "full", "packs", "statistics"] = "major",
    dry_run: bool = False,
) -> object:
    """Merge the deltas of a branch, as a commit that changes no data.

    Parameters
    ----------
    mode :
        minor makes runs of deltas; major also merges pending changes into manifests; full packs
        all manifests anew. Instead, packs moves the live chunks out of packs that are mostly dead,
        and statistics measures chunks without statistics, so that queries can skip chunks.
    """
    if mode != "statistics":
        return repo.compact(branch, mode, dry_run=dry_run)
    if dry_run:
        raise InvalidArgumentError("--mode statistics takes no --dry-run")
    return repo.compute_statistics(branch=branch)


@verb
def run_clean(
    repo: Repo, *, keep: str | None = None, grace: str = "24h", dry_run: bool = False
) -> object:
    """Delete unreferenced objects, and say how much space is still held, and why.

    It is safe beside writers and readers.

    Parameters
    ----------
    keep :
        Expire old versions first. 10 keeps the ten newest of each branch, 30d those of the last
        30 days, and config those that the configuration keeps.
    grace :
        How long a running writer without a lease may take, such as 24h.
    """
    wait = _duration(grace)
    if keep is None:
        return repo.garbage_collect(wait, dry_run=dry_run)
    kept: int | timedelta | None = None
    if keep.isdecimal() and len(keep) < 19:
        kept = int(keep)
    elif keep != "config":
        kept = _duration(keep, "neither a number of versions, nor an age such as 30d, nor config")
    return repo.clean(kept, wait, dry_run=dry_run)


def _duration(
    text: str, wrong: str = "not a duration; write it as 30d, 24h, 10m or 0s"
) -> timedelta:
    from zarr_manifests.config import duration_of

    found = timedelta(0) if text.strip() == "0" else duration_of(text)
    if found is None:
        raise InvalidArgumentError(f"{text[:40]!r} is {wrong}")
    return found


@verb
def run_recover(
    url: str,
    *,
    to: int | None = None,
    dry_run: bool = False,
    collections_ended: bool = False,
    option: Pairs = None,
) -> object:
    """Make a new root of the newest archive if it is lost; or set branches and tags back.

    Parameters
    ----------
    to : NUMBER
        Set branches and tags back to this version of the root, as `log --ops` lists them; the root
        may be sound.
    collections_ended :
        Say that no collection is running.
    """
    if to is not None and collections_ended:
        raise InvalidArgumentError("give --to or --collections-ended, not both")
    if to is not None:
        return zm.recover(open_at(url, option), to, dry_run=dry_run)
    how: Any = {"dry_run": dry_run, "collections_ended": collections_ended}
    return zm.recover(url, storage_options=storage_options(url, option), **how)


@verb
def run_check(url: str, *, option: Pairs = None) -> object:
    """Try out what a place can be used for: it writes some objects there and deletes them."""
    report = zm.storage.check(url, storage_options=storage_options(url, option))
    return Told(report, wrong=report.usable_for == "nothing")
