"""What the package takes from the outside world besides storage: time, chance, threads.

Invariant: no other module of the package reads a clock, draws a random number, sleeps or starts
a thread on its own account. All of it goes through one `Runtime`, so a test can replace the
world by a deterministic one: a fake clock, seeded bytes, no sleeping, and `parallel` run in a
fixed order with `checkpoint` as the place where a scheduler may switch to another actor.
"""

from __future__ import annotations

import functools
import getpass
import itertools
import os
import random
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

__all__ = [
    "SYSTEM",
    "ForkSafeLock",
    "PerThread",
    "Runtime",
    "asked_at",
    "fork_awaited_lock",
    "forks_made",
    "handed_over",
    "next_step",
    "one_by_one",
    "start_thread",
]

MAX_MS: Final = 253_402_300_799_999
"""The last millisecond of the year 9999, beyond which no date can be told."""
_POOL_THREADS = 64  # all live deltas of an array are fetched in one round


class ForkSafeLock:
    """A reentrant lock that a forked child finds free, whichever thread of its parent held it.

    Examples
    --------
    >>> from zarr_manifests.runtime import ForkSafeLock
    >>> lock = ForkSafeLock()
    >>> with lock, lock:
    ...     pass
    """

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _LOCKS.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def _renew(self) -> None:
        self._lock = threading.RLock()


_LOCKS: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _renew_locks() -> None:
    for lock in list(_LOCKS):
        lock._renew()


os.register_at_fork(after_in_child=_renew_locks)


def fork_awaited_lock() -> AbstractContextManager[bool]:
    """A reentrant lock that `os.fork` waits for, so that no child finds half done what it guards.

    It is for what keeps locks of its own that nobody renews, as some libraries in C++ do. It lasts
    as long as the process: a module makes one, not an object, and does not hold it for long.

    Examples
    --------
    >>> from zarr_manifests.runtime import fork_awaited_lock
    >>> lock = fork_awaited_lock()
    >>> with lock, lock:
    ...     pass
    """
    lock = threading.RLock()
    os.register_at_fork(
        before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
    )
    return lock


class PerThread[T]:
    """A value that each thread makes for itself, since threads cannot share it.

    Examples
    --------
    >>> from zarr_manifests.runtime import PerThread
    >>> buffers = PerThread(bytearray)
    >>> buffers.get() is buffers.get()
    True
    """

    __slots__ = ("_local", "_make")

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._local = threading.local()

    def get(self) -> T:
        """What the calling thread has."""
        try:
            found: T = self._local.value
        except AttributeError:
            found = self._local.value = self._make()
        return found


class _Forks:
    """How often this process has been forked; a child goes on from its parent's number."""

    count = 0


def _count_fork() -> None:
    _Forks.count += 1


os.register_at_fork(after_in_parent=_count_fork)


def forks_made() -> int:
    """A number that changes whenever this process makes a child by `os.fork`.

    Examples
    --------
    >>> from zarr_manifests.runtime import forks_made
    >>> forks_made() == forks_made()
    True
    """
    return _Forks.count


_STEPS = itertools.count(1)
_ASKED: ContextVar[tuple[int, ...]] = ContextVar("zarr_manifests_asked", default=())


def next_step() -> int:
    """The time of a clock that counts how often it is asked, all over the process."""
    return next(_STEPS)


def asked_at() -> tuple[int, ...]:
    """The steps at which what runs now was asked for, and the step now.

    A call that is handed over to a thread is asked for at a step of its own, however late the
    thread begins; if it hands over calls in turn, these have both steps.
    """
    return *_ASKED.get(), next_step()


def handed_over[R](call: Callable[[], R]) -> Callable[[], R]:
    """The call for another thread, with the context of this one; asked for now."""
    context: Context = copy_context()
    context.run(_ASKED.set, asked_at())
    return partial(context.run, call)


class _Parallel(Protocol):
    def __call__[R](self, calls: Sequence[Callable[[], R]]) -> list[R]: ...


