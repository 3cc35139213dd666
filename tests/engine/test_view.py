"""Views over objects that contradict each other: refused, whatever is asked of them."""

from __future__ import annotations

import json
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
from inside import context_of
from zarr_manifests.engine.edit.overlay import SessionView
from zarr_manifests.engine.objects.metadata import Objects
from zarr_manifests.engine.snapshot.view import SnapshotView
from zarr_manifests.errors import CorruptObjectError, ManifestsError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.chunk_table import UNSET, ChunkTable, InlineRef, StoredRef
from zarr_manifests.format.delta import CommitKind, Delta
from zarr_manifests.format.manifest import Manifest, ManifestRef, Part
from zarr_manifests.format.nodes import Base, Node, NodeKind
from zarr_manifests.format.snapshot import DeltaEntry, Snapshot
from zarr_manifests.grid import Box, Coords
from zarr_manifests.ids import snapshot_id_of
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import contents_of, workspace_of
from zarr_manifests.testing import CountingStorage

A, B = b"a" * 12, b"b" * 12
SESSION = f"{1:012d}-" + "ab" * 12


class Written:
    """Objects put together by hand, as no commit would."""

    def __init__(self) -> None:
        self.objects = Objects(MemoryStorage(), SYSTEM)
        self._n = 0

    def put(self, kind: str, data: bytes) -> BlobRef:
        self._n += 1
        key = f"{kind}/{SESSION}/{self._n}"
        self.objects.create(key, data)
        return BlobRef.to(key, data)

    def manifest(self, *tables: tuple[bytes, ChunkTable]) -> ManifestRef:
        manifest = Manifest.of(tables)
        return ManifestRef(self.put("manifests", manifest.encode()), manifest.directory())

    def view(
        self, deltas: list[Delta], leaves: tuple[ManifestRef, ...] = (), sequence: int = 0
    ) -> SnapshotView:
        entries = tuple(
            DeltaEntry.of(self.put("deltas", d.encode()), d, i) for i, d in enumerate(deltas, 1)
        )
        return self.snapshot(entries, Base((), leaves, sequence))

    def snapshot(self, entries: tuple[DeltaEntry, ...], content: Base) -> SnapshotView:
        base = self.put("nodes", content.encode())
        log = entries[-1].log if entries else self.put("deltas", Delta(b"l" * 16).encode())
        newest = entries[-1].last if entries else 0
        self._n += 1
        key = f"snapshots/{SESSION}/{self._n}"
        snapshot = Snapshot(
            *(
                snapshot_id_of(key),
                "5e" * 16,
                None,
                b"c" * 16,
                CommitKind.APPEND,
                "m",
                {},
                0,
                base,
                entries,
                log,
            ),
            sequence=newest,
        )
        self.objects.create(key, data := snapshot.encode())
        ref = BlobRef.to(key, data)
        return SnapshotView.open(self.objects, SYSTEM, ref)


def table(refs: dict[Coords, bytes | None]) -> ChunkTable:
    stored: dict[Coords, StoredRef] = {
        coords: UNSET if data is None else InlineRef(data) for coords, data in refs.items()
    }
    return ChunkTable.of(stored)


def test_newest_layer_wins_over_deltas_and_leaves() -> None:
    written = Written()
    leaf = written.manifest(
        (A, table({(0,): b"leaf", (1,): b"leaf", (2,): b"leaf", (3,): b"leaf"}))
    )
    large = written.manifest((A, table({(1,): b"large", (5,): b"large"})), (B, table({(0,): b"b"})))
    deltas = [
        Delta(b"1" * 16, truncated={A: (3,)}, manifests=(large,)),
        Delta(b"2" * 16, embedded=Manifest.of([(A, table({(2,): None, (5,): b"embedded"}))])),
    ]
    view = written.view(deltas, (leaf,))
    found = {i: view.lookup(A, (i,)) for i in range(7)}
    expected = {0: b"leaf", 1: b"large", 5: b"embedded"}
    assert found == {i: InlineRef(expected[i]) if i in expected else None for i in range(7)}
    chunks = view.chunks(A)
    assert chunks is not None
    assert dict(chunks.refs()) == {(i,): InlineRef(data) for i, data in expected.items()}
    assert view.lookup(B, (0,)) == InlineRef(b"b")
    assert view.lookup(b"c" * 12, (0,)) is None
    assert view.touched() == {A, B}


