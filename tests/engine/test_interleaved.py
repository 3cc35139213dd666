"""Two sessions, compactions, expiries and collections, in any order: history equals the model.

Two writers of one branch, each with its own handle, do whatever comes: set and unset chunks, grow
and shrink arrays, delete them and make them anew, commit, start again; in between the branch is
compacted in every mode, old snapshots expire, and what is dead is collected without any grace.
What a session reads is its snapshot with its changes. What a commit that is not refused leaves is
the head before, with these changes on top; so a commit that should have been refused shows as
well. A session that began before a collection may be refused, and reads right or not at all. Every
snapshot in history reads as it was committed; one that has expired does so too until it is
collected, and then cannot be opened.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr.core.buffer import cpu

import zarr_manifests as zm
from effort import examples
from zarr_manifests import Repository, Session
from zarr_manifests.error_cases import FencedError
from zarr_manifests.errors import ConflictError, SnapshotExpiredError
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of, workspace_of

PATHS = ("a", "g/b", "time")
LONGEST = 9
CONFIGS: dict[str, dict[str, Any]] = {
    "delta": {"compaction": {"mode": "manual"}},
    "auto": {"compaction": {"mode": "auto", "max-delta-count": 2, "size-ratio": 0.3}},
    "rewrite": {"compaction": {"mode": "manual"}, "commits": {"mode": "rewrite"}},
}
SMALL: dict[str, Any] = {
    "inline-chunk-bytes": 4,
    "compaction": {"fan-in": 2, "size-ratio": 0.2},
    "chunk-manifests": {
        "sets": [
            {"few": {"max-manifest-size": 6, "cardinality": 1}},
            {"default": {"max-manifest-size": 4}},
        ],
        "rules": [{"target": "few", "path": "/time"}],
    },
}

type Contents = dict[str, bytes]
type Change = tuple[str, str, int, int]


def document(path: str, length: int) -> bytes:
    """Metadata of an array whose chunks hold one element."""
    fields = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [length],
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1]}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": 0,
        "codecs": [{"name": "bytes"}],
        "attributes": {},
    }
    if path == "time":
        fields["dimension_names"] = ["time"]
    return json.dumps(fields).encode()


def length_of(contents: Contents, path: str) -> int | None:
    value = contents.get(f"{path}/zarr.json")
    return None if value is None else int(json.loads(value)["shape"][0])


def read(session: Session) -> Contents:
    keys = list(contents_of(session.store).keys_below(""))
    assert len(keys) == len(set(keys))
    found = {key: session.store.get_sync(key) for key in keys}
    return {key: value.to_bytes() for key, value in found.items() if value is not None}


@dataclass
class Writer:
    """A session, what it began with, and what it must read now."""

    repository: Repository
    session: Session
    base: Contents
    now: Contents = field(default_factory=dict)
    seen: int = 0
    """Commits of both before it began."""
    fenced: bool = False
    """Whether there was a collection since."""

    def begin(self) -> None:
        self.session = self.repository.writable_session()
        self.fenced = False
        self.base = read(self.session)
        self.now = dict(self.base)

    def merged(self, head: Contents) -> Contents:
        """The head with the changes of this session on top."""
        after = dict(head)
        for key in self.base.keys() | self.now.keys():
            old, new = self.base.get(key), self.now.get(key)
            if old == new:
                continue
            if key.endswith("/zarr.json") and old and new and head.get(key) != old:
                new = document(key.removesuffix("/zarr.json"), self._length(key, head))
            if new is None:
                after.pop(key, None)
            else:
                after[key] = new
        return after

    def _length(self, key: str, head: Contents) -> int:
        """Both have resized: the same, or both have grown."""
        path = key.removesuffix("/zarr.json")
        old, mine, theirs = (length_of(of, path) for of in (self.base, self.now, head))
        assert old is not None
        assert mine is not None
        assert theirs is not None, "the array was deleted: a conflict"
        assert mine == theirs or min(mine, theirs) > old, "a shrink against another: a conflict"
        return max(mine, theirs)


class World:
    """The repository beside its model."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.storage = MemoryStorage()
        repository = zm.create(self.storage, SMALL)
        session = repository.writable_session()
        for path in PATHS:
            session.store.set_sync(f"{path}/zarr.json", buffer(document(path, LONGEST)))
            for i in range(5):
                session.store.set_sync(f"{path}/c/{i}", buffer(b"seed%d" % i))
        first = session.commit("seed")
        self.made: dict[str, Contents] = {first: read(repository.readonly_session())}
        self.head = self.made[first]
        self.expired: set[str] = set()
        self.collected: set[str] = set()
        self.parents: dict[str, str | None] = {}
        self.writers: list[Writer] = []
        self.commits = 0
        for _ in range(2):
            handle = zm.open(self.storage, CONFIGS["delta"])
            self.writers.append(Writer(handle, handle.writable_session(), {}))
            self.writers[-1].begin()

    # --- changes -----------------------------------------------------------------------------

    def change(self, who: int, path: str, what: str, at: int, n: int) -> None:
        writer = self.writers[who]
        try:
            self._change(writer, path, what, at, n)
            assert read(writer.session) == writer.now
        except SnapshotExpiredError:
            assert writer.fenced
            assert writer.session.snapshot_id in self.expired
            self.begin(writer)

    def _change(self, writer: Writer, path: str, what: str, at: int, n: int) -> None:
        match what:
            case "set":
                for i in range(at, min(at + n, length_of(writer.now, path) or 0)):
                    value = self.rng.bytes(int(self.rng.choice([2, 3, 40])))
                    writer.session.store.set_sync(f"{path}/c/{i}", buffer(value))
                    writer.now[f"{path}/c/{i}"] = value
            case "unset":
                for i in range(at, at + n):
                    writer.session.store.delete_sync(f"{path}/c/{i}")
                    writer.now.pop(f"{path}/c/{i}", None)
            case "resize" if length_of(writer.now, path) is not None:
                self._describe(writer, path, at + 4)
                for i in range(at + 4, LONGEST + 4):
                    writer.now.pop(f"{path}/c/{i}", None)
            case "delete" | "re-create":
                workspace_of(writer.session.store).delete_below(f"{path}/")
                for key in [key for key in writer.now if key.startswith(f"{path}/")]:
                    del writer.now[key]
                if what == "re-create":
                    self._describe(writer, path, LONGEST)

    def _describe(self, writer: Writer, path: str, length: int) -> None:
        value = document(path, length)
        writer.session.store.set_sync(f"{path}/zarr.json", buffer(value))
        writer.now[f"{path}/zarr.json"] = value

    # --- commits and compactions -------------------------------------------------------------

    def use(self, who: int, mode: str) -> None:
        """Start again, with commits of another kind."""
        self.writers[who].repository = zm.open(self.storage, CONFIGS[mode])
        self.begin(self.writers[who])
        assert self.writers[who].base == self.head

    def begin(self, writer: Writer) -> None:
        writer.begin()
        writer.seen = self.commits

    def commit(self, who: int) -> None:
        writer = self.writers[who]
        if not writer.session.status():
            return
        began_at = writer.session.snapshot_id
        try:
            snapshot_id = writer.session.commit("changes")
        except ConflictError:
            # An array that was made anew may read as before.
            others = writer.seen != self.commits
            assert others or began_at in self.expired, "nobody else has committed anything"
            self.begin(writer)
            return
        except FencedError:
            assert writer.fenced
            self.begin(writer)
            return
        assert not writer.fenced
        self.head = writer.merged(self.head)
        self.made[snapshot_id] = self.head
        self.check_head()
        assert read(writer.session) == self.head
        writer.base, writer.now, writer.fenced = dict(self.head), dict(self.head), False
        self.commits += 1
        writer.seen = self.commits

    def compact(self, mode: str) -> None:
        report = zm.open(self.storage, CONFIGS["delta"]).compact(mode=mode)
        if report.snapshot_id is not None:
            self.made[report.snapshot_id] = self.head
        self.check_head()

    def expire(self, keep_last: int) -> None:
        repository = zm.open(self.storage, CONFIGS["delta"])
        self.parents |= {info.snapshot_id: info.parent_id for info in repository.ancestry()}
        report = repository.expire_snapshots(keep_last=keep_last)
        self.expired.update(report.snapshots)
        assert sum(1 for _ in zm.open(self.storage).ancestry()) <= keep_last
        self.check_head()

    def collect(self) -> None:
        zm.open(self.storage, CONFIGS["delta"]).garbage_collect(timedelta(0))
        self.collected = set(self.expired)
        for writer in self.writers:
            writer.fenced = True
        self.check_head()

    def race(self, mine: Change, yours: Change, mode: str | None) -> None:
        """Both change something, and both commit; maybe with a compaction in between."""
        self.change(0, *mine)
        self.change(1, *yours)
        self.commit(0)
        if mode is not None:
            self.compact(mode)
        self.commit(1)

    # --- what is so at any time --------------------------------------------------------------

    def check_head(self) -> None:
        assert read(zm.open(self.storage).readonly_session()) == self.head

    def check_all(self) -> None:
        fresh = zm.open(self.storage)
        history = list(fresh.ancestry())
        for info in history:
            found = read(fresh.readonly_session(info.snapshot_id))
            if info.snapshot_id in self.made:
                assert found == self.made[info.snapshot_id]
            elif info.kind == "rewrite":  # it followed a commit, and so did others maybe
                parents = self.parents | {i.snapshot_id: i.parent_id for i in history}
                parent = info.parent_id
                while parent not in self.made:
                    assert parent is not None
                    parent = parents[parent]
                assert found == self.made[parent]
        there = {info.snapshot_id for info in history}
        assert self.made.keys() <= there | self.expired
        assert there.isdisjoint(self.expired)
        for snapshot_id in self.collected:
            with pytest.raises(SnapshotExpiredError):
                fresh.readonly_session(snapshot_id)
        for snapshot_id in self.made.keys() & (self.expired - self.collected):
            found = read(fresh.readonly_session(snapshot_id))
            assert found == self.made[snapshot_id]
        assert fresh.verify().problems == ()


