"""Draws `pipeline.png`: the mean wind speed by month and latitude, as the guide computes it.

Run it with `python docs/images/pipeline.py`.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from zarr_manifests.demo import open_winds


def draw(to: Path) -> None:
    """Draw the mean over all years and longitudes."""
    winds = open_winds().astype("float64")
    speed = np.sqrt(winds.u**2 + winds.v**2).groupby("time.month").mean(("time", "lon"))
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    speed.plot(ax=axes, x="month", cmap="viridis", cbar_kwargs={"label": "mean speed, m/s"})
    axes.set_xticks(range(1, 13))
    axes.set_xlabel("month")
    axes.set_ylabel("latitude")
    figure.savefig(to, dpi=110)


if __name__ == "__main__":
    draw(Path(__file__).with_name("pipeline.png"))
