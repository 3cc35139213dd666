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
from zarr_manifests import exporting
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
            zm.export(session, inside)
    with pytest.raises(AlreadyExistsError, match="/proc exists"):
        zm.export(session, "/proc")
    (tmp_path / "link").symlink_to(tmp_path / "repository")
    with pytest.raises(InvalidArgumentError, match="in the repository"):
        zm.export(session, tmp_path / "link" / "x")
    (tmp_path / "file").write_text("a file")
    (tmp_path / "empty").mkdir()
    (tmp_path / "shortcut").symlink_to(tmp_path / "empty")
    for there in ("file", "shortcut"):
        with pytest.raises(AlreadyExistsError, match=f"{there} exists, and"):
            zm.export(session, tmp_path / there)
    with pytest.raises(InvalidArgumentError, match="zero byte"):
        zm.export(session, f"{tmp_path}/a\0b", "kerchunk")
    repo = zm.open(tmp_path / "repository")
    writing = repo.writable_session()
    zarr.create_group(writing.store, path="new")
    with pytest.raises(InvalidArgumentError, match="uncommitted changes"):
        zm.export(writing, tmp_path / "x")


def test_a_folder_is_there_whole_or_not_at_all(session: zm.Session, tmp_path: Path) -> None:
    dest = tmp_path / "out" / "plain.zarr"
    dest.mkdir(parents=True)

    def looked(stage: str, done: int) -> None:
        assert [*dest.iterdir()] == []

    raw = tmp_path / "raw files" / "day 1.nc"
    kept = raw.read_bytes()
    raw.write_bytes(kept + b"more")
    with zm.show_progress(looked), pytest.raises(VirtualSourceChangedError):
        zm.export(session, dest)
    assert [*dest.iterdir()] == []
    raw.write_bytes(kept)
    with zm.show_progress(looked):
        assert zm.export(session, dest).dest == str(dest)
    same_bytes(bytes_in(zarr.storage.LocalStore(dest)), bytes_in(session.store))
    assert [path.name for path in dest.parent.iterdir()] == ["plain.zarr"]
    with pytest.raises(AlreadyExistsError, match="replaces nothing"):
        zm.export(session, dest, path="large")


def test_a_folder_that_came_meanwhile_is_not_replaced(session: zm.Session, tmp_path: Path) -> None:
    dest = tmp_path / "out" / "plain.zarr"

    def taken(stage: str, done: int) -> None:
        dest.mkdir(exist_ok=True)
        (dest / "thesis.tex").write_text("years of work")

    with zm.show_progress(taken), pytest.raises(AlreadyExistsError, match="exists"):
        zm.export(session, dest)
    assert [path.name for path in dest.iterdir()] == ["thesis.tex"]
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
    with pytest.raises(AlreadyExistsError, match="replaces nothing"):
        zm.export(session, store, path="large")
    if kind == "zip":
        store.close()
        store = zarr.storage.ZipStore(tmp_path / "out.zip", mode="r")
    assert values_in(store) == values_in(session.store)


def test_what_an_export_has_left_is_told(
    session: zm.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "_BATCH_CHUNKS", 1)
    store = zarr.storage.MemoryStore()
    raw = tmp_path / "raw files" / "day 1.nc"
    raw.write_bytes(raw.read_bytes() + b"more")
    with pytest.raises(VirtualSourceChangedError) as error:
        zm.export(session, store)
    assert "holds what was written so far" in error.value.__notes__[0]
    assert bytes_in(store)
    with pytest.raises(FileNotFoundError):
        zarr.open_group(store, mode="r")
    with pytest.raises(AlreadyExistsError, match="an export that was broken off has left"):
        zm.export(session, store)
