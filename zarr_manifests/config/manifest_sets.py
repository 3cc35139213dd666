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
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Final

import re2
from msgspec import Struct
from msgspec.structs import force_setattr

from zarr_manifests.config.sections import (
    ANY_NAME,
    Faults,
    Kind,
    ListOf,
    Nested,
    Pairs,
    Scalar,
    Section,
    matches,
    plain_values,
    read_options,
    text,
    whole,
)
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.runtime import fork_awaited_lock
from zarr_manifests.texts import known_as, listed, shown, spelled

DEFAULT_SET_NAME: Final = "default"
_COORDINATES: Final = "coordinates"
MAX_REFS: Final = 1_000_000_000_000
_MAX_AXES: Final = 32
_MAX_SETS: Final = 64
_MAX_RULES: Final = 256
_SET_NAME: Final = text(
    r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}",
    "a name of at most 64 letters, digits and _ . - that begins with no . or -",
)
_MAX_REGEX_CHARS: Final = 1_000
_REGEX_MEMORY_BYTES: Final = 512 * 1024
_LOCK: Final = fork_awaited_lock()


@lru_cache(maxsize=1024)
def _compiled(regex: str) -> Any:
    options = re2.Options()
    options.max_mem = _REGEX_MEMORY_BYTES
    options.log_errors = False
    options.dot_nl = True  # a path may hold anything, and `.*` is any path
    return re2.compile(regex, options)


@lru_cache(maxsize=16_384)  # there are thousands of arrays, and each is asked about several times
def matching(regexes: tuple[str, ...], path: str) -> list[int]:
    """Positions of the regexes that match the whole absolute path, ascending.

    In time linear to the length of the path.

    Examples
    --------
    >>> from zarr_manifests.config.manifest_sets import matching
    >>> matching((".*/lat", "/a/.*", ".*/lon"), "/a/lat")
    [0, 1]
    """
    try:
        # RE2 holds locks of its own while it matches, and a child forked meanwhile waits for ever.
        # So forks wait for our lock.
        with _LOCK:
            return [i for i, regex in enumerate(regexes) if _compiled(regex).fullmatch(path)]
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"{path!a} is not a path: it is no valid Unicode text"
        ) from error


def _is_regex(value: Any) -> bool:
    try:
        return isinstance(value, str) and len(value) <= _MAX_REGEX_CHARS and bool(_compiled(value))
    except (re2.error, UnicodeEncodeError):
        return False


_REGEX: Final = Scalar(
    f"a regular expression of at most {_MAX_REGEX_CHARS:,} characters, in the syntax of RE2, "
    "without lookaround and backreferences",
    _is_regex,
)


class _PathEntry(Kind):
    """A regular expression that YAML writes as a map, such as `path: .*/time`."""

    def read(self, given: Any, faults: Faults) -> Any:
        if isinstance(given, Mapping) and [*given] == ["path"]:
            given, faults = given["path"], faults.at("path")
        return _REGEX.read(given, faults)

    def write(self, value: Any) -> Any:
        return {"path": value}


class ManifestSet(Struct, frozen=True):
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

    name: Annotated[str, _SET_NAME]
    max_manifest_size: Annotated[int | None, whole(1, MAX_REFS)] = None
    arrays_per_manifest: Annotated[int | None, whole(1, 1_000_000)] = None
    overflow_to: Annotated[str | None, _SET_NAME] = DEFAULT_SET_NAME
    cardinality: Annotated[int | None, whole(1, 1_000_000)] = 1

    other_names: ClassVar = {
        "max-size": "max-manifest-size",
        "max-arrays-per-manifest": "arrays-per-manifest",
    }
    resets: ClassVar = {"arrays_per_manifest": "max_manifest_size"}

    def __post_init__(self) -> None:
        read_options(self, self._faults_between())

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


