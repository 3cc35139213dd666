"""Reports as JSON: all that `--json` prints comes from here.

Each line is one object. A report is one line; a listing (`log`, `diff`, `tree`, `branch`, ...) is a
line for each entry. A report's keys are the attributes of its class, so they are as stable as the
library. Times are ISO 8601 in UTC; `nbytes` and `..._bytes` are bytes. Text is ASCII, with escapes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime
from typing import Any, Final

from zarr_manifests.cli.console import say
from zarr_manifests.errors import InvalidArgumentError

__all__ = ["json_line", "plain", "print_json"]

_TOO_LARGE: Final = {"map"}
"""Properties left out: `ValueChanges.map` has a number for every chunk of an array."""


def print_json(*values: object) -> None:
    """Print each value as one line."""
    for value in values:
        say(json_line(value))


def json_line(value: object) -> str:
    """The value as one line of JSON.

    Examples
    --------
    >>> from zarr_manifests.cli.as_json import json_line
    >>> from zarr_manifests.reports import Problem
    >>> json_line(Problem("current", "is damaged"))
    '{"key": "current", "what": "is damaged"}'
    """
    try:
        return json.dumps(plain(value), allow_nan=False)
    except RecursionError as error:  # attributes are anybody's
        raise InvalidArgumentError("what there is to print is nested too deeply") from error


def plain(value: Any) -> Any:
    """The value with what JSON knows: reports become objects, arrays lists, times text."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else _unusual(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, complex):
        return [plain(value.real), plain(value.imag)]
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, range):
        return {"first": value[0], "last": value[-1]} if value else None
    if hasattr(value, "dtype"):  # of NumPy
        return plain((value.astype(str) if value.dtype.kind in "mM" else value).tolist())
    if isinstance(value, Iterable):
        return [plain(inner) for inner in value]
    return _report(value)


def _unusual(number: float) -> str:
    """As in the documents of Zarr: JSON has no such numbers."""
    if math.isnan(number):
        return "NaN"
    return "Infinity" if number > 0 else "-Infinity"


def _report(report: object) -> dict[str, Any]:
    from zarr_manifests.reports import SnapshotInfo

    if isinstance(report, SnapshotInfo):
        return _snapshot(report)
    kind = type(report)
    names = [field.name for field in fields(report)] if is_dataclass(report) else []
    assert names, f"{kind.__name__} is no report"
    of_class = (name for name, found in vars(kind).items() if isinstance(found, property))
    names += [name for name in of_class if name not in _TOO_LARGE]
    return {name: plain(getattr(report, name)) for name in names}


def _snapshot(info: Any) -> dict[str, Any]:
    names = ("snapshot_id", "parent_id", "written_at", "kind", "message", "metadata")
    found = {name: plain(getattr(info, name)) for name in names}
    for name in ("written", "totals"):  # counts, named as in the format
        counts = getattr(info, name).items()
        found[name] = {key.replace("-", "_"): count for key, count in counts}
    return found
