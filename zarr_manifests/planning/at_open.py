"""What opening a snapshot fetches besides the snapshot and its base: digests.

A reader opens a branch in two rounds of requests: the root, then everything the root names, all at
once. The root can name few objects, and a snapshot can carry copies of few. If opening needs more
deltas than that, the newest of them are combined into a digest. It reaches back from the newest
delta over everything that is at most twice as large as all that is newer. So sizes at least double
from digest to digest, and a byte is copied into a digest only logarithmically often.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Final

from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.delta import Delta, Digest
from zarr_manifests.format.manifest import Manifest
from zarr_manifests.format.nodes import Node
from zarr_manifests.format.snapshot import DeltaEntry, Snapshot
from zarr_manifests.grid import Coords
from zarr_manifests.planning.tables.merge import Layer, merge_layers

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
    >>> from zarr_manifests.planning.at_open import digest_from
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
