"""What a reader sees of a repository."""

from __future__ import annotations

from typing import Any

import xarray as xr

import zarr_manifests as zm


def opened(place: Any, **options: Any) -> xr.Dataset:
    """A dataset of a repository, in memory."""
    return xr.open_dataset(place, engine="zarr_manifests", **options).load()


def messages(place: Any) -> list[str]:
    """The messages of its commits, oldest first, without the one that made it."""
    return [info.message for info in zm.open(place).ancestry()][::-1][1:]
