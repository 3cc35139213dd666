"""Marks of applications and metadata survive all that is done around them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import zarr

import zarr_manifests as zm
from in_order import in_order
from zarr_manifests import Repository
from zarr_manifests.storage.memory import MemoryStorage

ABOUT = {"title": "carried along", "contacts": ["a", "b"]}
MARKS = {"app": 7, "ä other": 2**63 - 1}


def set_step(repository: Repository, step: int, **options: Any) -> str:
    session = repository.writable_session()
    zarr.open_array(session.store, path="a").attrs["step"] = step
    return session.commit(f"step {step}", **options)


def test_whatever_changes_keeps_marks_and_metadata() -> None:
    storage = MemoryStorage()
    config = {"compaction": {"mode": "manual"}, "inline-chunk-bytes": 0}
    repository = zm.create(storage, config, runtime=in_order())
    repository.metadata(ABOUT)
    with repository.transaction(message="packed") as store:
        zarr.create_array(store, name="a", data=np.arange(9), chunks=(1,))
    for step, mark in enumerate(MARKS.items()):
        set_step(repository, step, txn=mark)
    before = repository.list_branches()["main"]
    set_step(repository, 2, txn=("app", 8))
    repository.reset_branch("main", before, force=True)
    repository.revert(set_step(repository, 3))
    with repository.transaction(message="a pack that is mostly dead") as store:
        zarr.open_array(store, path="a")[:8] = 0
    assert repository.compact(mode="packs").packs_written
    repository.compact(mode="full")
    set_step(repository, 4)
    session = repository.writable_session()
    zarr.open_array(session.store, path="a").attrs["step"] = 5
    session.amend("amended")
    repository.expire_snapshots(keep_last=1)
    repository.garbage_collect(timedelta(0))
    again = zm.open(storage, runtime=in_order())
    assert again.txn_versions() == MARKS
    assert again.metadata() == ABOUT
    assert again.verify().problems == ()
