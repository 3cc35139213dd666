"""How options are described: once, for building, reading, writing, and editors.

A section of the configuration is a frozen dataclass whose fields carry an `Option`: the kind of
value, what it is for, and other spellings. From these follow

- the checks when a section is built (`Section.__post_init__`), so that none is ever invalid;
- `read`, from the plain values of YAML, which goes on after a fault and reports every one with
  its place; what is left out is taken from a section to start from;
- `write`, back to plain values, and `schema`, the JSON Schema.

Invariant: reading takes time and memory in proportion to the bounds of the kinds, not to what is
given; at most 100 faults are kept.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from typing import Any, ClassVar, Final, Self, cast

import re2

from zarr_manifests.errors import ConfigError, InvalidArgumentError
from zarr_manifests.runtime import fork_awaited_lock

__all__ = [
    "Choice",
    "Faults",
    "Kind",
    "ListOf",
    "Nested",
    "Option",
    "PathSet",
    "Pattern",
    "Ratio",
    "Regex",
    "Section",
    "Whole",
    "described",
    "known_as",
    "matches_path",
    "options_of",
    "shown",
    "spelled",
    "within",
]

MAX_FAULTS: Final = 100
MAX_REGEX_CHARS: Final = 1_000
_REGEX_MEMORY_BYTES: Final = 512 * 1024
_SET_MEMORY_BYTES: Final = 16 * 1024 * 1024
_MATCHING: Final = fork_awaited_lock()
"""While RE2 matches it holds locks of its own, and not Python's: a child forked in the midst of it
would wait for them for ever."""


class Faults:
    """The faults found so far, each with its place."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def add(self, place: str, problem: str) -> None:
        """Note a fault; when there are too many, raise `ConfigError` with all so far."""
        self.problems.append(f"{place}: {problem}" if place else problem)
        if len(self.problems) >= MAX_FAULTS:
            self.problems.append("there may be more faults; mend these first")
            self.throw()

    def add_within(self, place: str, problems: Iterable[str]) -> None:
        """Note faults whose places are relative to `place`."""
        for problem in problems:
            self.add("", within(place, problem))

    def throw(self) -> None:
        """Raise `ConfigError` if there are any."""
        if self.problems:
            raise ConfigError(self.problems)


def within(place: str, name: str) -> str:
    """The place of an option in a section."""
    return f"{place}.{name}" if place else name


def shown(value: object) -> str:
    """A value as a message shows it: never longer than a line."""
    try:
        return reprlib.repr(value)[:80]
    except ValueError:  # a number with thousands of digits is not printed
        return "a number that is too large"


def spelled(key: object) -> str:
    """A key as it stands in a place: never longer than a name."""
    return key[:64] if isinstance(key, str) else shown(key)[:64]


def known_as(name: object, known: Iterable[str]) -> str:
    """The mend for a name that is not known: the one that was meant, or all there are."""
    names = list(known)
    close = difflib.get_close_matches(spelled(name), names, 1)
    if close:
        return f"did you mean {close[0]}?"
    return f"known are {', '.join(sorted(names)[:20])}" if names else "there are none"


class Kind[T](ABC):
    """A kind of value."""

    @abstractmethod
    def read(self, value: object, place: str, faults: Faults, base: T) -> T:
        """The value that YAML's `value` means; `base` where it has a fault, which is noted."""

    @abstractmethod
    def check(self, value: object, place: str, faults: Faults) -> None:
        """Note what is wrong with a value that a section was built with."""

    def write(self, value: T) -> Any:
        """As a plain value, which `read` understands."""
        return value

    @abstractmethod
    def schema(self) -> dict[str, Any]:
        """The JSON Schema of what `read` understands."""


class _Plain[T](Kind[T]):
    """A kind whose values are written as they are."""

    def read(self, value: object, place: str, faults: Faults, base: T) -> T:
        before = len(faults.problems)
        self.check(value, place, faults)
        return base if len(faults.problems) > before else cast("T", value)


