"""Durations and points in time as callers give them, checked."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from zarr_manifests.errors import InvalidArgumentError

__all__ = ["milliseconds", "moment_ms"]


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def milliseconds(duration: object, name: str) -> int:
    """Whole milliseconds of a duration, which must be a timedelta of 0 or more.

    Examples
    --------
    >>> from datetime import timedelta
    >>> from zarr_manifests.times import milliseconds
    >>> milliseconds(timedelta(seconds=2), "grace")
    2000
    """
    if isinstance(duration, timedelta) and duration >= timedelta(0):
        return duration // timedelta(milliseconds=1)
    raise InvalidArgumentError(f"{name} is a timedelta of 0 or more, not {duration!r}")


def moment_ms(moment: object, name: str) -> int:
    """Whole milliseconds from 1970 to a datetime or ISO 8601 text; without a time zone in UTC.

    A date alone is its first moment.

    Examples
    --------
    >>> from datetime import datetime
    >>> from zarr_manifests.times import moment_ms
    >>> moment_ms(datetime(1970, 1, 2), "since"), moment_ms("1970-01-02", "since")
    (86400000, 86400000)
    """
    if isinstance(moment, str):
        moment = _parsed(moment, name)
    if not isinstance(moment, datetime):
        raise InvalidArgumentError(
            f"{name} must be a datetime or ISO 8601 text, not {moment!r:.80}"
        )
    try:
        zoned = moment if moment.utcoffset() is not None else moment.replace(tzinfo=UTC)
        return (zoned - _EPOCH) // timedelta(milliseconds=1)
    except (ValueError, OverflowError) as error:  # pandas' not-a-time is a datetime, too
        raise InvalidArgumentError(f"{name} must be a time, not {moment!r}") from error


def _parsed(text: str, name: str) -> datetime:
    try:
        return datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise InvalidArgumentError(
            f"{name} must be a datetime or ISO 8601 text such as 2026-11-01 or "
            f"2026-11-01T12:00Z, not {text[:80]!r}"
        ) from error
