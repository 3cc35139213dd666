"""What is acknowledged can be read: no clock, text, number or value makes a root nobody opens."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgpack
import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from in_order import in_order
from stored import array_document, put
from zarr_manifests import Repository
from zarr_manifests.errors import InvalidArgumentError, UnsupportedFormatError
from zarr_manifests.storage.memory import MemoryStorage

LAST = datetime.fromtimestamp(253_402_300_799.999, UTC)
FIRST = datetime(1970, 1, 1, tzinfo=UTC)
NOTHING = timedelta(0)


def check(repo: Repository) -> Repository:
    """The repository as a process opens it that has seen nothing of it; all of it is sound."""
    fresh = zm.open(repo.storage)
    assert fresh.verify().problems == ()
    assert len(list(fresh.ancestry())) >= 1
    return fresh


@pytest.mark.parametrize(("now_ms", "said"), [(-1, FIRST), (2**63, LAST), (2**70, LAST)])
def test_a_clock_that_is_far_off_makes_nothing_unreadable(now_ms: int, said: datetime) -> None:
    runtime = in_order(now_ms=lambda: now_ms)
    repo = zm.create(MemoryStorage(), runtime=runtime)
    for i in range(3):
        with repo.transaction("main", message=f"commit {i}") as store:
            zarr.create_group(store, path=f"g{i}")
    head = repo.list_branches()["main"]
    repo.create_tag("v1", head)
    with repo.lease(head, timedelta(days=366)):
        repo.create_branch("dev")
        check(repo)
    repo.compact()
    repo.expire_snapshots(1, NOTHING)
    repo.garbage_collect(NOTHING)
    fresh = check(repo)
    assert {info.written_at for info in fresh.ancestry()} == {said}
    assert {entry.at for entry in fresh.ops_log()} == {said}
    repo.storage.delete_many(["current"])
    assert zm.recover(repo.storage, runtime=runtime).branches["main"]
    check(repo)


NOT_TEXT = "\udc80ab"


OF_NUMPY: dict[str, tuple[Any, Any]] = {
    "int": (np.int64(-3), -3),
    "float": (np.float32(0.5), 0.5),
    "text": (np.str_("x"), "x"),
    "time": (np.datetime64("2020-02-03T04:05"), "2020-02-03T04:05"),
    "inside": ({"a": [np.int8(1), (np.float64(2.5),)]}, {"a": [1, [2.5]]}),
}


@pytest.mark.parametrize(("given", "kept"), OF_NUMPY.values(), ids=OF_NUMPY)
def test_scalars_of_numpy_are_kept_as_what_they_are(given: Any, kept: Any) -> None:
    repo = zm.create(MemoryStorage())
    with repo.transaction("main", message="m", metadata={"value": given}) as store:
        zarr.create_group(store)
    for there in (repo, check(repo)):
        (found,) = next(there.ancestry()).metadata.values()
        assert found == kept
        assert type(found) is type(kept)


NOT_KEPT: dict[str, Any] = {
    "a list": [1],
    "not text": {"a": NOT_TEXT},
    "a name deep inside": {"a": [{NOT_TEXT: 1}]},
    "an array": {"a": np.arange(3)},
    "too many lists": {"a": [[]] * 100_000},
    "too large a number": {"a": 2**64},
    "an extension of msgpack": {"a": msgpack.Timestamp(5)},
}


@pytest.mark.parametrize("name", NOT_KEPT)
def test_metadata_that_cannot_be_kept_is_told_so(name: str) -> None:
    repo = zm.create(MemoryStorage())
    session = repo.writable_session("main")
    zarr.create_group(session.store)
    with pytest.raises(InvalidArgumentError, match="metadata"):
        session.commit("m", NOT_KEPT[name])
    session.commit("m", {"a": [2.5, {"b": None}]})
    check(repo)


NAMES: dict[str, Callable[[Repository, str], Any]] = {
    "create_branch": lambda repo, text: repo.create_branch(text),
    "message": lambda repo, text: repo.writable_session("main").amend(text),
    "group": lambda repo, text: zarr.create_group(repo.writable_session("main").store, path=text),
    "owner": lambda repo, _: repo.lease(repo.list_branches()["main"], owner=None).__enter__(),
}


@pytest.mark.parametrize("name", NAMES)
def test_other_texts_that_are_none_are_refused(name: str) -> None:
    repo = zm.create(MemoryStorage())
    with repo.transaction("main", message="m") as store:
        zarr.create_group(store, path="g")
    with pytest.raises(InvalidArgumentError):
        NAMES[name](repo, NOT_TEXT)
    check(repo)


@pytest.mark.parametrize(
    "changes",
    [
        {"chunk_grid": {"name": "spiral"}},
        {"chunk_key_encoding": {"name": "fanout"}},
        {"storage_transformers": [{"name": "of-keys"}]},
        {"node_type": "table"},
        {"zarr_format": 4},
    ],
)
def test_an_array_stays_as_it_is_if_its_next_document_is_refused(changes: dict[str, Any]) -> None:
    store = zm.create(MemoryStorage()).writable_session().store
    zarr.create_array(store, name="a", shape=(4,), chunks=(2,), dtype="u1")[:] = 7
    with pytest.raises(UnsupportedFormatError):
        put(store, "a/zarr.json", array_document((4,), **changes))
    assert zarr.open_array(store, path="a")[:].tolist() == [7] * 4
