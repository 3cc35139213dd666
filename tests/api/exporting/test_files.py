"""Exports to a file of kerchunk references."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import xarray as xr
import zarr
import zarr.storage
from zarr.core.sync import sync

import zarr_manifests as zm
from exported import ODD, odd_repository, values_in
from zarr_manifests.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    StorageFullError,
    UnsupportedStorageError,
)
from zarr_manifests.storage.disk import PosixDisk
from zarr_manifests.storage.memory import MemoryStorage


@pytest.fixture
def repo(tmp_path: Path) -> zm.Repository:
    return odd_repository(tmp_path)


def test_a_file_is_there_whole_or_not_at_all(
    repo: zm.Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, dest = repo.readonly_session(), tmp_path / "out" / "refs.json"
    dest.parent.mkdir()
    dest.write_bytes(b"of somebody else")
    with pytest.raises(AlreadyExistsError, match="replaces nothing"):
        zm.export(session, dest, "kerchunk")
    with pytest.raises(InvalidArgumentError, match="local file"):
        zm.export(session, "s3://bucket/x", "kerchunk")
    with pytest.raises(InvalidArgumentError, match="in the repository"):
        zm.export(session, tmp_path / "repository" / "x", "kerchunk")

    flush = PosixDisk.fsync_file

    def full(self: PosixDisk, fd: int) -> None:
        if "repository" not in str(Path(f"/proc/self/fd/{fd}").readlink()):
            raise OSError(28, "No space left on device")
        flush(self, fd)

    with monkeypatch.context() as patch:
        patch.setattr(PosixDisk, "fsync_file", full)
        with pytest.raises(StorageFullError):
            zm.export(session, dest.parent / "new.json", "kerchunk")
    assert dest.read_bytes() == b"of somebody else"
    assert [path.name for path in dest.parent.iterdir()] == ["refs.json"]
    late = tmp_path / "late.json"
    with (
        zm.show_progress(lambda *_: late.write_bytes(b"of somebody else") and None),
        pytest.raises(AlreadyExistsError),
    ):
        zm.export(session, late, "kerchunk")
    assert late.read_bytes() == b"of somebody else"


def opened(path: Path) -> Any:
    """The references as a store, as fsspec reads them."""
    files = fsspec.filesystem("reference", fo=str(path), asynchronous=False)
    return zarr.storage.FsspecStore.from_mapper(files.get_mapper(""), read_only=True)


def test_kerchunk_references_read_the_same(repo: zm.Repository, tmp_path: Path) -> None:
    session, dest = repo.readonly_session(), tmp_path / "refs.json"
    report = zm.export(session, dest, "kerchunk")
    assert report.tag == f"export-{session.snapshot_id}"
    assert repo.list_tags() == {report.tag: session.snapshot_id}
    assert 0 < report.referenced < report.chunks
    store = opened(dest)
    assert values_in(store) == values_in(session.store)
    assert values_in(store, "old", 2) == values_in(session.store, "old", 2)
    found = xr.open_zarr(store, group=ODD, consolidated=True)
    np.testing.assert_array_equal(found["u"], np.arange(48.0).reshape(8, 6))
    # Back into a repository.
    back = zm.create(tmp_path / "back", virtual_containers={"all": tmp_path})
    zm.export(session, tmp_path / "odd.json", "kerchunk", path=ODD)
    zm.virtual.import_kerchunk(back, tmp_path / "odd.json")
    assert values_in(back.readonly_session().store) == values_in(session.store, ODD)


def test_a_tag_keeps_what_references_point_to(repo: zm.Repository, tmp_path: Path) -> None:
    session = repo.readonly_session()
    report = zm.export(session, tmp_path / "refs.json", "kerchunk")
    assert repo.list_tags()[report.tag] == session.snapshot_id
    due = values_in(session.store)
    with repo.transaction(message="delete everything") as store:
        sync(store.clear())
        zarr.create_group(store)
    repo.create_tag(f"export-{repo.list_branches()['main']}", session.snapshot_id)
    with pytest.raises(AlreadyExistsError, match="another snapshot"):
        zm.export(repo.readonly_session(), tmp_path / "new", "kerchunk")
    assert not (tmp_path / "new").exists()
    repo.compact(mode="full")
    repo.expire_snapshots(keep_last=1)
    repo.garbage_collect(timedelta(0))
    assert values_in(opened(tmp_path / "refs.json")) == due


def test_chunks_in_memory_cannot_be_referred_to(tmp_path: Path) -> None:
    repo = zm.create(MemoryStorage())
    zm.write(xr.Dataset({"t": ("x", np.arange(3.0))}), repo, message="values")
    with pytest.raises(UnsupportedStorageError, match="format='zarr'"):
        zm.export(repo.readonly_session(), tmp_path / "refs.json", "kerchunk")
    assert repo.list_tags() == {}
