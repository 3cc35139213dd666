"""The package's main job on real data: netCDF, commits, xarray, a picture, Spark, a stream.

`open_winds` and `open_relief` return the data by themselves; `Demo.run` is what `zarr-manifests
demo` does and prints. Each step checks its claims: snapshots are compared with the sample value by
value, and Spark's means with xarray's. Every figure is measured at the storage while the step runs.

The demo writes to a new or empty directory. Any other directory is refused.
"""

from __future__ import annotations

import shutil
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import xarray as xr
from rich.console import Console

from zarr_manifests import repositories
from zarr_manifests.errors import AlreadyExistsError, JavaNotFoundError, ManifestsError
from zarr_manifests.metrics import process_totals
from zarr_manifests.repository import Repository
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.texts import bytes_text, count_text

# Requests, bytes read and written, and milliseconds.
type _Cost = Counter[str]

FIRST_TAG: Final = "first-years"
_DATA: Final = Path(__file__).parent / "data"
_FIRST: Final = 72
# Spark's own progress bar would overwrite the one of a step.
_SPARK: Final = {"spark.sql.shuffle.partitions": "2", "spark.ui.showConsoleProgress": "false"}
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
    return xr.load_dataset(_DATA / "winds.nc", engine="scipy")


def open_relief() -> xr.Dataset:
    """The relief of the earth on a grid of 1 degree (`relief`, int16, m), in memory.

    Examples
    --------
    >>> from zarr_manifests.demo import open_relief
    >>> int(open_relief().relief.max())
    5731
    """
    return xr.load_dataset(_DATA / "relief.nc", engine="scipy")


@contextmanager
def _measured() -> Iterator[_Cost]:
    """What the block costs in this process, known once it has ended."""
    cost: _Cost = Counter()
    before, start_s = process_totals(), SYSTEM.monotonic_s()
    yield cost
    cost["ms"] = round(1000 * (SYSTEM.monotonic_s() - start_s))
    done = process_totals() - before
    cost.update(requests=done.requests, read=done.bytes_read, wrote=done.bytes_written)


def _told(cost: _Cost) -> str:
    parts = [count_text(cost["requests"], "request")]
    parts += [f"{did} {bytes_text(cost[did])}" for did in ("read", "wrote") if cost[did]]
    return f"{', '.join(parts)} in {_duration(cost['ms'])}"


def _duration(ms: float) -> str:
    return f"{ms:.0f} ms" if ms < 995 else f"{ms / 1000:.1f} s"


def _check(sound: bool, problem: str) -> None:
    if not sound:
        raise CheckFailedError(problem)


