"""HTML for notebooks: facts, tables and parts that fold, in the colors of the page around them.

Text inherits the color of the page, and everything else takes what JupyterLab, VS Code and themes
of documentation define, or a tone that can be read on white and on black. A white page under a dark
desktop stays readable that way. Invariant: every value is escaped where it goes into HTML.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from html import escape
from itertools import islice
from typing import Any, Final

from zarr_manifests.plain import plain_text
from zarr_manifests.texts import bytes_text, time_text

__all__ = ["cell", "facts", "folded", "html_text", "page", "report", "size_text", "table"]

_MOST_ROWS: Final = 200
_OPEN_ROWS: Final = 12
_MOST_CHARS: Final = 300
_SHOWN: Final = 4

_STYLE: Final = (
    "<style>"
    ".zm{--zm-line:var(--jp-border-color2,var(--vscode-editorWidget-border,rgba(128,128,128,.4)));"
    "--zm-chip:var(--jp-layout-color3,var(--vscode-badge-background,rgba(128,128,128,.25)));"
    "--zm-chip-text:var(--jp-content-font-color0,var(--vscode-badge-foreground,inherit));"
    "font-size:13px;line-height:1.5;max-width:72em}"
    # Themes of documentation draw boxes around what folds.
    ".zm.zm details{border:none;box-shadow:none;background:none;font-size:inherit;margin:0;"
    "padding:0}"
    ".zm.zm summary{cursor:pointer;display:list-item;background:none;border:none;margin:0;"
    "padding:0;font-weight:normal;min-height:0}"
    ".zm.zm summary::before,.zm.zm summary::after{display:none}"
    ".zm .zm-title{font-weight:600;border-bottom:1px solid var(--zm-line);margin-bottom:4px}"
    ".zm .zm-dim{opacity:.7}"
    ".zm .zm-chip{background:var(--zm-chip);color:var(--zm-chip-text);border-radius:3px;"
    "padding:0 5px;margin-left:6px}"
    ".zm.zm details.zm-part{margin:2px 0 2px 4px}"
    ".zm table.zm-table{border-collapse:collapse;margin:0 0 4px 16px;border:none;font-size:13px}"
    ".zm table.zm-table td,.zm table.zm-table th{text-align:left;vertical-align:top;border:none;"
    "padding:1px 18px 1px 0;white-space:pre-wrap;background:none;max-width:60em}"
    ".zm table.zm-table th{font-weight:600;border-bottom:1px solid var(--zm-line)}"
    ".zm table.zm-table tr{background:none}"
    ".zm table.zm-mono td{font-family:var(--jp-code-font-family,monospace)}"
    ".zm .zm-row{display:flex;overflow:hidden}"
    ".zm .zm-row svg{flex:none;overflow:visible;margin:0}"
    ".zm .zm-row details{flex:1;min-width:0;padding-left:8px}"
    ".zm .zm-row summary{line-height:24px;white-space:nowrap;overflow:hidden;"
    "text-overflow:ellipsis}"
    "</style>"
)


def page(title: str, *parts: str) -> str:
    """What a notebook shows of a value: a title, and parts that are HTML already."""
    inner = "".join(parts)
    return f'{_STYLE}<div class="zm"><div class="zm-title">{html_text(title)}</div>{inner}</div>'


def facts(lines: Iterable[tuple[str, str]]) -> str:
    """A table of names and values."""
    rows = "".join(
        f'<tr><td class="zm-dim">{html_text(name)}</td><td>{html_text(value)}</td></tr>'
        for name, value in lines
    )
    return f'<table class="zm-table"><tbody>{rows}</tbody></table>' if rows else ""


def table(
    lines: Sequence[Sequence[str]],
    header: Sequence[str] = (),
    *,
    mono: bool = False,
    most: int = _MOST_ROWS,
) -> str:
    """A table of the first lines of text, which says how many more there are."""
    if not lines:
        return ""
    head = "".join(f"<th>{html_text(name)}</th>" for name in header)
    head = f"<thead><tr>{head}</tr></thead>" if head else ""
    body = "".join(
        f"<tr>{''.join(f'<td>{html_text(text)}</td>' for text in line)}</tr>"
        for line in lines[:most]
    )
    kind = "zm-table zm-mono" if mono else "zm-table"
    return f'<table class="{kind}">{head}<tbody>{body}</tbody></table>{_more(lines, most)}'


def folded(title: str, inner: str, *, is_open: bool = False) -> str:
    """A part that the reader opens and closes; `inner` is HTML already."""
    shown = " open" if is_open else ""
    return (
        f'<details class="zm-part"{shown}><summary>{html_text(title)}</summary>{inner}</details>'
        if inner
        else ""
    )


def report(value: Any) -> str:
    """What a notebook shows of a value of fields: single ones as facts, collections folded.

    Classes take it as their `_repr_html_`.

    Examples
    --------
    >>> from zarr_manifests.reports import Amount, ArrayUsage
    >>> "2 x 3" in ArrayUsage("/a", Amount(1, 8), Amount(1, 8), (2, 3))._repr_html_()
    True
    """
    single: list[tuple[str, str]] = []
    parts: list[str] = []
    for name, found in _fields(value):
        if _is_collection(found):
            parts.append(_part(name, found))
        else:
            single.append((_words(name), cell(name, found)))
    inner = facts(single) + "".join(parts)
    return page(type(value).__name__, inner or '<div class="zm-dim">nothing</div>')


def cell(name: str, value: Any) -> str:
    """A value as text, short enough for a table; numbers of bytes say also how much that is."""
    if value is None:
        return "none"
    if hasattr(value, "tolist") and not value.ndim:  # a number of NumPy
        value = value.tolist()
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return size_text(value) if "bytes" in name else f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, datetime):
        return time_text(value)
    if isinstance(value, tuple) and value and all(type(one) is int for one in value):
        return " x ".join(f"{one:,}" for one in value)
    if hasattr(value, "tolist"):  # coordinates
        rows = value[:_SHOWN].tolist()
        shown = ", ".join(str(tuple(row) if isinstance(row, list) else row) for row in rows)
        return f"{len(value):,}: {shown}{', ...' if len(value) > _SHOWN else ''}"
    if isinstance(value, Mapping):
        return _cut(", ".join(f"{key}: {cell(str(key), one)}" for key, one in value.items()))
    if isinstance(value, tuple | list):
        return _cut(", ".join(cell(name, one) for one in value))
    return _cut(str(value))


def html_text(value: str) -> str:
    r"""Any text as HTML that shows it: without tags, and with control characters written out.

    Examples
    --------
    >>> from zarr_manifests.markup import html_text
    >>> html_text("<b>\x1b[2J")
    '&lt;b&gt;\\x1b[2J'
    """
    return escape(plain_text(value))


def size_text(nbytes: int) -> str:
    """A number of bytes, and in larger units how much that is.

    Examples
    --------
    >>> from zarr_manifests.markup import size_text
    >>> size_text(999), size_text(1_234_567)
    ('999 bytes', '1,234,567 bytes (1.23 MB)')
    """
    plain = f"{nbytes:,} bytes"
    return f"{plain} ({bytes_text(nbytes)})" if nbytes >= 1000 else plain


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    """Its fields that `repr` shows, then its properties that are no arrays."""
    if dataclasses.is_dataclass(value):
        shown = (field.name for field in dataclasses.fields(value) if field.repr)
        yield from ((name, getattr(value, name)) for name in shown)
    for name, found in vars(type(value)).items():
        if isinstance(found, property) and not name.startswith("_") and name != "id":
            kind = str(getattr(found.fget, "__annotations__", {}).get("return", ""))
            if "Array" not in kind:
                yield name, getattr(value, name)


def _is_collection(value: Any) -> bool:
    if isinstance(value, Mapping):
        return True
    shape = isinstance(value, tuple) and value and all(isinstance(n, int | None) for n in value)
    return isinstance(value, tuple) and not shape


def _part(name: str, values: Collection[Any]) -> str:
    """A collection as a part that folds; open if it is short."""
    title = f"{_words(name)} ({len(values):,})"
    short = len(values) <= _OPEN_ROWS
    if isinstance(values, Mapping):
        pairs = [(str(key), cell(str(key), one)) for key, one in _first(values.items())]
        return folded(title, table(pairs) + _more(values), is_open=short)
    first = [*_first(values)]
    if first and dataclasses.is_dataclass(first[0]) and type(first[0]).__str__ is object.__str__:
        named = [dict(_fields(one)) for one in first]
        header = [_words(key) for key in named[0]]
        lines = [[cell(key, one) for key, one in each.items()] for each in named]
        return folded(title, table(lines, header) + _more(values), is_open=short)
    return folded(title, table([[cell(name, o)] for o in first]) + _more(values), is_open=short)


def _first(values: Iterable[Any]) -> Iterator[Any]:
    return islice(values, _MOST_ROWS)


def _more(values: Collection[Any], most: int = _MOST_ROWS) -> str:
    left = len(values) - most
    return f'<div class="zm-dim">... and {left:,} more</div>' if left > 0 else ""


def _words(name: str) -> str:
    return name.replace("_", " ").replace("nbytes", "bytes")


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARS else f"{text[: _MOST_CHARS - 1]}…"
