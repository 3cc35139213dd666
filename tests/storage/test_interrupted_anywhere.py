"""An interrupt at any place of a write or a read: others go on, and so does the next call.

Python raises `KeyboardInterrupt` on the main thread after a call, at the start of a function and at
the end of a turn of a loop, so never between entering a `with` of a lock in C and its block. These
places are taken from the code as it runs, and an interrupt is raised at many of them, one a run.
"""

from __future__ import annotations

import concurrent.futures.thread
import contextlib
import dis
import functools
import itertools
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr

import zarr_manifests as zm
from storages import LatencyStorage
from zarr_manifests.commits import SessionCommits
from zarr_manifests.config.cache_options import CacheOptions
from zarr_manifests.engine.objects.decoded_cache import DecodedCache
from zarr_manifests.error_cases import NotARepositoryError
from zarr_manifests.errors import SessionClosedError
from zarr_manifests.runtime import SYSTEM, ForkSafeLock
from zarr_manifests.storage import Storage
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.locks import exclusive
from zarr_manifests.storage.memory import MemoryStorage

type Place = tuple[CodeType, int]

TRIED = 40  # places of each scenario, half of them where something is taken or given back
# Not Python's conditions and events: with them an interrupt may leave a lock held, whoever waits.
OURS = (
    __file__,
    str(Path(zm.__file__).parent),
    *(module.__file__ for module in (contextlib, concurrent.futures.thread)),
)
TOOL, EVENTS = 4, sys.monitoring.events


@functools.cache
def places_in(code: CodeType) -> frozenset[int]:
    """The offsets at which an interrupt may be raised."""
    if not code.co_filename.startswith(OURS) or code.co_qualname.startswith("Interrupting."):
        return frozenset()
    every = list(dis.get_instructions(code))
    ranges = dis._parse_exception_table(code)  # type: ignore[attr-defined]

    def handler(at: int) -> list[int]:
        return [entry.target for entry in ranges if entry.start <= at < entry.end]

    found = {one.offset for one in every if one.opname == "JUMP_BACKWARD"}
    for one, following in itertools.pairwise(every):
        asks = one.opname == "RESUME" or one.opname.startswith("CALL")
        # What is raised here belongs to the instruction that follows.
        if asks and handler(one.offset) == handler(following.offset):
            found.add(following.offset)
    return frozenset(found)


def guards(code: CodeType) -> bool:
    """Whether it takes or gives back something, as a lock."""
    enters = ("BEFORE_WITH", "LOAD_SPECIAL")
    return code.co_name in ("__enter__", "__exit__") or any(
        one.opname in enters for one in dis.get_instructions(code)
    )


class Interrupting:
    """Calls something, and raises `KeyboardInterrupt` in it when a place is reached."""

    def __init__(self, code: CodeType | None = None, offset: int = 0, after: int = 0) -> None:
        self._code, self._offset, self._after = code, offset, after
        self.seen: Counter[Place] = Counter()
        self.raised = False

    def _look(self, code: CodeType, offset: int) -> Any:
        if self._code is None and offset not in places_in(code):
            return sys.monitoring.DISABLE
        if threading.current_thread() is self._thread:  # as signals are heard
            self.seen[code, offset] += 1
            if not self.raised and (code, offset) == (self._code, self._offset):
                self._after -= 1
                if self._after < 0:
                    self.raised = True
                    raise KeyboardInterrupt
        return None

    def call(self, call: Callable[[], object]) -> BaseException | None:
        """Call it; the interrupt, if it came."""
        self._thread = threading.current_thread()
        monitoring = sys.monitoring
        monitoring.use_tool_id(TOOL, "interrupts")
        monitoring.register_callback(TOOL, EVENTS.INSTRUCTION, self._look)
        if self._code is None:
            monitoring.set_events(TOOL, EVENTS.INSTRUCTION)
        else:
            monitoring.set_local_events(TOOL, self._code, EVENTS.INSTRUCTION)
        try:
            call()
        except KeyboardInterrupt as error:
            return error
        finally:
            monitoring.set_events(TOOL, 0)
            if self._code is not None:
                monitoring.set_local_events(TOOL, self._code, 0)
            monitoring.free_tool_id(TOOL)
        return None


