"""What finding the second chunk of an array costs, and what that must not hide."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.buffer import cpu, default_buffer_prototype
from zarr.core.sync import sync

import zarr_manifests as zm
from zarr_manifests import Repository, Session
from zarr_manifests.engine.edit import overlay
from zarr_manifests.engine.edit import workspace as workspaces
from zarr_manifests.engine.edit.overlay import SessionView, Unread
from zarr_manifests.engine.objects.decoded_cache import DecodedCache
from zarr_manifests.engine.snapshot import view as views
from zarr_manifests.storage import Storage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import ManifestStore, contents_of
from zarr_manifests.testing import CountingStorage, LatencyStorage

SIZE = 100
"""Bytes of a chunk, which are more than a manifest takes in."""


@pytest.fixture
def repository() -> Repository:
    return zm.create(MemoryStorage(), {"inline-chunk-bytes": 10})


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys whose arrays were searched for."""
    keys: list[str] = []
    true = SessionView._search

    def noted(self: SessionView, key: str, *of: object) -> object:
        keys.append(key)
        return true(self, key, *of)  # type: ignore[arg-type]

    monkeypatch.setattr(SessionView, "_search", noted)
    return keys


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Names that the cache of decoded objects was asked for."""
    names: list[object] = []
    true = DecodedCache.find

    def noted(self: DecodedCache, name: tuple[object, ...]) -> object:
        names.append(name)
        return true(self, name)

    monkeypatch.setattr(DecodedCache, "find", noted)
    return names


def put(store: ManifestStore, key: str, value: bytes) -> None:
    store.set_sync(key, cpu.Buffer.from_bytes(value))


def get(store: ManifestStore, key: str) -> bytes | None:
    found = store.get_sync(key)
    return None if found is None else found.to_bytes()


def make(session: Session, name: str, chunks: int = 20) -> zarr.Array:
    shape, chunk = (chunks * SIZE,), (SIZE,)
    return zarr.create_array(
        session.store,
        name=name,
        shape=shape,
        chunks=chunk,
        dtype="u1",
        compressors=None,
        overwrite=True,
    )


def begin(repository: Repository, *names: str) -> Session:
    """A session on these arrays, committed, whose chunks are their numbers and one."""
    session = repository.writable_session("main")
    for name in names:
        make(session, name)[:] = np.repeat(np.arange(1, 21), SIZE)
    session.commit("arrays")
    return session


def test_further_chunks_of_an_array_are_not_searched_for(
    repository: Repository, searched: list[str]
) -> None:
    session = begin(repository, "g/a", "g/b")
    put(session.store, "g/a/c/33", b"off the grid")
    session.commit("no chunk")
    store = repository.readonly_session("main").store
    searched.clear()
    for i in range(20):
        assert get(store, f"g/a/c/{i}") == bytes([i + 1]) * SIZE
    assert searched == ["g/a/c/0", "g/a/c/1"]  # of two after one another, most likely more
    assert get(store, "g/b/c/3") == bytes([4]) * SIZE
    assert get(store, "g/a/c/20") is None
    assert get(store, "g/a/c/33") == b"off the grid"
    assert get(store, "g/a/c/03") is None


def test_a_chunk_of_an_array_below_another_is_found_there(repository: Repository) -> None:
    """Its key may be one of both; that with the longest path counts."""
    session = begin(repository, "a")
    document = json.loads(get(session.store, "a/zarr.json") or b"")
    document["chunk_key_encoding"] = {"name": "v2", "configuration": {"separator": "/"}}
    put(session.store, "a/c/zarr.json", json.dumps(document).encode())
    put(session.store, "a/c/7", b"n" * SIZE)
    session.commit("an array below")
    store = repository.readonly_session("main").store
    assert get(store, "a/c/07") is None  # of neither
    assert get(store, "a/c/7") == b"n" * SIZE
    document["shape"] = [5 * SIZE]
    put(session.store, "a/c/zarr.json", json.dumps(document).encode())
    put(session.store, "a/c/4", b"n" * SIZE)
    put(session.store, "a/c/9", b"o" * SIZE)  # which the shorter path alone has a place for
    session.commit("a shorter array below")
    store = repository.readonly_session("main").store
    assert [get(store, f"a/c/{i}") for i in (9, 4)] == [b"o" * SIZE, b"n" * SIZE]


def test_an_array_that_a_session_puts_below_another_is_seen_at_once(
    repository: Repository,
) -> None:
    session = begin(repository, "a")
    assert get(session.store, "a/c/7") == b"\x08" * SIZE
    document = json.loads(get(session.store, "a/zarr.json") or b"")
    document["chunk_key_encoding"] = {"name": "v2", "configuration": {"separator": "/"}}
    put(session.store, "a/c/zarr.json", json.dumps(document).encode())
    chunk = contents_of(session.store).chunk_at("a/c/7")
    assert chunk is not None
    assert chunk[0].path == "a/c"


def test_chunks_of_an_array_that_the_session_has_made_are_not_searched_for_either(
    repository: Repository, searched: list[str]
) -> None:
    session = repository.writable_session("main")
    array = make(session, "g/a")
    searched.clear()
    array[:] = 1
    assert searched == ["g/a/c/0", "g/a/c/1"]
    array.resize((30 * SIZE,))
    for i in range(20, 30):
        put(session.store, f"g/a/c/{i}", b"x" * SIZE)
    assert [key for key in searched if "/c/" in key][2:] == ["g/a/c/20", "g/a/c/21"]
    array.resize((25 * SIZE,))
    assert contents_of(session.store).chunk_at("g/a/c/24") is not None
    assert contents_of(session.store).chunk_at("g/a/c/27") is None


@pytest.mark.parametrize("committed", [False, True])
def test_as_many_changed_nodes_as_before_need_not_be_the_same(
    repository: Repository, committed: bool
) -> None:
    session = repository.writable_session("main")
    make(session, "a")[:] = 1
    if committed:
        session.commit("array")
    make(session, "b")
    store, contents = session.store, contents_of(session.store)
    for i in range(3):  # it is known well by now
        put(store, f"a/c/{i}", b"x" * SIZE)
    document = json.loads(get(store, "a/zarr.json") or b"")
    document["chunk_key_encoding"] = {"name": "v2", "configuration": {"separator": "/"}}
    store.delete_sync("b/zarr.json")
    put(store, "a/c/zarr.json", json.dumps(document).encode())
    chunk = contents.chunk_at("a/c/7")
    assert chunk is not None
    assert chunk[0].path == "a/c"
    for i in (8, 9):
        put(store, f"a/c/{i}", b"y" * SIZE)
    assert contents.chunk_at("a/c/9") == (contents.node("a/c"), (9,))


def test_an_interrupt_while_a_node_goes_leaves_nothing_behind(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = repository.writable_session("main")
    make(session, "a")
    store, contents = session.store, contents_of(session.store)
    for i in range(3):
        put(store, f"a/c/{i}", b"x" * SIZE)

    class Interrupted(dict[str, Any]):
        """Comes when the node is gone, and before anything else is done."""

        def pop(self, *given: Any) -> Any:
            super().pop(*given)
            raise KeyboardInterrupt

    contents.changes.nodes = Interrupted(contents.changes.nodes)
    for i in range(3):
        put(store, f"a/c/{i}", b"x" * SIZE)
    with pytest.raises(KeyboardInterrupt):
        store.delete_sync("a/zarr.json")
    assert contents.node("a") is None
    assert contents.chunk_at("a/c/2") is None


def test_what_is_discarded_is_not_found_any_more(repository: Repository) -> None:
    session = begin(repository, "a")
    make(session, "b")
    for i in range(3):
        put(session.store, f"b/c/{i}", b"x" * SIZE)
    session.discard_changes()
    assert contents_of(session.store).chunk_at("b/c/2") is None


def test_an_array_that_was_made_anew_is_not_taken_for_the_one_before(
    repository: Repository,
) -> None:
    session = begin(repository, "a")
    assert get(session.store, "a/c/7") == b"\x08" * SIZE
    make(session, "a")[:] = 1
    session.commit("anew")
    assert get(session.store, "a/c/7") == b"\x01" * SIZE


def test_further_chunks_of_one_table_are_found_without_the_cache(
    repository: Repository, asked: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a moment; then it is asked again, as it must know what is in use."""
    begin(repository, "a")
    now = [100.0]
    monkeypatch.setattr(views, "_now_s", lambda: now[0])
    store = repository.readonly_session("main").store
    for i in range(3):
        get(store, f"a/c/{i}")
    asked.clear()
    for i in reversed(range(20)):  # in an order in which no refs are made ahead
        assert get(store, f"a/c/{i}") == bytes([i + 1]) * SIZE
    assert asked == []
    now[0] += 1
    get(store, "a/c/1")
    assert len(asked) == 1
    get(store, "a/c/2")
    assert len(asked) == 1


