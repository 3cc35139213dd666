"""`zarr-manifests import netcdf`, `zarr`, `kerchunk` and `icechunk`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

import zarr_manifests as zm
from zarr_manifests.cli.arguments import (
    Branch,
    Containers,
    FromOptions,
    Json,
    Message,
    Options,
    Url,
    as_given,
    containers_of,
    several,
    storage_options,
)
from zarr_manifests.cli.as_json import print_json
from zarr_manifests.cli.console import console, progress
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.plain import plain_text
from zarr_manifests.progress import expect
from zarr_manifests.texts import count_text

if TYPE_CHECKING:
    from zarr_manifests.reports import IngestProgress
    from zarr_manifests.repository import Repository
    from zarr_manifests.storage import Storage

__all__ = ["app"]

app = typer.Typer(
    name="import",
    help="Import files; or a Zarr store, kerchunk references or an icechunk repository in place.",
    no_args_is_help=True,
)

_Source = Annotated[
    str, typer.Argument(help="What to import: a path or a URL.", show_default=False)
]
_Path = Annotated[str, typer.Option("--path", "-p", help="Where to in the repository.")]
_MaxBytes = Annotated[
    int | None,
    typer.Option(
        "--max-bytes",
        help="Bytes of metadata, and of a chunk that is copied, that are accepted.",
        show_default="1 GiB",
    ),
]


@app.command(name="netcdf")
def run_netcdf(
    url: Url,
    files: Annotated[list[str], typer.Argument(help="Files, in any order.", show_default=False)],
    append_dim: Annotated[
        str, typer.Option("--append-dim", help="Join the files along this dimension.")
    ] = "time",
    kind: Annotated[
        str, typer.Option("--open", help="What they are: netcdf, hdf5, grib or zarr.")
    ] = "netcdf",
    virtual: Annotated[
        bool, typer.Option("--virtual", help="Refer to their chunks instead of copying them.")
    ] = False,
    group: Annotated[
        str | None, typer.Option("--group", help="Path of the group.", show_default="the root")
    ] = None,
    variable: Annotated[
        list[str] | None, several("--variable", text="Of the variables only this one")
    ] = None,
    skip: Annotated[
        bool, typer.Option("--skip", help="Leave out files that cannot be read or do not agree.")
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Write again the rows of files that have changed.")
    ] = False,
    branch: Branch = "main",
    message: Message = None,
    container: Containers = None,
    as_json: Json = False,
    option: Options = None,
) -> None:
    """Append netCDF, HDF5, GRIB or Zarr files along a dimension, each once, in one commit."""
    with progress("looking at files") as bar:

        def told(now: IngestProgress) -> None:
            stage = "looking at files" if now.doing == "looking" else "writing files"
            expect(bar, stage, now.of_files)
            bar(stage, now.files)

        report = _into(
            url,
            option,
            container,
            lambda repo: zm.ingest(
                files,
                repo,
                append_dim=append_dim,
                open=as_given(kind),
                virtual=virtual,
                variables=variable,
                group=group,
                branch=branch,
                on_error="report" if skip else "fail",
                on_changed="replace" if replace else "error",
                message=message,
                progress=told,
            ),
        )
    if as_json:
        print_json(report)
    else:
        console().print(str(report), soft_wrap=True)


@app.command(name="zarr")
def run_zarr(
    url: Url,
    source: _Source,
    path: _Path = "/",
    copy: Annotated[bool, typer.Option("--copy", help="Copy the chunks instead.")] = False,
    branch: Branch = "main",
    message: Message = None,
    max_bytes: _MaxBytes = None,
    as_json: Json = False,
    option: Options = None,
    from_option: FromOptions = None,
) -> None:
    """Import a plain Zarr store in one commit: metadata, and references to its chunks."""
    how = _bound(max_bytes, storage_options=storage_options(source, from_option, "--from-option"))
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", source.rstrip("/").rpartition("/")[2]).strip("-")
    with progress("importing") as told:
        made = _into(
            url,
            option,
            None,
            lambda repo: zm.virtual.import_zarr(
                repo, source, path, copy, message=message, branch=branch, progress=told, **how
            ),
            {} if copy else {name or "source": source},
        )
    _show(made, as_json)


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
    branch: Branch = "main",
    message: Message = None,
    max_bytes: _MaxBytes = None,
    container: Containers = None,
    as_json: Json = False,
    option: Options = None,
    from_option: FromOptions = None,
) -> None:
    """Import kerchunk references in one commit: a JSON file, or a folder of parquet files."""
    reached = storage_options(references, from_option, "--from-option") or None
    with progress("importing references") as told:
        made = _into(
            url,
            option,
            container,
            lambda repo: zm.virtual.import_kerchunk(
                repo,
                references,
                path,
                message=message,
                branch=branch,
                mode="w" if replace else "w-",
                append_dim=append_dim,
                remote_protocol=remote_protocol,
                progress=told,
                **_bound(max_bytes, storage_options=reached),
            ),
        )
    _show(made, as_json)


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
    max_bytes: _MaxBytes = None,
    container: Containers = None,
    as_json: Json = False,
    option: Options = None,
    from_option: FromOptions = None,
) -> None:
    """Import the snapshots, branches and tags of an icechunk repository; again for what is new.

    It needs the package of icechunk, which the extra `icechunk` brings.
    """
    how = _bound(max_bytes, storage_options=storage_options(source, from_option, "--from-option"))

    def take_in(repo: Repository) -> tuple[dict[str, str], dict[str, str]]:
        before = {*repo.list_branches().values()}
        ours = zm.virtual.import_icechunk(
            repo, source, as_given(history), branch, progress=told, **how
        )
        heads = repo.list_branches().items()
        return ours, {name: head for name, head in heads if head not in before}

    with progress("importing") as told:
        ours, moved = _into(url, option, container, take_in)
    if as_json:
        print_json({"branches": moved, "snapshots": ours})
        return
    out = console()
    for name, head in moved.items():
        out.print(f"{name}  {head}")
    out.print(f"{count_text(len(ours), 'snapshot')} of the icechunk repository here")


def _into[Made](
    url: str,
    option: list[str] | None,
    containers: list[str] | None,
    take_in: Callable[[Repository], Made],
    also: Mapping[str, str] | None = None,
) -> Made:
    """Import into the repository; if there is none, the first commit makes it.

    The containers are saved with it, and others.
    """
    from zarr_manifests.repositories import write_into
    from zarr_manifests.storage.url import storage_of

    places = containers_of(containers)
    storage = storage_of(url, storage_options(url, option))
    try:
        made = write_into(storage, None, take_in, make=True, virtual_containers=places)
    except ImportError as error:  # of a package that an extra brings
        raise InvalidArgumentError(str(error)) from error
    _save(storage, {**places, **(also or {})})
    return made


def _save(storage: Storage, places: Mapping[str, str]) -> None:
    """Save where files are with the repository, so that readers need only authorize it."""
    from zarr_manifests.virtual.containers import VirtualContainer

    if not places:
        return
    repo = zm.open(storage)
    told: list[Mapping[str, Any]] = repo.config.to_dict().get("virtual-containers", [])
    names, urls = ({one[key] for one in told} for key in ("name", "url"))
    given = {name: VirtualContainer(url).url for name, url in places.items()}
    new = {name: url for name, url in given.items() if name not in names and url not in urls}
    if new:
        more = [{"name": name, "url": url} for name, url in new.items()]
        repo.save_config({"virtual-containers": [*told, *more]})
    out = console(stderr=True)
    for name, url in new.items() if out.is_terminal else ():
        said = f"saved container {name} at {url}: `cat`, `serve` and others read there with"
        out.print(plain_text(f"{said} --authorize"), soft_wrap=True)


def _bound(max_bytes: int | None, **more: Any) -> dict[str, Any]:
    return more if max_bytes is None else {"max_bytes": max_bytes, **more}


def _show(made: str, as_json: bool) -> None:
    if as_json:
        print_json({"snapshot_id": made})
    else:
        console().print(made, style="yellow")
