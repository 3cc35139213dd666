"""Counts: what a repository does is counted, exactly, by this process, and shown where wanted."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import zarr
from zarr.core.buffer import cpu

import zarr_manifests as zm
from zarr_manifests import Repository
from zarr_manifests import metrics as metrics_module
from zarr_manifests.error_cases import ObjectNotFoundError
from zarr_manifests.errors import ConflictError
from zarr_manifests.metrics import Meter, Metrics, process_totals
from zarr_manifests.repository import context_of
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage import Storage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.storage.metered import MeteredStorage, meter_of, metered, unmetered
from zarr_manifests.store import contents_of
from zarr_manifests.testing import CountingStorage, Fault, FaultyStorage


def put(store: object, key: str, value: bytes) -> None:
    store.set_sync(key, cpu.Buffer.from_bytes(value))


def with_array(repository: Repository) -> Repository:
    with repository.transaction(message="array") as store:
        zarr.create_array(store, name="a", shape=(100,), chunks=(1,), dtype="u1")
    return repository


def test_the_counts_are_those_of_the_calls() -> None:
    counting = CountingStorage(MemoryStorage())
    repository = with_array(zm.create(counting, {"inline-chunk-bytes": 0}))
    with repository.transaction(message="chunks") as store:
        for i in range(10):
            put(store, f"a/c/{i}", bytes(5000))
    assert repository.readonly_session().store.get_sync("a/c/3") is not None
    repository.create_branch("side")
    assert not zm.open(counting.storage).readonly_session().status()  # another object's
    metrics = repository.metrics()
    assert metrics.requests == counting.requests
    assert metrics.bytes_read == counting.bytes_read
    assert metrics.bytes_written == counting.bytes_written
    assert (metrics.commits, metrics.conflicts, metrics.compactions) == (2, 0, 0)
    assert metrics.cache_hits > 0


@pytest.mark.parametrize("twin", [False, True])
def test_every_call_is_counted_and_answered_as_by_the_storage(twin: bool) -> None:
    counting = CountingStorage(MemoryStorage())
    meter = Meter()
    storage = metered(counting, meter)
    assert isinstance(storage, Storage)
    assert (storage.url, storage.capabilities) == (counting.url, counting.capabilities)
    if twin:
        assert asyncio.run(storage.create_async("a", b"four"))
        assert asyncio.run(storage.get_async("a", 1, 2)) == b"ou"
    else:
        assert storage.create("a", b"four")
        assert storage.get("a", 1, 2) == b"ou"
    assert not storage.create("a", b"other")
    assert storage.get_ranges("a", [(0, 1), (2, 9)]) == [b"f", b"ur"]
    tagged = storage.get_tagged("a")
    assert storage.cas("a", b"new", tagged.token, then_create=("b", b"after")) is not None
    assert storage.cas("a", b"stale", tagged.token, then_create=("c", b"never")) is None
    storage.put("d", b"put")
    assert storage.head("d").nbytes == 3
    assert [info.key for info in storage.list("", "a")] == ["b", "d"]
    assert storage.stray() is None
    storage.sync(["a"])
    storage.delete_many(iter(["d"]))
    with pytest.raises(ObjectNotFoundError):
        storage.get("d")
    metrics = meter.read()
    # That one of `then_create` is a request of its own is the storage's to decide.
    assert metrics.requests == counting.requests
    assert (metrics.bytes_read, metrics.bytes_written) == (
        counting.bytes_read,
        counting.bytes_written,
    )
    assert (metrics.list_requests, metrics.delete_requests, metrics.failed_requests) == (2, 1, 1)


@pytest.mark.parametrize("op", ["get", "get_ranges", "get_tagged", "put", "create", "cas", "head"])
def test_a_call_that_fails_is_counted_and_raises_the_same(op: str) -> None:
    meter = Meter()
    error = KeyboardInterrupt()
    storage = metered(FaultyStorage(MemoryStorage(), [Fault("fail_before", op=op)]), meter)
    arguments: dict[str, tuple[object, ...]] = {
        "get_ranges": ("a", [(0, 1)]),
        "put": ("a", b"x"),
        "create": ("a", b"x"),
        "cas": ("a", b"x", None),
    }
    with pytest.raises(Exception, match=r".") as caught:
        getattr(storage, op)(*arguments.get(op, ("a",)))
    assert not isinstance(caught.value, type(error))
    assert meter.read().failed_requests == meter.read().requests == 1


def test_what_is_counted_stays_here(tmp_path: Path) -> None:
    inner = MemoryStorage("metered-pickle")
    storage = metered(inner, Meter())
    assert unmetered(storage) is inner
    assert unmetered(inner) is inner
    assert metered(storage) is storage
    assert meter_of(storage) is storage.meter
    travelled = pickle.loads(pickle.dumps(storage))
    assert not isinstance(travelled, MeteredStorage)
    assert travelled.url == inner.url
    with_array(repository := zm.create(tmp_path / "r"))
    assert not isinstance(repository.storage, MeteredStorage)
    there = pickle.loads(pickle.dumps(repository))
    assert there.metrics().commits == 0
    assert repository.metrics().commits == 1
    fork = pickle.loads(pickle.dumps(repository.writable_session().fork()))
    put(fork.store, "a/c/0", bytes(5000))
    pickle.dumps(fork)  # which writes what is in memory
    counted = contents_of(fork.store).context.meter.read()
    assert (counted.commits, counted.write_requests) == (0, 1)


def test_conflicts_and_retries() -> None:
    storage = MemoryStorage()
    repository = with_array(zm.create(storage))
    other = zm.open(storage)
    one, two, three = (r.writable_session() for r in (repository, other, other))
    for session, key, value in ((one, "a/c/0", b"1"), (two, "a/c/1", b"2"), (three, "a/c/0", b"3")):
        put(session.store, key, value)
    two.commit("first")
    one.commit("second, on top of it")
    with pytest.raises(ConflictError):
        three.commit("too late")
    here, there = repository.metrics(), other.metrics()
    assert (here.commits, here.conflicts, here.retries) == (2, 0, 1)
    assert (there.commits, there.conflicts) == (1, 1)


def test_compactions_and_merged_refs() -> None:
    repository = with_array(zm.create(MemoryStorage(), {"compaction": {"max-delta-count": 4}}))
    for commit in range(6):
        with repository.transaction(message="chunks") as store:
            put(store, f"a/c/{commit}", b"1")
    metrics = repository.metrics()
    kinds = [info.kind for info in repository.ancestry()]
    assert metrics.compactions == kinds.count("rewrite") >= 1
    assert metrics.commits == 7
    assert metrics.refs_merged == 3, "the first delta is of metadata"


class _Slow(dict[str, int]):
    """Lets another thread go on between reading a count and writing it."""

    def __getitem__(self, name: str) -> int:
        value = super().__getitem__(name)
        time.sleep(0)
        return value


def test_additions_of_many_threads_are_not_lost() -> None:
    meter = Meter()
    meter._counts.by_name = _Slow(meter._counts.by_name)

    def work() -> None:
        for _ in range(300):
            meter.add("refs_merged", 2)
            meter.request("read_requests", 3)
            meter.read_request(5)

    SYSTEM.parallel([work] * 8)
    metrics = meter.read()
    counted = (metrics.refs_merged, metrics.read_requests, metrics.bytes_read)
    assert counted == (4800, 4800, 19_200)


def test_reads_that_are_not_counted_yet_are_bounded() -> None:
    meter = Meter()
    for _ in range(100_000):
        meter.read_request(1)
        assert len(meter._reads) <= 1001
    assert meter.read() == Metrics(read_requests=100_000, bytes_read=100_000)


def test_a_name_that_is_no_count_is_refused() -> None:
    with pytest.raises(KeyError, match="merged"):
        Meter().add("merged")


def test_metrics_are_values() -> None:
    meter = Meter()
    meter.add("commits", 3)
    before = meter.read()
    meter.add("commits")
    assert before.commits == 3
    assert meter.read() - before == Metrics(commits=1)
    assert meter.read().to_dict()["commits"] == 4
    with pytest.raises(TypeError):
        before - 1  # type: ignore[operator]
    assert [f.name for f in fields(Metrics)] == [*before.to_dict()]


def test_totals_of_the_process_keep_what_was_counted_by_what_is_gone() -> None:
    before = process_totals()
    one, two = Meter(), Meter()
    one.add("commits", 5)
    one.read_request(10)
    two.add("commits", 7)
    del one
    gc.collect()
    assert process_totals() - before == Metrics(commits=12, read_requests=1, bytes_read=10)


@pytest.mark.slow
def test_a_meter_that_is_collected_while_totals_are_taken_is_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Collecting(dict[str, int]):
        def __iter__(self) -> Iterator[str]:  # or copying it would not call the other
            return super().__iter__()

        def __getitem__(self, name: str) -> int:
            value = super().__getitem__(name)
            gc.collect(1)  # of what is young; all of it takes seconds
            return value

    registry = metrics_module._REGISTRY
    monkeypatch.setattr(registry, "retired", Collecting(registry.retired))
    before = process_totals()
    held: list[object] = [Meter()]
    for field in fields(Metrics):
        held[0].add(field.name)  # type: ignore[attr-defined]
    held.append(held)  # so that only a collection finds it
    del held
    found = process_totals() - before
    assert found == Metrics(**{field.name: 1 for field in fields(Metrics)})


def test_a_meter_that_is_collected_waits_for_nobody_who_counts() -> None:
    """It may go on a thread that holds the lock of another, which `process_totals` waits for."""
    before = process_totals()
    going = [Meter()]
    going[0].add("commits", 3)
    going[0].read_request(7)
    with metrics_module._REGISTRY.lock:  # as `process_totals`
        collecting = threading.Thread(target=going.clear, daemon=True)
        collecting.start()
        collecting.join(60)
        assert not collecting.is_alive()
    found = process_totals() - before
    assert found == Metrics(commits=3, read_requests=1, bytes_read=7)


def test_meters_that_are_gone_take_no_room() -> None:
    for _ in range(100):
        Meter()
    assert len(metrics_module._REGISTRY.gone) <= 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_starts_at_zero() -> None:
    meter = Meter()
    meter.add("commits", 5)
    meter.read_request(5)
    with meter._counts.lock:
        pid = os.fork()
        if pid == 0:  # no assert may leave the child
            sound = meter.read() == Metrics() == process_totals()
            meter.add("commits")
            os._exit(0 if sound and process_totals().commits == 1 else 1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert meter.read().commits == 5


# --- logs ----------------------------------------------------------------------------------------


def test_one_line_for_each_commit_and_compaction(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "zarr_manifests.operations")
    repository = with_array(zm.create(MemoryStorage(), {"compaction": {"max-delta-count": 2}}))
    with repository.transaction(message="chunks") as store:
        for i in range(3):
            put(store, f"a/c/{i}", b"1")
    records = [r for r in caplog.records if r.name == "zarr_manifests.operations"]
    assert [record.operation for record in records] == ["commit", "commit", "compaction"]
    ids = [info.snapshot_id for info in repository.ancestry()][::-1]
    assert [record.snapshot_id for record in records] == ids[1:]
    assert {record.repository_id for record in records} == {context_of(repository).repository_id}
    commit = records[1]
    assert (commit.levelname, commit.branch, commit.kind) == ("INFO", "main", "overwrite")
    assert (commit.refs_set, commit.refs_unset, commit.chunk_bytes) == (3, 0, 3)
    assert commit.duration_ms >= 0
    assert commit.repository_url == repository.storage.url
    assert commit.getMessage().startswith(f"commit {ids[2]} on main in ")


def test_nothing_is_logged_unless_asked_for() -> None:
    script = """
        import logging, sys
        logging.basicConfig(stream=sys.stdout)
        import zarr, zarr_manifests as zm
        def commit(name):
            with zm.create(f"memory://{name}").transaction(message="group") as store:
                _ = zarr.create_group(store, path="g")
        commit("quiet")
        logging.getLogger("zarr_manifests.operations").setLevel(logging.INFO)
        commit("asked")
    """
    (line,) = run(script).splitlines()
    assert line.startswith("INFO:zarr_manifests.operations:commit ")


def test_a_commit_is_logged_though_its_snapshot_is_not_in_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What the snapshot says is left out when it is not in memory any more."""
    caplog.set_level(logging.INFO, "zarr_manifests.operations")
    with_array(zm.create(MemoryStorage(), cache={"expire-ms": 0, "max-size": 0}))
    assert [record.operation for record in caplog.records] == ["commit"]


