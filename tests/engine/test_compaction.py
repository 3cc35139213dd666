"""Any commits and compactions, one after the other or at once: every snapshot stays as it was.

The contents of the head are compared with a dictionary after every step, as the package reads
them and as the independent reader of the specification does, and so are those of every snapshot
there ever was, at the end.
"""

from __future__ import annotations

import importlib.util
import json
import pickle
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import zarr_manifests as zm
from inside import context_of
from zarr_manifests import Repository, Session
from zarr_manifests.engine.compact import compaction, write_leaves
from zarr_manifests.engine.compact import merge_leaves as repack
from zarr_manifests.engine.compact.compaction import compact_branch
from zarr_manifests.engine.snapshot import pending
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.planning.upkeep.compaction_triggers import MOST_RUNS, CompactionMode
from zarr_manifests.runtime import SYSTEM, Run
from zarr_manifests.session import estimate_of
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of, workspace_of
from zarr_manifests.testing import CountingStorage

SPEC = Path(__file__).parents[1] / "spec" / "reader.py"


def _load_reader() -> Any:
    spec = importlib.util.spec_from_file_location("spec_reader_of_compactions", SPEC)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


reader = _load_reader()


def in_tasks(call: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
    """Run the calls as another process would: items and results are pickled."""
    for item in items:
        yield pickle.loads(pickle.dumps(call(pickle.loads(pickle.dumps(item)))))


# --- arrays, as documents --------------------------------------------------------------------

GRIDS = {"a": (40,), "b": (8, 8), "time": (30,), "g/c": (25,), "g/d": (5, 12), "v2": (20,)}


def document(path: str, shape: tuple[int, ...], note: int) -> tuple[str, bytes]:
    """Key and bytes of the metadata of an array whose chunks hold one element."""
    if path == "v2":
        fields: dict[str, Any] = {
            "zarr_format": 2,
            "shape": shape,
            "chunks": [1] * len(shape),
            "dtype": "|u1",
            "compressor": None,
            "fill_value": 0,
            "order": "C",
            "filters": None,
        }
        return f"{path}/.zarray", json.dumps(fields).encode()
    fields = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1] * len(shape)}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": 0,
        "codecs": [{"name": "bytes"}],
        "attributes": {"note": note},
    }
    if path == "time":
        fields["dimension_names"] = ["time"]
    return f"{path}/zarr.json", json.dumps(fields).encode()


def chunk_key(path: str, coords: tuple[int, ...]) -> str:
    separator, first = (".", []) if path == "v2" else ("/", ["c"])
    return f"{path}/{separator.join([*first, *map(str, coords)])}"


# --- the model -------------------------------------------------------------------------------


@dataclass
class State:
    """What one snapshot reads as, in plain terms."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Array by path -> its grid, which is its shape."""
    source: dict[str, str] = field(default_factory=dict)
    """Array -> the path it was made at, which its documents show."""
    keys: dict[str, bytes] = field(default_factory=dict)

    def copy(self) -> State:
        return State(dict(self.shapes), dict(self.source), dict(self.keys))

    def chunks(self, path: str) -> dict[str, tuple[int, ...]]:
        """Keys of the chunks of an array that are there, with their coordinates."""
        found, made = {}, self.source[path]
        for coords in np.ndindex(self.shapes[path]):
            key = path + chunk_key(made, coords).removeprefix(made)
            if key in self.keys:
                found[key] = coords
        return found


