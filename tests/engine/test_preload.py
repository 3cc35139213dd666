"""What is fetched in the background: once, within limits, and without harm to anybody."""

from __future__ import annotations

import gc
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from zarr.core.buffer import cpu

import zarr_manifests as zm
from inside import context_of
from zarr_manifests import Session
from zarr_manifests.config.manifest_sets import Preload as PreloadOptions
from zarr_manifests.engine.snapshot import preload
from zarr_manifests.errors import CorruptObjectError, SessionClosedError
from zarr_manifests.planning.layout.leaves import ArrayFacts, NodeFacts
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.session import preload_report
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of
from zarr_manifests.testing import CountingStorage, LatencyStorage
from zarr_manifests.testing.wrapped import Call, WrappedStorage

EACH_ALONE = {
    "sets": [{"alone": {"arrays-per-manifest": 1, "cardinality": None}}],
    "rules": [{"target": "alone"}],
    "preload": {"arrays": [{"path": ".*/v.*"}]},
}


class Gate(WrappedStorage):
    """Holds back every read of a manifest until it is opened."""

    def __init__(self, storage: MemoryStorage) -> None:
        super().__init__(storage)
        self.open = threading.Event()
        self.began = threading.Semaphore(0)

    def _around[R](self, call: Call[R]) -> R:
        if call.key.startswith("manifests/"):
            self.began.release()
            assert self.open.wait(20)
        return call.run()


def arrays(count: int, **options: Any) -> MemoryStorage:
    """A repository of arrays v0, v1, ... whose refs each have a manifest of their own."""
    storage = MemoryStorage()
    repository = zm.create(storage, {"chunk-manifests": EACH_ALONE, **options})
    session = repository.writable_session()
    for i in range(count):
        zarr.create_array(session.store, name=f"v{i}", shape=(4 + i,), chunks=(1,), dtype="i1")
        for at in range(4 + i):
            put(session, f"v{i}/c/{at}", bytes([at]))
    session.commit("write")
    repository.compact(mode="full")
    assert len(contents_of(repository.readonly_session().store).view.manifests) == count
    return storage


def put(session: Session, key: str, value: bytes) -> None:
    session.store.set_sync(key, cpu.Buffer.from_bytes(value))


def get(session: Session, key: str) -> bytes:
    value = session.store.get_sync(key)
    assert value is not None, key
    return value.to_bytes()


def manifests_read(counting: CountingStorage) -> list[str]:
    return [record.key for record in counting.log if record.key.startswith("manifests/")]


@pytest.fixture(scope="module")
def forty() -> MemoryStorage:
    return arrays(40)


def test_what_was_fetched_is_not_fetched_again(forty: MemoryStorage) -> None:
    counting = CountingStorage(forty)
    session = zm.open(counting).readonly_session()
    report = preload_report(session, wait_s=20)
    assert report.done
    assert [one.refs for one in report.in_state("fetched")] == [4 + i for i in range(40)]
    assert report.nbytes == sum(one.nbytes for one in report.manifests) > 0
    assert sorted(manifests_read(counting)) == sorted(one.key for one in report.manifests)
    counting.reset()
    assert [get(session, f"v{i}/c/3") for i in range(40)] == [b"\x03"] * 40
    assert manifests_read(counting) == []


def test_limits_are_kept_and_said(forty: MemoryStorage) -> None:
    counting = CountingStorage(forty)
    preload = {"arrays": [{"path": ".*/v.*"}], "max-manifests": 2, "max-manifest-size": 40}
    repository = zm.open(counting, {"chunk-manifests": {"preload": preload}})
    report = preload_report(repository.readonly_session(), wait_s=20)
    assert [one.refs for one in report.in_state("fetched")] == [4, 5]
    assert len(manifests_read(counting)) == 2
    whys = {one.refs: one.why for one in report.in_state("skipped")}
    assert whys[40] == "smaller ones have reached max-manifests, 2"
    assert whys[41] == "its 41 chunk refs are more than max-manifest-size, 40"
    assert len(report.manifests) == 40


