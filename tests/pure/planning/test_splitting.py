"""Leaves: how large they are, and that they stay while an array grows."""

from __future__ import annotations

import numpy as np
import pytest

from zarr_manifests.config.manifest_sets import Split
from zarr_manifests.grid import Box, Coords
from zarr_manifests.planning.leaves import ENDLESS, leaf_shape

NODE = b"n" * 12
NAMES = ("time", "lat", "lon")


def grid(*shape: int) -> np.ndarray:
    box = Box((0,) * len(shape), shape)
    return box.unravel(np.arange(box.size))


@pytest.mark.parametrize(
    ("shape", "along", "most", "expected"),
    [
        ((9000, 10, 20), (), 50_000, (250, ENDLESS, ENDLESS)),
        ((9000, 10, 20), (), 199, (1, 9, ENDLESS)),
        ((9000, 10, 20), (("time", 720),), 10**6, (720, ENDLESS, ENDLESS)),
        ((9000, 10, 20), ((1, 5),), 50_000, (500, 5, ENDLESS)),
        ((9000, 0, 20), (), 50_000, (2500, ENDLESS, ENDLESS)),
        ((), (), 5, ()),
    ],
)
def test_shape_of_a_leaf(
    shape: Coords, along: tuple[tuple[str | int, int], ...], most: int, expected: Coords
) -> None:
    split = Split(".*", along) if along else None
    names = NAMES if len(shape) == 3 else None
    assert leaf_shape(shape, names, split, most) == expected
