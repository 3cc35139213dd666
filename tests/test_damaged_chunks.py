"""What readers get of chunks that are damaged, missing or restored, whatever they read with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr

import zarr_manifests as zm
from zarr_manifests.bulk import use_bulk
from zarr_manifests.error_cases import VirtualSourceChangedError
from zarr_manifests.errors import CorruptObjectError, MissingChunkError, StorageError

VALUES = np.random.default_rng(0).random(40)
READERS: dict[str, Callable[[Any], Any]] = {
    "zarr": lambda store: zarr.open_array(store, path="a", mode="r")[10:20],
    "in bulk": lambda store: in_bulk(store)[10:20],
    "xarray": lambda store: xr.open_zarr(store, consolidated=False).a[10:20].values,
}
LAYOUTS = {"alone": {"inline-chunk-bytes": 0, "pack-chunk-bytes": 0}, "packed": {}}


def in_bulk(store: Any) -> Any:
    array = zarr.open_array(store, path="a", mode="r")
    use_bulk(array)
    return array


def made(folder: Path, config: Any) -> tuple[zm.Repository, list[Path]]:
    """A repository, and the files of its chunks."""
    repo = zm.create(folder, config | {"inline-chunk-bytes": 0})
    with repo.transaction(message="values") as store:
        zarr.create_array(
            store, name="a", data=VALUES, chunks=(10,), compressors=None, dimension_names=["x"]
        )
    return repo, [path for path in (folder / "chunks").rglob("*") if path.is_file()]


def flip(path: Path) -> None:
    path.write_bytes(bytes(255 - byte for byte in path.read_bytes()))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:50])


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("config", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("damage", [flip, cut])
def test_a_chunk_is_read_as_it_is_now(
    tmp_path: Path, read: Any, config: Any, damage: Callable[[Path], None]
) -> None:
    """Damaged, deleted and restored, as far as this process has opened its file."""
    repo, files = made(tmp_path, config)
    whole = {path: path.read_bytes() for path in files}
    store = repo.readonly_session().store
    for path in files:
        damage(path)
    with pytest.raises(CorruptObjectError, match="restore it from a backup") as damaged:
        read(store)
    for path in files:
        path.unlink()
    with pytest.raises(MissingChunkError, match="is not read as fill value") as missing:
        read(store)
    for caught in (damaged, missing):
        assert isinstance(caught.value, OSError)
        assert not isinstance(caught.value, KeyError | FileNotFoundError)  # of absent chunks
    for path, data in whole.items():
        path.write_bytes(data)
    np.testing.assert_array_equal(read(store), VALUES[10:20])


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_file_elsewhere_that_has_changed_or_is_gone(tmp_path: Path, read: Any) -> None:
    file = tmp_path / "a.bin"
    file.write_bytes(VALUES.tobytes())
    places = {"files": tmp_path.as_uri()}
    repo = zm.create(tmp_path / "repo", virtual_containers=places)
    with repo.transaction(message="refer") as store:
        zarr.create_array(
            store,
            name="a",
            shape=40,
            chunks=10,
            dtype="f8",
            compressors=None,
            dimension_names=["x"],
        )
        store.set_virtual_refs("a", [[1]], [file.as_uri()], [0], [80], [80], sizes=[320])
    store = repo.readonly_session().store
    np.testing.assert_array_equal(read(store), VALUES[10:20])
    file.write_bytes(VALUES[:30].tobytes())
    with pytest.raises(VirtualSourceChangedError, match="has changed") as changed:
        read(store)
    file.unlink()
    with pytest.raises(MissingChunkError, match="is not there") as missing:
        read(store)
    for caught in (changed, missing):
        assert isinstance(caught.value, OSError)
        assert not isinstance(caught.value, KeyError | FileNotFoundError)


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_sparse_file_offers_more_bytes_than_the_machine_has(tmp_path: Path, read: Any) -> None:
    file = tmp_path / "a.bin"
    with file.open("wb") as sparse:
        sparse.truncate(2**43)
    places = {"files": tmp_path.as_uri()}
    session = zm.create(tmp_path / "repo", virtual_containers=places).writable_session()
    zarr.create_array(
        session.store, name="a", shape=40, chunks=10, dtype="f8", dimension_names=["x"]
    )
    session.store.set_virtual_refs("a", [[1]], [file.as_uri()], [0], [0], [2**43])
    with pytest.raises(StorageError, match="larger than this machine's memory"):
        read(session.store)
