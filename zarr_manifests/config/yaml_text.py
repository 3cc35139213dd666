"""YAML to plain values, from anybody, in bounded time and memory.

What is refused, and when: texts over 1 MiB before anything is parsed; anchors, aliases and tags
at the first one, so nothing is ever larger than its text; nesting, the number of values and long
scalars as soon as a bound is passed; keys that are given twice; more than one document. All events
are looked at before PyYAML makes nodes of them. Scalars mean what they mean to its safe loader.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final, NoReturn

import yaml
from yaml.constructor import SafeConstructor

from zarr_manifests.errors import ConfigError, plain_text
from zarr_manifests.texts import shown, spelled

MAX_TEXT_BYTES: Final = 1 << 20
_MAX_DEPTH: Final = 24
_MAX_VALUES: Final = 20_000
_MAX_SCALAR_CHARS: Final = 4_096
_PARSER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def load_yaml(text: str | bytes) -> tuple[Any, Mapping[str, int]]:
    """The plain values that a YAML document holds, and the line of each place in it.

    Raises
    ------
    ConfigError
        If it is too large, is no YAML, or uses what no configuration needs.
    """
    encoded = text.encode(errors="replace") if isinstance(text, str) else text
    if len(encoded) > MAX_TEXT_BYTES:
        raise ConfigError([f"a text longer than {MAX_TEXT_BYTES:,} bytes is no configuration"])
    lines: dict[str, int] = {}
    try:
        _check(yaml.parse(text, Loader=_PARSER))
        node = yaml.compose(text, Loader=_PARSER)
        return None if node is None else _value(node, "", lines), lines
    except (yaml.YAMLError, UnicodeError) as error:
        reason = " ".join(re.sub('in "<.+ string>", ', "at ", str(error)).split())[:200]
        raise ConfigError([f"this is not YAML: {reason}"]) from error


def with_lines(faults: Iterable[str], lines: Mapping[str, int]) -> list[str]:
    """The faults after their lines: those of their places, or of what is around them; in order.

    Examples
    --------
    >>> from zarr_manifests.config.yaml_text import with_lines
    >>> with_lines(["commits.mode: 'deltas' is wrong"], {"commits": 3})
    ["line 3: commits.mode: 'deltas' is wrong"]
    """
    found = []
    for fault in faults:
        place = fault.partition(": ")[0]
        while place and place not in lines:
            place = place[: max(place.rfind("."), place.rfind("["), 0)]
        found.append((lines.get(place, 0), fault))
    found.sort(key=lambda one: one[0])
    return [f"line {line}: {fault}" if line else fault for line, fault in found]


def dump_yaml(values: Mapping[str, Any]) -> str:
    """Plain values as YAML, in their order; what holds no lists and maps in one line."""
    dump = partial(yaml.safe_dump, values, sort_keys=False, width=100, default_flow_style=None)
    text = str(dump(allow_unicode=True))
    # YAML takes for printable what turns the direction of text around, and what is read as a space.
    return text if text == plain_text(text, lines=True) else str(dump(allow_unicode=False))


def _check(events: Iterator[Any]) -> None:
    """Refuse what is not allowed at the first event of it."""
    values = depth = 0
    for event in events:
        if isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if isinstance(event, yaml.AliasEvent):
            _refuse(event, f"an alias (*{event.anchor}); write the value out")
        if not isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent):
            continue
        values += 1
        if values > _MAX_VALUES:
            _refuse(event, f"more than {_MAX_VALUES:,} values")
        if event.anchor is not None:
            _refuse(event, f"an anchor (&{event.anchor}); write values out where they are due")
        if event.tag is not None:
            _refuse(event, f"a tag ({event.tag}); remove it")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _MAX_DEPTH:
                _refuse(event, f"nested more than {_MAX_DEPTH} deep")
        elif len(event.value) > _MAX_SCALAR_CHARS:
            _refuse(event, f"a value of more than {_MAX_SCALAR_CHARS:,} characters")


def _value(node: Any, place: str, lines: dict[str, int]) -> Any:
    """The value of a node; `lines` gets the line of each place in it, such as `a.b[0]`."""
    if isinstance(node, yaml.SequenceNode):
        values = []
        for i, each in enumerate(node.value):
            lines[f"{place}[{i}]"] = each.start_mark.line + 1
            values.append(_value(each, f"{place}[{i}]", lines))
        return values
    if isinstance(node, yaml.ScalarNode):
        try:
            return SafeConstructor().construct_object(node)
        except (ValueError, OverflowError, yaml.YAMLError):
            _refuse(node, f"{shown(node.value)} has no meaning; quote it if it is text")
    found: dict[Any, Any] = {}
    for name, value in node.value:
        if not isinstance(name, yaml.ScalarNode):
            _refuse(name, "a key is a map or a list; quote it if it is text")
        key = _value(name, place, lines)
        if key in found:
            _refuse(name, f"the key {shown(key)} is given twice; keep one")
        at = f"{place}.{spelled(key)}".removeprefix(".")
        lines[at] = name.start_mark.line + 1
        found[key] = _value(value, at, lines)
    return found


def _refuse(event: Any, problem: str) -> NoReturn:
    mark = event.start_mark
    raise ConfigError([f"line {mark.line + 1}, column {mark.column + 1}: {problem}"])
