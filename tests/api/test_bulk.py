"""Many chunks at a time: resolved as each by itself is, and read with few requests."""

from __future__ import annotations

from datetime import timedelta
from itertools import product
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import zarr_manifests as zm
from effort import examples
from storages import CountingStorage
from stored import array_document, get, put
from zarr_manifests import Repository
from zarr_manifests.errors import ConflictError, FencedError, InvalidArgumentError
from zarr_manifests.ids import crc32c
from zarr_manifests.reports import Amount
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import workspace_of

RAW = "memory://raw-of-bulk"
LENGTH = 24


def make(storage: Any, **config: Any) -> Repository:
    common = {"inline-chunk-bytes": 4, "compaction": {"mode": "manual"}}
    return zm.create(storage, {**common, **config}, virtual_containers={"raw": RAW})


def raw_file(nbytes: int = 4096) -> bytes:
    data = bytes(i % 251 for i in range(nbytes))
    MemoryStorage("raw-of-bulk").put("x", data)
    return data


class Model:
    """A session that is changed in all ways, and the bytes of the chunks that it has then."""

    def __init__(self, spill_refs: int) -> None:
        leaves = [{"default": {"max-manifest-size": 7}}]
        self.raw = raw_file()
        self.repository = make(
            MemoryStorage(), **{"spill-refs": spill_refs, "chunk-manifests": {"sets": leaves}}
        )
        self.session = self.repository.writable_session()
        self.length, self.chunks = LENGTH, dict[tuple[int, ...], bytes]()
        self.committed: tuple[int, dict[tuple[int, ...], bytes]] | None = None
        put(self.session, "a/zarr.json", array_document((LENGTH, 2)))

    def one(self, at: int, value: bytes) -> None:
        if at < self.length:
            put(self.session, f"a/c/{at}/1", value)
            self.chunks[at, 1] = value

    def bulk(self, first: int, count: int, step: int) -> None:
        rows = range(first, self.length, step)[:count]
        index = [(at, side) for at in rows for side in (1, 0)]
        n = np.arange(len(index))
        offsets, sizes = (n * 7 + first) % 4000, n % 5 + 5
        parts = [self.raw[at : at + size] for at, size in zip(offsets, sizes, strict=True)]
        known = np.array([crc32c(part) for part in parts], int)
        checksums = np.where(n % 3 == 0, known, -1) if first % 2 else None
        if index:
            self.session.store.set_virtual_refs(
                "a", index, ["virtual://raw/x"], n * 0, offsets, sizes, checksums=checksums
            )
        self.chunks.update(zip(index, parts, strict=True))

    def unset(self, at: int) -> None:
        self.session.store.delete_sync(f"a/c/{at}/1")
        self.chunks.pop((at, 1), None)

    def resize(self, length: int) -> None:
        put(self.session, "a/zarr.json", array_document((length, 2)))
        self.length = length
        self.chunks = {at: data for at, data in self.chunks.items() if at[0] < length}

    def recreate(self) -> None:
        workspace_of(self.session.store).delete_below("a/")
        self.chunks.clear()
        self.resize(LENGTH)

    def commit(self) -> None:
        if self.session.status():
            self.session.commit("changes")
            self.committed = self.length, {**self.chunks}

    def discard(self) -> None:
        if self.committed is not None:
            self.session.discard_changes()
            self.length, self.chunks = self.committed[0], {**self.committed[1]}

    def compact(self, mode: Any) -> None:
        self.commit()
        self.repository.compact(mode=mode)
        self.session = self.repository.writable_session()

    def check(self, box: list[slice]) -> None:
        due = [(self.session, self.length, self.chunks)]
        if self.committed is not None:
            there = self.committed[1].values()
            assert self.repository.du(path="a").total == Amount(len(there), sum(map(len, there)))
            fresh = zm.open(self.repository.storage, virtual_containers={"raw": RAW})
            due += [(each.readonly_session(), *self.committed) for each in (self.repository, fresh)]
        for session, length, chunks in due:
            inside = [range(n)[part] for n, part in zip((length, 2), box, strict=True)]
            expected = {
                (i, j): chunks[i, j] for i in inside[0] for j in inside[1] if (i, j) in chunks
            }
            # One after another, for which refs are looked up ahead.
            for i, j in product(*inside):
                assert get(session, f"a/c/{i}/{j}") == chunks.get((i, j))
            found = session.chunk_refs("a", box)
            assert list(map(tuple, found.coords.tolist())) == sorted(expected)
            assert found.length.tolist() == [len(expected[at]) for at in sorted(expected)]
            assert dict(session.read_chunks("a", box)) == expected