class _NamedSet(Nested):
    """A set as YAML has it: its name, with the options below it."""

    def read(self, given: Any, faults: Faults, *_: Any) -> Any:
        entry = {given: None} if isinstance(given, str) else given
        if isinstance(given, ManifestSet):
            return given
        if not isinstance(entry, Mapping) or len(entry) != 1:
            faults(f"expected one name and, further to the right, its options; got {shown(given)}")
            return given
        ((name, body),) = entry.items()
        below = _DEFAULT_SET if name == DEFAULT_SET_NAME else None
        found = super().read(body, faults.at(spelled(name)), below, {"name": name})
        is_known = isinstance(found, ManifestSet) or not _SET_NAME.sound(name)
        return found if is_known else ManifestSet(name)  # whose name other entries may say

    def write(self, value: Any) -> Any:
        body = plain_values(value)
        limits = ("max-manifest-size", "arrays-per-manifest")
        del body["name"], body[limits[value.arrays_per_manifest is None]]
        return {value.name: body}


_DEFAULT_SET: Final = ManifestSet(DEFAULT_SET_NAME, 1_000_000, overflow_to=None, cardinality=None)


type Interval = tuple[int | None, int | None]


class _IntervalKind(Kind):
    """The lowest and the highest of whole numbers, both included; None is an open end."""

    end: ClassVar = whole(0, MAX_REFS)

    def read(self, given: Any, faults: Faults) -> Any:
        if not isinstance(given, list | tuple) or len(given) != 2:
            faults(f"expected [lowest, highest], got {shown(given)}")
            return given
        ends = [self.end.read(each, faults) for each in given if each is not None]
        if [*map(type, ends)] == [int, int] and ends[0] > ends[1]:
            faults(f"{shown(given)} is empty; give the smaller number first")
        return tuple(given)

    def write(self, value: Any) -> Any:
        return list(value)


def _within(number: int, interval: Interval | None) -> bool:
    low, high = interval or (None, None)
    return (low is None or low <= number) and (high is None or number <= high)


class Rule(Section, frozen=True):
    """Sends the arrays that meet all its conditions to a manifest set.

    Parameters
    ----------
    target : str
        The set's name.
    path : str or None
        A regular expression that matches the whole absolute path, such as `/group/array`.
    metadata_chunks : tuple of int or None, optional
        The lowest and the highest number of chunks that the array has by its shape. Both are
        included; None is an open end.
    initialized_chunks : tuple of int or None, optional
        The same for how many chunks have been written, which is fewer for sparse arrays.

    Examples
    --------
    >>> rule = Rule("coordinates", ".*/(lat|lon)", (0, 500))
    >>> rule.takes(500, 12), rule.takes(501, 12)
    (True, False)
    """

    target: Annotated[str, _SET_NAME]
    path: Annotated[str | None, _REGEX] = None
    metadata_chunks: Annotated[Interval | None, _IntervalKind()] = None
    initialized_chunks: Annotated[Interval | None, _IntervalKind()] = None

    def takes(self, metadata_chunks: int, initialized_chunks: int) -> bool:
        """Whether an array with those numbers of chunks meets it, if its path does."""
        return _within(metadata_chunks, self.metadata_chunks) and _within(
            initialized_chunks, self.initialized_chunks
        )


class _RuleKind(Nested):
    """A rule; conditions that it does not have are not written."""

    def write(self, value: Any) -> Any:
        return {name: one for name, one in plain_values(value).items() if one is not None}


def _is_dimension(value: Any) -> bool:
    return matches(ANY_NAME, value) or (type(value) is int and 0 <= value < _MAX_AXES)


_ALONG: Final = Pairs(
    Scalar(f"a dimension name, quoted, or an axis below {_MAX_AXES}", _is_dimension),
    whole(1, MAX_REFS),
    "dimension names (or axes) and the chunks along them, such as {time: 720}",
    least=1,
    most=_MAX_AXES,
)


class Split(Section, frozen=True):
    """Splits the arrays of some paths into leaves, which are packed one by one.

    Parameters
    ----------
    path : str
        A regular expression that matches the whole absolute path; the first split wins.
    along : tuple of (str or int, int)
        Dimension name or axis, and the chunks of a leaf along it.
    """

    path: Annotated[str, _REGEX]
    along: Annotated[tuple[tuple[str | int, int], ...], _ALONG]


