"""`zarr-manifests log`, `show` and `diff`: versions, and what changed between them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Final

from rich.text import Text

from zarr_manifests.cli.verbs import Repo, Told, TrustingRepo, styled, verb
from zarr_manifests.errors import InvalidArgumentError, SnapshotExpiredError, plain_text
from zarr_manifests.progress import counted
from zarr_manifests.rendering import columns, fact_table
from zarr_manifests.report import plain
from zarr_manifests.texts import count_text, time_text
from zarr_manifests.versions import RefName, refs_by_snapshot, short_ids

if TYPE_CHECKING:
    from zarr_manifests.reports import SnapshotInfo

_OLDER: Final = [Text("... and older ones: a larger -n shows more, -n 0 all", "dim")]


@verb
def run_log(
    repo: Repo,
    path: str | None = None,
    *,
    at: str = "main",
    limit: Annotated[int, {"min": 0}] = 20,
    oneline: bool = False,
    graph: bool = False,
    ops: bool = False,
) -> object:
    """Show the history, newest first: snapshot, time, kind, refs, message and size.

    Parameters
    ----------
    path :
        Only commits that have changed this array, or something in this group.
    limit : -n
        The most entries; 0 for all.
    oneline :
        One line each: short id, refs and message.
    graph :
        Draw the history of all branches and tags.
    ops :
        Show the operations on branches and tags instead: who, what, when.
    """
    if graph + ops > 1 or ((graph or ops) and (path or oneline or at != "main")):
        raise InvalidArgumentError(
            "--ops and --graph are of all branches and tags, and go with --limit only"
        )
    most = min(limit, sys.maxsize) or None
    if graph:
        from zarr_manifests.picturing.graph import graph_lines
        from zarr_manifests.repository import graph_of

        rows = graph_of(repo, rows=most or sys.maxsize)
        is_cut = most and rows and rows[-1].below
        return Told(None, [*graph_lines(rows), *(_OLDER if is_cut else ())])
    if ops:
        done, older = _first(repo.ops_log(), most, "reading the log")
        table = columns("version", "when", "who", "what", "ref", "snapshot", right=("version",))
        for op in done:
            what = f"{op.operation} from {op.before}" if op.before else op.operation
            table.add_row(str(op.version), time_text(op.at), op.by, what, op.ref, op.snapshot_id)
        return Told(done, [table, *older])
    # One more shows whether there are older ones.
    count = limit + 1 if limit and path is None else None
    history: Iterator[SnapshotInfo] = repo.ancestry(at, limit=count)
    if path is not None:
        touched = _touching(repo, at, path)
        history = (info for info in history if info.snapshot_id in touched)
    shown, older = _first(history, most, "following the history")
    refs, short = _refs(repo), short_ids(info.id for info in shown)
    text = _line if oneline else _entry
    lines = [text(info, refs.get(info.id, ()), short[info.id]) for info in shown]
    return Told([_record(info, refs.get(info.id, ())) for info in shown], [*lines, *older])


def _first[T](entries: Iterator[T], most: int | None, what: str) -> tuple[list[T], list[Text]]:
    """The first entries, and a line if there are older ones."""
    found = [*counted(what, islice(entries, most))]
    return found, [] if most is None or next(entries, None) is None else _OLDER


def _refs(repo: Repo) -> dict[str, list[RefName]]:
    return refs_by_snapshot(repo.list_branches(), repo.list_tags())


def _record(info: SnapshotInfo, refs: Sequence[RefName]) -> dict[str, Any]:
    """A snapshot for JSON, with its branches and tags."""
    branches, tags = ([ref.name for ref in refs if ref.kind == kind] for kind in ("branch", "tag"))
    return {**info.to_dict(), "branches": branches, "tags": tags}


def _touching(repo: Repo, at: str, path: str) -> set[str]:
    """Ids of the commits before that version that have changed what was at that path then."""
    from zarr_manifests.keys import absolute, no_array

    *_, oldest = repo.ancestry(at)
    start = None if oldest.parent_id is None else oldest.snapshot_id
    records, name = [*repo.changes(start, at)], absolute(path.strip("/"))
    inside = f"{name.rstrip('/')}/"
    touched = {str(one.snapshot_id) for one in records if f"{one.path}/".startswith(inside)}
    if not touched:
        known = {one.path for one in records}
        raise no_array(
            name, known, f" that a commit up to {at} has changed (a version goes to --at)"
        )
    return touched


def _entry(info: SnapshotInfo, refs: Sequence[RefName], short: str) -> Text:
    """A snapshot in two lines; its short id is marked."""
    first, _, second = str(info).partition("\n")
    before, marked, after = info.snapshot_id.partition(short)
    text = Text.assemble((before, "yellow"), (marked, "bold underline yellow"), (after, "yellow"))
    text.append(first.removeprefix(info.snapshot_id)).append_text(_names("  ", refs))
    return text.append(f"\n{second}")


def _line(info: SnapshotInfo, refs: Sequence[RefName], short: str) -> Text:
    return Text.assemble((short, "yellow"), _names(" ", refs), f" {plain_text(info.message)}")


def _names(before: str, refs: Sequence[RefName]) -> Text:
    return styled(f"{before}({', '.join(map(str, refs))})" if refs else "", "bold green")


# --- one commit ------------------------------------------------------------------------------


@verb
def run_show(repo: Repo, version: str = "main") -> object:
    """Show one commit: its message and metadata, and the nodes and chunks it has changed."""
    info = next(repo.ancestry(version, limit=1))
    refs = _refs(repo).get(info.id, ())
    facts = [("parent", info.parent_id or "none: it is the first")]
    for name, value in info.metadata.items():
        said = value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False)
        facts.append((name, plain_text(said)))
    text: list[object] = [_entry(info, refs, short_ids([info.id])[info.id]), fact_table(facts)]
    changes = None
    if info.parent_id is not None:
        try:
            changes = repo.diff(info.parent_id, info.id, symmetric=False)
            text.append(changes)
        except SnapshotExpiredError:
            said = "what it has changed is not known: the commit before has expired"
            text.append(Text(said, "dim"))
    return Told({**_record(info, refs), "changes": changes}, text)


# --- between versions ------------------------------------------------------------------------


@verb
def run_diff(
    repo: TrustingRepo, start: str, end: str = "main", *, direct: bool = False, values: bool = False
) -> object:
    """Show the changes after START up to END: nodes and chunks.

    Parameters
    ----------
    start :
        The older version: a branch, tag, id or short id, main~3, main@{2026-11-01}.
    end :
        The newer version.
    direct :
        Between two branches: all that differs, and not only what END has changed.
    values :
        Read the changed chunks, and compare their values.
    """
    if direct and values:
        raise InvalidArgumentError("give --direct or --values")
    diff = repo.diff(start, end, symmetric=not direct and not values)
    if not values:
        return diff
    shaped = (path for path, fields in diff.fields.items() if "shape" in fields)
    arrays = sorted({*diff.grids, *shaped} - ({*diff.created} - {*diff.deleted}))
    compared = [repo.diff(start, end, path, values=True) for path in arrays]
    found, lines = [*filter(None, compared)], list[object]()
    for one in found:
        lines.append(one)
        for path, chunks in one.chunks.items():
            for at, count in zip(chunks.tolist(), one.cells[path].tolist(), strict=True):
                lines.append(f"    {tuple(at)}: {count_text(count, 'cell')}")
    return Told(found, lines or [diff])