AT = st.integers(0, LENGTH + 3)
VALUE = st.sampled_from([b"abc", b"abcd", b"longer than inline", b"another that is longer"])
TURNS = st.one_of(
    st.tuples(st.just("one"), st.integers(0, LENGTH - 1), VALUE),
    st.tuples(st.just("bulk"), AT, st.integers(1, 20), st.integers(1, 3)),
    st.tuples(st.just("bulk"), AT, st.integers(1, 20), st.integers(1, 3)),
    st.tuples(st.just("unset"), AT),
    st.tuples(st.just("unset"), AT),
    st.tuples(st.just("resize"), st.integers(1, LENGTH + 6)),
    st.tuples(st.just("compact"), st.sampled_from(["minor", "major", "full"])),
    st.sampled_from([("commit",), ("commit",), ("commit",), ("recreate",), ("discard",)]),
)
BOUND = st.none() | st.integers(-3, LENGTH + 3)
BOX = st.tuples(st.builds(slice, BOUND, BOUND), st.builds(slice, BOUND, BOUND)).map(list)


@settings(max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(TURNS, BOX), min_size=3, max_size=14), st.sampled_from([8, 10_000]))
def test_refs_and_bytes_are_those_of_the_chunks_that_are_there(
    turns: list[tuple[tuple[Any, ...], list[slice]]], spill_refs: int
) -> None:
    model = Model(spill_refs)
    for (name, *arguments), box in turns:
        event(name)
        getattr(model, name)(*arguments)
        model.check(box)
        model.check([slice(None), slice(None)])


@pytest.fixture
def repository() -> Repository:
    """One array with an inline, a native and a virtual chunk."""
    raw_file()
    made = make(MemoryStorage())
    session = made.writable_session()
    put(session, "a/zarr.json", array_document((5, 2)))
    put(session, "a/c/0/1", b"in")
    put(session, "a/c/1/0", b"a native chunk")
    session.store.set_virtual_refs("a", [[3, 0]], ["virtual://raw/x"], [0], [10], [20])
    session.commit("one of each")
    return made


def test_refs_of_each_kind(repository: Repository) -> None:
    found = repository.readonly_session().chunk_refs("/a")
    assert (found.path, len(found), found.nbytes) == ("/a", 3, 2 + 14 + 20)
    assert found.kind.tolist() == [1, 2, 3]
    assert found.coords.tolist() == [[0, 1], [1, 0], [3, 0]]
    assert found.source.tolist() == [-1, 0, 1]
    assert found.length.tolist() == [2, 14, 20]
    assert found.inline == b"in"
    assert found.locations[0].startswith("chunks/")
    assert found.locations[1] == "virtual://raw/x"


def test_single_chunks_are_read_by_their_coordinates() -> None:
    storage = CountingStorage(MemoryStorage())
    repository = make(storage)
    session = repository.writable_session()
    array = zarr.create_array(
        session.store, name="a", shape=(20, 7), chunks=(6, 3), dtype="u1", compressors=None
    )
    array[6:] = np.arange(98).reshape(14, 7)
    array[0, 0] = 1
    for commits in (False, True):
        if commits:
            session.commit("numbers")
        found = dict(session.read_chunks("a", coords=[(3, 2), (1, 0), (0, 0), (0, 1), (4, 0)]))
        assert list(found) == [(0, 0), (1, 0), (3, 2)]
        whole = dict(session.read_chunks("a"))
        assert found == {at: whole[at] for at in found}
    assert not list(session.read_chunks("a", coords=np.empty((0, 2), np.int64)))
    storage.reset()
    list(repository.readonly_session().read_chunks("a", coords=[(3, 2)]))
    (read,) = [record for record in storage.log if record.key.startswith("chunks/")]
    assert read.nbytes == 18
    with pytest.raises(InvalidArgumentError, match="only one of box, cells and coords"):
        session.read_chunks("a", cells=[(0, 1)] * 2, coords=[(0, 0)])
    with pytest.raises(InvalidArgumentError, match="coordinates"):
        session.read_chunks("a", coords=[(0,)])


def test_what_a_collection_took_of_what_a_writer_wrote_is_said_to_be() -> None:
    storage = MemoryStorage()
    repository = make(storage, **{"pack-chunk-bytes": 8})
    session = repository.writable_session()
    put(session, "a/zarr.json", array_document((2, 1)))
    put(session, "a/c/0/0", b"an object of its own")
    repository.create_tag("meanwhile")
    repository.garbage_collect(timedelta(0))
    with pytest.raises(FencedError, match="collection has taken chunks/"):
        list(session.read_chunks("a"))


@pytest.mark.parametrize("chunks", [100, 9000])
@pytest.mark.parametrize("clash", [True, False])
def test_what_a_serializable_session_resolves_its_commit_depends_on(
    chunks: int, clash: bool
) -> None:
    repository = make(MemoryStorage())
    session = repository.writable_session()
    put(session, "a/zarr.json", array_document((chunks, 1)))
    put(session, "b/zarr.json", array_document((1, 1)))
    session.commit("empty")
    mine = repository.writable_session(isolation="serializable")
    assert len(mine.chunk_refs("a", [(10, None), (0, 1)])) == 0
    put(mine, "b/c/0/0", b"none")
    theirs = repository.writable_session()
    put(theirs, f"a/c/{20 if clash else 5}/0", b"one")
    theirs.commit("one")
    if clash:
        with pytest.raises(ConflictError, match=": read"):
            mine.commit("there are none")
    else:
        mine.commit("there are none")
