"""What terminals and notebooks show of a value: facts, tables and trees, drawn by rich.

Names, messages and metadata are anybody's: control characters are escaped where they are drawn.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import fields
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from zarr_manifests.errors import plain_text
from zarr_manifests.texts import bytes_text, parts_of, time_text

_MOST_ROWS: Final = 200
_MOST_CHARS: Final = 300
_WIDTH: Final = 160
_SHOWN: Final = 4
_HTML: Final = (
    '<pre style="font-family:monospace;line-height:1.4;overflow:auto;max-height:40em;'
    'white-space:pre">{code}</pre>'
)


class PlainConsole(Console):
    """A console that draws any text literally, in tables too."""

    def __init__(self, **options: Any) -> None:
        # In a notebook, a console shows what it prints, besides what the value shows there.
        plain: Any = {"highlight": False, "markup": False, "emoji": False, "force_jupyter": False}
        super().__init__(**plain, **options)

    def render_str(self, text: str, *args: Any, **options: Any) -> Text:
        """The text with control characters escaped."""
        return super().render_str(plain_text(text, lines=True), *args, **options)


def html(title: str, *parts: RenderableType) -> str:
    """What a notebook shows: a title and what follows it, in the colors of the page around it.

    Examples
    --------
    >>> from zarr_manifests.rendering import html
    >>> "&lt;b&gt;" in html("Session", "<b>")
    True
    """
    out = PlainConsole(file=io.StringIO(), record=True, width=_WIDTH, color_system="truecolor")
    out.print(Text(title, "bold"), *parts, sep="\n")
    return out.export_html(inline_styles=True, code_format=_HTML)


def columns(*headers: str, right: Sequence[str] = (), whole: Sequence[str] = ()) -> Table:
    """An empty table without lines.

    The headers named in `right` are right-aligned. These columns, and those in `whole`, are not
    wrapped on narrow terminals.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for header in headers:
        table.add_column(
            header,
            justify="right" if header in right else "left",
            no_wrap=header in right or header in whole,
            overflow="fold",
        )
    return table


def fact_table(facts: Iterable[tuple[str, str]]) -> Table:
    """A table of names and values."""
    table = columns("", "", whole=("",))
    table.show_header = False
    table.columns[0].style = "dim"
    for name, value in facts:
        table.add_row(name, value)
    return table


def more(count: int) -> list[Text]:
    """A line that says how many more there are, if there are any."""
    return [Text(f"... and {count:,} more", "dim")] if count > 0 else []


def says(value: object) -> bool:
    """Whether its class says in words what it is."""
    return not vars(type(value)).keys().isdisjoint(("__str__", "_lines"))


def report(value: Any) -> Group:
    """A value as what `str` says if its class says that; else its facts, then its collections.

    A count that is 0 unless it is given, and was not given, is left out. A mapping is shown as a
    report whose attributes have its names.
    """
    is_mapping = isinstance(value, Mapping)
    if not is_mapping and says(value):
        return Group(Text(plain_text(str(value), lines=True)))
    zeros = () if is_mapping else {one.name for one in fields(value) if one.default == 0}
    single, parts = [], []
    for name, found in value.items() if is_mapping else _parts(value).items():
        if name in zeros and found == 0:
            continue
        if isinstance(found, Mapping) or (isinstance(found, tuple) and not _is_shape(found)):
            if found:
                parts += [Text(f"{_words(name)} ({len(found):,})", "bold"), *_listed(name, found)]
        elif text := shown(name, found):
            single.append((_words(name), text))
    return Group(fact_table(single), *parts)


def _parts(value: Any) -> dict[str, Any]:
    """The parts of a value, but for those that another part says in words."""
    parts = dict(parts_of(value))
    spoken = (one for one in parts.values() if isinstance(one, Struct) and says(one))
    said = {name for one in spoken for name, _ in parts_of(one)}
    return {name: one for name, one in parts.items() if name not in said}


def _listed(name: str, values: Any) -> Iterator[RenderableType]:
    """The first elements of a collection as a table, and how many more there are."""
    first = [*islice(values.items() if isinstance(values, Mapping) else values, _MOST_ROWS)]
    if isinstance(values, Mapping):
        yield fact_table((str(key), shown(str(key), one)) for key, one in first)
    elif isinstance(first[0], Struct) and not says(first[0]):
        rows = [_parts(one) for one in first]
        used = [key for key in rows[0] if any(row[key] not in (None, "", ()) for row in rows)]
        right = [key for key in used if all(isinstance(row[key], int | float) for row in rows)]
        table = columns(*map(_words, used), right=[*map(_words, right)], whole=("path", "key"))
        for row in rows:
            table.add_row(*(shown(key, row[key]) for key in used))
        yield table
    else:
        yield from (Text(f"  {plain_text(shown(name, one))}") for one in first)
    yield from more(len(values) - len(first))


def _is_shape(value: tuple[Any, ...]) -> bool:
    return bool(value) and all(isinstance(length, int | None) for length in value)


def _words(name: str) -> str:
    return name.replace("_", " ").replace("nbytes", "bytes")


def shown(name: str, value: Any) -> str:
    """A value as text that is short enough for a table; numbers named bytes have a unit.

    Examples
    --------
    >>> from zarr_manifests.rendering import shown
    >>> shown("nbytes", 1_400_000), shown("shape", (365, 721)), shown("done", True)
    ('1.40 MB', '365 x 721', 'yes')
    """
    if value is None:
        return ""
    if hasattr(value, "tolist"):
        return _coordinates(value) if value.ndim else shown(name, value.tolist())
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return bytes_text(value) if "bytes" in name and value >= 0 else f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, datetime):
        return time_text(value)
    if isinstance(value, tuple) and _is_shape(value):
        return (" x " if "shape" in name else ", ").join(shown("", length) for length in value)
    if isinstance(value, Mapping):
        value = ", ".join(f"{key}: {shown(str(key), one)}" for key, one in value.items())
    if isinstance(value, tuple) and value and isinstance(value[0], Struct):
        return f"{len(value):,}"
    if isinstance(value, tuple | list):
        value = ", ".join(shown(name, one) for one in value)
    return plain_text(value, lines=True, most=_MOST_CHARS)


def _coordinates(value: Any) -> str:
    rows = value[:_SHOWN].tolist()
    first = ", ".join(str(tuple(row) if isinstance(row, list) else row) for row in rows)
    return f"{len(value):,}: {first}{', ...' if len(value) > _SHOWN else ''}"