def test_nothing_is_fetched_if_it_is_turned_off_or_here(forty: MemoryStorage) -> None:
    counting = CountingStorage(forty)
    none = {"chunk-manifests": {"preload": {"max-manifests": 0}}}
    report = preload_report(zm.open(counting, none).readonly_session(), wait_s=20)
    assert (report.manifests, report.done, manifests_read(counting)) == ((), True, [])
    repository = zm.open(counting)
    preload_report(repository.readonly_session(), wait_s=20)
    counting.reset()
    report = preload_report(repository.readonly_session())
    assert report.done
    assert {one.why for one in report.manifests} == {"it is here already"}
    assert manifests_read(counting) == []


def test_nothing_is_planned_if_what_is_elsewhere_has_no_coordinates() -> None:
    """A plan looks at every array, while the session's owner wants to begin."""
    begun: list[Callable[[], None]] = []
    runtime = replace(SYSTEM, background=begun.append)
    storage = arrays(2, **{"inline-chunk-bytes": 0})
    default = {"chunk-manifests": {"preload": {"arrays": None}}}

    def preloads(config: dict[str, Any]) -> tuple[int, bool]:
        begun.clear()
        session = zm.open(storage, config, runtime=runtime).readonly_session()
        return len(begun), preload_report(session).done

    assert preloads({}) == (1, False)
    assert preloads(default) == (1, False)  # arrays of one axis may be coordinates
    session = zm.open(storage).writable_session()
    for i in range(2):
        del zarr.open_group(session.store, mode="a")[f"v{i}"]
    zarr.create_array(session.store, name="v", shape=(4, 4), chunks=(1, 1), dtype="i1")[:] = 7
    session.commit("others")
    zm.open(storage).compact(mode="full")
    assert preloads({}) == (1, False)
    assert preloads(default) == (0, True)


def test_a_read_waits_for_the_fetch_in_flight(forty: MemoryStorage) -> None:
    gate = Gate(forty)
    counting = CountingStorage(gate)
    session = zm.open(counting).readonly_session()
    assert gate.began.acquire(timeout=20)  # v0 is the smallest, and so the first
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(get(session, "v0/c/2")))
    reader.start()
    assert preload_report(session).in_state("waiting")
    gate.open.set()
    reader.join(20)
    assert preload_report(session, wait_s=20).done
    assert found == [b"\x02"]
    assert len(set(manifests_read(counting))) == len(manifests_read(counting)) == 40


@pytest.mark.parametrize("how", ["close", "with", "forget", "commit", "discard"])
def test_it_ends_with_the_session(forty: MemoryStorage, how: str) -> None:
    storage = MemoryStorage()
    for info in forty.list():
        storage.put(info.key, forty.get(info.key))
    gate = Gate(storage)
    counting = CountingStorage(gate)
    session = zm.open(counting).writable_session()
    preload = session._pin.preload
    assert gate.began.acquire(timeout=20)
    if how == "close":
        session.close()
    elif how == "with":
        with session as same:
            assert same is session
    elif how == "forget":
        del session
        for _ in range(1000):  # a thread may hold it for a moment
            gc.collect()
            if preload.report().in_state("cancelled"):
                break
    elif how == "discard":
        session.discard_changes()
    else:
        put(session, "zarr.json", b'{"zarr_format": 3, "node_type": "group"}')
        session.commit("go on")
    gate.open.set()
    preload.wait(20)
    report = preload.report()
    assert report.done
    assert 1 <= len(report.in_state("fetched")) <= 16
    assert len(report.in_state("cancelled")) == 40 - len(report.in_state("fetched"))
    assert len(manifests_read(counting)) == len(report.in_state("fetched"))


def test_a_closed_session_reads_and_does_not_write(forty: MemoryStorage) -> None:
    session = zm.open(forty).writable_session()
    session.close()
    session.close()
    assert get(session, "v3/c/1") == b"\x01"
    with pytest.raises(SessionClosedError, match="close"):
        put(session, "v3/c/1", b"\x02")
    with pytest.raises(SessionClosedError, match="close"):
        session.commit("too late")


