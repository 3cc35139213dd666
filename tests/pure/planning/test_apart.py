"""Commits that are apart by their boxes, against a model of chunks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zarr_manifests.format.manifest import ManifestRef, Part
from zarr_manifests.format.records import BlobRef
from zarr_manifests.format.snapshot import DeltaEntry
from zarr_manifests.grid import Box
from zarr_manifests.planning.components import apart

NODES = (bytes(12), bytes([1] * 12))
LOG = BlobRef("deltas/000000000001-0123456789abcdef01234567/0", 10, 1)

chunk = st.tuples(st.integers(0, 6), st.integers(0, 6))
chunks = st.dictionaries(st.sampled_from(NODES), st.sets(chunk, min_size=1), max_size=2)


def boxes(of: dict[bytes, set[tuple[int, int]]]) -> dict[bytes, Box]:
    return {node: Box.around_coords(np.array(sorted(at))) for node, at in of.items()}


def entry(of: dict[bytes, set[tuple[int, int]]], *, nodes: bool = False) -> DeltaEntry:
    parts = tuple(Part(node, box, len(of[node])) for node, box in boxes(of).items())
    embedded, rest = parts[:1], parts[1:]
    return DeltaEntry(LOG, 1, 1, nodes, embedded, (ManifestRef(LOG, rest),) if rest else ())


@given(chunks, st.lists(chunks, max_size=3))
def test_what_is_apart_shares_no_chunk(
    mine: dict[bytes, set[tuple[int, int]]], theirs: list[dict[bytes, set[tuple[int, int]]]]
) -> None:
    around = {node: [box] for node, box in boxes(mine).items()}
    if apart(around, [entry(each) for each in theirs]):
        for each in theirs:
            assert not any(mine.get(node, set()) & each[node] for node in each)
