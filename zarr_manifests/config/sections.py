"""Sections of the configuration: frozen dataclasses whose fields say what they are.

The fields of a `Section` are annotated with the kind of value and a sentence that says what it is
for: `Annotated[int, Whole(1, 64), "threads that compact"]`. From these follow the checks when a
section is built (`check_options`, so none is ever invalid), writing (`plain_values`), reading a
saved configuration (`saved_values`), and, in `parsing`, the pydantic models that read YAML and the
JSON Schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, ClassVar, Final, NamedTuple, Protocol, get_type_hints

from zarr_manifests.config.kinds import Kind, Word, shown, spelled, under
from zarr_manifests.error_cases import ConfigError

__all__ = [
    "Nested",
    "Option",
    "Section",
    "check_options",
    "options_of",
    "plain_values",
    "saved_values",
]

_OPTIONS: Final[dict[type, dict[str, Option]]] = {}
"""The options of each section that was asked for them."""


class Option(NamedTuple):
    """What a field of a section is.

    Parameters
    ----------
    kind : Kind
        The kind of value.
    about : str
        What it is for, in a sentence.
    also : tuple of str
        Other names under which it is read.
    field : str
        The name of its field.
    default : object
        Its default; `dataclasses.MISSING` if the option must be given.
    """

    kind: Kind
    about: str
    also: tuple[str, ...] = ()
    field: str = ""
    default: Any = MISSING

    @property
    def nullable(self) -> bool:
        """Whether the value may be None."""
        return self.default is None or bool(self.kind.null)


class Section(Protocol):
    """A frozen dataclass whose `__post_init__` calls `check_options`.

    It may have a class attribute `misplaced`, which maps names that might be taken for options here
    to what to say of them.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]


def options_of(section: type[Section]) -> dict[str, Option]:
    """The options of a section by name, such as `max-manifest-size`."""
    if section not in _OPTIONS:
        hints = get_type_hints(section, include_extras=True)
        _OPTIONS[section] = {
            f.name.replace("_", "-"): _option(f, hints[f.name]) for f in fields(section) if f.init
        }
    return _OPTIONS[section]


def _option(field: Field[Any], hint: Any) -> Option:
    kind, *said = hint.__metadata__
    if isinstance(kind, str):  # nothing but what it is for: a section
        kind, said = Nested(hint.__origin__), [kind]
    return Option(kind, *said)._replace(field=field.name, default=field.default)


def check_options(section: Section, between: Callable[[], Iterable[str]] = tuple) -> None:
    """Refuse a section with a faulty value; words are put in lower case.

    `between` says what is wrong between options, each of which is sound.

    Raises
    ------
    ConfigError
        With all faults.
    """
    problems = []
    for name, option in options_of(type(section)).items():
        value = getattr(section, option.field)
        if isinstance(option.kind, Word):
            value = option.kind.read(value)
            object.__setattr__(section, option.field, value)
        if value is not None or not option.nullable:
            problems += [under(name, fault) for fault in option.kind.faults(value)]
    problems = problems or list(between())
    if problems:
        raise ConfigError(problems)


def plain_values(section: Section) -> dict[str, Any]:
    """The options of a section as plain values by name."""
    written = {}
    for name, option in options_of(type(section)).items():
        value = getattr(section, option.field)
        null = value is None and option.nullable
        written[name] = None if null else option.kind.write(value)
    return written


def saved_values(section: type[Section], plain: Mapping[Any, Any]) -> dict[str, Any]:
    """The values by field that `plain_values` wrote, which may lack options.

    Raises
    ------
    ConfigError
        If there is anything else.
    """
    options = options_of(section)
    problems = [f"{spelled(key)}: unknown option" for key in plain if key not in options]
    for name, option in options.items():
        if option.default is MISSING and name not in plain:
            problems.append(f"{name}: is missing")
        elif plain.get(name, option) is None and not option.nullable:
            problems.append(f"{name}: null is not allowed")
    if problems:
        raise ConfigError(problems[:10])
    return {options[name].field: options[name].kind.read(value) for name, value in plain.items()}


class Nested(Kind):
    """A section in a section, or in a list."""

    def __init__(self, section: type[Section]) -> None:
        self.section = section

    def faults(self, value: object) -> Iterator[str]:
        if not isinstance(value, self.section):
            yield f": expected a {self.section.__name__}, got {shown(value)}"

    def read(self, plain: Any) -> Any:
        if not isinstance(plain, Mapping):
            return plain
        return self.section(**saved_values(self.section, plain))

    def write(self, value: Any) -> Any:
        return plain_values(value)
