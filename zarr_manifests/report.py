"""What all reports can do: become a dict, JSON, a DataFrame, and text for people."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from zarr_manifests.errors import InvalidArgumentError, plain_text
from zarr_manifests.texts import parts_of

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType


class Report:
    """What a call of a repository or a session returns; its parts are plain structs.

    Examples
    --------
    >>> from zarr_manifests.reports import Problem, VerifyReport
    >>> VerifyReport((Problem("current", "is damaged"),)).to_dict()["problems"]
    [{'key': 'current', 'what': 'is damaged'}]
    """

    __slots__ = ()

    def _lines(self) -> Iterable[str]:
        """What it is in words: then that is what `str`, terminals, notebooks say. Or its tables."""
        from zarr_manifests.rendering import PlainConsole

        told = "".join(part.text for part in PlainConsole(width=160).render(self))
        return [line.rstrip() for line in told.splitlines()]

    def __str__(self) -> str:
        return "\n".join(map(plain_text, self._lines())) or repr(self)

    def to_dict(self) -> dict[str, Any]:
        """The attributes by name, in types that JSON knows; times are ISO 8601 in UTC."""
        return {name: plain(value) for name, value in parts_of(self)}

    def to_json(self) -> str:
        """The attributes as one line of JSON, in ASCII.

        Examples
        --------
        >>> import zarr_manifests as zm
        >>> zm.create("memory://report-json-example").verify().to_json()[:15]
        '{"problems": []'
        """
        return json_line(self)

    def to_pandas(self) -> pd.DataFrame:
        """One row for each element of its first collection of parts; else one row of all.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.create("memory://report-pandas-example")
        >>> with repo.transaction(message="an array") as store:
        ...     array = zarr.create_array(store, name="t", shape=2, dtype="i1")
        ...     array[:] = 1
        >>> repo.du().to_pandas()[["path", "total.chunks"]].values.tolist()
        [['/t', 1]]
        """
        import pandas as pd

        for _, value in parts_of(self):
            if isinstance(value, tuple) and value and isinstance(value[0], Struct):
                return pd.json_normalize(plain(value))
        return pd.json_normalize(self.to_dict(), max_level=0)

    def __rich__(self) -> RenderableType:
        """What a terminal shows."""
        from zarr_manifests.rendering import report

        return report(self)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from zarr_manifests.rendering import html

        return html(type(self).__name__, self.__rich__())


class Problem(Struct, frozen=True):
    """One thing that is wrong: the key of an object or the URL of a file, and what is wrong."""

    key: str
    what: str

    def __str__(self) -> str:
        return plain_text(self.what if self.key in self.what else f"{self.key}: {self.what}")


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
        raise InvalidArgumentError("the result is nested too deeply to be printed") from error


def plain(value: Any) -> Any:
    """The value with what JSON knows: structs become objects, arrays lists, times text."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        # As in the documents of Zarr, text where JSON has no such number.
        return value if math.isfinite(value) else json.dumps(value)
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
    return Report.to_dict(value)