@dataclass(frozen=True, slots=True)
class Whole(_Plain[int | None]):
    """A whole number from `low` to `high`; or null, if `null` says what that means."""

    low: int
    high: int
    null: str = ""

    def check(self, value: object, place: str, faults: Faults) -> None:
        if value is None and self.null:
            return
        if type(value) is not int:
            null = f" or null ({self.null})" if self.null else ""
            faults.add(place, f"expected a whole number{null}, got {shown(value)}")
        elif not self.low <= value <= self.high:
            faults.add(place, f"{shown(value)} is not within {self.low} to {self.high}")

    def schema(self) -> dict[str, Any]:
        kind = ["integer", "null"] if self.null else "integer"
        return {"type": kind, "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class Ratio(_Plain[float]):
    """A number from `low` to `high`."""

    low: float
    high: float

    def check(self, value: object, place: str, faults: Faults) -> None:
        if type(value) not in (int, float):
            faults.add(place, f"expected a number, got {shown(value)}")
        elif not self.low <= cast("float", value) <= self.high:
            faults.add(place, f"{shown(value)} is not within {self.low} to {self.high}")

    def schema(self) -> dict[str, Any]:
        return {"type": "number", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class Choice(_Plain[str]):
    """One of some words."""

    words: tuple[str, ...]

    def check(self, value: object, place: str, faults: Faults) -> None:
        if not isinstance(value, str) or value not in self.words:
            faults.add(place, f"{shown(value)} is none of {', '.join(self.words)}")

    def schema(self) -> dict[str, Any]:
        return {"enum": list(self.words)}


@dataclass(frozen=True, slots=True)
class Pattern(_Plain[str]):
    """A text that must look like `pattern`, which `meaning` says in words."""

    pattern: str
    meaning: str

    def check(self, value: object, place: str, faults: Faults) -> None:
        if not isinstance(value, str) or re.fullmatch(self.pattern, value, re.ASCII) is None:
            faults.add(place, f"expected {self.meaning}, got {shown(value)}")

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": f"^{self.pattern}$"}


@lru_cache(maxsize=1024)
def _compiled(regex: str) -> Any:
    return re2.compile(regex, _re2_options(_REGEX_MEMORY_BYTES))


def _re2_options(memory_bytes: int) -> Any:
    options = re2.Options()
    options.max_mem = memory_bytes
    options.log_errors = False
    options.dot_nl = True  # a path may hold anything, and `.*` is any path
    return options


def matches_path(regex: str, path: str) -> bool:
    """Whether the regex matches the whole absolute path, in time linear to its length."""
    compiled = _compiled(regex)
    try:
        with _MATCHING:
            return compiled.fullmatch(path) is not None
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"{path!a} is no path: it is no valid Unicode text") from error


class PathSet:
    """Regular expressions that are tried all at once.

    One automaton of all of them says which match a path, in one walk along it. Where it becomes
    too large for the memory it may have, they are tried one by one.

    Examples
    --------
    >>> from zarr_manifests.config.options import PathSet
    >>> PathSet([".*/lat", "/a/.*", ".*/lon"]).matching("/a/lat")
    [0, 1]
    """

    def __init__(self, regexes: Sequence[str], memory_bytes: int = _SET_MEMORY_BYTES) -> None:
        self._regexes = tuple(regexes)
        self._together: Any = None
        if len(self._regexes) > 1:
            together = re2.Set.FullMatchSet(_re2_options(memory_bytes))
            try:
                for regex in (*self._regexes, ".*"):
                    together.Add(regex)
                together.Compile()
                self._together = together
            except re2.error:  # too large; each for itself it is within its bounds
                self._together = None

    def matching(self, path: str) -> list[int]:
        """Positions of those that match the whole absolute path, ascending."""
        if self._together is not None:
            with _MATCHING:
                found = sorted(self._together.Match(path))
            # The last one matches whatever comes, so nothing at all means that memory ran out.
            if found:
                return found[:-1]
        return [i for i, regex in enumerate(self._regexes) if matches_path(regex, path)]


@dataclass(frozen=True, slots=True)
class Regex(_Plain[str]):
    """A regular expression for absolute paths, in the syntax of RE2."""

    def check(self, value: object, place: str, faults: Faults) -> None:
        if not isinstance(value, str):
            faults.add(place, f"expected a regular expression, got {shown(value)}; quote it")
        elif len(value) > MAX_REGEX_CHARS:
            faults.add(
                place,
                f"the regular expression has {len(value)} characters, {MAX_REGEX_CHARS} are "
                "allowed; use several rules",
            )
        else:
            try:
                _compiled(value)
            except (re2.error, UnicodeEncodeError) as error:
                reason = error.args[0] if isinstance(error, re2.error) else "not Unicode"
                text = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
                faults.add(
                    place,
                    f"{shown(value)} is not a regular expression ({text}); the syntax is RE2's, "
                    "without lookaround and backreferences",
                )

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "maxLength": MAX_REGEX_CHARS}


