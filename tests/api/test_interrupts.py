"""Ctrl-C at every call to the storage of a write with xarray: all of it is committed, or nothing.

The signal comes on whichever thread makes the call, and Python raises `KeyboardInterrupt` on the
main one, wherever that is then.
"""

from __future__ import annotations

import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from zarr.core.buffer import default_buffer_prototype

import zarr_manifests as zm
from storages import Call, InterruptingStorage, LatencyStorage, WrappedStorage
from zarr_manifests.bulk import use_bulk, write_here
from zarr_manifests.errors import SessionClosedError
from zarr_manifests.storage import Storage
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import ManifestStore, contents_of

PACKAGE = str(Path(zm.__file__).parent)
CHUNKS = {"t": {"chunks": (1, 40)}, "big": {"chunks": (100_000,)}}


def dataset(start: int, stop: int) -> xr.Dataset:
    rng = np.random.default_rng(start)
    variables = {"t": (("time", "x"), rng.random((stop - start, 40)))}
    if start == 0:
        variables["big"] = (("y",), rng.random(200_000))
    return xr.Dataset(variables, {"time": np.arange(start, stop)})


class _After(InterruptingStorage):
    """The interrupt comes when the call has been made."""

    def _around[R](self, call: Call[R]) -> R:
        result = WrappedStorage._around(self, call)  # noqa: SLF001 - not the one of its own base
        self._count(call.op)
        return result


KINDS: dict[str, Callable[[Storage], Storage]] = {
    "before": lambda s: InterruptingStorage(s, interrupt),
    "after": lambda s: _After(s, interrupt),
    "far away": lambda s: _After(LatencyStorage(s, latency_s=0.0), interrupt),
}


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Have Python hear Ctrl-C; a shell that starts a run in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def with_session(storage: Storage) -> None:
    session = zm.open(storage).writable_session()
    dataset(0, 3).to_zarr(session.store, consolidated=False, encoding=CHUNKS)
    session.commit("wanted")


def with_transaction(storage: Storage) -> None:
    with zm.open(storage).transaction(message="wanted") as store:
        dataset(0, 3).to_zarr(store, consolidated=False, encoding=CHUNKS)


def with_write(storage: Storage) -> None:
    zm.write(dataset(0, 3), storage, message="wanted", encoding=CHUNKS)


