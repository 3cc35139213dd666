"""Clocks, randomness and threads, behind one interface that tests can replace.

At the end: modules that are imported when they are used, and packages that may not be installed.

Invariant: no other module of the package reads a clock, draws a random number, sleeps or starts a
thread by itself. A test passes a deterministic `Runtime`: a fake clock, seeded bytes, no sleeping,
and `parallel` in a fixed order, with `checkpoint` where a scheduler may switch to another actor.
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
import warnings
import weakref
from _thread import RLock
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from contextvars import Context, ContextVar, copy_context
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, Protocol

from msgspec import Struct
from msgspec.structs import force_setattr

MAX_MS: Final = 253_402_300_799_999
"""The last millisecond of the year 9999, the largest date that `datetime` can represent."""
_WHO_CHARS: Final = 100
_POOL_THREADS = 64  # enough to fetch all live deltas of an array at once


class ForkSafeLock(RLock):  # type: ignore[misc]  # in CPython it is not final
    """A reentrant lock that is free in a forked child, whichever thread of the parent held it.

    Examples
    --------
    >>> from zarr_manifests.runtime import ForkSafeLock
    >>> lock = ForkSafeLock()
    >>> with lock, lock:
    ...     pass
    """

    __slots__ = ()

    def __init__(self) -> None:
        _LOCKS.add(self)


_LOCKS: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _renew_locks() -> None:
    for lock in list(_LOCKS):
        lock._at_fork_reinit()  # type: ignore[attr-defined]  # as the locks of `logging` do


os.register_at_fork(after_in_child=_renew_locks)


def fork_awaited_lock() -> AbstractContextManager[bool]:
    """A reentrant lock that `os.fork` waits for, so children never see guarded state half changed.

    For libraries with internal locks that a fork does not renew, as some in C++. The lock is never
    freed, so create one for each module, not for each object, and do not hold it for long.

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


_QUIET_LOCK = ForkSafeLock()
_QUIET: list[None] = []
"""One for each thread inside `quiet`."""
_FILTERS = ExitStack()
"""What puts the filters back, with the last of them."""


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore warnings here, also while other threads do.

    The filters are the process's. Of two threads inside `warnings.catch_warnings`, the first to
    leave lets the warnings of the other through, and the last puts back the wrong filters.

    Examples
    --------
    >>> import warnings
    >>> from zarr_manifests.runtime import quiet
    >>> with quiet():
    ...     warnings.warn("nobody reads this")
    """
    with _QUIET_LOCK:
        if not _QUIET:
            _FILTERS.enter_context(warnings.catch_warnings(action="ignore"))
        _QUIET.append(None)
    try:
        yield
    finally:
        with _QUIET_LOCK:
            _QUIET.pop()
            if not _QUIET:
                _FILTERS.close()


_FORKS: list[None] = []
"""One for each time this process has forked; a child continues from its parent's number."""
os.register_at_fork(after_in_parent=lambda: _FORKS.append(None))


def forks_made() -> int:
    """A number that changes whenever this process calls `os.fork`.

    Examples
    --------
    >>> from zarr_manifests.runtime import forks_made
    >>> forks_made() == forks_made()
    True
    """
    return len(_FORKS)


@contextmanager
def setting[T](variable: ContextVar[T], value: T) -> Iterator[None]:
    """In the block, the variable has this value.

    Examples
    --------
    >>> from contextvars import ContextVar
    >>> from zarr_manifests.runtime import setting
    >>> depth = ContextVar("depth", default=0)
    >>> with setting(depth, 1):
    ...     depth.get()
    1
    >>> depth.get()
    0
    """
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


_STEPS = itertools.count(1)
_ASKED: ContextVar[tuple[int, ...]] = ContextVar("zarr_manifests_asked", default=())


def next_step() -> int:
    """The next number of a counter that the whole process shares."""
    return next(_STEPS)


