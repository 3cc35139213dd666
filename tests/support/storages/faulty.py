"""Injecting faults into the calls of a storage.

Invariants: a call without a fault is passed on unchanged; at most one fault fires per call (the
first one that is due); after a simulated crash no call reaches the storage, as if the process were
dead.
"""

from __future__ import annotations

import fnmatch
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from storages.wrapped import Call, WrappedStorage
from zarr_manifests.errors import StorageError
from zarr_manifests.storage import Storage
from zarr_manifests.storage.protocol import Tagged, Token, check_key

type FaultKind = Literal[
    "fail_before",
    "fail_after",
    "lose_answer",
    "duplicate_late",
    "truncate",
    "flip_bits",
    "crash_before",
    "crash_after",
]

_READS = frozenset({"get", "get_tagged"})
_WRITES = frozenset({"put", "create", "create_after", "cas", "delete_many"})
_OPS = _READS | _WRITES | {"head", "list", "stray", "sync"}
# The other kinds apply to any call.
_ONLY = {"truncate": _READS, "flip_bits": _READS, "duplicate_late": _WRITES}


class SimulatedCrash(BaseException):
    """The simulated death of the process. Not an `Exception`, so that no handler catches it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, and the calls at which it fires.

    Parameters
    ----------
    kind : str
        - `fail_before`: an error, without effect.
        - `fail_after`: the effect, then an error, like a request that times out.
        - `lose_answer`: the effect, but the answer is lost, and the client library repeats the
          call and returns the second answer. So `create` returns False and `cas` None for the
          caller's own write.
        - `duplicate_late`: a write is repeated `after_calls` calls later, under the same
          conditions; its answer is dropped.
        - `truncate`: a read returns only the first half of its bytes.
        - `flip_bits`: a read returns its bytes with one bit in their middle flipped.
        - `crash_before`, `crash_after`: `SimulatedCrash`, before or after the effect.
    op : str, optional
        Only calls with this name (`get`, `create`, ...; `create_after` is the `then_create` of a
        swap); async variants count as their synchronous ones.
    key : str
        Only calls with a key that matches this pattern (`fnmatch`: `*` also matches slashes).
    skip : int
        How many matching calls to skip first.
    count : int, optional
        At how many matching calls the fault then fires; None for all.
    after_calls : int
        For `duplicate_late`: after how many calls the write is repeated.
    error : type
        What the failing kinds raise.

    Examples
    --------
    >>> from storages import Fault
    >>> Fault("lose_answer", op="cas", key="current").count
    1
    """

    kind: FaultKind
    op: str | None = None
    key: str = "*"
    skip: int = 0
    count: int | None = 1
    after_calls: int = 1
    error: type[StorageError] = StorageError

    def __post_init__(self) -> None:
        ops = _ONLY.get(self.kind, _OPS)
        assert self.op is None or self.op in ops, f"{self.kind} is possible for {sorted(ops)} only"

    def matches(self, op: str, keys: Sequence[str]) -> bool:
        """Whether the fault applies to a call of `op` with these keys."""
        if op not in _ONLY.get(self.kind, _OPS) or self.op not in (None, op):
            return False
        return any(fnmatch.fnmatchcase(key, self.key) for key in keys or ("",))


