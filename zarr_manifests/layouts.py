"""In which manifests chunk refs are, what reading them costs, and what another configuration gives.

What is, is read off the snapshot. What would be, and what anything costs, is found by doing it: a
full compaction runs on a scratch storage that nobody sees, and a repository is opened there as by
a process that has read nothing yet, whose requests are counted. So both are exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from zarr_manifests.config import CacheOptions, Preload, RepositoryConfig
from zarr_manifests.engine.compact.compaction import compact_branch
from zarr_manifests.engine.compact.manifest_layout import (
    ManifestLayout,
    ReadCost,
    ReadCosts,
    layout_now,
)
from zarr_manifests.engine.compact.scratch import ScratchStorage
from zarr_manifests.engine.root.roots import Roots
from zarr_manifests.engine.snapshot.context import Context
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.format.nodes import Node
from zarr_manifests.metrics import Meter, Metrics
from zarr_manifests.planning.upkeep.compaction_triggers import CompactionMode
from zarr_manifests.runtime import Runtime
from zarr_manifests.sessions import Sessions
from zarr_manifests.storage import Storage
from zarr_manifests.storage.metered import metered, unmetered
from zarr_manifests.store import workspace_of
from zarr_manifests.versions import DEFAULT_BRANCH, REF_ATTEMPTS
from zarr_manifests.virtual.containers import Containers

__all__ = ["Layouts"]

_NO_PRELOAD = Preload(max_manifests=0)


class Layouts(Sessions):
    """Says where the chunk refs of one repository are; what `Repository` is besides."""

    def explain_manifests(
        self,
        branch: str | None = None,
        *,
        tag: str | None = None,
        snapshot_id: str | None = None,
    ) -> ManifestLayout:
        """In which manifests the chunk refs of a snapshot are, and why there.

        For each array: the rule that matches it, its set, its leaves and their manifests, and the
        sets that did not take it. Read off the snapshot; no manifest is fetched. Of `main` if
        nothing is given.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.Repository.create("memory://explain-example")
        >>> with repo.transaction(message="three chunks") as store:
        ...     a = zarr.create_array(store, name="a", shape=(6,), chunks=(2,), dtype="i4")
        ...     a[:] = [1, 2, 3, 4, 5, 6]
        >>> _ = repo.compact("main", mode="full")
        >>> layout = repo.explain_manifests()
        >>> [(one.set_name, one.refs) for one in layout.manifests]
        [('coordinates', 3)]
        >>> layout.arrays[0].path, layout.arrays[0].rule, layout.arrays[0].manifests
        ('/a', 0, (0,))
        """
        session = self.readonly_session(branch, tag=tag, snapshot_id=snapshot_id)
        return layout_now(self._context, workspace_of(session.store).view)

    def read_costs(
        self,
        branch: str | None = None,
        *,
        tag: str | None = None,
        snapshot_id: str | None = None,
    ) -> ReadCosts:
        """What a process that has read nothing yet fetches of the metadata of a snapshot.

        Found by fetching it. Of `main` if nothing is given.

        Examples
        --------
        >>> import zarr_manifests as zm
        >>> repo = zm.Repository.create("memory://costs-example")
        >>> repo.read_costs().opening.requests
        1
        """
        context = self._context
        at = {"branch": branch, "tag": tag, "snapshot_id": snapshot_id}
        return _costs(unmetered(context.storage), context.config, context.runtime, at)

    def plan_manifests(
        self,
        config: RepositoryConfig | Mapping[str, Any],
        branch: str | None = None,
        *,
        tag: str | None = None,
        snapshot_id: str | None = None,
    ) -> ManifestLayout:
        """What a full compaction under another configuration would make of a snapshot.

        All its manifests are read, and nothing is written. Of `main` if nothing is given; what a
        tag or an id names is planned as if it were the head of a branch.

        Parameters
        ----------
        config : RepositoryConfig or mapping
            The configuration; a mapping changes the options it names of the one in use.
        branch, tag, snapshot_id : str, optional
            As for `readonly_session`.

        Raises
        ------
        ConfigError
            If the configuration has faults.
        """
        context = self._context
        if not isinstance(config, RepositoryConfig):
            config = context.config.overlaid(config)
        storage = ScratchStorage(unmetered(context.storage))
        there = _opened(storage, config, context.runtime)
        wanted = there.readonly_session(branch, tag=tag, snapshot_id=snapshot_id).snapshot_id
        if tag is not None or snapshot_id is not None:
            branch = f"planned-{context.runtime.random_bytes(12).hex()}"
            there.create_branch(branch, wanted)
        # It is saved, too: the root is larger or smaller by that.
        there._context.roots.update(
            lambda root: replace(root, config=config), "save config", "", "", REF_ATTEMPTS
        )
        compact_branch(there._context, branch or DEFAULT_BRANCH, CompactionMode.FULL)
        layout = there.explain_manifests(branch)
        return replace(
            layout,
            snapshot_id=wanted,
            manifests=tuple(replace(manifest, key=None) for manifest in layout.manifests),
            costs=_costs(storage, config, context.runtime, {"branch": branch}),
        )


def _opened(storage: Storage, config: RepositoryConfig, runtime: Runtime) -> Layouts:
    """The repository as a process opens it that has read nothing yet; it fetches nothing ahead."""
    planned = replace(config.chunk_manifests, preload=_NO_PRELOAD)
    storage = metered(storage, Meter())
    roots = Roots(storage, runtime)
    at = roots.read()
    context = Context.of(
        at.root.repository_id,
        storage,
        runtime,
        roots,
        replace(config, chunk_manifests=planned),
        Containers(),
        CacheOptions(),
    )
    return Layouts(context, at)


def _costs(
    storage: Storage, config: RepositoryConfig, runtime: Runtime, at: Mapping[str, str | None]
) -> ReadCosts:
    fresh = _opened(storage, config, runtime)
    view = workspace_of(fresh.readonly_session(**at).store).view  # type: ignore[arg-type]
    arrays = [node for node in view.nodes.values() if node.array is not None]
    coordinates = [node for node in arrays if node.array and node.array.is_coordinate(node.path)]
    opened = fresh._context.meter.read()
    runtime.parallel([partial(view.chunks, node.node_id) for node in coordinates])
    explored = fresh._context.meter.read()
    others = (node for node in arrays if node not in coordinates)
    runtime.parallel([partial(_read_last_step, view, node) for node in others])
    stepped = fresh._context.meter.read()
    return ReadCosts(_cost(opened), _cost(explored - opened), _cost(stepped - explored))


def _cost(counted: Metrics) -> ReadCost:
    return ReadCost(counted.read_requests, counted.bytes_read)


def _read_last_step(view: SnapshotView, node: Node) -> None:
    """Fetch what says where the last chunks along the first axis are."""
    leaves = view.index.placed(node.node_id)
    end = max((leaf.part.box.hi[:1] for leaf in leaves), default=())
    view.overlay(node.node_id)
    view.leaves(node.node_id, lambda box: box.hi[:1] == end)
