"""What xarray's and Zarr's own openers do to a repository, what protects it, and what is said."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr
from typer.testing import CliRunner

import zarr_manifests as zm
from zarr_manifests.cli.app import app
from zarr_manifests.error_cases import NotARepositoryError
from zarr_manifests.errors import AlreadyExistsError
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage

DS = xr.Dataset({"t": ("x", np.arange(3.0))})


@pytest.fixture
def place() -> Iterator[Path]:
    """A repository that everybody can reach, other than below pytest's own folders."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        place = Path(folder, "winds")
        zm.write(DS, place, message="first")
        yield place
        for path in (place, *place.rglob("*")):
            path.chmod(0o755)


def opened(place: object) -> xr.Dataset:
    return xr.open_dataset(place, engine="zarr_manifests").load()


def test_without_an_engine_xarray_finds_a_repository(place: Path) -> None:
    xr.testing.assert_identical(xr.open_dataset(place).load(), opened(place))
    with pytest.raises(FileNotFoundError):
        xr.open_zarr(place)


def test_what_to_zarr_deletes_is_said_afterwards(place: Path) -> None:
    DS.to_zarr(place, mode="w", consolidated=False)
    assert not (place / "current").exists()
    with pytest.raises(
        NotARepositoryError, match=r"plain Zarr store.*xr.open_zarr.*backup.*import_zarr"
    ):
        opened(place)


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_plain_store_is_called_that(tmp_path: Path, zarr_format: int) -> None:
    store = tmp_path / "plain store"
    DS.to_zarr(store, consolidated=False, zarr_format=zarr_format)
    for location in (store, str(store), LocalStorage(store)):
        with pytest.raises(NotARepositoryError, match=r"plain Zarr store .* xr.open_zarr"):
            zm.open(location)
        with pytest.raises(AlreadyExistsError, match=r"plain Zarr store .* xr.open_zarr"):
            zm.write(DS, location, message="on top")
    assert xr.open_zarr(store, consolidated=False).t.size == 3


def test_a_plain_store_elsewhere_is_called_that() -> None:
    storage = MemoryStorage()
    storage.put("zarr.json", b"{}")
    with pytest.raises(NotARepositoryError, match="plain Zarr store"):
        zm.open(storage)


@pytest.mark.parametrize("inside", ["wind", "chunks", "wind/deep", "current"])
def test_a_group_is_no_folder(place: Path, inside: str) -> None:
    zm.write(DS, place, message="group", group="wind")
    before = sorted(place.rglob("*"))
    with pytest.raises(NotARepositoryError, match=r"inside the repository .*winds.* group="):
        opened(place / inside)
    with pytest.raises(AlreadyExistsError, match=r"inside the repository .*winds.* group="):
        zm.write(DS, place / inside, message="into the group?")
    assert sorted(place.rglob("*")) == before


def test_a_pipe_in_a_folder_above_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "current")
    with pytest.raises(NotARepositoryError):
        opened(tmp_path / "winds")
    zm.write(DS, tmp_path / "winds", message="beside a pipe")


def test_what_zarr_leaves_in_a_repository_does_no_harm(place: Path) -> None:
    """The command `verify` names it, and nothing deletes it."""
    assert "zarr.json" not in _verified(place)
    zarr.open(place)
    left = {path for path in place.iterdir() if not path.name.startswith(".")}
    assert place / "zarr.json" in left
    repo = zm.open(place, create=True)
    repo.create_branch("dev")
    zm.write(DS + 1, place, message="second", mode="a")
    zm.write(DS, repo, message="third", group="g", mode="w")
    repo.compact()
    repo.expire_snapshots(keep_last=1)
    repo.garbage_collect(timedelta(0))
    assert repo.verify().ok
    assert left <= set(place.iterdir())
    xr.testing.assert_identical(opened(place), DS + 1)
    assert "zarr.json is not part of the repository" in _verified(place)
    with pytest.raises(AlreadyExistsError):
        zm.create(place)
    (place / "current").unlink()
    zm.recover(place)
    xr.testing.assert_identical(opened(place), DS + 1)


def _verified(place: Path) -> str:
    ended = CliRunner().invoke(app, ["verify", str(place)])
    assert ended.exit_code == 0
    return ended.stdout
