"""Pictures by matplotlib: the history, the chunks of an array, and what differs.

Colors can be told apart with any color vision. Each picture has a bounded number of marks, whatever
the size of what it shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from zarr_manifests.errors import plain_text
from zarr_manifests.grid import Coords, IndexArray
from zarr_manifests.picturing import ChunkMap, Folding, axis_name
from zarr_manifests.picturing.graph import GraphRow, about, lane_color, width_of
from zarr_manifests.runtime import need
from zarr_manifests.texts import bytes_text
from zarr_manifests.versions import short_ids

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from matplotlib.colors import Colormap

_SIDE: Final = 96
_MOST_ARRAYS: Final = 6
_MOST_CHARS: Final = 100
_NOTHING: Final[Any] = {"facecolor": "#eceff1", "edgecolor": "#b4bec5", "hatch": "////"}
_OLD: Final = "#8a949c"
_DAY_MS: Final = 86_400_000
_MINUTE_DAYS: Final = 1 / 1440
_LANE_INCHES: Final = 0.22
_TEXT_INCHES: Final = 7.5


def draw_history(rows: Sequence[GraphRow]) -> Axes:
    """Draw the graph of history, newest first, with a line of text for each row."""
    pyplot = _pyplot("ancestry().plot()")
    width = width_of(rows)
    inches = _LANE_INCHES * width + _TEXT_INCHES, 0.29 * len(rows) + 0.6
    _, axes = pyplot.subplots(figsize=inches, layout="constrained")
    text: Any = {"va": "center", "parse_math": False, "fontsize": 9, "in_layout": False}
    short = short_ids(row.commit.id for row in rows)
    for at, row in enumerate(rows):
        for pieces, top in ((row.above, at - 0.5), (row.below, float(at))):
            for a, b in pieces:
                axes.plot([a, b], [top, top + 0.5], color=lane_color(max(a, b)), lw=1.8, zorder=1)
        axes.scatter(row.lane, at, 40, lane_color(row.lane), zorder=2)
        axes.text(width - 0.4, at, plain_text(about(row, short).plain, most=_MOST_CHARS), **text)
    axes.set(xlim=(-0.6, inches[0] / _LANE_INCHES), ylim=(len(rows) - 0.4, -0.6))
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.set_title("History, newest first (times in UTC)", loc="left")
    return axes  # type: ignore[no-any-return]


def draw_chunks(chunks: ChunkMap) -> npt.NDArray[np.object_]:
    """Draw which chunks of an array exist, how large they are, and when they last changed."""
    pyplot = _pyplot("plot_chunks()")
    from matplotlib.ticker import EngFormatter

    folding, there = chunks.folding, chunks.chunks > 0
    wide = folding.shape[1] > 2 * folding.shape[0]
    shape: Any = {"nrows": 2, "figsize": (9, 4.6)} if wide else {"ncols": 2, "figsize": (10.5, 4.4)}
    figure, axes = pyplot.subplots(**shape, layout="constrained", sharex=True, sharey=True)
    mean = chunks.nbytes / np.maximum(chunks.chunks, 1)
    sizes = _mesh(axes[0], folding, np.where(there, mean, np.nan), "viridis")
    if sizes is not None:
        sizes.set_clim(0, float(mean.max()) or 1)
        figure.colorbar(sizes, ax=axes[0], label="in a chunk", format=EngFormatter("B"))
    _draw_changed(figure, axes[1], chunks)
    count, whole = int(chunks.chunks.sum()), int(folding.whole.sum())
    size = bytes_text(int(chunks.nbytes.sum()))
    title = f"{plain_text(chunks.path, most=40)}: {count:,} of {whole:,} chunks, {size}"
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", parse_math=False)
    for one, text in zip(axes, ("mean stored size", "last change"), strict=True):
        one.set_title(text, loc="left", fontsize=10)
        _label_axes(one, folding, chunks.dimensions)
    return np.asarray(axes, np.object_)


def _draw_changed(figure: Any, axes: Axes, chunks: ChunkMap) -> None:
    from matplotlib import dates
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    there, known = chunks.chunks > 0, chunks.changed_ms > 0
    days = np.where(there & known, chunks.changed_ms / _DAY_MS, np.nan)
    old = np.where(there & ~known, 0.0, np.nan)
    patches = [Patch(**_NOTHING, label="no chunk")] if not there.all() else []
    if (there & ~known).any():
        _mesh(axes, chunks.folding, old, ListedColormap([_OLD]))
        since = datetime.fromtimestamp(chunks.since_ms / 1000, UTC)
        patches.append(Patch(facecolor=_OLD, label=f"before {since:%Y-%m-%d}"))
    mesh = _mesh(axes, chunks.folding, days, "cividis")
    if mesh is not None and np.isfinite(days).any():
        first, last = float(np.nanmin(days)), float(np.nanmax(days))
        if first == last:  # one commit: a range, so that the bar has labels
            first, last = first - _MINUTE_DAYS, last + _MINUTE_DAYS
        mesh.set_clim(first, last)
        kinds: Any = dates  # its classes have no types
        ticks = kinds.AutoDateLocator(minticks=3, maxticks=8)
        form = kinds.ConciseDateFormatter(ticks)
        figure.colorbar(mesh, ax=axes, label="last changed (UTC)", ticks=ticks, format=form)
    if patches:
        _explain(axes, patches)


def _explain(axes: Axes, patches: Sequence[Any]) -> None:
    """Say above the picture, at the right, what its patterns mean."""
    place: Any = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderpad": 0.2}
    axes.legend(handles=patches, ncols=2, frameon=False, fontsize=9, **place)


def draw_diff(
    title: str,
    changed: Mapping[str, IndexArray],
    grids: Mapping[str, Coords],
    dimensions: Mapping[str, Sequence[str | None]],
) -> npt.NDArray[np.object_]:
    """Draw which chunks of each array changed; of many arrays, the six with the most of them."""
    pyplot = _pyplot("diff.plot()")
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.patches import Patch

    paths = sorted(changed, key=lambda path: (-len(changed[path]), path))
    shown, more = paths[:_MOST_ARRAYS], len(paths) - _MOST_ARRAYS
    if not shown:
        return np.array([], np.object_)
    columns = min(len(shown), 2)
    lines = -(-len(shown) // columns)
    figure, grid = pyplot.subplots(
        lines,
        columns,
        figsize=(5 * columns + 0.8, 2.9 * lines),
        layout="constrained",
        squeeze=False,
    )
    axes = grid.ravel()
    for one in axes[len(shown) :]:
        one.set_axis_off()
    for one, path in zip(axes, shown, strict=False):
        coords = changed[path]
        folding = Folding.of(grids.get(path, (coords.max(axis=0) + 1).tolist()), _SIDE)
        cells = folding.place(coords)
        percent = np.where(cells > 0, 100 * cells / np.maximum(folding.whole, 1), np.nan)
        mesh = _mesh(one, folding, percent, "viridis_r")
        if mesh is not None:
            mesh.set_clim(0, 100)
        whole = int(folding.whole.sum())
        about = f"{plain_text(path, most=28)}: {len(coords):,} of {whole:,} chunks"
        one.set_title(about, loc="left", fontsize=10, parse_math=False)
        _label_axes(one, folding, dimensions.get(path) or (None,) * len(folding.grid_shape))
    _explain(axes[len(shown[:columns]) - 1], [Patch(**_NOTHING, label="unchanged")])
    colors = ScalarMappable(Normalize(0, 100), "viridis_r")
    figure.colorbar(colors, ax=[*axes], label="changed chunks in a cell (%)")
    title += f"; {more:,} more arrays" if more > 0 else ""
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", parse_math=False)
    return np.asarray(axes[: len(shown)], np.object_)


def _mesh(
    axes: Axes, folding: Folding, values: npt.NDArray[np.float64], colors: str | Colormap
) -> QuadMesh | None:
    """The cells in colors; where there is no number, the pattern of nothing shows."""
    axes.patch.set(**_NOTHING, linewidth=0)
    if not values.size:
        axes.text(0.5, 0.5, "no chunks", ha="center", va="center", transform=axes.transAxes)
        return None
    return axes.pcolormesh(folding.column_edges, folding.row_edges, values, cmap=colors)


def _label_axes(axes: Axes, folding: Folding, dimensions: Sequence[str | None]) -> None:
    from matplotlib.ticker import MaxNLocator

    for axis, side, edges in (
        (folding.axes[0], axes.yaxis, folding.row_edges),
        (folding.axes[1], axes.xaxis, folding.column_edges),
    ):
        name = plain_text(axis_name(dimensions, axis), most=24)
        side.set_label_text(f"{name} (chunks)" if name else "", parse_math=False)
        if len(edges) <= 2:
            side.set_ticks([])
        else:
            side.set_major_locator(MaxNLocator(integer=True))
    if len(folding.row_edges) > 1 and not axes.yaxis_inverted():
        axes.invert_yaxis()


def _pyplot(what: str) -> Any:
    need(what, "plot", "matplotlib")
    from matplotlib import pyplot

    return pyplot
