"""Regular expressions for absolute paths, which take time linear in the path (RE2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import re2

from zarr_manifests.config.sections import Faults, Kind
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.runtime import fork_awaited_lock
from zarr_manifests.texts import shown

_MAX_REGEX_CHARS: Final = 1_000
_REGEX_MEMORY_BYTES: Final = 512 * 1024
_SET_MEMORY_BYTES: Final = 16 * 1024 * 1024
# RE2 holds locks of its own while it matches. A child forked meanwhile would wait for them for
# ever, so forks wait for this lock.
_MATCHING: Final = fork_awaited_lock()


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
        raise InvalidArgumentError(
            f"{path!a} is not a path: it is not valid Unicode text"
        ) from error


class PathSet:
    """Regular expressions that are matched all at once.

    One automaton finds all matches in one pass over the path. If it needs more memory than it
    may have, the expressions are matched one by one.

    Examples
    --------
    >>> from zarr_manifests.config.path_regex import PathSet
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
            except re2.error:  # too large together; each alone is within its bounds
                self._together = None

    def __reduce__(self) -> tuple[type[PathSet], tuple[Sequence[str]]]:
        return PathSet, (self._regexes,)

    def matching(self, path: str) -> list[int]:
        """Positions of those that match the whole absolute path, ascending."""
        if self._together is not None:
            with _MATCHING:
                found = sorted(self._together.Match(path))
            # The last one matches any path, so no match at all means that memory ran out.
            if found:
                return found[:-1]
        return [i for i, regex in enumerate(self._regexes) if matches_path(regex, path)]


class Regex(Kind):
    """A regular expression for absolute paths, in the syntax of RE2."""

    schema: Mapping[str, Any] = {"type": "string", "maxLength": _MAX_REGEX_CHARS}

    def read(self, given: Any, faults: Faults) -> Any:
        if not isinstance(given, str):
            faults(f"expected a regular expression, got {shown(given)}; quote it")
        elif len(given) > _MAX_REGEX_CHARS:
            faults(
                f"the regular expression has {len(given)} characters, {_MAX_REGEX_CHARS} are "
                "allowed; use several rules"
            )
        else:
            try:
                _compiled(given)
            except (re2.error, UnicodeEncodeError) as error:
                reason = error.args[0] if isinstance(error, re2.error) else "not Unicode"
                text = reason.decode(errors="replace") if isinstance(reason, bytes) else reason
                faults(
                    f"{shown(given)} is not a regular expression ({text}); the syntax is RE2's, "
                    "without lookaround and backreferences"
                )
        return given


class PathEntry(Regex):
    """A regular expression that YAML writes as a map, such as `path: .*/time`."""

    schema: Mapping[str, Any] = {
        "type": "object",
        "properties": {"path": Regex.schema},
        "required": ["path"],
        "additionalProperties": False,
    }

    def read(self, given: Any, faults: Faults) -> Any:
        if not isinstance(given, Mapping):
            return super().read(given, faults)
        if [*given] != ["path"]:
            faults(f"expected path: and a regular expression, got {shown(given)}")
            return given
        return super().read(given["path"], faults.at("path"))

    def write(self, value: Any) -> Any:
        return {"path": value}
