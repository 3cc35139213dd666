"""Versions as callers name them: a branch, a tag, an id, `main~3`, `main@{2026-11-01}`."""

from __future__ import annotations

import re
from typing import Final

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.records import dataclass
from zarr_manifests.times import moment_ms

__all__ = ["HEAD", "MAIN", "VersionName", "is_short_id", "named_by"]

HEAD: Final = "HEAD"
"""A name that no branch or tag takes: it stands for `main`."""
MAIN: Final = "main"
"""A name that is always the branch, so that it is found without a look at the tags."""
_MOST_BACK: Final = 10**9
_TEXT: Final = re.compile(r"([^~@{}]*)(?:@\{([^{}]*)\})?((?:~[0-9]{0,10})*)", re.ASCII)
_SHORT: Final = re.compile(r"(?:[0-9]{12}-)?[0-9a-f]{6,24}", re.ASCII)
_RANDOM_AT: Final = 13


@dataclass(frozen=True, slots=True)
class VersionName:
    """A version as it is written, taken apart.

    Parameters
    ----------
    name : str
        A branch, a tag, or the id of a snapshot, whole or short.
    at_ms : int, optional
        The newest snapshot of the branch written at or before this time, in ms since 1970.
    back : int
        So many snapshots before it, as `ancestry` lists them.
    """

    name: str
    at_ms: int | None = None
    back: int = 0

    @property
    def is_fixed(self) -> bool:
        """Whether it says which snapshot of a branch, and not its head."""
        return self.at_ms is not None or self.back > 0

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
        >>> VersionName.parse("main@{1970-01-02}").at_ms
        86400000
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
        name, moment, steps = found.groups()
        at_ms = None if moment is None else moment_ms(moment, f"the time in {text[:80]!r}")
        back = sum(int(step or 1) for step in steps.split("~")[1:])
        if back > _MOST_BACK:
            raise InvalidArgumentError(f"{text[:80]!r} is further back than any history")
        return cls(MAIN if name == HEAD else name, at_ms, back)


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
