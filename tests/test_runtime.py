"""What the real threads promise, whichever of them are free."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from zarr_manifests import runtime
from zarr_manifests.runtime import SYSTEM

ONE_THREAD = """
    from zarr_manifests import runtime
    runtime._POOL_THREADS = 1
"""


def run(code: str, *args: object) -> str:
    """Run it in a process of its own, since its pool may be waiting for ever; what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def test_calls_may_be_made_side_by_side_in_turn() -> None:
    code = """
        import threading
        from zarr_manifests.runtime import SYSTEM
        all_are_asked_for = threading.Event()
        def outer(i):
            if not i:
                all_are_asked_for.set()  # on the calling thread, which has handed over the others
            all_are_asked_for.wait()
            return SYSTEM.parallel([lambda: i, lambda: -i])
        calls = [lambda i=i: outer(i) for i in range(200)]
        print(SYSTEM.parallel(calls) == [[i, -i] for i in range(200)])
    """
    assert run(code) == "True\n"


def test_who_holds_a_lock_does_not_wait_for_threads_that_wait_for_it() -> None:
    code = """
        import threading
        from zarr_manifests.runtime import SYSTEM
        lock, waiting = threading.Lock(), threading.Barrier(2)
        def wait():
            waiting.wait()
            with lock:
                pass
        def others():
            SYSTEM.parallel([lambda: None, wait])
        with lock:
            thread = threading.Thread(target=others)
            thread.start()
            waiting.wait()
            print(SYSTEM.parallel([lambda: 1, lambda: 2]))
        thread.join()
    """
    assert run(textwrap.dedent(ONE_THREAD) + textwrap.dedent(code)) == "[1, 2]\n"


@pytest.mark.slow
def test_usage_is_counted_of_more_arrays_than_there_are_threads(tmp_path: Path) -> None:
    code = """
        import sys, zarr
        import zarr_manifests as zm
        small = {"sets": [{"small": {"max-manifest-size": 2, "cardinality": None}}]}
        some = {"rules": [{"target": "small"}], "splitting": [{"path": ".*", "along": {0: 2}}]}
        repo = zm.create(sys.argv[1], {"chunk-manifests": {**small, **some}})
        with repo.transaction(message="make") as store:
            for i in range(4):
                zarr.create_array(store, name=f"a{i}", shape=(8,), chunks=(1,), dtype="u1")[:] = 9
        repo.compact(mode="full")
        for step in range(3):
            with repo.transaction(message=f"step {step}") as store:
                for i in range(4):
                    zarr.open_array(store, path=f"a{i}")[step] = step + 1
        fresh = zm.open(sys.argv[1])
        print([usage.chunks for usage in fresh.du().arrays])
    """
    code = textwrap.dedent(ONE_THREAD) + textwrap.dedent(code)
    assert run(code, tmp_path / "r") == "[8, 8, 8, 8]\n"


def test_each_call_is_made_once_whoever_makes_it() -> None:
    made: list[int] = []
    inner = 3

    def outer(i: int) -> list[None]:
        return SYSTEM.parallel([partial(made.append, inner * i + j) for j in range(inner)])

    SYSTEM.parallel([partial(outer, i) for i in range(300)])
    assert sorted(made) == list(range(300 * inner))


def test_the_first_error_is_raised_when_all_have_ended() -> None:
    ended: list[int] = []

    def call(i: int) -> None:
        try:
            if i % 3 == 1:
                raise ValueError(i)
        finally:
            ended.append(i)

    with pytest.raises(ValueError, match=r"^1$"):
        SYSTEM.parallel([partial(call, i) for i in range(100)])
    assert sorted(ended) == list(range(100))


