"""A session that keeps eight refs in memory does all that one does that keeps all of them.

Two repositories go through the same: refs are set in bulk and one by one, unset, cut off by
resizes, arrays are moved, deleted and made anew; forks come back, others commit first, the session
is rebased, discards its changes, commits and amends. After every step both sessions read the same,
and whatever one is refused the other is refused.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from zarr.core.buffer import cpu

import zarr_manifests as zm
from effort import examples
from zarr_manifests import Fork, Session
from zarr_manifests.engine.objects.spill import Spilled
from zarr_manifests.errors import ConflictError, ManifestsError
from zarr_manifests.format.chunk_table import VirtualRef
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of, workspace_of
from zarr_manifests.testing import CountingStorage

BUDGET = 8
PATHS = ("a", "g/b")
LONGEST = 40
COMMON: dict[str, Any] = {"inline-chunk-bytes": 4, "compaction": {"mode": "manual"}}


def document(length: int) -> bytes:
    """Metadata of an array whose chunks hold one element, in two columns."""
    fields = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [length, 2],
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, 1]}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": 0,
        "codecs": [{"name": "bytes"}],
        "dimension_names": ["time", "side"],
    }
    return json.dumps(fields).encode()


def set_key(target: Session | Fork, key: str, value: bytes) -> None:
    target.store.set_sync(key, cpu.Buffer.from_bytes(value))


def is_spilled(session: Session | Fork) -> bool:
    tables = contents_of(session.store).changes.tables.values()
    return any(isinstance(rows, Spilled) for parts in tables for rows in parts)


def read(session: Session | Fork) -> dict[str, object]:
    """What is at each key; of virtual chunks where they are."""
    contents = contents_of(session.store)
    found: dict[str, object] = {}
    for key in contents.keys_below(""):
        entry = contents.find(key)
        assert entry is not None
        found[key] = entry
        if not isinstance(entry, VirtualRef):
            found[key] = contents.reader.read(entry, 0, entry.length)
    return found


class Side:
    """One of the two, which must not be told from the other."""

    def __init__(self, spill_refs: int) -> None:
        memory = MemoryStorage(f"spill-{spill_refs}")  # by this name a fork finds it
        memory.delete_many([info.key for info in memory.list()])
        self.storage = CountingStorage(memory)
        config = {**COMMON, "spill-refs": spill_refs}
        containers: dict[str, Any] = {"raw": "memory://raw-of-the-spill"}
        self.repository = zm.create(self.storage, config, virtual_containers=containers)
        self.session = self.repository.writable_session()
        for path in PATHS:
            set_key(self.session, f"{path}/zarr.json", document(LONGEST))
        self.bulk(self.session, PATHS[0], 0, 9, 1)
        self.session.commit("begin")
        self.forks: list[Fork] = []
        self.has_spilled = False

    def bulk(self, target: Session | Fork, path: str, first: int, count: int, step: int) -> None:
        node = contents_of(target.store).node(path)
        length = node.array.shape[0] if node is not None and node.array is not None else 0
        rows = np.arange(first, length, step)[:count]
        if not len(rows):
            return
        index = np.stack([np.repeat(rows, 2), np.tile([0, 1], len(rows))], axis=1)
        n = len(index)
        files = ["virtual://raw/x", "virtual://raw/y"]
        sizes = np.arange(n) + count
        target.store.set_virtual_refs(path, index, files, sizes % 2, np.arange(n) * step, sizes)

    def one(self, target: Session | Fork, path: str, at: int, value: bytes) -> None:
        if contents_of(target.store).node(path) is not None:
            set_key(target, f"{path}/c/{at}/1", value)

    def unset(self, target: Session | Fork, path: str, at: int) -> None:
        target.store.delete_sync(f"{path}/c/{at}/0")

    def resize(self, target: Session | Fork, path: str, length: int) -> None:
        if contents_of(target.store).node(path) is not None:
            set_key(target, f"{path}/zarr.json", document(length))

    def delete(self, target: Session | Fork, path: str) -> None:
        workspace_of(target.store).delete_below(path + "/")

    def recreate(self, target: Session | Fork, path: str) -> None:
        self.delete(target, path)
        set_key(target, f"{path}/zarr.json", document(LONGEST))

    def move(self, path: str, to: str) -> None:
        self.session.move(path, to)

    def fork(self, work: list[tuple[Any, ...]]) -> None:
        fork = pickle.loads(pickle.dumps(self.session.fork()))
        for name, *arguments in work:
            getattr(self, name)(fork, *arguments)
        self.has_spilled |= is_spilled(fork)
        self.session.merge(pickle.loads(pickle.dumps(fork)))

    def rival(self, path: str, at: int) -> None:
        other = self.repository.writable_session()
        if contents_of(other.store).node(path) is None:
            return
        self.one(other, path, at, b"rival")
        self.bulk(other, path, at, 3, 1)
        if other.status():
            other.commit("rival")

    def rebase(self, policy: Any) -> None:
        self.session.rebase(policy)

    def discard(self) -> None:
        self.session.discard_changes()

    def commit(self) -> None:
        if self.session.status():
            try:
                self.session.commit("changes")
            except ConflictError:
                self.session.discard_changes()
                raise

    def amend(self) -> None:
        self.session.amend("amended")

    def facts(self) -> Any:
        """What must be the same on both sides."""
        snapshots = []
        history = list(self.repository.ancestry())
        for info in history:
            at = self.repository.readonly_session(info.snapshot_id)
            snapshot = contents_of(at.store).view.snapshot
            snapshots.append((info.kind, dict(snapshot.totals), dict(snapshot.sums), read(at)))
        number = {info.snapshot_id: i for i, info in enumerate(history)}
        changes = sorted(
            (number[c.snapshot_id], c.path, c.operation, sorted(map(tuple, c.coordinates.tolist())))
            for c in self.repository.changes(history[-1].snapshot_id, mode="log")
        )
        return snapshots, changes


WHERE = st.sampled_from(PATHS)
AT = st.integers(0, LONGEST - 1)
VALUE = st.tuples(st.sampled_from([b"%d", b"%d, longer than inline"]), st.integers(0, 9)).map(
    lambda value: value[0] % value[1]
)
WORK = st.one_of(
    st.tuples(st.just("bulk"), WHERE, AT, st.integers(1, 20), st.integers(1, 3)),
    st.tuples(st.just("bulk"), WHERE, AT, st.integers(1, 20), st.integers(1, 3)),
    st.tuples(st.just("bulk"), WHERE, AT, st.integers(1, 20), st.integers(1, 3)),
    st.tuples(st.just("one"), WHERE, AT, VALUE),
    st.tuples(st.just("unset"), WHERE, AT),
    st.tuples(st.just("resize"), WHERE, st.integers(1, LONGEST + 10)),
)
RARE = st.one_of(
    st.tuples(st.just("delete"), WHERE),
    st.tuples(st.just("recreate"), WHERE),
)
TURNS = st.one_of(
    WORK.map(lambda work: ("work", work)),
    WORK.map(lambda work: ("work", work)),
    WORK.map(lambda work: ("work", work)),
    RARE.map(lambda work: ("work", work)),
    st.tuples(st.just("fork"), st.lists(WORK, min_size=1, max_size=3)),
    st.tuples(st.just("rival"), WHERE, AT),
    st.tuples(st.just("rebase"), st.sampled_from(["fail", "ours", "theirs"])),
    st.sampled_from([("commit",), ("commit",), ("amend",), ("discard",), ("move", "a", "g/m")]),
)


def done(call: Callable[[], None]) -> str:
    """What came of it."""
    try:
        call()
    except ManifestsError as error:
        conflicts = getattr(error, "conflicts", ())
        return f"{type(error).__name__} {sorted({(c.path, c.component) for c in conflicts})}"
    return "done"


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(TURNS, min_size=4, max_size=16))
def test_what_is_spilled_makes_no_difference(turns: list[tuple[Any, ...]]) -> None:
    sides = Side(BUDGET), Side(1_000_000)
    for name, *arguments in [*turns, ("commit",)]:
        outcomes = []
        for side in sides:
            if name == "work":
                what, *rest = arguments[0]
                outcomes.append(done(partial(getattr(side, what), side.session, *rest)))
            else:
                outcomes.append(done(partial(getattr(side, name), *arguments)))
        event(f"{name} {outcomes[0].split()[0]}")
        assert outcomes[0] == outcomes[1]
        few, many = sides
        few.has_spilled |= is_spilled(few.session)
        assert not is_spilled(many.session)
        assert read(few.session) == read(many.session)
        assert few.session.status() == many.session.status()
    event(f"spilled: {sides[0].has_spilled}")
    assert sides[0].facts() == sides[1].facts()
    keys = [r.key for r in sides[0].storage.log if r.op == "create"]
    assert len(keys) == len(set(keys))
    assert sides[0].repository.verify().ok


@pytest.mark.parametrize("spill_refs", [BUDGET, 1_000])
def test_the_model_spills_only_beyond_its_budget(spill_refs: int) -> None:
    side = Side(spill_refs)
    side.bulk(side.session, "a", 0, 30, 1)
    assert is_spilled(side.session) == (spill_refs < 60)