@dataclass
class World:
    """A repository beside what it must read as."""

    seed: int
    run: Run | None = None
    """Runs the tasks of compactions."""
    storage: MemoryStorage = field(default_factory=MemoryStorage)
    state: State = field(default_factory=State)
    made: list[tuple[str, State]] = field(default_factory=list)
    undo: State | None = None
    """The state before the last commit, unless the branch has been reset since."""
    landed: int = 0
    dropped: int = 0
    races: int = 0
    rewritten: int = 0
    most_runs: int = 0
    most_leaves: int = 0
    partly: int = 0
    exact: int = 0
    bounds: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        config = {"compaction": {"mode": "manual"}, "inline-chunk-bytes": 16}
        self.repository = zm.create(self.storage, config)
        session = self.repository.writable_session("main")
        for path in ("", "g"):
            key, value = f"{path}/zarr.json".lstrip("/"), b'{"zarr_format":3,"node_type":"group"}'
            session.store.set_sync(key, buffer(value))
            self.state.keys[key] = value
        self.made.append((session.commit("groups"), self.state.copy()))

    # --- commits -----------------------------------------------------------------------------

    def commit_and_compact(self) -> None:
        """A commit that is followed by the compaction that it makes due."""
        rewrite = bool(self.rng.random() < 0.5)
        config: dict[str, Any] = {"commits": {"mode": "rewrite" if rewrite else "delta"}}
        config["compaction"] = {
            "mode": "auto",
            "max-delta-count": 3,
            "size-ratio": 0.3,
        }
        repository = zm.open(self.storage, config)
        before = self.repository.list_branches()["main"]
        self.commit(repository)
        head = self.repository.readonly_session("main")
        if rewrite and head.snapshot_id != before:
            assert contents_of(head.store).view.snapshot.deltas == ()
            self.rewritten += 1

    def commit(self, repository: Repository | None = None, *, amend: bool = True) -> None:
        session = (repository or self.repository).writable_session("main")
        before = self.state.copy()
        for _ in range(int(self.rng.integers(1, 5))):
            self.change(session)
        if not session.status():
            return
        kind = next(self.repository.ancestry()).kind
        if amend and kind != "rewrite" and self.undo is not None and self.rng.random() < 0.1:
            snapshot_id = session.amend("amended")
        else:
            snapshot_id = session.commit("changes")
            self.undo = before
        self.made.append((snapshot_id, self.state.copy()))

    def change(self, session: Session) -> None:
        rng, state = self.rng, self.state
        path = list(GRIDS)[rng.integers(len(GRIDS))]
        if path not in state.shapes:
            self.create(session, path)
        match rng.integers(0, 12):
            case 0 | 5:
                self.resize(session, path)
            case 1 if rng.random() < 0.4:
                self.delete(session, path)
                if rng.random() < 0.5:
                    self.create(session, path)
            case 2 if rng.random() < 0.4 and path != "v2":
                self.move(session, path)
            case 3:
                session.store.set_sync(*self.opaque())
            case 4 if state.chunks(path):
                chunks = list(state.chunks(path))
                for key in rng.choice(chunks, rng.integers(1, len(chunks) + 1), replace=False):
                    session.store.delete_sync(key)
                    del state.keys[key]
            case _:
                self.write(session, path)

    def opaque(self) -> Any:
        key, value = f"other/{self.rng.integers(3)}", self.rng.bytes(4)
        self.state.keys[key] = value
        return key, buffer(value)

    def create(self, session: Session, path: str) -> None:
        self.state.source[path] = path
        self.describe(session, path, GRIDS[path])

    def describe(self, session: Session, path: str, shape: tuple[int, ...]) -> None:
        made = self.state.source[path]
        key, value = document(made, shape, int(self.rng.integers(1000)))
        key = path + key.removeprefix(made)
        session.store.set_sync(key, buffer(value))
        self.state.shapes[path] = shape
        self.state.keys[key] = value

    def resize(self, session: Session, path: str) -> None:
        chunks = self.state.chunks(path)
        whole = GRIDS[self.state.source[path]]
        grow = self.rng.random() < 0.5
        shape = whole if grow else tuple(int(self.rng.integers(1, n + 1)) for n in whole)
        for key, coords in chunks.items():
            if any(c >= n for c, n in zip(coords, shape, strict=True)):
                del self.state.keys[key]
        self.describe(session, path, shape)

    def delete(self, session: Session, path: str) -> None:
        workspace_of(session.store).delete_below(f"{path}/")
        self.state.shapes.pop(path)
        for key in [key for key in self.state.keys if key.startswith(f"{path}/")]:
            del self.state.keys[key]

    def move(self, session: Session, path: str) -> None:
        """To another place and, the next time, back."""
        other = path.removeprefix("moved-") if path.startswith("moved-") else f"moved-{path}"
        other = other.replace("/", "-") if path == path.removeprefix("moved-") else "g/c"
        if other in self.state.shapes or path not in self.state.shapes:
            return
        try:
            session.move(f"/{path}", f"/{other}")
        except InvalidArgumentError:
            return
        self.state.shapes[other] = self.state.shapes.pop(path)
        self.state.source[other] = self.state.source.pop(path)
        for key in [key for key in self.state.keys if key.startswith(f"{path}/")]:
            self.state.keys[other + key.removeprefix(path)] = self.state.keys.pop(key)

    def write(self, session: Session, path: str) -> None:
        shape, made = self.state.shapes[path], self.state.source[path]
        at = [int(self.rng.integers(n)) for n in shape]
        size = [int(self.rng.integers(1, 8)) for _ in shape]
        for step in np.ndindex(
            tuple(min(s, n - a) for s, n, a in zip(size, shape, at, strict=True))
        ):
            coords = tuple(a + s for a, s in zip(at, step, strict=True))
            key = path + chunk_key(made, coords).removeprefix(made)
            value = self.rng.bytes(int(self.rng.choice([2, 2, 40])))
            session.store.set_sync(key, buffer(value))
            self.state.keys[key] = value

    def revert(self) -> None:
        """Undo the last commit, through whatever has been compacted since."""
        if self.undo is None:
            return
        for info in self.repository.ancestry():
            if info.kind != "rewrite":
                break
        self.repository.revert(info.snapshot_id)
        self.state, self.undo = self.undo, None
        self.made.append((self.repository.list_branches()["main"], self.state.copy()))

    def reset(self) -> None:
        history = {info.snapshot_id for info in self.repository.ancestry()}
        known = [one for one in self.made if one[0] in history]
        snapshot_id, state = known[self.rng.integers(len(known))]
        self.repository.reset_branch("main", snapshot_id, force=True)
        self.state, self.undo = state.copy(), None

    # --- compactions -------------------------------------------------------------------------

    def compact(self, race: Callable[[], None] | None = None) -> None:
        rng = self.rng
        size = int(rng.choice([5, 20, 100]))
        sets = [{"default": {"max-manifest-size": size}}]
        rules: list[dict[str, Any]] = []
        if rng.random() < 0.5:
            sets = [{"small": {"max-manifest-size": 10, "cardinality": 2}}, *sets]
            rules = [{"target": "small", "path": ".*/(time|a)"}]
        config = {
            "compaction": {"fan-in": int(rng.integers(2, 5))},
            "chunk-manifests": {"sets": sets, "rules": rules},
        }
        raced = []

        def hook(name: str) -> None:
            if race is not None and name == "root.swap" and not raced:
                raced.append(True)
                self.races += 1
                race()

        repack.STEP_REFS = int(rng.choice([10, 4_000_000]))
        rows = 7 if repack.STEP_REFS == 10 else 2_000_000
        pending.BATCH_ROWS = write_leaves.BATCH_ROWS = compaction._PLANNED_ROWS = rows
        pending._PIECE_ROWS = min(rows, 250_000)
        write_leaves._TASK_REFS = rows
        runtime = replace(SYSTEM, checkpoint=hook)
        repository = zm.open(self.storage, config, runtime=runtime)
        modes = [CompactionMode.MAJOR] * 12 + [CompactionMode.MINOR] * 5 + [CompactionMode.FULL]
        mode = modes[rng.integers(len(modes))]
        ratio = float(rng.choice([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 1.0]))
        report, ref = compact_branch(
            context_of(repository), "main", mode, size_ratio=ratio, run=self.run
        )
        self.landed += ref is not None
        self.dropped += bool(raced) and ref is None
        if ref is not None:
            self.made.append((report.snapshot_id, self.state.copy()))

    def commit_meanwhile(self) -> None:
        self.compact(lambda: [self.commit() for _ in range(int(self.rng.integers(1, 3)))])

    def compact_meanwhile(self) -> None:
        self.compact(self.compact)

    # --- what is so at any time --------------------------------------------------------------

    def step(self) -> None:
        doing = [self.commit] * 11
        doing += [self.compact] * 4
        doing += [
            self.commit_and_compact,
            self.commit_meanwhile,
            self.commit_meanwhile,
            self.compact_meanwhile,
        ]
        doing += [self.revert, self.reset] if self.rng.random() < 0.3 else []
        doing[self.rng.integers(len(doing))]()

    def check_head(self) -> None:
        head = self.repository.list_branches()["main"]
        fresh = zm.open(self.storage).readonly_session("main")
        assert fresh.snapshot_id == head
        assert contents(fresh) == self.state.keys
        assert reader.Reader(self.storage.get).read(head) == self.state.keys
        self.check_shape(fresh)
        self.check_totals(fresh)

    def check_totals(self, session: Session) -> None:
        """What the snapshot says of each array, and what the specification makes of it."""
        own, view = reader.Reader(self.storage.get), contents_of(session.store).view
        snapshot = own.snapshot(session.snapshot_id)
        for path in self.state.shapes:
            chunks = self.state.chunks(path)
            real = len(chunks), sum(len(self.state.keys[key]) for key in chunks)
            node_id, total = view.nodes[path].node_id, estimate_of(session)[path].total
            said, exact = own.count(snapshot, node_id), own.is_exact(snapshot, node_id)
            assert (total.chunks_exact, total.nbytes_exact) == exact
            assert said[1] == total.nbytes
            for number, one, is_exact in zip(real, said, exact, strict=True):
                assert one == number if is_exact else one >= number
            self.exact += exact == (True, True)
            self.bounds += exact != (True, True)

    def check_shape(self, session: Session) -> None:
        """The bounds and invariants of the read list and the base."""
        view = contents_of(session.store).view
        runs = [entry for entry in view.snapshot.deltas if entry.first < entry.last]
        assert len(runs) <= MOST_RUNS
        boxes: dict[bytes, list[Any]] = {}
        merged = set()
        for ref in view.manifests:
            held = dict(ref.leaves())
            merged |= set(held.values())
            for part in held:
                boxes.setdefault(part.node_id, []).append(part.box)
        for some in boxes.values():
            assert not any(a.overlaps(b) for a, b in combinations(some, 2))
        self.most_runs = max(self.most_runs, len(runs))
        self.most_leaves = max([self.most_leaves, *map(len, boxes.values())])
        self.partly += len(merged) > 1 and bool(view.snapshot.deltas)

    def check_all(self) -> None:
        own = reader.Reader(self.storage.get)
        fresh = zm.open(self.storage)
        for snapshot_id, state in self.made:
            assert own.read(snapshot_id) == state.keys
            assert contents(fresh.readonly_session(snapshot_id)) == state.keys