def asked_at() -> tuple[int, ...]:
    """The steps at which the current call was submitted, and the current step.

    A call submitted to another thread keeps the step of its submission, however late the thread
    begins. Calls that it submits in turn have both steps.
    """
    return *_ASKED.get(), next_step()


def handed_over[R](call: Callable[[], R]) -> Callable[[], R]:
    """The call, to run on another thread in a copy of this context; submitted now."""
    context: Context = copy_context()
    context.run(_ASKED.set, asked_at())
    return partial(context.run, call)


class _Parallel(Protocol):
    def __call__[R](self, calls: Sequence[Callable[[], R]]) -> list[R]: ...


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_POOL_THREADS, "zarr-manifests")


os.register_at_fork(after_in_child=_pool.cache_clear)  # it has none of the parent's threads


def _run[R](call: Callable[[], R], outcome: Future[R]) -> None:
    """Run the call unless its outcome was cancelled; raises only what interrupts a thread."""
    if not outcome.set_running_or_notify_cancel():
        return
    try:
        outcome.set_result(call())
    except BaseException as error:
        outcome.set_exception(error)
        del outcome  # break the cycle of the error with its traceback
        if not isinstance(error, Exception):
            raise


def _run_parallel[R](calls: Sequence[Callable[[], R]]) -> list[R]:
    if len(calls) <= 1:
        return [call() for call in calls]
    # This thread runs calls, too, so it never waits for a call that has not begun. The threads of
    # the pool may all be waiting for this one, which may be one of them or hold a lock. All calls
    # end before the first error is raised, so the caller's next step cannot race with its uploads.
    handed = [(handed_over(call), Future[R]()) for call in calls]
    outcomes = [outcome for _, outcome in handed]
    try:
        with suppress(RuntimeError):  # no thread available, as at interpreter exit
            for one in handed[1:]:
                _pool().submit(partial(_run, *one))
        for i in (0, *range(len(calls) - 1, 0, -1)):  # the pool starts from the front
            call, outcome = handed[i]
            if outcome.cancel():
                outcomes[i] = Future()
                _run(call, outcomes[i])
        for outcome in outcomes:
            outcome.exception()  # when it has ended
    except BaseException:
        # This thread was interrupted. The calls that nobody has begun never run. A second
        # interrupt leaves the others running.
        for outcome in [outcome for _, outcome in handed if not outcome.cancel()]:
            outcome.exception()
        raise
    try:
        return [outcome.result() for outcome in outcomes]
    finally:
        del handed, outcomes, one, outcome  # break the cycle of an error with its traceback


type Run = Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]]
"""Calls a function with each item, perhaps in other processes.

It gives the results in the order of the items, and raises the first error. The function and the
items can be pickled. The builtin `map` is one.
"""


def one_by_one[R](calls: Sequence[Callable[[], R]]) -> list[R]:
    """Run the calls one after another on this thread; stops at the first error.

    Examples
    --------
    >>> from zarr_manifests.runtime import one_by_one
    >>> one_by_one([lambda: 1, lambda: 2])
    [1, 2]
    """
    return [call() for call in calls]


def _run_in_background(call: Callable[[], None]) -> None:
    outcome = Future[None]()
    try:
        _pool().submit(partial(_run, call, outcome))
    except RuntimeError:
        # The call may still be queued, and another thread of the pool run it.
        if outcome.cancel():
            raise


def _call_later(delay_s: float, call: Callable[[], None]) -> Callable[[], None]:
    timer = threading.Timer(delay_s, call)
    timer.daemon = True  # does not keep the interpreter alive
    timer.start()
    return timer.cancel


