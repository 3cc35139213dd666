"""Copies that report: what returned before the commit is in it, and what comes later raises."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.buffer import cpu

import zarr_manifests as zm
from zarr_manifests import Repository, Session
from zarr_manifests.engine.edit import reporting_copies as reports
from zarr_manifests.error_cases import FencedError, UnsupportedStorageError
from zarr_manifests.errors import (
    ConflictError,
    CorruptObjectError,
    InvalidArgumentError,
    ManifestsError,
    ReadOnlyError,
    SessionClosedError,
    StorageError,
)
from zarr_manifests.storage import Storage
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import ManifestStore, contents_of, workspace_of
from zarr_manifests.testing import CountingStorage, WrappedStorage
from zarr_manifests.testing.wrapped import Call

CHUNKS = 40


class Hooked(WrappedStorage):
    """Runs something before a call, and after it, as long as there is something to run."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self.before: Callable[[Call[Any]], None] | None = None
        self.after: Callable[[Call[Any]], None] | None = None

    def _around[R](self, call: Call[R]) -> R:
        if self.before is not None:
            self.before(call)
        result = call.run()
        if self.after is not None:
            self.after(call)
        return result

    def list(self, prefix: str = "", after: str = "") -> Iterator[Any]:
        return iter([*super().list(prefix, after)])


def make(storage: Storage, **config: Any) -> Repository:
    repo = zm.create(storage, config or None)
    with repo.transaction(message="make a") as store:
        zarr.create_array(
            store, name="a", shape=(CHUNKS,), chunks=(1,), dtype="u1", compressors=None
        )
    return repo


def begin(repo: Repository, **options: Any) -> Session:
    return repo.writable_session(copies="report", **options)


def put(store: ManifestStore, chunk: int, value: int) -> None:
    store.set_sync(f"a/c/{chunk}", cpu.Buffer.from_bytes(bytes([value])))


def values(repo: Repository) -> list[int]:
    found = zarr.open_array(repo.readonly_session().store, path="a", mode="r")[:]
    return [int(value) for value in np.asarray(found)]


def listed(repo: Repository) -> list[str]:
    return [info.key for info in repo.storage.list("reports/")]


@pytest.fixture
def repo() -> Repository:
    return make(MemoryStorage())


# --- what is in the commit ---------------------------------------------------------------------


def test_what_copies_wrote_and_unset_is_in_the_commit(tmp_path: Path) -> None:
    repo = make(LocalStorage(tmp_path))
    with repo.transaction(message="some") as store:
        zarr.open_array(store, path="a")[:4] = 9
    session = begin(repo)
    put(session.store, 5, 5)
    pickled = pickle.dumps(session.store)
    one, two = pickle.loads(pickled), pickle.loads(pickled)
    put(one, 0, 1)
    zarr.open_array(two, path="a", mode="r+")[1] = 0  # the fill value: the chunk goes
    put(two, 7, 6)
    put(two, 7, 7)  # the later one wins
    again = pickle.loads(pickle.dumps(two))  # a copy of a copy
    put(again, 8, 8)
    assert (values(repo)[:2], again.get_sync("a/c/7").to_bytes()) == ([9, 9], b"\x07")
    session.commit("all of it")
    assert values(repo)[:9] == [1, 0, 9, 9, 0, 5, 0, 7, 8]
    assert session.store.get_sync("a/c/1") is None
    assert repo.verify().ok
    put(pickle.loads(pickle.dumps(session.store)), 9, 9)  # and so it goes on
    session.commit("more")
    assert values(repo)[8:10] == [8, 9]


def test_chunks_of_any_size_have_an_object_each(repo: Repository) -> None:
    session = begin(repo)
    twin = copy.deepcopy(session.store)
    for number in range(3):
        put(twin, number, number + 1)
    twin.set_sync("a/c/3", cpu.Buffer.from_bytes(b""))
    of = {key.split("/")[1] for key in listed(repo)} - {workspace_of(session.store).keys.session_id}
    assert len(of) == 1
    written = [info for info in repo.storage.list("chunks/") if info.key.split("/")[1] in of]
    assert len(written) == 4
    session.commit("small ones")
    assert [session.store.get_sync(f"a/c/{n}").to_bytes() for n in range(3)] == [
        bytes([n + 1]) for n in range(3)
    ]
    assert session.store.get_sync("a/c/3").to_bytes() == b""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no os.fork")
def test_what_a_forked_child_wrote_is_in_the_commit(tmp_path: Path) -> None:
    session = begin(repo := make(LocalStorage(tmp_path)))
    child = os.fork()
    if not child:
        try:
            put(session.store, 0, 3)
            put(pickle.loads(pickle.dumps(session.store)), 1, 4)
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    session.commit("of the child")
    assert values(repo)[:2] == [3, 4]


