"""`zarr-manifests config` and `explain`: configurations, and which manifests they make, and why."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any

import typer

from zarr_manifests.cli.looking import value_text
from zarr_manifests.cli.verbs import Pairs, Repo, Told, pairs, styled, verb, write_error
from zarr_manifests.errors import ConfigError, InvalidArgumentError
from zarr_manifests.rendering import columns
from zarr_manifests.texts import bytes_text, count_text

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
    return Told(found, [f"{name}: {value_text(value)}" for name, value in shown.items()])


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
def run_explain(
    repo: Repo,
    array: str | None = None,
    *,
    at: str = "main",
    config: typer.FileBinaryRead | None = None,
) -> object:
    """Show each array's matching rule, its set and manifests, and why it overflowed.

    Parameters
    ----------
    array :
        Show the leaves of this array.
    config : -c FILE
        What a full compaction with this configuration would give; a YAML file, - for standard
        input. Nothing is written.
    """
    if config is not None and array is not None:
        raise InvalidArgumentError("give an ARRAY or --config, not both")
    given = None if config is None else _read_config(config)
    now = repo.explain_manifests(at, costs=given is not None)
    then = now if given is None else repo.explain_manifests(at, config=given)
    if array is not None:
        return _named(now, array)
    text = [styled(then.snapshot_id, "yellow"), _arrays(then), "", _manifests(then)]
    if given is None:
        return Told(now, text)
    sums = f"now:    {_sum(now)}", f"then:   {_sum(then)}", ""
    return Told({"now": now, "then": then}, [*text, *sums, _costs(now, then)])


def _arrays(layout: ManifestLayout) -> Any:
    numbers = ("rule", "leaves", "refs", "pending")
    table = columns("array", "rule", "set", "manifests", *numbers[1:], "overflowed",
                    right=numbers, whole=("array",))  # fmt: skip
    for array in layout.arrays:
        sets = dict.fromkeys(layout.manifests[i].set_name for i in array.manifests)
        table.add_row(
            array.path,
            "" if array.rule is None else str(array.rule),
            ", ".join(sets) or array.wanted,
            _numbers(array.manifests),
            f"{len(array.leaves):,}",
            f"{array.refs:,}",
            f"{array.pending_refs:,}" if array.pending_refs else "",
            "; ".join(f"{of.set_name}: {of.why}" for of in array.overflows),
        )
    return table


def _manifests(layout: ManifestLayout) -> Any:
    numbers = ("arrays", "refs", "bytes")
    table = columns("manifest", "set", *numbers, "key", right=numbers)
    for i, one in enumerate(layout.manifests):
        size = bytes_text(one.nbytes)
        table.add_row(str(i), one.set_name, f"{one.arrays:,}", f"{one.refs:,}", size, one.key or "")
    return table


def _named(layout: ManifestLayout, array: str) -> ArrayPlace:
    from zarr_manifests.keys import absolute, no_array

    arrays, path = {one.path: one for one in layout.arrays}, absolute(array.strip("/"))
    if path not in arrays:
        raise no_array(path, arrays, f" in snapshot {layout.snapshot_id}")
    return arrays[path]


def _numbers(positions: tuple[int, ...]) -> str:
    """`0, 2-4`, as in the table of manifests."""
    parts: list[list[int]] = []
    for at in positions:
        if parts and parts[-1][-1] == at - 1:
            parts[-1][-1] = at
        else:
            parts.append([at, at])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _sum(layout: ManifestLayout) -> str:
    refs = sum(manifest.refs for manifest in layout.manifests)
    size = sum(manifest.nbytes for manifest in layout.manifests)
    pending = sum(array.pending_refs for array in layout.arrays)
    text = f"{count_text(len(layout.manifests), 'manifest')}, {count_text(refs, 'ref')}, "
    text += bytes_text(size)
    return text + (f", and {count_text(pending, 'ref')} pending" if pending else "")


def _costs(now: ManifestLayout, then: ManifestLayout) -> Any:
    def said(cost: Mapping[str, int]) -> str:
        return f"{count_text(cost['requests'], 'request')}, {bytes_text(cost['nbytes'])}"

    table = columns("to read for", "now", "then", right=("now", "then"))
    for name, what in (
        ("opening", "opening"),
        ("coordinates", "then all coordinates"),
        ("last_step", "then one more step"),
    ):
        table.add_row(what, *(said(costs[name]) for costs in (now.costs, then.costs) if costs))
    return table
