"""Every value that a repository or a session returns: history, differences, sizes and reports.

All are immutable and hold no connection to the repository.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from zarr_manifests.errors import Conflict, ManifestsError
from zarr_manifests.format.root import LogEntry
from zarr_manifests.format.snapshot import HistoryEntry
from zarr_manifests.grid import Coords, IndexArray, grid_shape
from zarr_manifests.keys import absolute, no_array
from zarr_manifests.picturing import Folding
from zarr_manifests.planning.changes import ArrayShape, CellChanges, Change, Operation
from zarr_manifests.planning.components import Changes, Fields, field_changes
from zarr_manifests.planning.packing import Overflow
from zarr_manifests.planning.tables import Amount
from zarr_manifests.report import Problem, Report
from zarr_manifests.texts import bytes_text, count_text, listed, time_text, written_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from zarr_manifests.picturing.graph import GraphRow

__all__ = [
    "Amount",
    "Ancestry",
    "ArrayPlace",
    "ArrayShape",
    "CellChanges",
    "Change",
    "ChunkSelection",
    "CloneReport",
    "CollectionReport",
    "CompactionReport",
    "Diff",
    "ExportReport",
    "IngestReport",
    "IngestedFile",
    "LoggedOperation",
    "ManifestLayout",
    "ManifestPlace",
    "MergeReport",
    "Operation",
    "Problem",
    "RecoveryReport",
    "RewriteReport",
    "SnapshotInfo",
    "StatisticsReport",
    "Usage",
    "VerifyReport",
]

_PICTURE_LINES, _PICTURE_COLUMNS = 24, 72
_FULL, _PART, _NONE = "\N{FULL BLOCK}", "\N{MEDIUM SHADE}", "\N{MIDDLE DOT}"
_SHOWN: Final = 10
_SHOWN_CHUNKS: Final = 4
_SHOWN_COMMITS: Final = 60
_DRAWN_ROWS: Final = 40
_SHOWN_TEXT: Final = 60


# --- of arrays: chunks, sizes, statistics, manifests and ingested files --------------------------


class ChunkSelection(Report, Struct, frozen=True, eq=False):
    """The chunks of an array that may hold cells that a where selects.

    Parameters
    ----------
    path, where : str
        The array, and the comparisons in canonical text.
    shape, chunk_shape : tuple of int
        Of the array; of a sharded array, chunks are its shards.
    dimensions : tuple of (str or None)
        Names of its axes.
    boxes : int64[n, 2, ndim]
        Half-open boxes of chunk coordinates, disjoint and in C order, with all chunks that may
        match. Each box has its lower corner, then its upper one.
    selected : int
        Number of chunks in the boxes.
    left_out : mapping of str to int
        Chunks that cannot match, by reason: `range` (the values of coordinates), `statistics`
        (their own values), `absence` (never written, and the fill value does not match).
    unknown : int
        Selected chunks that have no statistics.
    data : tuple of str
        Paths of the arrays whose values are compared.
    """

    path: str
    where: str
    shape: Coords
    chunk_shape: Coords
    dimensions: tuple[str | None, ...]
    boxes: IndexArray
    selected: int
    left_out: Mapping[str, int]
    unknown: int
    data: tuple[str, ...] = ()

    @property
    def grid_shape(self) -> Coords:
        """Number of chunks along each axis."""
        return grid_shape(self.shape, self.chunk_shape)

    @property
    def chunks(self) -> int:
        """Chunks of the whole grid."""
        return math.prod(self.grid_shape)

    @property
    def cells(self) -> tuple[tuple[slice, ...], ...]:
        """The cells of each box as slices, one for each axis."""
        found = []
        for lo, hi in self.boxes.tolist():
            sides = zip(lo, hi, self.chunk_shape, self.shape, strict=True)
            found.append(tuple(slice(a * n, min(b * n, size)) for a, b, n, size in sides))
        return tuple(found)

    def _lines(self) -> Iterator[str]:
        yield f"{self.path} where {self.where}"
        yield f"{self.selected:,} of {self.chunks:,} chunks may match"
        yield "left out: " + ", ".join(f"{n:,} by {why}" for why, n in self.left_out.items())
        if self.data and self.unknown:
            call = f"repo.compute_statistics([{', '.join(f'"{path}"' for path in self.data)}])"
            yield f"{self.unknown:,} chunks have no statistics and are read; {call} makes them"

    def picture(self) -> str:
        """The grid of chunks as text: a block is selected, a dot left out, a grey block is both.

        It shows the two longest axes, and all chunks along the others in one place. It has at most
        24 lines of 72 places; of larger grids, several chunks share a place.
        """
        folding = Folding.of(self.grid_shape, _PICTURE_LINES, _PICTURE_COLUMNS)
        counts = folding.cover(self.boxes)
        marks = np.where(counts == folding.whole, _FULL, np.where(counts > 0, _PART, _NONE))
        return "\n".join("".join(row) for row in marks.tolist())

    def _repr_html_(self) -> str:
        """What `str` says, and the grid of chunks as a picture."""
        return f"<pre>{escape(str(self))}\n\n{self.picture()}</pre>"


class Usage(Report, Struct, frozen=True):
    """Chunks and bytes of the arrays of a snapshot; or of one array or other key of it.

    Parameters
    ----------
    path : str
        The absolute path of the array or key; empty for all together.
    total : Amount
        Chunks and bytes in the snapshot.
    growth : Amount
        The difference to the snapshot before, deleted arrays included; negative if there is less.
    grid_shape : tuple of int or None
        Chunks of the whole array along each axis; None for what is no array.
    inline, native, virtual : Amount or None
        Those in manifests, in objects of the repository, and in files elsewhere; None if they were
        not counted apart.
    arrays : tuple of Usage
        Of all together: that of every array and of every key that belongs to none, by path.
    snapshot_id : str
        Of all together: the snapshot.
    """

    path: str
    total: Amount
    growth: Amount
    grid_shape: Coords | None = None
    inline: Amount | None = None
    native: Amount | None = None
    virtual: Amount | None = None
    arrays: tuple[Usage, ...] = ()
    snapshot_id: str = ""

    def __getitem__(self, path: str) -> Usage:
        """Of the array at that path, with or without a leading slash."""
        for array in self.arrays:
            if array.path.strip("/") == path.strip("/"):
                return array
        arrays = (array.path for array in self.arrays)
        raise no_array(path, arrays, f" in snapshot {self.snapshot_id}")

    @property
    def chunks(self) -> int:
        """Chunks that are there; all others read as the fill value."""
        return self.total.chunks

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self.total.nbytes

    @property
    def exact(self) -> bool:
        """Whether all numbers are."""
        return self.total.exact and self.growth.exact

    @property
    def fraction(self) -> float | None:
        """How much of an array's grid is there, from 0 to 1; 1 for an empty grid, None without."""
        if self.grid_shape is None:
            return None
        size = math.prod(self.grid_shape)
        return self.chunks / size if size else 1.0


