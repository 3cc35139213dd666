"""`zarr-manifests export`: a snapshot in a format that other software reads."""

from __future__ import annotations

from typing import Annotated

import typer

import zarr_manifests as zm
from zarr_manifests.cli.arguments import (
    Authorize,
    Json,
    Options,
    ToOptions,
    Url,
    Version,
    as_given,
    open_at,
    storage_options,
)
from zarr_manifests.cli.as_json import print_json
from zarr_manifests.cli.console import console, progress
from zarr_manifests.texts import bytes_text, count_text

__all__ = ["run"]

_Dest = Annotated[
    str,
    typer.Argument(
        help="Where to: an empty folder or bucket, or a file for zip and kerchunk.",
        show_default=False,
    ),
]
_Format = Annotated[str, typer.Option("--format", "-f", help="zarr, zip, kerchunk or icechunk.")]
_Path = Annotated[str, typer.Option("--path", "-p", help="The group or array to export.")]
_NoCopy = Annotated[
    bool,
    typer.Option("--no-copy", help="Refer to chunks where they are; a tag keeps them there."),
]
_Tag = Annotated[
    str | None, typer.Option("--tag", "-t", help="The name of that tag.", show_default=False)
]
_Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the Zarr store or the file that is there.")
]


def run(
    url: Url,
    dest: _Dest,
    version: Version = "main",
    kind: _Format = "zarr",
    path: _Path = "/",
    no_copy: _NoCopy = False,
    tag: _Tag = None,
    overwrite: _Overwrite = False,
    authorize: Authorize = False,
    as_json: Json = False,
    option: Options = None,
    to_option: ToOptions = None,
) -> None:
    """Write a snapshot so that other software can read it: as Zarr, in a ZIP, as references."""
    options = storage_options(dest, to_option, "--to-option")
    session = open_at(url, option, authorize).readonly_session(version)
    with progress("exporting") as told:
        report = zm.export(
            session,
            dest,
            as_given(kind),
            not no_copy,
            path=path,
            overwrite=overwrite,
            tag=tag,
            storage_options=options or None,
            progress=told,
        )
    if as_json:
        print_json(report)
        return
    out = console()
    facts = [
        count_text(report.arrays, "array"),
        f"{count_text(report.chunks, 'chunk')} ({bytes_text(report.nbytes)})",
    ]
    if report.referenced:
        facts.append(f"{report.referenced:,} of them by reference")
    out.print(f"{report.dest}: {'; '.join(facts)}")
    if report.tag is not None:
        out.print(f"the tag {report.tag} keeps what is referred to: do not delete it")
