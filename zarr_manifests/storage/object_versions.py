"""Versions of objects that others write: asking for the known one, and what the answer says.

HTTP gives times in whole seconds, so a change within the second of the known time is only noticed
by the etag or the size.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.records import dataclass

__all__ = ["Version", "check_name", "conditional", "plain_etag", "version_of"]

_MOST_OFFSET: Final = 2**63 - 1
_MOST_SECONDS: Final = 253_402_300_798  # the year 9999


@dataclass(frozen=True, slots=True)
class Version:
    """What distinguishes versions of a file; None is unknown.

    Parameters
    ----------
    etag : str, optional
        Its etag, with or without quotes.
    modified_ms : int, optional
        Its time of modification, in milliseconds since 1970 UTC.
    nbytes : int, optional
        Its size.
    """

    etag: str | None = None
    modified_ms: int | None = None
    nbytes: int | None = None


def check_name(name: str) -> str:
    """Return the name of an object, if no segment of it is empty, `.` or `..`.

    Raises
    ------
    InvalidArgumentError
        If one is, or the name is not valid Unicode text.
    """
    text = name.encode(errors="replace").decode()
    if text != name or not {"", ".", ".."}.isdisjoint(name.split("/")):
        raise InvalidArgumentError(
            "the name of an object is valid Unicode text, and none of its segments is empty, '.' "
            "or '..'"
        )
    return name


def conditional(start: int, length: int, known: Version) -> dict[str, Any]:
    """Options of a request for a byte range, if the object is still the known version.

    A weak etag never matches in a condition, so it is not sent. At least a byte is asked for, since
    there is no empty range.
    """
    end = min(start + max(length, 1), _MOST_OFFSET)
    options: dict[str, Any] = {"range": (start, end)}
    if known.etag is not None and not known.etag.startswith("W/"):
        options["if_match"] = f'"{plain_etag(known.etag)}"'
    elif known.modified_ms is not None:
        # Rounded up, since a store may compare with fractions of a second.
        seconds = max(0, min(known.modified_ms // 1000 + 1, _MOST_SECONDS))
        options["if_unmodified_since"] = datetime.fromtimestamp(seconds, UTC)
    return options


def plain_etag(etag: str) -> str:
    """The etag without its quotes and its mark of weakness."""
    return etag.removeprefix("W/").strip('"')


def version_of(meta: Any) -> Version:
    """The version that an answer says; the client replaces an unknown time by zero."""
    modified_ms = int(meta["last_modified"].timestamp()) * 1000
    return Version(meta["e_tag"] or None, modified_ms or None, meta["size"])
