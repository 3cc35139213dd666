"""A session's store with the chunks of a region fetched in advance.

Zarr requests chunks one by one, as many at a time as it decodes. Here the chunks of a region are
resolved in one step and fetched in few requests (`Session.read_chunks`), and returned as Zarr
requests them. Invariant: it returns what the session's own store has; chunks that were not fetched
are read from that store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from zarr.core.buffer import default_buffer_prototype
from zarr.storage import WrapperStore

from zarr_manifests.session import Session
from zarr_manifests.store import ManifestStore

if TYPE_CHECKING:
    import zarr
    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype

__all__ = ["FetchedStore"]


class FetchedStore(WrapperStore[ManifestStore]):
    """A session's store for reading, with the chunks of one region in memory.

    Parameters
    ----------
    session : Session
        The session whose store it is.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session.store.with_read_only(True))
        self._session = session
        self._at_hand: dict[str, bytes] = {}

    @contextmanager
    def fetched(self, array: zarr.Array[Any], cells: Sequence[slice]) -> Iterator[None]:
        """Fetch the chunks that hold any of these cells; all chunks if no cells are given.

        Chunks of a sharded array are not fetched, since parts of shards may be requested.
        """
        if array.shards is None:
            wanted = self._session.read_chunks(array.path, cells=tuple(cells) or None)
            prefix, metadata = array.path.strip("/"), array.metadata
            for coords, data in wanted:
                key = metadata.encode_chunk_key(coords)
                self._at_hand[f"{prefix}/{key}" if prefix else key] = data
        try:
            yield
        finally:
            self._at_hand.clear()

    def _take(
        self, key: str, prototype: BufferPrototype | None, byte_range: ByteRequest | None
    ) -> Buffer | None:
        """Take the fetched value of the key; it is not kept, since a chunk is requested once."""
        data = self._at_hand.pop(key, None) if byte_range is None else None
        if data is None:
            return None
        return (prototype or default_buffer_prototype()).buffer.from_bytes(data)

    def get_sync(
        self,
        key: str,
        *,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """The value at the key, or a part of it; None if there is none."""
        found = self._take(key, prototype, byte_range)
        if found is None:
            found = super().get_sync(key, prototype=prototype, byte_range=byte_range)
        return found

    async def get(
        self,
        key: str,
        prototype: BufferPrototype,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """The value at the key, or a part of it; None if there is none."""
        found = self._take(key, prototype, byte_range)
        if found is None:
            found = await super().get(key, prototype, byte_range)
        return found
