"""The storages that count, delay, fail and crash do just that."""

import asyncio
import pickle
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from zarr_manifests.error_cases import StorageFullError
from zarr_manifests.errors import InvalidArgumentError, StorageError
from zarr_manifests.runtime import SYSTEM, Runtime
from zarr_manifests.storage import Storage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.testing import (
    CountingStorage,
    CrashDisk,
    Fault,
    FaultyStorage,
    LatencyStorage,
    SimulatedCrash,
)
from zarr_manifests.testing.faulty import FaultKind

# --- counting --------------------------------------------------------------------------------


def test_every_call_is_logged_with_its_bytes() -> None:
    storage = CountingStorage(MemoryStorage())
    token = storage.cas("current", b"12345", None, then_create=("root/1", b"123"))
    storage.create("a", b"1234", durable=False)
    storage.create("a", b"1234")
    storage.put("b", b"12")
    storage.get("a", 1, 2)
    storage.get_ranges("a", [(0, 1), (1, 2)])
    storage.get_tagged("current")
    storage.head("a")
    list(storage.list("roo"))
    storage.cas("current", b"1", f"not {token}", then_create=("root/2", b"123"))
    storage.delete_many(iter(["a", "b"]))
    storage.sync(["current"])
    with pytest.raises(StorageError):
        storage.get("a")
    assert [(record.op, record.key, record.nbytes) for record in storage.log] == [
        ("cas", "current", 5),
        ("create_after", "root/1", 3),
        ("create", "a", 4),
        ("create", "a", 4),
        ("put", "b", 2),
        ("get", "a", 2),
        ("get_ranges", "a", 3),
        ("get_tagged", "current", 5),
        ("head", "a", 0),
        ("list", "roo", 0),
        ("cas", "current", 1),
        ("delete_many", "a", 0),
        ("sync", "current", 0),
        ("get", "a", 0),
    ]
    assert storage.requests == 13
    assert storage.bytes_read == 2 + 3 + 5
    assert storage.bytes_written == 5 + 3 + 4 + 4 + 2 + 1
    assert storage.rounds() == 12
    assert all(record.start <= record.end for record in storage.log)
    storage.reset()
    assert storage.log == []
    assert (storage.requests, storage.rounds()) == (0, 0)


async def test_async_calls_are_logged_under_the_same_names() -> None:
    storage = CountingStorage(LatencyStorage(MemoryStorage(), latency_s=0.005))
    await asyncio.gather(*(storage.create_async(f"k{i}", b"123") for i in range(5)))
    await asyncio.gather(*(storage.get_async(f"k{i}", 0, 2) for i in range(5)))
    assert sorted((record.op, record.nbytes) for record in storage.log) == [
        *[("create", 3)] * 5,
        *[("get", 2)] * 5,
    ]
    assert storage.rounds() == 2
    with pytest.raises(StorageError):
        await storage.get_async("absent")
    assert storage.requests == 11


def test_calls_side_by_side_are_one_round() -> None:
    storage = CountingStorage(MemoryStorage())
    SYSTEM.parallel([lambda i=i: storage.put(f"k{i}", b"1") for i in range(8)])
    assert storage.rounds() == 1
    storage.get("k1")
    storage.get("k2")
    assert storage.rounds() == 3
    storage.sync(["k1"])
    assert storage.rounds() == 3


def test_threads_that_begin_late_are_no_round_more() -> None:
    storage = CountingStorage(MemoryStorage())
    done = [threading.Event() for _ in range(9)]
    done[0].set()

    def late(i: int) -> None:
        """Begins only when the one before has ended; makes two calls in turn."""
        assert done[i].wait(20)
        storage.put(f"k{i}", b"1")
        storage.get(f"k{i}")
        done[i + 1].set()

    storage.put("before", b"1")
    SYSTEM.parallel([partial(late, i) for i in range(8)])
    assert storage.rounds() == 1 + 2
    storage.put("after", b"1")
    assert storage.rounds() == 1 + 2 + 1


