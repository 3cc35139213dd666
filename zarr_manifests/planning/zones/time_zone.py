"""Time zones by the names that they have in Spark and elsewhere."""

from __future__ import annotations

import re
from datetime import UTC, timedelta, timezone, tzinfo
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from zarr_manifests.errors import InvalidArgumentError

_OFFSET: Final = re.compile(r"(?:UTC|GMT|UT)?([+-])(\d\d?)(?::?(\d\d))?", re.ASCII)


def zone_of(name: str) -> tzinfo:
    """The time zone of that name, such as `Europe/Berlin`, `UTC` or `+08:00`.

    Raises
    ------
    InvalidArgumentError
        If there is no such zone.

    Examples
    --------
    >>> from zarr_manifests.planning.zones.time_zone import zone_of
    >>> zone_of("GMT+8")
    datetime.timezone(datetime.timedelta(seconds=28800))
    """
    if name in ("UTC", "Z", "Etc/UTC"):
        return UTC
    offset = _OFFSET.fullmatch(str(name))
    if offset is not None:
        sign, hours, minutes = offset.groups()
        length = timedelta(hours=int(hours), minutes=int(minutes or 0))
        if length < timedelta(hours=24):
            return timezone(length if sign == "+" else -length)
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, TypeError, OSError) as error:
        raise InvalidArgumentError(f"{name!r} is no time zone, such as 'Europe/Berlin'") from error
