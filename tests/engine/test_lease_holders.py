"""Many lease holders beside a writer: what they cost it, counted in swaps.

The clock stands still but for the writer's swaps, each of which takes three seconds, in which
whatever renewals are due get in first.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import zarr
from zarr.core.buffer import cpu

import zarr_manifests as zm
from inside import root_of
from zarr_manifests.engine.root.roots import Roots
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.testing import CountingStorage, in_order

HOLDERS, TIMEOUT_S, COMMITS, SWAP_MS = 100, 120, 60, 3_000


@dataclass
class World:
    """A clock, and what is to be called when it gets there."""

    ms: int = 1_700_000_000_000
    due: dict[int, tuple[int, Callable[[], None]]] = field(default_factory=dict)
    timers: int = 0

    def runtime(self, **given: Any) -> Any:
        clock = {"now_ms": lambda: self.ms, "monotonic_s": lambda: self.ms / 1000}
        return in_order(**{**clock, "jitter": SYSTEM.jitter, "later": self.later, **given})

    def later(self, delay_s: float, call: Callable[[], None]) -> Callable[[], None]:
        self.timers += 1
        number = self.timers
        self.due[number] = self.ms + int(delay_s * 1000), call
        return lambda: self.due.pop(number, None)

    def advance(self, ms: int) -> None:
        self.ms += ms
        for number, (at, call) in [*self.due.items()]:
            if at <= self.ms:
                del self.due[number]
                call()


def written(counting: CountingStorage) -> Counter[str]:
    """What was written, by kind of object; swaps under the name of the root."""
    ops = ("create", "cas", "create_after")
    return Counter(r.key.partition("/")[0] for r in counting.log if r.op in ops)


def swaps(counting: CountingStorage) -> int:
    return sum(record.op == "cas" for record in counting.log)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 10])
def test_a_hundred_lease_holders_do_not_starve_a_writer(processes: int) -> None:
    world, storage = World(), MemoryStorage()
    with zm.create(storage, runtime=world.runtime()).transaction(message="array") as store:
        zarr.create_array(store, name="a", shape=(COMMITS,), chunks=(1,), dtype="u1")

    def before_swap(point: str) -> None:
        if point == "root.swap":
            world.advance(SWAP_MS)

    mine, theirs = CountingStorage(storage), CountingStorage(storage)
    config = {"compaction": {"mode": "manual"}}
    writer = zm.open(mine, config, runtime=world.runtime(checkpoint=before_swap))
    holders = [zm.open(theirs, runtime=world.runtime()) for _ in range(processes)]
    head = writer.list_branches()["main"]
    with contextlib.ExitStack() as stack:
        for number in range(HOLDERS):
            stack.enter_context(holders[number % processes].lease(head, TIMEOUT_S))
            world.advance(TIMEOUT_S * 1000 // 3 // HOLDERS)
        world.advance(0)
        before, begun_ms = root_of(storage), world.ms
        mine.reset()
        theirs.reset()
        session, tries = writer.writable_session(), []
        for at in range(COMMITS):
            session.store.set_sync(f"a/c/{at}", cpu.Buffer.from_bytes(b"x"))
            earlier = swaps(mine)
            session.commit(f"chunk {at}")
            tries.append(swaps(mine) - earlier)
        root = root_of(storage)
        periods = (world.ms - begun_ms) * 3 / TIMEOUT_S / 1000
        renewals = swaps(theirs)
        assert periods > 3
        # One swap a process and period, however many leases it holds.
        assert processes * (periods - 1) <= renewals <= processes * (periods + 1)
        # Each of them costs the writer a swap at most, and no commit is overtaken for ever.
        assert sum(tries) - COMMITS <= renewals
        assert max(tries) <= processes + 1
        assert root.version - before.version == COMMITS + renewals
        # Neither archive nor log entry is of a renewal; all leases are there and renewed.
        archived = {int(info.key[5:]) for info in storage.list("root/")}
        archived = {version for version in archived if version > before.version}
        logged = [one for one in writer.ops_log() if one.version > before.version]
        assert archived == {one.version for one in logged}
        assert [one.operation for one in logged] == ["commit overwrite"] * COMMITS
        leases = Roots(storage, SYSTEM).leases(root)
        assert len(leases) == HOLDERS
        assert min(lease.expires_ms for lease in leases) > world.ms
    assert Roots(storage, SYSTEM).leases(root_of(storage)) == ()
    assert writer.verify().ok