WHO = st.integers(0, 1)
WHAT = ["set"] * 12 + ["unset"] * 4 + ["resize"] * 2 + ["delete", "re-create"]
CHANGES = st.tuples(
    st.sampled_from(PATHS),
    st.sampled_from(WHAT),
    st.integers(0, LONGEST - 1),
    st.integers(1, 3),
)
MODES = st.sampled_from(["minor", "minor", "minor", "major", "full"])
TURNS = st.one_of(
    st.tuples(st.just("change"), WHO, CHANGES).map(lambda turn: (*turn[:2], *turn[2])),
    st.tuples(st.just("race"), CHANGES, CHANGES, st.none() | MODES),
    st.tuples(st.just("race"), CHANGES, CHANGES, st.none() | MODES),
    st.tuples(st.just("commit"), WHO),
    st.tuples(st.just("compact"), MODES),
    st.tuples(st.just("expire"), st.integers(1, 4)),
    st.tuples(st.just("collect")),
    st.tuples(st.just("use"), WHO, st.sampled_from(["delta", *sorted(CONFIGS)])),
)


@settings(max_examples=examples(15), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32 - 1), st.lists(TURNS, min_size=15, max_size=30))
def test_every_snapshot_equals_the_model(seed: int, turns: list[tuple[Any, ...]]) -> None:
    world = World(seed)
    for name, *arguments in turns:
        getattr(world, name)(*arguments)
    for who in (0, 1):
        world.commit(who)
    world.check_all()
    world.collect()
    world.check_all()


def buffer(value: bytes) -> Any:
    return cpu.Buffer.from_bytes(value)
