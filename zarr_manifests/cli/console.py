"""What the verbs share to print: results as text or JSON, progress, errors.

The library's errors say what to do in Python: `pass copy=False`, `repo.ancestry() lists them`. On
the command line the same is an option or a verb.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NoReturn

import typer
from rich.text import Text

from zarr_manifests.errors import ConflictError
from zarr_manifests.rendering import PlainConsole
from zarr_manifests.report import json_line
from zarr_manifests.texts import plain_text

_PIPED_WIDTH: Final = 200
_WORDS: Final = tuple(
    (re.compile(pattern), given)
    for pattern, given in (
        (r"`zm\.recover` and (?=`zarr-manifests recover` make)", ""),
        (r"(?<=`zarr-manifests recover` )make\b", "makes"),
        (r"`repo\.ancestry\(\)` and (`zarr-manifests log`) list\b", r"\1 lists"),
        (
            r"\bmake one with zm\.create, or check the path",
            "check the path; `zarr-manifests import` makes one of other data",
        ),
        (r"\breset_branch\('([^']*)', \.\.\.\)", r"`branch \1 VERSION --move`"),
        (
            r"\breset_branch\('([^']*)', '([^']*)', expected='([^']*)'\)",
            r"`branch \1 \2 --move --expected \3`",
        ),
        (r"\breset_branch\b", "`branch --move`"),
        (r"\bcherry_pick\b", "`cherry-pick`"),
        (r"\bgarbage_collect\(\)", "`clean`"),
        (
            r"\bpass keep_last, max_age or older_than \(`clean`: keep\)",
            "give --keep a number or an age",
        ),
        (r"\bkeep_last\b", "--keep"),
        (r"\bon_error='report'", "--skip"),
        (r"\bon_changed='replace'", "--replace"),
        (r"\bcopy=False\b", "--no-copy"),
        (r"\bwith copy=True\b", "without --no-copy"),
        (r"\bsymmetric=False\b", "--direct"),
        (r"\b(overwrite|force)=True\b", r"--\1"),
        (r"\b(format|expected)='([\w-]*)'", r"--\1 \2"),
        (r"\bauthorize=\[[^\]]*\]", "--authorize"),
        (r"\bmax_bytes=", "--max-bytes"),
        (r"\b(tag|path)=(?=[\s,.;]|$)", r"--\1"),
        (r"`repo\.list_branches\(\)`", "`zarr-manifests branch`"),
        (r"`repo\.list_tags\(\)`", "`zarr-manifests tag`"),
        (r"`repo\.(ancestry\(\)|txn_versions\(branch\))`", "`zarr-manifests log`"),
        (r"`repo\.ops_log\(\)`", "`zarr-manifests log --ops`"),
        (r"`zm\.recover\(repo, version\)`", "`zarr-manifests recover --to NUMBER`"),
        (r"`zm\.recover`", "`zarr-manifests recover`"),
    )
)


class _Console(PlainConsole):
    def on_broken_pipe(self) -> NoReturn:
        raise ReaderGoneError


class ReaderGoneError(Exception):
    """Nobody reads the output any more, as after `| head`: the application ends, and well."""


@dataclass(frozen=True, slots=True)
class Told:
    """A result that is not the same for programs as for people.

    Parameters
    ----------
    found : object
        What `--json` prints; None if that is no other than the text.
    text : iterable, optional
        What people see, part by part, a text as one line; `found` itself by default.
    wrong : bool
        Whether the exit code says that something is wrong.
    """

    found: object
    text: Iterable[object] | None = None
    wrong: bool = False


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


def show(result: object, as_json: bool) -> None:
    """Print a result as text, or as JSON: a listing is an object on each line.

    Text alone is the id of a snapshot.
    """
    told = result if isinstance(result, Told) else Told(result)
    if as_json and told.found is not None:
        found = {"snapshot_id": told.found} if isinstance(told.found, str) else told.found
        for one in found if isinstance(found, list) else [found]:
            say(json_line(one))
    else:
        out = console()
        for part in [told.found] if told.text is None else told.text:
            out.print(plain_text(part) if isinstance(part, str) else part, soft_wrap=True)
    if told.wrong:
        raise typer.Exit(1)


def styled(text: str, style: str) -> Text:
    """Anybody's text in a style."""
    return Text(plain_text(text), style)


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


def on_command_line(text: str) -> str:
    """The message with options and verbs of the command line.

    Examples
    --------
    >>> from zarr_manifests.cli.console import on_command_line
    >>> on_command_line("format='kerchunk' holds references: pass copy=False")
    '--format kerchunk holds references: pass --no-copy'
    >>> on_command_line("branch 'v1' exists; reset_branch moves it")
    "branch 'v1' exists; `branch --move` moves it"
    >>> on_command_line("`repo.ancestry()` and `zarr-manifests log` list the snapshots")
    '`zarr-manifests log` lists the snapshots'
    """
    for pattern, given in _WORDS:
        text = pattern.sub(given, text)
    return text
