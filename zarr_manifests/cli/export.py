"""`zarr-manifests export`: a snapshot in a format that other software reads."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from zarr_manifests.cli.console import (
    Options,
    Url,
    console,
    progress,
    storage_options,
)
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
_Ref = Annotated[str, typer.Option("--ref", "-r", help="A branch, a tag or the id of a snapshot.")]
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
_Authorize = Annotated[
    list[str] | None,
    typer.Option(
        "--authorize",
        help="Read the files of this saved container; may be given several times.",
        show_default=False,
    ),
]
_ToOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--to-option",
        metavar="NAME=VALUE",
        help="How to reach the other place; may be given several times.",
        show_default=False,
    ),
]


def run(
    url: Url,
    dest: _Dest,
    kind: _Format = "zarr",
    ref: _Ref = "main",
    path: _Path = "/",
    no_copy: _NoCopy = False,
    tag: _Tag = None,
    overwrite: _Overwrite = False,
    authorize: _Authorize = None,
    option: Options = None,
    to_option: _ToOptions = None,
) -> None:
    """Write a snapshot so that other software can read it: as Zarr, in a ZIP, as references."""
    from zarr_manifests.repository import Repository

    written: Any = kind  # the session says what it may be
    reached = storage_options(url, option)
    repo = Repository.open(url, authorize=authorize or (), storage_options=reached)
    session = repo.readonly_session(ref)
    with progress("written") as told:
        report = session.export(
            dest,
            written,
            not no_copy,
            path=path,
            overwrite=overwrite,
            tag=tag,
            storage_options=storage_options(dest, to_option) or None,
            progress=told,
        )
    out = console()
    facts = [
        count_text(report.arrays, "array"),
        f"{count_text(report.chunks, 'chunk')} ({bytes_text(report.nbytes)})",
    ]
    if report.reused:
        facts.append(f"{report.reused:,} of them there already")
    if report.referenced:
        facts.append(f"{report.referenced:,} of them by reference")
    out.print(f"{report.dest}: {'; '.join(facts)}")
    if report.tag is not None:
        out.print(f"the tag {report.tag} keeps what is referred to: do not delete it")
