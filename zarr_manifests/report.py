"""What all reports can do: become a dict, JSON, a DataFrame, and text for people."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from zarr_manifests.errors import InvalidArgumentError

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

__all__ = ["Report", "json_line", "plain"]

_TOO_LARGE: Final = frozenset({"map"})
"""Properties left out: `ValueChanges.map` has a number for every chunk of an array."""


class Report:
    """A value that a repository or a session returns.

    Examples
    --------
    >>> from zarr_manifests.reports import Problem
    >>> Problem("current", "is damaged").to_json()
    '{"key": "current", "what": "is damaged"}'
    """

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """The attributes by name, in types that JSON knows; times are ISO 8601 in UTC."""
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]
        of_class = (name for name, found in vars(type(self)).items() if isinstance(found, property))
        names += [name for name in of_class if name not in _TOO_LARGE]
        return {name: plain(getattr(self, name)) for name in names}

    def to_json(self) -> str:
        """The attributes as one line of JSON, in ASCII."""
        return json_line(self)

    def to_pandas(self) -> pd.DataFrame:
        """One row for each element of its first collection of reports; else one row of all."""
        import pandas as pd

        for value in (getattr(self, field.name) for field in fields(self)):  # type: ignore[arg-type]
            if isinstance(value, tuple) and value and isinstance(value[0], Report):
                return pd.json_normalize([one.to_dict() for one in value])
        return pd.json_normalize(self.to_dict(), max_level=0)

    def __rich__(self) -> RenderableType:
        """What a terminal shows."""
        from zarr_manifests.rendering import report

        return report(self)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from zarr_manifests.rendering import html

        return html(type(self).__name__, self.__rich__())


def json_line(value: object) -> str:
    """The value as one line of JSON.

    Raises
    ------
    InvalidArgumentError
        If it is nested too deeply.
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
    if isinstance(value, slice):
        return [value.start, value.stop]
    if hasattr(value, "dtype"):  # of NumPy
        return plain((value.astype(str) if value.dtype.kind in "mM" else value).tolist())
    if isinstance(value, Iterable):
        return [plain(inner) for inner in value]
    return value.to_dict() if isinstance(value, Report) else Report.to_dict(value)


def _unusual(number: float) -> str:
    """As in the documents of Zarr: JSON has no such numbers."""
    if math.isnan(number):
        return "NaN"
    return "Infinity" if number > 0 else "-Infinity"
