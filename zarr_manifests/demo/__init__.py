"""The package's main job on real data: netCDF, commits, xarray, Spark, a picture.

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
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.resources import as_file, files
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import xarray as xr
from rich.console import Console

from zarr_manifests import repositories
from zarr_manifests.errors import (
    AlreadyExistsError,
    JavaNotFoundError,
    ManifestsError,
    StorageError,
)
from zarr_manifests.metrics import process_totals
from zarr_manifests.repository import Repository
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.texts import bytes_text, count_text

type _Cost = Counter[str]
"""Requests, bytes read and written, and milliseconds."""

MARKER: Final = ".made-by-zarr-manifests-demo"
_NOTE: Final = (
    "This directory was made by `zarr-manifests demo`. When the demo is run here again it replaces "
    "winds/, rewritten/, stream/ and winds.png, and leaves everything else as it is.\n"
)
FIRST_TAG: Final = "first-years"
_FIRST: Final = 72
_REWRITE_EVERY: Final = 6
_STREAMED: Final = 2
"""Months that come in before the restart of the stream, and after it."""
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
    marker, another = directory / MARKER, "name a new directory: zarr-manifests demo DIRECTORY"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        is_ours = marker.is_file() and not marker.is_symlink()
        if any(directory.iterdir()) and not is_ours:
            raise AlreadyExistsError(
                f"{directory} is there and was not made by the demo, which therefore leaves "
                f"it alone; {another}"
            )
        marker.write_text(_NOTE, encoding="utf-8")
        (directory / "winds.png").unlink(missing_ok=True)
        for path in (directory / name for name in ("winds", "rewritten", "stream")):
            if path.is_symlink() or path.exists():
                shutil.rmtree(path)  # refuses a symbolic link
    except AlreadyExistsError:  # which is an OSError, too
        raise
    except OSError as error:
        why = error.strerror or error
        raise StorageError(f"the demo cannot write to {directory} ({why}); {another}") from error


@contextmanager
def _measured() -> Iterator[_Cost]:
    """What the block costs in this process, known once it has ended."""
    cost: _Cost = Counter()
    before, start_s = process_totals(), SYSTEM.monotonic_s()
    yield cost
    cost["ms"] = round(1000 * (SYSTEM.monotonic_s() - start_s))
    done = process_totals() - before
    cost.update(requests=done.requests, read=done.bytes_read, written=done.bytes_written)


def _told(cost: _Cost) -> str:
    parts = [count_text(cost["requests"], "request")]
    parts += [f"read {bytes_text(cost['read'])}"] if cost["read"] else []
    parts += [f"wrote {bytes_text(cost['written'])}"] if cost["written"] else []
    return f"{', '.join(parts)} in {_duration(cost['ms'])}"


def _duration(ms: float) -> str:
    return f"{ms:.0f} ms" if ms < 995 else f"{ms / 1000:.1f} s"


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
        self._at, self._out, self._steps = directory, out, count(1)
        self._winds = open_winds().isel(time=slice(0, _FIRST + months))
        self._last = self._winds.sizes["time"]
        self._names = ["", *self._winds.time.dt.strftime("%B %Y").values]  # counted from 1

    def run(self) -> Exception | None:
        """Do all steps; why Spark cannot run here, if so, and its steps are left out.

        Raises
        ------
        CheckFailedError
            If something that was read or computed is wrong.
        """
        months = f"{self._last} months of monthly Navy winds (public domain)"
        self._print(f"{months}, in {self._at}{os.sep}")
        commits = self._append(self._ingest())
        rewrites = self._rewrite()
        self._read()
        with self._step("Draw the last month's wind, and what each commit wrote"):
            head = self._open("winds").isel(time=-1).load()
            _draw(self._at / "winds.png", head, commits, rewrites)
            self._say(f"saved {self._at / 'winds.png'}")
        self._compare(commits, rewrites)
        try:  # last, since it takes longest and needs Java
            self._spark()
        except (JavaNotFoundError, ImportError) as error:
            self._say("left out, and step 7: Spark cannot run here (see the error at the end)")
            return error
        return None

    def _print(self, text: str, **how: Any) -> None:
        self._out.print(text, soft_wrap=True, **how)

    def _say(self, text: str) -> None:
        self._print(f"     {text}")

    @contextmanager
    def _step(self, what: str) -> Iterator[None]:
        self._print(f"\n{next(self._steps)}/7  {what}", style="bold")
        with self._out.status("working"):
            yield

    def _until(self, months: int) -> xr.Dataset:
        return self._winds.isel(time=slice(0, months))

    def _open(self, name: str, version: str | None = None) -> xr.Dataset:
        """A snapshot, opened without anything cached."""
        session = repositories.open(self._at / name).readonly_session(version)
        found: xr.Dataset = xr.open_zarr(session.store, chunks=None)
        return found

    # --- the steps ---------------------------------------------------------------------------

    def _ingest(self) -> Repository:
        repo, last = repositories.create(self._at / "winds"), self._names[_FIRST]
        what = f"Ingest {self._names[1]} to {last} with xarray, as one commit"
        with self._step(what), _measured() as cost:
            _commit_whole(repo, self._until(_FIRST), f"Ingest the months up to {last}")
        repo.create_tag(FIRST_TAG)
        self._say(_told(cost))
        return repo

    def _append(self, repo: Repository) -> dict[int, _Cost]:
        """Costs by the number of months afterwards."""
        costs: dict[int, _Cost] = {}
        following = count_text(self._last - _FIRST, "month")
        with self._step(f"Append the following {following}, one commit each"):
            for number in range(_FIRST + 1, self._last + 1):
                month, why = self._winds.isel(time=[number - 1]), f"Append {self._names[number]}"
                with _measured() as costs[number], repo.transaction(message=why) as store:
                    month.to_zarr(store, append_dim="time")
                costs[number]["compacted"] = next(repo.ancestry()).kind == "rewrite"
        self._say(f"all together: {_told(sum(costs.values(), Counter()))}")
        names = ("requests", "written", "ms")
        requests, written, ms = (median(cost[name] for cost in costs.values()) for name in names)
        wrote = f"wrote {bytes_text(round(written))} in {_duration(ms)}"
        self._say(f"median month: {requests:.0f} requests, {wrote}")
        for number, cost in costs.items():
            if cost["compacted"]:
                size = bytes_text(cost["written"])
                self._say(f"{self._names[number]} also compacted the deltas: wrote {size}")
        return costs

    def _rewrite(self) -> dict[int, _Cost]:
        """Costs of all months so far: same chunks, same disk, into an empty repository."""
        place, last, costs = self._at / "rewritten", self._last, {}
        due = sorted({_FIRST + 1, *range(_FIRST + _REWRITE_EVERY, last, _REWRITE_EVERY), last})
        appends = f"{len(due)} of these {last - _FIRST} appends"
        with self._step(f"For comparison, rewrite everything at {appends}"):
            for months in due:
                repo = repositories.create(place)
                with _measured() as costs[months]:
                    _commit_whole(repo, self._until(months), "Rewrite everything")
                shutil.rmtree(place)
        self._say(f"all together: {_told(sum(costs.values(), Counter()))}")
        return costs

    def _read(self) -> None:
        with self._step("Read the snapshot of the first years and the head, each opened anew"):
            first, head = ("first years", FIRST_TAG, _FIRST), ("head", "main", self._last)
            for name, version, months in (first, head):
                with _measured() as opening:
                    found = self._open("winds", version)
                with _measured() as one:
                    last = found.isel(time=slice(-1, None)).load()
                with _measured() as rest:
                    others = found.isel(time=slice(None, -1)).load()
                if not xr.concat([others, last], dim="time").identical(self._until(months)):
                    raise CheckFailedError(
                        f"{version} in {self._at / 'winds'} does not hold the {months} months "
                        "that were written"
                    )
                self._say(f"{name}, {months} months, {_SAME}")
                self._say(f"  open, with coordinates: {_told(opening)}")
                self._say(f"  u and v of one month:   {_told(one)}")
                self._say(f"  all other months:       {_told(rest)}")
            self._summarize()

    def _summarize(self) -> None:
        place, years = self._at / "winds", {"time": "YS"}
        repositories.open(place).compute_statistics(["u"])
        with _measured() as cost:
            found = repositories.open(place).readonly_session().summarize("u", by=years)
        expected = self._winds.u.astype("f8").resample(years).mean(...)
        if found.attrs["chunks_read"] or not np.allclose(found["mean"], expected, 1e-12, 0):
            raise CheckFailedError("statistics say other yearly means of u than xarray computes")
        whole = bytes_text(repositories.open(place).du(path="u").total.nbytes)
        self._say(
            f"{len(expected)} yearly means of u, by statistics: {_told(cost)}; all of u: {whole}"
        )

    def _compare(self, commits: Mapping[int, _Cost], rewrites: Mapping[int, _Cost]) -> None:
        """Print the first, middle and last measured month: the commit beside the full rewrite."""
        self._print(
            "\n               commit:                     rewrite:                    bytes"
            "\nto add         requests  written  seconds  requests  written  seconds  ratio"
        )
        due = list(rewrites)
        for number in dict.fromkeys([due[0], due[len(due) // 2], due[-1]]):
            line = f"{self._names[number]:14}"
            for cost in (commits[number], rewrites[number]):
                size, seconds = bytes_text(cost["written"]), f"{cost['ms'] / 1000:.2f}"
                line += f" {cost['requests']:8}  {size:>7}  {seconds:>7} "
            self._print(f"{line} {rewrites[number]['written'] / commits[number]['written']:5.0f}")
        self._print(
            "Rewriting is measured, not estimated: all months so far, as one commit into an\n"
            "empty repository on the same disk, with the same chunks and the same xarray."
        )

    def _spark(self) -> None:
        # The console shows progress, and two progress bars would overwrite each other.
        settings = {"spark.sql.shuffle.partitions": "2", "spark.ui.showConsoleProgress": "false"}
        with ExitStack() as at_the_end:
            at_the_end.enter_context(warnings.catch_warnings())
            # A warning about features of pandas that are not used here.
            warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas")
            with self._step("Compute the monthly mean wind speed on Spark"):
                from zarr_manifests.spark import session

                start_s = SYSTEM.monotonic_s()
                spark = session("zarr-manifests demo", master="local[2]", config=settings)
                at_the_end.callback(spark.stop)
                self._means(spark, start_s)
            with self._step("Let months come in as a stream, with a restart in the middle"):
                self._stream(spark)

    def _means(self, spark: Any, start_s: float) -> None:
        """Compute means on Spark, then read the strong westerlies of the second half."""
        from pyspark.sql import functions as sql

        from zarr_manifests.spark import explain_pruning, read

        place, winds = self._at / "winds", self._winds
        cells = read(spark, place, ["u", "v"])
        u, v = sql.col("u").cast("double"), sql.col("v").cast("double")
        speed, weight = sql.sqrt(u * u + v * v), sql.cos(sql.radians("lat"))
        mean = (sql.sum(speed * weight) / sql.sum(weight)).alias("mean")
        by_month = cells.groupBy("time").agg(mean, sql.count("u").alias("rows"))
        table: Any = by_month.orderBy("time").toPandas()
        took = _duration(1000 * (SYSTEM.monotonic_s() - start_s))
        difference = check_means(table, winds)
        half = winds.time.values[len(winds.time) // 2]
        where = f"u > 15.0 AND time >= '{np.datetime_as_string(half, 'D')}'"
        strong = read(spark, place, "u", where=where).count()
        if strong != int((winds.u.sel(time=slice(half, None)) > 15).sum()):
            raise CheckFailedError(f"Spark finds other cells where {where} than xarray does")
        pruned = explain_pruning(spark, place, "u", where=where)
        rows, tasks = int(table["rows"].sum()), cells.rdd.getNumPartitions()
        self._say(f"{rows:,} rows in {tasks} tasks, {took} with the start of Spark")
        same = f"as xarray computes them (largest difference {difference:.0e} m/s)"
        self._say(f"{len(table)} means, {same}")
        ends = table["mean"].argmin(), table["mean"].argmax()
        calm, windy = (f"{self._names[n + 1]} ({table['mean'][n]:.2f} m/s)" for n in ends)
        self._say(f"calmest month {calm}, windiest {windy}")
        self._say(f"where {where}: {strong:,} rows")
        skipped = pruned.left_out
        by = f"{skipped['range']} skipped by time, {skipped['statistics']} by statistics"
        self._say(f"of {pruned.chunks} chunks {by}")

    def _stream(self, spark: Any) -> None:
        """Stream files of months into a repository, with a restart in the middle.

        The driver is made to forget its last batch, as if it had died right after the commit. The
        restarted stream brings that batch again.
        """
        from zarr_manifests.spark import foreach_batch

        place, months = self._at / "stream", self._until(1 + 2 * _STREAMED)
        (place / "files").mkdir(parents=True)
        repo = repositories.create(place / "winds")
        _commit_whole(repo, self._until(1), "The first month")
        reports: list[Any] = []
        how: Any = {"dims": ["time", "lat", "lon"], "append_dim": "time"}
        write = foreach_batch(repo, "/", on_report=lambda _, one: reports.append(one), **how)
        schema = "time timestamp, lat double, lon double, u float, v float"
        rows = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1)
        stream = rows.parquet(str(place / "files")).writeStream.foreachBatch(write)
        stream = stream.option("checkpointLocation", str(place / "checkpoint"))
        with _measured() as cost:
            for month in range(1, 1 + 2 * _STREAMED):
                table = months.isel(time=[month]).to_dataframe().reset_index()
                table["time"] = table["time"].dt.tz_localize("UTC").astype("datetime64[us, UTC]")
                table.to_parquet(place / "files" / f"{month:02}.parquet", index=False)
                if month % _STREAMED == 0:  # one commit for each file that has come
                    stream.trigger(availableNow=True).start().awaitTermination()
                if month == _STREAMED:  # forget what Spark writes after the commit of a batch
                    commits = [*(place / "checkpoint" / "commits").glob("[0-9]*")]
                    last = max(commits, key=lambda file: int(file.name))
                    last.unlink()
                    last.with_name(f".{last.name}.crc").unlink(missing_ok=True)
        if not self._open("stream/winds").equals(months):
            raise CheckFailedError("the stream has not written each month once")
        shutil.rmtree(place)
        again = count_text(sum(report.replayed for report in reports), "batch")
        self._say(f"{2 * _STREAMED} files, one commit each, in {_duration(cost['ms'])}; {_SAME}")
        self._say(f"after the restart {again} came again and made no commit")


def _commit_whole(repo: Repository, ds: xr.Dataset, message: str) -> None:
    # One chunk per month, so that appending a month touches no existing chunk.
    chunk = (1, ds.sizes["lat"], ds.sizes["lon"])
    units = {name: ds.time.encoding[name] for name in ("units", "calendar", "dtype")}
    encoding = {"u": {"chunks": chunk}, "v": {"chunks": chunk}, "time": units | {"chunks": (12,)}}
    with repo.transaction("main", message=message) as store:
        ds.to_zarr(store, encoding=encoding)


def check_means(computed: Any, winds: xr.Dataset) -> float:
    """The largest difference between Spark's and xarray's mean speeds; only rounding is allowed.

    Parameters
    ----------
    computed : pandas.DataFrame
        `time` and `mean`, in the order of time.
    winds : xarray.Dataset
        `u` and `v` over the same times.

    Raises
    ------
    CheckFailedError
        If the months or the means are not the same.
    """
    means, weight = computed["mean"].to_numpy(), np.cos(np.deg2rad(winds.lat))
    speed = np.hypot(winds.u.astype("f8"), winds.v.astype("f8"))
    wanted = speed.weighted(weight).mean(("lat", "lon")).values
    same_months = np.array_equal(computed["time"].to_numpy(), winds.time.values)
    if not same_months or not np.allclose(means, wanted, rtol=1e-9, atol=0):
        raise CheckFailedError(
            "the monthly mean wind speeds that Spark computed are not those that xarray computes"
        )
    return float(np.abs(means - wanted).max())


def _draw(
    path: Path, month: xr.Dataset, commits: Mapping[int, _Cost], rewrites: Mapping[int, _Cost]
) -> None:
    """Save as PNG: the wind of a month on a map, and what commits and rewrites wrote."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with mpl.rc_context({"axes.titlelocation": "left", "axes.titleweight": "bold"}):
        figure = Figure(figsize=(9.6, 8.8), dpi=150, layout="constrained")
        above, below = figure.subplots(2, 1, height_ratios=(1.6, 1))
        _draw_map(above, month)
        start: Any = {"transform": below.get_yaxis_transform(), "va": "top", "weight": "bold"}
        anew = "writing everything anew (measured at the dots)"
        one = "committing the month"
        for text, costs, color in ((anew, rewrites, _GREY), (one, commits, _BLUE)):
            written = [cost["written"] / 1000 for cost in costs.values()]
            below.plot(list(costs), written, "o-", color=color, markersize=4)
            below.text(0.015, written[0] * 0.72, text, color=color, **start)
        place: Any = {"xytext": (-10, 18), "textcoords": "offset points", "ha": "right"}
        place["arrowprops"] = {"arrowstyle": "-", "color": _RED}
        for at in [(n, c["written"] / 1000) for n, c in commits.items() if c["compacted"]]:
            below.plot(*at, "o", color=_RED, markersize=6)
            below.annotate("this commit also\ncompacted the deltas", at, color=_RED, **place)
        below.set(title="Bytes written to add one month", xlabel="months in the repository")
        below.set(ylabel="written (kB, log scale)", ylim=(10, 4000), yscale="log")
        below.yaxis.set_major_formatter(lambda kilobytes, _: f"{kilobytes:,.10g}")
        below.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
        below.grid(axis="y", color="#dde2e7")
        below.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, format="png")


