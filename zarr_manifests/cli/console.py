"""What the verbs share to print: results as text or JSON, progress, errors."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import NoReturn

import typer

from zarr_manifests.cli.words import on_command_line
from zarr_manifests.errors import ConflictError
from zarr_manifests.progress import bars
from zarr_manifests.rendering import PlainConsole, says
from zarr_manifests.report import Report, json_line
from zarr_manifests.texts import plain_text

__all__ = ["ReaderGoneError", "console", "progress", "say", "show", "write_error"]

_PIPED_WIDTH = 200


class _Console(PlainConsole):
    def on_broken_pipe(self) -> NoReturn:
        raise ReaderGoneError


class ReaderGoneError(Exception):
    """Nobody reads the output any more, as after `| head`: the application ends, and well."""


def say(text: str, *, nl: bool = True) -> None:
    """Print the text as it is, without tables and colors."""
    try:
        typer.echo(text, nl=nl)
    except BrokenPipeError as error:
        raise ReaderGoneError from error


def console(*, stderr: bool = False) -> PlainConsole:
    """Standard output, or standard error; in a pipe, long lines are not wrapped."""
    out = _Console(stderr=stderr)
    if not out.is_terminal:
        out.width = max(out.width, _PIPED_WIDTH)
    return out


def show(result: object, as_json: bool, text: object = None) -> None:
    """Print a result: as a line of JSON; or as text, which may be given."""
    if as_json:
        say(json_line(result))
        return
    shown = result if text is None else text
    if isinstance(shown, Report) and says(shown):
        shown = str(shown)
    console().print(shown, soft_wrap=isinstance(shown, str))


def progress(what: str) -> AbstractContextManager[None]:
    """Show on standard error how far long work is; nothing if that is not a terminal."""
    return bars(console(stderr=True), what)


def write_error(error: BaseException | str) -> None:
    """Print the error as one line on standard error, and each conflict as another."""
    conflicts = error.conflicts if isinstance(error, ConflictError) else ()
    text = error.message if isinstance(error, ConflictError) else str(error)
    mark = typer.style("error:", fg=typer.colors.RED, bold=True)
    color = None if sys.stderr.isatty() else False
    shown = plain_text(on_command_line(text)).replace("\\n  ", "\n  ")  # a list
    typer.echo(f"{mark} {shown}", err=True, color=color)
    for conflict in conflicts:
        typer.echo(f"  {conflict}", err=True)