def in_time(call: Callable[[], object]) -> None:
    """Make the call on a thread of its own, and do not wait for ever for it."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "a lock is held, or something is waited for that never comes"
    if errors:
        raise errors[0]


def messages(storage: Storage) -> list[str]:
    return [info.message for info in zm.open(storage).ancestry()]


def check(storage: Storage, through: Storage) -> bool:
    """Whether it was committed; by the storage itself, and what was in between once more."""
    found = messages(storage)
    assert found in (["create repository"], ["wanted", "create repository"])
    if len(found) == 2:
        read = xr.open_dataset(storage, engine="zarr_manifests")
        xr.testing.assert_identical(read.load(), dataset(0, 3))
    else:
        assert [*contents_of(zm.open(storage).readonly_session().store).keys_below("")] == []
        zm.write(dataset(0, 3), through, message="again", encoding=CHUNKS)
    zm.write(dataset(3, 4), through, message="more", append_dim="time")
    read = xr.open_dataset(storage, engine="zarr_manifests").load()
    np.testing.assert_array_equal(read.time, np.arange(4))
    np.testing.assert_array_equal(read.t[:3], dataset(0, 3).t)
    assert zm.open(storage).verify().ok
    return len(found) == 2


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Callable[[str], Storage]]:
    made = iter(range(10_000))

    def make(kind: str) -> Storage:
        on_disk = kind == "after"
        storage = LocalStorage(tmp_path / str(next(made))) if on_disk else MemoryStorage()
        zm.create(storage)
        return storage

    return make


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "work"),
    [
        ("before", with_write),
        ("before", with_session),
        ("after", with_transaction),
        ("far away", with_write),
    ],
)
def test_an_interrupt_at_every_call(
    kind: str, work: Callable[[Storage], None], places: Callable[[str], Storage]
) -> None:
    counting = KINDS[kind](places(kind))
    work(counting)
    outcomes: list[bool] = []
    for at in range(1, len(counting.ops) + 1):
        storage = places(kind)
        wrapped = KINDS[kind](storage)
        wrapped.arm(at)
        with suppress(KeyboardInterrupt):
            work(wrapped)
        wrapped.arm(0)
        in_time(lambda s=storage, w=wrapped: outcomes.append(check(s, w)))
    assert False in outcomes
    assert True in outcomes or kind == "before"  # the swap is the last call


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
def test_a_session_goes_on_after_an_interrupt_or_says_that_it_does_not(
    kind: str, places: Callable[[str], Storage]
) -> None:
    counting = KINDS[kind](places(kind))
    with_session(counting)
    went_on = closed = 0
    for at in range(2, len(counting.ops) + 1):
        storage = places(kind)
        wrapped = KINDS[kind](storage)
        session = zm.open(wrapped).writable_session()
        wrapped.arm(at)
        with suppress(KeyboardInterrupt):
            dataset(0, 3).to_zarr(session.store, consolidated=False, encoding=CHUNKS)
            session.commit("wanted")
        wrapped.arm(0)

        def go_on(session: zm.Session = session) -> bool:
            try:
                dataset(0, 3).to_zarr(session.store, mode="w", consolidated=False, encoding=CHUNKS)
                if session.status():
                    session.commit("again")
            except SessionClosedError:
                return False
            return True

        answers: list[bool] = []
        in_time(lambda go_on=go_on, answers=answers: answers.append(go_on()))
        went_on, closed = went_on + answers[0], closed + (not answers[0])
        if answers[0] or len(messages(storage)) > 1:
            read = xr.open_dataset(storage, engine="zarr_manifests")
            xr.testing.assert_identical(read.load(), dataset(0, 3))
        assert zm.open(storage).verify().ok
    assert went_on
    assert closed


SEVEN = default_buffer_prototype().buffer.from_bytes(np.full(2, 7, "i4").tobytes())
WRITES: dict[str, Callable[[ManifestStore, Any], object]] = {
    "set": lambda store, _: store.set_sync("a/c/0", SEVEN),
    "delete": lambda store, _: store.delete_sync("a/c/0"),
    "in bulk": lambda _, array: write_here(array, (slice(0, 2),), np.full(2, 7, "i4")),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_an_interrupt_in_a_write_closes_its_session_and_no_other(
    write: Callable[[ManifestStore, Any], object],
) -> None:
    closed = []
    for number in itertools.count(1, 4):
        storage = MemoryStorage()
        repo = zm.create(storage, {"inline-chunk-bytes": 0, "pack-chunk-bytes": 0})
        with repo.transaction(message="wanted") as store:
            data = np.arange(4, dtype="i4")
            zarr.create_array(store, name="a", data=data, chunks=(2,), compressors=None)
        session, other = repo.writable_session(), repo.writable_session()
        other.store.set_sync("a/c/1", SEVEN)
        array = zarr.open_array(session.store, path="a")
        use_bulk(array)
        try:
            with interrupted_at(number):
                write(session.store, array)
        except KeyboardInterrupt:
            try:
                session.commit("goes on", allow_empty=True)
                closed.append(False)
            except SessionClosedError as error:
                closed.append("a write was interrupted" in str(error))
        else:
            break
        other.commit("the other session's")
        now = zarr.open_array(repo.readonly_session().store, path="a")[:].tolist()
        wholly = ([0, 1],) if closed[-1] else ([0, 1], [7, 7], [0, 0])
        assert now[:2] in wholly
        assert now[2:] == [7, 7]
        assert repo.verify().ok
    assert any(closed)


@contextmanager
def interrupted_at(number: int) -> Iterator[None]:
    """Interrupt this thread at a call within the package, or the next that Python does not mute."""
    calls = itertools.count(1)

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or PACKAGE not in frame.f_code.co_filename or next(calls) < number:
            return
        if not is_muted(frame):
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def is_muted(frame: FrameType | None) -> bool:
    """Whether a finalizer is running, at a collection of garbage say, whose errors Python drops."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__" or code.co_qualname == "finalize.__call__":
            return True
        frame = frame.f_back
    return False


def test_a_write_that_zarr_goes_on_with_is_committed_whole() -> None:
    class Interrupts(MemoryStorage):
        interrupts, commits = False, threading.Event()

        def create(self, key: str, data: Any, *, durable: bool = True) -> bool:
            if self.interrupts and key.startswith("chunks"):
                self.interrupts = False
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                self.commits.wait()
            return super().create(key, data, durable=durable)

    storage = Interrupts()
    config = {"inline-chunk-bytes": 0, "pack-chunk-bytes": 0}
    repo = zm.create(storage, config)
    with repo.transaction(message="m") as store:
        zarr.create_array(store, name="a", shape=(200,), chunks=(1,), dtype="i4")[:] = 1
    session = repo.writable_session()
    array = zarr.open_array(session.store, path="a")
    storage.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        array[:] = 2
    storage.commits.set()
    session.commit("after Ctrl-C")
    assert not session.status()
    found = zarr.open_array(repo.readonly_session().store, path="a", mode="r")[:]
    assert np.unique(found).tolist() == [2]
