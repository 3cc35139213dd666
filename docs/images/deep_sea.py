"""Draws `deep_sea.png`: the chunks that are read to find the sea deeper than 6000 m.

Run it with `python docs/images/deep_sea.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle

import zarr_manifests as zm
from zarr_manifests.demo import open_relief

CHUNK: Final = 10
WHERE: Final = "relief < -6000"


def draw(to: Path) -> None:
    """Draw the relief, the chunks that may match, and the cells that do."""
    relief = open_relief().relief
    repository = zm.create("memory://deep-sea")
    how = {"relief": {"chunks": (CHUNK, CHUNK)}}
    zm.write(relief.to_dataset(), repository, message="heights", encoding=how)
    found = repository.readonly_session().chunks_where("relief", WHERE)
    # The last latitude is the northernmost.
    lat, lon = np.arange(relief.shape[0]), np.arange(relief.shape[1])
    figure, axes = plt.subplots(figsize=(9, 4.9), layout="constrained")
    depths = axes.pcolormesh(lon, lat, relief, cmap="Blues_r", vmin=-8000, vmax=0, rasterized=True)
    land = np.ma.masked_less(relief.values, 0)
    axes.pcolormesh(lon, lat, land, cmap=mpl.colors.ListedColormap(["#d9d4c5"]), rasterized=True)
    deep = np.ma.masked_greater_equal(relief.values, -6000)
    axes.pcolormesh(lon, lat, deep, cmap=mpl.colors.ListedColormap(["#d62728"]), rasterized=True)
    for rows, columns in found.cells:
        corner = columns.start - 0.5, rows.start - 0.5
        size = columns.stop - columns.start, rows.stop - rows.start
        axes.add_patch(Rectangle(corner, *size, fill=False, edgecolor="black", linewidth=1.2))
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_aspect("equal")
    axes.set_title(
        f"{WHERE}: {found.selected} of {found.chunks} chunks are read (framed); "
        "red cells are deeper than 6000 m",
        fontsize=10,
    )
    figure.colorbar(depths, label="m", shrink=0.8)
    figure.savefig(to, dpi=110)


if __name__ == "__main__":
    draw(Path(__file__).with_name("deep_sea.png"))