class FaultyStorage(WrappedStorage):
    """Passes calls to a storage, with faults.

    The `then_create` of a swap is a separate call here, `create_after`, so that a crash can happen
    between the two.

    Parameters
    ----------
    storage : Storage
        The storage to wrap.
    faults : sequence of Fault
        The faults; each counts the calls that match it on its own.

    Examples
    --------
    >>> from zarr_manifests.storage.memory import MemoryStorage
    >>> from storages import Fault, FaultyStorage
    >>> storage = FaultyStorage(MemoryStorage(), [Fault("lose_answer", op="create")])
    >>> storage.create("a", b"mine"), storage.get("a")
    (False, b'mine')
    >>> storage.calls
    [('create', 'a'), ('get', 'a')]
    """

    def __init__(self, storage: Storage, faults: Sequence[Fault] = ()) -> None:
        super().__init__(storage)
        self.calls: list[tuple[str, str]] = []
        """Name and (first) key of every call since the start or the last `reset`."""
        self._faults = tuple(faults)
        self._lock = threading.Lock()
        self.reset()

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return type(self), (self._storage, self._faults)

    def reset(self) -> None:
        """Start over: no counted calls, no `fail_at`, no pending repeats, not crashed."""
        with self._lock:
            self.calls = []
            self._seen = [0] * len(self._faults)
            self._at: dict[int, Fault] = {}
            self._late: list[tuple[int, Call[Any]]] = []
            self._dead = False

    def fail_at(self, number: int, kind: FaultKind = "fail_before") -> None:
        """Make call `number`, counted from 1 in `calls`, fail.

        A kind that does not apply to that call has no effect.
        """
        with self._lock:
            assert number > len(self.calls), f"call {number} is past"
            self._at[number] = Fault(kind)

    def cas(
        self,
        key: str,
        data: bytes,
        token: Token | None,
        *,
        then_create: tuple[str, bytes] | None = None,
    ) -> Token | None:
        if then_create is not None:
            check_key(then_create[0])
        applied = False

        def run() -> Token | None:
            nonlocal applied
            new = self._storage.cas(key, data, token)
            applied = applied or new is not None
            return new

        try:
            return self._around(Call("cas", (key,), run, len(data)))
        finally:
            # Whatever answer the caller gets, the create follows the swap.
            if applied and then_create is not None:
                self._create_after(*then_create)

    def _create_after(self, key: str, data: bytes) -> None:
        try:
            self._around(self._create_call("create_after", key, data, durable=True))
        except StorageError:
            return  # never an error of the swap

    def _around[R](self, call: Call[R]) -> R:
        number, fault = self._begin(call)
        try:
            result = call.run()
            if fault is not None and fault.kind == "lose_answer":
                result = call.run()
            return self._end(call, fault, result)
        finally:
            self._repeat(number)

    async def _around_async[R](self, call: Call[R], run: Callable[[], Awaitable[R]]) -> R:
        number, fault = self._begin(call)
        try:
            result = await run()
            if fault is not None and fault.kind == "lose_answer":
                result = await run()
            return self._end(call, fault, result)
        finally:
            self._repeat(number)

    def _begin(self, call: Call[Any]) -> tuple[int, Fault | None]:
        """Count the call and find the fault that fires; raises if it fires before the effect."""
        with self._lock:
            if self._dead:
                raise SimulatedCrash(f"{call.op} {call.key} after the crash")
            self.calls.append((call.op, call.key))
            number = len(self.calls)
            fault = self._due(call, number)
            if fault is None:
                return number, None
            if fault.kind == "duplicate_late":
                self._late.append((number + fault.after_calls, call))
            self._dead = fault.kind == "crash_before"
        if fault.kind == "crash_before":
            raise SimulatedCrash(f"before {call.op} {call.key}")
        if fault.kind == "fail_before":
            raise fault.error(f"injected fault: {call.op} {call.key} failed and had no effect")
        return number, fault

    def _due(self, call: Call[Any], number: int) -> Fault | None:
        planned = self._at.get(number)
        due = planned if planned is not None and planned.matches(call.op, call.keys) else None
        for i, fault in enumerate(self._faults):
            if fault.matches(call.op, call.keys):
                turn = self._seen[i] - fault.skip
                self._seen[i] += 1
                if due is None and turn >= 0 and (fault.count is None or turn < fault.count):
                    due = fault
        return due

    def _end[R](self, call: Call[R], fault: Fault | None, result: R) -> R:
        if fault is None:
            return result
        if fault.kind == "crash_after":
            self._dead = True
            raise SimulatedCrash(f"after {call.op} {call.key}")
        if fault.kind == "fail_after":
            raise fault.error(f"injected fault: {call.op} {call.key} took effect and then failed")
        if fault.kind == "truncate":
            return _damaged(result, lambda data: data[: len(data) // 2])
        if fault.kind == "flip_bits":
            return _damaged(result, _with_flipped_bit)
        return result

    def _repeat(self, number: int) -> None:
        """Make the repeats that are due after call `number`."""
        with self._lock:
            due = [] if self._dead else [call for at, call in self._late if at <= number]
            self._late = [(at, call) for at, call in self._late if at > number]
        for call in due:
            try:
                call.run()
            except StorageError:
                continue  # no caller is waiting for it


def _damaged[R](result: R, damage: Callable[[bytes], bytes]) -> R:
    damaged: object = result
    if isinstance(result, bytes):
        damaged = damage(result)
    elif isinstance(result, Tagged):
        damaged = Tagged(damage(result.data), result.token)
    elif isinstance(result, list):
        damaged = [damage(part) for part in result]
    return cast(R, damaged)


def _with_flipped_bit(data: bytes) -> bytes:
    middle = len(data) // 2
    return (
        data[:middle] + bytes(byte ^ 1 for byte in data[middle : middle + 1]) + data[middle + 1 :]
    )