def test_what_copies_wrote_is_made_durable_before_the_commit(tmp_path: Path) -> None:
    storage = Hooked(LocalStorage(tmp_path))
    session = begin(make(storage))
    put(copy.deepcopy(session.store), 0, 1)
    done: list[tuple[str, tuple[str, ...]]] = []
    storage.before = lambda call: done.append((call.op, call.keys))
    session.commit("durable")
    (swap,) = (i for i, (op, _) in enumerate(done) if op == "cas")
    synced = {key for op, keys in done[:swap] if op == "sync" for key in keys}
    (written,) = (info.key for info in storage.list("chunks/") if info.nbytes == 1)
    assert written in synced


# --- the two orders that it rests on -----------------------------------------------------------


def test_whenever_a_copy_writes_during_a_commit_its_chunk_is_in_it_or_it_is_told() -> None:
    """One write before each call to the storage that the commit makes."""
    storage = Hooked(MemoryStorage())
    repo = make(storage)
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

    storage.before = storage.after = write
    session.commit("beside it")
    storage.before = storage.after = None
    assert len(returned) > 1
    assert len(raised) > 1
    found = values(repo)
    assert [number for number in returned if found[number] != 1] == []


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("calls", range(1, 5))
def test_whenever_a_commit_comes_during_a_write_its_chunk_is_in_it_or_it_is_told(
    when: str, calls: int
) -> None:
    """A commit at each call to the storage that a write in a copy makes."""
    storage = Hooked(MemoryStorage())
    repo = make(storage)
    session = begin(repo)
    put(session.store, 1, 1)
    twin = copy.deepcopy(session.store)
    put(twin, 2, 2)
    seen: list[str] = []

    def commit(call: Call[Any]) -> None:
        seen.append(call.op)
        if len(seen) == calls:
            storage.before = storage.after = None
            session.commit("amid it")

    setattr(storage, when, commit)
    try:
        put(twin, 0, 3)
        returned = True
    except SessionClosedError:
        returned = False
    storage.before = storage.after = None
    if calls == 4:  # there is no such call
        assert seen == ["create", "create", "head"]
        return
    assert values(repo)[1:3] == [1, 2]
    assert not returned or values(repo)[0] == 3
    assert returned == (when == "after" and calls == 3)


def test_the_token_is_gone_for_good_and_nothing_is_committed_unless_that_is_certain() -> None:
    class Keeping(Hooked):
        keeps = False

        def delete_many(self, keys: Any) -> None:
            if not self.keeps:
                super().delete_many(keys)

    storage = Keeping(MemoryStorage())
    repo = make(storage)
    session = begin(repo)
    twin = copy.deepcopy(session.store)
    put(twin, 0, 1)
    before = repo.list_branches()
    storage.keeps = True
    with pytest.raises(StorageError, match="has not deleted"):
        session.commit("cannot be")
    assert repo.list_branches() == before
    storage.keeps = False
    put(twin, 1, 2)
    session.commit("now")
    assert values(repo)[:2] == [1, 2]
    token = workspace_of(session.store).token
    with pytest.raises(SessionClosedError):
        put(twin, 2, 3)
    assert token in listed(repo)


# --- commits that fail -------------------------------------------------------------------------


def test_a_commit_that_failed_can_be_made_again_and_copies_stay_shut_out() -> None:
    storage = Hooked(MemoryStorage())
    repo = make(storage)
    session = begin(repo)
    twin = copy.deepcopy(session.store)
    put(twin, 0, 1)

    def fail(call: Call[Any]) -> None:
        if call.key.startswith("deltas/"):
            raise StorageError("no")

    storage.before = fail
    with pytest.raises(StorageError):
        session.commit("fails")
    storage.before = None
    with pytest.raises(SessionClosedError):
        put(twin, 1, 2)
    put(session.store, 3, 4)
    session.commit("again")
    assert values(repo)[:4] == [1, 0, 0, 4]  # what raised may be in it, and is not


def test_a_commit_that_failed_has_not_discarded_what_copies_reported(repo: Repository) -> None:
    session = begin(repo)
    put(copy.deepcopy(session.store), 0, 1)
    with pytest.raises(InvalidArgumentError, match="nothing to commit"):
        session.commit("without them nothing", discard_unmerged=True)
    session.commit("with them")
    assert values(repo)[0] == 1


