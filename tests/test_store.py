"""The store: Zarr's own suites, and its own promises beside them."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, run_state_machine_as_test
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import Buffer, cpu, default_buffer_prototype
from zarr.core.sync import sync
from zarr.testing.stateful import ZarrHierarchyStateMachine, ZarrStoreStateMachine
from zarr.testing.store import StoreTests
from zarr.testing.strategies import arrays

import zarr_manifests as zm
from effort import examples
from zarr_manifests.errors import InvalidArgumentError, ReadOnlyError
from zarr_manifests.storage import Storage
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import ManifestStore, contents_of, workspace_of
from zarr_manifests.testing import LatencyStorage

_MACHINES = settings(
    deadline=None,
    max_examples=examples(20),
    stateful_step_count=20,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
)
# Zarr's suite pickles stores that were opened for writing.
pytestmark = pytest.mark.filterwarnings("ignore:a writable store was pickled")

# Zarr's strategies draw every data type Zarr has.
_any_data_type = pytest.mark.filterwarnings(
    "ignore::zarr.errors.UnstableSpecificationWarning",
    "ignore::zarr.errors.ZarrUserWarning",
    "ignore:.*:UserWarning:numcodecs",
)


def _store(storage: Storage) -> ManifestStore:
    return zm.create(storage).writable_session("main").store


# --- Zarr's own suites -----------------------------------------------------------------------


class _ZarrStoreTests(StoreTests[ManifestStore, Buffer]):
    store_cls = ManifestStore
    buffer_cls = cpu.Buffer

    async def set(self, store: ManifestStore, key: str, value: Buffer) -> None:
        workspace_of(store).set(key, value.to_bytes())

    async def get(self, store: ManifestStore, key: str) -> Buffer:
        entry = contents_of(store).find(key)
        assert entry is not None
        data = contents_of(store).reader.read(entry, 0, entry.length)
        return cpu.Buffer.from_bytes(data)

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        raise NotImplementedError

    @pytest.fixture
    def store_kwargs(self, storage: Storage) -> dict[str, Any]:
        session = zm.create(storage).writable_session("main")
        return {"contents": workspace_of(session.store), "read_only": False}

    def test_store_repr(self, store: ManifestStore) -> None:
        assert repr(store).startswith(f"<ManifestStore {workspace_of(store).storage.url} at ")
        assert repr(store).endswith("writable>")

    def test_store_supports_writes(self, store: ManifestStore) -> None:
        assert store.supports_writes
        assert store.supports_deletes

    def test_store_supports_listing(self, store: ManifestStore) -> None:
        assert store.supports_listing


class TestZarrSuiteOnMemory(_ZarrStoreTests):
    @pytest.fixture
    def storage(self, request: pytest.FixtureRequest) -> Storage:
        return MemoryStorage(f"store-suite-{id(request.node)}")


class TestZarrSuiteOnLocalDisk(_ZarrStoreTests):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path / "repository")


class TestZarrSuiteOnRemote(_ZarrStoreTests):
    """The asynchronous paths: a storage that is not `inline`."""

    @pytest.fixture
    def storage(self, request: pytest.FixtureRequest) -> Storage:
        return LatencyStorage(MemoryStorage(f"store-suite-{id(request.node)}"), latency_s=0.0)


SUITES = [TestZarrSuiteOnMemory, TestZarrSuiteOnLocalDisk, TestZarrSuiteOnRemote]


@pytest.mark.parametrize("suite", SUITES)
def test_no_test_of_zarrs_suite_is_overridden_or_marked(suite: type[_ZarrStoreTests]) -> None:
    theirs = {name for name in dir(StoreTests) if name.startswith("test_")}
    abstract = {
        name for name in theirs if getattr(getattr(StoreTests, name), "__isabstractmethod__", False)
    }
    assert abstract == {
        "test_store_repr",
        "test_store_supports_writes",
        "test_store_supports_listing",
    }  # these Zarr leaves to whoever has a store
    ours = {name for kind in (suite, _ZarrStoreTests) for name in vars(kind)}
    assert ours & theirs <= abstract
    assert len(theirs - abstract) >= 30
    for name in theirs - abstract:
        assert getattr(suite, name) is getattr(StoreTests, name)
    assert not hasattr(suite, "pytestmark")


def _storages(tmp_path: Path, kind: str) -> Storage:
    return MemoryStorage() if kind == "memory" else LocalStorage(tmp_path / "repository")


@pytest.mark.slow
@_any_data_type
@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", ["memory", "local"])
def test_zarr_hierarchy_machine(tmp_path: Path, kind: str) -> None:
    store = _store(_storages(tmp_path, kind))
    run_state_machine_as_test(lambda: ZarrHierarchyStateMachine(store), settings=_MACHINES)


@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", ["memory", "local"])
def test_zarr_store_machine(tmp_path: Path, kind: str) -> None:
    store = _store(_storages(tmp_path, kind))
    run_state_machine_as_test(lambda: ZarrStoreStateMachine(store), settings=_MACHINES)


@_any_data_type
@pytest.mark.hypothesis
def test_zarr_hierarchy_machine_with_commits_between() -> None:
    """What Zarr has built so far is the same after every commit, also through folds."""

    class Committing(ZarrHierarchyStateMachine):
        def __init__(self) -> None:
            self.repository = zm.create(MemoryStorage(), {"compaction": {"max-delta-count": 3}})
            self.session = self.repository.writable_session("main")
            super().__init__(self.session.store)
            self.steps = 0

        @invariant()
        def commit_now_and_then(self) -> None:
            self.steps += 1
            if self.steps % 3 == 0 and self.session.status():
                keys = sorted(contents_of(self.session.store).keys_below(""))
                self.session.commit("so far")
                assert sorted(contents_of(self.session.store).keys_below("")) == keys
                committed = self.repository.readonly_session("main").store
                assert sorted(contents_of(committed).keys_below("")) == keys

    run_state_machine_as_test(Committing, settings=_MACHINES)


@_any_data_type
@settings(deadline=None, max_examples=examples(60), suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_arrays_of_format_2_that_zarr_draws(data: st.DataObject) -> None:
    """The keys and values are those of another store, and none is opaque."""
    model = zarr.storage.MemoryStore()
    array: Any = data.draw(
        arrays(
            stores=st.just(model),
            paths=st.just("g"),
            array_names=st.just("a"),
            zarr_formats=st.just(2),
            open_mode="a",
        )
    )
    due = {key: value.to_bytes() for key, value in model._store_dict.items()}
    repository = zm.create(MemoryStorage(), {"compaction": {"max-delta-count": 1}})
    session = repository.writable_session("main")
    for key in data.draw(st.permutations(sorted(due))):
        session.store.set_sync(key, _buffer(due[key]))
    session.commit("in any order")
    store = repository.readonly_session("main").store
    assert {key: _bytes(store.get_sync(key)) for key in contents_of(store).keys_below("")} == due
    assert not any(path.startswith("/") for path in contents_of(store).nodes())
    found = zarr.open_array(store, path="g/a", mode="r", zarr_format=2)
    assert found.metadata == array.metadata
    np.testing.assert_array_equal(found[...], array[...])


# --- the synchronous surface -----------------------------------------------------------------


def _buffer(data: bytes) -> Buffer:
    return cpu.Buffer.from_bytes(data)


def _bytes(found: Buffer | None) -> bytes | None:
    return None if found is None else found.to_bytes()


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_sync_calls_from_many_threads(tmp_path: Path, kind: str) -> None:
    repository = zm.create(_storages(tmp_path, kind), {"inline-chunk-bytes": 4})
    session = repository.writable_session("main")
    array = zarr.create_array(session.store, name="a", shape=(160,), chunks=(1,), dtype="u1")
    assert array.nchunks == 160
    store = session.store
    barrier = threading.Barrier(8)

    def work(worker: int) -> None:
        barrier.wait()
        for i in range(20):
            key, data = f"a/c/{worker * 20 + i}", bytes([worker, i]) * (1 + i % 4)
            store.set_sync(key, _buffer(data))
            assert _bytes(store.get_sync(key)) == data
            if i % 5 == 4:
                store.delete_sync(key)
                assert store.get_sync(key) is None
            store.set_sync(f"other/{worker}-{i}", _buffer(data))
            store.set_sync("shared", _buffer(data))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    session.commit("from 8 threads")
    read = repository.readonly_session("main").store
    for worker in range(8):
        for i in range(20):
            expected = None if i % 5 == 4 else bytes([worker, i]) * (1 + i % 4)
            assert _bytes(read.get_sync(f"a/c/{worker * 20 + i}")) == expected
            assert read.get_sync(f"other/{worker}-{i}") is not None
    assert _bytes(read.get_sync("shared")) is not None


def test_threads_write_while_the_session_commits() -> None:
    """No write is lost between two commits."""
    repository = zm.create(MemoryStorage(), {"compaction": {"max-delta-count": 4}})
    session = repository.writable_session("main")
    zarr.create_array(session.store, name="a", shape=(400,), chunks=(1,), dtype="u1")
    session.commit("array")

    def write(worker: int) -> None:
        for i in range(100):
            session.store.set_sync(f"a/c/{worker * 100 + i}", _buffer(bytes([worker, i])))

    with ThreadPoolExecutor(4) as pool:
        writing = [pool.submit(write, worker) for worker in range(4)]
        while not all(future.done() for future in writing):
            if session.status():
                session.commit("so far")
        for future in writing:
            future.result()
    if session.status():
        session.commit("the rest")
    read = repository.readonly_session("main").store
    for worker in range(4):
        for i in range(100):
            assert _bytes(read.get_sync(f"a/c/{worker * 100 + i}")) == bytes([worker, i])


@pytest.mark.parametrize("kind", ["memory", "local"])
async def test_sync_calls_inside_a_running_loop(tmp_path: Path, kind: str) -> None:
    store = _store(_storages(tmp_path, kind))
    assert asyncio.get_running_loop().is_running()
    store.set_sync("k", _buffer(b"value"))
    assert _bytes(store.get_sync("k")) == b"value"
    assert _bytes(await store.get("k")) == b"value"
    store.delete_sync("k")
    assert await store.get("k") is None


def test_sync_surface_is_offered_where_storage_calls_are_inline() -> None:
    assert _store(MemoryStorage())._supports_sync_io
    assert not _store(LatencyStorage(MemoryStorage(), latency_s=0.0))._supports_sync_io


def test_documents_far_away_are_read_without_a_thread_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are in memory once the session is open; only what may have to be fetched waits."""
    storage = LatencyStorage(MemoryStorage(), latency_s=0.0)
    session = zm.create(storage, {"inline-chunk-bytes": 0}).writable_session("main")
    group = zarr.create_group(session.store)
    for i in range(30):
        group.create_array(f"a{i}", shape=(4,), chunks=(2,), dtype="i4")[:] = i
    session.commit("arrays")
    store = zm.open(storage).readonly_session("main").store
    hops = 0
    to_thread = asyncio.to_thread

    async def counted(*call: Any) -> Any:
        nonlocal hops
        hops += 1
        return await to_thread(*call)

    monkeypatch.setattr(asyncio, "to_thread", counted)
    found = dict(zarr.open_group(store, mode="r").members())
    assert len(found) == 30
    assert hops == 1, "the list of the members"
    assert sync(store.get("a1/none")) is None
    assert hops == 1
    assert sync(store.get("a1/c/0", default_buffer_prototype())) is not None
    assert hops == 2, "of chunks, the manifest may have to be read"


