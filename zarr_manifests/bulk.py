"""Many chunks of a session at a time: where they are, and their bytes as they are stored.

Invariants: nothing is changed; no chunk is read to say where it is; what is not there is left out,
and what is there and cannot be had is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zarr_manifests.engine.edit.bulk_chunks import ChunkStream, chunks_in
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.chunk_table import ChunkTable
from zarr_manifests.format.nodes import Node
from zarr_manifests.grid import Box, Coords
from zarr_manifests.pinned import Pinned
from zarr_manifests.planning.tables.regions import Bounds, cells_box, chunk_box
from zarr_manifests.planning.tables.resolved_chunks import ResolvedChunks

__all__ = ["Bulk"]


class Bulk(Pinned):
    """Resolves and reads many chunks at a time; what `Session` is besides."""

    def resolve(
        self,
        path: str,
        box: Sequence[Bounds] | Box | None = None,
        *,
        cells: Sequence[Bounds] | None = None,
    ) -> ResolvedChunks:
        """Where the chunks of an array are that are there, as columns, in one step.

        Changes of the session included: chunks it has not written yet, as they are collected for a
        pack, are among the inline ones. Manifests that have nothing of the box are not read, and no
        chunk is. Of a sharded array these are the shards.

        Parameters
        ----------
        path : str
            The array.
        box : sequence, optional
            Chunk coordinates on each axis, as a slice without step or as (start, stop); all chunks
            if none are given.
        cells : sequence, optional
            Instead of a box: cells on each axis, likewise. The chunks that hold any of them.

        Returns
        -------
        ResolvedChunks
            With a row for each chunk that is there, in C order.

        Raises
        ------
        NotFoundError
            If there is no such array.
        InvalidArgumentError
            If the box or the cells have other axes than the array, or a step, or both are given.

        Examples
        --------
        >>> import numpy as np, zarr, zarr_manifests as zm
        >>> repo = zm.Repository.create("memory://resolve-example")
        >>> with repo.transaction(message="fill a part") as store:
        ...     a = zarr.create_array(store, name="a", shape=(4, 300), chunks=(2, 300), dtype="f8")
        ...     a[:2] = np.random.default_rng(1).random((2, 300))
        >>> found = repo.readonly_session().resolve("a")
        >>> len(found), found.coords.tolist(), [zm.ChunkKind(k).name for k in found.kind]
        (1, [[0, 0]], ['NATIVE'])
        >>> len(repo.readonly_session().resolve("a", [slice(1, 2), slice(None)]))
        0
        >>> len(repo.readonly_session().resolve("a", cells=[(0, 4), (10, 20)]))
        1
        """
        node, table = self._chunks_in(path, box, cells)
        assert node.array is not None
        return ResolvedChunks.of(f"/{node.path}", len(node.array.shape), table)

    def read_chunks(
        self,
        path: str,
        box: Sequence[Bounds] | Box | None = None,
        *,
        cells: Sequence[Bounds] | None = None,
        gap_bytes: int = 64 * 1024,
        window_bytes: int = 64 * 1024**2,
    ) -> Iterator[tuple[Coords, bytes]]:
        r"""The chunks of an array that are there, with their bytes as they are stored.

        Encoded, that is: values are what `zarr.open_array(session.store, path=path)` gives. Ranges
        of one object or file that lie near each other are fetched together, and every chunk's
        checksum is compared. The chunks are those that the session has when this is called, and are
        fetched as they are asked for.

        Parameters
        ----------
        path, box, cells
            As for `resolve`.
        gap_bytes : int, default 64 KiB
            Bytes that are fetched in vain at most between two chunks rather than to make two
            requests of them.
        window_bytes : int, default 64 MiB
            Bytes of chunks that are fetched at a time, and so held in memory; more if a chunk has
            more. No request is for more than 8 MiB, unless a chunk is.

        Yields
        ------
        tuple of int, bytes
            A chunk's coordinates, and what is stored of it; in C order.

        Raises
        ------
        NotFoundError
            If there is no such array.
        InvalidArgumentError
            If the box or the cells have other axes than the array, or a step, or both are given;
            or a number of bytes is out of range.
        MissingChunkError
            If an object or file that holds a chunk is not there.
        CorruptObjectError
            If it is too short, or a chunk does not match its checksum.
        VirtualContainerError, VirtualSourceChangedError
            If a file elsewhere may not be read, or is not what it was.
        SnapshotExpiredError
            If the snapshot has expired meanwhile, and chunks of it are gone.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> repo = zm.Repository.create("memory://read-chunks-example")
        >>> with repo.transaction(message="fill half") as store:
        ...     a = zarr.create_array(
        ...         store, name="a", shape=(8,), chunks=(2,), dtype="u1", compressors=None
        ...     )
        ...     a[4:] = 7
        >>> list(repo.readonly_session().read_chunks("a"))
        [((2,), b'\x07\x07'), ((3,), b'\x07\x07')]
        """
        for name, value, least in (("gap_bytes", gap_bytes, 0), ("window_bytes", window_bytes, 1)):
            if type(value) is not int or value < least:
                raise InvalidArgumentError(f"{name} is a number from {least} on, not {value!r}")
        _, table = self._chunks_in(path, box, cells)
        stream = ChunkStream(
            self._context,
            self._workspace,
            table,
            gap_bytes=gap_bytes,
            window_bytes=window_bytes,
        )
        return iter(stream)

    def _chunks_in(
        self,
        path: str,
        box: Sequence[Bounds] | Box | None,
        cells: Sequence[Bounds] | None,
    ) -> tuple[Node, ChunkTable | None]:
        if box is not None and cells is not None:
            raise InvalidArgumentError("either a box of chunks or cells are given, not both")
        workspace = self._workspace

        def find() -> tuple[Node, ChunkTable | None]:
            node = workspace.array_at(path)
            assert node.array is not None
            meta = node.array
            if cells is None:
                due = chunk_box(meta.grid, box)
            else:
                due = cells_box(meta.shape, meta.chunk_shape, cells)
            return node, chunks_in(workspace, node, due) if due.size else None

        return workspace.guarded(find)
