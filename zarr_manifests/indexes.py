"""What a repository knows of its arrays from indexes, and how these are brought up to date.

Invariant: an index makes answers quicker, and no answer another; without any all is the same.
"""

from __future__ import annotations

from zarr_manifests.engine.compact.presence_index import Presence, build_index
from zarr_manifests.engine.edit.move_nodes import node_path
from zarr_manifests.engine.history.follow import opened
from zarr_manifests.engine.snapshot.totals import tallies_of
from zarr_manifests.errors import NotFoundError
from zarr_manifests.format.root import Branch
from zarr_manifests.planning.tables.sums import NOTHING
from zarr_manifests.reports import ArrayStats, IndexReport
from zarr_manifests.versions import DEFAULT_BRANCH, Versions

__all__ = ["Indexes"]


class Indexes(Versions):
    """The indexes of one repository; what `Repository` is besides."""

    def array_stats(
        self,
        path: str,
        branch: str | None = None,
        *,
        tag: str | None = None,
        snapshot_id: str | None = None,
    ) -> ArrayStats:
        """How far an array is filled, without a listing; of `main` if nothing is given.

        Quick where the index of initialised chunks is up to date (`build_index`); the same, more
        slowly, where it is not, or is not there.

        Raises
        ------
        NotFoundError
            If there is no such array.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.Repository.create("memory://stats-example")
        >>> with repo.transaction(message="fill a quarter") as store:
        ...     array = zarr.create_array(store, name="air", shape=(8,), chunks=(2,), dtype="i2")
        ...     array[:2] = 7
        >>> stats = repo.array_stats("air")
        >>> stats.initialized_chunks, stats.total_chunks, stats.fraction
        (1, 4, 0.25)
        """
        return opened(
            lambda: self._array_stats(path, self._point(branch, tag, snapshot_id), branch)
        )

    def _array_stats(self, path: str, point: Branch, branch: str | None) -> ArrayStats:
        view = self._context.open_branch(point)
        node = view.nodes.get(node_path(path))
        if node is None or node.array is None:
            raise NotFoundError(f"there is no array /{node_path(path)}")
        presence = Presence(self._context, view, branch)
        total = tallies_of(view).get(node.node_id, NOTHING)
        chunks = total.chunks if total.chunks_exact else presence.count(node.node_id)
        nbytes = total.nbytes if total.nbytes_exact else presence.stored_bytes(node.node_id)
        meta = node.array
        return ArrayStats(
            f"/{node.path}",
            meta.shape,
            meta.chunk_shape,
            meta.grid.shape,
            chunks,
            nbytes,
            presence.counted,
        )

    def build_index(self, branch: str = DEFAULT_BRANCH) -> IndexReport:
        """Bring the index of initialised chunks up to date with a branch.

        It reads the manifests of the branch that the index does not know yet. The index changes no
        data: it is in no commit's way, and without it all is the same, but slower.

        Raises
        ------
        NotFoundError
            If there is no such branch.

        Examples
        --------
        >>> import zarr_manifests as zm
        >>> repo = zm.Repository.create("memory://index-example")
        >>> repo.build_index().indexed
        0
        """
        return build_index(self._context, branch)
