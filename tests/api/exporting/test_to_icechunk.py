"""Exports to icechunk, as icechunk reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import icechunk
import numpy as np
import pytest
import xarray as xr
import zarr
from zarr.core.sync import sync

import zarr_manifests as zm
from exported import ODD, odd_repository, values_in
from zarr_manifests.errors import (
    AlreadyExistsError,
    UnsupportedFormatError,
    VirtualSourceChangedError,
)


@pytest.fixture
def repo(tmp_path: Path) -> zm.Repository:
    """Without what icechunk does not take."""
    repo = odd_repository(tmp_path)
    session = repo.writable_session()
    for path in ("old", "notes"):
        sync(session.store.delete_dir(path))
    del zarr.open_group(session.store).attrs["missing"]
    session.commit("only what icechunk takes")
    return repo


def opened(path: Path) -> Any:
    """icechunk's store of the branch main."""
    storage = icechunk.local_filesystem_storage(str(path))
    repository = icechunk.Repository.open(storage)
    assert len([*repository.ancestry(branch="main")]) == 2
    return repository.readonly_session("main").store


def test_icechunk_reads_the_same(repo: zm.Repository, tmp_path: Path) -> None:
    session = repo.readonly_session()
    report = zm.export(session, tmp_path / "out" / "ice", "icechunk")
    store = opened(tmp_path / "out" / "ice")
    assert values_in(store) == values_in(session.store)
    found = xr.open_zarr(store, group=ODD, consolidated=False)
    np.testing.assert_array_equal(found["u"], np.arange(48.0).reshape(8, 6))
    assert (report.referenced, repo.list_tags()) == (0, {})
    with pytest.raises(AlreadyExistsError, match="replaces nothing"):
        zm.export(session, tmp_path / "out" / "ice", "icechunk")


def test_what_icechunk_does_not_take(tmp_path: Path) -> None:
    session, dest = odd_repository(tmp_path).readonly_session(), tmp_path / "ice"
    for path in ("", "old"):
        with pytest.raises(UnsupportedFormatError):
            zm.export(session, dest, "icechunk", path=path)
    assert not dest.exists()
    dest.mkdir()
    (dest / "thesis.tex").write_text("years of work")
    with pytest.raises(AlreadyExistsError, match="replaces nothing"):
        zm.export(session, dest, "icechunk", path=ODD)
    storage = icechunk.in_memory_storage()
    zm.export(session, storage, "icechunk", path=ODD)
    store = icechunk.Repository.open(storage).readonly_session("main").store
    assert values_in(store) == values_in(session.store, ODD)


def test_an_export_that_fails_has_no_commit_and_can_be_repeated(tmp_path: Path) -> None:
    session, dest = odd_repository(tmp_path).readonly_session(), tmp_path / "ice"
    raw = tmp_path / "raw files" / "day 1.nc"
    kept = raw.read_bytes()
    raw.write_bytes(kept + b"more")
    with pytest.raises(VirtualSourceChangedError):
        zm.export(session, dest, "icechunk", path=ODD)
    assert not dest.exists()
    storage = icechunk.in_memory_storage()
    with pytest.raises(VirtualSourceChangedError):
        zm.export(session, storage, "icechunk", path=ODD)
    assert len([*icechunk.Repository.open(storage).ancestry(branch="main")]) == 1
    with pytest.raises(AlreadyExistsError, match="leaves an empty one"):
        zm.export(session, storage, "icechunk", path=ODD)
    raw.write_bytes(kept)
    zm.export(session, dest, "icechunk", path=ODD)
    assert values_in(opened(dest)) == values_in(session.store, ODD)


def test_links_in_a_repository_are_not_followed(repo: zm.Repository, tmp_path: Path) -> None:
    """Icechunk would follow them."""
    dest, outside = tmp_path / "planted", tmp_path / "outside"
    icechunk.Repository.create(icechunk.local_filesystem_storage(str(dest)))
    (dest / "snapshots").rename(outside)
    (dest / "snapshots").symlink_to(outside)
    before = {path.name for path in outside.iterdir()}
    with pytest.raises(AlreadyExistsError, match="replaces nothing"):
        zm.export(repo.readonly_session(), dest, "icechunk")
    assert {path.name for path in outside.iterdir()} == before
