"""What is acknowledged can be read: no clock, text, number or value makes a root nobody opens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import msgpack
import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from inside import root_of
from zarr_manifests import Repository
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.format.envelope import MAX_MS
from zarr_manifests.format.root import ROOT_KEY
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.testing import in_order

LAST = datetime.fromtimestamp(MAX_MS / 1000, UTC)
FIRST = datetime(1970, 1, 1, tzinfo=UTC)
NOTHING = timedelta(0)


def check(repo: Repository) -> Repository:
    """The repository as a process opens it that has seen nothing of it; all of it is sound."""
    fresh = zm.open(repo.storage)
    assert fresh.verify().problems == ()
    assert len(list(fresh.ancestry())) >= 1
    return fresh


@pytest.mark.parametrize(
    ("now_ms", "said"),
    [
        (-1, FIRST),
        (-(2**70), FIRST),
        (MAX_MS, LAST),
        (MAX_MS + 1, LAST),
        (2**63, LAST),
        (2**70, LAST),
    ],
)
def test_a_clock_that_is_far_off_makes_nothing_unreadable(now_ms: int, said: datetime) -> None:
    runtime = in_order(now_ms=lambda: now_ms)
    repo = zm.create(MemoryStorage(), runtime=runtime)
    for i in range(3):
        with repo.transaction("main", message=f"commit {i}") as store:
            zarr.create_array(store, name=f"a{i}", data=np.arange(4) + i)
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
    repo.storage.delete_many([ROOT_KEY])
    assert zm.recover(repo.storage, runtime=runtime).branches["main"]
    check(repo)


def test_times_are_clamped_once_however_often_a_runtime_is_made() -> None:
    runtime = replace(replace(SYSTEM, now_ms=lambda: -5), sleep=lambda seconds: None)
    assert runtime.now_ms() == 0
    assert runtime.now_ms is replace(runtime, jitter=lambda limit_s: 0.0).now_ms


NOT_TEXT = "\udc80ab"


def test_a_name_that_is_no_text_is_logged_as_far_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZARR_MANIFESTS_WHO", NOT_TEXT + "x" * 1000)
    repo = zm.create(MemoryStorage())
    with repo.transaction("main", message="m") as store:
        zarr.create_group(store)
    repo.create_tag("v1")
    said = "?ab" + "x" * 97
    assert {entry.by for entry in check(repo).ops_log()} == {said}
    repo.storage.delete_many([ROOT_KEY])
    zm.recover(repo.storage)
    assert next(check(repo).ops_log()).by == said


@pytest.mark.parametrize("owner", [NOT_TEXT, "\N{SNOWMAN}" * 1000])
def test_an_owner_of_any_text_can_be_read(owner: str) -> None:
    repo = zm.create(MemoryStorage())
    with repo.lease(repo.list_branches()["main"], owner=owner):
        (lease,) = root_of(check(repo)).leases
    assert lease.owner == owner.replace("\udc80", "?")[:200]


@pytest.mark.parametrize("owner", [None, 7, b"me", ["me"]])
def test_an_owner_that_is_no_text_is_refused(owner: Any) -> None:
    """It was written as it came, and nobody could open the repository any more."""
    repo = zm.create(MemoryStorage())
    with (
        pytest.raises(InvalidArgumentError, match="owner"),
        repo.lease(repo.list_branches()["main"], owner=owner),
    ):
        raise AssertionError("unreachable")
    check(repo)


OF_NUMPY: dict[str, tuple[Any, Any]] = {
    "int": (np.int64(-3), -3),
    "uint": (np.uint64(2**64 - 1), 2**64 - 1),
    "float": (np.float32(0.5), 0.5),
    "longdouble": (np.longdouble(0.5), 0.5),
    "bool": (np.bool(True), True),
    "text": (np.str_("x"), "x"),
    "time": (np.datetime64("2020-02-03T04:05"), "2020-02-03T04:05"),
    "inside": ({"a": [np.int8(1), (np.float64(2.5),)]}, {"a": [1, [2.5]]}),
    "as a name": ({np.int64(3): 1}, {3: 1}),
}


@pytest.mark.parametrize("name", OF_NUMPY)
def test_scalars_of_numpy_are_kept_as_what_they_are(name: str) -> None:
    given, kept = OF_NUMPY[name]
    repo = zm.create(MemoryStorage())
    with repo.transaction("main", message="m", metadata={"value": given}) as store:
        zarr.create_group(store)
    for there in (repo, check(repo)):
        (found,) = next(there.ancestry()).metadata.values()
        assert found == kept
        assert type(found) is type(kept)


NOT_KEPT: dict[str, Any] = {
    "a list": [1],
    "a text": "ab",
    "a number": 1,
    "pairs": [("a", 1)],
    "not text": {"a": NOT_TEXT},
    "a name that is not text": {NOT_TEXT: 1},
    "a name deep inside": {"a": [{NOT_TEXT: 1}]},
    "an array": {"a": np.arange(3)},
    "a duration": {"a": np.timedelta64(3, "D")},
    "a date": {"a": datetime.now(UTC)},
    "a complex number": {"a": np.complex128(1)},
    "too many lists": {"a": [[]] * 100_000},
    "too large a number": {"a": 2**64},
}


@pytest.mark.parametrize("name", NOT_KEPT)
def test_metadata_that_cannot_be_kept_is_told_so(name: str) -> None:
    repo = zm.create(MemoryStorage())
    session = repo.writable_session("main")
    zarr.create_group(session.store)
    with pytest.raises(InvalidArgumentError, match="metadata"):
        session.commit("m", NOT_KEPT[name])
    session.commit("m", {"a": msgpack.Timestamp(5)})
    check(repo)


NAMES: dict[str, Callable[[Repository, str], Any]] = {
    "create_branch": lambda repo, text: repo.create_branch(text),
    "create_tag": lambda repo, text: repo.create_tag(text),
    "message": lambda repo, text: repo.writable_session("main").amend(text),
    "group": lambda repo, text: zarr.create_group(repo.writable_session("main").store, path=text),
    "restore": zm.recover,
}


@pytest.mark.parametrize("name", NAMES)
def test_other_texts_that_are_none_are_refused(name: str) -> None:
    repo = zm.create(MemoryStorage())
    with repo.transaction("main", message="m") as store:
        zarr.create_group(store, path="g")
    with pytest.raises(InvalidArgumentError):
        NAMES[name](repo, NOT_TEXT)
    check(repo)
