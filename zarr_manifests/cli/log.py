"""`zarr-manifests log`: the history of a version, or of branches and tags, newest first."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from zarr_manifests.cli.arguments import At, Json, Options, Url, complete_versions, open_at
from zarr_manifests.cli.as_json import plain, print_json
from zarr_manifests.cli.console import columns, console, progress
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.plain import plain_text
from zarr_manifests.progress import counted
from zarr_manifests.texts import time_text, totals_text, written_text
from zarr_manifests.versions import RefName, refs_by_snapshot, short_ids

if TYPE_CHECKING:
    from rich.console import Console

    from zarr_manifests.reports import LoggedOperation, SnapshotInfo
    from zarr_manifests.repository import Repository

__all__ = ["entry", "run", "snapshot_record"]


def run(
    url: Url,
    path: Annotated[
        str | None,
        typer.Argument(
            help="Only commits that have changed this array, or something in this group.",
            show_default=False,
        ),
    ] = None,
    at: At = "main",
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="WHEN",
            help="Only what came after: a time such as 2026-11-01, or a version.",
            show_default=False,
            autocompletion=complete_versions,
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=0, help="At most so many entries; 0 for all.")
    ] = 20,
    oneline: Annotated[
        bool, typer.Option("--oneline", help="One line each: short id, refs and message.")
    ] = False,
    ops: Annotated[
        bool, typer.Option("--ops", help="Who did what to which branch or tag, instead.")
    ] = False,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Show the history, newest first: snapshot, time, kind, refs, message and size."""
    if ops and (path is not None or since is not None or oneline or at != "main"):
        raise InvalidArgumentError("--ops is of all branches and tags, and goes with --limit only")
    repo = open_at(url, option)
    if ops:
        _show_operations(repo, limit, as_json)
        return
    simple = path is None and since is None
    most = limit + 1 if limit and simple else None  # one more shows whether there are older ones
    history: Iterator[SnapshotInfo] = repo.ancestry(at, limit=most)
    if since is not None:
        history = filter(_comes_after(repo, since), history)
    if path is not None:
        touched = _touching(repo, at, path)
        history = (info for info in history if info.snapshot_id in touched)
    refs, out = refs_by_snapshot(repo.list_branches(), repo.list_tags()), console()
    taken = islice(history, min(limit, sys.maxsize) or None)
    with progress("following the history") as told:
        shown = [*counted(told, "following the history", taken)]
    if as_json:
        print_json(*(snapshot_record(info, refs.get(info.id, ())) for info in shown))
        return
    short = short_ids(info.id for info in shown)
    show = _line if oneline else entry
    for info in shown:
        out.print(show(info, refs.get(info.id, ()), short[info.id]), soft_wrap=True)
    if limit and next(history, None) is not None:
        _say_older(out, limit)
    if not shown:
        out.print("no such commits")


def _say_older(out: Console, limit: int) -> None:
    out.print(Text(f"... and older ones: -n {limit * 10} shows more, -n 0 all", "dim"))


def _show_operations(repo: Repository, limit: int, as_json: bool) -> None:
    history = repo.ops_log()
    with progress("reading the log") as told:
        taken = counted(told, "reading the log", islice(history, min(limit, sys.maxsize) or None))
        operations = [*taken]
    if as_json:
        print_json(*operations)
        return
    table = columns("version", "when", "who", "what", "ref", "snapshot", right=("version",))
    for one in operations:
        who, what, ref = map(plain_text, (one.by, _told(one), one.ref))
        table.add_row(str(one.version), time_text(one.at), who, what, ref, one.snapshot_id)
    out = console()
    out.print(table)
    if limit and next(history, None) is not None:
        _say_older(out, limit)


def _told(one: LoggedOperation) -> str:
    return f"{one.operation} from {one.before}" if one.before else one.operation