class StatisticsReport(Report, Struct, frozen=True):
    """How many chunks of an array have statistics; or those of all arrays that were asked for.

    Parameters
    ----------
    path : str
        The array; empty for all together.
    chunks : int
        Initialised chunks of what can have statistics.
    known : int
        Those of them that had statistics before.
    measured : int
        Those of them that were measured now.
    skipped : str
        Why an array cannot have any; empty if it can.
    arrays : tuple of StatisticsReport
        Of all together: those of each array.
    snapshot_id : str
        Of all together: the snapshot whose chunks were measured.
    """

    path: str
    chunks: int
    known: int
    measured: int
    skipped: str = ""
    arrays: tuple[StatisticsReport, ...] = ()
    snapshot_id: str = ""

    @property
    def complete(self) -> bool:
        """Whether all these chunks have statistics."""
        return not self.skipped and self.known + self.measured == self.chunks


class ManifestPlace(Struct, frozen=True):
    """A manifest of the base.

    Parameters
    ----------
    key : str
        Its key in the storage.
    set_name : str
        The manifest set it was packed for.
    refs : int
        Chunk refs in it.
    nbytes : int
        Its bytes.
    arrays : int
        How many arrays have refs in it.
    """

    key: str
    set_name: str
    refs: int
    nbytes: int
    arrays: int


