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
from zarr_manifests.errors import CorruptObjectError, MissingChunkError

VALUES = np.random.default_rng(0).random(40)
READERS: dict[str, Callable[[Any], Any]] = {
    "zarr": lambda store: zarr.open_array(store, path="a", mode="r")[10:20],
    "in bulk": lambda store: in_bulk(store)[10:20],
    "xarray": lambda store: xr.open_zarr(store, consolidated=False).a[10:20].values,
}
ALONE, PACKED = {"pack-chunk-bytes": 0}, dict[str, int]()


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


@pytest.mark.parametrize(
    ("reader", "config", "damage"),
    [
        ("zarr", ALONE, flip),
        ("zarr", PACKED, cut),
        ("in bulk", ALONE, cut),
        ("in bulk", PACKED, flip),
        ("xarray", ALONE, flip),
    ],
)
def test_a_chunk_is_read_as_it_is_now(
    tmp_path: Path, reader: str, config: Any, damage: Callable[[Path], None]
) -> None:
    """Damaged, deleted and restored, as far as this process has opened its file."""
    read = READERS[reader]
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