class _Pool:
    """A thread pool made at first use, and made again in a forked child."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._executor = None  # the parent's threads do not exist in the child

    def submit(self, call: Callable[[], None]) -> None:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(_POOL_THREADS, "zarr-manifests")
        self._executor.submit(call)


_POOL = _Pool()


class _Call[R]:
    """A call that is made once, by the thread that is first to take it."""

    __slots__ = ("_call", "_ended", "_error", "_result", "_taken")

    def __init__(self, call: Callable[[], R]) -> None:
        self._call = call
        self._taken: dict[str, object] = {}
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._result: R

    def take(self, by: object) -> bool:
        """Whether nobody else has taken it; who was interrupted while it did can ask again."""
        return self._taken.setdefault("by", by) is by

    def run(self, by: object = None) -> None:
        """Make it, unless somebody has taken it; raises nothing but what interrupts a thread."""
        if not self.take(self if by is None else by):
            return
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error
            if not isinstance(error, Exception):
                raise
        finally:
            self._ended.set()

    def wait(self) -> None:
        """Wait for the thread that has taken it."""
        self._ended.wait()

    def outcome(self) -> R:
        """What it has returned, or raised; it has ended."""
        if self._error is None:
            return self._result
        try:
            raise self._error
        finally:
            self._error = None  # its traceback leads here


def _run_parallel[R](calls: Sequence[Callable[[], R]]) -> list[R]:
    if len(calls) <= 1:
        return [call() for call in calls]
    # This thread makes them, too: what no other has begun, it does not wait for. The pool's threads
    # may all be waiting for this very one, be it that it is one of them, or that it holds a lock.
    # All have ended before the first error is raised: what a caller does next must not race with
    # an upload of its own.
    handed = [_Call(handed_over(call)) for call in calls]
    here = object()
    try:
        with suppress(RuntimeError):  # there is no thread to be had (any more)
            for one in handed[1:]:
                _POOL.submit(one.run)
        for one in (handed[0], *reversed(handed[1:])):  # the pool begins with the first
            one.run(here)
    finally:
        # All have been taken but where this thread was interrupted, and these nobody makes now.
        for one in [one for one in handed if not one.take(here)]:
            one.wait()
    return [one.outcome() for one in handed]


def one_by_one[R](calls: Sequence[Callable[[], R]]) -> list[R]:
    """Run the calls one after another on this thread, and stop at the first that fails.

    Examples
    --------
    >>> from zarr_manifests.runtime import one_by_one
    >>> one_by_one([lambda: 1, lambda: 2])
    [1, 2]
    """
    return [call() for call in calls]


def _run_in_background(call: Callable[[], None]) -> None:
    one = _Call(call)
    try:
        _POOL.submit(one.run)
    except RuntimeError:
        # Where only a new thread was not to be had, another of the pool may come to it.
        if one.take(call):
            raise


def _call_later(delay_s: float, call: Callable[[], None]) -> Callable[[], None]:
    timer = threading.Timer(delay_s, call)
    timer.daemon = True  # what is due after the end of the program is not
    timer.start()
    return timer.cancel


def start_thread(call: Callable[[], None]) -> None:
    """Run the call on a thread of its own; the interpreter does not exit before it has ended.

    Raises
    ------
    RuntimeError
        If there is no thread to be had.

    Examples
    --------
    >>> from zarr_manifests.runtime import start_thread
    >>> done = threading.Event()
    >>> start_thread(done.set)
    >>> done.wait()
    True
    """
    threading.Thread(target=call, name="zarr-manifests-background", daemon=False).start()


def _no_checkpoint(name: str) -> None:
    return None


@functools.cache
def _user_and_host() -> str:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user without a name, as in some containers
        user = str(os.getuid()) if hasattr(os, "getuid") else "?"
    return f"{user}@{socket.gethostname()}"


def _who() -> str:
    """What the variable `ZARR_MANIFESTS_WHO` says, else the user and the host."""
    said = os.environ.get("ZARR_MANIFESTS_WHO")
    return _user_and_host() if said is None else said


class _Clamped:
    """A clock that says no time before 1970 or after the year 9999, whatever it is set to."""

    __slots__ = ("_clock",)

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock

    def __call__(self) -> int:
        return min(max(self._clock(), 0), MAX_MS)


@dataclass(frozen=True, slots=True)
class Runtime:
    """Clock, randomness, jitter, threads and yield points, passed in.

    Parameters
    ----------
    now_ms : callable
        Wall clock in milliseconds since 1970 UTC; recorded, never relied on for safety. What it
        says is taken to lie from 1970 to the year 9999, as no other time can be recorded.
    monotonic_s : callable
        A clock in seconds that never goes back.
    random_bytes : callable
        `random_bytes(n)` gives n unpredictable bytes.
    jitter : callable
        `jitter(limit_s)` gives a random wait between 0 and `limit_s` seconds.
    sleep : callable
        Waits that many seconds.
    parallel : callable
        Runs argument-free calls, side by side where it can, and returns their results in order;
        raises the first error only after all have ended. Calls may call `parallel` in turn, and a
        caller may hold a lock that other calls wait for: it never waits for what nobody has begun.
    background : callable
        Runs one argument-free call some time soon; nobody waits for it. Raises `RuntimeError` if
        there is no thread for it, as when the interpreter exits; then it is not made.
    checkpoint : callable
        Called with a name at each place where a scheduler may switch actors.
    later : callable
        `later(delay_s, call)` runs one argument-free call after so many seconds, in a thread of
        its own, and gives a callable that calls this off.
    who : callable
        Says in whose name operations are logged.

    Examples
    --------
    >>> from zarr_manifests.runtime import SYSTEM
    >>> SYSTEM.parallel([lambda: 1, lambda: 2])
    [1, 2]
    """

    now_ms: Callable[[], int]
    monotonic_s: Callable[[], float]
    random_bytes: Callable[[int], bytes]
    jitter: Callable[[float], float]
    sleep: Callable[[float], None]
    parallel: _Parallel
    background: Callable[[Callable[[], None]], None]
    checkpoint: Callable[[str], None] = _no_checkpoint
    later: Callable[[float, Callable[[], None]], Callable[[], None]] = _call_later
    who: Callable[[], str] = _who

    def __post_init__(self) -> None:
        clock = self.now_ms
        if not isinstance(clock, _Clamped):
            object.__setattr__(self, "now_ms", _Clamped(clock))


SYSTEM = Runtime(
    now_ms=lambda: time.time_ns() // 1_000_000,
    monotonic_s=time.monotonic,
    random_bytes=os.urandom,
    jitter=lambda limit_s: random.uniform(0.0, limit_s),
    sleep=time.sleep,
    parallel=_run_parallel,
    background=_run_in_background,
)