def snapshot_record(info: SnapshotInfo, refs: Sequence[RefName]) -> dict[str, Any]:
    """A snapshot for JSON, with its branches and tags."""
    found: dict[str, Any] = plain(info)
    branches, tags = ([ref.name for ref in refs if ref.kind == kind] for kind in ("branch", "tag"))
    return {**found, "branches": branches, "tags": tags}


# --- which ones ------------------------------------------------------------------------------


def _comes_after(repo: Repository, since: str) -> Callable[[SnapshotInfo], bool]:
    """Whether a snapshot is not as old as that; a branch or tag of that name goes before a time."""
    from zarr_manifests.times import moment_ms

    moment = None
    if since not in repo.list_branches() and since not in repo.list_tags():
        try:
            ms = moment_ms(since, "--since")
            moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)
        except InvalidArgumentError:
            moment = None  # so it is a version
    if moment is not None:
        begin = moment
        return lambda info: info.written_at >= begin
    before = {info.snapshot_id for info in repo.ancestry(since)}
    return lambda info: info.snapshot_id not in before


def _touching(repo: Repository, at: str, path: str) -> set[str]:
    """Ids of the commits before that version that have changed the node now at that path.

    Moves are followed back: where it was before counts before.
    """
    from zarr_manifests.keys import absolute, no_array

    *_, oldest = repo.ancestry(at)
    start = None if oldest.parent_id is None else oldest.snapshot_id
    with progress("following the history") as told:
        records = [
            (change.snapshot_id, change.path, change.moved_from)
            for change in repo.changes(start, at, progress=told)
        ]
    now = absolute(path.strip("/"))
    names, touched = _Names(now), set[str]()
    for snapshot_id, changes in _by_commit(records):
        moves = {new: old for new, old in changes if old is not None}
        if any(names.has(new) for new, _ in changes):
            touched.add(snapshot_id)
        names.before(moves)
    if not touched:
        known = {new for _, new, _ in records}
        raise no_array(
            now, known, f" that a commit up to {at} has changed (a version goes to --at)"
        )
    return touched


def _by_commit(
    records: list[tuple[str | None, str, str | None]],
) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """The changed paths of each commit, newest commit first."""
    commits: dict[str, list[tuple[str, str | None]]] = {}
    for snapshot_id, path, moved_from in records:
        assert snapshot_id is not None  # a log says it
        commits.setdefault(snapshot_id, []).append((path, moved_from))
    yield from reversed(commits.items())


class _Names:
    """What a node was called, from the newest commit backward."""

    def __init__(self, now: str) -> None:
        self._name = now

    def has(self, path: str) -> bool:
        """Whether this is the node, or lies in it."""
        name = self._name
        return path == name or name == "/" or path.startswith(f"{name}/")

    def before(self, moves: dict[str, str]) -> None:
        """Go back before these moves, old path by new."""
        self._name = moves.get(self._name, self._name)


# --- how they are shown ----------------------------------------------------------------------


def entry(info: SnapshotInfo, refs: Sequence[RefName], short: str) -> Text:
    """A snapshot in two lines; its short id is marked."""
    before, marked, after = info.snapshot_id.partition(short)
    text = Text(before, "yellow")
    text.append(marked, "bold underline yellow")
    text.append(after, "yellow")
    text.append(f"  {time_text(info.written_at)}  ", "default")
    text.append(info.kind, "cyan")
    if info.author:
        text.append(f"  by {plain_text(info.author)}", "default")
    if refs:
        text.append(f"  ({', '.join(plain_text(str(ref)) for ref in refs)})", "bold green")
    text.append(f"\n    {plain_text(info.message)}", "default")
    done, there = written_text(info.written), totals_text(info.totals)
    facts = "; ".join(part for part in (done, there and f"in all {there}") if part)
    return text.append(f"  [{facts}]", "dim") if facts else text


def _line(info: SnapshotInfo, refs: Sequence[RefName], short: str) -> Text:
    text = Text().append(short, "yellow")
    if refs:
        text.append(f" ({', '.join(plain_text(str(ref)) for ref in refs)})", "bold green")
    return text.append(f" {plain_text(info.message)}")
