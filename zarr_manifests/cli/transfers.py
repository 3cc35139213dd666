"""`zarr-manifests export`, `clone`, `import`, `serve` and `demo`: data comes in and goes out."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import zarr_manifests as zm
from zarr_manifests.cli.verbs import (
    Pairs,
    Repo,
    Told,
    TrustingRepo,
    console,
    open_at,
    pairs,
    storage_options,
    verb,
)
from zarr_manifests.errors import ManifestsError, NotFoundError, plain_text
from zarr_manifests.rendering import fact_table
from zarr_manifests.runtime import need
from zarr_manifests.texts import count_text

_GIB = 1024**3


# --- out -------------------------------------------------------------------------------------


@verb
def run_export(
    repo: TrustingRepo,
    dest: str,
    version: str = "main",
    *,
    format: Literal["zarr", "kerchunk", "icechunk"] = "zarr",  # noqa: A002 - the option
    path: str = "/",
    to_option: Pairs = None,
) -> object:
    """Write a snapshot so that other software can read it: as Zarr, as references, as icechunk.

    Parameters
    ----------
    dest :
        Where to: an empty folder or bucket, or a file for kerchunk.
    format : -f
        What to write.
    path : -p
        The group or array to export.
    """
    options = storage_options(dest, to_option, "--to-option") or None
    return zm.export(repo, dest, format, version=version, path=path, storage_options=options)


@verb
def run_clone(repo: Repo, dest: str, *, to_option: Pairs = None) -> object:
    """Copy a repository to another place, or update its clone there.

    Parameters
    ----------
    dest :
        Where to: an empty place, or a clone made before.
    """
    return zm.clone(repo, dest, storage_options=storage_options(dest, to_option, "--to-option"))


@verb
def run_serve(
    repo: TrustingRepo,
    *,
    host: str = "127.0.0.1",
    port: Annotated[int, {"min": 0, "max": 65535}] = 8000,
    token: Annotated[str | None, {"envvar": "ZARR_MANIFESTS_TOKEN"}] = None,
    origin: list[str] | None = None,
) -> None:
    """Serve a repository over HTTP: pages to look at it, and any snapshot as plain Zarr.

    Parameters
    ----------
    host :
        Listen here; only this machine can reach 127.0.0.1.
    port :
        Listen on this port; 0: a free one.
    token :
        What readers must give, as password or bearer token.
    origin :
        Let web pages of this origin read, such as https://viewer.example, or * for all; may be
        given several times.
    """
    from zarr_manifests.serving import serve

    def started(at: str) -> None:
        typer.echo(f"serving {plain_text(repo.storage.url)} at {at}/")
        typer.echo(f"main as Zarr, as it is now: {at}/zarr/{next(repo.ancestry(limit=1)).id}")
        typer.echo("press Ctrl-C to stop")

    serve(repo, host, port, token=token, origins=origin or (), started=started)


# --- in --------------------------------------------------------------------------------------

run_import = typer.Typer(
    name="import",
    help="Import files, a Zarr store, kerchunk references or an icechunk repository.",
    no_args_is_help=True,
)


@run_import.command(name="netcdf")
@verb
def run_import_netcdf(
    url: str,
    files: list[str],
    *,
    append_dim: str = "time",
    open: Literal["netcdf", "hdf5", "grib", "zarr"] = "netcdf",  # noqa: A002 - the option
    group: str | None = None,
    variable: list[str] | None = None,
    skip: bool = False,
    replace: bool = False,
    branch: str = "main",
    message: str | None = None,
    container: Pairs = None,
    option: Pairs = None,
) -> object:
    """Append netCDF, HDF5, GRIB or Zarr files along a dimension, each once, in one commit.

    Parameters
    ----------
    files :
        Files, in any order.
    append_dim :
        Join the files along this dimension.
    open :
        What they are.
    group :
        Path of the group; the root by default.
    variable :
        Of the variables only this one; may be given several times.
    skip :
        Leave out files that cannot be read or do not agree.
    replace :
        Write again the rows of files that have changed.
    """
    how: Any = {"open": open, "variables": variable, "group": group}
    how |= {"branch": branch, "message": message, "append_dim": append_dim}
    how["on_error"] = "report" if skip else "fail"
    how["on_changed"] = "replace" if replace else "error"
    return _into(url, files, option, container, partial(zm.ingest, files, **how))


@run_import.command(name="zarr")
@verb
def run_import_zarr(
    url: str,
    source: str,
    *,
    path: str = "/",
    copy: bool = False,
    branch: str = "main",
    message: str | None = None,
    max_bytes: int = _GIB,
    option: Pairs = None,
    from_option: Pairs = None,
) -> object:
    """Import a plain Zarr store in one commit: metadata, and references to its chunks.

    Parameters
    ----------
    source :
        What to import: a path or a URL.
    path : -p
        Where to in the repository.
    copy :
        Copy the chunks instead.
    """
    how: Any = {"message": message, "branch": branch, "max_bytes": max_bytes}
    how["storage_options"] = storage_options(source, from_option, "--from-option")
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", source.rstrip("/").rpartition("/")[2]).strip("-")
    places = {} if copy else {name or "source": source}
    take_in = partial(zm.virtual.import_zarr, url=source, path=path, copy=copy, **how)
    return _into(url, [source], option, None, take_in, places)


@run_import.command(name="kerchunk")
@verb
def run_import_kerchunk(
    url: str,
    references: str,
    *,
    path: str = "/",
    replace: bool = False,
    remote_protocol: str | None = None,
    branch: str = "main",
    message: str | None = None,
    max_bytes: int = _GIB,
    container: Pairs = None,
    option: Pairs = None,
    from_option: Pairs = None,
) -> object:
    """Import kerchunk references in one commit: a JSON file, or a folder of parquet files.

    Parameters
    ----------
    references :
        What to import: a path or a URL.
    path : -p
        Where to in the repository.
    replace :
        Replace what is at the path.
    remote_protocol :
        Scheme of locations without one.
    """
    how: Any = {"message": message, "branch": branch, "max_bytes": max_bytes}
    how |= {"mode": "w" if replace else "w-", "remote_protocol": remote_protocol}
    how["storage_options"] = storage_options(references, from_option, "--from-option") or None
    take_in = partial(zm.virtual.import_kerchunk, references=references, path=path, **how)
    return _into(url, [references], option, container, take_in)


@run_import.command(name="icechunk")
@verb
def run_import_icechunk(
    url: str,
    source: str,
    *,
    max_bytes: int = _GIB,
    container: Pairs = None,
    option: Pairs = None,
    from_option: Pairs = None,
) -> object:
    """Import the snapshots, branches and tags of an icechunk repository; again for what is new.

    It needs the package of icechunk, which the extra `icechunk` brings.

    Parameters
    ----------
    source :
        What to import: a path or a URL.
    """
    how: Any = {"max_bytes": max_bytes}
    how["storage_options"] = storage_options(source, from_option, "--from-option")
    take_in = partial(zm.virtual.import_icechunk, location=source, **how)
    ours = _into(url, [source], option, container, take_in)
    branches = open_at(url, option).list_branches()
    there = f"{count_text(len(ours), 'snapshot')} of the icechunk repository here"
    return Told({"branches": branches, "snapshots": ours}, [fact_table(branches.items()), there])


def _into[Made](
    url: str,
    sources: list[str],
    option: Pairs,
    containers: Pairs,
    take_in: Callable[[Repo], Made],
    also: Mapping[str, str] | None = None,
) -> Made:
    """Import into the repository, which is made first if there is none.

    It is not made for a file that is not there. The containers are saved with it, and others.
    """
    from zarr_manifests.repositories import write_into
    from zarr_manifests.storage.url import storage_of
    from zarr_manifests.virtual.containers import VirtualContainer

    places = pairs(containers, "--container")
    storage = storage_of(url, storage_options(url, option))
    for source in sources:
        # A `Path` raises OSError if the name is too long.
        if "://" not in source and not os.path.exists(source):  # noqa: PTH110
            raise NotFoundError(f"there is no {source}")
    found = write_into(storage, take_in, make=True, virtual_containers=places)
    # Readers need then only authorize them.
    repo = zm.open(storage)
    told: list[Mapping[str, Any]] = repo.config.to_dict().get("virtual-containers", [])
    names, urls = ({one[key] for one in told} for key in ("name", "url"))
    places |= also or {}
    given = [{"name": name, "url": VirtualContainer(url).url} for name, url in places.items()]
    new = [one for one in given if one["name"] not in names and one["url"] not in urls]
    if new:
        repo.save_config({"virtual-containers": [*told, *new]})
    return found


# --- the demo --------------------------------------------------------------------------------


@verb
def run_demo(directory: Path = Path("zarr-manifests-demo")) -> None:
    """Run the main job on eleven years of winds: netCDF, commits, xarray, Spark, a stream.

    Without Java or pyspark, the steps with Spark are left out, and the exit code is 1.

    Parameters
    ----------
    directory :
        A new directory.
    """
    need("the demo", "demo", "xarray", "scipy", "matplotlib")
    from zarr_manifests.demo import FIRST_TAG, Demo

    no_spark = Demo(directory, console()).run()
    command = f"{shlex.quote(sys.executable)} -m zarr_manifests"
    url = shlex.quote(str(directory / "winds"))
    typer.echo(
        f"""
What to try next:
  {command} serve {url}
  {command} log {url} -n 5
  {command} du {url}
  {command} tree {url} {FIRST_TAG}
  {command} info {url}
serve prints an address: open it, choose the newest commit, then u: a map of the wind."""
    )
    if no_spark is not None:
        raise ManifestsError(str(no_spark)) from no_spark