class ArrayPlace(Struct, frozen=True):
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
    refs : int
        Refs in manifests of the base.
    manifests : tuple of int
        Positions of these manifests, each once.
    pending_refs : int
        Refs that commits since have set or unset, and that are in no manifest of the base yet.
    is_coordinate : bool
        Whether it is a 1-d array named as its own dimension.
    """

    path: str
    rule: int | None
    wanted: str
    overflows: tuple[Overflow, ...]
    refs: int
    manifests: tuple[int, ...]
    pending_refs: int
    is_coordinate: bool


class ManifestLayout(Report, Struct, frozen=True):
    """Which manifests there are, and in which of them the refs of each array are.

    Parameters
    ----------
    snapshot_id : str
        The snapshot.
    manifests : tuple of ManifestPlace
        The base's.
    arrays : tuple of ArrayPlace
        By path; opaque keys that are stored as chunks are among them.
    """

    snapshot_id: str
    manifests: tuple[ManifestPlace, ...]
    arrays: tuple[ArrayPlace, ...]


class IngestedFile(Struct, frozen=True):
    """A file whose rows were committed.

    Parameters
    ----------
    url : str
        Where it is.
    start, rows : int
        Its first row in the arrays, and how many it has.
    nbytes : int
        Its size.
    """

    url: str
    start: int
    rows: int
    nbytes: int


class IngestReport(Report, Struct, frozen=True):
    """What `ingest` has done.

    Parameters
    ----------
    snapshot_id : str or None
        The commit it made; None if there was nothing to do.
    added, replaced : tuple of IngestedFile
        Files whose rows were appended, and files that had changed.
    failed : tuple of Problem
        Files that were left out, each with its URL as `key`, and `what` the reason is.
    unchanged : int
        The number of files that had been ingested before.
    seconds : float
        How long it took.

    Examples
    --------
    >>> print(IngestReport(None, (), (), (), 365, 0.5))
    nothing to do: 365 there already
    """

    snapshot_id: str | None
    added: tuple[IngestedFile, ...]
    replaced: tuple[IngestedFile, ...]
    failed: tuple[Problem, ...]
    unchanged: int
    seconds: float

    @property
    def nbytes(self) -> int:
        """Bytes of the files that were read."""
        return sum(file.nbytes for file in (*self.added, *self.replaced))

    def _lines(self) -> Iterator[str]:
        counts = (
            (len(self.added), f"{count_text(len(self.added), 'file')} added"),
            (len(self.replaced), f"{len(self.replaced):,} replaced"),
            (self.unchanged, f"{self.unchanged:,} there already"),
            (len(self.failed), f"{len(self.failed):,} left out"),
        )
        done = ", ".join(what for count, what in counts if count) or "no files"
        if self.snapshot_id is not None:
            done += f", in 1 commit: {bytes_text(self.nbytes)} in {self.seconds:.1f} s"
        yield done if self.snapshot_id is not None else f"nothing to do: {done}"
        yield from (f"  left out {file}" for file in self.failed)


# --- of upkeep: compaction, expiry, collection, verification, copies -----------------------------


class CompactionReport(Report, Struct, frozen=True):
    """What a compaction did, or would do: of deltas and manifests, or of packs.

    Attributes
    ----------
    snapshot_id : str or None
        The branch's head that it made; None if there was nothing to do, for a dry run, and if
        somebody else was faster.
    mode : str
        How: `minor`, `major`, `full` or `packs`. What is of another mode is 0.
    dry_run : bool
        Whether nothing was written.
    deltas_before, deltas_after : int
        Deltas and runs that readers merge.
    manifests_before, manifests_after : int
        Manifests of the base.
    manifests_written : int
        Those of the base that are new.
    refs_merged : int
        Chunk refs in manifests that were written.
    bytes_written : int
        Bytes of all objects that were written.
    packs, packs_nbytes : int
        With `packs`: chunk objects that the head refers to and whose live part is below `min_live`,
        and their bytes.
    chunks, chunks_nbytes : int
        Live chunks in these packs, those that were moved, or would be; and their bytes.
    chunks_overtaken : int
        Chunks that somebody else has changed meanwhile, which were therefore not moved.
    packs_written : int
        New packs.
    """

    snapshot_id: str | None = None
    mode: str = "major"
    dry_run: bool = False
    deltas_before: int = 0
    deltas_after: int = 0
    manifests_before: int = 0
    manifests_after: int = 0
    manifests_written: int = 0
    refs_merged: int = 0
    bytes_written: int = 0
    packs: int = 0
    packs_nbytes: int = 0
    chunks: int = 0
    chunks_nbytes: int = 0
    chunks_overtaken: int = 0
    packs_written: int = 0

    @property
    def dead_nbytes(self) -> int:
        """Bytes of the packs that nothing of the head refers to, and that become garbage."""
        return self.packs_nbytes - self.chunks_nbytes


class RewriteReport(Report, Struct, frozen=True, kw_only=True):
    """What writing an array anew has cost, or would cost.

    Attributes
    ----------
    path : str
        The array's absolute path.
    snapshot_id : str or None
        The new snapshot; None for a dry run.
    chunks : tuple of two shapes
        Shapes of the chunks, before and after.
    shards : tuple of two shapes or None
        Shapes of the shards, before and after; None without shards.
    chunks_before : int
        Chunks or shards of the old array that are there.
    reads_per_chunk : float
        How often each of these is read, on average.
    chunks_after : int
        Chunks or shards of the new array; in a dry run, all that there can be.
    tasks : int
        Boxes of cells that are read and written at a time.
    """

    path: str
    snapshot_id: str | None
    chunks: tuple[Coords, Coords]
    shards: tuple[Coords | None, Coords | None]
    chunks_before: int
    reads_per_chunk: float
    chunks_after: int
    tasks: int

    def _lines(self) -> Iterator[str]:
        shapes = [("chunks", self.chunks), ("shards", self.shards)]
        what = [f"{name} {_shape(a)} -> {_shape(b)}" for name, (a, b) in shapes if a != b]
        yield f"{self.path}: {', '.join(what) or 'other codecs'}"
        times = f"{self.reads_per_chunk:.3g} times" if self.reads_per_chunk > 1 else "once"
        done = self.snapshot_id is not None
        old, new = ("shard" if shards else "chunk" for shards in self.shards)
        yield (
            f"{'read' if done else 'would read'} {count_text(self.chunks_before, old)} {times}, "
            f"and {'wrote' if done else 'write'} {count_text(self.chunks_after, new)}; "
            f"tasks: {self.tasks:,}"
        )


def _shape(shape: Coords | None) -> str:
    return "none" if shape is None else " x ".join(f"{length:,}" for length in shape)


class ExportReport(Report, Struct, frozen=True, kw_only=True):
    """What an export has written.

    Parameters
    ----------
    dest : str
        Where it is.
    snapshot_id : str
        The snapshot that was exported.
    groups, arrays : int
        How many there are.
    chunks, nbytes : int
        The chunks in it, and their bytes as stored.
    referenced : int
        Those of them that are referred to, and not copied.
    tag : str or None
        Of references, the tag that keeps what they refer to; None if all was copied.
    """

    dest: str
    snapshot_id: str
    groups: int
    arrays: int
    chunks: int
    nbytes: int
    referenced: int = 0
    tag: str | None = None


class CollectionReport(Report, Struct, frozen=True):
    """What an expiry or a collection has done, or would do, or both of them in one call.

    What the call does not do is 0 or empty.

    Parameters
    ----------
    kept : int
        Objects that can be reached.
    objects, nbytes : mapping of str to int
        Objects deleted, and their bytes, by kind: `chunks`, `manifests`, `snapshots`, `root`, ...
    dry_run : bool
        Whether nothing was changed or deleted.
    waiting, waiting_nbytes : int
        Objects that nothing reaches, and their bytes, which stay for now: the writers that wrote
        them began within the grace, or hold a lease, and may still commit.
    held_by : mapping of str to datetime or None
        Tags with snapshots that no branch has in its history; and leases on other snapshots than
        the heads of branches, with the time at which each ends.
    waiting_until : datetime or None
        When what waits can be deleted, at the latest; leases may keep some of it longer.
    expired : mapping of str to tuple of str
        Ids of the snapshots that have left each branch's history, newest first; branches that
        keep all they have are not named.
    versions : mapping of str to int
        Of an expiry: how many snapshots the history of each branch has now.
    compacted : tuple of str
        Of `clean`: branches that were compacted, since they held chunks that no kept snapshot
        reads.
    """

    kept: int = 0
    objects: Mapping[str, int] = {}
    nbytes: Mapping[str, int] = {}
    dry_run: bool = False
    waiting: int = 0
    waiting_nbytes: int = 0
    held_by: Mapping[str, datetime | None] = {}
    waiting_until: datetime | None = None
    expired: Mapping[str, tuple[str, ...]] = {}
    versions: Mapping[str, int] = {}
    compacted: tuple[str, ...] = ()

    @property
    def deleted(self) -> int:
        """Objects of all kinds that were deleted."""
        return sum(self.objects.values())

    @property
    def deleted_nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(self.nbytes.values())

    @property
    def snapshots(self) -> tuple[str, ...]:
        """Ids of all snapshots that have left the history of some branch, each once."""
        return tuple(dict.fromkeys(name for names in self.expired.values() for name in names))

    def _lines(self) -> Iterator[str]:
        yield from self._expiry_lines()
        if self.kept:  # a collection keeps at least the newest snapshot
            yield from self._collection_lines()

    def _expiry_lines(self) -> Iterator[str]:
        if self.versions:
            verb, word = ("would expire", "to expire") if self.dry_run else ("expired", "expired")
            yield f"{verb} {count_text(len(self.snapshots), 'snapshot')}"
            for name, kept in sorted(self.versions.items()):
                yield f"  {name}: {len(self.expired.get(name, ())):,} {word}, {kept:,} kept"

    def _collection_lines(self) -> Iterator[str]:
        if self.compacted:
            verb = "would compact" if self.dry_run else "compacted"
            yield f"{verb} {', '.join(self.compacted)}"
        verb = "would delete" if self.dry_run else "deleted"
        yield f"{verb} {count_text(self.deleted, 'object')}, {bytes_text(self.deleted_nbytes)}"
        for kind, count in sorted(self.objects.items()):
            yield f"  {kind}: {count:,}, {bytes_text(self.nbytes[kind])}"
        yield f"kept {count_text(self.kept, 'object')}"
        # What was not deleted and why, and until when.
        if not (self.deleted or self.waiting):
            yield (
                "a branch, a tag or a lease reaches everything: what old snapshots alone need goes "
                "when they have expired"
            )
        if self.waiting:
            until = "" if self.waiting_until is None else f" until {time_text(self.waiting_until)}"
            yield (
                f"{count_text(self.waiting, 'object')}, {bytes_text(self.waiting_nbytes)}, that "
                f"nothing reaches may belong to writers that are not done, and can stay{until}: "
                "that is the grace. A grace of 0 deletes them now, and such writers cannot commit"
            )
        tags = [name for name, until in self.held_by.items() if until is None]
        if tags:
            yield f"kept with what only they need: {listed(tags, _SHOWN)}"
        for name, end in self.held_by.items():
            if end is not None:
                said = f"until {time_text(end)}, if it is not renewed"
                yield f"{name} keeps its snapshot and all newer ones {said}"


class VerifyReport(Report, Struct, frozen=True):
    """What a verification has found.

    Parameters
    ----------
    problems : tuple of Problem
        What is wrong; none if all is well.
    objects : int
        Metadata objects read, roots and archives included.
    chunk_objects, chunks : int
        Chunk objects read, and the different ranges of them that chunks refer to.
    nbytes : int
        Bytes of these chunks.
    unguarded : int
        Different byte ranges of files elsewhere that virtual chunks refer to without an etag or a
        time, so that a change of the file is not noticed. They are no problems.
    virtual_files : int
        Files elsewhere that virtual chunks lie in, in any version. None of them was looked at.
    """

    problems: tuple[Problem, ...] = ()
    objects: int = 0
    chunk_objects: int = 0
    chunks: int = 0
    nbytes: int = 0
    unguarded: int = 0
    virtual_files: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def _lines(self) -> Iterator[str]:
        yield from map(str, self.problems)
        if self.unguarded:
            said = count_text(self.unguarded, "virtual chunk")
            yield f"{said} without an etag or a time: a change of the file is not noticed"
        found = "sound" if self.ok else count_text(len(self.problems), "problem")
        chunks = f"{count_text(self.chunks, 'chunk')} in {count_text(self.chunk_objects, 'object')}"
        objects = count_text(self.objects, "metadata object")
        files = count_text(self.virtual_files, "file")
        unseen = f"; not looked at: {files} with virtual chunks" * (self.virtual_files > 0)
        yield f"{found}: {objects}, {chunks}, {bytes_text(self.nbytes)}{unseen}"


class CloneReport(Report, Struct, frozen=True):
    """What a clone has copied.

    Parameters
    ----------
    snapshots : int
        Snapshots that are new in the clone.
    objects : int
        Objects copied by this call.
    nbytes : int
        Their bytes.
    """

    snapshots: int
    objects: int
    nbytes: int


class RecoveryReport(Report, Struct, frozen=True):
    """What a recovery has done, or would do: of a damaged root, or of branches and tags.

    Parameters
    ----------
    recovered : int
        The version of the root whose archive was taken, or whose branches and tags these are.
    version : int
        The version of the root now.
    branches, tags : mapping of str to (str or None, str or None)
        By name: the ids of their snapshots before and after; None where there is no such branch or
        tag. Without a damaged root, those that differ; with one, all branches, of which nobody
        knows where they were before.
    perhaps_lost : range or None
        Of a damaged root: versions after it that there were, or may have been, and that are not in
        the root now. If the root could not be read, how many there were is not known: then these
        are all from the first one on up to the root's version now. Empty if the newest version was
        taken.
    skipped : mapping of int to str
        Newer archives that were not taken, and what was wrong with each.
    dry_run : bool
        Whether nothing was changed.
    """

    recovered: int
    version: int
    branches: Mapping[str, tuple[str | None, str | None]] = {}
    tags: Mapping[str, tuple[str | None, str | None]] = {}
    perhaps_lost: range | None = None
    skipped: Mapping[int, str] = {}
    dry_run: bool = False

    def _lines(self) -> Iterator[str]:
        if self.perhaps_lost is None:
            verb = "would be" if self.dry_run else "is now"
            for what, moved in (("branch", self.branches), ("tag", self.tags)):
                for name, (was, now) in moved.items():
                    yield f"{what} {name} was {was or 'not there'}, {verb} {now or 'not there'}"
            verb = "would be" if self.dry_run else "are"
            yield f"branches and tags {verb} those of version {self.recovered} again"
        else:
            yield from (f"version {at} was not taken: {why}" for at, why in self.skipped.items())
            yield from (f"{name}  {head}" for name, (_, head) in self.branches.items())
            took, now = ("would take", "would be") if self.dry_run else ("took", "is now")
            yield (
                f"{took} version {self.recovered}; the root {now} version {self.version}. What "
                f"versions from {self.recovered + 1} on did, if there were any, is not in it"
            )


# --- of versions: snapshots, ancestries, differences, merges, the log of operations --------------


def moved_tops(moved: Mapping[str, str]) -> dict[str, str]:
    """New path by old path of moved nodes, without those that moved along with their group.

    Examples
    --------
    >>> from zarr_manifests.reports import moved_tops
    >>> moved_tops({"/air": "/sky", "/air/t": "/sky/t", "/air/q": "/q"})
    {'/air': '/sky', '/air/q': '/q'}
    """

    def went_along(old: str, new: str) -> bool:
        (above, _, name), (now_above, _, now_name) = old.rpartition("/"), new.rpartition("/")
        return name == now_name and moved.get(above) == now_above

    return {old: new for old, new in moved.items() if not went_along(old, new)}


class SnapshotInfo(Report, Struct, frozen=True):
    """One entry of the history.

    Parameters
    ----------
    snapshot_id : str
        The snapshot's id; also `id`.
    parent_id : str or None
        Its parent's; None for the first of a repository.
    written_at : datetime
        When, in UTC, by the committer's clock.
    kind : str
        `append`, `overwrite`, `delete`, `metadata`, or `rewrite` (changes no data).
    message : str
        Why.
    metadata : mapping
        What the committer wanted kept.
    author : str
        Who committed, by `metadata["author"]`; may be empty.
    written : mapping of str to int
        What the commit did: `refs-set`, `refs-unset`, `chunk-bytes`.
    commit_id : str
        32 hexadecimal digits, as in `CommitOutcomeUnknownError.commit_id`.
    totals : mapping of str to int
        What the snapshot holds: `arrays`, `groups`, `chunks`, `chunk-bytes`. Where the last two
        are upper bounds, they are `chunks-at-most` and `chunk-bytes-at-most`. What is not known
        is left out. `Repository.totals` gives the same per array.
    """

    snapshot_id: str
    parent_id: str | None
    written_at: datetime
    kind: str
    message: str
    metadata: Mapping[str, Any]
    author: str
    written: Mapping[str, int]
    commit_id: str
    totals: Mapping[str, int]

    @classmethod
    def of(cls, entry: HistoryEntry) -> SnapshotInfo:
        """What the entry says."""
        return cls(
            entry.snapshot_id,
            None if entry.parent is None else entry.parent.snapshot_id,
            datetime.fromtimestamp(entry.written_ms / 1000, UTC),
            str(entry.kind),
            entry.message or "",
            entry.metadata,
            str(entry.metadata.get("author", "")),
            entry.totals,
            entry.commit_id.hex(),
            entry.sums,
        )

    @property
    def id(self) -> str:
        """The snapshot's id."""
        return self.snapshot_id

    def __hash__(self) -> int:
        return hash(self.snapshot_id)

    def _lines(self) -> Iterator[str]:
        done = written_text(self.written)
        by = f"  by {self.author}" if self.author else ""
        yield f"{self.snapshot_id}  {time_text(self.written_at)}  {self.kind}{by}"
        yield f"    {self.message}" + (f"  [{done}]" if done else "")


