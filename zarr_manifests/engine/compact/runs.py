"""Runs: neighbouring entries of a read list, merged into one delta.

For each chunk and node a run has the newest entry's state, and for each node the combined
truncation. UNSET rows are kept, since the base may still have the chunk. Invariant: applied to any
older state, a run has the same effect as its entries one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np

from zarr_manifests.engine.commit.carry_zones import upload_of
from zarr_manifests.engine.commit.landing import encoded_delta
from zarr_manifests.engine.compact.zone_index import load_zones
from zarr_manifests.engine.objects.chunks import SessionKeys
from zarr_manifests.engine.objects.metadata import Upload
from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.engine.snapshot.zones import UNUSABLE
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.delta import COMMIT_ID_BYTES, Delta
from zarr_manifests.format.manifest import Manifest
from zarr_manifests.format.nodes import Node
from zarr_manifests.format.snapshot import DeltaEntry
from zarr_manifests.format.zone_maps import ZoneTable
from zarr_manifests.grid import Coords
from zarr_manifests.planning.layout.packing import LEAF_ROWS
from zarr_manifests.planning.tables.merge import Layer, merge_layers, split
from zarr_manifests.planning.tables.sums import merged_counts
from zarr_manifests.planning.upkeep.digests import coordinate_ids
from zarr_manifests.planning.zones.entries import merged_by_node, taken, valid


def roll_up(
    context: ReadContext,
    view: SnapshotView,
    entries: Sequence[DeltaEntry],
    keys: SessionKeys,
) -> tuple[DeltaEntry, list[Upload]]:
    """Merge neighbours of the view's read list; return the run's entry and objects to upload."""
    wanted = [(entry.log, Delta) for entry in entries]
    context.objects.prefetch(
        [*wanted, *((ref.blob, Manifest) for e in entries for ref in e.manifests)]
    )
    deltas = [context.objects.load(ref, kind) for ref, kind in wanted]
    nodes: dict[str, Node] = {}
    deleted: dict[str, bytes] = {}
    for delta in deltas:
        for path in delta.deleted:
            nodes.pop(path, None)
        deleted |= delta.deleted
        nodes |= {node.path: node for node in delta.nodes}
    alive = view.by_id.keys()
    truncated: dict[bytes, Coords] = {}
    parts: dict[bytes, list[ChunkTable]] = {}
    for node_id, layers in _layers(context, entries, deltas).items():
        if node_id not in alive:
            continue  # the node was deleted
        merged = merge_layers(layers)
        if merged.truncated is not None:
            truncated[node_id] = merged.truncated
        if merged.table is not None:
            parts[node_id] = [*split(merged.table, LEAF_ROWS)]
    encoded = {
        node_id: Manifest.of([(node_id, table) for table in tables])
        for node_id, tables in parts.items()
    }
    commit_id = context.runtime.random_bytes(COMMIT_ID_BYTES)
    listed = tuple(nodes[path] for path in sorted(nodes))
    run, uploads = encoded_delta(
        context,
        keys,
        Delta(commit_id, listed, deleted, truncated),
        encoded,
        coordinate_ids(view.nodes.values(), encoded),
    )
    log = uploads[-1].ref
    held = {part.node_id for part in run.embedded.directory()}
    entry = DeltaEntry.of(
        log,
        run,
        entries[-1].last,
        coordinate_ids(view.nodes.values(), held),
        first=entries[0].first,
    )
    zones = _zones(context, entries, parts, keys)
    uploads += [] if zones is None else [zones]
    at = None if zones is None else zones.ref
    counts = merged_counts(entries, view.base_sequence, alive)
    return replace(entry, counts=counts, zones=at), uploads


def _zones(
    context: ReadContext,
    entries: Sequence[DeltaEntry],
    parts: Mapping[bytes, Sequence[ChunkTable]],
    keys: SessionKeys,
) -> Upload | None:
    """The object with the entries of zone maps that still describe a chunk of the run."""
    refs = [entry.zones for entry in entries if entry.zones is not None]
    found: list[tuple[bytes, ZoneTable]] = []
    for zones in context.runtime.parallel([partial(load_zones, context, ref) for ref in refs]):
        for node_id in zones.nodes & parts.keys():
            with suppress(*UNUSABLE):
                for table in zones.of_node(node_id):
                    count = np.zeros(len(table), np.bool_)
                    for part in parts[node_id]:
                        count |= valid(table, part)
                    kept = taken(table, count)
                    found += [] if kept is None else [(node_id, kept)]
    return upload_of(merged_by_node(found), keys)


def _layers(
    context: ReadContext, entries: Sequence[DeltaEntry], deltas: Sequence[Delta]
) -> dict[bytes, list[Layer]]:
    """The layers of each node's chunks, oldest first."""
    layers: dict[bytes, list[Layer]] = {}
    for entry, delta in zip(entries, deltas, strict=True):
        tables: dict[bytes, list[ChunkTable]] = {}
        manifests = [context.objects.load(ref.blob, Manifest) for ref in entry.manifests]
        for manifest in (delta.embedded, *manifests):
            for part, data in manifest.parts:
                tables.setdefault(part.node_id, []).append(manifest.decode(part, data))
        for node_id in {*tables, *delta.truncated}:
            layer = Layer(delta.truncated.get(node_id), tuple(tables.get(node_id, ())))
            layers.setdefault(node_id, []).append(layer)
    return layers
