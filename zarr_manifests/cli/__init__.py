"""The command `zarr-manifests`: the application, its verbs, `--version`, and error handling.

All verbs keep these rules. An error of this package is one line on standard error and exit code 1
(2 for an invalid command), never a traceback. Output needs no terminal. A verb's module is
imported, and its command made, when the verb is called or listed: all of them together take longer
than most calls.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_group

import zarr_manifests
from zarr_manifests.cli.verbs import write_error
from zarr_manifests.errors import InvalidArgumentError, ManifestsError

_USAGE: Final[Any] = typer.BadParameter.__mro__[1]
"""What Typer raises for an invalid command; where it is imported from depends on the version."""

_VERBS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "Look": {
        "history": ("log", "show", "diff"),
        "looking": ("tree", "cat", "summarize", "du"),
        "config": ("info", "explain"),
        "transfers": ("serve",),
    },
    "Change": {"edits": ("branch", "tag", "merge", "revert", "cherry-pick", "mv")},
    "Move": {"transfers": ("export", "clone", "import")},
    "Maintain": {
        "edits": ("verify", "compact", "clean", "recover", "check"),
        "config": ("config",),
    },
    "Learn": {"transfers": ("demo",)},
}
"""Names of verbs by the module they are in, as they are listed."""
_HOMES: Final = {
    name: (panel, module)
    for panel, modules in _VERBS.items()
    for module, names in modules.items()
    for name in names
}


@cache
def _command(name: str) -> Any:
    panel, module = _HOMES[name]
    home = import_module(f"zarr_manifests.cli.{module}")
    found = getattr(home, f"run_{name.replace('-', '_')}")
    one = typer.Typer()
    if isinstance(found, typer.Typer):
        one.add_typer(found, name=name, rich_help_panel=panel)
    else:
        one.command(name, rich_help_panel=panel)(found)
    return get_group(one).commands[name]


class _Commands(Mapping[str, Any]):
    def __getitem__(self, name: str) -> Any:
        return _command(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_HOMES)

    def __len__(self) -> int:
        return len(_HOMES)


class _Verbs(TyperGroup):
    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "commands": _Commands()})

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ManifestsError, ImportError) as error:  # of a package that an extra brings
            write_error(error)
            wrong = isinstance(error, InvalidArgumentError | ImportError)
            raise typer.Exit(2 if wrong else 1) from error
        except _USAGE as error:
            if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help
                raise
            where = ctx.command_path if error.ctx is None else error.ctx.command_path
            text = error.format_message().rstrip(".").replace(": Value error, ", ": ")
            see = " See" if text.endswith("?") else "; see"
            write_error(f"{text}{see} `{where} --help`")
            raise typer.Exit(2) from error
        except BrokenPipeError as error:  # nobody reads any more, as after `| head`
            # What is left in buffers must not fail when the interpreter ends.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
            raise typer.Exit(0) from error


app = typer.Typer(
    name="zarr-manifests",
    cls=_Verbs,
    help="Show, change and maintain versioned Zarr repositories.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"zarr-manifests {zarr_manifests.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    for stream in (sys.stdout, sys.stderr):
        # A terminal that lacks a character gets a question mark instead of a traceback.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
