"""Repacking: moving chunks out of packs that are mostly dead, without changing any value.

1. The head's refs give the live part of each chunk object; a listing gives their sizes. Objects
   with too small a live part are due, in rounds of a bounded number of chunks.
2. A round reads the live chunks of its packs, a few packs at a time, verifies their checksums, and
   writes them into new packs.
3. A compaction merges all pending changes into the base. Where a row refers to a chunk that has
   been written anew, the new leaf refers to the new place. So it conflicts with no other commit. If
   others write, unset or cut off a chunk in the meantime, their change is newer and stands. If
   others have compacted, it is done again.
4. The head no longer refers to the old packs. They become garbage once the snapshots that refer to
   them have expired.

Invariant: a chunk's new ref has the length and checksum of the old one, and its object is durable
before the swap.

Which manifests hold which chunk refs is read from the base's directory alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from zarr_manifests.engine.objects import SessionKeys, create_own
from zarr_manifests.engine.roots import opened
from zarr_manifests.engine.totals import node_facts, pending_rows
from zarr_manifests.engine.upkeep.compaction import compact_branch
from zarr_manifests.engine.view import Context, ReadContext, SnapshotView
from zarr_manifests.errors import (
    ConflictError,
    CorruptObjectError,
    InvalidArgumentError,
    ObjectNotFoundError,
)
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.manifest import NodeKind
from zarr_manifests.format.records import BlobRef
from zarr_manifests.ids import crc32c, snapshot_id_of
from zarr_manifests.planning.garbage import (
    CompactionMode,
    PackMoves,
    Range,
    Use,
    due_packs,
    parts,
    rows_of,
    uses_of,
)
from zarr_manifests.planning.packing import explain
from zarr_manifests.planning.tables import BaseIndex
from zarr_manifests.progress import counted, expect, tell
from zarr_manifests.reports import ArrayPlace, CompactionReport, ManifestLayout, ManifestPlace
from zarr_manifests.runtime import Run, Runtime
from zarr_manifests.storage import Storage
from zarr_manifests.storage.protocol import coalesce

ROUND_CHUNKS = 250_000
_ABREAST: Final = 8
"""Packs that are read, and then written, in parallel."""
_ATTEMPTS: Final = 10
_NAMED: Final = 5
_length: Final = attrgetter("length")


def repack_chunks(
    context: Context, branch: str, min_live: float, *, dry_run: bool, run: Run = map
) -> CompactionReport:
    """Move the live chunks of a branch's head out of packs whose live part is below `min_live`.

    `run` reads and writes packs.

    Raises
    ------
    InvalidArgumentError
        If `min_live` is out of range.
    NotFoundError
        If there is no such branch.
    CorruptObjectError
        If chunks to move are damaged or missing; all others have been moved.
    FencedError
        If the repacking is behind the fence of a collection.
    ConflictError
        If the branch was deleted, or others came first too often.
    """
    _check_part(min_live)

    uses = opened(partial(_uses, context, branch))
    sizes = _sizes(context, uses)
    due = due_packs(uses, sizes, min_live)
    report = CompactionReport(
        mode="packs",
        packs=len(due),
        packs_nbytes=sum(sizes[key] for key in due),
        chunks=sum(uses[key].chunks for key in due),
        chunks_nbytes=sum(uses[key].nbytes for key in due),
        dry_run=dry_run,
    )
    if dry_run or not due:
        return report
    keys = SessionKeys(context.roots.latest.root.version, context.runtime)
    work = _Repacking(context, branch, keys, run)
    expect("reading packs", len(due))
    head = None
    for packs in parts(due, lambda key: uses[key].chunks, ROUND_CHUNKS):
        head = work.move(frozenset(packs)) or head
    work.check_damaged()
    return replace(
        report,
        snapshot_id=None if head is None else snapshot_id_of(head.key),
        chunks=work.chunks,
        chunks_nbytes=work.nbytes,
        chunks_overtaken=work.overtaken,
        packs_written=work.packs_written,
    )


def _check_part(value: object) -> None:
    if not (isinstance(value, int | float) and 0 < value <= 1):
        raise InvalidArgumentError(f"min_live is a number above 0 and at most 1, not {value!r}")


def _head(context: ReadContext, branch: str) -> SnapshotView:
    return context.open_branch(context.roots.branch(context.roots.read().root, branch))


def _node_ids(view: SnapshotView) -> list[bytes]:
    """Nodes that may have chunks, in order of paths."""
    listed = (view.nodes[path] for path in sorted(view.nodes))
    return [node.node_id for node in listed if node.kind is not NodeKind.GROUP]


def _uses(context: ReadContext, branch: str) -> dict[str, Use]:
    """The live part of each chunk object at the head; one array's refs are in memory at a time."""
    view, found = _head(context, branch), dict[str, Use]()
    for node_id in counted("looking at refs", _node_ids(view)):
        table = view.chunks(node_id)
        if table is not None:
            for key, use in uses_of(table).items():
                found[key] = found.get(key, Use()).plus(use)
    return found


