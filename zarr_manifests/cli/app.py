"""The application: its verbs, `--version`, and error handling."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import zarr_manifests
from zarr_manifests.cli import (
    check,
    clone,
    compact,
    config,
    demo,
    diff,
    du,
    export,
    import_data,
    info,
    layout,
    log,
    maintain,
    ref_commands,
    tree,
)
from zarr_manifests.cli.console import write_error
from zarr_manifests.errors import InvalidArgumentError, ManifestsError

__all__ = ["app"]


class _Verbs(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ManifestsError as error:
            write_error(error)
            raise typer.Exit(2 if isinstance(error, InvalidArgumentError) else 1) from error


app = typer.Typer(
    name="zarr-manifests",
    cls=_Verbs,
    help="Look into versioned Zarr repositories, and see them at work.",
    no_args_is_help=True,
    add_completion=False,
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


app.command(name="demo")(demo.run)
app.command(name="log")(log.run)
app.command(name="tree")(tree.run)
app.command(name="info")(info.run)
app.command(name="du")(du.run)
app.command(name="check")(check.run)
app.command(name="explain")(layout.run_explain)
app.command(name="manifests")(layout.run_explain)
app.command(name="plan")(layout.run_plan)
app.command(name="diff")(diff.run)
app.command(name="compact")(compact.run)
app.command(name="clone")(clone.run)
app.command(name="export")(export.run)
app.command(name="branch")(ref_commands.run_branch)
app.command(name="tag")(ref_commands.run_tag)
app.command(name="expire")(maintain.run_expire)
app.command(name="gc")(maintain.run_gc)
app.command(name="repack")(maintain.run_repack)
app.command(name="statistics")(maintain.run_statistics)
app.command(name="verify")(maintain.run_verify)
app.command(name="ops")(maintain.run_ops)
app.command(name="restore")(maintain.run_restore)
app.command(name="recover")(maintain.run_recover)
app.add_typer(import_data.app, name="import")
app.add_typer(config.app, name="config")
