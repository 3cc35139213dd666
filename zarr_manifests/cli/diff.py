"""`zarr-manifests diff`: what changed from one snapshot to a later one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console

from zarr_manifests.cli.console import (
    Options,
    Url,
    console,
    open_at,
)
from zarr_manifests.plain import plain_text
from zarr_manifests.texts import count_text

if TYPE_CHECKING:
    from zarr_manifests.reports import Change

__all__ = ["run"]

_Ref = Annotated[
    str, typer.Argument(help="The id of a snapshot, a branch or a tag.", show_default=False)
]
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
    start: _Ref,
    end: _Ref,
    log: Annotated[bool, typer.Option("--log", help="Commit by commit, oldest first.")] = False,
    coordinates: Annotated[
        bool, typer.Option("--coordinates", help="The coordinates of the chunks, too.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line, as records to replay.")
    ] = False,
    option: Options = None,
) -> None:
    """Show what changed after START up to END: nodes made, changed, gone, moved; and chunks."""
    repo = open_at(url, option)
    with Console(stderr=True).status("following the history") as status:

        def show(commits: int) -> None:
            status.update(f"following the history: {count_text(commits, 'commit')}")

        changes = repo.changes(start, end, "log" if log else "net", progress=show)
        first = next(changes, None)
    found = _with_first(first, changes)
    if as_json:
        for change in found:
            typer.echo(json.dumps(_fields(change, coordinates)))
        return
    out = console()
    if first is None:
        out.print("no changes")
    for snapshot_id, records in groupby(found, key=lambda change: change.snapshot_id):
        if snapshot_id is not None:
            out.print(snapshot_id, style="yellow", soft_wrap=True)
        for line in _lines(records, coordinates):
            out.print(plain_text(line), soft_wrap=True)


def _with_first(first: Change | None, rest: Iterator[Change]) -> Iterator[Change]:
    if first is not None:
        yield first
        yield from rest


def _lines(records: Iterable[Change], coordinates: bool) -> Iterator[str]:
    """The changes of nodes, then of chunks, array by array."""
    from zarr_manifests.reports import moved_tops

    found = list(records)
    moved = {record.moved_from: record.path for record in found if record.moved_from is not None}
    tops = moved_tops(moved)
    for operation, mark in _MARKS.items():
        for record in found:
            went_along = record.moved_from is not None and record.moved_from not in tops
            if record.operation == operation and not went_along:
                yield mark.format(path=record.path, moved_from=record.moved_from)
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


def _fields(change: Change, coordinates: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {"path": change.path, "operation": change.operation}
    if change.snapshot_id is not None:
        fields["snapshot_id"] = change.snapshot_id
    if change.moved_from is not None:
        fields["moved_from"] = change.moved_from
    if change.grid_shape is not None:
        fields["grid_shape"] = change.grid_shape
    if change.operation in _WORDS:
        fields["chunks"] = len(change.coordinates)
        if coordinates:
            fields["coordinates"] = change.coordinates.tolist()
    return fields
