"""Marks of exactly-once commits: the last version that each application has committed.

A snapshot has up to 256 marks itself. The others are in a page of marks, which it points to; its
own marks override those of the page. Invariant: a snapshot and its page tell all marks there are,
so no earlier snapshot is needed to find one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.envelope import ObjectKind, check_numbers, check_texts
from zarr_manifests.format.records import SORTED_COUNTERS, MetadataObject

MOST_IN_SNAPSHOT: Final = 256
MOST_IN_PAGE: Final = 1 << 20
_NAME_BYTES: Final = 255


def check_marks(where: str, marks: Mapping[str, int], most: int) -> None:
    """Raise unless there are at most `most` marks, each with a valid name and version.

    Raises
    ------
    InvalidArgumentError
        If there are more, a name has not 1 to 255 bytes of UTF-8, or a version is out of range.
    """
    if len(marks) > most:
        raise InvalidArgumentError(f"{where}: {len(marks)} marks, and at most {most} fit")
    check_texts(where, *marks)
    for name in marks:
        if not 1 <= len(name.encode()) <= _NAME_BYTES:
            raise InvalidArgumentError(
                f"{where}: the name {name[:40]!r} has not 1 to {_NAME_BYTES} bytes"
            )
    check_numbers(where, *marks.values())


@dataclass(frozen=True, slots=True)
class MarksPage(MetadataObject):
    """Marks that a snapshot has no room for, by application."""

    marks: Mapping[str, int]

    _KIND = ObjectKind.MARKS
    _FIELDS = (("marks", "marks", SORTED_COUNTERS),)

    def __post_init__(self) -> None:
        check_marks("marks", self.marks, MOST_IN_PAGE)
