"""`zarr-manifests demo`: run the demo, and say what to try next.

Without Java or pyspark, the Spark steps are skipped, and the exit code reports it at the end.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from zarr_manifests.cli.console import console, say, write_error

__all__ = ["run_demo"]

_DEFAULT = Path("zarr-manifests-demo")
_APPENDS = 60
_NEEDED = ("xarray", "scipy", "matplotlib")


def run_demo(
    directory: Annotated[
        Path,
        typer.Argument(help="A new directory, or that of an earlier demo, which is replaced."),
    ] = _DEFAULT,
    months: Annotated[
        int,
        typer.Option("--months", min=1, max=_APPENDS, help="Append only so many months."),
    ] = _APPENDS,
) -> None:
    """Run the main job on eleven years of winds: netCDF, commits, xarray, Spark."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        write_error(
            f"the demo needs {', '.join(missing)}, not installed here; get all it needs with: "
            'pip install "zarr-manifests[demo]"'
        )
        raise typer.Exit(1)
    from zarr_manifests.demo import FIRST_TAG, Demo

    no_spark = Demo(directory, console(), months).run()
    command, python, url = _program(), _short(sys.executable), str(directory / "winds")
    code = f"import xarray as xr; print(xr.open_dataset({url!r}, engine='zarr_manifests'))"
    url = shlex.quote(url)
    say(
        f"""
What to try next:
  {command} serve {url}
  {command} log {url} -n 5
  {command} tree {url} --chunks
  {command} tree {url} {FIRST_TAG}
  {command} info {url}
  {python} -c "{code}"
serve prints an address: open it, choose the newest commit, then u: a map of the wind."""
    )
    if no_spark is not None:
        write_error(no_spark)
        raise typer.Exit(1)


def _program() -> str:
    """The command that starts this program again."""
    name = "zarr-manifests"
    found = shutil.which(name)
    beside = Path(sys.executable).with_name(name)
    if found is not None and Path(found) == beside:
        return name
    return (
        _short(str(beside)) if beside.is_file() else f"{_short(sys.executable)} -m zarr_manifests"
    )


def _short(path: str) -> str:
    """The path, relative if it is below the working directory, quoted for a shell."""
    here = Path.cwd()
    full = Path(path)
    return shlex.quote(str(full.relative_to(here) if full.is_relative_to(here) else full))
