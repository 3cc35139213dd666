"""YAML to plain values, from anybody, in bounded time and memory.

What is refused, and when: texts over 1 MiB before anything is parsed; anchors, aliases and tags
at the first one, so nothing is ever larger than its text; nesting, the number of values and long
scalars as soon as a bound is passed; keys that are given twice; more than one document. Events
are read one by one and put together here, without recursion. Scalars mean what they mean to
PyYAML's safe loader.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final, NoReturn

import yaml

from zarr_manifests.config.kinds import shown, spelled
from zarr_manifests.error_cases import ConfigError
from zarr_manifests.plain import plain_text

__all__ = ["MAX_TEXT_BYTES", "dump_yaml", "load_yaml", "load_yaml_lines", "with_line"]

MAX_TEXT_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 24
MAX_VALUES: Final = 20_000
MAX_SCALAR_CHARS: Final = 4_096
_PARSER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NO_KEY: Final = object()


def load_yaml(text: str | bytes) -> Any:
    """The plain values that a YAML document holds; None if it is empty.

    Raises
    ------
    ConfigError
        As `load_yaml_lines`.
    """
    return load_yaml_lines(text)[0]


def load_yaml_lines(text: str | bytes) -> tuple[Any, Mapping[str, int]]:
    """The plain values that a YAML document holds, and the line of each place in it.

    Raises
    ------
    ConfigError
        If it is too large, is no YAML, or uses what no configuration needs.
    """
    # Counted before it is encoded: characters are never more than bytes.
    if len(text) > MAX_TEXT_BYTES or len(_encoded(text)) > MAX_TEXT_BYTES:
        raise ConfigError(
            [f"the text is longer than {MAX_TEXT_BYTES:,} bytes; this is not a configuration"]
        )
    reading = _Reading()
    try:
        for event in yaml.parse(text, Loader=_PARSER):
            reading.take(event)
    except (yaml.YAMLError, UnicodeError) as error:
        raise ConfigError([f"this is not YAML: {_reason(error)}"]) from error
    return reading.document, reading.lines


def with_line(fault: str, lines: Mapping[str, int]) -> str:
    """The fault, which begins with its place, after the line of that place or of the one around it.

    Examples
    --------
    >>> from zarr_manifests.config.yaml_text import with_line
    >>> with_line("commits.mode: 'deltas' is wrong", {"commits": 3})
    "line 3: commits.mode: 'deltas' is wrong"
    """
    place = fault.partition(": ")[0]
    while place and place not in lines:
        place = place[: max(place.rfind("."), place.rfind("["), 0)]
    return f"line {lines[place]}: {fault}" if place else fault


def dump_yaml(values: Mapping[str, Any]) -> str:
    """Plain values as YAML, in their order."""
    dump = partial(yaml.dump, values, Dumper=_Dumper, sort_keys=False, width=100)
    text = str(dump(allow_unicode=True))
    # YAML takes for printable what turns the direction of text around.
    return text if text == plain_text(text, lines=True) else str(dump(allow_unicode=False))


class _Dumper(yaml.SafeDumper):
    """Writes lists of numbers, such as intervals, in one line, and texts so that they come back."""

    def represent_list(self, data: Any) -> Any:
        numbers = bool(data) and all(one is None or isinstance(one, int) for one in data)
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=numbers)

    def represent_text(self, data: str) -> Any:
        # Outside double quotes these are line breaks, which are read as spaces.
        style = '"' if any(mark in data for mark in "\x85\u2028\u2029") else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)


_Dumper.add_representer(list, _Dumper.represent_list)
_Dumper.add_representer(str, _Dumper.represent_text)


def _encoded(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", errors="replace")


def _reason(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())[:200]
    reason = getattr(error, "problem", None) or getattr(error, "context", None)
    return f"{reason} (line {mark.line + 1}, column {mark.column + 1})"


class _Reading:
    """What has been read of a document."""

    def __init__(self) -> None:
        self.document: Any = None
        self.lines: dict[str, int] = {}  # by place, such as `a.b[0]`
        self._at = ""  # the place of the value that comes or came last
        self._places: list[str] = []  # of each open map or list
        self._documents = 0
        self._values = 0
        self._open: list[dict[Any, Any] | list[Any]] = []
        self._keys: list[Any] = []  # of each open map, the key that waits for its value
        self._scalars: Any = yaml.SafeLoader("")

    def take(self, event: yaml.Event) -> None:
        """Go on by one event."""
        match event:
            case yaml.DocumentStartEvent():
                self._documents += 1
                if self._documents > 1:
                    self._refuse(event, "a second document begins; one is allowed")
            case yaml.AliasEvent():
                self._refuse(event, f"an alias (*{event.anchor}); write the value out")
            case yaml.ScalarEvent():
                self._check(event)
                self._put(self._scalar(event), event)
            case yaml.MappingStartEvent() | yaml.SequenceStartEvent():
                self._check(event)
                if len(self._open) >= MAX_DEPTH:
                    self._refuse(event, f"nested more than {MAX_DEPTH} deep")
                inner: Any = {} if isinstance(event, yaml.MappingStartEvent) else []
                self._put(inner, event)
                self._places.append(self._at)
                self._open.append(inner)
                self._keys.append(_NO_KEY)
            case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                self._open.pop()
                self._places.pop()
                self._keys.pop()

    def _check(self, event: Any) -> None:
        self._values += 1
        if self._values > MAX_VALUES:
            self._refuse(event, f"more than {MAX_VALUES:,} values")
        if event.anchor is not None:
            self._refuse(event, f"an anchor (&{event.anchor}); write values out where they are due")
        if event.tag is not None:
            self._refuse(event, f"a tag ({event.tag}); remove it")

    def _scalar(self, event: yaml.ScalarEvent) -> Any:
        if len(event.value) > MAX_SCALAR_CHARS:
            self._refuse(event, f"a value of more than {MAX_SCALAR_CHARS:,} characters")
        tag = self._scalars.resolve(yaml.ScalarNode, event.value, event.implicit)
        node = yaml.ScalarNode(tag, event.value)
        try:
            return self._scalars.construct_object(node)
        except (ValueError, OverflowError, yaml.YAMLError):
            self._refuse(event, f"{shown(event.value)} has no meaning; quote it if it is text")

    def _put(self, value: Any, event: yaml.Event) -> None:
        if not self._open:
            self.document = value
            return
        inside = self._open[-1]
        if isinstance(inside, list):
            self._note(f"[{len(inside)}]", event)
            inside.append(value)
        elif self._keys[-1] is not _NO_KEY:
            inside[self._keys[-1]] = value
            self._keys[-1] = _NO_KEY
        elif isinstance(value, dict | list):
            self._refuse(event, "a key is a map or a list; quote it if it is text")
        elif value in inside:
            self._refuse(event, f"the key {shown(value)} is given twice; keep one")
        else:
            self._note(f"[{len(inside)}].{spelled(value)}", event)  # of a map of sets
            self._note(f".{spelled(value)}", event)
            self._keys[-1] = value

    def _note(self, step: str, event: yaml.Event) -> None:
        mark: Any = event.start_mark
        self._at = (self._places[-1] + step).removeprefix(".")
        self.lines[self._at] = mark.line + 1

    def _refuse(self, event: yaml.Event, problem: str) -> NoReturn:
        mark: Any = event.start_mark
        raise ConfigError([f"line {mark.line + 1}, column {mark.column + 1}: {problem}"])
