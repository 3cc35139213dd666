"""What the verbs share to print: tables, numbers as text, progress, errors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zarr_manifests.cli.words import on_command_line
from zarr_manifests.errors import ConflictError
from zarr_manifests.plain import plain_text

if TYPE_CHECKING:
    from zarr_manifests.cli.progress_bar import ProgressBar

__all__ = [
    "ReaderGoneError",
    "columns",
    "console",
    "progress",
    "say",
    "write_error",
]

_PIPED_WIDTH = 200


class _Console(Console):
    """A console that prints any text literally, in tables too."""

    def render_str(self, text: str, *args: Any, **options: Any) -> Text:
        return super().render_str(plain_text(text, lines=True), *args, **options)

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


def console(*, stderr: bool = False) -> Console:
    """Standard output, or standard error; in a pipe, long lines are not wrapped."""
    out = _Console(highlight=False, markup=False, emoji=False, stderr=stderr)
    if not out.is_terminal:
        out.width = max(out.width, _PIPED_WIDTH)
    return out


@contextmanager
def progress(what: str) -> Iterator[ProgressBar]:
    """Show on standard error how far long work is; nothing if that is not a terminal.

    `what` is shown until the work itself says what it does. The value is a `progress` callable of
    the library.
    """
    from zarr_manifests.cli.progress_bar import ProgressBar

    with ProgressBar(console(stderr=True), what) as bar:
        yield bar


def columns(*headers: str, right: tuple[str, ...] = (), whole: tuple[str, ...] = ()) -> Table:
    """An empty table without lines.

    The headers named in `right` are right-aligned. These columns, and those in `whole`, are not
    wrapped on narrow terminals.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for header in headers:
        table.add_column(
            header,
            justify="right" if header in right else "left",
            no_wrap=header in right or header in whole,
            overflow="fold",
        )
    return table


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
