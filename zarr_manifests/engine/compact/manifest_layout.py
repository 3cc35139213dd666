"""Which manifests hold which chunk refs, what reading them costs, and what a plan would change.

The present layout is read from the base's directory alone. A planned layout, and all costs, are
measured: a full compaction runs on a scratch storage, which is then opened as by a new process,
with its requests counted. So both are exact. Invariant: the scratch storage's root is that of the
moment when it was made, whatever others do later; other objects never change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from msgspec.structs import replace

from zarr_manifests.config import CacheOptions, Config
from zarr_manifests.engine.compact.compaction import compact_branch
from zarr_manifests.engine.history.refs import REF_ATTEMPTS, Refs
from zarr_manifests.engine.snapshot.context import Context, ReadContext, open_at
from zarr_manifests.engine.snapshot.totals import node_facts, pending_rows
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import ObjectNotFoundError
from zarr_manifests.format.nodes import Node
from zarr_manifests.format.root import ROOT_KEY
from zarr_manifests.metrics import Metrics
from zarr_manifests.planning.layout.leaves import BaseIndex
from zarr_manifests.planning.layout.packing import explain
from zarr_manifests.planning.upkeep.read_list import CompactionMode
from zarr_manifests.reports import (
    ArrayPlace,
    LeafPlace,
    ManifestLayout,
    ManifestPlace,
)
from zarr_manifests.runtime import Runtime
from zarr_manifests.storage import Storage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.storage.metered import unmetered
from zarr_manifests.storage.protocol import Capabilities, ObjectInfo
from zarr_manifests.versions import HEADS
from zarr_manifests.virtual.containers import Containers

type _Costs = dict[str, dict[str, int]]


def read_costs(context: Context, version: str | None) -> _Costs:
    """Measure what a new process fetches to open and to read that snapshot."""
    return _costs(unmetered(context.storage), context.config, context.runtime, version)


def plan_layout(
    context: Context,
    config: Config | Mapping[str, Any],
    version: str | None,
) -> ManifestLayout:
    """Return the layout that a full compaction with that configuration would give the snapshot.

    Raises
    ------
    ConfigError
        If the configuration has faults.
    """
    if not isinstance(config, Config):
        config = context.config.overlaid(config)
    storage = ScratchStorage(unmetered(context.storage))
    there, refs = _opened(storage, config, context.runtime)
    found, view = refs.open(version, first=True)
    wanted, branch = view.snapshot_id, found.branch
    if branch is None or not found.moves:
        branch = f"planned-{context.runtime.random_bytes(12).hex()}"
        refs.create_branch(branch, wanted)
    # The configuration is saved as well, since it is part of the root and its size.
    there.roots.update(
        lambda root: replace(root, config=config), "save config", "", "", REF_ATTEMPTS
    )
    compact_branch(there, branch, CompactionMode.FULL, told=False)
    planned = HEADS + branch
    layout = layout_now(there, refs.view(planned))
    return replace(
        layout,
        snapshot_id=wanted,
        manifests=tuple(replace(manifest, key=None) for manifest in layout.manifests),
        costs=_costs(storage, config, context.runtime, planned),
    )


def _opened(storage: Storage, config: Config, runtime: Runtime) -> tuple[Context, Refs]:
    """The repository as a new process opens it."""
    context, at = open_at(storage, config, Containers(), CacheOptions(), runtime)
    return context, Refs(context, at)


def _costs(storage: Storage, config: Config, runtime: Runtime, version: str | None) -> _Costs:
    context, refs = _opened(storage, config, runtime)
    view = refs.view(version, first=True)
    arrays = [node for node in view.nodes.values() if node.array is not None]
    coordinates = [node for node in arrays if node.array and node.array.is_coordinate(node.path)]
    opened = context.meter.read()
    runtime.parallel([partial(view.chunks, node.node_id) for node in coordinates])
    explored = context.meter.read()
    others = (node for node in arrays if node not in coordinates)
    runtime.parallel([partial(_read_last_step, view, node) for node in others])
    stepped = context.meter.read()
    return {
        "opening": _cost(opened),
        "coordinates": _cost(explored - opened),
        "last_step": _cost(stepped - explored),
    }


def _cost(counted: Metrics) -> dict[str, int]:
    return {"requests": counted.read_requests, "nbytes": counted.bytes_read}


def _read_last_step(view: SnapshotView, node: Node) -> None:
    """Fetch the locations of the last chunks along the first axis."""
    leaves = view.index.placed(node.node_id)
    end = max((leaf.part.box.hi[:1] for leaf in leaves), default=())
    view.overlay(node.node_id)
    view.leaves(node.node_id, lambda box: box.hi[:1] == end)


def layout_now(context: ReadContext, view: SnapshotView) -> ManifestLayout:
    """Return which manifests hold the refs of a snapshot."""
    config, manifests, pending = context.config, view.manifests, pending_rows(view)
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
        leaves = tuple(
            LeafPlace(leaf.part.box.lo, leaf.part.box.hi, leaf.part.count, numbers[leaf.key])
            for leaf in index.placed(one.node_id)
        )
        found = explain(config.chunk_manifests, one, index)
        rows = pending.get(one.node_id, 0)
        arrays.append(ArrayPlace(one.path, *found, leaves, rows, one.is_coordinate))
    return ManifestLayout(view.snapshot_id, tuple(shown), tuple(arrays))


# --- a scratch storage ----------------------------------------------------------------------------


class ScratchStorage(MemoryStorage):
    """Reads from the storage below; writes (new objects and the root) go to memory."""

    def __init__(self, below: Storage) -> None:
        super().__init__()
        self._below = below
        self.put(ROOT_KEY, below.get(ROOT_KEY))

    @property
    def url(self) -> str:
        return self._below.url

    @property
    def capabilities(self) -> Capabilities:
        return replace(self._below.capabilities, cas=True)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        try:
            return super().get(key, start, length)
        except ObjectNotFoundError:
            return self._below.get(key, start, length)

    def head(self, key: str) -> ObjectInfo:
        try:
            return super().head(key)
        except ObjectNotFoundError:
            return self._below.head(key)

    def list(self, prefix: str = "", after: str = "") -> Iterator[ObjectInfo]:
        found = {info.key: info for info in self._below.list(prefix, after)}
        found |= {info.key: info for info in super().list(prefix, after)}
        yield from (found[key] for key in sorted(found))

    async def get_async(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return self.get(key, start, length)
