"""`storage_options`: what every function that takes a location hands to the storage."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import xarray as xr

import zarr_manifests as zm
from zarr_manifests.error_cases import ConfigError
from zarr_manifests.errors import InvalidArgumentError, StorageError
from zarr_manifests.storage.memory import MemoryStorage

DS = xr.Dataset({"t": ("x", [1.0, 2.0])})
ENTRANCES: dict[str, Callable[..., Any]] = {
    "create": zm.create,
    "open": zm.open,
    "open_or_create": partial(zm.open, create=True),
    "exists": zm.exists,
    "recover": zm.recover,
    "write": lambda place, **how: zm.write(DS, place, message="write", mode="w", **how),
    "engine": lambda place, **how: xr.open_dataset(place, engine="zarr_manifests", **how),
    "groups": lambda place, **how: xr.open_groups(place, engine="zarr_manifests", **how),
    "rewrite_chunks": lambda place, **how: zm.rewrite_chunks(place, "t", chunks=(1,), **how),
}
entrances = pytest.mark.parametrize("entrance", ENTRANCES.values(), ids=ENTRANCES)


@entrances
def test_options_reach_the_storage(entrance: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="regoin: unknown storage option"):
        entrance("s3://bucket/winds", storage_options={"regoin": "eu-west-1"})


@entrances
def test_options_are_refused_for_what_is_open(entrance: Callable[..., Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="a storage was given, which is open already"):
        entrance(MemoryStorage(), storage_options={"region": "eu-west-1"})


@entrances
def test_options_are_a_mapping(entrance: Callable[..., Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="storage_options is a mapping"):
        entrance("memory://options", storage_options=["region"])


@pytest.mark.parametrize("name", ["write", "engine", "rewrite_chunks"])
def test_options_are_refused_for_a_repository(name: str) -> None:
    repo = zm.create(MemoryStorage())
    with pytest.raises(InvalidArgumentError, match="a repository was given, which is open already"):
        ENTRANCES[name](repo, storage_options={"region": "eu-west-1"})


def test_options_are_used(tmp_path: Any) -> None:
    at, options = tmp_path / "winds", {"follow_links": True}
    zm.write(DS, at, message="write")
    (at / "current").rename(tmp_path / "current")
    (at / "current").symlink_to(tmp_path / "current")
    for name in ("open", "open_or_create", "exists", "engine", "groups"):
        with pytest.raises(StorageError, match="follow_links=True"):
            ENTRANCES[name](at)
        assert ENTRANCES[name](at, storage_options=options)