class Demo:
    """All steps, which print what each read and wrote.

    Parameters
    ----------
    directory : Path
        A new or empty directory.
    out : rich.console.Console
        Where to print.

    Raises
    ------
    AlreadyExistsError
        If there is anything.
    """

    def __init__(self, directory: Path, out: Console) -> None:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise AlreadyExistsError(f"{directory} is there: delete it, or name a new directory")
        out.soft_wrap = True
        self._at, self._out, self._winds = directory, out, open_winds()
        self._last = self._winds.sizes["time"]
        self._names = ["", *self._winds.time.dt.strftime("%B %Y").values]  # counted from 1

    def run(self) -> Exception | None:
        """Do all steps; why Spark cannot run here, if so, and its steps are left out.

        Raises
        ------
        CheckFailedError
            If something that was read or computed is wrong.
        """
        self._out.print(f"{self._last} months of monthly Navy winds (public domain), in {self._at}")
        commits = self._append(self._ingest())
        rewrites = self._rewrite(commits)
        self._read()
        with self._step("5/7  Draw the last month's wind, and what each commit wrote"):
            _draw(self._at / "winds.png", self._open("main").isel(time=-1), commits, rewrites)
            self._say(f"saved {self._at / 'winds.png'}")
        try:  # last, since it takes longest and needs Java
            self._spark()
        except (JavaNotFoundError, ImportError) as error:
            self._say("left out, and step 7: Spark cannot run here (see the error at the end)")
            return error
        return None

    def _say(self, text: str) -> None:
        self._out.print(f"     {text}")

    @contextmanager
    def _step(self, what: str) -> Iterator[None]:
        self._out.print(f"\n{what}", style="bold")
        with self._out.status("working"):
            yield

    def _until(self, months: int) -> xr.Dataset:
        return self._winds.isel(time=slice(0, months))

    def _open(self, version: str, place: str = "winds") -> Any:
        """A snapshot, opened without anything cached."""
        session = repositories.open(self._at / place).readonly_session(version)
        return xr.open_zarr(session.store, chunks=None)

    # --- the steps ---------------------------------------------------------------------------

    def _ingest(self) -> Repository:
        repo, last = repositories.create(self._at / "winds"), self._names[_FIRST]
        what = f"1/7  Ingest {self._names[1]} to {last} with xarray, as one commit"
        with self._step(what), _measured() as cost:
            _commit_whole(repo, self._until(_FIRST), f"Ingest the months up to {last}")
        repo.create_tag(FIRST_TAG)
        self._say(_told(cost))
        return repo

    def _append(self, repo: Repository) -> dict[int, _Cost]:
        """Costs by the number of months afterwards."""
        costs: dict[int, _Cost] = {}
        with self._step(f"2/7  Append the following {self._last - _FIRST} months, one commit each"):
            for number in range(_FIRST + 1, self._last + 1):
                month, why = self._winds.isel(time=[number - 1]), f"Append {self._names[number]}"
                with _measured() as costs[number], repo.transaction(message=why) as store:
                    month.to_zarr(store, append_dim="time")
                costs[number]["compacted"] = next(repo.ancestry()).kind == "rewrite"
        self._say(f"all together: {_told(sum(costs.values(), Counter()))}")
        each = {name: [cost[name] for cost in costs.values()] for name in costs[self._last]}
        middle = Counter({name: round(median(found)) for name, found in each.items()})
        self._say(f"median month: {_told(middle)}")
        return costs

    def _rewrite(self, commits: Mapping[int, _Cost]) -> dict[int, _Cost]:
        """Costs of all months so far: same chunks, same disk, into an empty repository."""
        place, costs = self._at / "rewritten", dict[int, _Cost]()
        due = _FIRST + 1, (_FIRST + 1 + self._last) // 2, self._last
        with self._step(f"3/7  For comparison, rewrite everything at {len(due)} of these appends"):
            for months in due:
                repo = repositories.create(place)
                with _measured() as costs[months]:
                    _commit_whole(repo, self._until(months), "Rewrite everything")
                shutil.rmtree(place)
        for months, cost in costs.items():
            ratio = cost["wrote"] / commits[months]["wrote"]
            self._say(f"{self._names[months]}, the commit: {_told(commits[months])}")
            self._say(f"  everything anew: {_told(cost)}, {ratio:.0f} times the bytes")
        return costs

    def _read(self) -> None:
        with self._step("4/7  Read the snapshot of the first years and the head, each opened anew"):
            first, head = ("first years", FIRST_TAG, _FIRST), ("head", "main", self._last)
            for name, version, months in (first, head):
                with _measured() as opening:
                    found = self._open(version)
                with _measured() as one:
                    last = found.isel(time=slice(-1, None)).load()
                with _measured() as rest:
                    others = found.isel(time=slice(None, -1)).load()
                same = xr.concat([others, last], dim="time").identical(self._until(months))
                _check(same, f"{version} does not hold the {months} months written")
                self._say(f"{name}, {months} months, every value as in the netCDF file")
                self._say(f"  open, with coordinates: {_told(opening)}")
                self._say(f"  u and v of one month:   {_told(one)}")
                self._say(f"  all other months:       {_told(rest)}")
            self._summarize(self._at / "winds")

    def _summarize(self, place: Path) -> None:
        repositories.open(place).compute_statistics(["u"])
        with _measured() as cost:
            found = repositories.open(place).readonly_session().summarize("u", by="time.YS")
        expected = self._winds.u.astype("f8").resample(time="YS").mean(...)
        same = not found.attrs["chunks_read"] and np.allclose(found["mean"], expected, 1e-12, 0)
        _check(same, "statistics say other yearly means of u than xarray computes")
        whole = bytes_text(repositories.open(place).du(path="u").total.nbytes)
        self._say(f"{len(expected)} yearly means of u by statistics: {_told(cost)}, of {whole}")

    def _spark(self) -> None:
        # Spark warns of features of pandas that are not used here.
        quiet = warnings.catch_warnings(action="ignore", category=FutureWarning)
        with quiet, ExitStack() as at_the_end:
            with self._step("6/7  Compute the mean wind speed on Spark"):
                from zarr_manifests.spark import session

                spark = session("zarr-manifests demo", master="local[2]", config=_SPARK)
                at_the_end.callback(spark.stop)
                self._means(spark)
                self._search(spark)
            with self._step("7/7  Let months come in as a stream, with a restart in the middle"):
                self._stream(spark)

    def _means(self, spark: Any) -> None:
        """Compute the mean of each month on Spark, and compare with xarray."""
        from pyspark.sql import functions as sql

        from zarr_manifests.spark import read

        winds, start_s = self._winds.astype("f8"), SYSTEM.monotonic_s()
        cells = read(spark, self._at / "winds", ["u", "v"])
        u, v = sql.col("u").cast("double"), sql.col("v").cast("double")
        speed, weight = sql.sqrt(u * u + v * v), sql.cos(sql.radians("lat"))
        mean = (sql.sum(speed * weight) / sql.sum(weight)).alias("mean")
        by_month = cells.groupBy("time").agg(mean, sql.count("u").alias("rows"))
        table: Any = by_month.orderBy("time").toPandas()
        took = _duration(1000 * (SYSTEM.monotonic_s() - start_s))
        weighted = np.hypot(winds.u, winds.v).weighted(np.cos(np.deg2rad(winds.lat)))
        expected = weighted.mean(("lat", "lon")).values
        same = len(table) == len(expected) and np.allclose(table["mean"], expected, 1e-9, 0)
        _check(same, "Spark computes other monthly means than xarray does")
        means = f"{len(table)} means, as xarray computes them"
        self._say(f"{table['rows'].sum():,} rows in {took}: {means}")

    def _search(self, spark: Any) -> None:
        """Read the strong westerlies of the second half; statistics say which chunks have any."""
        from zarr_manifests.spark import read

        place, winds = self._at / "winds", self._winds
        half = winds.time.values[len(winds.time) // 2]
        where = f"u > 15.0 AND time >= '{np.datetime_as_string(half, 'D')}'"
        strong = read(spark, place, "u", where=where).count()
        same = strong == int((winds.u.sel(time=slice(half, None)) > 15).sum())
        _check(same, f"Spark finds other cells where {where} than xarray does")
        pruned = repositories.open(place).readonly_session().chunks_where("u", where)
        self._say(f"where {where}: {strong:,} rows")
        by = "{range} skipped by time, {statistics} by statistics".format(**pruned.left_out)
        self._say(f"of {pruned.chunks} chunks {by}")

    def _stream(self, spark: Any) -> None:
        """Append months that come as files; the restart has forgotten that it wrote the second."""
        from zarr_manifests.spark import foreach_batch

        place, repeated = self._at / "stream", list[bool]()
        repo, files = repositories.create(place / "winds"), place / "files"
        files.mkdir()
        _commit_whole(repo, self._until(1), "The first month")
        dims, heard = ["time", "lat", "lon"], lambda _, report: repeated.append(report.replayed)
        write = foreach_batch(repo, "/", dims=dims, append_dim="time", on_report=heard)
        rows = spark.readStream.option("maxFilesPerTrigger", 1)
        rows = rows.schema("time timestamp, lat double, lon double, u float, v float")
        for month in range(1, 5):
            table = self._winds.isel(time=[month]).to_dataframe().reset_index()
            table["time"] = table["time"].dt.tz_localize("UTC")
            table.to_parquet(files / f"{month}.parquet", index=False, coerce_timestamps="us")
            if month % 2 == 0:  # the job runs, and ends once it has written what there is
                sink = rows.parquet(str(files)).writeStream.trigger(availableNow=True)
                sink = sink.option("checkpointLocation", str(place / "checkpoint"))
                sink.foreachBatch(write).start().awaitTermination()
            for note in (place / "checkpoint" / "commits").glob("*1*") if month == 2 else ():
                note.unlink()
        same = self._open("main", "stream/winds").equals(self._until(5))
        _check(same, "the stream has not written each month once")
        self._say(f"{len(repeated) - sum(repeated)} files, one commit each")
        self._say(f"after the restart {sum(repeated)} batch came again and made no commit")
        shutil.rmtree(place)


def _commit_whole(repo: Repository, ds: xr.Dataset, message: str) -> None:
    # One chunk per month, so that appending a month touches no existing chunk.
    chunk = (1, ds.sizes["lat"], ds.sizes["lon"])
    units = {name: ds.time.encoding[name] for name in ("units", "calendar", "dtype")}
    encoding = {"u": {"chunks": chunk}, "v": {"chunks": chunk}, "time": units | {"chunks": (12,)}}
    with repo.transaction("main", message=message) as store:
        ds.to_zarr(store, encoding=encoding)


def _draw_map(axes: Any, month: xr.Dataset) -> None:
    around = month.pad(lon=(0, 1), mode="wrap")  # the first meridian again, to leave no gap
    around["lon"] = [*month.lon.values, month.lon.values[0] + 360]
    speed = np.hypot(around.u, around.v)
    bar = {"label": "wind speed (m s$^{-1}$)", "fraction": 0.025, "pad": 0.015}
    levels = np.arange(0, speed.max() + 0.5, 0.5)
    speed.plot.contourf(ax=axes, levels=levels, cmap="YlGnBu", cbar_kwargs=bar)
    open_relief().relief.plot.contour(ax=axes, levels=[0], colors=_INK, linewidths=0.7)
    sparse = around.isel(lat=slice(1, -1), lon=slice(None, None, 2))
    where = sparse.lon, sparse.lat, sparse.u, sparse.v
    arrows = axes.quiver(*where, color=_INK, width=0.0013, scale=300, alpha=0.85)
    axes.quiverkey(arrows, 0.95, 1.035, 10, "10 m s$^{-1}$", labelpos="W")
    axes.set_title("")  # xarray's
    axes.set_title(month.time.dt.strftime("Mean wind, %B %Y").item(), loc="left", weight="bold")
    axes.set(xlabel="longitude (degrees east)", ylabel="latitude (degrees north)")
    axes.set(xlim=(20, 380), yticks=range(-90, 91, 30), aspect="equal")


def _draw(
    path: Path, month: xr.Dataset, commits: Mapping[int, _Cost], rewrites: Mapping[int, _Cost]
) -> None:
    """Save as PNG: the wind of a month on a map, and what commits and rewrites wrote."""
    from matplotlib.figure import Figure

    compacted = {months: cost for months, cost in commits.items() if cost["compacted"]}
    figure = Figure(figsize=(9.6, 8.8), dpi=150, layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(1.6, 1))
    _draw_map(above, month)
    for label, costs, line, color in (
        ("writing everything anew", rewrites, "o-", _GREY),
        ("committing the month", commits, "o-", _BLUE),
        ("a commit that also compacted the deltas", compacted, "o", _RED),
    ):
        written = [cost["wrote"] / 1000 for cost in costs.values()]
        below.plot(list(costs), written, line, color=color, markersize=4, label=label)
    below.legend(loc="center right", frameon=False)
    below.set_title("Bytes written to add one month", loc="left", weight="bold")
    below.set_xlabel("months in the repository")
    below.set(ylabel="written (kB, log scale)", ylim=(10, 4000), yscale="log")
    below.yaxis.set_major_formatter(lambda kilobytes, _: f"{kilobytes:,.10g}")
    below.grid(axis="y", color="#dde2e7")
    figure.savefig(path, format="png")