@dataclass(frozen=True, slots=True)
class ListOf[T](Kind[tuple[T, ...]]):
    """A list of at most `most` values; null is the empty list."""

    item: Kind[T]
    stand_in: T
    most: int

    def read(self, value: object, place: str, faults: Faults, base: tuple[T, ...]) -> tuple[T, ...]:
        if value is None:
            return ()
        if not isinstance(value, list | tuple):
            faults.add(place, f"expected a list, got {shown(value)}; begin each entry with '- '")
            return base
        if self._too_long(value, place, faults):
            return base
        # A stand-in takes the place of what cannot be read, so that the others keep theirs.
        return tuple(
            self.item.read(entry, f"{place}[{i}]", faults, self.stand_in)
            for i, entry in enumerate(value)
        )

    def check(self, value: object, place: str, faults: Faults) -> None:
        if not isinstance(value, tuple):
            faults.add(place, f"expected a tuple, got {shown(value)}")
        elif not self._too_long(value, place, faults):
            for i, entry in enumerate(value):
                self.item.check(entry, f"{place}[{i}]", faults)

    def _too_long(self, value: list[Any] | tuple[Any, ...], place: str, faults: Faults) -> bool:
        if len(value) > self.most:
            faults.add(place, f"{len(value)} entries, at most {self.most} are allowed")
        return len(value) > self.most

    def write(self, value: tuple[T, ...]) -> Any:
        return [self.item.write(entry) for entry in value]

    def schema(self) -> dict[str, Any]:
        return {"type": ["array", "null"], "items": self.item.schema(), "maxItems": self.most}


@dataclass(frozen=True, slots=True)
class Option:
    """What a field of a section is.

    Parameters
    ----------
    kind : Kind
        The kind of value.
    about : str
        What it is for, in a sentence.
    also : tuple of str
        Other names that are read.
    """

    kind: Kind[Any]
    about: str
    also: tuple[str, ...] = ()


def described(kind: Kind[Any], about: str, also: tuple[str, ...] = ()) -> dict[str, Any]:
    """The metadata that makes a dataclass's field an option."""
    return {"option": Option(kind, about, also)}


def options_of(section: type[Section]) -> dict[str, Option]:
    """The options of a section by name, such as `max-manifest-size`."""
    return {f.name.replace("_", "-"): f.metadata["option"] for f in fields(section)}


