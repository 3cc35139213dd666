"""Arguments and options that several verbs take, and what they mean."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any, Final

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
    "as_given",
    "complete_branches",
    "complete_versions",
    "containers_of",
    "open_at",
    "several",
    "storage_options",
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


def several(*names: str, text: str, metavar: str | None = None) -> Any:
    """An option that may be given several times, which its help says behind the text."""
    text = f"{text}; may be given several times."
    return typer.Option(*names, metavar=metavar, help=text, show_default=False)


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
    str | None, typer.Option("--message", "-m", help="Of the commit.", show_default=False)
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON: one object on each line.")]
Authorize = Annotated[
    bool,
    typer.Option("--authorize", help="Read files at the places that are saved with it (`info`)."),
]
Containers = Annotated[
    list[str] | None,
    several("--container", metavar="NAME=URL", text="A place whose files may be looked at"),
]
Options = Annotated[
    list[str] | None,
    several(
        "--option", "-o", metavar=_PAIR, text="How to reach the storage, such as region=eu-west-1"
    ),
]
FromOptions = Annotated[
    list[str] | None,
    several("--from-option", metavar=_PAIR, text="How to reach what is imported"),
]
ToOptions = Annotated[
    list[str] | None,
    several("--to-option", metavar=_PAIR, text="How to reach the other place"),
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


def as_given(text: Any) -> Any:
    """A word that the library checks against those it knows."""
    return text
