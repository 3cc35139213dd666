"""Exports as plain Zarr stores: every byte, with what reads them, and what goes wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import zarr
import zarr.storage

import zarr_manifests as zm
from exported import bytes_in, odd_repository, same_bytes
from zarr_manifests.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
)
from zarr_manifests.exporting import places


@pytest.fixture
def session(tmp_path: Path) -> zm.Session:
    return odd_repository(tmp_path).readonly_session()


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
    repo = zm.open(tmp_path / "repository")
    writing = repo.writable_session()
    zarr.create_group(writing.store, path="new")
    with pytest.raises(InvalidArgumentError, match="uncommitted changes"):
        zm.export(writing, tmp_path / "x")


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
