"""How long snapshots stay in the history, unless the one who lets them expire says otherwise."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Final

from zarr_manifests.config.kinds import Kind, Whole, shown
from zarr_manifests.config.sections import check_options

__all__ = ["Snapshots", "duration_of"]

_DURATION: Final = r"(\d{1,10}(?:\.\d{1,9})?)([smhdw])"
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_MOST: Final = timedelta(days=36_525)


def duration_of(text: str) -> timedelta | None:
    """What a text such as `30d`, `24h`, `10m` or `0s` means; None if it is none.

    Examples
    --------
    >>> from zarr_manifests.config.snapshots import duration_of
    >>> duration_of("36h"), duration_of("long")
    (datetime.timedelta(days=1, seconds=43200), None)
    """
    found = re.fullmatch(_DURATION, text.strip(), re.ASCII)
    return None if found is None else timedelta(**{_UNITS[found[2]]: float(found[1])})


class _Duration(Kind):
    """A time of whole seconds up to a hundred years, written as `30d`."""

    schema: Mapping[str, Any] = {"type": "string", "pattern": f"^{_DURATION}$"}

    def faults(self, value: object) -> Iterator[str]:
        if not isinstance(value, timedelta):
            yield f": expected a time such as 30d, 24h or 10m, got {shown(value)}"
        elif not timedelta(0) <= value <= _MOST or value.microseconds:
            yield f": {value} is not in whole seconds from 0s to {_MOST.days}d"

    def read(self, plain: Any) -> Any:
        try:
            found = duration_of(plain) if isinstance(plain, str) else None
        except OverflowError:
            found = timedelta.max
        return plain if found is None else found

    def write(self, value: Any) -> Any:
        seconds = value // timedelta(seconds=1)
        for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
            if seconds and seconds % size == 0:
                return f"{seconds // size}{unit}"
        return f"{seconds}s"


@dataclass(frozen=True, slots=True)
class Snapshots:
    """What `Repository.expire_snapshots` keeps by default: what either of the two options says.

    Parameters
    ----------
    keep_last : int or None
        That many of the newest snapshots of each branch. 1 to 1,000,000,000.
    max_age : timedelta or None
        What is not older; as text `30d`, `24h`, `10m` or `0s`, in whole seconds.

    Examples
    --------
    >>> from zarr_manifests import Config
    >>> config = Config.from_yaml("snapshots: {keep-last: 100, max-age: 30d}")
    >>> config.snapshots.max_age.days
    30
    """

    keep_last: Annotated[
        int | None,
        Whole(1, 1_000_000_000, null="the number says nothing"),
        "how many of the newest snapshots of each branch an expiry without arguments keeps",
    ] = None
    max_age: Annotated[timedelta | None, _Duration(), "up to which age it keeps snapshots"] = None

    def __post_init__(self) -> None:
        check_options(self)
