"""Copies that report: what returned before the commit is in it, and what comes later raises."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import stored
import zarr_manifests as zm
from storages import WrappedStorage
from storages.wrapped import Call
from zarr_manifests import Repository, Session
from zarr_manifests.errors import (
    ConflictError,
    CorruptObjectError,
    FencedError,
    InvalidArgumentError,
    ManifestsError,
    ReadOnlyError,
    SessionClosedError,
    StorageError,
    UnsupportedStorageError,
)
from zarr_manifests.storage import Storage
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import ManifestStore

CHUNKS = 40


class Hooked(WrappedStorage):
    """Runs something before each call and after it."""

    hook: Callable[[Call[Any]], None] = staticmethod(lambda _: None)

    def _around[R](self, call: Call[R]) -> R:
        self.hook(call)
        result = call.run()
        self.hook(call)
        return result


def make(storage: Storage, chunks: int = CHUNKS, config: Any = None) -> Repository:
    repo = zm.create(storage, config)
    with repo.transaction(message="make a") as store:
        zarr.create_array(
            store, name="a", shape=(chunks,), chunks=(1,), dtype="u1", compressors=None
        )
    return repo


def begin(repo: Repository, **options: Any) -> Session:
    return repo.writable_session(copies="report", **options)


def change(store: ManifestStore, chunk: int, value: bytes | None) -> None:
    if value is None:
        store.delete_sync(f"a/c/{chunk}")
    else:
        stored.put(store, f"a/c/{chunk}", value)


def put(store: ManifestStore, chunk: int, value: int) -> None:
    change(store, chunk, bytes([value]))


def values(repo: Repository) -> list[int]:
    found = zarr.open_array(repo.readonly_session().store, path="a", mode="r")[:]
    return [int(value) for value in np.asarray(found)]


def listed(repo: Repository) -> list[str]:
    return [info.key for info in repo.storage.list("reports/")]


@pytest.fixture
def repo() -> Repository:
    return make(MemoryStorage())


def test_whenever_a_copy_writes_during_a_commit_its_chunk_is_in_it_or_it_is_told() -> None:
    """One write before each call to the storage that the commit makes."""
    repo = make(storage := Hooked(MemoryStorage()))
    session = begin(repo)
    twin = copy.deepcopy(session.store)
    put(twin, 0, 1)
    returned, raised, busy = [0], list[int](), list[bool]()

    def write(call: Call[Any]) -> None:
        if busy or len(returned) + len(raised) == CHUNKS:
            return
        busy.append(True)
        number = len(returned) + len(raised)
        try:
            put(twin, number, 1)
            returned.append(number)
        except SessionClosedError:
            raised.append(number)
        busy.clear()

    storage.hook = write
    session.commit("beside it")
    del storage.hook
    assert len(returned) > 1
    assert len(raised) > 1
    found = values(repo)
    assert [number for number in returned if found[number] != 1] == []


def test_the_token_is_gone_for_good_and_nothing_is_committed_unless_that_is_certain() -> None:
    class Keeping(WrappedStorage):
        keeps = False

        def delete_many(self, keys: Any) -> None:
            if not self.keeps:
                super().delete_many(keys)

    repo = make(storage := Keeping(MemoryStorage()))
    session = begin(repo)
    twin = copy.deepcopy(session.store)
    put(twin, 0, 1)
    before = repo.list_branches()
    storage.keeps = True
    with pytest.raises(StorageError):
        session.commit("cannot be")
    assert repo.list_branches() == before
    storage.keeps = False
    put(twin, 1, 2)
    session.commit("now")
    assert values(repo)[:2] == [1, 2]
    with pytest.raises(SessionClosedError):
        put(twin, 2, 3)


def test_retried_tasks_that_wrote_the_same_agree_and_others_are_named(repo: Repository) -> None:
    session = begin(repo)
    one, two = copy.deepcopy(session.store), copy.deepcopy(session.store)
    for store in (one, two):
        put(store, 0, 1)
        store.delete_sync("a/c/1")
    put(one, 3, 1)
    put(two, 3, 2)
    put(one, 4, 1)
    two.delete_sync("a/c/4")
    with pytest.raises(ConflictError, match=r"/a: chunks \[\(3,\), \(4,\)\]"):
        session.commit("which")
    assert values(repo) == [0] * CHUNKS
    with pytest.raises(ConflictError):
        session.commit("still")
    put(session.store, 5, 5)
    session.commit("none of them", discard_unmerged=True)
    assert values(repo)[:6] == [0, 0, 0, 0, 0, 5]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no os.fork")
def test_what_the_session_wrote_since_a_child_was_forked_is_not_replaced_silently(
    tmp_path: Path,
) -> None:
    session = begin(make(LocalStorage(tmp_path)))
    put(session.store, 1, 1)
    go_on, tell = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.read(go_on, 1)
            put(session.store, 0, 1)
        finally:
            os._exit(0)
    put(session.store, 0, 2)
    copy.deepcopy(session.store)
    os.write(tell, b"x")
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(ConflictError, match=r"\[\(0,\)\]"):
        session.commit("which")


def test_chunks_of_an_array_that_the_session_has_deleted_are_a_conflict(repo: Repository) -> None:
    session = begin(repo)
    put(copy.deepcopy(session.store), 0, 2)
    session.store.delete_sync("a/zarr.json")
    with pytest.raises(ConflictError):
        session.commit("which")


@pytest.mark.parametrize(
    "change",
    [
        lambda store: zarr.open_array(store, path="a", mode="r+").resize((50,)),
        lambda store: zarr.create_group(store, path="g"),
        lambda store: stored.put(store, "notes.txt", b"x"),
        lambda store: store.delete_sync("a/zarr.json"),
        lambda store: zarr.open_group(store, mode="r+").__delitem__("a"),
        lambda store: store.set_virtual_refs("a", [[0]], ["memory://x/y"], [0], [0], [1]),
    ],
)
def test_copies_change_nothing_but_chunks(repo: Repository, change: Callable[[Any], Any]) -> None:
    session = begin(repo)
    twin = copy.deepcopy(session.store)
    with pytest.raises(ReadOnlyError, match="fork"):
        change(twin)
    document = twin.get_sync("a/zarr.json")
    twin.set_sync("a/zarr.json", document)  # as libraries do
    twin.delete_sync("no/such/key")
    put(twin, 0, 1)
    session.commit("the chunk")
    assert values(repo)[0] == 1


@pytest.mark.parametrize("lacks", ["list", "delete_many"])
def test_a_storage_that_does_not_list_or_delete_is_refused_at_once(lacks: str) -> None:
    make(inner := MemoryStorage())
    lacking = type("Lacking", (WrappedStorage,), {lacks: lambda *_: iter(())})
    with pytest.raises(UnsupportedStorageError, match="list and delete"):
        begin(zm.open(lacking(inner)))


@pytest.mark.parametrize("end", ["close", "discard", "rebase", "amend"])
def test_however_a_session_goes_on_its_copies_are_told(repo: Repository, end: str) -> None:
    session = begin(repo)
    twin = copy.deepcopy(session.store)
    put(twin, 0, 1)
    with repo.transaction(message="others") as store:
        put(store, 1, 1)
    if end == "close":
        session.close()
    elif end == "discard":
        session.discard_changes()
    elif end == "rebase":
        session.rebase()
    else:
        with pytest.raises(ConflictError):
            session.amend("not the head any more")
    with pytest.raises(SessionClosedError):
        put(twin, 2, 1)
    if end == "rebase":
        session.commit("what came before")
        assert values(repo)[:3] == [1, 1, 0]
    if end == "discard":
        put(copy.deepcopy(session.store), 3, 1)
        session.commit("new ones")
        assert values(repo)[:4] == [0, 1, 0, 1]


def test_without_a_token_copies_are_as_without_the_option() -> None:
    repo = make(storage := Hooked(MemoryStorage()))
    session = begin(repo)
    put(session.store, 0, 1)

    def fail(call: Call[Any]) -> None:
        if call.key.startswith("reports/") and call.op == "create":
            raise StorageError("no")

    storage.hook = fail
    session.commit("stands")
    del storage.hook
    assert values(repo)[0] == 1
    put(copy.deepcopy(session.store), 1, 1)
    with pytest.raises(ManifestsError, match="1 copies"):
        session.commit("would leave it out")


def test_reports_are_collected_with_their_session_and_a_lease_keeps_them(repo: Repository) -> None:
    leased, dead = begin(repo, lease=600), begin(repo)
    for session, number in ((leased, 0), (dead, 1)):
        put(copy.deepcopy(session.store), number, 1)
    with repo.transaction(message="others") as store:
        put(store, 2, 1)
    count = len(listed(repo))
    repo.garbage_collect(timedelta(0))
    assert len(listed(repo)) == count - 2  # token and report of the one that is shut out
    with pytest.raises(FencedError):
        dead.commit("too late")
    leased.commit("kept")
    assert values(repo)[:3] == [1, 0, 1]
    assert repo.verify().ok
    leased.close()
    repo.garbage_collect(timedelta(0))
    assert listed(repo) == []


@pytest.mark.parametrize("damage", ["cut", "long", "foreign"])
def test_a_damaged_report_is_an_error_and_nothing_is_committed(
    repo: Repository, damage: str
) -> None:
    session = begin(repo)
    token = set(listed(repo))
    put(copy.deepcopy(session.store), 0, 1)
    put(copy.deepcopy(session.store), 1, 1)
    one, two = sorted({*listed(repo)} - token)
    data, other = repo.storage.get(one), repo.storage.get(two)
    wrong = {"cut": data[:-3], "long": bytes(1 << 17), "foreign": other}
    repo.storage.put(one, wrong[damage])
    with pytest.raises(CorruptObjectError):
        session.commit("with what")
    assert values(repo) == [0] * CHUNKS
    put(session.store, 2, 2)
    session.commit("without", discard_unmerged=True)
    assert values(repo)[:3] == [0, 0, 2]


# --- in whatever order -------------------------------------------------------------------------

TWO, PACKED = b"2", b"3, in a pack"
CLASH = "a conflict that names the chunk"
WAYS: dict[str, tuple[list[tuple[Any, ...]], Any]] = {
    "over what the session wrote before": (
        [("write", 0, TWO), ("copy",), ("write in copy", 0, 0, PACKED)],
        {0: PACKED, 1: b"1"},
    ),
    "what the session wrote since": (
        [("copy",), ("write", 0, TWO), ("write in copy", 0, 0, PACKED)],
        CLASH,
    ),
    "what the session wrote between two copies": (
        [("copy",), ("write", 0, TWO), ("copy",), ("write in copy", 1, 0, PACKED)],
        CLASH,
    ),
    "the same as the session": (
        [("copy",), ("write", 0, TWO), ("write in copy", 0, 0, TWO)],
        {0: TWO, 1: b"1"},
    ),
    "unset again, which the session had unset before": (
        [("write", 0, None), ("copy",), ("write", 0, TWO), ("write in copy", 0, 0, None)],
        CLASH,
    ),
    "unset in a copy of a copy": (
        [("copy",), ("copy of a copy",), ("write in copy", 1, 0, None)],
        {0: None, 1: b"1"},
    ),
    "both of a copy and of its copy": (
        [
            *(("copy",), ("write in copy", 0, 0, TWO), ("copy of a copy",)),
            ("write in copy", 1, 1, PACKED),
        ],
        {0: TWO, 1: PACKED},
    ),
    "what others have committed": (
        [("copy",), ("write in copy", 0, 0, TWO), ("rival", 0, PACKED)],
        CLASH,
    ),
    "beside what others have committed": (
        [("copy",), ("write in copy", 0, 0, TWO), ("rival", 1, PACKED)],
        {0: TWO, 1: PACKED},
    ),
}
"""By name: who does what, and what is at each chunk once it is committed."""


@pytest.fixture
def two() -> Repository:
    repo = make(MemoryStorage(), 2, {"inline-chunk-bytes": 4})
    with repo.transaction(message="begin") as store:
        for chunk in (0, 1):
            change(store, chunk, b"%d" % chunk)
    return repo


@pytest.mark.parametrize("name", WAYS)
def test_what_copies_report_is_neither_lost_nor_replaced(two: Repository, name: str) -> None:
    steps, expected = WAYS[name]
    session, copies = begin(two), list[ManifestStore]()
    for what, *given in steps:
        match what:
            case "write":
                change(session.store, *given)
            case "copy":
                copies.append(copy.deepcopy(session.store))
            case "copy of a copy":
                copies.append(copy.deepcopy(copies[-1]))
            case "write in copy":
                number, chunk, value = given
                change(copies[number], chunk, value)
                assert stored.get(copies[number], f"a/c/{chunk}") == value
            case "rival":
                with two.transaction(message="of another") as store:
                    change(store, *given)
    if expected == CLASH:
        head = two.list_branches()
        for _ in range(2):
            with pytest.raises(ConflictError, match=r"/a: chunks \[\(0,\)\]"):
                session.commit("which")
        assert two.list_branches() == head
    else:
        session.commit("all of it")
        store = two.readonly_session().store
        assert {chunk: stored.get(store, f"a/c/{chunk}") for chunk in expected} == expected


def test_only_a_commit_that_lands_leaves_out_what_it_was_told_to() -> None:
    """It fails at one of its calls, and the next one is not told to leave anything out."""
    outcomes = set[bytes | None]()
    for failing in range(1, 100):
        repo = make(storage := Hooked(MemoryStorage()))
        session = begin(repo)
        put(session.store, 1, 2)
        put(copy.deepcopy(session.store), 0, 1)
        calls = iter(range(2 * failing))

        def fail(_: Call[Any], calls: Iterator[int] = calls, last: int = 2 * failing - 1) -> None:
            if next(calls, None) == last:
                raise StorageError("planted")

        storage.hook = fail
        with suppress(StorageError):
            session.commit("first", discard_unmerged=True)
        del storage.hook
        ended = next(calls, None) is not None
        with suppress(InvalidArgumentError, SessionClosedError):  # it has landed, or nobody knows
            session.commit("then")
        found = zm.open(repo.storage).readonly_session().store
        outcomes.add(stored.get(found, "a/c/0"))
        assert stored.get(found, "a/c/1") == b"\2"
        if ended:
            break
    assert outcomes == {None, b"\1"}
