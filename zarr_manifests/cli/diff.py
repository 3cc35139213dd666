"""`zarr-manifests diff`: what changed from one version to another, as nodes, chunks or values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from zarr_manifests.cli.arguments import (
    Authorize,
    Json,
    Options,
    Url,
    complete_versions,
    open_at,
    several,
)
from zarr_manifests.cli.as_json import print_json
from zarr_manifests.cli.console import console, progress
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.plain import plain_text
from zarr_manifests.texts import count_text

if TYPE_CHECKING:
    from zarr_manifests.format.nodes import Node
    from zarr_manifests.reports import Change, Diff
    from zarr_manifests.repository import Repository

__all__ = ["change_lines", "change_record", "run"]

_Start = Annotated[
    str,
    typer.Argument(
        help="The older version: a branch, tag, id or short id, main~3, main@{2026-11-01}.",
        show_default=False,
        autocompletion=complete_versions,
    ),
]
_End = Annotated[str, typer.Argument(help="The newer version.", autocompletion=complete_versions)]
_MARKS: Final[dict[str, str]] = {
    "create": "+ {path}",
    "metadata": "~ {path}",
    "delete": "- {path}",
    "move": "> {moved_from} to {path}",
}
_WORDS: Final[dict[str, str]] = {
    "append": "appended",
    "overwrite": "overwritten",
    "unset": "removed",
}


def run(
    url: Url,
    start: _Start,
    end: _End = "main",
    log: Annotated[bool, typer.Option("--log", help="Commit by commit, oldest first.")] = False,
    direct: Annotated[
        bool,
        typer.Option(
            "--direct",
            help="Between two branches: all that differs, and not only what END has changed.",
        ),
    ] = False,
    coordinates: Annotated[
        bool, typer.Option("--coordinates", help="The coordinates of the chunks, too.")
    ] = False,
    values: Annotated[
        bool, typer.Option("--values", help="Read the changed chunks, and compare their values.")
    ] = False,
    array: Annotated[
        list[str] | None,
        several("--array", text="With --values: of this array"),
    ] = None,
    authorize: Authorize = False,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Show what changed after START up to END: nodes made, changed, gone, moved; and chunks."""
    if sum((log, direct, values)) > 1 or (array and not values):
        raise InvalidArgumentError(
            "give one of --log, --direct and --values; --array goes with --values"
        )
    repo = open_at(url, option, authorize)
    if values:
        _show_values(repo, start, end, array, as_json=as_json)
        return
    if direct or not (log or _comes_after(repo, start, end)):
        _show_difference(repo.diff(start, end, symmetric=not direct), coordinates, as_json)
        return
    with progress("following the history") as told:
        changes = repo.changes(start, end, "log" if log else "net", progress=told)
        first = next(changes, None)
    found = _with_first(first, changes)
    if as_json:
        for change in found:
            print_json(change_record(change, coordinates))
        return
    out = console()
    if first is None:
        out.print("no changes")
    for snapshot_id, records in groupby(found, key=lambda change: change.snapshot_id):
        if snapshot_id is not None:
            out.print(snapshot_id, style="yellow", soft_wrap=True)
        for line in change_lines(records, coordinates):
            out.print(plain_text(line), soft_wrap=True)


def _comes_after(repo: Repository, start: str, end: str) -> bool:
    from zarr_manifests.repository import resolved

    before = resolved(repo, start)
    return any(info.snapshot_id == before for info in repo.ancestry(end))


def _with_first(first: Change | None, rest: Iterator[Change]) -> Iterator[Change]:
    if first is not None:
        yield first
        yield from rest


def change_lines(records: Iterable[Change], coordinates: bool = False) -> Iterator[str]:
    """The changes of nodes, then of chunks, array by array."""
    from zarr_manifests.reports.version_reports import field_lines, moved_tops

    found = list(records)
    moved = {record.moved_from: record.path for record in found if record.moved_from is not None}
    tops = moved_tops(moved)
    for operation, mark in _MARKS.items():
        for record in found:
            went_along = record.moved_from is not None and record.moved_from not in tops
            if record.operation == operation and not went_along:
                yield mark.format(path=record.path, moved_from=record.moved_from)
                yield from field_lines(record.fields)
    chunks = [record for record in found if record.operation not in _MARKS]
    for path, group in groupby(sorted(chunks, key=lambda r: r.path), key=lambda r: r.path):
        of_path = list(group)
        yield f"  {path}: {', '.join(map(_summary, of_path))}"
        if coordinates:
            for record in of_path:
                for coords in record.coordinates.tolist():
                    yield f"    {record.operation} {tuple(coords)}"


