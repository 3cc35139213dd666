"""`zarr-manifests log`, `show` and `diff`: versions, and what changed between them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import chain, groupby, islice
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.text import Text

from zarr_manifests.cli.arguments import (
    At,
    Authorize,
    Json,
    Options,
    Url,
    Version,
    complete_versions,
    open_at,
    verb,
)
from zarr_manifests.cli.console import console, progress, say, show
from zarr_manifests.errors import HistoryExpiredError, InvalidArgumentError
from zarr_manifests.plain import plain_text
from zarr_manifests.progress import counted
from zarr_manifests.rendering import columns, fact_table
from zarr_manifests.report import json_line, plain
from zarr_manifests.texts import count_text, time_text
from zarr_manifests.versions import RefName, refs_by_snapshot, short_ids

if TYPE_CHECKING:
    from zarr_manifests.reports import Change, SnapshotInfo
    from zarr_manifests.repository import Repository

__all__ = ["run_diff", "run_log", "run_show"]

_MARKS: Final = {
    "create": "+ {path}",
    "metadata": "~ {path}",
    "delete": "- {path}",
    "move": "> {moved_from} to {path}",
}
_WORDS: Final = {"append": "appended", "overwrite": "overwritten", "unset": "removed"}
_OLDER: Final = "... and older ones: -n {} shows more, -n 0 all"

Since = Annotated[
    str | None,
    typer.Option(
        "--since",
        metavar="WHEN",
        help="Only what came after: a time such as 2026-11-01, or a version.",
        show_default=False,
        autocompletion=complete_versions,
    ),
]
Start = Annotated[
    str,
    typer.Argument(
        help="The older version: a branch, tag, id or short id, main~3, main@{2026-11-01}.",
        show_default=False,
        autocompletion=complete_versions,
    ),
]
End = Annotated[str, typer.Argument(help="The newer version.", autocompletion=complete_versions)]


@verb
def run_log(
    url: Url,
    path: str | None = None,
    *,
    at: At = "main",
    since: Since = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=0, help="0 for all.")] = 20,
    oneline: bool = False,
    graph: bool = False,
    ops: bool = False,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Show the history, newest first: snapshot, time, kind, refs, message and size.

    Parameters
    ----------
    path :
        Only commits that have changed this array, or something in this group.
    oneline :
        One line each: short id, refs and message.
    graph :
        Draw the history of all branches and tags.
    ops :
        Who did what to which branch or tag, instead.
    """
    if graph + ops > 1 or ((graph or ops) and (path or since or oneline or at != "main")):
        raise InvalidArgumentError(
            "--ops and --graph are of all branches and tags, and go with --limit only"
        )
    repo = open_at(url, option)
    most = min(limit, sys.maxsize) or None
    if ops:
        _show_operations(repo, most, as_json)
    elif graph:
        _show_graph(repo, most)
    else:
        history = _wanted(repo, path, at, since, limit)
        _show_history(repo, history, most, as_json, _line if oneline else _entry)


def _wanted(
    repo: Repository, path: str | None, at: str, since: str | None, limit: int
) -> Iterator[SnapshotInfo]:
    # One more shows whether there are older ones.
    most = limit + 1 if limit and path is None and since is None else None
    history: Iterator[SnapshotInfo] = repo.ancestry(at, limit=most)
    if since is not None:
        history = filter(_comes_after(repo, since), history)
    if path is not None:
        touched = _touching(repo, at, path)
        history = (info for info in history if info.snapshot_id in touched)
    return history


def _show_history(
    repo: Repository,
    history: Iterator[SnapshotInfo],
    most: int | None,
    as_json: bool,
    text: Callable[[SnapshotInfo, Sequence[RefName], str], Text],
) -> None:
    refs, out = refs_by_snapshot(repo.list_branches(), repo.list_tags()), console()
    with progress("following the history"):
        shown = [*counted("following the history", islice(history, most))]
    if as_json:
        for info in shown:
            say(json_line(_record(info, refs.get(info.id, ()))))
        return
    short = short_ids(info.id for info in shown)
    for info in shown:
        out.print(text(info, refs.get(info.id, ()), short[info.id]), soft_wrap=True)
    if most and next(history, None) is not None:
        out.print(_OLDER.format(most * 10), style="dim")
    if not shown:
        out.print("no such commits")


def _show_operations(repo: Repository, most: int | None, as_json: bool) -> None:
    history = repo.ops_log()
    with progress("reading the log"):
        operations = [*counted("reading the log", islice(history, most))]
    if as_json:
        for one in operations:
            say(json_line(one))
        return
    table = columns("version", "when", "who", "what", "ref", "snapshot", right=("version",))
    for one in operations:
        what = f"{one.operation} from {one.before}" if one.before else one.operation
        table.add_row(str(one.version), time_text(one.at), one.by, what, one.ref, one.snapshot_id)
    out = console()
    out.print(table)
    if most and next(history, None) is not None:
        out.print(_OLDER.format(most * 10), style="dim")


