"""How manifests are planned: which arrays' chunk refs are packed together, split, and preloaded.

A *manifest set* is a group of manifests with limits; *rules* send arrays to sets, the first that
matches wins; an array that finds no room in a set overflows to the next, at the end to the set
`default`, which takes anything.

Invariants: names of sets are unique and `default` is among them; every set but `default`
overflows to a set, and following that one always comes to `default`; every rule's target is
there; every regular expression compiles, to an automaton whose time is linear in the path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, Final

from zarr_manifests.config.kinds import (
    MAX_REFS,
    REF_NAME,
    SET_NAME,
    Along,
    AlongKind,
    Interval,
    IntervalKind,
    PathsKind,
    SetNameKind,
)
from zarr_manifests.config.options import (
    Faults,
    Kind,
    ListOf,
    Nested,
    PathSet,
    Regex,
    Section,
    Whole,
    described,
    known_as,
    matches_path,
    options_of,
    shown,
    spelled,
    within,
)
from zarr_manifests.errors import ConfigError

__all__ = [
    "DEFAULT_SET_NAME",
    "ChunkManifests",
    "Interval",
    "ManifestSet",
    "Preload",
    "Rule",
    "Split",
]

DEFAULT_SET_NAME: Final = "default"
_DEFAULT_SET_REFS: Final = 1_000_000
_MAX_SETS: Final = 64
_MAX_RULES: Final = 256
_MAX_REFS_TO_LOAD: Final = 256
_REMEMBERED: Final = 16_384


@dataclass(frozen=True, slots=True)
class ManifestSet(Section):
    """A group of manifests, and what they may hold.

    Parameters
    ----------
    name : str
        What rules and other sets call it.
    max_manifest_size : int or None
        Refs in a manifest. None, with no `arrays_per_manifest`: as many as there are.
    arrays_per_manifest : int or None
        Arrays in a manifest; instead of `max_manifest_size`.
    overflow_to : str or None
        The set that takes arrays for which there is no room. None for `default`, and only there.
    cardinality : int or None
        Manifests in the set; None for any number, which `default` always has.

    Raises
    ------
    ConfigError
        If a value is out of range, both limits are given, or `default` is limited in number.
    """

    name: str = field(metadata=described(SET_NAME, "what rules and other sets call it"))
    max_manifest_size: int | None = field(
        default=None,
        metadata=described(
            Whole(1, MAX_REFS, "unlimited"),
            "chunk refs in a manifest; null for no limit",
            ("max-size",),
        ),
    )
    arrays_per_manifest: int | None = field(
        default=None,
        metadata=described(
            Whole(1, 1_000_000, "not packed by number"),
            "arrays in a manifest, instead of max-manifest-size",
            ("max-arrays-per-manifest",),
        ),
    )
    overflow_to: str | None = field(
        default=DEFAULT_SET_NAME,
        metadata=described(SetNameKind(), "the set that takes arrays for which there is no room"),
    )
    cardinality: int | None = field(
        default=1,
        metadata=described(
            Whole(1, 1_000_000, "unlimited"), "manifests in the set; null for any number"
        ),
    )

    def _check_together(self, faults: Faults) -> None:
        if self.max_manifest_size is not None and self.arrays_per_manifest is not None:
            faults.add(
                "arrays-per-manifest",
                "a set is packed by this or by max-manifest-size, not by both; leave one out",
            )
        if self.name != DEFAULT_SET_NAME:
            if self.overflow_to is None:
                faults.add(
                    "overflow-to", "only the set default overflows nowhere; name a set, or default"
                )
            return
        if self.overflow_to is not None:
            faults.add(
                "overflow-to", "the set default takes what is left and overflows nowhere; remove it"
            )
        if self.cardinality is not None:
            faults.add(
                "cardinality", "the set default has any number of manifests; remove it, or use null"
            )


@dataclass(frozen=True, slots=True)
class _Sets(Kind[tuple[ManifestSet, ...]]):
    """Sets as YAML has them: a list of single names, each with the options below it."""

    def read(
        self, value: object, place: str, faults: Faults, base: tuple[ManifestSet, ...]
    ) -> tuple[ManifestSet, ...]:
        if isinstance(value, Mapping):
            value = [{name: body} for name, body in value.items()]
        if value is None:
            value = []
        if not isinstance(value, list | tuple):
            faults.add(place, f"expected a list of sets, got {shown(value)}; begin each with '- '")
            return base
        if len(value) > _MAX_SETS:
            faults.add(place, f"{len(value)} sets, at most {_MAX_SETS} are allowed")
            return base
        return tuple(self._one(entry, f"{place}[{i}]", faults) for i, entry in enumerate(value))

    def _one(self, entry: object, place: str, faults: Faults) -> ManifestSet:
        # What cannot be read leaves a set behind, so that other sets and rules find theirs.
        unnamed = ManifestSet(f"unnamed{place.rpartition('[')[2].rstrip(']')}")
        if isinstance(entry, str):
            entry = {entry: None}
        if not isinstance(entry, Mapping) or len(entry) != 1:
            names = list(entry)[:4] if isinstance(entry, Mapping) else entry
            faults.add(
                place,
                f"expected one name and, further to the right, its options; got {shown(names)}",
            )
            return unnamed
        ((name, body),) = entry.items()
        before = len(faults.problems)
        SET_NAME.check(name, place, faults)
        if len(faults.problems) > before:
            name = unnamed.name
        else:
            place = within(place, name)
        return self._body(name, body, place, faults)

    def _body(self, name: str, body: object, place: str, faults: Faults) -> ManifestSet:
        last = name == DEFAULT_SET_NAME
        base = _DEFAULT_SET if last else ManifestSet(name)
        if isinstance(body, Mapping) and "name" in body:
            faults.add(within(place, "name"), "unknown option; the name stands before the colon")
            body = {key: value for key, value in body.items() if key != "name"}
        values = ManifestSet.read_options(body, place, faults, base)
        if last and values["arrays_per_manifest"] and not _gives_size(body):
            values["max_manifest_size"] = None
        try:
            return ManifestSet(**values)
        except ConfigError as error:
            faults.add_within(place, error.problems)
            return replace(base, overflow_to=base.overflow_to and values["overflow_to"])

    def check(self, value: object, place: str, faults: Faults) -> None:
        if not isinstance(value, tuple):
            faults.add(place, f"expected a tuple, got {shown(value)}")
            return
        if len(value) > _MAX_SETS:
            faults.add(place, f"{len(value)} sets, at most {_MAX_SETS} are allowed")
            return
        for i, entry in enumerate(value):
            Nested(ManifestSet).check(entry, f"{place}[{i}]", faults)

    def write(self, value: tuple[ManifestSet, ...]) -> Any:
        written = []
        for one in value:
            body = one.write()
            limits = ("max-manifest-size", "arrays-per-manifest")
            del body["name"], body[limits[one.arrays_per_manifest is None]]
            written.append({one.name: body})
        return written

    def schema(self) -> dict[str, Any]:
        body = ManifestSet.schema()
        properties = {name: of for name, of in body["properties"].items() if name != "name"}
        body = {
            "type": ["object", "null"],
            "additionalProperties": False,
            "properties": properties,
        }
        name = SET_NAME.schema()
        by_name = {
            "type": "object",
            "propertyNames": name,
            "additionalProperties": body,
        }
        one = {"anyOf": [name, by_name | {"minProperties": 1, "maxProperties": 1}]}
        listed = {"type": ["array", "null"], "items": one, "maxItems": _MAX_SETS}
        return {"anyOf": [listed, by_name | {"maxProperties": _MAX_SETS}]}


def _gives_size(body: object) -> bool:
    names = ("max-manifest-size", *options_of(ManifestSet)["max-manifest-size"].also)
    return isinstance(body, Mapping) and any(
        spelled(key).replace("_", "-") in names for key in body
    )


_DEFAULT_SET: Final = ManifestSet(DEFAULT_SET_NAME, _DEFAULT_SET_REFS, None, None, None)
_CHUNKS_RANGE: Final = "[lowest, highest], both included; null for an open end"


@dataclass(frozen=True, slots=True)
class Rule(Section):
    """Sends the arrays that meet all its conditions to a manifest set.

    Parameters
    ----------
    target : str
        The set's name.
    path : str or None
        A regular expression that matches the whole absolute path, such as `/group/array`.
    metadata_chunks : Interval or None
        How many chunks the array has by its shape.
    initialized_chunks : Interval or None
        How many of them have been written.

    Examples
    --------
    >>> rule = Rule("coordinates", ".*/(lat|lon)", Interval(0, 500))
    >>> rule.matches("/winds/lat", 12, 12), rule.matches("/winds/lat/bounds", 12, 12)
    (True, False)
    """

    target: str = field(metadata=described(SET_NAME, "the set that matching arrays go to"))
    path: str | None = field(
        default=None,
        metadata=described(Regex(), "matches the whole absolute path (RE2 syntax)"),
    )
    metadata_chunks: Interval | None = field(
        default=None,
        metadata=described(IntervalKind(), f"chunks the array has by its shape: {_CHUNKS_RANGE}"),
    )
    initialized_chunks: Interval | None = field(
        default=None,
        metadata=described(IntervalKind(), f"chunks that have been written: {_CHUNKS_RANGE}"),
    )

    def matches(self, path: str, metadata_chunks: int, initialized_chunks: int) -> bool:
        """Whether an array with that absolute path and those numbers of chunks meets it."""
        return self.takes(metadata_chunks, initialized_chunks) and (
            self.path is None or matches_path(self.path, path)
        )

    def takes(self, metadata_chunks: int, initialized_chunks: int) -> bool:
        """Whether an array with those numbers of chunks meets it, if its path does."""
        return (self.metadata_chunks is None or metadata_chunks in self.metadata_chunks) and (
            self.initialized_chunks is None or initialized_chunks in self.initialized_chunks
        )


@dataclass(frozen=True, slots=True)
class Split(Section):
    """Splits the arrays of some paths into leaves, which are packed one by one.

    Parameters
    ----------
    path : str
        A regular expression that matches the whole absolute path; the first split wins.
    along : tuple of (str or int, int)
        Dimension name or axis, and the chunks of a leaf along it.
    """

    path: str = field(metadata=described(Regex(), "matches the whole absolute path (RE2 syntax)"))
    along: Along = field(
        metadata=described(AlongKind(), "chunks of a leaf by dimension name or axis")
    )

    def _check_together(self, faults: Faults) -> None:
        names = [axis for axis, _ in self.along]
        if len(set(names)) < len(names):
            faults.add("along", f"a dimension is named twice in {shown(names)}")

    def matches(self, path: str) -> bool:
        """Whether it is about the array with that absolute path."""
        return matches_path(self.path, path)


@dataclass(frozen=True, slots=True)
class _SplittingKind(Kind[tuple[Split, ...] | None]):
    """`none`, or a list of splits."""

    splits: ClassVar[ListOf[Split]] = ListOf(
        Nested(Split, fresh=True), Split(".*", ((0, 1),)), _MAX_RULES
    )

    def read(
        self, value: object, place: str, faults: Faults, base: tuple[Split, ...] | None
    ) -> tuple[Split, ...] | None:
        if value == "none":
            return None
        if isinstance(value, list | tuple):
            return self.splits.read(value, place, faults, base or ())
        faults.add(place, f"expected none, or a list of paths to split, got {shown(value)}")
        return base

    def check(self, value: object, place: str, faults: Faults) -> None:
        if value is not None:
            self.splits.check(value, place, faults)

    def write(self, value: tuple[Split, ...] | None) -> Any:
        return "none" if value is None else self.splits.write(value)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [{"const": "none"}, self.splits.schema() | {"type": "array"}]}


@dataclass(frozen=True, slots=True)
class Preload(Section):
    """Which manifests are fetched in the background when a session opens.

    Parameters
    ----------
    max_manifest_size : int
        Refs in a manifest beyond which it is not preloaded.
    max_manifests : int
        How many are preloaded at most; 0 for none.
    arrays : tuple of str or None
        Regular expressions that match whole absolute paths. None: every coordinate, that is a
        one-dimensional array named as its own dimension.
    branches, tags : tuple of str
        Refs whose manifests are preloaded when the repository is opened.
    """

    max_manifest_size: int = field(
        default=50_000,
        metadata=described(Whole(0, MAX_REFS), "refs beyond which a manifest is not preloaded"),
    )
    max_manifests: int = field(
        default=64,
        metadata=described(Whole(0, 10_000), "how many manifests are preloaded at most; 0: none"),
    )
    arrays: tuple[str, ...] | None = field(
        default=None,
        metadata=described(
            PathsKind(),
            "the arrays whose manifests are preloaded, by path; null: every coordinate "
            "(a one-dimensional array named as its own dimension)",
        ),
    )
    branches: tuple[str, ...] = field(
        default=(),
        metadata=described(
            ListOf(REF_NAME, "main", _MAX_REFS_TO_LOAD),
            "branches preloaded when the repository is opened",
        ),
    )
    tags: tuple[str, ...] = field(
        default=(),
        metadata=described(
            ListOf(REF_NAME, "main", _MAX_REFS_TO_LOAD),
            "tags preloaded when the repository is opened",
        ),
    )

    def matches(self, path: str) -> bool:
        """Whether `arrays` names the array with that absolute path; none if `arrays` is None."""
        return any(matches_path(regex, path) for regex in self.arrays or ())


_COORDINATES: Final = "coordinates"
_DEFAULT_SETS: Final = (ManifestSet(_COORDINATES, 50_000), _DEFAULT_SET)
_DEFAULT_RULES: Final = (Rule(_COORDINATES, ".*", Interval(0, 5_000)),)


class _Choice:
    """What `ChunkManifests` says of an array, found quickly and remembered for a while.

    There may be hundreds of rules and splits, and thousands of arrays that are asked about.
    """

    def __init__(self, config: ChunkManifests) -> None:
        rules, splits = config.rules, config.splitting or ()
        self._rules = rules
        self._by_name = {one.name: one for one in config.sets}
        self._with_path = [i for i, rule in enumerate(rules) if rule.path is not None]
        self._without = [i for i, rule in enumerate(rules) if rule.path is None]
        self._paths = PathSet([rule.path for rule in rules if rule.path is not None])
        self._splits, self._split_paths = splits, PathSet([split.path for split in splits])
        self.set_for = lru_cache(maxsize=_REMEMBERED)(self._set_for)
        self.split_for = lru_cache(maxsize=_REMEMBERED)(self._split_for)

    def _set_for(
        self, path: str, metadata_chunks: int, initialized_chunks: int
    ) -> tuple[ManifestSet, Rule | None]:
        due = self._without
        if self._with_path:
            due = sorted([*due, *(self._with_path[i] for i in self._paths.matching(path))])
        for i in due:
            rule = self._rules[i]
            if rule.takes(metadata_chunks, initialized_chunks):
                return self._by_name[rule.target], rule
        return self._by_name[DEFAULT_SET_NAME], None

    def _split_for(self, path: str) -> Split | None:
        found = self._split_paths.matching(path) if self._splits else []
        return self._splits[found[0]] if found else None


class _Remembering:
    """A place beside the options for what follows from them."""

    __slots__ = ("_choice",)
    _choice: _Choice


@dataclass(frozen=True, slots=True)
class ChunkManifests(Section, _Remembering):
    """Which arrays' chunk refs are packed together, split, and preloaded.

    Parameters
    ----------
    sets : tuple of ManifestSet
        The sets, in an order that breaks ties; `default` is added if it is missing.
    rules : tuple of Rule
        What goes where; the first that matches wins, and what none matches goes to `default`.
        Unless given, arrays of at most 5,000 chunks go to `coordinates`, should there be a set
        of that name.
    splitting : tuple of Split or None
        What is split into leaves, and how. What no entry matches is split only where it does not
        fit into `default`. None keeps all arrays whole.
    preload : Preload
        What is fetched when a session opens.

    Raises
    ------
    ConfigError
        If a name is used twice or is not there, or sets overflow in a circle.

    Examples
    --------
    >>> planned = ChunkManifests()
    >>> planned.set_for("/winds/lat", 12, 12)[0].name, planned.set_for("/winds/u", 9_000, 0)
    ('coordinates', (ManifestSet(name='default', ...), None))
    """

    sets: tuple[ManifestSet, ...] = field(
        default=_DEFAULT_SETS,
        metadata=described(_Sets(), "groups of manifests and their limits; order breaks ties"),
    )
    rules: tuple[Rule, ...] = field(
        default=_DEFAULT_RULES,
        metadata=described(
            ListOf(Nested(Rule, fresh=True), Rule(DEFAULT_SET_NAME), _MAX_RULES),
            "which arrays go to which set; the first that matches wins",
        ),
    )
    splitting: tuple[Split, ...] | None = field(
        default=(),
        metadata=described(
            _SplittingKind(),
            "arrays that are split into leaves; none keeps all whole; without it, those are "
            "split that do not fit into the set default",
        ),
    )
    preload: Preload = field(
        default=Preload(),
        metadata=described(Nested(Preload), "what is fetched when a session opens"),
    )

    def __post_init__(self) -> None:
        sets: Any = self.sets
        names = {getattr(one, "name", "") for one in (sets if isinstance(sets, tuple) else ())}
        if isinstance(sets, tuple) and DEFAULT_SET_NAME not in names:
            object.__setattr__(self, "sets", (*self.sets, _DEFAULT_SET))
        # By identity: a rule that somebody wrote is never dropped, even if it is the same.
        if self.rules is _DEFAULT_RULES and _COORDINATES not in names:
            object.__setattr__(self, "rules", ())
        Section.__post_init__(self)

    @classmethod
    def _completed(cls, values: dict[str, Any], given: object) -> dict[str, Any]:
        if isinstance(given, Mapping) and "sets" in given and "rules" not in given:
            return values | {"rules": _DEFAULT_RULES}  # others are about sets that were there
        return values

    def _check_together(self, faults: Faults) -> None:
        by_name: dict[str, ManifestSet] = {}
        for i, one in enumerate(self.sets):
            if one.name in by_name:
                faults.add(f"sets[{i}].{one.name}", "another set has this name; choose a new one")
            by_name.setdefault(one.name, one)
        for i, one in enumerate(self.sets):
            place = f"sets[{i}].{one.name}.overflow-to"
            if one.overflow_to is not None and one.overflow_to not in by_name:
                known = known_as(one.overflow_to, by_name)
                faults.add(place, f"there is no set {one.overflow_to!r}; {known}")
            way = _circle(one, by_name)
            if way and one.name == min(way, key=list(by_name).index):  # each circle once
                faults.add(
                    place,
                    f"the sets overflow in a circle ({' -> '.join([*way, one.name])}); let one "
                    "overflow to default",
                )
        for i, rule in enumerate(self.rules):
            if rule.target not in by_name:
                known = known_as(rule.target, by_name)
                faults.add(f"rules[{i}].target", f"there is no set {rule.target!r}; {known}")

    @property
    def default_set(self) -> ManifestSet:
        """The last set, which takes anything."""
        return next(one for one in self.sets if one.name == DEFAULT_SET_NAME)

    def ordered_sets(self) -> tuple[ManifestSet, ...]:
        """The sets, each after those that overflow to it; ties in the order of `sets`."""
        left, ordered = list(self.sets), []
        while left:
            targets = {one.overflow_to for one in left}
            due = next(one for one in left if one.name not in targets)
            left.remove(due)
            ordered.append(due)
        return tuple(ordered)

    def set_for(
        self, path: str, metadata_chunks: int, initialized_chunks: int
    ) -> tuple[ManifestSet, Rule | None]:
        """The set of an array and the rule that says so; `default` and None if none matches.

        Parameters
        ----------
        path : str
            Absolute, such as `/group/array`.
        metadata_chunks, initialized_chunks : int
            Chunks it has by its shape, and those that have been written.
        """
        return self._chosen().set_for(path, metadata_chunks, initialized_chunks)

    def split_for(self, path: str) -> Split | None:
        """The first split about the array with that absolute path."""
        return self._chosen().split_for(path)

    def _chosen(self) -> _Choice:
        try:
            return self._choice
        except AttributeError:  # not yet, or this one came out of a pickle
            choice = _Choice(self)
            object.__setattr__(self, "_choice", choice)
            return choice


def _circle(start: ManifestSet, by_name: Mapping[str, ManifestSet]) -> list[str]:
    """The names on the way from a set back to itself by overflow; empty if there is none."""
    way, at = [start.name], start.overflow_to
    while at is not None and at in by_name and at not in way:
        way.append(at)
        at = by_name[at].overflow_to
    return way if at == start.name else []
