"""The options of the data source, from the text that Spark passes on to arguments of Python.

Names are those that Iceberg uses. As with all options of Spark, upper and lower case are the same.
Options of the storage begin with `storage.`, such as `storage.region`. An option that is unknown,
has an impossible value or contradicts another one is an error, because an option without effect
would give wrong rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, Final

from zarr_manifests.config import duration_of
from zarr_manifests.errors import ConfigError, InvalidArgumentError
from zarr_manifests.storage.url import parse_options
from zarr_manifests.texts import hyphened, known_as, shown

type _Options = Mapping[str, Callable[[str], Any]]
"""What makes an argument of an option's text, or raises `ValueError` with what it expects."""

# Spark gives a stream's own options to its sink, too.
_CHECKPOINT: Final = "checkpointlocation"
_STORAGE: Final = "storage."


def _text(value: str) -> str:
    if not value.strip():
        raise ValueError("it is empty")
    return value.strip()


def _names(value: str) -> list[str]:
    """Names apart from each other by commas, or a JSON list of names."""
    if not value.lstrip().startswith("["):
        return [_text(name) for name in value.split(",")]
    names = _json(value)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError('expected names, as in ["u", "v"]')
    return list(names)


def _json(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error})") from error


def _ranges(value: str) -> dict[str, Any]:
    """By column, a value, `[lo, hi]`, or a list of such ranges and of values."""
    given = _object('{"lat": [-30, 30]}')(value)
    return {dimension: _range(range_) for dimension, range_ in given.items()}


def _range(given: Any) -> Any:
    """A list of two, which JSON has no other name for, is a pair."""
    if isinstance(given, list) and len(given) == 2 and not any(isinstance(g, list) for g in given):
        return tuple(given)
    return given


def _where(value: str) -> Any:
    """Comparisons as text, or a JSON object of ranges by column."""
    return _ranges(value) if value.lstrip().startswith("{") else _text(value)


def _object(example: str) -> Callable[[str], dict[str, Any]]:
    def read(value: str) -> dict[str, Any]:
        found = _json(value)
        if not isinstance(found, dict):
            raise ValueError(f"expected a JSON object, as in {example}")
        return found

    return read


def _count(value: str, least: int = 1) -> int:
    # int() would accept signs, underscores and digits of other scripts.
    if not (value.isascii() and value.isdigit() and len(value) < 19 and int(value) >= least):
        raise ValueError(f"expected a whole number from {least} on")
    return int(value)


def _one_of(*words: str) -> Callable[[str], str]:
    def read(value: str) -> str:
        if value.lower() not in words:
            raise ValueError(f"expected {', '.join(words[:-1])} or {words[-1]}")
        return value.lower()

    return read


def _flag(value: str) -> bool:
    return _one_of("true", "false")(value) == "true"


def _duration(value: str, advice: str = "") -> timedelta:
    found = duration_of(value)
    if not found:
        raise ValueError(f"expected a duration such as 90s, 36h or 7d{advice}")
    return found


def _lease(value: str) -> timedelta | None:
    return None if value.strip().lower() == "none" else _duration(value, ", or none")


_PLACE: Final[_Options] = {
    "group": _text,
    "branch": _text,
    "virtual-containers": _object('{"era5": "s3://bucket/era5"}'),
    "authorize": _names,
}
"""The options of reads and writes."""
# What a view may have that rows are inserted into, and which says nothing about where they go.
_EITHER: Final[_Options] = {
    "variables": _names,
    "nan": _one_of("null", "keep", "drop"),
    "lease": _lease,
}
_READ: Final[_Options] = {
    "version": _text,
    "where": _where,
    "decode-times": _flag,
    "broadcast": _flag,
    "target-rows": _count,
    "max-tasks": _count,
    "layout": _one_of("long", "chunk"),
}
CHANGES: Final[_Options] = {"start-snapshot-id": _text, "end-snapshot-id": _text}
"""The options of the cells that were added between two snapshots."""
STREAM: Final[_Options] = {
    "starting-snapshot": _text,
    "max-commits-per-trigger": _count,
    "max-bytes-per-trigger": _count,
    "streaming-overwrite-mode": _one_of("fail", "skip", "added-only"),
    "keep-for": _duration,
}
"""The options that only a stream has."""
_WRITE: Final[_Options] = {
    "dims": _names,
    "append-dim": _text,
    "region": _ranges,
    "missing": _one_of("fill", "keep", "error"),
    "duplicates": _one_of("error", "last"),
    "order-by": _text,
    "tolerance": _object('{"lat": 1e-6}'),
    "statistics": _flag,
    "message": _text,
    "txn-app-id": _text,
    "txn-version": lambda value: _count(value, least=0),
    "write.buffer-bytes": _count,
}
"""The options that only a write has. A view that rows are inserted into has them too."""
_ALL: Final[_Options] = {**_PLACE, **_EITHER, **_READ, **CHANGES, **STREAM, **_WRITE}
# Of each of these, both contradict each other.
_APART: Final = (
    *((change, other) for change in CHANGES for other in ("version", "branch")),
    *(("lease", of_stream) for of_stream in STREAM),
)