def _show_graph(repo: Repository, most: int | None) -> None:
    from zarr_manifests.picturing.graph import graph_lines
    from zarr_manifests.repository import graph_of

    out = console()
    for line in graph_lines(graph_of(repo, rows=most or sys.maxsize)):
        out.print(line, soft_wrap=True)


def _record(info: SnapshotInfo, refs: Sequence[RefName]) -> dict[str, Any]:
    """A snapshot for JSON, with its branches and tags."""
    branches, tags = ([ref.name for ref in refs if ref.kind == kind] for kind in ("branch", "tag"))
    return {**info.to_dict(), "branches": branches, "tags": tags}


def _comes_after(repo: Repository, since: str) -> Callable[[SnapshotInfo], bool]:
    """Whether a snapshot is not as old as that; a branch or tag of that name goes before a time."""
    from zarr_manifests.times import moment_ms

    if since not in repo.list_branches() and since not in repo.list_tags():
        try:
            ms = moment_ms(since, "--since")
        except InvalidArgumentError:
            ms = None  # so it is a version
        if ms is not None:
            begin = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)
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
    with progress("following the history"):
        records = [*repo.changes(start, at)]
    now = name = absolute(path.strip("/"))
    touched: set[str] = set()
    by_commit = [(id_, [*group]) for id_, group in groupby(records, lambda one: one.snapshot_id)]
    for snapshot_id, changes in reversed(by_commit):
        assert snapshot_id is not None  # a log says it
        if any(
            one.path == name or name == "/" or one.path.startswith(f"{name}/") for one in changes
        ):
            touched.add(snapshot_id)
        name = next(
            (one.moved_from for one in changes if one.moved_from and one.path == name), name
        )
    if not touched:
        known = {one.path for one in records}
        raise no_array(
            now, known, f" that a commit up to {at} has changed (a version goes to --at)"
        )
    return touched


def _entry(info: SnapshotInfo, refs: Sequence[RefName], short: str) -> Text:
    """A snapshot in two lines; its short id is marked."""
    first, _, second = str(info).partition("\n")
    head = first.removeprefix(info.snapshot_id)
    before, marked, after = info.snapshot_id.partition(short)
    text = Text(before, "yellow")
    text.append(marked, "bold underline yellow")
    text.append(after, "yellow")
    text.append(head)
    if refs:
        text.append(f"  ({', '.join(plain_text(str(ref)) for ref in refs)})", "bold green")
    return text.append(f"\n{second}")


def _line(info: SnapshotInfo, refs: Sequence[RefName], short: str) -> Text:
    text = Text(short, "yellow")
    if refs:
        text.append(f" ({', '.join(plain_text(str(ref)) for ref in refs)})", "bold green")
    return text.append(f" {plain_text(info.message)}")


# --- one commit ------------------------------------------------------------------------------