def dataset(start: int, stop: int, seed: int = 0) -> xr.Dataset:
    rng = np.random.default_rng([seed, start])
    variables: dict[str, Any] = {
        name: (("time", "x"), rng.random((stop - start, 40))) for name in ("plain", "packed")
    }
    if start == 0:
        variables["large"] = (("y",), rng.random(40_000))
    return xr.Dataset(variables, {"time": np.arange(start, stop)})


CHUNKS = {"plain": {"chunks": (1, 40)}, "packed": {"chunks": (3, 7)}}


class Scenario:
    """A repository, what is done to it, and how it then is."""

    def __init__(self, storage: Storage, through: Storage) -> None:
        self.storage, self.through = storage, through
        zm.write(dataset(0, 4), storage, message="first", encoding=CHUNKS)

    def work(self) -> None:
        zm.write(dataset(4, 6), self.through, message="wanted", append_dim="time")

    @property
    def wanted(self) -> xr.Dataset:
        return xr.concat([dataset(0, 4), dataset(4, 6)], "time", data_vars="minimal")

    def landed(self) -> bool:
        found = [info.message for info in zm.open(self.storage).ancestry()]
        assert found in (["first", "create repository"], ["wanted", "first", "create repository"])
        return len(found) == 3

    def again(self) -> None:
        """Do it again if it was not done, then look and write."""
        if not self.landed():
            self.work()
        assert self.landed()
        read = xr.open_dataset(self.through, engine="zarr_manifests").load()
        xr.testing.assert_identical(read, self.wanted)
        assert zm.open(self.storage).verify().ok


class Create(Scenario):
    def __init__(self, storage: Storage, through: Storage) -> None:
        self.storage, self.through = storage, through

    def work(self) -> None:
        zm.write(dataset(0, 4), self.through, message="wanted", encoding=CHUNKS)

    @property
    def wanted(self) -> xr.Dataset:
        return dataset(0, 4)

    def landed(self) -> bool:
        try:
            found = [info.message for info in zm.open(self.storage).ancestry()]
        except NotARepositoryError:
            return False
        assert found in (["create repository"], ["wanted", "create repository"])
        return len(found) == 2


class GoOn(Scenario):
    """A session goes on if it does not say that it is closed; it commits nothing twice."""

    session: zm.Session | None = None

    def work(self) -> None:
        if self.session is None:
            self.session = zm.open(self.through).writable_session()
        group, new = zarr.open_group(self.session.store, mode="r+"), dataset(0, 4, 1)
        for name in new.data_vars:
            group[str(name)][:] = new[name].values  # type: ignore[index]
        self.session.commit("wanted")

    @property
    def wanted(self) -> xr.Dataset:
        return dataset(0, 4, 1)

    def again(self) -> None:
        session = self.session
        if session is not None and self.landed():
            with contextlib.suppress(SessionClosedError):
                if session.status():
                    session.commit("twice")
        try:
            super().again()
        except SessionClosedError:
            self.session = None
            super().again()


class Read(Scenario):
    def __init__(self, storage: Storage, through: Storage) -> None:
        super().__init__(storage, through)
        zm.write(dataset(4, 6), storage, message="wanted", append_dim="time")
        self.repository = zm.open(through)
        self.store = self.repository.readonly_session().store

    def work(self) -> None:
        read = xr.open_dataset(self.repository, engine="zarr_manifests").load()
        xr.testing.assert_identical(read, self.wanted)
        found = zarr.open_group(self.store, mode="r")["packed"][:]  # type: ignore[index]
        np.testing.assert_array_equal(found, self.wanted.packed)

    def again(self) -> None:
        self.work()
        super().again()


