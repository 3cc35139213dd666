"""Snapshots put together by hand, with runs and leaves that are merged to different sequences.

A `Line` is a history of one array `x` and a few groups. It keeps what every chunk and node must
read as in plain dictionaries (`chunks`, `groups`), and rolls up, merges and drops by the rules of
the specification, without the package's own merging.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from zarr_manifests.config import Config
from zarr_manifests.format.chunk_table import UNSET, ChunkTable, InlineRef, StoredRef
from zarr_manifests.format.manifest import (
    Base,
    Bundle,
    Count,
    Delta,
    Manifest,
    ManifestRef,
    Node,
    NodeKind,
)
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.root import Branch, LogEntry, Root
from zarr_manifests.format.snapshot import (
    CommitKind,
    DeltaEntry,
    History,
    HistoryPage,
    HistoryPageRef,
    Snapshot,
)
from zarr_manifests.grid import Box
from zarr_manifests.ids import snapshot_id_of
from zarr_manifests.storage import Storage

ARRAY = b"x" * 12
LENGTH = 12
REPOSITORY = "5e" * 16
AT_MS = 1_700_000_000_000


def x_document() -> bytes:
    fields = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [LENGTH],
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1]}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": [{"name": "bytes"}],
        "fill_value": 0,
        "dimension_names": ["x"],
    }
    return json.dumps(fields).encode()


def group_document(note: str) -> bytes:
    return json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {"n": note}}).encode()


@dataclass
class Change:
    """A delta, or a run, in plain terms."""

    first: int
    last: int
    rows: dict[int, bytes | None]
    cut: int | None
    groups: dict[str, str]
    deleted: set[str]
    count: tuple[int, int] = (0, 0)
    """By how much it changes the number of chunks, and their bytes."""
    apart: bool = False
    """Whether its chunk table has a manifest of its own."""
    log: BlobRef | None = None


@dataclass
class Leaf:
    """Chunks from `lo` up to `hi`, merged to a sequence."""

    lo: int
    hi: int
    merged: int
    rows: dict[int, bytes]


@dataclass
class Line:
    """A history, its newest snapshot in the branch `main`."""

    storage: Storage
    session: str = f"{0:012d}-{'5e' * 12}"
    chunks: dict[int, bytes] = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict)
    sequence: int = 0
    changes: list[Change] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)
    base_sequence: int = 0
    base_groups: dict[str, str] = field(default_factory=dict)
    base_count: tuple[int, int] = (0, 0)
    numbers: int = 0
    parent: BlobRef | None = None
    version: int = 0
    log: tuple[LogEntry, ...] = ()
    marks: dict[str, int] = field(default_factory=dict)
    marks_page: BlobRef | None = None
    history: History = field(default_factory=History)
    """What the next snapshot says about its ancestors."""
    pruned: bool = True
    """Whether runs leave out what counts nowhere, and entries are dropped from anywhere."""

    # --- what changes, and what is made of it ------------------------------------------------

    def commit(
        self,
        rows: Mapping[int, bytes | None],
        cut: int | None = None,
        groups: Mapping[str, str] | None = None,
        deleted: Sequence[str] = (),
        *,
        apart: bool = False,
    ) -> None:
        self.sequence += 1
        groups = dict(groups or {})
        gone = {name for name in deleted if name in self.groups and name not in groups}
        change = Change(self.sequence, self.sequence, dict(rows), cut, groups, gone, apart=apart)
        self.changes.append(change)
        chunks, nbytes = self.count()
        _apply(self.chunks, change)
        change.count = (self.count()[0] - chunks, self.count()[1] - nbytes)
        self.groups = {n: g for n, g in self.groups.items() if n not in gone} | groups

    def count(self) -> tuple[int, int]:
        """How many chunks there are, and their bytes."""
        return len(self.chunks), sum(map(len, self.chunks.values()))

    def merged_at(self, coordinate: int) -> int:
        """What the leaf whose box holds the coordinate is merged to."""
        return next((at.merged for at in self.leaves if at.lo <= coordinate < at.hi), 0)

    def roll_up(self, start: int, stop: int) -> bool:
        """Put a run in place of the entries from `start` to `stop`, unless that may not be."""
        taken = self.changes[start:stop]
        for change in taken:
            for leaf in self.leaves if self.pruned and change.cut is not None else ():
                cuts = leaf.hi > (change.cut or 0)
                if cuts and change.last <= leaf.merged < taken[-1].last:
                    return False
        run = Change(taken[0].first, taken[-1].last, {}, None, {}, set())
        for change in taken:
            counting = {
                c: value
                for c, value in change.rows.items()
                if not self.pruned or change.last > self.merged_at(c)
            }
            if change.cut is not None:
                run.rows = {c: value for c, value in run.rows.items() if c < change.cut}
                run.cut = change.cut if run.cut is None else min(run.cut, change.cut)
            run.rows |= counting
            if change.last > self.base_sequence:
                run.count = (run.count[0] + change.count[0], run.count[1] + change.count[1])
            if change.last > self.base_sequence or not self.pruned:
                run.groups = {n: g for n, g in run.groups.items() if n not in change.deleted}
                run.groups |= change.groups
                run.deleted = (run.deleted | change.deleted) - run.groups.keys()
        self.changes[start:stop] = [run]
        return True

    def write_base(self) -> None:
        self.base_sequence, self.base_groups = self.sequence, dict(self.groups)
        self.base_count = self.count()

    def merge_leaf(self, lo: int, hi: int) -> None:
        """Give the base a leaf of that box with all changes, in place of those it had there."""
        self.leaves = [leaf for leaf in self.leaves if leaf.hi <= lo or hi <= leaf.lo]
        rows = {c: value for c, value in self.chunks.items() if lo <= c < hi}
        self.leaves.append(Leaf(lo, hi, self.sequence, rows))
        self.leaves.sort(key=lambda leaf: leaf.lo)
        self.write_base()

    def drop(self) -> int:
        """Let go of entries that count nowhere any more; returns how many."""
        kept: list[Change] = []
        for i, change in enumerate(self.changes):
            due = {c for older in self.changes[:i] for c in older.rows} if change.cut else set()
            cut = LENGTH if change.cut is None else change.cut
            counts = (
                change.last > self.base_sequence
                or any(change.last > self.merged_at(c) for c in change.rows)
                or any(change.last > leaf.merged for leaf in self.leaves if leaf.hi > cut)
                or any(change.last > self.merged_at(c) for c in due if c >= cut)
                or change.cut == 0
            )
            if counts or (kept and not self.pruned):
                kept.append(change)
        dropped = len(self.changes) - len(kept)
        self.changes = kept
        return dropped

    # --- as objects --------------------------------------------------------------------------

    def put(self, kind: str, data: bytes) -> BlobRef:
        self.numbers += 1
        key = f"{kind}/{self.session}/{self.numbers}"
        assert self.storage.create(key, data)
        return BlobRef.to(key, data)

    def node(self, name: str, note: str) -> Node:
        node_id = name.encode().ljust(12, b"-")
        return Node(name, node_id, NodeKind.GROUP, {"zarr.json": group_document(note)})

    def table(self, rows: Mapping[int, bytes | None]) -> ChunkTable:
        stored: dict[tuple[int, ...], StoredRef] = {
            (c,): UNSET if value is None else InlineRef(value) for c, value in rows.items()
        }
        return ChunkTable.of(stored)

    def entry(self, change: Change) -> tuple[DeltaEntry, Delta]:
        held = Manifest.of([(ARRAY, self.table(change.rows))] if change.rows else [])
        manifests: tuple[ManifestRef, ...] = ()
        if change.apart and change.rows:
            manifests = (ManifestRef(self.put("manifests", held.encode()[0]), held.directory()),)
            held = Manifest(())
        delta = Delta(
            change.last.to_bytes(16),
            tuple(self.node(name, note) for name, note in change.groups.items()),
            {name: name.encode().ljust(12, b"-") for name in change.deleted},
            {} if change.cut is None else {ARRAY: (change.cut,)},
            held,
            manifests,
        )
        change.log = self.put("deltas", delta.encode())
        entry = DeltaEntry.of(change.log, delta, change.last, {ARRAY}, first=change.first)
        counts = (Count(ARRAY, *change.count),) if any(change.count) else ()
        return replace(entry, counts=counts), delta

    def base(self) -> Base:
        nodes = [replace(self.node("", "root"), node_id=b"root".ljust(12, b"-"))]
        nodes += [self.node(name, note) for name, note in sorted(self.base_groups.items())]
        nodes.append(Node("x", ARRAY, NodeKind.ARRAY, {"zarr.json": x_document()}))
        tables = []
        for leaf in self.leaves:
            places = sorted(leaf.rows)
            index = np.array(places, np.int64) - leaf.lo
            refs = [InlineRef(leaf.rows[c]) for c in places]
            tables.append((ARRAY, ChunkTable.build(Box((leaf.lo,), (leaf.hi,)), index, refs)))
        refs_of: list[ManifestRef] = []
        for at in range(0, len(tables), 2):
            held = Manifest.of(tables[at : at + 2])
            # Without live deltas nothing depends on it, and it may be left out.
            merged = tuple(leaf.merged for leaf in self.leaves[at : at + 2] if self.changes)
            blob = self.put("manifests", held.encode()[0])
            nbytes = tuple(int(table.length.sum()) for _, table in tables[at : at + 2])
            refs_of.append(ManifestRef(blob, held.directory(), merged, nbytes=nbytes))
        counts = (Count(ARRAY, *self.base_count),) if any(self.base_count) else ()
        return Base(tuple(nodes), tuple(refs_of), self.base_sequence, counts)

    def bundled(
        self, entries: Sequence[tuple[DeltaEntry, Delta]]
    ) -> list[tuple[DeltaEntry, Delta]]:
        held = Bundle({entry.log.key: delta for entry, delta in entries if entry.at_open})
        blob = self.put("bundles", held.encode())
        return [
            (replace(entry, bundle=blob) if entry.at_open else entry, delta)
            for entry, delta in entries
        ]

    def write(
        self,
        message: str,
        *,
        bundle_from: int | None = None,
        merged: tuple[str, str] | None = None,
    ) -> str:
        """Write a snapshot and make it the head of `main`; returns its id.

        Its entries from `bundle_from` on that opening needs are in a bundle.
        """
        entries = [self.entry(change) for change in self.changes]
        base = self.put("nodes", self.base().encode())
        if bundle_from is not None:
            entries[bundle_from:] = self.bundled(entries[bundle_from:])
        own = Delta(self.numbers.to_bytes(16))
        log = self.put("deltas", own.encode())
        sums = {"chunks": len(self.chunks), "arrays": 1, "groups": len(self.groups) + 1}
        self.numbers += 1
        key = f"snapshots/{self.session}/{self.numbers}"
        snapshot = Snapshot(
            snapshot_id_of(key),
            REPOSITORY,
            self.parent,
            own.commit_id,
            CommitKind.REWRITE,
            message,
            {},
            AT_MS + self.numbers,
            base,
            tuple(entry for entry, _ in entries),
            log,
            marks=self.marks,
            sequence=self.sequence,
            sums=sums,
            marks_page=self.marks_page,
            merged=merged,
            history=self.history,
        )
        data = snapshot.encode()
        assert self.storage.create(key, data)
        self.parent = head = BlobRef.to(key, data)
        self.swap(Branch(head, base, ahead=snapshot.ahead), "commit rewrite", own.commit_id)
        self.tell(snapshot.entry(head).pack())
        return snapshot_id_of(head.key)

    def tell(self, entry: bytes) -> None:
        """Add to the history; every third entry and every second page go to a page."""
        pages, recent = self.history.pages, (*self.history.recent, entry)
        if len(recent) > 3:
            pages, recent = (*pages, self.page(History(recent=recent[:3]))), recent[3:]
        if len(pages) > 1 and pages[-2].level == pages[-1].level:
            pages = (*pages[:-2], self.page(History(pages[-2:])))
        self.history = History(pages, recent)

    def page(self, history: History) -> HistoryPageRef:
        """A page with that; its time is later than that of the newest snapshot in it."""
        blob = self.put("history", HistoryPage(history).encode())
        return HistoryPageRef(blob, AT_MS + self.numbers, history.count, history.level)

    def swap(self, branch: Branch, operation: str, commit_id: bytes) -> None:
        self.version += 1
        at = AT_MS + self.numbers
        where = snapshot_id_of(branch.head.key)
        entry = LogEntry(self.version, at, operation, "main", where, commit_id)
        self.log = (*self.log, entry)[-32:]
        write = self.version.to_bytes(16)
        config = Config()
        root = Root(
            REPOSITORY,
            self.version,
            write,
            at,
            config,
            {"main": branch},
            log=self.log,
        )
        self.storage.create(f"root/{self.version:020d}", root.bare().encode())
        found = self.storage.get_tagged("current").token if self.version > 1 else None
        assert self.storage.cas("current", root.encode(), found) is not None

    def expected(self) -> dict[str, bytes]:
        """All keys and values of the Zarr store."""
        found = {"zarr.json": group_document("root"), "x/zarr.json": x_document()}
        found |= {f"{name}/zarr.json": group_document(n) for name, n in self.groups.items()}
        return found | {f"x/c/{c}": value for c, value in self.chunks.items()}


def _apply(chunks: dict[int, bytes], change: Change) -> None:
    if change.cut is not None:
        for c in [c for c in chunks if c >= change.cut]:
            del chunks[c]
    for c, value in change.rows.items():
        if value is None:
            chunks.pop(c, None)
        else:
            chunks[c] = value
