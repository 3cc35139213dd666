"""Values that tell what upkeep did: compaction, expiry, collection, verification, copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Final

from msgspec import Struct

from zarr_manifests.grid import Coords
from zarr_manifests.report import Problem, Report
from zarr_manifests.texts import bytes_text, count_text, listed, time_text

_SHOWN: Final = 10


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
        old, new = ("shards" if shards else "chunks" for shards in self.shards)
        yield (
            f"{'read' if done else 'would read'} {self.chunks_before:,} {old} {times}, "
            f"and {'wrote' if done else 'write'} {self.chunks_after:,} {new}; "
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
        The tag that keeps what is referred to; None if nothing is.
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
    """

    problems: tuple[Problem, ...] = ()
    objects: int = 0
    chunk_objects: int = 0
    chunks: int = 0
    nbytes: int = 0
    unguarded: int = 0

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
        yield f"{found}: {objects}, {chunks}, {bytes_text(self.nbytes)}"


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
