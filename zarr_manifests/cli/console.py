"""What the verbs share: options that select a snapshot, and printing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.plain import plain_text

if TYPE_CHECKING:
    from zarr_manifests.repository import Repository
    from zarr_manifests.session import Session

__all__ = [
    "Branch",
    "Options",
    "SnapshotId",
    "Tag",
    "Url",
    "columns",
    "console",
    "open_at",
    "progress",
    "session_at",
    "storage_options",
    "write_error",
]

_PIPED_WIDTH = 200

Url = Annotated[
    str,
    typer.Argument(
        help="The repository: a path, or a URL such as file:///data/winds.", show_default=False
    ),
]
Branch = Annotated[
    str | None,
    typer.Option("--branch", "-b", help="At the head of this branch.", show_default="main"),
]
Tag = Annotated[str | None, typer.Option("--tag", "-t", help="At this tag.", show_default=False)]
SnapshotId = Annotated[
    str | None,
    typer.Option("--snapshot", "-s", help="At the snapshot with this id.", show_default=False),
]


Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="NAME=VALUE",
        help="How to reach the storage, such as region=eu-west-1; may be given several times.",
        show_default=False,
    ),
]


def storage_options(url: str, given: list[str] | None) -> dict[str, object]:
    """Return the storage options that `--option name=value` gives."""
    from zarr_manifests.storage.url import parse_options

    texts = {}
    for one in given or ():
        name, equals, value = one.partition("=")
        if not equals or not name or name in texts:
            raise InvalidArgumentError("--option takes name=value, and each name once")
        texts[name] = value
    # As in `python -m`: credentials may be a function in a file of the working directory.
    if "credentials" in texts and "" not in sys.path:
        sys.path.insert(0, "")
    return parse_options(url, texts)


def open_at(url: str, option: list[str] | None) -> Repository:
    """Open the repository at that URL."""
    from zarr_manifests.repository import Repository

    return Repository.open(url, storage_options=storage_options(url, option))


def session_at(
    url: str, option: list[str] | None, branch: str | None, tag: str | None, snapshot: str | None
) -> Session:
    """Open a read-only session at the snapshot that the options select."""
    return open_at(url, option).readonly_session(branch=branch, tag=tag, snapshot_id=snapshot)


class _Console(Console):
    """A console that prints any text literally, in tables too."""

    def render_str(self, text: str, *args: Any, **options: Any) -> Text:
        return super().render_str(plain_text(text, lines=True), *args, **options)


def console() -> Console:
    """Standard output; in a pipe, long lines are not wrapped."""
    out = _Console(highlight=False, markup=False, emoji=False)
    if not out.is_terminal:
        out.width = max(out.width, _PIPED_WIDTH)
    return out


@contextmanager
def progress(what: str = "objects") -> Iterator[Callable[[str, int], None]]:
    """Show progress on one line of the terminal."""
    with console().status("Starting ...") as status:
        yield lambda stage, done: status.update(f"{stage}: {done:,} {what}")


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
    """Print the error as one line on standard error."""
    mark = typer.style("error:", fg=typer.colors.RED, bold=True)
    typer.echo(
        f"{mark} {plain_text(error)}", err=True, color=None if sys.stderr.isatty() else False
    )
