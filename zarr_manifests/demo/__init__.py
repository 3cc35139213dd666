"""The package's main job on real data: netCDF, commits, xarray, Spark, a stream, a picture.

`open_winds` and `open_relief` return the data by themselves; `Demo.run` is what `zarr-manifests
demo` does and prints. Each step checks its claims: both snapshots are compared with the sample
value by value, and Spark's means with xarray's. Every figure is measured at the storage while the
step runs.

A directory belongs to the demo if it was missing or empty when the demo first used it. A marker
file is written there first and records that. Any other directory is refused. In its own directory,
a new run removes by name what a run writes.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from importlib.resources import as_file, files
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import xarray as xr
from rich.console import Console
from rich.progress import track
from rich.table import Table

from zarr_manifests import repositories
from zarr_manifests.error_cases import JavaNotFoundError
from zarr_manifests.errors import AlreadyExistsError, ManifestsError, StorageError
from zarr_manifests.metrics import process_totals
from zarr_manifests.repository import Repository
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.texts import bytes_text, count_text

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from pyspark.sql import SparkSession

    from zarr_manifests.spark.write_plan import WriteReport

FIRST_TAG: Final = "first-years"
MARKER: Final = ".made-by-zarr-manifests-demo"
_WRITTEN: Final = ("winds", "rewritten", "stream", "winds.png")
_NOTE: Final = (
    "This directory was made by `zarr-manifests demo`. When the demo is run here again it replaces "
    "winds/, rewritten/, stream/ and winds.png, and leaves everything else as it is.\n"
)
_STEPS: Final = 7
_FIRST: Final = 72
_REWRITE_EVERY: Final = 6
_STREAMED: Final = 2
"""Months that come in before the restart of the stream, and after it."""
_STRONG: Final = 15.0
"""Speed of strong winds, in m s-1."""
_STREAMING: Final = "Let months come in as a stream, with a restart in the middle"
_SAME: Final = "every value as in the netCDF file"
_INK, _BLUE, _RED, _GREY = "#22303c", "#1f77a4", "#d1495b", "#7b828c"


class CheckFailedError(ManifestsError):
    """Something that the demo read or computed is wrong."""


def open_winds() -> xr.Dataset:
    """The monthly Navy winds, January 1982 to December 1992, on a grid of 5 degrees, in memory.

    Returns
    -------
    xarray.Dataset
        `u` and `v` (float32, m s-1) over `time`, `lat` and `lon`. In the public domain.

    Examples
    --------
    >>> from zarr_manifests.demo import open_winds
    >>> dict(open_winds().sizes)
    {'time': 132, 'lat': 37, 'lon': 72}
    """
    return _load("winds.nc")


def open_relief() -> xr.Dataset:
    """The relief of the earth on a grid of 1 degree (`relief`, int16, m), in memory.

    Examples
    --------
    >>> from zarr_manifests.demo import open_relief
    >>> int(open_relief().relief.max())
    5731
    """
    return _load("relief.nc")


def _load(name: str) -> xr.Dataset:
    with as_file(files(__package__) / "data" / name) as path:
        return xr.load_dataset(path, engine="scipy")


def claim(directory: Path) -> None:
    """Make a new or empty directory the demo's, or clear that of an earlier run.

    Raises
    ------
    AlreadyExistsError
        If it has anything that the demo did not make.
    StorageError
        If the directory cannot be written.
    """
    marker = directory / MARKER
    try:
        owned = marker.is_file() and not marker.is_symlink()
        empty = not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))
        if not (owned or empty):
            raise AlreadyExistsError(
                f"{directory} is there and was not made by the demo, which therefore leaves it "
                "alone; name a new directory: zarr-manifests demo DIRECTORY"
            )
        directory.mkdir(parents=True, exist_ok=True)
        marker.write_text(_NOTE, encoding="utf-8")
        for path in (directory / name for name in _WRITTEN):
            if path.is_dir() or path.is_symlink():
                shutil.rmtree(path)  # refuses a symbolic link
            path.unlink(missing_ok=True)
    except AlreadyExistsError:  # which is an OSError, too
        raise
    except OSError as error:
        raise StorageError(
            f"the demo cannot write to {directory} ({error.strerror or error}); name another "
            "directory: zarr-manifests demo DIRECTORY"
        ) from error


@dataclass(slots=True)
class _Cost:
    """Requests, bytes and seconds of what a block does in this process, once it has ended."""

    requests: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        parts = [count_text(self.requests, "request")]
        parts += [f"read {bytes_text(self.bytes_read)}"] if self.bytes_read else []
        parts += [f"wrote {bytes_text(self.bytes_written)}"] if self.bytes_written else []
        return f"{', '.join(parts)} in {_duration(self.seconds)}"

    @property
    def cells(self) -> list[str]:
        """What the table of comparisons says of it."""
        return [str(self.requests), bytes_text(self.bytes_written), f"{self.seconds:.2f}"]


@contextmanager
def _measured() -> Iterator[_Cost]:
    cost = _Cost()
    before, start_s = process_totals(), SYSTEM.monotonic_s()
    yield cost
    cost.seconds = SYSTEM.monotonic_s() - start_s
    done = process_totals() - before
    cost.requests, cost.bytes_read = done.requests, done.bytes_read
    cost.bytes_written = done.bytes_written


def _total(costs: Iterable[_Cost]) -> str:
    return f"all together: {_Cost(*map(sum, zip(*map(astuple, costs), strict=True)))}"


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 0.995 else f"{seconds:.1f} s"


class Demo:
    """All steps, which print what each read and wrote.

    Parameters
    ----------
    directory : Path
        The demo's own directory: a new one, or that of an earlier run, which is replaced.
    out : rich.console.Console
        Where to print.
    months : int
        How many months are appended after the first years, 1 to 60.

    Raises
    ------
    AlreadyExistsError
        If the directory has anything that the demo did not make.
    """

    def __init__(self, directory: Path, out: Console, months: int = 60) -> None:
        claim(directory)
        self._at, self._out, self._step = directory, out, 0
        self._winds = open_winds().isel(time=slice(0, _FIRST + months))
        self._repo = repositories.create(directory / "winds")

    def run(self) -> Exception | None:
        """Do all steps; why Spark cannot run here, if so, and its steps are left out.

        Raises
        ------
        CheckFailedError
            If something that was read or computed is wrong.
        """
        total = self._winds.sizes["time"]
        self._print(f"{total} months of monthly Navy winds (public domain), in {self._at}{os.sep}")
        self._ingest()
        commits, compacted = self._append()
        rewrites = self._rewrite()
        self._read()
        self._start("Draw the last month's wind, and what each commit wrote")
        with self._out.status("Drawing ..."):
            head = self._open("winds").isel(time=-1).load()
            _draw(self._at / "winds.png", head, commits, compacted, rewrites)
        self._say(f"saved {self._at / 'winds.png'}")
        self._compare(commits, rewrites)
        try:  # last, since it takes longest and needs Java
            self._spark()
        except (JavaNotFoundError, ImportError) as error:
            self._say("left out: Spark cannot run here (see the error at the end)")
            self._start(_STREAMING)
            self._say("left out as well")
            return error
        return None

    def _print(self, text: str = "", **how: Any) -> None:
        self._out.print(text, soft_wrap=True, **how)

    def _start(self, what: str) -> None:
        self._step += 1
        self._print(f"\n{self._step}/{_STEPS}  {what}", style="bold")

    def _say(self, text: object) -> None:
        self._print(f"     {text}")

    def _each(self, items: range | list[int], what: str) -> Iterable[int]:
        shown = self._out.is_terminal
        return track(items, f"     {what}", console=self._out, transient=True, disable=not shown)

    def _label(self, months: int) -> str:
        """The name of the last of that many months."""
        return str(self._winds.time[months - 1].dt.strftime("%B %Y").item())

    def _open(self, name: str, version: str | None = None) -> xr.Dataset:
        """A snapshot, opened without anything cached."""
        session = repositories.open(self._at / name).readonly_session(version)
        found: xr.Dataset = xr.open_zarr(session.store, chunks=None)
        return found

    # --- the steps ---------------------------------------------------------------------------

    def _ingest(self) -> None:
        last = self._label(_FIRST)
        self._start(f"Ingest {self._label(1)} to {last} with xarray, as one commit")
        with self._out.status("Ingesting ..."), _measured() as cost:
            _commit_whole(self._repo, self._first(_FIRST), f"Ingest the months up to {last}")
        self._repo.create_tag(FIRST_TAG)
        self._say(cost)

    def _first(self, months: int) -> xr.Dataset:
        return self._winds.isel(time=slice(0, months))

    def _append(self) -> tuple[dict[int, _Cost], list[int]]:
        """Costs by the number of months afterwards, and after which the deltas were compacted."""
        months = range(_FIRST + 1, self._winds.sizes["time"] + 1)
        self._start(f"Append the following {count_text(len(months), 'month')}, one commit each")
        costs, compacted = {}, []
        for month in self._each(months, "appending"):
            message, one = f"Append {self._label(month)}", self._winds.isel(time=[month - 1])
            with _measured() as cost, self._repo.transaction("main", message=message) as store:
                one.to_zarr(store, append_dim="time")
            costs[month] = cost
            if next(self._repo.ancestry()).kind == "rewrite":
                compacted.append(month)
        self._say(_total(costs.values()))
        requests = median(cost.requests for cost in costs.values())
        written = bytes_text(round(median(cost.bytes_written for cost in costs.values())))
        seconds = _duration(median(cost.seconds for cost in costs.values()))
        self._say(f"median month: {requests:.0f} requests, wrote {written} in {seconds}")
        for month in compacted:
            size = bytes_text(costs[month].bytes_written)
            self._say(f"{self._label(month)} also compacted the deltas: wrote {size}")
        return costs, compacted

    def _rewrite(self) -> dict[int, _Cost]:
        """Costs of all months so far: same chunks, same disk, into an empty repository."""
        last = self._winds.sizes["time"]
        due = {_FIRST + 1, *range(_FIRST + _REWRITE_EVERY, last, _REWRITE_EVERY), last}
        self._start(
            f"For comparison, rewrite everything at {len(due)} of these {last - _FIRST} appends"
        )
        costs = {}
        for months in self._each(sorted(due), "rewriting"):
            repo = repositories.create(self._at / "rewritten")
            with _measured() as costs[months]:
                _commit_whole(repo, self._first(months), "Rewrite everything")
            shutil.rmtree(self._at / "rewritten")
        self._say(_total(costs.values()))
        return costs

    def _read(self) -> None:
        self._start("Read the snapshot of the first years and the head, each opened anew")
        whole = self._winds.sizes["time"]
        for name, tag, months in (("first years", FIRST_TAG, _FIRST), ("head", None, whole)):
            with self._out.status("Reading and comparing ..."):
                with _measured() as opening:
                    found = self._open("winds", tag)
                with _measured() as one:
                    last = found.isel(time=slice(-1, None)).load()
                with _measured() as rest:
                    others = found.isel(time=slice(None, -1)).load()
                if not xr.concat([others, last], dim="time").identical(self._first(months)):
                    raise CheckFailedError(
                        f"snapshot {tag or 'main'} in {self._at / 'winds'} does not hold the "
                        f"{months} months that were written"
                    )
            self._say(f"{name}, {months} months, {_SAME}")
            self._say(f"  open, with coordinates: {opening}")
            self._say(f"  u and v of one month:   {one}")
            self._say(f"  all other months:       {rest}")

    def _compare(self, commits: dict[int, _Cost], rewrites: dict[int, _Cost]) -> None:
        """Print the first, middle and last measured month: the commit beside the full rewrite."""
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        table.add_column("\nto add", overflow="fold")
        heads = "commit:\nrequests", "\nwritten", "\nseconds", "rewrite:\nrequests"
        for head in (*heads, "\nwritten ", "\nseconds ", "bytes\nratio"):
            table.add_column(head, justify="right", no_wrap=True)
        months = list(rewrites)
        for month in dict.fromkeys([months[0], months[len(months) // 2], months[-1]]):
            commit, rewrite = commits[month], rewrites[month]
            ratio = f"{rewrite.bytes_written / commit.bytes_written:.0f}"
            table.add_row(self._label(month), *commit.cells, *rewrite.cells, ratio)
        self._print()
        self._out.print(table)
        self._print(
            "Rewriting is measured, not estimated: all months so far, as one commit into an\n"
            "empty repository on the same disk, with the same chunks and the same xarray."
        )

    def _spark(self) -> None:
        self._start("Compute the monthly mean wind speed on Spark")
        from zarr_manifests.spark import session

        # The console shows progress, and two progress bars would overwrite each other.
        settings = {"spark.sql.shuffle.partitions": "2", "spark.ui.showConsoleProgress": "false"}
        start_s = SYSTEM.monotonic_s()
        with warnings.catch_warnings():
            # A warning about features of pandas that are not used here.
            warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas")
            spark = session("zarr-manifests demo", master="local[2]", config=settings)
            try:
                self._means(spark, start_s)
                self._start(_STREAMING)
                self._stream(spark)
            finally:
                spark.stop()

    def _means(self, spark: SparkSession, start_s: float) -> None:
        """Compute means on Spark, then read the strong westerlies of the second half."""
        from zarr_manifests.spark import explain_pruning, read

        place, time = self._at / "winds", self._winds.time
        with self._out.status("Reading, computing ..."):
            rows, tasks, table = _spark_means(spark, place)
            took = _duration(SYSTEM.monotonic_s() - start_s)
            difference = check_means(table, _xarray_means(self._winds))
            repositories.open(place).compute_statistics(["u"])
            half = time.values[len(time) // 2]
            where = f"u > {_STRONG} AND time >= '{np.datetime_as_string(half, 'D')}'"
            strong = read(spark, place, "u", where=where).count()
            if strong != int((self._winds.u.sel(time=slice(half, None)) > _STRONG).sum()):
                raise CheckFailedError(f"Spark finds other cells where {where} than xarray does")
            pruned = explain_pruning(spark, place, "u", where=where)
        means, left_out = table["mean"].to_numpy(), pruned.left_out
        low, high = int(means.argmin()), int(means.argmax())
        self._say(f"{rows:,} rows in {tasks} tasks, {took} with the start of Spark")
        self._say(
            f"{len(means)} means, as xarray computes them (largest difference {difference:.0e} m/s)"
        )
        self._say(
            f"calmest month {self._label(low + 1)} ({means[low]:.2f} m/s), "
            f"windiest {self._label(high + 1)} ({means[high]:.2f} m/s)"
        )
        self._say(f"where {where}: {strong:,} rows")
        self._say(
            f"of {pruned.chunks} chunks {left_out['range']} skipped by time, "
            f"{left_out['statistics']} by statistics"
        )

    def _stream(self, spark: SparkSession) -> None:
        """Stream files of months into a repository, with a restart in the middle.

        The driver is made to forget its last batch, as if it had died right after the commit. The
        restarted stream brings that batch again.
        """
        place = self._at / "stream"
        (place / "files").mkdir(parents=True)
        months = self._first(1 + 2 * _STREAMED)
        repo = repositories.create(place / "winds")
        _commit_whole(repo, self._first(1), "The first month")
        reports: list[WriteReport] = []
        start_s = SYSTEM.monotonic_s()
        with self._out.status("Streaming ..."):
            for month in range(1, 1 + 2 * _STREAMED):
                rows = months.isel(time=[month]).to_dataframe().reset_index()
                rows["time"] = rows["time"].dt.tz_localize("UTC").astype("datetime64[us, UTC]")
                rows.to_parquet(place / "files" / f"{month:02}.parquet", index=False)
                if month == _STREAMED:
                    _run_stream(spark, repo, place, reports)
                    _forget_last_batch(place / "checkpoint" / "commits")
            _run_stream(spark, repo, place, reports)
            took = _duration(SYSTEM.monotonic_s() - start_s)
            if not self._open("stream/winds").equals(months):
                raise CheckFailedError("the stream has not written each month once")
        shutil.rmtree(place)
        again = count_text(sum(report.replayed for report in reports), "batch")
        self._say(f"{2 * _STREAMED} files, one commit each, in {took}; {_SAME}")
        self._say(f"after the restart {again} came again and made no commit")


def _commit_whole(repo: Repository, ds: xr.Dataset, message: str) -> None:
    # One chunk per month, so that appending a month touches no existing chunk.
    chunk = (1, ds.sizes["lat"], ds.sizes["lon"])
    units = {name: ds.time.encoding[name] for name in ("units", "calendar", "dtype")}
    encoding = {"u": {"chunks": chunk}, "v": {"chunks": chunk}, "time": units | {"chunks": (12,)}}
    with repo.transaction("main", message=message) as store:
        ds.to_zarr(store, encoding=encoding)


# --- Spark ---------------------------------------------------------------------------------------


def check_means(computed: pd.DataFrame, wanted: xr.DataArray) -> float:
    """The largest difference between Spark's and xarray's means; only rounding is allowed.

    Parameters
    ----------
    computed : pandas.DataFrame
        `time` and `mean`, in the order of time.
    wanted : xarray.DataArray
        The means over `time`.

    Raises
    ------
    CheckFailedError
        If the months or the means are not the same.
    """
    means = computed["mean"].to_numpy()
    same_months = np.array_equal(computed["time"].to_numpy(), wanted.time.values)
    if not same_months or not np.allclose(means, wanted.values, rtol=1e-9, atol=0):
        raise CheckFailedError(
            "the monthly mean wind speeds that Spark computed are not those that xarray computes"
        )
    return float(np.abs(means - wanted.values).max())


def _spark_means(spark: SparkSession, repository: Path) -> tuple[int, int, pd.DataFrame]:
    """The number of cells read, the number of tasks, and the table of means."""
    from pyspark.sql import functions as sql

    from zarr_manifests.spark import read

    cells = read(spark, repository, ["u", "v"])
    u, v = sql.col("u").cast("double"), sql.col("v").cast("double")
    speed, weight = sql.sqrt(u * u + v * v), sql.cos(sql.radians("lat"))
    mean = (sql.sum(speed * weight) / sql.sum(weight)).alias("mean")
    table: pd.DataFrame = cells.groupBy("time").agg(mean, sql.count("u")).orderBy("time").toPandas()
    return int(table["count(u)"].sum()), cells.rdd.getNumPartitions(), table


def _xarray_means(winds: xr.Dataset) -> xr.DataArray:
    u, v = winds.u.astype("float64"), winds.v.astype("float64")
    speed: xr.DataArray = np.sqrt(u * u + v * v)
    return speed.weighted(np.cos(np.deg2rad(winds.lat))).mean(("lat", "lon"))


def _run_stream(
    spark: SparkSession, repo: Repository, place: Path, reports: list[WriteReport]
) -> None:
    """Write the files that have come since the last run, one in each commit."""
    from zarr_manifests.spark import foreach_batch

    dims = ["time", "lat", "lon"]
    write = foreach_batch(
        repo, "/", dims=dims, append_dim="time", on_report=lambda _, report: reports.append(report)
    )
    schema = "time timestamp, lat double, lon double, u float, v float"
    rows = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1)
    query = rows.parquet(str(place / "files")).writeStream.foreachBatch(write)
    query = query.option("checkpointLocation", str(place / "checkpoint"))
    query.trigger(availableNow=True).start().awaitTermination()


def _forget_last_batch(commits: Path) -> None:
    """Delete what Spark writes after the commit of a batch."""
    last = max(int(file.name) for file in commits.iterdir() if file.name.isdigit())
    for name in (f"{last}", f".{last}.crc"):
        (commits / name).unlink(missing_ok=True)


# --- the picture ---------------------------------------------------------------------------------


def _draw(
    path: Path,
    month: xr.Dataset,
    commits: dict[int, _Cost],
    compacted: list[int],
    rewrites: dict[int, _Cost],
) -> None:
    """Save as PNG: the wind of a month on a map, and what commits and rewrites wrote."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"axes.titlelocation": "left", "axes.titleweight": "bold"}):
        figure = Figure(figsize=(9.6, 8.8), dpi=150, layout="constrained")
        above, below = figure.subplots(2, 1, height_ratios=(1.6, 1))
        _draw_map(above, month)
        _draw_costs(below, commits, compacted, rewrites)
        figure.savefig(path, format="png")