def test_what_the_cache_drops_is_not_kept_for_the_next_chunk(
    repository: Repository, asked: list[object]
) -> None:
    begin(repository, "a")
    store = repository.readonly_session("main").store
    for i in range(3):
        get(store, f"a/c/{i}")
    view = contents_of(store).view
    (kept,) = view._alone.values()
    assert kept[0]() is not None
    contents_of(store).context.objects.cache.clear()
    assert kept[0]() is None
    asked.clear()
    assert get(store, "a/c/7") == b"\x08" * SIZE
    assert asked


def test_a_chunk_that_shares_an_object_takes_the_lock_once(repository: Repository) -> None:
    session = begin(repository, "a")
    contents = contents_of(session.store)
    taken: list[str] = []
    true = contents.lock

    class Counted:
        def __enter__(self) -> None:
            taken.append("taken")
            true.__enter__()

        def __exit__(self, *of: object) -> None:
            true.__exit__(*of)

    contents.lock = Counted()  # type: ignore[assignment]
    put(session.store, "a/c/3", b"z" * SIZE)
    assert taken == ["taken"]
    contents.lock = true
    assert get(session.store, "a/c/3") == b"z" * SIZE


# --- how often a key is looked at ------------------------------------------------------------


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each time that a key is asked whether it is a document's, or which array's chunk it is."""
    found: list[str] = []

    def note(owner: object, name: str, what: str) -> None:
        true = getattr(owner, name)

        def noted(*given: Any) -> Any:
            found.append(what)
            return true(*given)

        monkeypatch.setattr(owner, name, noted)

    note(workspaces, "document_path", "document")
    note(overlay, "document_path", "document")
    note(SessionView, "_nearby", "array")
    return found


@pytest.mark.parametrize("nbytes", [5, 100, 5000])  # in a manifest, in a pack, by itself
@pytest.mark.parametrize("remote", [False, True])
def test_a_chunk_that_is_written_is_looked_up_once(
    nbytes: int, remote: bool, looked_at: list[str]
) -> None:
    storage: Storage = MemoryStorage()
    if remote:
        storage = LatencyStorage(storage, latency_s=0.0)
    config = {"inline-chunk-bytes": 10, "pack-chunk-bytes": 1000}
    session = zm.create(storage, config).writable_session("main")
    make(session, "a")
    for key in ("a/c/0", "a/c/1", "a/c/2"):
        looked_at.clear()
        value = cpu.Buffer.from_bytes(b"x" * nbytes)
        if remote:
            sync(session.store.set(key, value))
        else:
            session.store.set_sync(key, value)
        assert sorted(looked_at) == ["array", "document"]


@pytest.mark.parametrize("writable", [False, True])
def test_a_chunk_far_away_that_is_read_is_looked_up_once(
    writable: bool, looked_at: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a thread has to fetch the manifest that says where it is."""
    storage = LatencyStorage(MemoryStorage(), latency_s=0.0)
    begin(zm.create(storage, {"inline-chunk-bytes": 10}), "a", "b")
    again = zm.open(storage)
    session = again.writable_session() if writable else again.readonly_session()
    threads: list[str] = []
    true = SessionView.find_unread

    def noted(self: SessionView, key: str, unread: Unread) -> Any:
        threads.append(key)
        return true(self, key, unread)

    monkeypatch.setattr(SessionView, "find_unread", noted)
    prototype = default_buffer_prototype()
    for i in range(3):
        looked_at.clear()
        found = sync(session.store.get(f"a/c/{i}", prototype))
        assert found is not None
        assert found.to_bytes() == bytes([i + 1]) * SIZE
        assert looked_at.count("array") == 1
    assert "a/c/0" in threads
    assert "a/c/2" not in threads, "by then the manifest is here"


