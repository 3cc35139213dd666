"""A session's store that fetches the chunks of a region before they are asked for.

Zarr asks for chunks one by one, as many at a time as it decodes. Here those of a region are
resolved in one step and fetched in few requests (`Session.read_chunks`), and handed out as Zarr
asks. Invariant: what is handed out is what the session's own store has; whatever is not at hand is
asked of that.
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
    """The store of a session, to read, with the chunks of one region at hand.

    Parameters
    ----------
    session : Session
        Whose store it is.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session.store.with_read_only(True))
        self._session = session
        self._at_hand: dict[str, bytes] = {}

    @contextmanager
    def fetched(self, array: zarr.Array[Any], cells: Sequence[slice]) -> Iterator[None]:
        """Have the chunks that hold any of these cells at hand; all chunks if no cells are given.

        Of a sharded array they are not, since less than whole shards may be asked for.
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
        """What is at hand of the key; it is not kept, since a chunk is asked for once."""
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
        """The value at the key, or the part of it; None if there is none."""
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
        """The value at the key, or the part of it; None if there is none."""
        found = self._take(key, prototype, byte_range)
        if found is None:
            found = await super().get(key, prototype, byte_range)
        return found
