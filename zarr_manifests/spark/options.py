"""The options of the data source, from the text that Spark passes on to arguments of Python.

Names are those that Iceberg uses. As with all options of Spark, upper and lower case are the same.
Options of the storage begin with `storage.`, such as `storage.region`. An option that is unknown,
has an impossible value or contradicts another one is an error, because an option without effect
would give wrong rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from zarr_manifests.config.repository_config import duration_of
from zarr_manifests.error_cases import ConfigError
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.storage.url import parse_options
from zarr_manifests.texts import hyphened, known_as, shown

__all__ = [
    "CHANGES",
    "LOCATION",
    "OPTIONS",
    "STREAM",
    "WRITE",
    "SourceOption",
    "read_options",
    "taken",
    "write_options",
]

LOCATION: Final = "path"
"""The option that `load(url)` and `save(url)` set, and that SQL has to give."""
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


def _count(value: str) -> int:
    # int() would accept signs, underscores and digits of other scripts.
    if not (value.isascii() and value.isdigit() and len(value) < 19 and int(value)):
        raise ValueError("expected a whole number from 1 on")
    return int(value)


def _version(value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) < 19):
        raise ValueError("expected a whole number from 0 on")
    return int(value)


def _flag(value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ValueError("expected true or false")
    return value.lower() == "true"


def _one_of(*words: str) -> Callable[[str], str]:
    def read(value: str) -> str:
        if value.lower() not in words:
            raise ValueError(f"expected {', '.join(words[:-1])} or {words[-1]}")
        return value.lower()

    return read


def _duration(value: str) -> timedelta:
    found = duration_of(value)
    if not found:
        raise ValueError("expected a duration such as 90s, 36h or 7d")
    return found


def _lease(value: str) -> timedelta | None:
    try:
        return None if value.strip().lower() == "none" else _duration(value)
    except ValueError as error:
        raise ValueError("expected a duration such as 90s, 36h or 7d, or none") from error


@dataclass(frozen=True, slots=True)
class SourceOption:
    """An option of the data source.

    Parameters
    ----------
    argument : str
        The argument that it gives, of `read`, of `changes` or of a stream.
    read : callable
        From the option's text to the argument; raises `ValueError` with what it expects.
    """

    argument: str
    read: Callable[[str], Any]


OPTIONS: Final[Mapping[str, SourceOption]] = {
    "group": SourceOption("group", _text),
    "variables": SourceOption("variables", _names),
    "version": SourceOption("version", _text),
    "branch": SourceOption("branch", _text),
    "start-snapshot-id": SourceOption("start", _text),
    "end-snapshot-id": SourceOption("end", _text),
    "where": SourceOption("where", _where),
    "on-empty": SourceOption("on_empty", _one_of("empty", "error")),
    "decode-times": SourceOption("decode_times", _flag),
    "broadcast": SourceOption("broadcast", _flag),
    "nan": SourceOption("nan", _one_of("null", "keep", "drop")),
    "target-rows": SourceOption("target_rows", _count),
    "max-tasks": SourceOption("max_tasks", _count),
    "layout": SourceOption("layout", _one_of("long", "chunk")),
    "lease": SourceOption("lease", _lease),
    "virtual-containers": SourceOption(
        "virtual_containers", _object('{"era5": "s3://bucket/era5"}')
    ),
    "authorize": SourceOption("authorize", _names),
    "starting-snapshot": SourceOption("starting_snapshot", _text),
    "max-commits-per-trigger": SourceOption("max_commits", _count),
    "max-bytes-per-trigger": SourceOption("max_bytes", _count),
    "streaming-overwrite-mode": SourceOption(
        "overwrite_mode", _one_of("fail", "skip", "added-only")
    ),
    "keep-for": SourceOption("keep_for", _duration),
    "dims": SourceOption("dims", _names),
    "append-dim": SourceOption("append_dim", _text),
    "region": SourceOption("region", _ranges),
    "missing": SourceOption("missing", _one_of("fill", "keep", "error")),
    "duplicates": SourceOption("duplicates", _one_of("error", "last")),
    "order-by": SourceOption("order_by", _text),
    "tolerance": SourceOption("tolerance", _object('{"lat": 1e-6}')),
    "statistics": SourceOption("statistics", _flag),
    "message": SourceOption("message", _text),
    "txn-app-id": SourceOption("txn_app_id", _text),
    "txn-version": SourceOption("txn_version", _version),
    "write.buffer-bytes": SourceOption("buffer_bytes", _count),
}
"""The options by name."""

CHANGES: Final = ("start-snapshot-id", "end-snapshot-id")
"""The options of the cells that were added between two snapshots."""
STREAM: Final = (
    "starting-snapshot",
    "max-commits-per-trigger",
    "max-bytes-per-trigger",
    "streaming-overwrite-mode",
    "keep-for",
)
"""The options that only a stream has."""
WRITE: Final = (
    "dims",
    "append-dim",
    "region",
    "missing",
    "duplicates",
    "order-by",
    "tolerance",
    "statistics",
    "message",
    "txn-app-id",
    "txn-version",
    "write.buffer-bytes",
)
"""The options that only a write has. A view that rows are inserted into has them too."""
# What a view may have that rows are inserted into, and which says nothing about where they go.
_EITHER: Final = (
    "group",
    "branch",
    "virtual-containers",
    "authorize",
    "variables",
    "nan",
    "on-empty",
    "lease",
)
# Of each of these, two or more contradict each other.
_APART: Final[tuple[tuple[str, ...], ...]] = (
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
    taken(arguments, WRITE)
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
    location, arguments, texts = _parsed(known)
    reads = [name for name in texts if name in OPTIONS and name not in (*WRITE, *_EITHER)]
    if reads:
        raise InvalidArgumentError(
            f"a write does not take {' and '.join(reads)}, which say what to read"
        )
    both = taken(arguments, ("group", "branch", "virtual-containers", "authorize"))
    if "storage_options" in arguments:
        both["storage_options"] = arguments["storage_options"]
    return location, taken(arguments, WRITE) | both


def _parsed(given: Mapping[str, str]) -> tuple[str, dict[str, Any], dict[str, str]]:
    """The location, the arguments, and the options by their names in lower case."""
    texts = {name.lower(): value for name, value in given.items()}
    location = texts.pop(LOCATION, "")
    arguments: dict[str, Any] = {}
    faults = (
        []
        if location
        else ["there is no location: load(url) or save(url) gives it, and in SQL path 'url'"]
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
        option = OPTIONS.get(name)
        if option is None:
            advice = known_as(hyphened(name), OPTIONS)
            faults.append(f"option {name[:64]!r} is unknown: {advice}")
            continue
        try:
            arguments[option.argument] = option.read(text)
        except ValueError as error:
            faults.append(f"option {name!r} cannot be {shown(text)}: {error}")
    faults += _contradictions(texts.keys())
    if faults:
        raise InvalidArgumentError("; ".join(faults))
    return location, arguments, texts


def taken(arguments: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Take the arguments that the options of these names give out of those of `read_options`."""
    wanted = (OPTIONS[name].argument for name in names)
    return {name: arguments.pop(name) for name in wanted if name in arguments}


def _contradictions(names: Iterable[str]) -> Iterator[str]:
    known = set(names)
    for group in _APART:
        both = [name for name in group if name in known]
        if len(both) > 1:
            yield f"options {' and '.join(both)} contradict each other: give one of them"
    if "end-snapshot-id" in known and "start-snapshot-id" not in known:
        yield "option end-snapshot-id needs start-snapshot-id; to read one snapshot, version"
