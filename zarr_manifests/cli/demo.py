"""`zarr-manifests demo`: run the demo's steps and print what each read and wrote.

Without Java or pyspark, the Spark step is skipped, and the exit code reports it at the end.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.status import Status
from rich.table import Table

from zarr_manifests.cli.console import console, write_error
from zarr_manifests.error_cases import JavaNotFoundError
from zarr_manifests.rendering import columns
from zarr_manifests.texts import bytes_text, count_text

if TYPE_CHECKING:
    from zarr_manifests.demo import Demo
    from zarr_manifests.demo.costs import Commit, Cost, Rewrite
    from zarr_manifests.demo.steps import SparkMeans

__all__ = ["run"]

_DEFAULT = Path("zarr-manifests-demo")
_APPENDS = 60
_STEPS = 7
_NEEDED = ("xarray", "scipy", "matplotlib")


def run(
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
    _require_packages()
    from zarr_manifests.demo import Demo, DemoPlace

    out = _Steps(console())
    place = DemoPlace.claim(directory)
    demo = Demo(place, months)
    total = demo.winds.sizes["time"]
    out.say(f"{total} months of monthly Navy winds (public domain), in {place.directory}{os.sep}")
    _ingest(out, demo)
    commits = _append(out, demo, months)
    rewrites = _rewrite(out, demo, months)
    _read(out, demo)
    out.start("Draw the last month's wind, and what each commit wrote")
    with out.busy("Drawing"):
        demo.draw(commits, rewrites)
    out.result(f"saved {place.picture}")
    out.say()
    out.show(_comparison(demo, commits, rewrites))
    out.say(
        "Rewriting is measured, not estimated: all months so far, as one commit into an\n"
        "empty repository on the same disk, with the same chunks and the same xarray."
    )
    missing = _spark(out, demo)  # last, since it takes longest and needs Java
    _say_what_next(out, place.repository)
    if missing is not None:
        write_error(missing)
        raise typer.Exit(1)


class _Steps:
    """Numbers the steps, and shows progress of long ones."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._number = 0

    def say(self, text: str = "") -> None:
        self._out.print(text, soft_wrap=True)

    def show(self, table: Table) -> None:
        self._out.print(table)

    def start(self, what: str) -> None:
        self._number += 1
        self._out.print(f"\n{self._number}/{_STEPS}  {what}", style="bold", soft_wrap=True)

    def result(self, text: str) -> None:
        self._out.print(f"     {text}", soft_wrap=True)

    def busy(self, what: str) -> Status:
        return self._out.status(f"{what} ...")

    def each[T](self, items: Iterable[T], total: int, what: str) -> Iterable[T]:
        if not self._out.is_terminal:
            return items
        return track(items, f"     {what}", total, console=self._out, transient=True)


def _require_packages() -> None:
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        write_error(
            f"the demo needs {', '.join(missing)}, not installed here; get all it needs with: "
            'pip install "zarr-manifests[demo]"'
        )
        raise typer.Exit(1)


# --- the steps -----------------------------------------------------------------------------------


def _ingest(out: _Steps, demo: Demo) -> None:
    first, last = demo.label(1), demo.label(demo.first_months)
    out.start(f"Ingest {first} to {last} with xarray, as one commit")
    with out.busy("Ingesting"):
        cost = demo.ingest()
    out.result(_cost_text(cost))


def _append(out: _Steps, demo: Demo, months: int) -> list[Commit]:
    from zarr_manifests.demo.costs import Cost

    out.start(f"Append the following {count_text(months, 'month')}, one commit each")
    commits = list(out.each(demo.append(), months, "appending"))
    total = sum((commit.cost for commit in commits), Cost())
    out.result(f"all together: {_cost_text(total)}")
    requests = median(commit.cost.requests for commit in commits)
    written = median(commit.cost.bytes_written for commit in commits)
    seconds = median(commit.cost.seconds for commit in commits)
    out.result(
        f"median month: {requests:.0f} requests, wrote {bytes_text(round(written))} "
        f"in {_seconds_text(seconds)}"
    )
    for commit in commits:
        if commit.compacted:
            out.result(
                f"{demo.label(commit.months)} also compacted the deltas: "
                f"wrote {bytes_text(commit.cost.bytes_written)}"
            )
    return commits


def _rewrite(out: _Steps, demo: Demo, months: int) -> list[Rewrite]:
    from zarr_manifests.demo.costs import Cost

    due = len(demo.rewrites)
    out.start(f"For comparison, rewrite everything at {due} of these {months} appends")
    rewrites = list(out.each(demo.rewrite(), due, "rewriting"))
    total = sum((rewrite.cost for rewrite in rewrites), Cost())
    out.result(f"all together: {_cost_text(total)}")
    return rewrites