def test_who_is_interrupted_waits_for_what_has_begun_and_begins_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime, "_POOL_THREADS", 1)
    monkeypatch.setattr(runtime, "_POOL", runtime._Pool())
    begun, go_on = threading.Barrier(2), threading.Event()
    ended: list[str] = []

    def interrupted() -> None:
        begun.wait()
        raise KeyboardInterrupt

    def other() -> None:
        begun.wait()
        go_on.wait()
        ended.append("other")

    def wait(call: runtime._Call[None]) -> None:
        go_on.set()
        call._ended.wait()

    monkeypatch.setattr(runtime._Call, "wait", wait)
    calls: list[Callable[[], None]] = [interrupted, other, partial(ended.append, "left")]
    with pytest.raises(KeyboardInterrupt):
        SYSTEM.parallel(calls)
    through = threading.Event()
    SYSTEM.background(through.set)  # by the one thread, after all that it was handed before
    through.wait()
    assert ended == ["other"]


@pytest.mark.parametrize("ending", ["atexit", "another thread"])
def test_a_commit_lands_while_the_interpreter_exits(tmp_path: Path, ending: str) -> None:
    code = """
        import atexit, sys, threading, zarr
        from concurrent.futures import thread
        import zarr_manifests as zm
        repo = zm.create(sys.argv[1])
        session = repo.writable_session()
        zarr.create_array(session.store, name="a", shape=(4,), chunks=(1,), dtype="u1")[:] = 7
        def end():
            if sys.argv[2] != "atexit":
                threading.main_thread().join()
            assert thread._shutdown
            session.commit("at the end")
            print(repo.du().chunks)
        if sys.argv[2] == "atexit":
            atexit.register(end)
        else:
            threading.Thread(target=end).start()
    """
    assert run(code, tmp_path / "r", ending) == "4\n"


def test_what_no_thread_can_be_had_for_is_made_once() -> None:
    """The pool has it in its queue by then, and one of its other threads may still come to it."""
    code = """
        import threading
        from zarr_manifests.runtime import SYSTEM
        begun, go_on, through, made = *(threading.Event() for _ in range(3)), []
        SYSTEM.background(lambda: (begun.set(), go_on.wait()))
        begun.wait()  # the pool's one thread is busy
        def no_more(thread):
            raise RuntimeError("can't start new thread")
        threading.Thread.start = no_more
        SYSTEM.parallel([lambda i=i: made.append(i) for i in range(10)])
        try:
            SYSTEM.background(lambda: made.append("refused"))
        except RuntimeError as error:
            print(error)
        go_on.set()
        while not through.is_set():
            try:
                SYSTEM.background(through.set)
            except RuntimeError:  # the thread is not idle yet
                continue
            through.wait()
        print(sorted(made) == list(range(10)))
    """
    assert run(code) == "can't start new thread\nTrue\n"


def test_who_is_interrupted_waits_for_no_call_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(call: runtime._Call[None], by: object) -> bool:
        taken = take(call, by)
        if by is not call and not interrupts:
            interrupts.append(taken)
            raise KeyboardInterrupt  # right after it has been taken
        return taken

    take, interrupts = runtime._Call.take, list[bool]()
    monkeypatch.setattr(runtime._Call, "take", interrupted)
    waited: list[BaseException] = []

    def work() -> None:
        try:
            SYSTEM.parallel([lambda: None, lambda: None])
        except KeyboardInterrupt as error:
            waited.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert (len(waited), interrupts) == (1, [True])


def test_threads_that_are_quiet_at_once_hear_nothing_and_leave_the_filters_as_they_were() -> None:
    first_left, second_in = threading.Event(), threading.Event()

    def second() -> None:
        with runtime.quiet():
            second_in.set()
            assert first_left.wait(60)
            warnings.warn("which is an error in tests", stacklevel=1)

    filters = list(warnings.filters)
    with ThreadPoolExecutor() as pool:
        with runtime.quiet():
            ended = pool.submit(second)
            assert second_in.wait(60)
        first_left.set()
        ended.result()
    assert warnings.filters == filters
    with pytest.warns(UserWarning, match="heard"):
        warnings.warn("heard", stacklevel=1)