class Ancestry(Iterator[SnapshotInfo]):
    """The history of a version, newest first: an iterator that a notebook shows as a graph.

    Made by `Repository.ancestry`. What a notebook shows is not taken from the iterator.

    Parameters
    ----------
    found : iterator of SnapshotInfo
        The snapshots.
    graph : callable
        Rows of the graph of all branches and tags, or of a version; see `history_graph`.
    version : str
        The version.
    limit : int or None
        The most snapshots.

    Examples
    --------
    >>> import zarr_manifests as zm
    >>> history = zm.create("memory://history-example").ancestry()
    >>> "create repository" in history._repr_html_()
    True
    >>> next(history).message
    'create repository'
    """

    def __init__(
        self,
        found: Iterator[SnapshotInfo],
        graph: Callable[..., Sequence[GraphRow]],
        version: str,
        limit: int | None,
    ) -> None:
        self._found, self._graph, self._version, self._limit = found, graph, version, limit

    def __next__(self) -> SnapshotInfo:
        return next(self._found)

    def __repr__(self) -> str:
        return "<Ancestry: an iterator of SnapshotInfo, newest first>"

    def plot(self) -> Axes:
        """Draw the history of all branches and tags as a graph, newest first; return the axes.

        It has the newest 40 commits.

        Raises
        ------
        ImportError
            If matplotlib is not installed; it comes with the extra `plot`.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.create("memory://plot-history-example")
        >>> with repo.transaction(message="make air") as store:
        ...     _ = zarr.create_group(store, path="air")
        >>> axes = repo.ancestry().plot()
        >>> axes.figure.savefig("history.png")  # doctest: +SKIP
        """
        from zarr_manifests.picturing.draw import draw_history

        return draw_history(self._graph(rows=_DRAWN_ROWS))

    def _repr_html_(self) -> str:
        from zarr_manifests.picturing.graph import graph_lines
        from zarr_manifests.rendering import html

        rows: Sequence[GraphRow] = ()
        with suppress(ManifestsError):  # what is shown to look around must not fail
            most = _SHOWN_COMMITS if self._limit is None else min(self._limit, _SHOWN_COMMITS)
            rows = self._graph(self._version, rows=most)
        older = ["... and older ones"] if rows and rows[-1].below else []
        return html("History", *graph_lines(rows), *older)


