"""Reading options from plain values, and their JSON Schema: the part that needs pydantic.

Pydantic walks through what is given, finds names that are unknown or missing, goes on after a
fault, and writes the schema. The models come from the options of the sections, whose kinds check
the values. Importing pydantic takes a tenth of a second, so other modules import this one only
when there is something to read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING
from functools import cache, partial
from itertools import islice
from typing import Annotated, Any, Final, NamedTuple, cast

from pydantic import (
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    WrapValidator,
    create_model,
)
from pydantic.json_schema import GenerateJsonSchema

from zarr_manifests.config.kinds import (
    SET_NAME,
    Entry,
    Kind,
    ListOf,
    hyphened,
    known_as,
    shown,
    spelled,
    under,
)
from zarr_manifests.config.manifest_sets import (
    DEFAULT_SET_NAME,
    ChunkManifests,
    ManifestSet,
    NamedSet,
    Rule,
    manifest_set,
)
from zarr_manifests.config.sections import Nested, Option, Section, options_of, plain_values
from zarr_manifests.error_cases import ConfigError

__all__ = ["json_schema", "parse"]

_MAX_FAULTS: Final = 100


def parse[S: Section](section: type[S], options: object, place: str, below: S) -> S:
    """The section that plain values mean, with what they leave out taken from another.

    Sections within are gone into; a list replaces the whole list. Of `sets` and `rules`, which
    belong together, `sets` alone also replaces the rules, by the default.

    Parameters
    ----------
    section : type
        The section's class.
    options : mapping
        Its options, named with hyphens or underscores.
    place : str
        Where the options stand, for messages.
    below : Section
        The section that they change.

    Raises
    ------
    ConfigError
        With all faults, each with its place; at most 100.
    """
    if not isinstance(options, Mapping):
        raise ConfigError([under(place, _not_options(options)).removeprefix(": ")])
    try:
        given = _merged(plain_values(below), options)
        found: S = _adapter(cast("Any", section)).validate_python(given)
    except ValidationError as error:
        problems = [under(place, fault).removeprefix(": ") for fault in _faults_of(error)]
        if len(problems) > _MAX_FAULTS:
            problems[_MAX_FAULTS:] = ["there may be more faults; mend these first"]
        raise ConfigError(problems) from None
    return found


def json_schema(section: type[Section]) -> dict[str, Any]:
    """The JSON Schema of what `parse` reads."""
    return _adapter(cast("Any", section)).json_schema(schema_generator=_Schema)


def _merged(below: Mapping[str, Any], above: Mapping[Any, Any]) -> dict[Any, Any]:
    named = {hyphened(key) for key in above}
    if "sets" in named:  # the rules below are about the sets below
        named.add("rules")
    found = {name: value for name, value in below.items() if name not in named}
    for key, value in above.items():
        inner = below.get(hyphened(key))
        if isinstance(inner, Mapping) and (value is None or isinstance(value, Mapping)):
            value = _merged(inner, value or {})
        found[key] = value
    return found


@cache
def _adapter(section: Any) -> TypeAdapter[Any]:
    return TypeAdapter(_type_of(Nested(section)))


def _faults_of(error: ValidationError) -> list[str]:
    """The faults of a map, relative to it."""
    faults: list[str] = error.errors(include_url=False)[0]["ctx"]["error"].problems
    return faults


# --- the types that pydantic reads ----------------------------------------------------------------


def _type_of(kind: Kind) -> Any:
    """The type that reads values of the kind."""
    match kind:
        case NamedSet():
            body = {name: o for name, o in options_of(ManifestSet).items() if name != "name"}
            named = _Map(ManifestSet.__name__, body, dict, ManifestSet.misplaced).type()
            return Annotated[named, WrapValidator(_read_named_set), _Json(_named_set_schema)]
        case Nested():
            of = kind.section
            misplaced = getattr(of, "misplaced", {})
            return _Map(of.__name__, options_of(of), partial(_built, of), misplaced).type()
        case Entry():
            option = Option(kind.kind, "a regular expression", field=kind.name)
            return _Map("Entry", {kind.name: option}, kind.read).type()
        case ListOf():
            item: Any = _type_of(kind.item)
            items: Any = Annotated[tuple[item, ...], Field(max_length=kind.most)] | None
            read = BeforeValidator(partial(_listed, kind))
            return Annotated[items, read, _Json(partial(_list_schema, kind))]
    checked = PlainValidator(partial(_checked, kind))
    return Annotated[Any, checked, WithJsonSchema(dict(kind.schema))]


def _built(section: type[Section], values: dict[str, Any]) -> Section:
    return section(**values)


class _Map(NamedTuple):
    """A map of options, and what is built of their values by field."""

    title: str
    options: Mapping[str, Option]
    build: Callable[[dict[str, Any]], Any]
    misplaced: Mapping[str, str] = {}

    def type(self) -> Any:
        """The type that reads it; null is the empty map."""
        fields: dict[str, Any] = {
            option.field: self._field(name) for name, option in self.options.items()
        }
        config = ConfigDict(extra="forbid", json_schema_extra=self._with_other_names)
        model = create_model(self.title, __config__=config, **fields)
        required = any(option.default is MISSING for option in self.options.values())
        return Annotated[model if required else model | None, WrapValidator(self._read)]

    def _field(self, name: str) -> tuple[Any, Any]:
        option = self.options[name]
        kind, default = _type_of(option.kind), option.default
        if default is not MISSING and default is not None:
            default = option.kind.write(default)
        described = Field(
            ... if default is MISSING else default,
            validation_alias=AliasChoices(name, option.field, *option.also),
            description=option.about,
        )
        return (kind | None if option.nullable else kind), described

    def _with_other_names(self, schema: dict[str, Any]) -> None:
        for name, option in self.options.items():
            for other in option.also:
                schema["properties"][other] = schema["properties"][name]

    def _read(self, value: object, handler: Callable[[Any], Any]) -> Any:
        given = {} if value is None else value
        if not isinstance(given, Mapping):
            raise ConfigError([_not_options(value)])
        given = {_key(key): entry for key, entry in given.items()}
        try:
            model = handler(given)
            return self.build({name: getattr(model, name) for name in model.model_fields_set})
        except ValidationError as error:
            faults = [*islice(self._faults(given, error), _MAX_FAULTS + 1)]
        if self.title == ChunkManifests.__name__:
            faults = [*dict.fromkeys([*faults, *_between_sets_and_rules(given)])]
        raise ConfigError(faults)

    def _faults(self, given: Mapping[str, Any], error: ValidationError) -> Iterator[str]:
        """What pydantic found, in the order of what is given."""
        order = {key: i for i, key in enumerate(given)}
        found = error.errors(include_url=False)
        for one in sorted(found, key=lambda one: order.get(str(one["loc"][0]), len(order))):
            key, *rest = one["loc"]
            place = spelled(key) + "".join(f"[{step}]" for step in rest)
            match one["type"]:
                case "value_error":
                    yield from (under(place, fault) for fault in one["ctx"]["error"].problems)
                case "missing":
                    yield f"{place}: is missing: {self.options[place].about}"
                case "extra_forbidden":
                    yield f"{place}: {self._unknown(key, given)}"
                case _:
                    yield f"{place}: {one['msg']}"

    def _unknown(self, key: object, given: Mapping[str, Any]) -> str:
        name = _named(self.options, key)
        if name is not None and sum(_named(self.options, other) == name for other in given) > 1:
            return f"{name} is given twice, once in another spelling; keep one"
        said = self.misplaced.get(hyphened(key))
        return said or f"unknown option; {known_as(key, self.options.keys())}"


def _key(key: object) -> str:
    """A key as pydantic can take it: text without halves of surrogate pairs."""
    text = key if isinstance(key, str) else spelled(key)
    return text.encode(errors="backslashreplace").decode()


def _not_options(value: object) -> str:
    return f": expected options and their values, got {shown(value)}"


def _named(options: Mapping[str, Option], key: object) -> str | None:
    """The name of the option that a key means, with hyphens, underscores or another name."""
    name = hyphened(key)
    return next((n for n, option in options.items() if name == n or name in option.also), None)


def _checked(kind: Kind, plain: object) -> Any:
    value = kind.read(plain)
    if faults := [*kind.faults(value)]:
        raise ConfigError(faults)
    return value


def _listed(kind: ListOf, value: Any) -> Any:
    """The list that is given; null is an empty one."""
    if value == kind.none != "":
        return None
    if value is None and not kind.none:
        return ()
    if isinstance(value, Mapping) and isinstance(kind.item, NamedSet):
        value = [{name: body} for name, body in value.items()]
    if not isinstance(value, list | tuple):
        expected = f"{kind.none}, or a list" if kind.none else "a list"
        raise ConfigError(
            [f": expected {expected}, got {shown(value)}; begin each entry with '- '"]
        )
    if len(value) > kind.most:
        raise ConfigError([kind.too_many(len(value))])
    return value


# --- sets and rules -------------------------------------------------------------------------------


def _read_named_set(value: object, handler: Callable[[Any], Any]) -> ManifestSet:
    """The set that a name alone, or a map from it to options, means."""
    entry = {value: None} if isinstance(value, str) else value
    if not isinstance(entry, Mapping) or len(entry) != 1:
        got = shown(list(entry)[:4] if isinstance(entry, Mapping) else entry)
        raise ConfigError(
            [f": expected one name and, further to the right, its options; got {got}"]
        )
    ((name, body),) = entry.items()
    faults = [*SET_NAME.faults(name)]
    place = "" if faults else name
    try:
        values = handler(body)
        if not faults:
            return manifest_set(values | {"name": name})
    except ValidationError as error:
        faults += [under(place, fault) for fault in _faults_of(error)]
    except ConfigError as error:
        faults += [under(place, fault) for fault in error.problems]
    raise ConfigError(faults)


def _between_sets_and_rules(given: Mapping[str, Any]) -> list[str]:
    """What is wrong between sets and rules, some of which have faults of their own."""
    faults: list[str] = []
    entries = {}
    for name in ("sets", "rules"):
        kind = cast("ListOf", options_of(ChunkManifests)[name].kind)
        try:
            entries[name] = _listed(kind, given[name]) if name in given else None
        except ConfigError:  # no list at all: that is said already
            return []
    values: dict[str, Any] = {}
    if entries["sets"] is not None:
        sets = enumerate(entries["sets"])
        values["sets"] = tuple(_stand_in(i, entry, faults) for i, entry in sets)
    if entries["rules"] is not None:
        values["rules"] = tuple(Rule(_target(entry)) for entry in entries["rules"])
    try:
        ChunkManifests(**values)
    except ConfigError as error:
        faults += error.problems
    return faults


def _target(rule: object) -> str:
    """The target of a rule; where there is none, a set that is always there."""
    target: Any = rule.get("target") if isinstance(rule, Mapping) else None
    return DEFAULT_SET_NAME if [*SET_NAME.faults(target)] else target


def _stand_in(i: int, entry: Any, faults: list[str]) -> ManifestSet:
    """The set with what is sound of it, so that other sets and rules find theirs."""
    entry = {entry: None} if isinstance(entry, str) else entry
    only = isinstance(entry, Mapping) and len(entry) == 1
    name, body = next(iter(entry.items())) if only else (None, None)
    if [*SET_NAME.faults(name)]:
        return ManifestSet(f"unnamed{i}")
    options, values = options_of(ManifestSet), {"name": name}
    for key, plain in body.items() if isinstance(body, Mapping) else ():
        known = _named(options, key)
        if known not in (None, "name") and (plain is not None or not options[known].nullable):
            with contextlib.suppress(ConfigError):
                values[options[known].field] = _checked(options[known].kind, plain)
    try:
        return manifest_set(values)
    except ConfigError as error:
        faults += [under(f"sets[{i}].{name}", fault) for fault in error.problems]
    target = values.get("overflow_to") if name != DEFAULT_SET_NAME else None
    return manifest_set({"name": name} | ({"overflow_to": target} if target else {}))


# --- the JSON Schema ------------------------------------------------------------------------------


class _Schema(GenerateJsonSchema):
    """Without titles that only repeat names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


class _Json(NamedTuple):
    """Changes the JSON Schema of a type."""

    change: Callable[[dict[str, Any]], dict[str, Any]]

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> dict[str, Any]:
        return self.change(handler(core))


def _named_set_schema(body: dict[str, Any]) -> dict[str, Any]:
    one = {"minProperties": 1, "maxProperties": 1}
    named = {"type": "object", "propertyNames": SET_NAME.schema, "additionalProperties": body}
    return {"anyOf": [SET_NAME.schema, named | one]}


def _list_schema(kind: ListOf, schema: dict[str, Any]) -> dict[str, Any]:
    listed, null = schema["anyOf"]
    choices = [listed, {"const": kind.none} if kind.none else null]
    if isinstance(kind.item, NamedSet):
        _, one = listed["items"]["anyOf"]
        choices.append(one | {"minProperties": 0, "maxProperties": kind.most})
    return {"anyOf": choices}
