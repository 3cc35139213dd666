"""Which manifests to fetch before they are asked for.

Candidates are the manifests with leaves of the arrays that `preload.arrays` names (by default every
CF coordinate), and the live deltas with chunks of these arrays, since a lookup needs both. The
smallest are chosen first, up to `max-manifests`. A candidate with more than `max-manifest-size`
refs is skipped, and one whose bytes are already here. Invariants: every candidate is either chosen
or skipped with a reason; the result does not depend on the input's order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from zarr_manifests.config.manifest_sets import Preload
from zarr_manifests.format.manifest import Part
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.snapshot import DeltaEntry
from zarr_manifests.planning.layout.leaves import ArrayFacts, BaseIndex


@dataclass(frozen=True, slots=True)
class Candidate:
    """An object with refs of an array to preload."""

    blob: BlobRef
    refs: int
    is_delta: bool

    @property
    def order(self) -> tuple[int, int, str]:
        """Sort key: smallest first."""
        return self.refs, self.blob.length, self.blob.key


@dataclass(frozen=True, slots=True)
class Skipped:
    """A candidate that is not fetched, and the reason."""

    candidate: Candidate
    why: str


@dataclass(frozen=True, slots=True)
class PreloadPlan:
    """The candidates to fetch, in this order, and the skipped ones."""

    fetched: tuple[Candidate, ...]
    skipped: tuple[Skipped, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the objects to fetch, in order."""
        return tuple(candidate.blob.key for candidate in self.fetched)


def plan_preload(
    preload: Preload,
    arrays: Iterable[ArrayFacts],
    base: BaseIndex,
    deltas: Sequence[DeltaEntry] = (),
    here: Collection[str] = (),
) -> PreloadPlan:
    """Choose what to preload.

    Parameters
    ----------
    preload : Preload
        The `preload` section of the configuration.
    arrays : iterable of ArrayFacts
        The arrays of the snapshot.
    base : BaseIndex
        The base of the snapshot.
    deltas : sequence of DeltaEntry
        The live deltas of the snapshot.
    here : collection of str
        Keys of objects that need no fetching, besides those that the snapshot carries copies of.

    Examples
    --------
    >>> from zarr_manifests.config.manifest_sets import Preload
    >>> from zarr_manifests.format.records import BlobRef
    >>> from zarr_manifests.format.manifest import ManifestRef, Part
    >>> from zarr_manifests.grid import Box
    >>> from zarr_manifests.planning.layout.leaves import ArrayFacts, BaseIndex
    >>> from zarr_manifests.planning.layout.preload_plan import plan_preload
    >>> node_id = b"time" + bytes(8)
    >>> time = ArrayFacts(node_id, "/time", (3,), 3, ("time",))
    >>> blob = BlobRef("manifests/000000000001-0123456789abcdef01234567/1", 100, 0)
    >>> base = BaseIndex([ManifestRef(blob, (Part(node_id, Box((0,), (3,)), 3),))])
    >>> len(plan_preload(Preload(), [time], base).keys)
    1
    """
    wanted = {
        array.node_id
        for array in arrays
        if (array.is_coordinate if preload.arrays is None else preload.matches(array.path))
    }
    if not preload.max_manifests or not wanted:
        return PreloadPlan((), ())
    keys = {key for node_id in wanted for key in base.manifests_of(node_id)}
    found = {key: Candidate(base[key].blob, _refs(base[key].parts), False) for key in keys}
    for delta in deltas:
        if any(part.node_id in wanted for part in delta.embedded):
            found[delta.log.key] = Candidate(delta.log, _refs(delta.embedded), True)
        for ref in delta.manifests:
            if any(part.node_id in wanted for part in ref.parts):
                found[ref.blob.key] = Candidate(ref.blob, _refs(ref.parts), True)
    fetched: list[Candidate] = []
    skipped: list[Skipped] = []
    for candidate in sorted(found.values(), key=lambda candidate: candidate.order):
        if candidate.blob.copy is not None or candidate.blob.key in here:
            skipped.append(Skipped(candidate, "it is here already"))
        elif candidate.refs > preload.max_manifest_size:
            why = (
                f"its {candidate.refs:,} chunk refs are more than max-manifest-size, "
                f"{preload.max_manifest_size:,}"
            )
            skipped.append(Skipped(candidate, why))
        elif len(fetched) == preload.max_manifests:
            why = f"smaller ones have reached max-manifests, {preload.max_manifests:,}"
            skipped.append(Skipped(candidate, why))
        else:
            fetched.append(candidate)
    return PreloadPlan(tuple(fetched), tuple(skipped))


def _refs(parts: Iterable[Part]) -> int:
    return sum(part.count for part in parts)