def test_batches_in_turn_are_a_round_each() -> None:
    storage = CountingStorage(MemoryStorage())
    for batch in range(3):
        SYSTEM.parallel([partial(storage.put, f"{batch}-{i}", b"1") for i in range(8)])
        assert storage.rounds() == batch + 1


def test_the_slowest_of_a_batch_is_waited_for() -> None:
    """What comes after a batch waited for the call in it that waited for most."""
    storage = CountingStorage(MemoryStorage())

    def in_turn(n: int) -> None:
        for i in range(n):
            storage.put(f"{n}-{i}", b"1")

    SYSTEM.parallel([partial(in_turn, n) for n in (1, 5, 2)])
    assert storage.rounds() == 5
    storage.get("5-0")
    assert storage.rounds() == 6


def test_batches_within_batches_wait_for_what_led_to_them_alone() -> None:
    storage = CountingStorage(MemoryStorage())
    others = threading.Event()

    def within(name: str) -> None:
        if name == "late":
            assert others.wait(20)
        SYSTEM.parallel([partial(storage.put, f"{name}-{i}", b"1") for i in range(3)])
        storage.get(f"{name}-0")

    def long() -> None:
        for i in range(4):
            storage.put(f"long-{i}", b"1")
        others.set()

    SYSTEM.parallel([partial(within, "one"), partial(within, "two")])
    assert storage.rounds() == 2
    storage.reset()
    SYSTEM.parallel([long, partial(within, "late")])
    assert storage.rounds() == 4


def test_counting_from_many_threads_loses_nothing() -> None:
    storage = CountingStorage(MemoryStorage())

    def work() -> None:
        for i in range(200):
            storage.create(f"k{i}", b"1")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert storage.requests == 1600


def test_a_pickled_copy_counts_for_itself() -> None:
    storage = CountingStorage(LatencyStorage(MemoryStorage("count-pickle"), latency_s=0))
    storage.put("a", b"1")
    copy = pickle.loads(pickle.dumps(storage))
    assert copy.log == []
    assert copy.get("a") == b"1"
    assert (copy.requests, storage.requests) == (1, 1)


# --- latency ---------------------------------------------------------------------------------


def _recording_runtime(slept: list[float], later: list[Callable[[], None]]) -> Runtime:
    return Runtime(
        now_ms=SYSTEM.now_ms,
        monotonic_s=SYSTEM.monotonic_s,
        random_bytes=SYSTEM.random_bytes,
        jitter=SYSTEM.jitter,
        sleep=slept.append,
        parallel=SYSTEM.parallel,
        background=later.append,
    )


def test_every_call_waits_and_what_follows_a_swap_is_not_waited_for() -> None:
    slept: list[float] = []
    later: list[Callable[[], None]] = []
    memory = MemoryStorage()
    storage = LatencyStorage(memory, latency_s=0.5, runtime=_recording_runtime(slept, later))
    token = storage.cas("current", b"1", None, then_create=("root/1", b"1"))
    assert token is not None
    assert slept == [0.5]
    assert [info.key for info in memory.list()] == ["current"]
    assert storage.cas("current", b"2", "stale", then_create=("root/2", b"1")) is None
    assert len(later) == 1
    later[0]()
    assert [info.key for info in memory.list()] == ["current", "root/1"]
    assert slept == [0.5] * 3
    storage.sync(["current"])
    assert slept == [0.5] * 3
    storage.get("current")
    list(storage.list())
    storage.head("current")
    storage.delete_many(["current"])
    assert slept == [0.5] * 7


def test_what_follows_a_swap_is_done_where_there_is_no_thread_for_it() -> None:
    def no_thread(call: Callable[[], None]) -> None:
        raise RuntimeError("cannot schedule new futures after shutdown")

    memory = MemoryStorage()
    storage = LatencyStorage(memory, latency_s=0, runtime=replace(SYSTEM, background=no_thread))
    assert storage.cas("current", b"1", None, then_create=("root/1", b"1")) is not None
    assert [info.key for info in memory.list()] == ["current", "root/1"]


