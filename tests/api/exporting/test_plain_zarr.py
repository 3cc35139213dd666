"""Exports as plain Zarr stores: every byte, with what reads them, and what goes wrong."""

from __future__ import annotations

from pathlib import Path

import obstore.store
import pytest
import zarr
import zarr.storage
from zarr.abc.store import Store

import zarr_manifests as zm
from exported import bytes_in, odd_repository, same_bytes, values_in
from zarr_manifests.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    VirtualSourceChangedError,
)


@pytest.fixture
def session(tmp_path: Path) -> zm.Session:
    return odd_repository(tmp_path).readonly_session()


def test_wrong_destinations(session: zm.Session, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="'zar' is unknown: did you mean zarr"):
        zm.export(session, tmp_path / "x", format="zar")  # type: ignore[arg-type]
    for inside in (tmp_path / "repository", tmp_path / "repository/chunks/x", tmp_path):
        with pytest.raises(InvalidArgumentError, match="in the repository, or holds it"):
            zm.export(session, inside, overwrite=True)
    with pytest.raises(InvalidArgumentError, match="mount point"):
        zm.export(session, "/", overwrite=True)
    (tmp_path / "link").symlink_to(tmp_path / "repository")
    with pytest.raises(InvalidArgumentError, match="in the repository"):
        zm.export(session, tmp_path / "link" / "x")
    (tmp_path / "file").write_text("a file")
    with pytest.raises(InvalidArgumentError, match="cannot be replaced"):
        zm.export(session, tmp_path / "file", overwrite=True)
    repo = zm.open(tmp_path / "repository")
    writing = repo.writable_session()
    zarr.create_group(writing.store, path="new")
    with pytest.raises(InvalidArgumentError, match="uncommitted changes"):
        zm.export(writing, tmp_path / "x")


def test_a_folder_is_replaced_by_a_whole_one_or_not_at_all(
    session: zm.Session, tmp_path: Path
) -> None:
    dest = tmp_path / "out" / "plain.zarr"
    dest.mkdir(parents=True)
    zm.export(session, dest, path="large")
    with pytest.raises(AlreadyExistsError, match="overwrite=True replaces"):
        zm.export(session, dest)
    large = bytes_in(zarr.storage.LocalStore(dest))

    def looked(stage: str, done: int) -> None:
        assert bytes_in(zarr.storage.LocalStore(dest)) == large

    raw = tmp_path / "raw files" / "day 1.nc"
    kept = raw.read_bytes()
    raw.write_bytes(kept + b"more")
    with zm.show_progress(looked), pytest.raises(VirtualSourceChangedError):
        zm.export(session, dest, overwrite=True)
    assert bytes_in(zarr.storage.LocalStore(dest)) == large
    raw.write_bytes(kept)
    with zm.show_progress(looked):
        assert zm.export(session, dest, overwrite=True).dest == str(dest)
    same_bytes(bytes_in(zarr.storage.LocalStore(dest)), bytes_in(session.store))
    assert [path.name for path in dest.parent.iterdir()] == ["plain.zarr"]


def test_a_folder_that_came_meanwhile_is_not_replaced(session: zm.Session, tmp_path: Path) -> None:
    dest = tmp_path / "out" / "plain.zarr"

    def taken(stage: str, done: int) -> None:
        dest.mkdir(exist_ok=True)
        (dest / "thesis.tex").write_text("years of work")

    with zm.show_progress(taken), pytest.raises(AlreadyExistsError, match="exists"):
        zm.export(session, dest)
    assert [path.name for path in dest.iterdir()] == ["thesis.tex"]
    assert [path.name for path in dest.parent.iterdir()] == ["plain.zarr"]
    with pytest.raises(AlreadyExistsError, match="holds data"):
        zm.export(session, dest, overwrite=True)


def test_the_old_folder_comes_back_if_the_new_one_gets_no_name(
    session: zm.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dest, rename = tmp_path / "out" / "plain.zarr", Path.rename
    zm.export(session, dest)

    def interrupted(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            zm.export(session, dest, path="large", overwrite=True)
    same_bytes(bytes_in(zarr.storage.LocalStore(dest)), bytes_in(session.store))
    assert [path.name for path in dest.parent.iterdir()] == ["plain.zarr"]


@pytest.mark.parametrize("kind", ["memory", "obstore", "local", "zip"])
def test_any_store_of_zarr_has_every_byte(session: zm.Session, tmp_path: Path, kind: str) -> None:
    stores: dict[str, Store] = {
        "memory": zarr.storage.MemoryStore(),
        "obstore": zarr.storage.ObjectStore(obstore.store.MemoryStore()),
        "local": zarr.storage.LocalStore(tmp_path / "out"),
        "zip": zarr.storage.ZipStore(tmp_path / "out.zip", mode="w"),
    }
    store = stores[kind]
    zm.export(session, store)
    same_bytes(bytes_in(store), bytes_in(session.store))
    if kind == "zip":  # of which nothing can be deleted
        with pytest.raises(AlreadyExistsError):
            zm.export(session, store, overwrite=True)
        return
    assert values_in(store) == values_in(session.store)
    zm.export(session, store, path="large", overwrite=True)
    same_bytes(bytes_in(store), bytes_in(session.store, "large/"))


def test_what_an_export_has_left_is_told_and_replaced(session: zm.Session, tmp_path: Path) -> None:
    store = zarr.storage.MemoryStore()
    zm.export(session, store)
    raw = tmp_path / "raw files" / "day 1.nc"
    kept = raw.read_bytes()
    raw.write_bytes(kept + b"more")
    with pytest.raises(VirtualSourceChangedError) as error:
        zm.export(session, store, overwrite=True)
    assert "holds what was written so far" in error.value.__notes__[0]
    assert bytes_in(store)
    with pytest.raises(FileNotFoundError):
        zarr.open_group(store, mode="r")
    raw.write_bytes(kept)
    with pytest.raises(AlreadyExistsError, match="what an export that was broken off has left"):
        zm.export(session, store)
    zm.export(session, store, overwrite=True)
    same_bytes(bytes_in(store), bytes_in(session.store))