def test_what_cannot_be_fetched_is_an_error_of_the_read_alone() -> None:
    storage = arrays(3)
    for info in list(storage.list("manifests/")):
        storage.delete_many([info.key])
    session = zm.open(storage).readonly_session()
    report = preload_report(session, wait_s=20)
    assert len(report.in_state("failed")) == 3
    assert all("is referenced and not there" in one.why for one in report.manifests)
    with pytest.raises(CorruptObjectError, match="is referenced and not there"):
        get(session, "v0/c/0")


def test_branches_and_tags_are_preloaded_when_the_repository_opens() -> None:
    storage = arrays(3)
    repository = zm.open(storage)
    repository.create_tag("release")
    repository.save_config(
        {
            "chunk-manifests": {
                "preload": {
                    "arrays": [{"path": ".*/v.*"}],
                    "branches": ["main", "gone"],
                    "tags": ["lost", "release"],
                }
            }
        }
    )
    gate = Gate(storage)
    gate.open.set()
    counting = CountingStorage(gate)
    repository = zm.open(counting)
    for _ in range(3):
        assert gate.began.acquire(timeout=60)
    session = repository.readonly_session()
    assert [get(session, f"v{i}/c/0") for i in range(3)] == [b"\0"] * 3
    assert len(manifests_read(counting)) == 3


@pytest.mark.slow
def test_a_forked_child_reads_what_its_parent_was_fetching(forty: MemoryStorage) -> None:
    code = """
        import faulthandler, os, sys
        import zarr_manifests as zm
        from zarr_manifests.session import preload_report
        from zarr_manifests.testing import LatencyStorage
        from zarr_manifests.storage import from_url
        repository = zm.open(LatencyStorage(from_url(sys.argv[1]), latency_s=0.2))
        session = repository.readonly_session()
        child = os.fork()
        if not child:
            faulthandler.dump_traceback_later(30, exit=True)  # where it hangs, if it does
            assert preload_report(session, wait_s=60).done
            value = session.store.get_sync("v39/c/0")
            os._exit(0 if value is not None and value.to_bytes() == b"\\0" else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert len(preload_report(session, wait_s=60).in_state("fetched")) == 40
    """
    run(code, forty)


@pytest.mark.slow
def test_a_child_that_is_forked_while_a_fetch_ends_can_ask_for_the_report(
    forty: MemoryStorage,
) -> None:
    code = """
        import os, signal, sys, threading
        import zarr_manifests as zm
        from zarr_manifests.session import preload_report
        session = zm.open(sys.argv[1]).readonly_session()
        held, go_on = threading.Event(), threading.Event()
        def end():
            with session._pin.preload._ended._condition:  # as the thread that ends it, for a moment
                held.set()
                go_on.wait()
        thread = threading.Thread(target=end)
        thread.start()
        held.wait()
        child = os.fork()
        if not child:
            signal.alarm(60)  # ends it, wherever it waits
            os._exit(0 if preload_report(session, wait_s=60).done else 1)
        print(os.waitpid(child, 0)[1])
        go_on.set()
        thread.join()
    """
    assert run(code, forty) == "0\n"


@pytest.mark.slow
def test_the_interpreter_does_not_wait_for_all_of_it(forty: MemoryStorage) -> None:
    code = """
        import atexit, sys
        import zarr_manifests as zm
        import zarr_manifests.session  # at first, since it takes long enough for all of it
        from zarr_manifests.testing import CountingStorage, LatencyStorage
        from zarr_manifests.storage import from_url
        counting = CountingStorage(LatencyStorage(from_url(sys.argv[1]), latency_s=0.1))
        session = zm.open(counting).readonly_session()
        read = lambda: sum(record.key.startswith("manifests/") for record in counting.log)
        atexit.register(lambda: print(read()))
    """
    assert int(run(code, forty)) <= 16


def run(code: str, storage: MemoryStorage) -> str:
    """Run it in a process of its own, with a copy of the repository on disk; what it prints."""
    with tempfile.TemporaryDirectory() as folder:
        for info in storage.list():
            path = Path(folder, info.key)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(storage.get(info.key))
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), folder],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