class Section:
    """What sections of the configuration have in common; each is a frozen dataclass."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __post_init__(self) -> None:
        faults = Faults()
        for name, option in options_of(type(self)).items():
            field = name.replace("-", "_")
            value = getattr(self, field)
            if value is not None or _default(type(self), field) is not None:
                option.kind.check(value, name, faults)
        faults.throw()
        self._check_together(faults)
        faults.throw()

    def _check_together(self, faults: Faults) -> None:
        """Note what is wrong between options, each of which is right in itself."""

    @classmethod
    def read(cls, value: object, place: str, faults: Faults, base: Self | None) -> Self | None:
        """The section that YAML's `value` means, with the options of `base` where it has none.

        Where an option has a fault, which is noted, the section has that of `base`. None if the
        faults are such that there is no section.
        """
        values = cls._completed(cls.read_options(value, place, faults, base), value)
        if not set(_required(cls)) <= values.keys():
            return None
        try:
            return cls(**values)
        except ConfigError as error:
            faults.add_within(place, error.problems)
            return None

    @classmethod
    def _completed(cls, values: dict[str, Any], given: object) -> dict[str, Any]:
        """The values of the options, seeing what was given: some depend on others."""
        return values

    @classmethod
    def read_options(
        cls, value: object, place: str, faults: Faults, base: Section | None
    ) -> dict[str, Any]:
        """The values of the options by field: those of `base`, and over them what is given."""
        values = {} if base is None else {f.name: getattr(base, f.name) for f in fields(base)}
        if value is None:  # the name of a section with nothing below it
            value = {}
        if not isinstance(value, Mapping):
            faults.add(place, f"expected options and their values, got {shown(value)}")
            return values
        options, seen = options_of(cls), set[str]()
        for key, entry in value.items():
            here, name = within(place, spelled(key)), _name_of(key, options)
            if name is None:
                faults.add(here, f"unknown option; {known_as(key, options)}")
                continue
            if name in seen:
                faults.add(here, f"{name} is given twice, once in another spelling; keep one")
                continue
            seen.add(name)
            field = name.replace("-", "_")
            if entry is None and _default(cls, field) is None:
                values[field] = None
                continue
            start = values.get(field, _default(cls, field))
            found = options[name].kind.read(entry, here, faults, start)
            if found is not MISSING:
                values[field] = found
        for field in _required(cls):
            if field not in values and field not in seen:
                name = field.replace("_", "-")
                faults.add(within(place, name), f"is missing: {options[name].about}")
        return values

    def write(self) -> dict[str, Any]:
        """The options as plain values by name."""
        return {
            name: option.kind.write(getattr(self, name.replace("-", "_")))
            for name, option in options_of(type(self)).items()
        }

    @classmethod
    def schema(cls) -> dict[str, Any]:
        """The JSON Schema of the section."""
        properties: dict[str, Any] = {}
        for name, option in options_of(cls).items():
            entry = {"description": option.about} | option.kind.schema()
            default = _default(cls, name.replace("-", "_"))
            if default is not MISSING:
                entry["default"] = None if default is None else option.kind.write(default)
            for spelling in (name, *option.also):
                properties[spelling] = entry
        schema = {"type": ["object", "null"], "additionalProperties": False}
        required = [field.replace("_", "-") for field in _required(cls)]
        if required:
            schema |= {"type": "object", "required": required}
        return schema | {"properties": properties}


def _required(section: type[Section]) -> list[str]:
    """The fields without which there is no section."""
    return [f.name for f in fields(section) if _default(section, f.name) is MISSING]


def _default(section: type[Section], field: str) -> Any:
    found = section.__dataclass_fields__[field]
    return found.default if found.default_factory is MISSING else found.default_factory()


def _name_of(key: object, options: Mapping[str, Option]) -> str | None:
    """The option that a key names, with hyphens, underscores or in another spelling."""
    name = spelled(key).replace("_", "-")
    if name in options:
        return name
    return next((known for known, option in options.items() if name in option.also), None)


@dataclass(frozen=True, slots=True)
class Nested[S: Section](Kind[S]):
    """A section in a section, or in a list.

    `fresh` says that what is left out has its default, not the value of what is replaced.
    """

    section: type[S]
    fresh: bool = False

    def read(self, value: object, place: str, faults: Faults, base: S) -> S:
        found = self.section.read(value, place, faults, None if self.fresh else base)
        return base if found is None else found

    def check(self, value: object, place: str, faults: Faults) -> None:
        if not isinstance(value, self.section):
            faults.add(place, f"expected a {self.section.__name__}, got {shown(value)}")

    def write(self, value: S) -> Any:
        written = value.write()
        # Null says what leaving out says, but where there is a value below.
        return {k: v for k, v in written.items() if v is not None} if self.fresh else written

    def schema(self) -> dict[str, Any]:
        return self.section.schema()