@pytest.mark.parametrize("pipeline", ["BatchedCodecPipeline", "FusedCodecPipeline"])
@pytest.mark.parametrize("remote", [False, True])
def test_codec_pipelines(pipeline: str, remote: bool) -> None:
    storage: Storage = MemoryStorage()
    if remote:
        storage = LatencyStorage(storage, latency_s=0.0)
    values = np.arange(1200, dtype="f4").reshape(40, 30)
    with zarr.config.set({"codec_pipeline.path": f"zarr.core.codec_pipeline.{pipeline}"}):
        repository = zm.create(storage)
        session = repository.writable_session("main")
        for name, shards in (("plain", None), ("sharded", (20, 30))):
            array = zarr.create_array(
                session.store, name=name, shape=(40, 30), chunks=(10, 10), shards=shards, dtype="f4"
            )
            array[:] = values
            array[5:7, 2:4] = -1.0
        session.commit("values")
        expected = values.copy()
        expected[5:7, 2:4] = -1.0
        group = zarr.open_group(repository.readonly_session("main").store, mode="r")
        for name in ("plain", "sharded"):
            np.testing.assert_array_equal(group[name][:], expected)
            np.testing.assert_array_equal(group[name][3:17, 9:21], expected[3:17, 9:21])


# --- its own promises ------------------------------------------------------------------------


