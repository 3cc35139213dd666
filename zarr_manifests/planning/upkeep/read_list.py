"""When deltas are compacted, and which entries are merged.

A snapshot's read list has two kinds of entries: deltas (of one commit) and runs (several deltas,
merged). Two kinds of compaction limit how often each row is rewritten:

- A *minor* compaction merges the deltas that are in no run yet into one run, and then runs of
  similar size, `fan_in` at a time. Sizes fall into classes, each a power of `fan_in`, and a class
  has fewer than `fan_in` runs. So a row is copied once per class.
- A *major* compaction merges entries into leaves of the base, but only into leaves whose pending
  refs have reached `size_ratio` of the refs they hold. So rewriting a leaf costs at most
  1 / `size_ratio` times the cost of what was added to it.

A third trigger is for whoever opens the branch: live deltas with many changed nodes are merged into
the base, which is read page by page.

Invariants: only neighbours are merged, so the newest row of a chunk stays the newest; an entry is
dropped only when the base has everything in it, and all older entries are dropped too.

Entries of history move from the snapshot to a page, and pages to a larger page. Each commit writes
the entries in its snapshot again, so they are few. A commit fetches nothing for a new page: what
goes there is in the parent already. Compactions read pages and merge those of similar size, so that
few are left to read.

What opening a snapshot fetches besides the snapshot and its base: digests
--------------------------------------------------------------------------

A reader opens a branch in two rounds of requests: the root, then everything the root names, all at
once. The root can name few objects, and a snapshot can carry copies of few. If opening needs more
deltas than that, the newest of them are combined into a digest. It reaches back from the newest
delta over everything that is at most twice as large as all that is newer. So sizes at least double
from digest to digest, and a byte is copied into a digest only logarithmically often.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import takewhile
from typing import Final

from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.manifest import Manifest
from zarr_manifests.format.nodes import Delta, Digest, Node
from zarr_manifests.format.snapshot import DeltaEntry, Snapshot
from zarr_manifests.grid import Coords
from zarr_manifests.planning.tables.merge import Layer, merge_layers

MOST_RUNS: Final = 20
"""Most runs in a read list; beyond that the newest are merged whatever their sizes."""
_SMALLEST_CLASS_ROWS: Final = 1_024
_NODE_CHANGES_MOST: Final = 1_000
_NODE_BYTES_MOST: Final = 128 * 1024
_TABLES_FEW: Final = 1_000
_TABLES_MOST: Final = 20_000
_PATIENCE: Final = 10
"""With more than few tables, which cost a writer most, so many times the changes are due."""


class CompactionMode(StrEnum):
    """How much a compaction rewrites."""

    MINOR = "minor"
    MAJOR = "major"
    FULL = "full"


def is_due(
    unrolled: int,
    sequence: int,
    *,
    min_delta_count: int,
    max_delta_count: int,
    interval_commits: int,
) -> bool:
    """Whether a compaction is due after the commit with this sequence number.

    Parameters
    ----------
    unrolled : int
        The number of deltas that are in no run.
    sequence : int
        The commit's number in the branch's history.
    min_delta_count, max_delta_count : int
        Below the minimum, none is due; from the maximum on, one always is.
    interval_commits : int
        In between, one is due when the sequence is a multiple of this.

    Examples
    --------
    >>> from zarr_manifests.planning.upkeep.read_list import is_due
    >>> limits = dict(min_delta_count=10, max_delta_count=50, interval_commits=100)
    >>> is_due(49, 149, **limits), is_due(50, 150, **limits), is_due(12, 200, **limits)
    (False, True, True)
    """
    if unrolled >= max_delta_count:
        return True
    return unrolled >= min_delta_count and sequence % interval_commits == 0


def opening_is_slow(changes: int, nbytes: int, tables: int) -> bool:
    """Whether so many nodes have changed since the base that a compaction is due.

    Parameters
    ----------
    changes : int
        The number of nodes that live deltas newer than the base set or delete.
    nbytes : int
        The size of these deltas, which every reader fetches to open the snapshot.
    tables : int
        The number of their chunk tables. Merging one takes a writer longer than a hundred changes
        take a reader: more than a few wait for ten times the changes, and very many for a
        compaction that is due for other reasons.

    Examples
    --------
    >>> from zarr_manifests.planning.upkeep.read_list import opening_is_slow
    >>> opening_is_slow(3, 4_000, 3), opening_is_slow(5_000, 60_000, 0)
    (False, True)
    >>> opening_is_slow(2_000, 60_000, 2_000), opening_is_slow(12_000, 360_000, 12_000)
    (False, True)
    """
    scale = 1 if tables <= _TABLES_FEW else _PATIENCE
    many = changes > scale * _NODE_CHANGES_MOST
    large = changes > 0 and nbytes > scale * _NODE_BYTES_MOST
    return (many or large) and tables <= _TABLES_MOST


def merge_groups(rows: Sequence[int], runs: int, fan_in: int) -> list[tuple[int, int]]:
    """Return which entries a minor compaction merges, as half-open ranges of positions.

    Parameters
    ----------
    rows : sequence of int
        The number of chunk refs that each entry of the read list sets or unsets, oldest first.
    runs : int
        How many of the oldest entries are runs.
    fan_in : int
        How many runs of similar size are merged into one.

    Examples
    --------
    >>> from zarr_manifests.planning.upkeep.read_list import merge_groups
    >>> merge_groups([5_000] * 3 + [100] * 50, 3, 4)
    [(0, 53)]
    >>> merge_groups([5_000] * 2 + [100] * 50, 2, 4)
    [(2, 52)]
    """
    stack = [(at, at + 1, rows[at]) for at in range(runs)]  # start, stop, rows
    if runs < len(rows):
        stack.append((runs, len(rows), sum(rows[runs:])))
        _settle(stack, fan_in)
    excess = len(stack) - MOST_RUNS
    if excess > 0:
        _merge(stack, len(stack) - excess - 1)
    return [(start, stop) for start, stop, _ in stack if stop - start > 1]


def _settle(stack: list[tuple[int, int, int]], fan_in: int) -> None:
    """Merge the newest run with its neighbours until each class has fewer than `fan_in`."""
    while True:
        newest = _class(stack[-1][2], fan_in)
        start = len(stack) - 1
        # Smaller runs before it would never again be the newest of their class.
        while start and _class(stack[start - 1][2], fan_in) < newest:
            start -= 1
        same = start
        while same and _class(stack[same - 1][2], fan_in) == newest:
            same -= 1
        if start - same + 1 >= fan_in:
            start = same
        if start == len(stack) - 1:
            return
        _merge(stack, start)


def _merge(stack: list[tuple[int, int, int]], start: int) -> None:
    merged = stack[start][0], stack[-1][1], sum(rows for _, _, rows in stack[start:])
    stack[start:] = [merged]


def _class(rows: int, fan_in: int) -> int:
    found, bound = 0, _SMALLEST_CLASS_ROWS
    while rows >= bound:
        found, bound = found + 1, bound * fan_in
    return found


def overlap_refs(count: int, box_size: int, shared_size: int) -> float:
    """The refs of an entry in part of its box, if they are spread evenly."""
    return count * shared_size / box_size if box_size else 0.0


# --- pages of history --------------------------------------------------------------------------

PAGE: Final = 24
"""So many entries go to a page."""
FAN_OUT: Final = 32
"""So many pages of one level go to a page of the next level."""
_MOST_BYTES: Final = 12 * 1024
_MOST_MERGED: Final = 1024


def are_a_page(sizes: Sequence[int]) -> bool:
    """Whether entries of these sizes in bytes go to a page.

    Examples
    --------
    >>> from zarr_manifests.planning.upkeep.read_list import are_a_page
    >>> are_a_page([200] * 23), are_a_page([200] * 24), are_a_page([1000] * 13)
    (False, True, True)
    """
    return len(sizes) >= PAGE or sum(sizes) > _MOST_BYTES


def pages_to_roll(levels: Sequence[int]) -> int:
    """How many of the newest pages go to a page of pages, given the level of each, oldest first.

    Examples
    --------
    >>> from zarr_manifests.planning.upkeep.read_list import pages_to_roll
    >>> pages_to_roll([1, 1] + [0] * 31), pages_to_roll([1, 1] + [0] * 32)
    (0, 32)
    """
    last = sum(1 for _ in takewhile(lambda level: level == levels[-1], reversed(levels)))
    return last if last >= FAN_OUT else 0


def pages_to_merge(counts: Sequence[int]) -> int:
    """How many of the newest pages a compaction merges, given the entries of each, oldest first.

    A page is merged if it is at most twice as large as all newer ones together. So sizes at least
    double from page to page, and an entry is copied only logarithmically often.

    Examples
    --------
    >>> from zarr_manifests.planning.upkeep.read_list import pages_to_merge
    >>> pages_to_merge([500, 90, 24, 24]), pages_to_merge([500, 24]), pages_to_merge([24])
    (3, 0, 0)
    """
    merged = total = 0
    for count in reversed(counts):
        if (merged and count > 2 * total) or total + count > _MOST_MERGED:
            break
        merged, total = merged + 1, total + count
    return merged if merged > 1 else 0


# --- digests ------------------------------------------------------------------------------------


_AHEAD_MOST: Final = 4  # objects that a branch names besides snapshot and base
_OPENING_MOST: Final = 8  # the same, plus those that the snapshot carries copies of
_TABLES_BYTES: Final = 64 * 1024


def needs_digest(snapshot: Snapshot) -> bool:
    """Whether opening the snapshot needs so many objects that it should get a digest."""
    return len(snapshot.ahead) > _AHEAD_MOST or len(snapshot.opening()) > _OPENING_MOST


def digest_from(sizes: Sequence[int]) -> int:
    """Return the start of a digest that ends with the last of these objects (at least two).

    Examples
    --------
    >>> from zarr_manifests.planning.upkeep.read_list import digest_from
    >>> digest_from([100, 100, 100, 100]), digest_from([10_000, 100, 100])
    (0, 1)
    """
    start = len(sizes) - 2
    newer = sum(sizes[start:])
    while start > 0 and sizes[start - 1] <= 2 * newer:
        start -= 1
        newer += sizes[start]
    return start


def coordinate_ids(nodes: Iterable[Node], among: Container[bytes]) -> frozenset[bytes]:
    """The ids of those nodes that are coordinates."""
    return frozenset(
        node.node_id
        for node in nodes
        if node.node_id in among and node.array and node.array.is_coordinate(node.path)
    )


def make_digest(
    entries: Sequence[DeltaEntry],
    found: Mapping[int, Delta | Digest],
    nodes: Iterable[Node],
    base_sequence: int,
) -> Digest:
    """Build the digest of a range of deltas.

    It only repeats node records newer than the base: older ones are in the base, and deltas between
    those of the range may have left the read list.

    Parameters
    ----------
    entries : sequence of DeltaEntry
        The range of deltas.
    found : mapping of int to Delta or Digest
        By position in the range: the contents of the deltas that opening needs, some of them in
        earlier digests.
    nodes : iterable of Node
        All nodes after the range.
    base_sequence : int
        The sequence up to which the base has all node changes.
    """
    changed: dict[str, Node] = {}
    deleted: dict[str, bytes] = {}
    truncated: list[Mapping[bytes, Coords]] = [{} for _ in entries]
    for position in sorted(found):
        value = found[position]
        cuts = value.truncated if isinstance(value, Digest) else (value.truncated,)
        if entries[position + len(cuts) - 1].last > base_sequence:
            for path in value.deleted:
                changed.pop(path, None)
            deleted.update(value.deleted)
            changed.update((node.path, node) for node in value.nodes)
        truncated[position : position + len(cuts)] = cuts
    parts = {part.node_id for entry in entries for part in entry.embedded}
    elsewhere = {p.node_id for entry in entries for ref in entry.manifests for p in ref.parts}
    covered, tables = _coordinates(entries, found, coordinate_ids(nodes, parts) - elsewhere)
    of = tuple(entry.log.crc32c for entry in entries)
    return Digest(tuple(changed.values()), deleted, tuple(truncated), covered, tables, of)


def tells_about(digest: Digest, entries: Sequence[DeltaEntry]) -> bool:
    """Whether the digest belongs to these deltas, as far as their entries can tell."""
    if digest.of != tuple(entry.log.crc32c for entry in entries):
        return False
    cuts = any(
        cut and not entry.changes_nodes
        for cut, entry in zip(digest.truncated, entries, strict=True)
    )
    changes = digest.nodes or digest.deleted
    if cuts or (changes and not any(entry.changes_nodes for entry in entries)):
        return False
    most: dict[bytes, int] = {}  # the most rows that the range can have of each node
    for entry in entries:
        for part in entry.embedded:
            most[part.node_id] = most.get(part.node_id, 0) + part.count
        for ref in entry.manifests:
            if any(part.node_id in digest.covered for part in ref.parts):
                return False
    rows = {part.node_id: part.count for part in digest.tables.directory()}
    return all(
        rows.get(node, 0) <= most.get(node, 0)
        and (cut is not None or (node in rows) == bool(most.get(node)))
        for node, cut in digest.covered.items()
    )


def _coordinates(
    entries: Sequence[DeltaEntry], found: Mapping[int, Delta | Digest], ids: frozenset[bytes]
) -> tuple[dict[bytes, Coords | None], Manifest]:
    """Merge the chunk tables of coordinates, smallest first, as far as they fit."""
    merged = {}
    for node_id in ids:
        layers = _layers(entries, found, node_id)
        if layers is not None:
            merged[node_id] = merge_layers(layers)
    packed: list[tuple[int, bytes, Manifest]] = []
    for node_id, overlay in merged.items():
        tables: list[ChunkTable] = [] if overlay.table is None else [overlay.table]
        manifest = Manifest.of([(node_id, table) for table in tables])
        packed.append((sum(len(data) for _, data in manifest.parts), node_id, manifest))
    covered: dict[bytes, Coords | None] = {}
    held = Manifest(())
    room = _TABLES_BYTES
    for size, node_id, manifest in sorted(packed, key=lambda one: one[:2]):
        if size <= room:
            room -= size
            covered[node_id] = merged[node_id].truncated
            held = Manifest(held.parts + manifest.parts)
    return covered, held


def _layers(
    entries: Sequence[DeltaEntry], found: Mapping[int, Delta | Digest], node_id: bytes
) -> list[Layer] | None:
    """The layers of the node in the range; None if some of them are unknown."""
    layers = []
    known: set[int] = set()
    for position in sorted(found):
        value = found[position]
        if isinstance(value, Delta):
            known.add(position)
            tables = value.embedded.tables(node_id)
            cut = value.truncated.get(node_id)
        elif node_id in value.covered:
            known.update(range(position, position + len(value.truncated)))
            tables, cut = value.tables.tables(node_id), value.covered[node_id]
        else:
            continue
        if tables or cut is not None:
            layers.append(Layer(cut, tuple(tables)))
    speak = {
        i for i, entry in enumerate(entries) if any(p.node_id == node_id for p in entry.embedded)
    }
    cut_in = {
        position + i
        for position, value in found.items()
        if isinstance(value, Digest)
        for i, cuts in enumerate(value.truncated)
        if node_id in cuts
    }
    return layers if speak | cut_in <= known else None
