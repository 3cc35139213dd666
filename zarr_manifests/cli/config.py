"""`zarr-manifests config`: configurations and their JSON Schema; metadata of a repository."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from zarr_manifests.cli.arguments import Pairs, Repo, pairs, verb
from zarr_manifests.cli.console import Told, say, write_error
from zarr_manifests.cli.looking import value_text
from zarr_manifests.error_cases import ConfigError
from zarr_manifests.errors import InvalidArgumentError

if TYPE_CHECKING:
    from zarr_manifests.config import Config

__all__ = ["read_config", "run_config"]

run_config = typer.Typer(
    help="Show, change and check configurations; metadata of a repository.", no_args_is_help=True
)


@run_config.command(name="show")
@verb
def show_config(repo: Repo) -> object:
    """Print the saved configuration as YAML."""
    return Told(repo.config.to_dict(), repo.config.to_yaml().splitlines())


@run_config.command(name="set")
@verb
def set_options(
    repo: Repo,
    options: list[str],
) -> None:
    """Change options and save them, all or none.

    Parameters
    ----------
    options :
        Such as commits.mode=rewrite; values are YAML.
    """
    given: dict[str, Any] = {}
    for one in options:
        _put(given, one)
    repo.save_config(given)


@run_config.command()
@verb
def apply(repo: Repo, file: str) -> None:
    """Save the configuration in a file; options that the file leaves out get their defaults.

    Parameters
    ----------
    file :
        A YAML file; - for standard input.
    """
    repo.save_config(read_config(file))


@run_config.command()
@verb
def validate(file: str) -> object:
    """Check a file and print every fault with its place, one per line.

    Parameters
    ----------
    file :
        A YAML file; - for standard input.
    """
    config = read_config(file)
    return Told(config.to_dict(), [f"{'standard input' if file == '-' else file}: good"])


@run_config.command()
def schema() -> None:
    """Print the JSON Schema of configurations, for editors."""
    from zarr_manifests.config import config_schema

    say(json.dumps(config_schema(), indent=2))


@run_config.command()
@verb
def metadata(
    repo: Repo,
    entries: Pairs = None,
    *,
    replace: bool = False,
) -> object:
    """Show the metadata of the repository as a whole, or set some names of it.

    Parameters
    ----------
    entries : [NAME=VALUE]...
        Set these; values are JSON, or text.
    replace :
        Drop the names not given.
    """
    given = {name: _value(text) for name, text in pairs(entries, "metadata").items()}
    if replace:
        repo.metadata(given, replace=True)
    elif given:
        repo.metadata(given)
    found = repo.metadata()
    shown = {} if given or replace else found
    return Told(found, [f"{name}: {value_text(value)}" for name, value in shown.items()])


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


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