def in_time(call: Callable[[], object]) -> None:
    """Make the call on another thread, and do not wait for ever for it."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "a lock is held, or something is waited for that never comes"
    if errors:
        raise errors[0]


def a_lock(_: Path) -> Callable[[], object]:
    lock = ForkSafeLock()

    def hold() -> None:
        with lock:
            pass

    return hold


def a_lock_file(folder: Path) -> Callable[[], object]:
    def hold() -> None:
        with exclusive(str(folder / ".lock")):
            pass

    return hold


def a_cache(_: Path) -> Callable[[], object]:
    cache = DecodedCache(CacheOptions(), SYSTEM)

    def obtain() -> None:
        cache.clear()
        assert cache.obtain(("name",), lambda: b"value") == b"value"

    return obtain


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:.*unclosed file:ResourceWarning")
@pytest.mark.parametrize("make", [a_lock, a_lock_file, a_cache])
def test_an_interrupt_at_each_place_keeps_nobody_waiting(
    make: Callable[[Path], Callable[[], object]], tmp_path: Path
) -> None:
    make(tmp_path)()  # what is done once only
    looking = Interrupting()
    assert looking.call(make(tmp_path)) is None
    assert looking.seen
    for (code, offset), times in looking.seen.items():
        for after in range(times):
            call = make(tmp_path)
            kept = Interrupting(code, offset, after).call(call)  # as an interactive session does
            assert kept is not None
            in_time(call)


@pytest.fixture
def made(tmp_path: Path) -> Callable[[str, type[Scenario]], Scenario]:
    numbers = itertools.count()

    def make(kind: str, scenario: type[Scenario]) -> Scenario:
        if kind == "disk":
            storage: Storage = LocalStorage(tmp_path / str(next(numbers)))
            return scenario(storage, storage)
        storage = MemoryStorage()
        far = LatencyStorage(storage, latency_s=0.0)
        return scenario(storage, far if kind == "far away" else storage)

    return make


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files not closed
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "scenario"),
    [
        ("memory", Scenario),
        ("disk", Scenario),
        ("far away", Scenario),
        ("disk", Create),
        ("disk", GoOn),
        ("disk", Read),
    ],
)
def test_an_interrupt_anywhere_leaves_nothing_held(
    kind: str, scenario: type[Scenario], made: Callable[[str, type[Scenario]], Scenario]
) -> None:
    made(kind, scenario).work()  # what is done once only
    looking = Interrupting()
    assert looking.call(made(kind, scenario).work) is None
    rng = random.Random(f"{kind} {scenario.__name__}")
    every = sorted(looking.seen, key=lambda at: (at[0].co_filename, at[0].co_firstlineno, at[1]))
    near = [place for place in every if guards(place[0])]
    raised = 0
    for code, offset in rng.sample(every, TRIED // 2) + rng.sample(near, TRIED // 2):
        one = made(kind, scenario)
        interrupting = Interrupting(code, offset, rng.randrange(looking.seen[code, offset]))
        kept = interrupting.call(one.work)  # as an interactive session keeps it
        raised += interrupting.raised
        where = f"{code.co_filename}:{code.co_firstlineno} {code.co_qualname} at {offset}"
        try:
            in_time(one.again)
        except BaseException as error:
            error.add_note(f"after an interrupt in {where}")
            raise
        del kept
    assert raised > 0.9 * TRIED


def test_what_has_landed_is_not_committed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    storage = MemoryStorage()
    session = zm.create(storage).writable_session()
    zarr.create_array(session.store, name="a", data=np.arange(3))
    with monkeypatch.context() as patch:
        patch.setattr(SessionCommits, "_go_on", interrupted)  # right after the swap
        with pytest.raises(KeyboardInterrupt):
            session.commit("once")
    with pytest.raises(SessionClosedError, match="took effect is not known"):
        session.commit("twice")
    found = [info.message for info in zm.open(storage).ancestry()]
    assert found == ["once", "create repository"]
