"""Draw the chart of the README from the table of docs/benchmarks.md: `python docs/images/ratios.py`."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Final

TABLE: Final = Path(__file__).parents[1] / "benchmarks.md"

_ROWS: Final = (
    ("append-1m", "icechunk", "append 10 chunks to a million"),
    ("virtual-1m", "icechunk", "commit a million references"),
    ("small-read-bulk", "icechunk", "read 4 KB chunks"),
    ("contending-2000", "icechunk", "2,000 commits of eight processes"),
    ("open-20ms-200", "icechunk", "open 200 arrays, 20 ms away"),
    ("large-write-durable", "icechunk", "write 1 MB chunks to the disk"),
    ("history-20ms", "icechunk", "list 1,000 commits, 20 ms away"),
    ("large-read", "LocalStore", "read 1 MB chunks, LocalStore"),
    ("large-write", "icechunk", "write 1 MB chunks, theirs not yet on the disk"),
)
"""Row of the table, peer, and what the row does."""

_WIDTH: Final = 1080
_ROW: Final = 30
_ZERO: Final = 540
_DECADE: Final = 210
_STYLE: Final = """
text{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;font-size:14px;fill:#22303c}
.end{text-anchor:end} .middle{text-anchor:middle} .bold{font-weight:600} .small{font-size:12px;fill:#55646f}
"""


def ratios() -> list[tuple[str, float]]:
    """What each row does, and how many times our time the peer takes."""
    lines = re.findall(r"^\| .*\|$", TABLE.read_text(encoding="utf-8"), re.MULTILINE)
    header = next(line for line in lines if line.startswith("| row | ours |"))
    columns = [cell.strip() for cell in header.split("|")]
    cells = [line.split("|") for line in lines if line.startswith("| `")]
    by_row = {row[1].strip(" `"): row for row in cells if len(row) == len(columns)}
    return [(what, float(by_row[row][columns.index(peer)])) for row, peer, what in _ROWS]


def picture() -> str:
    """The chart as SVG."""
    found = ratios()
    height = 64 + _ROW * len(found)
    title = "How many times our time icechunk takes (LocalStore where named)"
    rows = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{title}">',
        f'<style>{_STYLE}</style><rect width="{_WIDTH}" height="{height}" rx="10" fill="#fff"/>',
        f'<text class="bold" x="20" y="28">{title}</text>',
    ]
    for at, (what, ratio) in enumerate(found):
        top = 46 + _ROW * at
        end = _ZERO + _DECADE * math.log10(ratio)
        left, width = min(_ZERO, end), abs(end - _ZERO)
        color = "#1f77a4" if ratio >= 1 else "#d1495b"
        label = "" if ratio >= 1 else ' class="end"'
        rows += [
            f'<text class="end" x="{_ZERO - 105}" y="{top + 15}">{what}</text>',
            f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="20" rx="3" fill="{color}"/>',
            f'<text{label} x="{end + (8 if ratio >= 1 else -8):.1f}" y="{top + 15}">{ratio:g}</text>',
        ]
    bottom = 46 + _ROW * len(found)
    rows += [
        f'<path d="M{_ZERO} 40V{bottom}" stroke="#22303c" stroke-width="1.5"/>',
        f'<text class="small" x="{_ZERO + 8}" y="{bottom + 10}">right of the line this store is faster; the scale is logarithmic</text>',
        "</svg>",
    ]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture(), encoding="utf-8")