# --- OpenTelemetry -------------------------------------------------------------------------------


def run(script: str) -> str:
    """What a fresh Python prints that runs the script."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_does_not_import_opentelemetry() -> None:
    assert run("import sys, zarr_manifests\nprint('opentelemetry' in sys.modules)") == "False"


def test_without_opentelemetry_all_works() -> None:
    script = """
        import sys
        sys.modules["opentelemetry"] = None
        import zarr_manifests as zm
        repo = zm.create("memory://r")
        print(repo.metrics().requests > 0)
    """
    assert run(script) == "True"


@pytest.mark.parametrize("provider_first", [True, False])
def test_a_reader_of_opentelemetry_sees_the_counts(provider_first: bool) -> None:
    script = f"""
        from opentelemetry import metrics
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        import zarr, zarr_manifests as zm
        from zarr_manifests.metrics import process_totals
        reader = InMemoryMetricReader()
        provide = lambda: metrics.set_meter_provider(MeterProvider([reader]))
        if {provider_first}:
            provide()
        repos = [zm.create(f"memory://r{{n}}") for n in range(2)]
        if not {provider_first}:
            provide()
        for repo in repos:
            with repo.transaction(message="group") as store:
                _ = zarr.create_group(store, path="g")
        del repo, repos, store
        scope = reader.get_metrics_data().resource_metrics[0].scope_metrics[0]
        assert scope.scope.name == "zarr_manifests"
        found = {{m.name: (m.unit, m.data.data_points[0].value) for m in scope.metrics}}
        totals = process_totals().to_dict()
        assert {{k.removeprefix("zarr_manifests."): v for k, (_, v) in found.items()}} == totals
        assert all(m.data.is_monotonic for m in scope.metrics)
        assert found["zarr_manifests.bytes_written"][0] == "By"
        print(found["zarr_manifests.commits"][1])
    """
    assert run(script) == "2"
