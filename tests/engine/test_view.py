"""Views over objects that contradict each other: refused, whatever is asked of them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zarr_manifests import Repository
from zarr_manifests.engine.objects import Objects
from zarr_manifests.engine.view import SnapshotView
from zarr_manifests.engine.workspace import Workspace
from zarr_manifests.errors import CorruptObjectError, ManifestsError
from zarr_manifests.format.blobs import BlobRef
from zarr_manifests.format.chunk_table import UNSET, ChunkTable, InlineRef, StoredRef
from zarr_manifests.format.delta import CommitKind, Delta
from zarr_manifests.format.manifest import Manifest, ManifestRef, Part
from zarr_manifests.format.nodes import Base, Node, NodeKind
from zarr_manifests.format.snapshot import DeltaEntry, Snapshot
from zarr_manifests.grid import Box, Coords
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage import MemoryStorage

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

    def view(self, deltas: list[Delta], leaves: tuple[ManifestRef, ...] = ()) -> SnapshotView:
        entries = tuple(
            DeltaEntry.of(self.put("deltas", d.encode()), d, i) for i, d in enumerate(deltas, 1)
        )
        return self.snapshot(entries, Base((), leaves))

    def snapshot(self, entries: tuple[DeltaEntry, ...], content: Base) -> SnapshotView:
        base = self.put("nodes", content.encode())
        log = entries[-1].log if entries else self.put("deltas", Delta(b"l" * 16).encode())
        newest = entries[-1].last if entries else 0
        snapshot = Snapshot(
            *(None, b"c" * 16, CommitKind.APPEND, "m", {}, 0, base, entries, log),
            sequence=newest,
        )
        ref = self.put("snapshots", snapshot.encode())
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
    workspace = Workspace(Repository.create(MemoryStorage())._context, view)
    workspace.changes.nodes["a"] = node = Node("a", A, NodeKind.ARRAY, {"zarr.json": document})
    with pytest.raises(CorruptObjectError, match="1 axes for a node of 2"):
        workspace.chunks(node)
    with pytest.raises(CorruptObjectError, match="1 axes for a node of 2"):
        workspace.find("a/c/0/0")


coords = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def any_tables(draw: st.DrawFn) -> ChunkTable:
    ndim = draw(st.integers(0, 3))
    one = st.lists(st.integers(0, 3), min_size=ndim, max_size=ndim).map(tuple)
    refs = st.none() | st.binary(max_size=3)
    return table(draw(st.dictionaries(one, refs, min_size=1, max_size=4)))


node_ids = st.sampled_from([A, B])


@settings(max_examples=150, deadline=None)
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
