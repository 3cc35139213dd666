"""Options: the values they may have, and how they are read and written.

A *section* is a frozen struct. Its fields are annotated with a kind of value, such as
`Annotated[int, Whole(1, 64)]`, and its docstring says what each is for. Its `__post_init__` calls
`read_options`, so none is ever invalid, whether it comes from Python, YAML or a saved root.

A section may have the class attributes `other_names`, which maps names that are read, too, to
options, and `resets`: a field that is given takes the other back to its default.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import NoneType
from typing import Any, Final, NamedTuple, get_args, get_type_hints

from msgspec import NODEFAULT, Struct
from msgspec.structs import fields, force_setattr

from zarr_manifests.errors import ConfigError
from zarr_manifests.texts import hyphened, known_as, shown, spelled

# A name that can be written: half of a surrogate pair cannot.
ANY_NAME: Final = r"[^\ud800-\udfff]{1,255}"


class Faults(NamedTuple):
    """Collects the faults of the value at a place; a fault is a line `PLACE: PROBLEM`."""

    found: list[str]
    place: str = ""

    def __call__(self, problem: str) -> None:
        """Add a problem of the value."""
        self.found.append(f"{self.place}: {problem}" if self.place else problem)

    def at(self, step: str) -> Faults:
        """Collects those of a value inside, such as `path` or `[0]`."""
        dot = "." if self.place and step[:1] != "[" else ""
        return Faults(self.found, f"{self.place}{dot}{step}")


class Kind(ABC):
    """A kind of value; `meaning` is what is expected, for messages."""

    meaning: str

    @abstractmethod
    def read(self, given: Any, faults: Faults) -> Any:
        """The value that is given, as such or as YAML has it."""

    def write(self, value: Any) -> Any:
        """The value as YAML has it."""
        return value


class Scalar(Kind):
    """A single value.

    Parameters
    ----------
    meaning : str
        What is expected, for messages.
    sound : callable
        Whether a value is one.
    secret : bool
        Whether messages leave out what was given.
    """

    def __init__(self, meaning: str, sound: Callable[[Any], bool], secret: bool = False) -> None:
        self.meaning, self.sound, self.secret = meaning, sound, secret

    def read(self, given: Any, faults: Faults) -> Any:
        if not self.sound(given):
            got = "" if self.secret else f", got {shown(given)}"
            faults(f"expected {self.meaning}{got}")
        return given


def whole(low: int, high: int) -> Scalar:
    """A whole number within these bounds."""
    meaning = f"a whole number from {low:,} to {high:,}"
    return Scalar(meaning, lambda value: type(value) is int and low <= value <= high)


def word(*words: str) -> Scalar:
    """One of some words."""
    return Scalar(" or ".join(words), lambda value: value in words)


def text(pattern: str, meaning: str, secret: bool = False) -> Scalar:
    """A text that matches the regular expression as a whole."""
    return Scalar(meaning, lambda value: matches(pattern, value), secret=secret)


def matches(pattern: str, value: object) -> bool:
    """Whether it is a text that matches the regular expression as a whole."""
    return isinstance(value, str) and re.fullmatch(pattern, value, re.ASCII) is not None


YES_NO: Final = Scalar("true or false", lambda value: type(value) is bool)


class Pairs(Kind):
    """From `least` to `most` values by name: a tuple of pairs; in YAML a map, without its nulls."""

    def __init__(self, name: Kind, value: Kind, meaning: str, least: int, most: int) -> None:
        self.name, self.value, self.meaning = name, value, meaning
        self.least, self.most = least, most

    def read(self, given: Any, faults: Faults) -> Any:
        pairs = given
        if isinstance(given, Mapping):
            pairs = tuple(pair for pair in given.items() if pair[1] is not None)
        if not isinstance(pairs, tuple) or not all(
            isinstance(pair, tuple) and len(pair) == 2 for pair in pairs
        ):
            faults(f"expected {self.meaning}, got {shown(given)}")
        elif not self.least <= len(pairs) <= self.most:
            faults(f"{len(pairs)} names, from {self.least} to {self.most} are allowed")
        else:
            for name, value in pairs:
                inside = faults.at(spelled(name))
                self.name.read(name, inside)
                self.value.read(value, inside)
                if [other for other, _ in pairs].count(name) > 1:
                    inside("is there twice")
        return pairs

    def write(self, value: Any) -> Any:
        return dict(value)


class ListOf(Kind):
    """A tuple of at most `most` values, a list in YAML; `none` is the word for None."""

    def __init__(self, item: Kind, most: int, none: str = "") -> None:
        self.item, self.most, self.none = item, most, none

    def read(self, given: Any, faults: Faults) -> Any:
        if self.none and given in (None, self.none):
            return None
        if not isinstance(given, list | tuple):
            expected = f"{self.none}, or a list" if self.none else "a list"
            faults(f"expected {expected}, got {shown(given)}; begin each entry with '- '")
        elif len(given) > self.most:
            faults(f"{len(given)} entries, at most {self.most} are allowed")
        else:
            return tuple(self.item.read(each, faults.at(f"[{i}]")) for i, each in enumerate(given))
        return ()

    def write(self, value: Any) -> Any:
        return self.none if value is None else [self.item.write(each) for each in value]


class Nested(Kind):
    """A section in a section, or in a list: a map in YAML."""

    def __init__(self, section: type[Struct]) -> None:
        self.section = section
        self.others: Mapping[str, str] = getattr(section, "other_names", {})
        self.resets: Mapping[str, str] = getattr(section, "resets", {})

    def read(
        self, given: Any, faults: Faults, below: Any = None, known: Mapping[str, Any] | None = None
    ) -> Any:
        """The section that is given, or of which options are given.

        What they leave out is as in the section `below`, or has its default. `known` has values by
        field.
        """
        if type(given) is self.section:  # one below it may have more options
            return given
        if not isinstance(given, Mapping | None):
            faults(f"expected options and their values, got {shown(given)}")
            return given if below is None else below
        options, values = options_of(self.section), dict[str, Any](known or {})
        for key, value in (given or {}).items():
            inside = faults.at(spelled(key))
            option = options.get(self.others.get(hyphened(key), hyphened(key)))
            if option is None:
                inside(f"unknown option; {known_as(key, options)}")
            elif option.field in values:
                inside(f"{hyphened(option.field)} is given twice, in two spellings; keep one")
            else:
                values[option.field] = option.given(value, inside, below)
        rest = {one.field: getattr(below, one.field, one.default) for one in options.values()}
        for field, other in self.resets.items():
            if values.get(field) is not None:
                del rest[other]
        try:
            return self.section(**rest | values)
        except ConfigError as error:
            faults.found.extend(faults.at(fault).place for fault in error.problems)
        return given if below is None else below

    def write(self, value: Any) -> Any:
        return plain_values(value)


class Option(NamedTuple):
    """A field of a section: its kind, its name and its default, or `msgspec.NODEFAULT`."""

    kind: Kind
    field: str
    default: Any
    nullable: bool

    def given(self, value: Any, faults: Faults, below: Any) -> Any:
        """The value that its section gets where a map has this one over the section `below`."""
        before = getattr(below, self.field, None)
        if isinstance(self.kind, Nested) and before is not None:
            return self.kind.read(value, faults, before)
        if isinstance(self.kind, Pairs) and isinstance(value, Mapping | None):
            return dict(before or ()) | dict(value or {})
        is_list = isinstance(self.kind, ListOf) and not self.nullable
        return () if value is None and is_list else value


@cache
def options_of(section: type) -> dict[str, Option]:
    """The options of a section by name, such as `max-manifest-size`."""
    hints = get_type_hints(section, include_extras=True)
    found = {}
    for each in fields(section):
        of, *kinds = get_args(hints[each.name]) or (hints[each.name],)
        kind: Kind = kinds[0] if kinds else Nested(of)
        # A word in YAML may stand for None instead.
        nullable = NoneType in get_args(of) and not getattr(kind, "none", "")
        found[hyphened(each.name)] = Option(kind, each.name, each.default, nullable)
    return found


def read_options(section: Struct, between: Iterable[str] = ()) -> None:
    """Put each option of a section as its kind reads it.

    Parameters
    ----------
    section : object
        The section, which has what was given.
    between : iterable of str
        What is wrong between the options, which may have faults of their own.

    Raises
    ------
    ConfigError
        With all faults.
    """
    faults = Faults([])
    for name, option in options_of(type(section)).items():
        given = getattr(section, option.field)
        if given is NODEFAULT:
            faults.at(name)(f"is missing: expected {option.kind.meaning}")
        elif given is not None or not option.nullable:
            force_setattr(section, option.field, option.kind.read(given, faults.at(name)))
    faults.found.extend(between)
    if faults.found:
        raise ConfigError(faults.found)


class Section(Struct, frozen=True):
    """A section between whose options nothing can be wrong."""

    def __post_init__(self) -> None:
        read_options(self)


def plain_values(section: Struct) -> dict[str, Any]:
    """The options of a section by name, as YAML has them."""
    written = {}
    for name, option in options_of(type(section)).items():
        value = getattr(section, option.field)
        written[name] = None if value is None and option.nullable else option.kind.write(value)
    return written


def overlaid[S: Struct](below: S, options: object, place: str = "") -> S:
    """The section that results from changing options of another.

    Sections within are gone into; a list replaces the whole list. Of `sets` and `rules`, which
    belong together, `sets` alone also replaces the rules, by the default.

    Parameters
    ----------
    below : Section
        The section.
    options : mapping
        The options that change, named with hyphens or underscores.
    place : str
        Where the options stand, for messages.

    Raises
    ------
    ConfigError
        With all faults, each with its place.
    """
    faults = Faults([], place)
    found: S = Nested(type(below)).read(options, faults, below)
    if faults.found:
        raise ConfigError(faults.found)
    return found
