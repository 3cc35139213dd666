"""Draw the picture of the README: `python docs/images/idea.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_WIDTH: Final = 1080
_HEIGHT: Final = 470
_STYLE: Final = """
text{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;font-size:15px;fill:#22303c}
.small{font-size:13px;fill:#55646f} .bold{font-weight:600} .middle{text-anchor:middle}
.line{stroke:#55646f;stroke-width:2;fill:none} .ref{stroke-width:1.6;fill:none;stroke-opacity:.85}
.shared{stroke:#9fb1bf;stroke-width:1.6;fill:none;stroke-dasharray:5 4}
"""
_COLORS: Final = ("#1f77a4", "#2f9c7f", "#b58b2b", "#d1495b")
_DAYS: Final = ("1 March", "2 March", "3 March", "4 March")
_LEFT: Final = (230, 460, 690, 920)
_PLACES: Final = (("netCDF file", 345), ("repository", 575), ("bucket", 805))
_CHUNKS: Final = ((0, 0), (1, 0), (1, 1), (2, 0))
"""Of each day: its place, and which of its squares there."""


def _commits() -> list[str]:
    parts = [f'<path class="line" d="M{_LEFT[0]} 70H{_LEFT[-1]}"/>']
    for left, day, color in zip(_LEFT, _DAYS, _COLORS, strict=True):
        parts += [
            f'<circle cx="{left}" cy="70" r="13" fill="{color}"/>',
            f'<text class="middle" x="{left}" y="105">{day}</text>',
        ]
    for left, name, kind in ((_LEFT[1], "v1", "tag"), (_LEFT[3], "main", "branch")):
        width = 28 + 8 * len(f"{kind} {name}")
        parts += [
            f'<rect x="{left - width / 2}" y="18" width="{width}" height="26" rx="13" fill="#eef2f5" stroke="#9fb1bf"/>',
            f'<text class="middle" x="{left}" y="36">{kind} <tspan class="bold">{name}</tspan></text>',
        ]
    return parts


def _manifests() -> list[str]:
    parts = []
    for at, (left, color) in enumerate(zip(_LEFT, _COLORS, strict=True)):
        parts += [
            f'<path class="line" d="M{left} 112V150"/>',
            f'<rect x="{left - 60}" y="152" width="120" height="54" rx="6" fill="#fff" stroke="#55646f"/>',
        ]
        for day in range(at + 1):
            fill = color if day == at else "#e3e8ec"
            parts.append(
                f'<rect x="{left - 52 + 27 * day}" y="164" width="23" height="30" rx="3" fill="{fill}"/>'
            )
        if at:
            before = _LEFT[at - 1]
            parts.append(
                f'<path class="shared" marker-end="url(#grey)" d="M{left - 62} 179H{before + 66}"/>'
            )
    return parts


def _chunks() -> list[str]:
    parts = []
    for name, middle in _PLACES:
        parts += [
            f'<rect x="{middle - 85}" y="318" width="170" height="82" rx="8" fill="#f6f8f9" stroke="#9fb1bf"/>',
            f'<text class="middle" x="{middle}" y="388">{name}</text>',
        ]
    for at, (place, square) in enumerate(_CHUNKS):
        shared = sum(1 for other, _ in _CHUNKS if other == place)
        x = _PLACES[place][1] + (square - (shared - 1) / 2) * 64
        color = _COLORS[at]
        start = _LEFT[at] - 52 + 27 * at + 11
        parts += [
            f'<rect x="{x - 22}" y="330" width="44" height="36" rx="4" fill="{color}"/>',
            f'<path class="ref" stroke="{color}" marker-end="url(#c{at})" d="M{start} 197C{start} 265 {x} 255 {x} 325"/>',
        ]
    return parts


def picture() -> str:
    """The picture as SVG."""
    heads = [("grey", "#9fb1bf"), *((f"c{at}", color) for at, color in enumerate(_COLORS))]
    markers = "".join(
        f'<marker id="{name}" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{color}"/></marker>'
        for name, color in heads
    )
    labels = [
        f'<text class="bold" x="20" y="{y}">{name}</text><text class="small" x="20" y="{y + 20}">{what}</text>'
        for y, name, what in (
            (68, "Commits", "one each day"),
            (176, "Manifests", "where chunks are"),
            (350, "Chunks", "bytes of the array"),
        )
    ]
    caption = "A commit writes what changed; every version stays readable."
    rows = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{caption}">',
        f"<style>{_STYLE}</style><defs>{markers}</defs>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="10" fill="#fff"/>',
        *labels,
        *_commits(),
        *_manifests(),
        *_chunks(),
        f'<text class="middle bold" x="{_WIDTH / 2}" y="444">{caption}</text>',
        "</svg>",
    ]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture(), encoding="utf-8")