def _sizes(context: ReadContext, uses: dict[str, Use]) -> dict[str, int]:
    """Sizes of the objects by key, from one listing, which includes dead bytes at their ends."""
    return {info.key: info.nbytes for info in context.storage.list("chunks/") if info.key in uses}


class _Repacking(Struct):
    """The rounds of one repacking, and their results."""

    context: Context
    branch: str
    keys: SessionKeys
    run: Run
    chunks: int = 0
    nbytes: int = 0
    overtaken: int = 0
    packs_read: int = 0
    packs_written: int = 0
    damaged: list[tuple[Range, str]] = []

    def move(self, packs: frozenset[str]) -> BlobRef | None:
        """Move the live chunks of these packs; return the new head, None if there were none."""
        _, tables = opened(partial(self._rows_in, packs))
        moves = PackMoves(tables, self.keys.session_id)
        copied = self._copy(moves)
        head = self._land(moves) if copied else None
        moved = [one.length for one in moves.ranges if moves.done[one.at]]
        self.chunks += len(moved)
        self.nbytes += sum(moved)
        self.overtaken += copied - len(moved)
        return head

    def _land(self, moves: PackMoves) -> BlobRef | None:
        """Merge all pending changes into the base, with the new places; return the new head."""
        context, branch = self.context, self.branch
        for _ in range(_ATTEMPTS):
            context.roots.branch(context.roots.read().root, branch)  # there is one
            moves.done[:] = False
            how = CompactionMode.MAJOR
            _, head = compact_branch(
                context, branch, how, size_ratio=0.0, moves=moves, keys=self.keys
            )
            if head is not None or not moves.done.any():
                return head
        raise ConflictError(
            f"repacking {branch!r}: others came first {_ATTEMPTS} times; nothing was "
            "changed, start it again later"
        )

    def _rows_in(self, packs: frozenset[str]) -> tuple[SnapshotView, dict[bytes, ChunkTable]]:
        """The head, and by node the chunks that are in these packs."""
        view = _head(self.context, self.branch)
        tables = {}
        for node_id in _node_ids(view):
            table = view.chunks(node_id)
            rows = None if table is None else rows_of(table, packs)
            if rows is not None:
                tables[node_id] = rows
        return view, tables

    def _copy(self, moves: PackMoves) -> int:
        """Write the chunks into new packs; return how many were."""
        context, pack_bytes = self.context, self.context.config.pack_bytes
        steps, count = [], 0
        for step in parts(moves.ranges, _length, _ABREAST * pack_bytes):
            # Two packs in a row are larger than one may be, so there cannot be more of them.
            most = 2 * (sum(one.length for one in step) // pack_bytes) + 1
            keys = tuple(self.keys.next("chunks") for _ in range(most))
            steps.append(_Step(tuple(step), keys, pack_bytes))
        copy = partial(_copy_step, context.storage, context.runtime)
        results = iter(self.run(copy, steps))
        for whole in steps:
            tell("reading packs", self.packs_read)
            copied = next(results)
            self.packs_read += len({one.key for one in whole.ranges})
            for at, number, offset in copied.placed:
                moves.note(at, number, offset)
            self.damaged += copied.damaged
            self.packs_written += copied.packs
            count += len(copied.placed)
            tell("writing packs", self.packs_written)
        return count

    def check_damaged(self) -> None:
        """Raise if chunks that could not be moved are still referred to.

        Others have been changed meanwhile, and may have been collected.
        """
        if not self.damaged:
            return
        why = {(one.key, one.offset): text for one, text in self.damaged}
        view, tables = opened(partial(self._rows_in, frozenset(one.key for one, _ in self.damaged)))
        paths = {node.node_id: path for path, node in view.nodes.items()}
        named = []
        for node_id, rows in tables.items():
            path = paths[node_id]
            for one in PackMoves({node_id: rows}, "").ranges:
                if (one.key, one.offset) in why:
                    text = why[one.key, one.offset]
                    named.append(f"a chunk of /{path} ({one.key}, offset {one.offset}) {text}")
        if named:
            more = len(named) - _NAMED
            listed = "; ".join(named[:_NAMED]) + (f"; and {more} more" if more > 0 else "")
            raise CorruptObjectError(
                f"{listed}. They stay where they are, all others have been moved: restore them "
                "from a backup or write them again"
            )


# --- copying, perhaps in other processes -------------------------------------------------------


class _Step(Struct, frozen=True):
    """Ranges to copy, and the keys of the new packs."""

    ranges: tuple[Range, ...]
    keys: tuple[str, ...]
    pack_bytes: int


class _Copied(Struct, frozen=True):
    """What a step has written: (position, object number, offset) of each chunk.

    `damaged` are chunks that could not be read, and why.
    """

    placed: list[tuple[int, int, int]]
    packs: int
    damaged: list[tuple[Range, str]]


type _Read = tuple[list[tuple[Range, bytes]], list[tuple[Range, str]]]
"""Chunks that were read, and those that are damaged."""


def _copy_step(storage: Storage, runtime: Runtime, step: _Step) -> _Copied:
    """Write the chunks of one step into new packs."""
    due = [
        part
        for _, of_one in groupby(step.ranges, attrgetter("key"))
        for part in parts(of_one, _length, step.pack_bytes)
    ]
    read: list[_Read] = runtime.parallel([partial(_read, storage, part) for part in due])
    data = {one.at: chunk for found, _ in read for one, chunk in found}
    damaged = [one for _, lost in read for one in lost]
    whole = sorted((r for r in step.ranges if r.at in data), key=lambda r: r.at)
    calls: list[Callable[[], None]] = []
    placed: list[tuple[int, int, int]] = []
    packs = [*parts(whole, _length, step.pack_bytes)]
    for key, packed in zip(step.keys[: len(packs)], packs, strict=True):
        number, offset = int(key.rpartition("/")[2]), 0
        for one in packed:
            placed.append((one.at, number, offset))
            offset += one.length
        calls.append(partial(create_own, storage, key, b"".join(data[r.at] for r in packed)))
    runtime.parallel(calls)
    return _Copied(placed, len(calls), damaged)


def _read(storage: Storage, ranges: Sequence[Range]) -> _Read:
    """The chunks at these ranges of one object."""
    offsets, lengths = [one.offset for one in ranges], [one.length for one in ranges]
    room = storage.capabilities
    requests = coalesce(offsets, lengths, gap_bytes=room.gap_bytes, span_bytes=room.span_bytes)
    try:
        data = [storage.get(ranges[0].key, one.start, one.length) for one in requests]
    except ObjectNotFoundError:
        return [], [(one, "is not there") for one in ranges]
    found, damaged = [], []
    for request, span in zip(requests, data, strict=True):
        for one in (ranges[at] for at in request.members):
            start = one.offset - request.start
            chunk = span[start : start + one.length]
            if len(chunk) != one.length or crc32c(chunk) != one.crc32c:
                damaged.append((one, "does not match its checksum"))
            else:
                found.append((one, chunk))
    return found, damaged


# --- manifest layout ------------------------------------------------------------------------------


def layout_now(context: ReadContext, view: SnapshotView) -> ManifestLayout:
    """Return which manifests hold the refs of a snapshot."""
    config, manifests, pending = context.config, view.pages.manifests(), pending_rows(view)
    index = BaseIndex(manifests)
    numbers = {ref.blob.key: number for number, ref in enumerate(manifests)}
    facts = node_facts(view, index)
    shown = [
        ManifestPlace(
            ref.blob.key,
            ref.packed_for,
            sum(part.count for part in ref.parts),
            ref.blob.length,
            len({part.node_id for part in ref.parts}),
        )
        for ref in manifests
    ]
    arrays = []
    for one in sorted(facts.values(), key=lambda array: (array.path, array.node_id)):
        placed = index.placed(one.node_id)
        refs = sum(leaf.part.count for leaf in placed)
        held_by = tuple(sorted({numbers[leaf.key] for leaf in placed}))
        found = explain(config.chunk_manifests, one, index)
        rows = pending.get(one.node_id, 0)
        arrays.append(ArrayPlace(one.path, *found, refs, held_by, rows, one.is_coordinate))
    return ManifestLayout(view.snapshot_id, tuple(shown), tuple(arrays))