class Diff(Report, Struct, frozen=True, eq=False):
    """What changed from one snapshot to a later one, or in a session; false if nothing has.

    Parameters
    ----------
    created, updated, deleted : tuple of str
        Absolute paths; a node that was deleted and made again is in both lists.
    chunks : mapping of str to int64[n, ndim]
        Coordinates of the chunks written or removed, by absolute path, sorted; a key that belongs
        to no array is one chunk.
    moved : mapping of str to str
        New path by old; these are neither created nor deleted, but updated if their metadata
        changed too.
    truncated : mapping of str to tuple of int
        Of arrays that were made smaller, or whose chunks were moved, though they may have grown
        again since: the shape of the chunk grid, in chunks along each axis, beyond which all chunks
        went. Which these were is not looked up; `chunks` does not have them.
    grids : mapping of str to tuple of int
        Of the arrays in `chunks`: the shape of the chunk grid in the later snapshot.
    dimensions : mapping of str to tuple of (str or None)
        Of the arrays in `chunks` that name their dimensions: the names in the later snapshot.
    fields : mapping of str to mapping
        Of the nodes in `updated`: the fields of their metadata that differ, such as `shape` or
        `attributes.units`, with their values before and after; None where there was none.
    cells : mapping of str to int64[n]
        If values were compared: how many cells of each of these chunks have another value. Cells of
        only one version, because the array has another shape, are not compared; `fields` then has
        both shapes.
    steps : mapping of str to tuple of float
        If values were compared: the least and the greatest difference, new minus old, over the
        changed cells that are numbers in both versions; an array without any is left out. Values
        are as stored: not scaled, and times not decoded.
    """

    created: tuple[str, ...] = ()
    updated: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    chunks: Mapping[str, IndexArray] = {}
    moved: Mapping[str, str] = {}
    truncated: Mapping[str, Coords] = {}
    grids: Mapping[str, Coords] = {}
    dimensions: Mapping[str, tuple[str | None, ...]] = {}
    fields: Mapping[str, Fields] = {}
    cells: Mapping[str, IndexArray] = {}
    steps: Mapping[str, tuple[float, float]] = {}

    @classmethod
    def of(cls, changes: Changes) -> Diff:
        """What these changes have made of the nodes and their chunks."""
        each = [change for _, change in changes]
        now = {absolute(c.after.path): c for c in each if c.after is not None}
        pairs = [(c.before, c.after) for _, c in sorted(now.items()) if c.before and c.after]
        updated = {
            absolute(new.path): field_changes(old, new)
            for old, new in pairs
            if old.documents != new.documents
        }
        chunks = {path: c.chunks.coords() for path, c in sorted(now.items()) if c.chunks}
        arrays = {path: node.array for path in chunks if (node := now[path].after) and node.array}
        return cls(
            tuple(sorted(path for path, c in now.items() if c.before is None)),
            tuple(updated),
            tuple(sorted(absolute(c.path) for c in each if c.after is None)),
            chunks,
            {absolute(a.path): absolute(b.path) for a, b in pairs if a.path != b.path},
            {path: c.cut for path, c in sorted(now.items()) if c.cut is not None},
            {path: array.grid.shape for path, array in arrays.items()},
            {p: a.dimension_names for p, a in arrays.items() if a.dimension_names},
            updated,
        )

    def __bool__(self) -> bool:
        listed = self.created, self.updated, self.deleted, self.chunks, self.moved, self.truncated
        return any(listed)

    def _lines(self) -> Iterator[str]:
        if not self:
            yield "no changes"
        yield from (f"+ {path}" for path in self.created)
        for path in self.updated:
            yield f"~ {path}"
            yield from field_lines(self.fields.get(path, {}))
        yield from (f"- {path}" for path in self.deleted)
        for path in sorted({*self.created}.intersection(self.deleted)):
            yield f"  {path}: made again, so all that it held before is gone"
        yield from (f"> {old} to {new}" for old, new in moved_tops(self.moved).items())
        yield from (f"  {path}: cut to {shape} chunks" for path, shape in self.truncated.items())
        for path, at in self.chunks.items():
            yield f"  {path}: {_chunks_text(at)}"
            if path in self.cells:
                yield f"    {_cells_text(self.cells[path], self.steps.get(path))}"

    def plot(self) -> npt.NDArray[np.object_]:
        """Draw which chunks of each array changed, and return the axes.

        Large grids are folded: a cell then stands for several chunks, and its color says how many
        of them changed. Where no chunk changed, there is no picture.

        Raises
        ------
        ImportError
            If matplotlib is not installed; it comes with the extra `plot`.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.create("memory://plot-diff-example")
        >>> with repo.transaction(message="make air") as store:
        ...     air = zarr.create_array(store, name="air", shape=(8, 8), chunks=(2, 2), dtype="i2")
        ...     air[:] = 1
        >>> with repo.transaction(message="correct a corner") as store:
        ...     zarr.open_array(store, path="air")[:2, :2] = 7
        >>> (axes,) = repo.diff("main~1", "main").plot()
        >>> axes.get_title(loc="left")
        '/air: 1 of 16 chunks'
        """
        from zarr_manifests.picturing.draw import draw_diff

        counts = [("created", self.created), ("updated", self.updated), ("deleted", self.deleted)]
        title = "Changed chunks; nodes: " + ", ".join(f"{len(n):,} {name}" for name, n in counts)
        return draw_diff(title, self.chunks, self.grids, self.dimensions)