def test_a_conflict_with_others_is_resolved_by_a_second_commit(repo: Repository) -> None:
    session = begin(repo)
    put(copy.deepcopy(session.store), 0, 1)
    with repo.transaction(message="others") as store:
        put(store, 0, 2)
    with pytest.raises(ConflictError, match=r"/a: chunks \[\(0,\)\]"):
        session.commit("conflict")
    session.commit("mine", rebase="ours")
    assert values(repo)[0] == 1


def test_the_same_bytes_of_others_conflict_since_what_a_copy_read_is_not_known(
    repo: Repository,
) -> None:
    session = begin(repo)
    twin = copy.deepcopy(session.store)
    put(twin, 0, twin.get_sync("a/c/0") is None)
    with repo.transaction(message="others count, too") as store:
        put(store, 0, 1)
    with pytest.raises(ConflictError):
        session.commit("both have counted to one")


# --- different bytes ---------------------------------------------------------------------------


def test_retried_tasks_that_wrote_the_same_agree_and_others_are_named(repo: Repository) -> None:
    session = begin(repo)
    pickled = session.store
    one, two = copy.deepcopy(pickled), copy.deepcopy(pickled)
    for store in (one, two):
        put(store, 0, 1)
        store.delete_sync("a/c/1")
    put(one, 3, 1)
    put(two, 3, 2)
    put(one, 4, 1)
    two.delete_sync("a/c/4")
    with pytest.raises(ConflictError, match=r"/a: chunks \[\(3,\), \(4,\)\]: .*two copies"):
        session.commit("which")
    assert values(repo) == [0] * CHUNKS
    with pytest.raises(ConflictError):
        session.commit("still")
    put(session.store, 5, 5)
    session.commit("none of them", discard_unmerged=True)
    assert values(repo)[:6] == [0, 0, 0, 0, 0, 5]


def test_what_the_session_wrote_meanwhile_is_not_replaced_silently(repo: Repository) -> None:
    session = begin(repo)
    put(session.store, 0, 1)
    put(session.store, 1, 1)
    twin = copy.deepcopy(session.store)
    put(twin, 0, 2)  # over what it began with
    put(twin, 1, 2)
    put(session.store, 1, 3)
    later = copy.deepcopy(session.store)
    put(session.store, 2, 3)
    put(later, 2, 4)
    with pytest.raises(ConflictError, match=r"\[\(1,\), \(2,\)\]"):
        session.commit("which")
    put(session.store, 1, 2)
    put(session.store, 2, 4)
    session.commit("agreed")
    assert values(repo)[:3] == [2, 2, 4]


def test_what_the_session_wrote_since_its_first_pickling_counts_though_nothing_was_before(
    repo: Repository,
) -> None:
    session = begin(repo)
    early = copy.deepcopy(session.store)
    put(session.store, 0, 2)
    copy.deepcopy(session.store)
    put(early, 0, 1)
    with pytest.raises(ConflictError, match=r"\[\(0,\)\]"):
        session.commit("which")


