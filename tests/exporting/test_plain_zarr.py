"""Exports as plain Zarr stores: every byte, with what reads them, and what goes wrong."""

from __future__ import annotations

import json
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
import zarr.storage

import zarr_manifests as zm
from exported import ODD, bytes_in, odd_repository, put, same_bytes, values_in
from zarr_manifests.error_cases import StorageFullError, VirtualSourceChangedError
from zarr_manifests.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    ReadOnlyError,
    SnapshotExpiredError,
)
from zarr_manifests.exporting import places
from zarr_manifests.keys import DOCUMENTS
from zarr_manifests.storage.memory import MemoryStorage


@pytest.fixture
def session(tmp_path: Path) -> zm.Session:
    return odd_repository(tmp_path).readonly_session()


@pytest.mark.parametrize("into", ["folder", "url", "local store", "memory store", "zip store"])
def test_every_byte_is_exported(session: zm.Session, tmp_path: Path, into: str) -> None:
    place = tmp_path / "out %41" / "plain.zarr"
    dest: Any = {
        "folder": place,
        "url": place.as_uri(),
        "local store": zarr.storage.LocalStore(place),
        "memory store": zarr.storage.MemoryStore(),
        "zip store": zarr.storage.ZipStore(tmp_path / "plain.zip", mode="w"),
    }[into]
    told: list[tuple[str, int]] = []
    report = zm.export(session, dest, progress=lambda *what: told.append(what))
    if into == "zip store":
        dest.close()
        dest = zarr.storage.ZipStore(tmp_path / "plain.zip", mode="r")
    store = dest if "memory" in into or "zip" in into else zarr.storage.LocalStore(place)
    found = bytes_in(store)
    same_bytes(found, bytes_in(session.store))
    assert values_in(store) == values_in(session.store)
    assert values_in(store, "old", 2) == values_in(session.store, "old", 2)
    chunks = [
        data
        for key, data in found.items()
        if key.rpartition("/")[2] not in (*DOCUMENTS, ".zmetadata")
    ]
    assert (report.chunks, report.nbytes) == (len(chunks), sum(map(len, chunks)))
    assert told[-1] == ("chunks", report.chunks)
    assert (report.groups, report.arrays, report.reused, report.tag) == (5, 9, 0, None)


def test_xarray_opens_it_by_consolidated_metadata(session: zm.Session, tmp_path: Path) -> None:
    zm.export(session, tmp_path / "plain.zarr")
    tree = xr.open_datatree(tmp_path / "plain.zarr", engine="zarr", consolidated=True)
    np.testing.assert_array_equal(tree[f"{ODD}/u"], np.arange(48.0).reshape(8, 6))
    assert tree[f"{ODD}/inner/deep"].attrs == {"level": 3}
    found = xr.open_zarr(tmp_path / "plain.zarr", group=ODD, consolidated=True)
    np.testing.assert_array_equal(found["u"], tree[f"{ODD}/u"])
    old = zarr.open_consolidated(str(tmp_path / "plain.zarr"), path="old", zarr_format=2)
    assert old.metadata.consolidated_metadata is not None
    np.testing.assert_array_equal(np.asarray(old["t"][...]), np.arange(24).reshape(4, 6))


@pytest.mark.parametrize("path", [ODD, "large", "old", f"/{ODD}/shards/", "notes"])
def test_a_path_becomes_the_root(session: zm.Session, tmp_path: Path, path: str) -> None:
    if path == "notes":
        with pytest.raises(NotFoundError, match="'/notes'"):
            zm.export(session, tmp_path / "plain.zarr", path=path)
        assert not (tmp_path / "plain.zarr").exists()
        return
    report = zm.export(session, tmp_path / "plain.zarr", path=path)
    assert report.path == "/" + path.strip("/")
    found = bytes_in(zarr.storage.LocalStore(tmp_path / "plain.zarr"))
    same_bytes(found, bytes_in(session.store, path.strip("/") + "/"))


