"""The index of initialised chunks: quick where it is there, and never wrong, whatever it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.core.buffer import cpu

import zarr_manifests as zm
from effort import examples
from inside import change_root, context_of, root_of
from zarr_manifests import Repository, Session
from zarr_manifests.engine.compact.presence_index import Presence, index_leaves
from zarr_manifests.engine.snapshot.context import Context
from zarr_manifests.engine.snapshot.index_directory import index_pointer
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import (
    CorruptObjectError,
    InvalidArgumentError,
    NotFoundError,
)
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.chunk_table import ChunkTable, NativeRef
from zarr_manifests.format.envelope import ObjectKind, encode
from zarr_manifests.format.index import Bitmap, Bitmaps, IndexDirectory
from zarr_manifests.format.root import Root
from zarr_manifests.grid import Box
from zarr_manifests.reports import Amount
from zarr_manifests.repository import build_index
from zarr_manifests.session import initialized_chunks
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of
from zarr_manifests.testing import CountingStorage

SOURCE = "000000000001-" + "0" * 24
KEY = f"indexes/{SOURCE}/1"


def put(session: Session, key: str, value: bytes = b"12345678") -> None:
    session.store.set_sync(key, cpu.Buffer.from_bytes(value))


def make(session: Session, path: str, shape: tuple[int, ...]) -> None:
    chunks = (1,) * len(shape)
    zarr.create_array(
        session.store, name=path, shape=shape, chunks=chunks, dtype="u1", compressors=None
    )


def initialized_counts(context: Context, view: SnapshotView) -> dict[str, int]:
    """Number of chunks that are there, by path of the array."""
    presence = Presence(context, view)
    arrays = {path: node.node_id for path, node in view.nodes.items() if node.array is not None}
    return {path: presence.count(node_id) for path, node_id in arrays.items()}


def counts(repository: Repository) -> dict[str, int]:
    session = repository.readonly_session()
    return initialized_counts(context_of(repository), contents_of(session.store).view)


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage()


@pytest.fixture
def repository(storage: MemoryStorage) -> Repository:
    """An array of 36,000 chunks in two leaves, every third of them there, and a full small one.

    Its branch names no index, as if all had been written before there was one.
    """
    sets = [
        {"coordinates": {"max-manifest-size": 5_000}},
        {"default": {"max-manifest-size": 9_000}},
    ]
    config = {"chunk-manifests": {"sets": sets}, "compaction": {"size-ratio": 0}}
    made = zm.create(storage, config)
    session = made.writable_session()
    make(session, "big", (12_000, 3))
    make(session, "small", (5,))
    for i in range(12_000):
        put(session, f"big/c/{i}/{i % 3}")
    for i in range(5):
        put(session, f"small/c/{i}", b"1234")
    session.commit("fill")
    made.compact("main", "major")
    name_none(storage)
    remove_all(storage)
    return made


def manifests_read(storage: CountingStorage) -> list[str]:
    return [r.key for r in storage.log if r.op == "get" and r.key.startswith("manifests/")]


def is_counted(storage: MemoryStorage, branch: str = "main", path: str = "big") -> bool:
    """Whether the size of an array is counted in manifests, since the index does not know it."""
    counting = CountingStorage(storage)
    zm.open(counting).du(branch, path=path)
    return manifests_read(counting) != []


# --- bitmaps -------------------------------------------------------------------------------------


@given(
    st.sets(st.tuples(st.integers(0, 30), st.integers(0, 9)), min_size=1, max_size=150),
    st.tuples(st.integers(0, 12), st.integers(0, 8)),
    st.tuples(st.integers(1, 30), st.integers(1, 9)),
)
def test_a_bitmap_says_what_its_table_says(
    chunks: set[tuple[int, int]], lo: tuple[int, int], shape: tuple[int, int]
) -> None:
    table = ChunkTable.of({c: NativeRef(SOURCE, 1, 0, 8, 1) for c in chunks})
    (bitmap,) = Bitmaps.from_object(
        data := Bitmaps((Bitmap.of(table),)).encode(), BlobRef.to(KEY, data)
    ).bitmaps
    box = table.box
    every = box.unravel(np.arange(box.size))
    assert [tuple(c) in chunks for c in every.tolist()] == bitmap.has(every).tolist()
    region = Box(lo, (lo[0] + shape[0], lo[1] + shape[1]))
    if region.overlaps(box):
        expected = sorted(c for c in chunks if c in region)
        assert list(map(tuple, bitmap.coords(region).tolist())) == expected


def test_a_bitmap_is_as_small_as_what_it_says() -> None:
    def encoded(chunks: list[int]) -> tuple[Bitmap, int]:
        table = ChunkTable.of({(i,): NativeRef(SOURCE, 1, 0, 8, 1) for i in chunks})
        bitmap = Bitmap.of(table)
        return bitmap, len(Bitmaps((bitmap,)).encode())

    full, nbytes = encoded(list(range(100_000)))
    assert (full.bits, full.index, nbytes < 100) == (None, None, True)
    empty = Bitmap.of(ChunkTable.build(Box((2,), (9,)), np.empty(0, np.int64), []))
    assert (empty.bits, empty.index, empty.count) == (None, None, 0)
    data = Bitmaps((empty,)).encode()
    (read,) = Bitmaps.from_object(data, BlobRef.to(KEY, data)).bitmaps
    assert read.coords(Box((0,), (5,))).shape == (0, 1)
    assert not read.has(np.array([[2], [8]])).any()
    rng = np.random.default_rng(1)
    dense, nbytes = encoded(rng.permutation(100_000)[:50_000].tolist())
    assert dense.bits is not None
    assert nbytes < 13_000
    sparse, nbytes = encoded(rng.permutation(10_000_000)[:1_000].tolist())
    assert sparse.index is not None
    assert nbytes < 3_000


@pytest.mark.parametrize(
    "bitmap",
    [
        [[0], [10], 3, b"\xe0", None],
        [[0], [10], 3, b"\xc0\x01", None],
        [[0], [10], 4, b"\xe0\x00", None],
        [[0], [10], 9, None, None],
        [[0], [10], 2, None, [1, 9, 1, 0, b"\x01"]],
        [[0], [10], 2, None, [0, 3]],
        [[0], [2**61], 2**60, None, [0, 3]],
        [[0], [10], 2, b"\xc0\x00", [1, 0, 1, 0, b"\x01"]],
        [[5], [2], 1, None, None],
        [["0"], [2], 1, None, None],
        [[0], [2]],
        None,
    ],
)
def test_a_malformed_bitmap_is_refused(bitmap: object) -> None:
    data = encode(ObjectKind.INDEX, {"type": "bitmaps", "bitmaps": [bitmap]})
    with pytest.raises(CorruptObjectError):
        Bitmaps.from_object(data, BlobRef.to(KEY, data))


_WRONG: list[tuple[int, object]] = [
    (0, b"short"),
    (1, [-1]),
    (1, [10]),
    (2, [2**62]),
    (2, [9, 9]),
    (2, ["9"]),
    (3, 7),
    (7, 1),
    *((place, wrong) for place in range(4, 9) for wrong in (-1, None, "x", [])),
]


@pytest.mark.parametrize(("place", "wrong"), _WRONG)
def test_a_malformed_entry_is_refused(place: int, wrong: object) -> None:
    blob = BlobRef(KEY, 10, 7).pack()
    entry: list[object] = [b"n" * 12, [0], [9], "manifests/x", 5, 9, 72, 0, 0]

    def directory(entry: list[object]) -> bytes:
        return encode(ObjectKind.INDEX, {"type": "directory", "blobs": [blob], "entries": [entry]})

    sound = directory(entry)
    (found,) = IndexDirectory.from_object(sound, BlobRef.to(KEY, sound)).entries.values()
    assert (found.count, found.stored_bytes, found.box) == (9, 72, Box((0,), (9,)))
    entry[place] = wrong
    data = directory(entry)
    with pytest.raises(CorruptObjectError):
        IndexDirectory.from_object(data, BlobRef.to(KEY, data))


# --- what is asked, and what it costs ------------------------------------------------------------


def test_the_index_answers_without_a_manifest(
    repository: Repository, storage: MemoryStorage
) -> None:
    report = build_index(repository)
    assert (report.leaves, report.indexed) == (3, 3)
    assert build_index(repository).indexed == 0
    counting = CountingStorage(storage)
    reader = zm.open(counting)
    counting.reset()
    stats = reader.du(path="/big")["big"]
    assert (stats.total, stats.grid_shape) == (Amount(12_000, 96_000), (12_000, 3))
    assert manifests_read(counting) == []
    assert stats.fraction == pytest.approx(1 / 3)
    session = reader.readonly_session()
    found = initialized_chunks(session, "big", [slice(7_000, 7_003), slice(None)])
    assert found.tolist() == [[7_000, 1], [7_001, 2], [7_002, 0]]
    assert found.dtype == np.int64
    assert initialized_chunks(session, "big", [slice(0, 0), slice(None)]).shape == (0, 2)
    assert len(initialized_chunks(session, "big")) == 12_000
    assert manifests_read(counting) == []
    assert not any(r.op == "list" for r in counting.log)
    assert counting.requests <= 6


def test_commits_are_laid_over_the_index(repository: Repository, storage: MemoryStorage) -> None:
    build_index(repository)
    session = repository.writable_session()
    put(session, "big/c/0/2", b"new")
    session.commit("one more")
    assert repository.du(path="big").chunks == 12_001
    assert repository.du(path="big").nbytes == 96_003
    put(session, "big/c/0/0", b"other")
    session.store.delete_sync("big/c/11999/2")
    session.commit("overwrite and remove")
    zarr.open_array(session.store, path="small").resize((3,))
    session.commit("cut off")
    counting = CountingStorage(storage)
    reader = zm.open(counting)
    assert reader.du(path="big").total == Amount(12_000, 95_992)
    assert counts(reader) == {"big": 12_000, "small": 3}
    last = initialized_chunks(reader.readonly_session(), "big", [slice(11_998, None), slice(0, 3)])
    assert last.tolist() == [[11_998, 1]]
    assert manifests_read(counting) == []


def test_what_is_cut_off_is_not_counted(repository: Repository) -> None:
    build_index(repository)
    session = repository.writable_session()
    zarr.open_array(session.store, path="small").resize((3,))
    zarr.open_array(session.store, path="small").resize((9,))
    put(session, "small/c/1", b"other")
    put(session, "small/c/8", b"12")
    session.commit("cut off, overwrite and append")
    assert repository.du(path="small").chunks == 4
    session.store.delete_sync("small/c/0")
    session.commit("remove")
    assert repository.du(path="small").chunks == 3
    assert repository.du(path="small").nbytes == 11
    assert initialized_chunks(repository.readonly_session(), "small").tolist() == [[1], [2], [8]]


def test_changes_of_a_session_are_laid_over_too(repository: Repository) -> None:
    session = repository.writable_session()
    put(session, "small/c/1", b"other")
    session.store.delete_sync("small/c/0")
    assert initialized_chunks(session, "small").tolist() == [[1], [2], [3], [4]]
    zarr.open_array(session.store, path="small").resize((3,))
    zarr.open_array(session.store, path="small").resize((9,))
    put(session, "small/c/7")
    make(session, "new", ())
    assert initialized_chunks(session, "small").tolist() == [[1], [2], [7]]
    assert initialized_chunks(session, "new", []).shape == (0, 0)
    put(session, "new/c")
    assert initialized_chunks(session, "new").shape == (1, 0)
    with pytest.raises(NotFoundError):
        initialized_chunks(session, "none")
    for region in ([slice(None), slice(None)], [slice(0, 5, 2)], []):
        with pytest.raises(InvalidArgumentError, match="region"):
            initialized_chunks(session, "small", region)
    with pytest.raises(NotFoundError):
        repository.du(path="none")


def test_counts_of_arrays_that_no_delta_touches_are_free(
    repository: Repository, storage: MemoryStorage
) -> None:
    counting = CountingStorage(storage)
    reader = zm.open(counting)
    view = contents_of(reader.readonly_session().store).view
    counting.reset()
    assert initialized_counts(context_of(reader), view) == {"big": 12_000, "small": 5}
    assert counting.requests == 0


def test_a_lookup_fetches_the_bitmaps_of_its_leaves_only(
    repository: Repository, storage: MemoryStorage
) -> None:
    build_index(repository)
    assert len(list(storage.list("indexes/"))) == 3
    counting = CountingStorage(storage)
    session = zm.open(counting).readonly_session()
    counting.reset()
    initialized_chunks(session, "small")
    read = [r for r in counting.log if r.op == "get"]
    assert len(read) == 2  # the directory, and the bitmaps of the small array
    assert all(r.key.startswith("indexes/") for r in read)


def test_building_is_incremental(repository: Repository, storage: MemoryStorage) -> None:
    build_index(repository)
    session = repository.writable_session()
    put(session, "small/c/1", b"other")
    session.commit("another")
    repository.compact("main", "major")
    counting = CountingStorage(storage)
    builder = zm.open(counting)
    report = build_index(builder)
    assert (report.leaves, report.indexed) == (3, 0)  # the compaction has told it
    assert manifests_read(counting) == []
    assert zm.open(storage).du(path="big").nbytes == 96_000


# --- never wrong ---------------------------------------------------------------------------------


def answers(repository: Repository) -> tuple[object, ...]:
    session = repository.readonly_session()
    region = initialized_chunks(session, "big", [slice(5_990, 6_010), slice(0, 2)])
    every = initialized_chunks(session, "big")
    return counts(repository), region.tolist(), every.tolist()


def damage_nothing(storage: MemoryStorage) -> None:
    pass


def remove_bitmaps(storage: MemoryStorage) -> None:
    pointer = index_pointer(context_of(zm.open(storage)))
    assert pointer is not None
    storage.delete_many([i.key for i in storage.list("indexes/") if i.key != pointer.key])


def remove_all(storage: MemoryStorage) -> None:
    storage.delete_many([info.key for info in storage.list("indexes/")])


def break_all(storage: MemoryStorage) -> None:
    for info in list(storage.list("indexes/")):
        data = bytearray(storage.get(info.key))
        data[-1] ^= 1
        storage.put(info.key, bytes(data))


def name_another(storage: MemoryStorage, blob: BlobRef | None) -> None:
    def change(root: Root) -> Root:
        main = replace(root.branches["main"], index=blob)
        return replace(root, branches={**root.branches, "main": main})

    change_root(zm.open(storage), "damage", change)
    assert index_pointer(context_of(zm.open(storage))) == blob


def name_none(storage: MemoryStorage) -> None:
    name_another(storage, None)


def name_an_index_of_another_type(storage: MemoryStorage) -> None:
    data = encode(ObjectKind.INDEX, {"type": "of another time", "entries": 5})
    storage.create(KEY, data)
    name_another(storage, BlobRef.to(KEY, data))


def name_what_is_no_index(storage: MemoryStorage) -> None:
    base = context_of(zm.open(storage)).roots.latest.root.branches["main"].base
    assert base is not None
    name_another(storage, base.bare())


@pytest.mark.parametrize(
    "damage",
    [
        damage_nothing,
        remove_bitmaps,
        remove_all,
        break_all,
        name_none,
        name_an_index_of_another_type,
        name_what_is_no_index,
    ],
)
def test_whatever_the_index_is_the_answers_are_the_same(
    repository: Repository, storage: MemoryStorage, damage: Callable[[MemoryStorage], None]
) -> None:
    session = repository.writable_session()
    put(session, "big/c/6000/1")
    session.store.delete_sync("big/c/6001/1")
    session.commit("before")
    session = zm.open(storage).writable_session()
    put(session, "big/c/3/0")
    session.commit("which does not look up what it overwrites")
    expected = answers(repository)
    build_index(repository)
    damage(storage)
    assert answers(zm.open(storage)) == expected
    assert is_counted(storage) == (damage is not damage_nothing)
    report = build_index(zm.open(storage))
    assert report.indexed == (0 if damage is damage_nothing else 3)
    assert answers(zm.open(storage)) == expected
    assert not is_counted(storage)


def test_an_index_that_is_behind_is_not_used_for_what_it_does_not_know(
    repository: Repository, storage: MemoryStorage
) -> None:
    build_index(repository)
    session = repository.writable_session()
    session.store.delete_sync("big/c/5/2")
    put(session, "big/c/11999/0")
    session.commit("change")
    repository.compact("main", "major")
    reader = zm.open(storage)
    found = initialized_chunks(reader.readonly_session(), "big", [slice(4, 7), slice(None)])
    assert found.tolist() == [[4, 1], [6, 0]]
    assert counts(reader)["big"] == 12_000
    old = list(reader.ancestry())[-2].snapshot_id
    assert reader.du(path="big", version=old).chunks == 12_000


def test_other_branches_keep_their_entries(repository: Repository, storage: MemoryStorage) -> None:
    build_index(repository)
    repository.create_branch("trial")
    session = repository.writable_session("trial")
    put(session, "small/c/1", b"other")
    session.commit("another")
    repository.compact("trial", "major")
    assert build_index(repository, "trial").indexed == 0
    assert build_index(repository, "main").indexed == 0
    for branch in ("main", "trial"):
        assert not is_counted(storage, branch, "small")
    counting = CountingStorage(storage)
    session = zm.open(counting).readonly_session("trial")
    counting.reset()
    assert len(initialized_chunks(session, "small")) == 5
    assert manifests_read(counting) == []
    repository.reset_branch("trial", repository.list_branches()["main"], force=True)
    # Only of leaves that the branch had: what a compaction replaced is indexed again.
    assert build_index(repository, "trial").indexed == 1
    with pytest.raises(NotFoundError):
        build_index(repository, "none")


def test_the_index_is_in_no_commit_s_way(repository: Repository) -> None:
    session = repository.writable_session()
    put(session, "big/c/5/0")
    build_index(repository)
    session.commit("landed after the index")
    assert root_of(repository).branches["main"].index is not None
    assert counts(repository)["big"] == 12_001
    assert next(repository.ancestry()).kind == "overwrite"


# --- against a model -----------------------------------------------------------------------------

_STEP = st.one_of(
    st.tuples(st.just("set"), st.integers(0, 11), st.integers(0, 3)),
    st.tuples(st.just("set"), st.integers(0, 11), st.integers(0, 3)),
    st.tuples(st.just("unset"), st.integers(0, 11), st.integers(0, 3)),
    st.tuples(st.just("resize"), st.integers(0, 12), st.integers(0, 4)),
    st.tuples(st.sampled_from(["commit", "fold", "index"]), st.just(0), st.just(0)),
)


@settings(max_examples=examples(150))
@given(
    st.lists(_STEP, min_size=5, max_size=60),
    st.tuples(st.integers(0, 9), st.integers(0, 3)),
    st.tuples(st.integers(0, 9), st.integers(0, 4)),
)
def test_a_session_knows_what_is_there(
    steps: list[tuple[str, int, int]], lo: tuple[int, int], size: tuple[int, int]
) -> None:
    repository = zm.create(MemoryStorage())
    session = repository.writable_session()
    make(session, "a", (12, 4))
    session.commit("array")
    for what, i, j in steps:
        if what == "commit" and session.status():
            session.commit("some")
        elif what in ("fold", "index") and not session.status():
            if what == "fold":
                repository.compact("main", "major")
            else:
                build_index(repository)
            session = repository.writable_session()
        elif what == "set":
            put(session, f"a/c/{i}/{j}")
        elif what == "unset":
            session.store.delete_sync(f"a/c/{i}/{j}")
        elif what == "resize":
            zarr.open_array(session.store, path="a").resize((i, j))
    contents = contents_of(session.store)
    node = contents.nodes()["a"]
    assert node.array is not None
    table = contents.chunks(node)
    expected = [] if table is None else [tuple(c) for c in table.coords().tolist()]
    expected = [c for c in expected if c in node.array.grid]
    assert list(map(tuple, initialized_chunks(session, "a").tolist())) == sorted(expected)
    hi = (lo[0] + size[0], lo[1] + size[1])
    region = [slice(a, b) for a, b in zip(lo, hi, strict=True)]
    found = list(map(tuple, initialized_chunks(session, "a", region).tolist()))
    assert found == sorted(c for c in expected if c in Box(lo, hi))
    committed = contents.view.chunks(node.node_id)
    presence = Presence(context_of(repository), contents.view)
    assert presence.count(node.node_id) == (0 if committed is None else len(committed))
    stored = presence.stored_bytes(node.node_id)
    assert stored in (None, 0 if committed is None else int(committed.length.sum()))


def test_the_directory_is_read_back_as_it_was_written(repository: Repository) -> None:
    build_index(repository)
    pointer = index_pointer(context_of(repository))
    assert pointer is not None
    data = repository.storage.get(pointer.key)
    directory = IndexDirectory.from_object(data, pointer)
    assert directory.encode() == data
    assert len(directory.entries) == 3
    assert directory.others == {}


def test_roots_of_other_indexes_are_carried_over(
    repository: Repository, storage: MemoryStorage
) -> None:
    others = {"of another time": BlobRef(KEY, 10, 7)}
    data = IndexDirectory({}, others).encode()
    storage.create(f"{KEY}1", data)
    name_another(storage, BlobRef.to(f"{KEY}1", data))
    build_index(repository)
    pointer = index_pointer(context_of(repository))
    assert pointer is not None
    directory = IndexDirectory.from_object(storage.get(pointer.key), pointer)
    assert (len(directory.entries), directory.others) == (3, others)


def test_what_a_compaction_indexes_meanwhile_stays_indexed(
    repository: Repository, storage: MemoryStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    name_another(storage, None)

    def meanwhile(*given: Any) -> Any:
        other = zm.open(storage)
        session = other.writable_session()
        put(session, "small/c/0", b"5678")
        session.commit("everything anew")
        other.compact(mode="full")
        return index_leaves(*given)

    monkeypatch.setattr("zarr_manifests.engine.compact.presence_index.index_leaves", meanwhile)
    build_index(repository)
    monkeypatch.undo()
    assert build_index(zm.open(storage)).indexed == 0
