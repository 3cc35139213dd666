"""What is tried, and what is to become of it where others come first."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import Final

from simulated.model import Change, Resize, SetChunk, State
from zarr_manifests import Txn
from zarr_manifests.errors import Conflict
from zarr_manifests.planning.conflict import Choice, Policy

LOG: Final = ("log/step", "log/entry")
"""Arrays that only appends change."""
STEP: Final = "step"
"""The dimension that those share."""


@dataclass(frozen=True, slots=True)
class Terms:
    """On what terms a commit may be put on top of others.

    Parameters
    ----------
    chunks, attributes : {"fail", "ours", "theirs"}
        Whose chunks, and whose attributes, stay where both have changed them.
    seen : frozenset of (str, int)
        Chunks that nobody else may have changed, because they were read.
    relocates : bool
        Whether what it appends to the log is put behind what others have appended.
    """

    chunks: Choice = "fail"
    attributes: Choice = "fail"
    seen: frozenset[tuple[str, int]] = frozenset()
    relocates: bool = False

    @property
    def policy(self) -> Policy:
        """What says so to a commit: a word, or a function where one does not do."""
        return self.chunks if self.chunks == self.attributes else self._decide

    def _decide(self, conflict: Conflict) -> Choice:
        return self.chunks if conflict.chunks else self.attributes

    def choice(self, place: tuple[object, ...]) -> Choice:
        """Whose change of a place stays."""
        return self.chunks if place[0] == "chunk" else self.attributes

    def place(
        self, changes: tuple[Change, ...], taken: Set[object], base: State, tip: State
    ) -> tuple[Change, ...]:
        """The changes, made on `base`, as they are to be on top of the tip.

        `taken` are the places that others have changed. A chunk that ends up with what it holds at
        the tip is no conflict: the change stays, and the log has it.
        """
        last = {change.place: change for change in changes}

        def stays(change: Change) -> bool:
            if self.choice(change.place) != "theirs" or change.place not in taken:
                return True
            end = last[change.place]
            if not isinstance(end, SetChunk):
                return False
            return tip.chunks.get((end.path, end.number)) == end.data

        changes = tuple(change for change in changes if stays(change))
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
    txn : Txn or None
        The step of a stream that it is.
    merges : str or None
        The snapshot that it merges.
    outcome : str
        `open` until its maker knows; then `acknowledged`, `failed` or `unknown`.
    landed : str or None
        The snapshot it has become.
    undone : bool
        Whether that was lost with the root.
    """

    message: str
    branch: str
    base: str
    changes: tuple[Change, ...]
    amends: bool = False
    terms: Terms = field(default_factory=Terms)
    start: int = 0
    epoch: int | None = None
    txn: Txn | None = None
    merges: str | None = None
    outcome: str = "open"
    landed: str | None = None
    undone: bool = False


@dataclass(slots=True, eq=False)
class RefChange:
    """One try of an operation on a branch or tag; `snapshot` is where it is to point then."""

    operation: str
    name: str
    snapshot: str | None
    outcome: str = "open"
    landed: int | None = None
    undone: bool = False


def _shifted(change: Change, by: int) -> Change:
    """What is appended, further behind."""
    match change:
        case SetChunk(number=number):
            return replace(change, number=number + by)
        case Resize(length=length):
            return replace(change, length=length + by)
    return change