def test_what_changes_before_a_thread_reads_is_looked_up_again() -> None:
    """A chunk that was found before others have replaced its array is not read any more."""
    storage = LatencyStorage(MemoryStorage(), latency_s=0.0)
    begin(zm.create(storage, {"inline-chunk-bytes": 10}), "a")
    session = zm.open(storage).writable_session()
    contents = contents_of(session.store)
    unread = contents.find_at_hand("a/c/3")
    assert isinstance(unread, Unread)
    assert unread.chunk is not None
    make(session, "a")
    assert contents.find_unread("a/c/3", unread) is None


def test_chunks_of_a_box_that_is_written_again_and_again_are_in_the_newest_delta() -> None:
    counting = CountingStorage(MemoryStorage())
    zm.create(counting)
    with zm.open(counting).transaction(message="made") as store:
        zarr.create_array(store, name="v", shape=(4000,), chunks=(1,), dtype="u1")
    for i in range(5):
        with zm.open(counting).transaction(message="changed") as store:
            at = np.arange(4000 if i == 0 else 2000)
            lengths = np.random.default_rng(i).integers(1, 2**40, len(at))
            files = ["memory://elsewhere/v"]
            store.set_virtual_refs("v", at[:, None], files, at * 0, lengths, lengths % 97 + 1)
        session = zm.open(counting).readonly_session()
        counting.reset()
        refs = session.chunk_refs("v", box=[(100, 900)])
        np.testing.assert_array_equal(refs.offset, lengths[100:900])
        assert counting.requests == 1