def test_what_is_written_while_another_thread_pickles_for_the_first_time_counts(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write and a second pickling come whenever the first one gives the lock up."""
    session = begin(repo)
    contents = contents_of(session.store)
    lock = contents.lock

    class Yielding:
        held = 0

        def __enter__(self) -> None:
            lock.__enter__()
            self.held += 1

        def __exit__(self, *error: Any) -> None:
            self.held -= 1
            lock.__exit__(*error)
            if not self.held:
                monkeypatch.setattr(contents, "lock", lock)
                put(session.store, 0, 2)
                copy.deepcopy(session.store)

    monkeypatch.setattr(contents, "lock", Yielding())
    early = copy.deepcopy(session.store)
    put(early, 0, 1)
    with pytest.raises(ConflictError, match=r"\[\(0,\)\]"):
        session.commit("which")


@pytest.mark.parametrize("late", [True, False])
def test_an_unset_in_a_copy_is_not_lost_where_the_session_began_with_one_and_wrote_since(
    repo: Repository, late: bool
) -> None:
    with repo.transaction(message="something to unset") as store:
        put(store, 0, 1)
    session = begin(repo)
    session.store.delete_sync("a/c/0")
    early = copy.deepcopy(session.store)
    put(session.store, 0, 2)
    (copy.deepcopy(session.store) if late else early).delete_sync("a/c/0")
    with pytest.raises(ConflictError, match=r"\[\(0,\)\]"):
        session.commit("which")
    assert values(repo)[0] == 1
    session.store.delete_sync("a/c/0")
    session.commit("agreed")
    assert values(repo)[0] == 0


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


# --- what copies may not -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda store: zarr.open_array(store, path="a", mode="r+").resize((50,)),
        lambda store: zarr.open_array(store, path="a", mode="r+").attrs.update({"x": 1}),
        lambda store: zarr.create_group(store, path="g"),
        lambda store: store.set_sync("notes.txt", cpu.Buffer.from_bytes(b"x")),
        lambda store: store.set_sync(f"a/c/{CHUNKS}", cpu.Buffer.from_bytes(b"x")),
        lambda store: store.delete_sync("a/zarr.json"),
        lambda store: zarr.open_group(store, mode="r+").__delitem__("a"),
        lambda store: store.set_virtual_refs("a", [[0]], ["memory://x/y"], [0], [0], [1]),
    ],
)
def test_copies_change_nothing_but_chunks(repo: Repository, change: Callable[[Any], Any]) -> None:
    session = begin(repo)
    twin = copy.deepcopy(session.store)
    with pytest.raises(ReadOnlyError, match=r"copies='report'.*session\.fork"):
        change(twin)
    document = twin.get_sync("a/zarr.json")
    twin.set_sync("a/zarr.json", document)  # as libraries do
    twin.delete_sync("no/such/key")
    put(twin, 0, 1)
    session.commit("the chunk")
    assert values(repo)[0] == 1


def test_what_cannot_go_together_is_refused(repo: Repository) -> None:
    with pytest.raises(InvalidArgumentError, match="serializable"):
        begin(repo, isolation="serializable")
    with pytest.raises(InvalidArgumentError, match="'merge' or 'report'"):
        repo.writable_session(copies="fork")  # type: ignore[arg-type]


@pytest.mark.parametrize("lacks", ["list", "delete_many"])
@pytest.mark.parametrize("silently", [True, False])
def test_a_storage_that_does_not_list_or_delete_is_refused_at_once(
    lacks: str, silently: bool
) -> None:
    class Lacking(Hooked):
        def _lack(self, *_: Any) -> Any:
            if not silently:
                raise StorageError("403")
            return iter(())

    setattr(Lacking, lacks, Lacking._lack)
    make(inner := MemoryStorage())
    with pytest.raises(UnsupportedStorageError, match="list and delete"):
        begin(zm.open(Lacking(inner)))


# --- how sessions end --------------------------------------------------------------------------


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
    storage = Hooked(MemoryStorage())
    repo = make(storage)
    session = begin(repo)
    put(session.store, 0, 1)

    def fail(call: Call[Any]) -> None:
        if call.key.startswith("reports/") and call.op == "create":
            raise StorageError("no")

    storage.before = fail
    session.commit("stands")
    storage.before = None
    assert values(repo)[0] == 1
    put(copy.deepcopy(session.store), 1, 1)
    with pytest.raises(ManifestsError, match="1 copies"):
        session.commit("would leave it out")


# --- garbage, damage, costs --------------------------------------------------------------------


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
    assert values(repo)[:3] == [1, 0, 1]
    assert repo.verify().ok


@pytest.mark.parametrize("damage", ["cut", "long", "foreign", "gone"])
def test_a_damaged_report_is_an_error_and_nothing_is_committed(
    repo: Repository, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = begin(repo)
    put(copy.deepcopy(session.store), 0, 1)
    put(copy.deepcopy(session.store), 1, 1)
    own = workspace_of(session.store).keys.session_id
    one, two = (key for key in listed(repo) if own not in key)
    data = repo.storage.get(one)
    if damage == "gone":
        monkeypatch.setattr(reports, "_listed", lambda *_: [(one.split("/")[1], 99)])
    else:
        wrong = {"cut": data[:-3], "long": bytes(1 << 17), "foreign": repo.storage.get(two)}
        repo.storage.put(one, wrong[damage])
    with pytest.raises(CorruptObjectError):
        session.commit("with what")
    assert values(repo) == [0] * CHUNKS
    monkeypatch.undo()
    put(session.store, 2, 2)
    session.commit("without", discard_unmerged=True)
    assert values(repo)[:3] == [0, 0, 2]


def test_a_chunk_takes_two_requests_more_in_a_copy_and_one_more_in_the_commit() -> None:
    storage = CountingStorage(MemoryStorage())
    repo = make(storage)
    session = begin(repo)
    twin = copy.deepcopy(session.store)
    put(twin, 0, 1)
    storage.reset()
    for number in range(1, 11):
        put(twin, number, number)
    assert storage.requests == 30
    storage.reset()
    session.commit("ten and one")
    reads = [call for call in storage.log if call.key.startswith("reports/")]
    # and: delete, look, list, and the next token; the root is read once more, too
    assert len(reads) == 11 + 4