# --- a large repository, opened by xarray ----------------------------------------------------

DATA, SMALL, STEPS = 180, 17, 5_505


@pytest.fixture(scope="module")
def two_hundred() -> MemoryStorage:
    """180 data arrays before lat, lon and time, 17 small ones after; a million virtual refs."""
    storage = MemoryStorage()
    repository = zm.create(storage)
    session = repository.writable_session()
    group = zarr.create_group(session.store, path="zz")
    for name, size in (("lat", 73), ("lon", 144), ("time", STEPS)):
        group.create_array(
            name, data=np.arange(float(size)), chunks=(min(size, 1_000),), dimension_names=(name,)
        )
    names = ("time", "lat", "lon")
    arrays = [(f"data_{i:03}", STEPS) for i in range(DATA)]
    arrays += [(f"zz_{i:02}", 588) for i in range(SMALL)]
    for name, count in arrays:
        group.create_array(
            name,
            shape=(STEPS, 73, 144),
            chunks=(-(-STEPS // count), 73, 144),
            dtype="f4",
            dimension_names=names,
            attributes={"long_name": f"the variable {name}", "units": "m s-1"},
        )
        index = np.zeros((-(-STEPS // -(-STEPS // count)), 3), np.int64)
        index[:, 0] = np.arange(len(index))
        size = 73 * 144 * 4
        session.store.set_virtual_refs(
            f"zz/{name}",
            index,
            [f"file:///archive/{name}.bin"],
            np.zeros(len(index), np.int64),
            index[:, 0] * size,
            np.full(len(index), size),
        )
    session.commit("all")
    repository.compact(mode="full")
    return storage


@pytest.mark.slow
def test_opening_with_coordinates_reads_no_data_manifest(two_hundred: MemoryStorage) -> None:
    view = contents_of(zm.open(two_hundred).readonly_session().store).view
    assert sum(part.count for ref in view.manifests for part in ref.parts) >= 1_000_000
    coordinates = {view.nodes[f"zz/{name}"].node_id for name in ("lat", "lon", "time")}
    of_data = {
        ref.blob.key
        for ref in view.manifests
        if not coordinates & {part.node_id for part in ref.parts}
    }
    assert of_data
    counting = CountingStorage(LatencyStorage(two_hundred, latency_s=0.02))
    repository = zm.open(counting)
    session = repository.readonly_session()
    dataset = xr.open_zarr(session.store, group="zz", consolidated=False)
    assert (dataset.time.values[-1], dataset.lat.values[-1], dataset.lon.size) == (
        STEPS - 1, 72, 144
    )  # fmt: skip
    assert len(dataset.data_vars) == DATA + SMALL
    assert preload_report(session, wait_s=20).done
    assert counting.rounds() <= 3
    assert counting.bytes_read < 256 * 1024
    assert not of_data & {record.key for record in counting.log}


def test_only_coordinates_are_looked_at_closer(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be thousands of arrays, and each session that opens asks."""
    storage = MemoryStorage()
    repository = zm.create(storage)
    session = repository.writable_session()
    for name in ("time", *(f"v{i}" for i in range(20))):
        zarr.create_array(
            session.store,
            name=name,
            shape=(4,),
            chunks=(1,),
            dtype="i1",
            dimension_names=("time",),
        )
        put(session, f"{name}/c/0", b"1")
    session.commit("write")
    repository.compact(mode="full")
    looked: list[str] = []

    class Noted(NodeFacts):
        def __getitem__(self, node_id: bytes) -> ArrayFacts:
            found = super().__getitem__(node_id)
            looked.append(found.path)
            return found

    monkeypatch.setattr(preload, "NodeFacts", Noted)
    view = contents_of(zm.open(storage).readonly_session().store).view
    objects = context_of(repository).objects
    looked.clear()
    plan = preload._plan(objects, PreloadOptions(), view)
    assert looked == ["/time"]
    assert [one.candidate.refs for one in plan.skipped] == [21]  # its manifest came along
