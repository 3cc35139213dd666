"""The comparison as text, as JSON and as a table."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from runner import MISSED, OURS, Growth, Outcome

_PACKAGES = ("zarr-manifests", "zarr", "icechunk", "obstore", "fsspec", "numpy", "pyspark")

_COLUMNS = (
    "row",
    "ours",
    "peer",
    "its figure",
    "times ours (spread)",
    "processor",
    "target",
    "peak memory: ours, the peer's",
)


def figure_text(value: float, unit: str) -> str:
    """A figure with a unit that suits."""
    if unit.startswith(("B", "x")):
        return f"{value:.2f} {unit}"
    for factor, name in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if value * factor >= 1:
            return f"{value * factor:.3g} {name}{unit.removeprefix('s')}"
    return f"{value * 1e9:.3g} ns{unit.removeprefix('s')}"


def describe(outcome: Outcome, seconds: float) -> str:
    """Some lines about one row, which took so long."""
    row = outcome.row
    how = f"pipeline: {row.pipeline}; durability: {row.durability}; cache: {row.cache}"
    effort = f"rounds: {len(outcome.figures[OURS])}; took {seconds:.0f} s"
    lines = [f"{row.name}: {row.title} ({_sizes(outcome)})", f"  {how}; {effort}"]
    for name, figures in outcome.figures.items():
        low, high = min(f.value for f in figures), max(f.value for f in figures)
        spread = f"{figure_text(low, row.unit)} to {figure_text(high, row.unit)}"
        text = f"  {name:15} {figure_text(outcome.median(name), row.unit):>15}  ({spread})"
        text += f"  peak {memory_text(outcome.peak_bytes(name))}"
        if name == OURS and (limit := row.limits.get("value")) is not None:
            reached = _graded(limit / outcome.median(name))
            text += f", at most {figure_text(limit, row.unit)}: {reached}"
        if name != OURS:
            ratios = outcome.ratios(name)
            text += f"  {outcome.ratio(name):.2f} x ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            if (cpu := outcome.cpu_ratio(name)) is not None:
                text += f", processor {cpu:.2f} x"
            if name in row.due:
                text += f", target {row.due[name]:.3g}: {verdict(outcome, name)}"
        lines.append(text)
        if extras := outcome.extras(name):
            lines.append(f"  {'':15} {_extras(extras)}")
    return "\n".join(lines)


def describe_growth(growth: Growth, outcomes: Sequence[Outcome]) -> str | None:
    """A line about how a figure grows; None if it was not measured."""
    found = growth.found(outcomes)
    if found is None:
        return None
    reached = _graded(growth.most / found)
    return f"{growth.title}: {found:.2f} x, at most {growth.most:g} allowed: {reached}"


def memory_text(peak_bytes: int | None) -> str:
    """Bytes of memory; a dash where there is nothing to compare."""
    return "-" if peak_bytes is None else f"{peak_bytes / 1e6:.0f} MB"


def _sizes(outcome: Outcome) -> str:
    return ", ".join(f"{n.replace('_', ' ')} {value:,}" for n, value in outcome.sizes.items())


def _extras(extras: Mapping[str, float]) -> str:
    texts = []
    for name, value in extras.items():
        if name.startswith("bytes"):
            text = f"{value / 1e6:.2f} MB"
        else:
            text = figure_text(value, "s") if name.startswith("seconds") else f"{value:,.0f}"
        texts.append(f"{name.removeprefix('seconds, ')}: {text}")
    return "; ".join(texts)


def verdict(outcome: Outcome, name: str) -> str:
    """Whether what is due was reached."""
    return _graded(outcome.ratio(name) / outcome.row.due[name])


def _graded(reached: float) -> str:
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
        "processors": os.cpu_count(),
        "python": sys.version.split()[0],
        "packages": versions,
    }


def save(outcomes: Sequence[Outcome], growths: Sequence[Growth], place: Path) -> None:
    """Write all figures as JSON."""
    content = {
        "machine": machine(),
        "rows": [outcome.as_json() for outcome in outcomes],
        "growths": [
            {"title": each.title, "most": each.most, "found": each.found(outcomes)}
            for each in growths
        ],
    }
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def tabulate(outcomes: Sequence[Outcome], growths: Sequence[Growth], place: Path) -> None:
    """Write the comparison as a table in Markdown."""
    known = machine()
    versions = ", ".join(f"{name} {number}" for name, number in known["packages"].items())
    lines = [
        f"Python {known['python']}, {known['processors']} processors; {versions}.",
        "",
        f"| {' | '.join(_COLUMNS)} |",
        "|---" * len(_COLUMNS) + "|",
    ]
    for outcome in outcomes:
        lines += [_line(outcome, name) for name in outcome.figures if name != OURS]
        if list(outcome.figures) == [OURS]:
            ours = figure_text(outcome.median(OURS), outcome.row.unit)
            memory = memory_text(outcome.peak_bytes(OURS))
            lines.append(f"| `{outcome.row.name}` | {ours} | | | | | | {memory} |")
    lines.append("")
    for outcome in outcomes:
        for name in outcome.figures:
            if extras := outcome.extras(name):
                lines.append(f"- `{outcome.row.name}`, {name}: {_extras(extras)}")
    lines += [f"- {text}" for g in growths if (text := describe_growth(g, outcomes)) is not None]
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _line(outcome: Outcome, name: str) -> str:
    row, ratios, cpu = outcome.row, outcome.ratios(name), outcome.cpu_ratio(name)
    due = f"{row.due[name]:.3g}, {verdict(outcome, name)}" if name in row.due else ""
    peaks = f"{memory_text(outcome.peak_bytes(OURS))}, {memory_text(outcome.peak_bytes(name))}"
    cells = [
        f"`{row.name}`",
        figure_text(outcome.median(OURS), row.unit),
        name,
        figure_text(outcome.median(name), row.unit),
        f"**{outcome.ratio(name):.2f}** ({ratios[0]:.2f} to {ratios[-1]:.2f})",
        "" if cpu is None else f"{cpu:.2f}",
        due,
        peaks,
    ]
    return f"| {' | '.join(cells)} |"
