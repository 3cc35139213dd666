"""Arrays whose chunks could not be told from other keys are refused, and kept as nothing else."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.buffer import cpu
from zarr.storage import LocalStore

import zarr_manifests as zm
from zarr_manifests import Session
from zarr_manifests.errors import UnsupportedFormatError
from zarr_manifests.storage.memory import MemoryStorage

RECTILINEAR = {"kind": "inline", "chunk_shapes": [[1, 3]]}
UNKNOWN: dict[str, dict[str, Any]] = {
    "the chunk grid 'rectilinear'": {
        "chunk_grid": {"name": "rectilinear", "configuration": RECTILINEAR}
    },
    "the chunk grid 'spiral'": {"chunk_grid": {"name": "spiral"}},
    "the chunk key encoding 'fanout'": {"chunk_key_encoding": {"name": "fanout"}},
    "the chunk key encoding 'short'": {"chunk_key_encoding": "short"},
    "storage transformers": {"storage_transformers": [{"name": "of-keys"}]},
    "the node type 'table'": {"node_type": "table"},
    "Zarr format 4": {"zarr_format": 4},
}


def document(**changes: Any) -> bytes:
    fields = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [4],
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2]}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": 0,
        "codecs": [{"name": "bytes"}],
        "storage_transformers": [],
        **changes,
    }
    return json.dumps(fields).encode()


@pytest.fixture
def session() -> Session:
    return zm.create(MemoryStorage()).writable_session()


@pytest.mark.parametrize("what", UNKNOWN)
def test_a_document_is_refused_when_it_is_written(session: Session, what: str) -> None:
    data = cpu.Buffer.from_bytes(document(**UNKNOWN[what]))
    for write in (
        lambda: session.store.set_sync("g/a/zarr.json", data),
        lambda: asyncio.run(session.store.set("g/a/zarr.json", data)),
    ):
        with pytest.raises(UnsupportedFormatError, match=f"'/g/a' has {what}: its chunks"):
            write()
    assert not session.status()


def test_an_array_stays_as_it_is_if_its_next_document_is_refused(session: Session) -> None:
    array = zarr.create_array(session.store, name="a", shape=(4,), chunks=(2,), dtype="u1")
    array[:] = 7
    for changes in UNKNOWN.values():
        with pytest.raises(UnsupportedFormatError):
            session.store.set_sync("a/zarr.json", cpu.Buffer.from_bytes(document(**changes)))
    assert zarr.open_array(session.store, path="a")[:].tolist() == [7] * 4


def test_what_only_looks_like_it_is_kept(session: Session) -> None:
    """A name in the attributes, and bytes that are no metadata of Zarr."""
    attributes = {"storage_transformers": ["x"], "chunk_grid": {"name": "rectilinear"}}
    for data in (document(attributes=attributes), b"{", b'{"chunk_grid": {"name": "rectilinear"}}'):
        session.store.set_sync("a/zarr.json", cpu.Buffer.from_bytes(data))
        found = session.store.get_sync("a/zarr.json")
        assert found is not None
        assert found.to_bytes() == data


def test_zarr_itself_is_refused(session: Session) -> None:
    with (
        zarr.config.set({"array.rectilinear_chunks": True}),
        pytest.raises(UnsupportedFormatError, match="'/a' has the chunk grid 'rectilinear'"),
    ):
        zarr.create_array(session.store, name="a", shape=(4,), chunks=[[1, 3]], dtype="u1")
    assert "a" not in zarr.open_group(session.store, mode="r")


def test_imports_are_refused(tmp_path: Path) -> None:
    with zarr.config.set({"array.rectilinear_chunks": True}):
        made = zarr.create_array(
            LocalStore(tmp_path / "plain"), name="a", shape=(4,), chunks=[[1, 3]], dtype="u1"
        )
        made[:] = np.arange(4)
    repository = zm.create(MemoryStorage(), virtual_containers={"here": str(tmp_path)})
    before = next(repository.ancestry()).snapshot_id
    with pytest.raises(UnsupportedFormatError, match="'/new/a' has the chunk grid 'rectilinear'"):
        zm.virtual.import_zarr(repository, tmp_path / "plain", "/new", message="take it in")
    refs = {"a/zarr.json": document(**UNKNOWN["the chunk grid 'rectilinear'"]).decode()}
    with pytest.raises(UnsupportedFormatError, match="rectilinear"):
        zm.virtual.import_kerchunk(
            repository, {"version": 1, "refs": refs}, "/new", message="take it in"
        )
    assert next(repository.ancestry()).snapshot_id == before
