"""The storage of a simulated world: one set of objects, and what each process sees of it.

`Shelf` holds the objects. `Wire` is one process's way to them: each call is a yield point before
it takes effect and another before its answer arrives, and between these it may go wrong:

- it fails without effect, or after it;
- its answer is lost and the client library, which tries again by itself, answers to that;
- it fails, and takes effect some time later, perhaps seconds, or takes effect twice, the second
  time later, or both times later; only where the storage is a remote one;
- a deletion takes seconds;
- the process dies, before or after the effect;
- the answer is lost, and the process reaches nothing for a while after that.

Invariant: nothing reaches the shelf from a process that is dead, but for what was held back on
the way.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from simulated.world import World
from storages import SimulatedCrash
from zarr_manifests.errors import ObjectNotFoundError, StorageError
from zarr_manifests.storage.protocol import Capabilities, ObjectInfo, Tagged, Token, check_key

_WRITES: Final = frozenset({"put", "create", "cas", "delete_many"})
_FAULTS: Final = (
    *("fail", "fail_after", "lose_answer", "late", "twice", "crash", "outage", "late_twice"),
)
_SLOW_S: Final = 3.0
_LATER: Final = frozenset({"late", "twice", "late_twice"})


@dataclass(frozen=True, slots=True)
class Weather:
    """How often a call goes wrong, of a thousand.

    Parameters
    ----------
    fail, fail_after, lose_answer, late, twice, crash, outage, late_twice : int
        Of the kinds of faults, in the order in which the module names them.
    no_thread : int
        How often, of a thousand times, a thread that is asked for cannot be had.
    """

    fail: int = 0
    fail_after: int = 0
    lose_answer: int = 0
    late: int = 0
    twice: int = 0
    crash: int = 0
    outage: int = 0
    late_twice: int = 0
    no_thread: int = 0

    def draw(self, rng: random.Random) -> str:
        """The fault of one call; empty if there is none."""
        chance = rng.random() * 1000
        for name in _FAULTS:
            chance -= getattr(self, name)
            if chance < 0:
                return name
        return ""


class Shelf:
    """The objects, and who is told of what changes them.

    Attributes
    ----------
    swapped : callable
        Called with key, old and new bytes right after a swap.
    deleted : callable
        Called with the keys right after a deletion.
    lost : dict of str to (bytes, object)
        What an accident has taken away, until it is put back or done without.
    accidents : int
        How many there have been, and how many were made good.
    deleting : int
        Deletions that are on their way.
    """

    url = "memory://shelf"

    def __init__(self, *, inline: bool) -> None:
        self.objects: dict[str, tuple[bytes, Token]] = {}
        self.capabilities = Capabilities(inline=inline, durable=False, shared=False)
        self.swapped: Callable[[str, bytes | None, bytes], None] = lambda key, old, new: None
        self.deleted: Callable[[Sequence[str]], None] = lambda keys: None
        self.lost: dict[str, tuple[bytes, Token]] = {}
        self.accidents = 0
        self.deleting = 0
        self._tokens = 0

    def lose(self, keys: Iterable[str]) -> None:
        """Let an accident happen to these objects."""
        self.lost |= {key: self.objects.pop(key) for key in keys if key in self.objects}
        self.accidents += 1

    def put_back(self) -> None:
        """Make the accident good."""
        self.objects |= self.lost
        self.do_without()

    def do_without(self) -> None:
        """Somebody has found another way."""
        self.lost = {}
        self.accidents += 1

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        data = self._find(key)[0]
        return data[start:] if length is None else data[start : start + length]

    def get_tagged(self, key: str) -> Tagged:
        return Tagged(*self._find(key))

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        self._write(key, data)

    def create(self, key: str, data: bytes | memoryview, *, durable: bool = True) -> bool:
        if key in self.objects:
            return False
        self._write(key, bytes(data))
        return True

    def cas(
        self,
        key: str,
        data: bytes,
        token: Token | None,
        *,
        then_create: tuple[str, bytes] | None = None,
    ) -> Token | None:
        old, held = self.objects.get(key, (None, None))
        if held != token:
            return None
        new = self._write(key, data)
        self.swapped(key, old, data)
        if then_create is not None:
            self.create(*then_create)
        return new

    def head(self, key: str) -> ObjectInfo:
        return ObjectInfo(key, len(self._find(key)[0]), 0)

    def list(self, prefix: str = "", after: str = "") -> Iterator[ObjectInfo]:
        keys = sorted(key for key in self.objects if key.startswith(prefix) and key > after)
        return iter([ObjectInfo(key, len(self.objects[key][0]), 0) for key in keys])

    def stray(self) -> str | None:
        return None

    def delete_many(self, keys: Iterable[str]) -> None:
        gone = [key for key in keys if self.objects.pop(key, None) is not None]
        self.deleted(gone)

    def sync(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._find(key)

    async def get_async(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return self.get(key, start, length)

    async def create_async(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        return self.create(key, data, durable=durable)

    def _find(self, key: str) -> tuple[bytes, Token]:
        found = self.objects.get(check_key(key))
        if found is None:
            raise ObjectNotFoundError(f"there is no object {key!r} on the shelf")
        return found

    def _write(self, key: str, data: bytes) -> Token:
        check_key(key)
        self._tokens += 1
        token = str(self._tokens)
        self.objects[key] = bytes(data), token
        return token


@dataclass(slots=True, eq=False)
class Wire:
    """A process's way to the shelf.

    Attributes
    ----------
    dead : bool
        Whether the process is.
    doomed : bool
        Whether the process dies after its next deletion, and nothing of what goes with its swaps
        ever arrives.
    """

    world: World
    shelf: Shelf
    weather: Weather
    rng: random.Random
    url: str
    dead: bool = False
    doomed: bool = False
    capabilities: Capabilities = field(init=False)
    _down: int = 0
    _disturbed: int = 0

    @property
    def disturbed(self) -> int:
        """A number that changes whenever a call goes wrong, and never rests during an accident."""
        if self.shelf.lost:
            self._disturbed += 1
        return self._disturbed + self.shelf.accidents

    def disturb(self) -> None:
        """Something other than a call goes wrong."""
        self._disturbed += 1

    def __post_init__(self) -> None:
        self.capabilities = self.shelf.capabilities

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return self._call("get", key, lambda: self.shelf.get(key, start, length))

    def get_tagged(self, key: str) -> Tagged:
        return self._call("get_tagged", key, lambda: self.shelf.get_tagged(key))

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        self._call("put", key, lambda: self.shelf.put(key, data))

    def create(self, key: str, data: bytes | memoryview, *, durable: bool = True) -> bool:
        kept = bytes(data)  # for the call may land when its caller has gone on
        return self._call("create", key, lambda: self.shelf.create(key, kept))

    def cas(
        self,
        key: str,
        data: bytes,
        token: Token | None,
        *,
        then_create: tuple[str, bytes] | None = None,
    ) -> Token | None:
        begun = self.shelf.accidents

        def run() -> Token | None:
            if token is None and self.shelf.accidents != begun:
                # The root is there again. Should it be lost once more, nothing could tell that
                # this was sent before that.
                return None
            new = self.shelf.cas(key, data, token)
            if new is not None and then_create is not None:
                self._follow(*then_create)
            return new

        return self._call("cas", key, run)

    def _follow(self, key: str, data: bytes) -> None:
        """What goes with a swap: at once on a local disk, elsewhere some time, or never."""
        if self.doomed:
            return
        if self.capabilities.inline:
            self.shelf.create(key, data)
        elif self.rng.random() < 0.9:
            self.world.soon(lambda: self._held_back(lambda: self.shelf.create(key, data)))

    def head(self, key: str) -> ObjectInfo:
        return self._call("head", key, lambda: self.shelf.head(key))

    def list(self, prefix: str = "", after: str = "") -> Iterator[ObjectInfo]:
        return self._call("list", prefix, lambda: self.shelf.list(prefix, after))

    def stray(self) -> str | None:
        return None

    def delete_many(self, keys: Iterable[str]) -> None:
        many = tuple(keys)
        if many:
            self.shelf.deleting += 1
            try:
                self._call("delete_many", many[0], lambda: self.shelf.delete_many(many))
            finally:
                self.shelf.deleting -= 1
            if self.doomed:
                self._die("after a deletion")

    def sync(self, keys: Iterable[str]) -> None:
        many = tuple(keys)
        if many:
            self._call("sync", many[0], lambda: self.shelf.sync(many))

    async def get_async(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return self.get(key, start, length)

    async def create_async(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        return self.create(key, data, durable=durable)

    def __reduce__(self) -> tuple[Any, ...]:
        return _receiver, ()

    # --- one call ----------------------------------------------------------------------------

    def _call[R](self, op: str, key: str, run: Callable[[], R]) -> R:
        self.check_alive()
        self.world.calls += 1
        self.world.pause()
        if op == "delete_many" and not self.capabilities.inline and self.rng.random() < 0.5:
            self.world.sleep(self.rng.random() * _SLOW_S)
        fault = self._fault(op)
        self.world.note(f"{op} {key}{' !' + fault if fault else ''}")
        if fault:
            self._disturbed += 1
        if fault == "crash" and self.rng.random() < 0.5:
            self._die(f"before {op}")
        if fault == "fail":
            raise StorageError(f"simulated: {op} {key} failed")
        if fault in ("late", "late_twice"):
            for _ in range(1 + (fault == "late_twice")):
                self.world.soon(lambda: self._held_back(run))
            raise StorageError(f"simulated: {op} {key} timed out on its way")
        try:
            result = run()
            if fault == "lose_answer":
                result = run()
        finally:
            if fault == "twice":
                self.world.soon(lambda: self._held_back(run))
            if self.rng.random() < 0.5:
                self.world.pause()
        if fault == "crash":
            self._die(f"after {op}")
        if fault == "fail_after":
            raise StorageError(f"simulated: the answer to {op} {key} was lost")
        return result

    def _fault(self, op: str) -> str:
        if not self.world.open:
            return ""
        if self._down > 0:
            self._down -= 1
            return "fail"
        fault = self.weather.draw(self.rng)
        if fault == "outage":
            self._down = self.rng.randrange(1, 12)
            fault = "fail_after"
        if op not in _WRITES and fault in {"fail_after", "lose_answer", *_LATER}:
            return "fail" if fault == "fail_after" else ""
        if self.capabilities.inline and fault in _LATER:
            return ""  # calls of a local disk are over when they return
        return fault

    def check_alive(self) -> None:
        """Raise if the process is dead."""
        if self.dead:
            raise SimulatedCrash("the process is dead")

    def _die(self, when: str) -> None:
        self.dead = True
        raise SimulatedCrash(when)

    def _held_back(self, run: Callable[[], Any]) -> None:
        try:
            run()
        except StorageError:
            return  # there is nobody to tell


_RECEIVERS: Final[list[Wire]] = []


def _receiver() -> Wire:
    return _RECEIVERS[-1]


@contextmanager
def received_by(wire: Wire) -> Iterator[None]:
    """What is unpickled in this block comes to that process."""
    _RECEIVERS.append(wire)
    try:
        yield
    finally:
        _RECEIVERS.pop()
