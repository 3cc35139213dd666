"""What is done to one node takes as many steps whether there are few other nodes or many."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import CodeType
from typing import Any, Final, NamedTuple

import pytest
from zarr.core.buffer import cpu
from zarr.core.sync import sync

import zarr_manifests
import zarr_manifests as zm
from zarr_manifests import Repository, Session
from zarr_manifests.engine.snapshot.path_index import PathIndex
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import ManifestStore, contents_of

PACKAGE: Final = str(Path(zarr_manifests.__file__).parent)
TOOL: Final = 4
FEW, MANY = 40, 160
GROUP = b'{"zarr_format": 3, "node_type": "group"}'
ARRAY = b"""{
    "zarr_format": 3, "node_type": "array", "shape": [4], "data_type": "uint8", "fill_value": 0,
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2]}},
    "chunk_key_encoding": {"name": "default"}, "codecs": [{"name": "bytes"}]
}"""


class Counted(dict[str, Any]):
    """Counts the nodes that are looked at, also where all are copied at once."""

    looked = 0

    def __getitem__(self, path: str) -> Any:
        Counted.looked += 1
        return super().__getitem__(path)

    def get(self, path: str, default: Any = None) -> Any:
        Counted.looked += 1
        return super().get(path, default)

    def __contains__(self, path: object) -> bool:
        Counted.looked += 1
        return super().__contains__(path)

    def __iter__(self) -> Iterator[str]:
        Counted.looked += len(self)
        return super().__iter__()

    def keys(self) -> Any:
        Counted.looked += len(self)
        return super().keys()

    def values(self) -> Any:
        Counted.looked += len(self)
        return super().values()

    def items(self) -> Any:
        Counted.looked += len(self)
        return super().items()


def steps(call: Callable[[], object]) -> int:
    """Lines and loops of the package that run in `call`, and nodes that are looked at."""
    ran = 0

    def step(code: CodeType, *_: int) -> object:
        nonlocal ran
        if not code.co_filename.startswith(PACKAGE):
            return sys.monitoring.DISABLE
        ran += 1
        return None

    events = sys.monitoring.events
    sys.monitoring.use_tool_id(TOOL, "steps")
    sys.monitoring.restart_events()
    Counted.looked = 0
    try:
        for event in (events.LINE, events.JUMP):
            sys.monitoring.register_callback(TOOL, event, step)
        sys.monitoring.set_events(TOOL, events.LINE | events.JUMP)
        call()
    finally:
        sys.monitoring.set_events(TOOL, 0)
        for event in (events.LINE, events.JUMP):
            sys.monitoring.register_callback(TOOL, event, None)
        sys.monitoring.free_tool_id(TOOL)
    return ran + Counted.looked


def put(store: ManifestStore, key: str, value: bytes) -> None:
    store.set_sync(key, cpu.Buffer.from_bytes(value))


def listed(store: ManifestStore, path: str) -> list[str]:
    async def names() -> list[str]:
        return [name async for name in store.list_dir(path)]

    found: list[str] = sync(names())
    return found


def opened(repository: Repository) -> Session:
    """A session whose looks at nodes are counted."""
    session = repository.writable_session("main")
    contents = contents_of(session.store)
    contents.view.nodes = Counted(contents.view.nodes)
    contents.changes.nodes = Counted(contents.changes.nodes)
    return session


def make(store: ManifestStore, number: int) -> None:
    """An array, its chunks, one of them before it, and a key that is neither."""
    put(store, f"g/{number}/c/0", b"\x00\x01")
    put(store, f"g/{number}/notes", b"")
    put(store, f"g/{number}/zarr.json", ARRAY)
    for chunk in (0, 1, 0):
        put(store, f"g/{number}/c/{chunk}", bytes([number % 256, chunk]))
        assert store.get_sync(f"g/{number}/c/{chunk}") is not None


class Many(NamedTuple):
    """A session over that many arrays in a group."""

    repository: Repository
    session: Session
    count: int

    @property
    def store(self) -> ManifestStore:
        return self.session.store


def filled(count: int, *, committed: bool) -> Many:
    """Arrays that are committed or not."""
    # A compaction looks at all nodes.
    config = {"inline-chunk-bytes": 0, "compaction": {"mode": "manual"}}
    repository = zm.create(MemoryStorage(), config, virtual_containers={"raw": "memory://raw"})
    session = opened(repository)
    put(session.store, "g/zarr.json", GROUP)
    for number in range(count):
        make(session.store, number)
    if committed:
        session.commit("arrays")
        session = opened(repository)
        listed(session.store, "")  # the first listing, and the first reads, may index all nodes
        for number in range(count - 20, count):
            assert session.store.get_sync(f"g/{number}/c/0") is not None
    return Many(repository, session, count)


ONE_BY_ONE: Final[dict[str, Callable[[Many, int], object]]] = {
    "make": lambda of, i: make(of.store, 1000 + i),
    "attributes": lambda of, i: put(of.store, f"g/{i}/zarr.json", ARRAY + b" " * i),
    "read": lambda of, i: [of.store.get_sync(f"g/{i}/c/{c}") for c in (0, 1, 0, 1, 7)],
    "exists": lambda of, i: sync(of.store.exists(f"g/x{i}/zarr.json")),
    "list": lambda of, i: listed(of.store, f"g/{i}"),
    "delete": lambda of, i: of.store.delete_sync(f"g/{i}/zarr.json"),
    "delete all of": lambda of, i: sync(of.store.delete_dir(f"g/{i}")),
    "move": lambda of, i: of.session.move(f"/g/{i}", f"/m{i}"),
}
"""What may be done to one array of many."""


def refer(of: Many) -> None:
    """Set virtual refs in all arrays."""
    where = ["virtual://raw/a"], [0], [0], [2]
    for number in range(of.count):
        of.store.set_virtual_refs(f"g/{number}", [[0]], *where)


def commit_after_another(of: Many) -> None:
    """Commit a change of each array after another session has committed one of each."""
    one, other = of.session, opened(of.repository)
    for number in range(of.count):
        make(other.store, 1000 + number)
        put(one.store, f"g/{number}/c/1", b"\x00\x07")
    other.commit("other")
    one.commit("one")


AT_ONCE: Final[dict[str, Callable[[Many], object]]] = {
    "list": lambda of: listed(of.store, "g"),
    "delete": lambda of: sync(of.store.delete_dir("g")),
    "move": lambda of: of.session.move("/g", "/h"),
    "move and commit": lambda of: (of.session.move("/g", "/h"), of.session.commit("moved")),
    "commit after another": commit_after_another,
    "refer": refer,
    "status": lambda of: of.session.status(),
    "sizes": lambda of: of.repository.du(of.session.snapshot_id),
}
"""What may be done to all of them."""


@pytest.mark.parametrize("committed", [False, True], ids=["new", "stored"])
@pytest.mark.parametrize("act", ONE_BY_ONE)
def test_one_array_of_many(act: str, committed: bool) -> None:
    """Its steps are as many with few other arrays as with many."""

    def act_on_some(of: Many) -> None:
        for number in range(20):
            ONE_BY_ONE[act](of, number)

    few, many = (
        steps(partial(act_on_some, filled(count, committed=committed))) for count in (FEW, MANY)
    )
    assert many <= 1.05 * few


@pytest.mark.parametrize("committed", [False, True], ids=["new", "stored"])
@pytest.mark.parametrize("act", AT_ONCE)
def test_all_arrays_of_a_group(act: str, committed: bool) -> None:
    """The steps grow as the arrays do."""
    few, many = (
        steps(partial(AT_ONCE[act], filled(count, committed=committed))) for count in (FEW, MANY)
    )
    assert many <= 1.1 * few * MANY / FEW


def test_what_is_made_and_deleted_leaves_no_trace() -> None:
    session = opened(zm.create(MemoryStorage()))
    changes = contents_of(session.store).changes
    for number in range(5):
        make(session.store, number)
        sync(session.store.delete_dir(f"g/{number}"))
    assert vars(changes.paths) == vars(PathIndex())


@pytest.mark.parametrize(
    ("path", "directories"),
    [("a", [""]), ("a/b", ["a/", ""]), ("/a/b", ["/a/", "/", ""]), ("//", ["//", "/"])],
)
def test_a_path_is_in_its_directories(path: str, directories: list[str]) -> None:
    index = PathIndex(["other/path"])
    index.add(path)
    index.add(path)
    assert path in index.paths(directories[0])
    for inner, outer in pairwise(directories):
        assert inner in index.directories(outer)
    index.discard(path)
    index.discard(path)
    assert vars(index) == vars(PathIndex(["other/path"]))


def test_the_root_is_in_no_directory() -> None:
    index = PathIndex([""])
    assert vars(index) == vars(PathIndex())
    index.discard("")
    assert vars(index) == vars(PathIndex())


def test_a_directory_stays_while_there_are_paths_in_it() -> None:
    index = PathIndex(["a/b/c", "a/d", "a"])
    index.discard("a/b/c")
    assert not index.directories("a/")
    assert list(index.paths("a/")) == ["a/d"]
    index.discard("a/d")
    assert not index.directories("")
    assert list(index.paths("")) == ["a"]


def test_many_new_arrays_wait_for_a_compaction() -> None:
    """One commit of them merges no tables; so many nodes without chunks are compacted at once."""
    compacted = []
    for chunks in (True, False):
        repository = zm.create(MemoryStorage())
        with repository.transaction(message="arrays") as store:
            for number in range(1_100):
                put(store, f"{number}/zarr.json", ARRAY)
                if chunks:
                    put(store, f"{number}/c/0", b"\x00\x01")
        compacted.append("commit rewrite" in {done.operation for done in repository.ops_log()})
    assert compacted == [False, True]
