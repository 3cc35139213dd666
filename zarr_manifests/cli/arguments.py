"""Verbs from functions, and the arguments and options that several verbs take."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from inspect import Parameter
from typing import TYPE_CHECKING, Annotated, Any, Final, get_origin

import typer

import zarr_manifests as zm
from zarr_manifests.cli.console import show
from zarr_manifests.errors import InvalidArgumentError, ManifestsError
from zarr_manifests.progress import show_progress

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
    "Repo",
    "ToOptions",
    "TrustingRepo",
    "Url",
    "Version",
    "complete_branches",
    "complete_versions",
    "open_at",
    "pairs",
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


def verb(function: Callable[..., object]) -> Callable[..., None]:
    """Make a function a verb: positional parameters are arguments, keyword-only ones options.

    In the place of a `Repo` the command takes a URL, and `--option`. What the function returns is
    printed, and the command takes `--json`, unless the function says that it returns None.

    What the help says of each parameter stands in the section Parameters of the docstring. In the
    place of a type stand a short name such as `-n`, and what the help calls the value, such as
    `WHEN`.
    """
    said, _, parameters = inspect.cleandoc(function.__doc__ or "").partition("\n\nParameters\n")
    texts = {
        found[1]: (found[2].split(), " ".join(found[3].split()))
        for found in re.finditer(r"^(\w+) :(.*)\n((?:    .*\n?)+)", parameters, re.MULTILINE)
    }
    signature = inspect.signature(function, eval_str=True)
    tells = signature.return_annotation is not None
    added: dict[str, tuple[Any, Any]] = {"as_json": (Json, False)} if tells else {}
    opened, made = "", []
    for one in signature.parameters.values():
        kind = one.annotation
        if kind in (Repo, TrustingRepo):
            added |= {"authorize": (Authorize, False)} if kind is TrustingRepo else {}
            added["option"] = Options, None
            opened, kind, one = one.name, Url, one.replace(name="url")
        elif get_origin(kind) is not Annotated:
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
    for name, (kind, default) in added.items():
        made.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind))

    def run(**given: Any) -> None:
        as_json = given.pop("as_json", False)
        with show_progress() if tells else nullcontext():
            if opened:
                url, option = given.pop("url"), given.pop("option")
                given[opened] = open_at(url, option, given.pop("authorize", False))
            result = function(**given)
        if tells:
            show(result, as_json)

    changed: Any = run
    changed.__name__, changed.__doc__ = function.__name__, said
    changed.__signature__ = inspect.Signature(made)
    changed.__annotations__ = {one.name: one.annotation for one in made}
    return run


type Repo = Repository
"""The repository at the URL, opened."""
type TrustingRepo = Repository
"""The same; with `--authorize` it reads files at the places that are saved with it."""
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

    texts = pairs(given, option)
    # As in `python -m`: credentials may be a function in a file of the working directory.
    if "credentials" in texts and "" not in sys.path:
        sys.path.insert(0, "")
    return parse_options(url, texts)


def pairs(given: list[str] | None, option: str) -> dict[str, str]:
    """The values by name that `NAME=VALUE` gives several times; errors have no value."""
    found: dict[str, str] = {}
    for one in given or ():
        name, equals, value = one.partition("=")
        if not equals or not name or name in found:
            raise InvalidArgumentError(f"{option} takes name=value, and each name once")
        found[name] = value
    return found


def open_at(url: str, option: list[str] | None, authorize: bool = False) -> Repository:
    """Open the repository at that URL."""
    options = storage_options(url, option)
    return zm.open(url, authorize=authorize, storage_options=options)