def field_lines(fields: Fields) -> Iterator[str]:
    """Fields that differ as lines, with their values before and after.

    Examples
    --------
    >>> from zarr_manifests.reports import field_lines
    >>> list(field_lines({"attributes.units": ("K", "degC"), "shape": ([2], [3])}))
    ["    attributes.units: 'K' to 'degC'", '    shape: [2] to [3]']
    """
    for name, (was, now) in fields.items():
        texts = [repr(value) for value in (was, now)]
        before, after = (t if len(t) <= _SHOWN_TEXT else f"{t[:_SHOWN_TEXT]}..." for t in texts)
        gone = f"{before} removed" if now is None else f"{before} to {after}"
        yield f"    {name}: {f'{after} added' if was is None else gone}"


def _cells_text(counts: IndexArray, steps: tuple[float, float] | None) -> str:
    """How many cells have changed, and by how much."""
    told = count_text(int(counts.sum()), "changed cell")
    return told if steps is None else f"{told} by {steps[0]:g} to {steps[1]:g}, as stored"


def _chunks_text(chunks: IndexArray) -> str:
    """How many chunks, and the first of them."""
    told = count_text(len(chunks), "chunk")
    if chunks.shape[1] == 0:  # it has no coordinates
        return told
    first = ", ".join(str(tuple(at)) for at in chunks[:_SHOWN_CHUNKS].tolist())
    return f"{told}: {first}{', ...' if len(chunks) > _SHOWN_CHUNKS else ''}"


