"""Verbs from functions, and the arguments and options that several verbs take."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from inspect import Parameter
from typing import TYPE_CHECKING, Annotated, Any, Final, get_args, get_origin

import typer

import zarr_manifests as zm
from zarr_manifests.cli.console import show
from zarr_manifests.errors import InvalidArgumentError, ManifestsError
from zarr_manifests.progress import show_progress

if TYPE_CHECKING:
    from zarr_manifests.repository import Repository

type Repo = Repository
"""The repository at the URL, opened."""
type TrustingRepo = Repository
"""The same; with `--authorize` it reads files at the places that are saved with it."""
Pairs = list[str] | None
"""What was given as `NAME=VALUE`, each name once."""

_SHARED: Final = """
url :
    The repository: a path, or a URL such as file:///data/winds.
version : VERSION
    A branch, tag, id or short id, main~3, main@{2026-11-01}.
at : -a VERSION
    Which version: a branch, tag, id or short id, main~3, main@{2026-11-01}.
branch : -b
    The branch to commit to.
message : -m
    The commit message.
dry_run :
    Only say what would be done.
json :
    Print JSON: one object on each line.
authorize :
    Read files at the places that are saved with it (`info`).
max_bytes :
    Bytes of metadata, and of a chunk that is copied, that are accepted.
container : NAME=URL
    A place whose files may be looked at; may be given several times.
option : -o NAME=VALUE
    How to reach the storage, such as region=eu-west-1; may be given several times.
from_option : NAME=VALUE
    How to reach what is imported; may be given several times.
to_option : NAME=VALUE
    How to reach the other place; may be given several times.
"""
_TOLD: Final = re.compile(r"^(\w+) :(.*)\n((?:    .*\n?)+)", re.MULTILINE)


def verb(function: Callable[..., object]) -> Callable[..., None]:
    """Make a function a verb: positional parameters are arguments, keyword-only ones options.

    In the place of a `Repo` the command takes a URL, and `--option`. What the function returns is
    printed, and the command takes `--json`, unless the function says that it returns None.

    What the help says of a parameter stands in the section Parameters of the docstring, or above,
    if several verbs have it. In the place of a type stand a short name such as `-n`, and what the
    help calls the value, such as `WHEN`. Limits are an annotation, such as `{"min": 0}`.
    """
    said, _, parameters = inspect.cleandoc(function.__doc__ or "").partition("\n\nParameters\n")
    texts = {found[1]: found for found in _TOLD.finditer(f"{_SHARED}\n{parameters}")}
    signature = inspect.signature(function, eval_str=True)
    tells = signature.return_annotation is not None
    opened, due = "", []
    added: dict[str, Any] = {"json": bool} if tells else {}
    for one in signature.parameters.values():
        if one.annotation in (Repo, TrustingRepo):
            opened = one.name
            added |= {"authorize": bool} if one.annotation is TrustingRepo else {}
            added |= {"option": list[str] | None}
            due.append(one.replace(name="url", annotation=str))
        else:
            due.append(one)
    for name, kind in added.items():
        default = False if kind is bool else None
        due.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind))
    made = [_described(one, texts) for one in due]

    def run(**given: Any) -> None:
        as_json = given.pop("json", False)
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


def _described(one: Parameter, texts: dict[str, re.Match[str]]) -> Parameter:
    """The parameter with what Typer wants to know of it; what more it knows comes as a mapping."""
    annotated = get_origin(one.annotation) is Annotated
    kind, more = get_args(one.annotation) if annotated else (one.annotation, {})
    words = texts[one.name][2].split()
    told: Any = {
        "help": " ".join(texts[one.name][3].split()),
        "metavar": next((word for word in words if not word.startswith("-")), None),
        "show_default": one.default not in (None, False),
        "autocompletion": _COMPLETED.get(one.name),
        **more,
    }
    if one.kind is not one.KEYWORD_ONLY:
        return one.replace(annotation=Annotated[kind, typer.Argument(**told)])
    names = [f"--{one.name.replace('_', '-')}", *(word for word in words if word[0] == "-")]
    return one.replace(annotation=Annotated[kind, typer.Option(*names, **told)])


# --- completion ------------------------------------------------------------------------------


def _versions(ctx: typer.Context, incomplete: str) -> list[str]:
    """Branches and tags that begin so, for a shell; none if the repository cannot be opened."""
    return _names(ctx, incomplete, tags=True)


def _branches(ctx: typer.Context, incomplete: str) -> list[str]:
    """Branches that begin so, for a shell."""
    return _names(ctx, incomplete, tags=False)


_COMPLETED: Final = {
    **dict.fromkeys(("at", "end", "name", "since", "start", "version"), _versions),
    **dict.fromkeys(("branch", "into"), _branches),
}
"""What completes a parameter of that name."""


def _names(ctx: typer.Context, incomplete: str, *, tags: bool) -> list[str]:
    # An incomplete command is not parsed if a value is missing: the URL is behind the verb.
    typed = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
    words = typed.split()[len(ctx.command_path.split()) :]
    url = next((word for word in words if not word.startswith("-")), "")
    try:
        repo = open_at(ctx.params.get("url") or url, ctx.params.get("option"))
        names = [*repo.list_branches(), *(repo.list_tags() if tags else ())]
    except ManifestsError:  # there is nobody to tell
        return []
    return [name for name in names if name.startswith(incomplete)]


# --- what was given --------------------------------------------------------------------------


def storage_options(url: str, given: Pairs, option: str = "--option") -> dict[str, object]:
    """The storage options that `--option name=value` gives; `option` is its name, for errors."""
    from zarr_manifests.storage.url import parse_options

    texts = pairs(given, option)
    # As in `python -m`: credentials may be a function in a file of the working directory.
    if "credentials" in texts and "" not in sys.path:
        sys.path.insert(0, "")
    return parse_options(url, texts)


def pairs(given: Pairs, option: str) -> dict[str, str]:
    """The values by name that `NAME=VALUE` gives several times; errors have no value."""
    found: dict[str, str] = {}
    for one in given or ():
        name, equals, value = one.partition("=")
        if not equals or not name or name in found:
            raise InvalidArgumentError(f"{option} takes name=value, and each name once")
        found[name] = value
    return found


def open_at(url: str, option: Pairs, authorize: bool = False) -> Repository:
    """Open the repository at that URL."""
    options = storage_options(url, option)
    return zm.open(url, authorize=authorize, storage_options=options)