def test_consolidated_metadata_is_not_offered() -> None:
    store = _store(MemoryStorage())
    assert not store.supports_consolidated_metadata
    zarr.create_group(store)
    with pytest.raises(TypeError, match="support consolidated metadata"):
        zarr.consolidate_metadata(store)


def test_identical_documents_and_unset_of_absent_chunks_are_no_changes() -> None:
    session = zm.create(MemoryStorage()).writable_session("main")
    zarr.create_array(session.store, name="a", shape=(4,), chunks=(2,), dtype="i4")
    session.commit("array")
    document = session.store.get_sync("a/zarr.json")
    assert document is not None
    session.store.set_sync("a/zarr.json", document)
    session.store.delete_sync("a/c/1")
    session.store.delete_sync("no/such/key")
    assert not session.status()
    with pytest.raises(InvalidArgumentError, match="nothing to commit"):
        session.commit("nothing")


def test_a_change_that_is_undone_is_no_change() -> None:
    session = zm.create(MemoryStorage()).writable_session("main")
    session.store.set_sync("a", _buffer(b"1"))
    session.store.delete_sync("a")
    assert not session.status()


@pytest.mark.parametrize("key", ["../outside", "a/../../b", "..", "a/./b"])
def test_keys_that_climb_are_refused(tmp_path: Path, key: str) -> None:
    store = _store(LocalStorage(tmp_path / "inner" / "repository"))
    with pytest.raises(InvalidArgumentError, match="segment"):
        store.set_sync(key, _buffer(b"x"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["inner"]


@pytest.mark.parametrize("key", ["", "/", "/lead", "a//b", "a/", "a\0b", ".", "a/.."])
@pytest.mark.parametrize("name", ["", "/zarr.json", "/c/0"])
def test_keys_that_name_no_one_place_are_refused_before_bytes_are_written(
    tmp_path: Path, key: str, name: str
) -> None:
    store = _store(LocalStorage(tmp_path))
    before = {*tmp_path.rglob("*")}
    with pytest.raises(InvalidArgumentError, match="is refused"):
        store.set_sync(key + name, _buffer(bytes(1 << 20)))
    with pytest.raises(InvalidArgumentError, match="is refused"):
        asyncio.run(store.set(key + name, _buffer(bytes(1 << 20))))
    assert {*tmp_path.rglob("*")} == before
    assert _bytes(store.get_sync("a/b")) is None


@pytest.mark.parametrize("key", ["a..b", "..a", "a...", "ä/ö", "a b", "%2e%2e/x", "c:\\x"])
def test_odd_keys_are_kept(key: str) -> None:
    repository = zm.create(MemoryStorage(), {"inline-chunk-bytes": 0})
    session = repository.writable_session("main")
    session.store.set_sync(key, _buffer(b"x"))
    session.commit("odd")
    store = repository.readonly_session("main").store
    assert [*contents_of(store).keys_below("")] == [key]
    assert _bytes(store.get_sync(key)) == b"x"


def test_key_that_is_no_text_is_refused() -> None:
    store = _store(MemoryStorage())
    with pytest.raises(InvalidArgumentError):
        store.set_sync("a/\ud800", _buffer(b"x"))


def test_only_buffers_are_taken() -> None:
    store = _store(MemoryStorage())
    with pytest.raises(TypeError, match="Buffer"):
        store.set_sync("a", b"bytes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Buffer"):
        sync(store.set("a", b"bytes"))  # type: ignore[arg-type]


def test_readonly_session_refuses_writes_of_every_kind() -> None:
    store = zm.create(MemoryStorage()).readonly_session("main").store
    assert store.read_only
    assert not store.supports_writes
    for write in (
        lambda: store.set_sync("a", _buffer(b"x")),
        lambda: store.delete_sync("a"),
        lambda: sync(store.set("a", _buffer(b"x"))),
        lambda: sync(store.set_if_not_exists("a", _buffer(b"x"))),
        lambda: sync(store.delete("a")),
        lambda: sync(store.delete_dir("a")),
        lambda: store.with_read_only(False),
    ):
        with pytest.raises(ReadOnlyError):
            write()


def test_repr_says_what_is_read_now_and_is_made_once() -> None:
    """Zarr asks for it with each array."""

    class Asked(LatencyStorage):
        times = 0

        @property
        def url(self) -> str:
            self.times += 1
            return super().url

    storage = Asked(MemoryStorage(), latency_s=0)
    session = zm.create(storage).writable_session("main")
    store = session.store
    first = repr(store)
    storage.times = 0
    assert {repr(store) for _ in range(10)} == {first}
    assert storage.times == 0
    zarr.create_group(store)
    session.commit("group")
    assert session.snapshot_id in repr(store) != first


def test_equality_and_hash() -> None:
    repository = zm.create(MemoryStorage())
    session, other = repository.writable_session("main"), repository.writable_session("main")
    assert session.store == session.store
    assert hash(session.store) == hash(session.store)
    assert session.store != other.store
    assert repository.readonly_session("main").store == repository.readonly_session("main").store
    assert repository.readonly_session("main").store != session.store
    assert session.store != "store"


@pytest.mark.parametrize("remote", [False, True])
def test_partial_values_of_inline_and_native_chunks(remote: bool) -> None:
    storage: Storage = MemoryStorage()
    if remote:
        storage = LatencyStorage(storage, latency_s=0.0)
    session = zm.create(storage, {"inline-chunk-bytes": 8}).writable_session("main")
    small, large = bytes(range(8)), bytes(range(100))
    sync(session.store.set("small", _buffer(small)))
    sync(session.store.set("large", _buffer(large)))
    requests = [
        (key, part)
        for key in ("small", "large")
        for part in (
            None,
            RangeByteRequest(2, 5),
            RangeByteRequest(5, 1000),
            RangeByteRequest(500, 1000),
            OffsetByteRequest(3),
            OffsetByteRequest(1000),
            SuffixByteRequest(4),
            SuffixByteRequest(1000),
        )
    ]
    found = sync(session.store.get_partial_values(default_buffer_prototype(), requests))
    expected = [
        value[cut]
        for value in (small, large)
        for cut in (
            slice(None),
            slice(2, 5),
            slice(5, 1000),
            slice(500, 1000),
            slice(3, None),
            slice(1000, None),
            slice(-4, None),
            slice(0, None),
        )
    ]
    assert [_bytes(buffer) for buffer in found] == expected