def buffer(value: bytes) -> Any:
    from zarr.core.buffer import default_buffer_prototype

    return default_buffer_prototype().buffer.from_bytes(value)


def contents(session: Session) -> dict[str, bytes]:
    from zarr.core.buffer import default_buffer_prototype

    prototype = default_buffer_prototype()
    keys = list(contents_of(session.store).keys_below(""))
    assert len(keys) == len(set(keys))
    found = {key: session.store.get_sync(key, prototype=prototype) for key in keys}
    return {key: value.to_bytes() for key, value in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2, 6, 24, 36])
@pytest.mark.parametrize("run", [None, in_tasks])
def test_any_commits_and_compactions(
    run: Run | None, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (pending, write_leaves):
        monkeypatch.setattr(module, "BATCH_ROWS", module.BATCH_ROWS)
    monkeypatch.setattr(compaction, "_PLANNED_ROWS", compaction._PLANNED_ROWS)
    monkeypatch.setattr(pending, "_PIECE_ROWS", pending._PIECE_ROWS)
    monkeypatch.setattr(repack, "STEP_REFS", repack.STEP_REFS)
    monkeypatch.setattr(write_leaves, "_TASK_REFS", write_leaves._TASK_REFS)
    world = World(seed, run)
    for _ in range(40):
        world.step()
        world.check_head()
    world.check_all()
    assert world.landed > 3
    assert world.races
    assert world.most_leaves > 2
    assert world.exact


@pytest.mark.parametrize("seed", range(100, 104))
def test_rewriting_after_each_commit_makes_no_difference(seed: int) -> None:
    """But that readers find no deltas."""
    worlds = World(seed), World(seed)
    for world, mode in zip(worlds, ("delta", "rewrite"), strict=True):
        options = {"commits": {"mode": mode}, "compaction": {"mode": "auto"}}
        for _ in range(15):
            world.commit(zm.open(world.storage, options), amend=False)
        world.check_all()
    delta, rewrite = (zm.open(w.storage).readonly_session("main") for w in worlds)
    assert contents(delta) == contents(rewrite) == worlds[0].state.keys == worlds[1].state.keys
    assert len(contents_of(delta.store).view.snapshot.deltas) == 16
    assert contents_of(rewrite.store).view.snapshot.deltas == ()
    made = [(info.message, info.kind) for info in worlds[1].repository.ancestry()]
    data = [(info.message, info.kind) for info in worlds[0].repository.ancestry()]
    assert [one for one in made if one[1] != "rewrite"] == data


# --- cost ------------------------------------------------------------------------------------


def pending_refs(refs: int, commits: int) -> MemoryStorage:
    """A repository whose array has so many virtual chunks, pending in so many commits."""
    storage = MemoryStorage()
    sets = {"default": {"max-manifest-size": 10_000}}
    config = {"chunk-manifests": {"sets": [sets]}, "compaction": {"mode": "manual"}}
    session = zm.create(storage, config).writable_session()
    key, data = document("b", (refs // 100, 100), 0)
    session.store.set_sync(key, buffer(data))
    for rows in np.split(np.arange(refs), commits):
        index = np.stack([rows // 100, rows % 100], axis=1)
        files = [f"file:///{rows[0]}/{i}" for i in range(len(rows) // 1_000)]
        where = (rows - rows[0]) // 1_000, rows % 1_013 * 7_919, rows % 509 + 1
        session.store.set_virtual_refs("b", index, files, *where)
        session.commit("refs")
    return storage


@pytest.mark.parametrize("mode", ["major", "full"])
def test_memory_depends_on_what_is_worked_on_at_a_time(
    mode: Literal["major", "full"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on how many refs there are, pending or in one array of the base."""
    for module in (pending, write_leaves):
        monkeypatch.setattr(module, "BATCH_ROWS", 20_000)
    monkeypatch.setattr(repack, "STEP_REFS", 40_000)
    refs = 400_000
    storage = CountingStorage(pending_refs(refs, 20))
    if mode == "full":
        zm.open(storage).compact("main", "full")
    repository = zm.open(storage)
    storage.reset()
    tracemalloc.start()
    report = repository.compact("main", mode)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.refs_merged == refs
    assert report.manifests_written == 40
    assert peak < 30 * refs  # bytes; columns that vary take 8 a ref each
    fetched = [record for record in storage.log if record.op.startswith("get")]
    objects = [record for record in fetched if record.key != "current"]
    assert report.bytes_read == sum(record.nbytes for record in objects) > 20_000
    assert len(objects) == len({record.key for record in objects})
    assert repository.compact("main", "major").bytes_read == 0, "all of it is in the cache"
