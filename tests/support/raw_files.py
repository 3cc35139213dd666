"""Files of GRIB, each of one day."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import eccodes
import numpy as np

FIRST = np.datetime64("2024-01-01", "ns")
SHAPE = (20, 30)


def save_grib(place: Path, number: int, shape: tuple[int, int], names: tuple[str, ...]) -> Path:
    """A message for each name, all of one day."""
    with place.open("wb") as file:
        for offset, name in enumerate(names):
            message = eccodes.codes_grib_new_from_samples("regular_ll_sfc_grib2")
            for key, value in {
                "Nj": shape[0],
                "Ni": shape[1],
                "latitudeOfFirstGridPointInDegrees": shape[0] - 1,
                "latitudeOfLastGridPointInDegrees": 0,
                "longitudeOfFirstGridPointInDegrees": 0,
                "longitudeOfLastGridPointInDegrees": shape[1] - 1,
                "iDirectionIncrementInDegrees": 1,
                "jDirectionIncrementInDegrees": 1,
                "dataDate": 20240101 + number,
                "shortName": name,
            }.items():
                eccodes.codes_set(message, key, value)
            eccodes.codes_set_values(message, grib_values(number, shape).ravel() + offset)
            eccodes.codes_write(message, file)
            eccodes.codes_release(message)
    return place


def grib_values(number: int, shape: tuple[int, int]) -> Any:
    return np.arange(float(shape[0] * shape[1])).reshape(shape) + 1000 * number
