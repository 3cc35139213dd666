"""What is tried, and what is to become of it where others come first."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from zarr_manifests.testing.simulation.model import Change, Resize, SetChunk, State

__all__ = ["LOG", "STEP", "Attempt", "RefChange", "Terms"]

LOG: Final = ("log/step", "log/entry")
"""Arrays that only appends change."""
STEP: Final = "step"
"""The dimension that those share."""


@dataclass(frozen=True, slots=True)
class Terms:
    """On what terms a commit may be put on top of others.

    Parameters
    ----------
    policy : {"fail", "ours", "theirs"}
        Whose chunks and attributes stay where both have changed them.
    seen : frozenset of (str, int)
        Chunks that nobody else may have changed, because they were read.
    relocates : bool
        Whether what it appends to the log is put behind what others have appended.
    """

    policy: Literal["fail", "ours", "theirs"] = "fail"
    seen: frozenset[tuple[str, int]] = frozenset()
    relocates: bool = False

    def place(
        self, changes: tuple[Change, ...], taken: Set[object], base: State, tip: State
    ) -> tuple[Change, ...]:
        """The changes, made on `base`, as they are to be on top of the tip.

        `taken` are the places that others have changed.
        """
        if self.policy == "theirs":
            changes = tuple(change for change in changes if change.place not in taken)
        if self.relocates:
            by = {p: (tip.nodes[p].length or 0) - (base.nodes[p].length or 0) for p in LOG}
            changes = tuple(_shifted(change, by.get(change.path, 0)) for change in changes)
        return changes


@dataclass(slots=True, eq=False)
class Attempt:
    """One try of a commit, known by its message.

    Attributes
    ----------
    start : int
        The version that its session began at.
    epoch : int or None
        The version at which its session claimed the branch for itself.
    outcome : str
        `open` until its maker knows; then `acknowledged`, `failed` or `unknown`.
    landed : str or None
        The snapshot it has become.
    """

    message: str
    branch: str
    base: str
    changes: tuple[Change, ...]
    amends: bool = False
    terms: Terms = field(default_factory=Terms)
    start: int = 0
    epoch: int | None = None
    outcome: str = "open"
    landed: str | None = None


@dataclass(slots=True, eq=False)
class RefChange:
    """One try of an operation on a branch or tag; `snapshot` is where it is to point then."""

    operation: str
    name: str
    snapshot: str | None
    outcome: str = "open"
    landed: int | None = None


def _shifted(change: Change, by: int) -> Change:
    """What is appended, further behind."""
    match change:
        case SetChunk(number=number):
            return replace(change, number=number + by)
        case Resize(length=length):
            return replace(change, length=length + by)
    return change
