"""`zarr-manifests config`, `explain` and `info`: a repository's options, manifests and objects."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import IO, TYPE_CHECKING, Any

import typer

from zarr_manifests.cli.verbs import Repo, Told, verb, write_error
from zarr_manifests.errors import ConfigError, InvalidArgumentError
from zarr_manifests.progress import counted
from zarr_manifests.rendering import report

if TYPE_CHECKING:
    from zarr_manifests.config import Config

run_config = typer.Typer(help="Show, change and check configurations.", no_args_is_help=True)


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


# --- manifests -------------------------------------------------------------------------------


@verb
def run_explain(repo: Repo, version: str = "main") -> object:
    """Show each array's matching rule, its set and manifests."""
    return repo.explain_manifests(version)


# --- the repository --------------------------------------------------------------------------


@verb
def run_info(repo: Repo) -> object:
    """Show a repository: branches, tags, metadata and size."""
    from zarr_manifests.format.records import FORMAT_VERSION
    from zarr_manifests.format.root import ROOT_KEY, Root

    root = Root.from_object(repo.storage.get_tagged(ROOT_KEY).data)
    objects: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for one in counted("looking at what is stored", repo.storage.list()):
        kind = one.key.partition("/")[0]
        objects[kind] += 1
        sizes[kind] += one.nbytes
    found = {
        "url": repo.storage.url,
        "repository_id": root.repository_id,
        "format": FORMAT_VERSION,
        "root_version": root.version,
        "root_written_at": datetime.fromtimestamp(root.written_ms / 1000, UTC),
        "objects": objects.total(),
        "nbytes": sizes.total(),
        "branches": repo.list_branches(),
        "tags": repo.list_tags(),
        "metadata": repo.metadata(),
        "stored": {
            kind: {"objects": objects[kind], "nbytes": n} for kind, n in sizes.most_common()
        },
    }
    return Told(found, [report(found)])
