"""YAML to plain values, from anybody, in bounded time and memory.

What is refused, and when: texts over 1 MiB before anything is parsed; anchors, aliases and tags
at the first one, so nothing is ever larger than its text; nesting, the number of values and long
scalars as soon as a bound is passed; keys that are given twice; more than one document. Events
are read one by one and put together here. Scalars mean what they mean to PyYAML's safe loader.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final, NoReturn

import yaml

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
        raise ConfigError(
            [f"the text is longer than {MAX_TEXT_BYTES:,} bytes; this is not a configuration"]
        )
    reading = _Reading(yaml.parse(text, Loader=_PARSER))
    try:
        return reading.document(), reading.lines
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
    """Plain values as YAML, in their order."""
    dump = partial(yaml.dump, values, Dumper=_Dumper, sort_keys=False, width=100)
    text = str(dump(allow_unicode=True))
    # YAML takes for printable what turns the direction of text around, and what is read as a space.
    return text if text == plain_text(text, lines=True) else str(dump(allow_unicode=False))


class _Dumper(yaml.SafeDumper):
    """Writes lists of numbers, such as intervals, in one line."""

    def represent_list(self, data: Any) -> Any:
        numbers = bool(data) and all(one is None or isinstance(one, int) for one in data)
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=numbers)


_Dumper.add_representer(list, _Dumper.represent_list)


class _Reading:
    """Puts together what events say; `lines` has the line of each place, such as `a.b[0]`."""

    def __init__(self, events: Iterator[Any]) -> None:
        self.lines: dict[str, int] = {}
        self._events = events
        self._values = 0
        self._scalars: Any = yaml.SafeLoader("")

    def document(self) -> Any:
        """What the only document holds; None if there is none."""
        found, documents = None, 0
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    _refuse(event, "a second document begins; one is allowed")
                found = self._value(next(self._events), "", 0)
        return found

    def _value(self, event: Any, place: str, depth: int) -> Any:
        """The value that begins with the event."""
        self._values += 1
        if isinstance(event, yaml.AliasEvent):
            _refuse(event, f"an alias (*{event.anchor}); write the value out")
        if self._values > _MAX_VALUES:
            _refuse(event, f"more than {_MAX_VALUES:,} values")
        if event.anchor is not None:
            _refuse(event, f"an anchor (&{event.anchor}); write values out where they are due")
        if event.tag is not None:
            _refuse(event, f"a tag ({event.tag}); remove it")
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event)
        if depth >= _MAX_DEPTH:
            _refuse(event, f"nested more than {_MAX_DEPTH} deep")
        read = self._map if isinstance(event, yaml.MappingStartEvent) else self._list
        return read(place, depth + 1)

    def _list(self, place: str, depth: int) -> list[Any]:
        found: list[Any] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            at = f"{place}[{len(found)}]"
            self.lines[at] = event.start_mark.line + 1
            found.append(self._value(event, at, depth))
        return found

    def _map(self, place: str, depth: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            if isinstance(event, yaml.CollectionStartEvent):
                _refuse(event, "a key is a map or a list; quote it if it is text")
            key = self._value(event, place, depth)
            if key in found:
                _refuse(event, f"the key {shown(key)} is given twice; keep one")
            at = f"{place}.{spelled(key)}".removeprefix(".")
            self.lines[at] = event.start_mark.line + 1
            found[key] = self._value(next(self._events), at, depth)
        return found

    def _scalar(self, event: Any) -> Any:
        if len(event.value) > _MAX_SCALAR_CHARS:
            _refuse(event, f"a value of more than {_MAX_SCALAR_CHARS:,} characters")
        tag = self._scalars.resolve(yaml.ScalarNode, event.value, event.implicit)
        try:
            return self._scalars.construct_object(yaml.ScalarNode(tag, event.value))
        except (ValueError, OverflowError, yaml.YAMLError):
            _refuse(event, f"{shown(event.value)} has no meaning; quote it if it is text")


def _refuse(event: Any, problem: str) -> NoReturn:
    mark = event.start_mark
    raise ConfigError([f"line {mark.line + 1}, column {mark.column + 1}: {problem}"])