class Preload(Section, frozen=True):
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
    """

    max_manifest_size: Annotated[int, whole(0, MAX_REFS)] = 50_000
    max_manifests: Annotated[int, whole(0, 10_000)] = 64
    arrays: Annotated[tuple[str, ...] | None, ListOf(_PathEntry(), most=64)] = None

    def matches(self, path: str) -> bool:
        """Whether `arrays` names the array with that absolute path; none if `arrays` is None."""
        return bool(matching(self.arrays or (), path))


_DEFAULT_SETS: Final = (ManifestSet(_COORDINATES, 50_000), _DEFAULT_SET)
_DEFAULT_RULES: Final = (Rule(_COORDINATES, ".*", (0, 5_000)),)


class ChunkManifests(Struct, frozen=True):
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
        If a value is wrong, a name is used twice or is not there, or sets overflow in a circle.

    Examples
    --------
    >>> planned = ChunkManifests()
    >>> planned.set_for("/winds/lat", 12, 12)[0].name, planned.set_for("/winds/u", 9_000, 0)
    ('coordinates', (ManifestSet(name='default', ...), None))
    """

    sets: Annotated[tuple[ManifestSet, ...], ListOf(_NamedSet(ManifestSet), _MAX_SETS)] = (
        _DEFAULT_SETS
    )
    rules: Annotated[tuple[Rule, ...], ListOf(_RuleKind(Rule), _MAX_RULES)] = _DEFAULT_RULES
    splitting: Annotated[
        tuple[Split, ...] | None, ListOf(Nested(Split), _MAX_RULES, none="none")
    ] = ()
    preload: Preload = Preload()

    resets: ClassVar = {"sets": "rules"}  # which are about the sets below

    def __post_init__(self) -> None:
        # By identity: a rule that somebody wrote is never dropped, even if it is the same.
        by_default = self.rules is _DEFAULT_RULES
        read_options(self, self._faults_between(by_default))
        names = [one.name for one in self.sets]
        if DEFAULT_SET_NAME not in names:
            force_setattr(self, "sets", (*self.sets, _DEFAULT_SET))
            read_options(self)  # it is one of as many as are allowed
        if by_default and _COORDINATES not in names:
            force_setattr(self, "rules", ())

    def _faults_between(self, by_default: bool) -> Iterator[str]:
        """What is wrong between sets and rules, which may have faults of their own."""
        places, targets = dict[str, str](), dict[str, str | None]()
        for i, one in enumerate[Any](self.sets):
            if isinstance(one, ManifestSet) and one.name in targets:
                yield f"sets[{i}].{one.name}: another set has this name; choose a new one"
            elif isinstance(one, ManifestSet):
                places[one.name], targets[one.name] = f"sets[{i}].{one.name}", one.overflow_to
        targets.setdefault(DEFAULT_SET_NAME, None)
        for name, target in targets.items():
            if target is not None and target not in targets:
                near = known_as(target, targets)
                yield f"{places[name]}.overflow-to: there is no set {shown(target)}; {near}"
        left: Mapping[str, str | None] = targets
        while ends := [name for name, target in left.items() if target not in left]:
            left = {name: target for name, target in left.items() if name not in ends}
        if left:
            yield (
                f"{places[next(iter(left))]}.overflow-to: the sets overflow in a circle "
                f"({listed(left)}); let one overflow to default"
            )
        for i, rule in enumerate(() if by_default else self.rules):
            target = rule.get("target") if isinstance(rule, dict) else getattr(rule, "target", None)
            if isinstance(target, str) and target not in targets:
                near = known_as(target, targets)
                yield f"rules[{i}].target: there is no set {shown(target)}; {near}"

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
        paths = tuple(".*" if rule.path is None else rule.path for rule in self.rules)
        rules = (self.rules[i] for i in matching(paths, path))
        rule = next((r for r in rules if r.takes(metadata_chunks, initialized_chunks)), None)
        target = DEFAULT_SET_NAME if rule is None else rule.target
        return next(one for one in self.sets if one.name == target), rule

    def split_for(self, path: str) -> Split | None:
        """The first split about the array with that absolute path."""
        splits = self.splitting or ()
        found = matching(tuple(split.path for split in splits), path)
        return splits[found[0]] if found else None