class MergeReport(Report, Struct, frozen=True):
    """What a merge did, or would do.

    Parameters
    ----------
    source, base : str
        Ids of the snapshot that was merged, and of the newest one whose changes both sides had.
    into : str
        The branch.
    snapshot_id : str or None
        The head of the branch now; None for a dry run.
    commits : int
        Commits of the source that the branch did not have.
    fast_forward : bool
        Whether the branch was moved to the source, because it had nothing else to keep.
    conflicts : tuple of Conflict
        All places where both sides have different changes; only a dry run has any.
    dry_run : bool
        Whether nothing was changed.
    """

    source: str
    base: str
    into: str
    snapshot_id: str | None
    commits: int
    fast_forward: bool
    conflicts: tuple[Conflict, ...] = ()
    dry_run: bool = False

    @property
    def merges(self) -> bool:
        """Whether there was, or is, anything to merge."""
        return self.source != self.base

    def _lines(self) -> Iterator[str]:
        if not self.merges:
            yield f"{self.into} has all changes of {self.source}"
        elif self.conflicts:
            yield f"{self.source} cannot be merged into {self.into}, because of conflicts:"
            yield from (f"  {conflict}" for conflict in self.conflicts)
        else:
            would = "would bring" if self.dry_run else "brought"
            how = "by moving the branch there" if self.fast_forward else "in one commit"
            count = count_text(self.commits, "commit")
            yield f"{would} {count} of {self.source} to {self.into}, {how}"