def test_a_distant_storage_is_not_inline() -> None:
    near = MemoryStorage()
    far = LatencyStorage(near, latency_s=0)
    assert near.capabilities.inline
    assert not far.capabilities.inline
    assert far.capabilities.shared == near.capabilities.shared
    assert far.url == near.url
    assert far.storage is near
    with pytest.raises(InvalidArgumentError):
        LatencyStorage(near, latency_s=-1)


# --- faults ----------------------------------------------------------------------------------


def _faulty(*faults: Fault) -> FaultyStorage:
    storage = FaultyStorage(MemoryStorage(), faults)
    storage.storage.put("a", b"0123456789")
    return storage


def test_fail_before_has_no_effect() -> None:
    storage = _faulty(Fault("fail_before", op="create", error=StorageFullError))
    with pytest.raises(StorageFullError, match="create b failed and had no effect"):
        storage.create("b", b"1")
    assert storage.create("b", b"2")
    assert storage.get("b") == b"2"


def test_fail_after_has_the_effect() -> None:
    storage = _faulty(Fault("fail_after", op="create"))
    with pytest.raises(StorageError, match="took effect"):
        storage.create("b", b"1")
    assert storage.get("b") == b"1"


def test_a_lost_answer_reads_like_somebody_elses_write() -> None:
    storage = _faulty(Fault("lose_answer"), Fault("lose_answer", op="cas"))
    assert not storage.create("b", b"1")
    assert storage.get("b") == b"1"
    assert storage.cas("c", b"1", None, then_create=("root/1", b"1")) is None
    assert storage.get("c") == b"1"
    assert storage.get("root/1") == b"1"


async def test_async_calls_fail_too() -> None:
    storage = _faulty(Fault("lose_answer", op="create"), Fault("flip_bits", op="get"))
    assert not await storage.create_async("b", b"1")
    assert await storage.get_async("b") == b"0"
    assert await storage.get_async("b") == b"1"


def test_a_late_duplicate_comes_after_other_calls_under_the_same_conditions() -> None:
    storage = _faulty(Fault("duplicate_late", op="create", after_calls=2))
    assert storage.create("b", b"old")
    storage.delete_many(["b"])
    assert [info.key for info in storage.storage.list()] == ["a"]
    storage.head("a")
    assert storage.storage.get("b") == b"old"  # back from the dead
    storage = _faulty(Fault("duplicate_late", op="cas", after_calls=1))
    token = storage.cas("c", b"1", None)
    assert storage.cas("c", b"2", token) is not None
    assert storage.get("c") == b"2"  # its token does not hold any more


def test_a_late_put_overwrites() -> None:
    storage = _faulty(Fault("duplicate_late", op="put", after_calls=1))
    storage.put("b", b"old")
    storage.put("b", b"new")
    assert storage.get("b") == b"old"


@pytest.mark.parametrize(
    ("kind", "expected"), [("truncate", b"01234"), ("flip_bits", b"01234\x346789")]
)
def test_damaged_reads(kind: FaultKind, expected: bytes) -> None:
    storage = _faulty(Fault(kind, count=None))
    assert storage.get("a") == expected
    assert storage.get_tagged("a").data == expected
    assert storage.get_ranges("a", [(0, 10)]) == [expected]
    assert storage.get_tagged("a").token == storage.storage.get_tagged("a").token
    storage.put("b", b"1")  # writes are left alone
    assert storage.storage.get("b") == b"1"


