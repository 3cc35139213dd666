"""Versions as callers name them: a branch, a tag, an id, `main~3`, `main@{2026-11-01}`.

`refs/heads/x` is a branch, and `refs/tags/x` a tag, whatever else is called x.

And the other way round: the branches, tags and short ids by which a snapshot is shown. And the
times and ages by which callers choose among versions, checked.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from msgspec import Struct

from zarr_manifests.errors import InvalidArgumentError

HEAD: Final = "HEAD"
"""A name that no branch or tag takes: it stands for `main`."""
MAIN: Final = "main"
"""A name that is always the branch, so that it is found without a look at the tags."""
HEADS: Final = "refs/heads/"
TAGS: Final = "refs/tags/"
_MOST_BACK: Final = 10**9
_TEXT: Final = re.compile(
    r"([^~@{}]*)(?:@(?:\{([^{}]*)\}|([^~@{}]+)))?((?:~[0-9]{0,10})*)", re.ASCII
)
_SHORT: Final = re.compile(r"(?:[0-9]{12}-)?[0-9a-f]{6,24}", re.ASCII)
_RANDOM_AT: Final = 13
_SHORT_DIGITS: Final = 8
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class VersionName(Struct, frozen=True):
    """A version as it is written, taken apart.

    Parameters
    ----------
    name : str
        A branch, a tag, or the id of a snapshot, whole or short; or `refs/heads/` and a branch, or
        `refs/tags/` and a tag.
    at_ms : int, optional
        The newest snapshot of the branch written at or before this time, in ms since 1970.
    back : int
        The number of snapshots to go back, as `ancestry` lists them.
    """

    name: str
    at_ms: int | None = None
    back: int = 0

    @classmethod
    def checked(cls, text: object) -> str:
        """The text, if it names a version; else as `parse`."""
        cls.parse(text)
        return str(text)

    @classmethod
    def parse(cls, text: object) -> VersionName:
        """The version that a text names.

        Raises
        ------
        InvalidArgumentError
            If it is no text, or names no version.

        Examples
        --------
        >>> from zarr_manifests.versions import VersionName
        >>> VersionName.parse("HEAD~3")
        VersionName(name='main', at_ms=None, back=3)
        >>> VersionName.parse("main@{1970-01-02}").at_ms, VersionName.parse("main@1970-01-02").at_ms
        (86400000, 86400000)
        """
        if not isinstance(text, str):
            raise InvalidArgumentError(
                f"{text!r:.80} is not the name of a branch or tag, nor the id of a snapshot"
            )
        found = _TEXT.fullmatch(text)
        if found is None:
            raise InvalidArgumentError(
                f"{text[:80]!r} names no version: write a branch, a tag or the id of a snapshot, "
                "then, if wanted, @{2026-11-01} for a time and ~3 for three snapshots before"
            )
        name, in_braces, bare, steps = found.groups()
        moment = bare if in_braces is None else in_braces
        at_ms = None if moment is None else moment_ms(moment, f"the time in {text[:80]!r}")
        back = sum(int(step or 1) for step in steps.split("~")[1:])
        if back > _MOST_BACK:
            raise InvalidArgumentError(f"{text[:80]!r} is further back than any history")
        return cls(MAIN if name == HEAD else name, at_ms, back)


class RefName(Struct, frozen=True):
    """A branch or tag, as a name of its snapshot.

    Parameters
    ----------
    kind : {"branch", "tag"}
        What it is.
    name : str
        What it is called.

    Examples
    --------
    >>> from zarr_manifests.versions import RefName
    >>> str(RefName("branch", "main")), str(RefName("tag", "v1"))
    ('main', 'tag v1')
    """

    kind: Literal["branch", "tag"]
    name: str

    def __str__(self) -> str:
        return self.name if self.kind == "branch" else f"tag {self.name}"


def refs_by_snapshot(
    branches: Mapping[str, str], tags: Mapping[str, str]
) -> dict[str, list[RefName]]:
    """The branches and tags at each snapshot, by its id; `main` first.

    Parameters
    ----------
    branches, tags : mapping of str to str
        Ids of snapshots by name, as `Repository.list_branches` and `Repository.list_tags` give.

    Examples
    --------
    >>> from zarr_manifests.versions import refs_by_snapshot
    >>> start = "000000000001-5f3a09c41b77d20e9a8b6c10-1"
    >>> [str(ref) for ref in refs_by_snapshot({"dev": start, "main": start}, {"v1": start})[start]]
    ['main', 'dev', 'tag v1']
    """
    names: dict[str, list[RefName]] = {}
    for name in sorted(branches, key=lambda name: name != MAIN):
        names.setdefault(branches[name], []).append(RefName("branch", name))
    for name, snapshot_id in tags.items():
        names.setdefault(snapshot_id, []).append(RefName("tag", name))
    return names


def is_short_id(text: str) -> bool:
    """Whether it may be the first six or more digits of the random part of a snapshot's id.

    What comes before the random part may be there, too.
    """
    return _SHORT.fullmatch(text) is not None


def named_by(text: str, snapshot_id: str) -> bool:
    """Whether a short id stands for the snapshot.

    Examples
    --------
    >>> from zarr_manifests.versions import named_by
    >>> named_by("5f3a09", "000000000012-5f3a09c41b77d20e9a8b6c10-1")
    True
    """
    return snapshot_id.startswith((text, snapshot_id[:_RANDOM_AT] + text))


def short_ids(snapshot_ids: Iterable[str]) -> dict[str, str]:
    """A short name of each snapshot that is no other's: eight digits, or the whole id.

    Snapshots of one session have the same random part, and so are named by the whole id.

    Examples
    --------
    >>> from zarr_manifests.versions import short_ids
    >>> ids = ["000000000001-5f3a09c41b77d20e9a8b6c10-1", "000000000002-5f3a0981b77d20e9a8b6c1ff-1"]
    >>> list(short_ids(ids).values())
    ['5f3a09c4', '5f3a0981']
    """
    short = {each: each[_RANDOM_AT : _RANDOM_AT + _SHORT_DIGITS] for each in snapshot_ids}
    counts = Counter(short.values())
    return {each: digits if counts[digits] == 1 else each for each, digits in short.items()}


# --- times and ages --------------------------------------------------------------------------


def milliseconds(duration: object, name: str) -> int:
    """Whole milliseconds of a duration, which must be a timedelta of 0 or more.

    Examples
    --------
    >>> from datetime import timedelta
    >>> from zarr_manifests.versions import milliseconds
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
    >>> from zarr_manifests.versions import moment_ms
    >>> moment_ms(datetime(1970, 1, 2), "since"), moment_ms("1970-01-02", "since")
    (86400000, 86400000)
    """
    if isinstance(moment, str):
        moment = _moment(moment, name)
    if not isinstance(moment, datetime):
        raise InvalidArgumentError(
            f"{name} must be a datetime or ISO 8601 text, not {moment!r:.80}"
        )
    try:
        zoned = moment if moment.utcoffset() is not None else moment.replace(tzinfo=UTC)
        return (zoned - _EPOCH) // timedelta(milliseconds=1)
    except (ValueError, OverflowError) as error:  # pandas' not-a-time is a datetime, too
        raise InvalidArgumentError(f"{name} must be a time, not {moment!r}") from error


def _moment(text: str, name: str) -> datetime:
    try:
        return datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise InvalidArgumentError(
            f"{name} must be a datetime or ISO 8601 text such as 2026-11-01 or "
            f"2026-11-01T12:00Z, not {text[:80]!r}"
        ) from error
