"""Verbs from functions, and the arguments and options that several verbs take."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final, get_origin

import typer

import zarr_manifests as zm
from zarr_manifests.errors import InvalidArgumentError, ManifestsError

if TYPE_CHECKING:
    from zarr_manifests.repository import Repository

__all__ = [
    "At",
    "Authorize",
    "Branch",
    "Containers",
    "DryRun",
    "FromOptions",
    "Json",
    "Message",
    "Options",
    "ToOptions",
    "Url",
    "Version",
    "complete_branches",
    "complete_versions",
    "containers_of",
    "open_at",
    "storage_options",
    "verb",
]

_PAIR: Final = "NAME=VALUE"


def complete_versions(ctx: typer.Context, incomplete: str) -> list[str]:
    """Branches and tags that begin so, for a shell; none if the repository cannot be opened."""
    return _completed(ctx, incomplete, tags=True)


def complete_branches(ctx: typer.Context, incomplete: str) -> list[str]:
    """Branches that begin so, for a shell."""
    return _completed(ctx, incomplete, tags=False)


def _completed(ctx: typer.Context, incomplete: str, *, tags: bool) -> list[str]:
    try:
        repo = open_at(ctx.params.get("url") or _typed_url(ctx), ctx.params.get("option"))
        names = [*repo.list_branches(), *(repo.list_tags() if tags else ())]
    except ManifestsError:  # there is nobody to tell
        return []
    return [name for name in names if name.startswith(incomplete)]


def _typed_url(ctx: typer.Context) -> str:
    """The URL of an incomplete command: behind the verb. It is not parsed if a value is missing."""
    typed = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
    words = typed.split()[len(ctx.command_path.split()) :]
    return next((word for word in words if not word.startswith("-")), "")


def verb[Made: Callable[..., None]](function: Made) -> Made:
    """Make a function a verb: positional parameters are arguments, keyword-only ones options.

    What its help says of each stands in the section Parameters of its docstring. In the place of a
    type stand a short name such as `-n`, and what the help calls the value, such as `WHEN`.
    """
    said, _, parameters = inspect.cleandoc(function.__doc__ or "").partition("\n\nParameters\n")
    texts = {
        found[1]: (found[2].split(), " ".join(found[3].split()))
        for found in re.finditer(r"^(\w+) :(.*)\n((?:    .*\n?)+)", parameters, re.MULTILINE)
    }
    made = []
    for one in inspect.signature(function, eval_str=True).parameters.values():
        kind = one.annotation
        if get_origin(kind) is not Annotated:
            words, text = texts[one.name]
            told: Any = {
                "help": text,
                "metavar": next((word for word in words if not word.startswith("-")), None),
                "show_default": one.default not in (None, False),
            }
            if one.kind is one.KEYWORD_ONLY:
                names = [f"--{one.name.replace('_', '-')}", *(w for w in words if w[0] == "-")]
                kind = Annotated[kind, typer.Option(*names, **told)]
            else:
                kind = Annotated[kind, typer.Argument(**told)]
        made.append(one.replace(annotation=kind))
    changed: Any = function
    changed.__doc__ = said
    changed.__signature__ = inspect.Signature(made)
    changed.__annotations__ = {one.name: one.annotation for one in made}
    return function


Url = Annotated[
    str,
    typer.Argument(
        help="The repository: a path, or a URL such as file:///data/winds.", show_default=False
    ),
]
At = Annotated[
    str,
    typer.Option(
        "--at",
        "-a",
        metavar="VERSION",
        help="Which version: a branch, tag, id or short id, main~3, main@{2026-11-01}.",
        autocompletion=complete_versions,
    ),
]
Version = Annotated[
    str,
    typer.Argument(
        metavar="VERSION",
        help="A branch, tag, id or short id, main~3, main@{2026-11-01}.",
        autocompletion=complete_versions,
    ),
]
Branch = Annotated[
    str,
    typer.Option(
        "--branch", "-b", help="The branch to commit to.", autocompletion=complete_branches
    ),
]
Message = Annotated[
    str | None,
    typer.Option("--message", "-m", help="The commit message.", show_default=False),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON: one object on each line.")]
Authorize = Annotated[
    bool,
    typer.Option("--authorize", help="Read files at the places that are saved with it (`info`)."),
]


def _pairs_of(*names: str, text: str, metavar: str = _PAIR) -> Any:
    text = f"{text}; may be given several times."
    return typer.Option(*names, metavar=metavar, help=text, show_default=False)


Containers = Annotated[
    list[str] | None,
    _pairs_of("--container", metavar="NAME=URL", text="A place whose files may be looked at"),
]
Options = Annotated[
    list[str] | None,
    _pairs_of("--option", "-o", text="How to reach the storage, such as region=eu-west-1"),
]
FromOptions = Annotated[
    list[str] | None, _pairs_of("--from-option", text="How to reach what is imported")
]
ToOptions = Annotated[
    list[str] | None, _pairs_of("--to-option", text="How to reach the other place")
]


def storage_options(
    url: str, given: list[str] | None, option: str = "--option"
) -> dict[str, object]:
    """The storage options that `--option name=value` gives; `option` is its name, for errors."""
    from zarr_manifests.storage.url import parse_options

    texts = _pairs(given, option, "name=value")
    # As in `python -m`: credentials may be a function in a file of the working directory.
    if "credentials" in texts and "" not in sys.path:
        sys.path.insert(0, "")
    return parse_options(url, texts)


def containers_of(given: list[str] | None) -> dict[str, str]:
    """The places that `--container NAME=URL` gives."""
    return _pairs(given, "--container", "NAME=URL")


def _pairs(given: list[str] | None, option: str, form: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in given or ():
        name, equals, value = one.partition("=")
        if not equals or not name or name in found:
            raise InvalidArgumentError(f"{option} takes {form}, and each name once")
        found[name] = value
    return found


def open_at(url: str, option: list[str] | None, authorize: bool = False) -> Repository:
    """Open the repository at that URL."""
    options = storage_options(url, option)
    return zm.open(url, authorize=authorize, storage_options=options)
