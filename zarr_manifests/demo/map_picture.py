"""The demo's picture: the last month's wind on a map, and what each commit wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from zarr_manifests.demo.costs import Commit, Rewrite
from zarr_manifests.demo.sample import open_relief

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw"]

_INK: Final = "#22303c"
_COMMIT: Final = "#1f77a4"
_COMPACTION: Final = "#d1495b"
_REWRITE: Final = "#7b828c"


def draw(
    path: Path, month: xr.Dataset, commits: Sequence[Commit], rewrites: Sequence[Rewrite]
) -> None:
    """Save the picture as PNG.

    Parameters
    ----------
    path : Path
        The file.
    month : xarray.Dataset
        `u` and `v` of one month over `lat` and `lon`, with a scalar `time`.
    commits : sequence of Commit
        The appends.
    rewrites : sequence of Rewrite
        What was measured of writing everything anew.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: Any = {
        "axes.edgecolor": _INK,
        "axes.labelcolor": _INK,
        "axes.titlecolor": _INK,
        "axes.titlelocation": "left",
        "axes.titlesize": 12,
        "axes.titleweight": "bold",
        "axes.labelsize": 9.5,
        "text.color": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "xtick.labelsize": 9,
        "ytick.labelsize": 9,
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=(9.6, 8.8), dpi=150, layout="constrained")
        map_axes, cost_axes = figure.subplots(2, 1, height_ratios=(1.6, 1))
        _draw_map(figure, map_axes, month)
        _draw_costs(cost_axes, commits, rewrites)
        figure.savefig(path, format="png")


def _draw_map(figure: Figure, axes: Axes, month: xr.Dataset) -> None:
    around = _closed(month)
    lon, lat = around.lon.values, around.lat.values
    u, v = around.u.values, around.v.values
    speed = np.hypot(u, v)
    top = max(2 * np.ceil(speed.max() / 2), 2.0)
    filled = axes.contourf(
        lon, lat, speed, levels=np.linspace(0, top, 25), cmap="YlGnBu", extend="neither"
    )
    filled.set_edgecolor("face")
    relief = open_relief().relief
    axes.contour(relief.lon, relief.lat, relief, levels=[0], colors=_INK, linewidths=0.7)
    sparse = (slice(1, -1), slice(None, None, 2))
    arrows = axes.quiver(
        lon[::2], lat[1:-1], u[sparse], v[sparse], color=_INK, width=0.0013, scale=300, alpha=0.85
    )
    axes.quiverkey(
        arrows, 0.95, 1.035, 10, "10 m s$^{-1}$", labelpos="W", fontproperties={"size": 9}
    )
    bar = figure.colorbar(
        filled, ax=axes, fraction=0.025, pad=0.015, ticks=np.arange(0, top + 1, 2)
    )
    bar.set_label("wind speed (m s$^{-1}$)")
    bar.outline.set_visible(False)
    axes.set(
        title=f"Mean wind, {month.time.dt.strftime('%B %Y').item()}",
        xlabel="longitude (degrees east)",
        ylabel="latitude (degrees north)",
        xticks=range(60, 380, 60),
        yticks=range(-90, 91, 30),
        ylim=(-90, 90),
        xlim=(20, 380),
        aspect="equal",
    )


def _closed(month: xr.Dataset) -> xr.Dataset:
    """The month with its first meridian repeated at the end, so that the map has no gap."""
    import xarray as xr

    first = month.isel(lon=slice(0, 1))
    first = first.assign_coords(lon=first.lon + 360)
    return xr.concat([month, first], dim="lon", join="outer", combine_attrs="override")


def _draw_costs(axes: Axes, commits: Sequence[Commit], rewrites: Sequence[Rewrite]) -> None:
    from matplotlib.ticker import MaxNLocator

    months = [commit.months for commit in commits]
    written = [commit.cost.bytes_written / 1000 for commit in commits]
    again = [rewrite.cost.bytes_written / 1000 for rewrite in rewrites]
    axes.plot([rewrite.months for rewrite in rewrites], again, "o-", color=_REWRITE, markersize=4.5)
    axes.plot(months, written, "o-", color=_COMMIT, markersize=3)
    for commit in commits:
        if commit.compacted:
            _mark_compaction(axes, commit)
    _label(axes, "writing everything anew (measured at the dots)", again, 0.72, _REWRITE)
    _label(axes, "committing the month", written, 0.72, _COMMIT)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda kilobytes, _: f"{kilobytes:,.10g}")
    axes.set(
        title="Bytes written to add one month",
        xlabel="months in the repository",
        ylabel="written (kB, log scale)",
        ylim=(10, 4000),
    )
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
    axes.margins(x=0.015)
    axes.grid(which="major", axis="y", color="#dde2e7", linewidth=0.8)
    axes.grid(which="minor", axis="y", color="#eef1f4", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _label(axes: Axes, text: str, heights: Sequence[float], below: float, color: str) -> None:
    """Write a curve's label below its start."""
    axes.text(
        0.015,
        heights[0] * below,
        text,
        transform=axes.get_yaxis_transform(),
        va="top",
        color=color,
        fontsize=10,
        fontweight="bold",
    )


def _mark_compaction(axes: Axes, commit: Commit) -> None:
    height = commit.cost.bytes_written / 1000
    axes.plot([commit.months], [height], "o", color=_COMPACTION, markersize=6, zorder=5)
    axes.annotate(
        "this commit also\ncompacted the deltas",
        (commit.months, height),
        xytext=(-10, 18),
        textcoords="offset points",
        ha="right",
        fontsize=9.5,
        color=_COMPACTION,
        arrowprops={"arrowstyle": "-", "color": _COMPACTION, "linewidth": 1},
    )
