"""Which live deltas are read, decided from what the read list says of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.delta import Delta
from zarr_manifests.format.manifest import Part
from zarr_manifests.grid import Box
from zarr_manifests.planning.tables.live_deltas import LiveSources, TableSource


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    lo = draw(st.tuples(st.integers(0, 4), st.integers(0, 4)))
    sides = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    return Box(lo, (lo[0] + sides[0], lo[1] + sides[1]))


@st.composite
def live_sources(draw: st.DrawFn) -> LiveSources:
    sources = []
    for position in range(draw(st.integers(0, 5))):
        found = draw(st.lists(st.tuples(boxes(), st.booleans()), min_size=1, max_size=3))
        parts = (Part(bytes(12), box, box.size - (not full)) for box, full in found)
        blob = BlobRef(f"deltas/000000000000-{0:024x}/{position}", 1, 0)
        sources.append(TableSource(position, position + 1, blob, Delta, tuple(parts)))
    return LiveSources(sources, {})


def chunks(box: Box) -> list[tuple[int, ...]]:
    numbers = box.unravel(np.arange(box.size))
    return [tuple(coords) for coords in numbers.tolist()]


@given(live_sources(), boxes())
def test_of_a_box_are_read_the_tables_that_decide_one_of_its_chunks(
    live: LiveSources, box: Box
) -> None:
    due = {source for coords in chunks(box) for source in live.reach(coords).sources}
    assert live.deciding(box) == [source for source in live.sources if source in due]
