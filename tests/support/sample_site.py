"""A repository with a history to look at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr

import zarr_manifests as zm
from zarr_manifests.repository import resolved

type Values = npt.NDArray[Any]

HOSTILE = "<script>alert(1)</script>"
HOSTILE_ARRAY = "<img src=x onerror=alert(1)>#?%41 é"
LAT, LON = np.linspace(90, -90, 37), np.arange(0.0, 360, 5)


def temperature(day: int) -> Values:
    """Degrees around the earth, with a hole where nothing was measured."""
    values = 30 * np.cos(np.radians(LAT))[:, None] - 10 + 5 * np.sin(np.radians(LON + 20 * day))
    values[10:14, 20:26] = np.nan
    return np.array(values, np.float32)


def depth() -> Values:
    """Metres of water, from south to north."""
    return np.array(100 + 10 * np.arange(19)[:, None] + np.arange(36), np.int16)


@dataclass(frozen=True)
class Sample:
    """A repository, and the ids of its snapshots by what was done."""

    repo: zm.Repository
    ids: dict[str, str] = field(default_factory=dict)

    def commit(self, what: str, write: Callable[[zarr.Group], None], branch: str = "main") -> None:
        """Commit what a function writes to the root group."""
        with self.repo.transaction(branch, message=what) as store:
            write(zarr.open_group(store, mode="a"))
        self.ids[what] = resolved(self.repo, branch)


def _array(group: zarr.Group, name: str, values: Values, dims: str, **attributes: object) -> None:
    chunks = (1, *values.shape[1:]) if values.ndim == 3 else values.shape
    array = group.create_array(
        name,
        shape=values.shape,
        chunks=chunks,
        dtype=values.dtype,
        fill_value=np.nan if values.dtype.kind == "f" else 0,
        dimension_names=dims.split(),
        attributes=attributes,  # type: ignore[arg-type]
    )
    array[...] = values


def _begin(group: zarr.Group) -> None:
    _array(group, "air/time", np.arange(3), "time", units="days since 2026-11-01")
    _array(group, "air/lat", LAT, "lat", units="degrees_north")
    _array(group, "air/lon", LON, "lon", units="degrees_east")
    three = np.stack([temperature(day) for day in range(3)])
    _array(group, "air/t", three, "time lat lon", units="degC", long_name="Air temperature")
    _array(group, "sea/lat", LAT[::-2], "lat", units="degrees_north")
    _array(group, "sea/lon", LON[::2], "lon", units="degrees_east")
    _array(group, "sea/depth", depth(), "lat lon", units="m", scale_factor=0.5)


def _append(day: int) -> Callable[[zarr.Group], None]:
    def write(group: zarr.Group) -> None:
        for name, value in (("air/time", day), ("air/t", temperature(day))):
            array: Any = group[name]
            array.resize((day + 1, *array.shape[1:]))
            array[day] = value

    return write


def _correct(group: zarr.Group) -> None:
    array: Any = group["air/t"]
    array[3, :10, :20] = temperature(3)[:10, :20] + 2
    array[3, 10, 20] = 1  # nothing was there


def _hostile(group: zarr.Group) -> None:
    _array(group, HOSTILE_ARRAY, np.eye(4), "<b> b", title=f"{HOSTILE}\u202e", units="<i>")


def make_sample(location: str) -> Sample:
    """Six days of a map, a branch with a correction, and names that want to be HTML."""
    found = Sample(zm.create(location))
    found.commit("three days", _begin)
    found.repo.create_tag("v1", found.ids["three days"])
    for day in (3, 4):
        found.commit(f"day {day}", _append(day))
    found.repo.create_branch("fix/day-3")
    found.commit("correct day 3", _correct, "fix/day-3")
    found.commit("day 5", _append(5))
    found.repo.create_branch("odd")
    found.commit(f"{HOSTILE}\nand \x1b[2J more", _hostile, "odd")
    return found
