"""`rewrite_chunks`: other chunks, shards or codecs for an array, in one commit.

Tasks read boxes of the array at a fixed snapshot and write them to forks of a session. After each
round of tasks the forks are merged, and what has been written is committed to a branch of its own,
always as one commit, which later rounds amend. At the end this commit is picked onto the target
branch. Invariants: the target branch gets all of the new chunks in one commit, or none; rounds that
were committed are not repeated, unless the array has changed meanwhile; every cell is in one box,
and every new chunk or shard lies within one, so that one task writes it.
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal

import zarr
import zarr.storage
from msgspec import Struct
from msgspec.structs import replace

from zarr_manifests import repositories
from zarr_manifests.errors import InvalidArgumentError, SnapshotExpiredError
from zarr_manifests.grid import Box
from zarr_manifests.planning.regions import ResolvedChunks
from zarr_manifests.planning.scan import Axis, Scan, one_run, plan_scan
from zarr_manifests.progress import expect, tell
from zarr_manifests.reports import RewriteReport, SnapshotInfo
from zarr_manifests.repositories import repository_of
from zarr_manifests.repository import Repository, containers_of
from zarr_manifests.runtime import SYSTEM, Run
from zarr_manifests.session import Fork, Session
from zarr_manifests.storage import Storage
from zarr_manifests.store import ManifestStore, contents_of
from zarr_manifests.versions import HEADS
from zarr_manifests.xarray.array_target import ArrayTarget

_DONE: Final = "boxes-done"


def rewrite_chunks(
    location: str | os.PathLike[str] | Storage | Repository,
    path: str,
    *,
    chunks: Sequence[int] | Literal["keep"] = "keep",
    shards: Sequence[int] | Literal["keep"] | None = "keep",
    codecs: Mapping[str, Any] | None = None,
    branch: str = "main",
    message: str | None = None,
    task_bytes: int = 256 * 1024**2,
    round_bytes: int = 16 * 1024**3,
    dry_run: bool = False,
    run: Run | None = None,
    storage_options: Mapping[str, object] | None = None,
) -> RewriteReport:
    """Rewrite an array with other chunks, shards or codecs, in one commit.

    Older snapshots are untouched. If the rewriting fails, call it again: it continues, unless the
    array has changed. Until it ends, a branch `rewrite-chunks/...` holds what is done; delete the
    branch to give up.

    Parameters
    ----------
    location : str, path, Storage or Repository
        The repository.
    path : str
        The array.
    chunks, shards : sequence of int, optional
        Their new shapes, as in `zarr.create_array`; unchanged if not given. None for `shards`
        stores chunks without shards.
    codecs : mapping, optional
        `filters`, `compressors` and `serializer`, as in `zarr.create_array`; unchanged if not
        given.
    branch : str, default "main"
        The branch.
    message : str, optional
        The commit message.
    task_bytes : int, default 256 MiB
        Bytes of values that a task holds at a time; at least one new chunk or shard.
    round_bytes : int, default 16 GiB
        Bytes of values that are written between two of the commits that keep them.
    dry_run : bool, default False
        Only report the cost.
    run : callable, optional
        Runs the tasks; by default on threads. `zarr_manifests.spark.maintenance` brings its own.
    storage_options : mapping, optional
        Options of `zarr_manifests.storage.from_url` for the path or URL.

    Returns
    -------
    RewriteReport
        What was read and written, or would be.

    Raises
    ------
    NotFoundError
        If there is no such branch or array.
    InvalidArgumentError
        If the array has such chunks, shards and codecs already, or `codecs` has other names.
    ConflictError
        If others have changed the array meanwhile.
    ValueError
        From Zarr, if chunks, shards and codecs do not go together.

    Examples
    --------
    >>> import numpy as np, zarr, zarr_manifests as zm
    >>> repo = zm.create("memory://rewrite-chunks-example")
    >>> with repo.transaction(message="one day a chunk") as store:
    ...     a = zarr.create_array(store, name="t", shape=(60, 8), chunks=(1, 8), dtype="f4")
    ...     a[:] = np.arange(480).reshape(60, 8)
    >>> print(zm.rewrite_chunks(repo, "t", chunks=(30, 4), dry_run=True))
    /t: chunks 1 x 8 -> 30 x 4
    would read 60 chunks once, and write 4 chunks; tasks: 1
    >>> report = zm.rewrite_chunks(repo, "t", chunks=(30, 4))
    >>> zarr.open_array(repo.readonly_session().store, path="t").chunks
    (30, 4)
    """
    repository = repository_of(location, storage_options)
    source = repository.readonly_session(HEADS + branch)
    contents_of(source.store).array_at(path)  # else Zarr says less of what is missing
    old = zarr.open_array(source.store, path=path, mode="r")
    layout = _layout(old, chunks, shards, codecs)
    _create(zarr.storage.MemoryStore(), old, layout)  # so that a wrong layout fails at once
    stored, written = old.shards or old.chunks, layout["shards"] or layout["chunks"]
    cells = max(task_bytes // max(old.dtype.itemsize, 1), 1)
    scan = plan_rechunk(old.shape, stored, written, cells)
    refs = source.chunk_refs(path)
    needed = scan.holding(stored, refs.coords).tolist()
    report = _estimate(refs, old, layout, scan, len(needed))
    if dry_run:
        return report
    rewriting = _Rewriting(repository, source, path, layout, scan, needed, report)
    per_round = max(round_bytes // max(task_bytes, 1), 1)
    # The branch that keeps what is done keeps its own commit, but not what that was made from.
    with repository.lease(source.snapshot_id, owner="rewriting chunks"):
        return rewriting.land(
            branch, message or f"rewrite the chunks of {report.path}", per_round, run or _on_threads
        )


def plan_rechunk(
    shape: Sequence[int], old: Sequence[int], new: Sequence[int], target_cells: int
) -> Scan:
    """Boxes of cells that are rewritten together.

    A box is made of whole new chunks. As far as the target allows, its edges are edges of old
    chunks too, so that these are read once.

    Parameters
    ----------
    shape : sequence of int
        The array's shape.
    old, new : sequence of int
        Shapes of what is read and written as a whole: chunks, or shards if there are any.
    target_cells : int
        Cells that a box should have at most; a box with more is one new chunk.

    Examples
    --------
    >>> from zarr_manifests.rewriting import plan_rechunk
    >>> [(box.lo, box.hi) for box in plan_rechunk((12, 4), (1, 4), (6, 2), 24)]
    [((0, 0), (6, 4)), ((6, 0), (12, 4))]
    """
    unit = list(new)
    for axis in reversed(range(len(shape))):
        common = math.lcm(old[axis], new[axis])
        if common >= shape[axis]:  # one span is aligned with everything
            common = -(-shape[axis] // new[axis]) * new[axis]
        if math.prod(unit) // unit[axis] * common <= target_cells:
            unit[axis] = common
    axes = [Axis(n, one_run(0, length)) for n, length in zip(unit, shape, strict=True)]
    return plan_scan(axes, target_rows=target_cells)


def reads_per_chunk(scan: Scan, old: Sequence[int]) -> float:
    """How many boxes read an old chunk, on average; 1 is the best.

    Examples
    --------
    >>> from zarr_manifests.rewriting import plan_rechunk, reads_per_chunk
    >>> reads_per_chunk(plan_rechunk((12,), (12,), (3,), 3), (12,))
    4.0
    """
    factor = 1.0
    for spans, chunk, axis in zip(scan.spans, old, scan.axes, strict=True):
        if len(spans):
            touched = -(-spans[:, 1] // chunk) - spans[:, 0] // chunk
            factor *= int(touched.sum()) / -(-axis.size // chunk)
    return factor


def _layout(
    old: zarr.Array[Any],
    chunks: Sequence[int] | str,
    shards: Sequence[int] | str | None,
    codecs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The arguments of `zarr.create_array` that say how values are stored."""
    known = ["compressors", "filters", *(["serializer"] if old.metadata.zarr_format == 3 else ())]
    if unknown := set(codecs or {}) - set(known):
        raise InvalidArgumentError(f"codecs has {min(unknown)!r}; known here: {', '.join(known)}")
    now: dict[str, Any] = {name: getattr(old, name) for name in ("chunks", "shards", *known)}
    new = {**now, **(codecs or {})}
    if not isinstance(chunks, str):
        new["chunks"] = tuple(chunks)
    if not isinstance(shards, str):
        new["shards"] = None if shards is None else tuple(shards)
    if new == now:
        raise InvalidArgumentError(
            f"/{old.path} has these chunks, shards and codecs already; nothing was rewritten"
        )
    if len(new["chunks"]) != old.ndim:
        raise InvalidArgumentError(f"chunks must have {old.ndim} axes, not {new['chunks']}")
    return new


