"""`zarr-manifests config` and `explain`: configurations, and which manifests they make, and why."""

from __future__ import annotations

import json
from typing import IO, TYPE_CHECKING, Any

import typer

from zarr_manifests.cli.verbs import Pairs, Repo, Told, pairs, verb, write_error
from zarr_manifests.errors import ConfigError, InvalidArgumentError
from zarr_manifests.report import plain

if TYPE_CHECKING:
    from zarr_manifests.config import Config
    from zarr_manifests.reports import ArrayPlace, ManifestLayout

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
def set_options(repo: Repo, options: list[str]) -> None:
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
def apply(repo: Repo, file: typer.FileBinaryRead) -> None:
    """Save the configuration in a file; options that the file leaves out get their defaults.

    Parameters
    ----------
    file :
        A YAML file; - for standard input.
    """
    repo.save_config(_read_config(file))


@run_config.command()
@verb
def validate(file: typer.FileBinaryRead) -> object:
    """Check a file and print every fault with its place, one per line.

    Parameters
    ----------
    file :
        A YAML file; - for standard input.
    """
    config = _read_config(file)
    name = getattr(file, "name", "<stdin>")
    return Told(config.to_dict(), [f"{name}: good"])


@run_config.command()
@verb
def metadata(repo: Repo, entries: Pairs = None, *, replace: bool = False) -> object:
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
    return Told(found, [f"{name}: {_value_text(value)}" for name, value in shown.items()])


def _value_text(value: object) -> str:
    """The value on one line; text as it is, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False)


def _read_config(file: IO[bytes]) -> Config:
    """Read the configuration in the file; faults are printed one per line, and end the program."""
    from zarr_manifests.config import Config
    from zarr_manifests.config.yaml_text import MAX_TEXT_BYTES

    try:
        # One byte more than allowed, so that the rest of a huge file is never read.
        return Config.from_yaml(file.read(MAX_TEXT_BYTES + 1))
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


# --- manifests -------------------------------------------------------------------------------


@verb
def run_explain(repo: Repo, array: str | None = None, *, at: str = "main") -> object:
    """Show each array's matching rule, its set and manifests; of one array, why it overflowed.

    Parameters
    ----------
    array :
        Show only this array, with its leaves.
    """
    layout = repo.explain_manifests(at)
    return layout if array is None else _named(layout, array)


def _named(layout: ManifestLayout, array: str) -> ArrayPlace:
    from zarr_manifests.keys import absolute, no_array

    arrays, path = {one.path: one for one in layout.arrays}, absolute(array.strip("/"))
    if path not in arrays:
        raise no_array(path, arrays, f" in snapshot {layout.snapshot_id}")
    return arrays[path]