class LoggedOperation(Struct, frozen=True):
    """One operation on the root.

    Parameters
    ----------
    version : int
        The version of the root that it made; `zarr_manifests.recover` takes one.
    at : datetime
        When, in UTC, by the clock of who did it.
    operation : str
        What: `commit append`, `create branch`, `expire snapshots`, ...
    ref : str
        The branch or tag it was about; empty if about none.
    snapshot_id : str
        The snapshot concerned; may be empty.
    operation_id : str
        Its random id in hexadecimal; of a commit that is `SnapshotInfo.commit_id`.
    by : str
        Who, as they said: the user and the host, or what the environment variable
        `ZARR_MANIFESTS_WHO` was set to; may be empty.
    before : str
        Of an amend, a reset or a deletion: id of the snapshot that the branch or tag was at. It can
        be opened by that id until it is collected. Else empty.
    """

    version: int
    at: datetime
    operation: str
    ref: str
    snapshot_id: str
    operation_id: str
    by: str = ""
    before: str = ""

    @classmethod
    def from_entry(cls, entry: LogEntry) -> LoggedOperation:
        """What an entry of the log says."""
        at = datetime.fromtimestamp(entry.at_ms / 1000, UTC)
        operation, _, before = entry.operation.partition(" from ")
        ids = entry.snapshot, entry.commit_id.hex()
        return cls(entry.version, at, operation, entry.ref, *ids, entry.by, before)
