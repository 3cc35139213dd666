"""Kinds of values that options have.

A kind checks values, converts them from and to the plain values of YAML, and knows its JSON
Schema. It needs no pydantic: sections are checked whenever one is built, also when a repository
is opened.

A fault is a line `PLACE: PROBLEM`. The place is relative to the value: empty, or `[0].path`.
"""

from __future__ import annotations

import re
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Final

from zarr_manifests.texts import near_names

__all__ = [
    "MAX_REFS",
    "REF_NAME",
    "SET_NAME",
    "Along",
    "AlongKind",
    "Entry",
    "Kind",
    "Labels",
    "LabelsKind",
    "ListOf",
    "Number",
    "Text",
    "Whole",
    "Word",
    "YesNo",
    "hyphened",
    "known_as",
    "shown",
    "spelled",
    "under",
]

MAX_REFS: Final = 1_000_000_000_000
_MAX_AXES: Final = 32


def under(place: str, fault: str) -> str:
    """The fault of a value that stands at `place`."""
    return place + (fault if not place or fault[:1] in (":", "[") else f".{fault}")


def shown(value: object) -> str:
    """A value as a message shows it: never longer than a line."""
    try:
        return reprlib.repr(value)[:80]
    except ValueError:  # Python prints no number with thousands of digits
        return "a number that is too large"


def spelled(key: object) -> str:
    """A key as it stands in a place: never longer than a name."""
    return key[:64] if isinstance(key, str) else shown(key)[:64]


def hyphened(key: object) -> str:
    """The name of an option that a key with hyphens or underscores means."""
    return spelled(key).replace("_", "-")


def known_as(name: object, known: Iterable[str]) -> str:
    """Advice for an unknown name: the known name that is close to it, or all known names."""
    names = list(known)
    close = near_names(spelled(name), names)
    if close:
        return f"did you mean {close[0]}?"
    return f"known are {', '.join(sorted(names)[:40])}" if names else "there are none"


class Kind(ABC):
    """A kind of value.

    `null` says what None means, if it is allowed although it is not the default.
    """

    null: str = ""
    schema: Mapping[str, Any] = {}

    @abstractmethod
    def faults(self, value: object) -> Iterator[str]:
        """What is wrong with the value of an option; nothing if it is sound."""

    def read(self, plain: Any) -> Any:
        """The value that a plain one means; what means none comes back, with faults."""
        return plain

    def write(self, value: Any) -> Any:
        """The value as a plain one, which `read` understands."""
        return value


class Whole(Kind):
    """A whole number from `low` to `high`."""

    def __init__(self, low: int, high: int, null: str = "") -> None:
        self.low, self.high, self.null = low, high, null
        self.schema = {"type": "integer", "minimum": low, "maximum": high}

    def faults(self, value: object) -> Iterator[str]:
        if type(value) is not int:
            null = f" or null ({self.null})" if self.null else ""
            yield f": expected a whole number{null}, got {shown(value)}"
        elif not self.low <= value <= self.high:
            yield f": {shown(value)} is not within {self.low} to {self.high}"


class YesNo(Kind):
    """True or false."""

    schema: Mapping[str, Any] = {"type": "boolean"}

    def faults(self, value: object) -> Iterator[str]:
        if type(value) is not bool:
            yield f": expected true or false, got {shown(value)}"


class Number(Kind):
    """A number from `low` to `high`."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high
        self.schema = {"type": "number", "minimum": low, "maximum": high}

    def faults(self, value: object) -> Iterator[str]:
        if type(value) is not int and type(value) is not float:
            yield f": expected a number, got {shown(value)}"
        elif not self.low <= value <= self.high:
            yield f": {shown(value)} is not within {self.low} to {self.high}"


class Word(Kind):
    """One of some words in lower case, read in any case."""

    def __init__(self, *words: str) -> None:
        self.words = words
        self.schema = {"enum": list(words)}

    def faults(self, value: object) -> Iterator[str]:
        if value not in self.words:
            yield f": {shown(value)} is not one of {', '.join(self.words)}"

    def read(self, plain: Any) -> Any:
        lower = plain.lower() if isinstance(plain, str) else plain
        return lower if lower in self.words else plain


class Text(Kind):
    """A text that matches `pattern`, which `meaning` says in words."""

    def __init__(self, pattern: str, meaning: str, null: str = "") -> None:
        self.pattern, self.meaning, self.null = pattern, meaning, null
        self.schema = {"type": "string", "pattern": f"^{pattern}$"}

    def faults(self, value: object) -> Iterator[str]:
        if not isinstance(value, str) or re.fullmatch(self.pattern, value, re.ASCII) is None:
            yield f": expected {self.meaning}, got {shown(value)}"


_NAME: Final = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}"
_NAME_MEANING: Final = "a name of at most 64 letters, digits and _ . - that begins with no . or -"
SET_NAME: Final = Text(_NAME, _NAME_MEANING)
OVERFLOW: Final = Text(_NAME, _NAME_MEANING, null="nowhere")
REF_NAME: Final = Text(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,254}", "the name of a branch or tag")

type Along = tuple[tuple[str | int, int], ...]


class AlongKind(Kind):
    """Chunks per leaf by dimension name or axis; a map in YAML."""

    chunks: ClassVar = Whole(1, MAX_REFS)
    schema: Mapping[str, Any] = {
        "type": "object",
        "minProperties": 1,
        "maxProperties": _MAX_AXES,
        "additionalProperties": chunks.schema,
    }

    def faults(self, value: object) -> Iterator[str]:
        if not isinstance(value, tuple):
            yield (
                ": expected dimension names (or axes) and the chunks along them, such as "
                f"{{time: 720}}, got {shown(value)}"
            )
        elif not 1 <= len(value) <= _MAX_AXES:
            yield f": expected 1 to {_MAX_AXES} dimensions, got {len(value)}"
        else:
            for pair in value:
                if isinstance(pair, tuple) and len(pair) == 2:
                    yield from (under(spelled(pair[0]), fault) for fault in self._pair(*pair))
                else:
                    yield f": expected (dimension, chunks), got {shown(pair)}"

    def _pair(self, axis: object, chunks: object) -> Iterator[str]:
        named = isinstance(axis, str) and 0 < len(axis) <= 255 and _is_unicode(axis)
        if not named and not (type(axis) is int and 0 <= axis < _MAX_AXES):
            yield f": {shown(axis)} is neither a dimension name nor an axis from 0; quote names"
        yield from self.chunks.faults(chunks)

    def read(self, plain: Any) -> Any:
        return tuple(plain.items()) if isinstance(plain, Mapping) else plain

    def write(self, value: Any) -> Any:
        return dict(value)


def _is_unicode(text: str) -> bool:
    """Whether the text can be written: half of a surrogate pair cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