def _draw_map(axes: Axes, month: xr.Dataset) -> None:
    around = month.pad(lon=(0, 1), mode="wrap")  # the first meridian again, to leave no gap
    lon, lat = [*month.lon.values, month.lon.values[0] + 360], month.lat.values
    u, v = around.u.values, around.v.values
    speed = np.hypot(u, v)
    top = max(2 * np.ceil(speed.max() / 2), 2.0)
    filled = axes.contourf(lon, lat, speed, levels=np.linspace(0, top, 25), cmap="YlGnBu")
    filled.set_edgecolor("face")
    relief = open_relief().relief
    axes.contour(relief.lon, relief.lat, relief, levels=[0], colors=_INK, linewidths=0.7)
    sparse: Any = (slice(1, -1), slice(None, None, 2))
    look: Any = {"color": _INK, "width": 0.0013, "scale": 300, "alpha": 0.85}
    arrows = axes.quiver(lon[::2], lat[1:-1], u[sparse], v[sparse], **look)
    axes.quiverkey(arrows, 0.95, 1.035, 10, "10 m s$^{-1}$", labelpos="W")
    look = {"fraction": 0.025, "pad": 0.015, "ticks": np.arange(0, top + 1, 2)}
    axes.figure.colorbar(filled, ax=axes, label="wind speed (m s$^{-1}$)", **look)
    axes.set_title(f"Mean wind, {month.time.dt.strftime('%B %Y').item()}")
    axes.set(xlabel="longitude (degrees east)", ylabel="latitude (degrees north)")
    axes.set(xticks=range(60, 380, 60), yticks=range(-90, 91, 30))
    axes.set(xlim=(20, 380), ylim=(-90, 90), aspect="equal")


