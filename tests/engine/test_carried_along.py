"""Marks, merges and features, which nothing here writes, survive all that is done around them.

So do zone maps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from inside import change_root, context_of, root_of
from zarr_manifests import Repository
from zarr_manifests.errors import UnsupportedFormatError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.marks import MarksPage
from zarr_manifests.format.root import FEATURES
from zarr_manifests.format.snapshot import Snapshot
from zarr_manifests.ids import snapshot_id_of
from zarr_manifests.repository import build_index
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import workspace_of
from zarr_manifests.testing import in_order
from zoned import counting, numbers, write

MARKS = {"app": 7, "ä other": 2**63 - 1}
IN_PAGE = {f"application {i}": i for i in range(400)} | {"app": 3}
ABOUT = {"title": "carried along", "contacts": ["a", "b"]}


@pytest.fixture
def storage() -> MemoryStorage:
    """The head of `main` is a merge with marks of its own and in a page."""
    storage = MemoryStorage()
    config = {"compaction": {"mode": "manual"}, "inline-chunk-bytes": 0}
    repository = zm.create(storage, config, runtime=in_order())
    with repository.transaction(message="make") as store:
        zarr.create_array(store, name="a", shape=(8,), chunks=(2,), dtype="i8")
    set_step(repository, 1)
    keys = workspace_of(repository.writable_session().store).keys
    page = MarksPage(IN_PAGE).encode()
    at = BlobRef.to(keys.next("pages"), page)
    storage.put(at.key, page)
    head = head_of(storage)
    key = keys.next("snapshots")
    merge = replace(
        head,
        snapshot_id=snapshot_id_of(key),
        marks=MARKS,
        marks_page=at,
        merged=(head.snapshot_id, head.snapshot_id),
    )
    storage.put(key, merge.encode())
    moved = BlobRef.to(key, merge.encode())
    change_root(
        repository,
        "commit append",
        lambda root: replace(
            root,
            features=FEATURES,
            metadata=ABOUT,
            branches={"main": replace(root.branches["main"], head=moved)},
        ),
        merge.snapshot_id,
    )
    return storage


def set_step(repository: Repository, step: int, branch: str = "main") -> str:
    session = repository.writable_session(branch)
    zarr.open_array(session.store, path="a").attrs["step"] = step
    zarr.open_array(session.store, path="a")[:2] = step
    return session.commit(f"step {step}")


def head_of(storage: MemoryStorage, branch: str = "main") -> Snapshot:
    head = root_of(storage).branches[branch].head
    return Snapshot.from_object(storage.get(head.key), head)


def opened(storage: MemoryStorage) -> Repository:
    return zm.open(storage, runtime=in_order())


def amend(repository: Repository) -> None:
    session = repository.writable_session()
    zarr.open_array(session.store, path="a").attrs["step"] = 5
    session.amend("amended")


def revert(repository: Repository) -> None:
    repository.revert(set_step(repository, 2))


def cherry_pick(repository: Repository) -> None:
    first = [info.snapshot_id for info in repository.ancestry()][1]
    repository.create_branch("side", first)
    session = repository.writable_session("side")
    session.store.set_sync("note", zarr.core.buffer.cpu.Buffer.from_bytes(b"on the side"))
    repository.cherry_pick(session.commit("on the side"))


def repack(repository: Repository) -> None:
    """Make a pack that is mostly dead, and move the rest out of it."""
    with repository.transaction(message="packed") as store:
        zarr.create_array(store, name="p", data=np.arange(9), chunks=(1,))
    with repository.transaction(message="mostly dead") as store:
        zarr.open_array(store, path="p")[:8] = 0
    report = repository.compact(mode="packs")
    assert report.packs_written
    assert report.snapshot_id is not None


def reset(repository: Repository) -> None:
    before = repository.list_branches()["main"]
    set_step(repository, 2)
    repository.reset_branch("main", before, force=True)


def expire(repository: Repository) -> None:
    set_step(repository, 2)
    repository.expire_snapshots(keep_last=1)


CHANGES: dict[str, tuple[Callable[[Repository], Any], bool]] = {
    "commit": (lambda repository: set_step(repository, 2), False),
    "amend": (amend, True),
    "compact": (lambda repository: repository.compact(mode="full"), False),
    "repack": (repack, False),
    "revert": (revert, False),
    "cherry-pick": (cherry_pick, False),
    "tag": (lambda repository: repository.create_tag("v1"), True),
    "reset": (reset, True),
    "index": (build_index, True),
    "expire": (expire, False),
}


@pytest.mark.parametrize("what", CHANGES)
def test_whatever_changes_keeps_marks_and_features(what: str, storage: MemoryStorage) -> None:
    before = head_of(storage)
    change, is_still_a_merge = CHANGES[what]
    change(opened(storage))
    after = head_of(storage)
    assert (after.marks, after.marks_page) == (MARKS, before.marks_page)
    assert after.merged == (before.merged if is_still_a_merge else None)
    assert root_of(storage).features == FEATURES
    assert root_of(storage).metadata == ABOUT
    repository = opened(storage)
    repository.garbage_collect(timedelta(0))
    assert repository.verify().problems == ()
    assert after.marks_page is not None
    page = storage.get(after.marks_page.key)
    assert MarksPage.from_object(page, after.marks_page).marks == IN_PAGE


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("what", CHANGES)
def test_whatever_changes_keeps_zone_maps(what: str, leaves: bool, storage: MemoryStorage) -> None:
    repository = opened(storage)
    if leaves:
        write(session := repository.writable_session(), 1, 4, 3)
        session.commit("with entries")
        repository.compact(mode="full")
    session = repository.writable_session()
    write(session, 0 if leaves else 1, 1 if leaves else 4, 4)
    session.commit("with entries, too")
    CHANGES[what][0](opened(storage))
    repository = opened(storage)
    repository.garbage_collect(timedelta(0))
    assert {1, 2, 3} <= {*numbers(counting(repository))}
    assert repository.verify().problems == ()


def test_an_overtaken_commit_takes_the_marks_of_the_tip_it_lands_on(storage: MemoryStorage) -> None:
    repository = opened(storage)
    before = head_of(storage)
    assert before.parent is not None
    repository.create_tag("merge", before.snapshot_id)
    repository.reset_branch("main", snapshot_id_of(before.parent.key), force=True)
    session = repository.writable_session()
    assert not head_of(storage).marks
    session.store.set_sync("note", zarr.core.buffer.cpu.Buffer.from_bytes(b"late"))
    opened(storage).reset_branch("main", before.snapshot_id)
    session.commit("late")
    after = head_of(storage)
    assert (after.marks, after.marks_page, after.merged) == (MARKS, before.marks_page, None)


def test_recovery_and_restoring_keep_features(storage: MemoryStorage) -> None:
    version = root_of(storage).version
    set_step(opened(storage), 2)
    zm.recover(opened(storage), version)
    assert root_of(storage).features == FEATURES
    assert root_of(storage).metadata == ABOUT
    storage.put("current", b"damaged")
    zm.recover(storage)
    assert root_of(storage).features == FEATURES
    assert root_of(storage).metadata == ABOUT
    assert head_of(storage).marks == MARKS


def test_a_marks_page_that_is_damaged_or_missing_is_found(storage: MemoryStorage) -> None:
    at = head_of(storage).marks_page
    assert at is not None
    data = storage.get(at.key)
    storage.put(at.key, data[:-1] + bytes([data[-1] ^ 1]))
    assert [problem.key for problem in opened(storage).verify().problems] == [at.key]
    storage.delete_many([at.key])
    assert [problem.key for problem in opened(storage).verify().problems] == [at.key]


def test_an_expired_marks_page_is_collected(storage: MemoryStorage) -> None:
    repository = opened(storage)
    before = head_of(storage)
    assert before.parent is not None
    assert before.marks_page is not None
    repository.reset_branch("main", snapshot_id_of(before.parent.key), force=True)
    repository.garbage_collect(timedelta(0))
    assert before.marks_page.key not in {info.key for info in storage.list("pages/")}


def test_an_unknown_feature_is_refused_by_all_that_open(storage: MemoryStorage) -> None:
    root = root_of(storage)
    object.__setattr__(root, "features", (*FEATURES, "time-travel"))
    storage.put("current", root.encode())
    before = {info.key: storage.get(info.key) for info in storage.list()}
    for call in (
        lambda: zm.open(storage),
        lambda: zm.open(storage, create=True),
        lambda: zm.recover(storage),
        lambda: context_of(zm.open(storage)),
    ):
        with pytest.raises(UnsupportedFormatError, match=r"\['time-travel'\]"):
            call()
    assert {info.key: storage.get(info.key) for info in storage.list()} == before
