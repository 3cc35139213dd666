"""Draw what three chunk shapes cost to read: `python docs/images/chunk_shapes.py`."""

from __future__ import annotations

from math import ceil, prod
from pathlib import Path
from typing import Final

SHAPE: Final = (8760, 721, 1440)
ITEM_BYTES: Final = 2
LAYOUTS: Final = (
    ("maps", (1, 721, 1440)),
    ("both", (96, 104, 104)),
    ("series", (8760, 11, 11)),
)
QUESTIONS: Final = (
    ("one map", (1, 721, 1440)),
    ("a month of Europe", (720, 160, 280)),
    ("a year at one place", (8760, 1, 1)),
)
_COLORS: Final = ("#1f77a4", "#2f9c7f", "#b58b2b")
_WIDTH: Final = 1080
_STYLE: Final = """
text{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;font-size:14px;fill:#22303c}
.end{text-anchor:end} .bold{font-weight:600} .small{font-size:12px;fill:#55646f}
"""


def read_bytes(chunk: tuple[int, ...], box: tuple[int, ...]) -> int:
    """The bytes of all chunks that a box touches, if it begins where a chunk does."""
    counts = [ceil(width / size) for width, size in zip(box, chunk, strict=True)]
    return prod(counts) * prod(chunk) * ITEM_BYTES


def _said(count: int) -> str:
    units = (("GB", 1e9, 1), ("MB", 1e6, 0), ("kB", 1e3, 0))
    name, size, digits = next(unit for unit in units if count >= unit[1])
    return f"{count / size:.{digits}f} {name}"


def picture() -> str:
    """The picture as SVG: a bar of bytes for each shape and question."""
    total = prod(SHAPE) * ITEM_BYTES
    rows = []
    top = 44
    for question, box in QUESTIONS:
        rows.append(f'<text class="bold" x="20" y="{top + 13}">{question}</text>')
        rows.append(
            f'<text class="small" x="20" y="{top + 31}">{_said(prod(box) * ITEM_BYTES)} asked for</text>'
        )
        for (name, chunk), color in zip(LAYOUTS, _COLORS, strict=True):
            count = min(read_bytes(chunk, box), total)
            width = max(2.0, 520 * (count / total) ** 0.25)
            shape = " \u00d7 ".join(map(str, chunk))
            rows += [
                f'<text class="end" x="400" y="{top + 14}">{name}  {shape}</text>',
                f'<rect x="412" y="{top}" width="{width:.1f}" height="18" rx="3" fill="{color}"/>',
                f'<text x="{420 + width:.1f}" y="{top + 14}">{_said(count)}</text>',
            ]
            top += 25
        top += 16
    title = "Read to answer a question, by the shape of the chunks"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top + 14}" role="img" aria-label="{title}">',
            f'<style>{_STYLE}</style><rect width="{_WIDTH}" height="{top + 14}" rx="10" fill="#fff"/>',
            f'<text class="bold" x="412" y="26">{title}</text>',
            *rows,
            f'<text class="small" x="412" y="{top}">the length of a bar is the fourth root of its bytes</text>',
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture(), encoding="utf-8")
