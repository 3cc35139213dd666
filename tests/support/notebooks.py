"""Runs the cells of a notebook, and tells whether the pictures they make are there.

`python tests/support/notebooks.py NOTEBOOK` does so in a process of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot


def code_of(notebook: Path) -> list[str]:
    """The cells of code, of a notebook that is kept without outputs."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells), "outputs are not kept: clear them"
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def run_notebook(notebook: Path) -> None:
    """Run all cells; the last one must make a picture, and no picture may be blank."""
    mpl.use("Agg")
    namespace: dict[str, Any] = {"__name__": "notebook"}
    code = code_of(notebook)
    assert code, f"{notebook.name} has no code"
    try:
        for number, source in enumerate(code):
            before = set(pyplot.get_fignums())
            exec(compile(source, f"{notebook.name}[{number}]", "exec"), namespace)  # noqa: S102
            made = [n for n in pyplot.get_fignums() if n not in before]
            blank = [n for n in made if is_blank(pyplot.figure(n))]
            assert not blank, f"{notebook.name}[{number}]: a picture is all one color"
        assert made, f"{notebook.name} does not end in a picture"
    finally:
        pyplot.close("all")


def is_blank(figure: Any) -> bool:
    """Whether a picture has no axes, or the inside of any of them is all one color."""
    figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba())[::-1, :, :3]  # from below, as extents count
    for axes in figure.axes:
        left, bottom, right, top = np.round(axes.get_window_extent().extents).astype(int)
        inside = pixels[bottom + 3 : top - 3, left + 3 : right - 3].reshape(-1, 3)
        if len(np.unique(inside, axis=0)) < 2:
            return True
    return not figure.axes


if __name__ == "__main__":
    run_notebook(Path(sys.argv[1]))
