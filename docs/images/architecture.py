"""Draw the rooms of the package: `python docs/images/architecture.py`.

The order is that of the import contracts in `pyproject.toml`, the words are the first sentences of
the packages and modules themselves.
"""

from __future__ import annotations

import ast
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Final
from xml.sax.saxutils import escape

ROOT: Final = Path(__file__).parents[2]
PICTURE: Final = Path(__file__).with_name("architecture.svg")

_WIDTH, _GAP, _PAD = 1120, 10, 12
_LINE_PX, _TITLE_PX, _CHAR_PX = 15, 20, 5.9
_FILLS: Final = ("#eef2f5", "#dbe7ee", "#ffffff")
_INK, _GREY, _EDGE = "#22303c", "#5b6b78", "#9fb1bf"
_OPENED: Final = {"engine": "rooms", "planning": "planning"}
"""Packages whose insides are drawn, and the contract that orders them."""


@dataclass(frozen=True, slots=True)
class Room:
    """A box of the picture: its sentence, and the rows of rooms in it, from the top down."""

    name: str
    sentence: str
    rows: tuple[tuple[Room, ...], ...] = ()


def contracts() -> dict[str, list[list[str]]]:
    """The names in each layer, from the top down, by the id of the contract."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        found = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    return {
        contract["id"]: [re.findall(r"\w+", layer) for layer in contract["layers"]]
        for contract in found
        if contract["type"] == "layers"
    }


def rooms() -> list[list[Room]]:
    """The rows of the whole package, from the top down."""
    orders = contracts()
    return [
        [_room("zarr_manifests", name, orders) for name in layer if name != "__main__"]
        for layer in orders["layers"]
        if layer != ["__main__"]
    ]


def _room(parent: str, name: str, orders: dict[str, list[list[str]]]) -> Room:
    place = ROOT / parent / name
    source = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    text = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    sentence = re.split(r"(?<=\.)\s", " ".join(text.split()))[0]
    inner = orders[_OPENED[name]] if name in _OPENED else []
    rows = tuple(tuple(_room(f"{parent}/{name}", one, orders) for one in row) for row in inner)
    return Room(name, sentence, rows)


def _height(room: Room, width: float) -> float:
    text = len(wrap(room.sentence, int((width - 2 * _PAD) / _CHAR_PX))) * _LINE_PX
    inner = sum(_row_height(row, width - 2 * _PAD) + _GAP for row in room.rows)
    return _PAD + _TITLE_PX + text + inner + _PAD / 2


def _row_height(row: tuple[Room, ...] | list[Room], width: float) -> float:
    each = (width - _GAP * (len(row) - 1)) / len(row)
    return max(_height(room, each) for room in row)


def _draw(room: Room, x: float, y: float, width: float, height: float, depth: int) -> list[str]:
    shape = f'x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="5"'
    lines = [f'<rect {shape} fill="{_FILLS[depth]}" stroke="{_EDGE}"/>']
    at = y + _PAD + 6
    lines.append(f'<text x="{x + _PAD:.0f}" y="{at:.0f}" class="name">{escape(room.name)}</text>')
    for text in wrap(room.sentence, int((width - 2 * _PAD) / _CHAR_PX)):
        at += _LINE_PX
        lines.append(f'<text x="{x + _PAD:.0f}" y="{at:.0f}">{escape(text)}</text>')
    return lines + _draw_rows(room.rows, x + _PAD, at + _GAP, width - 2 * _PAD, depth + 1)[0]


def _draw_rows(
    rows: tuple[tuple[Room, ...], ...] | list[list[Room]],
    x: float,
    y: float,
    width: float,
    depth: int,
) -> tuple[list[str], float]:
    lines: list[str] = []
    for row in rows:
        height = _row_height(row, width)
        each = (width - _GAP * (len(row) - 1)) / len(row)
        for number, room in enumerate(row):
            lines += _draw(room, x + number * (each + _GAP), y, each, height, depth)
        y += height + _GAP
    return lines, y


def drawn() -> str:
    """The picture, as SVG."""
    lines, end = _draw_rows(rooms(), _GAP, _GAP, _WIDTH - 2 * _GAP, 0)
    style = (
        f"text{{font:11px sans-serif;fill:{_GREY}}}.name{{font:bold 14px sans-serif;fill:{_INK}}}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{end:.0f}">'
    back = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head, f"<style>{style}</style>", back, *lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(drawn(), encoding="utf-8")
