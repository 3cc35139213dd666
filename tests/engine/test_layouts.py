"""Where refs lie in real repositories after compactions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import zarr

import zarr_manifests as zm
from storages import CountingStorage
from zarr_manifests import Repository, Session
from zarr_manifests.storage.memory import MemoryStorage


def make(session: Session, path: str, shape: int) -> None:
    zarr.create_array(session.store, name=path, shape=(shape,), chunks=(1,), dtype="i1")


def refer(session: Session, path: str, chunks: np.ndarray) -> None:
    none = np.zeros(len(chunks), np.int64)
    session.store.set_virtual_refs(
        path, chunks[:, None], [f"file:///archive/{path}.bin"], none, chunks, none + 1
    )


def written(config: Mapping[str, Any], arrays: Mapping[str, tuple[int, int]]) -> Repository:
    """A repository of arrays of so many chunks, the first so many of which are there."""
    repository = zm.create(MemoryStorage(), config)
    session = repository.writable_session()
    for path, (shape, refs) in arrays.items():
        make(session, path, shape)
        refer(session, path, np.arange(refs))
    session.commit("write")
    repository.compact(mode="full")
    return repository


def test_sparse_arrays_go_by_what_has_been_written() -> None:
    sets = [{"small": {"max-manifest-size": 50_000}}]
    rules = [{"initialized-chunks": [0, 1_000], "target": "small"}]
    repository = written(
        {"chunk-manifests": {"sets": sets, "rules": rules}},
        {"empty": (9_000, 0), "sparse": (9_000, 1_000), "full": (9_000, 1_001)},
    )

    def wanted() -> dict[str, tuple[str, int]]:
        places = repository.explain_manifests().arrays
        return {one.path.strip("/"): (one.wanted, one.refs) for one in places}

    assert wanted()["sparse"] == ("small", 1_000)
    assert wanted()["full"] == ("default", 1_001)
    # What is written later counts once, and what is there already.
    for _ in range(2):
        session = repository.writable_session()
        refer(session, "sparse", np.arange(600, 1_002))
        session.commit("more")
    repository.compact(mode="full")
    assert wanted()["sparse"] == ("default", 1_002)


def test_costs_are_what_a_new_process_fetches() -> None:
    """Of a repository too large for its root, with deltas on top that touch a coordinate."""
    config = {"chunk-manifests": {"sets": [{"default": {"max-manifest-size": 20_000}}]}}
    repository = written(config, {"a": (60_000, 60_000), "b": (30_000, 30_000)})
    session = repository.writable_session()
    noise = np.random.default_rng(5).bytes(20_000).hex()
    zarr.create_group(session.store, path="g", attributes={"about": noise})
    zarr.create_array(
        session.store, name="t", data=np.arange(1, 31), chunks=(1,), dimension_names=("t",)
    )
    session.commit("a coordinate")
    repository.compact(mode="full")
    session = repository.writable_session()
    zarr.open_array(session.store, path="t")[3] = 7
    refer(session, "a", np.random.default_rng(5).permutation(60_000)[:20_000])
    session.commit("more")
    counting = CountingStorage(repository.storage)
    cold = zm.open(counting)
    cold.explain_manifests()
    counting.reset()
    costs = cold.explain_manifests(costs=True).costs or {}
    requests = [(r.key.partition("/")[0], r.nbytes) for r in counting.log[1:]]
    first = costs["opening"]["requests"]
    opening, last = requests[:first], requests[first:]
    assert sorted(kind for kind, _ in opening) == ["current", "nodes", "snapshots"]
    assert sum(nbytes for _, nbytes in opening) == costs["opening"]["nbytes"]
    assert costs["coordinates"] == {"requests": 0, "nbytes": 0}, (
        "copies of the leaf and the delta came along"
    )
    assert [kind for kind, _ in last] == ["manifests"] * 3, "a delta, and two leaves"
    assert costs["last_step"] == {"requests": 3, "nbytes": sum(nbytes for _, nbytes in last)}
    planned = {"chunk-manifests": {"sets": ["default"]}}
    before = {info.key for info in repository.storage.list()}
    other = repository.explain_manifests(config=planned)
    assert [manifest.refs for manifest in other.manifests] == [90_030]
    assert other.costs is not None
    assert [other.costs[name]["requests"] for name in ("opening", "last_step")] == [3, 0]
    assert {info.key for info in repository.storage.list()} == before, "nobody sees a plan"
