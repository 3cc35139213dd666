"""Where refs lie in real repositories after compactions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import zarr

import zarr_manifests as zm
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
