"""Draw the six floors of the package: `python docs/images/architecture.py`.

The rooms on each floor are those of the contract `floors` in `pyproject.toml`.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from textwrap import wrap
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PICTURE: Final = Path(__file__).with_name("architecture.svg")
FLOORS: Final = {
    "entrances": "what people use: xarray, Spark, the server, the command line",
    "facades": "repositories, sessions and the Zarr store; reading and writing in bulk",
    "engine": "reads and changes snapshots, commits, compacts, collects",
    "bytes": "objects in storage, and chunks in files of others",
    "decisions": "plans and formats as values: no I/O, no clock",
    "values": "errors, configuration, keys and grids",
}
_WIDTH, _PAD, _LINE, _CHARS = 900, 14, 18, 98
_FILLS: Final = ("#f4e9dc", "#eef2f5", "#dbe7ee", "#dfeee4", "#f3ecf4", "#f2f2ee")


def floors() -> list[list[str]]:
    """The rooms on each floor, from the top down."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (found,) = (contract["layers"] for contract in contracts if contract["id"] == "floors")
    return [[name for name in re.findall(r"\w+", layer) if name[0] != "_"] for layer in found]


def engine_modules() -> list[str]:
    """The modules of the engine."""
    found = (path.stem for path in (ROOT / "zarr_manifests/engine").rglob("*.py"))
    return sorted(name for name in found if name != "__init__")


def drawn() -> str:
    """The picture, as SVG."""
    lines, y = [], _PAD
    for (title, sentence), names, fill in zip(FLOORS.items(), floors(), _FILLS, strict=True):
        listed = engine_modules() if names == ["engine"] else sorted(names)
        rows = wrap("   ".join(listed), _CHARS, break_on_hyphens=False)
        height = _PAD + _LINE * (1 + len(rows)) + _PAD // 2
        lines.append(
            f'<rect x="{_PAD}" y="{y}" width="{_WIDTH - 2 * _PAD}" height="{height}" '
            f'rx="6" fill="{fill}" stroke="#9fb1bf"/>'
        )
        at = y + _PAD + 6
        lines.append(
            f'<text x="{2 * _PAD}" y="{at}"><tspan class="name">{title}</tspan>'
            f'<tspan dx="12">{sentence}</tspan></text>'
        )
        for number, row in enumerate(rows, 1):
            text = row.replace("   ", "&#160;&#160;&#160;")
            lines.append(
                f'<text x="{2 * _PAD}" y="{at + number * _LINE}" class="rooms">{text}</text>'
            )
        y += height + _PAD // 2
    style = (
        "text{font:13px sans-serif;fill:#5b6b78}.name{font:bold 15px sans-serif;fill:#22303c}"
        ".rooms{font:13px monospace;fill:#22303c}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y + _PAD // 2}">'
    back = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head, f"<style>{style}</style>", back, *lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(drawn(), encoding="utf-8")