def read_options(given: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """Return the location, and the arguments of a read that the options give.

    Options of a write are checked and left out, since a view to insert into has both. Without a
    version, the branch is read.

    Parameters
    ----------
    given : mapping of str to str
        The options as Spark passes them on. `path` is the location.

    Raises
    ------
    InvalidArgumentError
        If there is no location, or options are unknown, malformed or contradict each other; it
        names all of them.

    Examples
    --------
    >>> from zarr_manifests.spark.options import read_options
    >>> read_options({"path": "winds", "variables": "u, v", "Target-Rows": "1000"})
    ('winds', {'variables': ['u', 'v'], 'target_rows': 1000})
    >>> read_options({"path": "winds", "target_rows": "1000"})
    Traceback (most recent call last):
        ...
    zarr_manifests.errors.InvalidArgumentError: option 'target_rows' is unknown: did you mean \
target-rows?
    """
    location, arguments, _ = _parsed(given)
    taken(arguments, _WRITE)
    branch = arguments.pop("branch", None)
    return location, arguments if branch is None else {"version": branch} | arguments


def write_options(given: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """Return the location, and the arguments of a write that the options give.

    Parameters
    ----------
    given : mapping of str to str
        The options as Spark passes them on. `path` is the location.

    Raises
    ------
    InvalidArgumentError
        As `read_options`; also if options say what to read.

    Examples
    --------
    >>> from zarr_manifests.spark.options import write_options
    >>> write_options({"path": "winds", "dims": "time,lat", "append-dim": "time"})
    ('winds', {'dims': ['time', 'lat'], 'append_dim': 'time'})
    """
    known = {name: value for name, value in given.items() if name.lower() != _CHECKPOINT}
    location, arguments, names = _parsed(known)
    reads = [name for name in names if name in {**_READ, **CHANGES, **STREAM}]
    if reads:
        raise InvalidArgumentError(
            f"a write does not take {' and '.join(reads)}, which say what to read"
        )
    taken(arguments, _EITHER)
    return location, arguments


def _parsed(given: Mapping[str, str]) -> tuple[str, dict[str, Any], list[str]]:
    """The location, the arguments, and the names of the options in lower case."""
    texts = {name.lower(): value for name, value in given.items()}
    location = texts.pop("path", "")
    arguments: dict[str, Any] = {}
    faults = []
    if not location:
        faults.append(
            "there is no location: load(url) or save(url) gives it, and in SQL path 'url'"
        )
    of_storage = {name: texts.pop(name) for name in list(texts) if name.startswith(_STORAGE)}
    if of_storage and location:
        try:
            arguments["storage_options"] = parse_options(
                location, {name.removeprefix(_STORAGE): text for name, text in of_storage.items()}
            )
        except ConfigError as error:
            faults += [f"option {_STORAGE}{problem}" for problem in error.problems]
    for name, text in texts.items():
        if name not in _ALL:
            advice = known_as(hyphened(name), _ALL)
            faults.append(f"option {name[:64]!r} is unknown: {advice}")
            continue
        try:
            arguments[_argument(name)] = _ALL[name](text)
        except ValueError as error:
            faults.append(f"option {name!r} cannot be {shown(text)}: {error}")
    for pair in _APART:
        if {*pair} <= texts.keys():
            faults.append(f"options {' and '.join(pair)} contradict each other: give one of them")
    if "end-snapshot-id" in texts and "start-snapshot-id" not in texts:
        faults.append(
            "option end-snapshot-id needs start-snapshot-id; to read one snapshot, version"
        )
    if faults:
        raise InvalidArgumentError("; ".join(faults))
    return location, arguments, list(texts)


def _argument(name: str) -> str:
    return name.removeprefix("write.").replace("-", "_")


def taken(arguments: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Take the arguments that the options of these names give out of those of `read_options`."""
    wanted = map(_argument, names)
    return {name: arguments.pop(name) for name in wanted if name in arguments}
