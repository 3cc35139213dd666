"""Values that tell how chunk references lie in manifests, and which manifests are preloaded."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from zarr_manifests.grid import Coords
from zarr_manifests.planning.layout.sets import Overflow
from zarr_manifests.report import Report

__all__ = [
    "ArrayPlace",
    "LeafPlace",
    "ManifestLayout",
    "ManifestPlace",
    "PreloadReport",
    "PreloadState",
    "PreloadedManifest",
    "ReadCost",
    "ReadCosts",
]


@dataclass(frozen=True, slots=True)
class ManifestPlace(Report):
    """A manifest of the base.

    Parameters
    ----------
    key : str or None
        Its key in the storage; None if it is only planned.
    set_name : str
        The manifest set it was packed for.
    refs : int
        Chunk refs in it.
    nbytes : int
        Its bytes.
    arrays : int
        How many arrays have refs in it.
    """

    key: str | None
    set_name: str
    refs: int
    nbytes: int
    arrays: int


@dataclass(frozen=True, slots=True)
class LeafPlace(Report):
    """A leaf: the box [lo, hi) of an array's chunks, its refs, and its manifest's position."""

    lo: Coords
    hi: Coords
    refs: int
    manifest: int


@dataclass(frozen=True, slots=True)
class ArrayPlace(Report):
    """Where the refs of an array are, and why there.

    Parameters
    ----------
    path : str
        Its absolute path.
    rule : int or None
        Position of the rule that matched; None if none did.
    wanted : str
        The manifest set that says.
    overflows : tuple of Overflow
        The sets that did not take it, each with `set_name` and `why`.
    leaves : tuple of LeafPlace
        Where its refs are.
    pending_refs : int
        Refs that commits since have set or unset, and that are in no leaf yet.
    is_coordinate : bool
        Whether it is a 1-d array named as its own dimension.
    """

    path: str
    rule: int | None
    wanted: str
    overflows: tuple[Overflow, ...]
    leaves: tuple[LeafPlace, ...]
    pending_refs: int
    is_coordinate: bool

    @property
    def refs(self) -> int:
        """Refs in all its leaves."""
        return sum(leaf.refs for leaf in self.leaves)

    @property
    def manifests(self) -> tuple[int, ...]:
        """Positions of the manifests with leaves of it, each once."""
        return tuple(sorted({leaf.manifest for leaf in self.leaves}))


@dataclass(frozen=True, slots=True)
class ReadCost(Report):
    """Requests to the storage, and the bytes they bring."""

    requests: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ReadCosts(Report):
    """What a process that has read nothing yet fetches of the metadata; chunks are not counted.

    Parameters
    ----------
    opening : ReadCost
        To open the repository and the snapshot: its groups, arrays and attributes are there then.
    coordinates : ReadCost
        What is fetched after that to find all chunks of all coordinates.
    last_step : ReadCost
        What is fetched after that to find the last chunks along the first axis of all other
        arrays, which is where one more step is appended.
    """

    opening: ReadCost
    coordinates: ReadCost
    last_step: ReadCost


@dataclass(frozen=True, slots=True)
class ManifestLayout(Report):
    """Which manifests there are, and in which of them the refs of each array are.

    Parameters
    ----------
    snapshot_id : str
        The snapshot.
    manifests : tuple of ManifestPlace
        The base's.
    arrays : tuple of ArrayPlace
        By path; opaque keys that are stored as chunks are among them.
    costs : ReadCosts or None
        What is fetched to read it, if it was measured.
    """

    snapshot_id: str
    manifests: tuple[ManifestPlace, ...]
    arrays: tuple[ArrayPlace, ...]
    costs: ReadCosts | None = None


class PreloadState(StrEnum):
    """What became of a manifest that a session might need."""

    FETCHED = "fetched"
    SKIPPED = "skipped"
    FAILED = "failed"
    WAITING = "waiting"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class PreloadedManifest(Report):
    """A manifest or delta with chunk refs of an array that is preloaded.

    Parameters
    ----------
    key : str
        Its key in the storage.
    refs : int
        Chunk refs in it.
    nbytes : int
        Its bytes.
    state : PreloadState
        What became of it.
    why : str
        Why it was skipped, or could not be fetched; else empty.
    """

    key: str
    refs: int
    nbytes: int
    state: PreloadState
    why: str = ""


@dataclass(frozen=True, slots=True)
class PreloadReport(Report):
    """What a session has prefetched, and what it has not.

    Parameters
    ----------
    snapshot_id : str
        The snapshot that the session opened with.
    manifests : tuple of PreloadedManifest
        The smallest first.
    done : bool
        Whether nothing more will be fetched.
    """

    snapshot_id: str
    manifests: tuple[PreloadedManifest, ...]
    done: bool

    def in_state(self, state: PreloadState | str) -> tuple[PreloadedManifest, ...]:
        """Those in that state, such as `"fetched"`."""
        return tuple(one for one in self.manifests if one.state == state)

    @property
    def nbytes(self) -> int:
        """Bytes of what was fetched."""
        return sum(one.nbytes for one in self.in_state(PreloadState.FETCHED))