def _summary(record: Change) -> str:
    if record.operation == "truncate":
        return f"cut off at {record.grid_shape}"
    return f"{count_text(len(record.coordinates), 'chunk')} {_WORDS[record.operation]}"


def change_record(change: Change, coordinates: bool = False) -> dict[str, Any]:
    """A change for JSON: as `Repository.changes` yields it, without what it does not have."""
    fields: dict[str, Any] = {"path": change.path, "operation": change.operation}
    if change.snapshot_id is not None:
        fields["snapshot_id"] = change.snapshot_id
    if change.moved_from is not None:
        fields["moved_from"] = change.moved_from
    if change.grid_shape is not None:
        fields["grid_shape"] = change.grid_shape
    if change.fields:
        fields["fields"] = change.fields
    if change.operation in _WORDS:
        fields["chunks"] = len(change.coordinates)
        if coordinates:
            fields["coordinates"] = change.coordinates
    return fields


# --- versions of which neither comes after the other -----------------------------------------


def _show_difference(diff: Diff, coordinates: bool, as_json: bool) -> None:
    if as_json:
        print_json(*_records(diff, coordinates))
        return
    from zarr_manifests.reports.version_reports import field_lines

    out = console()
    if not coordinates:
        out.print(str(diff), soft_wrap=True)
        return
    for record in _records(diff, coordinates):
        chunks = record.get("coordinates")
        out.print(plain_text(f"{record['operation']} {record['path']}"), soft_wrap=True)
        for line in field_lines(record.get("fields", {})):
            out.print(plain_text(line), soft_wrap=True)
        for at in () if chunks is None else chunks.tolist():
            out.print(f"    {tuple(at)}")


def _records(diff: Diff, coordinates: bool) -> Iterator[dict[str, Any]]:
    """As for `changes`; of chunks it is only known that they differ."""
    named = (("create", diff.created), ("metadata", diff.updated), ("delete", diff.deleted))
    for operation, paths in named:
        for path in paths:
            fields = diff.fields.get(path) if operation == "metadata" else None
            rest = {"fields": fields} if fields else {}
            yield {"path": path, "operation": operation, **rest}
    for old, new in diff.moved.items():
        yield {"path": new, "operation": "move", "moved_from": old}
    for path, shape in diff.truncated.items():
        yield {"path": path, "operation": "truncate", "grid_shape": shape}
    for path, chunks in diff.chunks.items():
        record = {"path": path, "operation": "change", "chunks": len(chunks)}
        yield {**record, "coordinates": chunks} if coordinates else record


# --- values ----------------------------------------------------------------------------------


def _show_values(
    repo: Repository, start: str, end: str, arrays: Sequence[str] | None, *, as_json: bool
) -> None:
    out = console()
    paths = arrays or _in_both(repo, start, end)
    if not (paths or as_json):
        out.print("no changes")
    for path in paths:
        with progress(f"comparing {plain_text(path)}") as told:
            found = repo.diff(start, end, path, values=True, progress=told)
        if as_json:
            print_json(found)
            continue
        out.print(str(found), soft_wrap=True)
        if found.cells:
            for at, count in zip(found.chunks.tolist(), found.counts.tolist(), strict=True):
                out.print(f"    {tuple(at)}: {count_text(count, 'cell')}")


def _in_both(repo: Repository, start: str, end: str) -> list[str]:
    """The changed arrays that there are in both versions, by their paths in the newer one."""
    from zarr_manifests.store import contents_of

    diff = repo.diff(start, end, symmetric=False)
    found = {*diff.created, *diff.updated, *diff.chunks, *diff.truncated}
    moved_from = {new: old for old, new in diff.moved.items()}
    was, now = (
        contents_of(repo.readonly_session(version).store).view.nodes for version in (start, end)
    )

    def is_array(nodes: Mapping[str, Node], path: str) -> bool:
        node = nodes.get(path.strip("/"))
        return node is not None and node.array is not None

    there = (path for path in found if is_array(was, moved_from.get(path, path)))
    return sorted(path for path in there if is_array(now, path))
