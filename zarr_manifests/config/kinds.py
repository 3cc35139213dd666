"""Kinds of values that only the planning of manifests has: intervals, names, axes, paths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from zarr_manifests.config.options import (
    Faults,
    Kind,
    Pattern,
    Regex,
    Whole,
    known_as,
    shown,
    spelled,
    within,
)
from zarr_manifests.errors import ConfigError

__all__ = [
    "MAX_REFS",
    "REF_NAME",
    "SET_NAME",
    "Along",
    "AlongKind",
    "Interval",
    "IntervalKind",
    "PathsKind",
    "SetNameKind",
]

MAX_REFS: Final = 1_000_000_000_000
_MAX_PATHS: Final = 64
_MAX_AXES: Final = 32
SET_NAME: Final = Pattern(
    r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}",
    "a name of at most 64 letters, digits and _ . - that begins with no . or -",
)
REF_NAME: Final = Pattern(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,254}", "the name of a branch or tag")


@dataclass(frozen=True, slots=True)
class Interval:
    """A closed interval of whole numbers; None is an open end.

    Raises
    ------
    ConfigError
        Unless `0 <= low <= high`.

    Examples
    --------
    >>> 500 in Interval(0, 500), 501 in Interval(0, 500), 10**9 in Interval(501)
    (True, False, True)
    """

    low: int | None = None
    high: int | None = None

    def __post_init__(self) -> None:
        faults = Faults()
        for value in (self.low, self.high):
            if value is not None and (type(value) is not int or not 0 <= value <= MAX_REFS):
                faults.add(
                    "", f"expected a number from 0 to {MAX_REFS} or null, got {shown(value)}"
                )
        faults.throw()
        if self.low is not None and self.high is not None and self.low > self.high:
            faults.add("", f"[{self.low}, {self.high}] is empty; give the smaller number first")
        faults.throw()

    def __contains__(self, number: int) -> bool:
        return (self.low is None or self.low <= number) and (
            self.high is None or number <= self.high
        )


@dataclass(frozen=True, slots=True)
class IntervalKind(Kind[Interval | None]):
    """An interval; a list of two in YAML."""

    def read(
        self, value: object, place: str, faults: Faults, base: Interval | None
    ) -> Interval | None:
        if not isinstance(value, list | tuple) or len(value) != 2:
            faults.add(place, f"expected [lowest, highest], got {shown(value)}")
            return base
        try:
            return Interval(*value)
        except ConfigError as error:
            for problem in error.problems:
                faults.add(place, problem)
            return base

    def check(self, value: object, place: str, faults: Faults) -> None:
        if value is not None and not isinstance(value, Interval):
            faults.add(place, f"expected an Interval or None, got {shown(value)}")

    def write(self, value: Interval | None) -> Any:
        return None if value is None else [value.low, value.high]

    def schema(self) -> dict[str, Any]:
        end = {"type": ["integer", "null"], "minimum": 0, "maximum": MAX_REFS}
        return {"type": "array", "items": end, "minItems": 2, "maxItems": 2}


@dataclass(frozen=True, slots=True)
class SetNameKind(Kind[str | None]):
    """The name of a set; null for the set `default`, which overflows nowhere."""

    def read(self, value: object, place: str, faults: Faults, base: str | None) -> str | None:
        before = len(faults.problems)
        self.check(value, place, faults)
        return base if len(faults.problems) > before else value  # type: ignore[return-value]

    def check(self, value: object, place: str, faults: Faults) -> None:
        if value is not None:
            SET_NAME.check(value, place, faults)

    def schema(self) -> dict[str, Any]:
        return SET_NAME.schema() | {"type": ["string", "null"]}


type Along = tuple[tuple[str | int, int], ...]


@dataclass(frozen=True, slots=True)
class AlongKind(Kind[Along]):
    """Chunks per leaf by dimension name or axis; a map in YAML."""

    def read(self, value: object, place: str, faults: Faults, base: Along) -> Along:
        if not isinstance(value, Mapping):
            faults.add(
                place,
                "expected dimension names (or axes) and the chunks along them, such as "
                f"{{time: 720}}, got {shown(value)}",
            )
            return base
        along = tuple(value.items())
        before = len(faults.problems)
        self.check(along, place, faults)
        return base if len(faults.problems) > before else along

    def check(self, value: object, place: str, faults: Faults) -> None:
        if not isinstance(value, tuple) or not 1 <= len(value) <= _MAX_AXES:
            faults.add(place, f"expected 1 to {_MAX_AXES} dimensions, got {shown(value)}")
            return
        for pair in value:
            if not isinstance(pair, tuple) or len(pair) != 2:
                faults.add(place, f"expected (dimension, chunks), got {shown(pair)}")
                continue
            axis, chunks = pair
            here = within(place, spelled(axis))
            named = isinstance(axis, str) and 0 < len(axis) <= 255 and _is_unicode(axis)
            if not named and not (type(axis) is int and 0 <= axis < _MAX_AXES):
                faults.add(
                    here, f"{shown(axis)} is no dimension name and no axis from 0; quote names"
                )
            Whole(1, MAX_REFS).check(chunks, here, faults)

    def write(self, value: Along) -> Any:
        return dict(value)

    def schema(self) -> dict[str, Any]:
        chunks = Whole(1, MAX_REFS).schema()
        return {
            "type": "object",
            "minProperties": 1,
            "maxProperties": _MAX_AXES,
            "additionalProperties": chunks,
        }


@dataclass(frozen=True, slots=True)
class PathsKind(Kind[tuple[str, ...] | None]):
    """Path regexes, each in a map `path: regex`; null for the coordinates."""

    def read(
        self, value: object, place: str, faults: Faults, base: tuple[str, ...] | None
    ) -> tuple[str, ...] | None:
        if value is None:
            return None
        if not isinstance(value, list | tuple) or len(value) > _MAX_PATHS:
            faults.add(place, f"expected a list of at most {_MAX_PATHS} paths, got {shown(value)}")
            return base
        found = []
        for i, entry in enumerate(value):
            here = f"{place}[{i}]"
            if not isinstance(entry, Mapping):
                faults.add(here, f"expected path: regular expression, got {shown(entry)}")
                continue
            for key, regex in entry.items():
                if key == "path":
                    found.append(Regex().read(regex, within(here, "path"), faults, ""))
                else:
                    known = known_as(key, ["path"])
                    faults.add(within(here, spelled(key)), f"unknown option; {known}")
            if "path" not in entry:
                faults.add(within(here, "path"), "is missing: a regular expression")
        return tuple(found)

    def check(self, value: object, place: str, faults: Faults) -> None:
        if value is None:
            return
        if not isinstance(value, tuple) or len(value) > _MAX_PATHS:
            faults.add(place, f"expected a tuple of at most {_MAX_PATHS}, got {shown(value)}")
            return
        for i, regex in enumerate(value):
            Regex().check(regex, f"{place}[{i}].path", faults)

    def write(self, value: tuple[str, ...] | None) -> Any:
        return None if value is None else [{"path": regex} for regex in value]

    def schema(self) -> dict[str, Any]:
        entry = {
            "type": "object",
            "required": ["path"],
            "additionalProperties": False,
            "properties": {"path": Regex().schema()},
        }
        return {"type": ["array", "null"], "items": entry, "maxItems": _MAX_PATHS}


def _is_unicode(text: str) -> bool:
    """Whether the text can be written: half of a surrogate pair cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
