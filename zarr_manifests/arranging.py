"""Moving nodes, and the chunks of arrays, in a session.

Invariant: paths and the places of chunks change, and the bytes of none.
"""

from __future__ import annotations

from collections.abc import Sequence

from zarr_manifests.contents import Contents
from zarr_manifests.engine.edit.move_nodes import move_node, node_path, reindex_chunks, shift_chunks
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.planning.tables.moves import Places

__all__ = ["Arranging"]


class Arranging(Contents):
    """Moves what is in one session; what `Session` is besides."""

    def move(self, old: str, new: str) -> None:
        """Move a group or array, with everything below it, to another path.

        Only metadata changes: no chunk is read or written, and every node keeps its history.
        What documents say (dimension names, attributes) stays as it is.

        Parameters
        ----------
        old, new : str
            Paths, with or without a leading slash. The group that `new` lies in must exist.

        Raises
        ------
        NotFoundError
            If there is nothing at `old`, or no group for `new`.
        AlreadyExistsError
            If there is something at or below `new`.
        InvalidArgumentError
            If `old` is the root, or `new` lies below `old` or below an array.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> session = zm.Repository.create("memory://move-example").writable_session()
        >>> _ = zarr.create_group(session.store, path="air")
        >>> session.move("air", "water")
        >>> list(zarr.open_group(session.store, mode="r"))
        ['water']
        """
        self._check_open()
        move_node(self._workspace, old, new)

    def rename(self, path: str, name: str) -> None:
        """Give a group or array another name in the same group; as `move` otherwise."""
        if not name or "/" in name:
            raise InvalidArgumentError(f"{name!r} is no name; session.move takes a path")
        above = node_path(path).rpartition("/")[0]
        self.move(path, f"{above}/{name}")

    def shift_array(self, path: str, offset_in_chunks: Sequence[int]) -> None:
        """Move all chunks of an array by whole chunks; none is read or written.

        What would come to lie outside the array is dropped, and what becomes vacant reads as fill
        value. The array keeps its shape; resize it first to make room. A chunk at the array's
        edge moves with all it holds, including what lies beyond the edge.

        Parameters
        ----------
        path : str
            The array.
        offset_in_chunks : sequence of int
            How far, one number an axis, in chunks; negative towards the beginning.

        Raises
        ------
        NotFoundError
            If there is no such array.
        InvalidArgumentError
            If there is not one whole number for each axis.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> session = zm.Repository.create("memory://shift-example").writable_session()
        >>> a = zarr.create_array(session.store, name="a", shape=(6,), chunks=(2,), dtype="i4")
        >>> a[:] = [1, 2, 3, 4, 5, 6]
        >>> session.shift_array("a", (-1,))
        >>> a[:]
        array([3, 4, 5, 6, 0, 0], dtype=int32)
        """
        self._check_open()
        shift_chunks(self._workspace, path, offset_in_chunks)

    def reindex_array(self, path: str, places: Places) -> None:
        """Move the chunks of an array to other places in it; none is read or written.

        Parameters
        ----------
        path : str
            The array.
        places : mapping, callable or int[n, 2 * ndim]
            From a chunk's coordinate to its new one, or to None to drop the chunk. A callable is
            asked once for each chunk that is there, which takes seconds for a million. An array
            has a row a chunk, the old coordinate and then the new one, where -1 on every axis
            drops the chunk. Chunks that are not named stay; what is named and not there does not
            matter.

        Raises
        ------
        NotFoundError
            If there is no such array.
        InvalidArgumentError
            If a chunk would lie outside the array, or two at one place, or a coordinate has not
            one whole number for each axis; nothing is changed.

        Examples
        --------
        >>> import zarr, zarr_manifests as zm
        >>> session = zm.Repository.create("memory://reindex-example").writable_session()
        >>> a = zarr.create_array(session.store, name="a", shape=(6,), chunks=(2,), dtype="i4")
        >>> a[:] = [1, 2, 3, 4, 5, 6]
        >>> session.reindex_array("a", lambda chunk: (2 - chunk[0],))
        >>> a[:]
        array([5, 6, 3, 4, 1, 2], dtype=int32)
        """
        self._check_open()
        reindex_chunks(self._workspace, path, places)