def _read(out: _Steps, demo: Demo) -> None:
    from zarr_manifests.demo.steps import FIRST_TAG

    out.start("Read the snapshot of the first years and the head, each opened anew")
    for name, tag in (("first years", FIRST_TAG), ("head", None)):
        with out.busy("Reading and comparing"):
            opened = demo.read(tag)
        out.result(f"{name}, {opened.months} months, every value as in the netCDF file")
        out.result(f"  open, with coordinates: {_cost_text(opened.opening)}")
        out.result(f"  u and v of one month:   {_cost_text(opened.one_month)}")
        out.result(f"  all other months:       {_cost_text(opened.the_rest)}")


def _spark(out: _Steps, demo: Demo) -> Exception | None:
    out.start("Compute the monthly mean wind speed on Spark")
    streaming = "Let months come in as a stream, with a restart in the middle"
    try:
        with demo.on_spark() as spark:
            with out.busy("Reading, computing"):
                means = demo.means(spark)
            _say_means(out, demo, means)
            out.start(streaming)
            with out.busy("Streaming"):
                streamed = demo.stream(spark)
    except (JavaNotFoundError, ImportError) as error:
        out.result("left out: Spark cannot run here (see the error at the end)")
        out.start(streaming)
        out.result("left out as well")
        return error
    out.result(
        f"{streamed.months} files, one commit each, in {_seconds_text(streamed.seconds)}; every "
        "value as in the netCDF file"
    )
    out.result(
        f"after the restart {count_text(streamed.repeated, 'batch')} came again and made no commit"
    )
    return None


def _say_means(out: _Steps, demo: Demo, done: SparkMeans) -> None:
    out.result(
        f"{done.rows:,} rows in {done.tasks} tasks, {_seconds_text(done.seconds)} "
        "with the start of Spark"
    )
    out.result(
        f"{len(done.means)} means, as xarray computes them "
        f"(largest difference {done.difference:.0e} m/s)"
    )
    low, high = int(done.means.argmin()), int(done.means.argmax())
    out.result(
        f"calmest month {demo.label(low + 1)} ({done.means[low]:.2f} m/s), "
        f"windiest {demo.label(high + 1)} ({done.means[high]:.2f} m/s)"
    )
    strong = done.strong
    out.result(f"where {strong.where}: {strong.rows:,} rows")
    out.result(
        f"of {strong.chunks} chunks {strong.by_time} skipped by time, "
        f"{strong.by_statistics} by statistics"
    )


# --- what is printed -----------------------------------------------------------------------------


def _cost_text(cost: Cost) -> str:
    parts = [count_text(cost.requests, "request")]
    if cost.bytes_read:
        parts.append(f"read {bytes_text(cost.bytes_read)}")
    if cost.bytes_written:
        parts.append(f"wrote {bytes_text(cost.bytes_written)}")
    return f"{', '.join(parts)} in {_seconds_text(cost.seconds)}"


def _seconds_text(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 0.995 else f"{seconds:.1f} s"


def _comparison(demo: Demo, commits: Sequence[Commit], rewrites: Sequence[Rewrite]) -> Table:
    """A table of the first, middle and last measured month: the commit beside the full rewrite."""
    numbers = ("commit:\nrequests", "\nwritten", "\nseconds")
    others = ("rewrite:\nrequests", "\nwritten ", "\nseconds ", "bytes\nratio")
    table = columns("\nto add", *numbers, *others, right=(*numbers, *others))
    by_months = {commit.months: commit.cost for commit in commits}
    for i in sorted({0, len(rewrites) // 2, len(rewrites) - 1}):
        months, rewrite = rewrites[i].months, rewrites[i].cost
        commit = by_months[months]
        table.add_row(
            demo.label(months),
            *_cells(commit),
            *_cells(rewrite),
            f"{rewrite.bytes_written / commit.bytes_written:.0f}",
        )
    return table


def _cells(cost: Cost) -> tuple[str, str, str]:
    return str(cost.requests), bytes_text(cost.bytes_written), f"{cost.seconds:.2f}"


def _say_what_next(out: _Steps, repository: Path) -> None:
    from zarr_manifests.demo.steps import FIRST_TAG

    command, python, url = _program(), _short(sys.executable), shlex.quote(str(repository))
    code = (
        f"import xarray as xr; print(xr.open_dataset({str(repository)!r}, engine='zarr_manifests'))"
    )
    out.say("\nWhat to try next:")
    for line in (
        f"{command} serve {url}",
        f"{command} log {url} -n 5",
        f"{command} tree {url} --chunks",
        f"{command} tree {url} {FIRST_TAG}",
        f"{command} info {url}",
        f'{python} -c "{code}"',
    ):
        out.say(f"  {line}")
    out.say(
        "serve prints an address: open it, choose the newest commit, then u: a map of the wind."
    )


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
