"""What happens to chunks of a pack while it is written."""

from __future__ import annotations

import zarr
from zarr.core.buffer import cpu

import zarr_manifests as zm
from zarr_manifests import Session
from zarr_manifests.storage.memory import MemoryStorage

SIZE = 1000


class Storage(MemoryStorage):
    """Calls `meanwhile` once, while the first pack is written."""

    session: Session | None = None

    def create(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        if key.startswith("chunks/") and self.session is not None:
            session, self.session = self.session, None
            put(session, 3, b"new")
            session.store.delete_sync("a/c/4")
        return super().create(key, data, durable=durable)


def put(session: Session, i: int, value: bytes) -> None:
    session.store.set_sync(f"a/c/{i}", cpu.Buffer.from_bytes(value))


def value(i: int) -> bytes:
    return bytes([i]) * SIZE


def test_writers_go_on_while_a_pack_is_written() -> None:
    storage = Storage()
    repo = zm.create(storage, {"pack-bytes": 10 * SIZE, "inline-chunk-bytes": 1})
    session = repo.writable_session()
    zarr.create_array(session.store, name="a", shape=(20,), chunks=(1,), dtype="u1")
    session.commit("array")
    storage.session = session
    for i in range(12):
        put(session, i, value(i))
    assert storage.session is None
    session.commit("chunks")
    store = repo.readonly_session().store
    found = {i: store.get_sync(f"a/c/{i}") for i in range(12)}
    expected = {i: value(i) for i in range(12)} | {3: b"new"}
    assert {i: got.to_bytes() for i, got in found.items() if got is not None} == {
        i: data for i, data in expected.items() if i != 4
    }