SIDE = 5
GRID = Box((0, 0), (SIDE, SIDE))
ALL = [tuple(c) for c in GRID.unravel(np.arange(GRID.size)).tolist()]
cells = st.tuples(st.integers(0, SIDE - 1), st.integers(0, SIDE - 1))


@st.composite
def dense_tables(draw: st.DrawFn) -> dict[Coords, bytes | None]:
    """Rows for every chunk of a box."""
    (a, b), (c, d) = draw(cells), draw(cells)
    box = Box((min(a, c), min(b, d)), (max(a, c) + 1, max(b, d) + 1))
    kept = draw(st.booleans())
    rows = [tuple(c) for c in box.unravel(np.arange(box.size)).tolist()]
    return dict.fromkeys(rows, b"dense" if kept else None)


rows_of = dense_tables() | st.dictionaries(
    cells, st.none() | st.binary(max_size=2), min_size=1, max_size=6
)
said = st.fixed_dictionaries(
    {
        "cut": st.none() | cells,
        "embedded": st.none() | rows_of,
        "apart": st.lists(rows_of, max_size=2),
    }
)
halves = (Box((0, 0), (2, SIDE)), Box((2, 0), (SIDE, 3)))


def said_in(one: dict[str, Any]) -> list[dict[Coords, bytes | None]]:
    return [rows for rows in (one["embedded"], *one["apart"]) if rows]


def delta_of(written: Written, number: int, one: dict[str, Any]) -> Delta:
    return Delta(
        bytes([number]) * 16,
        truncated={} if one["cut"] is None else {A: one["cut"]},
        embedded=Manifest.of([(A, table(one["embedded"]))] if one["embedded"] else []),
        manifests=tuple(written.manifest((A, table(rows))) for rows in one["apart"]),
    )


def laid_over(
    leaf: dict[Coords, bytes | None], says: list[dict[str, Any]]
) -> dict[Coords, bytes | None]:
    """What the leaf's chunks, and those in no leaf, have become."""
    found = dict(leaf)
    for one in says:
        if one["cut"] is not None:
            found = {c: v for c, v in found.items() if (np.array(c) < one["cut"]).all()}
        for rows in said_in(one):
            found.update(rows)
    return found


@pytest.mark.slow
@settings(max_examples=examples(200), deadline=None)
@given(st.lists(said, max_size=6), st.tuples(st.integers(0, 6), st.integers(0, 6)), st.data())
def test_one_chunk_many_and_all_are_found_alike(
    says: list[dict[str, Any]], upto: tuple[int, int], data: st.DataObject
) -> None:
    """Deltas that set, remove and truncate, over two leaves that have some of them already."""
    written = Written()
    merged = [min(n, len(says)) for n in upto]
    leaves = [dict.fromkeys((c for c in ALL if c in box and sum(c) % 2), b"f") for box in halves]
    directory = tuple(
        replace(written.manifest((A, table(leaf))), merged=(n,))
        for leaf, n in zip(leaves, merged, strict=True)
    )
    deltas = [delta_of(written, number, one) for number, one in enumerate(says, 1)]
    first = written.view(deltas, directory, max(merged))
    expected = {c: laid_over({}, says).get(c) for c in ALL}
    for leaf, n, box in zip(leaves, merged, halves, strict=True):
        model = laid_over(leaf, says[n:])
        expected |= {c: model.get(c) for c in ALL if c in box}

    def view() -> SnapshotView:
        """With nothing in memory."""
        return SnapshotView.open(Objects(written.objects.storage, SYSTEM), SYSTEM, first.ref)

    def content(found: InlineRef | None) -> bytes | None:
        return None if found is None else found.data

    def contents(found: ChunkTable | None) -> dict[Coords, bytes | None]:
        return {} if found is None else {c: content(ref) for c, ref in found.refs()}

    there = {c: found for c, found in expected.items() if found is not None}
    for at in ALL:
        assert content(view().lookup(A, at)) == expected[at]
    looked = view()
    order = data.draw(st.permutations(ALL))
    assert {c: content(looked.lookup(A, c)) for c in order} == expected
    assert contents(view().chunks(A)) == there
    some = sorted(data.draw(st.sets(cells, min_size=1, max_size=6)))
    among = {c: found for c, found in there.items() if c in some}
    asked = view()
    for _ in range(2):
        assert contents(asked.chunks_at(A, np.array(some))) == among
    assert content(asked.lookup(A, order[0])) == expected[order[0]]
    region = data.draw(dense_tables())
    box = Box.around_coords(np.array([*region]))
    for after in (0, *merged):
        whole, part = view().overlay(A, after), view().overlay(A, after, box)
        assert whole.truncated == part.truncated
        kept = [
            {c: ref for c, ref in one.table.refs() if c in box} if one.table else {}
            for one in (whole, part)
        ]
        assert kept[0] == kept[1]