def _estimate(
    refs: ResolvedChunks, old: zarr.Array[Any], layout: Mapping[str, Any], scan: Scan, boxes: int
) -> RewriteReport:
    stored_as = old.shards or old.chunks
    written_as = layout["shards"] or layout["chunks"]
    grid = [-(-length // n) for length, n in zip(old.shape, written_as, strict=True)]
    return RewriteReport(
        path=f"/{old.path}",
        snapshot_id=None,
        chunks=(old.chunks, layout["chunks"]),
        shards=(old.shards, layout["shards"]),
        values_bytes=old.nbytes,
        chunks_before=len(refs),
        stored_bytes=int(refs.length.sum()),
        reads_per_chunk=reads_per_chunk(scan, stored_as),
        chunks_after=math.prod(grid),
        tasks=boxes,
        reused_tasks=0,
    )


class _Rewriting(Struct, frozen=True):
    """An array that is being rewritten, and the branch that keeps what is done."""

    repository: Repository
    source: Session
    path: str
    layout: Mapping[str, Any]
    scan: Scan
    needed: Sequence[int]
    """Numbers of the boxes with values."""
    report: RewriteReport

    def land(self, branch: str, message: str, per_round: int, run: Run) -> RewriteReport:
        """Rewrite what is left, and commit it to the branch."""
        # No compaction may come between the commits that amend each other, nor be one of them.
        repository = repositories.open(
            self.repository.storage,
            replace(
                self.repository.config,
                compaction=replace(self.repository.config.compaction, mode="manual"),
                commits=replace(self.repository.config.commits, mode="delta"),
            ),
            virtual_containers=containers_of(self.repository),
        )
        kept = self._branch_name()
        reused = done = self._resumed(repository, kept)
        session = repository.writable_session(kept)
        expect("rewriting chunks", len(self.needed))
        tell("rewriting chunks", done or 0)
        while done is None or done < len(self.needed):
            first = done is None
            if first:
                old = zarr.open_array(self.source.store, path=self.path, mode="r")
                _create(session.store, old, self.layout)
            numbers = self.needed[done or 0 : (done or 0) + per_round]
            write = partial(_write, self.source.store, session.fork(), self.path)
            session.merge(*run(write, [self.scan[number] for number in numbers]))
            done = (done or 0) + len(numbers)
            commit = session.commit if first else session.amend
            commit(message, {"rewrites": self.report.path, _DONE: done})
            tell("rewriting chunks", done)
        picked = self.repository.cherry_pick(repository.list_branches()[kept], branch, message)
        repository.delete_branch(kept)
        return replace(
            self.report,
            snapshot_id=picked,
            chunks_after=len(self.repository.readonly_session(picked).chunk_refs(self.path)),
            reused_tasks=reused or 0,
        )

    def _branch_name(self) -> str:
        """A branch for this array, layout and cut into boxes."""
        spans = [span.tolist() for span in self.scan.spans]
        text = repr((self.report.path, sorted((k, str(v)) for k, v in self.layout.items()), spans))
        return f"rewrite-chunks/{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def _resumed(self, repository: Repository, kept: str) -> int | None:
        """How many boxes are done; None if nothing is, and the branch was made anew."""
        head = repository.list_branches().get(kept)
        if head is not None:
            newest = [*repository.ancestry(kept, limit=2)]
            if len(newest) == 2 and self._unchanged(newest[1]) and _DONE in newest[0].metadata:
                return int(newest[0].metadata[_DONE])
            repository.delete_branch(kept)
        repository.create_branch(kept, self.source.snapshot_id)
        return None

    def _unchanged(self, begun: SnapshotInfo) -> bool:
        """Whether the array is the same as in the snapshot that the rewriting began with."""
        try:
            ends = begun.snapshot_id, self.source.snapshot_id
            diff = self.repository.diff(*ends, symmetric=False)
        except (InvalidArgumentError, SnapshotExpiredError):
            return False  # another history
        nodes = *diff.created, *diff.updated, *diff.deleted, *diff.moved, *diff.moved.values()
        return self.report.path not in {*nodes, *diff.chunks, *diff.truncated}


def _create(store: Any, old: zarr.Array[Any], layout: Mapping[str, Any]) -> None:
    """Make an empty array of the new layout in the place of the old one."""
    metadata = old.metadata
    how: dict[str, Any] = {"zarr_format": metadata.zarr_format}
    if metadata.zarr_format == 3:
        how["dimension_names"] = metadata.dimension_names
        how["chunk_key_encoding"] = metadata.chunk_key_encoding
    else:
        how["order"] = metadata.order
    zarr.create_array(
        store,
        name=old.path,
        shape=old.shape,
        dtype=metadata.dtype,
        fill_value=metadata.fill_value,
        attributes=old.attrs.asdict(),
        overwrite=True,
        **how,
        **layout,
    )


def _write(old: ManifestStore, fork: Fork, path: str, box: Box) -> Fork:
    """Write a box of the old array to the new one, in a fork of its own."""
    mine = copy.copy(fork)
    source = zarr.open_array(old, path=path, mode="r")
    array = zarr.open_array(mine.store, path=path, mode="r+")
    target = ArrayTarget(array, statistics=True)
    place = tuple(slice(lo, hi) for lo, hi in zip(box.lo, box.hi, strict=True))
    target[place] = source[place]
    target.record()
    return mine


def _on_threads(call: Callable[[Box], Fork], boxes: Sequence[Box]) -> Iterable[Fork]:
    abreast = os.cpu_count() or 1
    for first in range(0, len(boxes), abreast):
        calls = [partial(call, box) for box in boxes[first : first + abreast]]
        yield from SYSTEM.parallel(calls)
