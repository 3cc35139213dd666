"""What a session tells of its contents: what was changed, what is there, and how much.

Invariant: no chunk is read for it, and nothing is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from zarr_manifests.bulk import Bulk
from zarr_manifests.display import html_page
from zarr_manifests.engine.compact.presence_index import initialized_coords
from zarr_manifests.engine.snapshot.preload import PreloadReport
from zarr_manifests.format.nodes import NodeKind
from zarr_manifests.grid import Box, IndexArray
from zarr_manifests.planning.tables.moves import moved_paths
from zarr_manifests.planning.tables.regions import Bounds
from zarr_manifests.reports import ArrayUsage, Status, Totals

__all__ = ["Contents"]


class Contents(Bulk):
    """Tells of the contents of one session; what `Session` is besides."""

    def _repr_html_(self) -> str:
        view = self._workspace.view
        facts = [
            ("at", self._context.storage.url),
            ("snapshot", view.snapshot_id),
            ("message", view.snapshot.message),
            ("mode", "read-only" if self.read_only else f"writable on branch {self._branch!r}"),
        ]
        if not self.read_only:
            facts.append(("changes", str(self.status())))
        return html_page("Session", facts, self._workspace.nodes())

    def status(self) -> Status:
        """What has been changed and not committed."""
        workspace = self._workspace
        with workspace.lock:
            before, changes = workspace.view.nodes, workspace.changes.copy()
        nodes = workspace.nodes()
        paths = {node.node_id: node.path for node in nodes.values()}
        opaque = {n.node_id for n in nodes.values() if n.kind is NodeKind.OPAQUE}
        moved = moved_paths(before, nodes)
        old_paths = {new: old for old, new in moved.items()}
        made = [n for n in changes.nodes.values() if n is not None]
        created = [n.path for n in made if n.path not in before and n.path not in old_paths]
        updated = [
            n.path
            for n in made
            if (n.path in before and n.path not in old_paths)
            or (n.path in old_paths and before[old_paths[n.path]].documents != n.documents)
        ]
        gone = [p for p, node in changes.nodes.items() if node is None and p not in moved]
        return Status(
            tuple(sorted(map(_absolute, created))),
            tuple(sorted(map(_absolute, updated))),
            tuple(sorted(map(_absolute, gone))),
            {
                _absolute(paths[node]): count
                for node in changes.touched()
                if node in paths and node not in opaque and (count := changes.count(node))
            },
            {_absolute(old): _absolute(new) for old, new in moved.items()},
            {
                _absolute(paths[node]): shape
                for node, shape in changes.truncated.items()
                if node in paths
            },
        )

    def du(self) -> tuple[ArrayUsage, ...]:
        """Chunks and bytes of every array, and of every key that is no part of one.

        Counted from manifests, changes of the session included; no chunk is read.
        """
        nodes = [n for n in self._workspace.nodes().values() if n.kind is not NodeKind.GROUP]
        calls = [partial(self._workspace.chunks, node) for node in nodes]
        tables = self._context.runtime.parallel(calls)
        found = map(ArrayUsage.of, (_absolute(node.path) for node in nodes), tables)
        return tuple(sorted(found, key=lambda usage: usage.path))

    def totals(self) -> Totals:
        """How many chunks and bytes there are in the session's snapshot, as it says itself.

        What the session has changed is not in it. Nothing is read for it; see `Repository.totals`.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> session = zm.Repository.create("memory://session-totals-example").writable_session()
        >>> array = zarr.create_array(session.store, name="a", shape=(8,), chunks=(2,), dtype="i2")
        >>> array[4:] = 7
        >>> _ = session.commit("fill half")
        >>> session.totals()["a"].total.refs
        2
        """
        return Totals.of(self._workspace.view)

    def initialized_chunks(
        self, path: str, region: Sequence[Bounds] | Box | None = None
    ) -> IndexArray:
        """Coordinates (int64[n, ndim]) of the chunks of an array that are there, in C order.

        Changes of the session included. Nothing is listed and no chunk is read; where the index of
        initialised chunks is up to date (`Repository.build_index`), no manifest of the base either.

        Parameters
        ----------
        path : str
            The array.
        region : sequence, optional
            Chunk coordinates on each axis, as a slice without step or as (start, stop); all if none
            are given.

        Raises
        ------
        NotFoundError
            If there is no such array.
        InvalidArgumentError
            If the region has other axes than the array, or a step.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> session = zm.Repository.create("memory://present-example").writable_session()
        >>> array = zarr.create_array(session.store, name="a", shape=(8,), chunks=(2,), dtype="i2")
        >>> array[4:] = 7
        >>> session.initialized_chunks("a").tolist()
        [[2], [3]]
        >>> session.initialized_chunks("a", [slice(0, 3)]).tolist()
        [[2]]
        """
        return initialized_coords(
            self._context, self._workspace, path, region, branch=self._indexed
        )

    def preload_report(self, wait_s: float = 0.0) -> PreloadReport:
        """What was fetched in the background since the session opened, and what was not, and why.

        Parameters
        ----------
        wait_s : float, default 0
            Wait so many seconds at most for it to end.

        Examples
        --------
        >>> import numpy as np, xarray as xr, zarr_manifests as zm
        >>> repo = zm.Repository.create("memory://preload-example")
        >>> with repo.transaction(message="a coordinate") as store:
        ...     _ = xr.Dataset(coords={"x": np.arange(3)}).to_zarr(store, consolidated=False)
        >>> report = repo.readonly_session().preload_report(wait_s=1)
        >>> [(one.state.value, one.refs, one.why) for one in report.manifests]
        [('skipped', 1, 'it is here already')]
        """
        if wait_s > 0:
            self._preload.wait(wait_s)
        return self._preload.report()


def _absolute(path: str) -> str:
    return path if path.startswith("/") else f"/{path}"
