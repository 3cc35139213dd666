"""Draws `summary.png`: eleven years of wind, answered without reading a chunk, as in the guide.

Run it with `python docs/images/summary.py`.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt

import zarr_manifests as zm
from zarr_manifests.demo import open_winds


def draw(to: Path) -> None:
    """Draw the extremes of each month, and its mean."""
    winds = open_winds()
    winds["u"].attrs["statistics_weights"] = "lat: cos"
    repo = zm.create("memory://summary")
    zm.write(winds, repo, message="eleven years", encoding={"u": {"chunks": (1, 37, 72)}})
    found = repo.readonly_session().summarize("u", by="time", weights={"lat": "cos"})
    assert found.attrs["chunks_read"] == 0
    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    axes.fill_between(found.time, found["min"], found["max"], color="#a6cee3", label="extremes")
    axes.plot(found.time, found["mean"], color="#1f4e79", label="mean, weighted by area")
    axes.axhline(0, color="0.6", linewidth=0.6, zorder=0)
    axes.margins(x=0)
    axes.set_ylabel("wind to the east, m/s")
    axes.legend(loc="lower left", ncols=2, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(to, dpi=110)


if __name__ == "__main__":
    draw(Path(__file__).with_name("summary.png"))