def start_thread(call: Callable[[], None]) -> None:
    """Run the call on its own thread, which the interpreter waits for at exit.

    Raises
    ------
    RuntimeError
        If no thread can be started.

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
    except (OSError, KeyError):  # a user id without a name, as in some containers
        user = str(os.getuid()) if hasattr(os, "getuid") else "?"
    return f"{user}@{socket.gethostname()}"


def _who() -> str:
    """The value of `ZARR_MANIFESTS_WHO`, or else user and host; not too long, and valid text."""
    said = os.environ.get("ZARR_MANIFESTS_WHO")
    said = _user_and_host() if said is None else said
    return said[:_WHO_CHARS].encode("utf-8", "replace").decode()


def _clamped(clock: Callable[[], int]) -> int:
    """The clock's time, limited to the years 1970 to 9999."""
    return min(max(clock(), 0), MAX_MS)


class Runtime(Struct, frozen=True):
    """Clock, randomness, jitter, threads and yield points, passed in.

    Parameters
    ----------
    now_ms : callable
        Wall clock in milliseconds since 1970 UTC, limited to the years 1970 to 9999. Times are
        recorded; safety never depends on them.
    monotonic_s : callable
        Monotonic clock in seconds.
    random_bytes : callable
        `random_bytes(n)` returns n unpredictable bytes.
    jitter : callable
        `jitter(limit_s)` returns a random delay between 0 and `limit_s` seconds.
    sleep : callable
        Waits for a number of seconds.
    parallel : callable
        Runs calls without arguments concurrently and returns their results in order. Raises the
        first error after all have ended. Calls may be nested, and the caller may hold a lock that
        other calls wait for: it never waits for a call that has not begun.
    background : callable
        Runs a call without arguments soon, without waiting for it. Raises `RuntimeError`, and does
        not run it, if there is no thread, as at interpreter exit.
    checkpoint : callable
        Called with a name wherever a scheduler may switch actors.
    later : callable
        `later(delay_s, call)` runs a call without arguments after a delay in seconds, on its own
        thread, and returns a callable that cancels it.
    who : callable
        Returns the author of logged operations.

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
        if getattr(self.now_ms, "func", None) is not _clamped:
            force_setattr(self, "now_ms", partial(_clamped, self.now_ms))

    def __reduce__(self) -> str | tuple[Any, ...]:
        return "SYSTEM" if self is SYSTEM else super().__reduce__()


SYSTEM = Runtime(
    now_ms=lambda: time.time_ns() // 1_000_000,
    monotonic_s=time.monotonic,
    random_bytes=os.urandom,
    jitter=lambda limit_s: random.uniform(0.0, limit_s),
    sleep=time.sleep,
    parallel=_run_parallel,
    background=_run_in_background,
)


# --- modules --------------------------------------------------------------------------------------


def on_demand(package: str, *modules: str, **names: str) -> Callable[[str], Any]:
    """A package's `__getattr__`: it imports a module, or a name from its module, when it is used.

    Type checkers do not follow it, so the package imports the same under `TYPE_CHECKING`.

    Parameters
    ----------
    package : str
        Its `__name__`.
    *modules : str
        Its modules.
    **names : str
        The modules of other names.

    Examples
    --------
    >>> from zarr_manifests.engine import upkeep
    >>> upkeep.verify.__name__
    'zarr_manifests.engine.upkeep.verify'
    """

    def attribute(name: str) -> Any:
        if name in names:
            return getattr(import_module(f"{package}.{names[name]}"), name)
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return import_module(f"{package}.{name}")

    return attribute


def need(what: str, extra: str, *packages: str) -> None:
    """Refuse what needs a package that is not installed.

    Parameters
    ----------
    what : str
        What needs the packages.
    extra : str
        The extra of this package that brings them.
    *packages : str
        Their names.

    Raises
    ------
    ModuleNotFoundError
        If one is not installed; it says how to get it.

    Examples
    --------
    >>> from zarr_manifests.runtime import need
    >>> need("plot()", "plot", "numpy")  # which is installed
    """
    for name in packages:
        if find_spec(name) is None:
            raise ModuleNotFoundError(
                f"{what} needs {name}, which is not installed here; get all it needs with: "
                f'pip install "zarr-manifests[{extra}]"',
                name=name,
            )
