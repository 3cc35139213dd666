"""Statistics of chunks, as far as zone maps of the chunks that are there have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import zarr

import zarr_manifests as zm
from zarr_manifests import Repository, Session
from zarr_manifests.engine.edit.record_zones import record_zones
from zarr_manifests.grid import Box
from zarr_manifests.planning.zones.meaning import Meaning
from zarr_manifests.planning.zones.measure import measure
from zarr_manifests.store import ManifestStore, contents_of, workspace_of


def put(store: ManifestStore, path: str, at: int, values: Any, chunk: int = 2) -> None:
    """Write whole chunks of a 1-d array, with their statistics."""
    zarr.open_array(store, path=path)[at : at + len(values)] = values
    node = contents_of(store).array_at(path)
    meaning = Meaning.of(node.documents)
    block = meaning.compared(np.asarray(values))
    bounds = measure(block, (chunk,), meaning.fill, meaning.missing)
    box = Box((at // chunk,), (-(-(at + len(values)) // chunk),))
    record_zones(workspace_of(store), path, box, meaning.digest, bounds)


def make(name: str) -> Repository:
    repo = zm.create(f"memory://{name}", {"inline-chunk-bytes": 0})
    with repo.transaction(message="make") as store:
        zarr.create_array(store, name="a", shape=(9,), chunks=(2,), dtype="f8")
        put(store, "a", 0, np.array([1.0, 2.0, np.nan, 4.0]))
        put(store, "a", 6, np.array([-3.0, 8.0, 5.0]))
    return repo


def rows(session: Session, **where: Any) -> dict[int, tuple[float, float, int, int]]:
    found = session.chunk_refs("a", **where, statistics=True)
    assert (found.path, found.coords.shape[1]) == ("/a", 1)
    at = found.coords[:, 0].tolist()
    assert at == sorted(set(at))
    assert (found.low <= found.high).all()
    # Stored bounds are rounded outward.
    columns = (found.low.round(4), found.high.round(4), found.nan, found.cells)
    return dict(zip(at, zip(*(c.tolist() for c in columns), strict=True), strict=True))


FIRST = {0: (1.0, 2.0, 0, 2), 1: (4.0, 4.0, 1, 2), 3: (-3.0, 8.0, 0, 2)}


def test_bounds_and_counts_are_those_written() -> None:
    session = make("chunk-statistics").readonly_session()
    found = rows(session)
    assert {k: found[k] for k in FIRST} == FIRST
    assert found[4][1:] == (5.0, 0, 1)
    assert session.chunk_refs("a", statistics=True).bounded.all()
    assert rows(session, box=[slice(1, 3)]) == {1: FIRST[1]}
    assert rows(session, box=[slice(2, 3)]) == {}


def test_a_chunk_that_was_overwritten_without_statistics_has_none() -> None:
    repo = make("chunk-statistics-overwritten")
    with repo.transaction(message="by Zarr") as store:
        zarr.open_array(store, path="a")[0:2] = 100
    assert rows(repo.readonly_session()).keys() == {1, 3, 4}
    with repo.transaction(message="with statistics") as store:
        put(store, "a", 2, np.array([7.0, 9.0]))
    assert rows(repo.readonly_session())[1] == (7.0, 9.0, 0, 2)


def test_statistics_stay_through_a_compaction() -> None:
    repo = make("chunk-statistics-compacted")
    before = rows(repo.readonly_session())
    repo.compact(mode="full")
    assert rows(repo.readonly_session()) == before
    with repo.transaction(message="by Zarr") as store:
        zarr.open_array(store, path="a")[0:2] = 100
    after = rows(repo.readonly_session())
    assert after == {at: row for at, row in before.items() if at}


def test_changes_that_are_not_committed_count() -> None:
    session = make("chunk-statistics-session").writable_session()
    put(session.store, "a", 0, np.array([50.0, 60.0]))
    zarr.open_array(session.store, path="a")[2:4] = 0.5
    found = rows(session)
    assert found.keys() <= {0, 3, 4}
    assert found.get(0, (50.0, 60.0, 0, 2)) == (50.0, 60.0, 0, 2)
    session.commit("both")
    assert rows(session)[0] == (50.0, 60.0, 0, 2)


def test_another_meaning_has_no_statistics() -> None:
    repo = make("chunk-statistics-meaning")
    with repo.transaction(message="a value means missing now") as store:
        zarr.open_array(store, path="a").attrs["_FillValue"] = 4.0
    assert rows(repo.readonly_session()) == {}


def test_an_array_without_any_has_no_rows() -> None:
    repo = make("chunk-statistics-none")
    with repo.transaction(message="by Zarr") as store:
        zarr.create_array(store, name="b", shape=(2, 2), chunks=(1, 1), dtype="i2")[:] = 1
        zarr.create_array(store, name="empty", shape=(2,), chunks=(1,), dtype="i2")
    found = repo.readonly_session().chunk_refs("b", statistics=True)
    assert (len(found), found.coords.shape) == (0, (0, 2))
    assert len(repo.readonly_session().chunk_refs("empty", statistics=True)) == 0
