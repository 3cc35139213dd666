"""The comparison as text, as JSON and as a picture."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from runner import MISSED, OURS, Outcome

_PACKAGES = ("zarr-manifests", "zarr", "icechunk", "obstore", "fsspec", "numpy", "pyspark")


def figure_text(value: float, unit: str) -> str:
    """A figure with a unit that suits."""
    if unit.startswith("B"):
        return f"{value:.2f} {unit}"
    for factor, name in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if value * factor >= 1:
            return f"{value * factor:.3g} {name}{unit.removeprefix('s')}"
    return f"{value * 1e9:.3g} ns{unit.removeprefix('s')}"


def describe(outcome: Outcome) -> str:
    """Some lines about one row."""
    row = outcome.row
    sizes = ", ".join(f"{name} {value:,}" for name, value in outcome.sizes.items())
    lines = [
        f"{row.name}: {row.title} ({sizes})",
        f"  pipeline {row.pipeline}; {row.durability}; {row.cache}",
    ]
    for name, figures in outcome.figures.items():
        low, high = min(f.value for f in figures), max(f.value for f in figures)
        spread = f"{figure_text(low, row.unit)} to {figure_text(high, row.unit)}"
        text = f"  {name:15} {figure_text(outcome.median(name), row.unit):>14}  ({spread})"
        peak = outcome.peak_bytes(name)
        text += f"  {peak / 1e6:7.0f} MB"
        if name != OURS:
            ratios = outcome.ratios(name)
            text += f"  {outcome.ratio(name):6.2f} x ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            if (cpu := outcome.cpu_ratio(name)) is not None:
                text += f", processor {cpu:.2f} x"
            if name in row.due:
                text += f", due {row.due[name]:g}: {_verdict(outcome, name)}"
        lines.append(text)
    return "\n".join(lines)


def _verdict(outcome: Outcome, name: str) -> str:
    reached = outcome.ratio(name) / outcome.row.due[name]
    return "reached" if reached >= 1 else "MISSED" if reached < MISSED else "not reached"


def machine() -> dict[str, Any]:
    """What it was measured on."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "python": sys.version.split()[0],
        "packages": versions,
    }


def save(outcomes: Sequence[Outcome], place: Path) -> None:
    """Write all figures as JSON."""
    content = {"machine": machine(), "rows": [outcome.as_json() for outcome in outcomes]}
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def draw(outcomes: Sequence[Outcome], place: Path) -> None:
    """Draw the ratios: a dot for each round's, a bar for the middle one, a mark for what is due."""
    from matplotlib.figure import Figure as Canvas

    pairs = [(each, peer) for each in outcomes for peer in each.figures if peer != OURS]
    if not pairs:
        return
    canvas = Canvas(figsize=(9, 0.34 * len(pairs) + 1.2), layout="constrained")
    axes = canvas.subplots()
    peers = list(dict.fromkeys(peer for _, peer in pairs))
    for place_on_axis, (outcome, peer) in enumerate(pairs):
        ratios, colour = outcome.ratios(peer), f"C{peers.index(peer)}"
        axes.barh(place_on_axis, outcome.ratio(peer) - 1, left=1, color=colour, alpha=0.55)
        axes.plot(ratios, [place_on_axis] * len(ratios), ".", color=colour, markersize=4)
        if peer in outcome.row.due:
            axes.plot([outcome.row.due[peer]], [place_on_axis], "|k", markersize=12)
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(
        range(len(pairs)), [f"{each.row.title} - {peer}" for each, peer in pairs], fontsize=7
    )
    axes.invert_yaxis()
    axes.set_xlabel("times as much time (or bytes) as zarr_manifests takes; | what is due")
    axes.grid(axis="x", alpha=0.3)
    place.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(place, dpi=120, metadata={"Software": None})