def test_a_table_with_every_chunk_of_its_box_ends_the_search() -> None:
    written = Written()
    rows = [{(i,): bytes([n]) for i in range(4)} for n in range(4)]
    leaf, *over = [written.manifest((A, table(one))) for one in rows]
    deltas = [Delta(bytes([n]) * 16, manifests=(ref,)) for n, ref in enumerate(over)]
    first = written.view(deltas, (leaf,))
    counting = CountingStorage(written.objects.storage)
    view = SnapshotView.open(Objects(counting, SYSTEM), SYSTEM, first.ref)
    counting.reset()
    assert view.lookup(A, (2,)) == InlineRef(b"\x03")
    assert [record.key for record in counting.log] == [over[-1].blob.key]


def test_what_a_truncation_drops_is_not_fetched() -> None:
    written = Written()
    rows: dict[Coords, bytes | None] = {(0,): b"x", (8,): b"y"}
    leaf, old, new = (written.manifest((A, table(rows))) for _ in range(3))
    deltas = [
        Delta(b"1" * 16, manifests=(old,)),
        Delta(b"2" * 16, truncated={A: (4,)}),
        Delta(b"3" * 16, manifests=(new,)),
    ]
    first = written.view(deltas, (leaf,))
    for at, due in ((5, [new]), (3, [old, new, leaf])):
        counting = CountingStorage(written.objects.storage)
        view = SnapshotView.open(Objects(counting, SYSTEM), SYSTEM, first.ref)
        counting.reset()
        assert view.lookup(A, (at,)) is None
        assert {record.key for record in counting.log} == {ref.blob.key for ref in due}


def test_two_tables_of_a_manifest_with_the_same_box_are_told_apart() -> None:
    written = Written()
    old = table({(0,): b"old", (1,): b"kept", (2,): b"old"})
    two = [(A, old), (A, table({(0,): b"new", (2,): None}))]
    view = written.view([Delta(b"1" * 16, manifests=(written.manifest(*two),))])
    for _ in range(2):
        assert view.lookup(A, (1,)) == InlineRef(b"kept")
        assert view.lookup(A, (0,)) == InlineRef(b"new")
        assert view.lookup(A, (2,)) is None


def test_a_manifest_that_lacks_what_the_base_says_it_has() -> None:
    written = Written()
    leaf = written.manifest((A, table({(0,): b"x"})))
    lie = ManifestRef(leaf.blob, (Part(A, Box((0,), (9,)), 9), Part(B, Box((0,), (1,)), 1)))
    view = written.view([], (lie,))
    for node in (A, B):
        with pytest.raises(CorruptObjectError, match=f"{leaf.blob.key} has no chunk table"):
            view.lookup(node, (0,))