def test_op_key_skip_and_count_choose_the_calls() -> None:
    storage = _faulty(Fault("fail_before", op="get", key="chunks/*", skip=1, count=2))
    storage.put("chunks/s/1", b"1")
    outcomes = []
    for key in ("a", "chunks/s/1", "a", *["chunks/s/1"] * 3):
        try:
            storage.get(key)
            outcomes.append("ok")
        except StorageError:
            outcomes.append("failed")
    assert outcomes == ["ok", "ok", "ok", "failed", "failed", "ok"]


def test_any_of_many_keys_can_match() -> None:
    storage = _faulty(Fault("fail_before", key="b*"))
    with pytest.raises(StorageError):
        storage.delete_many(["a", "b"])
    assert storage.get("a") == b"0123456789"


def test_one_fault_fires_at_a_call_and_all_count_it() -> None:
    storage = _faulty(Fault("truncate"), Fault("flip_bits", skip=1))
    assert storage.get("a") == b"01234"
    assert storage.get("a") == b"01234\x346789"


def test_the_create_after_a_swap_can_fail_without_the_swap() -> None:
    storage = _faulty(Fault("fail_before", op="create_after"))
    assert storage.cas("c", b"1", None, then_create=("root/1", b"1")) is not None
    assert storage.calls == [("cas", "c"), ("create_after", "root/1")]
    assert [info.key for info in storage.list("root")] == []


def _work(storage: Storage) -> None:
    storage.create("x", b"1")
    storage.cas("y", b"2", None, then_create=("z", b"3"))
    storage.get("x")


@pytest.mark.parametrize("kind", ["crash_before", "crash_after"])
def test_a_crash_at_every_call(kind: FaultKind) -> None:
    left = []
    for number in range(1, 6):
        storage = FaultyStorage(MemoryStorage())
        storage.fail_at(number, kind)
        try:
            _work(storage)
        except SimulatedCrash:
            for call in (storage.get, storage.head, storage.list, storage.get_tagged):
                with pytest.raises(SimulatedCrash):  # the dead do not call
                    call("x")
            with pytest.raises(SimulatedCrash):
                storage.put("w", b"1")
        assert len(storage.calls) == min(number, 4)
        left.append("".join(info.key for info in storage.storage.list()))
    expected = {
        "crash_before": ["", "x", "xy", "xyz", "xyz"],
        "crash_after": ["x", "xy", "xyz", "xyz", "xyz"],
    }
    assert left == expected[kind]


def test_no_handler_of_errors_survives_a_crash() -> None:
    assert not issubclass(SimulatedCrash, Exception)


def test_the_dead_repeat_nothing() -> None:
    storage = FaultyStorage(MemoryStorage(), [Fault("duplicate_late", op="put", after_calls=1)])
    storage.fail_at(2, "crash_after")
    storage.put("a", b"1")
    with pytest.raises(SimulatedCrash):
        storage.delete_many(["a"])
    assert list(storage.storage.list()) == []
    storage.reset()
    assert list(storage.list()) == []


def test_fail_at_numbers_the_calls_to_come() -> None:
    storage = _faulty()
    storage.fail_at(2)
    storage.get("a")
    with pytest.raises(StorageError):
        storage.get("a")
    with pytest.raises(InvalidArgumentError, match="2 calls have been made"):
        storage.fail_at(2)
    storage.reset()
    storage.fail_at(1, "truncate")
    assert storage.get("a") == b"01234"
    assert storage.calls == [("get", "a")]


@pytest.mark.parametrize(
    "arguments",
    [
        {"kind": "explode"},
        {"kind": "fail_before", "op": "got"},
        {"kind": "truncate", "op": "put"},
        {"kind": "duplicate_late", "op": "get"},
        {"kind": "fail_before", "skip": -1},
        {"kind": "fail_before", "count": 0},
        {"kind": "duplicate_late", "after_calls": -1},
    ],
)
def test_faults_without_meaning_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(InvalidArgumentError):
        Fault(**arguments)  # type: ignore[arg-type]


