"""`zarr-manifests import zarr`, `kerchunk` and `icechunk`: data that stays where it is."""

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
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.texts import count_text

__all__ = ["app"]

app = typer.Typer(
    name="import",
    help="Import a Zarr store, kerchunk references or an icechunk repository, without copying.",
    no_args_is_help=True,
)

_Source = Annotated[
    str, typer.Argument(help="What to import: a path or a URL.", show_default=False)
]
_Path = Annotated[str, typer.Option("--path", help="Where to in the repository.")]
_Branch = Annotated[str, typer.Option("--branch", "-b", help="The branch to commit to.")]
_Message = Annotated[
    str | None, typer.Option("--message", "-m", help="Of the commit.", show_default=False)
]
_FromOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--from-option",
        metavar="NAME=VALUE",
        help="How to reach what is imported; may be given several times.",
        show_default=False,
    ),
]
_Containers = Annotated[
    list[str] | None,
    typer.Option(
        "--container",
        metavar="NAME=URL",
        help="A place whose files may be looked at; may be given several times.",
        show_default=False,
    ),
]


@app.command(name="zarr")
def run_zarr(
    url: Url,
    source: _Source,
    path: _Path = "/",
    copy: Annotated[bool, typer.Option("--copy", help="Copy the chunks instead.")] = False,
    branch: _Branch = "main",
    message: _Message = None,
    option: Options = None,
    from_option: _FromOptions = None,
) -> None:
    """Import a plain Zarr store in one commit: metadata, and references to its chunks."""
    options = storage_options(source, from_option)
    with progress("done") as told:
        made = _open(url, option).import_zarr(
            source,
            path,
            copy,
            message=message,
            branch=branch,
            storage_options=options,
            progress=told,
        )
    console().print(made, style="yellow")


@app.command(name="kerchunk")
def run_kerchunk(
    url: Url,
    references: _Source,
    path: _Path = "/",
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace what is at the path.")
    ] = False,
    append_dim: Annotated[
        str | None,
        typer.Option("--append-dim", help="Append along this dimension.", show_default=False),
    ] = None,
    remote_protocol: Annotated[
        str | None,
        typer.Option(
            "--remote-protocol", help="Scheme of locations without one.", show_default=False
        ),
    ] = None,
    branch: _Branch = "main",
    message: _Message = None,
    container: _Containers = None,
    option: Options = None,
    from_option: _FromOptions = None,
) -> None:
    """Import kerchunk references in one commit: a JSON file, or a folder of parquet files."""
    made = _open(url, option, container).import_kerchunk(
        references,
        path,
        message=message,
        branch=branch,
        mode="w" if replace else "w-",
        append_dim=append_dim,
        remote_protocol=remote_protocol,
        storage_options=storage_options(references, from_option) or None,
    )
    console().print(made, style="yellow")


@app.command(name="icechunk")
def run_icechunk(
    url: Url,
    source: _Source,
    history: Annotated[
        str, typer.Option("--history", help="all snapshots, or those of heads and tags.")
    ] = "all",
    branch: Annotated[
        list[str] | None,
        typer.Option("--branch", "-b", help="Only these branches.", show_default="all"),
    ] = None,
    container: _Containers = None,
    option: Options = None,
    from_option: _FromOptions = None,
) -> None:
    """Import the snapshots, branches and tags of an icechunk repository; again for what is new."""
    repo, depth = _open(url, option, container), _as_given(history)
    before = {*repo.list_branches().values()}
    options = storage_options(source, from_option)
    with progress("done") as told:
        ours = repo.import_icechunk(source, depth, branch, storage_options=options, progress=told)
    out = console()
    for name, head in repo.list_branches().items():
        if head not in before:
            out.print(f"{name}  {head}")
    out.print(f"{count_text(len(ours), 'snapshot')} of the icechunk repository here")


def _open(url: str, option: list[str] | None, containers: list[str] | None = None) -> Any:
    """The repository, which is made if the place is empty, with these containers."""
    from zarr_manifests.repository import Repository

    places = {}
    for one in containers or ():
        name, equals, place = one.partition("=")
        if not equals or not name or name in places:
            raise InvalidArgumentError("--container takes NAME=URL, and each name once")
        places[name] = place
    options = storage_options(url, option)
    return Repository.open_or_create(url, virtual_containers=places, storage_options=options)


def _as_given(text: Any) -> Any:
    """The text, of which the repository says whether it is one of the words it knows."""
    return text
