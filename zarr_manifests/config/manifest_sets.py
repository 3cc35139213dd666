"""How manifests are planned: which arrays' chunk refs are packed together, split, and preloaded.

A *manifest set* is a group of manifests with limits; *rules* send arrays to sets, the first that
matches wins; an array that finds no room in a set overflows to the next, at the end to the set
`default`, which takes anything.

Invariants: names of sets are unique and `default` is among them; every set but `default`
overflows to a set, and following that one always comes to `default`; every rule's target is
there; every regular expression compiles, to an automaton whose time is linear in the path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Final

from zarr_manifests.config.kinds import (
    MAX_REFS,
    OVERFLOW,
    REF_NAME,
    SET_NAME,
    Along,
    AlongKind,
    Entry,
    Kind,
    ListOf,
    Whole,
    known_as,
    shown,
)
from zarr_manifests.config.path_regex import PathSet, Regex, matches_path
from zarr_manifests.config.sections import Nested, check_options, plain_values, saved_values
from zarr_manifests.error_cases import ConfigError

__all__ = [
    "DEFAULT_SET_NAME",
    "ChunkManifests",
    "Interval",
    "ManifestSet",
    "NamedSet",
    "Preload",
    "Rule",
    "Split",
    "manifest_set",
]

DEFAULT_SET_NAME: Final = "default"
_DEFAULT_SET_REFS: Final = 1_000_000
_MAX_SETS: Final = 64
_MAX_RULES: Final = 256
_MAX_REFS_TO_LOAD: Final = 256
_MAX_PATHS: Final = 64
_REMEMBERED: Final = 16_384


@dataclass(frozen=True, slots=True)
class ManifestSet:
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

    name: Annotated[str, SET_NAME, "what rules and other sets call it"]
    max_manifest_size: Annotated[
        int | None,
        Whole(1, MAX_REFS, "unlimited"),
        "chunk refs per manifest; `null` without `arrays-per-manifest` means no limit",
        ("max-size",),
    ] = None
    arrays_per_manifest: Annotated[
        int | None,
        Whole(1, 1_000_000, "not packed by number"),
        "arrays per manifest, the biggest with the smallest; instead of `max-manifest-size`",
        ("max-arrays-per-manifest",),
    ] = None
    overflow_to: Annotated[
        str | None, OVERFLOW, "the set that gets an array for which there is no room"
    ] = DEFAULT_SET_NAME
    cardinality: Annotated[
        int | None, Whole(1, 1_000_000, "unlimited"), "manifests in the set; `null` for any number"
    ] = 1

    misplaced: ClassVar = {"name": "unknown option; the name stands before the colon"}

    def __post_init__(self) -> None:
        check_options(self, self._faults_between)

    def _faults_between(self) -> Iterator[str]:
        if self.max_manifest_size is not None and self.arrays_per_manifest is not None:
            yield (
                "arrays-per-manifest: a set is packed by this or by max-manifest-size, not by "
                "both; leave one out"
            )
        if self.name != DEFAULT_SET_NAME:
            if self.overflow_to is None:
                yield "overflow-to: only the set default overflows nowhere; name a set, or default"
            return
        if self.overflow_to is not None:
            yield (
                "overflow-to: the set default takes what is left and overflows nowhere; remove it"
            )
        if self.cardinality is not None:
            yield "cardinality: the set default has any number of manifests; remove it, or use null"


def manifest_set(values: Mapping[str, Any]) -> ManifestSet:
    """The set with these values by field; `default` has other defaults than the others."""
    if values["name"] == DEFAULT_SET_NAME:
        values = {"overflow_to": None, "cardinality": None, **values}
        if values.get("arrays_per_manifest") is None:
            values = {"max_manifest_size": _DEFAULT_SET_REFS, **values}
    return ManifestSet(**values)


class NamedSet(Nested):
    """A set as YAML has it: its name, with the options below it."""

    def __init__(self) -> None:
        super().__init__(ManifestSet)

    def read(self, plain: Any) -> Any:
        if not isinstance(plain, Mapping) or len(plain) != 1:
            return plain
        ((name, body),) = plain.items()
        if not isinstance(body, Mapping):
            return plain
        return manifest_set(saved_values(ManifestSet, {**body, "name": name}))

    def write(self, value: Any) -> Any:
        body = plain_values(value)
        limits = ("max-manifest-size", "arrays-per-manifest")
        del body["name"], body[limits[value.arrays_per_manifest is None]]
        return {value.name: body}


_DEFAULT_SET: Final = manifest_set({"name": DEFAULT_SET_NAME})


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
        problems = [
            f"expected a number from 0 to {MAX_REFS} or null, got {shown(end)}"
            for end in (self.low, self.high)
            if end is not None and (type(end) is not int or not 0 <= end <= MAX_REFS)
        ]
        if not problems and self.low is not None and self.high is not None and self.low > self.high:
            problems = [f"[{self.low}, {self.high}] is empty; give the smaller number first"]
        if problems:
            raise ConfigError(problems)

    def __contains__(self, number: int) -> bool:
        return (self.low is None or self.low <= number) and (
            self.high is None or number <= self.high
        )


class _IntervalKind(Kind):
    """An interval; a list of two in YAML."""

    schema: Mapping[str, Any] = {
        "type": "array",
        "items": {"type": ["integer", "null"], "minimum": 0, "maximum": MAX_REFS},
        "minItems": 2,
        "maxItems": 2,
    }

    def faults(self, value: object) -> Iterator[str]:
        if not isinstance(value, Interval):
            yield f": expected [lowest, highest], got {shown(value)}; in Python, an Interval"

    def read(self, plain: Any) -> Any:
        if not isinstance(plain, list | tuple) or len(plain) != 2:
            return plain
        try:
            return Interval(*plain)
        except ConfigError as error:
            raise ConfigError([f": {problem}" for problem in error.problems]) from None

    def write(self, value: Any) -> Any:
        return [value.low, value.high]


@dataclass(frozen=True, slots=True)
class Rule:
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

    target: Annotated[str, SET_NAME, "the name of a set"]
    path: Annotated[
        str | None,
        Regex(),
        "a regular expression that matches the whole absolute path, such as `/winds/u`",
    ] = None
    metadata_chunks: Annotated[
        Interval | None,
        _IntervalKind(),
        "`[lowest, highest]`: how many chunks the array has by its shape. Both ends are "
        "included, `null` is an open end",
    ] = None
    initialized_chunks: Annotated[
        Interval | None,
        _IntervalKind(),
        "the same for how many chunks have been written, which is fewer for sparse arrays",
    ] = None

    def __post_init__(self) -> None:
        check_options(self)

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


class _RuleKind(Nested):
    """A rule; conditions that it does not have are not written."""

    def write(self, value: Any) -> Any:
        return {name: one for name, one in plain_values(value).items() if one is not None}


@dataclass(frozen=True, slots=True)
class Split:
    """Splits the arrays of some paths into leaves, which are packed one by one.

    Parameters
    ----------
    path : str
        A regular expression that matches the whole absolute path; the first split wins.
    along : tuple of (str or int, int)
        Dimension name or axis, and the chunks of a leaf along it.
    """

    path: Annotated[str, Regex(), "matches the whole absolute path (RE2 syntax)"]
    along: Annotated[Along, AlongKind(), "chunks of a leaf by dimension name or axis"]

    def __post_init__(self) -> None:
        check_options(self, self._faults_between)

    def _faults_between(self) -> Iterator[str]:
        names = [axis for axis, _ in self.along]
        if len(set(names)) < len(names):
            yield f"along: a dimension is named twice in {shown(names)}"

    def matches(self, path: str) -> bool:
        """Whether it is about the array with that absolute path."""
        return matches_path(self.path, path)


@dataclass(frozen=True, slots=True)
class Preload:
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

    max_manifest_size: Annotated[
        int, Whole(0, MAX_REFS), "manifests with more chunk refs are not preloaded"
    ] = 50_000
    max_manifests: Annotated[
        int, Whole(0, 10_000), "how many are preloaded at most; 0 turns preloading off"
    ] = 64
    arrays: Annotated[
        tuple[str, ...] | None,
        ListOf(Entry("path", Regex()), _MAX_PATHS),
        "a list of `path: regular expression`. `null`: every coordinate, that is, a "
        "one-dimensional array named as its own dimension",
    ] = None
    branches: Annotated[
        tuple[str, ...],
        ListOf(REF_NAME, _MAX_REFS_TO_LOAD),
        "branches that are preloaded when the repository is opened, before there is a session",
    ] = ()
    tags: Annotated[
        tuple[str, ...],
        ListOf(REF_NAME, _MAX_REFS_TO_LOAD),
        "tags that are preloaded then, too",
    ] = ()

    def __post_init__(self) -> None:
        check_options(self)

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


class _Memo:
    """Holds what was worked out from a `ChunkManifests`; a pickle of it is empty."""

    choice: _Choice | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Memo, ()


@dataclass(frozen=True, slots=True)
class ChunkManifests:
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

    sets: Annotated[
        tuple[ManifestSet, ...],
        ListOf(NamedSet(), _MAX_SETS),
        "groups of manifests and their limits; order breaks ties",
    ] = _DEFAULT_SETS
    rules: Annotated[
        tuple[Rule, ...],
        ListOf(_RuleKind(Rule), _MAX_RULES),
        "which arrays go to which set; the first that matches wins",
    ] = _DEFAULT_RULES
    splitting: Annotated[
        tuple[Split, ...] | None,
        ListOf(Nested(Split), _MAX_RULES, none="none"),
        "arrays that are split into leaves; none keeps all whole; without it, those are "
        "split that do not fit into the set default",
    ] = ()
    preload: Annotated[Preload, "what is fetched when a session opens"] = field(default=Preload())
    _memo: _Memo = field(default_factory=_Memo, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sets: Any = self.sets
        names = {getattr(one, "name", "") for one in (sets if isinstance(sets, tuple) else ())}
        if isinstance(sets, tuple) and DEFAULT_SET_NAME not in names:
            object.__setattr__(self, "sets", (*self.sets, _DEFAULT_SET))
        # By identity: a rule that somebody wrote is never dropped, even if it is the same.
        if self.rules is _DEFAULT_RULES and _COORDINATES not in names:
            object.__setattr__(self, "rules", ())
        check_options(self, self._faults_between)

    def _faults_between(self) -> Iterator[str]:
        by_name: dict[str, ManifestSet] = {}
        for i, one in enumerate(self.sets):
            if one.name in by_name:
                yield f"sets[{i}].{one.name}: another set has this name; choose a new one"
            by_name.setdefault(one.name, one)
        for i, one in enumerate(self.sets):
            place = f"sets[{i}].{one.name}.overflow-to"
            if one.overflow_to is not None and one.overflow_to not in by_name:
                known = known_as(one.overflow_to, by_name)
                yield f"{place}: there is no set {one.overflow_to!r}; {known}"
            way = _circle(one, by_name)
            if way and one.name == min(way, key=list(by_name).index):  # each circle once
                yield (
                    f"{place}: the sets overflow in a circle ({' -> '.join([*way, one.name])}); "
                    "let one overflow to default"
                )
        for i, rule in enumerate(self.rules):
            if rule.target not in by_name:
                known = known_as(rule.target, by_name)
                yield f"rules[{i}].target: there is no set {rule.target!r}; {known}"

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
        if self._memo.choice is None:
            self._memo.choice = _Choice(self)
        return self._memo.choice


def _circle(start: ManifestSet, by_name: Mapping[str, ManifestSet]) -> list[str]:
    """The names on the way from a set back to itself by overflow; empty if there is none."""
    way, at = [start.name], start.overflow_to
    while at is not None and at in by_name and at not in way:
        way.append(at)
        at = by_name[at].overflow_to
    return way if at == start.name else []