@verb
def run_show(
    url: Url,
    version: Version = "main",
    *,
    coordinates: bool = False,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Show one commit: its message and metadata, and the nodes and chunks it has changed.

    Parameters
    ----------
    coordinates :
        The coordinates of the chunks, too.
    """
    repo = open_at(url, option)
    info = next(repo.ancestry(version, limit=1))
    refs = refs_by_snapshot(repo.list_branches(), repo.list_tags()).get(info.id, ())
    changes: list[Change] | None = []
    if info.parent_id is not None:
        try:
            changes = [*repo.changes(info.parent_id, info.snapshot_id)]
        except HistoryExpiredError:
            changes = None
    if as_json:
        found = None if changes is None else [_change_record(one, coordinates) for one in changes]
        show({**_record(info, refs), "changes": found}, as_json)
        return
    out = console()
    out.print(_entry(info, refs, short_ids([info.id])[info.id]), soft_wrap=True)
    facts = [("parent", info.parent_id or "none: it is the first")]
    for name, value in info.metadata.items():
        facts.append((name, json.dumps(plain(value), ensure_ascii=False)))
    out.print(fact_table(facts))
    if changes is None:
        said = "what it has changed is not known: the commit before has expired"
        out.print(said, style="dim")
        return
    for line in _change_lines(changes, coordinates):
        out.print(line, soft_wrap=True)
    if not changes:
        out.print("no changes")


# --- between versions ------------------------------------------------------------------------


@verb
def run_diff(
    url: Url,
    start: Start,
    end: End = "main",
    *,
    log: bool = False,
    direct: bool = False,
    coordinates: bool = False,
    values: bool = False,
    array: list[str] | None = None,
    authorize: Authorize = False,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Show what changed after START up to END: nodes made, changed, gone, moved; and chunks.

    Parameters
    ----------
    log :
        Commit by commit, oldest first.
    direct :
        Between two branches: all that differs, and not only what END has changed.
    coordinates :
        The coordinates of the chunks, too.
    values :
        Read the changed chunks, and compare their values.
    array :
        With --values: of this array; may be given several times.
    """
    if sum((log, direct, values)) > 1 or (array and not values):
        raise InvalidArgumentError(
            "give one of --log, --direct and --values; --array goes with --values"
        )
    repo = open_at(url, option, authorize)
    if values:
        _show_values(repo, start, end, array, as_json)
    elif direct or not (log or _is_ancestor(repo, start, end)):
        diff = repo.diff(start, end, symmetric=not direct)
        show(diff, as_json)
        for path, found in diff.chunks.items() if coordinates and not as_json else ():
            for at in found.tolist():
                console().print(f"    {path} {tuple(at)}", soft_wrap=True)
    else:
        _show_changes(repo, start, end, log, coordinates, as_json)


def _is_ancestor(repo: Repository, start: str, end: str) -> bool:
    from zarr_manifests.repository import resolved

    before = resolved(repo, start)
    return any(info.snapshot_id == before for info in repo.ancestry(end))


def _show_changes(
    repo: Repository, start: str, end: str, log: bool, coordinates: bool, as_json: bool
) -> None:
    with progress("following the history"):
        changes = repo.changes(start, end, "log" if log else "net")
        first = [*islice(changes, 1)]
    found = chain(first, changes)
    if as_json:
        for change in found:
            say(json_line(_change_record(change, coordinates)))
        return
    out = console()
    if not first:
        out.print("no changes")
    for snapshot_id, records in groupby(found, key=lambda change: change.snapshot_id):
        if snapshot_id is not None:
            out.print(snapshot_id, style="yellow", soft_wrap=True)
        for line in _change_lines(records, coordinates):
            out.print(line, soft_wrap=True)


def _change_lines(records: Iterable[Change], coordinates: bool) -> Iterator[str]:
    """The changes of nodes, then of chunks, array by array."""
    from zarr_manifests.reports.version_reports import field_lines, moved_tops

    found = list(records)
    moved = {record.moved_from: record.path for record in found if record.moved_from is not None}
    tops = moved_tops(moved)
    for operation, mark in _MARKS.items():
        for record in found:
            went_along = record.moved_from is not None and record.moved_from not in tops
            if record.operation == operation and not went_along:
                line = mark.format(path=record.path, moved_from=record.moved_from)
                yield from map(plain_text, [line, *field_lines(record.fields)])
    chunks = [record for record in found if record.operation not in _MARKS]
    for path, group in groupby(sorted(chunks, key=lambda r: r.path), key=lambda r: r.path):
        of_path = list(group)
        yield plain_text(f"  {path}: {', '.join(map(_summary, of_path))}")
        for record in of_path if coordinates else ():
            for coords in record.coordinates.tolist():
                yield f"    {record.operation} {tuple(coords)}"


def _summary(record: Change) -> str:
    if record.operation == "truncate":
        return f"cut off at {record.grid_shape}"
    return f"{count_text(len(record.coordinates), 'chunk')} {_WORDS[record.operation]}"


def _change_record(change: Change, coordinates: bool) -> dict[str, Any]:
    """A change for JSON: as `Repository.changes` yields it, without what it does not have."""
    fields: dict[str, Any] = {"path": change.path, "operation": change.operation}
    for name in ("snapshot_id", "moved_from", "grid_shape", "fields"):
        if getattr(change, name):
            fields[name] = getattr(change, name)
    if change.operation in _WORDS:
        fields["chunks"] = len(change.coordinates)
        if coordinates:
            fields["coordinates"] = change.coordinates
    return fields


def _show_values(
    repo: Repository, start: str, end: str, arrays: Sequence[str] | None, as_json: bool
) -> None:
    out = console()
    paths = arrays or _in_both(repo, start, end)
    if not (paths or as_json):
        out.print("no changes")
    for path in paths:
        with progress(f"comparing {path}"):
            found = repo.diff(start, end, path, values=True)
        show(found, as_json)
        for at, count in zip(found.chunks.tolist(), found.counts.tolist(), strict=True):
            if count and not as_json:
                out.print(f"    {tuple(at)}: {count_text(count, 'cell')}")


def _in_both(repo: Repository, start: str, end: str) -> list[str]:
    """The changed arrays that there are in both versions, by their paths in the newer one."""
    from zarr_manifests.store import contents_of

    diff = repo.diff(start, end, symmetric=False)
    found = {*diff.created, *diff.updated, *diff.chunks, *diff.truncated}
    moved_from = {new: old for old, new in diff.moved.items()}
    was, now = (
        {
            f"/{path}"
            for path, node in contents_of(repo.readonly_session(version).store).view.nodes.items()
            if node.array is not None
        }
        for version in (start, end)
    )
    return sorted(path for path in found & now if moved_from.get(path, path) in was)