def test_a_faulty_storage_is_pickled_with_its_faults() -> None:
    storage = FaultyStorage(MemoryStorage("faulty-pickle"), [Fault("fail_before", op="put")])
    copy = pickle.loads(pickle.dumps(storage))
    with pytest.raises(StorageError):
        copy.put("a", b"1")
    copy.put("a", b"1")


# --- a disk that crashes ---------------------------------------------------------------------


def test_a_crash_drops_what_is_not_synced_and_keeps_the_rest(tmp_path: Path) -> None:
    disk = CrashDisk(tmp_path / "repository")
    storage = disk.storage()
    storage.create("kept", b"1")
    storage.create("d/synced", b"2", durable=False)
    storage.create("d/torn", b"3", durable=False)
    storage.sync(["d/synced"])
    storage.create("d/lost", b"4", durable=False)
    storage.create("e/lost", b"5", durable=False)
    disk.crash()
    storage = disk.storage()
    assert {info.key: storage.get(info.key) for info in storage.list()} == {
        "kept": b"1",
        "d/synced": b"2",
        "d/torn": b"",  # its name was synced with that folder, its bytes were not
    }
    assert not (tmp_path / "repository" / "e").exists()
    assert storage.create("e/lost", b"again")
    disk.crash()
    storage = disk.storage()
    assert storage.get("e/lost") == b"again"


def test_an_undone_rename_brings_the_old_file_back(tmp_path: Path) -> None:
    disk = CrashDisk(tmp_path)
    storage = disk.storage()
    storage.put("a", b"old")
    storage.put("a", b"new", durable=False)
    storage.delete_many(["a"])
    disk.crash()
    storage = disk.storage()
    assert storage.get("a") == b"old"


def test_a_file_that_comes_back_is_as_torn_as_it_was(tmp_path: Path) -> None:
    disk = CrashDisk(tmp_path)
    storage = disk.storage()
    storage.create("a", b"1", durable=False)
    storage.create("b", b"2")  # brings the name of the other to the disk, not its bytes
    storage.put("a", b"3", durable=False)
    disk.crash()
    storage = disk.storage()
    assert storage.get("a") == b""


def test_the_whole_root_goes_if_its_name_was_not_synced(tmp_path: Path) -> None:
    disk = CrashDisk(tmp_path / "repository")
    storage = disk.storage()
    storage.create("a", b"1", durable=False)
    disk.crash()
    storage = disk.storage()
    assert list(tmp_path.iterdir()) == []


def test_chance_decides_what_is_lost_and_the_seed_decides_chance(tmp_path: Path) -> None:
    def survivors(folder: str, seed: int) -> dict[str, bytes]:
        disk = CrashDisk(tmp_path / folder)
        storage = disk.storage()
        storage.create("a", b"1")
        for i in range(20):
            storage.create(f"k{i}", b"0123456789", durable=False)
        disk.crash(random.Random(seed))
        storage = disk.storage()
        return {info.key: storage.get(info.key) for info in storage.list()}

    first = survivors("x", 1)
    assert first == survivors("y", 1)
    assert first != survivors("z", 2)
    assert first["a"] == b"1"
    assert 1 < len(first) < 21
    lengths = {len(data) for key, data in first.items() if key != "a"}
    assert len(lengths) > 3
    assert all(b"0123456789".startswith(data) for key, data in first.items() if key != "a")


def test_a_planned_crash_stops_the_disk_until_the_restart(tmp_path: Path) -> None:
    disk = CrashDisk(tmp_path)
    storage = disk.storage()
    storage.create("a", b"1")
    disk.crash_at = len(disk.calls) + 4  # the link
    for _ in range(2):
        with pytest.raises(SimulatedCrash):
            storage.create("b", b"2")
    disk.crash()
    storage = disk.storage()
    assert [info.key for info in storage.list()] == ["a"]
    assert storage.create("b", b"2")


def test_a_storage_on_a_crashing_disk_is_not_pickled(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="not picklable"):
        pickle.dumps(CrashDisk(tmp_path).storage())
