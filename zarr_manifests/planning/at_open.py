"""What opening a snapshot fetches besides the snapshot and its base: digests, and manifests ahead.

A reader opens a branch in two rounds of requests: the root, then everything the root names, all at
once. The root can name few objects, and a snapshot can carry copies of few. If opening needs more
deltas than that, the newest of them are combined into a digest. It reaches back from the newest
delta over everything that is at most twice as large as all that is newer. So sizes at least double
from digest to digest, and a byte is copied into a digest only logarithmically often.

Candidates for a *preload* are the manifests with leaves of the arrays that `preload.arrays` names
(by default every CF coordinate), and the live deltas with chunks of these arrays, since a lookup
needs both. The smallest are chosen first, up to `max-manifests`. A candidate with more than
`max-manifest-size` refs is skipped, and one whose bytes are already here. Invariants: every
candidate is either chosen or skipped with a reason; the result does not depend on the input's
order.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from zarr_manifests.config.manifest_sets import Preload
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.delta import Delta, Digest
from zarr_manifests.format.manifest import Manifest, Part
from zarr_manifests.format.nodes import Node
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.snapshot import DeltaEntry, Snapshot
from zarr_manifests.grid import Coords
from zarr_manifests.planning.layout.leaves import ArrayFacts, BaseIndex
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


# --- preload -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Candidate:
    """An object with refs of an array to preload."""

    blob: BlobRef
    refs: int

    @property
    def order(self) -> tuple[int, int, str]:
        """Sort key: smallest first."""
        return self.refs, self.blob.length, self.blob.key


type PreloadPlan = tuple[Sequence[Candidate], Sequence[tuple[Candidate, str]]]
"""The candidates to fetch, in this order; and those that are skipped, each with the reason."""


def plan_preload(
    preload: Preload,
    arrays: Iterable[ArrayFacts],
    base: BaseIndex,
    deltas: Sequence[DeltaEntry] = (),
    here: Collection[str] = (),
) -> PreloadPlan:
    """Return what to preload, and what is skipped.

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
    >>> from zarr_manifests.planning.at_open import plan_preload
    >>> node_id = b"time" + bytes(8)
    >>> time = ArrayFacts(node_id, "/time", (3,), 3, ("time",))
    >>> blob = BlobRef("manifests/000000000001-0123456789abcdef01234567/1", 100, 0)
    >>> base = BaseIndex([ManifestRef(blob, (Part(node_id, Box((0,), (3,)), 3),))])
    >>> [len(candidates) for candidates in plan_preload(Preload(), [time], base)]
    [1, 0]
    """
    wanted = {
        array.node_id
        for array in arrays
        if (array.is_coordinate if preload.arrays is None else preload.matches(array.path))
    }
    if not preload.max_manifests or not wanted:
        return (), ()
    keys = {key for node_id in wanted for key in base.manifests_of(node_id)}
    found = {key: Candidate(base[key].blob, _refs(base[key].parts)) for key in keys}
    for delta in deltas:
        if any(part.node_id in wanted for part in delta.embedded):
            found[delta.log.key] = Candidate(delta.log, _refs(delta.embedded))
        for ref in delta.manifests:
            if any(part.node_id in wanted for part in ref.parts):
                found[ref.blob.key] = Candidate(ref.blob, _refs(ref.parts))
    fetched: list[Candidate] = []
    skipped: list[tuple[Candidate, str]] = []
    for candidate in sorted(found.values(), key=lambda candidate: candidate.order):
        if candidate.blob.copy is not None or candidate.blob.key in here:
            skipped.append((candidate, "it is here already"))
        elif candidate.refs > preload.max_manifest_size:
            most = f"max-manifest-size, {preload.max_manifest_size:,}"
            skipped.append((candidate, f"its {candidate.refs:,} chunk refs are more than {most}"))
        elif len(fetched) == preload.max_manifests:
            why = f"smaller ones have reached max-manifests, {preload.max_manifests:,}"
            skipped.append((candidate, why))
        else:
            fetched.append(candidate)
    return fetched, skipped


def _refs(parts: Iterable[Part]) -> int:
    return sum(part.count for part in parts)
