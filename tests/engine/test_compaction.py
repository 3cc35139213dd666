"""Any commits and compactions, one after the other or at once: every snapshot stays as it was.

The contents of the head are compared with a dictionary after every step, and so are those of every
snapshot there ever was, at the end.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import zarr
from msgspec.structs import replace
from zarr.core.sync import sync

import zarr_manifests as zm
from inside import small_steps
from stored import array_document, contents, put
from zarr_manifests import Repository, Session
from zarr_manifests.errors import FencedError
from zarr_manifests.runtime import SYSTEM, Run
from zarr_manifests.storage.memory import MemoryStorage

type Shape = tuple[int, ...]


def in_tasks(call: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
    """Run the calls as another process would: items and results are pickled."""
    for item in items:
        yield pickle.loads(pickle.dumps(call(pickle.loads(pickle.dumps(item)))))


def document(shape: Shape, note: int = 0, dims: Sequence[str] | None = None) -> bytes:
    """The metadata of an array whose chunks hold one element."""
    named = {"dimension_names": dims} if dims else {}
    return array_document(shape, attributes={"note": note}, **named)


# --- the model -------------------------------------------------------------------------------

GRIDS: dict[str, Shape] = {"a": (40,), "b": (8, 8), "time": (30,), "g/c": (25,), "g/d": (5, 12)}


class State:
    """What one snapshot reads as, in plain terms."""

    def __init__(self) -> None:
        self.shapes: dict[str, Shape] = {}
        """Array by path -> its grid, which is its shape."""
        self.keys: dict[str, bytes] = {}

    def chunks(self, path: str) -> dict[str, Shape]:
        """Keys of the chunks of an array that are there, with their coordinates."""
        found = {key_of(path, coords): coords for coords in np.ndindex(self.shapes[path])}
        return {key: coords for key, coords in found.items() if key in self.keys}


def key_of(path: str, coords: Shape) -> str:
    return "/".join([path, "c", *map(str, coords)])


class World:
    """A repository beside what it must read as."""

    def __init__(self, seed: int, run: Run | None = None) -> None:
        self.rng, self.run = np.random.default_rng(seed), run
        self.storage, self.state = MemoryStorage(), State()
        self.made: list[tuple[str, State]] = []
        self.landed = self.races = 0
        config = {"compaction": {"mode": "manual"}, "inline-chunk-bytes": 16}
        self.repository = zm.create(self.storage, config)
        session = self.repository.writable_session("main")
        for path in ("", "g"):
            key = f"{path}/zarr.json".lstrip("/")
            self.set(session, key, b'{"zarr_format":3,"node_type":"group"}')
        self.note(session.commit("groups"))

    def note(self, snapshot_id: str) -> None:
        self.made.append((snapshot_id, copy.deepcopy(self.state)))

    # --- commits -----------------------------------------------------------------------------

    def commit(self, repository: Repository | None = None) -> None:
        session = (repository or self.repository).writable_session("main")
        for _ in range(int(self.rng.integers(1, 5))):
            self.change(session)
        if session.status():
            self.note(session.commit("changes"))

    def commit_and_compact(self) -> None:
        """A commit that is followed by the compaction that it makes due."""
        mode = "rewrite" if self.rng.random() < 0.5 else "delta"
        due = {"mode": "auto", "max-delta-count": 3, "size-ratio": 0.3}
        self.commit(zm.open(self.storage, {"commits": {"mode": mode}, "compaction": due}))

    def change(self, session: Session) -> None:
        rng, state = self.rng, self.state
        path = list(GRIDS)[rng.integers(len(GRIDS))]
        if path not in state.shapes:
            self.describe(session, path, GRIDS[path])
        match rng.integers(0, 12):
            case 0 | 5:
                self.resize(session, path)
            case 1 if rng.random() < 0.4:
                sync(session.store.delete_dir(path))
                del state.shapes[path]
                for key in [key for key in state.keys if key.startswith(f"{path}/")]:
                    del state.keys[key]
                if rng.random() < 0.5:
                    self.describe(session, path, GRIDS[path])
            case 3:
                self.set(session, f"other/{rng.integers(3)}", rng.bytes(4))
            case 4 if state.chunks(path):
                chunks = list(state.chunks(path))
                for key in rng.choice(chunks, rng.integers(1, len(chunks) + 1), replace=False):
                    session.store.delete_sync(key)
                    del state.keys[key]
            case _:
                self.write(session, path)

    def set(self, session: Session, key: str, value: bytes) -> None:
        put(session, key, value)
        self.state.keys[key] = value

    def describe(self, session: Session, path: str, shape: Shape) -> None:
        dims = [path] if path == "time" else None
        self.state.shapes[path] = shape
        self.set(session, f"{path}/zarr.json", document(shape, int(self.rng.integers(1000)), dims))

    def resize(self, session: Session, path: str) -> None:
        shape = GRIDS[path]
        if self.rng.random() < 0.5:
            shape = tuple(int(self.rng.integers(1, n + 1)) for n in shape)
        for key, coords in self.state.chunks(path).items():
            if any(c >= n for c, n in zip(coords, shape, strict=True)):
                del self.state.keys[key]
        self.describe(session, path, shape)

    def write(self, session: Session, path: str) -> None:
        shape = self.state.shapes[path]
        at = [int(self.rng.integers(n)) for n in shape]
        size = [min(int(self.rng.integers(1, 8)), n - a) for n, a in zip(shape, at, strict=True)]
        for step in np.ndindex(*size):
            coords = tuple(a + s for a, s in zip(at, step, strict=True))
            self.set(session, key_of(path, coords), self.rng.bytes(40 if sum(step) % 3 else 2))

    def reset(self) -> None:
        history = {info.snapshot_id for info in self.repository.ancestry()}
        known = [one for one in self.made if one[0] in history]
        snapshot_id, state = known[self.rng.integers(len(known))]
        self.repository.reset_branch("main", snapshot_id, force=True)
        self.state = copy.deepcopy(state)

    # --- compactions -------------------------------------------------------------------------

    def compact(self, race: Callable[[], None] | None = None) -> None:
        rng = self.rng
        default = {"default": {"max-manifest-size": int(rng.choice([5, 20, 100]))}}
        small = {"small": {"max-manifest-size": 10, "cardinality": 2}}
        rules = [{"target": "small", "path": ".*/(time|a)"}]
        ratio = float(rng.choice([0.0, 0.1, 0.3, 0.5, 1.0]))
        config = {
            "compaction": {"fan-in": int(rng.integers(2, 5)), "size-ratio": ratio},
            "chunk-manifests": {"sets": [small, default], "rules": rules},
        }
        raced = []

        def hook(name: str) -> None:
            if race is not None and name == "root.swap" and not raced:
                raced.append(True)
                self.races += 1
                race()

        repository = zm.open(self.storage, config, runtime=replace(SYSTEM, checkpoint=hook))
        mode = str(rng.choice(["major"] * 12 + ["minor"] * 5 + ["full"]))
        try:
            with small_steps(7) if rng.random() < 0.5 else contextlib.nullcontext():
                report = repository.compact("main", mode, run=self.run)
        except FencedError:  # by the compaction that came meanwhile
            assert raced
            return
        if report.snapshot_id is not None:
            self.landed += 1
            self.note(report.snapshot_id)

    def commit_meanwhile(self) -> None:
        self.compact(lambda: [self.commit() for _ in range(int(self.rng.integers(1, 3)))])

    def compact_meanwhile(self) -> None:
        self.compact(self.compact)

    # --- what is so at any time --------------------------------------------------------------

    def step(self) -> None:
        doing = [self.commit] * 11 + [self.compact] * 4 + [self.commit_meanwhile] * 2
        doing += [self.commit_and_compact, self.compact_meanwhile]
        doing += [self.reset] if self.rng.random() < 0.3 else []
        doing[self.rng.integers(len(doing))]()

    def check_head(self) -> None:
        assert contents(zm.open(self.storage).readonly_session("main")) == self.state.keys

    def check_all(self) -> None:
        fresh = zm.open(self.storage)
        for snapshot_id, state in self.made:
            assert contents(fresh.readonly_session(snapshot_id)) == state.keys
        assert fresh.verify().problems == ()


@pytest.mark.parametrize(("seed", "run"), [(0, None), (6, None), (24, in_tasks)])
def test_any_commits_and_compactions(run: Run | None, seed: int) -> None:
    world = World(seed, run)
    for _ in range(25):
        world.step()
        world.check_head()
    world.check_all()
    assert world.landed > 3
    assert world.races


# --- cost ------------------------------------------------------------------------------------


def test_memory_depends_on_what_is_worked_on_at_a_time() -> None:
    """Not on how many refs there are, pending or in one array of the base."""
    refs, commits = 400_000, 20
    storage = MemoryStorage()
    sets = {"default": {"max-manifest-size": 10_000}}
    config = {"chunk-manifests": {"sets": [sets]}, "compaction": {"mode": "manual"}}
    session = zm.create(storage, config).writable_session()
    put(session, "b/zarr.json", document((refs // 100, 100)))
    for rows in np.split(np.arange(refs), commits):
        index = np.stack([rows // 100, rows % 100], axis=1)
        files = [f"file:///{rows[0]}/{i}" for i in range(len(rows) // 1_000)]
        where = (rows - rows[0]) // 1_000, rows % 1_013 * 7_919, rows % 509 + 1
        session.store.set_virtual_refs("b", index, files, *where)
        session.commit("refs")
    repository = zm.open(storage)
    tracemalloc.start()
    with small_steps(20_000):
        report = repository.compact("main", "major")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.refs_merged == refs
    assert report.manifests_written == 40
    assert peak < 30 * refs  # bytes; columns that vary take 8 a ref each


@pytest.mark.parametrize("mode", ["major", "full"])
def test_a_shrink_by_one_of_very_many_is_merged(mode: Any) -> None:
    many = 10**17
    repository = zm.create(MemoryStorage(), {"compaction": {"mode": "manual"}})
    session = repository.writable_session()
    array = zarr.create_array(session.store, name="a", shape=(many,), chunks=(1,), dtype="i4")
    array[0], array[many - 1] = 10, 99
    session.commit("first and last")
    repository.compact(mode="full")
    for shape in (many - 1, many):
        session = repository.writable_session()
        zarr.open_array(session.store, path="a").resize((shape,))
        session.commit("resize")
        repository.compact(mode=mode)
    store = repository.readonly_session().store
    assert zarr.open_array(store, path="a", mode="r")[many - 1] == 0


def test_what_is_merged_leaves_the_read_list() -> None:
    """Although the leaf is smaller than what was changed."""
    repository = zm.create(MemoryStorage(), {"compaction": {"mode": "manual"}})
    session = repository.writable_session()
    array = zarr.create_array(session.store, name="a", shape=(10,), chunks=(1,), dtype="i4")
    array[:] = np.arange(1, 11)
    session.commit("values")
    repository.compact(mode="full")
    session = repository.writable_session()
    zarr.open_array(session.store, path="a")[5] = 50
    session.store.delete_sync("a/c/9")
    session.commit("one anew, the last gone")
    assert repository.compact(mode="full").deltas_after == 0


@pytest.mark.parametrize(("more", "left"), [(10, 1), (15, 0)])
def test_arrays_of_one_manifest_are_due_together(more: int, left: int) -> None:
    """What each has outside its leaf is less than a quarter of the manifest."""
    repository = zm.create(MemoryStorage(), {"compaction": {"mode": "manual"}})
    for first, last in ((0, 50), (50, 50 + more)):
        session = repository.writable_session()
        for name in "ab":
            if not first:
                zarr.create_array(session.store, name=name, shape=(99,), chunks=(1,), dtype="i4")
            zarr.open_array(session.store, path=name)[first:last] = 1
        session.commit("values")
        assert repository.compact(mode="major").deltas_after == (left if first else 0)
