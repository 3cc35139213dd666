"""`zarr-manifests config`: configurations and their JSON Schema; metadata of a repository."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zarr_manifests.cli.arguments import Json, Options, Url, open_at
from zarr_manifests.cli.console import say, show, write_error
from zarr_manifests.cli.looking import value_text
from zarr_manifests.errors import ConfigError, InvalidArgumentError
from zarr_manifests.plain import plain_text

if TYPE_CHECKING:
    from zarr_manifests.config import Config

__all__ = ["app", "read_config"]

app = typer.Typer(
    help="Show, change and check configurations; metadata of a repository.", no_args_is_help=True
)

File = Annotated[str, typer.Argument(help="A YAML file; - for standard input.", show_default=False)]


@app.command(name="show")
def show_config(url: Url, as_json: Json = False, option: Options = None) -> None:
    """Print the saved configuration as YAML."""
    config = open_at(url, option).config
    if as_json:
        show(config.to_dict(), as_json)
    else:
        say(config.to_yaml(), nl=False)


@app.command(name="set")
def set_options(
    url: Url,
    options: Annotated[
        list[str],
        typer.Argument(help="Such as commits.mode=rewrite; values are YAML.", show_default=False),
    ],
    option: Options = None,
) -> None:
    """Change options and save them, all or none."""
    given: dict[str, Any] = {}
    for one in options:
        _put(given, one)
    open_at(url, option).save_config(given)


@app.command()
def apply(url: Url, file: File, option: Options = None) -> None:
    """Save the configuration in a file; options that the file leaves out get their defaults."""
    open_at(url, option).save_config(read_config(file))


@app.command()
def validate(file: File, as_json: Json = False) -> None:
    """Check a file and print every fault with its place, one per line."""
    config = read_config(file)
    if as_json:
        show(config.to_dict(), as_json)
    else:
        say(f"{'standard input' if file == '-' else plain_text(file)}: good")


@app.command()
def schema() -> None:
    """Print the JSON Schema of configurations, for editors."""
    from zarr_manifests.config import config_schema

    say(json.dumps(config_schema(), indent=2))


@app.command()
def metadata(
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
        repo.metadata(given, replace=True)
    elif given:
        repo.metadata(given)
    if as_json:
        show(repo.metadata(), as_json)
    elif not given:
        for name, value in repo.metadata().items():
            say(plain_text(f"{name}: {value_text(value)}"))


def read_config(file: str) -> Config:
    """Read the configuration in the file; faults are printed one per line, and end the program."""
    from zarr_manifests.config import Config
    from zarr_manifests.config.yaml_text import MAX_TEXT_BYTES

    try:
        # One byte more than allowed, so that the rest of a huge file is never read.
        if file == "-":
            text = sys.stdin.buffer.read(MAX_TEXT_BYTES + 1)
        else:
            with Path(file).open("rb") as stream:
                text = stream.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise InvalidArgumentError(f"{file} cannot be read: {error.strerror}") from error
    try:
        return Config.from_yaml(text)
    except ConfigError as error:
        for problem in error.problems:
            write_error(problem)
        raise typer.Exit(2) from error


def _put(given: dict[str, Any], option: str) -> None:
    """Put `section.option=value` into nested options."""
    from zarr_manifests.config.yaml_text import load_yaml

    place, equals, text = option.partition("=")
    if not equals or not place:
        raise InvalidArgumentError(f"{option!r}: expected option=value, as commits.mode=rewrite")
    *sections, name = place.split(".")
    inside = given
    for section in sections:
        inside = inside.setdefault(section, {})
        if not isinstance(inside, dict):
            raise InvalidArgumentError(f"{place}: {section} is given as a value and as a section")
    if name in inside:
        raise InvalidArgumentError(f"{place} is given twice")
    inside[name] = load_yaml(text)[0]


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
