"""What the real threads promise, whichever of them are free."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest

from zarr_manifests.runtime import SYSTEM


def run(code: str, *args: object) -> str:
    """Run it in a process of its own, since its pool may be waiting for ever; what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), *map(str, args)],
        capture_output=True,
        text=True,
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


def test_who_is_interrupted_waits_for_what_has_begun_and_begins_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others_go, begun, ended = threading.Event(), list[int](), list[int]()
    cancelled, cancel = itertools.count(), Future.cancel

    def counted(future: Future[None]) -> bool:
        done = cancel(future)
        if next(cancelled) >= len(others):
            others_go.set()
        return done

    def interrupted() -> None:  # on the calling thread, which has handed over the others
        raise KeyboardInterrupt

    def other(number: int) -> None:
        begun.append(number)
        others_go.wait()
        ended.append(number)

    others = [partial(other, number) for number in range(2_000)]
    monkeypatch.setattr(Future, "cancel", counted)
    with pytest.raises(KeyboardInterrupt):
        SYSTEM.parallel([interrupted, *others])
    at_the_end = len(begun), len(ended)
    through = threading.Event()
    SYSTEM.background(through.set)  # after all that was handed over before
    through.wait()
    assert at_the_end[0] == at_the_end[1] == len(begun) < len(others)


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