def test_what_is_there_is_not_lost(session: zm.Session, tmp_path: Path) -> None:
    dest = tmp_path / "plain.zarr"
    dest.mkdir()
    (dest / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(AlreadyExistsError):
            zm.export(session, dest, overwrite=overwrite)
    assert [path.name for path in dest.iterdir()] == ["thesis.tex"]
    (dest / "thesis.tex").unlink()
    zm.export(session, dest)
    before = bytes_in(zarr.storage.LocalStore(dest))
    for wrong in (
        {},
        {"overwrite": True, "format": "zar"},
        {"overwrite": True, "path": "no"},
        {"overwrite": True, "copy": False},
        {"overwrite": True, "tag": "t"},
        {"overwrite": True, "storage_options": {"regoin": "x"}},
    ):
        with pytest.raises((AlreadyExistsError, InvalidArgumentError, NotFoundError)):
            zm.export(session, dest, **wrong)  # type: ignore[arg-type]
        assert bytes_in(zarr.storage.LocalStore(dest)) == before
    zm.export(session, dest, path="old", overwrite=True)
    same_bytes(bytes_in(zarr.storage.LocalStore(dest)), bytes_in(session.store, "old/"))


def test_wrong_destinations(session: zm.Session, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="'zar' is unknown: did you mean zarr"):
        zm.export(session, tmp_path / "x", format="zar")  # type: ignore[arg-type]
    for inside in (tmp_path / "repository", tmp_path / "repository/chunks/x", tmp_path):
        with pytest.raises(InvalidArgumentError, match="in the repository, or holds it"):
            zm.export(session, inside, overwrite=True)
    (tmp_path / "link").symlink_to(tmp_path / "repository")
    with pytest.raises(InvalidArgumentError, match="in the repository"):
        zm.export(session, tmp_path / "link" / "x")
    (tmp_path / "file").write_text("a file")
    with pytest.raises(InvalidArgumentError, match="is a file"):
        zm.export(session, tmp_path / "file", overwrite=True)
    with pytest.raises(InvalidArgumentError, match="MemoryStore"):
        zm.export(session, MemoryStorage())
    with pytest.raises(InvalidArgumentError, match="give a path"):
        zm.export(session, 7)  # type: ignore[arg-type]
    with pytest.raises(ReadOnlyError):
        zm.export(session, zarr.storage.MemoryStore(read_only=True))
    repo = zm.open(tmp_path / "repository")
    writing = repo.writable_session()
    zarr.create_group(writing.store, path="new")
    with pytest.raises(InvalidArgumentError, match="uncommitted changes"):
        zm.export(writing, tmp_path / "x")
    empty = zm.create(MemoryStorage())
    with pytest.raises(NotFoundError):
        zm.export(empty.readonly_session(), tmp_path / "x")


@pytest.mark.usefixtures("session")
def test_an_interrupted_export_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = zm.open(tmp_path / "repository", virtual_containers={"raw": tmp_path / "raw files"})
    with repo.transaction(message="a document that zarr.json hides") as store:
        put(store, ".zgroup", b'{"zarr_format": 2}')
    session = repo.readonly_session()
    dest = tmp_path / "plain.zarr"
    write = places._DISK.write

    def full(temp: Any, data: bytes) -> None:
        if b'"zarr_format"' in data:
            raise OSError(28, "No space left on device")
        write(temp, data)

    with monkeypatch.context() as patch:
        patch.setattr(places._DISK, "write", full)
        with pytest.raises(StorageFullError):
            zm.export(session, dest)
    with pytest.raises(FileNotFoundError):
        zarr.open_group(dest, mode="r")
    with pytest.raises(AlreadyExistsError, match="unfinished export of another"):
        zm.export(session, dest, path="old")
    (dest / "large/c/0/0").unlink()
    (dest / "large/c/0/1").write_bytes(b"cut off")
    report = zm.export(session, dest)
    assert report.reused == report.chunks - 2
    same_bytes(bytes_in(zarr.storage.LocalStore(dest)), bytes_in(session.store))


@pytest.mark.parametrize("name", ["arrays", "history", "nodes"])
def test_every_snapshot_of_golden_repositories(tmp_path: Path, name: str) -> None:
    shutil.copytree(Path(__file__).parents[1] / "golden/v1" / name, tmp_path / name)
    repo = zm.open(tmp_path / name / "repo")
    for info in [*repo.ancestry()][:-1]:
        session = repo.readonly_session(info.snapshot_id)
        store = zarr.storage.MemoryStore()
        zm.export(session, store)
        same_bytes(bytes_in(store), bytes_in(session.store))


def test_a_snapshot_that_has_expired(tmp_path: Path) -> None:
    repo = zm.create(tmp_path / "repository")
    with repo.transaction(message="values") as store:
        zarr.create_array(store, name="a", data=np.random.default_rng(1).random(900))
    session = repo.readonly_session()
    with repo.transaction(message="other values") as store:
        zarr.open_array(store, path="a")[:] = 1
    repo.compact(mode="full")
    repo.expire_snapshots(keep_last=1)
    repo.garbage_collect(timedelta(0))
    with pytest.raises(SnapshotExpiredError):
        zm.export(session, tmp_path / "plain.zarr")
    assert not (tmp_path / "plain.zarr/zarr.json").exists()


def test_what_was_cleared_halfway_is_not_taken_for_an_export(
    session: zm.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dest = tmp_path / "plain.zarr"
    zm.export(session, dest)

    def killed(self: Any, kept: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(places.Folder, "clear", killed)
        with pytest.raises(KeyboardInterrupt):
            zm.export(session, dest, overwrite=True)
    with pytest.raises(FileNotFoundError):
        zarr.open_group(dest, mode="r")
    with pytest.raises(AlreadyExistsError, match="unfinished"):
        zm.export(session, dest)
    assert zm.export(session, dest, overwrite=True).reused == 0
    same_bytes(bytes_in(zarr.storage.LocalStore(dest)), bytes_in(session.store))


def test_a_source_that_changed_is_an_error(session: zm.Session, tmp_path: Path) -> None:
    raw = tmp_path / "raw files" / "day 1.nc"
    raw.write_bytes(raw.read_bytes() + b"more")
    with pytest.raises(VirtualSourceChangedError):
        zm.export(session, tmp_path / "plain.zarr")
    assert not (tmp_path / "plain.zarr" / "zarr.json").exists()


def test_chunks_of_arrays_in_each_other_stay_apart(tmp_path: Path) -> None:
    """A key belongs to the array with the longest path: the other one's chunk is not found."""
    repo = zm.create(tmp_path / "repository")
    keys: dict[str, Any] = {"chunk_key_encoding": {"name": "v2", "separator": "/"}}
    with repo.transaction(message="a") as store:
        data = np.arange(1, 5).reshape(2, 2)
        zarr.create_array(store, name="a", data=data, chunks=(1, 1), zarr_format=2, **keys)
    with repo.transaction(message="below") as store:
        document = json.loads(bytes_in(repo.readonly_session().store)["a/.zarray"])
        for shape in ([0], [1]):
            changed = document | {"shape": shape, "chunks": [1]}
            put(store, "a/0/.zarray", json.dumps(changed).encode())
    session = repo.readonly_session()
    due = bytes_in(session.store)
    zm.export(session, tmp_path / "plain.zarr")
    same_bytes(bytes_in(zarr.storage.LocalStore(tmp_path / "plain.zarr")), due)
