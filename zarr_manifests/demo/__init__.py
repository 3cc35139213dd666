"""The package's main job on real data: netCDF, commits, xarray, Spark, a picture.

`open_winds` and `open_relief` return the data by themselves; `Demo.run` is what `zarr-manifests
demo` does and prints. Each step checks its claims: both snapshots are compared with the sample
value by value, and Spark's means with xarray's. Every figure is measured at the storage while the
step runs.

The demo writes to a new or empty directory. Any other directory is refused.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import as_file, files
from itertools import count
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

type _Cost = Counter[str]
"""Requests, bytes read and written, and milliseconds."""

FIRST_TAG: Final = "first-years"
_FIRST: Final = 72
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
            raise AlreadyExistsError(
                f"{directory} is there: delete it, or name a new directory: "
                "zarr-manifests demo DIRECTORY"
            )
        self._at, self._out, self._steps = directory, out, count(1)
        self._winds = open_winds()
        self._last = self._winds.sizes["time"]
        self._names = ["", *self._winds.time.dt.strftime("%B %Y").values]  # counted from 1

    def run(self) -> Exception | None:
        """Do all steps; why Spark cannot run here, if so, and its step is left out.

        Raises
        ------
        CheckFailedError
            If something that was read or computed is wrong.
        """
        what = f"{self._last} months of monthly Navy winds (public domain)"
        self._print(f"{what}, in {self._at}{os.sep}")
        commits = self._append(self._ingest())
        rewrites = self._rewrite(commits)
        self._read()
        with self._step("Draw the last month's wind, and what each commit wrote"):
            head = self._open("main").isel(time=-1).load()
            _draw(self._at / "winds.png", head, commits, rewrites)
            self._say(f"saved {self._at / 'winds.png'}")
        try:  # last, since it takes longest and needs Java
            self._spark()
        except (JavaNotFoundError, ImportError) as error:
            self._say("left out: Spark cannot run here (see the error at the end)")
            return error
        return None

    def _print(self, text: str, **how: Any) -> None:
        self._out.print(text, soft_wrap=True, **how)

    def _say(self, text: str) -> None:
        self._print(f"     {text}")

    @contextmanager
    def _step(self, what: str) -> Iterator[None]:
        self._print(f"\n{next(self._steps)}/6  {what}", style="bold")
        with self._out.status("working"):
            yield

    def _until(self, months: int) -> xr.Dataset:
        return self._winds.isel(time=slice(0, months))

    def _open(self, version: str) -> xr.Dataset:
        """A snapshot, opened without anything cached."""
        session = repositories.open(self._at / "winds").readonly_session(version)
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
        with self._step(f"Append the following {self._last - _FIRST} months, one commit each"):
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
        return costs

    def _rewrite(self, commits: Mapping[int, _Cost]) -> dict[int, _Cost]:
        """Costs of all months so far: same chunks, same disk, into an empty repository."""
        place, costs = self._at / "rewritten", dict[int, _Cost]()
        due = _FIRST + 1, (_FIRST + 1 + self._last) // 2, self._last
        with self._step(f"For comparison, rewrite everything at {len(due)} of these appends"):
            for months in due:
                repo = repositories.create(place)
                with _measured() as costs[months]:
                    _commit_whole(repo, self._until(months), "Rewrite everything")
                shutil.rmtree(place)
        for months, cost in costs.items():
            ratio = cost["written"] / commits[months]["written"]
            self._say(f"{self._names[months]}, the commit: {_told(commits[months])}")
            self._say(f"  everything anew: {_told(cost)}, {ratio:.0f} times the bytes")
        return costs

    def _read(self) -> None:
        with self._step("Read the snapshot of the first years and the head, each opened anew"):
            first, head = ("first years", FIRST_TAG, _FIRST), ("head", "main", self._last)
            for name, version, months in (first, head):
                with _measured() as opening:
                    found = self._open(version)
                with _measured() as one:
                    last = found.isel(time=slice(-1, None)).load()
                with _measured() as rest:
                    others = found.isel(time=slice(None, -1)).load()
                if not xr.concat([others, last], dim="time").identical(self._until(months)):
                    raise CheckFailedError(f"{version} does not hold the {months} months written")
                self._say(f"{name}, {months} months, {_SAME}")
                self._say(f"  open, with coordinates: {_told(opening)}")
                self._say(f"  u and v of one month:   {_told(one)}")
                self._say(f"  all other months:       {_told(rest)}")
            self._summarize()

    def _summarize(self) -> None:
        place = self._at / "winds"
        repositories.open(place).compute_statistics(["u"])
        with _measured() as cost:
            found = repositories.open(place).readonly_session().summarize("u", by="time.YS")
        expected = self._winds.u.astype("f8").resample(time="YS").mean(...)
        if found.attrs["chunks_read"] or not np.allclose(found["mean"], expected, 1e-12, 0):
            raise CheckFailedError("statistics say other yearly means of u than xarray computes")
        whole = bytes_text(repositories.open(place).du(path="u").total.nbytes)
        what = f"{len(expected)} yearly means of u, by statistics"
        self._say(f"{what}: {_told(cost)}; all of u: {whole}")

    def _spark(self) -> None:
        with warnings.catch_warnings(), self._step("Compute the mean wind speed on Spark"):
            # A warning about features of pandas that are not used here.
            warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas")
            from zarr_manifests.spark import session

            # The console shows progress, and two progress bars would overwrite each other.
            quiet = {"spark.sql.shuffle.partitions": "2", "spark.ui.showConsoleProgress": "false"}
            spark = session("zarr-manifests demo", master="local[2]", config=quiet)
            try:
                self._means(spark)
                self._search(spark)
            finally:
                spark.stop()

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
        if len(table) != len(expected) or not np.allclose(table["mean"], expected, 1e-9, 0):
            raise CheckFailedError("Spark computes other monthly means than xarray does")
        rows = int(table["rows"].sum())
        self._say(f"{rows:,} rows in {took}: {len(table)} means, as xarray computes them")

    def _search(self, spark: Any) -> None:
        """Read the strong westerlies of the second half; statistics say which chunks have any."""
        from zarr_manifests.spark import read

        place, winds = self._at / "winds", self._winds
        half = winds.time.values[len(winds.time) // 2]
        where = f"u > 15.0 AND time >= '{np.datetime_as_string(half, 'D')}'"
        strong = read(spark, place, "u", where=where).count()
        if strong != int((winds.u.sel(time=slice(half, None)) > 15).sum()):
            raise CheckFailedError(f"Spark finds other cells where {where} than xarray does")
        pruned = repositories.open(place).readonly_session().chunks_where("u", where)
        self._say(f"where {where}: {strong:,} rows")
        skipped = pruned.left_out
        by = f"{skipped['range']} skipped by time, {skipped['statistics']} by statistics"
        self._say(f"of {pruned.chunks} chunks {by}")


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


def _draw(
    path: Path, month: xr.Dataset, commits: Mapping[int, _Cost], rewrites: Mapping[int, _Cost]
) -> None:
    """Save as PNG: the wind of a month on a map, and what commits and rewrites wrote."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    compacted = {months: cost for months, cost in commits.items() if cost["compacted"]}
    with mpl.rc_context({"axes.titlelocation": "left", "axes.titleweight": "bold"}):
        figure = Figure(figsize=(9.6, 8.8), dpi=150, layout="constrained")
        above, below = figure.subplots(2, 1, height_ratios=(1.6, 1))
        _draw_map(above, month)
        for label, costs, line, color in (
            ("writing everything anew", rewrites, "o-", _GREY),
            ("committing the month", commits, "o-", _BLUE),
            ("a commit that also compacted the deltas", compacted, "o", _RED),
        ):
            written = [cost["written"] / 1000 for cost in costs.values()]
            below.plot(list(costs), written, line, color=color, markersize=4, label=label)
        below.legend(loc="center right", frameon=False)
        below.set(title="Bytes written to add one month", xlabel="months in the repository")
        below.set(ylabel="written (kB, log scale)", ylim=(10, 4000), yscale="log")
        below.yaxis.set_major_formatter(lambda kilobytes, _: f"{kilobytes:,.10g}")
        below.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
        below.grid(axis="y", color="#dde2e7")
        below.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, format="png")