def _draw_costs(
    axes: Axes, commits: dict[int, _Cost], compacted: list[int], rewrites: dict[int, _Cost]
) -> None:
    from matplotlib.ticker import MaxNLocator

    for text, costs, color in (
        ("writing everything anew (measured at the dots)", rewrites, _GREY),
        ("committing the month", commits, _BLUE),
    ):
        written = [cost.bytes_written / 1000 for cost in costs.values()]
        axes.plot(list(costs), written, "o-", color=color, markersize=4)
        place: Any = {"transform": axes.get_yaxis_transform(), "va": "top"}
        axes.text(0.015, written[0] * 0.72, text, color=color, fontweight="bold", **place)
    for month in compacted:
        at = month, commits[month].bytes_written / 1000
        axes.plot(*at, "o", color=_RED, markersize=6)
        place = {"xytext": (-10, 18), "textcoords": "offset points", "ha": "right"}
        line = {"arrowstyle": "-", "color": _RED}
        text = "this commit also\ncompacted the deltas"
        axes.annotate(text, at, color=_RED, arrowprops=line, **place)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda kilobytes, _: f"{kilobytes:,.10g}")
    axes.set(title="Bytes written to add one month", xlabel="months in the repository")
    axes.set(ylabel="written (kB, log scale)", ylim=(10, 4000), axisbelow=True)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
    axes.margins(x=0.015)
    axes.grid(axis="y", color="#dde2e7")
    axes.spines[["top", "right"]].set_visible(False)