type Labels = tuple[tuple[str, str | int | float | bool], ...]


class LabelsKind(Kind):
    """Texts, numbers and booleans by name; a map in YAML, where null removes a name."""

    most: ClassVar = 64
    schema: Mapping[str, Any] = {
        "type": "object",
        "maxProperties": 64,
        "additionalProperties": {"type": ["string", "number", "boolean", "null"]},
    }

    def faults(self, value: object) -> Iterator[str]:
        if not isinstance(value, tuple):
            yield f": expected names and their values, such as {{host: a}}, got {shown(value)}"
        elif len(value) > self.most:
            yield f": {len(value)} names, at most {self.most} are allowed"
        else:
            for pair in value:
                if isinstance(pair, tuple) and len(pair) == 2:
                    yield from (under(spelled(pair[0]), fault) for fault in self._pair(*pair))
                else:
                    yield f": expected (name, value), got {shown(pair)}"
            names = [pair[0] for pair in value if isinstance(pair, tuple) and len(pair) == 2]
            yield from (f": {shown(one)} is there twice" for one in names if names.count(one) > 1)

    def _pair(self, name: object, value: object) -> Iterator[str]:
        if not (isinstance(name, str) and 0 < len(name) <= 255 and _is_unicode(name)):
            yield f": {shown(name)} is no name of 1 to 255 characters"
        sound = type(value) in (str, int, float, bool)
        if isinstance(value, str):
            sound = _is_unicode(value)
        elif isinstance(value, int | float):
            sound = sound and -(2**63) <= value < 2**63  # which no NaN is
        if not sound:
            yield f": expected a text, a finite number, true or false, got {shown(value)}"

    def read(self, plain: Any) -> Any:
        if not isinstance(plain, Mapping):
            return plain
        return tuple((name, value) for name, value in plain.items() if value is not None)

    def write(self, value: Any) -> Any:
        return dict(value)


class Entry(Kind):
    """A value that YAML writes as a map of one option, such as `path: .*/time`."""

    def __init__(self, name: str, kind: Kind) -> None:
        self.name, self.kind = name, kind

    def faults(self, value: object) -> Iterator[str]:
        return (under(self.name, fault) for fault in self.kind.faults(value))

    def read(self, plain: Any) -> Any:
        only = isinstance(plain, Mapping) and list(plain) == [self.name]
        return plain[self.name] if only else plain

    def write(self, value: Any) -> Any:
        return {self.name: value}


class ListOf(Kind):
    """A tuple of at most `most` values, a list in YAML; `none` is the word for None."""

    def __init__(self, item: Kind, most: int, none: str = "") -> None:
        self.item, self.most, self.none = item, most, none

    def faults(self, value: object) -> Iterator[str]:
        if value is None and self.none:
            return
        if not isinstance(value, tuple):
            yield f": expected a tuple, got {shown(value)}"
        elif len(value) > self.most:
            yield self.too_many(len(value))
        else:
            for i, one in enumerate(value):
                yield from (under(f"[{i}]", fault) for fault in self.item.faults(one))

    def too_many(self, count: int) -> str:
        """The fault of a list with so many entries."""
        return f": {count} entries, at most {self.most} are allowed"

    def read(self, plain: Any) -> Any:
        if self.none and plain == self.none:
            return None
        sound = isinstance(plain, list | tuple) and len(plain) <= self.most
        return tuple(map(self.item.read, plain)) if sound else plain

    def write(self, value: Any) -> Any:
        return self.none if value is None else [self.item.write(one) for one in value]
