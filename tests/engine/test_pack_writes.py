"""Packs that are written in the background while an event loop goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import zarr
from zarr.core.buffer import cpu

import zarr_manifests as zm
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.testing import Fault, FaultyStorage

SIZE = 1000


def test_a_commit_writes_what_could_not_be_written(tmp_path: Path) -> None:
    """The first pack, which ten chunks fill; what it held is not lost, and goes with the rest."""
    faulty = FaultyStorage(
        LocalStorage(tmp_path), [Fault("fail_before", op="create", key="chunks/*")]
    )
    session = zm.create(faulty, {"pack-bytes": 10 * SIZE}).writable_session()
    zarr.create_array(session.store, name="a", shape=(2000,), chunks=(1,), dtype="u1")
    session.commit("array")
    values = [np.random.default_rng(i).bytes(SIZE) for i in range(12)]

    async def write() -> None:
        for i, value in enumerate(values):
            await session.store.set(f"a/c/{i}", cpu.Buffer.from_bytes(value))

    asyncio.run(write())
    session.commit("all")
    store = zm.open(tmp_path).readonly_session().store
    found = [store.get_sync(f"a/c/{i}") for i in range(12)]
    assert [one and one.to_bytes() for one in found] == values
    sizes = [file.stat().st_size for file in (tmp_path / "chunks").rglob("*") if file.is_file()]
    assert sorted(sizes) == [2 * SIZE, 10 * SIZE]
