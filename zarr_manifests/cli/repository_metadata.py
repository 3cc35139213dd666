"""`zarr-manifests metadata`: what a repository says of itself as a whole, shown or set."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from zarr_manifests.cli.arguments import Json, Options, Url, open_at
from zarr_manifests.cli.as_json import plain, print_json
from zarr_manifests.cli.console import say
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.plain import plain_text

__all__ = ["run", "value_text"]


def run(
    url: Url,
    entries: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=VALUE]...",
            help="Set these; values are JSON, or text.",
            show_default=False,
        ),
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Drop the names not given.")] = False,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Show the metadata of the repository as a whole, or set some names of it."""
    given = _parsed(entries or [])
    repo = open_at(url, option)
    if replace:
        repo.update_metadata(given, replace=True)
    elif given:
        repo.update_metadata(given)
    if as_json:
        print_json(repo.metadata)
    elif not given:
        for name, value in repo.metadata.items():
            say(f"{plain_text(name)}: {value_text(value)}")


def value_text(value: object) -> str:
    """The value on one line; text as it is, everything else as JSON."""
    text = value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False)
    return plain_text(text)


def _parsed(entries: list[str]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for entry in entries:
        name, equals, text = entry.partition("=")
        if not equals or not name or name in given:
            raise InvalidArgumentError(f"{entry!r}: expected NAME=VALUE, and each name once")
        given[name] = _value(text)
    return given


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