@pytest.mark.parametrize("where", ["delta", "leaf"])
def test_a_table_of_other_axes_is_not_read_as_absent(where: str) -> None:
    written = Written()
    flat = table({(0,): b"x", (1,): b"y"})
    delta = Delta(b"d" * 16, embedded=Manifest.of([(A, flat)] if where == "delta" else []))
    view = written.view([delta], (written.manifest((A, flat)),) if where == "leaf" else ())
    assert view.lookup(A, (0,)) == InlineRef(b"x")
    for coords in ((0, 0), ()):
        with pytest.raises(CorruptObjectError, match=f"1 axes for a node of {len(coords)}"):
            view.lookup(A, coords)
    document = json.dumps(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [4, 4],
            "data_type": "uint8",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, 1]}},
            "chunk_key_encoding": {"name": "default"},
            "fill_value": 0,
            "codecs": [{"name": "bytes"}],
        }
    ).encode()
    contents = SessionView(context_of(zm.create(MemoryStorage())), view)
    contents.changes.nodes["a"] = node = Node("a", A, NodeKind.ARRAY, {"zarr.json": document})
    with pytest.raises(CorruptObjectError, match="1 axes for a node of 2"):
        contents.chunks(node)
    with pytest.raises(CorruptObjectError, match="1 axes for a node of 2"):
        contents.find("a/c/0/0")


coords = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def any_tables(draw: st.DrawFn) -> ChunkTable:
    ndim = draw(st.integers(0, 3))
    one = st.lists(st.integers(0, 3), min_size=ndim, max_size=ndim).map(tuple)
    refs = st.none() | st.binary(max_size=3)
    return table(draw(st.dictionaries(one, refs, min_size=1, max_size=4)))


node_ids = st.sampled_from([A, B])


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.dictionaries(node_ids, coords, max_size=2),
            st.lists(st.tuples(node_ids, any_tables()), max_size=2),
        ),
        max_size=3,
    ),
    st.lists(st.tuples(node_ids, any_tables()), max_size=2),
    coords,
)
def test_numbers_of_axes_that_do_not_agree(
    deltas: list[tuple[dict[bytes, Coords], list[tuple[bytes, ChunkTable]]]],
    leaves: list[tuple[bytes, ChunkTable]],
    probe: Coords,
) -> None:
    written = Written()
    made = [
        Delta(bytes([i]) * 16, truncated=cut, embedded=Manifest.of(tables))
        for i, (cut, tables) in enumerate(deltas)
    ]
    view = written.view(made, tuple(written.manifest(leaf) for leaf in leaves))
    for node in (A, B):
        for ask in (
            lambda node=node: view.lookup(node, probe),
            lambda node=node: view.chunks(node),
        ):
            try:
                ask()
            except ManifestsError:
                continue


def test_snapshots_of_one_base_share_its_nodes_while_none_has_changed() -> None:
    """There may be thousands, and a commit of one chunk is not to go through them."""
    repository = zm.create(MemoryStorage(), {"inline-chunk-bytes": 0})
    session = repository.writable_session()
    for i in range(20):
        zarr.create_array(session.store, name=f"v{i}", shape=(4,), chunks=(1,), dtype="i1")
    session.commit("make many")
    repository.compact(mode="full")
    session = repository.writable_session()
    before = contents_of(session.store).view
    session.store.set_sync("v3/c/0", cpu.Buffer.from_bytes(b"1"))
    session.commit("one chunk")
    after = contents_of(session.store).view
    assert after.ref != before.ref
    assert after.nodes is before.nodes
    assert after.by_id is before.by_id
    zarr.open_group(session.store)["v3"].attrs["units"] = "K"
    workspace_of(session.store).delete_below("v4/")
    session.commit("an attribute, and one array less")
    last = contents_of(session.store).view
    assert "v4" in before.nodes
    assert set(before.nodes) - set(last.nodes) == {"v4"}
    assert last.by_id == {node.node_id: node for node in last.nodes.values()}
    assert b"units" in last.nodes["v3"].documents["zarr.json"]
    assert b"units" not in before.nodes["v3"].documents["zarr.json"]
