"""A head that goes while something is done to it, or read of it, is not told as damage.

The branch is reset and its old head collected, before each storage call in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from zarr_manifests import Repository
from zarr_manifests.engine.history import follow as following
from zarr_manifests.error_cases import FencedError, ObjectNotFoundError
from zarr_manifests.errors import CorruptObjectError
from zarr_manifests.repository import build_index
from zarr_manifests.storage import Storage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of
from zarr_manifests.testing import InterruptingStorage, copy_of, in_order

CONFIG = {"inline-chunk-bytes": 0, "compaction": {"mode": "manual"}}
CELLS = 8


def noise(seed: int) -> str:
    """So long and so varied that no copy of it is carried along."""
    return np.random.default_rng(seed).bytes(20_000).hex()


def prepared() -> tuple[MemoryStorage, str]:
    """A repository whose head needs many objects, and the id of what it was before."""
    storage = MemoryStorage()
    repository = zm.create(storage, CONFIG, runtime=in_order())
    with repository.transaction(message="make a") as store:
        array = zarr.create_array(
            store, name="a", shape=(CELLS,), chunks=(1,), dtype="i8", compressors=None
        )
        array[:] = 1
    base = repository.readonly_session().snapshot_id
    for value in range(2):
        with repository.transaction(message="on top") as store:
            zarr.open_group(store).attrs["large"] = noise(value)
            zarr.open_array(store, path="a")[value : value + 4] = value  # packs partly dead
        if not value:
            repository.compact(mode="full")
    return storage, base


def opened(storage: Storage) -> Repository:
    return zm.open(storage, runtime=in_order())


OPERATIONS: dict[str, Callable[[Repository], Any]] = {
    "totals": lambda repository: repository.du(estimate=True),
    "du of one": lambda repository: repository.du(path="a"),
    "build_index": build_index,
    "compact": lambda repository: repository.compact(mode="full"),
    "dry run": lambda repository: repository.compact(mode="full", dry_run=True),
    "repack": lambda repository: repository.compact(mode="packs", min_live=1.0),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_head_that_goes_meanwhile_is_not_told_as_damage(name: str) -> None:
    operation, (made, base) = OPERATIONS[name], prepared()

    def race(number: int) -> int:
        storage = copy_of(made)

        def reset() -> None:
            others = opened(storage)
            others.reset_branch("main", base, force=True)
            others.expire_snapshots(keep_last=1)
            assert others.garbage_collect(timedelta(0)).objects["snapshots"] >= 2

        racing = InterruptingStorage(storage, reset)
        repository = opened(racing)
        racing.arm(number)
        try:
            operation(repository)
        except FencedError:  # its own objects may have gone with the head
            assert name in ("build_index", "repack")
        calls = len(racing.ops)
        if number:
            after = opened(storage)
            assert np.asarray(zarr.open_array(after.readonly_session().store, path="a")).sum() == 8
            assert after.verify().problems == ()
        return calls

    calls = race(0)
    assert calls >= 3
    for number in range(1, calls + 1):
        race(number)


@pytest.mark.parametrize("how", ["refresh", "follow"])
def test_a_head_that_goes_while_a_reader_goes_on_to_it_is_not_told_as_damage(how: str) -> None:
    made, base = prepared()

    def race(number: int) -> int:
        storage = copy_of(made)
        opened(storage).reset_branch("main", base, force=True)

        def reset() -> None:
            others = opened(storage)
            others.reset_branch("main", base, force=True)
            others.expire_snapshots(keep_last=1)
            others.garbage_collect(timedelta(0))

        racing = InterruptingStorage(storage, reset)
        repository = opened(racing)
        follow = {"follow": True, "follow_interval": timedelta(0)} if how == "follow" else {}
        session = repository.readonly_session("main", **follow)  # type: ignore[arg-type]
        with opened(storage).transaction(message="on top") as store:
            zarr.open_group(store).attrs["large"] = noise(3)
            zarr.open_array(store, path="a")[0] = 0
        racing.arm(number)
        if how == "refresh":
            session.rebase()
        assert np.asarray(zarr.open_array(session.store, path="a", mode="r")).sum() in (7, 8)
        return len(racing.ops)

    calls = race(0)
    for number in range(1, calls + 1):
        race(number)


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_a_head_in_history_lacks_is_damage(name: str) -> None:
    made, _ = prepared()
    view = contents_of(opened(made).readonly_session().store).view
    made.delete_many([view.snapshot.log.key])
    with pytest.raises(CorruptObjectError, match="not there"):
        OPERATIONS[name](opened(made))


def test_what_is_missing_here_and_there_by_turns_is_damage() -> None:
    """What is told first may differ from one try to the next; it ends all the same."""
    tries = 0

    def attempt() -> None:
        nonlocal tries
        tries += 1
        missing = f"deltas/{tries % 2}"
        raise CorruptObjectError(f"{missing} is not there") from ObjectNotFoundError(missing)

    with pytest.raises(CorruptObjectError, match="not there"):
        following.opened(attempt)
    assert tries == 3
