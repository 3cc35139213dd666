"""Entries of zone maps that a commit writes or carries along.

A commit writes one object with the entries of the chunks that it sets. Invariant: it writes no
entry of another chunk, as far as the chunks are in memory. Nothing depends on this, since readers
compare addresses; it keeps useless entries from being stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from zarr_manifests.engine.edit.change_set import ChangeSet
from zarr_manifests.engine.objects.chunks import SessionKeys
from zarr_manifests.engine.objects.metadata import Upload
from zarr_manifests.engine.objects.spill import Rows
from zarr_manifests.engine.snapshot.context import ReadContext
from zarr_manifests.engine.snapshot.zones import KnownZones
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.columns import MAX_ROWS
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.format.zone_maps import PAGE_ROWS, Zones, ZoneTable
from zarr_manifests.planning.tables.merge import rearranged
from zarr_manifests.planning.upkeep.garbage import parts
from zarr_manifests.planning.zones.meaning import in_pages, merged_alike, taken, valid

_ROWS_TOGETHER: Final = 4 * PAGE_ROWS


def zones_upload(
    zones: Mapping[bytes, Sequence[ZoneTable | bytes]],
    tables: Mapping[bytes, Sequence[Rows]],
    keys: SessionKeys,
) -> Upload | None:
    """The object with the entries that describe chunks in these tables; None if there are none."""
    found = (
        (node_id, merged)
        for node_id, parts in tables.items()
        for group in _together(zones.get(node_id, ()))
        for merged in _merged(group, parts)
    )
    return upload_of(found, keys)


def _together(tables: Sequence[ZoneTable | bytes]) -> list[Sequence[ZoneTable | bytes]]:
    """Groups of tables to merge, so that few entries are decoded at a time; mostly one."""
    heads = [ZoneTable.head(zones) for zones in tables]
    if sum(rows for _, rows in heads) <= _ROWS_TOGETHER:
        return [tables]
    order = sorted(range(len(tables)), key=lambda at: heads[at][0].lo)
    groups = parts(order, lambda at: heads[at][1], _ROWS_TOGETHER)
    return [[tables[at] for at in group] for group in groups]


def _merged(group: Sequence[ZoneTable | bytes], parts: Sequence[Rows]) -> list[ZoneTable]:
    tables = (zones if isinstance(zones, ZoneTable) else ZoneTable.parse(zones) for zones in group)
    still = (_still(zones, parts) for zones in tables)
    return merged_alike(zones for zones in still if zones is not None)


def upload_of(tables: Iterable[tuple[bytes, ZoneTable]], keys: SessionKeys) -> Upload | None:
    """The object with these entries, by node, in tables of limited size; None if there are none."""
    room = MAX_ROWS
    kept: list[tuple[bytes, int, bytes]] = []
    for node_id, zones in tables:
        room -= len(zones)
        if room >= 0:  # chunks beyond have no entries
            kept += [(node_id, len(page), page.pack()) for page in in_pages(zones)]
    return Upload.of(keys, "indexes", Zones(tuple(kept)).encode()) if kept else None


def _still(zones: ZoneTable, parts: Sequence[Rows]) -> ZoneTable | None:
    """The entries of chunks that are still in these tables, or in tables not in memory."""
    count = np.zeros(len(zones), np.bool_)
    for part in parts:
        if not isinstance(part, ChunkTable):
            return zones
        count |= valid(zones, part)
    return taken(zones, count)


def take_zones(context: ReadContext, changes: ChangeSet, snapshot: Snapshot) -> None:
    """Add the entries of a snapshot's own commit to changes that have some of its chunks."""
    entry = snapshot.deltas[-1] if snapshot.deltas else None
    if entry is None or entry.zones is None or entry.log.key != snapshot.log.key:
        return
    known = KnownZones.of(context, [entry])
    changes.take_zones({node: tuple(known.recent_of(node)) for node in changes.touched()})


def moved(changes: ChangeSet, node_id: bytes, axis: int, first: int, steps: int) -> None:
    """Move the entries of chunks from `first` on along an axis, as their chunks have been moved."""
    before = [*changes.zones_of(node_id)]
    changes.zones.pop(node_id, None)
    for zones in before:
        coords = zones.coords().copy()
        beyond = coords[:, axis] >= first
        coords[:, axis] += np.where(beyond, steps, 0)
        # All of these chunks move by the same number of steps, so they stay in order.
        addresses = rearranged(zones.addresses, beyond, coords)
        if addresses is not None:
            bounds = zones.bounds.take(beyond)
            changes.add_zones(node_id, ZoneTable(zones.meaning, addresses, bounds))
        rest = taken(zones, ~beyond)
        if rest is not None:
            changes.add_zones(node_id, rest)
