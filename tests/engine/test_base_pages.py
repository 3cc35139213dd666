"""Bases in pages: they answer as bases without pages do, and few of their pages are read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr.core.buffer import cpu
from zarr.core.sync import sync

import zarr_manifests as zm
from effort import examples
from zarr_manifests import Repository, Session
from zarr_manifests.errors import CorruptObjectError, ManifestsError
from zarr_manifests.format.nodes import Base
from zarr_manifests.planning.layout import node_pages
from zarr_manifests.planning.layout.node_pages import PageLimits
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import ManifestStore, contents_of
from zarr_manifests.testing import CountingStorage, LatencyStorage

GROUP = b'{"zarr_format": 3, "node_type": "group"}'
SMALL = PageLimits(inline=0, nodes=2, leaves=2)
NEVER = PageLimits(inline=10**9)


def array(length: int = 6, dimension: str = "x") -> bytes:
    return json.dumps(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [length],
            "data_type": "uint8",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1]}},
            "chunk_key_encoding": {"name": "default"},
            "codecs": [{"name": "bytes"}],
            "fill_value": 0,
            "dimension_names": [dimension],
        }
    ).encode()


def put(store: ManifestStore, key: str, value: bytes) -> None:
    store.set_sync(key, cpu.Buffer.from_bytes(value))


@contextmanager
def limits(of: PageLimits) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_pages, "LIMITS", of)
        yield


def repository(storage: Any = None, **config: Any) -> Repository:
    given_config = {"compaction": {"mode": "manual"}, "inline-chunk-bytes": 100, **config}
    return zm.create(MemoryStorage() if storage is None else storage, given_config)


def pages_of(repo: Repository) -> Base:
    """The base of main, with its pointers to pages."""
    pages = contents_of(repo.readonly_session("main").store).view.pages
    assert pages is not None
    return pages.base


# --- alike -----------------------------------------------------------------------------------

names = st.sampled_from(["a", "a-b", "a0", "b", "x"])
paths = st.lists(names, max_size=3).map("/".join)
keys = st.one_of(
    paths.map(lambda path: f"{path}/zarr.json".lstrip("/")),
    st.tuples(paths, st.integers(0, 6)).map(lambda one: f"{one[0]}/c/{one[1]}".lstrip("/")),
    st.tuples(paths, names).map(lambda one: f"{one[0]}/{one[1]}.txt".lstrip("/")),
)
documents = st.sampled_from([GROUP, array(), array(3), array(6, "a")])


@st.composite
def steps(draw: st.DrawFn) -> tuple[str, ...]:
    match draw(st.sampled_from(["set", "set", "set", "set", "delete", "move", "fold", "commit"])):
        case "set":
            key = draw(keys)
            value = draw(documents) if key.endswith("zarr.json") else draw(st.binary(min_size=1))
            return "set", key, value.hex()
        case "delete":
            return "delete", draw(keys)
        case "move":
            return "move", draw(paths), draw(paths)
        case what:
            return (what,)


def outcome(call: Any, *args: Any) -> Any:
    try:
        return call(*args)
    except ManifestsError as error:
        return type(error)


class One:
    """A repository and a session on it."""

    def __init__(self, of: PageLimits) -> None:
        self.limits, self.repo = of, repository()
        self.session = self.repo.writable_session("main")

    def do(self, step: tuple[str, ...]) -> Any:
        store = self.session.store
        match step:
            case "set", key, value:
                return outcome(put, store, key, bytes.fromhex(value))
            case "delete", key:
                return outcome(store.delete_sync, key)
            case "move", old, new:
                return outcome(self.session.move, old, new)
        with suppress(ManifestsError):  # nothing to commit
            self.session.commit("change")
        if step == ("fold",):
            with limits(self.limits):
                self.repo.compact("main", "full")
        self.session = self.repo.writable_session("main")
        return None


def seen(session: Session, wanted: list[str]) -> Any:
    """What the store answers to these keys, and to listings."""
    store = session.store
    found: dict[str, Any] = {}
    for key in wanted:
        value = store.get_sync(key)
        found[key] = None if value is None else value.to_bytes()
    for prefix in {"", *(key.rpartition("/")[0] for key in wanted)}:
        found[f"list {prefix}"] = sorted(collected(store.list_dir(prefix)))
        found[f"all {prefix}"] = sorted(collected(store.list_prefix(prefix)))
    return found


def collected(names: Any) -> list[str]:
    async def gather() -> list[str]:
        return [name async for name in names]

    return sync(gather())


@given(st.lists(steps(), min_size=1, max_size=25), st.lists(keys, min_size=1, max_size=6))
@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_base_in_pages_answers_as_one_without(
    changes: list[tuple[str, ...]], wanted: list[str]
) -> None:
    one, other = One(SMALL), One(NEVER)
    for step in changes:
        assert one.do(step) == other.do(step)
    wanted = [*wanted, *(step[1] for step in changes if step[0] in ("set", "delete"))]
    assert seen(one.session, wanted) == seen(other.session, wanted)
    for each in (one, other):
        each.do(("fold",))
        each.do(("commit",))
    readers = [each.repo.readonly_session("main") for each in (one, other)]
    assert seen(readers[0], wanted) == seen(readers[1], wanted)
    assert one.repo.verify().problems == ()
    mine, theirs = (each.repo.du(estimate=True) for each in (one, other))
    assert (mine.total, mine.arrays) == (theirs.total, theirs.arrays)
    sums = [contents_of(reader.store).view.snapshot.sums for reader in readers]
    assert sums[0] == sums[1]


# --- few pages -------------------------------------------------------------------------------

IN_A_GROUP = 100


class Many(NamedTuple):
    """Arrays in groups, merged into the base by the commit that made them."""

    storage: MemoryStorage
    arrays: int

    @property
    def groups(self) -> int:
        return self.arrays // IN_A_GROUP


@pytest.fixture(scope="module", params=[10_000, pytest.param(30_000, marks=pytest.mark.sweep)])
def many(request: pytest.FixtureRequest) -> Many:
    storage = MemoryStorage()
    found = Many(storage, request.param)
    repo = zm.create(storage)
    with repo.transaction("main", message="make") as store:
        put(store, "zarr.json", GROUP)
        for i in range(found.arrays):
            if i < found.groups:
                put(store, f"g{i}/zarr.json", GROUP)
            put(store, f"g{i % found.groups}/a{i // found.groups}/zarr.json", array(i + 1))
    return found


def counted(many: Many) -> CountingStorage:
    return CountingStorage(LatencyStorage(copy_of(many.storage), latency_s=0))


def copy_of(storage: MemoryStorage) -> MemoryStorage:
    copied = MemoryStorage()
    for info in storage.list():
        copied.put(info.key, storage.get(info.key))
    return copied


def test_one_array_of_many_is_opened_by_one_page(many: Many) -> None:
    storage = counted(many)
    session = zm.open(storage).readonly_session("main")
    assert zarr.open_array(session.store, path="g7/a23", mode="r").shape == (23 * many.groups + 8,)
    assert storage.rounds() <= 3
    assert storage.bytes_read <= 32 * 1024
    storage.reset()
    with pytest.raises(FileNotFoundError):
        zarr.open_array(session.store, path="g7/a100", mode="r")
    assert storage.requests <= 1  # the page of a path beyond those of the group
    assert len(collected(session.store.list_dir("g7"))) == IN_A_GROUP + 1
    assert storage.requests <= 3
    assert storage.bytes_read <= 32 * 1024


def test_a_group_of_many_lists_its_members_by_its_pages(many: Many) -> None:
    storage = counted(many)
    session = zm.open(storage).readonly_session("main")
    storage.reset()
    assert len(collected(session.store.list_dir(""))) == many.groups + 1
    assert storage.requests <= 1 + many.groups // 150  # at once, so many groups are in a page
    assert storage.rounds() == 1
    storage.reset()
    group = zarr.open_group(session.store, path="g3", mode="r")
    assert len(list(group.array_keys())) == IN_A_GROUP
    assert storage.requests <= 3
    assert storage.rounds() <= 2


@pytest.mark.slow
def test_a_commit_to_one_array_of_many_reads_few_pages(many: Many) -> None:
    storage = counted(many)
    repo = zm.open(storage, {"compaction": {"mode": "manual"}})
    for step in range(3):
        storage.reset()
        session = repo.writable_session("main")
        opened = zarr.open_array(session.store, path="g7/a23")
        match step:
            case 0:
                opened[:] = 1
            case 1:
                opened.resize(5)
                session.move("g7/a23", "g7/moved")
                put(session.store, "g7/new/zarr.json", array())
                session.move("g7/moved", "g7/a23")
            case 2:
                session.store.delete_sync("g8/a1/zarr.json")
                opened.attrs["n"] = 1
        session.commit("one")
        assert storage.bytes_read <= 32 * 1024, step
    assert len(pages_of(repo).pages) > 30
    sums = contents_of(repo.readonly_session("main").store).view.snapshot.sums
    assert (sums["arrays"], sums["groups"]) == (many.arrays, many.groups + 1)
    storage.reset()
    repo.compact("main", "full")
    assert (
        sum(record.key.startswith("nodes/") for record in storage.log if record.op == "create") < 5
    )
    assert repo.verify().problems == ()


# --- large arrays ----------------------------------------------------------------------------


def large() -> tuple[CountingStorage, Repository]:
    """An array with many leaves, and a small one."""
    storage = CountingStorage(MemoryStorage())
    split = {"splitting": [{"path": "/a", "along": {0: 10}}]}
    repo = repository(storage, **{"chunk-manifests": split})
    for stop in range(30, 301, 30):
        with repo.transaction("main", message="make") as store:
            put(store, "a/zarr.json", array(stop))
            put(store, "b/zarr.json", array(3))
            zarr.open_array(store, path="a")[stop - 30 :] = np.arange(stop - 30, stop) % 200 + 1
            zarr.open_array(store, path="b")[:] = 7
        with limits(PageLimits(inline=4, nodes=4, leaves=5)):
            repo.compact("main", "major")  # one more manifest
    return storage, repo


@pytest.mark.slow
def test_a_chunk_of_a_large_array_is_found_by_one_page_of_leaves() -> None:
    storage, repo = large()
    base = pages_of(repo)
    assert len(base.leaf_pages) >= 6
    session = zm.open(storage).readonly_session("main")
    opened = zarr.open_array(session.store, path="a", mode="r")
    storage.reset()
    assert opened[123] == 124
    read = [record.key for record in storage.log if record.key.startswith("nodes/")]
    assert len(read) == 1
    assert (np.asarray(opened[:]) == np.arange(300) % 200 + 1).all()
    assert repo.verify().problems == ()


def test_an_append_to_a_large_array_rewrites_its_last_page() -> None:
    storage, repo = large()
    before = pages_of(repo)
    with repo.transaction("main", message="more") as store:
        opened = zarr.open_array(store, path="a")
        opened.resize(320)
        opened[300:] = 9
    with limits(PageLimits(inline=4, nodes=4, leaves=5)):
        repo.compact("main", "major")
    after = pages_of(repo)
    kept = set(before.leaf_pages) & set(after.leaf_pages)
    assert len(kept) >= len(before.leaf_pages) - 1
    session = zm.open(storage).readonly_session("main")
    opened = zarr.open_array(session.store, path="a", mode="r")
    assert (np.asarray(opened[295:]) == [*(np.arange(295, 300) % 200 + 1), *[9] * 20]).all()
    assert repo.verify().problems == ()


# --- damage ----------------------------------------------------------------------------------


def damaged(change: Any) -> Repository:
    """A repository whose newest base is changed, with all pointers to it."""
    repo = repository()
    with repo.transaction("main", message="make") as store:
        for path in ("", "a", "b", "c", "a/x", "b/x", "c/x"):
            put(store, f"{path}/zarr.json".lstrip("/"), GROUP if "x" not in path else array())
    with limits(SMALL):
        done = repo.compact("main", "full")
    assert done.snapshot_id is not None
    view = contents_of(repo.readonly_session("main").store).view
    assert view.snapshot.base is not None
    assert view.pages is not None
    storage = repo.storage
    base = change(storage, view.pages.base)
    if base is not None:
        with pytest.MonkeyPatch.context() as patch:
            encode = Base.encode
            patch.setattr(Base, "encode", lambda self: encode(base if self.pages else self))
            with limits(SMALL), repo.transaction("main", message="one more") as store:
                put(store, "d/zarr.json", GROUP)
            with limits(SMALL):
                repo.compact("main", "full")
    return zm.open(storage)


def drop_page(storage: MemoryStorage, base: Base) -> None:
    storage.delete_many([base.pages[1].blob.key])


def test_a_missing_page_is_an_error_and_no_absent_node() -> None:
    repo = damaged(drop_page)
    store = repo.readonly_session("main").store
    reads = [outcome(store.get_sync, f"{path}/zarr.json") for path in ("a", "b", "c", "a/x", "c/x")]
    errors = [read for read in reads if isinstance(read, type)]
    assert errors
    assert set(errors) == {CorruptObjectError}
    assert len(errors) < len(reads)  # others are in other pages
    assert None not in reads
    assert len(repo.verify().problems) == 1


def exchange(storage: MemoryStorage, base: Base) -> Base:
    one, two, *rest = base.pages
    return replace(base, pages=(replace(one, blob=two.blob), replace(two, blob=one.blob), *rest))


def miscount(storage: MemoryStorage, base: Base) -> Base:
    return replace(base, pages=(replace(base.pages[0], nodes=7), *base.pages[1:]))


def widen(storage: MemoryStorage, base: Base) -> Base:
    return replace(base, pages=(*base.pages[:-1], replace(base.pages[-1], last="zz/zz")))


def leave_out(storage: MemoryStorage, base: Base) -> Base:
    return replace(base, counts=None)


def call_orphans(storage: MemoryStorage, base: Base) -> Base:
    return replace(base, pages=(*base.pages[:-1], replace(base.pages[-1], orphans=True)))


@pytest.mark.parametrize("change", [exchange, miscount, widen, leave_out])
def test_pages_that_are_not_as_the_base_says_are_refused(change: Any) -> None:
    repo = damaged(change)
    with pytest.raises(CorruptObjectError):
        list(contents_of(repo.readonly_session("main").store).view.nodes)
    assert repo.verify().problems


def test_verification_finds_wrong_orphans() -> None:
    assert damaged(call_orphans).verify().problems