def _draw_map(axes: Any, month: xr.Dataset) -> None:
    around = month.pad(lon=(0, 1), mode="wrap")  # the first meridian again, to leave no gap
    around["lon"] = [*month.lon.values, month.lon.values[0] + 360]
    speed = np.hypot(around.u, around.v)
    top = max(2 * np.ceil(speed.max().item() / 2), 2)
    bar = {"label": "wind speed (m s$^{-1}$)", "fraction": 0.025, "pad": 0.015}
    filled = speed.plot.contourf(
        ax=axes, levels=np.linspace(0, top, 25), cmap="YlGnBu", extend="neither",
        cbar_kwargs={**bar, "ticks": np.arange(0, top + 1, 2)},
    )  # fmt: skip
    filled.set_edgecolor("face")
    open_relief().relief.plot.contour(ax=axes, levels=[0], colors=_INK, linewidths=0.7)
    sparse = around.isel(lat=slice(1, -1), lon=slice(None, None, 2))
    where = sparse.lon, sparse.lat, sparse.u, sparse.v
    arrows = axes.quiver(*where, color=_INK, width=0.0013, scale=300, alpha=0.85)
    axes.quiverkey(arrows, 0.95, 1.035, 10, "10 m s$^{-1}$", labelpos="W")
    axes.set_title(f"Mean wind, {month.time.dt.strftime('%B %Y').item()}")
    axes.set(xlabel="longitude (degrees east)", ylabel="latitude (degrees north)")
    axes.set(xticks=range(60, 380, 60), yticks=range(-90, 91, 30))
    axes.set(xlim=(20, 380), ylim=(-90, 90), aspect="equal")
